"""`specdistill data` as a user runs it: in shards, killed, on a full disk, and by servers."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from datasets import Dataset

from recipes.pico.corpus import CHAT_TEMPLATE
from specdistill.data.rows.row_set import MANIFEST
from tests.data.produce.openai_server import Behaviour, running
from tests.data.produce.row_sets import chat, contents
from tests.kills import check_survives_kills
from tests.launches import environment
from tests.refusals import refused_key
from tests.scripts import specdistill
from tests.tiny import input_keys, tiny_target_model, tiny_tokenizer

WAYS = pytest.mark.parametrize("by_server", [True, False])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny target with a chat template and conversations of two turns."""
    path = tmp_path_factory.mktemp("make")
    tiny_target_model().save_pretrained(path / "model")
    tiny_tokenizer(CHAT_TEMPLATE).save_pretrained(path / "model")
    rows = [chat(f"{number}?", "x", "more", "y") for number in range(100, 160)]
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@contextmanager
def prepare_generation(by_server: bool, seconds: float = 0.0) -> Iterator[list[str]]:
    """Yield the keys of a way to generate: by a server, or with the target in this process."""
    if not by_server:
        yield ["data.regenerate.batch_size=4", "target.dtype=float32", "train.bf16=false"]
        return
    with running(Behaviour(seconds=seconds)) as server:
        yield [f"data.regenerate.server=[{server.address}]", "data.regenerate.batch_size=2"]


def build_arguments(
    folder: Path,
    cache: Path,
    way: Sequence[str],
    *more: str,
    verb: str = "make",
    num_tokens: int = 9000,
) -> list[str]:
    keys = [key for key in input_keys(folder) if not key.startswith("data.cache_dir")]
    generated = [
        f"data.cache_dir={cache}",
        f"data.regenerate.num_tokens={num_tokens}",
        "data.max_length=96",
    ]
    return ["data", verb, "recipe=small/eagle3", *keys, *generated, *way, *more]


def read_row_set(cache: Path) -> dict[str, bytes]:
    (manifest,) = cache.glob(f"rows/*/{MANIFEST}")
    return contents(manifest.parent)


def make_row_set(folder: Path, cache: Path, way: Sequence[str]) -> dict[str, bytes]:
    done = specdistill(*build_arguments(folder, cache, way))
    assert done.returncode == 0 and "The rows are in " in done.stdout, done.stderr
    return read_row_set(cache)


def test_a_merge_of_one_shard_is_refused(folder: Path, tmp_path: Path) -> None:
    done = specdistill(
        *build_arguments(folder, tmp_path / "cut", [], "data.shard=1/3", verb="merge")
    )
    assert done.returncode == 2 and refused_key(done.stderr) == "data.shard", done.stderr


def test_few_prompts_whose_answers_are_all_dropped_name_the_rule(
    folder: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"How much is {n} and {n}?", "response": str(2 * n)} for n in range(6)]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    with running(Behaviour(text=lambda digest: "ab" * 30)) as server:
        way = [f"data.regenerate.server=[{server.address}]", "data.regenerate.filter=[looping]"]
        # Without randomness a prompt is used once.
        keys = [f"data.source={source}", "data.regenerate.temperatures=[0.0]"]
        done = specdistill(*build_arguments(folder, tmp_path / "cache", way, *keys))
    assert done.returncode == 2 and refused_key(done.stderr) == "data.regenerate.filter"
    assert "rules that dropped all 6 answers" in done.stderr, done.stderr


@pytest.mark.parametrize("verb", ["make", "show", "features"])
def test_a_mask_that_ends_texts_is_refused_before_anything_is_generated(
    verb: str, folder: Path, tmp_path: Path
) -> None:
    """The method is a block drafter, and token 0 ends a generation."""
    keys = [
        "method=dflash",
        "draft.mask_token_id=0",
        f"hidden_states.path={tmp_path / 'store'}",
        "hidden_states.mode=hybrid",
    ]
    arguments = build_arguments(folder, tmp_path / "cut", [], *keys, verb=verb)
    done = specdistill(*[key for key in arguments if not key.startswith("recipe=")])
    assert done.returncode == 2 and refused_key(done.stderr) == "draft.mask_token_id", done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.long
