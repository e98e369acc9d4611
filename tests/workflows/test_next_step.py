"""`specdistill` alone prints what the state of the folder asks for, in commands with valid keys."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from specdistill.cli.main import main
from specdistill.evaluation.gate.decide import Evidence, judge
from specdistill.evaluation.gate.rules import read_rule
from specdistill.evaluation.report.files import write_report
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import format_recipe, load_recipe
from tests.documented import find_commands, find_unknown_keys
from tests.refusals import refused_key
from tests.simulated import simulate, simulated_report

PASSES, FAILS, CANNOT_TELL = (
    {"metric": "mean_acceptance_length", "min": least} for least in (1.0, 9.0, 2.94)
)


@pytest.fixture
def run(in_empty_folder: Path) -> Path:
    """Return a run that was interrupted, relative to the working directory."""
    del in_empty_folder
    return write_interrupted_run("runs/mine")


def write_interrupted_run(folder: str, *more: str) -> Path:
    keys = [
        "method=eagle3",
        "target.model=models/mine",
        "data.source=texts.jsonl",
        f"train.output_dir={folder}",
        *more,
    ]
    path = Path(folder) / "run" / "recipe.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(format_recipe(load_recipe(Recipe, keys)), encoding="utf-8")
    return Path(folder)


def trained(run: Path) -> None:
    (run / "draft").mkdir()
    (run / "draft" / "config.json").write_text("{}", encoding="utf-8")


def add_report(
    run: Path,
    rule: dict[str, object] | None = None,
    place: str = "report",
    age: float = 0.0,
    **parts: object,
) -> None:
    """Add a report that was judged by the rule, or was not judged without one.

    A draft is added where there is none. age: seconds since the report was written.
    """
    if not (run / "draft").exists():
        trained(run)
    records = simulate(24)
    report = simulated_report(records, **parts)
    if rule:
        report = judge([read_rule("gate", rule)], Evidence(report, records))
    write_report(run / place, report, records)
    now = (run / place / "report.json").stat().st_mtime
    os.utime(run / place / "report.json", (now - age, now - age))


def read_next_step(capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """Return the sentence and the commands that are printed, after checking their keys."""
    assert main([]) == 0
    sentence, *lines, _ = capsys.readouterr().out.splitlines()
    found = [line.partition("#")[0].strip() for line in lines]
    assert [
        key
        for verb, keys in find_commands("\n".join(found))
        for key in find_unknown_keys(verb, keys)
    ] == []
    return sentence, found


def test_without_a_run_demo_and_plan_are_suggested(
    in_empty_folder: Path, capsys: pytest.CaptureFixture[str]
):
    del in_empty_folder
    assert read_next_step(capsys)[1] == [
        "specdistill demo",
        "specdistill plan target=path/to/model",
    ]


def test_after_a_measured_lookup_its_export_is_suggested(
    in_empty_folder: Path, capsys: pytest.CaptureFixture[str]
):
    del in_empty_folder
    foreign = Path("results") / "report.json"
    foreign.parent.mkdir()
    foreign.write_text("{}", encoding="utf-8")
    records = simulate(24)
    lookup = {"method": "ngram", "model": None, "revision": None}
    report = simulated_report(records, draft=lookup)
    settings = report["settings"]
    report["settings"] = {**settings, "drafting": {"rule": "vllm", "min": 1, "max": 3}}
    write_report(Path("runs/lookup"), report, records)
    sentence, found = read_next_step(capsys)
    assert "runs/lookup" in sentence and f"{report['results'][0]['speedup']:.2f}×" in sentence
    assert found == [
        "specdistill export method=ngram engine=vllm target=pico report=runs/lookup"
        " output_dir=runs/lookup-vllm",
        "specdistill plan target=pico",
    ]

    # A running server does not say how it looks up, no engine but two has lookups, and a plan is
    # made for the target without an adapter.
    report = {**report, "engine": {"name": "sglang", "version": "0.5.9"}, "settings": settings}
    report["target"] = {**report["target"], "model": "pico + adapters/a"}
    write_report(Path("runs/lookup"), report, records)
    assert read_next_step(capsys)[1] == [
        "specdistill export method=ngram engine=vllm target=pico target.adapter=adapters/a"
        " output_dir=runs/lookup-vllm",
        "specdistill plan target=pico",
    ]
    report["engine"] = {"name": "llama.cpp", "version": "b9000"}
    write_report(Path("runs/lookup"), report, records)
    assert " engine=llama.cpp " in read_next_step(capsys)[1][0]
    write_interrupted_run("runs/mine")
    assert read_next_step(capsys)[1] == [TRAIN]


TRAIN, EVAL = (f"specdistill {verb} recipe=runs/mine/run/recipe.yaml" for verb in ("train", "eval"))
DOCTOR = "specdistill doctor draft=runs/mine/draft target=models/mine"
EXPORT = (
    "specdistill export draft=runs/mine/draft engine=vllm target=models/mine"
    " output_dir=runs/mine/vllm"
)
TRUST = "target.trust_remote_code=true"
PUBLISH = "specdistill publish run=runs/mine repo=org/name baseline=none"


@pytest.mark.parametrize(
    ("reach", "steps", "fact"),
    [
        (lambda run: None, [TRAIN], "incomplete"),
        (trained, [f"{EVAL} eval.suite=path/to/prompts.jsonl"], "not measured"),
        (add_report, ["specdistill gate report=runs/mine/report gates=default"], "no gate verdict"),
        (
            lambda run: add_report(run, PASSES, incomplete="a server died"),
            [f"{EVAL} eval.suite=path/to/prompts.jsonl"],
            "",
        ),
        (lambda run: add_report(run, FAILS), [DOCTOR], "acceptance length"),
        (
            lambda run: add_report(run, CANNOT_TELL),
            [f"{EVAL} eval.suite=path/to/more/prompts.jsonl"],
            "acceptance length",
        ),
        (lambda run: add_report(run, PASSES), [EXPORT, PUBLISH], "passed"),
    ],
    ids=["interrupted", "trained", "measured", "cut short", "failed", "inconclusive", "passed"],
)
def test_the_next_step_follows_from_the_state_of_the_run(
    reach: Callable[[Path], None],
    steps: list[str],
    fact: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
):
    reach(run)
    sentence, found = read_next_step(capsys)
    assert found == steps and "runs/mine" in sentence and fact in sentence


@pytest.mark.parametrize(
    ("keys", "reach", "step"),
    [
        ("eval.suite=mt-bench", trained, EVAL),
        (
            "publish.repo=me/mine",
            lambda run: add_report(run, PASSES),
            "specdistill publish run=runs/mine baseline=none",
        ),
        (TRUST, lambda run: None, f"{TRAIN} {TRUST}"),
        (TRUST, lambda run: add_report(run, FAILS), f"{DOCTOR} {TRUST}"),
        (TRUST, lambda run: add_report(run, PASSES), PUBLISH),
        (
            ["eval.engine=vllm", "eval.engine_command=vllm serve"],
            trained,
            f"{EVAL} 'eval.engine_command=\"vllm serve\"' eval.suite=path/to/prompts.jsonl",
        ),
    ],
)
def test_the_next_step_depends_on_the_keys_of_the_recipe(
    keys: str | list[str],
    reach: Callable[[Path], None],
    step: str,
    in_empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
):
    del in_empty_folder
    reach(write_interrupted_run("runs/mine", *([keys] if isinstance(keys, str) else keys)))
    assert read_next_step(capsys)[1][-1] == step
    if "recipe=" in step:
        load_recipe(Recipe, shlex.split(step)[2:])


def test_the_next_step_follows_from_the_last_verdict(run: Path, capsys: pytest.CaptureFixture[str]):
    """`specdistill gate` writes a verdict next to the report; a newer measurement replaces it."""
    add_report(run, age=20)
    add_report(run, FAILS, place="report/release", age=10)
    assert read_next_step(capsys)[1] == [DOCTOR]
    add_report(run, PASSES)
    assert read_next_step(capsys)[1] == [EXPORT, PUBLISH]


def test_the_next_step_is_for_the_run_that_was_worked_on_last(
    run: Path, capsys: pytest.CaptureFixture[str]
):
    """Neither the run that was begun last nor a run that trained a target counts."""
    later_run = write_interrupted_run("runs/sweep/later")
    add_report(run, PASSES)
    target = Path("runs/target/run/recipe.yaml")
    target.parent.mkdir(parents=True)
    target.write_text("shape: {num_layers: 2}\n", encoding="utf-8")
    for number, path in enumerate(
        [later_run / "run/recipe.yaml", run / "report/report.json", target]
    ):
        os.utime(path, (2e9 + number, 2e9 + number))
    assert read_next_step(capsys)[1] == [EXPORT, PUBLISH]


def test_a_run_that_was_moved_is_named_where_it_lies(run: Path, capsys: pytest.CaptureFixture[str]):
    run.rename("elsewhere")
    assert read_next_step(capsys)[1] == [
        "specdistill train recipe=elsewhere/run/recipe.yaml train.output_dir=elsewhere"
    ]


def test_a_report_that_cannot_be_read_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]):
    add_report(run)
    (run / "report" / "report.json").write_text("{", encoding="utf-8")
    assert main([]) == 2
    assert refused_key(capsys.readouterr().err) == "report"


def test_a_quick_look_is_followed_by_the_whole_measurement(
    run: Path, capsys: pytest.CaptureFixture[str]
):
    settings = simulated_report(simulate(24))["settings"] | {"quick": True}
    add_report(run, PASSES, settings=settings)
    assert read_next_step(capsys)[1] == [
        f"{EVAL} eval.suite=path/to/prompts.jsonl eval.quick=false"
    ]
