"""A finished run released on the Hub: the draft as it was measured, the evidence for it, exports for engines, and the card."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.hf_api import RepoFile

from specdistill.credentials import check_no_secret, without_places
from specdistill.doctor.diagnosis import findings_of_engine
from specdistill.engines import ENGINES
from specdistill.engines.engine import Engine, Served
from specdistill.engines.llama_cpp import GGUF
from specdistill.errors import UserError, logger
from specdistill.export import as_measured, check_exports, export, measured_lookup
from specdistill.files.documents import read_json, read_keys
from specdistill.files.folders import new_folder
from specdistill.gate.decide import FIRST_RELEASE, Evidence
from specdistill.hub.card import PICTURE, CardContents, model_card
from specdistill.hub.command import PublishOptions
from specdistill.hub.evidence import (
    DRAFT,
    FINISHED,
    PROVENANCE,
    RECIPE,
    Release,
    check_finished,
    read_release,
)
from specdistill.hub.licenses import (
    CARD,
    TEXTS,
    Licensed,
    forbidden,
    license_of_draft,
    licensed_data,
    licensed_model,
)
from specdistill.hub.repository import (
    LICENSES,
    NOTICE,
    REPORT,
    FileChange,
    Repository,
    check_names,
    hub_failures,
    is_same,
)
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import link, read_config
from specdistill.methods.load import draft_files, draft_hash, implementation, locate
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import RUNS_NOTHING, load_recipe, recipe_yaml
from specdistill.recipe.sections import PublishConfig
from specdistill.report import phrases, tables
from specdistill.report.draft_lengths import draft_lengths, usual_length
from specdistill.report.files import REPORT as REPORT_FILE
from specdistill.report.files import SAMPLES, digest, read_report, to_picture, write_report
from specdistill.report.phrases import size
from specdistill.report.text import cells, plain
from specdistill.repositories import fetch, hub_errors, split_gguf, split_revision
from specdistill.targets.files import SHOWN, Shards, TargetFiles
from specdistill.training.history import read_history

WEIGHTS = (".safetensors", ".gguf")
# Prompts and completions, which may be about addresses; what else these say report.json says.
OF_A_SUITE = (SAMPLES, "report.html", Path(PICTURE).name)


@dataclass(frozen=True)
class Publication:
    """What became of a run. commit: None where nothing was published: it was refused (refusals that no reason overrode), or a dry run.

    folder: what was or would be published; None where that was not written, as it was refused or is there already.
    """

    repository: str
    tag: str
    refusals: Sequence[str]
    folder: Path | None = None
    changes: Sequence[FileChange] = ()
    commit: str | None = None


def publish_run(options: PublishOptions) -> Publication:
    """Release a run's draft, or say why not. Its recipe's section `publish` says what the options do not.

    Raises UserError for what the user got wrong, ResourceError when the Hub or the disk fails.
    """
    run, tag, reason = Path(options.run), options.tag, options.force
    check_finished(run)
    given = options.model_dump(include=options.model_fields_set & PublishConfig.model_fields.keys())
    recipe = load_recipe(Recipe, [f"recipe={run / RECIPE}", *RUNS_NOTHING])
    config = recipe.publish.model_copy(update=given)
    name = check_names(config.repo, tag)
    if not options.dry_run:
        with hub_failures(name):
            HfApi().whoami()
    there = Repository.read(name)
    there.check_visible(config.private)
    if known := next(
        (it for it in ([tag] if tag else there.tags) if is_released(run, there.at(it))), None
    ):
        return Publication(name, known, (), commit=there.tags[known])
    if tag in there.tags:
        raise UserError(
            "tag",
            got=f"{tag}, which is another release of {name}",
            expected=f"a new one, e.g. {there.next_tag}",
        )
    tag, (before, last) = tag or there.next_tag, last_release(there, options.baseline)
    release = read_release(run, recipe, last)
    target, base_model = find_target(release, config.base_model)
    if base_model == name:
        raise UserError("repo", got=f"{name}, which is the target's", expected="one for the draft")
    parts = made_from(release.recipe, target, base_model)
    refusals = [*release.refusals, *(f"licence: {why}" for why in forbidden(parts, name))]
    if refusals and reason is None:
        return Publication(name, tag, refusals)
    if reason is not None and not refusals:
        raise UserError(
            "force", got=reason, expected="no such key: nothing speaks against this release"
        )

    since = phrases.since(release.report) if last else "The first release."
    contents = CardContents(
        repository=name,
        tag=tag,
        release=release,
        history=read_history(run / DRAFT, key="run"),
        base_model=base_model,
        parts=parts,
        license=license_of_draft(config.license, parts),
        overridden=refusals,
        reason=reason,
        since=before,
        changes=f"{plain(since)}\n\n{cells(tables.changes(release.report))}" if last else "",
    )
    folder = Path(options.output_dir or run / "release")
    if (
        options.output_dir is None
        and folder.exists()
        and not (folder / Path(PROVENANCE).name).is_file()
    ):
        raise UserError(
            "output_dir",
            got=f"null, and {folder} holds no earlier release",
            expected="a new folder",
        )
    stage(contents, target, config.exports, folder, replaces=options.output_dir is None)
    changes = there.difference(folder)
    if options.dry_run:
        return Publication(name, tag, refusals, folder, changes)
    message = (
        f"Release {tag}\n\n{phrases.summary(release.report)}\n\n{since}"  # which `git tag` shows
    )
    commit = there.upload(folder, changes, tag, message=message, private=config.private)
    return Publication(name, tag, refusals, folder, changes, commit)


def last_release(
    repository: Repository, baseline: str | None
) -> tuple[str, Evidence] | tuple[None, None]:
    """The tag of the release before the next, and what the next is compared with: its report, as published, or measured again with the
    settings of the new one. None for the first, which is one by name.

    baseline: `none` for a first release; or a report of the last one that was measured again, its file or folder; None: as published.
    Raises UserError for a first release that is not called one, for one that is none, and for a report of other weights than the last
    release's; ResourceError when the Hub fails.
    """
    name, tag = repository.name, repository.last_release()
    if tag is None:
        if baseline != FIRST_RELEASE:
            expected = f"{FIRST_RELEASE}: {name} has no release to compare with, and a first one is one by name"
            raise UserError("baseline", got=baseline or "nothing", expected=expected)
        return None, None
    if baseline == FIRST_RELEASE:
        expected = f"no such key: {name} has the release {tag}, which this one is compared with"
        raise UserError("baseline", got=baseline, expected=expected)
    patterns = [f"{REPORT}/{REPORT_FILE}", f"{REPORT}/{SAMPLES}"]
    folder = fetch(
        name, key="repo", expected="a release", revision=repository.tags[tag], patterns=patterns
    )
    key, place = ("baseline", Path(baseline)) if baseline else ("repo", folder / REPORT)
    report, records = read_report(place, key)
    if report.get("digest") != digest(report, records):
        expected = (
            "one as it was measured; eval measures a release again, and baseline= takes that report"
        )
        raise UserError(
            key, got=f"{baseline or f'{name}@{tag}'}, a report that was edited", expected=expected
        )
    if baseline and report["draft"].get("weights") != draft_hash(
        locate(f"{name}@{repository.tags[tag]}", key="repo")
    ):
        raise UserError(
            key, got=f"{baseline}, a report of other weights", expected=f"one of {name}@{tag}"
        )
    report["draft"] |= {
        "model": name,
        "revision": tag,
    }  # as a reader knows it, and not where it was measured
    return tag, Evidence(report, records)


def is_released(run: Path, files: Mapping[str, RepoFile]) -> bool:
    """Whether a commit with these files is the release of this run: of this draft, this training and this measurement."""
    own = {path.name: path for path in (*draft_files(run / DRAFT), run / PROVENANCE)}
    samples = {f"{REPORT}/{SAMPLES}": run / REPORT / SAMPLES}
    return all(
        path.is_file() and is_same(path, files.get(name))
        for name, path in {**own, **samples}.items()
    )


def find_target(release: Release, base_model: str | None) -> tuple[TargetFiles, str | None]:
    """The files of a release's target, and its Hub id, None where it has none.

    Raises UserError where `base_model` is another target, ResourceError when the Hub fails.
    """
    named = release.recipe.target
    if base_model is None:
        target = TargetFiles(named.model, named.revision, named.adapter)
        return target, None if Path(target.name).exists() else split_gguf(target.name)[0]
    with hub_errors("base_model", base_model, expected="the Hub id of the target"):
        HfApi().model_info(base_model)
    target = TargetFiles(base_model, adapter=named.adapter)
    if not target.identity.is_same(release.made_for):
        raise UserError(
            "base_model",
            got=f"{target.identity}",
            expected=f"the draft's target: {release.made_for}",
        )
    return target, base_model


def made_from(recipe: Recipe, target: TargetFiles, base_model: str | None) -> list[Licensed]:
    """What a draft was made from, each with its licence. Raises UserError and ResourceError where that cannot be read."""
    parts = [
        licensed_model("target", base_model or Path(recipe.target.model).name, target.fetch(CARD))
    ]
    init = getattr(getattr(recipe, "draft", None), "init", None) or ""
    others = {"target's adapter": target.adapter, "initialization": init if "/" in init else None}
    for what, model in others.items():
        if model:
            name, revision = split_revision(model)
            folder = fetch(
                name, key=what, expected="a folder or a Hub id", revision=revision, patterns=[CARD]
            )
            parts.append(
                licensed_model(what, Path(name).name if Path(name).exists() else name, folder)
            )
    data = getattr(recipe, "data", None)
    return [*parts, *(licensed_data(data.source) if data else [])]


def stage(
    of: CardContents, target: TargetFiles, exports: Sequence[str], output: Path, *, replaces: bool
) -> None:
    """Write the folder of a release; the draft's files are linked, not read.

    Raises UserError for what is in its place, for a link out of the run and for an export that cannot be, ResourceError when the disk
    fails.
    """
    release, draft = of.release, of.release.run / DRAFT
    Shards.open(draft, "run").check()
    refuse_links(
        [path for part in (DRAFT, "run", REPORT) for path in (release.run / part).iterdir()],
        release.run,
    )
    check_exports(exports, release.method, "exports")
    with new_folder(output, replaces=replaces) as folder:
        for path in (*release.draft, release.run / PROVENANCE):
            link(path, folder / path.name)
        recipe = read_keys(release.run / RECIPE, "run", FINISHED)
        (folder / Path(RECIPE).name).write_text(recipe_yaml(recipe, public=True), encoding="utf-8")
        write_report(folder / REPORT, release.report, release.records)
        (folder / PICTURE).write_text(to_picture(release.report, release.records), encoding="utf-8")
        exported = {}
        for engine in exports:
            exported[engine] = export(draft, engine, folder / engine, target, merges=False)
            (
                folder / engine / "SERVE.md"
            ).unlink()  # with names of this machine; the card says how to serve it
            if (config := folder / engine / "config.json").is_file():
                config.write_text(
                    json.dumps(without_places(read_json(config)), indent=2) + "\n", encoding="utf-8"
                )
        pass_on_terms(of.parts, target, folder)
        (folder / CARD).write_text(
            str(model_card(of, serving_of(of, target, exported))), encoding="utf-8"
        )
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            if path.suffix not in WEIGHTS and path.name not in OF_A_SUITE:
                text = path.read_text(encoding="utf-8", errors="replace")
                check_no_secret(
                    path.name, text.replace("\N{ZERO WIDTH SPACE}", "")
                )  # which pages put into addresses


def pass_on_terms(parts: Sequence[Licensed], target: TargetFiles, folder: Path) -> None:
    """Write what licences ask to be passed on: their notices, and the target's own texts. Raises UserError for a text that is a link out of
    the target's folder, or out of its place in the Hub's cache.
    """
    if terms := dict.fromkeys(part.terms.notice for part in parts if part.terms):
        (folder / NOTICE).write_text("".join(f"{notice}\n" for notice in terms), encoding="utf-8")
    texts = target.fetch(*TEXTS)
    found = sorted(path for pattern in TEXTS for path in texts.glob(pattern) if path.is_file())
    refuse_links(found, texts.parents[1] if texts.parent.name == "snapshots" else texts, "target")
    for path in found:
        (folder / LICENSES).mkdir(exist_ok=True)
        link(path, folder / LICENSES / path.name)


def refuse_links(paths: Iterable[Path], home: Path, key: str = "run") -> None:
    """Raises UserError for the first that is a link out of the folder `home`, or lies behind one."""
    if out := next(
        (path for path in paths if not path.resolve().is_relative_to(home.resolve())), None
    ):
        raise UserError(
            key, got=f"{out}, a link", expected="a file: what a link leads to would be published"
        )


def serving_of(
    of: CardContents, target: TargetFiles, exported: Mapping[str, Served]
) -> Iterator[tuple[str, str]]:
    """(engine's title, commands) for each engine that can be given the draft of a release: see `serving_lines`."""
    report, draft = of.release.report, of.release.run / DRAFT
    served = Served(
        method=of.release.method,
        output=Path(of.repository),
        target=of.base_model,
        config=read_config(draft, "run"),
        lookup_first=measured_lookup(report["settings"]),
        draft_revision=of.tag,
        **as_measured(report, target, draft_lengths(report), usual_length(report)),
    )
    return serving_lines(served, draft, exported)


def loads_as_is(engine: Engine, method: str, folder: Path) -> bool:
    """Whether an engine loads a draft's folder as training wrote it. Of the weights the names and shapes alone are read."""
    if METHODS[method].standalone:
        return engine is not GGUF  # whose files its converter makes
    config, tensors = read_config(folder, "draft"), Shards.open(folder, "draft").without_content()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    head = implementation(method).head_shape(config, None)
    return all(
        found.severity != "problem"
        for found in findings_of_engine(engine, method, head, config, shapes)
    )


def serving_lines(
    served: Served, draft: Path, exports: Mapping[str, Served]
) -> Iterator[tuple[str, str]]:
    """(engine's title, commands) for each engine that can be given the draft: as it is, or as exported for it.

    served: the draft of a tag, in the repository's root. draft: its folder here. exports: engine -> what was exported for it, into a folder
    of that name.
    """
    assert served.method is not None
    row, repository, local = METHODS[served.method], served.output, served.output.name
    for name, serving in row.serving().items():
        engine = ENGINES[name]
        if engine.serve_command is None:
            continue
        k, lookup = engine.drafting(served.num_tokens, served.lookup_first)
        started = replace(served, num_tokens=k, lookup_first=lookup)
        if name in exports:
            own = exports[name]
            exported = replace(
                started,
                output=Path(local) / name,
                draft_revision=None,
                serving=serving,
                config=own.config,
            )
            at = f"--revision {served.draft_revision} --local-dir {local} --include {shlex.quote(f'{name}/*')}"
            yield engine.title, f"hf download {repository} {at}\n{engine.serve_command(exported)}"
        elif loads_as_is(engine, served.method, draft):
            yield engine.title, engine.serve_command(replace(started, serving=serving))


def print_outcome(made: Publication) -> None:
    """Each file and what becomes of it, and what was released; refusals on stderr."""
    name, url = (
        f"{made.repository}@{made.tag}",
        f"{constants.ENDPOINT}/{made.repository}/tree/{made.tag}",
    )
    if made.folder is not None:
        for change in made.changes:
            print(f"{change.what:8} {size(change.size):>12}  {change.path}")
        counts = Counter(change.what for change in made.changes)
        total = sum(change.size for change in made.changes if change.what != "removed")
        print(
            f"{name}: {size(total)} in {', '.join(f'{count} {what}' for what, count in counts.items())}"
        )
        print(f"from {made.folder}")
        print(
            f"released: {url} (commit {made.commit[:SHOWN]})"
            if made.commit
            else "Dry run: nothing was uploaded."
        )
    elif made.refusals:
        for refusal in made.refusals:
            logger.error(f"refused: {refusal}")
        logger.error(
            "nothing was published; force=REASON publishes it anyway, with the reason on the card"
        )
    else:
        print(f"{name} is this release already: {url}")
