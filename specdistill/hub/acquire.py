"""From a method and a target to a draft's folder: chosen by the user, checked before its weights are fetched, fetched at one commit.

What a draft is depends on its method: a head, a model, a layer that comes with the target's own checkpoint, or nothing at all. Whether it
is one for this target is told by small files and by the headers of its safetensors, tens of kilobytes of a file of gigabytes.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from rich.filesize import decimal

from specdistill.errors import ResourceError, UserError, logger
from specdistill.files.documents import head_of
from specdistill.hub.model_files import MODEL, SMALL, ModelFiles
from specdistill.methods import METHODS, method_named
from specdistill.methods.checkpoint import read_config
from specdistill.methods.load import TOKENIZER, implementation, recognized
from specdistill.methods.target_record import check_target, recorded_target
from specdistill.progress import free_bytes
from specdistill.repositories import split_gguf, split_revision
from specdistill.targets.files import INDEX, TargetFiles

CARD = "README.md"
DRAFT, TARGET = "the folder of a draft, or org/name or org/name@revision on the Hub", "pico, a folder, a GGUF file or a Hub id"


def acquire(
    method: str,
    target: str,
    draft: str | None = None,
    *,
    target_revision: str | None = None,
    adapter: str | None = None,
    revision: str | None = None,
    dry_run: bool = False,
    **options: Any,
) -> Path:
    """The folder of a draft for a target; with `dry_run` the one that it would have.

    draft: a folder or a Hub id, `org/name@revision` too; None for a layer of the target's own checkpoint, whose folder it then is.
    options: of decoding, as far as they say what fits.

    Raises UserError for a draft that is none for this target, before its weights are fetched, and for a draft that was not chosen;
    ResourceError when the Hub, the disk or the cache fails, and without the Hub for what is missing.
    """
    if not method_named(method).is_trained:
        raise UserError("method", got=f"{method}, which has no weights", expected="a method with something to acquire")
    folder, gguf = split_gguf(target)
    of_target = ModelFiles.of(folder, target_revision, key="target.model", expected=TARGET)
    commit = of_target.folder.name if of_target.repository else target_revision
    files = TargetFiles(f"{of_target.repository or of_target.folder}{f'/{gguf}' if gguf else ''}", commit, adapter)
    if draft is not None:
        of_draft = _find_draft(draft, revision)
        wanted, names = of_draft, _checked(of_draft, method, files, of_target, options)
    elif (check_native := implementation(method).check_native) is not None:
        check_native({name: tensor.shape for name, tensor in of_target.tensors().items()}, files)
        logger.info(f"{of_target.name}: its own checkpoint holds the layer that drafts, so the whole of it is needed")
        wanted, names = of_target, [gguf] if gguf else [*of_target.matching(*MODEL), *of_target.weights()]
    else:
        listed = f"`specdistill plan target={shlex.quote(target)}` lists those that the Hub has"
        raise UserError("draft", got="nothing", expected=f"{DRAFT}; {listed}")
    _announce(wanted, names)
    if not dry_run:
        wanted.fetch(names)
    return wanted.folder


def _find_draft(draft: str, revision: str | None) -> ModelFiles:
    """Where a draft is. Raises UserError for a revision that is named twice, and for what holds no draft in safetensors."""
    name, named = split_revision(draft)
    if named and revision:
        raise UserError("revision", got=revision, expected=f"none with {draft}, which names one")
    if split_gguf(name)[1]:
        raise UserError("draft", got=f"{draft}, a GGUF file", expected=f"{DRAFT}, with config.json and safetensors")
    found = ModelFiles.of(name, named or revision, key="draft", expected=DRAFT)
    if "config.json" not in found.sizes:
        others = ", ".join(sorted(found.sizes)[:5]) or "nothing"
        raise UserError("draft", got=f"{found.name} without a config.json, with {others}", expected="a draft")
    return found


def _checked(draft: ModelFiles, method: str, target: TargetFiles, of_target: ModelFiles, options: dict[str, Any]) -> list[str]:
    """The files of a draft that are needed, once the small ones and headers say that it is one of the method for the target."""
    tokenizer = TOKENIZER if METHODS[method].standalone else ()
    folder, tensors = draft.fetch(draft.matching(*SMALL, *tokenizer)), draft.tensors()
    found = recognized(read_config(folder, "draft"), tensors.keys(), name=draft.name, key="draft")
    if found != method:
        got = f"{draft.name}, which holds a draft of method {found}"
        raise UserError("draft", got=got, expected=f"one of method {method}")
    of_target.fetch(of_target.matching("config.json", INDEX, *tokenizer))
    implementation(method).check(folder, tensors, target, key="draft", name=draft.name, **options)
    if recorded_target(folder, "draft") is None:
        _compare_card(draft, of_target)
    else:
        check_target(folder, target, "draft", **options)
    logger.info(f"{draft.name}: a draft of method {method} that fits {of_target.name}")
    return [*draft.matching(*SMALL, *TOKENIZER), *draft.weights()]


def _compare_card(draft: ModelFiles, target: ModelFiles) -> None:
    """Say so where a draft that records no target has a card that names another: sizes alone do not tell a model from its fine-tunes."""
    try:
        named = head_of(draft.folder / CARD).get("base_model") if CARD in draft.sizes else None
    except ValueError:
        named = None  # a card is prose; what cannot be read says nothing
    models = [named] if isinstance(named, str) else named or []
    if target.repository and models and target.repository.lower() not in {str(model).lower() for model in models}:
        others = ", ".join(map(str, models))
        logger.info(f"warning: the card of {draft.name} names {others}, not {target.repository}; only sizes say that it fits")


def _announce(wanted: ModelFiles, names: Sequence[str]) -> None:
    """Say what will be fetched, and what the disk has free. Raises ResourceError where it has too little."""
    sizes = {file: wanted.sizes[file] for file in wanted.missing(names)}
    listed = "".join(f"\n  {decimal(size):>10}  {file}" for file, size in sizes.items())
    at = f" (commit {wanted.folder.name})" if wanted.repository else ""
    logger.info(f"{wanted.key}: {wanted.name}{at}, {len(names)} files, {len(sizes)} of them to fetch{listed}")
    if total := sum(sizes.values()):
        cache = Path(constants.HF_HUB_CACHE)
        what = f"{decimal(total)} into {cache}, whose disk has {decimal(free := free_bytes(cache))} free"
        if total > free:
            raise ResourceError(f"to fetch: {what}", next_step="free disk space, or set HF_HOME to a larger disk")
        logger.info(f"to fetch: {what}")
