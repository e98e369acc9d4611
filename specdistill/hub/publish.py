"""Release a finished run on the Hub.

A release holds the draft as it was measured, the evidence for it, exports for engines, and the
model card.
"""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.hf_api import RepoFile

from specdistill.advice.doctor.diagnosis import find_loader_problems
from specdistill.common.credentials import check_no_secret, remove_places
from specdistill.common.documents import read_json, read_keys
from specdistill.common.errors import ResourceError, UserError, logger, make_unused_key_error
from specdistill.common.folders import create_folder
from specdistill.common.repositories import (
    convert_hub_errors,
    fetch,
    find_connection_failure,
    split_gguf,
    split_revision,
)
from specdistill.evaluation.gate.decide import FIRST_RELEASE, Evidence
from specdistill.evaluation.report import phrases, tables
from specdistill.evaluation.report.files import REPORT as REPORT_FILE
from specdistill.evaluation.report.files import (
    SAMPLES,
    compute_digest,
    read_report,
    to_picture,
    write_report,
)
from specdistill.evaluation.report.phrases import format_size
from specdistill.evaluation.report.tables import draft_lengths
from specdistill.evaluation.report.text import escape_markdown, format_cells
from specdistill.hub.card import PICTURE, CardContents, build_model_card
from specdistill.hub.evidence import (
    DRAFT,
    FINISHED_RUN_HINT,
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
    choose_draft_license,
    find_data_licenses,
    list_prohibitions,
    read_model_license,
)
from specdistill.hub.options import PublishOptions
from specdistill.hub.repository import (
    LICENSES,
    NOTICE,
    REPORT,
    FileChange,
    Repository,
    check_names,
    convert_upload_errors,
    is_same,
)
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import link, read_config
from specdistill.methods.compatibility import check_draft
from specdistill.methods.load import draft_files, draft_hash, load_method, locate
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import ARGUMENTS_WITHOUT_CODE, format_recipe, load_recipe
from specdistill.recipe.sections import PublishConfig
from specdistill.serving.engines import ENGINES
from specdistill.serving.engines.engine import Engine, Served
from specdistill.serving.engines.llama_cpp import GGUF
from specdistill.serving.export import (
    check_exports,
    export,
    list_measured_fields,
    read_measured_lookup,
)
from specdistill.targets.files import NUM_SHOWN_HASH_DIGITS, Shards, TargetFiles
from specdistill.training.history import read_history

WEIGHTS = (".safetensors", ".gguf")  # the suffixes of files that hold weights
# Files with prompts and completions, which may contain what looks like a secret, such as an
# address. Everything else in them is also in report.json, which is searched for secrets.
SUITE_REPORT_FILES = (SAMPLES, "report.html", Path(PICTURE).name)


@dataclass(frozen=True)
class Publication:
    """The outcome of publishing a run.

    Attributes:
        repository: the repository on the Hub.
        tag: the tag of the release.
        refusals: the reasons against the release. Nothing was published, unless `force` overrode
            them.
        folder: the folder that was published, or that a dry run wrote. None if the release was
            refused or exists already.
        changes: how the files in the folder differ from those on the Hub.
        commit: the commit of the release. None if nothing was published, because it was refused or
            because of a dry run.
    """

    repository: str
    tag: str
    refusals: Sequence[str]
    folder: Path | None = None
    changes: Sequence[FileChange] = ()
    commit: str | None = None


