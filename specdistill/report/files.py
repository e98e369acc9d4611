"""The report's folder: written whole or not at all, read, and rendered again from its JSON files.

report.html: one self-contained file, the verdict first. Every value is escaped: names and model output come from outside.

The token view's data is each prompt's completion, round by round, as compact JSON that the page renders one prompt at a time. Where all
prompts would make the page too large, as many as fit are taken, evenly over the categories; samples.jsonl holds them all.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from pydantic import TypeAdapter, ValidationError

from specdistill.errors import ResourceError, UserError, refusing
from specdistill.files.documents import read_json
from specdistill.files.folders import check_writable
from specdistill.report import charts, phrases, tables
from specdistill.report.draft_lengths import by_load, fastest_lengths
from specdistill.report.schema import ReportDocument, schema
from specdistill.report.text import to_markdown
from specdistill.statistics.metrics import MIN_BUCKET_DRAFTS
from specdistill.statistics.records import (
    ALL,
    PromptRecord,
    read_records,
    records_of,
    write_records,
)
from specdistill.suites.suite import evenly
from specdistill.terminal import printable

REPORT, SAMPLES = "report.json", "samples.jsonl"
FILES = (REPORT, SAMPLES, "report.md", "report.html", "junit.xml")
JUDGED = (
    "gate",
    "baseline",
    "digest",
)  # parts of a report that change when it is judged again, and the hash of all others
SCALARS = ("number", "integer", "boolean")
ROW_IDENTITY = (
    "num_speculative_tokens",
    "temperature",
    "batch_size",
)  # numbers of a row that are its configuration
MAX_BYTES = 4_000_000  # of the embedded JSON, so that a page stays below 5 MB and opens at once
PROMPT_CHARACTERS = 400  # shown of a prompt's end


def write_report(folder: Path, report: Mapping[str, Any], records: Sequence[PromptRecord]) -> None:
    """Write report.json, samples.jsonl and what is rendered from them; nothing appears in `folder` before everything is ready."""
    validate(report)
    with staged(folder) as staging:
        text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
        (staging / REPORT).write_text(f"{text}\n", encoding="utf-8")
        write_records(records, staging / SAMPLES)
        render(staging)


def check_replaceable(folder: Path, key: str, names: Sequence[str] = FILES) -> None:
    """Raises UserError for a folder that cannot be written, and for files that are to be written there and are somebody else's.

    names: of the files; the first one, a report or a comparison, says whose they are.
    """
    check_writable(folder, key)
    there, is_own = next((name for name in names if (folder / name).exists()), None), False
    with suppress(OSError, ValueError, TypeError):
        is_own = "specdistill_version" in read_json(folder / names[0])
    if there is not None and not is_own:
        raise UserError(
            key,
            got=f"{folder}, which holds {there} and no {names[0]} of specdistill",
            expected="a new folder",
        )


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder to write files into; they move to `folder` at the end, JSON first. Raises ResourceError when the disk fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".report-") as name:
            yield Path(name)
            for path in sorted(Path(name).iterdir(), key=lambda path: path.suffix != ".json"):
                os.replace(path, folder / path.name)
    except OSError as error:
        raise ResourceError(
            f"could not write to {folder} ({error.strerror})", next_step="free the disk"
        ) from error


def digest(report: Mapping[str, Any], records: Sequence[PromptRecord]) -> str:
    """sha256 of what was measured, to be taken when it was: of a report without its verdict (JUDGED), and of its records."""
    measured = {name: part for name, part in report.items() if name not in JUDGED}
    content = json.dumps(
        [measured, [asdict(record) for record in records]], sort_keys=True, allow_nan=False
    )
    return hashlib.sha256(content.encode()).hexdigest()


def read_report(path: Path, key: str = "report") -> tuple[dict[str, Any], list[PromptRecord]]:
    """report.json (or its folder) and the records next to it. Raises UserError when either is missing or invalid."""
    path = path / REPORT if path.is_dir() else path
    return read_document(path, key), read_records(path.parent / SAMPLES, key)


def read_document(path: Path, key: str = "report") -> dict[str, Any]:
    """report.json (or its folder) alone. Raises as `read_report`."""
    path = path / REPORT if path.is_dir() else path
    with refusing((OSError, ValueError), key, path, "a report.json"):
        report: dict[str, Any] = read_json(path)
    validate(report, str(path), key)
    return report


def render(folder: Path) -> None:
    """report.md, report.html and junit.xml from report.json and samples.jsonl, and from nothing else."""
    report, records = read_report(folder)
    (folder / "report.md").write_text(to_markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(to_html(report, records), encoding="utf-8")
    junit = template("report/junit.xml.j2").render(report=report)
    (folder / "junit.xml").write_text(
        f"{printable(junit)}\n", encoding="utf-8"
    )  # XML cannot hold the other characters


@cache
def _adapter() -> TypeAdapter[ReportDocument]:
    return TypeAdapter(ReportDocument)


def validate(report: Any, name: str = "report.json", key: str = "report") -> None:
    """Raises UserError that names the first field that does not fit the schema."""
    try:
        _adapter().validate_python(report)
    except ValidationError as error:
        wrong = error.errors()[0]
        place = ".".join(map(str, wrong["loc"])) or "the whole document"
        expected = "a report of schema version 2: measure again with this specdistill"
        raise UserError(
            key, got=f"{name} with {place}: {wrong['msg'][:200]}", expected=expected
        ) from error


@cache
def row_metrics() -> tuple[str, ...]:
    """Numbers of a result row that a rule can test."""
    fields = schema()["$defs"]["ResultDocument"]["properties"]
    return tuple(
        name
        for name, field in fields.items()
        if field.get("type") in SCALARS and name not in ROW_IDENTITY
    )


@cache
def document_metrics() -> tuple[str, ...]:
    """Dotted paths of the numbers and booleans outside the result rows, e.g. `lossless.greedy_identical`."""
    return tuple(_scalars(schema()))


def _scalars(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, field in node.get("properties", {}).items():
        field = schema()["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else field
        if field.get("type") in SCALARS and prefix:
            yield f"{prefix}{name}"
        elif name != "gate":
            yield from _scalars(field, f"{prefix}{name}.")


@cache
def template(name: str) -> Template:
    """By its path in the package. All values are escaped; a missing value is an error."""
    loader = PackageLoader("specdistill", ".")
    templates = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    templates.filters |= {
        name: getattr(phrases, name) for name in ("number", "times", "percent", "interval")
    }
    templates.filters["at_k"] = charts.at_k
    templates.globals |= {"phrases": phrases, "tables": tables, "charts": charts}
    return templates.get_template(name)


def to_html(report: Mapping[str, Any], records: Sequence[PromptRecord]) -> str:
    row = report["results"][0]
    main_records = records_of(row, records)
    contexts = [
        context for context in report["context"] if context["num_drafts"] >= MIN_BUCKET_DRAFTS
    ]

    def swept(setting: str, shown: str) -> list[tuple[str, Mapping[str, Any]]]:
        return [
            (shown.format(line[setting]), line)
            for line in tables.sweep(report, setting)
            if line[setting] != ALL
        ]

    return template("report/report.html.j2").render(
        title=phrases.title(report),
        verdict=phrases.verdict(report),
        settings=phrases.settings_line(report),
        created=report["created"],
        report=report,
        row=row,
        named=[(phrases.row_name(line), line) for line in tables.main_rows(report)],
        swept=swept,
        contexts=[(context["bucket"].replace("-", " to "), context) for context in contexts],
        min_drafts=MIN_BUCKET_DRAFTS,
        by_k=tables.sweep(report, "num_speculative_tokens") or [row],
        by_load=by_load(fastest_lengths(report)),
        latency=tables.latency(main_records),
        samples=samples(main_records),
        num_records=len(main_records),
    )


def to_picture(report: Mapping[str, Any], records: Sequence[PromptRecord]) -> str:
    """The verdict, the numbers, a marked completion and the positions as one SVG, for pages that others keep."""
    row = report["results"][0]
    varied = sorted(
        records_of(row, records), key=lambda record: -len(set(record.token_ids))
    )  # a loop shows little
    sample = next(iter(samples(varied)), None)
    return printable(
        template("report/picture.svg.j2").render(report=report, row=row, sample=sample)
    )


def samples(records: Sequence[PromptRecord], max_bytes: int = MAX_BYTES) -> list[dict[str, Any]]:
    """One sample for each prompt whose rounds are known, in the order of the records, `max_bytes` of JSON at most."""
    records = [record for record in records if record.counts is None]
    every = [_sample(record) for record in records]
    sizes = [
        len(json.dumps(sample, ensure_ascii=False, separators=(",", ":")).encode()) + 1
        for sample in every
    ]
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
    ours, plain = (
        record.speculative,
        record.baseline if record.configuration.batch_size == 1 else None,
    )
    return {
        "id": record.id,
        "category": record.category.replace("_", " "),
        "prompt": record.prompt
        if len(record.prompt) <= PROMPT_CHARACTERS
        else f"…{record.prompt[-PROMPT_CHARACTERS:]}",
        "first": record.first_token_text,
        "rounds": [
            [
                one.emitted_text,
                len(one.accepted),
                one.drafted_text[len(one.accepted) :],
                *filter(None, [one.num_off_path]),
            ]
            for one in record.rounds
        ],
        "length": round(1 + sum(accepted for _, accepted in drafts) / len(drafts), 2)
        if drafts
        else None,
        "speedup": round((ours.num_tokens / ours.seconds) / (plain.num_tokens / plain.seconds), 2)
        if plain
        else None,
    }
