"""The scale and cap that a class applies to its head's output are found by trying the model.

tests/targets/test_architectures.py tries every class.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specdistill.data.rows.packing import index_batch
from specdistill.decoding.near_ties import compute_logits_in_float64
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.models.objective import Distillation
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.targets.anatomy import examine_model
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import DIVERGENCES
from tests.heads import document_rows
from tests.refusals import refused
from tests.targets.architectures import tiny_model
from tests.tiny import tiny_target_model, tiny_tokenizer

IDS = torch.arange(3, 19)[None]
ROWS = index_batch(document_rows(range(3, 19)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "scale", "cap"),
    [("gemma2", 1.0, 3.0), ("granite", 1 / 4, None), ("minicpm3", 256 / 64, None)],
)
@torch.no_grad()
def test_scale_and_cap_are_found_in_every_dtype(
    kind: str, scale: float, cap: float | None, dtype: torch.dtype
) -> None:
    """minicpm3 scales before the head."""
    model = tiny_model(kind).to(dtype)
    anatomy = examine_model(model, kind)
    assert anatomy.head.scale == pytest.approx(
        scale, rel=1e-6 if dtype == torch.float32 or kind != "minicpm3" else 1e-3
    )
    assert anatomy.head.cap == cap
    hidden = anatomy.backbone(input_ids=IDS).last_hidden_state
    expected = model(IDS).logits
    assert (anatomy.head(hidden) - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("kind", ["gemma2", "granite"])
@torch.no_grad()
def test_training_and_drafting_use_the_models_own_head(kind: str) -> None:
    target = FrozenTarget(tiny_model(kind), tiny_tokenizer(), name=kind)
    expected = target.model(IDS).logits[0]
    assert not torch.allclose(
        target.lm_head(target.features(IDS, ()).last_hidden)[0], expected, atol=0.1
    )
    forward_kl = DIVERGENCES["forward_kl"]
    for objective in (
        TrainingTimeTest(build_eagle3(target), forward_kl, 1),
        Distillation(tiny_model(kind), forward_kl),
    ):
        soft_targets = objective.read_target(target, ROWS)["soft_targets"]
        probs_RW = soft_targets.at(slice(None), measure=False).probs_rW[: len(expected) - 1]
        assert torch.allclose(probs_RW, expected[:-1].softmax(-1), atol=1e-6)
    assert torch.allclose(
        compute_logits_in_float64(target, IDS[0].tolist(), len(IDS[0]))[0],
        expected.double(),
        atol=1e-4,
    )
    draft = DraftModelProposer(tiny_model(kind))
    draft.begin([len(IDS[0])])
    assert torch.allclose(draft.head(draft.layers(IDS, [IDS.shape[1]]))[0], expected, atol=1e-5)
    distillation = Distillation(tiny_model(kind), forward_kl)
    loss, _ = distillation(**ROWS, **distillation.read_target(target, ROWS))
    assert abs(float(loss)) < 1e-4  # because the draft is the target


class Upcasting(LlamaForCausalLM):  # type: ignore[misc]
    """A model that scales its logits in float32, whatever the dtype of its head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output["logits"] = output.logits.float() * 0.3
        return output


@torch.no_grad()
def test_logits_are_finished_in_the_dtype_of_the_class() -> None:
    model = Upcasting(tiny_target_model(num_layers=1).config).eval().bfloat16()
    head, hidden = examine_model(model, "tiny").head, model.model(input_ids=IDS).last_hidden_state
    assert head.float32 and torch.allclose(head(hidden), model(IDS).logits, rtol=1e-6)


class Biased(LlamaForCausalLM):  # type: ignore[misc]
    """A model that computes its logits by a formula of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output["logits"] = output.logits + torch.arange(output.logits.shape[-1])
        return output


class Forgetful(LlamaForCausalLM):  # type: ignore[misc]
    """A model that reads every token as if it were the first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        forward = self.model.forward
        self.model.forward = lambda past_key_values=None, **kwargs: forward(
            past_key_values=None, **kwargs
        )


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Biased(tiny_target_model().config), "a Biased: its logits"),
        (Forgetful(tiny_target_model().config), "a Forgetful: passes over a KV cache"),
        (tiny_model("bert"), "a BertLMHeadModel: its logits"),
    ],
    ids=["biased", "forgetful", "bert"],
)
def test_another_formula_and_a_cache_that_does_not_continue_are_refused(
    model: Any, what: str
) -> None:
    with refused("target.model", f"odd, {what}"):
        FrozenTarget(model, tiny_tokenizer(), name="odd")


def test_dropout_is_off_while_a_model_is_examined_and_on_again_after() -> None:
    config = tiny_target_model().config
    config.attention_dropout = 0.5
    model = LlamaForCausalLM(config).train()
    examine_model(model, "draft")
    assert model.training and all(layer.training for layer in model.model.layers)


def test_a_part_of_the_vocabulary_is_finished_as_the_whole() -> None:
    head, raw = examine_model(tiny_model("gemma2"), "capped").head, torch.linspace(-9, 9, 160)
    parts: list[Tensor] = [head.finish(raw[:50]), head.finish(raw[50:])]
    assert torch.equal(torch.cat(parts), head.finish(raw))
