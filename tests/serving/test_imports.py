"""Heads in the layouts of other projects load, or are refused with the reason."""

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdistill.decoding.decoder import Decoder
from specdistill.methods.eagle.checkpoint import load_eagle
from specdistill.methods.eagle3.checkpoint import load_eagle3
from specdistill.methods.load import find_method, load_proposer
from specdistill.targets.frozen import FrozenTarget
from tests.refusals import refused
from tests.serving import layouts
from tests.tiny import tiny_target_model, tiny_tokenizer, write_target

IDS = "eagle_aux_hidden_state_layer_ids"
H, V, W = 64, 260, 25
SIZES = {
    "hidden_size": H,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
}
# The rotary keys of a LlamaConfig since transformers 5, and before.
NEW_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
OLD_ROPE = {"rope_theta": 500000.0, "rope_scaling": None}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return FrozenTarget.load(str(write_target(tmp_path_factory.mktemp("target"), num_layers=8)))


def make_head_tensors(first: str) -> dict[str, Tensor]:
    """Return the tensors of an EAGLE-3 head of bfloat16 noise; `first` prefixes its first layer."""
    tensors = {
        name: make_noise(shape, index)
        for index, (name, shape) in enumerate(layouts.eagle3(first).items())
    }
    ids = torch.arange(5, 105, 4)
    return tensors | {"d2t": ids - torch.arange(W), "t2d": torch.isin(torch.arange(V), ids)}


