"""Two processes share a measurement: acceptance is that of all prompts, speed that of the first."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdistill.common.errors import ExitCode
from specdistill.common.project import ROOT
from specdistill.evaluation.statistics.records import read_records
from tests.launches import TWO_PROCESSES, finish, start
from tests.refusals import refused_key
from tests.tiny import write_inputs

# Each test starts processes, which takes seconds.
pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.launches]
COUNTS = (
    "num_prompts",
    "num_drafts",
    "num_draft_tokens",
    "accepted_per_position",
    "mean_acceptance_length",
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("target")
    write_inputs(folder)
    rows = [
        {"prompt": f"{number} and {number}, {number} and", "category": "ab"[number % 2]}
        for number in range(7)
    ]
    (folder / "suite.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    few = ["eval.max_new_tokens=16", "eval.repeats=1", "eval.warmup=0", "eval.sampling_draws=20"]
    return ["method=ngram", f"target={folder / 'model'}", f"suite={folder / 'suite.jsonl'}", *few]


def measure_in_processes(
    folder: Path, *keys: str, config: str, options: tuple[str, ...] = ()
) -> dict[str, Any]:
    process = start(
        ROOT / "eval/run.py", *keys, f"output_dir={folder}", config=config, options=options
    )
    output = finish(process)
    assert process.returncode in (ExitCode.DONE, ExitCode.CHECK_FAILED, ExitCode.INCONCLUSIVE), (
        output
    )
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_two_processes_measure_what_one_does(keys: list[str], tmp_path: Path) -> None:
    alone = measure_in_processes(tmp_path / "one", *keys, config="cpu")
    both = measure_in_processes(
        tmp_path / "two", *keys, config="cpu_processes", options=TWO_PROCESSES
    )
    for one, two in zip(alone["results"], both["results"], strict=True):
        assert {name: one[name] for name in COUNTS} == {name: two[name] for name in COUNTS}
    assert alone["lossless"]["prompts_checked"] == both["lossless"]["prompts_checked"] == 7
    assert all(row["speedup"] > 0 for row in both["results"])
    one, two = (
        read_records(tmp_path / name / "samples.jsonl", "report") for name in ("one", "two")
    )
    assert [record.text for record in one] == [record.text for record in two]
    # Only the first process is timed: it has prompts 0, 1, 4 and 5.
    assert [record.baseline is None for record in two] == [
        False,
        False,
        True,
        True,
        False,
        False,
        True,
    ]


def test_a_method_that_looks_up_earlier_outputs_is_refused_in_two_processes(
    keys: list[str], tmp_path: Path
) -> None:
    arguments = [*keys, "method=suffix", f"output_dir={tmp_path}"]
    process = start(ROOT / "eval/run.py", *arguments, config="cpu_processes", options=TWO_PROCESSES)
    errors = [line for line in finish(process).splitlines() if line.startswith("error: ")]
    assert process.returncode and refused_key(errors[0]) == "method"
