"""report.html: one self-contained file, the verdict first. Every value is escaped: names and model output come from outside.

The token view's data is each prompt's completion, round by round, as compact JSON that the page renders one prompt at a time. Where all
prompts would make the page too large, as many as fit are taken, evenly over the categories; samples.jsonl holds them all.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from specdistill.report import charts, phrases, tables
from specdistill.statistics.metrics import MIN_BUCKET_DRAFTS
from specdistill.statistics.records import ALL, PromptRecord, records_of
from specdistill.suites.suite import evenly

NUM_PLAIN_SAMPLES = 3  # completions shown where scripts do not run
MAX_BYTES = 4_000_000  # of the embedded JSON, so that a page stays below 5 MB and opens at once
PROMPT_CHARACTERS = 400  # shown of a prompt's end


def template(name: str) -> Template:
    """By its path in the package. All values are escaped; a missing value is an error."""
    loader = PackageLoader("specdistill", ".")
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    templates.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    templates.filters |= {name: getattr(phrases, name) for name in ("number", "times", "percent", "interval")}
    templates.filters["at_k"] = charts.at_k
    templates.filters["label"] = lambda name: name if len(name) == 1 else name[:1].upper() + name[1:]  # a symbol stays as it is
    templates.globals |= {"phrases": phrases, "tables": tables, "charts": charts}
    return templates.get_template(name)


def to_html(report: Mapping[str, Any], records: Sequence[PromptRecord]) -> str:
    row, main = report["results"][0], tables.main_rows(report)
    main_records = records_of(row, records)
    contexts = [context for context in report["context"] if context["num_drafts"] >= MIN_BUCKET_DRAFTS]

    def swept(setting: str, shown: str) -> list[tuple[str, Mapping[str, Any]]]:
        return [(shown.format(line[setting]), line) for line in tables.sweep(report, setting) if line[setting] != ALL]

    return template("report/report.html.j2").render(
        title=phrases.title(report),
        verdict=phrases.verdict(report),
        settings=phrases.settings_line(report),
        created=report["created"],
        report=report,
        row=row,
        named=[(phrases.row_name(line), line) for line in main],
        num_configurations=len(tables.whole_rows(report)),
        swept=swept,
        contexts=[(context["bucket"].replace("-", " to "), context) for context in contexts],
        min_drafts=MIN_BUCKET_DRAFTS,
        by_k=tables.sweep(report, "num_speculative_tokens") or [row],
        per_token=tables.time_per_token(main_records),
        latency=tables.latency(main_records),
        samples=samples(main_records),
        num_plain_samples=NUM_PLAIN_SAMPLES,
        num_records=len(main_records),
    )


def samples(records: Sequence[PromptRecord], max_bytes: int = MAX_BYTES) -> list[dict[str, Any]]:
    """One sample for each prompt whose rounds are known, in the order of the records, `max_bytes` of JSON at most."""
    records = [record for record in records if record.counts is None]
    every = [_sample(record) for record in records]
    sizes = [len(json.dumps(sample, ensure_ascii=False, separators=(",", ":")).encode()) + 1 for sample in every]
    chosen = list(range(len(every)))
    while (size := sum(sizes[index] for index in chosen)) > max_bytes:
        count = min(len(chosen) - 1, len(chosen) * max_bytes // size)
        chosen = evenly(range(len(every)), [record.category for record in records], count)
    return [every[index] for index in chosen]


def _sample(record: PromptRecord) -> dict[str, Any]:
    """A round is [emitted tokens, how many of them were drafted, rejected draft tokens], as text; for a tree these along one path, and
    the number of other nodes. The speedup is None without a baseline, and in a batch, whose prompts share its times.
    """
    drafts = record.drafts()
    ours, plain = record.speculative, record.baseline if record.configuration.batch_size == 1 else None
    return {
        "id": record.id,
        "category": record.category.replace("_", " "),
        "prompt": record.prompt if len(record.prompt) <= PROMPT_CHARACTERS else f"…{record.prompt[-PROMPT_CHARACTERS:]}",
        "first": record.first_token_text,
        "rounds": [
            [one.emitted_text, len(one.accepted), one.drafted_text[len(one.accepted) :], *filter(None, [one.num_off_path])]
            for one in record.rounds
        ],
        "length": round(1 + sum(accepted for _, accepted in drafts) / len(drafts), 2) if drafts else None,
        "speedup": round((ours.num_tokens / ours.seconds) / (plain.num_tokens / plain.seconds), 2) if plain else None,
    }
