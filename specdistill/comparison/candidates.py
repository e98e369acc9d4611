"""The drafts of a comparison: located, named and checked to be different before anything is loaded, then measured together."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdistill.comparison.compare import Measured
from specdistill.comparison.options import CommonOptions, lookups_of_each, settings_of_each
from specdistill.errors import UserError, nearest
from specdistill.measurement.configurations import MeasurementPlan
from specdistill.measurement.hardware import fit_threads, resources_used
from specdistill.measurement.losslessness import generate_greedily, greedy_check, sampling_test
from specdistill.measurement.measure import calibrate, measure_together, prompt_records, round_costs
from specdistill.measurement.measured import MeasuredConfiguration, Measurement, draft_report
from specdistill.methods import METHODS
from specdistill.methods.load import describe_draft, load_proposer, locate, method_of
from specdistill.methods.recipe import options_by_method
from specdistill.methods.target_record import use_recorded_template
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.report.files import digest
from specdistill.repositories import split_revision
from specdistill.suites.suite import load_suite, num_measured, tokenize
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history

KEY = "drafts"
UNTRAINED = [
    name for name, method in METHODS.items() if not method.is_trained
]  # named in place of a folder


@dataclass(frozen=True)
class Candidate:
    """One draft. draft: its folder or Hub id as given; folder: of its files; both are None for a method without a draft. lookup_first: what
    stands in front of the draft.
    """

    name: str
    method: str
    draft: str | None = None
    folder: Path | None = None
    lookup_first: LookupFirstConfig | None = None


def find_candidates(
    entries: Sequence[str],
    lookups: Sequence[LookupFirstConfig | None] = (),
    shapes: Sequence[Any] = (),
) -> list[Candidate]:
    """Candidates with unique names, from folders, Hub ids (org/name or org/name@revision) and methods without a draft (`ngram`, `suffix`).

    lookups: what stands in front of each; (): nothing. A candidate behind one has its method and `+` in front of its name. shapes: the
    settings that each drafts with; (): the same for all. A draft that is there once more, with others, has a number after its name.

    Raises UserError for fewer than two, for a folder without a draft, for two that are the same or of one name, and for a lookup in front
    of another; ResourceError when the Hub fails.
    """
    if len(entries) < 2:
        raise UserError(KEY, got=f"{len(entries)} of them", expected="two or more: drafts=[a,b]")
    lookups, shapes = lookups or [None] * len(entries), shapes or [None] * len(entries)
    for entry, lookup in zip(entries, lookups, strict=True):
        if lookup and entry in UNTRAINED:
            got = f"a lookup in front of {entry}, which is one itself"
            raise UserError(
                "lookup_first_each",
                got=got,
                expected="null for it, and a section for each draft behind a lookup",
            )
    folders = [None if entry in UNTRAINED else _locate(entry) for entry in entries]
    for one, two in itertools.combinations(range(len(entries)), 2):
        first, second = folders[one], folders[two]
        same = (
            first.resolve() == second.resolve()
            if first and second
            else entries[one] == entries[two]
        )
        if same and lookups[one] == lookups[two] and shapes[one] == shapes[two]:
            got = f"{entries[one]} and {entries[two]}, which are the same draft"
            raise UserError(
                KEY,
                got=got,
                expected="different candidates, or different settings for them (…_each)",
            )
    prefixes = [f"{lookup.method}+" if lookup else "" for lookup in lookups]
    return [
        Candidate(name, method_of(folder, key=KEY), entry, folder, lookup)
        if folder
        else Candidate(name, entry)
        for name, entry, folder, lookup in zip(
            _names(prefixes, entries), entries, folders, lookups, strict=True
        )
    ]


def measure_candidates(options: CommonOptions) -> list[Measured]:
    """The candidates measured together: every prompt is decoded with all the drafts and once without, so that their times are paired over
    one baseline. Raises UserError for what is wrong with any of them, before anything is measured.
    """
    settings = settings_of_each(options, len(options.drafts))
    candidates = find_candidates(options.drafts, lookups_of_each(options, settings), settings)
    suite = load_suite(options.suite, options.target.model)
    target = FrozenTarget.load(**vars(options.target))
    fit_threads(target)
    of_all: dict[str, Any] = {
        "key": KEY,
        "draft_length": options.draft_length,
        "compile": options.compile,
    }
    proposers = [
        load_proposer(
            one.method, one.folder, target, lookup_first=one.lookup_first, **of_all, **keys
        )
        for one, keys in zip(
            candidates, options_by_method(options, [one.method for one in candidates]), strict=True
        )
    ]
    use_recorded_template([one.folder for one in candidates if one.folder], target.tokenizer, KEY)
    histories = [read_history(one.folder, key=KEY) if one.folder else None for one in candidates]
    room = {
        "max_new_tokens": options.max_new_tokens,
        "max_length": target.max_length,
        "vocab_size": target.vocab_size,
    }
    prompts = tokenize(
        suite, target.tokenizer, num_prompts=num_measured(suite, options.num_prompts), **room
    )
    MeasurementPlan(settings[0], prompts)  # refuses fewer than a batch

    with resources_used(target.device) as took:
        for proposer, own in zip(proposers, settings, strict=True):
            calibrate(target, proposer, prompts, own)
        runs = measure_together(target, proposers, prompts, *settings)
        generate = generate_greedily(target, settings[0])
        found = []
        for proposer, own, decoded in zip(proposers, settings, runs, strict=True):
            records = prompt_records(suite.name, own.configuration, target, proposer, decoded)
            result = MeasuredConfiguration(
                records, greedy_check(target, proposer, decoded, own, generate), took
            )
            test = sampling_test(target, proposer, prompts, own, num_draws=options.sampling_draws)
            found.append(
                Measurement(own, [result], test, round_costs(target, proposer, prompts, own), took)
            )

    measured = []
    for one, proposer, history, of_one in zip(candidates, proposers, histories, found, strict=True):
        report, records = (
            draft_report(target, proposer, suite, of_one, describe_draft(one.draft, one.method)),
            of_one.records,
        )
        report["digest"] = digest(report, records)
        measured.append(Measured(one.name, history.summary() if history else None, report, records))
    return measured


def _locate(entry: str) -> Path:
    """The folder of an entry: the entry itself, or the Hub's files in the local cache."""
    if entry and Path(entry).is_dir():  # Path("") is the working directory
        return Path(entry)
    expected = f"a draft folder, a Hub id or {' or '.join(UNTRAINED)}"
    if entry.startswith((".", "/", "~")) or split_revision(entry)[0].count("/") != 1:
        got = f"{entry or 'an empty name'}, which is no folder"
        raise UserError(KEY, got=got, expected=expected, nearest=nearest(entry, UNTRAINED))
    return locate(entry, key=KEY, expected=expected)


