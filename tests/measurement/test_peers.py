"""The draft that a running server is said to have loaded: read from a Hub on loopback, it must be one for the target."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specdistill.errors import ExitCode
from specdistill.measurement.servers import check_draft
from specdistill.methods.target_record import SECTION
from specdistill.targets.files import TargetFiles
from tests.loopback_hub import fetched, loopback_hub
from tests.refusals import refused, refused_key
from tests.scripts import evaluate

DRAFT = "someone/tiny-draft"
OTHER = {"name_or_path": "someone/else", "revision": None, "adapter": None, "weights": "1" * 64, "tokenizer": "2" * 64}


def config(target: dict[str, Any]) -> bytes:
    return json.dumps({"architectures": ["LlamaForCausalLMEagle3"], SECTION: {"target": target}}).encode()


@pytest.mark.parametrize("made_for", ["pico", "another target"])
def test_a_draft_on_the_hub_is_checked_by_its_config_alone(
    made_for: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the right one the command goes on to the server, which nobody has started."""
    target = dataclasses.asdict(TargetFiles.of("pico").identity) if made_for == "pico" else OTHER
    keys = ["target=pico", "method=eagle3", "suite=pico", "eval.engine=vllm", "eval.server=http://127.0.0.1:9"]
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home", token=None):
        hub.create(DRAFT, {"config.json": config(target), "model.safetensors": b"large"})
        code = evaluate(*keys, f"draft={DRAFT}", f"output_dir={tmp_path / 'report'}")
    assert fetched(tmp_path / "home") == {"config.json"}
    error = capsys.readouterr().err
    if made_for == "pico":
        assert code == ExitCode.RESOURCE_ERROR and "http://127.0.0.1:9/" in error
    else:
        assert (code, refused_key(error)) == (ExitCode.USER_ERROR, "eval.draft")
        assert "11111111" in error and "22222222" in error


def test_a_folder_is_checked_and_what_the_target_holds_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config(OTHER))
    target = TargetFiles.of("pico")
    with refused("eval.draft", holds="someone/else"):
        check_draft(str(tmp_path), "eagle3", target)
    with refused("eval.draft", "/nowhere/draft"):
        check_draft("/nowhere/draft", "eagle3", target)
    check_draft(str(tmp_path), "mtp", target)
    check_draft(None, "eagle3", target)
