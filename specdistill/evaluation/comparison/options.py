"""Define the keys of `specdistill compare`, and derive the settings of each draft from them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import create_model

from specdistill.common.errors import UserError
from specdistill.decoding.tree import build_tree_shape
from specdistill.evaluation.measurement.configurations import Settings
from specdistill.evaluation.report.phrases import format_count
from specdistill.methods.recipe import list_method_eval_keys
from specdistill.recipe.fields import AtLeastOne, Condition, option, section
from specdistill.recipe.sections import (
    DRAFT_IS_CHAIN,
    LookupFirstConfig,
    MeasurementConfig,
    TargetConfig,
    TreeConfig,
)

# Conditions under which a key of `compare` is used. The phrases complete "only used …" in errors.
K_IS_SHARED = Condition(
    "without num_speculative_tokens_each, and with a tree only as the depth of the tree",
    lambda options: not options.num_speculative_tokens_each and DRAFT_IS_CHAIN.holds(options),
)
SETTINGS_ARE_PER_DRAFT = Condition(
    "without lookup_first, which is the lookup of all drafts",
    lambda options: options.lookup_first is None,
)
CHAINS = Condition("without a tree", lambda options: options.tree is None)


class CommonOptions(MeasurementConfig):
    """The keys of `specdistill compare`, without those that methods add (see `CompareOptions`)."""

    target: TargetConfig = section(TargetConfig)
    drafts: list[str] = option(
        ..., "two or more of: draft folders, Hub ids (org/name, org/name@revision), ngram, suffix"
    )
    num_speculative_tokens: int = option(
        4, "K, draft tokens per round", ge=1, condition=K_IS_SHARED
    )
    num_speculative_tokens_each: list[AtLeastOne] = option(
        [],
        "K of each draft, in the order of drafts; []: all use num_speculative_tokens",
        condition=CHAINS,
    )
    trees_each: list[TreeConfig | None] = option(
        [],
        "tree of each draft, in the order of drafts, null for a chain; []: all use the key `tree`",
        condition=CHAINS,
    )
    lookup_first_each: list[LookupFirstConfig | None] = option(
        [],
        "lookup that is tried before each draft, in the order of drafts, null for no lookup; []:"
        " all use the key lookup_first",
        condition=SETTINGS_ARE_PER_DRAFT,
    )
    output_dir: str = option(..., "folder of the comparison and its reports")


# Add to the keys of every comparison those that only some methods read.
KEYS_OF_METHODS: dict[str, Any] = dict(list_method_eval_keys())
CompareOptions: type[CommonOptions] = create_model(
    "CompareOptions", __base__=CommonOptions, **KEYS_OF_METHODS
)


def list_lookups(
    options: CommonOptions, settings: Sequence[Settings]
) -> list[LookupFirstConfig | None]:
    """Return the lookup in front of each draft; None for a draft without a lookup.

    Such a lookup drafts first, and the draft is used if the lookup finds nothing.

    Args:
        options: the keys of `specdistill compare`.
        settings: the settings of each draft (see `list_draft_settings`).

    Raises:
        UserError: for a lookup that does not fit its draft's settings.
    """
    # Each draft has a lookup of its own (lookup_first_each), or all have the same (lookup_first).
    lookups = options.lookup_first_each or [options.lookup_first] * len(settings)
    for lookup, draft_settings in zip(lookups, settings, strict=True):
        if lookup and draft_settings.tree:
            raise UserError(
                "lookup_first_each",
                got="a lookup in front of a draft that has a tree in trees_each or `tree`",
                expected=(
                    "the tree in the lookup's key draft_tree instead, for example"
                    " lookup_first_each=[{draft_tree: {branching: [2, 2]}}, null]; set this draft's"
                    " entry of trees_each to null, or leave `tree` out"
                ),
            )
        if lookup:
            lookup.check(options, draft_settings.num_speculative_tokens)
    return lookups


def list_draft_settings(options: CommonOptions, count: int) -> list[Settings]:
    """Return the settings with which each draft is measured.

    In the returned settings the drafts may differ in K, the number of draft tokens per round, and
    in the tree that they draft. The lookup in front of each draft (`lookup_first_each`) is no part
    of these settings: `list_lookups` returns it.

    Args:
        options: the keys of `specdistill compare`.
        count: the number of drafts.

    Raises:
        UserError: for a key whose number of values differs from the number of drafts.
    """
    # Check all keys that have a value for each draft, that of the lookups included. Such a key must
    # be empty, or have as many values as there are drafts.
    shared = Settings.from_section(options)
    for key in ("num_speculative_tokens_each", "trees_each", "lookup_first_each"):
        if len(getattr(options, key)) not in (0, count):
            raise UserError(
                key,
                got=format_count(len(getattr(options, key)), "value"),
                expected=f"{count}, one for each draft",
            )

    # Choose the tree of each draft: its own, or the one that all drafts share. With a tree, K is
    # the depth of the tree.
    trees = [shared.tree] * count
    if options.trees_each:
        trees = [build_tree_shape(tree) if tree else None for tree in options.trees_each]
    depths = [tree.depth if tree else shared.num_speculative_tokens for tree in trees]
    ks = options.num_speculative_tokens_each or depths
    return [
        replace(shared, num_speculative_tokens=k, tree=tree)
        for k, tree in zip(ks, trees, strict=True)
    ]
