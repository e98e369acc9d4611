"""Published figures: what they state agrees with itself, and a report is judged by them only where
it was measured alike."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdistill.cli.main import main
from specdistill.common.documents import read_json
from specdistill.common.project import PUBLISHED_FOLDER, ROOT, SUITES
from specdistill.evaluation.comparison.published import PublishedFigures, load_published
from specdistill.evaluation.report.schema import PER_POSITION
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from tests.refusals import refused_key

NAMES = sorted(path.stem for path in PUBLISHED_FOLDER.glob("*.yaml"))
QWEN = "vllm-ci-qwen3-8b-eagle3"


@pytest.mark.parametrize("name", NAMES)
def test_published_figures_agree_and_eval_takes_their_protocol(name: str) -> None:
    """Lengths are published with two decimals, and rates with four."""
    published = load_published(name)
    for figure in published.figures:
        length, rates = figure.mean_acceptance_length, figure.acceptance_rate_per_position
        if rates:
            assert len(rates) == figure.num_speculative_tokens and 1 + sum(rates) == pytest.approx(
                length, abs=0.0052
            )
        if figure.num_drafts is not None and figure.num_accepted_tokens is not None:
            assert round(1 + figure.num_accepted_tokens / figure.num_drafts, 2) == length
    assert (SUITES / f"{published.suite}.yaml").is_file() and published.source.startswith(
        "https://"
    )
    recipe: Any = load_recipe(Recipe, [*published.keys(), "train.output_dir=runs/x"])
    assert (recipe.target.model, recipe.eval.engine, recipe.eval.suite) == (
        published.target,
        "vllm",
        published.suite,
    )
    assert recipe.eval.num_prompts == (
        published.num_prompts if published.category == "all" else None
    )


def test_raw_counts_match_the_published_runs() -> None:
    """The test above checks the acceptance lengths that follow from these counts."""
    figures = [
        figure for name in NAMES for figure in load_published(name).figures if figure.num_drafts
    ]
    assert {(figure.num_drafts, figure.num_accepted_tokens) for figure in figures} == {
        (4816, 12208),
        (84995, 128899),
    }


def write_report(
    folder: Path,
    published: PublishedFigures,
    *,
    length: float,
    ci95: list[float] | None,
    **other: Any,
) -> Path:
    """Write a report measured by the published protocol, in the layout of the sample report.

    `other` holds fields that differ from the protocol.
    """
    sample, k = (
        read_json(ROOT / "docs" / "sample" / "report.json"),
        published.figures[0].num_speculative_tokens,
    )
    protocol_fields = {
        "suite": published.suite,
        "num_prompts": published.num_prompts,
        "temperature": 0.0,
        "tree": None,
    }
    row = {
        **sample["results"][0],
        **protocol_fields,
        "num_speculative_tokens": k,
        "acceptance_length_vllm": length,
    }
    row |= {name: (row[name] * 2)[:k] for name in PER_POSITION} | {
        "acceptance_length_vllm_ci95": ci95
    }
    row |= {name: value for name, value in other.items() if name in row}
    report = {
        **{name: part for name, part in sample.items() if name not in ("theory", "headline")},
        "headline": {"average": "one"},
        "target": {**sample["target"], "model": other.get("target", published.target)},
        "engine": {"name": other.get("engine", "vllm"), "version": "0.33"},
        "settings": {
            **sample["settings"],
            "drafting": {},
            "max_new_tokens": other.get("max_new_tokens", 256),
        },
        "results": [
            {name: value for name, value in row.items() if value is not None or name == "tree"}
        ],
    }
    report["not_measured"] = {**sample["not_measured"], "theory": "-"}
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    return folder / "report.json"


@pytest.mark.parametrize(
    ("length", "ci95", "said"),
    [
        (2.4, [2.3, 2.5], "above"),
        (2.1, [2.0, 2.2], "below"),
        (2.3, [2.2, 2.4], "not separable"),
        (2.9, None, "not separable"),
    ],
)
def test_a_report_is_above_below_or_not_separable(
    length: float,
    ci95: list[float] | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = write_report(tmp_path, load_published(QWEN), length=length, ci95=ci95)
    assert main(["compare", f"published={QWEN}", f"report={report}"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| 3 "))
    assert line.endswith(f"| {said} |") and "| 2.26 | 65%  40%  20% |" in line


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"target": "Qwen/Qwen3-4B"}, "target Qwen/Qwen3-4B, expected target Qwen/Qwen3-8B"),
        ({"num_speculative_tokens": 4}, "K 4, expected K 3"),
        (
            {"temperature": 1.0, "suite": "gsm8k"},
            "suite gsm8k, temperature 1.0, expected suite mt-bench, temperature 0.0",
        ),
        ({"max_new_tokens": 128}, "max_new_tokens 128, expected max_new_tokens 256"),
        ({"num_prompts": 8}, "num_prompts 8"),
        ({"engine": "sglang"}, "engine sglang"),
        ({"tree": {"branching": [4, 2, 1]}}, "drafting tree with branching 4, 2, 1"),
    ],
)
def test_another_protocol_is_refused_by_name(
    other: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = write_report(tmp_path, load_published(QWEN), length=2.4, ci95=[2.3, 2.5], **other)
    if (k := other.get("num_speculative_tokens")) is not None:
        content = read_json(report)
        row = content["results"][0]
        row |= {name: (row[name] * 2)[:k] for name in PER_POSITION}
        report.write_text(json.dumps(content), encoding="utf-8")
    assert main(["compare", f"published={QWEN}", f"report={report}"]) == 2
    assert refused_key(error := capsys.readouterr().err) == "report" and f" with {named}" in error


CODING = """
source: https://example.org
target: pico
engine: specdistill
suite: pico-edit
category: rename
temperature: 1.0
top_k: 40
max_new_tokens: 8
template: {enable_thinking: true}
figures: [{num_speculative_tokens: 2, mean_acceptance_length: 2.9}]
"""


def test_a_draft_is_measured_by_the_published_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(CODING, encoding="utf-8")
    short = [
        f"eval.{key}" for key in ("num_prompts=2", "warmup=0", "repeats=1", "sampling_draws=0")
    ]
    short.append(f"output_dir={tmp_path / 'report'}")
    assert main(["compare", f"published={tmp_path / 'mine.yaml'}", "method=ngram", *short]) == 0
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if line.startswith("| 2 | 2.90 |"))
    assert row.endswith("| not separable |")  # one prompt of the category has no interval
    assert "arguments of the chat template, {'enable_thinking': True}" in shown
    report = read_json(tmp_path / "report" / "report.json")
    assert (report["settings"]["top_k"], report["settings"]["max_new_tokens"]) == (40, 8)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [((f"published={QWEN}",), "report"), (("published=vllm-ci",), "published")],
)
def test_a_mistake_is_reported_with_its_key(
    arguments: tuple[str, ...], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert refused_key(error) == key and ("eval.num_speculative_tokens=3" in error) == (
        key == "report"
    )
