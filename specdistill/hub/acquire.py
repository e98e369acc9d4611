"""Check that a draft fits a target before its weights are fetched, and fetch it.

The user chooses the draft, and it is fetched at one commit.

The files of a draft depend on its method: it is a head, a model, or a layer in the target's own
checkpoint. Small files and the headers of its safetensors tell whether it fits the target. A header
is tens of kilobytes of a file of gigabytes. Fetched files are compared with the checksums that the
Hub lists.
"""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    LocalEntryNotFoundError,
    SafetensorsParsingError,
    XetDownloadError,
)
from rich.filesize import decimal
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

from specdistill.common.documents import read_front_matter
from specdistill.common.errors import (
    ResourceError,
    UserError,
    convert_errors,
    join_lines,
    logger,
    make_unused_key_error,
)
from specdistill.common.progress import find_free_bytes
from specdistill.common.repositories import (
    HTTP_ERROR,
    convert_hub_errors,
    find_commit,
    resolve,
    split_gguf,
    split_revision,
)
from specdistill.hub.licenses import CARD
from specdistill.hub.options import AcquireOptions
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import read_config, read_outline
from specdistill.methods.compatibility import check_draft
from specdistill.methods.load import TOKENIZER, load_method, recognize_method
from specdistill.methods.target_record import read_target_record
from specdistill.targets.files import INDEX, SINGLE, Shards, TargetFiles

