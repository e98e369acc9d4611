"""The folder of a report: written completely or not at all, read, and rendered from its JSON files.

report.html is one self-contained file, which shows the verdict first. Every value is escaped: names
and model output come from outside.

The page's token view has the completion of each prompt, round by round, as compact JSON that the
page renders one prompt at a time. If all prompts would make the page too large, it has as many as
fit, chosen evenly over the categories. samples.jsonl holds all of them.

Several reports can be summarized in a Markdown table with a row for each.
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

from specdistill.common.documents import read_json
from specdistill.common.errors import ResourceError, UserError, convert_errors
from specdistill.common.folders import check_writable
from specdistill.common.terminal import make_printable
from specdistill.evaluation.report import charts, phrases, tables
from specdistill.evaluation.report.phrases import (
    Report,
    format_bracketed_interval,
    format_number,
    format_times,
    is_lossless,
)
from specdistill.evaluation.report.schema import ReportDocument, build_schema
from specdistill.evaluation.report.tables import find_fastest_lengths, tabulate_by_load
from specdistill.evaluation.report.text import escape_markdown, format_table, to_markdown
from specdistill.evaluation.statistics.metrics import MIN_BUCKET_ROUNDS
from specdistill.evaluation.statistics.records import (
    ALL_PROMPTS,
    PromptRecord,
    read_records,
    select_records,
    write_records,
)
from specdistill.evaluation.suites.suite import select_evenly

REPORT = "report.json"
SAMPLES = "samples.jsonl"
FILES = (REPORT, SAMPLES, "report.md", "report.html", "junit.xml")
# Parts of a report that change when the gate judges it again, and `digest`, the hash of all other
# parts.
JUDGED_PARTS = ("gate", "baseline", "digest")
SCALARS = ("number", "integer", "boolean")  # types of JSON Schema that a gate's rule can test
# Numbers of a row that belong to its configuration.
ROW_IDENTITY = ("num_speculative_tokens", "temperature", "batch_size")
Sample = dict[str, object]  # a prompt of the token view, as its script reads it
SummaryNumbers = dict[str, Any]  # the numbers of one report, by column
MAX_BYTES = 4_000_000  # of the embedded JSON, so that a page stays below 5 MB and opens at once
# How many characters of a long prompt are shown: its end, which the completion follows. More would
# push the completion off the screen.
PROMPT_CHARACTERS = 400
NUM_VISIBLE_TOKENS = 48  # about as many tokens of a completion as the picture has room for
# The columns of the table of several reports.
SUMMARY_HEAD = (
    "method",
    "draft",
    "target",
    "suite",
    "K",
    "acceptance length",
    "speedup",
    "lossless",
    "verdict",
)


def write_report(folder: Path, report: Report, records: Sequence[PromptRecord]) -> None:
    """Write report.json, samples.jsonl and the pages that are rendered from them.

    Nothing appears in `folder` before all files are complete.

    Args:
        folder: the folder of the report, which is created if it does not exist.
        report: the content of report.json.
        records: the records of all prompts, for samples.jsonl.
    """
    validate_report(report)

    # Write the two JSON files to a temporary folder, and render the pages from them. `stage_files`
    # then moves all files to `folder`.
    with stage_files(folder) as staging:
        text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        (staging / REPORT).write_text(text, encoding="utf-8")
        write_records(records, staging / SAMPLES)
        render(staging)


def check_replaceable(folder: Path, key: str, names: Sequence[str] = FILES) -> None:
    """Check that report files can be written to a folder without overwriting foreign files.

    Args:
        folder: the folder, which need not exist.
        key: the setting that named the folder, for errors.
        names: the names of the files to be written. The first one is a JSON document (a report or a
            comparison).

    Raises:
        UserError: for a folder that cannot be written, and for existing files that specdistill did
            not write.
    """
    check_writable(folder, key)

    # Existing files may be replaced if the JSON document is one of them and says that specdistill
    # wrote it.
    existing_names = [name for name in names if (folder / name).exists()]
    is_from_specdistill = False
    with suppress(OSError, ValueError, TypeError):
        is_from_specdistill = "specdistill_version" in read_json(folder / names[0])
    if existing_names and not is_from_specdistill:
        raise UserError(
            key,
            got=(
                f"{folder}, which has a file {existing_names[0]}, but no {names[0]} with a"
                " specdistill_version"
            ),
            expected="a new folder, so that no foreign file is overwritten",
        )


@contextmanager
def stage_files(folder: Path) -> Iterator[Path]:
    """Provide a temporary folder for a `with` block, and move its files to `folder` afterwards.

    So `folder` never has half-written files. If the block raises an error, nothing is moved.

    Args:
        folder: the final folder, which is created if it does not exist.

    Raises:
        ResourceError: if the files cannot be written, e.g. because the disk is full.
    """
    try:
        # The temporary folder is inside the final one, so files move within one file system.
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".report-") as name:
            yield Path(name)

            # Move report.json or comparison.json first, then the records, then the pages. If this
            # is interrupted, no page is newer than the data that it shows.
            data_first = [".json", ".jsonl"]
            for path in sorted(
                Path(name).iterdir(),
                key=lambda path: data_first.index(path.suffix) if path.suffix in data_first else 2,
            ):
                os.replace(path, folder / path.name)
    except OSError as error:
        raise ResourceError(
            f"could not write to {folder} ({error.strerror})",
            next_step="free disk space or choose another folder",
        ) from error


def compute_digest(report: Report, records: Sequence[PromptRecord]) -> str:
    """Return the sha256 of a measurement: of its report without the verdict, and of all records.

    The digest is computed right after the measurement. A release computes it again from the files
    and compares, so that nobody edits the files unnoticed. The parts of the report in JUDGED_PARTS
    are left out, because a report may be judged again.
    """
    measured = {name: part for name, part in report.items() if name not in JUDGED_PARTS}
    content = json.dumps(
        [measured, [asdict(record) for record in records]], sort_keys=True, allow_nan=False
    )
    return hashlib.sha256(content.encode()).hexdigest()


def read_report(path: Path, key: str = "report") -> tuple[Report, list[PromptRecord]]:
    """Read report.json, and the records of all prompts from samples.jsonl next to it.

    Args:
        path: the path of report.json or of its folder.
        key: the setting that named the path, for errors.

    Raises:
        UserError: if one of the two files is missing or invalid.
    """
    path = path / REPORT if path.is_dir() else path
    return read_document(path, key), read_records(path.parent / SAMPLES, key)


def read_document(path: Path, key: str = "report") -> Report:
    """Read report.json and check it against the schema, without the records of the prompts.

    Args:
        path: the path of report.json or of its folder.
        key: the setting that named the path, for errors.

    Raises:
        UserError: if report.json is missing or invalid.
    """
    path = path / REPORT if path.is_dir() else path
    with convert_errors((OSError, ValueError), key, path, "a report.json"):
        report: Report = read_json(path)
    validate_report(report, str(path), key)
    return report


def render(folder: Path) -> None:
    """Write report.md, report.html and junit.xml, made from the JSON files in the same folder.

    The JSON files are report.json and samples.jsonl. Nothing else is read, so a report can be
    rendered again on another machine.

    Args:
        folder: the folder of the report.
    """
    report, records = read_report(folder)

    # Render the three pages.
    (folder / "report.md").write_text(to_markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(to_html(report, records), encoding="utf-8")
    junit = load_template("evaluation/report/junit.xml.j2").render(report=report)
    # XML 1.0 forbids control characters, so `make_printable` replaces them.
    (folder / "junit.xml").write_text(f"{make_printable(junit)}\n", encoding="utf-8")


@cache
def _build_adapter() -> TypeAdapter[ReportDocument]:
    """Return the pydantic validator of reports, which takes long to build and is built once."""
    return TypeAdapter(ReportDocument)


def validate_report(report: object, name: str = "report.json", key: str = "report") -> None:
    """Raise UserError if a report does not fit the schema; the error names the first wrong field.

    The message of pydantic about the field is cut after 200 characters.

    Args:
        report: the content of a report.json.
        name: the name of the file, for the error.
        key: the setting that named the file, for the error.
    """
    try:
        _build_adapter().validate_python(report)
    except ValidationError as error:
        first_error = error.errors()[0]
        field = ".".join(map(str, first_error["loc"])) or "the whole document"
        raise UserError(
            key,
            got=f"{name} with {field}: {first_error['msg'][:200]}",
            expected="a report of schema version 3: measure again with this version of specdistill",
        ) from error


@cache
def list_row_metrics() -> tuple[str, ...]:
    """Return the names of the numbers in a row of the report that a rule of the gate can test.

    These are all numbers and booleans of a row in the JSON Schema, e.g. `speedup`, except those
    that say what was measured (ROW_IDENTITY), such as the temperature.
    """
    fields = build_schema()["$defs"]["ResultDocument"]["properties"]
    return tuple(
        name
        for name, field in fields.items()
        if field.get("type") in SCALARS and name not in ROW_IDENTITY
    )


@cache
def list_document_metrics() -> tuple[str, ...]:
    """Return the names of the numbers in a report, outside its rows, that a gate rule can test.

    Booleans are included. A name is the dotted path of a number in the report, e.g.
    `lossless.greedy_identical`.
    """
    return tuple(_list_scalars(build_schema()))


def _list_scalars(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of the numbers and booleans that a rule of the gate can test.

    These are all numbers and booleans below an object of the report's JSON Schema, with two
    exceptions: those at the top level of the report, which describe the file, and those of the
    section `gate`, which has the verdict itself.

    Args:
        node: the schema of the object. Its fields are in `properties`.
        prefix: the path of the object, with a dot at the end; empty for the report itself.
    """
    for name, field in node.get("properties", {}).items():
        # A field with `$ref` is described elsewhere, under `$defs`.
        if "$ref" in field:
            definition_name = field["$ref"].rpartition("/")[2]
            field = build_schema()["$defs"][definition_name]

        if field.get("type") in SCALARS:
            if prefix:  # not at the top level
                yield f"{prefix}{name}"
        elif name != "gate":
            yield from _list_scalars(field, f"{prefix}{name}.")


