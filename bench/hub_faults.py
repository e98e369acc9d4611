"""Whether a draft that is published or fetched while things go wrong is whole: faults of a Hub on loopback, and kills (SIGKILL).

    python bench/hub_faults.py [num_faults=100]

Each trial runs `specdistill publish` or `specdistill acquire` until one fault has met it, each kind by turns, at a request or a moment
drawn at random, then the same command again until it is done, without a fault. After every command the Hub is looked at: a commit
holds all files of the release or none, a tag is on a commit that does; and what was fetched is, byte for byte, what the Hub holds.
Large files move by classic LFS in half of the trials and by Xet in the others. So that a hundred faults take minutes, the commands
are children of a process that has imported the package and decoded the prompts that `publish` decodes again, and the client does not
wait between its own tries.

Writes bench/results/hub_faults.json and the table in docs/release.md.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from specdistill.command import run
from specdistill.errors import ExitCode
from specdistill.measurement.hardware import hardware
from specdistill.project import ROOT
from specdistill.recipe.fields import Section, option
from specdistill.report.text import table, write_between

sys.path.insert(0, str(ROOT))  # the tests' Hub
from tests.finished_runs import finished_run
from tests.loopback_hub import Fault, Hub, loopback_hub

RESULTS = Path(__file__).with_name("results") / "hub_faults.json"
PAGE = ROOT / "docs" / "release.md"
NAME, TAG, ASIDE = "someone/draft", "v1", "someone-else.txt"
MOST_TRIES = 4
# Requests whose answers, or whose bodies, are files: where a byte may be another one without TLS or JSON noticing.
CARRY_FILES = {"upload", "commit", "resolve", "download"}
MOMENT, CHUNKS = "killed at a moment", "other bytes in Xet's chunks"
FAULTS = {
    "an error once": Fault("status", ""),
    "errors for longer than the client tries": Fault("status", "", times=9),
    "connection cut": Fault("cut", ""),
    "answer lost": Fault("lost", ""),
    "another byte": Fault("corrupt", ""),
    "slow": Fault("slow", "", seconds=0.1),
    "another commit in between": Fault("conflict", ""),
    "killed during a request": Fault("call", ""),
    "killed after a request": Fault("lost", ""),
}
# Runs one command itself, then those that it is told, each in a child of its own, and says their process ids and exit codes.
PARENT = """
import json, os, sys, time
import specdistill.hub.acquire, specdistill.hub.publish
from specdistill.cli import main
from specdistill.hub import evidence

sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.01))
checked, check = [], evidence.spot_check

def check_once(*given, **options):
    checked[:] = checked or [check(*given, **options)]
    return checked[0]

evidence.spot_check = check_once
out = os.dup(1)
os.dup2(2, 1)
assert main(json.loads(sys.argv[1])) == 0
os.dup2(out, 1)
for line in sys.stdin:
    child = os.fork()
    if not child:
        arguments, out, err = json.loads(line)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Options(Section):
    num_faults: int = option(100, "trials, shared out over the two commands by LFS and by Xet", ge=4)
    seed: int = option(0, "of the faults and moments", ge=0)
    output_dir: str = option("runs/hub_faults", "folder of the runs, emptied first")


