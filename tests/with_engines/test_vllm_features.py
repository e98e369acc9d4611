"""A real vLLM fills a feature store, from which a head trains offline.

The hidden states of pico agree with those of our own pass. Those that vLLM returns with a
completion agree with those of a later request for the same text, and save that request.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdistill.common.project import PICO, ROOT
from tests.scripts import specdistill
from tests.with_engines.environments import serving

pytestmark = [pytest.mark.long, pytest.mark.engines]  # vLLM in its own environment

LAYERS = (2, 8, 13)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that vLLM writes hidden states to, and its log."""
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def address(states: Path) -> Iterator[str]:
    """The address of a vLLM with pico that writes hidden states."""
    draft_config = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*LAYERS, 16]}}
    extract = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": draft_config,
    }
    connector = {
        "kv_connector": "HiddenStatesOnCpu",
        "kv_connector_module_path": "hidden_states_on_cpu",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(states)},
    }
    options = [
        "--speculative-config",
        json.dumps(extract),
        "--kv-transfer-config",
        json.dumps(connector),
    ]
    with serving(states / "log", str(PICO), *options, python_path=Path(__file__).parent) as served:
        yield served


def run_command(folder: Path, *arguments: str, regenerate: str = "null") -> str:
    """Run a command on the rows of a folder and return what it printed to stderr."""
    keys = [
        "recipe=pico/eagle3",
        f"data.regenerate={regenerate}",
        f"data.source={folder / 'rows.jsonl'}",
        "data.max_length=128",
    ]
    keys += [
        f"data.cache_dir={folder / 'cache'}",
        "data.validation_fraction=0.2",
        "data.decontaminate=[]",
        "train.bf16=false",
    ]
    keys += [
        "train.max_steps=2",
        "train.eval_steps=2",
        "train.save_steps=2",
        "hidden_states.dtype=float32",
    ]
    done = specdistill(*arguments, *keys)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def test_vllm_fills_a_store_as_the_target_does(address: str, tmp_path: Path) -> None:
    source = re.findall(
        r"(?s).{300}",
        (ROOT / "specdistill" / "decoding" / "decoder.py").read_text(encoding="utf-8"),
    )
    rows = [json.dumps({"text": text}) for text in source[:24]]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for name, servers in (("own", []), ("vllm", [f"hidden_states.server=[{address}]"])):
        run_command(
            tmp_path,
            "data",
            "features",
            "hidden_states.mode=hybrid",
            f"hidden_states.path={tmp_path / name}",
            *servers,
        )
    shards = sorted(path.name for path in (tmp_path / "own").glob("*.safetensors"))
    assert shards
    for shard in shards:
        own, other = (load_file(tmp_path / name / shard) for name in ("own", "vllm"))
        for name in ("input_ids", "document_lengths", "num_documents"):
            assert torch.equal(own[name], other[name])
        error = (own["features"] - other["features"]).norm(dim=-1) / own["features"].norm(dim=-1)
        assert error.max() < 1e-3, error.max()
        assert not torch.equal(own["features"], other["features"])
    trained = [
        "hidden_states.mode=offline",
        f"hidden_states.path={tmp_path / 'vllm'}",
        f"train.output_dir={tmp_path / 'run'}",
    ]
    run_command(tmp_path, "train", *trained)
    assert (tmp_path / "run" / "draft" / "model.safetensors").exists()


def test_rows_and_features_in_one_request_are_those_of_two(
    address: str, states: Path, tmp_path: Path
) -> None:
    questions = [
        "What does `map` do?",
        "And `zip`?",
        "Sort a list.",
        "Read a file.",
        "Count words.",
        "Sum two numbers.",
    ]
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "?"}]}
        for text in questions
    ]
    rows += [
        {"text": text}
        for text in re.findall(r"(?s).{300}", Path(__file__).read_text(encoding="utf-8"))
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    regenerate = (
        "{num_tokens: 1500, prompt_tokens: 16, temperatures: [0.0], filter: [], server:"
        f" [{address}]}}"
    )

    def num_requests() -> int:
        return (states / "log").read_text().count("POST /v1/completions")

    def run_data(verb: str, name: str) -> tuple[str, int]:
        """Run `data make` or `data features`; return its output and its number of requests."""
        keys, before = (
            ["hidden_states.mode=hybrid", f"hidden_states.path={tmp_path / name}"],
            num_requests(),
        )
        keys.append(f"hidden_states.server=[{address}]")
        return (
            run_command(tmp_path, "data", verb, *keys, regenerate=regenerate),
            num_requests() - before,
        )

    run_data("make", "one")
    num_generated = len(list((tmp_path / "one" / "generated").iterdir()))
    assert num_generated > 10 and not list(states.glob("*.safetensors*"))
    printed, num_asked = run_data("features", "one")
    # The hidden states of the first row are requested again, to compare them.
    assert "kept while generating" in printed and 0 < num_asked < num_generated / 2
    _, num_asked = run_data("features", "two")
    shards = sorted(path.name for path in (tmp_path / "two").glob("*.safetensors"))
    assert shards and not (tmp_path / "one" / "generated").exists()
    # A generated document that no packed row has room for is not requested.
    num_packed = sum(
        int(load_file(tmp_path / "two" / shard)["num_documents"].sum()) for shard in shards
    )
    assert 10 < num_packed <= num_asked
    for shard in shards:
        one, two = (load_file(tmp_path / name / shard) for name in ("one", "two"))
        for name in ("input_ids", "document_lengths", "num_documents"):
            assert torch.equal(one[name], two[name])
        place, documents = 0, iter(one["document_lengths"].tolist())
        for count in one["num_documents"].tolist():
            lengths = [next(documents) for _ in range(count)]
            found, expected = (
                it["features"][place : place + 4 * sum(lengths)]
                .view(4, sum(lengths), -1)
                .split(lengths, dim=1)
                for it in (one, two)
            )
            place += 4 * sum(lengths)
            for own, other in zip(found, expected, strict=True):
                error = (own - other).norm(dim=-1) / other.norm(dim=-1)
                assert error[:, :-1].max() < 1e-3, error.max()
                assert not own[:, -1].any() and other[:, -1].any()
