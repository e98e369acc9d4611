"""EAGLE heads survive the way to an engine's layout and back, bit for bit.

Names and keys of each layout are compared with those written by hand, and unsupported heads are
refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdistill.methods.chains import serving as limits
from specdistill.serving.engines.loader import Limit
from specdistill.serving.export import export
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.heads import head_of, load_head, save_head
from tests.refusals import refused
from tests.serving import layouts
from tests.tiny import tiny_target_model

ENGINES = ("vllm", "sglang", "speculators", "gguf")
IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Each limit with a head that violates it alone, and the engines that have the limit.
EAGLE3: dict[Limit, tuple[dict[str, Any], tuple[str, ...]]] = {
    limits.SEVERAL_LAYERS: ({"num_layers": 2}, ("sglang", "gguf")),
    limits.FC_NORM: ({"fc_norm": True}, ("gguf",)),
    limits.NORM_OUTPUT: ({"norm_output": True}, ("gguf",)),
    limits.NORM_BEFORE_RESIDUAL: ({"norm_before_residual": True}, ("sglang",)),
    limits.WIDTH_OF_FC_INPUT: ({"hidden_size": 192}, ("sglang",)),
    limits.OWN_EMBEDDING: ({"own_embedding": True}, ("sglang",)),
    limits.NOT_THREE_LAYERS_READ: ({"aux_layers": [1, 6]}, ("gguf",)),
    limits.LAST_STATE_READ: ({"aux_layers": [2, 4, 8]}, ("sglang", "gguf")),
    limits.LAYERS_OUT_OF_ORDER: (
        {"aux_layers": [5, 4, 2]},
        ("vllm", "sglang", "speculators", "gguf"),
    ),
    limits.SLIDING_WINDOW: ({"sliding_window": 4}, ("gguf",)),
}
EAGLE: dict[Limit, tuple[dict[str, Any], tuple[str, ...]]] = {
    limits.FC_BIAS: ({"fc_bias": True}, ("vllm",)),
    limits.SLIDING_WINDOW: ({"sliding_window": 4}, ("vllm", "sglang")),
}
REFUSED = [
    pytest.param(method, engine, shape, limit, id=f"{method}, {limit.setting}, {engine}")
    for method, table in (("eagle3", EAGLE3), ("eagle", EAGLE))
    for limit, (shape, engines) in table.items()
    for engine in engines
]
PRUNED: dict[str, Any] = {
    "draft_vocabulary": torch.arange(5, 105, 4),
    "hidden_size": 32,
    "num_attention_heads": 2,
}
RESIDUAL: dict[str, Any] = {
    "norm_before_residual": True,
    "rope_scaling": LLAMA3,
    "own_embedding": True,
}
WIDE: dict[str, Any] = {"hidden_size": 192, "norm_before_fc": True}
NORMS: dict[str, Any] = {"fc_norm": True, "norm_output": True, "sliding_window": 4}
# Heads that an engine supports, each with many settings at once.
ABLE: list[tuple[str, str, dict[str, Any]]] = [
    *(
        ("eagle3", engine, RESIDUAL | NORMS | {"num_layers": 3, "aux_layers": [1, 6]})
        for engine in ("vllm", "speculators")
    ),
    *(("eagle3", engine, WIDE | {"aux_layers": [2, 4, 8]}) for engine in ("vllm", "speculators")),
    ("eagle3", "sglang", NORMS | {"aux_layers": [1, 2, 3, 5, 7], "rope_scaling": LLAMA3}),
    ("eagle3", "sglang", PRUNED | {"norm_before_fc": True}),
    ("eagle3", "gguf", WIDE),
    ("eagle3", "gguf", RESIDUAL | {"aux_layers": [0, 3, 7]}),
    *(("eagle3", engine, PRUNED | {"num_key_value_heads": 1}) for engine in ENGINES),
    ("eagle", "vllm", {"num_layers": 3, "head_dim": 64}),
    ("eagle", "sglang", {"num_layers": 3, "head_dim": 64, "fc_bias": True}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return layouts.saved_target(tmp_path_factory.mktemp("target"))


def read_head(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("method", "engine", "shape", "limit"), REFUSED)
def test_a_head_that_an_engine_does_not_support_is_refused(
    method: str,
    engine: str,
    shape: dict[str, Any],
    limit: Limit,
    target: FrozenTarget,
    tmp_path: Path,
) -> None:
    save_head(method, head_of(method, target, shape), tmp_path / "ours")
    with refused("engine", engine, holds=limit.setting):
        export(tmp_path / "ours", engine, tmp_path / "out", TargetFiles(target.name))
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize(("method", "engine", "shape"), ABLE)
def test_a_head_comes_back_bit_for_bit(
    method: str, engine: str, shape: dict[str, Any], target: FrozenTarget, tmp_path: Path
) -> None:
    head = head_of(method, target, shape)
    save_head(method, head, tmp_path / "ours")
    assert (
        export(tmp_path / "ours", engine, tmp_path / "out", TargetFiles(target.name)).method
        == method
    )
    back = load_head(method, tmp_path / "out", target)
    assert back.config == head.config
    for name, tensor in head.state_dict().items():
        assert back.state_dict()[name].dtype == tensor.dtype and torch.equal(
            back.state_dict()[name], tensor
        ), name
    # The head is then saved in our layout again, with the same keys as at first.
    save_head(method, back, tmp_path / "again")
    for one, other in zip(read_head(tmp_path / "ours"), read_head(tmp_path / "again"), strict=True):
        assert one.keys() == other.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_keep_their_dtype(dtype: torch.dtype, target: FrozenTarget, tmp_path: Path) -> None:
    save_head(
        "eagle3",
        head_of("eagle3", target, {"draft_vocabulary": torch.arange(5, 105, 4)}, dtype),
        tmp_path / "ours",
    )
    for engine in ENGINES:
        export(tmp_path / "ours", engine, tmp_path / engine, TargetFiles(target.name))
        config, tensors = read_head(tmp_path / engine)
        assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {
            dtype
        }
        assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
        assert str(dtype).removeprefix("torch.") in (config.get("torch_dtype"), config.get("dtype"))


def make_llama_config(**keys: Any) -> dict[str, Any]:
    """Return the keys of a Llama that every layout has for a head of the tiny target."""
    return {
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "mlp_bias": False,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 260,
        **keys,
    }


def make_speculators_config(target: FrozenTarget, **keys: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target.name, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": make_llama_config(),
        "draft_vocab_size": 25,
        "target_hidden_size": None,
        "norm_before_residual": False,
        "fc_norm": False,
        "norm_output": False,
        "norm_before_fc": False,
        IDS: [2, 4, 5],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **keys,
    }


NO_NORMS = {"fc_norm": False, "norm_output": False, "norm_before_fc": False}
COUNTED = {"draft_vocab_size": 25, "target_hidden_size": 64, "num_aux_hidden_states": 3}


def test_eagle3_layouts_are_those_written_by_hand(target: FrozenTarget, tmp_path: Path) -> None:
    """Only speculators' config states the default layers, and only its weights repeat the target's
    embedding."""
    save_head(
        "eagle3",
        head_of("eagle3", target, {"draft_vocabulary": torch.arange(5, 105, 4)}),
        tmp_path / "ours",
    )
    expected = {
        "vllm": {
            "architectures": ["LlamaForCausalLMEagle3"],
            **make_llama_config(**COUNTED, **NO_NORMS, norm_before_residual=False),
        },
        "sglang": {
            "architectures": ["LlamaForCausalLMEagle3"],
            **make_llama_config(**COUNTED, **NO_NORMS),
        },
        "gguf": {
            "architectures": ["LlamaForCausalLMEagle3"],
            **make_llama_config(**COUNTED, norm_before_fc=False, norm_before_residual=False),
        },
        "speculators": make_speculators_config(target),
    }
    for engine, keys in expected.items():
        export(tmp_path / "ours", engine, tmp_path / engine, TargetFiles(target.name))
        config, tensors = read_head(tmp_path / engine)
        assert config == keys, engine
        shapes = layouts.eagle3("layers.0." if engine == "speculators" else "midlayer.")
        shapes |= {"embed_tokens.weight": (260, 64)} if engine == "speculators" else {}
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes, engine
        assert tensors["d2t"].tolist() == [5 + 3 * index for index in range(25)]
        assert tensors["t2d"].nonzero().flatten().tolist() == list(range(5, 105, 4))
    embedding = read_head(tmp_path / "speculators")[1]["embed_tokens.weight"]
    assert torch.equal(embedding, target.model.get_input_embeddings().weight.bfloat16())


def test_a_whole_vocabulary_has_no_maps_and_another_width_its_own_embedding(
    target: FrozenTarget, tmp_path: Path
) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_head("eagle3", head_of("eagle3", target, shape), tmp_path / "ours")
    for engine in ENGINES:
        export(tmp_path / "ours", engine, tmp_path / engine, TargetFiles(target.name))
        config, tensors = read_head(tmp_path / engine)
        assert not {"d2t", "t2d"} & tensors.keys()
        assert tensors["embed_tokens.weight"].shape == (260, 32) and tensors[
            "lm_head.weight"
        ].shape == (260, 32)
        assert config["target_hidden_size"] == 64 and config["draft_vocab_size"] == 260


def test_sliding_windows_are_written_where_engines_look(
    target: FrozenTarget, tmp_path: Path
) -> None:
    save_head(
        "eagle3",
        head_of("eagle3", target, {"sliding_window": 4, "num_layers": 2}),
        tmp_path / "ours",
    )
    export(tmp_path / "ours", "vllm", tmp_path / "vllm", TargetFiles(target.name))
    config, _ = read_head(tmp_path / "vllm")
    assert config["sliding_window"] == 4 and config["layer_types"] == [
        "sliding_attention",
        "sliding_attention",
    ]
    save_head("eagle3", head_of("eagle3", target, {"sliding_window": 4}), tmp_path / "one")
    export(tmp_path / "one", "sglang", tmp_path / "sglang", TargetFiles(target.name))
    assert "--speculative-draft-window-size 4" in (tmp_path / "sglang" / "SERVE.md").read_text()


def test_scaled_rotary_frequencies_are_written_for_older_and_newer_readers(
    target: FrozenTarget, tmp_path: Path
) -> None:
    save_head("eagle3", head_of("eagle3", target, {"rope_scaling": LLAMA3}), tmp_path / "ours")
    export(tmp_path / "ours", "vllm", tmp_path / "out")
    config, _ = read_head(tmp_path / "out")
    assert config["rope_scaling"] == LLAMA3 and config["rope_theta"] == 10000.0
    assert config["rope_parameters"] == {**LLAMA3, "rope_theta": 10000.0}


def test_eagle_layouts_are_those_written_by_hand(target: FrozenTarget, tmp_path: Path) -> None:
    """vLLM's layout has no bias, and SGLang's has one of zeros.

    SGLang's config has no `bias`, which would also add one to the attention.
    """
    save_head("eagle", head_of("eagle", target, {}), tmp_path / "ours")
    model = {"architectures": ["LlamaForCausalLM"], **make_llama_config(bias=False)}
    expected = {
        "vllm": (
            {
                "model_type": "eagle",
                "model": model,
                "truncated_vocab_size": None,
                "method": "eagle",
            },
            layouts.EAGLE,
        ),
        "sglang": (
            {"architectures": ["LlamaForCausalLMEagle"], **make_llama_config()},
            layouts.EAGLE | {"fc.bias": (64,)},
        ),
    }
    for engine, (keys, wanted) in expected.items():
        export(tmp_path / "ours", engine, tmp_path / engine, TargetFiles(target.name))
        config, tensors = read_head(tmp_path / engine)
        assert config == keys, engine
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == wanted, engine
        assert "fc.bias" not in tensors or not tensors["fc.bias"].any()


def test_an_export_that_needs_the_target_is_refused_without_one(
    target: FrozenTarget, tmp_path: Path
) -> None:
    save_head("eagle3", head_of("eagle3", target, {}), tmp_path / "ours")
    with refused("target.model", "nothing"):
        export(tmp_path / "ours", "speculators", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_target_that_does_not_fit_is_refused(target: FrozenTarget, tmp_path: Path) -> None:
    tiny_target_model(num_layers=6).save_pretrained(tmp_path / "other")
    for method in ("eagle", "eagle3"):
        save_head(method, head_of(method, target, {}), tmp_path / method)
    with refused("draft", holds="num_target_layers 8"):
        export(tmp_path / "eagle3", "vllm", tmp_path / "out", TargetFiles(str(tmp_path / "other")))
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with refused("draft", holds="vocab_size 260"):
        export(tmp_path / "eagle", "vllm", tmp_path / "out", TargetFiles(str(tmp_path / "other")))


def test_the_embedding_is_found_in_a_sharded_target(target: FrozenTarget, tmp_path: Path) -> None:
    tiny_target_model(num_layers=layouts.NUM_LAYERS).save_pretrained(
        tmp_path / "sharded", max_shard_size="80KB"
    )
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    save_head("eagle3", head_of("eagle3", target, {}), tmp_path / "ours")
    export(
        tmp_path / "ours", "speculators", tmp_path / "out", TargetFiles(str(tmp_path / "sharded"))
    )
    embedding = read_head(tmp_path / "out")[1]["embed_tokens.weight"]
    assert torch.equal(embedding, target.model.get_input_embeddings().weight.bfloat16())


def test_a_head_left_to_the_target_is_completed(target: FrozenTarget, tmp_path: Path) -> None:
    """Some heads of a whole vocabulary leave `lm_head` to the target."""
    save_head("eagle3", head_of("eagle3", target, {}, torch.float32), tmp_path / "ours")
    path = tmp_path / "ours" / "model.safetensors"
    save_file(
        {name: tensor for name, tensor in load_file(path).items() if name != "lm_head.weight"}, path
    )
    export(tmp_path / "ours", "vllm", tmp_path / "out", TargetFiles(target.name))
    assert torch.equal(read_head(tmp_path / "out")[1]["lm_head.weight"], target.lm_head.weight)
    assert torch.equal(
        load_head("eagle3", tmp_path / "ours", target).lm_head.weight, target.lm_head.weight
    )