def make_noise(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def write_head(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, pickled: bool = False
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def split_into_shards(folder: Path) -> dict[str, Any]:
    """Split the single weights file of a folder into two shards and return their index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    place = {
        name: f"model-0000{1 + (index > 5)}-of-00002.safetensors"
        for index, name in enumerate(sorted(tensors))
    }
    for file in set(place.values()):
        save_file(
            {name: tensor for name, tensor in tensors.items() if place[name] == file}, folder / file
        )
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def make_speculators_config(**keys: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
        "transformer_layer_config": {"model_type": "llama", "head_dim": 32, **SIZES, **NEW_ROPE},
        "draft_vocab_size": W,
        "target_hidden_size": None,
        IDS: [2, 4, 5],
        **keys,
    }


def make_specforge_config(**keys: Any) -> dict[str, Any]:
    # SpecForge writes these keys, too; they switch no window on.
    window = {"max_window_layers": 36, "sliding_window": 32768, "use_sliding_window": False}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **SIZES,
        **OLD_ROPE,
        **window,
        "draft_vocab_size": W,
        **keys,
    }


def assert_loads(
    folder: Path, target: FrozenTarget, tensors: dict[str, Tensor], method: str = "eagle3"
) -> Any:
    """Check that a head is recognised, has the given tensors and decodes; return the head."""
    assert find_method(folder) == method
    head = (load_eagle3 if method == "eagle3" else load_eagle)(folder, target)
    state = head.state_dict()
    for name in tensors.keys() - {"t2d"}:
        assert torch.equal(state[name.replace("midlayer.", "layers.0.")], tensors[name]), name
    decoder = Decoder(target, load_proposer(method, folder, target))
    generated = decoder.generate([5, 6, 7], max_new_tokens=4, num_speculative_tokens=2)
    assert len(generated.token_ids) == 4
    return head


def test_a_speculators_head_loads(target: FrozenTarget, tmp_path: Path) -> None:
    """The head has the norms that speculators' training adds, and a copy of the target's
    embedding in another dtype, which is not taken for one of its own."""
    tensors = make_head_tensors("layers.0.") | {"input_norm.weight": make_noise((3 * H,), 20)}
    copy = {"embed_tokens.weight": target.model.get_input_embeddings().weight.bfloat16()}
    folder = write_head(
        tmp_path / "head",
        make_speculators_config(norm_before_fc=True, norm_output=True),
        tensors | copy,
    )
    config = assert_loads(folder, target, tensors).config
    assert (
        config.aux_layers == (2, 4, 5)
        and config.norm_before_fc
        and config.norm_output
        and not config.owns_embedding
    )
    assert config.norm_before_residual and config.rope_theta == 500000.0 and config.fc_norm is False


def test_norm_before_residual_is_read_from_a_speculators_config(
    target: FrozenTarget, tmp_path: Path
) -> None:
    folder = write_head(
        tmp_path / "head",
        make_speculators_config(norm_before_residual=False),
        make_head_tensors("layers.0."),
    )
    assert not load_eagle3(folder, target).config.norm_before_residual


def test_another_embedding_of_the_same_width_is_the_heads_own(
    target: FrozenTarget, tmp_path: Path
) -> None:
    embedding = {"embed_tokens.weight": make_noise((V, H), 30)}
    folder = write_head(
        tmp_path / "head", make_speculators_config(), make_head_tensors("layers.0.") | embedding
    )
    head = assert_loads(folder, target, embedding)
    assert head.config.owns_embedding and "embed_tokens.weight" not in head.shared


def test_a_specforge_head_loads(target: FrozenTarget, tmp_path: Path) -> None:
    nested = {"eagle_config": {IDS: [0, 2, 6], "use_aux_hidden_state": True}}
    folder = write_head(
        tmp_path / "head", make_specforge_config(**nested), make_head_tensors("midlayer.")
    )
    config = assert_loads(folder, target, make_head_tensors("midlayer.")).config
    assert (
        config.aux_layers == (1, 3, 7)
        and config.sliding_window is None
        and not config.norm_before_residual
    )


def test_a_safeailab_pickle_loads(target: FrozenTarget, tmp_path: Path) -> None:
    """The config calls itself a plain Llama and names neither the head size nor the layers."""
    folder = write_head(
        tmp_path / "head",
        make_specforge_config(architectures=["LlamaForCausalLM"]),
        make_head_tensors("midlayer."),
        pickled=True,
    )
    config = assert_loads(folder, target, make_head_tensors("midlayer.")).config
    assert config.aux_layers == (2, 4, 5) and config.head_dim == 32


def test_a_modelopt_head_loads(target: FrozenTarget, tmp_path: Path) -> None:
    """The head has no t2d and no embedding; its config has null keys and YaRN scaling."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    eagle = {
        IDS: [],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    }
    keys = {
        "rope_scaling": yarn,
        "eagle_config": eagle,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "use_cache": None,
    }
    tensors = {
        name: tensor for name, tensor in make_head_tensors("layers.0.").items() if name != "t2d"
    }
    head = assert_loads(
        write_head(tmp_path / "head", make_specforge_config(**keys), tensors), target, tensors
    )
    assert head.config.rope_scaling == yarn and head.target_ids_W.tolist() == [*range(5, 105, 4)]


def test_legacy_names_of_the_norms_are_read(target: FrozenTarget, tmp_path: Path) -> None:
    norms = {
        f"aux_norm_{part}.weight": make_noise((H,), 40 + index)
        for index, part in enumerate(("low", "mid", "high"))
    }
    folder = write_head(
        tmp_path / "head",
        make_specforge_config(use_aux_norm=True),
        make_head_tensors("midlayer.") | norms,
    )
    head = load_eagle3(folder, target)
    assert head.config.fc_norm
    for norm, tensor in zip(head.fc_norm, norms.values(), strict=True):
        assert torch.equal(norm.weight, tensor)


def test_a_sharded_head_loads(target: FrozenTarget, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", make_specforge_config(), make_head_tensors("midlayer."))
    split_into_shards(folder)
    assert_loads(folder, target, make_head_tensors("midlayer."))


def test_weights_of_two_dtypes_load_in_the_wider_one(target: FrozenTarget, tmp_path: Path) -> None:
    tensors = make_head_tensors("midlayer.")
    # bfloat16 does not have these values.
    tensors["norm.weight"] = tensors["norm.weight"].float() + 1e-5
    head = load_eagle3(write_head(tmp_path / "head", make_specforge_config(), tensors), target)
    assert head.fc.weight.dtype == torch.float32 and torch.equal(
        head.norm.weight, tensors["norm.weight"]
    )


CONFIGS = [
    (make_specforge_config(hidden_act="gelu"), "hidden_act gelu"),
    (make_specforge_config(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    (
        make_specforge_config(eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state False",
    ),
    (make_specforge_config(eagle_config={"parallel_draft_step": 4}), "parallel_draft_step 4"),
    (make_specforge_config(eagle_config={"layer_ids": [1, 2]}), "layer_ids [1, 2]"),
    (make_specforge_config(eagle_config={IDS: [1, 3, 4]}, **{IDS: [1, 3, 4]}), "[1, 3, 4]"),
    (make_specforge_config(num_aux_hidden_states=2), "num_aux_hidden_states 2"),
    (make_specforge_config(**{IDS: [2, 4, 9]}), "[2, 4, 9]"),
    (make_specforge_config(fc_norm=True, norm_before_fc=True), "norm_before_fc"),
    (make_specforge_config(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    (make_specforge_config(hidden_size="64"), "hidden_size '64'"),
    (make_specforge_config(num_attention_heads=None), "num_attention_heads"),
    (make_specforge_config(num_target_layers=36), "num_target_layers 36"),
    (make_specforge_config(vocab_size=32000), "vocab_size 32000"),
    (
        make_specforge_config(rope_scaling={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "partial_rotary_factor 0.5",
    ),
    (make_specforge_config(rope_scaling={"type": "yarn"}), "yarn"),
    (make_specforge_config(rope_scaling={"type": "spiral", "factor": 2.0}), "rope_type spiral"),
    # Dynamic scaling changes the angles with the length of the text.
    (
        make_specforge_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "rope_type dynamic",
    ),
    (make_speculators_config(speculators_model_type="peagle"), "speculators_model_type peagle"),
    (make_speculators_config(transformer_layer_config="llama"), "transformer_layer_config"),
]


@pytest.mark.parametrize(("config", "names"), CONFIGS, ids=[names for _, names in CONFIGS])
def test_a_config_that_heads_do_not_support_is_refused(
    config: dict[str, Any], names: str, target: FrozenTarget, tmp_path: Path
) -> None:
    folder = write_head(tmp_path / "head", config, make_head_tensors("midlayer."))
    with refused("eval.draft", holds=names):
        load_proposer("eagle3", folder, target)


HEAD = make_head_tensors("midlayer.")


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"d2t": None}, "d2t"),
        # The tensor is there twice.
        ({"layers.0.hidden_norm.weight": make_noise((H,))}, "hidden_norm.weight"),
        (
            {"midlayer.self_attn.q_norm.weight": make_noise((32,))},
            "layers.0.self_attn.q_norm.weight",
        ),
        # The config does not set fc_norm.
        ({"fc_norm.0.weight": make_noise((H,))}, "fc_norm.0.weight"),
        ({"lm_head.weight": make_noise((V, H))}, "lm_head.weight of shape (260, 64)"),
        ({"fc.weight": HEAD["fc.weight"].to(torch.int8)}, "fc.weight in torch.int8"),
        ({"fc.weight": HEAD["fc.weight"].double()}, "fc.weight in torch.float64"),
        ({"d2t": HEAD["d2t"].float()}, "d2t in torch.float32"),
        ({"d2t": HEAD["d2t"] + torch.arange(W) * 20}, "d2t"),  # token ids instead of offsets
        ({"d2t": HEAD["d2t"].flip(0)}, "d2t"),
        *(
            (
                {"norm.weight": HEAD["norm.weight"].index_fill(0, torch.tensor(3), value)},
                "norm.weight",
            )
            for value in (nan, inf)
        ),
    ],
)
def test_unusable_weights_are_refused(
    changed: dict[str, Tensor | None], names: str, target: FrozenTarget, tmp_path: Path
) -> None:
    tensors = {name: tensor for name, tensor in (HEAD | changed).items() if tensor is not None}
    with refused("eval.draft", holds=names):
        load_proposer(
            "eagle3", write_head(tmp_path / "head", make_specforge_config(), tensors), target
        )


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("outside", "../elsewhere.safetensors"),
        ("no shard", "model-00002-of-00002.safetensors"),
        ("lies", "norm.weight"),
        ("no map", "model.safetensors.index.json"),
        ("cut short", "model-00001-of-00002.safetensors"),
    ],
)
def test_a_wrong_shard_index_is_refused(
    change: str, names: str, target: FrozenTarget, tmp_path: Path
) -> None:
    folder = write_head(tmp_path / "head", make_specforge_config(), make_head_tensors("midlayer."))
    index = split_into_shards(folder)
    if change == "outside":
        index["weight_map"]["norm.weight"] = "../elsewhere.safetensors"
    elif change == "no shard":
        (folder / "model-00002-of-00002.safetensors").unlink()
    elif change == "lies":
        index["weight_map"]["norm.weight"] = "model-00001-of-00002.safetensors"
    elif change == "cut short":
        path = folder / "model-00001-of-00002.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    else:
        index = {"weight_map": ["norm.weight"]}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused("eval.draft", holds=names):
        load_proposer("eagle3", folder, target)


EMBEDDING = {"model.embed_tokens.weight": make_noise((4, 4))}


@pytest.mark.parametrize(
    ("config", "tensors", "got"),
    [
        ({}, EMBEDDING, "1 tensors"),
        (
            {"architectures": ["MedusaModel"]},
            {"0.0.linear.weight": make_noise((4, 4))},
            "MedusaModel",
        ),
        (
            {"architectures": ["PEagleDraftModel"]},
            make_head_tensors("midlayer.") | {"mask_hidden": make_noise((1, 1, 192))},
            "peagle",
        ),
        (
            {"architectures": ["DFlash2DraftModel"]},
            make_head_tensors("layers.0.") | {"hidden_norm.weight": make_noise((H,))},
            "dflash2",
        ),
    ],
)
def test_an_unknown_layout_is_refused(
    config: dict[str, Any], tensors: dict[str, Tensor], got: str, tmp_path: Path
) -> None:
    with refused("eval.draft", holds=got):
        find_method(write_head(tmp_path / "head", config, tensors))


def test_a_small_draft_with_nan_is_refused(target: FrozenTarget, tmp_path: Path) -> None:
    model = tiny_target_model(num_layers=2)
    model.model.norm.weight.data[0] = torch.nan
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with refused("eval.draft", holds="model.norm.weight"):
        load_proposer("draft_model", tmp_path, target)
