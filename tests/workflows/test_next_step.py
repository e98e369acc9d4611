"""`specdistill` alone: what it prints is what the state of the folder asks for, in commands that
take the keys that they are given."""

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
from tests.documented import commands, unknown_keys
from tests.refusals import refused_key
from tests.simulated import simulate, simulated_report

PASSES, FAILS, CANNOT_TELL = (
    {"metric": "mean_acceptance_length", "min": least} for least in (1.0, 9.0, 2.94)
)


@pytest.fixture
def run(in_empty_folder: Path) -> Path:
    """A run that was interrupted, relative to the working directory."""
    del in_empty_folder
    return interrupted("runs/mine")


def interrupted(folder: str, *more: str) -> Path:
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


def measured(
    run: Path,
    rule: dict[str, object] | None = None,
    place: str = "report",
    age: float = 0.0,
    **parts: object,
) -> None:
    """Trained, and a report that was judged by the rule; without one it was not judged. age:
    seconds since."""
    if not (run / "draft").exists():
        trained(run)
    records = simulate(24)
    report = simulated_report(records, **parts)
    if rule:
        report = judge([read_rule("gate", rule)], Evidence(report, records))
    write_report(run / place, report, records)
    now = (run / place / "report.json").stat().st_mtime
    os.utime(run / place / "report.json", (now - age, now - age))


def said(capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """The sentence, and the commands, whose keys all are some."""
    assert main([]) == 0
    sentence, *lines, _ = capsys.readouterr().out.splitlines()
    found = [line.partition("#")[0].strip() for line in lines]
    assert [
        key for verb, keys in commands("\n".join(found)) for key in unknown_keys(verb, keys)
    ] == []
    return sentence, found


def test_without_a_run(in_empty_folder: Path, capsys: pytest.CaptureFixture[str]):
    del in_empty_folder
    assert said(capsys)[1] == ["specdistill demo", "specdistill plan target=path/to/model"]


def test_after_a_measured_lookup(in_empty_folder: Path, capsys: pytest.CaptureFixture[str]):
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
    sentence, found = said(capsys)
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
    assert said(capsys)[1] == [
        "specdistill export method=ngram engine=vllm target=pico target.adapter=adapters/a"
        " output_dir=runs/lookup-vllm",
        "specdistill plan target=pico",
    ]
    report["engine"] = {"name": "llama.cpp", "version": "b9000"}
    write_report(Path("runs/lookup"), report, records)
    assert " engine=llama.cpp " in said(capsys)[1][0]
    interrupted("runs/mine")
    assert said(capsys)[1] == [TRAIN]


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
        (measured, ["specdistill gate report=runs/mine/report gates=default"], "no gate verdict"),
        (
            lambda run: measured(run, PASSES, incomplete="a server died"),
            [f"{EVAL} eval.suite=path/to/prompts.jsonl"],
            "",
        ),
        (lambda run: measured(run, FAILS), [DOCTOR], "acceptance length"),
        (
            lambda run: measured(run, CANNOT_TELL),
            [f"{EVAL} eval.suite=path/to/more/prompts.jsonl"],
            "acceptance length",
        ),
        (lambda run: measured(run, PASSES), [EXPORT, PUBLISH], "passed"),
    ],
    ids=["interrupted", "trained", "measured", "cut short", "failed", "inconclusive", "passed"],
)
def test_the_next_step(
    reach: Callable[[Path], None],
    steps: list[str],
    fact: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
):
    reach(run)
    sentence, found = said(capsys)
    assert found == steps and "runs/mine" in sentence and fact in sentence


@pytest.mark.parametrize(
    ("keys", "reach", "step"),
    [
        ("eval.suite=mt-bench", trained, EVAL),
        (
            "publish.repo=me/mine",
            lambda run: measured(run, PASSES),
            "specdistill publish run=runs/mine baseline=none",
        ),
        (TRUST, lambda run: None, f"{TRAIN} {TRUST}"),
        (TRUST, lambda run: measured(run, FAILS), f"{DOCTOR} {TRUST}"),
        (TRUST, lambda run: measured(run, PASSES), PUBLISH),
        (
            ["eval.engine=vllm", "eval.engine_command=vllm serve"],
            trained,
            f"{EVAL} 'eval.engine_command=\"vllm serve\"' eval.suite=path/to/prompts.jsonl",
        ),
    ],
)
def test_what_the_recipe_names_is_kept(
    keys: str | list[str],
    reach: Callable[[Path], None],
    step: str,
    in_empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
):
    del in_empty_folder
    reach(interrupted("runs/mine", *([keys] if isinstance(keys, str) else keys)))
    assert said(capsys)[1][-1] == step
    if "recipe=" in step:
        load_recipe(Recipe, shlex.split(step)[2:])


def test_the_last_verdict_counts(run: Path, capsys: pytest.CaptureFixture[str]):
    """`specdistill gate` writes its verdict next to the report that it judged; a newer measurement
    replaces it."""
    measured(run, age=20)
    measured(run, FAILS, place="report/release", age=10)
    assert said(capsys)[1] == [DOCTOR]
    measured(run, PASSES)
    assert said(capsys)[1] == [EXPORT, PUBLISH]


def test_the_run_that_was_worked_on_last_counts(run: Path, capsys: pytest.CaptureFixture[str]):
    """Not the one that was begun last; and a run that trained a target is none of a draft."""
    begun = interrupted("runs/sweep/later")
    measured(run, PASSES)
    target = Path("runs/target/run/recipe.yaml")
    target.parent.mkdir(parents=True)
    target.write_text("shape: {num_layers: 2}\n", encoding="utf-8")
    for number, path in enumerate([begun / "run/recipe.yaml", run / "report/report.json", target]):
        os.utime(path, (2e9 + number, 2e9 + number))
    assert said(capsys)[1] == [EXPORT, PUBLISH]


def test_a_run_that_was_moved_is_named_where_it_lies(run: Path, capsys: pytest.CaptureFixture[str]):
    run.rename("elsewhere")
    assert said(capsys)[1] == [
        "specdistill train recipe=elsewhere/run/recipe.yaml train.output_dir=elsewhere"
    ]


def test_a_report_that_cannot_be_read_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]):
    measured(run)
    (run / "report" / "report.json").write_text("{", encoding="utf-8")
    assert main([]) == 2
    assert refused_key(capsys.readouterr().err) == "report"


def test_a_quick_look_is_followed_by_the_whole_measurement(
    run: Path, capsys: pytest.CaptureFixture[str]
):
    settings = simulated_report(simulate(24))["settings"] | {"quick": True}
    measured(run, PASSES, settings=settings)
    assert said(capsys)[1] == [f"{EVAL} eval.suite=path/to/prompts.jsonl eval.quick=false"]
