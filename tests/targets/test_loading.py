"""Checkpoints that transformers can read are loaded, and others are refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdistill.advice.plan.plan import make_plan
from specdistill.advice.plan.reading import read_model_config as read_plan
from specdistill.common.errors import ResourceError
from specdistill.common.project import PICO
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.loading import read_tokenizer
from tests.families import OTHERS, write_model
from tests.gguf_writer import write_gguf
from tests.heads import HEADS, build_head
from tests.refusals import refused
from tests.tiny import tiny_target_model, write_target

IDS = torch.arange(5, 40)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_target(tmp_path)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(PICO, tmp_path_factory.mktemp("gguf") / "pico.gguf", "f32")


def test_a_gguf_file_is_a_target(gguf: Path) -> None:
    target, pico = FrozenTarget.load(str(gguf)), FrozenTarget.load("pico")
    with torch.no_grad():
        assert torch.equal(target.model(IDS).logits, pico.model(IDS).logits)
    tokenizer, end_ids, longest = read_tokenizer(TargetFiles(str(gguf)))
    assert tokenizer("def f(x):").input_ids == pico.tokenizer("def f(x):").input_ids
    assert end_ids and longest == pico.max_length
    files = TargetFiles(str(gguf))
    assert (files.hidden_size, files.num_layers) == (pico.hidden_size, pico.num_layers)
    assert files.identity == target.identity and files.identity.revision is None
    assert files.identity.name_or_path == str(gguf) and not files.identity.is_same(pico.identity)


def test_a_gguf_file_is_planned_for_like_the_checkpoint_it_was_made_from(gguf: Path) -> None:
    file, pico = read_plan(str(gguf), key="target"), read_plan("pico", key="target")
    sizes = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    assert {name: getattr(file.text, name) for name in sizes} == {
        name: getattr(pico.text, name) for name in sizes
    }
    assert (file.hub_id, file.native_mtp, file.stored_bytes) == (None, None, gguf.stat().st_size)
    assert f"target.model={gguf}" in str(make_plan(file).recommendation["start"])


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class AcmeConfig(LlamaConfig):
    model_type = "acme"

class AcmeForCausalLM(LlamaForCausalLM):
    config_class = AcmeConfig
"""


def test_code_of_a_target_runs_when_it_is_trusted(folder: Path) -> None:
    (folder / "code.py").write_text(REMOTE)
    path = folder / "config.json"
    auto = {"AutoConfig": "code.AcmeConfig", "AutoModelForCausalLM": "code.AcmeForCausalLM"}
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "model_type": "acme", "auto_map": auto})
    )
    with refused("target.model", folder):
        FrozenTarget.load(str(folder))
    assert (
        type(FrozenTarget.load(str(folder), trust_remote_code=True).model).__name__
        == "AcmeForCausalLM"
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_fp8_checkpoint_is_a_target(folder: Path) -> None:
    """Only weights of layers are in fp8, with a scale for each block, as in DeepSeek's files."""
    plain, stored = tiny_target_model(), {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = weight
        if "layers." in name and weight.ndim == 2:
            blocks = weight.view(weight.shape[0] // 32, 32, -1, 32)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            eighth = (blocks / scale).to(torch.float8_e4m3fn)
            stored[name], stored[f"{name}_scale_inv"] = (
                eighth.view_as(weight),
                scale.squeeze((1, 3)),
            )
            plain.get_parameter(name).data = (eighth.float() * scale).view_as(weight)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    scheme = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": scheme}))
    with torch.no_grad():
        target, expected = FrozenTarget.load(str(folder)), plain(IDS).logits
        assert (target.model(IDS).logits - expected).norm() < 0.02 * expected.norm()
    if not torch.cuda.is_available():  # transformers dequantizes
        assert target.is_plain and {parameter.dtype for parameter in target.model.parameters()} == {
            torch.float32
        }


@pytest.mark.parametrize("attn", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_an_attention_without_its_package_is_refused(folder: Path, attn: str) -> None:
    with refused("target.model", folder):
        FrozenTarget.load(str(folder), attn=attn)


@pytest.mark.parametrize("kind", ["fp8", "bitsandbytes-8bit"])
def test_a_quantization_that_cannot_be_applied_is_refused(folder: Path, kind: str) -> None:
    with refused("target.quantization", kind, holds="float32"):
        FrozenTarget.load(str(folder), quantization=kind)
    with refused("target.quantization", kind, holds="without"):  # its package, or a GPU
        FrozenTarget.load(str(folder), dtype="bfloat16", quantization=kind)


def test_a_full_memory_is_not_reported_as_a_broken_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command then reports that the memory is full."""

    def raise_out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", raise_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        FrozenTarget.load(str(folder))


def test_a_device_map_is_followed_or_refused(folder: Path) -> None:
    """A spread over several devices cannot be tested here: `auto` finds only the CPU."""
    for device_map in ("cpu", "auto"):
        assert FrozenTarget.load(str(folder), device_map=device_map).device.type == "cpu"
    for device_map in ("nonsense", "cuda:99"):
        with refused("target.device_map", f"{device_map}"):
            FrozenTarget.load(str(folder), device_map=device_map)


def test_layers_whose_weights_are_converted_do_not_stay_on_disk(tmp_path: Path) -> None:
    """Files hold each expert on its own, and the model holds all experts in one tensor."""
    write_model(tmp_path / "target", {"model_type": "qwen3_moe"}, OTHERS)
    target = FrozenTarget.load(str(tmp_path / "target"), layers_on_disk=True)
    assert not any(weight.is_meta for weight in target.model.parameters())


def test_one_process_loads_the_whole_of_a_shared_target(folder: Path) -> None:
    shared, whole = FrozenTarget.load(str(folder), shard="layers"), FrozenTarget.load(str(folder))
    assert torch.equal(shared.features(IDS, [1]).aux[0], whole.features(IDS, [1]).aux[0])


def test_layers_stay_on_disk_until_they_are_run(folder: Path) -> None:
    disk_target, whole = (
        FrozenTarget.load(str(folder), layers_on_disk=True),
        FrozenTarget.load(str(folder)),
    )
    on_disk = {name for name, weight in disk_target.model.named_parameters() if weight.is_meta}
    assert on_disk and on_disk == {
        name for name, _ in disk_target.model.named_parameters() if ".layers." in name
    }
    assert disk_target.device == whole.device and disk_target.logits.linear.weight.equal(
        whole.logits.linear.weight
    )
    for features, expected in zip(
        disk_target.features(IDS, [1]).aux, whole.features(IDS, [1]).aux, strict=True
    ):
        assert torch.equal(features, expected)
    for method in HEADS:
        init = {"init": "scratch"} if method == "mtp" else {}
        state_dict, expected = (
            build_head(method, target, **init).state_dict() for target in (disk_target, whole)
        )
        assert state_dict.keys() == expected.keys() and all(
            torch.equal(state_dict[name], expected[name]) for name in state_dict
        )


def test_a_name_on_the_hub_without_a_network_is_refused_as_unreachable() -> None:
    """transformers and huggingface_hub are both tried, offline as in every test."""
    for attempt in (
        lambda: read_tokenizer(TargetFiles("org/nothere")),
        lambda: read_plan("org/nothere", key="target.model"),
    ):
        with pytest.raises(
            ResourceError,
            match=(
                r"^target.model: org/nothere is no folder here, and \S+ cannot be reached"
                r" .*HF_HUB_OFFLINE"
            ),
        ):
            attempt()
