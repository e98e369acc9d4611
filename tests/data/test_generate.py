"""`specdistill data` as a user runs it, by servers without the target's weights and in process: killed, resumed, the same rows."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from specdistill.data.answers import PATTERN
from specdistill.pico.corpus import CHAT_TEMPLATE
from tests.data.openai_server import Behaviour, OpenAIServer, running
from tests.launches import environment
from tests.scripts import specdistill, start_specdistill
from tests.tiny import input_keys, tiny_target_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a chat template, and conversations of two turns."""
    path = tmp_path_factory.mktemp("generate")
    tiny_target_model().save_pretrained(path / "model")
    tiny_tokenizer(CHAT_TEMPLATE).save_pretrained(path / "model")
    turns = [("user", "{}?"), ("assistant", "x"), ("user", "more"), ("assistant", "y")]
    rows = [
        {"messages": [{"role": role, "content": said.format(number)} for role, said in turns]} for number in range(100, 160)
    ]
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def command(folder: Path, cache: Path, servers: Sequence[OpenAIServer], *more: str) -> list[str]:
    addresses = ",".join(server.address for server in servers)
    keys = [key for key in input_keys(folder) if not key.startswith("data.cache_dir")]
    generated = [f"data.cache_dir={cache}", "data.regenerate.num_tokens=900", f"data.regenerate.server=[{addresses}]", *more]
    return ["data", "generate", "recipe=small/eagle3", *keys, *generated, "data.max_length=96", "data.regenerate.batch_size=2"]


def in_process(words: Sequence[str]) -> list[str]:
    """What generates as much without a server."""
    return [word for word in words if word != "generate" and "server" not in word and "batch_size" not in word]


def generate(folder: Path, cache: Path, *servers: OpenAIServer) -> subprocess.CompletedProcess[str]:
    return specdistill(*command(folder, cache, servers))


def answers(cache: Path) -> dict[str, list[int]]:
    found = {}
    for path in cache.glob(f"answers/*/{PATTERN}"):
        for line in path.read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            found["-".join(str(values[name]) for name in ("prompt", "turn", "temperature", "seed"))] = values["token_ids"]
    return found


@pytest.mark.long  # a process, and three generations
def test_a_killed_generation_goes_on_with_other_servers_to_the_same_rows(folder: Path, tmp_path: Path) -> None:
    with running() as made:
        whole = generate(folder, tmp_path / "whole", made)
    assert whole.returncode == 0, whole.stderr
    assert "for training and validation: " in whole.stdout and "kept" in whole.stderr
    again = specdistill(*(word for word in command(folder, tmp_path / "whole", [made]) if word != "generate"))
    assert again.returncode == 0, again.stderr  # training finds the rows, though the server is gone
    with running(Behaviour(seconds=0.05)) as one, running(Behaviour(seconds=0.05)) as two:
        with start_specdistill(*command(folder, tmp_path / "cut", [one])) as process:
            while len(answers_so_far := answers(tmp_path / "cut")) < 5 and process.poll() is None:
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
        kept = answers(tmp_path / "cut") if answers_so_far else {}
        assert len(kept) >= 5
        resumed = generate(folder, tmp_path / "cut", one, two)
        assert resumed.returncode == 0, resumed.stderr
        assert two.num_requests and max((one.answered + two.answered).values()) <= 2  # one more of what was in flight
    assert resumed.stdout == whole.stdout
    ended, expected = answers(tmp_path / "cut"), answers(tmp_path / "whole")
    assert {name: ended[name] for name in kept} == kept
    assert {name: ids for name, ids in ended.items() if name in expected} == {
        name: ids for name, ids in expected.items() if name in ended
    }


def test_what_cannot_be_generated_is_one_line(folder: Path, tmp_path: Path) -> None:
    with running(Behaviour(models=("a", "b"))) as made:
        several = generate(folder, tmp_path, made)
    *_, said = several.stderr.splitlines()
    assert several.returncode == 2 and said.startswith("error: data.regenerate.server: got http://127.0.0.1")
    gone = generate(folder, tmp_path, made)
    assert gone.returncode == 3 and "/v1/models does not answer" in gone.stderr and "Traceback" not in gone.stderr
    nobody = generate(folder, tmp_path)
    assert nobody.returncode == 2 and nobody.stderr.startswith("error: data.regenerate.server: got nothing"), nobody.stderr


