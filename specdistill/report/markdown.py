"""report.md: the report as a page that fits a CI job's summary: the verdict, what changed, the rules, the main numbers.

A summary may hold 1 MiB on GitHub; this page has a line a rule, a category, a cell and a change, and nothing else that grows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from specdistill.report.rows import main_rows, whole_rows
from specdistill.report.wording import (
    absences,
    between,
    changed,
    configuration_name,
    failed_rules,
    greedy_texts,
    measured,
    number,
    outcome,
    percent,
    quality,
    requirement,
    row_name,
    scope,
    settings_line,
    since,
    summary,
    times,
    title,
    verdict,
)


def to_markdown(report: Mapping[str, Any]) -> str:
    sections = [
        f"# {verdict(report)}: {plain(title(report))}",
        summary(report),
        failed_rules(report),
        plain(settings_line(report)),
        "\n".join(f"- **{plain(finding['name'])}**: {plain(finding['message'])}" for finding in report["findings"]),
        *_since(report),
        *_gate(report),
        "## Results",
        table(("category", *NUMBERS), ((plain(row_name(row)), *_numbers(row)) for row in main_rows(report))),
        _headline(report),
        _not_measured(report["results"][0]),
        *_sweep(report),
        "## Losslessness",
        _lossless(report),
        *_quality(report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


NUMBERS = ("prompts", "acceptance length", "acceptance rate", "per position", "tokens/s / plain", "speedup", "predicted")


def _since(report: Mapping[str, Any]) -> Iterator[str]:
    if "baseline" not in report:
        return
    yield "## Since the last release"
    yield plain(since(report))
    lines = [changed(entry) for entry in report["baseline"]["changes"]]
    yield table(
        ("number", "before", "now", "change", "95 %", ""),
        (
            (plain(line["what"]), line["old"], line["new"], line["change"], plain(line["ci95"]), line["outcome"])
            for line in lines
        ),
    )


def _gate(report: Mapping[str, Any]) -> Iterator[str]:
    if not report["gate"]["rules"]:
        return
    yield "## Gate"
    yield table(
        ("", "metric", "scope", "required", "measured", "why"),
        (
            (outcome(rule), rule["metric"], plain(scope(rule)), requirement(rule), measured(rule), plain(rule["reason"]))
            for rule in report["gate"]["rules"]
        ),
    )


def _sweep(report: Mapping[str, Any]) -> Iterator[str]:
    rows = whole_rows(report)
    if len(rows) > 1:
        yield "## Cells"
        yield table(("cell", *NUMBERS), ((plain(configuration_name(row)), *_numbers(row)) for row in rows))


def _not_measured(row: Mapping[str, Any]) -> str:
    absent = absences(row, ("mean_acceptance_length", "speedup", "predicted_speedup"))
    return f"Not measured: {plain(absent)}." if absent else ""


def _numbers(row: Mapping[str, Any]) -> tuple[str, ...]:
    rates = row.get("acceptance_rate_per_position", [])
    return (
        str(row["num_prompts"]),
        number(row.get("mean_acceptance_length")) + between(row, "mean_acceptance_length"),
        percent(row.get("acceptance_rate")),
        " ".join(percent(rate) for rate in rates) or "–",
        f"{number(row.get('tokens_per_second'), 0)} / {number(row.get('baseline_tokens_per_second'), 0)}",
        times(row.get("speedup")) + between(row, "speedup"),
        times(row.get("predicted_speedup")),
    )


def _headline(report: Mapping[str, Any]) -> str:
    headline = report["headline"]
    if not headline:
        return ""
    micro = headline["micro"]
    return "\n".join(
        f"- {average['average']}: acceptance length **{number(average.get('mean_acceptance_length'))}**"
        f"{between(average, 'mean_acceptance_length')}, speedup **{times(average.get('speedup'))}**{between(average, 'speedup')}"
        for average in (headline, micro)
    )


def _lossless(report: Mapping[str, Any]) -> str:
    lossless = report["lossless"]
    lines = [f"- greedy: {greedy_texts(report)}"]
    test = lossless.get("sampling_test")
    if test:
        lines.append(
            f"- sampled: chi-square p = {test['p_value']:.3g} over {test['num_draws']} draws; "
            f"a rule wrong on purpose gives p = {test['negative_control_p_value']:.2g}"
        )
    else:
        lines.append(f"- sampled: {report['not_measured']['lossless.sampling_test']}")
    return "\n".join(lines)


def _quality(report: Mapping[str, Any]) -> Iterator[str]:
    lines = quality(report)
    if lines:
        yield "## Task quality"
        yield table(
            ("succeed by", "texts", "without draft", "with draft", "difference, points", "95 %", ""),
            (
                (
                    plain(line["name"]),
                    *(line[name] for name in ("texts", "without", "with", "difference", "ci95", "outcome")),
                )
                for line in lines
            ),
        )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines]) if lines else ""


def plain(text: str) -> str:
    """Names come from outside: they are shown as they are and cannot become markup."""
    escaped = "".join(f"\\{character}" if character in "\\`*_[]<>|#" else character for character in text)
    return " ".join(escaped.split())
