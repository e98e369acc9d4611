"""A report next to figures that others have published: `specdistill compare published=NAME report=…`. No torch.

A file of `eval/published` has the figures and the protocol that they were measured by. Acceptance lengths are compared where the report was
measured by the same one, as far as the source states it: otherwise they say nothing about the draft.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from specdistill.command import keys_of
from specdistill.errors import ExitCode, UserError
from specdistill.files.documents import read_keys
from specdistill.project import PUBLISHED, find_yaml
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_recipe, validate
from specdistill.report.files import read_document
from specdistill.report.phrases import between, lookup_first, number, online_length, per_position, tree
from specdistill.report.text import table
from specdistill.terminal import result

# What must be the same, and the key of `specdistill eval` that it is set by.
PROTOCOL = {
    "target": "target.model",
    "engine": "eval.engine",
    "suite": "eval.suite",
    "num_prompts": "eval.num_prompts",
    "temperature": "eval.temperature",
    "max_new_tokens": "eval.max_new_tokens",
    "batch_size": "eval.concurrency",
}
A_CHAIN = "a chain of K tokens"


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
    engine: str = option(..., "what decoded")
    suite: str = option(..., "name under eval/suites")
    num_prompts: int | None = option(None, "prompts that were measured", ge=1)
    temperature: float | None = option(None, "0 is greedy", ge=0)
    max_new_tokens: int | None = option(None, "tokens generated per prompt, at most", ge=1)
    batch_size: int | None = option(None, "requests in flight", ge=1)
    figures: list[PublishedFigure] = option(..., "one for each K", min_length=1)

    def command(self) -> str:
        """What measures a draft by this protocol."""
        first, *others = (figure.num_speculative_tokens for figure in self.figures)
        stated = {key: getattr(self, name) for name, key in PROTOCOL.items() if getattr(self, name) is not None}
        keys = {**stated, "eval.num_speculative_tokens": first}
        keys |= {"eval.sweep.num_speculative_tokens": ",".join(map(str, others))} if others else {}
        return " ".join(["specdistill eval method=METHOD eval.draft=DRAFT", *(f"{key}={value}" for key, value in keys.items())])


class PublishedOptions(Section):
    published: str = option(..., "published figures to compare a report with: a name under eval/published, or a YAML file")
    report: str | None = option(None, "report.json or its folder, with published=")


def load_published(name: str) -> PublishedFigures:
    """Raises UserError for an unknown name, and for a file that is none."""
    path = find_yaml(name, PUBLISHED, "published")
    return validate(PublishedFigures, read_keys(path, "published", "published figures"), f"{path.name}: ")


def compare_published(arguments: Sequence[str]) -> int:
    options = load_recipe(PublishedOptions, keys_of([*arguments]))
    published = load_published(options.published)
    if options.report is None:
        raise UserError("report", got="nothing", expected=f"a report.json, measured by: {published.command()}")
    compared = compared_with(published, read_document(Path(options.report)), options.report)
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
    print(table(("K", "published", "by position", "measured (95% interval)", "by position", "the report is"), rows))
    print(f"\nAcceptance lengths, the bonus token included. {published.source}")
    if unstated := ", ".join(name for name in PROTOCOL if getattr(published, name) is None):
        print(f"Not compared, because the source does not state it: {unstated}.")
    result([{"published": figure, "measured": row, "verdict": judged(row, figure)} for figure, row in compared])
    return ExitCode.DONE


def compared_with(
    published: PublishedFigures, report: Mapping[str, Any], name: str
) -> list[tuple[PublishedFigure, Mapping[str, Any]]]:
    """The figures, each with the row of the report that was measured by the same protocol.

    Raises UserError, saying what differs, for a report that has none. name: of the report, in the error.
    """
    figures = {figure.num_speculative_tokens: figure for figure in published.figures}
    rows = [row for row in report["results"] if row["category"] == row["context_bucket"] == "all"]
    differing = [differences(published, report, row) for row in rows]
    if all(differing):
        wrong = min(differing, key=len)
        got, expected = (", ".join(f"{what} {pair[side]}" for what, pair in wrong.items()) for side in (0, 1))
        raise UserError("report", got=f"{name} with {got}", expected=f"{expected}, as published")
    return [(figures[row["num_speculative_tokens"]], row) for row, other in zip(rows, differing, strict=True) if not other]


def judged(row: Mapping[str, Any], figure: PublishedFigure) -> Literal["above", "below", "not separable"]:
    """Of the report: whether its interval lies above or below the figure, which is taken as it stands; without one, not separable."""
    stated = figure.mean_acceptance_length
    low, high = row.get("mean_acceptance_length_ci95") or (stated, stated)
    return "above" if low > stated else "below" if high < stated else "not separable"


def differences(published: PublishedFigures, report: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What a row of a report was measured with otherwise than published: name -> its value, the published one."""
    settings = report["settings"]
    measured = {
        "target": report["target"]["model"],
        "engine": report.get("engine", {"name": "specdistill"})["name"],
        "max_new_tokens": settings["max_new_tokens"],
        **{name: row[name] for name in ("suite", "num_prompts", "temperature", "batch_size")},
    }
    other = {name: (measured[name], getattr(published, name)) for name in PROTOCOL if getattr(published, name) is not None}
    other["drafting"] = (online_length(row) or lookup_first(settings) or tree(row["tree"]) or A_CHAIN, A_CHAIN)
    ks = [figure.num_speculative_tokens for figure in published.figures]
    if (k := row["num_speculative_tokens"]) not in ks:
        other["K"] = (k, " or ".join(map(str, ks)))
    if "mean_acceptance_length" not in row:
        other["acceptance length"] = ("not measured", "a number")
    return {name: pair for name, pair in other.items() if pair[0] != pair[1]}
