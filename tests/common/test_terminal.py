"""Commands print hostile names without steering the terminal, in any encoding."""

import io
import json
import logging
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from xml.etree import ElementTree

import pytest
import yaml

from specdistill.cli.main import main
from specdistill.common.errors import run_and_report
from specdistill.common.project import PICO
from specdistill.common.terminal import NOISE, guard
from specdistill.evaluation.report.files import compute_digest, write_report
from tests.simulated import simulate, simulated_report

EVIL = "\x1b]0;owned\x07\x9b2J\u202e\u2066\ufffe [link=http://evil.example]é[/link]"
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# A command that prints in all the ways in which commands print.
PRINTING_SCRIPT = """
import logging, sys
handler = logging.StreamHandler()  # as libraries make one when they are imported
from specdistill.common.errors import UserError, run_and_report
from specdistill.common.progress import show_progress
from specdistill.common.terminal import Console
from rich.text import Text
from tqdm import tqdm
def command():
    print(sys.argv[1])
    print("a", f"\\r{sys.argv[1]}", file=sys.stderr)
    handler.emit(logging.makeLogRecord({"msg": sys.argv[1]}))
    Console().print(sys.argv[1], Text("green", style="green"))
    for _ in tqdm([1], "fetching"):
        list(tqdm([1], "a file", leave=False))
    with show_progress("Measuring", 1, "rows") as advance:
        advance()
    raise UserError("suite", got=sys.argv[1], expected="x")
sys.exit(run_and_report(command))
"""


@pytest.fixture(scope="module")
def gate_arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments of `gate` for a report and rules with hostile names."""
    folder, records = tmp_path_factory.mktemp("report"), simulate(8)
    report = simulated_report(records)
    report["suite"]["name"] = report["target"]["model"] = report["created"] = EVIL
    report["digest"] = compute_digest(report, records)
    write_report(folder, report, records)
    rules = [
        {"metric": "speedup", "min": 1, "scope": {"category": EVIL}},
        {"metric": "speedup", "min": 1},
    ]
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    return ["gate", f"report={folder}", f"gates={folder / 'rules.yaml'}"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_hostile_names_steer_no_terminal_and_break_no_xml(
    gate_arguments, encoding, tmp_path, monkeypatch
):
    code, out, err = run_command([*gate_arguments, f"output_dir={tmp_path}"], encoding, monkeypatch)
    assert code == 1 and err == ""
    assert (
        "failed" in out
        and "[link=http://evil.example]" in out
        and ("é" if encoding == "utf-8" else "\\xe9") in out
    )
    assert not CONTROL_CHARACTERS.search(out)
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert "\ufffd]0;owned" in suite.findall("testcase")[0].get(
        "name", ""
    ) and "[link=" in suite.get("name", "")


def test_a_long_message_is_shortened(monkeypatch, tmp_path):
    """Messages of commands and those of a library's logging handler are shortened."""
    code, out, err = run_command(
        ["doctor", f"draft={'x' * 5000}", f"suite={'y' * 5000}"], "utf-8", monkeypatch
    )
    assert code == 2 and out == "" and err.startswith("error: suite: ")
    assert all(len(line) <= 1000 for line in err.splitlines())
    stream = io.StringIO()
    guard(stream, shortens=True)
    logging.StreamHandler(stream).emit(logging.makeLogRecord({"msg": f"a{'x' * 5000}z"}))
    line = stream.getvalue().removesuffix("\n")
    assert len(line) == 1000 and line[0] + line[-1] == "az"


@pytest.mark.long  # a plan imports torch
def test_json_is_whole_in_any_encoding(tmp_path, monkeypatch):
    target = tmp_path / "é\u202e"
    target.mkdir()
    shutil.copy(PICO / "config.json", target)
    code, out, _ = run_command(
        ["plan", f"target={target}", "hub=false", "--json"], "ascii", monkeypatch
    )
    assert code == 0 and json.loads(out)["target"]["model"] == str(target)


@pytest.mark.long  # imports DeepSpeed
def test_noise_of_libraries_is_not_shown(monkeypatch):
    """The noise is of DeepSpeed without a GPU, and of a Hub that does not answer.

    Other messages of these libraries are shown.
    """
    from deepspeed.accelerator import real_accelerator
    from huggingface_hub import close_session
    from huggingface_hub.utils._http import http_backoff, httpx2

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    for name in ("DeepSpeed", "huggingface_hub.utils._http"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler])
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    close_session()  # its client refuses requests, offline as every test
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)

    def command() -> int:
        real_accelerator.get_accelerator()
        with pytest.raises(httpx2.ConnectError):
            http_backoff("GET", "http://127.0.0.1:9", max_retries=1, base_wait_time=0)
        logging.getLogger("DeepSpeed").warning("something else")
        return 0

    assert run_and_report(command) == 0 and records == ["something else"]
    monkeypatch.setattr("specdistill.common.terminal.NOISE", dict.fromkeys(NOISE, "nothing at all"))
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    run_and_report(command)
    close_session()
    assert len(records) > 3  # so the messages above had been left out


def run_command(
    arguments: list[str], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a command whose streams have this encoding."""
    outputs = [io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2)]
    for name, output in zip(("stdout", "stderr"), outputs, strict=True):
        monkeypatch.setattr(sys, name, output)
    try:
        code = main(arguments)
    except SystemExit as exit_error:  # a script
        code = exit_error.code
    return code, *(output.detach().getvalue().decode(encoding) for output in outputs)


def run_on_a_terminal(*arguments: str) -> tuple[int, str]:
    """Return the exit code of Python with these arguments, and what a terminal gets from it."""
    terminal, process_end = pty.openpty()
    termios.tcsetwinsize(process_end, (40, 120))
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=process_end, stderr=process_end, stdin=process_end
    )
    os.close(process_end)
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError:  # its other end is closed
            return process.wait(), shown.decode()


def test_a_terminal_gets_colours_and_bars_but_no_hostile_sequences(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    code, shown = run_on_a_terminal("-c", PRINTING_SCRIPT, EVIL)
    assert code == 2 and shown.count("\ufffd]0;owned\ufffd") == 5 and "a \ufffd\ufffd]0" in shown
    assert (
        "\x1b[32mgreen\x1b[0m" in shown
        and "\rfetching: 100%" in shown
        and "1/1\x1b[0m rows" in shown
    )
    allowed_sequences = (
        r"\r\n|\x1b\[[\d;]*m|\x1b\[\?25[lh]|\x1b\[(2K|A)|\r(?=\x1b\[2K|fetching|a file| +\x1b)"
    )
    assert not CONTROL_CHARACTERS.search(re.sub(rf"\r(?= +\x1b\[A)|{allowed_sequences}", "", shown))
