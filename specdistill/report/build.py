"""The report as one document, from its measured parts."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from specdistill import __version__
from specdistill.report.findings import findings
from specdistill.suites.suite import Suite

SCHEMA_VERSION = 2


def build_report(
    *,
    target: Mapping[str, Any],
    draft: Mapping[str, Any],
    hardware: Mapping[str, Any],
    software: Mapping[str, str],
    settings: Mapping[str, Any],
    suite: Suite,
    results: Sequence[Mapping[str, Any]],
    context: Sequence[Mapping[str, Any]],
    headline: Mapping[str, Any],
    theory: Mapping[str, Any] | None,
    lossless: Mapping[str, Any],
    not_measured: Mapping[str, str],
    git_revision: str | None,
    engine: Mapping[str, Any] | None = None,
    incomplete: str | None = None,
) -> dict[str, Any]:
    """The report, to report.schema.json, not yet judged: its gate has no rules and does not pass.

    engine: what decoded, if not this package. incomplete: why the measurement was cut short, if it was.
    """
    absent = dict(not_measured)
    if git_revision is None:
        absent["git_revision"] = "the code is not in a git checkout"
    if theory is None:
        absent.setdefault("theory", "nothing was drafted")
    if incomplete is not None:
        absent["incomplete"] = incomplete
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "specdistill_version": __version__,
        **({} if git_revision is None else {"git_revision": git_revision}),
        "target": dict(target),
        "draft": dict(draft),
        "hardware": dict(hardware),
        "software": dict(software),
        "engine": dict(engine or {"name": "specdistill", "version": __version__}),
        **({} if incomplete is None else {"incomplete": True}),
        "settings": dict(settings),
        "suite": {name: getattr(suite, name) for name in ("name", "version", "licence", "source", "sha256")},
        "headline": dict(headline),
        "results": [dict(row) for row in results],
        "lossless": dict(lossless),
        "context": [dict(row) for row in context],
        **({} if theory is None else {"theory": dict(theory)}),
        "findings": [],
        "gate": {"passed": False, "rules": []},
        "not_measured": absent,
    }
    report["findings"] = [{"name": name, "message": message} for name, message in findings(report)]
    return report
