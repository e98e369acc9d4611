"""Compare a draft with figures that others have published: `specdistill compare published=NAME`.

A file in `eval/published` holds the figures, and the protocol with which they were measured. The
draft is measured now with this protocol (`draft=…`), or was measured before (`report=…`). A report
with another protocol is refused, because the difference of its acceptance length would say nothing
about the draft.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from specdistill.common.documents import read_keys
from specdistill.common.errors import ExitCode, UserError
from specdistill.common.project import PUBLISHED_FOLDER, find_yaml
from specdistill.common.terminal import print_result
from specdistill.evaluation.report.files import read_document
from specdistill.evaluation.report.phrases import (
    Report,
    ResultRow,
    describe_tree,
    format_bracketed_interval,
    format_number,
    format_per_position,
    lookup_first,
)
from specdistill.evaluation.report.text import format_table
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_own_keys, validate_recipe
from specdistill.recipe.short_keys import SHORTHANDS, rename_keys_as_typed, select_recipe_keys

# A part of the protocol -> the key of `specdistill eval` that sets it. A report must agree with the
# published figures in every part that their source states.
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
CHAIN_TEXT = "a chain of K tokens"  # how the published figures were drafted
OWN_ENGINE = "specdistill"  # the `engine` of figures that were measured without an engine


class PublishedFigure(Section):
    """The published figures at one K."""

    num_speculative_tokens: int = option(..., "K, draft tokens per round", ge=1)
    mean_acceptance_length: float = option(
        ..., "1 + num_accepted_tokens / num_drafts, as vLLM counts", ge=1
    )
    acceptance_rate_per_position: list[float] = option(
        [],
        "for each of the K positions: the draft tokens accepted there, divided by num_drafts; []:"
        " not stated",
    )
    num_drafts: int | None = option(None, "rounds in which something was drafted", ge=1)
    num_accepted_tokens: int | None = option(None, "draft tokens that were accepted", ge=0)


class PublishedFigures(Section):
    """A file of published figures and their protocol, for drafts that are chains of K tokens.

    If a value is null, the source does not state it.
    """

    source: str = option(..., "URL of the source that states the figures")
    target: str = option(..., "Hub id of the target")
    draft: str | None = option(None, "Hub id of the draft that was measured")
    engine: str = option(..., "program that decoded: an engine, or specdistill")
    suite: str = option(..., "suite of prompts: the name of a file in eval/suites")
    category: str = option("all", "category of the suite; all: the whole suite")
    num_prompts: int | None = option(None, "number of prompts of the category", ge=1)
    temperature: float | None = option(None, "sampling temperature; 0 is greedy", ge=0)
    top_p: float | None = option(None, "nucleus sampling (top-p); 1: off", gt=0, le=1)
    top_k: int | None = option(None, "top-k sampling; 0: off", ge=0)
    max_new_tokens: int | None = option(None, "most tokens generated per prompt", ge=1)
    batch_size: int | None = option(None, "requests in flight at the same time", ge=1)
    template: dict[str, Any] = option({}, "arguments of the target's chat template")
    figures: list[PublishedFigure] = option(
        ..., "published figures, one entry for each K", min_length=1
    )

    def keys(self) -> list[str]:
        """Return the arguments with which `specdistill eval` measures a draft by this protocol.

        The protocol is how the published figures were measured: suite, temperature and so on. If
        the figures are about one category, the whole suite is measured, which includes it.
        """
        # Set every part of the protocol that the source states. The first K is measured in the main
        # configuration.
        first, *remaining = (figure.num_speculative_tokens for figure in self.figures)
        keys = {
            key: getattr(self, name)
            for name, key in PROTOCOL.items()
            if getattr(self, name) is not None
        }
        keys["eval.num_speculative_tokens"] = first

        # Sweep the other values of K.
        if remaining:
            keys["eval.sweep.num_speculative_tokens"] = ",".join(map(str, remaining))

        # The published number of prompts is that of the category, so it is not set for the whole
        # suite. Without the key eval.engine, the draft is measured in this process.
        if self.category != "all":
            keys.pop("eval.num_prompts", None)
        if self.engine == OWN_ENGINE:
            del keys["eval.engine"]
        return [f"{key}={value}" for key, value in keys.items()]


class PublishedOptions(Section):
    """The keys of `specdistill compare published=…`."""

    published: str = option(
        ..., "published figures to compare with: a name under eval/published, or a YAML file"
    )
    report: str | None = option(
        None, "with published=: a report that was measured before, as report.json or its folder"
    )
    draft: str | None = option(
        None, "with published=: a draft to measure now, with any keys of eval"
    )


def load_published(name: str) -> PublishedFigures:
    """Load published figures by the name of a file in `eval/published`, or by the path of a file.

    Raises:
        UserError: for an unknown name, and for a file that does not hold published figures.
    """
    path = find_yaml(name, PUBLISHED_FOLDER, "published")
    return validate_recipe(
        PublishedFigures, read_keys(path, "published", "published figures"), f"{path.name}: "
    )


def compare_published(
    arguments: Sequence[str], measure: Callable[[list[str]], tuple[Report, Path]]
) -> int:
    """Run `specdistill compare published=…`: compare a draft with published figures.

    The result is printed to stdout.

    Args:
        arguments: the arguments of the command. They name a report, or a draft to measure now.
        measure: a function that measures a draft. It takes arguments of `specdistill eval`, and
            returns the report and its folder.

    Returns:
        The exit code.

    Raises:
        UserError: for arguments that name both a report and a draft, or neither, and for a report
            that was measured with another protocol.
    """
    options, eval_arguments = load_own_keys(PublishedOptions, arguments)
    published = load_published(options.published)

    # Arguments of `specdistill eval` say what to measure now. They exclude an existing report.
    draft_argument = [f"draft={options.draft}"] if options.draft else []
    keys = select_recipe_keys([*eval_arguments, *draft_argument], SHORTHANDS)
    if options.report is not None and keys:
        raise UserError(
            "report",
            got=f"{options.report}, and {keys[0]}",
            expected="either a report, or the keys of a draft to measure now",
        )
    if options.report is None and not keys:
        raise UserError(
            "report",
            got="nothing",
            expected=(
                "a report.json, or a draft to measure now, e.g. method=eagle3 draft=path/to/draft."
                f" It is measured with {' '.join(published.keys())}"
            ),
        )

    # Measure the draft, or read the report.
    if options.report is None:
        with rename_keys_as_typed(arguments, SHORTHANDS):
            report, folder = measure([*published.keys(), *keys])
    else:
        report = read_document(Path(options.report))
        folder = Path(options.report)

    # Pair the rows of the report with the figures of the same K. Print them as a table, and as JSON
    # for programs.
    pairs = match_figures(published, report, f"{folder}")
    _print_pairs(pairs)
    _print_source(published)
    result = []
    for figure, row in pairs:
        verdict = compare_with_figure(row, figure)
        result.append({"published": figure, "measured": row, "verdict": verdict})
    print_result(result)
    return ExitCode.DONE


def _print_pairs(pairs: Sequence[tuple[PublishedFigure, ResultRow]]) -> None:
    """Print a table with each published figure next to what was measured at the same K.

    Args:
        pairs: a published figure, and the row of the report with the same K.
    """
    head = (
        "K",
        "published",
        "by position",
        "measured (95% interval)",
        "by position",
        "the report is",
    )

    # Measured values have a confidence interval. Published figures have none.
    table_rows = []
    for figure, row in pairs:
        measured = format_number(row["acceptance_length_vllm"])
        measured += format_bracketed_interval(row, "acceptance_length_vllm")
        table_rows.append(
            (
                str(figure.num_speculative_tokens),
                format_number(figure.mean_acceptance_length),
                format_per_position(vars(figure)),
                measured,
                format_per_position(row),
                compare_with_figure(row, figure),
            )
        )
    print(format_table(head, table_rows))


def _print_source(published: PublishedFigures) -> None:
    """Print where the published figures are from, and which settings could not be compared.

    A setting cannot be compared if the source of the figures does not state it. Arguments of the
    chat template can never be compared, because reports do not record them.
    """
    print(
        "\nAcceptance lengths are 1 + accepted / drafts, as vLLM counts them. Published in:"
        f" {published.source}"
    )
    unstated = ", ".join(name for name in PROTOCOL if getattr(published, name) is None)
    if unstated:
        print(f"Not compared, because the source does not state it: {unstated}.")
    if published.template:
        print(
            "Not compared, because reports do not record them: the arguments of the chat template,"
            f" {published.template} in the source."
        )


def match_figures(
    published: PublishedFigures, report: Report, name: str
) -> list[tuple[PublishedFigure, ResultRow]]:
    """Pair published figures with the rows of a report that were measured in the same way.

    That is, with the same protocol: target, suite, temperature and other settings, and the same K.

    Args:
        published: the published figures.
        report: the report.
        name: the name of the report in errors.

    Returns:
        Pairs of a figure and a row with the same K.

    Raises:
        UserError: for a report without such a row. The error says what differs.
    """
    # Select the rows of the published category. Rows about prompts that were cut to a certain
    # length (context_bucket) do not count.
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

    # List for each row how it differs from the published protocol; an empty dict if it does not.
    differing = [list_differences(published, report, row) for row in rows]

    # If every row differs, the error shows the row with the fewest differences.
    if all(differing):
        fewest = min(differing, key=len)
        got = ", ".join(f"{part} {measured}" for part, (measured, _) in fewest.items())
        expected = ", ".join(
            f"{part} {published_value}" for part, (_, published_value) in fewest.items()
        )
        raise UserError("report", got=f"{name} with {got}", expected=f"{expected}, as published")
    return [
        (figures[row["num_speculative_tokens"]], row)
        for row, protocol_differences in zip(rows, differing, strict=True)
        if not protocol_differences
    ]


def compare_with_figure(
    row: ResultRow, figure: PublishedFigure
) -> Literal["above", "below", "not separable"]:
    """Return whether a measured acceptance length is above or below the published figure.

    The whole confidence interval must lie on one side of the figure, which is taken as exact. A row
    without an interval is not separable from the figure.

    Args:
        row: the row of the report with the measured acceptance length.
        figure: the published figure at the same K.
    """
    # Without an interval, take the figure itself for both ends: the result is `not separable`.
    published_length = figure.mean_acceptance_length
    low, high = row.get("acceptance_length_vllm_ci95") or (published_length, published_length)
    if low > published_length:
        return "above"
    if high < published_length:
        return "below"
    return "not separable"


def list_differences(
    published: PublishedFigures, report: Report, row: ResultRow
) -> dict[str, tuple[object, object]]:
    """List how the protocol of a report's row differs from that of the published figures.

    The protocol is how the figures were measured: target, suite, temperature and other settings.

    Args:
        published: the published figures.
        report: the report.
        row: a row of its results.

    Returns:
        Part of the protocol -> the row's value and the published value. Empty if all are equal.
    """
    # Pair the row's values with the published ones, as far as the source states them. A report that
    # names no engine was measured by specdistill itself.
    settings = report["settings"]
    measured = {
        "target": report["target"]["model"],
        "engine": report.get("engine", {"name": OWN_ENGINE})["name"],
        **{name: settings[name] for name in ("top_p", "top_k", "max_new_tokens")},
        **{name: row[name] for name in ("suite", "num_prompts", "temperature", "batch_size")},
    }
    compared = {
        name: (measured[name], getattr(published, name))
        for name in PROTOCOL
        if getattr(published, name) is not None
    }

    # Published figures are about drafts that are chains of K tokens, at some values of K. The row
    # may be about a lookup in front of the draft, or about a tree.
    lookup_text = lookup_first(settings)
    drafting = lookup_text or describe_tree(row["tree"]) or CHAIN_TEXT
    compared["drafting"] = (drafting, CHAIN_TEXT)
    ks = [figure.num_speculative_tokens for figure in published.figures]
    k = row["num_speculative_tokens"]
    if k not in ks:
        compared["K"] = (k, " or ".join(map(str, ks)))
    if "acceptance_length_vllm" not in row:
        compared["acceptance length"] = ("not measured", "a number")
    return {
        name: (measured_value, published_value)
        for name, (measured_value, published_value) in compared.items()
        if measured_value != published_value
    }
