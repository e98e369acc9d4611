"""A release and the one before it: what it is compared with, and what changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdistill.errors import UserError
from specdistill.gate.decide import FIRST_RELEASE, Evidence
from specdistill.hub.evidence import Release
from specdistill.hub.repository import REPORT, Repository
from specdistill.methods.load import draft_hash, locate
from specdistill.report import phrases, tables
from specdistill.report.files import REPORT as REPORT_FILE
from specdistill.report.files import SAMPLES, digest, read_report
from specdistill.report.text import cells, plain
from specdistill.repositories import fetch


@dataclass(frozen=True)
class LastRelease:
    """What a release is compared with. evidence: its report, as published, or measured again with the settings of the new one."""

    tag: str
    evidence: Evidence


def last_release(repository: Repository, baseline: str | None) -> LastRelease | None:
    """The release before the next; None for the first, which is one by name.

    baseline: `none` for a first release; or a report of the last one that was measured again, its file or folder; None: as published.
    Raises UserError for a first release that is not called one, for one that is none, and for a report of other weights than the last
    release's; ResourceError when the Hub fails.
    """
    name, tag = repository.name, repository.last_release()
    if tag is None:
        if baseline != FIRST_RELEASE:
            expected = f"{FIRST_RELEASE}: {name} has no release to compare with, and a first one is one by name"
            raise UserError("baseline", got=baseline or "nothing", expected=expected)
        return None
    if baseline == FIRST_RELEASE:
        expected = f"no such key: {name} has the release {tag}, which this one is compared with"
        raise UserError("baseline", got=baseline, expected=expected)
    patterns = [f"{REPORT}/{REPORT_FILE}", f"{REPORT}/{SAMPLES}"]
    folder = fetch(name, key="repo", expected="a release", revision=repository.tags[tag], patterns=patterns)
    key, place = ("baseline", Path(baseline)) if baseline else ("repo", folder / REPORT)
    report, records = read_report(place, key)
    if report.get("digest") != digest(report, records):
        expected = "one as it was measured; eval measures a release again, and baseline= takes that report"
        raise UserError(key, got=f"{baseline or f'{name}@{tag}'}, a report that was edited", expected=expected)
    if baseline and report["draft"].get("weights") != draft_hash(locate(f"{name}@{repository.tags[tag]}", key="repo")):
        raise UserError(key, got=f"{baseline}, a report of other weights", expected=f"one of {name}@{tag}")
    report["draft"] |= {"model": name, "revision": tag}  # as a reader knows it, and not where it was measured
    return LastRelease(tag, Evidence(report, records))


def what_changed(report: Mapping[str, Any]) -> str:
    """Markdown: every number before and now with its interval."""
    return f"{plain(phrases.since(report))}\n\n{cells(tables.changes(report))}"


def tag_message(release: Release, tag: str, last: LastRelease | None) -> str:
    """What `git tag` shows: the main numbers, and how many changed."""
    since = phrases.since(release.report) if last else "The first release."
    return f"Release {tag}\n\n{phrases.summary(release.report)}\n\n{since}"
