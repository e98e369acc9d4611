"""report.html: one file that needs nothing else, the verdict first. Everything from outside is escaped: model output is
untrusted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from specdistill.report import charts, latency, rows, token_view, wording
from specdistill.statistics.configuration import ALL
from specdistill.statistics.prompt_sums import MIN_BUCKET_DRAFTS
from specdistill.statistics.records import PromptRecord, records_of

NUM_PLAIN_SAMPLES = 3  # texts shown where scripts do not run


def environment(package: str = "specdistill.report") -> Environment:
    """Templates of a package and those beside this file. All values are escaped; a missing value is an error."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(name, ".") for name in dict.fromkeys((package, "specdistill.report"))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    made.filters |= {"number": wording.number, "times": wording.times, "percent": wording.percent}
    return made


def to_html(report: Mapping[str, Any], records: Sequence[PromptRecord]) -> str:
    row, main = report["results"][0], rows.main_rows(report)
    context = rows.by_context(report)
    k = len(row["accepted_per_position"])
    batches, temperatures = rows.sweep(report, "batch_size"), rows.sweep(report, "temperature")
    lengths = [line for line in rows.sweep(report, "context_bucket") if line["context_bucket"] != ALL]
    written = records_of(row, records)
    samples = token_view.samples(written)
    html: str = (
        environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            row=row,
            rows=main,
            configurations=rows.whole_rows(report),
            words=wording,
            positions=charts.acceptance_by_position(row),
            categories=charts.acceptance_by((wording.row_name(line) for line in main), main, k),
            contexts=charts.acceptance_by((line["bucket"].replace("-", " to ") for line in context), context, k),
            min_drafts=MIN_BUCKET_DRAFTS,
            lengths=charts.acceptance_by((f"{line['context_bucket']} tokens" for line in lengths), lengths, k),
            temperatures=charts.acceptance_by((f"T = {line['temperature']:g}" for line in temperatures), temperatures, k),
            speedups=charts.speedup_by_k(report.get("theory"), rows.sweep(report, "num_speculative_tokens") or [row]),
            breakdown=charts.time_per_token(latency.a_token(written)),
            batches=charts.speedup_by((f"batch {line['batch_size']}" for line in batches), batches),
            latency=latency.lines(written),
            samples=samples,
            num_plain_samples=NUM_PLAIN_SAMPLES,
            num_records=len(written),
            width=charts.WIDTH,
        )
    )
    return html
