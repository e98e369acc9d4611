"""A finished run released on the Hub: the draft as it was measured, the evidence for it, exports for engines, and the card."""

import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.hf_api import RepoFile

from specdistill.credentials import check_no_secret
from specdistill.engines.engine import Served
from specdistill.errors import UserError
from specdistill.export.export import export
from specdistill.hub.card import Published, model_card, target_name
from specdistill.hub.evidence import (
    DRAFT,
    NOT_COMPARED,
    PROVENANCE,
    RECIPE,
    SPOT_CHECK,
    Release,
    check_evidence,
    check_finished,
)
from specdistill.hub.licenses import CARD, TEXTS, Licensed, forbidden, license_of_draft, licensed_data, licensed_model
from specdistill.hub.releases import LastRelease, last_release, restore, restored, tag_message, to_measure_again, what_changed
from specdistill.hub.repository import (
    LICENSES,
    NOTICE,
    REPORT,
    Change,
    Repository,
    check_names,
    difference,
    hub_failures,
    is_same,
    upload,
)
from specdistill.hub.serving import serving_lines
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import link, new_folder, read_config
from specdistill.methods.load import draft_files
from specdistill.methods.recipe import Recipe
from specdistill.methods.target_record import recorded_target
from specdistill.recipe.load import load_recipe
from specdistill.report.files import SAMPLES, write_report
from specdistill.report.phrases import size
from specdistill.repositories import fetch, hub_errors, split_gguf
from specdistill.targets.files import Shards, TargetFiles
from specdistill.targets.identity import SHOWN, TargetIdentity, content_hash
from specdistill.training.history import read_history

STAGED = "release"  # in a run's folder
WEIGHTS = (".safetensors", ".gguf")
OF_A_SUITE = (
    SAMPLES,
    "report.html",
)  # prompts and completions, which may be about addresses; what else these say report.json says


@dataclass(frozen=True)
class Origin:
    """What a release was made from. identity: of the target. base_model: its Hub id, None where it has none."""

    target: TargetFiles
    identity: TargetIdentity
    base_model: str | None
    parts: Sequence[Licensed]

    @classmethod
    def of(cls, release: Release, base_model: str | None) -> "Origin":
        """Raises UserError where `base_model` is another target, ResourceError when the Hub fails."""
        recipe, named = release.recipe, release.recipe.target
        if base_model is None:
            target = TargetFiles.of(named.model, named.revision, named.adapter, named.trust_remote_code)
        else:
            with hub_errors("base_model", base_model, expected="the Hub id of the target"):
                HfApi().model_info(base_model)
            target = TargetFiles.of(base_model, adapter=named.adapter)
        made_for = recorded_target(release.run / DRAFT, "run") or TargetFiles.of(named.model, named.revision).identity
        if base_model is not None and not target.identity.is_same(made_for):
            raise UserError("base_model", got=f"{target.identity}", expected=f"the draft's target: {made_for}")
        hub_id = None if Path(target.name).exists() else split_gguf(target.name)[0]
        parts = [licensed_model("target", hub_id or Path(named.model).name, target.fetch(CARD))]
        init = getattr(getattr(recipe, "draft", None), "init", None) or ""
        others = {"target's adapter": named.adapter, "initialization": init if "/" in init else None}
        for what, model in others.items():
            if model:
                folder = fetch(model, key=what, expected="a folder or a Hub id", patterns=[CARD])
                parts.append(licensed_model(what, Path(model).name if Path(model).exists() else model, folder))
        data = getattr(recipe, "data", None)
        return cls(target, made_for, hub_id, [*parts, *(licensed_data(data.source) if data else [])])

    def refusals(self, repository: str) -> list[str]:
        return [f"licence: {why}" for why in forbidden(self.parts, repository)]


def is_released(run: Path, files: Mapping[str, RepoFile]) -> bool:
    """Whether a commit with these files is the release of this run: of this draft, this training and this measurement."""
    own = {path.name: path for path in (*draft_files(run / DRAFT), run / RECIPE, run / PROVENANCE)}
    samples = {f"{REPORT}/{SAMPLES}": run / REPORT / SAMPLES}
    return all(path.is_file() and is_same(path, files.get(name)) for name, path in {**own, **samples}.items())