@dataclass
class Parent:
    """Runs commands, one at a time, in children that can be killed."""

    process: subprocess.Popen[str]
    folder: Path
    child: int | None = None

    def run(self, arguments: Sequence[str], seconds: float | None = None) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of a command; killed after that many seconds, and then the code is -9."""
        assert self.process.stdin and self.process.stdout
        out, err = self.folder / "out", self.folder / "err"
        self.process.stdin.write(json.dumps([list(arguments), str(out), str(err)]) + "\n")
        self.process.stdin.flush()
        self.child = int(self.process.stdout.readline())
        timer = None if seconds is None else threading.Timer(seconds, self.kill)
        if timer:
            timer.start()
        code = int(self.process.stdout.readline())
        self.child = None
        if timer:
            timer.cancel()
        return code, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")

    def kill(self) -> None:
        if self.child is not None:
            with suppress(ProcessLookupError):
                os.kill(self.child, signal.SIGKILL)


@contextmanager
def parent(hub: Hub, folder: Path, first: Sequence[str]) -> Iterator[Parent]:
    """first: the command that it runs itself."""
    environment = {**hub.environment(folder / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PARENT, json.dumps(first)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=folder) as process:
        try:
            yield Parent(process, folder)
        finally:
            process.kill()


@dataclass
class Way:
    """One of the two commands by one kind of transfer. files: what a release, or what is fetched, consists of."""

    hub: Hub
    commands: Parent
    arguments: Sequence[str]
    reset: Callable[[], None]
    check: Callable[[bool, str], list[str]]
    asked: list[tuple[str, str]] = field(default_factory=list)  # (route, method) of each request of an undisturbed run
    seconds: float = 0.0

    def measure(self) -> None:
        """Run it undisturbed, once without a clock, for its parent to be ready."""
        self.reset()
        self.commands.run(self.arguments)
        self.reset()
        start, first = time.monotonic(), len(self.hub.requests)
        code, out, err = self.commands.run(self.arguments)
        assert code == 0 and not self.check(True, out), err
        self.seconds = time.monotonic() - start
        self.asked = [(request.route, request.method) for request in self.hub.requests[first:]]

    def trial(self, kind: str, draw: random.Random) -> dict[str, Any]:
        """One fault, and the command repeated until it is done. What met no fault, as a moment after its end, is no trial."""
        while True:
            self.reset()
            self.hub.faults.clear()
            met = len(self.hub.faults.met)
            undo, moment = self._begin(kind, draw)
            is_injected = bool(self.hub.faults.waiting)
            # A header in which a byte is another one may be the author's mistake as well.
            first, found = self._run(
                moment, (ExitCode.RESOURCE_ERROR, ExitCode.USER_ERROR) if "byte" in kind else (ExitCode.RESOURCE_ERROR,)
            )
            if first or (moment is None and len(self.hub.faults.met) - met >= is_injected):
                break
        code, tries = first, 1
        self.hub.faults.clear()
        undo()
        while code and tries < MOST_TRIES:
            code, more = self._run()
            found, tries = found + more, tries + 1
        ended = "in one run" if first == 0 else "killed" if first < 0 else "refused"
        return {"fault": kind, "ended": ended, "tries": tries, "done": code == 0, "found": found}

    def _run(self, moment: float | None = None, expected: Sequence[int] = (ExitCode.RESOURCE_ERROR,)) -> tuple[int, list[str]]:
        """The exit code of the command, and what is not as it should be after it."""
        code, out, err = self.commands.run(self.arguments, moment)
        found = self.check(code == 0, out)
        last = (err.strip().splitlines() or [""])[-1]
        if code not in (0, -signal.SIGKILL) and not (code in expected and "error: " in last):
            found.append(f"exit code {code}: {err.strip()[-300:]}")
        return code, found

    def _begin(self, kind: str, draw: random.Random) -> tuple[Callable[[], None], float | None]:
        """What ends a fault, and the second in which to kill."""

        def nothing() -> None:
            pass

        if kind == MOMENT:
            return nothing, draw.uniform(0, self.seconds)
        if kind == CHUNKS:
            assert self.hub.cas
            self.hub.cas.damage()
            return self.hub.cas.damage, None  # twice, and they are as they were
        fault = FAULTS[kind]
        number = draw.choice([number for number, (route, method) in enumerate(self.asked) if meets(fault, route, method)])
        route, _ = self.asked[number]
        skip = sum(before == route for before, _ in self.asked[:number])
        call = self.commands.kill if kind.startswith("killed") else None
        self.hub.inject(replace(fault, route=route, skip=skip, status=draw.choice((429, 500, 502, 503)), call=call))
        return nothing, None

    def kinds(self) -> list[str]:
        """The faults that it may meet."""
        chunks = [CHUNKS] if self.hub.cas and self.arguments[0] == "acquire" else []
        return [kind for kind, fault in FAULTS.items() if any(meets(fault, *asked) for asked in self.asked)] + [MOMENT, *chunks]


def meets(fault: Fault, route: str, method: str) -> bool:
    """Whether a fault can strike a request: another byte, where the body is a file; another commit, before a commit."""
    if fault.kind == "corrupt":
        return route in CARRY_FILES and method != "HEAD"
    return fault.kind != "conflict" or route == "commit"


def publishing(hub: Hub, commands: Parent, released: Path) -> Way:
    names: set[str] = set()

    def reset() -> None:
        hub.repositories.clear()
        for folder in (hub.objects.folder, *([hub.cas.folder] if hub.cas else [])):
            shutil.rmtree(folder)
            folder.mkdir()

    def check(done: bool, _: str) -> list[str]:
        found = []
        if NAME not in hub.repositories:
            return ["done, and there is no repository"] if done else []
        staged = contents(released / "release")
        names.update(staged)
        for commit in hub.commits(NAME):
            files = {path: file.read_bytes() for path, file in hub.files(NAME, commit).items()}
            sent = files.keys() - {ASIDE, ".gitattributes"}
            if sent and sent != names:
                found.append(f"half of a release: {sorted(sent)}")
            if commit in hub.tags(NAME).values() and {name: files.get(name) for name in staged} != staged:
                found.append("a tag on other content")
        if done and list(hub.tags(NAME)) != [TAG]:
            found.append(f"done, and the tags are {hub.tags(NAME)}")
        return found

    return Way(hub, commands, publish_of(released), reset, check)


def publish_of(released: Path) -> list[str]:
    return ["publish", f"run={released}", f"repo={NAME}", "baseline=none"]


def fetching(hub: Hub, commands: Parent, released: Path, target: Path) -> Way:
    hub.create(NAME, contents(released / "draft", as_paths=True))
    hub.tag(NAME, TAG)

    def reset() -> None:
        shutil.rmtree(commands.folder / "home", ignore_errors=True)

    def check(done: bool, out: str) -> list[str]:
        if not done:
            return [f"failed, and stdout says {out}"] if out else []
        held = {name: path.read_bytes() for name, path in hub.files(NAME, TAG).items()}
        fetched = contents(Path(out.strip()))
        return [f"{name} is not what the Hub holds" for name in held if fetched.get(name) != held[name]]

    arguments = ["acquire", "method=draft_model", f"target={target}", f"draft={NAME}@{TAG}"]
    return Way(hub, commands, arguments, reset, check)


def contents(folder: Path, *, as_paths: bool = False) -> dict[str, Any]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path if as_paths else path.read_bytes() for path in found}


def trials(
    folder: Path, released: Path, command: str, transfer: Literal["lfs", "xet"], count: int, draw: random.Random
) -> dict[str, Any]:
    """What became of a command under so many faults."""
    folder.mkdir(parents=True)
    start = time.monotonic()
    first = [*publish_of(released), "dry_run=true"] if command == "publish" else ["--version"]
    with loopback_hub(folder / "hub", transfer) as hub, parent(hub, folder, first) as commands:
        way = (
            publishing(hub, commands, released)
            if command == "publish"
            else fetching(hub, commands, released, released.parent / "target")
        )
        way.measure()
        kinds = way.kinds()
        made = [way.trial(kinds[number % len(kinds)], draw) for number in range(count)]
    found = [f"{one['fault']}: {what}" for one in made for what in one["found"]]
    print(
        f"{command} by {transfer}: {count} faults, {dict(Counter(one['ended'] for one in made))}, {found or 'all whole'}",
        flush=True,
    )
    return {
        "faults": count,
        "kinds": dict(sorted(Counter(one["fault"] for one in made).items())),
        "ended": dict(sorted(Counter(one["ended"] for one in made).items())),
        "done": sum(one["done"] for one in made),
        "most tries": max(one["tries"] for one in made),
        "found": found,
        "requests": len(way.asked),
        "seconds": round(time.monotonic() - start, 1),
    }


def main(options: Options) -> ExitCode:
    folder = Path(options.output_dir).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    released = finished_run(folder / "finished")
    draw, ways = random.Random(options.seed), {}
    counts = [options.num_faults // 4 + (index < options.num_faults % 4) for index in range(4)]
    for count, (command, transfer) in zip(
        counts, [(c, t) for c in ("publish", "acquire") for t in ("lfs", "xet")], strict=True
    ):
        ways[f"{command}, {'classic LFS' if transfer == 'lfs' else 'Xet'}"] = trials(
            folder / f"{command}-{transfer}", released, command, transfer, count, draw
        )
    made = {"hardware": hardware(torch.device("cpu")), "ways": ways}
    RESULTS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    write_between(PAGE, "hub_faults", page(made))
    whole = all(not way["found"] and way["done"] == way["faults"] for way in ways.values())
    return ExitCode.DONE if whole else ExitCode.CHECK_FAILED


def page(made: dict[str, Any]) -> str:
    lines = []
    for name, way in made["ways"].items():
        ended = [str(way["ended"].get(kind, 0)) for kind in ("in one run", "refused", "killed")]
        lines.append((name, str(way["faults"]), *ended, f"{way['done']} of {way['faults']}", str(len(way["found"]))))
    columns = ("", "faults", "met and done all the same", "ended with an error", "killed", "done when repeated", "not whole")
    return f"{made['hardware']['name']}:\n\n{table(columns, lines)}"


if __name__ == "__main__":
    sys.exit(run(main, Options))
