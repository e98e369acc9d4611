"""The EAGLE-3 head: exact tensors, cached == uncached, and checkpoints that come back bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdistill.decoding.cache import DraftCache
from specdistill.drafts.build import build_eagle3
from specdistill.drafts.checkpoint import config_to_json, load_eagle3, save_eagle3
from specdistill.drafts.eagle3 import Eagle3Draft
from specdistill.errors import UserError
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.unroll import ChainMemory
from tests.tiny import tiny_target_model, tiny_tokenizer

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms of 3.1": {"fc_norm": True, "norm_output": True},
    "norm before residual": {"norm_before_residual": True},
    "three layers": {"num_layers": 3},
    "pruned vocabulary": {"draft_vocabulary": torch.arange(5, 105, 4)},
    "narrower": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1},
    "four layers read": {"aux_layers": [0, 1, 3, 4]},
}


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")


@pytest.fixture(params=VARIANTS, scope="module")
def draft(request: pytest.FixtureRequest, target: FrozenTarget) -> Eagle3Draft:
    return build_eagle3(target, **VARIANTS[request.param])


def test_save_and_load_are_bit_equal(draft: Eagle3Draft, target: FrozenTarget, tmp_path: Path) -> None:
    save_eagle3(draft, tmp_path)
    loaded = load_eagle3(tmp_path, target)
    assert loaded.config == draft.config
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_bfloat16_comes_back_as_bfloat16(target: FrozenTarget, tmp_path: Path) -> None:
    draft = build_eagle3(target).to(torch.bfloat16)
    save_eagle3(draft, tmp_path)
    assert load_eagle3(tmp_path, target).fc.weight.dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_tensors_are_those_that_engines_load(target: FrozenTarget, tmp_path: Path) -> None:
    save_eagle3(build_eagle3(target, draft_vocabulary=torch.arange(5, 105, 4), fc_norm=True), tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    size, source = target.hidden_size, target.config
    heads, groups, inner = source.num_attention_heads * 32, source.num_key_value_heads * 32, source.intermediate_size
    assert shapes == {
        "fc.weight": (size, 3 * size),
        "fc_norm.0.weight": (size,),
        "fc_norm.1.weight": (size,),
        "fc_norm.2.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * size),
        "midlayer.self_attn.k_proj.weight": (groups, 2 * size),
        "midlayer.self_attn.v_proj.weight": (groups, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, heads),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "norm.weight": (size,),
        "lm_head.weight": (25, size),
        "d2t": (25,),
        "t2d": (target.vocab_size,),
    }


def test_d2t_is_an_offset_and_t2d_a_mask(target: FrozenTarget) -> None:
    ids = torch.tensor([5, 7, 100])
    draft = build_eagle3(target, draft_vocabulary=ids)
    assert draft.d2t.tolist() == [5, 6, 98] and draft.d2t.dtype == torch.int64
    assert draft.t2d.nonzero().flatten().tolist() == ids.tolist() and draft.t2d.dtype == torch.bool
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[ids])


def test_layer_ids_in_the_file_count_outputs_and_defaults_are_left_out(target: FrozenTarget) -> None:
    deep = FrozenTarget(tiny_target_model(num_layers=8), tiny_tokenizer(), name="deep")
    default = config_to_json(build_eagle3(deep).config, torch.float32)
    assert "eagle_aux_hidden_state_layer_ids" not in default["eagle_config"]
    shallow = config_to_json(build_eagle3(target).config, torch.float32)  # engines would take [2, 2, 1] for four layers
    assert shallow["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    chosen = config_to_json(build_eagle3(target, aux_layers=[1, 3]).config, torch.float32)
    assert chosen["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert chosen["num_aux_hidden_states"] == 2


def test_both_names_of_the_first_layer_are_read(target: FrozenTarget, tmp_path: Path) -> None:
    draft = build_eagle3(target)
    save_eagle3(draft, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    assert torch.equal(load_eagle3(tmp_path, target).layers[0].mlp.up_proj.weight, draft.layers[0].mlp.up_proj.weight)


def test_cached_steps_equal_the_uncached_pass(draft: Eagle3Draft, target: FrozenTarget) -> None:
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        hidden = draft.fuse(target.features(ids, draft.config.aux_layers).aux)
        positions = torch.arange(12)[None]
        whole, _ = draft(ids, hidden, positions, ChainMemory(torch.zeros_like(ids), draft.config.num_layers))
        cache = DraftCache.allocate(draft.config, 12, torch.float32, ids.device)
        parts = []
        for start, end in ((0, 5), (5, 6), (6, 12)):
            normed, _ = draft(ids[:, start:end], hidden[:, start:end], cache.next_positions(end - start), cache)
            parts.append(normed)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)


def test_batch_equals_single(draft: Eagle3Draft, target: FrozenTarget) -> None:
    ids = torch.stack((torch.arange(3, 13), torch.arange(40, 50)))
    positions = torch.arange(10).expand(2, 10)
    with torch.no_grad():
        hidden = draft.fuse(target.features(ids, draft.config.aux_layers).aux)
        both, _ = draft(ids, hidden, positions, ChainMemory(torch.zeros_like(ids), draft.config.num_layers))
        for row in range(2):
            memory = ChainMemory(torch.zeros(1, 10, dtype=torch.long), draft.config.num_layers)
            one, _ = draft(ids[row : row + 1], hidden[row : row + 1], positions[:1], memory)
            assert torch.allclose(both[row], one[0], atol=1e-5)


def test_norm_output_feeds_back_what_the_head_sees(target: FrozenTarget) -> None:
    ids = torch.arange(3, 8)[None]
    for norm_output in (False, True):
        draft = build_eagle3(target, norm_output=norm_output)
        draft.norm.weight.data = torch.linspace(0.5, 2.0, len(draft.norm.weight))
        hidden = draft.fuse(target.features(ids, draft.config.aux_layers).aux)
        normed, recycled = draft(ids, hidden, torch.arange(5)[None], ChainMemory(torch.zeros_like(ids), 1))
        assert torch.equal(normed, recycled) == norm_output
        assert torch.allclose(draft.norm(recycled), normed, atol=1e-6) != norm_output


def corrupt(folder: Path, change: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if change == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif change == "missing":
        del tensors["midlayer.mlp.up_proj.weight"]
        save_file(tensors, path)
    elif change == "unknown":
        save_file({**tensors, "extra.weight": torch.zeros(1)}, path)
    elif change == "transposed":
        save_file({**tensors, "fc.weight": tensors["fc.weight"].T.contiguous()}, path)
    elif change == "no weights":
        path.unlink()
    elif change == "no config":
        (folder / "config.json").unlink()
    elif change == "broken config":
        (folder / "config.json").write_text("{")
    else:
        config = json.loads((folder / "config.json").read_text())
        key, value = change.split("=")
        (folder / "config.json").write_text(json.dumps({**config, key: int(value)}))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("truncated", "safetensors"),
        ("missing", "layers.0.mlp.up_proj.weight"),
        ("unknown", "extra.weight"),
        ("transposed", "fc.weight"),
        ("no weights", "no weights"),
        ("no config", "config.json"),
        ("broken config", "JSON"),
        ("target_hidden_size=96", "target_hidden_size 96"),
        ("vocab_size=77", "vocab_size 77"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(target: FrozenTarget, tmp_path: Path, change: str, names: str) -> None:
    save_eagle3(build_eagle3(target), tmp_path)
    corrupt(tmp_path, change)
    with pytest.raises(UserError, match=r"^eval\.draft: got .*expected") as caught:
        load_eagle3(tmp_path, target)
    assert names in str(caught.value) and "\n" not in str(caught.value)


def test_pickles_load_as_plain_tensors_only(target: FrozenTarget, tmp_path: Path) -> None:
    draft = build_eagle3(target)
    save_eagle3(draft, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert torch.equal(load_eagle3(tmp_path, target).fc.weight, draft.fc.weight)
    torch.save({"fc.weight": Path("/")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="weights_only"):
        load_eagle3(tmp_path, target)
