"""Merging adds the layer to a full checkpoint where engines look, and changes nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdistill.common.errors import UserError
from specdistill.methods.mtp.checkpoint import (
    build_mtp,
    export_mtp,
    load_mtp,
    merge_mtp_weights,
    save_mtp,
)
from specdistill.methods.mtp.tensor_names import merge_experts
from specdistill.serving.engines.engine import Layout
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.mtp_targets import (
    KINDS,
    add_tensors,
    all_tensors,
    mtp_shapes,
    mtp_tensors,
    tiny_model,
    write_checkpoint,
)

DEPTH = {
    "qwen3_next": "num_nextn_predict_layers",
    "qwen3_5": "mtp_num_hidden_layers",
    "deepseek_v3": "num_nextn_predict_layers",
}


def save_draft(
    target: FrozenTarget, folder: Path, *, init: str | None = None, add: float = 0.0
) -> None:
    """Save the target's own layer or a fresh one, with each weight moved by `add`."""
    draft = build_mtp(target, init=init)
    for parameter in draft.parameters():
        parameter.data += add
    save_mtp(draft, folder)


Tensors = dict[str, torch.Tensor]


def merge_draft(
    folder: Path, kind: str, *, add: float = 0.0, **checkpoint: Any
) -> tuple[FrozenTarget, Tensors, Tensors]:
    """Merge a draft into a checkpoint, and return the target and the tensors before and after.

    The folders are `target`, `draft` with the target's own layer or else a fresh one, and `merged`.
    """
    source, output = folder / "target", folder / "merged"
    target = write_checkpoint(kind, source, **checkpoint)
    save_draft(
        target,
        folder / "draft",
        init=None if checkpoint.get("with_mtp", True) else "scratch",
        add=add,
    )
    merge_mtp_weights(folder / "draft", source, output)
    return target, all_tensors(source), all_tensors(output)