def publish_run(options: PublishOptions) -> Publication:
    """Release the draft of a finished run on the Hub, or return the reasons against it.

    Options that are not given have the values of the section `publish` of the run's recipe.

    Args:
        options: the options of the command `specdistill publish`.

    Raises:
        UserError: for options, files or a repository that cannot be used.
        ResourceError: when the Hub or the disk fails.
    """
    # Read the run's recipe, without running code that it may name. Options that were given replace
    # the values of its section `publish`.
    run = Path(options.run)
    check_finished(run)
    requested_keys = options.model_dump(
        include=options.model_fields_set & PublishConfig.model_fields.keys()
    )
    recipe = load_recipe(Recipe, [f"recipe={run / RECIPE}", *ARGUMENTS_WITHOUT_CODE])
    config = recipe.publish.model_copy(update=requested_keys)
    name = check_names(config.repo, options.tag)

    # Ask the Hub whether it accepts the token, and read the repository. A dry run of a first
    # release needs nothing from the Hub, so it may go on without it.
    if not options.dry_run:
        with convert_upload_errors(name):
            HfApi().whoami()
    repository = _read_repository(
        name, may_be_new=options.dry_run and options.baseline == FIRST_RELEASE
    )
    repository.check_visible(config.private)

    # If the command is repeated, the Hub may have the release already.
    released_tag = _find_released_tag(run, repository, options.tag)
    if released_tag:
        return Publication(name, released_tag, (), commit=repository.tags[released_tag])
    if options.tag in repository.tags:
        raise UserError(
            "tag",
            got=f"{options.tag}, which is another release of {name}",
            expected=f"a new tag, e.g. {repository.next_tag}",
        )

    # Check the release. `force` overrides the reasons against it.
    contents, target = _check_release(run, recipe, config, repository, options)
    tag = contents.tag
    refusals = contents.overridden
    if refusals and options.force is None:
        return Publication(name, tag, refusals)
    if options.force is not None and not refusals:
        raise make_unused_key_error("force", options.force, "nothing speaks against this release")

    # Complete the card, and write the folder of the release.
    report = contents.release.report
    comparison = phrases.describe_baseline(report) if contents.since else "The first release."
    changes_table = format_cells(tables.tabulate_changes(report)) if contents.since else ""
    contents = replace(
        contents,
        history=read_history(run / DRAFT, key="run"),
        changes=f"{escape_markdown(comparison)}\n\n{changes_table}" if contents.since else "",
    )
    folder = _choose_folder(options)
    stage(contents, target, config.exports, folder, replaces=options.output_dir is None)

    # Upload the files that differ from the Hub. The message is for the tag: `git tag` shows it.
    changes = repository.compare_with(folder)
    if options.dry_run:
        return Publication(name, tag, refusals, folder, changes)
    message = f"Release {tag}\n\n{phrases.format_summary(report)}\n\n{comparison}"
    commit = repository.upload(folder, changes, tag, message=message, private=config.private)
    return Publication(name, tag, refusals, folder, changes, commit)


def _find_released_tag(run: Path, repository: Repository, tag: str | None) -> str | None:
    """Return the tag under which a run is released already; None if it is not.

    Args:
        run: the folder of the run.
        repository: the repository of the releases.
        tag: the only tag to look at; None for all tags.
    """
    for candidate_tag in [tag] if tag else repository.tags:
        if is_released(run, repository.at(candidate_tag)):
            return candidate_tag
    return None


def _check_release(
    run: Path,
    recipe: Recipe,
    publish_config: PublishConfig,
    repository: Repository,
    options: PublishOptions,
) -> tuple[CardContents, TargetFiles]:
    """Read a run as the next release of a repository, and collect the reasons against the release.

    Args:
        run: the folder of the run.
        recipe: the recipe of the run.
        publish_config: the recipe's section `publish`, in which the options that were given have
            replaced the recipe's values.
        repository: the repository of the releases.
        options: all options of the command, also those that the recipe cannot set, such as `tag`.

    Returns:
        The contents of the card, without the history and the changes; and the files of the target.
        The contents include the reasons against the release (`overridden`; empty if there are
        none). The option `force` can override them; this function does not decide that.
    """
    # Judge the measurement, and find the target.
    last_tag, last = find_last_release(repository, options.baseline)
    release = read_release(run, recipe, last)
    target, base_model = find_target(release, publish_config.base_model)
    name = repository.name
    if base_model == name:
        raise UserError(
            "repo",
            got=f"{name}, which is the target's repository",
            expected="another repository for the draft",
        )

    # A licence can speak against a release, and so can a draft that does not fit its target.
    parts = list_ingredients(release.recipe, target, base_model)
    warnings, misfits = check_release_fit(release, target)
    prohibitions = [f"licence: {reason}" for reason in list_prohibitions(parts, name)]
    refusals = [*release.refusals, *misfits, *prohibitions]
    contents = CardContents(
        repository=name,
        tag=options.tag or repository.next_tag,
        release=release,
        history=None,
        base_model=base_model,
        parts=parts,
        license=choose_draft_license(publish_config.license, parts),
        overridden=refusals,
        warnings=warnings,
        reason=options.force,
        since=last_tag,
    )
    return contents, target


