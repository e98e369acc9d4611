"""Read the files of a checkpoint, in a folder or on the Hub, without loading the model.

This module reads the config.json and single tensors, and computes the identity of a target: the
sha256 of its files. A draft records the identity of the target that it was made for. The identity
is the same wherever the files lie, and does not depend on the dtype of the weights in memory.
Hashing is cheap: the Hub's cache names a large file by its sha256, so it need not be read, and
files in a folder are read once.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdistill.common.documents import read_json, read_keys
from specdistill.common.errors import UserError, convert_errors
from specdistill.common.hashes import hash_file
from specdistill.common.project import PICO
from specdistill.common.repositories import fetch, read_large_file_hashes, resolve, split_gguf
from specdistill.recipe.sections import TargetConfig
from specdistill.targets.loading import read_gguf_config

KEY = "target.model"  # the recipe key to name in errors
# The weights of a checkpoint are in one file, or in several that an index lists.
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The files of a peft LoRA adapter.
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
# The files that turn text into token ids. They alone identify a tokenizer: chat templates, default
# settings and names of special tokens are in other files and may differ.
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
# The sections in which some layouts of config.json have the sizes of a decoder.
NESTED_SECTIONS = ("transformer_layer_config", "model", "text_config")
# The most layers that a config may have. Layers are built one by one, so a broken config with a
# huge number would take all memory.
MAX_LAYERS = 1000
# The types of the keys of config.json that are read here.
KINDS = {
    **dict.fromkeys(
        (*NESTED_SECTIONS, "rope_parameters", "rope_scaling", "quantization_config"),
        dict[str, object],
    ),
    **dict.fromkeys(("architectures", "layer_types"), list[str]),
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), str),
    **dict.fromkeys(
        (
            "vocab_size",
            "hidden_size",
            "max_position_embeddings",
            "draft_vocab_size",
            "sliding_window",
        ),
        int,
    ),
    "num_hidden_layers": Annotated[int, Field(le=MAX_LAYERS)],
    "rope_theta": float,
}
# How the names of these two tensors end in checkpoints.
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
NUM_SHOWN_HASH_DIGITS = 8  # hexadecimal digits of a hash that errors show


@dataclass(frozen=True)
class Shards:
    """The safetensors files of a checkpoint.

    Attributes:
        folder: the folder of the files.
        file_of: file name of each tensor, in the order of the checkpoint.
        key: the recipe key to name in errors.
    """

    folder: Path
    file_of: dict[str, str]
    key: str

    @classmethod
    def open(cls, folder: Path, key: str, *, complete: bool = True) -> "Shards":
        """Find the safetensors files of a checkpoint, and which tensor is in which file.

        Args:
            folder: the folder of the files.
            key: the recipe key to name in errors.
            complete: whether all files that the index names must exist.

        Raises:
            UserError: for a missing or broken file.
        """
        # A single file needs no index.
        if not (folder / INDEX).is_file():
            if not (folder / SINGLE).is_file():
                raise UserError(
                    key,
                    got=f"{folder}, which has no {SINGLE} and no index",
                    expected="a checkpoint in safetensors",
                )
            return cls(folder, dict.fromkeys(_read_tensor_names(folder / SINGLE, key), SINGLE), key)

        # Several files have an index, which says in which file each tensor is.
        with convert_errors(
            (ValueError, KeyError, TypeError, AttributeError),
            key,
            folder / INDEX,
            "a safetensors index",
        ):
            file_of: dict[str, str] = read_json(folder / INDEX)["weight_map"]
            # os.fspath raises TypeError for values that are no file names, such as numbers.
            files = sorted(set(map(os.fspath, file_of.values())))

        # The named files must exist. A name with a folder in it could lead out of the checkpoint.
        for file in files:
            if Path(file).name != file:
                raise UserError(
                    key,
                    got=f"{folder / INDEX}, which names {file}",
                    expected="names of files in the same folder",
                )
            if complete and not (folder / file).is_file():
                raise UserError(
                    key, got=f"{folder} without {file}", expected="every file that its index names"
                )
        return cls(folder, file_of, key)

    def check(self) -> None:
        """Check that every tensor is in the file that the index names, and in no other file.

        transformers does not check this when it loads a model.

        Raises:
            UserError: if files and index differ.
        """
        for file in self.files:
            indexed_names = {name for name, place in self.file_of.items() if place == file}
            names_in_file = _read_tensor_names(self.folder / file, self.key)
            mismatches = sorted(indexed_names.symmetric_difference(names_in_file))
            if mismatches:
                raise UserError(
                    self.key,
                    got=(
                        f"{self.folder}, whose index does not match its files for"
                        f" {', '.join(mismatches[:3])}"
                    ),
                    expected="every tensor in the one file that the index names",
                )

    @property
    def files(self) -> list[str]:
        """The names of the files, sorted."""
        return sorted(set(self.file_of.values()))

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.build_without_content().values())

    def build_without_content(self) -> dict[str, Tensor]:
        """Return all tensors by name, on the meta device, so that their content is not loaded."""

        def read_header(weights: Any, name: str) -> Tensor:
            """Return an empty tensor with the shape and dtype of a tensor in an open file."""
            shape = weights.get_slice(name).get_shape()
            # An empty slice is enough to learn the dtype. A tensor without dimensions cannot be
            # sliced, so its one number is read.
            part = weights.get_slice(name)[:0] if shape else weights.get_tensor(name)
            return torch.empty(shape, dtype=part.dtype, device="meta")

        return self._read(self.file_of, read_header)

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Load tensors by name, each in the dtype of its file."""
        return self._read(names, lambda weights, name: weights.get_tensor(name))

    def _read(self, names: Iterable[str], read: Callable[[Any, str], Tensor]) -> dict[str, Tensor]:
        """Call `read` for each tensor, and return its results by name of the tensor.

        The tensors are grouped by file, so that each file is opened only once.

        Args:
            names: the names of the tensors.
            read: called with an open file and the name of a tensor in it.

        Raises:
            UserError: for a broken file.
        """
        # Group the names by file.
        tensors = {}
        names_by_file = defaultdict(list)
        for name in names:
            names_by_file[self.folder / self.file_of[name]].append(name)

        # Open each file, and read its tensors.
        for path, names_in_file in names_by_file.items():
            with (
                convert_errors(SafetensorError, self.key, path, "a whole file"),
                safe_open(path, framework="pt") as weights,
            ):
                tensors.update({name: read(weights, name) for name in names_in_file})
        return tensors


