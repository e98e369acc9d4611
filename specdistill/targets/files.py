"""A target's sizes, from its config.json, and single tensors, without loading the model."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from specdistill.errors import UserError
from specdistill.hub import fetch, resolve
from specdistill.targets.shards import INDEX, SINGLE, Shards, read_json

KEY = "target.model"
EXPECTED = "pico, a folder or a Hub id"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TargetFiles:
    """A target's files, in a folder or on the Hub, from where they are fetched one by one when they are read.

    name: the folder or the Hub id, as engines take it. Methods raise UserError and ResourceError.
    """

    name: str
    revision: str | None = None

    @classmethod
    def of(cls, model: str, revision: str | None = None) -> "TargetFiles":
        """`pico`, a folder or a Hub id; raises UserError for a path that is no folder."""
        return cls(resolve(model, KEY), revision)

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json(self.fetch("config.json", INDEX) / "config.json", KEY)

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the config."""
        text: dict[str, Any] = self.config.get("text_config") or self.config
        return text

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
        shards = Shards.open(folder if (folder / INDEX).is_file() else self.fetch(SINGLE), KEY, complete=False)
        for end in (name, EMBEDDING):
            # The shortest: a multi-token-prediction layer may repeat both under longer names.
            full_name = min((full for full in shards.file_of if f".{full}".endswith(f".{end}")), key=len, default=None)
            if full_name:
                self.fetch(shards.file_of[full_name])
                return shards.load([full_name])[full_name]
        raise UserError(KEY, got=f"{self.name} without {name}", expected="a language model with an embedding")

    def fetch(self, *patterns: str) -> Path:
        """The folder that holds the files of these names, as far as they exist."""
        return fetch(self.name, key=KEY, expected=EXPECTED, revision=self.revision, patterns=patterns)

    def _size(self, name: str) -> int:
        size = self.text_config.get(name)
        if type(size) is not int:
            raise UserError(KEY, got=f"{self.name} with {name} {size}", expected="the config.json of a language model")
        return size


def needed(target: TargetFiles | None, why: str) -> TargetFiles:
    """The target; raises UserError, saying why, when none was given."""
    if target is None:
        raise UserError(KEY, got="nothing", expected=f"the draft's target: {why}")
    return target
