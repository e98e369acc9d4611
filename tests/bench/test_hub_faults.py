"""The bench that breaks a Hub under publish and acquire: what it finds of a few faults, and that it notices what is not whole."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.finished_runs import finished_run
from tests.loopback_hub import loopback_hub
from tests.scripts import load_script

bench: Any = load_script("bench/hub_faults.py")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("finished"))


@pytest.mark.long  # commands that are killed and repeated
@pytest.mark.parametrize(("command", "transfer"), [("publish", "xet"), ("acquire", "lfs")])
def test_what_meets_faults_is_whole_and_done_when_repeated(released: Path, command: str, transfer: str, tmp_path: Path) -> None:
    found = bench.trials(tmp_path / "trials", released, command, transfer, 4, random.Random(5))
    assert (found["faults"], found["done"], found["found"]) == (4, 4, [])
    assert len(found["kinds"]) == 4 and set(found["ended"]) <= {"in one run", "refused", "killed"}
    assert "4 of 4" in bench.page({"hardware": {"name": "a machine"}, "ways": {command: found}})


def test_what_is_not_whole_is_noticed(tmp_path: Path) -> None:
    released = tmp_path / "run"
    for name in ("release/config.json", "release/README.md"):
        (released / name).parent.mkdir(parents=True, exist_ok=True)
        (released / name).write_bytes(b"{}")
    with loopback_hub(tmp_path / "hub") as hub:
        way = bench.publishing(hub, None, released)
        assert way.check(False, "") == [] and way.check(True, "") == ["done, and there is no repository"]
        hub.create(bench.NAME)
        assert way.check(False, "") == []
        hub.commit(bench.NAME, {"config.json": b"{}"})
        assert way.check(False, "") == ["half of a release: ['config.json']"]
        hub.create(bench.NAME, {"config.json": b"{}", "README.md": b"another"})
        assert way.check(False, "") == []
        hub.tag(bench.NAME, "v1")
        assert way.check(False, "") == ["a tag on other content"]
        hub.create(bench.NAME, {"config.json": b"{}", "README.md": b"{}"})
        assert way.check(True, "") == ["done, and the tags are {}"]
        (released / "draft").mkdir()
        (released / "draft/config.json").write_bytes(b"{}")
        way = bench.fetching(hub, None, released, tmp_path)
        assert way.check(True, str(released / "draft")) == [] and way.check(False, "a/path") == [
            "failed, and stdout says a/path"
        ]
        assert way.check(True, str(tmp_path)) == ["config.json is not what the Hub holds"]