def _choose_folder(options: PublishOptions) -> Path:
    """Return the folder that the release is written into.

    Raises:
        UserError: if the default folder exists and is not an earlier release.
    """
    # An earlier release in the default folder is replaced. It is recognized by the record of the
    # training in its root.
    folder = Path(options.output_dir or Path(options.run) / "release")
    is_earlier_release = (folder / Path(PROVENANCE).name).is_file()
    if options.output_dir is None and folder.exists() and not is_earlier_release:
        raise UserError(
            "output_dir",
            got=f"null, and the default folder {folder} holds something else than a release",
            text=(
                f"output_dir: the default folder {folder} exists and holds something else than an"
                " earlier release, so it is not replaced. Choose a new folder with output_dir=PATH."
            ),
        )
    return folder


def _read_repository(name: str, *, may_be_new: bool) -> Repository:
    """Read the state of a repository of the Hub.

    Args:
        name: its Hub id.
        may_be_new: whether to warn, and treat the repository as a new one, if the Hub cannot be
            reached.
    """
    try:
        return Repository.read(name)
    except ResourceError as error:
        if not (may_be_new and error.__cause__ and find_connection_failure(error.__cause__)):
            raise
        logger.warning(
            f"The Hub cannot be reached. {name} is treated as a new repository, and earlier"
            " releases are not checked."
        )
        return Repository(name)


def find_last_release(
    repository: Repository, baseline: str | None
) -> tuple[str, Evidence] | tuple[None, None]:
    """Return the tag of the last release, and the report that the next release is compared with.

    By default, this report is the one that was published with the last release. With `baseline`, it
    is a newer report of the last release, measured with the settings of the next release.

    Args:
        repository: the repository of the releases.
        baseline: the file or folder of a newer report of the last release; the word `none` for a
            first release; None for the report as published.

    Returns:
        The tag of the last release, and its report with the records. Both are None for the first
        release, which must be declared with `none`.

    Raises:
        UserError: if `baseline` is not `none` for a first release, or is `none` for a later one;
            for an edited report; and for a report of other weights than the last release has.
        ResourceError: when the Hub fails.
    """
    name = repository.name
    tag = repository.last_release()

    # The first release must be declared, because it is compared with nothing.
    if tag is None:
        if baseline != FIRST_RELEASE:
            raise UserError(
                "baseline",
                got=baseline or "nothing",
                text=(
                    f"baseline: {name} has no release to compare with. For its first release type"
                    f" baseline={FIRST_RELEASE}"
                ),
            )
        return None, None
    if baseline == FIRST_RELEASE:
        raise make_unused_key_error(
            "baseline", baseline, f"{name} has the release {tag}, which this one is compared with"
        )

    # Fetch the report of the last release, or take the given one.
    folder = fetch(
        name,
        key="repo",
        expected="a release",
        revision=repository.tags[tag],
        patterns=[f"{REPORT}/{REPORT_FILE}", f"{REPORT}/{SAMPLES}"],
    )
    key = "baseline" if baseline else "repo"
    report, records = read_report(Path(baseline) if baseline else folder / REPORT, key)

    # The report must be unedited, and must have measured the released draft.
    if report.get("digest") != compute_digest(report, records):
        raise UserError(
            key,
            got=f"{baseline or f'{name}@{tag}'}, a report that was edited",
            expected=(
                "an unedited report: measure the release again with `specdistill eval`, and pass"
                " that report as baseline=PATH"
            ),
        )
    if baseline:
        released_draft = locate(f"{name}@{repository.tags[tag]}", key="repo")
        if report["draft"].get("weights") != draft_hash(released_draft):
            raise UserError(
                key,
                got=f"{baseline}, a report of a draft with other weights",
                expected=f"a report of {name}@{tag}",
            )

    # In the comparison, the draft has its name on the Hub, not the folder where it was measured.
    report["draft"] |= {"model": name, "revision": tag}
    return tag, Evidence(report, records)


def is_released(run: Path, files: Mapping[str, RepoFile]) -> bool:
    """Return whether a commit is the release of a run.

    The commit must hold the draft of the run, the record of its training and the records of its
    measurement. report.json is not compared, because the gate is decided again for a release.

    Args:
        run: the folder of the run.
        files: the files of the commit, by path.
    """
    local_files = {path.name: path for path in (*draft_files(run / DRAFT), run / PROVENANCE)}
    local_files[f"{REPORT}/{SAMPLES}"] = run / REPORT / SAMPLES
    return all(
        path.is_file() and is_same(path, files.get(name)) for name, path in local_files.items()
    )


