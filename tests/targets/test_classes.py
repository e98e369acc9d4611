"""Models for text and images are targets for their text."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText

from specdistill.decoding.decoder import Decoder
from specdistill.evaluation.measurement import reference
from specdistill.methods.load import load_proposer
from specdistill.targets.frozen import FrozenTarget
from tests.families import OTHERS, write_model

SECTIONS = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}


@pytest.mark.parametrize(
    "config",
    [{"model_type": "qwen2_5_vl", **SECTIONS}, {"model_type": "mistral3"}],
    ids=["Qwen2.5-VL", "Mistral 3"],
)
def test_text_is_decoded_as_by_generate(config: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path / "target", config, OTHERS)
    target = FrozenTarget.load(str(tmp_path / "target"))
    assert isinstance(
        target.model, type(AutoModelForImageTextToText.from_config(target.model.config))
    )
    prompt = target.tokenizer("Once and again, once and again.").input_ids
    (expected,) = reference.generate_reference(target, [prompt], max_new_tokens=24)
    decoder = Decoder(target, load_proposer("ngram", None, target))
    assert (
        tuple(decoder.generate(prompt, max_new_tokens=24, num_speculative_tokens=3).token_ids)
        == expected
    )