def stage(
    release: Release,
    origin: Origin,
    output: Path,
    *,
    repository: str,
    tag: str,
    license: str | None = None,
    exports: Sequence[str] = (),
    overridden: Sequence[str] = (),
    reason: str | None = None,
    last: LastRelease | None = None,
) -> None:
    """Write the folder of a release; the draft's files are linked, not read. last: the release before it.

    Raises UserError for what is in its place, for a link among the draft's files and for an export that cannot be, ResourceError when the
    disk fails.
    """
    draft, method = release.run / DRAFT, str(release.report["draft"]["method"])
    k = int(release.report["settings"]["num_speculative_tokens"])
    Shards.open(draft, "run").check()
    if linked := next((path for path in release.draft if path.is_symlink()), None):
        raise UserError("run", got=f"{linked}, a link", expected="a file: what a link leads to would be published")
    if exports and METHODS[method].artifact == "layer":
        expected = "none: engines load a layer in a copy of its target, which is exported where it is served"
        raise UserError("exports", got=", ".join(exports), expected=expected)
    settings, target = release.report["settings"], origin.target
    with new_folder(output) as folder:
        for path in (*release.draft, release.recipe_file, release.provenance_file):
            link(path, folder / path.name)
        write_report(folder / REPORT, release.report, release.records)
        exported = {}
        for engine in exports:
            exported[engine] = export(draft, engine, folder / engine, target, num_speculative_tokens=k)
            (folder / engine / "SERVE.md").unlink()  # with names of this machine; the card says how to serve it
        terms = dict.fromkeys(part.terms.notice for part in origin.parts if part.terms)
        if terms:
            (folder / NOTICE).write_text("".join(f"{notice}\n" for notice in terms), encoding="utf-8")
        texts = target.fetch(*TEXTS)
        for path in sorted(path for pattern in TEXTS for path in texts.glob(pattern) if path.is_file()):
            (folder / LICENSES).mkdir(exist_ok=True)
            link(path, folder / LICENSES / path.name)
        served = Served(
            method=method,
            output=Path(repository),
            target=origin.base_model,
            num_tokens=k,
            samples=settings.get("temperature", 0) > 0 and settings.get("draft_sampling", "greedy") != "greedy",
            config=read_config(draft, "run"),
        )
        name = target_name(origin.identity, origin.base_model)
        card = model_card(
            Published(
                repository=repository,
                tag=tag,
                release=release,
                history=read_history(draft, key="run"),
                target=origin.identity,
                base_model=origin.base_model,
                parts=origin.parts,
                license=license_of_draft(license, origin.parts),
                serving=list(serving_lines(served, draft, exported, repository=repository, tag=tag, target=name)),
                overridden=overridden,
                reason=reason,
                since=last.tag if last else None,
                changes=what_changed(release, last) if last else "",
            )
        )
        (folder / CARD).write_text(str(card), encoding="utf-8")
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            if path.suffix not in WEIGHTS and path.name not in OF_A_SUITE:
                check_no_secret(path.name, path.read_text(encoding="utf-8", errors="replace"))


def check_unchanged(release: Release, folder: Path) -> None:
    """Raises UserError where what would be published is not what was checked: somebody wrote into the run meanwhile, a training perhaps."""
    names = [path.name for path in (*release.draft, release.recipe_file, release.provenance_file)]
    if content_hash([folder / name for name in names]) != release.content:
        raise UserError(
            "run", got=f"{release.run}, which changed while it was checked", expected="a run that nothing writes to"
        )


@dataclass(frozen=True)
class Outcome:
    """What became of a run. commit: None where nothing was published: it was refused (refusals that no reason overrode), or a trial.

    folder: what was or would be published; None where that was not written, as it was refused or is there already. advice: what to do
    about a refusal.
    """

    repository: str
    tag: str
    refusals: Sequence[str]
    folder: Path | None = None
    changes: Sequence[Change] = ()
    commit: str | None = None
    advice: str | None = None


