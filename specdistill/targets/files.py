"""A checkpoint's files: its config.json, and single tensors, read without loading the model, of a folder or of a target on the Hub.

Which target a draft was made for is told by the sha256 of its files: the same wherever they lie, and never the weights in memory. The
Hub's cache names a large file by its sha256, so that what came from there is not read again; files in a folder are read once.
"""

import hashlib
import os
import re
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

from specdistill.errors import UserError, refusing
from specdistill.files.documents import read_json, read_keys
from specdistill.project import PICO
from specdistill.repositories import fetch, large_file_hashes, resolve, split_gguf
from specdistill.targets.loading import read_gguf_config

KEY = "target.model"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
# What turns text into token ids. Templates, defaults and the names of special tokens stand in other files.
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
NESTED = (
    "transformer_layer_config",
    "model",
    "text_config",
)  # where some layouts of config.json have a decoder's sizes
MOST_LAYERS = 1000  # of a model, which are made one by one
# Of keys of config.json that are read here.
KINDS = {
    **dict.fromkeys(
        (*NESTED, "rope_parameters", "rope_scaling", "quantization_config"), dict[str, Any]
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
    "num_hidden_layers": Annotated[int, Field(le=MOST_LAYERS)],
    "rope_theta": float,
}
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
SHOWN = 8  # digits of a hash that errors show


@dataclass(frozen=True)
class Shards:
    """The safetensors files of a checkpoint.

    file_of: file name of each tensor, in the order of the checkpoint. key: the recipe key that errors name.
    """

    folder: Path
    file_of: dict[str, str]
    key: str

    @classmethod
    def open(cls, folder: Path, key: str, *, complete: bool = True) -> "Shards":
        """Raises UserError for a missing or broken file. Files that the index names may be missing if not `complete`."""
        if not (folder / INDEX).is_file():
            if not (folder / SINGLE).is_file():
                got = f"{folder}, which has no {SINGLE} and no index"
                raise UserError(key, got=got, expected="a checkpoint in safetensors")
            return cls(folder, dict.fromkeys(_names(folder / SINGLE, key), SINGLE), key)
        with refusing(
            (ValueError, KeyError, TypeError, AttributeError),
            key,
            folder / INDEX,
            "a safetensors index",
        ):
            file_of: dict[str, str] = read_json(folder / INDEX)["weight_map"]
            files = sorted(set(map(os.fspath, file_of.values())))  # which takes names alone
        for file in files:
            if Path(file).name != file:
                raise UserError(
                    key, got=f"{folder / INDEX} with {file}", expected="files in the same folder"
                )
            if complete and not (folder / file).is_file():
                raise UserError(
                    key, got=f"{folder} without {file}", expected="every file that its index names"
                )
        return cls(folder, file_of, key)

    def check(self) -> None:
        """Raises UserError unless every tensor is in the file that the index names, and in no other. transformers is not as strict."""
        for file in self.files:
            listed = {name for name, place in self.file_of.items() if place == file}
            if wrong := sorted(listed.symmetric_difference(_names(self.folder / file, self.key))):
                got = f"{self.folder}, whose files and index differ about {', '.join(wrong[:3])}"
                raise UserError(
                    self.key, got=got, expected="every tensor in the one file that the index names"
                )

    @property
    def files(self) -> list[str]:
        return sorted(set(self.file_of.values()))

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.without_content().values())

    def without_content(self) -> dict[str, Tensor]:
        """All tensors on the meta device, by the files' headers alone."""

        def described(weights: Any, name: str) -> Tensor:
            shape = weights.get_slice(name).get_shape()
            part = (
                weights.get_slice(name)[:0] if shape else weights.get_tensor(name)
            )  # a number cannot be cut
            return torch.empty(shape, dtype=part.dtype, device="meta")

        return self._read(self.file_of, described)

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        return self._read(names, lambda weights, name: weights.get_tensor(name))

    def _read(self, names: Iterable[str], read: Callable[[Any, str], Tensor]) -> dict[str, Tensor]:
        """Of tensors what `read` gives, by name; each file is opened once. Raises UserError for a broken one."""
        tensors = {}
        by_file = defaultdict(list)
        for name in names:
            by_file[self.folder / self.file_of[name]].append(name)
        for path, inside in by_file.items():
            with (
                refusing(SafetensorError, self.key, path, "a whole file"),
                safe_open(path, framework="pt") as weights,
            ):
                tensors.update({name: read(weights, name) for name in inside})
        return tensors


