"""From a method and a target to a draft's folder: chosen by the user, checked before its weights are fetched, fetched at one commit.

What a draft is depends on its method: a head, a model, a layer that comes with the target's own checkpoint, or nothing at all. Whether it
is one for this target is told by small files and by the headers of its safetensors, tens of kilobytes of a file of gigabytes. What is
fetched is compared with the checksums that the Hub lists.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path

import torch
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import SafetensorsParsingError, XetDownloadError
from rich.filesize import decimal
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

from specdistill.errors import ResourceError, UserError, logger, one_line, refusing
from specdistill.files.documents import head_of
from specdistill.hub.command import AcquireOptions
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import read_config
from specdistill.methods.load import TOKENIZER, implementation, recognized
from specdistill.methods.target_record import check_target, recorded_target
from specdistill.progress import free_bytes
from specdistill.repositories import hub_errors, resolve, split_gguf, split_revision
from specdistill.targets.files import INDEX, SINGLE, Shards, TargetFiles

CARD = "README.md"
SMALL = ("config.json", "generation_config.json", INDEX, CARD)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MODEL = (*SMALL, *TOKENIZER, "*processor_config.json")
# What reading a header raises that holds other JSON; the last of negative sizes, and of what is too deep.
OTHER_HEADERS = (
    SafetensorsParsingError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
)
DRAFT, TARGET = (
    "the folder of a draft, or org/name or org/name@revision on the Hub",
    "pico, a folder, a GGUF file or a Hub id",
)


@dataclass(frozen=True)
class ModelFiles:
    """A folder, or a commit of a repository; without the Hub, what its cache has of that commit, which is a folder too.

    key: what errors name. name: as the user gave it. folder: where the files are, or will be once they are fetched. sizes: bytes of each
    file next to config.json that a model may need, and of its pickles. repository: None for a folder.
    """

    key: str
    name: str
    folder: Path
    sizes: Mapping[str, int]
    repository: str | None = None

    @classmethod
    def of(cls, name: str, revision: str | None, *, key: str, expected: str) -> "ModelFiles":
        """The folder `name`, or a revision of a repository, with its small files fetched.

        Raises UserError for what is neither, ResourceError when the Hub fails, and without it for a repository that is not in its cache.
        """
        place = resolve(name, key)
        if Path(place).is_dir():
            if revision is not None:
                expected = "a folder, which has no revisions, or a Hub id"
                raise UserError(key, got=f"{name} at revision {revision}", expected=expected)
            return cls(key, name, Path(place), _sizes(Path(place)))
        shown = f"{name}@{revision}" if revision else name
        with hub_errors(key, shown, expected=expected):
            folder = Path(snapshot_download(place, revision=revision, allow_patterns=list(SMALL)))
            if constants.is_offline_mode():
                return cls(key, shown, folder, _sizes(folder))
            patterns = [*MODEL, "*.safetensors", "*.gguf", *PICKLES]
            files = snapshot_download(
                place, revision=folder.name, allow_patterns=patterns, dry_run=True
            )
        return cls(
            key,
            shown,
            folder,
            {it.filename: it.file_size or 0 for it in files if "/" not in it.filename},
            place,
        )

    def matching(self, *patterns: str) -> list[str]:
        """The files whose names match."""
        return [path for path in self.sizes if any(fnmatch(path, pattern) for pattern in patterns)]

    def weights(self) -> list[str]:
        """The safetensors files that hold the weights. Raises UserError where there are none."""
        if INDEX in self.sizes:
            named = Shards.open(self.folder, self.key, complete=False).files
            if lacking := next((file for file in named if file not in self.sizes), None):
                raise UserError(
                    self.key,
                    got=f"{self.name} without {lacking}",
                    expected="every file that its index names",
                )
            return named
        if SINGLE in self.sizes:
            return [SINGLE]
        if pickles := self.matching(*PICKLES):
            got = f"{self.name} with weights in a pickle alone ({', '.join(pickles[:3])}), of which nothing can be known unread"
            instead = "specdistill export reads plain tensors of one and writes safetensors"
            raise UserError(self.key, got=got, expected=f"safetensors; {instead}")
        found = ", ".join(sorted(self.sizes)[:5]) or "nothing"
        raise UserError(
            self.key,
            got=f"{self.name} without weights, with {found}",
            expected=f"{SINGLE}, or {INDEX}",
        )

    def missing(self, files: Sequence[str]) -> list[str]:
        return [file for file in files if not (self.folder / file).is_file()]

    def fetch(self, files: Sequence[str]) -> Path:
        """The folder, once these files are in it; when one was missing, all are compared with the checksums that the Hub lists.

        Raises ResourceError when the Hub or its cache fails, and for damaged files, after they were taken out of the cache, where whoever
        reads it next would take them.
        """
        if not (missing := self.missing(files)):
            return self.folder
        if self.repository is None:
            what = f"{self.key}: of {self.name} these files are not in {self.folder}: {', '.join(missing)}"
            raise ResourceError(what, next_step="acquire it where there is a network")
        try:
            with hub_errors(self.key, self.name, expected="a Hub id"):
                snapshot_download(
                    self.repository,
                    revision=self.folder.name,
                    allow_patterns=[escape(file) for file in missing],
                )
                found = (
                    HfApi()
                    .verify_repo_checksums(self.repository, revision=self.folder.name)
                    .mismatches
                )
        except (OSError, XetDownloadError, RuntimeError) as error:  # the last is hf_xet's
            what = f"{self.key}: {self.name} was not fetched whole ({one_line(str(error))[:200]})"
            raise ResourceError(what, next_step="run it again: what is whole is kept") from error
        if damaged := sorted(it["path"] for it in found):
            for link in (self.folder / file for file in damaged):
                link.resolve().unlink()
                link.unlink(missing_ok=True)
            next_step = "run it again, or look at what stands between this machine and the Hub"
            raise ResourceError(
                f"{self.key}: {self.name} is damaged: {', '.join(damaged)}", next_step=next_step
            )
        return self.folder

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the weights by name, without their content: of each file the header alone is read, here or on the Hub.

        Raises UserError for files that cannot be read, or are not those that the index names.
        """
        if not self.missing(self.weights()):
            shards = Shards.open(self.folder, self.key)
            shards.check()
            return shards.without_content()
        assert self.repository is not None
        what = f"{self.name}, whose weights cannot be read"
        with refusing(OTHER_HEADERS, self.key, what, "whole safetensors files"):
            with hub_errors(self.key, self.name, expected="a Hub id"):
                read = (
                    HfApi()
                    .get_safetensors_metadata(self.repository, revision=self.folder.name)
                    .files_metadata.values()
                )
            return {
                name: torch.empty(
                    tuple(it.shape), dtype=str_to_torch_dtype[it.dtype], device="meta"
                )
                for file in read
                for name, it in file.tensors.items()
            }


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def acquire(options: AcquireOptions) -> Path:
    """The folder of a draft for a target, or of the target whose own layer drafts; with `dry_run` the one that it would have.

    Raises UserError for a draft that is none for this target, before its weights are fetched, and for a draft that was not chosen;
    ResourceError when the Hub, the disk or the cache fails, and without the Hub for what is missing.
    """
    method, draft, target, adapter = (
        options.method,
        options.draft,
        options.target.model,
        options.target.adapter,
    )
    if not METHODS[method].is_trained:
        raise UserError(
            "method",
            got=f"{method}, which has no weights",
            expected="a method with something to acquire",
        )
    folder, gguf = split_gguf(target)
    of_target = ModelFiles.of(folder, options.target.revision, key="target.model", expected=TARGET)
    commit = of_target.folder.name if of_target.repository else options.target.revision
    files = TargetFiles(
        f"{of_target.repository or of_target.folder}{f'/{gguf}' if gguf else ''}", commit, adapter
    )
    if draft is not None:
        name, revision = split_revision(draft)
        wanted = ModelFiles.of(name, revision, key="draft", expected=DRAFT)
        names = _checked(wanted, options, files, of_target)
    elif adapter is not None:
        raise UserError("target.adapter", got=adapter, expected="no such key without draft=…")
    elif (check_native := implementation(method).check_native) is not None:
        check_native({name: tensor.shape for name, tensor in of_target.tensors().items()}, files)
        logger.info(
            f"{of_target.name}: its own checkpoint holds the layer that drafts, so the whole of it is needed"
        )
        wanted, names = (
            of_target,
            [gguf] if gguf else [*of_target.matching(*MODEL), *of_target.weights()],
        )
    else:
        listed = f"`specdistill plan target={shlex.quote(target)}` lists those that the Hub has"
        raise UserError("draft", got="nothing", expected=f"{DRAFT}; {listed}")
    _announce(wanted, names)
    if not options.dry_run:
        wanted.fetch(names)
    return wanted.folder


