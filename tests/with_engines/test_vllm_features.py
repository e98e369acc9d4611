"""A feature store that a real vLLM fills: what it makes of pico agrees with our own pass, and a head trains from it offline."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdistill.project import PICO, ROOT
from tests.scripts import specdistill
from tests.with_engines.environments import serving

pytestmark = [pytest.mark.long, pytest.mark.engines]  # vLLM in its own environment

LAYERS = (2, 8, 13)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of vLLM with pico, with the connector."""
    folder = tmp_path_factory.mktemp("states")
    of = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*LAYERS, 16]}}
    extract = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": of}
    connector = {
        "kv_connector": "HiddenStatesOnCpu",
        "kv_connector_module_path": "hidden_states_on_cpu",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    options = ["--speculative-config", json.dumps(extract), "--kv-transfer-config", json.dumps(connector)]
    with serving(folder / "log", str(PICO), *options, python_path=Path(__file__).parent) as served:
        yield served


def command(folder: Path, *arguments: str) -> None:
    keys = ["recipe=pico/eagle3", "data.regenerate=null", f"data.source={folder / 'rows.jsonl'}", "data.max_length=128"]
    keys += [f"data.cache_dir={folder / 'cache'}", "data.validation_fraction=0.2", "data.decontaminate=[]", "train.bf16=false"]
    keys += ["train.max_steps=2", "train.eval_steps=2", "train.save_steps=2", "hidden_states.dtype=float32"]
    done = specdistill(*arguments, *keys)
    assert done.returncode == 0, done.stderr[-3000:]


def test_vllm_fills_a_store_as_the_target_does(address: str, tmp_path: Path) -> None:
    source = re.findall(r"(?s).{300}", (ROOT / "specdistill" / "decoding" / "decoder.py").read_text(encoding="utf-8"))
    rows = [json.dumps({"text": text}) for text in source[:24]]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for name, servers in (("own", []), ("vllm", [f"hidden_states.server=[{address}]"])):
        command(tmp_path, "data", "features", "hidden_states.mode=hybrid", f"hidden_states.path={tmp_path / name}", *servers)
    shards = sorted(path.name for path in (tmp_path / "own").glob("*.safetensors"))
    assert shards
    for shard in shards:
        own, other = (load_file(tmp_path / name / shard) for name in ("own", "vllm"))
        for name in ("input_ids", "document_lengths", "num_documents"):
            assert torch.equal(own[name], other[name])
        error = (own["features"] - other["features"]).norm(dim=-1) / own["features"].norm(dim=-1)
        assert error.max() < 1e-3, error.max()
        assert not torch.equal(own["features"], other["features"])
    trained = ["hidden_states.mode=offline", f"hidden_states.path={tmp_path / 'vllm'}", f"train.output_dir={tmp_path / 'run'}"]
    command(tmp_path, "train", *trained)
    assert (tmp_path / "run" / "draft" / "model.safetensors").exists()
