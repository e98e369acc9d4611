"""The candidates of a comparison, measured together: every prompt is decoded with all the drafts and once without, so that their times are
paired over one baseline.
"""

from typing import Any

from specdistill.comparison.candidates import find_candidates
from specdistill.comparison.compare import Measured
from specdistill.comparison.options import CommonOptions, lookups_of_each, settings_of_each
from specdistill.measurement.configurations import MeasurementPlan
from specdistill.measurement.hardware import fit_threads, resources_used
from specdistill.measurement.losslessness import generate_greedily, greedy_check, sampling_test
from specdistill.measurement.measure import calibrate, measure_together, prompt_records, round_costs
from specdistill.measurement.measured import MeasuredConfiguration, Measurement, draft_report
from specdistill.methods.load import describe_draft, load_proposer
from specdistill.methods.recipe import options_by_method
from specdistill.methods.target_record import use_recorded_template
from specdistill.report.files import digest
from specdistill.suites.suite import load_suite, num_measured, tokenize
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history


def measure_candidates(options: CommonOptions) -> list[Measured]:
    """Raises UserError for what is wrong with any of them, before anything is measured."""
    settings = settings_of_each(options, len(options.drafts))
    candidates = find_candidates(options.drafts, lookups_of_each(options, settings), settings)
    suite = load_suite(options.suite, options.target.model)
    target = FrozenTarget.load(**vars(options.target))
    fit_threads(target)
    of_all: dict[str, Any] = {"key": "drafts", "draft_length": options.draft_length, "compile": options.compile}
    proposers = [
        load_proposer(one.method, one.folder, target, lookup_first=one.lookup_first, **of_all, **keys)
        for one, keys in zip(candidates, options_by_method(options, [one.method for one in candidates]), strict=True)
    ]
    use_recorded_template([one.folder for one in candidates if one.folder], target.tokenizer, "drafts")
    histories = [read_history(one.folder, key="drafts") if one.folder else None for one in candidates]
    room = {"max_new_tokens": options.max_new_tokens, "max_length": target.max_length, "vocab_size": target.vocab_size}
    prompts = tokenize(suite, target.tokenizer, num_prompts=num_measured(suite, options.num_prompts), **room)
    MeasurementPlan(settings[0], prompts)  # refuses fewer than a batch

    with resources_used(target.device) as took:
        for proposer, own in zip(proposers, settings, strict=True):
            calibrate(target, proposer, prompts, own)
        runs = measure_together(target, proposers, prompts, *settings)
        generate = generate_greedily(target, settings[0])
        found = []
        for proposer, own, decoded in zip(proposers, settings, runs, strict=True):
            records = prompt_records(suite.name, own.configuration, target, proposer, decoded)
            result = MeasuredConfiguration(records, greedy_check(target, proposer, decoded, own, generate), took)
            test = sampling_test(target, proposer, prompts, own, num_draws=options.sampling_draws)
            found.append(Measurement(own, [result], test, round_costs(target, proposer, prompts, own), took))

    measured = []
    for one, proposer, history, of_one in zip(candidates, proposers, histories, found, strict=True):
        report, records = draft_report(target, proposer, suite, of_one, describe_draft(one.draft, one.method)), of_one.records
        report["digest"] = digest(report, records)
        measured.append(Measured(one.name, history.summary() if history else None, report, records))
    return measured
