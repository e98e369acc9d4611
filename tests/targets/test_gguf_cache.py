"""A GGUF file is converted once, and its copy loads as the file itself does."""

import os
import shutil
import subprocess
import sys
from errno import ENOSPC
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from specdistill.common.gguf_files import MetadataReader
from specdistill.common.project import PICO
from specdistill.data.rows.files import hash_tokenizer
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.loading import read_gguf_config, read_tokenizer
from tests.gguf_writer import write_gguf
from tests.tiny import tiny_target_model

IDS = torch.arange(5, 40)[None]


def write_tiny(path: Path, folder: Path, model: Any = None, seed: int = 0) -> Path:
    """Write a tiny model with pico's tokenizer to `folder`, and from there as a GGUF file."""
    (model or tiny_target_model(num_layers=1, vocab_size=1024, seed=seed)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(PICO).save_pretrained(folder)
    return write_gguf(folder, path, "q8_0")


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_tiny(folder / "tiny.gguf", folder / "model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of copies, which does not exist yet."""
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets" / "specdistill" / "gguf"


def list_copies(cache: Path) -> list[Path]:
    return [path for path in cache.glob("*") if path.is_dir()]


def compute_logits(target: FrozenTarget) -> torch.Tensor:
    with torch.no_grad():
        return target.model(IDS).logits


def read_config_values(target: FrozenTarget) -> dict[str, Any]:
    """Return the config without names: they change no numbers, and some are only in a folder."""
    values = target.model.config.to_dict()
    return {
        name: value
        for name, value in values.items()
        if name not in ("_name_or_path", "architectures")
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_copy_loads_as_the_file_does(tiny_gguf: Path, cache: Path, dtype: str) -> None:
    text = " def f(x):  return [x] \n é"
    direct = FrozenTarget.load(str(tiny_gguf), dtype=dtype, cache=False)
    assert not cache.exists()
    for copied in (
        FrozenTarget.load(str(tiny_gguf), dtype=dtype),
        FrozenTarget.load(str(tiny_gguf), dtype=dtype),
    ):
        assert (
            torch.equal(compute_logits(copied), compute_logits(direct))
            and copied.dtype == direct.dtype == dtype
        )
        assert (copied.eos_token_ids, copied.max_length) == (
            direct.eos_token_ids,
            direct.max_length,
        )
        assert (copied.is_plain, copied.revision) == (direct.is_plain, direct.revision)
        assert read_config_values(copied) == read_config_values(direct)
        ours, expected = copied.tokenizer, direct.tokenizer
        assert (
            type(ours) is type(expected)
            and ours.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
        )
        assert ours(text).input_ids == expected(text).input_ids
        assert (ours.chat_template, ours.special_tokens_map) == (
            expected.chat_template,
            expected.special_tokens_map,
        )
        assert copied.identity == direct.identity == TargetFiles(str(tiny_gguf)).identity
    (folder,) = list_copies(cache)
    assert folder.name.endswith(f"-{dtype}")


def test_a_class_with_rules_of_its_own_splits_as_the_file_says(cache: Path, tmp_path: Path) -> None:
    """Qwen2Tokenizer normalizes text, and the tokenizer of a GGUF file does not.

    They differ where a letter with an accent is two characters.
    """
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=1024, max_position_embeddings=256, **sizes))
    file = write_tiny(tmp_path / "qwen.gguf", tmp_path / "model", model)
    files = TargetFiles(str(file))
    direct = FrozenTarget.load(str(file), cache=False)
    FrozenTarget.load(str(file))
    copied = FrozenTarget.load(str(file))
    text = "cafe\N{COMBINING ACUTE ACCENT}"
    assert len(list_copies(cache)) == 1 and torch.equal(
        compute_logits(copied), compute_logits(direct)
    )
    assert type(direct.tokenizer).__name__ == "Qwen2Tokenizer"
    for tokenizer in (copied.tokenizer, read_tokenizer(files)[0]):
        assert tokenizer(text).input_ids == direct.tokenizer(text).input_ids
        assert hash_tokenizer(tokenizer) == hash_tokenizer(direct.tokenizer)


def test_metadata_is_read_once_and_not_at_all_for_the_copy(
    tiny_gguf: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process reads the metadata once, when it checks the file."""
    file = Path(shutil.copy(tiny_gguf, tmp_path / "mine.gguf"))
    readings = []
    read = MetadataReader.__init__

    def count_reading(self: MetadataReader, path: Any, *rest: Any) -> None:
        readings.append(path)
        read(self, path, *rest)

    def fail_if_used(*_: Any) -> None:
        raise AssertionError("gguf's reader reads every string")

    monkeypatch.setattr(MetadataReader, "__init__", count_reading)
    monkeypatch.setattr(gguf, "GGUFReader", fail_if_used)
    FrozenTarget.load(str(file))
    read_gguf_config(tmp_path, file.name, key="target.model", name="mine")
    assert len(readings) == 1
    monkeypatch.setattr(
        "transformers.modeling_gguf_pytorch_utils.load_gguf_checkpoint", fail_if_used
    )
    FrozenTarget.load(str(file))
    read_tokenizer(TargetFiles(str(file)))
    assert len(readings) == 1 and len(list_copies(cache)) == 1


def test_a_changed_file_is_converted_again(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    loaded = []
    for folder, seed in (("one", 1), ("two", 2)):
        write_tiny(file, tmp_path / folder, seed=seed)
        loaded.append(compute_logits(FrozenTarget.load(str(file))))
        assert torch.equal(loaded[-1], compute_logits(FrozenTarget.load(str(file), cache=False)))
    assert not torch.equal(*loaded) and len(list_copies(cache)) == 2


def test_a_file_is_loaded_although_the_cache_cannot_be_written(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.parent.mkdir()
    cache.parent.touch()  # a file where a folder should be
    expected = compute_logits(FrozenTarget.load(str(tiny_gguf), cache=False))
    assert torch.equal(compute_logits(FrozenTarget.load(str(tiny_gguf))), expected)
    assert "no safetensors copy could be written" in caplog.text
    cache.parent.unlink()

    def raise_disk_full(*_: Any, **__: Any) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", raise_disk_full)
    assert torch.equal(compute_logits(FrozenTarget.load(str(tiny_gguf))), expected)
    assert "No space left" in caplog.text and not list_copies(cache)


LOAD = """
import sys
from specdistill.targets.frozen import FrozenTarget
FrozenTarget.load(sys.argv[1])
"""


@pytest.mark.long  # starts two processes, which import torch
def test_two_processes_at_once_convert_a_file_once(
    tiny_gguf: Path, cache: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "HF_ASSETS_CACHE": str(tmp_path / "assets")}
    command = [
        sys.executable,
        "-c",
        f"import logging\nlogging.basicConfig(level='INFO')\n{LOAD}",
        str(tiny_gguf),
    ]
    processes = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    messages = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], messages
    assert sum("Converting" in message for message in messages) == 1
    assert len(list_copies(cache)) == 1 and not list(cache.glob(".*.partial"))