def _checked(
    draft: ModelFiles, options: AcquireOptions, target: TargetFiles, of_target: ModelFiles
) -> list[str]:
    """The files of a draft that are needed, once the small ones and headers say that it is one of the method for the target."""
    method, translated = (
        options.method,
        {"heterogeneous_vocab": True} if options.heterogeneous_vocab else {},
    )
    tokenizer = TOKENIZER if METHODS[method].standalone else ()
    folder, tensors = draft.fetch(draft.matching(*SMALL, *tokenizer)), draft.tensors()
    found = recognized(read_config(folder, "draft"), tensors.keys(), name=draft.name, key="draft")
    if found != method:
        got = f"{draft.name}, which holds a draft of method {found}"
        raise UserError("draft", got=got, expected=f"one of method {method}")
    of_target.fetch(of_target.matching("config.json", INDEX, *tokenizer))
    implementation(method).check(
        folder, tensors, target, key="draft", name=draft.name, **translated
    )
    if recorded_target(folder, "draft") is None:
        _compare_card(draft, of_target)
    else:
        check_target(folder, target, "draft", **translated)
    logger.info(f"{draft.name}: a draft of method {method} that fits {of_target.name}")
    return [*draft.matching(*SMALL, *TOKENIZER), *draft.weights()]


def _compare_card(draft: ModelFiles, target: ModelFiles) -> None:
    """Say so where a draft that records no target has a card that names another: sizes alone do not tell a model from its fine-tunes."""
    try:
        named = head_of(draft.folder / CARD).get("base_model") if CARD in draft.sizes else None
    except ValueError:
        named = None  # a card is prose; what cannot be read says nothing
    models = [named] if isinstance(named, str) else named or []
    if (
        target.repository
        and models
        and target.repository.lower() not in {str(model).lower() for model in models}
    ):
        others = ", ".join(map(str, models))
        logger.info(
            f"warning: the card of {draft.name} names {others}, not {target.repository}; only sizes say that it fits"
        )


def _announce(wanted: ModelFiles, names: Sequence[str]) -> None:
    """Say what will be fetched, and what the disk has free. Raises ResourceError where it has too little."""
    sizes = {file: wanted.sizes[file] for file in wanted.missing(names)}
    listed = "".join(f"\n  {decimal(size):>10}  {file}" for file, size in sizes.items())
    at = f" (commit {wanted.folder.name})" if wanted.repository else ""
    logger.info(
        f"{wanted.key}: {wanted.name}{at}, {len(names)} files, {len(sizes)} of them to fetch{listed}"
    )
    if total := sum(sizes.values()):
        cache = Path(constants.HF_HUB_CACHE)
        what = f"{decimal(total)} into {cache}, whose disk has {decimal(free := free_bytes(cache))} free"
        if total > free:
            raise ResourceError(
                f"to fetch: {what}", next_step="free disk space, or set HF_HOME to a larger disk"
            )
        logger.info(f"to fetch: {what}")
