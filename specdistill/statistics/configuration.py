"""The configuration of a measurement: how completions were generated and how prompts were cut.

A report's first row is the main configuration's; a sweep adds configurations that differ from it in one setting.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

ALL = "all"


@dataclass(frozen=True)
class Configuration:
    """One combination of settings.

    num_speculative_tokens: K; of a tree its depth. tree: its budget, depth and top_k, or its branching; None drafts a chain.
    context_bucket: tokens that prompts were cut to; `all`: prompts as the suite has them.
    """

    num_speculative_tokens: int
    temperature: float = 0.0
    batch_size: int = 1
    tree: Mapping[str, int | list[int]] | None = None
    context_bucket: str = ALL


CONFIGURATION_KEYS = tuple(field.name for field in fields(Configuration))


def configuration_of(row: Mapping[str, Any]) -> Configuration:
    """The configuration of a report's row."""
    return Configuration(**{name: row[name] for name in CONFIGURATION_KEYS})