def publish_run(
    run: Path,
    given: Mapping[str, Any],
    *,
    tag: str | None = None,
    reason: str | None = None,
    dry_run: bool = False,
    output_dir: Path | None = None,
    baseline: str | None = None,
    suite: str | None = None,
    num_speculative_tokens: int | None = None,
    spot_check: int = SPOT_CHECK,
) -> Outcome:
    """Release a run's draft, or say why not.

    given: keys of `publish:` in place of those of the run's recipe. tag: None takes the next of v1, v2, …. reason: why it is published
    although it is refused. dry_run: write the folder and compare it with the Hub, no more. output_dir: a new folder; None takes `release`
    in the run's, which is written anew. baseline: see `last_release`; suite, num_speculative_tokens, spot_check: see
    `check_evidence`.

    Raises UserError for what the user got wrong, ResourceError when the Hub or the disk fails.
    """
    check_finished(run)
    config = load_recipe(Recipe, [f"recipe={run / RECIPE}"]).publish.model_copy(update=dict(given))
    name = check_names(config.repo, tag)
    if not dry_run:
        with hub_failures(name):
            HfApi().whoami()
    there = Repository.read(name)
    there.check_visible(config.private)
    if known := next((it for it in ([tag] if tag else there.tags) if is_released(run, there.at(it))), None):
        return Outcome(name, known, (), commit=there.tags[known])
    if tag in there.tags:
        raise UserError("tag", got=f"{tag}, which is another release of {name}", expected=f"a new one, as {there.next_tag}")
    tag, last = tag or there.next_tag, last_release(there, baseline)
    evidence = last.evidence if last else None
    release = check_evidence(
        run,
        baseline=evidence,
        first_release=last is None,
        suite=suite,
        num_speculative_tokens=num_speculative_tokens,
        num_prompts=spot_check,
    )
    origin = Origin.of(release, config.base_model)
    if origin.base_model == name:
        raise UserError("repo", got=f"{name}, which is the target's", expected="one for the draft")
    refusals = [*map(str, release.refusals), *origin.refusals(name)]
    if refusals and reason is None:
        compared = not any(refusal.name == NOT_COMPARED for refusal in release.refusals)
        return Outcome(name, tag, refusals, advice=None if compared or last is None else to_measure_again(release, last))
    if reason is not None and not refusals:
        raise UserError("force", got=reason, expected="no such key: nothing speaks against this release")

    folder = output_dir or run / STAGED
    if output_dir is None:
        shutil.rmtree(folder, ignore_errors=True)
    options: dict[str, Any] = {"license": config.license, "exports": config.exports, "overridden": refusals, "reason": reason}
    stage(release, origin, folder, repository=name, tag=tag, last=last, **options)
    changes = difference(folder, there.files)
    check_unchanged(release, folder)  # its files are links to the run's
    if dry_run:
        return Outcome(name, tag, refusals, folder, changes)
    message = tag_message(release, tag, last)
    commit = upload(folder, changes, there, tag, message=message, private=config.private)
    return Outcome(name, tag, refusals, folder, changes, commit)


def restore_release(repository: str | None, tag: str, *, dry_run: bool = False) -> None:
    """Put an earlier release on the main branch again, and say what became of each file. Raises as `restored` and `restore`."""
    name = check_names(repository, tag)
    there = Repository.read(name)
    changes = restored(there, tag)
    print_changes(f"{name}@{tag}", changes)
    if all(change.what == "same" for change in changes):
        print(f"{name} holds {tag} already")
    elif dry_run:
        print("a trial: nothing was sent")
    else:
        commit = restore(there, tag, changes)
        print(
            f"restored: {constants.ENDPOINT}/{name} holds {tag} again (commit {commit[:SHOWN]}), and every tag is where it was"
        )


def print_outcome(outcome: Outcome) -> None:
    """Each file and what becomes of it, and what was released; refusals on stderr."""
    if outcome.refusals and outcome.folder is None:
        for refusal in outcome.refusals:
            print(f"refused: {refusal}", file=sys.stderr)
        if outcome.advice:
            print(f"to compare it with the last release: {outcome.advice}", file=sys.stderr)
        print("nothing was published; force=REASON publishes it all the same, with the reason on the card", file=sys.stderr)
        return
    name = f"{outcome.repository}@{outcome.tag}"
    if outcome.folder is None:
        print(f"{name} is this release already: {constants.ENDPOINT}/{outcome.repository}/tree/{outcome.tag}")
        print("with other keys it is another release, whose tag= is a new one")
        return
    print_changes(name, outcome.changes)
    print(f"from {outcome.folder}")
    if outcome.commit is None:
        print("a trial: nothing was sent")
    else:
        print(f"released: {constants.ENDPOINT}/{outcome.repository}/tree/{outcome.tag} (commit {outcome.commit[:SHOWN]})")


def print_changes(name: str, changes: Sequence[Change]) -> None:
    for change in changes:
        print(f"{change.what:8} {size(change.size):>12}  {change.path}")
    counts = Counter(change.what for change in changes)
    total = sum(change.size for change in changes if change.what != "removed")
    print(f"{name}: {size(total)} in {', '.join(f'{count} {what}' for what, count in counts.items())}")