def check_index(folder: Path) -> None:
    """Check that each tensor is in just the file that the index names, and the total of bytes."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = all_tensors(folder)
    for file in set(index["weight_map"].values()):
        assert load_file(folder / file).keys() == {
            name for name, place in index["weight_map"].items() if place == file
        }
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_merging_an_untrained_layer_changes_no_tensor_and_no_file(
    kind: str, sharded: bool, tmp_path: Path
) -> None:
    source, output = tmp_path / "target", tmp_path / "merged"
    _, before, after = merge_draft(tmp_path, kind, sharded=sharded, dtype=torch.bfloat16)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    assert {path.name for path in source.iterdir()} == {path.name for path in output.iterdir()}
    for path in source.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith("index.json"):
            assert path.read_bytes() == (output / path.name).read_bytes(), path.name
    if sharded:
        check_index(output)
        changed = {
            path.name
            for path in source.glob("*.safetensors")
            if not path.samefile(output / path.name)
        }
        place = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
        assert changed == {place[name] for name in mtp_shapes(kind)} and len(changed) < len(
            set(place.values())
        )


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_target_has_the_trained_layer(kind: str, sharded: bool, tmp_path: Path) -> None:
    target, before, after = merge_draft(tmp_path, kind, sharded=sharded, add=0.5)
    trained = load_mtp(tmp_path / "draft", target).state_dict()
    merged_layer = build_mtp(FrozenTarget.load(str(tmp_path / "merged"))).state_dict()
    assert all(torch.equal(merged_layer[name], tensor) for name, tensor in trained.items())
    differing = {name for name in before if not torch.equal(before[name], after[name])}
    # the bias is no parameter, so it was not moved
    assert differing == {name for name in mtp_shapes(kind) if not name.endswith("correction_bias")}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_target_without_an_mtp_layer_gets_one(kind: str, sharded: bool, tmp_path: Path) -> None:
    source, output = tmp_path / "target", tmp_path / "merged"
    target, before, after = merge_draft(
        tmp_path, kind, sharded=sharded, with_mtp=False, dtype=torch.bfloat16
    )
    expected = mtp_tensors(kind, target.model, torch.bfloat16)  # with DeepSeek's copies
    new = {name: tensor for name, tensor in after.items() if name not in before}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in new.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()
    }
    for name in new.keys() & {
        "model.layers.2.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight",
    }:
        assert torch.equal(new[name], expected[name])
    assert json.loads((output / "config.json").read_text())[DEPTH[kind]] == 1
    # the original is unchanged, though files may be shared
    assert DEPTH[kind] not in json.loads((source / "config.json").read_text())
    if sharded:
        check_index(output)
        assert all(path.samefile(output / path.name) for path in source.glob("*.safetensors"))
    build_mtp(FrozenTarget.load(str(output)))


def test_experts_keep_the_form_of_the_checkpoint(tmp_path: Path) -> None:
    source, output = tmp_path / "target", tmp_path / "merged"
    target = write_checkpoint("qwen3_next", source, with_mtp=False)
    add_tensors(source, merge_experts(mtp_tensors("qwen3_next", target.model)))
    save_draft(target, tmp_path / "draft")
    merge_mtp_weights(tmp_path / "draft", source, output)
    before, after = all_tensors(source), all_tensors(output)
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in before and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_text_config_of_a_model_with_vision_records_the_layer(tmp_path: Path) -> None:
    source, output = tmp_path / "target", tmp_path / "merged"
    target = write_checkpoint("qwen3_5", source, with_mtp=False)
    save_draft(target, tmp_path / "draft", init="scratch")
    text = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text, "vision_config": {}})
    )
    merge_mtp_weights(tmp_path / "draft", source, output)
    config = json.loads((output / "config.json").read_text())
    assert (
        config["text_config"]["mtp_num_hidden_layers"] == 1
        and "mtp_num_hidden_layers" not in config
    )


def test_the_hubs_symbolic_links_become_files_and_hidden_folders_stay(tmp_path: Path) -> None:
    blobs, source, output = tmp_path / "blobs", tmp_path / "snapshot", tmp_path / "merged"
    target = write_checkpoint("qwen3_5", blobs, sharded=True)
    source.mkdir()
    for path in blobs.iterdir():
        (source / path.name).symlink_to(Path("..") / "blobs" / path.name)
    (source / ".cache").mkdir()
    (source / ".cache" / "download.metadata").write_text("of the original")
    save_draft(target, tmp_path / "draft")
    merge_mtp_weights(tmp_path / "draft", source, output)
    assert (
        not any(path.is_symlink() for path in output.iterdir()) and not (output / ".cache").exists()
    )
    assert all_tensors(source).keys() == all_tensors(output).keys()


def spoil_inputs(change: str, source: Path, draft: Path) -> None:
    index_path = source / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    name = next(iter(index["weight_map"]))
    config = json.loads((source / "config.json").read_text())
    if change == "index lies":
        index["weight_map"]["extra.weight"] = index["weight_map"].pop(name)
    elif change == "quantized":
        config["quantization_config"] = {"quant_method": "fp8"}
    elif change == "another target":
        config["hidden_size"] = 48
    elif change == "deeper":
        add_tensors(source, {"model.layers.3.enorm.weight": torch.zeros(32)})
        return
    else:
        tensors = load_file(draft / "model.safetensors")
        del tensors["model.layers.2.eh_proj.weight"]
        save_file(tensors, draft / "model.safetensors")
    index_path.write_text(json.dumps(index))
    (source / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("index lies", "extra.weight"),
        ("quantized", "quantized"),
        ("another target", "hidden_size 32"),
        ("deeper", "model.layers.3.enorm.weight"),
        ("incomplete draft", "model.layers.2.eh_proj.weight"),
    ],
)
def test_inputs_that_cannot_be_merged_are_refused_without_output(
    change: str, names: str, tmp_path: Path
) -> None:
    source, output = tmp_path / "target", tmp_path / "merged"
    target = write_checkpoint("deepseek_v3", source, sharded=True)
    save_draft(target, tmp_path / "draft")
    spoil_inputs(change, source, tmp_path / "draft")
    with pytest.raises(UserError, match=re.escape(names)):
        export_mtp(tmp_path / "draft", "vllm", Layout(), output, TargetFiles(str(source)), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "target"]


def test_a_tied_head_is_the_copy_of_the_embedding(tmp_path: Path) -> None:
    source, output = tmp_path / "target", tmp_path / "merged"
    model = tiny_model("deepseek_v3")
    target = write_checkpoint("deepseek_v3", source, with_mtp=False)
    save_draft(target, tmp_path / "draft", init="scratch")
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    merge_mtp_weights(tmp_path / "draft", source, output)
    head = all_tensors(output)["model.layers.2.shared_head.head.weight"]
    assert torch.equal(head, model.get_input_embeddings().weight)