def check_release_fit(release: Release, target: TargetFiles) -> tuple[list[str], list[str]]:
    """Check that the draft of a run fits its target.

    Returns:
        Warnings, and refusals if it does not fit.
    """
    # Only drafts that are whole language models may have another vocabulary than the target.
    options: dict[str, Any] = (
        {"heterogeneous_vocab": is_translated(release)}
        if METHODS[release.method].standalone
        else {}
    )

    # If the draft does not fit, `check_draft` raises a UserError with the key `run`. An error with
    # another key has another cause, such as a target that cannot be read.
    try:
        findings = check_draft(release.method, release.run / DRAFT, target, "run", **options)
    except UserError as error:
        if error.key != "run":
            raise
        return [], [f"not a draft for its target: {str(error).removeprefix('run: ')}"]
    return [finding.what for finding in findings], []


def is_translated(release: Release) -> bool:
    """Return whether the draft was measured with tokens translated between two vocabularies.

    The commands for engines do not set up such a translation.
    """
    return bool(release.report["settings"].get("drafting", {}).get("heterogeneous_vocab"))


def find_target(release: Release, base_model: str | None) -> tuple[TargetFiles, str | None]:
    """Find the target of a release.

    Args:
        release: the run that is released.
        base_model: the Hub id of the target, if the recipe names a folder; None to take the target
            that the recipe names.

    Returns:
        The files of the target, and its Hub id, or None if it has none.

    Raises:
        UserError: if `base_model` is another target.
        ResourceError: when the Hub fails.
    """
    # Without `base_model`, take the recipe's target. A local path has no Hub id. Otherwise the Hub
    # id is the target's name, without the name of a GGUF file in the repository ([0]).
    recipe_target = release.recipe.target
    if base_model is None:
        target = TargetFiles(recipe_target.model, recipe_target.revision, recipe_target.adapter)
        return target, None if Path(target.name).exists() else split_gguf(target.name)[0]

    # `base_model` is where others find a target that was a folder during training. The files on the
    # Hub must be those of that folder.
    with convert_hub_errors("base_model", base_model, expected="the Hub id of the target"):
        HfApi().model_info(base_model)
    target = TargetFiles(base_model, adapter=recipe_target.adapter)
    if not target.identity.is_same(release.made_for):
        raise UserError(
            "base_model",
            got=f"{target.identity}",
            expected=f"the target that the draft was made for: {release.made_for}",
        )
    return target, base_model


def list_ingredients(recipe: Recipe, target: TargetFiles, base_model: str | None) -> list[Licensed]:
    """List the models and data that a draft was made from, with the licence of each.

    Args:
        recipe: the recipe of the draft.
        target: the files of the target.
        base_model: the Hub id of the target; None if it has none.

    Raises:
        UserError: for a card or a source that cannot be read.
        ResourceError: when the Hub fails.
    """
    # The target.
    target_name = base_model or Path(recipe.target.model).name
    parts = [read_model_license("target", target_name, target.fetch(CARD))]

    # The target's adapter, and the model that the draft was initialized from, if any. Only a
    # `draft.init` with a slash names a model; other values name ways to initialize.
    init = getattr(getattr(recipe, "draft", None), "init", None) or ""
    optional_parts = {
        "target's adapter": target.adapter,
        "initialization": init if "/" in init else None,
    }
    for what, model in optional_parts.items():
        if model:
            name, revision = split_revision(model)
            folder = fetch(
                name, key=what, expected="a folder or a Hub id", revision=revision, patterns=[CARD]
            )
            shown_name = Path(name).name if Path(name).exists() else name
            parts.append(read_model_license(what, shown_name, folder))

    # The training data.
    data = getattr(recipe, "data", None)
    return [*parts, *(find_data_licenses(data.source) if data else [])]