# Files that are fetched at once, before it is known whether the draft fits.
SMALL_FILES = ("config.json", "generation_config.json", INDEX, CARD)
# Files of weights that are not opened here, because unpickling may run code.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# The files of a language model next to its weights.
MODEL = (*SMALL_FILES, *TOKENIZER, "*processor_config.json")
# Errors that huggingface_hub raises for a header of safetensors that is no valid header. A
# RuntimeError comes from negative sizes, and from JSON that is nested too deeply.
OTHER_HEADERS = (
    SafetensorsParsingError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
)
# What errors say is expected.
DRAFT = "the folder of a draft, or org/name or org/name@revision on the Hub"
TARGET = "pico (built in), a folder, a GGUF file or a Hub id"


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model: those of a folder, or of one commit of a repository on the Hub.

    If the Hub cannot be reached, only the files in its cache are known, and they are treated as a
    folder.

    Attributes:
        key: the key to name in errors.
        name: the model, as the user gave it.
        folder: the folder that the files are in, or will be in once they are fetched.
        sizes: file name -> size in bytes, of the files next to config.json that a model may need,
            and of its pickles.
        repository: the Hub id; None for a folder.
    """

    key: str
    name: str
    folder: Path
    sizes: Mapping[str, int]
    repository: str | None = None

    @classmethod
    def open(cls, name: str, revision: str | None, *, key: str, expected: str) -> "ModelFiles":
        """Find the files of a folder or of a revision of a repository, and fetch the small ones.

        Args:
            name: the folder or the Hub id.
            revision: a branch, tag or commit; None for the default.
            key: the key to name in errors.
            expected: the text in errors that says what was expected.

        Raises:
            UserError: for a name that is neither a folder nor a Hub id.
            ResourceError: when the Hub fails, or when it cannot be reached and the repository is
                not in its cache.
        """
        place = resolve(name, key)

        # A folder is taken as it is.
        if Path(place).is_dir():
            if revision is not None:
                expected = "a folder, which has no revisions, or a Hub id"
                raise UserError(key, got=f"{name} at revision {revision}", expected=expected)
            return cls(key, name, Path(place), _list_sizes(Path(place)))
        full_name = f"{name}@{revision}" if revision else name

        # Fetch the small files of a repository, and list the others without fetching them.
        with convert_hub_errors(key, full_name, expected=expected):
            commit = find_commit(place, revision)
            snapshot = partial(
                snapshot_download,
                place,
                revision=commit,
                local_files_only=constants.is_offline_mode(),
            )
            try:
                folder = Path(snapshot(allow_patterns=list(SMALL_FILES)))
                files: Any = snapshot(
                    allow_patterns=[*MODEL, "*.safetensors", "*.gguf", *PICKLES], dry_run=True
                )
            except (HTTP_ERROR, LocalEntryNotFoundError, DryRunError):
                # The Hub cannot be reached. Its cache may hold all files that are needed.
                folder = Path(
                    snapshot_download(
                        place, revision=commit, allow_patterns=[], local_files_only=True
                    )
                )
                return cls(key, full_name, folder, _list_sizes(folder))
        # Files in subfolders do not belong to the model.
        sizes = {file.filename: file.file_size or 0 for file in files if "/" not in file.filename}
        return cls(key, full_name, folder, sizes, place)

    def list_matching(self, *patterns: str) -> list[str]:
        """Return the files whose names match one of the patterns."""
        return [name for name in self.sizes if any(fnmatch(name, pattern) for pattern in patterns)]

    def weights(self) -> list[str]:
        """Return the safetensors files that hold the weights.

        Raises:
            UserError: if there are none, or if one that the index names is missing.
        """
        # If there are several files of weights, an index names them. They need not be in the folder
        # yet (complete=False), but the model must have them.
        if INDEX in self.sizes:
            weight_files = Shards.open(self.folder, self.key, complete=False).files
            missing = [file for file in weight_files if file not in self.sizes]
            if missing:
                raise UserError(
                    self.key,
                    got=f"{self.name} without {missing[0]}",
                    expected="every file that its index names",
                )
            return weight_files

        # Otherwise a single file holds the weights. Pickles are not opened.
        if SINGLE in self.sizes:
            return [SINGLE]
        pickles = self.list_matching(*PICKLES)
        if pickles:
            raise UserError(
                self.key,
                got=(
                    f"{self.name}, whose weights are only in pickle files"
                    f" ({', '.join(pickles[:3])}),"
                    " which are not opened"
                ),
                expected=(
                    "safetensors; `specdistill export` converts a pickle file of plain tensors to"
                    " safetensors"
                ),
            )
        file_names = ", ".join(sorted(self.sizes)[:5]) or "nothing"
        raise UserError(
            self.key,
            got=f"{self.name} without weights, with {file_names}",
            expected=f"{SINGLE}, or {INDEX}",
        )

    def list_missing(self, files: Sequence[str]) -> list[str]:
        """Return which of these files are not in the model's folder yet."""
        return [file for file in files if not (self.folder / file).is_file()]

    def fetch(self, files: Sequence[str]) -> Path:
        """Fetch the files that are not in the model's folder yet.

        If a file was fetched, all files of the commit are compared with the checksums that the Hub
        lists. Damaged files are removed from the cache, so that nobody uses them later.

        Returns:
            The folder, which holds all of these files.

        Raises:
            ResourceError: when the Hub or its cache fails, and for damaged files.
        """
        # Missing files can be fetched for a repository, but not for a folder.
        missing = self.list_missing(files)
        if not missing:
            return self.folder
        if self.repository is None:
            raise ResourceError(
                f"{self.key}: {self.folder} lacks these files of {self.name}: {', '.join(missing)}",
                next_step="run `specdistill acquire` on a machine with a network connection",
            )

        # Fetch the files, and compare their hashes with the Hub's. The Hub's cache names a folder
        # after its commit, so `folder.name` is the commit.
        try:
            with convert_hub_errors(self.key, self.name, expected="a Hub id", patterns=missing):
                snapshot_download(
                    self.repository,
                    revision=self.folder.name,
                    allow_patterns=[escape(file) for file in missing],
                )
                verification = HfApi().verify_repo_checksums(
                    self.repository, revision=self.folder.name
                )
                entries = verification.mismatches
        except (OSError, XetDownloadError, RuntimeError) as error:
            # hf_xet raises RuntimeError.
            raise ResourceError(
                f"{self.key}: {self.name} was not fetched completely"
                f" ({join_lines(str(error))[:200]})",
                next_step="run it again: complete files are kept",
            ) from error

        # A damaged file is removed from the cache, so that it is fetched again.
        damaged = sorted(entry["path"] for entry in entries)
        if damaged:
            # A file in the cache is a link to a blob, and both are removed.
            for link in (self.folder / file for file in damaged):
                link.resolve().unlink()
                link.unlink(missing_ok=True)
            raise ResourceError(
                f"{self.key}: {self.name} is damaged: {', '.join(damaged)}",
                next_step=(
                    "run it again; if it fails again, check for a proxy between this"
                    " machine and the Hub"
                ),
            )
        return self.folder

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the weights by name: their shapes and dtypes, without content.

        Only the header of each file is read, from the disk or from the Hub. If the files are on the
        disk, the small tensors that map a draft's token ids to the target's have their content,
        too.

        Raises:
            UserError: for files that cannot be read, or are not those that the index names.
        """
        # The files are on the disk.
        if not self.list_missing(self.weights()):
            return read_outline(self.folder, self.key)

        # The Hub's client reads the headers with range requests. For a header that is not one of
        # safetensors, it raises one of the errors OTHER_HEADERS. The folder's name is the commit.
        assert self.repository is not None
        with convert_errors(
            OTHER_HEADERS,
            self.key,
            f"{self.name}, whose weights cannot be read",
            "whole safetensors files",
        ):
            with convert_hub_errors(
                self.key, self.name, expected="a Hub id", patterns=self.weights()
            ):
                metadata = HfApi().get_safetensors_metadata(
                    self.repository, revision=self.folder.name
                )
            tensors = {}
            for file in metadata.files_metadata.values():
                for name, tensor_info in file.tensors.items():
                    dtype = str_to_torch_dtype[tensor_info.dtype]
                    shape = tuple(tensor_info.shape)
                    tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
            return tensors


def _list_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file in a folder, by name."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def acquire(options: AcquireOptions) -> Path:
    """Fetch a draft for a target, after checking that the draft fits.

    If no draft is named and a layer of the target itself drafts (method mtp), the target is
    fetched.

    Args:
        options: the options of the command, which name method, target and draft.

    Returns:
        The folder of the draft. With `dry_run`, the folder that the draft would have.

    Raises:
        UserError: if no draft was chosen, and, before the weights are fetched, for a draft that
            does not fit this target.
        ResourceError: when the Hub, the disk or the cache fails, or when the Hub cannot be reached
            and files are missing.
    """
    method = options.method
    if not METHODS[method].is_trained:
        raise UserError(
            "method",
            got=f"{method}, whose drafts have no weights that could be fetched",
            expected="a method that is trained",
        )

    # Find the target, and fetch its small files. `gguf` is the name of a GGUF file in the target's
    # folder or repository; None for other targets. The folder of a repository in the Hub's cache is
    # named after the commit, so `folder.name` is the revision.
    folder, gguf = split_gguf(options.target.model)
    target_model = ModelFiles.open(
        folder, options.target.revision, key="target.model", expected=TARGET
    )
    location = str(target_model.repository or target_model.folder)
    target = TargetFiles(
        f"{location}/{gguf}" if gguf else location,
        target_model.folder.name if target_model.repository else options.target.revision,
        options.target.adapter,
    )

    # Find the names of the files that are needed: those of the draft, or of the target if its own
    # layer drafts. Only draft models have the option `heterogeneous_vocab`.
    check_options: dict[str, Any] = (
        {"heterogeneous_vocab": options.heterogeneous_vocab} if METHODS[method].standalone else {}
    )
    if options.draft is not None:
        name, revision = split_revision(options.draft)
        model_files = ModelFiles.open(name, revision, key="draft", expected=DRAFT)
        names = _check_draft(model_files, method, target, target_model, check_options)
    else:
        _check_native_draft(options, target, target_model)
        model_files = target_model
        names = [gguf] if gguf else [*model_files.list_matching(*MODEL), *model_files.weights()]

    # Fetch the files. `dry_run` stops before that.
    _announce(model_files, names)
    if not options.dry_run:
        model_files.fetch(names)
        # The draft is checked once more, with the content of its vocabulary maps.
        if options.draft is not None:
            check_draft(
                method,
                model_files.folder,
                target,
                "draft",
                name=model_files.name,
                logs=False,
                **check_options,
            )
    return model_files.folder


def _check_native_draft(
    options: AcquireOptions, target: TargetFiles, target_model: ModelFiles
) -> None:
    """Check that a layer of the target itself can draft, for a command that names no draft.

    Args:
        options: the options of the command.
        target: the target's config and tensors.
        target_model: the list of the target's files, which are not all fetched yet.

    Raises:
        UserError: if the method needs a draft, for an adapter, and for a target without such a
            layer.
    """
    # Refuse an adapter, and a method whose draft is no layer of the target. Only method mtp drafts
    # with a layer of the target.
    if options.target.adapter is not None:
        raise make_unused_key_error(
            "target.adapter",
            options.target.adapter,
            "only used with a trained draft",
            alternative="add draft=PATH",
        )
    if not METHODS[options.method].in_target:
        plan_command = f"specdistill plan target={shlex.quote(options.target.model)}"
        raise UserError(
            "draft",
            got="nothing",
            expected=f"{DRAFT}; `{plan_command}` lists the drafts on the Hub",
        )
    shapes = {name: tensor.shape for name, tensor in target_model.tensors().items()}
    load_method(options.method).check_native(shapes, target)
    logger.info(
        f"{target_model.name}: the draft is a layer inside this checkpoint, so the whole checkpoint"
        " is fetched"
    )


def _check_draft(
    draft: ModelFiles,
    method: str,
    target: TargetFiles,
    target_model: ModelFiles,
    check_options: Mapping[str, Any],
) -> list[str]:
    """Check that a draft is one of the named method and fits the target, before it is fetched.

    Only small files, and the headers of the files of weights, are read.

    Args:
        draft: the files of the draft.
        method: the method that the user named.
        target: the target's config and tensors.
        target_model: the list of the target's files, which are not all fetched yet.
        check_options: options of `check_draft`.

    Returns:
        The names of the draft's files that are to be fetched.

    Raises:
        UserError: for a draft of another method, or one that does not fit the target.
    """
    # Check that the files are a draft of the method. Only a draft model has a tokenizer of its own,
    # which must be compared with the target's.
    tokenizer = TOKENIZER if METHODS[method].standalone else ()
    folder = draft.fetch(draft.list_matching(*SMALL_FILES, *tokenizer))
    tensors = draft.tensors()
    method_name = recognize_method(
        read_config(folder, "draft"), tensors.keys(), name=draft.name, key="draft"
    )
    if method_name != method:
        raise UserError(
            "draft",
            got=f"{draft.name}, which holds a draft of method {method_name}",
            expected=f"a draft of method {method}",
        )

    # Check that the draft fits the target. If the draft has no record of its target, its card is
    # compared, too.
    target_model.fetch(target_model.list_matching("config.json", INDEX, *tokenizer))
    check_draft(method, folder, target, "draft", name=draft.name, tensors=tensors, **check_options)
    if read_target_record(folder, "draft") is None:
        _compare_card(draft, target_model)
    logger.info(f"{draft.name}: a draft of method {method} that fits {target_model.name}")
    return [*draft.list_matching(*SMALL_FILES, *TOKENIZER), *draft.weights()]


def _compare_card(draft: ModelFiles, target: ModelFiles) -> None:
    """Warn if the model card of a draft names another target as its base model.

    This is for a draft without a record of its target. The shapes of the draft's tensors fit every
    fine-tune of the target, so only the card can tell for which model the draft was made.
    """
    base_model = None
    if CARD in draft.sizes:
        # Nobody checks the metadata of cards, so broken ones are ignored.
        with suppress(ValueError):
            base_model = read_front_matter(draft.folder / CARD).get("base_model")
    models = base_model if isinstance(base_model, list) else [base_model] if base_model else []
    model_names = {str(model).lower() for model in models}
    if target.repository and models and target.repository.lower() not in model_names:
        logger.warning(
            f"the card of {draft.name} says that it was made for"
            f" {', '.join(map(str, models))}, not {target.repository}. Only the sizes of the two"
            " were compared, and they fit"
        )


def _announce(model_files: ModelFiles, names: Sequence[str]) -> None:
    """Log which files will be fetched, and check that the disk has enough space.

    Raises:
        ResourceError: if the disk has too little space.
    """
    # List the files that are missing, with their sizes.
    sizes = {file: model_files.sizes[file] for file in model_files.list_missing(names)}
    lines = "".join(f"\n  {decimal(size):>10}  {file}" for file, size in sizes.items())
    commit = f" (commit {model_files.folder.name})" if model_files.repository else ""
    logger.info(
        f"{model_files.key}: {model_files.name}{commit}, {len(names)} files, {len(sizes)} of them"
        f" to fetch{lines}"
    )

    # Compare their sum with the free space.
    total = sum(sizes.values())
    if total:
        cache = Path(constants.HF_HUB_CACHE)
        free_bytes = find_free_bytes(cache)
        summary = f"{decimal(total)} into {cache}, whose disk has {decimal(free_bytes)} free"
        if total > free_bytes:
            raise ResourceError(
                f"too little disk space to fetch {summary}",
                next_step="free disk space, or set HF_HOME to a larger disk",
            )
        logger.info(f"to fetch: {summary}")