@pytest.mark.long  # two processes, and two generations
def test_a_killed_generation_in_process_goes_on_behind_its_last_batch(folder: Path, tmp_path: Path) -> None:
    def data(cache: Path) -> list[str]:
        keys = [key for key in input_keys(folder) if not key.startswith("data.cache_dir")]
        generated = ["data.regenerate.num_tokens=3000", "data.regenerate.batch_size=4", f"data.cache_dir={cache}"]
        return [
            "data",
            "recipe=small/eagle3",
            *keys,
            *generated,
            "data.max_length=96",
            "target.dtype=float32",
            "train.bf16=false",
        ]

    whole = specdistill(*data(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    for least in (4, 20):
        with start_specdistill(*data(tmp_path / "cut")) as process:
            while len(answers(tmp_path / "cut")) < least and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        assert least <= len(answers(tmp_path / "cut")) < len(answers(tmp_path / "whole"))
    resumed = specdistill(*data(tmp_path / "cut"))
    assert resumed.returncode == 0 and resumed.stdout == whole.stdout
    assert answers(tmp_path / "cut") == answers(tmp_path / "whole")


FULL = """
mount -t tmpfs -o size=80k tmpfs "$1" || exit 99
shift; disk=$1; shift
"$@" 2> "$0.full"; echo $? > "$0.code"
mount -o remount,size=50m tmpfs "$disk"
exec "$@"
"""


@pytest.mark.long  # processes on a file system of their own
@pytest.mark.parametrize("by_server", [True, False])
def test_a_full_disk_ends_a_generation_in_one_line_and_it_goes_on_with_space(
    by_server: bool, folder: Path, tmp_path: Path
) -> None:
    """A file system of 80 KiB, in a mount namespace of its own."""
    if subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True, check=False
    ).returncode:
        pytest.skip("no mount namespaces on this machine")
    disk = tmp_path / "disk"
    disk.mkdir()
    with running() as made:
        servers = [made] if by_server else []

        def line(cache: Path) -> list[str]:
            forced = "data.force=true"  # or the estimate would already refuse it
            words = command(folder, cache, servers, "data.regenerate.num_tokens=5000", "target.dtype=float32", forced)
            return words if by_server else in_process(words)

        whole = specdistill(*line(tmp_path / "cache"))
        shell = ["unshare", "-rm", "sh", "-c", FULL, str(tmp_path / "run"), str(disk), str(disk)]
        mounted = [*shell, sys.executable, "-m", "specdistill", *line(disk / "cache")]
        resumed = subprocess.run(mounted, env=environment(), capture_output=True, text=True, check=False, timeout=300)
    assert whole.returncode == 0, whole.stderr
    said = (tmp_path / "run.full").read_text()
    assert (tmp_path / "run.code").read_text().strip() == "3" and "Traceback" not in said, said
    assert "No space left on device); free disk space, or set data.cache_dir" in said.splitlines()[-1]
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == whole.stdout


@pytest.mark.long  # two generations
@pytest.mark.parametrize("by_server", [True, False])
def test_a_generation_is_costed_before_it_is_paid(by_server: bool, folder: Path, tmp_path: Path) -> None:
    """The estimate of the first answers is near what comes of all; one that the disk has no room for ends, and keeps them."""

    def line(cache: Path, num_tokens: int, *more: str) -> subprocess.CompletedProcess[str]:
        words = command(folder, cache, [made], f"data.regenerate.num_tokens={num_tokens}", *more)
        return specdistill(*(words if by_server else in_process(words)))

    with running() as made:
        refused = line(tmp_path / "huge", 10**12)
        assert refused.returncode == 3, refused.stderr
        assert "\nerror: generating takes about " in refused.stderr and refused.stderr.endswith("(data.force=true)\n")
        assert 0 < len(answers(tmp_path / "huge")) < 1000
        done = line(tmp_path / "cache", 10_000)
    assert done.returncode == 0, done.stderr
    cells = (line.split("│")[1:-1] for line in done.stderr.splitlines() if "│ " in line)
    told = {cell[0].strip(): cell[1].strip().replace(",", "") for cell in cells}
    rows, tokens, loss_tokens = (float(told[name]) for name in ("rows", "tokens", "loss tokens"))
    found = answers(tmp_path / "cache")
    assert sum(map(len, found.values())) == pytest.approx(loss_tokens, rel=0.2)
    assert len(found) == pytest.approx(rows, rel=0.25) and tokens > loss_tokens
