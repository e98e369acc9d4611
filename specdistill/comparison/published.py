"""A draft next to figures that others have published: `specdistill compare published=NAME draft=…`, or a report that there is.

A file of `eval/published` has the figures and the protocol that they were measured by. Acceptance lengths are compared where the report was
measured by the same one, as far as the source states it: otherwise they say nothing about the draft.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from specdistill.command import SHORTHANDS, keys_of
from specdistill.errors import ExitCode, UserError
from specdistill.files.documents import read_keys
from specdistill.project import PUBLISHED, find_yaml
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_own_keys, validate
from specdistill.report.files import read_document
from specdistill.report.phrases import (
    between,
    lookup_first,
    number,
    online_length,
    per_position,
    tree,
)
from specdistill.report.text import table
from specdistill.terminal import result

# What must be the same, and the key of `specdistill eval` that it is set by.
PROTOCOL = {
    "target": "target.model",
    "engine": "eval.engine",
    "suite": "eval.suite",
    "num_prompts": "eval.num_prompts",
    "temperature": "eval.temperature",
    "top_p": "eval.top_p",
    "top_k": "eval.top_k",
    "max_new_tokens": "eval.max_new_tokens",
    "batch_size": "eval.concurrency",
}
A_CHAIN, OURS = "a chain of K tokens", "specdistill"


class PublishedFigure(Section):
    num_speculative_tokens: int = option(..., "K", ge=1)
    mean_acceptance_length: float = option(..., "the bonus token counts", ge=1)
    acceptance_rate_per_position: list[float] = option([], "[K] unconditional; []: not stated")
    num_drafts: int | None = option(None, "rounds in which something was drafted", ge=1)
    num_accepted_tokens: int | None = option(None, "draft tokens that were accepted", ge=0)


class PublishedFigures(Section):
    """Chains of K draft tokens. null: the source does not state it."""

    source: str = option(..., "address of what states the figures")
    target: str = option(..., "Hub id")
    draft: str | None = option(None, "Hub id of the draft that was measured")
    engine: str = option(..., "what decoded: an engine, or specdistill")
    suite: str = option(..., "name under eval/suites")
    category: str = option("all", "of the suite")
    num_prompts: int | None = option(None, "prompts that were measured, of the category", ge=1)
    temperature: float | None = option(None, "0 is greedy", ge=0)
    top_p: float | None = option(None, "nucleus sampling", gt=0, le=1)
    top_k: int | None = option(None, "0: off", ge=0)
    max_new_tokens: int | None = option(None, "tokens generated per prompt, at most", ge=1)
    batch_size: int | None = option(None, "requests in flight", ge=1)
    template: dict[str, Any] = option({}, "arguments of the target's chat template")
    figures: list[PublishedFigure] = option(..., "one for each K", min_length=1)

    def keys(self) -> list[str]:
        """Of `specdistill eval`, by which it measures a draft by this protocol: the whole suite, where the figures are of a category."""
        first, *others = (figure.num_speculative_tokens for figure in self.figures)
        stated = {
            key: getattr(self, name)
            for name, key in PROTOCOL.items()
            if getattr(self, name) is not None
        }
        keys = {**stated, "eval.num_speculative_tokens": first}
        keys |= {"eval.sweep.num_speculative_tokens": ",".join(map(str, others))} if others else {}
        if self.category != "all":
            keys.pop("eval.num_prompts", None)
        if self.engine == OURS:
            del keys["eval.engine"]
        return [f"{key}={value}" for key, value in keys.items()]


class PublishedOptions(Section):
    published: str = option(
        ..., "published figures to compare with: a name under eval/published, or a YAML file"
    )
    report: str | None = option(None, "report.json or its folder, with published=")
    draft: str | None = option(
        None, "with published=: a draft to measure now, with any keys of eval"
    )


def load_published(name: str) -> PublishedFigures:
    """Raises UserError for an unknown name, and for a file that is none."""
    path = find_yaml(name, PUBLISHED, "published")
    return validate(
        PublishedFigures, read_keys(path, "published", "published figures"), f"{path.name}: "
    )


def compare_published(
    arguments: Sequence[str], measure: Callable[[list[str]], tuple[dict[str, Any], Path]]
) -> int:
    """Compare a report, or one that `measure` makes: keys of `specdistill eval` -> the report, and its folder."""
    options, others = load_own_keys(PublishedOptions, arguments)
    published = load_published(options.published)
    keys = keys_of([*others, *([f"draft={options.draft}"] if options.draft else [])], SHORTHANDS)
    if options.report is not None and keys:
        raise UserError(
            "report",
            got=f"{options.report}, and {keys[0]}",
            expected="a report, or what is measured now",
        )
    if options.report is None and not keys:
        expected = f"a report.json, or a draft, e.g. method=eagle3 draft=path/to/draft, measured with {' '.join(published.keys())}"
        raise UserError("report", got="nothing", expected=expected)
    if options.report is None:
        report, folder = measure([*published.keys(), *keys])
    else:
        report, folder = read_document(Path(options.report)), Path(options.report)
    compared = compared_with(published, report, f"{folder}")
    rows = [
        (
            str(figure.num_speculative_tokens),
            number(figure.mean_acceptance_length),
            per_position(vars(figure)),
            f"{number(row['mean_acceptance_length'])}{between(row, 'mean_acceptance_length')}",
            per_position(row),
            judged(row, figure),
        )
        for figure, row in compared
    ]
    print(
        table(
            (
                "K",
                "published",
                "by position",
                "measured (95% interval)",
                "by position",
                "the report is",
            ),
            rows,
        )
    )
    print(f"\nAcceptance lengths, the bonus token included. {published.source}")
    if unstated := ", ".join(name for name in PROTOCOL if getattr(published, name) is None):
        print(f"Not compared, because the source does not state it: {unstated}.")
    if published.template:
        print(
            f"Not compared, because a report does not state it: arguments of the chat template, {published.template}."
        )
    result(
        [
            {"published": figure, "measured": row, "verdict": judged(row, figure)}
            for figure, row in compared
        ]
    )
    return ExitCode.DONE


def compared_with(
    published: PublishedFigures, report: Mapping[str, Any], name: str
) -> list[tuple[PublishedFigure, Mapping[str, Any]]]:
    """The figures, each with the row of the report that was measured by the same protocol.

    Raises UserError, saying what differs, for a report that has none. name: of the report, in the error.
    """
    figures = {figure.num_speculative_tokens: figure for figure in published.figures}
    rows = [
        row
        for row in report["results"]
        if (row["category"], row["context_bucket"]) == (published.category, "all")
    ]
    if not rows:
        categories = ", ".join(sorted({row["category"] for row in report["results"]}))
        raise UserError(
            "report",
            got=f"{name} with categories {categories}",
            expected=f"category {published.category}",
        )
    differing = [differences(published, report, row) for row in rows]
    if all(differing):
        wrong = min(differing, key=len)
        got, expected = (
            ", ".join(f"{what} {pair[side]}" for what, pair in wrong.items()) for side in (0, 1)
        )
        raise UserError("report", got=f"{name} with {got}", expected=f"{expected}, as published")
    return [
        (figures[row["num_speculative_tokens"]], row)
        for row, other in zip(rows, differing, strict=True)
        if not other
    ]


def judged(
    row: Mapping[str, Any], figure: PublishedFigure
) -> Literal["above", "below", "not separable"]:
    """Of the report: whether its interval lies above or below the figure, which is taken as it stands; without one, not separable."""
    stated = figure.mean_acceptance_length
    low, high = row.get("mean_acceptance_length_ci95") or (stated, stated)
    return "above" if low > stated else "below" if high < stated else "not separable"


def differences(
    published: PublishedFigures, report: Mapping[str, Any], row: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """What a row of a report was measured with otherwise than published: name -> its value, the published one."""
    settings = report["settings"]
    measured = {
        "target": report["target"]["model"],
        "engine": report.get("engine", {"name": OURS})["name"],
        **{name: settings[name] for name in ("top_p", "top_k", "max_new_tokens")},
        **{name: row[name] for name in ("suite", "num_prompts", "temperature", "batch_size")},
    }
    other = {
        name: (measured[name], getattr(published, name))
        for name in PROTOCOL
        if getattr(published, name) is not None
    }
    other["drafting"] = (
        online_length(row) or lookup_first(settings) or tree(row["tree"]) or A_CHAIN,
        A_CHAIN,
    )
    ks = [figure.num_speculative_tokens for figure in published.figures]
    if (k := row["num_speculative_tokens"]) not in ks:
        other["K"] = (k, " or ".join(map(str, ks)))
    if "mean_acceptance_length" not in row:
        other["acceptance length"] = ("not measured", "a number")
    return {name: pair for name, pair in other.items() if pair[0] != pair[1]}
