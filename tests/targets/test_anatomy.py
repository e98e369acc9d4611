"""What a class does to its head's output, found by trying it. tests/targets/test_architectures.py tries every class."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
)

from specdistill.decoding.decoder import in_float64
from specdistill.losses.divergence import DIVERGENCES
from specdistill.methods.draft_model.objective import Distillation
from specdistill.methods.draft_model.proposer import DraftModelProposer
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.heads.unroll import TrainingTimeTest
from specdistill.rows.packing import indexed
from specdistill.targets.anatomy import examine
from specdistill.targets.frozen import FrozenTarget
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8}
IDS = torch.arange(3, 19)[None]
COLUMNS = {
    "input_ids": IDS,
    "loss_mask": torch.ones_like(IDS),
    "document_ids": torch.zeros_like(IDS),
    "position_ids": torch.arange(16)[None],
}
ROWS = indexed(COLUMNS)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "capped":
            model: Any = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=3.0, pad_token_id=0))
        elif name == "scaled":
            model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=13.0))
        else:
            config = {**SIZES, **MLA, "num_key_value_heads": 4, "dim_model_base": 24}
            model = MiniCPM3ForCausalLM(MiniCPM3Config(**config))
    return model.eval().to(dtype)


def target_of(name: str) -> FrozenTarget:
    return FrozenTarget(model_of(name), tiny_tokenizer(), name=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "scale", "cap"), [("capped", 1.0, 3.0), ("scaled", 1 / 13, None), ("scaled before the head", 24 / 64, None)]
)
@torch.no_grad()
def test_scale_and_cap_are_found_in_every_dtype(name: str, scale: float, cap: float | None, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    anatomy = examine(model, name)
    assert anatomy.head.scale == pytest.approx(scale, rel=1e-6 if dtype == torch.float32 or "before" not in name else 1e-3)
    assert anatomy.head.cap == cap
    hidden = anatomy.backbone(input_ids=IDS).last_hidden_state
    expected = model(IDS).logits
    assert (anatomy.head(hidden) - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("name", ["capped", "scaled"])
@torch.no_grad()
def test_all_that_use_a_head_use_the_models_own(name: str) -> None:
    target = target_of(name)
    expected = target.model(IDS).logits[0]
    assert not torch.allclose(target.lm_head(target.features(IDS, ()).last_hidden)[0], expected, atol=0.1)
    forward_kl = DIVERGENCES["forward_kl"]
    for objective in (TrainingTimeTest(build_eagle3(target), forward_kl, 1), Distillation(model_of(name), forward_kl)):
        soft_targets = objective.read_target(target, ROWS)["soft_targets"]
        probs_RW = soft_targets.at(slice(None), measure=False).probs_rW[: len(expected) - 1]
        assert torch.allclose(probs_RW, expected[:-1].softmax(-1), atol=1e-6)
    assert torch.allclose(in_float64(target, IDS[0].tolist())[0], expected.double(), atol=1e-4)
    draft = DraftModelProposer(model_of(name))
    assert torch.allclose(draft.head(draft.layers(IDS))[0], expected, atol=1e-5)
    distillation = Distillation(model_of(name), forward_kl)
    loss, _ = distillation(**ROWS, **distillation.read_target(target, ROWS))
    assert abs(float(loss)) < 1e-4  # a draft that is the target


class Upcasting(LlamaForCausalLM):  # type: ignore[misc]
    """It scales its logits in float32, whatever the head computes in."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output["logits"] = output.logits.float() * 0.3
        return output


@torch.no_grad()
def test_logits_are_finished_in_the_dtype_of_the_class() -> None:
    model = Upcasting(tiny_target_model(num_layers=1).config).eval().bfloat16()
    head, hidden = examine(model, "tiny").head, model.model(input_ids=IDS).last_hidden_state
    assert head.float32 and torch.allclose(head(hidden), model(IDS).logits, rtol=1e-6)


class Biased(LlamaForCausalLM):  # type: ignore[misc]
    """Logits of a formula of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output["logits"] = output.logits + torch.arange(output.logits.shape[-1])
        return output


class Forgetful(LlamaForCausalLM):  # type: ignore[misc]
    """It reads every token as if it were the first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        forward = self.model.forward
        self.model.forward = lambda past_key_values=None, **kwargs: forward(past_key_values=None, **kwargs)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Biased(tiny_target_model().config), "a Biased: its logits"),
        (Forgetful(tiny_target_model().config), "a Forgetful: passes over a KV cache"),
        (BertLMHeadModel(BertConfig(**{**SIZES, "num_key_value_heads": None})), "a BertLMHeadModel: its logits"),
    ],
    ids=["biased", "forgetful", "bert"],
)
def test_another_formula_and_a_cache_that_does_not_continue_are_refused(model: Any, what: str) -> None:
    with refused("target.model", f"odd, {what}"):
        FrozenTarget(model, tiny_tokenizer(), name="odd")


def test_dropout_is_off_while_a_model_is_examined_and_on_again_after() -> None:
    config = tiny_target_model().config
    config.attention_dropout = 0.5
    model = LlamaForCausalLM(config).train()
    examine(model, "draft")
    assert model.training and all(layer.training for layer in model.model.layers)


def test_a_part_of_the_vocabulary_is_finished_as_the_whole() -> None:
    head, raw = examine(model_of("capped"), "capped").head, torch.linspace(-9, 9, 160)
    parts: list[Tensor] = [head.finish(raw[:50]), head.finish(raw[50:])]
    assert torch.equal(torch.cat(parts), head.finish(raw))
