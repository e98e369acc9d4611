"""`specdistill compare`: its keys, and what of them cannot be measured together."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import create_model

from specdistill.comparison.candidates import Candidate
from specdistill.decoding.tree import tree_shape
from specdistill.errors import UserError
from specdistill.measurement.configurations import Settings
from specdistill.methods.ngram.config import LookupFirstConfig
from specdistill.methods.recipe import eval_keys_of_methods
from specdistill.recipe.fields import AtLeastOne, ReadWhen, option, section, shown
from specdistill.recipe.sections import A_CHAIN, MeasurementConfig, TargetConfig, TreeConfig

SAME_K = ReadWhen(
    "without num_speculative_tokens_each, and without a tree or as the depth of that",
    lambda it: not it.num_speculative_tokens_each and A_CHAIN.holds(it),
)
CHAINS = ReadWhen("without a tree", lambda it: it.tree is None)


class CommonOptions(MeasurementConfig):
    target: TargetConfig = section(TargetConfig)
    drafts: list[str] = option(
        ...,
        "two or more: draft folders, Hub ids (org/name, org/name@revision), the word ngram, or ngram+<folder or Hub id> for a draft that "
        "drafts where a look-up finds nothing",
    )
    num_speculative_tokens: int = option(4, "K, draft tokens a round", ge=1, read_when=SAME_K)
    lookup_first: LookupFirstConfig = option(LookupFirstConfig(), "how ngram+<draft> drafts")
    num_speculative_tokens_each: list[AtLeastOne] = option(
        [], "K of each draft, in their order; []: num_speculative_tokens is that of all", read_when=CHAINS
    )
    trees_each: list[TreeConfig | None] = option(
        [], "a tree for each draft, in their order, null for a chain of its K; []: chains", read_when=CHAINS
    )
    output_dir: str = option(..., "where the comparison and the reports go")


KEYS_OF_METHODS: dict[str, Any] = dict(eval_keys_of_methods())
CompareOptions: type[CommonOptions] = create_model("CompareOptions", __base__=CommonOptions, **KEYS_OF_METHODS)


def check_lookup_first(options: CommonOptions, candidates: Sequence[Candidate], settings: Sequence[Settings]) -> None:
    """Raises UserError for its keys where no candidate has a look-up in front of it, and for what cannot be drafted so where one has."""
    if not any(entry.looks_up_first for entry in candidates):
        if options.lookup_first != LookupFirstConfig():
            got = f"keys below it with drafts={shown(options.drafts)}"
            raise UserError("lookup_first", got=got, expected="no such key, or a candidate ngram+<draft>")
        return
    if options.batch_size > 1:
        raise UserError("batch_size", got=f"{options.batch_size} with a candidate ngram+<draft>", expected="1")
    if options.lookup_first.draft_tree:
        tree_shape(**vars(options.lookup_first.draft_tree))
        if options.compile:
            got = "true with lookup_first.draft_tree"
            raise UserError("compile", got=got, expected="false: one shape is compiled, that of a chain")
    for chosen in (chosen for entry, chosen in zip(candidates, settings, strict=True) if entry.looks_up_first):
        if chosen.tree:
            key = "trees_each" if options.trees_each else "tree"
            expected = "null for it: its draft's tree is lookup_first.draft_tree"
            raise UserError(key, got="a tree with a candidate ngram+<draft>", expected=expected)
        if options.lookup_first.levels > chosen.num_speculative_tokens:
            key, of_tree = ("draft_tree", "a tree of depth ") if options.lookup_first.draft_tree else ("draft_tokens", "")
            got = f"{of_tree}{options.lookup_first.levels} with K = {chosen.num_speculative_tokens}"
            raise UserError(f"lookup_first.{key}", got=got, expected="at most K of the candidate ngram+<draft>")


def settings_of_each(options: CommonOptions, count: int) -> list[Settings]:
    """The settings of each draft: they differ in K or tree alone. Raises UserError for another number of these than of drafts."""
    for_all = Settings.of(options)
    for key in ("num_speculative_tokens_each", "trees_each"):
        if len(getattr(options, key)) not in (0, count):
            raise UserError(key, got=f"{len(getattr(options, key))} of them", expected=f"{count}, one for each draft")
    chains = [replace(for_all, num_speculative_tokens=k) for k in options.num_speculative_tokens_each] or [for_all] * count
    trees = [tree_shape(**vars(tree)) if tree else None for tree in options.trees_each] or [for_all.tree] * count
    for k, tree in zip(options.num_speculative_tokens_each, trees, strict=False):
        if tree and tree.depth != k:
            got = f"{k} for a tree of depth {tree.depth}"
            raise UserError("num_speculative_tokens_each", got=got, expected="the depth of the tree")
    return [
        replace(chain, num_speculative_tokens=tree.depth, tree=tree) if tree else chain
        for chain, tree in zip(chains, trees, strict=True)
    ]