def _names(prefixes: Sequence[str], drafts: Sequence[str]) -> list[str]:
    """Each draft's prefix and last part, with as many parts before it as make it unique: runs/a/draft -> a-draft; the second of one draft
    has -2 behind it.

    Names become folders, so they are compared without case.
    """
    paths = [
        Path(draft).resolve().parts[1:]
        if Path(draft).is_dir()
        else tuple(
            part.replace("/", "-") for part in draft.split("/", 1)
        )  # a revision may hold slashes, e.g. refs/pr/1
        for draft in drafts
    ]
    # Of each, from the shortest on.
    each = [
        [f"{prefix}{'-'.join(path[-depth:])}" for depth in range(1, len(path) + 1)]
        for prefix, path in zip(prefixes, paths, strict=True)
    ]
    names = []
    for place, own in enumerate(each):
        taken = {name.casefold() for other in each if other != own for name in other}
        name, number = (
            next((name for name in own if name.casefold() not in taken), own[-1]),
            each[: place + 1].count(own),
        )
        names.append(f"{name}-{number}" if number > 1 else name)
    folded = [name.casefold() for name in names]
    if double := next((name for name in names if folded.count(name.casefold()) > 1), None):
        got = f"{double}, the name of two of them"
        raise UserError(
            KEY, got=got, expected="folders of different names, which their reports get"
        )
    return names
