"""The multi-token-prediction draft: transformers' own layers behind a `KVCache`, and weights that
come back bit for bit."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.modeling_layers import MtpModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specdistill.decoding.decoder import Decoder
from specdistill.methods.load import load_proposer
from specdistill.methods.mtp.checkpoint import build_mtp, load_mtp, save_mtp
from specdistill.methods.mtp.module import MtpDraft
from specdistill.methods.mtp.tensor_names import split_experts
from specdistill.serving.export import export
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.heads import causal
from tests.memorised import PROMPT, memorise
from tests.mtp_targets import (
    COMMON,
    EXPERTS,
    KINDS,
    add_tensors,
    mtp_shapes,
    mtp_tensors,
    tiny_target,
    write_checkpoint,
)
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(kind: str) -> FrozenTarget:
    return tiny_target(kind)


@pytest.fixture(scope="module")
def draft(target: FrozenTarget) -> MtpDraft:
    return build_mtp(target, init="scratch")


def compute_inputs(
    draft: MtpDraft, target: FrozenTarget
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return next ids, hidden states and rotary tables of two texts."""
    ids = torch.stack((torch.arange(3, 15), torch.arange(40, 52)))
    hidden = draft.fuse(target.features(ids, ()))
    return ids.roll(-1, 1), hidden, draft.rotary(hidden, torch.arange(12).expand(2, 12))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_layer_computes_what_transformers_computes_under_a_causal_mask(
    draft: MtpDraft, target: FrozenTarget, attention: str
) -> None:
    ids, hidden, rotary = compute_inputs(draft, target)
    positions = torch.arange(12).expand(2, 12)
    layer = copy.deepcopy(target.backbone.layers[draft.layers[0].self_attn.layer_idx])
    layer.load_state_dict(draft.layers[0].state_dict())
    layer.self_attn.config._attn_implementation = attention
    with torch.no_grad():
        both = torch.cat(
            (draft.token_norm(draft.embed_tokens(ids)), draft.hidden_norm(hidden)), dim=-1
        )
        expected = draft.norm(
            layer(
                draft.fc(both),
                attention_mask=torch.full((12, 12), -torch.inf).triu(1).expand(2, 1, 12, 12),
                position_ids=positions,
                position_embeddings=target.backbone.rotary_emb(hidden, positions),
            )
        )
        normed, next_hidden = draft(ids, hidden, rotary, causal(ids))
    assert torch.allclose(normed, expected, atol=1e-5, rtol=0)
    assert torch.equal(normed, next_hidden)  # engines feed back what the head sees


def test_the_hidden_state_is_the_targets_after_its_final_norm(
    draft: MtpDraft, target: FrozenTarget
) -> None:
    ids = torch.arange(3, 15)[None]
    assert torch.allclose(
        target.lm_head(draft.fuse(target.features(ids, ()))), target.model(ids).logits, atol=1e-5
    )


def test_only_the_drafts_own_weights_are_saved_and_trained(
    draft: MtpDraft, target: FrozenTarget
) -> None:
    ids, hidden, rotary = compute_inputs(draft, target)
    normed, _ = draft(ids, hidden, rotary, causal(ids))
    draft.logits(normed).logsumexp(-1).sum().backward()
    draft_parameters = dict(draft.named_parameters())
    assert all(parameter.grad is not None for parameter in draft_parameters.values())
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert not {"embed_tokens", "lm_head"} & {name.split(".")[0] for name in draft.state_dict()}
    assert draft.target_ids_W is None  # its logits are of the target's tokens
    draft.zero_grad()


def test_another_dtype_rounds_neither_the_target_nor_the_routing_bias(
    target: FrozenTarget, kind: str
) -> None:
    draft = build_mtp(target, init="scratch")
    draft.layers.load_state_dict(
        {f"0.{name}": tensor for name, tensor in target.backbone.layers[-1].state_dict().items()}
    )
    draft.to(torch.bfloat16)
    kept = {name for name, tensor in draft.state_dict().items() if tensor.dtype == torch.float32}
    assert kept == (
        {"layers.0.mlp.gate.e_score_correction_bias"} if kind == "deepseek_v3" else set()
    )
    assert {
        tensor.dtype
        for tensor in (*target.model.parameters(), *target.backbone.rotary_emb.buffers())
    } == {torch.float32}
    layer = target.backbone.layers[-1].state_dict()
    for name in kept:
        assert torch.equal(draft.state_dict()[name], layer[name.removeprefix("layers.0.")])


def test_the_targets_own_weights_are_read(kind: str, tmp_path: Path) -> None:
    target = write_checkpoint(kind, tmp_path, sharded=True)
    state, published = (
        split_experts(build_mtp(target).state_dict()),
        mtp_tensors(kind, target.model),
    )
    prefix, layer, norms = {
        "deepseek_v3": ("model.layers.2.", "", ("enorm", "hnorm", "shared_head.norm")),
    }.get(kind, ("mtp.", "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")))
    published_names = dict(zip(("token_norm", "hidden_norm", "norm"), norms, strict=True))
    experts = (
        []
        if kind == "qwen3_5"
        else [f"mlp.experts.{EXPERTS - 1}.{part}_proj" for part in ("gate", "up", "down")]
    )
    published_names |= {
        f"layers.0.{name}": layer + name
        for name in ("input_layernorm", "self_attn.o_proj", *experts)
    }
    for name, published_name in published_names.items():
        assert torch.equal(
            state[f"{name}.weight"], published[f"{prefix}{published_name}.weight"]
        ), name


def test_a_target_without_the_layer_needs_an_init(kind: str, tmp_path: Path) -> None:
    for target in (write_checkpoint(kind, tmp_path, with_mtp=False), tiny_target(kind)):
        with refused("draft.init", "null, and"):
            build_mtp(target)
        build_mtp(target, init="scratch")


