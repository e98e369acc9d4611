"""`specdistill compare`: its keys, and what of them cannot be measured together."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import create_model

from specdistill.decoding.tree import tree_shape
from specdistill.errors import UserError
from specdistill.measurement.configurations import Settings
from specdistill.methods.recipe import eval_keys_of_methods
from specdistill.recipe.fields import AtLeastOne, ReadWhen, option, section
from specdistill.recipe.sections import (
    A_CHAIN,
    LookupFirstConfig,
    MeasurementConfig,
    TargetConfig,
    TreeConfig,
)

SAME_K = ReadWhen(
    "without num_speculative_tokens_each, and without a tree or as the depth of that",
    lambda it: not it.num_speculative_tokens_each and A_CHAIN.holds(it),
)
FOR_EACH = ReadWhen(
    "without lookup_first, which is that of all", lambda it: it.lookup_first is None
)
CHAINS = ReadWhen("without a tree", lambda it: it.tree is None)


class CommonOptions(MeasurementConfig):
    target: TargetConfig = section(TargetConfig)
    drafts: list[str] = option(
        ..., "two or more of: draft folders, Hub ids (org/name, org/name@revision), ngram, suffix"
    )
    num_speculative_tokens: int = option(4, "K, draft tokens per round", ge=1, read_when=SAME_K)
    num_speculative_tokens_each: list[AtLeastOne] = option(
        [],
        "K of each draft, in the order of drafts; []: num_speculative_tokens for all",
        read_when=CHAINS,
    )
    trees_each: list[TreeConfig | None] = option(
        [],
        "tree of each draft, in the order of drafts, null for a chain; []: chains",
        read_when=CHAINS,
    )
    lookup_first_each: list[LookupFirstConfig | None] = option(
        [],
        "lookup_first of each draft, in the order of drafts, null for none; []: lookup_first for all",
        read_when=FOR_EACH,
    )
    output_dir: str = option(..., "folder of the comparison and its reports")


KEYS_OF_METHODS: dict[str, Any] = dict(eval_keys_of_methods())
CompareOptions: type[CommonOptions] = create_model(
    "CompareOptions", __base__=CommonOptions, **KEYS_OF_METHODS
)


def lookups_of_each(
    options: CommonOptions, settings: Sequence[Settings]
) -> list[LookupFirstConfig | None]:
    """What stands in front of each draft, of `settings_of_each`. Raises UserError for one that does not fit."""
    lookups = options.lookup_first_each or [options.lookup_first] * len(settings)
    for lookup, own in zip(lookups, settings, strict=True):
        if lookup and own.tree:
            got = "a lookup in front of a draft with a tree of trees_each"
            raise UserError("lookup_first_each", got=got, expected="draft_tree of the lookup")
        if lookup:
            lookup.check(options, own.num_speculative_tokens)
    return lookups


def settings_of_each(options: CommonOptions, count: int) -> list[Settings]:
    """The settings of each draft: they differ in K or tree alone. Raises UserError for another number of a key's values than of drafts."""
    for_all = Settings.of(options)
    for key in ("num_speculative_tokens_each", "trees_each", "lookup_first_each"):
        if len(getattr(options, key)) not in (0, count):
            raise UserError(
                key,
                got=f"{len(getattr(options, key))} of them",
                expected=f"{count}, one for each draft",
            )
    trees = [tree_shape(tree) if tree else None for tree in options.trees_each] or [
        for_all.tree
    ] * count
    depths = [tree.depth if tree else for_all.num_speculative_tokens for tree in trees]
    each = zip(options.num_speculative_tokens_each or depths, trees, strict=True)
    return [replace(for_all, num_speculative_tokens=k, tree=tree) for k, tree in each]
