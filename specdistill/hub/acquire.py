"""From a method and a target to a draft's folder: chosen by the user, checked before its weights are fetched, fetched at one commit.

What a draft is depends on its method: a head, a model, a layer that comes with the target's own checkpoint, or nothing at all. Whether it
is one for this target is told by small files and by the headers of its safetensors, tens of kilobytes of a file of gigabytes.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import constants
from huggingface_hub.repocard import metadata_load
from rich.filesize import decimal

from specdistill.cost import free_bytes
from specdistill.errors import ResourceError, UserError
from specdistill.hub.bundle import Role, write_bundle
from specdistill.hub.sources import Headers, Source, say
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import read_config
from specdistill.methods.load import TOKENIZER, implementation, recognized
from specdistill.methods.target_record import check_target, recorded_target
from specdistill.planning.reading import KnownDraft, known_drafts
from specdistill.repositories import offline, split_gguf, split_revision
from specdistill.targets.files import INDEX, TargetFiles

CARD = "README.md"
DRAFT, TARGET = "the folder of a draft, or org/name or org/name@revision on the Hub", "pico, a folder, a GGUF file or a Hub id"
MODEL = ("config.json", "generation_config.json", INDEX, *TOKENIZER, "*processor_config.json")
WORTH_TIMING = 64 * 2**20  # bytes to fetch, from which on minutes are asked after
SHOWN = 10  # drafts of a list


@dataclass(frozen=True)
class Wanted:
    """What of a source is needed. role: `draft` or `target`."""

    role: Role
    source: Source
    files: Sequence[str]


def acquire(
    method: str,
    target: str,
    draft: str | None = None,
    *,
    target_revision: str | None = None,
    adapter: str | None = None,
    revision: str | None = None,
    verify: bool = False,
    warm: bool = False,
    bundle: str | None = None,
    dry_run: bool = False,
    **options: Any,
) -> Path:
    """The folder of a draft for a target; with `dry_run` the one that it would have.

    draft: a folder or a Hub id, `org/name@revision` too; None for a layer of the target's own checkpoint, whose folder it then is. verify:
    compare what is in the cache already with its checksums. warm: fetch the target's files too. bundle: write both into this archive.
    options: of decoding, as far as they say what fits.

    Raises UserError for a draft that is none for this target, before its weights are fetched, and for a draft that was not chosen;
    ResourceError when the Hub, the disk or the cache fails, and offline for what is missing.
    """
    if METHODS[method].artifact is None:
        raise UserError("method", got=f"{method}, which has no weights", expected="a method with something to acquire")
    if bundle is not None and Path(bundle).exists():
        raise UserError("bundle", got=f"{bundle}, which exists", expected="a new file")
    folder, gguf = split_gguf(target)
    of_target = Source.of(folder, target_revision, key="target.model", expected=TARGET)
    if warm and of_target.repository is None:
        raise UserError("warm", got="true", expected=f"false with a target that is here, {target}")
    files = TargetFiles(f"{of_target.repository or of_target.folder}{f'/{gguf}' if gguf else ''}", of_target.commit, adapter)
    whole_target = bool(warm or bundle)
    if draft is not None:
        source = _source_of(draft, revision)
        wanted = [Wanted("draft", source, _checked(source, method, files, of_target, verify, options))]
    elif implementation(method).check_native is not None:
        wanted, whole_target = [], True
        _check_native(method, files, of_target)
    else:
        raise _not_chosen(method, target, of_target.repository)
    if whole_target:
        wanted.append(Wanted("target", of_target, [gguf] if gguf else _whole_model(of_target)))
    if verify and (local := next((each.source for each in wanted if each.source.repository is None), None)):
        raise UserError("verify", got="true", expected=f"false with a folder, {local.name}, of which no checksums are stated")
    _announce(wanted)
    if not dry_run:
        for each in wanted:
            each.source.fetch(each.files, verify=verify or bundle is not None)
        if bundle is not None:
            write_bundle(Path(bundle), method, {each.role: (each.source, each.files) for each in wanted})
            say(f"bundle: {bundle}, {decimal(Path(bundle).stat().st_size)}")
    return wanted[0].source.folder


def _source_of(draft: str, revision: str | None) -> Source:
    """Where a draft is. Raises UserError for a revision that is named twice, and for what holds no draft in safetensors."""
    name, named = split_revision(draft)
    if named and revision:
        raise UserError("revision", got=revision, expected=f"none beside {draft}, which names one")
    if split_gguf(name)[1]:
        raise UserError("draft", got=f"{draft}, a GGUF file", expected=f"{DRAFT}, with config.json and safetensors")
    source = Source.of(name, named or revision, key="draft", expected=DRAFT)
    if "config.json" not in source.files:
        found = ", ".join(sorted(source.files)[:5]) or "nothing"
        raise UserError("draft", got=f"{source.name} without a config.json, with {found}", expected="a draft")
    if INDEX not in source.files:
        source.weights()  # a pickle is refused before anything is fetched
    return source


def _checked(
    source: Source, method: str, target: TargetFiles, of_target: Source, verify: bool, options: dict[str, Any]
) -> list[str]:
    """The files of a draft that are needed, once the small ones and headers say that it is one of the method for the target."""
    is_model = METHODS[method].artifact == "model"
    needed = source.matching("config.json", "generation_config.json", INDEX, CARD, *TOKENIZER)
    if constants.is_offline_mode():
        source.fetch([*needed, *source.weights()], verify=verify)  # what is missing is named at once
    folder = source.fetch(source.matching("config.json", INDEX, CARD, *(TOKENIZER if is_model else ())), verify=verify)
    headers = Headers(source)
    found = recognized(read_config(folder, "draft"), headers.keys(), name=source.name, key="draft")
    if found != method:
        got = f"{source.name}, which holds a draft of method {found}"
        raise UserError("draft", got=got, expected=f"one of method {method}")
    of_target.fetch(_small(of_target, with_tokenizer=is_model), verify=verify)
    tensors = dict(headers)
    with offline():  # what is read is here by now
        implementation(method).check(folder, tensors, target, key="draft", name=source.name, **options)
    if recorded_target(folder, "draft") is None:
        _compare_card(source, of_target)
    elif constants.is_offline_mode() and of_target.missing(_whole_model(of_target)):
        say(f"{source.name}: not compared with the target that it records, whose weights are not all here")
    else:
        check_target(folder, target, "draft", **options)
    say(f"{source.name}: a draft of method {method} that fits {of_target.name}")
    return [*needed, *headers.files]


def _check_native(method: str, target: TargetFiles, source: Source) -> None:
    """Whether the layer that a method drafts with is in the target's own checkpoint."""
    source.fetch(_small(source))
    check_native = implementation(method).check_native
    assert check_native is not None
    check_native(Headers(source), target)
    say(f"{source.name}: its own checkpoint holds the layer that drafts, so the whole of it is needed")


