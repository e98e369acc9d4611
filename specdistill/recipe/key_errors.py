"""Turn errors of pydantic into one line that names the key as typed, and the nearest valid one."""

import types
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import get_args

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from specdistill.common.errors import UserError, find_nearest, make_unused_key_error
from specdistill.recipe.fields import (
    Section,
    describe_condition,
    describe_kind,
    find_default,
    format_value,
    list_fields,
    list_leaves,
    list_variants,
)

Place = Sequence[int | str]  # the place of a key: names of keys, and indices in lists
# Names that other tools use for our keys and values.
ALIASES = {
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "train.num_train_epochs"),
    **dict.fromkeys(
        ("batch_size", "train_batch_size"),
        "train.per_device_train_batch_size (to measure: eval.batch_size)",
    ),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "model_max_length"), "data.max_length"),
    **dict.fromkeys(("dataset", "dataset_name", "train_file"), "data.source"),
    **dict.fromkeys(("lr", "learning_rate"), "train.learning_rate"),
    **dict.fromkeys(("llama.cpp", "llama_cpp"), "gguf"),
    **{name: f"train.{name}" for name in ("max_steps", "output_dir", "report_to")},
    "dataset_text_field": "data.columns={text: NAME}",
    "launch": (
        "accelerate launch --config_file accelerate_configs/NAME.yaml SCRIPT, or specdistill train"
        " launch=NAME"
    ),
    "warmup_ratio": "train.warmup_steps, where a number below 1 is a share of the steps",
    "model_name_or_path": "target.model",
}


@cache
def list_required_keys(schema: type[Section]) -> frozenset[str]:
    """Return the keys without a default, which every recipe of a schema must have."""
    # `list_leaves` gives each default as text. PydanticUndefined stands for a missing default.
    return frozenset(
        key
        for key, _, default, _ in list_leaves([schema])
        if default == format_value(PydanticUndefined)
    )


def explain_errors(
    schema: type[Section], chosen: type[Section], errors: Sequence[ErrorDetails], prefix: str
) -> UserError:
    """Choose the most helpful of pydantic's errors, and return it as a UserError.

    Unknown keys are shown before wrong values, and wrong values before missing keys, because a
    misspelt key often explains why another one is missing.

    Args:
        schema: the schema of recipes of any method.
        chosen: the schema of the recipe's method, which the values were checked against.
        errors: pydantic's errors.
        prefix: text that goes before the keys, for a section that is in another file.
    """
    # Show one error only. Its place is the keys and list indices that lead to the wrong value.
    first = min(errors, key=lambda detail: _rank_error(chosen, detail))
    place = _remove_tags(chosen, first["loc"])

    # The key is unknown. Either a variant of the section that was not chosen has it, or no variant.
    if first["type"] == "extra_forbidden":
        if _is_key_of_other_variant(chosen, place):
            return _make_other_variant_error(chosen, place, first["input"], prefix)
        return _make_unknown_key_error(schema, chosen, place, first["input"], prefix)
    key = prefix + format_place(place)

    # A section's `min` is above its `max` (see `check_lengths`).
    if first["type"] == "min_above_max":
        limits = first["ctx"]
        return UserError(
            prefix + format_place([*place, "min"]),
            got=limits["min"],
            expected=f"at most {prefix}{format_place([*place, 'max'])}, which is {limits['max']}",
        )

    # The key is missing, or its value is no section, or has a wrong type or size. Only a schema of
    # recipes has the section `train`: for it, the error of a missing key may suggest a recipe.
    field = _find_field(chosen, place)
    if first["type"] == "missing":
        return _make_missing_key_error(
            key, field, list_required_keys(chosen) if "train" in schema.model_fields else ()
        )
    if first["type"] in ("model_type", "model_attributes_type", "union_tag_not_found"):
        return _make_no_section_error(
            key, field, first["input"], is_item=not isinstance(place[-1], str)
        )
    return _make_wrong_value_error(key, field, first)


def _rank_error(schema: type[Section], detail: ErrorDetails) -> int:
    """Return the rank of one of pydantic's errors; the error with the lowest rank is shown.

    The order is: unknown key (0), wrong value (1), missing key (2), and a key that only another
    variant of the section has (3). The last kind is often only a consequence: because of another
    error, that variant was not chosen.
    """
    if detail["type"] == "extra_forbidden":
        return 3 if _is_key_of_other_variant(schema, _remove_tags(schema, detail["loc"])) else 0
    return 2 if detail["type"] == "missing" else 1


def _is_key_of_other_variant(schema: type[Section], place: Place) -> bool:
    """Return whether a key that its section lacks exists in another variant of the section."""
    return place[-1] in list_fields(_find_variants(schema, place[:-1]))


