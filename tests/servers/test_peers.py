"""The draft that a running server is said to have loaded: read from a Hub on loopback, it must be one for the target."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdistill.errors import UserError
from specdistill.methods.target_record import SECTION
from specdistill.project import ROOT
from specdistill.servers.peers import check_draft
from specdistill.targets.files import TargetFiles
from tests.loopback_hub import fetched, loopback_hub

DRAFT = "someone/tiny-draft"
OTHER = {"name_or_path": "someone/else", "revision": None, "adapter": None, "weights": "1" * 64, "tokenizer": "2" * 64}


def config(target: dict[str, Any]) -> bytes:
    return json.dumps({"architectures": ["LlamaForCausalLMEagle3"], SECTION: {"target": target}}).encode()


@pytest.mark.long
@pytest.mark.parametrize("made_for", ["pico", "another target"])
def test_a_draft_on_the_hub_is_checked_by_its_config_alone(made_for: str, tmp_path: Path) -> None:
    """With the right one the command goes on to the server, which nobody has started."""
    target = dataclasses.asdict(TargetFiles.of("pico").identity) if made_for == "pico" else OTHER
    keys = [
        "target=pico",
        "method=eagle3",
        "suite=pico",
        "eval.engine=vllm",
        "eval.server=http://127.0.0.1:9",
        f"draft={DRAFT}",
    ]
    with loopback_hub(tmp_path / "hub") as hub:
        hub.create(DRAFT, {"config.json": config(target), "model.safetensors": b"large"})
        command = [sys.executable, ROOT / "eval/run.py", *keys, f"output_dir={tmp_path / 'report'}"]
        surroundings = hub.environment(tmp_path / "home", token=None)
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120, env=surroundings, cwd=tmp_path
        )
    assert fetched(tmp_path / "home") == {"config.json"}
    said = result.stderr.strip().splitlines()[-1]
    if made_for == "pico":
        assert result.returncode == 3 and said.startswith("error: http://127.0.0.1:9/"), result.stderr
    else:
        assert result.returncode == 2 and "a draft for someone/else (weights 11111111, tokenizer 22222222)" in said, said
        assert said.startswith("error: eval.draft: got ") and "expected a draft for pico (" in said


def test_a_folder_is_checked_and_what_the_target_holds_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config(OTHER))
    target = TargetFiles.of("pico")
    with pytest.raises(UserError, match=r"^eval\.draft: got .*, a draft for someone/else"):
        check_draft(str(tmp_path), "eagle3", target)
    with pytest.raises(UserError, match=r"^eval\.draft: got /nowhere/draft, which is no folder"):
        check_draft("/nowhere/draft", "eagle3", target)
    check_draft(str(tmp_path), "mtp", target)
    check_draft(None, "eagle3", target)
