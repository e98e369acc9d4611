"""Compare drafts for one target in one paired run: comparison.json, .md and .html, and each candidate's own report.

python eval/compare.py target=pico drafts=[runs/demo/draft,runs/small/draft,ngram] suite=pico output_dir=runs/comparison
python eval/compare.py target=path/to/model drafts=[org/draft@v1,org/draft@v2] suite=path/to/prompts.jsonl output_dir=runs/comparison
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import create_model

from specdistill.command import check_writable, run
from specdistill.comparison.candidates import Candidate, find_candidates
from specdistill.comparison.compare import Measured, compare
from specdistill.comparison.pages import print_comparison, write_comparison
from specdistill.decoding.transformers_models import check_reads_trees
from specdistill.decoding.tree import tree_shape
from specdistill.errors import ExitCode, UserError
from specdistill.measurement.configurations import Plan, Settings
from specdistill.measurement.hardware import fit_threads, resources_used
from specdistill.measurement.losslessness import greedy_check, sampling_test
from specdistill.measurement.measure import measure_together, prompt_records, round_costs
from specdistill.measurement.measured import MeasuredConfiguration, draft_report
from specdistill.methods.load import describe_draft, load_proposer
from specdistill.methods.ngram.config import LookupFirst
from specdistill.methods.ngram.first import LookupFirstProposer
from specdistill.methods.recipe import eval_keys_of_methods, options_by_method
from specdistill.recipe.fields import AtLeastOne, ReadWhen, option, section, shown
from specdistill.recipe.sections import A_CHAIN, MeasurementConfig, TargetConfig, TreeConfig
from specdistill.suites.suite import load_suite, tokenize
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history

SHORTHANDS = {"target": "target.model"}
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
    lookup_first: LookupFirst = option(LookupFirst(), "how ngram+<draft> drafts")
    num_speculative_tokens_each: list[AtLeastOne] = option(
        [], "K of each draft, in their order; []: num_speculative_tokens is that of all", read_when=CHAINS
    )
    trees_each: list[TreeConfig | None] = option(
        [], "a tree for each draft, in their order, null for a chain of its K; []: chains", read_when=CHAINS
    )
    output_dir: str = option(..., "where the comparison and the reports go")


KEYS_OF_METHODS: dict[str, Any] = dict(eval_keys_of_methods())
CompareOptions: type[CommonOptions] = create_model("CompareOptions", __base__=CommonOptions, **KEYS_OF_METHODS)


def main(options: CommonOptions) -> ExitCode:
    folder = Path(options.output_dir)
    check_writable(folder, "output_dir")
    candidates, suite = find_candidates(options.drafts), load_suite(options.suite, options.target.model)
    settings = settings_of_each(options, len(candidates))
    check_lookup_first(options, candidates, settings)
    drafting = options_by_method(options, [entry.method for entry in candidates])

    # Target, all the drafts, and prompts: whatever is wrong with one of them shows before anything is measured
    target = FrozenTarget.load(**vars(options.target))
    fit_threads(target)
    if options.lookup_first.draft_tree:
        check_reads_trees(target)
    proposers = [
        load_proposer(entry.method, entry.folder, target, key="drafts", **own)
        for entry, own in zip(candidates, drafting, strict=True)
    ]
    proposers = [
        LookupFirstProposer(proposer, options.lookup_first) if entry.looks_up_first else proposer
        for entry, proposer in zip(candidates, proposers, strict=True)
    ]
    histories = [read_history(entry.folder, key="drafts") if entry.folder else None for entry in candidates]
    drafts = [describe_draft(entry.draft, entry.method) for entry in candidates]
    limits: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "num_prompts": options.num_prompts}
    prompts = tokenize(suite, target.tokenizer, max_length=target.max_length, **limits)

    # Measure: every prompt is decoded with all the drafts and once without, so that their times are paired over one baseline
    plans = [Plan(own, prompts) for own in settings]
    with resources_used(target.device) as took:
        runs = measure_together(target, proposers, prompts, *settings)
        results = [
            MeasuredConfiguration(
                prompt_records(suite.name, plan.settings.configuration, target, proposer, own),
                greedy_check(target, proposer, own, plan.settings),
                took,
            )
            for proposer, plan, own in zip(proposers, plans, runs, strict=True)
        ]
        tests = [
            sampling_test(target, proposer, prompts, own, num_draws=options.sampling_draws)
            for proposer, own in zip(proposers, settings, strict=True)
        ]
        # Behind a look-up, how many tokens a round drafts depends on what was found: no round is a shorter one of another.
        costs = [
            [] if entry.looks_up_first else round_costs(target, proposer, prompts, own)
            for entry, proposer, own in zip(candidates, proposers, settings, strict=True)
        ]
    reports = [
        draft_report(target, proposer, suite, [plan], [result], draft=draft, sampling_test=test, costs=cost, took=took)
        for proposer, draft, plan, result, test, cost in zip(proposers, drafts, plans, results, tests, costs, strict=True)
    ]

    # Compare and write
    measured = [
        Measured(
            name=entry.name,
            num_layers=entry.num_layers,
            hidden_size=entry.hidden_size,
            vocabulary=1.0 if proposer.vocabulary is None else len(proposer.vocabulary) / target.vocab_size,
            training=history.summary() if history else None,
            report=report,
            records=result.records,
        )
        for entry, proposer, history, report, result in zip(candidates, proposers, histories, reports, results, strict=True)
    ]
    comparison = compare(measured, seed=options.seed)
    write_comparison(folder, comparison, {entry.name: entry.records for entry in measured})
    print_comparison(comparison, folder)
    return ExitCode.DONE if all(entry["lossless"] for entry in comparison["ranking"]) else ExitCode.CHECK_FAILED


def check_lookup_first(options: CommonOptions, candidates: Sequence[Candidate], settings: Sequence[Settings]) -> None:
    """Raises UserError for its keys where no candidate has a look-up in front of it, and for what cannot be drafted so where one has."""
    if not any(entry.looks_up_first for entry in candidates):
        if options.lookup_first != LookupFirst():
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


if __name__ == "__main__":
    sys.exit(run(main, CompareOptions, shorthands=SHORTHANDS))
