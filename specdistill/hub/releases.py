"""A release beside the one before it: what it is compared with, what changed, and the way back to an earlier one."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import CommitOperationCopy, CommitOperationDelete, HfApi
from huggingface_hub.hf_api import RepoFile

from specdistill.errors import ResourceError, UserError, nearest
from specdistill.gate.decide import FIRST_RELEASE, Evidence
from specdistill.hub.evidence import RECIPE as RUN_RECIPE
from specdistill.hub.evidence import Release
from specdistill.hub.repository import AGAIN, REPORT, Change, Repository, files_at, hub_failures, is_of_a_release
from specdistill.methods.load import draft_hash, locate
from specdistill.report import phrases, tables
from specdistill.report.files import REPORT as REPORT_FILE
from specdistill.report.files import SAMPLES, digest, read_report
from specdistill.report.phrases import scalar, signed
from specdistill.report.text import cells, plain
from specdistill.repositories import fetch

RECIPE, PROVENANCE = "recipe.yaml", "provenance.json"
MEASURED_AGAIN = "last-release"  # in a run's folder: the report of the last release with the run's own settings
# Of a recipe: what a machine calls things, and what becomes of a draft once it is made.
NOT_OF_THE_DRAFT = ("train.output_dir", "eval.output_dir", "eval.draft", "eval.baseline", "data.cache_dir", "publish.")
FACTS = ("target_weights", "data_fingerprint", "rows")  # of a training, that stand in its provenance alone
HEADLINES = ("mean_acceptance_length", "speedup")


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

    def __str__(self) -> str:
        return f"{self.repository}@{self.tag}"


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
    recipe, provenance = (_mapping(folder / file, f"{name}@{tag}") for file in (RECIPE, PROVENANCE))
    return LastRelease(name, tag, Evidence(report, records), recipe, provenance)


def _mapping(path: Path, release: str) -> dict[str, Any]:
    """What a file of a release holds; nothing where it has none. Raises UserError for what `publish` does not write."""
    expected = "a release as publish writes them; restore=TAG takes an earlier one back"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError("repo", got=f"{release} with {path.name} that does not read", expected=expected) from error
    if not isinstance(found, dict):
        raise UserError("repo", got=f"{release} with {path.name} that holds no keys", expected=expected)
    return found


def to_measure_again(release: Release, last: LastRelease) -> str:
    """The commands that measure the last release as the new one was, and publish with that in its place."""
    recipe, output = release.recipe, release.run / MEASURED_AGAIN
    k = {"eval.num_speculative_tokens": release.num_speculative_tokens}  # which the file of the recipe may not say
    keys = {"recipe": release.run / RUN_RECIPE, "draft": last, "output_dir": output, **k}
    method = last.evidence.report["draft"]["method"]
    if method != recipe.method:  # its recipe has other keys
        settings = ("suite", "num_speculative_tokens", "temperature", "max_new_tokens", "num_prompts", "repeats")
        asked = {f"eval.{name}": value for name in settings if (value := getattr(recipe.eval, name)) is not None}
        target = {"target": recipe.target.model, "target.dtype": recipe.target.dtype}
        keys = {"method": method, **target, "draft": last, "output_dir": output, **asked}
    words = [shlex.quote(f"{name}={value}") for name, value in keys.items()]
    return f"specdistill eval {' '.join(words)}, then publish with baseline={shlex.quote(str(output))}"


def what_changed(release: Release, last: LastRelease) -> str:
    """Markdown: every number before and now with its interval, and what the draft was made from and measured with before and now."""
    report = release.report
    numbers = [plain(phrases.since(report)), cells(tables.changes(report))]
    made = [f"- `{key}`: {plain(before)} → {plain(now)}" for key, before, now in changed_settings(release, last)]
    return "\n\n".join(filter(None, [*numbers, "\n".join(made) or "It was made and measured with the same settings."]))


def tag_message(release: Release, tag: str, last: LastRelease | None) -> str:
    """What `git tag` shows: the main numbers, how they changed, and the settings that did."""
    if last is None:
        return f"Release {tag}, the first\n\n{phrases.summary(release.report)}"
    lines = [f"Release {tag}\n\n{phrases.summary(release.report)}\n\nSince {last.tag}:"]
    for change in release.report["baseline"]["changes"]:
        if change["category"] == "all" and change["metric"] in HEADLINES and "change" in change:
            name, shown = tables.METRICS_SHOWN[change["metric"]]
            interval = f" ({' to '.join(map(signed, change['ci95']))})" if "ci95" in change else ""
            lines.append(f"- {name} {shown(change['old'])} to {shown(change['new'])}: {signed(change['change'])}{interval}")
    lines += [f"- {key}: {before} to {now}" for key, before, now in changed_settings(release, last)]
    return "\n".join(lines)


def changed_settings(release: Release, last: LastRelease) -> Iterator[tuple[str, str, str]]:
    """(key, before, now) of every key of the recipe that differs, and of the facts of the training; `–` where one has no such key."""
    recipe = yaml.safe_load((release.run / RUN_RECIPE).read_text(encoding="utf-8"))
    now, before = dict(_leaves(recipe)), dict(_leaves(last.recipe))
    if before:
        for key in sorted(now.keys() | before.keys()):
            if now.get(key) != before.get(key) and not key.startswith(NOT_OF_THE_DRAFT):
                yield key, _shown(before.get(key)), _shown(now.get(key))
    for fact in FACTS:
        then, this = last.provenance.get(fact), release.provenance.get(fact)
        if None not in (then, this) and then != this:
            yield fact, _shown(then), _shown(this)


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    return "–" if value is None else json.dumps(value) if isinstance(value, list | dict) else scalar(value)


def restored(repository: Repository, tag: str) -> list[Change]:
    """What becomes of the main branch's files when it is to hold a release again.

    Raises UserError for a tag that is not there and for one that is no release, ResourceError when the Hub fails.
    """
    earlier = repository.at(tag)
    if f"{REPORT}/{REPORT_FILE}" not in earlier:
        known = list(repository.tags)
        got = f"{tag}, which holds no report" if tag in repository.tags else tag
        expected = f"a release of {repository.name}: {', '.join(known) or 'it has none'}"
        raise UserError("restore", got=got, expected=expected, nearest=nearest(tag, known))
    changes = [Change(path, _compared(file, repository.files.get(path)), file.size) for path, file in sorted(earlier.items())]
    removed = sorted(path for path in repository.files.keys() - earlier.keys() if is_of_a_release(path))
    return changes + [Change(path, "removed", repository.files[path].size) for path in removed]


def _compared(file: RepoFile, there: RepoFile | None) -> Literal["new", "changed", "same"]:
    if there is None:
        return "new"
    return "same" if file.blob_id == there.blob_id else "changed"


def restore(repository: Repository, tag: str, changes: Sequence[Change]) -> str:
    """Commit a release's files to the main branch again, copied on the Hub; returns the commit. Nothing is new, so nothing is tagged.

    Raises ResourceError when the Hub fails or was changed meanwhile.
    """
    api, name, commit = HfApi(), repository.name, repository.tags[tag]
    copied = [it.path for it in changes if it.what in ("new", "changed")]
    operations: list[CommitOperationCopy | CommitOperationDelete] = [
        *(CommitOperationCopy(path, path, src_revision=commit) for path in copied),
        *(CommitOperationDelete(it.path) for it in changes if it.what == "removed"),
    ]
    with hub_failures(name):
        head = api.create_commit(name, operations, commit_message=f"Restore {tag}", parent_commit=repository.commits[0]).oid
        there = files_at(name, head)
        left = [path for path, file in repository.at(tag).items() if path not in there or there[path].blob_id != file.blob_id]
        if left:
            what = f"repo: the main branch of {name} holds other content than {tag} in {', '.join(left[:3])}"
            raise ResourceError(what, next_step=AGAIN)
    return str(head)