def read_config(
    folder: Path, key: str, expected: str = "a checkpoint with its config.json"
) -> dict[str, Any]:
    """A folder's config.json. Raises UserError, saying what is there instead, when it has none."""
    path = folder / "config.json"
    if not path.is_file():
        found = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        inside = next(
            (str(folder / name) for name in found if (folder / name / "config.json").is_file()),
            None,
        )
        nothing = "is empty" if folder.is_dir() else "is no folder"
        shown = f"holds {', '.join(found[:5])}{', …' * (len(found) > 5)}" if found else nothing
        raise UserError(key, got=f"{folder}, which {shown}", expected=expected, nearest=inside)
    config = read_keys(path, key, expected)
    for part in (config, *(config.get(name) for name in (*NESTED, "rope_parameters"))):
        for name, kind in KINDS.items():
            stated({} if part is None else part, name, kind, key)
    return config


def stated(config: Mapping[str, Any], name: str, kind: Any, key: str) -> Any:
    """A key's value, None where it is absent or null. Raises UserError for one of another kind than pydantic's `kind`."""
    try:
        return _adapter(kind).validate_python(config.get(name), strict=True)
    except ValidationError as error:
        expected = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise UserError(
            key, got=f"a config.json with {name} {config[name]!r}", expected=expected
        ) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind | None)


def _names(path: Path, key: str) -> list[str]:
    with (
        refusing(SafetensorError, key, path, "a whole safetensors file"),
        safe_open(path, framework="pt") as weights,
    ):
        return list(weights.keys())