def _make_missing_key_error(
    key: str, field: FieldInfo, keys_of_recipes: Collection[str]
) -> UserError:
    """Return the error for a key that must be given but is missing.

    Args:
        key: the missing key; for a section the error names the first required key in it.
        field: the field of the key.
        keys_of_recipes: the required keys of recipes. If the missing key is one of them, the error
            also suggests to name a recipe.
    """
    # If a whole section must be given, name the first key in it that must be given. If the section
    # has several variants, take the first one, which is the default.
    while variants := list_variants(field.annotation):
        fields = variants[0].model_fields
        required_names = [name for name, inner in fields.items() if inner.is_required()]
        field = fields[required_names[0]]
        key = f"{key}.{required_names[0]}"
    hint = ", or a recipe that names it (recipe=pico/eagle3)" if key in keys_of_recipes else ""
    return UserError(key, got="nothing", expected=f"{field.description}{hint}")


def _make_no_section_error(
    key: str, field: FieldInfo, value: object, *, is_item: bool
) -> UserError:
    """Return the error for a key whose value should be a section, but is something else.

    Args:
        key: the key.
        field: the field of the key; for an item of a list, the field of the list.
        value: the value.
        is_item: whether the value is an item of a list of sections.
    """
    is_nullable = types.NoneType in get_args(field.annotation) and not is_item
    # As an example, suggest the first key of the section.
    first_key, *_ = list_fields(_list_field_variants(field))
    return UserError(
        key,
        got="null" if value is None else repr(value),
        expected=f"{'null or ' if is_nullable else ''}a section with keys of its own",
        nearest=f"{key}.{first_key}",
    )


def _make_wrong_value_error(key: str, field: FieldInfo, detail: ErrorDetails) -> UserError:
    """Return the error for a value that its key does not accept.

    Args:
        key: the key.
        field: the field of the key.
        detail: pydantic's error.
    """
    # By default the error expects the key's type, in the words of the help text.
    value = detail["input"]
    kind = describe_kind(field)
    if detail["type"] == "union_tag_invalid":
        # The value that chooses between the variants of a section is none of the allowed values.
        name = str(field.discriminator)
        variants = list_variants(field.annotation)
        return _make_no_choice_error(
            f"{key}.{name}",
            value[name],
            [str(find_default(variant.model_fields[name])) for variant in variants],
        )

    # The value is none of the names that the key accepts. Suggest the nearest one. `kind` lists the
    # names, for example as `list of a|b or null`.
    if detail["type"] == "literal_error":
        names = kind.split(", ")[0].replace(" or null", "").removeprefix("list of ")
        return _make_no_choice_error(key, value, names.split("|"))

    # Keys were typed below a key that is no section.
    if isinstance(value, dict) and value:
        return UserError(
            key, got=f"a section with the keys {', '.join(map(str, value))}", expected=kind
        )

    # If the value is outside a limit, show only the value. Otherwise show its type, too, which may
    # be what is wrong.
    if {"ge", "gt", "le", "lt", "multiple_of"} & detail.get("ctx", {}).keys():
        got = str(value)
    else:
        got = "null" if value is None else f"{value!r} ({type(value).__name__})"

    # If the value is inside a mapping, `kind` only says "mapping". pydantic's own message says what
    # is expected of the value itself.
    is_in_mapping = kind == "mapping" and detail["type"] != "dict_type"
    message = detail["msg"].removeprefix("Input should be ")
    return UserError(key, got=got, expected=message if is_in_mapping else kind)


def _make_no_choice_error(key: str, value: object, choices: Collection[str]) -> UserError:
    """Return the error for a value that is not among a key's choices, with the nearest choice."""
    # `ALIASES` has names that other tools use.
    return UserError(
        key,
        got=repr(value),
        expected=f"one of {', '.join(choices)}",
        nearest=find_nearest(ALIASES.get(str(value), str(value)), choices),
    )


def _make_other_variant_error(
    schema: type[Section], place: Place, value: object, prefix: str
) -> UserError:
    """Return the error for a key that only another variant of its section has.

    A section has variants (classes with different keys) if its values decide which keys there are.
    The error says when the variant that has the key is used.

    Args:
        schema: the schema of the recipe.
        place: the names and list indices that lead to the key.
        value: the value of the key.
        prefix: text that goes before the key.
    """
    # Find the first variant that has the key.
    *section_place, name = place
    variants = _find_variants(schema, section_place)
    owner = next(variant for variant in variants if name in variant.model_fields)

    # A variant may be chosen by one key, the discriminator. The error then suggests the value of
    # this key that chooses `owner`. Other variants are chosen by a function of several keys, so
    # there is no single key to suggest.
    discriminator = _find_field(schema, section_place).discriminator
    alternative = ""
    if isinstance(discriminator, str):
        choosing_key = prefix + format_place([*section_place, discriminator])
        alternative = f"set {choosing_key}={find_default(owner.model_fields[discriminator])}"
    return make_unused_key_error(
        prefix + format_place(place),
        format_value(value),
        f"only used {describe_condition(variants, str(name))}",
        alternative=alternative,
    )