@cache
def load_template(name: str) -> Template:
    """Load a Jinja template of the package, with the filters and functions that reports use.

    Args:
        name: the path of the template inside the package.
    """
    # Escape all values, because names and model output come from outside. A missing value is an
    # error (StrictUndefined).
    templates = Environment(
        loader=PackageLoader("specdistill", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    # Write JSON without spaces and with Unicode characters, so that more prompts fit into a page.
    templates.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}

    # Templates write numbers with the same functions as the other formats.
    templates.filters |= {
        "number": phrases.format_number,
        "times": phrases.format_times,
        "percent": phrases.format_percent,
        "interval": phrases.format_interval,
    }
    templates.filters["at_k"] = charts.format_speedup_at_k
    templates.globals |= {"phrases": phrases, "tables": tables, "charts": charts}
    return templates.get_template(name)


def to_html(report: Report, records: Sequence[PromptRecord]) -> str:
    """Return the content of report.html, a page that needs no other files.

    Args:
        report: the content of report.json.
        records: the records of all prompts. Those of the main configuration are shown in the page.
    """
    # The first row is that of the main configuration, for the whole suite.
    row = report["results"][0]
    main_records = select_records(row, records)

    # Ranges of context lengths with few rounds are not drawn, as they are mostly noise.
    contexts = [
        context for context in report["context"] if context["num_rounds"] >= MIN_BUCKET_ROUNDS
    ]

    def list_swept_rows(setting: str, name_format: str) -> list[tuple[str, phrases.ResultRow]]:
        """Return the rows of the report that differ only in one setting, each with a name to show.

        Args:
            setting: the setting that was varied, e.g. "temperature".
            name_format: the name of a row; {} stands for the value of the setting.
        """
        # A row is named by its number in this setting. Leave out the row that has "all"
        # (ALL_PROMPTS) in place of a number: its prompts were not cut to a length.
        return [
            (name_format.format(swept_row[setting]), swept_row)
            for swept_row in tables.sweep(report, setting)
            if swept_row[setting] != ALL_PROMPTS
        ]

    return load_template("evaluation/report/report.html.j2").render(
        title=phrases.format_title(report),
        verdict=phrases.format_verdict(report),
        settings=phrases.format_settings(report),
        created=report["created"],
        report=report,
        row=row,
        named=[(phrases.name_row(line), line) for line in tables.select_main_rows(report)],
        swept=list_swept_rows,
        contexts=[(context["bucket"].replace("-", " to "), context) for context in contexts],
        min_rounds=MIN_BUCKET_ROUNDS,
        by_k=tables.sweep(report, "num_speculative_tokens") or [row],
        by_load=tabulate_by_load(find_fastest_lengths(report)),
        latency=tables.tabulate_latency(main_records),
        samples=select_samples(main_records),
        num_records=len(main_records),
    )


def to_picture(report: Report, records: Sequence[PromptRecord]) -> str:
    """Return an SVG that sums up a report, for the draft's model card.

    The picture shows the verdict, the main numbers, the acceptance by position, and a completion in
    which the accepted draft tokens are marked.

    Args:
        report: the content of report.json.
        records: the records of all prompts.
    """
    row = report["results"][0]
    # Show the completion whose visible part has the largest number of different tokens. A
    # completion that repeats itself would show little.
    varied = sorted(
        select_records(row, records),
        key=lambda record: -len(set(record.token_ids[:NUM_VISIBLE_TOKENS])),
    )
    samples = select_samples(varied)
    template = load_template("evaluation/report/picture.svg.j2")
    return make_printable(
        template.render(report=report, row=row, sample=samples[0] if samples else None)
    )


def select_samples(records: Sequence[PromptRecord], max_bytes: int = MAX_BYTES) -> list[Sample]:
    """Return the completions to show token by token in report.html, as many as fit.

    Args:
        records: the records of the prompts. Those from a server are left out, because a server
            does not show its rounds.
        max_bytes: the most bytes that the samples may take as JSON. If there are too many, samples
            are left out evenly over the categories.

    Returns:
        The samples, in the order of the records.
    """
    # Build all samples and measure their JSON, with one byte for the comma after each. Records with
    # `counts` come from a server.
    records = [record for record in records if record.counts is None]
    samples = [_build_sample(record) for record in records]
    sizes = [
        len(json.dumps(sample, ensure_ascii=False, separators=(",", ":")).encode()) + 1
        for sample in samples
    ]

    # Choose fewer samples, evenly over the categories, until they fit. How many fit is estimated
    # from their mean size. Sizes differ, so this may take several attempts, each with at least one
    # sample less than the attempt before.
    categories = [record.category for record in records]
    chosen = list(range(len(samples)))
    while (size := sum(sizes[index] for index in chosen)) > max_bytes:
        count = min(len(chosen) - 1, len(chosen) * max_bytes // size)
        chosen = select_evenly(range(len(samples)), categories, count)
    return [samples[index] for index in chosen]


def _build_sample(record: PromptRecord) -> Sample:
    """Return a prompt and its completion, round by round, as the script in report.html reads them.

    A round is [emitted tokens, how many of them were draft tokens, rejected draft tokens], with the
    tokens as texts. For a tree, the rejected tokens are those of one path, and the number of nodes
    off this path is appended.

    Args:
        record: the record of the prompt.
    """
    # List the rounds. Accepted draft tokens are the first emitted tokens of a round.
    rounds: list[list[object]] = []
    for round_record in record.rounds:
        num_accepted = len(round_record.accepted)
        rejected_text = round_record.drafted_text[num_accepted:]
        num_off_path = [round_record.num_off_path] if round_record.num_off_path else []
        rounds.append([round_record.emitted_text, num_accepted, rejected_text, *num_off_path])
    num_emitted = sum(len(round_record.emitted) for round_record in record.rounds)

    # The prompts of a batch are decoded at the same time, so a speedup is shown only if the prompt
    # was decoded alone, and plain decoding was measured, too.
    speculative = record.speculative
    baseline = record.baseline if record.configuration.batch_size == 1 else None
    tokens_per_second = speculative.num_tokens / speculative.seconds
    is_long = len(record.prompt) > PROMPT_CHARACTERS
    return {
        "id": record.id,
        "category": record.category.replace("_", " "),
        "prompt": f"…{record.prompt[-PROMPT_CHARACTERS:]}" if is_long else record.prompt,
        "first": record.first_token_text,
        "rounds": rounds,
        "length": round(num_emitted / len(rounds), 2) if rounds else None,
        "speedup": (
            round(tokens_per_second / (baseline.num_tokens / baseline.seconds), 2)
            if baseline
            else None
        ),
    }


def summarize_reports(places: Sequence[str]) -> tuple[str, list[SummaryNumbers]]:
    """Return a Markdown table with a row for each report, and the same numbers as dictionaries.

    Args:
        places: paths of report.json files, of their folders, or of folders that contain folders of
            reports.

    Raises:
        UserError: for a path without a report.
    """
    # Read the reports, in the order of the paths.
    reports = []
    for place in places:
        for path in _find_reports(Path(place)):
            reports.append(read_document(path, "reports"))

    # Write a row of the table for each report.
    rows = []
    for report in reports:
        rows.append([escape_markdown(cell) for cell in _format_summary_cells(report)])
    numbers = [_select_summary_numbers(report) for report in reports]
    return format_table(SUMMARY_HEAD, rows), numbers


def _find_reports(place: Path) -> Sequence[Path]:
    """Return the paths of the reports at a place.

    Args:
        place: the path of a report.json; of a folder that has one; or of a folder whose subfolders
            have one each, such as the folder of a run or of a comparison.

    Raises:
        UserError: if there is no report.
    """
    reports = (
        [place]
        if place.is_file() or (place / REPORT).is_file()
        else sorted(place.glob(f"*/{REPORT}"))
    )
    if not reports:
        raise UserError(
            "reports",
            got=f"{place}, which has no report",
            expected="a report.json, its folder, or a folder that contains folders of reports",
        )
    return reports


def _select_summary_numbers(report: Report) -> SummaryNumbers:
    """Return the main numbers of a report for a summary of several reports.

    The numbers are those of the whole suite in the main configuration, which is the report's first
    row. A number that was not measured is None.
    """
    row = report["results"][0]
    draft = report["draft"]

    # Each metric gets three columns: its value and the ends of its interval. The draft is named
    # MODEL@REVISION, or by its method if it has no model, as n-gram lookup.
    metric_values: dict[str, float | None] = {}
    for name, metric in (("acceptance_length", "mean_acceptance_length"), ("speedup", "speedup")):
        low, high = row.get(f"{metric}_ci95", (None, None))
        metric_values |= {name: row.get(metric), f"{name}_low": low, f"{name}_high": high}
    return {
        "method": draft["method"],
        "draft": "@".join(filter(None, (draft["model"], draft["revision"]))) or draft["method"],
        "target": report["target"]["model"],
        "suite": row["suite"],
        "K": row["num_speculative_tokens"],
        **metric_values,
        "lossless": is_lossless(report),
        "verdict": report["gate"]["verdict"],
    }


def _format_summary_cells(report: Report) -> list[str]:
    """Return the main numbers of a report as texts, for a row of the table of several reports.

    SUMMARY_HEAD names the columns: method, draft, target, suite, K, acceptance length, speedup,
    lossless and verdict.
    """
    # The first five columns (method to K) show values as they are. The others are formatted here.
    numbers = _select_summary_numbers(report)
    row = report["results"][0]
    length = (
        f"{format_number(row.get('mean_acceptance_length'))}"
        f"{format_bracketed_interval(row, 'mean_acceptance_length')}"
    )
    speedup = f"{format_times(row.get('speedup'))}{format_bracketed_interval(row, 'speedup')}"
    return [
        *(str(numbers[name]) for name in SUMMARY_HEAD[:5]),
        length,
        speedup,
        {True: "yes", False: "NO", None: "–"}[numbers["lossless"]],
        numbers["verdict"] or "–",
    ]
