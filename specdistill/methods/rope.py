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
CONTRADICTION_ADVICE = (
    "make them the same: transformers 5 (with it vLLM, SGLang and llama.cpp's converter) reads"
    " rope_scaling if it is stated, else rope_parameters; transformers 4 reads rope_theta and"
    " rope_scaling"
)
# Older names of kinds, and their current names. Multimodal positions (mrope) are "default" here,
# because their sections change nothing for text.
RENAMED_KINDS = {"su": "longrope", "mrope": "default"}


def read_entries(config: RawConfig) -> list[dict[str, object]]:
    """Return the settings of a config.json's rotary embeddings, as transformers 5 reads them.

    Returns:
        One entry, or one for each kind of layer (full and sliding attention), each in the spelling
        of `normalize`.
    """
    # The newer key `rope_parameters` may hold one entry for each kind of layer. Otherwise there is
    # one entry: the value of the older key `rope_scaling` if it is given, else of the newer key.
    newer = config.get("rope_parameters") or {}
    nested = [entry for entry in newer.values() if isinstance(entry, dict)]
    entries = nested or [config.get("rope_scaling") or newer]
    return [normalize(entry, config) for entry in entries]


def choose_entry(parameters: RawConfig | None) -> dict[str, Any]:
    """Choose the rotary embedding of a draft's layers from a target's `rope_parameters`.

    If each kind of layer has its own embedding, the one of full attention is chosen, or else the
    one of sliding attention. The draft's layers rotate all dimensions of queries and keys, even if
    the target's layers rotate only some (`partial_rotary_factor`, Gemma 4's `proportional`).
    """
    # If the values are entries of their own, there is one for each kind of layer. Take the entry of
    # full attention, because a head attends to all positions.
    entry = dict(parameters or {})
    if any(isinstance(value, Mapping) for value in entry.values()):
        entry = dict(entry.get("full_attention") or entry.get("sliding_attention") or {})

    # Drop settings that would rotate only some dimensions.
    entry.pop("partial_rotary_factor", None)
    if entry.get("rope_type") == "proportional":
        entry["rope_type"] = "default"
    return entry


def normalize(entry: RawConfig, config: RawConfig) -> dict[str, object]:
    """Return the settings of a rotary embedding in one spelling, so that two can be compared.

    The result has the keys `rope_type` (its kind) and `rope_theta` (its base). For kinds that scale
    the positions, such as `yarn`, it also has the numbers of the scaling.

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

    # Keep the numbers of the scaling. `type` is only the older name of `rope_type`.
    # `partial_rotary_factor` is left out, because a draft's layers rotate all dimensions.
    unread = ("type", "partial_rotary_factor")
    numbers = {
        name: value for name, value in entry.items() if value is not None and name not in unread
    }
    length = "original_max_position_embeddings"
    if kind in ("llama3", "yarn", "longrope") and length not in numbers:
        # transformers uses the same default for this length.
        numbers[length] = config.get(length) or config.get("max_position_embeddings")
    return {**numbers, "rope_type": kind, THETA: theta}


def find_differing_names(
    entry: Mapping[str, object], other_entry: Mapping[str, object]
) -> list[str]:
    """Return the names of the settings in which two rotary embeddings differ.

    Args:
        entry: the settings of one embedding, in the spelling of `normalize`.
        other_entry: the settings of the other one.
    """
    # If the kinds (`rope_type`) differ, other numbers of the scaling mean different things. Then
    # only the kind and the base (`rope_theta`) are reported.
    names = [name for name in {**entry, **other_entry} if entry.get(name) != other_entry.get(name)]
    return [name for name in names if "rope_type" not in names or name in ("rope_type", THETA)]


def find_contradiction(config: RawConfig) -> str | None:
    """Find a setting of the rotary embedding that a config.json gives twice with different values.

    The newer spelling is the key `rope_parameters`; the older one is `rope_theta` and
    `rope_scaling`.

    Returns:
        The two places with their values, in words; None if there is no contradiction.
    """
    # Read both spellings.
    newer = config.get("rope_parameters") or {}
    older = config.get("rope_scaling") or {}
    theta = config.get(THETA)

    # If there is one entry for each kind of layer, compare the older keys with the entry of full
    # attention.
    place = "rope_parameters"
    if isinstance(newer.get("full_attention"), dict):
        place = "rope_parameters.full_attention"
        newer = newer["full_attention"]

    # Within an entry, `rope_type` and its older name `type` must agree. `type` may still have the
    # older name of the kind, such as "su" for "longrope".
    for name, entry in ((place, newer), ("rope_scaling", older)):
        kind = entry.get("rope_type")
        older_kind = entry.get("type")
        if None not in (kind, older_kind) and kind not in (
            older_kind,
            RENAMED_KINDS.get(str(older_kind)),
        ):
            return f"{name}.rope_type {kind} and {name}.type {older_kind}"

    # The base may be given inside `rope_scaling` and next to it. Both must agree, too.
    if None not in (theta, older.get(THETA)) and theta != older[THETA]:
        return f"rope_scaling.{THETA} {older[THETA]} and {THETA} {theta}"

    # There is nothing to compare if one of the spellings is missing, or if the newer one has only
    # entries for kinds of layers without full attention. `rope_theta` without `rope_scaling` is
    # complete: it means an embedding without scaling.
    if (
        not newer
        or (not older and theta is None)
        or any(isinstance(value, dict) for value in newer.values())
    ):
        return None

    # Compare both spellings after bringing them into one form; report the first difference.
    first = normalize(newer, config)
    second = normalize(older, config)
    for name in find_differing_names(first, second):
        return (
            f"{name} {first.get(name)} in {place}, and {name} {second.get(name)} in rope_theta and"
            " rope_scaling"
        )
    return None
