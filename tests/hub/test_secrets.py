"""A planted token, searched for everywhere: what commands print and log, what they write, what they
send, and to whom."""

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


def places_with(secret: str, folder: Path) -> list[str]:
    """The files of a folder, followed links included, that hold it."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    )


def run(verb: str, *arguments: str) -> int:
    """The exit code of a verb, with the traceback of what goes wrong."""
    try:
        return main([verb, *arguments, "debug=true"])
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.long  # every command
def test_a_planted_token_is_found_nowhere_else(
    measured: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One in HF_TOKEN, and one where `hf auth login` keeps it."""
    of_the_client = logging.getLogger("huggingface_hub")  # it tells no other
    monkeypatch.setattr(of_the_client, "handlers", [caplog.handler])
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, of_the_client.name)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    home, target, kept = (
        tmp_path / "home",
        measured.parent / "target",
        Hub.token.swapcase().replace("HF_", "hf_"),
    )
    finished = shutil.copytree(measured, tmp_path / "run")
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"text {n} " * 9}) + "\n" for n in range(8))
    )
    home.mkdir()
    (home / "token").write_text(kept)
    with (
        loopback_hub(tmp_path / "hub") as hub,
        hub.client(home),
        mock.patch.object(constants, "HF_DEBUG", True),
    ):
        published = ["publish", f"run={finished}", f"repo={NAME}", "baseline=none"]
        hub.inject(Fault("status", "whoami", status=401))
        assert run(*published) == 3
        hub.inject(Fault("status", "commit", status=403))
        assert run(*published) == 3
        assert run(*published) == 0
        acquired = ["acquire", "method=draft_model", f"target={target}", f"draft={NAME}@v1"]
        hub.inject(Fault("status", "tree", status=403))
        assert run(*acquired) == 3
        assert run(*acquired) == 0
        assert run(
            "gate", f"report={finished / 'report'}", "gates=release", f"baseline={NAME}@v1"
        ) in (0, 1, 4)
        assert run("doctor", f"draft={NAME}", f"target={target}", "decode=false") in (0, 1)
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
            run(
                "train",
                "method=eagle3",
                *keys,
                "data.validation_fraction=0.2",
                "data.decontaminate=[]",
            )
            == 0
        )
    said = capfd.readouterr()
    everything = said.out + said.err + caplog.text
    assert hub.token not in everything and kept not in everything
    # what logs and tracebacks there are was looked through
    assert "<TOKEN>" in everything and "Traceback" in said.err
    written = (
        "run/release/README.md",
        "run/report/release/report.html",
        "trained/draft/config.json",
    )
    assert all((tmp_path / path).is_file() for path in written)
    assert places_with(hub.token, tmp_path) == [] and places_with(kept, tmp_path) == ["home/token"]
    assert {request.token for request in hub.requests} == {None, hub.token}
    assert {
        request.token for request in hub.requests if request.headers["host"].startswith("localhost")
    } == {None}
