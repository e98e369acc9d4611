"""`specdistill compare`: its keys, and what of them cannot be measured together."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import create_model

from specdistill.comparison.candidates import LOOKUP_FIRST, Candidate
from specdistill.decoding.tree import tree_shape
from specdistill.errors import UserError
from specdistill.measurement.configurations import Settings
from specdistill.methods.ngram.config import LookupFirstConfig
from specdistill.methods.recipe import eval_keys_of_methods
from specdistill.recipe.fields import AtLeastOne, ReadWhen, option, section
from specdistill.recipe.sections import A_CHAIN, MeasurementConfig, TargetConfig, TreeConfig

SAME_K = ReadWhen(
    "without num_speculative_tokens_each, and without a tree or as the depth of that",
    lambda it: not it.num_speculative_tokens_each and A_CHAIN.holds(it),
)
CHAINS = ReadWhen("without a tree", lambda it: it.tree is None)
LOOKED_UP_FIRST = ReadWhen(
    "with a candidate ngram+<draft>", lambda it: any(draft.startswith(LOOKUP_FIRST) for draft in it.drafts)
)


class CommonOptions(MeasurementConfig):
    target: TargetConfig = section(TargetConfig)
    drafts: list[str] = option(
        ...,
        "two or more: draft folders, Hub ids (org/name, org/name@revision), the word ngram, or ngram+<folder or Hub id> for a draft that "
        "drafts where an n-gram lookup finds nothing",
    )
    num_speculative_tokens: int = option(4, "K, draft tokens per round", ge=1, read_when=SAME_K)
    lookup_first: LookupFirstConfig = option(LookupFirstConfig(), "how ngram+<draft> drafts", read_when=LOOKED_UP_FIRST)
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
    """Raises UserError for a draft that would draft more than K where the n-gram lookup finds nothing, or a tree of a compiled target."""
    first = options.lookup_first
    if first.draft_tree and options.compile:
        got = "true with lookup_first.draft_tree"
        raise UserError("compile", got=got, expected="false: one shape is compiled, that of a chain")
    for entry, chosen in zip(candidates, settings, strict=True):
        if entry.looks_up_first and first.levels > chosen.num_speculative_tokens:
            key, of_tree = ("draft_tree", "a tree of depth ") if first.draft_tree else ("draft_tokens", "")
            got = f"{of_tree}{first.levels} with K = {chosen.num_speculative_tokens}"
            raise UserError(f"lookup_first.{key}", got=got, expected="at most K of the candidate ngram+<draft>")


def settings_of_each(options: CommonOptions, count: int) -> list[Settings]:
    """The settings of each draft: they differ in K or tree alone. Raises UserError for another number of these than of drafts."""
    for_all = Settings.of(options)
    for key in ("num_speculative_tokens_each", "trees_each"):
        if len(getattr(options, key)) not in (0, count):
            raise UserError(key, got=f"{len(getattr(options, key))} of them", expected=f"{count}, one for each draft")
    trees = [tree_shape(**vars(tree)) if tree else None for tree in options.trees_each] or [for_all.tree] * count
    depths = [tree.depth if tree else for_all.num_speculative_tokens for tree in trees]
    each = zip(options.num_speculative_tokens_each or depths, trees, strict=True)
    return [replace(for_all, num_speculative_tokens=k, tree=tree) for k, tree in each]
