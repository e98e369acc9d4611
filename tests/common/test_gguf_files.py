"""The metadata of GGUF files, compared with gguf's own reader, and broken files."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from specdistill.common.gguf_files import MAX_ARRAY_LENGTH, MetadataReader, check_gguf, open_gguf
from specdistill.common.project import PICO
from tests.gguf_writer import write_gguf
from tests.refusals import refused

KEY = "target.model"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(PICO, tmp_path_factory.mktemp("gguf") / "pico.gguf", "q8_0")


def write_metadata(path: Path, values: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_reader_agrees_with_gguf_except_for_the_contents_of_a_vocabulary(
    tmp_path: Path,
) -> None:
    values = {
        "general.name": "a name",
        "llama.block_count": 3,
        "llama.head_counts": [1, 2, 3],
        "llama.scales": [0.5, 1.5],
        "tokenizer.ggml.tokens": ["é", "", "longer than one"],
        "tokenizer.ggml.scores": [float(i) for i in range(MAX_ARRAY_LENGTH + 1)],
        "llama.after": 7,
    }
    path = write_metadata(tmp_path / "model.gguf", values)
    ours = MetadataReader(path)
    expected = gguf.GGUFReader(path)
    assert ours.fields.keys() == expected.fields.keys()
    for name, field in expected.fields.items():
        contents = field.contents()
        if name == "tokenizer.ggml.tokens":
            contents = ["", "", ""]
        if name == "tokenizer.ggml.scores":
            contents = []
        assert ours.fields[name].contents() == contents, name
        assert ours.fields[name].types == field.types, name
    assert [tensor.name for tensor in ours.tensors] == [tensor.name for tensor in expected.tensors]
    for tensor, other in zip(ours.tensors, expected.tensors, strict=True):
        assert np.array_equal(tensor.data, other.data)


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "model.gguf", {"general.name": "one"})
    reader = open_gguf(path)
    assert open_gguf(path) is reader
    write_metadata(path, {"general.name": "another"})
    assert open_gguf(path).fields["general.name"].contents() == "another"


def test_a_file_that_was_cut_short_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    """Files are cut in the weights, the vocabulary, and anywhere in the metadata of a small one."""
    whole = gguf_file.read_bytes()
    small = write_metadata(
        tmp_path / "small.gguf",
        {"general.name": "a", "llama.counts": [1, 2], "llama.names": ["a", "bc"]},
    )
    beginnings = [small.read_bytes()[:size] for size in range(4, small.stat().st_size)]
    short = tmp_path / "short.gguf"
    for content in (whole[:10_000], whole[:-100], *beginnings):
        short.write_bytes(content)
        with refused(KEY, short, holds="cut short"):
            check_gguf(short, KEY)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    for number, content in enumerate(
        (b"", b"GG", b'{"a": 1}', b"version https://git-lfs.github.com/spec/v1")
    ):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        with refused(KEY, path, holds="no GGUF file"):
            check_gguf(path, KEY)


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "model-00001-of-00003.gguf", {"split.count": 3})
    with refused(KEY, path, holds="one of 3 parts"):
        check_gguf(path, KEY)
    check_gguf(write_metadata(tmp_path / "whole.gguf", {"split.count": 1}), KEY)


def test_commands_refuse_a_short_file_before_torch_is_imported(
    gguf_file: Path, tmp_path: Path
) -> None:
    """The refusal takes two seconds; importing torch and transformers alone takes longer."""
    short = tmp_path / "short.gguf"
    short.write_bytes(gguf_file.read_bytes()[:-100])
    keys = {
        f"train recipe=small/eagle3 target.model={short}": "target.model",
        f"plan target={short}": "target",
        f"eval method=ngram target=pico eval.engine=llama.cpp eval.llama_cpp.model={short}": (
            "eval.llama_cpp.model"
        ),
        f"compare target={short} drafts=ngram output_dir=runs/c": "target",
    }
    script = (
        "import sys; sys.modules['torch'] = None; from specdistill.cli.main import main\n"
        "for command in sys.argv[1:]: main(command.split())"
    )
    process = subprocess.run([sys.executable, "-c", script, *keys], capture_output=True, text=True)
    lines = process.stderr.splitlines()
    for line, key in zip(lines, keys.values(), strict=True):
        assert line.startswith(f"error: {key}: got {short}, which is cut short"), line