def file_hashes(paths: Iterable[Path]) -> list[str]:
    """The sha256 of files, several read at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_file_hash, paths))


def combined(hashes: Iterable[str]) -> str:
    """One hash of several, whatever their order."""
    return hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()


def content_hash(paths: Iterable[Path]) -> str:
    """sha256 of the names and contents of files, wherever they lie."""
    files = list(paths)
    # Resolved, so that each is read: a link's name says nothing about what it leads to.
    hashes = file_hashes(path.resolve() for path in files)
    return combined(f"{sha256} {path.name}" for sha256, path in zip(hashes, files, strict=True))


def _file_hash(path: Path) -> str:
    # In the Hub's cache. The link itself says it: what it leads to may be a link too, to a file that is named by another hash (Xet).
    if path.is_symlink() and re.fullmatch("[0-9a-f]{64}", stored := path.readlink().name):
        return stored
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class TargetIdentity:
    """name_or_path: pico, a folder or a Hub id. revision: the commit of a Hub id. adapter: merged into the weights, folder or Hub id.

    weights, tokenizer: sha256 in hexadecimal, of the files' sha256; the adapter's are among the weights.
    """

    name_or_path: str
    revision: str | None
    adapter: str | None
    weights: str
    tokenizer: str

    def is_same(self, other: "TargetIdentity") -> bool:
        """Whether both have the same weights and tokenizer, whatever they are called."""
        return (self.weights, self.tokenizer) == (other.weights, other.tokenizer)

    def __str__(self) -> str:
        revision = f"@{self.revision[:SHOWN]}" if self.revision else ""
        adapter = f" + {self.adapter}" if self.adapter else ""
        hashes = f"weights {self.weights[:SHOWN]}, tokenizer {self.tokenizer[:SHOWN]}"
        return f"{self.name_or_path}{revision}{adapter} ({hashes})"


@dataclass(frozen=True)
class TargetFiles:
    """A target's files, in a folder or on the Hub, from where they are fetched one by one when they are read.

    name: the folder, the GGUF file or the Hub id, as engines take it; of `pico` its folder. adapter: LoRA, merged where the target is
    loaded; of the files here it is in `identity` alone. trust_remote_code: run the repository's own code. Methods raise UserError and
    ResourceError.
    """

    name: str
    revision: str | None = None
    adapter: Any = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Raises UserError for a path that is no target's, and for several adapters."""
        object.__setattr__(self, "name", resolve(self.name, KEY))
        if self.adapter is not None and not isinstance(self.adapter, str):
            expected = "one: several are for `specdistill eval` with eval.engine=specdistill"
            raise UserError(
                "target.adapter", got=f"{len(self.adapter)} adapters", expected=expected
            )

    @cached_property
    def identity(self) -> TargetIdentity:
        """From hashes of the files, of which none is fetched but the tokenizer's."""
        folder = self.fetch("config.json", INDEX, *TOKENIZER, *self._gguf)
        weights = file_hashes(folder / file for file in self._gguf) or self._weight_hashes(folder)
        if self.adapter is not None:
            found = fetch(
                self.adapter,
                key="target.adapter",
                expected="the folder or Hub id of a LoRA adapter",
                patterns=ADAPTER,
            )
            weights += file_hashes(path for name in ADAPTER if (path := found / name).is_file())
        return TargetIdentity(
            name_or_path="pico" if self.name == str(PICO) else self.name,
            revision=self.commit,
            adapter=self.adapter,
            weights=combined(weights),
            tokenizer=combined(
                file_hashes(
                    path for name in self._gguf or TOKENIZER if (path := folder / name).is_file()
                )
            ),
        )

    def _weight_hashes(self, folder: Path) -> list[str]:
        """The sha256 of every file of weights; of a Hub id whose files are not in `folder` yet, as the Hub states them."""
        there = {path.name for path in folder.iterdir()}
        listed = Shards.open(folder, KEY, complete=False).files if INDEX in there else []
        files = listed or _unlisted_weights(there)
        if files and there >= set(files):
            return file_hashes(folder / file for file in files)
        stated = (
            {} if Path(self.name).is_dir() else large_file_hashes(self.name, folder.name, key=KEY)
        )
        files = listed or _unlisted_weights(stated)
        if not files or not stated.keys() >= set(files):
            raise UserError(
                KEY,
                got=f"{self.name} without weights",
                expected="every weight that its config asks for",
            )
        return [stated[file] for file in files]

    @property
    def _gguf(self) -> tuple[str, ...]:
        """The one file that holds config, tokenizer and weights, if it is one."""
        file = split_gguf(self.name)[1]
        return (file,) if file else ()

    @cached_property
    def config(self) -> dict[str, Any]:
        if self._gguf:
            return read_gguf_config(
                self.fetch(*self._gguf), self._gguf[0], key=KEY, name=self.name
            ).to_dict()
        return read_config(self.fetch("config.json", INDEX), KEY)

    @property
    def commit(self) -> str | None:
        """Of a Hub id, as it is in the cache."""
        folder = Path(split_gguf(self.name)[0])
        return None if folder.is_dir() else self.fetch("config.json", *self._gguf).name

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the config."""
        return self.config.get("text_config") or self.config

    @property
    def hidden_size(self) -> int:
        return self._size("hidden_size")

    @property
    def vocab_size(self) -> int:
        return self._size("vocab_size")

    @property
    def num_layers(self) -> int:
        return self._size("num_hidden_layers")

    def tensor(self, name: str) -> Tensor:
        """The embedding, or the head, which is the embedding if they are tied."""
        folder = self.fetch("config.json", INDEX)
        shards = Shards.open(
            folder if (folder / INDEX).is_file() else self.fetch(SINGLE), KEY, complete=False
        )
        for end in (name, EMBEDDING):
            # The shortest: a multi-token-prediction layer may repeat both under longer names.
            full_name = min(
                (full for full in shards.file_of if f".{full}".endswith(f".{end}")),
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
        """The folder that holds the files of these names, as far as they exist."""
        expected = "pico, a folder, a GGUF file or a Hub id"
        return fetch(
            split_gguf(self.name)[0],
            key=KEY,
            expected=expected,
            revision=self.revision,
            patterns=patterns,
        )

    def _size(self, name: str) -> int:
        size = self.text_config.get(name)
        if type(size) is not int:
            raise UserError(
                KEY,
                got=f"{self.name} with {name} {size}",
                expected="the config.json of a language model",
            )
        return size


def _unlisted_weights(names: Iterable[str]) -> list[str]:
    """The files that hold the weights of a checkpoint without an index in safetensors."""
    return (
        [SINGLE]
        if SINGLE in names
        else sorted(name for name in names if fnmatch(name, "pytorch_model*.bin"))
    )


def needed(target: TargetFiles | None, why: str) -> TargetFiles:
    """The target; raises UserError, saying why, when none was given."""
    if target is None:
        raise UserError(KEY, got="nothing", expected=f"the draft's target: {why}")
    return target