def read_config(
    folder: Path, key: str, expected: str = "a checkpoint with its config.json"
) -> dict[str, Any]:
    """Read the config.json of a folder, and check the types of the keys that are used.

    Args:
        folder: the folder.
        key: the recipe key to name in errors.
        expected: the text in errors that says what was expected.

    Raises:
        UserError: for a value of another type, and for a folder without config.json. The error for
            a folder without config.json lists what the folder holds.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise _build_missing_config_error(folder, key, expected)

    # Check the types of all keys that are read later, in the config and in its nested sections. A
    # section that is missing or null is checked like an empty one.
    config = read_keys(path, key, expected)
    nested_sections = [config.get(name) for name in (*NESTED_SECTIONS, "rope_parameters")]
    for section in (config, *nested_sections):
        for name, kind in KINDS.items():
            read_stated({} if section is None else section, name, kind, key)
    return config


def _build_missing_config_error(folder: Path, key: str, expected: str) -> UserError:
    """Return the error for a folder without config.json.

    The path may be one level too high or too low. So the error shows what the folder holds, and
    suggests a subfolder that has a config.json.
    """
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    candidates = [folder / name for name in names if (folder / name / "config.json").is_file()]
    if names:
        content = f"holds {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
    else:
        content = "is empty" if folder.is_dir() else "is no folder"
    return UserError(
        key,
        got=f"{folder}, which {content}",
        expected=expected,
        nearest=str(candidates[0]) if candidates else None,
    )


def read_stated(config: Mapping[str, object], name: str, kind: Any, key: str) -> Any:
    """Return the value of a key of config.json, after checking its type.

    Args:
        config: a section of config.json.
        name: the key.
        kind: the type that a value must have, as pydantic takes it. Null is always allowed.
        key: the recipe key to name in errors.

    Returns:
        The value; None if the key is missing or null.

    Raises:
        UserError: for a value of another type.
    """
    # A missing key is checked like null, which `_build_adapter` allows beside `kind`.
    try:
        return _build_adapter(kind).validate_python(config.get(name), strict=True)
    except ValidationError as error:
        # pydantic's message is "Input should be", followed by what is expected.
        raise UserError(
            key,
            got=f"a config.json with {name} {config[name]!r}",
            expected=error.errors()[0]["msg"].removeprefix("Input should be "),
        ) from error


@cache
def _build_adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator for a type or null. Building one is slow, so it is cached."""
    return TypeAdapter(kind | None)


