"""report.html: one self-contained file, the verdict first. Every value is escaped: names and model output come from outside."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from specdistill.report import charts, latency, numbers, phrases, results, tables, token_view
from specdistill.statistics.metrics import MIN_BUCKET_DRAFTS
from specdistill.statistics.records import ALL, PromptRecord, records_of

NUM_PLAIN_SAMPLES = 3  # completions shown where scripts do not run


def environment(package: str = "specdistill.report") -> Environment:
    """Templates of a package and of this one. All values are escaped; a missing value is an error."""
    templates = Environment(
        loader=ChoiceLoader([PackageLoader(name, ".") for name in dict.fromkeys((package, "specdistill.report"))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    templates.filters |= {name: getattr(numbers, name) for name in ("number", "times", "percent", "interval")} | {
        "label": _label
    }
    templates.globals |= {"phrases": phrases, "tables": tables, "width": charts.WIDTH}
    return templates


def _label(name: str) -> str:
    """A table's head with a capital, except for symbols."""
    return name if len(name) == 1 else name[:1].upper() + name[1:]


def to_html(report: Mapping[str, Any], records: Sequence[PromptRecord]) -> str:
    row, main = report["results"][0], results.main_rows(report)
    context = results.by_context(report)
    k = len(row["accepted_per_position"])
    batches, temperatures = results.sweep(report, "batch_size"), results.sweep(report, "temperature")
    lengths = [line for line in results.sweep(report, "context_bucket") if line["context_bucket"] != ALL]
    main_records = records_of(row, records)
    html: str = (
        environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            row=row,
            rows=main,
            configurations=results.whole_rows(report),
            positions=charts.acceptance_by_position(row),
            categories=charts.acceptance_by((phrases.row_name(line) for line in main), main, k),
            contexts=charts.acceptance_by((line["bucket"].replace("-", " to ") for line in context), context, k),
            min_drafts=MIN_BUCKET_DRAFTS,
            lengths=charts.acceptance_by((f"{line['context_bucket']} tokens" for line in lengths), lengths, k),
            temperatures=charts.acceptance_by((f"T = {line['temperature']:g}" for line in temperatures), temperatures, k),
            speedups=charts.speedup_by_k(report.get("theory"), results.sweep(report, "num_speculative_tokens") or [row]),
            breakdown=charts.time_per_token(latency.per_token(main_records)),
            batches=charts.speedup_by((f"batch {line['batch_size']}" for line in batches), batches),
            latency=latency.lines(main_records),
            samples=token_view.samples(main_records),
            num_plain_samples=NUM_PLAIN_SAMPLES,
            num_records=len(main_records),
        )
    )
    return html
