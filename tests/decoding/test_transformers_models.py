"""Models that cannot read several texts at once are refused."""

from typing import Any

import pytest

from specdistill.decoding.transformers_models import check_batchable
from tests.refusals import refused
from tests.tiny import qwen, tiny_target_model


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "recurrent layers"),
        (
            {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8},
            "chunked_attention",
        ),
        ({"_attn_implementation": "flash_attention_2"}, "flash_attention_2"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary angles",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rotary angles"),
    ],
)
def test_models_that_cannot_hold_several_texts_are_refused(
    change: dict[str, object], holds: str
) -> None:
    model = tiny_target_model()
    check_batchable(model, "tiny")
    for name, value in change.items():
        vars(model.config)[
            name if name != "_attn_implementation" else "_attn_implementation_internal"
        ] = value
    with refused("eval.batch_size", "more than 1 for tiny,", holds=holds):
        check_batchable(model, "tiny")


@pytest.mark.parametrize("build", [tiny_target_model, qwen])
@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
def test_models_that_ignore_the_mask_or_the_positions_are_refused(
    build: Any, ignored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    check_batchable(model, "tiny")
    decoder = model.get_decoder()
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda **options: forward(**options | {ignored: None}))
    with refused("eval.batch_size", "more than 1 for tiny, a model with layers that read a row"):
        check_batchable(model, "tiny")
