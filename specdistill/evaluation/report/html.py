"""report.html: one file that needs nothing else, the verdict first. Everything from outside is escaped: model output is
untrusted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from specdistill.evaluation.records import PromptRecord
from specdistill.evaluation.report import charts, wording
from specdistill.evaluation.suites import evenly

NUM_SAMPLES = 12
PROMPT_CHARACTERS = 400  # of a prompt's end, enough to see what is continued


def environment() -> Environment:
    """The templates beside this file: whatever they are given is escaped, and what they are not given is an error."""
    made = Environment(
        loader=PackageLoader("specdistill.evaluation", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"number": wording.number, "times": wording.times, "percent": wording.percent}
    return made


def to_html(report: Mapping[str, Any], records: Sequence[PromptRecord]) -> str:
    row = report["results"][0]
    theory = report.get("theory")
    shown = evenly(records, [record.category for record in records], NUM_SAMPLES)
    html: str = (
        environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            row=row,
            words=wording,
            positions=charts.acceptance_by_position(row),
            categories=charts.acceptance_by_category(report["results"], report["settings"]["num_speculative_tokens"]),
            speedups=charts.speedup_by_k(theory, row) if theory else None,
            breakdown=charts.time_per_token(row),
            samples=[_sample(record) for record in shown],
            width=charts.WIDTH,
        )
    )
    return html


def _sample(record: PromptRecord) -> dict[str, Any]:
    """What the token view needs, as short as it can be said. A round is [drafted texts, number accepted, emitted texts]."""
    prompt = record.prompt
    return {
        "id": record.id,
        "category": record.category,
        "prompt": prompt if len(prompt) <= PROMPT_CHARACTERS else f"…{prompt[-PROMPT_CHARACTERS:]}",
        "first": record.first_token_text,
        "rounds": [[entry.drafted_text, len(entry.accepted), entry.emitted_text] for entry in record.rounds],
        "speedup": (record.speculative.num_tokens / record.speculative.seconds)
        / (record.baseline.num_tokens / record.baseline.seconds),
    }
