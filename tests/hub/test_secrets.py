"""A planted token is in nothing that commands print, log or write, and is sent to the Hub alone."""

import json
import logging
import shutil
from pathlib import Path
from unittest import mock

import pytest
from huggingface_hub import constants

from specdistill.cli.main import main
from tests.hub.conftest import NAME
from tests.loopback_hub import Fault, Hub, loopback_hub

pytestmark = pytest.mark.xdist_group("measured run")  # one worker measures


def find_files_with(secret: str, folder: Path) -> list[str]:
    """Return the files in a folder that contain the secret; links are followed."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    )


def run_verb(verb: str, *arguments: str) -> int:
    """Run a verb with tracebacks of its errors, and return its exit code."""
    try:
        return main([verb, *arguments, "debug=true"])
    except SystemExit as exit_error:
        return int(exit_error.code or 0)


@pytest.mark.long  # every command
def test_a_planted_token_is_found_nowhere_else(
    measured_run: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One token is in HF_TOKEN, and another one where `hf auth login` stores it."""
    client_logger = logging.getLogger("huggingface_hub")  # it does not propagate to the root logger
    monkeypatch.setattr(client_logger, "handlers", [caplog.handler])
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, client_logger.name)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    home, target, stored_token = (
        tmp_path / "home",
        measured_run.parent / "target",
        Hub.token.swapcase().replace("HF_", "hf_"),
    )
    run_folder = shutil.copytree(measured_run, tmp_path / "run")
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"text {n} " * 9}) + "\n" for n in range(8))
    )
    home.mkdir()
    (home / "token").write_text(stored_token)
    with (
        loopback_hub(tmp_path / "hub") as hub,
        hub.client(home),
        mock.patch.object(constants, "HF_DEBUG", True),
    ):
        publish_command = ["publish", f"run={run_folder}", f"repo={NAME}", "baseline=none"]
        hub.inject(Fault("status", "whoami", status=401))
        assert run_verb(*publish_command) == 3
        hub.inject(Fault("status", "commit", status=403))
        assert run_verb(*publish_command) == 3
        assert run_verb(*publish_command) == 0
        acquire_command = ["acquire", "method=draft_model", f"target={target}", f"draft={NAME}@v1"]
        hub.inject(Fault("status", "tree", status=403))
        assert run_verb(*acquire_command) == 3
        assert run_verb(*acquire_command) == 0
        assert run_verb(
            "gate", f"report={run_folder / 'report'}", "gates=release", f"baseline={NAME}@v1"
        ) in (0, 1, 4)
        assert run_verb("doctor", f"draft={NAME}", f"target={target}", "decode=false") in (0, 1)
        keys = [
            f"target.model={target}",
            f"data.source={tmp_path / 'texts.jsonl'}",
            f"train.output_dir={tmp_path / 'trained'}",
        ]
        keys += [
            "data.max_length=32",
            "train.max_steps=1",
            "train.per_device_train_batch_size=1",
            "train.report_to=none",
        ]
        assert (
            run_verb(
                "train",
                "method=eagle3",
                *keys,
                "data.validation_fraction=0.2",
                "data.decontaminate=[]",
            )
            == 0
        )
    output = capfd.readouterr()
    everything = output.out + output.err + caplog.text
    assert hub.token not in everything and stored_token not in everything
    # the output that was searched has logs and tracebacks
    assert "<TOKEN>" in everything and "Traceback" in output.err
    written_files = (
        "run/release/README.md",
        "run/report/release/report.html",
        "trained/draft/config.json",
    )
    assert all((tmp_path / path).is_file() for path in written_files)
    assert find_files_with(hub.token, tmp_path) == [] and find_files_with(
        stored_token, tmp_path
    ) == ["home/token"]
    assert {request.token for request in hub.requests} == {None, hub.token}
    assert {
        request.token for request in hub.requests if request.headers["host"].startswith("localhost")
    } == {None}
