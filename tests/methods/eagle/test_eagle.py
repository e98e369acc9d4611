"""The EAGLE-1 head: exact tensors, and what other writers put into a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdistill.data.rows.packing import index_batch
from specdistill.decoding.sampling import Sampling
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle.checkpoint import export_eagle, load_eagle, save_eagle
from specdistill.methods.eagle.module import EagleDraft, build_eagle
from specdistill.methods.eagle.serving import SERVING
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import forward_kl
from tests.heads import causal, document_rows
from tests.proposers import state_of
from tests.refusals import refused
from tests.serving import layouts
from tests.targets.architectures import tiny_model
from tests.tiny import tiny_tokenizer


def rewrite_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any
) -> None:
    """Add tensors and keys to a checkpoint, and remove keys whose value is None."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **(tensors or {})}, path)
    raw = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in raw.items() if value is not None})
    )


def test_tensors_are_those_that_engines_load(target: FrozenTarget, tmp_path: Path) -> None:
    save_eagle(build_eagle(target), tmp_path)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert shapes == layouts.EAGLE
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["bias"] is False


def test_the_head_computes_its_formula(target: FrozenTarget) -> None:
    """Attention at one position is its value, so the head is two matrix products and an MLP."""
    head = build_eagle(target)
    ids, hidden = (
        torch.tensor([[7]]),
        torch.randn(1, 1, target.hidden_size, generator=torch.Generator().manual_seed(0)),
    )
    with torch.no_grad():
        output, next_hidden = head(
            ids, hidden, head.rotary(hidden, torch.zeros_like(ids)), causal(ids)
        )
        layer = head.layers[0]
        fused = torch.cat((head.embed_tokens(ids), hidden), -1) @ head.fc.weight.T
        value = layer.self_attn.v_proj(fused).view(1, 1, -1, 32)
        shared = target.config.num_attention_heads // target.config.num_key_value_heads
        state = fused + layer.self_attn.o_proj(value.repeat_interleave(shared, 2).flatten(2))
        normed = state * (state.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        expected = state + layer.mlp(normed)
    assert torch.allclose(output, expected, atol=1e-5) and output is next_hidden


def test_a_config_without_the_bias_key_means_a_bias(target: FrozenTarget, tmp_path: Path) -> None:
    save_eagle(build_eagle(target), tmp_path)
    rewrite_checkpoint(tmp_path, bias=None)
    with refused("eval.draft", f"{tmp_path} without fc.bias"):
        load_eagle(tmp_path, target)
    rewrite_checkpoint(tmp_path, {"fc.bias": torch.linspace(0, 1, target.hidden_size)})
    assert load_eagle(tmp_path, target).fc.bias[-1] == 1


def test_a_bias_that_the_config_denies_is_refused_unless_it_is_zero(
    target: FrozenTarget, tmp_path: Path
) -> None:
    save_eagle(build_eagle(target), tmp_path)
    rewrite_checkpoint(tmp_path, {"fc.bias": torch.zeros(target.hidden_size)})
    assert load_eagle(tmp_path, target).fc.bias is None
    rewrite_checkpoint(tmp_path, {"fc.bias": torch.ones(target.hidden_size)})
    with refused("eval.draft", f"{tmp_path} with unknown fc.bias"):
        load_eagle(tmp_path, target)


def test_copies_of_the_targets_embedding_and_head_are_read_and_others_refused(
    target: FrozenTarget, tmp_path: Path
) -> None:
    save_eagle(build_eagle(target), tmp_path)
    copies = {
        "embed_tokens.weight": target.backbone.embed_tokens.weight.detach(),
        "lm_head.weight": target.lm_head.weight.detach(),
    }
    # SafeAILab's files have such copies.
    rewrite_checkpoint(tmp_path, {name: tensor.half() for name, tensor in copies.items()})
    load_eagle(tmp_path, target)
    rewrite_checkpoint(tmp_path, {"lm_head.weight": copies["lm_head.weight"] + 1})
    with refused("eval.draft", f"{tmp_path}, whose lm_head.weight differs"):
        load_eagle(tmp_path, target)


@pytest.fixture(params=["gemma2", "granite"], scope="module")
def scaling_target(request: pytest.FixtureRequest) -> FrozenTarget:
    """A target whose class caps or scales its logits, which are so far apart that this shows."""
    target = FrozenTarget(tiny_model(request.param), tiny_tokenizer(), name=request.param)
    target.lm_head.weight.data.mul_(40)
    return target


def build_oracle(target: FrozenTarget, predict: Any, tmp_path: Path) -> EagleDraft:
    """Return a head, loaded from a file, whose every predicted feature is the target's own.

    `predict` gives these features for the head's next tokens.
    """
    save_eagle(build_eagle(target), tmp_path)
    draft = load_eagle(tmp_path, target)
    draft.forward = lambda next_ids, hidden, rotary, kv_cache: (predict(next_ids),) * 2  # type: ignore[method-assign]
    return draft


@torch.no_grad()
def test_a_head_with_the_targets_features_drafts_the_targets_distribution(
    scaling_target: FrozenTarget, tmp_path: Path
) -> None:
    text, sampling = [5, 9, 17, 30, 8, 9], Sampling(temperature=0.8)
    fed = text[:1]

    def predict(next_ids: torch.Tensor) -> torch.Tensor:
        fed.extend(next_ids[0].tolist())
        return scaling_target.features(torch.tensor([fed]), ()).last_hidden[:, -next_ids.shape[1] :]

    proposer = HeadProposer(build_oracle(scaling_target, predict, tmp_path))
    proposer.begin([20])
    state = state_of(text, scaling_target.features(torch.tensor([text[:-1]]), ()))
    (proposal,) = proposer.propose(state, 3, sampling, [torch.Generator().manual_seed(0)])
    logits = scaling_target.model(torch.tensor([text + proposal.tokens])).logits[
        0, len(text) - 1 : -1
    ]
    assert proposal.probabilities is not None
    assert torch.allclose(proposal.probabilities, (logits / 0.8).softmax(-1), atol=1e-5)
    bare = (
        scaling_target.lm_head(scaling_target.features(torch.tensor([text]), ()).last_hidden[0, -1])
        / 0.8
    )
    assert (proposal.probabilities[0] - bare.softmax(-1)).abs().sum() / 2 > 0.1


@torch.no_grad()
def test_a_head_with_the_targets_features_has_nothing_left_to_learn(
    scaling_target: FrozenTarget, tmp_path: Path
) -> None:
    ids = torch.tensor([[5, 9, 17, 30, 8, 9, 11, 40, 41, 6]])
    last_hidden = scaling_target.model(ids, output_hidden_states=True).hidden_states[-1]
    steps = iter(range(1, 3))

    def predict(_next_ids: torch.Tensor) -> torch.Tensor:
        ahead = next(steps)
        return torch.nn.functional.pad(last_hidden[:, ahead:], (0, 0, 0, ahead))

    rows = index_batch(document_rows(ids[0].tolist()))
    objective = TrainingTimeTest(
        build_oracle(scaling_target, predict, tmp_path),
        forward_kl,
        2,
        temperature=0.8,
    )
    total, sums = objective(**rows, **objective.read_target(scaling_target, rows), measure=True)
    assert abs(float(total)) < 1e-4
    assert [
        float(accepted / count)
        for accepted, count in zip(sums.accepted, sums.loss_tokens, strict=True)
    ] == pytest.approx([1, 1])


def test_a_logit_scale_is_exported_where_vllm_looks_for_it(
    scaling_target: FrozenTarget, tmp_path: Path
) -> None:
    save_eagle(build_eagle(scaling_target), tmp_path / "draft")
    layout = SERVING["vllm"].layout
    assert layout is not None
    export_eagle(tmp_path / "draft", "vllm", layout, tmp_path / "out", None, 3)
    model_config = json.loads((tmp_path / "out" / "config.json").read_text())["model"]
    assert model_config.get("logit_scale", 1.0) == scaling_target.logits.scale
    assert ("logit_scale" in model_config) == (scaling_target.name == "granite")
    rewrite_checkpoint(tmp_path / "draft", logit_scale=0.5)
    with refused("eval.draft", f"{tmp_path / 'draft'} with logit_scale 0.5"):
        load_eagle(tmp_path / "draft", scaling_target)