def _read_tensor_names(path: Path, key: str) -> list[str]:
    """Return the names of the tensors in a safetensors file, from its header."""
    with (
        convert_errors(SafetensorError, key, path, "a whole safetensors file"),
        safe_open(path, framework="pt") as weights,
    ):
        return list(weights.keys())


def hash_files(paths: Iterable[Path]) -> list[str]:
    """Return the sha256 of files, in hexadecimal. Threads read several files at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(hash_file, paths))


def combine_hashes(hashes: Iterable[str]) -> str:
    """Combine several hashes into one sha256 that does not depend on their order."""
    # They are sorted, joined to one text, and hashed again.
    return hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()


def hash_contents(paths: Iterable[Path]) -> str:
    """Return one sha256 of the names and contents of files, whatever folders they are in."""
    files = list(paths)
    # In the Hub's cache, a path may be a link to a file that is named by its sha256. `hash_file`
    # does not read the file of such a link, but returns this name. Here the content must be
    # read, so `hash_file` gets the path of the file itself in place of the link.
    hashes = hash_files(path.resolve() for path in files)
    return combine_hashes(
        f"{sha256} {path.name}" for sha256, path in zip(hashes, files, strict=True)
    )


@dataclass(frozen=True)
class TargetIdentity:
    """The identity of a target: its name, and hashes of its files.

    Attributes:
        name_or_path: pico, a folder or a Hub id.
        revision: the commit of a Hub id; None for a folder.
        adapter: folder or Hub id of the adapter that is merged into the weights; None without one.
        weights: the sha256 of the hashes of all weight files, the adapter's included.
        tokenizer: the sha256 of the hashes of the tokenizer files.
    """

    name_or_path: str
    revision: str | None
    adapter: str | None
    weights: str
    tokenizer: str

    def is_same(self, other_identity: "TargetIdentity") -> bool:
        """Return whether both have the same weights and tokenizer, whatever their names."""
        return (self.weights, self.tokenizer) == (other_identity.weights, other_identity.tokenizer)

    def __str__(self) -> str:
        """Return the name with revision, adapter and the first digits of the hashes."""
        revision = f"@{self.revision[:NUM_SHOWN_HASH_DIGITS]}" if self.revision else ""
        adapter = f" + {self.adapter}" if self.adapter else ""
        hashes = (
            f"weights {self.weights[:NUM_SHOWN_HASH_DIGITS]}, tokenizer"
            f" {self.tokenizer[:NUM_SHOWN_HASH_DIGITS]}"
        )
        return f"{self.name_or_path}{revision}{adapter} ({hashes})"


@dataclass(frozen=True)
class TargetFiles:
    """The files of a target, in a folder or on the Hub.

    Files on the Hub are fetched one by one when they are read. Methods raise UserError and
    ResourceError.

    Attributes:
        name: the folder, the GGUF file or the Hub id, as engines take it; for `pico` its folder.
        revision: the revision of a Hub id; None for the default.
        adapter: a LoRA adapter that is merged when the target is loaded. Here only `identity` reads
            it.
        trust_remote_code: run the repository's own code.
    """

    name: str
    revision: str | None = None
    adapter: Any = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Resolve the name, and refuse several adapters.

        Raises:
            UserError: for a path that is not a target, and for several adapters.
        """
        object.__setattr__(self, "name", resolve(self.name, KEY))
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise UserError(
                "target.adapter",
                got=f"{len(self.adapter)} adapters",
                expected="one adapter; only `specdistill eval` with eval.engine=specdistill takes"
                " several",
            )

    @classmethod
    def from_config(cls, target: TargetConfig) -> "TargetFiles":
        """Return the files of the target that a recipe's section `target` names.

        Raises:
            UserError: for a path that is not a target, and for several adapters.
        """
        return cls(target.model, target.revision, target.adapter, target.trust_remote_code)

    @cached_property
    def identity(self) -> TargetIdentity:
        """The identity of the target: its name, and hashes of its weights and tokenizer files.

        safetensors files are not fetched for this, because the Hub lists their hashes. A GGUF file
        and an adapter are fetched.
        """
        # Hash the weights: the GGUF file if there is one, otherwise the files of the checkpoint.
        folder = self.fetch("config.json", INDEX, *TOKENIZER, *self._gguf)
        weights = hash_files(folder / file for file in self._gguf) or self._hash_weights(folder)

        # An adapter changes the weights, so the hashes of its files are added to the list.
        if self.adapter is not None:
            adapter_folder = fetch(
                self.adapter,
                key="target.adapter",
                expected="the folder or Hub id of a LoRA adapter",
                patterns=ADAPTER,
            )
            weights += hash_files(_list_existing_files(adapter_folder, ADAPTER))

        # Hash the tokenizer files. A GGUF file holds the tokenizer together with the weights.
        tokenizer = hash_files(_list_existing_files(folder, self._gguf or TOKENIZER))

        # pico, the small target in this package, goes by its name, because the path of the package
        # differs between machines.
        return TargetIdentity(
            name_or_path="pico" if self.name == str(PICO) else self.name,
            revision=self.commit,
            adapter=self.adapter,
            weights=combine_hashes(weights),
            tokenizer=combine_hashes(tokenizer),
        )

    def _hash_weights(self, folder: Path) -> list[str]:
        """Return the sha256 of every file of weights of a checkpoint.

        If the files of a Hub id are not in `folder` yet, their hashes are read from the Hub.

        Raises:
            UserError: if there are no weights.
        """
        # If all files of weights are in the folder, hash them.
        names_in_folder = {path.name for path in folder.iterdir()}
        has_index = INDEX in names_in_folder
        indexed_files = Shards.open(folder, KEY, complete=False).files if has_index else []
        files = indexed_files or _find_unlisted_weights(names_in_folder)
        if files and names_in_folder >= set(files):
            return hash_files(folder / file for file in files)

        # Otherwise ask the Hub for the hashes, so that nothing has to be downloaded. The folder's
        # name is the commit. Without an index, the Hub's list of files also tells which of them
        # hold weights.
        hub_hashes = (
            {}
            if Path(self.name).is_dir()
            else read_large_file_hashes(self.name, folder.name, key=KEY)
        )
        files = indexed_files or _find_unlisted_weights(hub_hashes)
        if not files or not hub_hashes.keys() >= set(files):
            raise UserError(
                KEY,
                got=f"{self.name} without weights",
                expected="a checkpoint with its weights",
            )
        return [hub_hashes[file] for file in files]

    @property
    def gguf(self) -> Path | None:
        """The GGUF file on this machine; None if the target is not a GGUF file."""
        return self.fetch(*self._gguf) / self._gguf[0] if self._gguf else None

    @property
    def _gguf(self) -> tuple[str, ...]:
        """The name of the GGUF file that holds config, tokenizer and weights; empty if none."""
        file = split_gguf(self.name)[1]
        return (file,) if file else ()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The target's config.json, or the config of its GGUF file."""
        if self._gguf:
            return read_gguf_config(
                self.fetch(*self._gguf), self._gguf[0], key=KEY, name=self.name
            ).to_dict()
        return read_config(self.fetch("config.json", INDEX), KEY)

    @property
    def commit(self) -> str | None:
        """The commit of a Hub id in the Hub's cache; None for a folder."""
        # The cache names the folder of a snapshot by its commit.
        is_folder = Path(split_gguf(self.name)[0]).is_dir()
        return None if is_folder else self.fetch("config.json", *self._gguf).name

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the config that describes the language model; by default the whole config."""
        return self.config.get("text_config") or self.config

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states."""
        return self._size("hidden_size")

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self._size("vocab_size")

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return self._size("num_hidden_layers")

    def tensor(self, name: str) -> Tensor:
        """Load the weight of the token embedding or of the LM head, without loading the model.

        If the checkpoint has no tensor for the head, the head is tied to the embedding, whose
        weight is then returned.

        Args:
            name: `embed_tokens.weight` or `lm_head.weight`.

        Raises:
            UserError: if the checkpoint has no such tensor.
        """
        # Find the files. Without an index, all tensors are in one file, which is fetched.
        folder = self.fetch("config.json", INDEX)
        shards = Shards.open(
            folder if (folder / INDEX).is_file() else self.fetch(SINGLE), KEY, complete=False
        )

        # Search for the tensor by the end of its name, then for the embedding in its place, because
        # a tied head has no tensor of its own.
        for suffix in (name, EMBEDDING):
            # The shortest name is the right one, because a multi-token-prediction layer may repeat
            # both tensors under longer names.
            full_name = min(
                (full for full in shards.file_of if f".{full}".endswith(f".{suffix}")),
                key=len,
                default=None,
            )
            if full_name:
                self.fetch(shards.file_of[full_name])
                return shards.load([full_name])[full_name]
        raise UserError(
            KEY, got=f"{self.name} without {name}", expected="a language model with an embedding"
        )

    def fetch(self, *patterns: str) -> Path:
        """Fetch the files that match these patterns, and return the folder that holds them.

        Files that do not exist are left out.
        """
        return fetch(
            split_gguf(self.name)[0],
            key=KEY,
            expected="pico (built in), a folder, a GGUF file or a Hub id",
            revision=self.revision,
            patterns=patterns,
        )

    def _size(self, name: str) -> int:
        """Return a number from the text config, such as `hidden_size`.

        Raises:
            UserError: if it is missing or no integer.
        """
        size = self.text_config.get(name)
        if type(size) is not int:
            raise UserError(
                KEY,
                got=f"{self.name} with {name} {size}",
                expected=f"the config.json of a language model, with an integer as {name}",
            )
        return size


def _list_existing_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the paths of those files that exist in a folder, in the order of `names`."""
    paths = [folder / name for name in names]
    return [path for path in paths if path.is_file()]


def _find_unlisted_weights(names: Iterable[str]) -> list[str]:
    """Return which of these files hold the weights of a checkpoint without an index.

    These are the single safetensors file, or else the files that torch.save wrote.

    Args:
        names: the names of all files of the checkpoint.
    """
    return (
        [SINGLE]
        if SINGLE in names
        else sorted(name for name in names if fnmatch(name, "pytorch_model*.bin"))
    )


def require_target(target: TargetFiles | None, why: str) -> TargetFiles:
    """Return the target's files, or raise an error if the user named no target.

    Args:
        target: the target's files; None if no target was named.
        why: why a target is needed, for the error.

    Raises:
        UserError: if no target was named.
    """
    if target is None:
        raise UserError(KEY, got="nothing", expected=f"the draft's target: {why}")
    return target
