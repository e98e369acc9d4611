"""Read the rotary embedding in a config.json, whose two spellings may contradict each other.

Since version 5 transformers writes `rope_parameters`, which may hold one entry for each kind of
layer. Files for older readers have `rope_theta` and `rope_scaling`. If both are there, readers
choose differently:

- transformers 5 reads `rope_scaling` if it is stated, with the `rope_theta` next to it, else
  `rope_parameters`. vLLM, SGLang and llama.cpp's converter read the file through transformers.
- With transformers 4 they read `rope_theta` and `rope_scaling` alone.
- llama.cpp's converter reads `rope_parameters` if transformers does not know the model.
"""

from collections.abc import Mapping
from typing import Any

from specdistill.methods.sizes import RawConfig

THETA = "rope_theta"
READERS = (
    "make them the same: transformers 5 (with it vLLM, SGLang and llama.cpp's converter) reads"
    " rope_scaling if it is stated, else rope_parameters; transformers 4 reads rope_theta and"
    " rope_scaling"
)
# Older names of kinds, and their current names. Multimodal positions (mrope) are "default" here,
# because their sections change nothing for text.
RENAMED_KINDS = {"su": "longrope", "mrope": "default"}


def read_entries(config: RawConfig) -> list[dict[str, object]]:
    """Return the rotary embeddings of a config.json as transformers 5 reads them.

    Returns:
        One normalized entry, or one for each kind of layer.
    """
    # If the newer key holds one entry for each kind of layer, these entries count. Otherwise there
    # is one entry: the older key if it is stated, else the newer one.
    newer = config.get("rope_parameters") or {}
    nested = [entry for entry in newer.values() if isinstance(entry, dict)]
    return [normalize(entry, config) for entry in nested or [config.get("rope_scaling") or newer]]


def choose_entry(parameters: RawConfig | None) -> dict[str, Any]:
    """Return the rotary embedding that a draft's own layers use, from a target's `rope_parameters`.

    If each kind of layer has its own embedding, the one of full attention is chosen, or else the
    one of sliding attention. The draft's layers rotate the whole of each query, even if the
    target's layers rotate only a part (`partial_rotary_factor`, and Gemma 4's `proportional`).
    """
    # Without a common entry, take that of full attention, because a head sees all positions.
    entry = dict(parameters or {})
    if any(isinstance(value, Mapping) for value in entry.values()):
        entry = dict(entry.get("full_attention") or entry.get("sliding_attention") or {})

    # The draft's layers rotate the whole of each query.
    entry.pop("partial_rotary_factor", None)
    if entry.get("rope_type") == "proportional":
        entry["rope_type"] = "default"
    return entry


def normalize(entry: RawConfig, config: RawConfig) -> dict[str, object]:
    """Return the settings of a rotary embedding in one spelling, so that two can be compared.

    The result has the kind as `rope_type`, the base as `rope_theta` and, if the kind scales, the
    numbers of the scaling.

    Args:
        entry: the rotary embedding as config.json states it.
        config: the config around the entry. Its keys are used where the entry has none.
    """
    # Read the kind and the base under any of their names.
    kind = str(entry.get("rope_type") or entry.get("type") or "default")
    kind = RENAMED_KINDS.get(kind, kind)
    theta = entry.get(THETA) or config.get(THETA)
    if kind == "default":
        return {"rope_type": kind, THETA: theta}

    # Keep the numbers of the scaling. `type` is the older name of the kind, and a draft's layers
    # rotate the whole of each query, so both keys are left out.
    unread = ("type", "partial_rotary_factor")
    numbers = {
        name: value for name, value in entry.items() if value is not None and name not in unread
    }
    length = "original_max_position_embeddings"
    if kind in ("llama3", "yarn", "longrope") and length not in numbers:
        # transformers fills in the length in the same way.
        numbers[length] = config.get(length) or config.get("max_position_embeddings")
    return {**numbers, "rope_type": kind, THETA: theta}


def find_differing_names(
    entry: Mapping[str, object], other_entry: Mapping[str, object]
) -> list[str]:
    """Return the names of the settings that differ between two normalized entries.

    If their kinds differ, only the kind and the base are compared.
    """
    # Settings of scalings of different kinds cannot be compared one by one, so only kind and base
    # are.
    names = [name for name in {**entry, **other_entry} if entry.get(name) != other_entry.get(name)]
    return [name for name in names if "rope_type" not in names or name in ("rope_type", THETA)]


def find_contradiction(config: RawConfig) -> str | None:
    """Return a setting of the rotary embedding that a config.json states twice and differently.

    Returns:
        The two places with their values, in words; None if the spellings agree.
    """
    # Read the newer and the older spelling.
    newer = config.get("rope_parameters") or {}
    older = config.get("rope_scaling") or {}
    theta = config.get(THETA)

    # With one entry for each kind of layer, the older keys speak of full attention.
    place = "rope_parameters"
    if isinstance(newer.get("full_attention"), dict):
        place = "rope_parameters.full_attention"
        newer = newer["full_attention"]

    # Within an entry, the two spellings of the type must agree.
    for name, entry in ((place, newer), ("rope_scaling", older)):
        kind = entry.get("rope_type")
        older_kind = entry.get("type")
        if None not in (kind, older_kind) and kind not in (
            older_kind,
            RENAMED_KINDS.get(str(older_kind)),
        ):
            return f"{name}.rope_type {kind} and {name}.type {older_kind}"

    # The two places of the base must agree, too.
    if None not in (theta, older.get(THETA)) and theta != older[THETA]:
        return f"rope_scaling.{THETA} {older[THETA]} and {THETA} {theta}"

    # For older readers `rope_theta` alone is complete: it means an embedding without scaling.
    if (
        not newer
        or (not older and theta is None)
        or any(isinstance(value, dict) for value in newer.values())
    ):
        return None

    # Compare both entries in one form.
    first = normalize(newer, config)
    second = normalize(older, config)
    for name in find_differing_names(first, second):
        return (
            f"{name} {first.get(name)} in {place}, and {name} {second.get(name)} in rope_theta and"
            " rope_scaling"
        )
    return None