def stage(
    contents: CardContents,
    target: TargetFiles,
    exports: Sequence[str],
    output: Path,
    *,
    replaces: bool,
) -> None:
    """Write the folder of a release: draft, training record, report, exports, licences and card.

    The draft's files are linked, not copied.

    Args:
        contents: the contents of the card.
        target: the files of the target.
        exports: the engines to export the draft for.
        output: the folder to write.
        replaces: whether an earlier folder in its place is replaced.

    Raises:
        UserError: for a folder that must not be replaced, for a link out of the run, and for an
            export that is not possible.
        ResourceError: when the disk fails.
    """
    # Check the files before anything is written: that the weights are complete, and that no file is
    # a link to a file outside of the run, which would be published. In the folder of a run, the
    # recipe and the training record are in a folder that is also named `run`.
    release = contents.release
    draft = contents.release.run / DRAFT
    Shards.open(draft, "run").check()
    paths: list[Path] = []
    for part in (DRAFT, "run", REPORT):
        paths += (release.run / part).iterdir()
    refuse_links(paths, release.run)
    check_exports(exports, release.method, "exports")
    with create_folder(output, replaces=replaces) as folder:
        # Write the draft, its recipe and its report.
        for path in (*release.draft, release.run / PROVENANCE):
            link(path, folder / path.name)
        recipe = read_keys(release.run / RECIPE, "run", FINISHED_RUN_HINT)
        (folder / Path(RECIPE).name).write_text(
            format_recipe(recipe, public=True), encoding="utf-8"
        )
        write_report(folder / REPORT, release.report, release.records)
        (folder / PICTURE).write_text(to_picture(release.report, release.records), encoding="utf-8")

        # Write the exports for engines.
        exported = {}
        for engine in exports:
            exported[engine] = export(
                draft, engine, folder / engine, target, merges=False, logs=False
            )
            # SERVE.md names paths of this machine; the card says how to serve the draft.
            (folder / engine / "SERVE.md").unlink()
            config_path = folder / engine / "config.json"
            if config_path.is_file():
                config = remove_places(read_json(config_path))
                config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

        # Write the licences and the card.
        write_terms(contents.parts, target, folder)
        (folder / CARD).write_text(
            str(build_model_card(contents, list_serving_commands(contents, target, exported))),
            encoding="utf-8",
        )

        # Nothing that is published may hold a secret.
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            if path.suffix not in WEIGHTS and path.name not in SUITE_REPORT_FILES:
                # Pages put zero-width spaces into addresses, which would hide a secret.
                text = path.read_text(encoding="utf-8", errors="replace")
                check_no_secret(path.name, text.replace("\N{ZERO WIDTH SPACE}", ""))


def write_terms(parts: Sequence[Licensed], target: TargetFiles, folder: Path) -> None:
    """Write the texts that licences demand to be passed on with a draft, into its folder.

    These texts are the notices of the licences, and the licence files of the target.

    Raises:
        UserError: for a text that is a link out of the target's folder, or out of the target's
            place in the Hub's cache.
    """
    # Write the notices into one file, each once.
    terms = dict.fromkeys(part.terms.notice for part in parts if part.terms)
    if terms:
        (folder / NOTICE).write_text("".join(f"{notice}\n" for notice in terms), encoding="utf-8")

    # Link the licence files of the target. In the Hub's cache, the folder of a commit is
    # REPOSITORY/snapshots/COMMIT. Its files are links, which may lead out of the folder of the
    # commit, but not out of the folder of the repository.
    target_folder = target.fetch(*TEXTS)
    paths = chain.from_iterable(target_folder.glob(pattern) for pattern in TEXTS)
    term_files = sorted(path for path in paths if path.is_file())
    is_in_cache = target_folder.parent.name == "snapshots"
    home = target_folder.parents[1] if is_in_cache else target_folder
    refuse_links(term_files, home, key="target")
    for path in term_files:
        (folder / LICENSES).mkdir(exist_ok=True)
        link(path, folder / LICENSES / path.name)


def refuse_links(paths: Iterable[Path], home: Path, key: str = "run") -> None:
    """Raise UserError if a path is a link that leads out of a folder, or lies behind such a link.

    Args:
        paths: the files that would be published.
        home: the folder that they must lie in.
        key: the key to name in errors.
    """
    for path in paths:
        if not path.resolve().is_relative_to(home.resolve()):
            raise UserError(
                key,
                got=f"{path}, a link",
                expected="a file, because a link would publish the file that it points to",
            )


def list_serving_commands(
    contents: CardContents, target: TargetFiles, exported: Mapping[str, Served]
) -> Iterator[tuple[str, str]]:
    """Yield the title and the commands of each engine that can serve the draft of a release.

    Nothing is yielded for a draft that was measured with tokens translated between two
    vocabularies, because the commands do not set up the translation.

    Args:
        contents: the contents of the card.
        target: the files of the target.
        exported: by engine, the draft that was exported for it.
    """
    report = contents.release.report
    draft = contents.release.run / DRAFT
    if is_translated(contents.release):
        return iter(())
    is_gguf = split_gguf(target.name)[1] is not None
    served = Served(
        method=contents.release.method,
        output=Path(contents.repository),
        # Engines other than llama.cpp need a checkpoint in safetensors. A repository of GGUF files
        # has none.
        target=None if is_gguf else contents.base_model,
        gguf=Path(target.name).name if is_gguf else None,
        config=read_config(draft, "run"),
        lookup_first=read_measured_lookup(report["settings"]),
        draft_revision=contents.tag,
        **list_measured_fields(
            report, target, draft_lengths(report), report["settings"]["num_speculative_tokens"]
        ),
    )
    return format_serving_lines(served, draft, exported)