def _small(source: Source, *, with_tokenizer: bool = False) -> list[str]:
    """What is read of a target to compare it with a draft."""
    return source.matching("config.json", INDEX, *(TOKENIZER if with_tokenizer else ()))


def _whole_model(source: Source) -> list[str]:
    """The files that decoding with a target reads."""
    if not constants.is_offline_mode():
        source.fetch(source.matching(INDEX))
    return [*source.matching(*MODEL), *source.weights()]


def _compare_card(draft: Source, target: Source) -> None:
    """Say so where a draft that records no target has a card that names another: sizes alone do not tell a model from its fine-tunes."""
    try:
        named = (metadata_load(draft.folder / CARD) or {}).get("base_model") if CARD in draft.files else None
    except (ValueError, AttributeError, yaml.YAMLError):
        named = None  # a card is prose; what cannot be read says nothing
    models = [named] if isinstance(named, str) else named or []
    if target.repository and models and target.repository.lower() not in {str(model).lower() for model in models}:
        others = ", ".join(map(str, models))
        say(f"warning: the card of {draft.name} names {others}, not {target.repository}; only sizes say that it fits")


def _announce(wanted: Sequence[Wanted]) -> None:
    """Say what will be fetched, how long that may take and what the disk has free. Raises ResourceError where it has too little."""
    missing = [(each.source, file) for each in wanted for file in each.source.missing(each.files)]
    for each in wanted:
        own = [f"\n  {decimal(source.files[file].size):>10}  {file}" for source, file in missing if source is each.source]
        at = f" (commit {each.source.commit})" if each.source.commit else ""
        say(f"{each.role}: {each.source.name}{at}, {len(each.files)} files, {len(own)} of them to fetch{''.join(own)}")
    if not missing or constants.is_offline_mode():
        return
    total, cache = sum(source.files[file].size for source, file in missing), Path(constants.HF_HUB_CACHE)
    what = f"{decimal(total)} into {cache}, whose disk has {decimal(free := free_bytes(cache))} free"
    if total > free:
        raise ResourceError(f"to fetch: {what}", next_step="free disk space, or set HF_HOME to a larger disk")
    source, file = max(missing, key=lambda each: each[0].files[each[1]].size)
    say(f"to fetch: {what}; time: {_minutes(source, file, total) if total >= WORTH_TIMING else 'not estimated for so little'}")


def _minutes(source: Source, file: str, total: int) -> str:
    """What a sample of a file says, taken over one connection."""
    sample, seconds = source.sample(file)
    if not sample:
        return "unknown"
    rate = sample / seconds
    return f"about {total / rate / 60:.0f} min, if all comes as {decimal(sample)} of {file} did, at {decimal(int(rate))}/s"


def _not_chosen(method: str, target: str, repository: str | None) -> UserError | ResourceError:
    """Show the drafts that are known for a target, the most downloaded first, and leave the choice."""
    found, not_asked = known_drafts(target, repository)
    if not_asked:
        return ResourceError(f"draft: none is given, and the Hub was {not_asked}", next_step="name one with draft=")
    command = f"specdistill acquire method={method} target={shlex.quote(target)} draft="
    drafts = [draft for draft in found if draft.method == method]
    by_card = [draft for draft in drafts if draft.found_by == "card"]
    by_name = [draft for draft in drafts if draft.found_by != "card"]
    if by_card:
        say(f"drafts of method {method} whose card names {target}, the most downloaded first:")
        _show(by_card, command)
    if by_name:
        say(f"drafts of method {method} that are called like {target}, though their card does not name it:")
        _show(by_name, "")
    choices = [*by_card, *by_name]
    if not choices:
        return UserError("draft", got="nothing", expected=f"a draft: the Hub lists none of method {method} for {target}")
    return UserError("draft", got="nothing", expected=f"a choice, as in: {command}{choices[0].repository}")


def _show(drafts: Sequence[KnownDraft], command: str) -> None:
    for draft in drafts[:SHOWN]:
        say(f"  {command}{draft.repository}    {draft.downloads:,} downloads")
    if len(drafts) > SHOWN:
        say(f"  and {len(drafts) - SHOWN} more")
