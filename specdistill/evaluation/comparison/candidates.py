"""Locate, name and check the drafts of a comparison, and measure them together."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdistill.common.errors import UserError
from specdistill.decoding.proposer import Proposer
from specdistill.evaluation.comparison.compare import Measured
from specdistill.evaluation.comparison.options import (
    CommonOptions,
    list_draft_settings,
    list_lookups,
)
from specdistill.evaluation.measurement.cache import MeasurementCache, identify_draft
from specdistill.evaluation.measurement.configurations import MeasurementPlan, Settings
from specdistill.evaluation.measurement.hardware import fit_threads
from specdistill.evaluation.measurement.loading import check_measurement
from specdistill.evaluation.measurement.results import Measurement, build_draft_report
from specdistill.evaluation.measurement.runner import measure
from specdistill.evaluation.report.files import compute_digest
from specdistill.evaluation.suites.suite import Suite, count_measured, load_suite, tokenize
from specdistill.methods import METHODS
from specdistill.methods.load import describe_draft, find_method, load_proposer, locate
from specdistill.methods.recipe import list_method_options
from specdistill.methods.target_record import use_recorded_template
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.sharding import count_processes
from specdistill.training.history import read_history

KEY = "drafts"  # the key of the command that names the candidates
# Methods without weights, which a user names in place of a folder.
UNTRAINED_METHODS = [name for name, method in METHODS.items() if not method.is_trained]
# What an error says was expected of an entry of `drafts`.
EXPECTED = f"a draft folder, a Hub id or {' or '.join(UNTRAINED_METHODS)}"


@dataclass(frozen=True)
class Candidate:
    """One draft of a comparison.

    Attributes:
        name: the unique name of the candidate, which is also the name of its report's folder.
        method: the method of the draft.
        draft: the folder or Hub id that the command names; None for a method without weights.
        folder: the local folder of the draft's files; None for a method without weights.
        lookup_first: the lookup in front of the draft; None for no lookup.
    """

    name: str
    method: str
    draft: str | None = None
    folder: Path | None = None
    lookup_first: LookupFirstConfig | None = None


def find_candidates(
    entries: Sequence[str],
    lookups: Sequence[LookupFirstConfig | None] = (),
    settings: Sequence[Settings] = (),
) -> list[Candidate]:
    """Locate the drafts to compare, download those on the Hub, and give each a unique name.

    Args:
        entries: the drafts as the command names them: folders, Hub ids (org/name or
            org/name@revision), and methods without weights (`ngram`, `suffix`).
        lookups: the lookup in front of each draft; () for none. If there is one, the draft's name
            begins with the lookup's method and `+`.
        settings: the settings of each draft; () if all have the same. If a draft occurs again with
            other settings, its name ends with a number.

    Raises:
        UserError: for fewer than two drafts, for a folder without a draft, for two drafts that are
            the same or cannot get different names, and for a lookup in front of a lookup.
        ResourceError: when the Hub fails.
    """
    num_drafts = len(entries)
    if num_drafts < 2:
        raise UserError(KEY, got=f"{num_drafts} drafts", expected="two or more: drafts=[a,b]")

    # Refuse a lookup in front of a draft that is a lookup itself.
    lookup_each = lookups or [None] * num_drafts
    settings_each: Sequence[Settings | None] = settings or [None] * num_drafts
    for entry, lookup in zip(entries, lookup_each, strict=True):
        if lookup and entry in UNTRAINED_METHODS:
            raise UserError(
                "lookup_first_each",
                got=f"a lookup in front of {entry}, which is a lookup itself",
                expected=f"null in the place of {entry}",
            )

    # Locate the drafts, and download those on the Hub.
    folders: list[Path | None] = []
    for entry in entries:
        folder = None
        if entry not in UNTRAINED_METHODS:
            folder = locate(entry, key=KEY, expected=EXPECTED, names=UNTRAINED_METHODS)
        folders.append(folder)

    # Refuse a draft that occurs twice with the same lookup and settings. Draft folders are compared
    # by their resolved paths.
    identities = [
        (folder.resolve() if folder else entry, lookup, draft_settings)
        for folder, entry, lookup, draft_settings in zip(
            folders, entries, lookup_each, settings_each, strict=True
        )
    ]
    for first, second in itertools.combinations(range(num_drafts), 2):
        if identities[first] == identities[second]:
            raise UserError(
                KEY,
                got=f"{entries[first]} and {entries[second]}, which are the same draft",
                expected="different drafts, or other settings, e.g. num_speculative_tokens_each",
            )

    # Name the drafts, and read the method of each.
    prefixes = [f"{lookup.method}+" if lookup else "" for lookup in lookup_each]
    names = _name_candidates(prefixes, entries)
    candidates = []
    for name, entry, folder, lookup in zip(names, entries, folders, lookup_each, strict=True):
        if folder is None:
            candidates.append(Candidate(name, entry))
        else:
            candidates.append(Candidate(name, find_method(folder, key=KEY), entry, folder, lookup))
    return candidates


def _name_candidates(prefixes: Sequence[str], drafts: Sequence[str]) -> list[str]:
    """Give each draft a unique name: a prefix and the end of its path.

    A name has as many parts of the path as it needs to be unique: runs/a/draft and runs/b/draft are
    named a-draft and b-draft. If the same draft occurs a second time, its name ends with -2. Names
    become names of folders, so names that differ only in case count as equal.

    Args:
        prefixes: the beginning of each name, e.g. `ngram+`; an empty string for none.
        drafts: the folders, Hub ids and methods that the command names.

    Raises:
        UserError: if two names are still equal, e.g. those of paths that differ only in case.
    """
    # List the possible names of each draft, from the shortest to the longest: the last part of its
    # path, the last two parts, and so on. The root `/` of a path is left out ([1:]).
    options_each = []
    for prefix, draft in zip(prefixes, drafts, strict=True):
        if Path(draft).is_dir():
            parts = list(Path(draft).resolve().parts[1:])
        else:
            # A Hub id has two parts, org/name. The revision after the name may have slashes, too,
            # e.g. refs/pr/1.
            parts = [part.replace("/", "-") for part in draft.split("/", 1)]
        depths = range(1, len(parts) + 1)
        options_each.append([f"{prefix}{'-'.join(parts[-depth:])}" for depth in depths])

    # Choose the shortest name that is no possible name of another draft. A draft that occurs again
    # has the same possible names, and gets a number.
    names = []
    for index, options in enumerate(options_each):
        names_of_others = set()
        for other_options in options_each:
            if other_options != options:
                names_of_others |= {name.casefold() for name in other_options}
        unique = [name for name in options if name.casefold() not in names_of_others]
        name = unique[0] if unique else options[-1]
        number = options_each[: index + 1].count(options)
        names.append(f"{name}-{number}" if number > 1 else name)

    # Refuse names that are still equal, e.g. those of two paths that differ only in case.
    folded = [name.casefold() for name in names]
    for name in names:
        if folded.count(name.casefold()) > 1:
            raise UserError(
                KEY,
                got=f"two drafts named {name}",
                expected="folders with different names, because reports are named after them",
            )
    return names


def measure_candidates(options: CommonOptions, cache_folder: Path) -> list[Measured]:
    """Measure the drafts (candidates) of a comparison together, and build the report of each.

    Every prompt is decoded with each of the drafts, and also without a draft. So all drafts are
    compared with the same times of plain decoding.

    Args:
        options: the keys of `specdistill compare`.
        cache_folder: the folder of the cache, from which an interrupted comparison resumes.

    Returns:
        The candidates with their reports, in the order of `options.drafts`.

    Raises:
        UserError: if anything is wrong with a candidate, before anything is measured; and if
            several processes were launched, because each would measure and write everything.
    """
    if count_processes() > 1:
        raise UserError(
            "num_processes",
            got=count_processes(),
            text=(
                f"compare runs in one process, but {count_processes()} were started. Run it without"
                " torchrun or another launcher."
            ),
        )

    # Find the candidates, and the settings and options of each.
    settings = list_draft_settings(options, len(options.drafts))
    candidates = find_candidates(options.drafts, list_lookups(options, settings), settings)
    options_each = list_method_options(options, [candidate.method for candidate in candidates])
    suite = load_suite(options.suite, options.target.model)

    # Check the drafts and the suite before weights are loaded.
    folders = [candidate.folder for candidate in candidates if candidate.folder]
    drafts = []
    for candidate, draft_options in zip(candidates, options_each, strict=True):
        if candidate.folder:
            drafts.append((candidate.method, candidate.folder, draft_options))
    check_measurement(TargetFiles.from_config(options.target), drafts, suite, options, key=KEY)

    # Load the target and the drafts.
    target = FrozenTarget.load(**vars(options.target))
    fit_threads(target)
    proposers = []
    for candidate, draft_options in zip(candidates, options_each, strict=True):
        proposer = load_proposer(
            candidate.method,
            candidate.folder,
            target,
            lookup_first=candidate.lookup_first,
            key=KEY,
            compile=options.compile,
            **draft_options,
        )
        proposers.append(proposer)
    use_recorded_template(folders, target.tokenizer, KEY)
    histories = []
    for candidate in candidates:
        histories.append(read_history(candidate.folder, key=KEY) if candidate.folder else None)

    # Measure all drafts together.
    measurements = _measure_together(
        options, suite, target, candidates, proposers, settings, cache_folder
    )

    # Build the report of each draft. The digest shows later whether the report was edited.
    measured = []
    for candidate, proposer, history, measurement in zip(
        candidates, proposers, histories, measurements, strict=True
    ):
        draft = describe_draft(candidate.draft, candidate.method)
        report = build_draft_report(target, proposer, suite, measurement, draft)
        report["digest"] = compute_digest(report, measurement.records)
        training = history.summary() if history else None
        measured.append(Measured(candidate.name, training, report, measurement.records))
    return measured


def _measure_together(
    options: CommonOptions,
    suite: Suite,
    target: FrozenTarget,
    candidates: Sequence[Candidate],
    proposers: Sequence[Proposer],
    settings: Sequence[Settings],
    cache_folder: Path,
) -> list[Measurement]:
    """Measure drafts on the same prompts, all against the same runs of plain decoding.

    Args:
        options: the keys of `specdistill compare`.
        suite: the suite that is measured.
        target: the target.
        candidates: the drafts: their names, methods and folders.
        proposers: the same drafts, loaded into memory.
        settings: the settings of each draft.
        cache_folder: the folder of the cache.

    Returns:
        The measurement of each draft.
    """
    # The settings of the drafts differ only in K and tree, which plain decoding does not use. So
    # plain decoding may have the settings of any draft, here of the first.
    prompts = tokenize(
        suite,
        target.tokenizer,
        num_prompts=count_measured(suite, options.num_prompts),
        max_new_tokens=options.max_new_tokens,
        max_length=target.max_length,
        vocab_size=target.vocab_size,
    )
    plan = MeasurementPlan(settings[0], prompts, settings)

    # The cache identifies a comparison by all of its drafts.
    identities = []
    for candidate, proposer in zip(candidates, proposers, strict=True):
        identities.append(
            identify_draft(target, proposer, suite, method=candidate.method, draft=candidate.draft)
        )
    return measure(
        target,
        proposers,
        suite,
        [plan],
        MeasurementCache(cache_folder, identities),
        num_draws=options.sampling_draws,
    )