def can_load_directly(engine: Engine, method: str, folder: Path) -> bool:
    """Return whether an engine can load the folder of a draft as training wrote it, unconverted.

    Only the config, and the names and shapes of the weights, are read.
    """
    # A draft model is a checkpoint of transformers, which all engines but llama.cpp load.
    if METHODS[method].standalone:
        return engine is not GGUF  # llama.cpp needs files that its converter makes

    # The engine must find no problem in the config and the shapes of a head's weights.
    config = read_config(folder, "draft")
    tensors = Shards.open(folder, "draft").build_without_content()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    head_shape = load_method(method).read_head_shape(config, num_layers=None)
    findings = find_loader_problems(engine, method, head_shape, config, shapes)
    return all(finding.severity != "problem" for finding in findings)


def format_serving_lines(
    served: Served, draft: Path, exports: Mapping[str, Served]
) -> Iterator[tuple[str, str]]:
    """Yield the title and the commands of each engine that can serve the draft.

    An engine loads the export that was made for it, or else the draft as training wrote it. Engines
    that can load neither are left out.

    Args:
        served: the facts to serve the draft from the root of its repository, at the tag of a
            release.
        draft: the folder of the draft on this machine.
        exports: by engine, the draft that was exported for it into a folder of that name.
    """
    assert served.method is not None

    # The field `output` has the name of the draft's repository here, OWNER/NAME. The commands
    # download an export into a local folder NAME.
    repository = served.output
    local_folder = served.output.name

    # Engines without a command for serving are left out.
    for name, serving in METHODS[served.method].serving().items():
        engine = ENGINES[name]
        if engine.serve_command is None:
            continue

        # Serve with the number of draft tokens and the lookup that this engine supports.
        k, lookup = engine.drafting(served.num_tokens, served.lookup_first)
        served_draft = replace(served, num_tokens=k, lookup_first=lookup)
        # An export lies in a subfolder of the repository. The subfolder is downloaded, and served
        # from the local folder, which has no revision.
        if name in exports:
            exported = replace(
                served_draft,
                output=Path(local_folder) / name,
                draft_revision=None,
                serving=serving,
                config=exports[name].config,
            )
            download = (
                f"hf download {repository} --revision {served.draft_revision}"
                f" --local-dir {local_folder} --include {shlex.quote(f'{name}/*')}"
            )
            yield engine.title, f"{download}\n{engine.serve_command(exported)}"
        elif can_load_directly(engine, served.method, draft):
            yield engine.title, engine.serve_command(replace(served_draft, serving=serving))


def print_outcome(publication: Publication) -> None:
    """Print what was published, or log the reasons why nothing was.

    For a release, each file is listed with its size and how it changed on the Hub.
    """
    name = f"{publication.repository}@{publication.tag}"
    url = f"{constants.ENDPOINT}/{publication.repository}/tree/{publication.tag}"

    # Say which files were written and uploaded. For each file: new, changed, same or removed.
    if publication.folder is not None:
        for change in publication.changes:
            print(f"{change.what:8} {format_size(change.size):>12}  {change.path}")
        counts = Counter(change.what for change in publication.changes)
        total = sum(change.size for change in publication.changes if change.what != "removed")
        counts_text = ", ".join(f"{count} {what}" for what, count in counts.items())
        print(f"{name}: {format_size(total)} in {counts_text}")
        print(f"from {publication.folder}")
        if publication.commit:
            print(f"released: {url} (commit {publication.commit[:NUM_SHOWN_HASH_DIGITS]})")
        else:
            print("Dry run: nothing was uploaded.")

    # Otherwise nothing was written: the release was refused, or exists already.
    elif publication.refusals:
        for refusal in publication.refusals:
            logger.error(f"refused: {refusal}")
        logger.error(
            "Nothing was published. force=REASON publishes it anyway, with the reason on the card."
        )
    else:
        print(f"{name} already holds this release: {url}")
