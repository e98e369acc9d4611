"""Every command of the pages is run, from a clone to a gated draft of a small real model.

A command that needs what a test lacks is marked in its page (`# needs the Hub`); tests/test_docs.py
checks the keys of all of them.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdistill.cli.main import main
from specdistill.common.project import ROOT
from tests.documented import SCRIPTS, find_shell_lines, read_page
from tests.tiny import write_target

# These come first, in the order of a reader: a later page may measure what an earlier one has
# trained.
FIRST = [ROOT / "README.md", ROOT / "docs" / "your-target.md", ROOT / "docs" / "training.md"]
EXAMPLES = sorted((ROOT / "examples").rglob("README.md"))
OTHERS = {ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")} - {*FIRST}
PAGES = [*FIRST, *sorted(OTHERS), *EXAMPLES]
RUN_IN_A_SHELL = ("cat", "cp")
# Keys that make a command of the pages small. Nothing else is changed.
SMALL = {
    "train": [
        "train.max_steps=4",
        "train.eval_steps=2",
        "train.save_steps=2",
        "train.per_device_train_batch_size=2",
    ],
    "eval": [
        "eval.num_prompts=4",
        "eval.max_new_tokens=12",
        "eval.repeats=1",
        "eval.warmup=0",
        "eval.sampling_draws=20",
    ],
    "compare": ["num_prompts=2", "max_new_tokens=8", "repeats=1", "warmup=0", "sampling_draws=0"],
    "doctor": ["eval.num_prompts=1"],
    "plan": ["serving.context=128", "training.batch_size=1", "training.max_length=64"],
}
ROWS = [
    "data.max_length=64",
    "data.regenerate.num_tokens=2_000",
    "data.regenerate.prompt_tokens=8",
    "data.regenerate.batch_size=64",
]
READS_ROWS = ("data", "train")
SWEEP_KEYS = ["eval.num_prompts=2", "eval.max_new_tokens=6"]
SWEEP_KEYS += [
    f"eval.sweep.{axis}"
    for axis in ("num_speculative_tokens=[2]", "temperature=[1]", "batch_size=[2]", "context=[64]")
]
SELECTION_KEYS = ["selection.num_prompts=2", "selection.max_new_tokens=8"]
# the recipe of your-target.md is for a target of 8B parameters
MINE_KEYS = ["target.dtype=float32", "draft.vocab_size=null"]
MAY_SAY_NO = ("eval", "gate", "doctor")  # with exit code 1: the drafts have hardly been trained


def split_command(command: str) -> tuple[str, list[str]] | None:
    """Return the verb and the keys of a command of ours, or None for another program.

    The verb of `specdistill` alone is empty.
    """
    first, *rest = shlex.split(command, comments=True)
    if first == "specdistill":
        return (rest[0], rest[1:]) if rest else ("", [])
    if first == "python" and rest[0] in SCRIPTS:
        return SCRIPTS[rest[0]], rest[1:]
    return None


def test_every_command_is_typed_by_a_test_or_says_what_it_needs() -> None:
    lines = {
        line.command for page in PAGES for line in find_shell_lines(page) if not line.is_marked
    }
    assert {
        line
        for line in lines
        if not split_command(line) and line.split()[0] not in (*RUN_IN_A_SHELL, "make", ".")
    } == set()


def test_make_has_every_target_that_pages_name() -> None:
    targets = {
        word
        for page in PAGES
        for line in find_shell_lines(page)
        for word in re.findall(r"^make ([\w-]+)", line.command)
    }
    assert {"setup", "demo", "test"} <= targets
    subprocess.run(
        ["make", "--dry-run", *sorted(targets)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def reader_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Yield a folder where the names that the pages use are files.

    The target is a trained model of 260,000 parameters, where there is one.
    """
    folder = tmp_path_factory.mktemp("reader")
    target = folder / "path" / "to" / "model"
    try:
        data = request.getfixturevalue("shared_data")
        shutil.copytree(data / "models" / "stories260K-hf", target, copy_function=shutil.copyfile)
        rows = (
            (data / "train" / "tinystories" / "tinystories_val_slice.jsonl")
            .read_text("utf-8")
            .splitlines()
        )
    except pytest.skip.Exception:
        write_target(target)
        rows = [
            json.dumps({"text": f"Once upon a time there were {n} cats and {n * n} dogs. " * 3})
            for n in range(200)
        ]
    (folder / "path/to/model").chmod(0o755)
    for name, part in (
        ("texts", rows[:120]),
        ("conversations", rows[:120]),
        ("prompts", rows[-8:]),
    ):
        (folder / "path" / "to" / f"{name}.jsonl").write_text(
            "\n".join(part) + "\n", encoding="utf-8"
        )
    (folder / "path" / "to" / "draft").symlink_to(target)
    (folder / "runs").mkdir()
    (folder / "runs" / "before").symlink_to("short")
    (recipe,) = re.findall(
        r"^```yaml\n(.*?)^```",
        read_page(ROOT / "docs" / "your-target.md"),
        re.MULTILINE | re.DOTALL,
    )
    (folder / "mine.yaml").write_text(recipe, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def run_small(verb: str, keys: list[str], patch: pytest.MonkeyPatch) -> int:
    """Run a command of ours with keys that make it small, and return its exit code."""
    small_keys = [*SMALL.get(verb, [])]
    if verb in READS_ROWS:
        small_keys += ROWS
    if any(key.startswith("eval.sweep.") for key in keys):
        small_keys += SWEEP_KEYS
    if any(key.startswith("selection.") for key in keys):
        small_keys += SELECTION_KEYS
    if "recipe=mine.yaml" in keys:
        small_keys += MINE_KEYS
    patch.setattr(sys, "argv", sys.argv)
    try:
        return main([word for word in [verb, *keys, *small_keys] if word])
    except SystemExit as ended:
        return int(str(ended.code or 0))


@pytest.mark.long  # two drafts of a small real model, from their data to their exports
def test_every_command_of_the_pages_succeeds(
    reader_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for page in PAGES:
        for line in find_shell_lines(page):
            if line.is_marked:
                continue
            command = split_command(line.command)
            if command is None:
                if line.command.startswith(RUN_IN_A_SHELL):
                    subprocess.run(
                        line.command, shell=True, check=True, capture_output=True, timeout=60
                    )
                continue
            verb, keys = command
            code = run_small(verb, keys, monkeypatch)
            assert code == 0 or (code == 1 and verb in MAY_SAY_NO), (
                f"{page.name}: {line.command}: exit code {code}"
            )
    for run in ("cpu", "mine"):
        report = json.loads(
            (reader_folder / "runs" / run / "report" / "report.json").read_text(encoding="utf-8")
        )
        assert report["gate"]["verdict"] in ("passed", "failed", "inconclusive")
        assert report["lossless"]["unexplained_divergences"] == 0
        assert (reader_folder / "runs" / run / "vllm" / "SERVE.md").is_file()