def _make_unknown_key_error(
    schema: type[Section], chosen: type[Section], place: Place, value: object, prefix: str
) -> UserError:
    """Return the error for a key that the recipe's method does not have.

    If other methods have the key, the error names them. Otherwise it suggests a similar key.

    Args:
        schema: the schema of recipes of any method.
        chosen: the schema of the recipe's method.
        place: the names and list indices that lead to the key.
        value: the value of the key.
        prefix: text that goes before the key.
    """
    # If another method has the key, name the methods that do.
    key = prefix + format_place(place)
    name = str(place[-1])
    key_without_indices = ".".join(part for part in place if isinstance(part, str))
    schemas = schema.list_schemas()
    methods_with_key = [
        method for method, recipe in schemas.items() if _has_key(recipe, key_without_indices)
    ]
    if methods_with_key:
        chosen_method = next((method for method, recipe in schemas.items() if recipe is chosen), "")
        # A whole section may be unknown. Name the first key in it that was typed.
        while isinstance(value, Mapping) and value:
            inner_name, value = next(iter(value.items()))
            key = f"{key}.{inner_name}"
        return make_unused_key_error(
            key,
            format_value(value),
            f"not used with method={chosen_method}, only with {', '.join(methods_with_key)}",
        )

    # Suggest a key of the same section with a similar name, else a key of the same name elsewhere.
    # In a recipe, a name that other tools use (`ALIASES`) comes first: suggest our key for it.
    known_keys = sorted(list_fields(_find_variants(chosen, place[:-1])))
    similar_name = find_nearest(name, known_keys)
    if similar_name:
        suggestion: str | None = f"{key.removesuffix(name)}{similar_name}"
    else:
        # Several keys may have this name. Suggest the first one with the fewest sections around it.
        all_keys = [row.key for row in list_leaves([chosen])]
        same_name_keys = [path for path in all_keys if path.rpartition(".")[2] == name]
        suggestion = min(same_name_keys, key=lambda path: path.count("."), default=None)
    if "train" in chosen.model_fields:
        suggestion = ALIASES.get(name, suggestion)
    return UserError(
        key,
        got="an unknown key",
        expected=f"one of {', '.join(known_keys)}" if known_keys else "no keys",
        nearest=suggestion,
    )


def _has_key(schema: type[Section], key: str) -> bool:
    """Return whether a schema has a key, or a section of that name."""
    # The dots let only whole names match: `eval` matches `eval.suite`, but not `evaluate`.
    return any(f"{row.key}.".startswith(f"{key}.") for row in list_leaves([schema]))


def _find_field(schema: type[Section], place: Place) -> FieldInfo:
    """Return the pydantic field at a place in a recipe, such as ('eval', 'tree', 0, 'budget').

    If the place is inside a mapping that is no section, the field of the mapping is returned.
    """
    # Follow the names into sections, and into lists of sections, whose indices are skipped.
    first_name, *inner_names = (part for part in place if isinstance(part, str))
    field = schema.model_fields[first_name]
    for name in inner_names:
        inner_fields = list_fields(_list_field_variants(field))
        field = inner_fields[name] if inner_fields else field
    return field


def _find_variants(schema: type[Section], place: Place) -> list[type[Section]]:
    """Return the variants of the section at a place; an empty place is the whole recipe."""
    return _list_field_variants(_find_field(schema, place)) if place else [schema]


def _list_field_variants(field: FieldInfo) -> list[type[Section]]:
    """Return the section classes of a field: those of its value, or of the items of a list.

    There are several classes if the section has variants, and none if the field holds no section.
    """
    variants = list_variants(field.annotation)
    for item in get_args(field.annotation):
        variants = variants or list_variants(item)
    return variants


def _remove_tags(schema: type[Section], location: Place) -> Place:
    """Return pydantic's location of an error without the names of variants in it.

    pydantic puts the name of the chosen variant after the name of a section that has variants, as
    in ('data', 'regenerate', 'LocalRegeneration', 'server').
    """
    # After the name of a section with variants (its field has a discriminator), skip the next part,
    # which is the name of the variant.
    fields = schema.model_fields
    place: list[int | str] = []
    parts = iter(location)
    for part in parts:
        place.append(part)
        if isinstance(part, str) and part in fields:
            field = fields[part]
            fields = list_fields(_list_field_variants(field))
            if field.discriminator:
                next(parts, None)
    return place


def format_place(place: Place) -> str:
    """Return a place as a dotted key: ('eval', 'tree', 0, 'budget') becomes eval.tree[0].budget."""
    parts = [f"[{part}]" if isinstance(part, int) else str(part) for part in place]
    return ".".join(parts).replace(".[", "[")