@WAYS
def test_shards_that_are_made_apart_merge_into_the_same_rows(
    by_server: bool, folder: Path, tmp_path: Path
) -> None:
    with prepare_generation(by_server) as way:
        expected = make_row_set(folder, tmp_path / "whole", way)
        for index in (2, 0):
            done = specdistill(
                *build_arguments(folder, tmp_path / "cut", way, f"data.shard={index}/3")
            )
            assert done.returncode == 0 and f"Made shard {index} of 3" in done.stdout, done.stderr
        early = specdistill(*build_arguments(folder, tmp_path / "cut", way, verb="merge"))
        assert (
            early.returncode == 2
            and refused_key(early.stderr) == "data.shard"
            and "block-00001" in early.stderr
        )
        array = {
            "SLURM_ARRAY_TASK_ID": "8",
            "SLURM_ARRAY_TASK_MIN": "7",
            "SLURM_ARRAY_TASK_COUNT": "3",
        }
        words = [
            sys.executable,
            "-m",
            "specdistill",
            *build_arguments(folder, tmp_path / "cut", way, "data.shard=auto"),
        ]
        subprocess.run(
            words, env={**environment(), **array}, check=True, capture_output=True, timeout=300
        )
    merged = specdistill(*build_arguments(folder, tmp_path / "cut", way, verb="merge"))
    assert merged.returncode == 0 and read_row_set(tmp_path / "cut") == expected, merged.stderr
    named = f"data.rows={next((tmp_path / 'cut').glob(f'rows/*/{MANIFEST}')).parent}"
    shown = specdistill(*build_arguments(folder, tmp_path / "none", way, named, verb="show"))
    assert shown.returncode == 0 and "Documents to train on" in shown.stdout, shown.stderr


@pytest.mark.long  # Ray takes seconds to start, and a minute on a busy machine
def test_ray_repeats_the_shard_of_a_killed_worker(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra [ray]")
    with running(Behaviour(seconds=0.03)) as server:
        way = [f"data.regenerate.server=[{server.address}]", "data.regenerate.batch_size=2"]
        expected, asked = make_row_set(folder, tmp_path / "whole", way), server.num_requests
        words = build_arguments(folder, tmp_path / "cut", way, "on=ray", "shards=4", "gpus=0")
        local_ray = {**environment(), "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(
            [sys.executable, "-m", "specdistill", *words], env=local_ray, **output
        )  # type: ignore[call-overload]
        while server.num_requests < asked + 20 and process.poll() is None:
            time.sleep(0.01)
        workers = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "ray::_make_shard" in child.cmdline()[0]
        ]
        workers[0].kill()
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "Made 4 shards" in said, said
    merged = specdistill(*build_arguments(folder, tmp_path / "cut", way, verb="merge"))
    assert merged.returncode == 0 and read_row_set(tmp_path / "cut") == expected, merged.stderr


def test_without_ray_the_extra_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = specdistill(*build_arguments(folder, tmp_path, [], "on=ray", "shards=4"))
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith(
        "Run: pip install 'specdistill[ray]'"
    ), done.stderr


@pytest.mark.long
@WAYS
def test_kills_give_the_same_rows(by_server: bool, folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "thesis.tex").write_text("mine")

    def read_rows() -> dict[str, bytes]:
        return {
            name: content
            for path in cache.glob(f"rows/*/{MANIFEST}")
            for name, content in contents(path.parent).items()
        }

    with prepare_generation(by_server) as way:
        check_survives_kills(build_arguments(folder, cache, way, num_tokens=600), cache, read_rows)
    assert all(len(Dataset.from_file(str(path))) for path in cache.glob("rows/*/*.arrow"))


FULL = """
mount -t tmpfs -o size=80k tmpfs "$1" || exit 99
shift; disk=$1; shift
"$@" 2> "$0.full"; echo $? > "$0.code"
mount -o remount,size=50m tmpfs "$disk"
"$@" && cp -r "$disk/cache/rows" "$0.rows"
"""


@pytest.mark.long
@WAYS
def test_a_full_disk_ends_a_generation_in_one_line_and_it_goes_on_with_space(
    by_server: bool, folder: Path, tmp_path: Path
) -> None:
    """The disk is a file system of 80 KiB in a mount namespace of its own."""
    mounts = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", tmp_path],
        capture_output=True,
        check=False,
    )
    if mounts.returncode:
        pytest.skip("no mount namespaces on this machine")
    disk = tmp_path / "disk"
    disk.mkdir()
    with prepare_generation(by_server) as way:
        forced = "data.force=true"  # otherwise the estimate would already refuse it
        expected = make_row_set(folder, tmp_path / "whole", way)
        shell = ["unshare", "-rm", "sh", "-c", FULL, str(tmp_path / "run"), str(disk), str(disk)]
        words = build_arguments(folder, disk / "cache", way, forced)
        mounted = [*shell, sys.executable, "-m", "specdistill", *words]
        resumed = subprocess.run(
            mounted, env=environment(), capture_output=True, text=True, check=False, timeout=300
        )
    said = (tmp_path / "run.full").read_text()
    assert (tmp_path / "run.code").read_text().strip() == "3" and "Traceback" not in said, said
    assert "No space left on device" in said.splitlines()[-1]
    assert resumed.returncode == 0, resumed.stderr
    (manifest,) = (tmp_path / "run.rows").glob(f"*/{MANIFEST}")
    assert contents(manifest.parent) == expected


def test_rows_are_not_made_into_a_folder_of_other_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "model.safetensors").write_text("mine")
    with prepare_generation(by_server=False) as way:
        said = specdistill(*build_arguments(folder, tmp_path, way, f"data.rows={tmp_path / 'set'}"))
    assert (
        said.returncode == 2
        and refused_key(said.stderr) == "data.rows"
        and "model.safetensors" in said.stderr
    )
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["model.safetensors"]