@pytest.mark.parametrize(
    ("kind", "with_mtp", "name"),
    [
        ("qwen3_next", True, "mtp.layers.1.input_layernorm.weight"),  # a deeper layer
        ("deepseek_v3", True, "model.layers.3.enorm.weight"),
        # no missing layer, but names that no engine reads
        ("qwen3_next", False, "model.mtp_layers.0.input_proj.weight"),
        ("deepseek_v3", True, "model.layers.2.shared_head.head.weight"),  # no copy of the head
    ],
)
def test_a_checkpoint_with_layers_that_cannot_be_read_is_refused(
    kind: str, with_mtp: bool, name: str, tmp_path: Path
) -> None:
    target = write_checkpoint(kind, tmp_path, with_mtp=with_mtp)
    add_tensors(tmp_path, {name: torch.zeros(260, 32)})
    with refused("target.model", tmp_path, holds=name.removeprefix("model.layers.2.")):
        build_mtp(target)


def test_tensors_are_those_that_engines_load(
    draft: MtpDraft, target: FrozenTarget, kind: str, tmp_path: Path
) -> None:
    save_mtp(draft, tmp_path)
    assert {
        name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()
    } == mtp_shapes(kind)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["SpecdistillMtp"]
    assert config["text_config"]["hidden_size"] == target.hidden_size


def test_each_tensor_comes_back_in_its_dtype(tmp_path: Path) -> None:
    target = tiny_target("deepseek_v3")
    draft = build_mtp(target, init="scratch").to(torch.bfloat16)
    save_mtp(draft, tmp_path)
    loaded = load_mtp(tmp_path, target).state_dict()
    for name, tensor in draft.state_dict().items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


def test_a_fresh_layer_follows_the_seed_and_passes_on_the_targets_hidden_state() -> None:
    target = tiny_target("qwen3_next")
    first, again, other = (
        build_mtp(target, init="scratch", seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(
        first["layers.0.mlp.experts.down_proj"], other["layers.0.mlp.experts.down_proj"]
    )
    hidden = torch.randn(2 * target.hidden_size)
    assert torch.equal(first["fc.weight"] @ hidden, hidden[target.hidden_size :])
    assert torch.equal(first["norm.weight"], target.backbone.norm.weight)


class OwnAttention(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


class OtherArguments(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, position_ids: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states


def build_target_with_layer(layer: type) -> FrozenTarget:
    model = tiny_target_model()
    model.model.layers[-1].__class__ = layer
    return FrozenTarget(model, tiny_tokenizer(), name="tiny")


SMALL = {**COMMON, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL)), "Gemma2Attention with softcap"),
        (
            lambda: GptOssForCausalLM(
                GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)
            ),
            "GptOssAttention with s_aux",
        ),
        (
            lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)),
            "MistralAttention with sliding_window",
        ),
        (
            lambda: build_target_with_layer(OwnAttention).model,
            "OwnAttention, whose attention does not use",
        ),
        (lambda: build_target_with_layer(OtherArguments).model, "OtherArguments"),
    ],
)
def test_attention_that_a_kv_cache_cannot_serve_is_refused(build: Any, names: str) -> None:
    with refused("target.model", names):
        build_mtp(FrozenTarget(build(), tiny_tokenizer(), name="tiny"), init="scratch")


def test_tensors_of_a_plain_model_have_the_qwen_names(tmp_path: Path) -> None:
    target = FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")
    save_mtp(build_mtp(target, init="scratch"), tmp_path)
    assert "mtp.layers.0.self_attn.q_proj.weight" in load_file(tmp_path / "model.safetensors")


def test_transformers_own_mtp_layer_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`MtpModel` of transformers reads the published names and computes the same."""
    target = write_checkpoint("deepseek_v3", tmp_path, sharded=True)
    monkeypatch.setattr(target.model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."])
    theirs, draft = MtpModel.from_pretrained(target.model), build_mtp(target)
    ids, hidden, rotary = compute_inputs(draft, target)
    with torch.no_grad():
        expected = theirs.forward_layer(
            0, hidden, torch.arange(12).expand(2, 12), None, input_ids=ids
        )
        normed, _ = draft(ids, hidden, rotary, causal(ids))
    assert torch.allclose(normed, expected, atol=1e-5, rtol=0)


@pytest.mark.long  # trains a layer for 20 steps
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_transformers_decodes_with_a_trained_layer_as_we_do(kind: str, tmp_path: Path) -> None:
    """`generate(use_mtp=True)` with an exported target gives the same text in as many passes."""
    target = write_checkpoint(kind, tmp_path / "target", with_mtp=False)
    memorise("mtp", target, tmp_path / "run", num_steps=20)
    export(tmp_path / "run" / "draft", "vllm", tmp_path / "merged", TargetFiles(target.name))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    # transformers looks for the layer under these names
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]
    passes: list[int] = []
    model.model.register_forward_hook(
        lambda _, __, output: passes.append(output.last_hidden_state.shape[1])
    )
    prompt = target.tokenizer(PROMPT)["input_ids"]
    options: dict[str, Any] = {
        "max_new_tokens": 60,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    (theirs,) = model.generate(torch.tensor([prompt]), use_mtp=True, **options)
    proposer = load_proposer("mtp", tmp_path / "run" / "draft", target)
    ours = Decoder(target, proposer).generate(prompt, max_new_tokens=60, num_speculative_tokens=1)
    assert theirs.tolist() == [*prompt, *ours.token_ids]
    assert 30 < len(passes) == 1 + len(ours.rounds) < 58
