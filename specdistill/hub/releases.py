"""A release and the one before it: what it is compared with, and what changed."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdistill.errors import UserError
from specdistill.files.documents import read_keys
from specdistill.gate.decide import FIRST_RELEASE, Evidence
from specdistill.hub.evidence import RECIPE as RUN_RECIPE
from specdistill.hub.evidence import Release
from specdistill.hub.repository import REPORT, Repository
from specdistill.methods.load import draft_hash, locate
from specdistill.recipe.load import consent, flattened
from specdistill.report import phrases, tables
from specdistill.report.files import REPORT as REPORT_FILE
from specdistill.report.files import SAMPLES, digest, read_report
from specdistill.report.phrases import scalar
from specdistill.report.text import cells, plain
from specdistill.repositories import fetch

RECIPE, PROVENANCE = "recipe.yaml", "provenance.json"
MEASURED_AGAIN = "last-release"  # in a run's folder: the report of the last release with the run's own settings
# Of a recipe: what a machine calls things, and what becomes of a draft once it is made.
NOT_OF_THE_DRAFT = ("train.output_dir", "eval.output_dir", "eval.draft", "eval.baseline", "data.cache_dir", "publish.")
FACTS = ("target_weights", "data_fingerprint", "rows")  # of a training, that stand in its provenance alone


@dataclass(frozen=True)
class LastRelease:
    """What a release is compared with. evidence: its report, as published, or measured again with the settings of the new one.

    recipe, provenance: of its training; empty where they were not published.
    """

    repository: str
    tag: str
    evidence: Evidence
    recipe: Mapping[str, Any]
    provenance: Mapping[str, Any]


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
    patterns = [f"{REPORT}/{REPORT_FILE}", f"{REPORT}/{SAMPLES}", RECIPE, PROVENANCE]
    folder = fetch(name, key="repo", expected="a release", revision=repository.tags[tag], patterns=patterns)
    key, place = ("baseline", Path(baseline)) if baseline else ("repo", folder / REPORT)
    report, records = read_report(place, key)
    if report.get("digest") != digest(report, records):
        expected = "one as it was measured; eval measures a release again, and baseline= takes that report"
        raise UserError(key, got=f"{baseline or f'{name}@{tag}'}, a report that was edited", expected=expected)
    if baseline and report["draft"].get("weights") != draft_hash(locate(f"{name}@{repository.tags[tag]}", key="repo")):
        raise UserError(key, got=f"{baseline}, a report of other weights", expected=f"one of {name}@{tag}")
    report["draft"] |= {"model": name, "revision": tag}  # as a reader knows it, and not where it was measured
    expected = f"{name}@{tag} as publish writes it; restore=TAG takes an earlier release back"
    recipe, provenance = (
        read_keys(folder / file, "repo", expected) if (folder / file).is_file() else {} for file in (RECIPE, PROVENANCE)
    )
    return LastRelease(name, tag, Evidence(report, records), recipe, provenance)


def to_measure_again(release: Release, last: LastRelease) -> str | None:
    """The commands that measure the last release as the new one was, and publish with that in its place; None where it was measured so, and
    where it is of another method, which a recipe of its own measures.
    """
    if release.is_comparable or last.evidence.report["draft"]["method"] != release.method:
        return None
    output, k = release.run / MEASURED_AGAIN, release.report["settings"]["num_speculative_tokens"]
    keys = {"recipe": release.run / RUN_RECIPE, "draft": f"{last.repository}@{last.tag}", "output_dir": output}
    keys["eval.num_speculative_tokens"] = k  # which the file of the recipe may not say
    words = [shlex.quote(f"{name}={value}") for name, value in keys.items()]
    words += map(shlex.quote, consent(read_keys(release.run / RUN_RECIPE, "run", "a run with its recipe")))
    return f"specdistill eval {' '.join(words)}, then publish with baseline={shlex.quote(str(output))}"


def what_changed(release: Release, last: LastRelease) -> str:
    """Markdown: every number before and now with its interval, and what the draft was made from and measured with before and now."""
    report = release.report
    numbers = [plain(phrases.since(report)), cells(tables.changes(report))]
    made = [f"- `{plain(key)}`: {plain(before)} → {plain(now)}" for key, before, now in changed_settings(release, last)]
    return "\n\n".join(filter(None, [*numbers, "\n".join(made) or "It was made and measured with the same settings."]))


def tag_message(release: Release, tag: str, last: LastRelease | None) -> str:
    """What `git tag` shows: the main numbers, and how many changed."""
    since = phrases.since(release.report) if last else "The first release."
    return f"Release {tag}\n\n{phrases.summary(release.report)}\n\n{since}"


def changed_settings(release: Release, last: LastRelease) -> Iterator[tuple[str, str, str]]:
    """(key, before, now) of every key of the recipe that differs, and of the facts of the training; `–` where one has no such key."""
    recipe = read_keys(release.run / RUN_RECIPE, "run", "a run with its recipe")
    before, now = dict(flattened(last.recipe)), dict(flattened(recipe))
    keys = sorted(before.keys() | now.keys()) if before else []
    for key in keys:
        if before.get(key) != now.get(key) and not key.startswith(NOT_OF_THE_DRAFT):
            yield key, _shown(before.get(key)), _shown(now.get(key))
    for fact in FACTS:
        then, this = last.provenance.get(fact), release.provenance.get(fact)
        if None not in (then, this) and then != this:
            yield fact, _shown(then), _shown(this)


def _shown(value: Any) -> str:
    return "–" if value is None else json.dumps(value) if isinstance(value, list | dict) else scalar(value)
