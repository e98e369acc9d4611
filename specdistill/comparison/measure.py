"""The candidates of a comparison, measured together: every prompt is decoded with all the drafts and once without, so that their times are
paired over one baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdistill.comparison.candidates import Candidate, find_candidates
from specdistill.comparison.compare import Measured
from specdistill.comparison.options import CommonOptions, lookups_of_each, settings_of_each
from specdistill.decoding.proposer import Proposer
from specdistill.measurement.configurations import MeasurementPlan, Settings
from specdistill.measurement.hardware import fit_threads, resources_used
from specdistill.measurement.losslessness import generate_greedily, greedy_check, sampling_test
from specdistill.measurement.measure import calibrate, measure_together, prompt_records, round_costs
from specdistill.measurement.measured import MeasuredConfiguration, draft_report
from specdistill.methods.load import describe_draft, load_proposer
from specdistill.methods.recipe import options_by_method
from specdistill.report.files import digest
from specdistill.suites.suite import Prompt, Suite, load_suite, num_measured, tokenize
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import History, read_history


@dataclass(frozen=True)
class LoadedCandidate:
    """A candidate that is ready to draft."""

    candidate: Candidate
    settings: Settings
    proposer: Proposer
    history: History | None


def measure_candidates(options: CommonOptions) -> list[Measured]:
    """Raises UserError for what is wrong with any of them, before anything is measured."""
    settings = settings_of_each(options, len(options.drafts))
    candidates = find_candidates(options.drafts, lookups_of_each(options, settings), settings)
    suite = load_suite(options.suite, options.target.model)
    target = FrozenTarget.load(**vars(options.target))
    fit_threads(target)
    loaded = _loaded(options, candidates, settings, target)
    limits: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "num_prompts": num_measured(suite, options.num_prompts)}
    prompts = tokenize(suite, target.tokenizer, max_length=target.max_length, vocab_size=target.vocab_size, **limits)
    return _measured(target, loaded, suite, prompts, num_draws=options.sampling_draws)


def _loaded(
    options: CommonOptions, candidates: Sequence[Candidate], settings: Sequence[Settings], target: FrozenTarget
) -> list[LoadedCandidate]:
    loaded = []
    drafting = options_by_method(options, [candidate.method for candidate in candidates])
    for candidate, own, keys in zip(candidates, settings, drafting, strict=True):
        own_keys = {"key": "drafts", "lookup_first": candidate.lookup_first, "draft_length": options.draft_length, **keys}
        proposer = load_proposer(candidate.method, candidate.folder, target, **own_keys)
        history = read_history(candidate.folder, key="drafts") if candidate.folder else None
        loaded.append(LoadedCandidate(candidate, own, proposer, history))
    return loaded


def _measured(
    target: FrozenTarget, loaded: Sequence[LoadedCandidate], suite: Suite, prompts: Sequence[Prompt], *, num_draws: int
) -> list[Measured]:
    with resources_used(target.device) as took:
        for entry in loaded:
            calibrate(target, entry.proposer, prompts, entry.settings)
        runs = measure_together(target, [entry.proposer for entry in loaded], prompts, *(entry.settings for entry in loaded))
        results: list[tuple[MeasuredConfiguration, dict[str, Any]]] = []
        generate = generate_greedily(target, loaded[0].settings)
        for entry, own in zip(loaded, runs, strict=True):
            settings, proposer = entry.settings, entry.proposer
            records = prompt_records(suite.name, settings.configuration, target, proposer, own)
            result = MeasuredConfiguration(records, greedy_check(target, proposer, own, settings, generate), took)
            test = sampling_test(target, proposer, prompts, settings, num_draws=num_draws)
            costs = round_costs(target, proposer, prompts, settings)
            results.append((result, {"sampling_test": test, "costs": costs, "took": took}))
    measured = []
    for entry, (result, found) in zip(loaded, results, strict=True):
        candidate, vocabulary, plan = entry.candidate, entry.proposer.vocabulary, MeasurementPlan(entry.settings, prompts)
        draft = describe_draft(candidate.draft, candidate.method)
        report = draft_report(target, entry.proposer, suite, [plan], [result], draft=draft, **found)
        report["digest"] = digest(report, result.records)
        measured.append(
            Measured(
                name=candidate.name,
                num_layers=candidate.num_layers,
                hidden_size=candidate.hidden_size,
                vocabulary=1.0 if vocabulary is None else len(vocabulary) / target.vocab_size,
                training=entry.history.summary() if entry.history else None,
                report=report,
                records=result.records,
            )
        )
    return measured
