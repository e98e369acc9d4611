"""A report held against its records: every number that they determine is computed again, by the code that computed it first.

What they do not determine is left to the digest that was taken when it was measured: losslessness, the costs of rounds of other lengths,
what the measurement took.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdistill.report.build import context_rows, headline, result_rows, theory
from specdistill.statistics.records import PromptRecord
from specdistill.statistics.sample_size import corrected_confidence
from specdistill.suites.suite import Suite

TOLERANCE = 1e-6  # relative: of sums that another version of numpy adds up in another order
OF_SUITE = ("name", "version", "licence", "source", "sha256")


def recomputed(report: Mapping[str, Any], records: Sequence[PromptRecord]) -> dict[str, Any]:
    """The parts of a report that its records, at least one, determine: `results`, `headline`, `context`, and of `theory` what a round at
    K shows.
    """
    settings, suite = report["settings"], Suite(**{name: report["suite"][name] for name in OF_SUITE}, rows=())
    confidence = corrected_confidence(0.95) if settings.get("interim_analyses") else 0.95
    groups: dict[str, list[PromptRecord]] = {}
    for record in records:
        groups.setdefault(repr(record.configuration), []).append(
            record
        )  # a configuration's tree is a mapping, which has no hash
    rows = [
        result_rows(group, suite, group[0].configuration, seed=settings["seed"], confidence=confidence)
        for group in groups.values()
    ]
    main = next(iter(groups.values()))
    parts: dict[str, Any] = {
        "results": [row for of_configuration in rows for row in of_configuration],
        "headline": headline(rows[0], main, confidence=confidence),
        "context": context_rows(main),
    }
    if "theory" in report and (computed := theory(rows[0][0], (), lambda k: k)):
        parts["theory"] = {**report["theory"], **{name: computed[name] for name in ("alpha", "K", "v", "c", "predicted")}}
    return parts


def contradictions(report: Mapping[str, Any], computed: Mapping[str, Any]) -> Iterator[str]:
    """Where a report says something else than what is `recomputed`, in words; nothing for one that was made from its records."""
    for name, part in computed.items():
        yield from _differences(name, report.get(name), part)


def defects(records: Sequence[PromptRecord], settings: Mapping[str, Any]) -> Iterator[str]:
    """Where records are none that decoding leaves, in words. settings: the report's."""
    seen: set[tuple[str, str]] = set()
    for record in records:
        if (key := (record.id, repr(record.configuration))) in seen:
            yield f"{record.id} is there twice"
        seen.add(key)
        for wrong in _defects(record, settings):
            yield f"{record.id}: {wrong}"


def _defects(record: PromptRecord, settings: Mapping[str, Any]) -> Iterator[str]:
    at, tokens, plain = record.configuration, record.token_ids, record.baseline
    chains_only = at.tree is None and "draft_tree" not in settings.get("drafting", {})
    for number, entry in enumerate(record.rounds, start=1):
        accepted = len(entry.accepted)
        if entry.accepted != entry.drafted[:accepted] or entry.accepted != entry.emitted[:accepted]:
            yield f"round {number} accepted what was not drafted or not emitted"
        elif len(entry.emitted) - accepted not in (0, 1) or (len(entry.drafted) > at.num_speculative_tokens):
            yield f"round {number} has more tokens than K = {at.num_speculative_tokens} allows"
        elif chains_only and entry.num_off_path:
            yield f"round {number} of a chain has other branches"
        elif (
            chains_only
            and accepted < min(len(entry.drafted), len(entry.emitted))
            and (entry.drafted[accepted] == entry.emitted[accepted])
        ):
            yield f"round {number} rejected the target's own token"
        elif (len(entry.drafted_text), len(entry.emitted_text)) != (len(entry.drafted), len(entry.emitted)):
            yield f"round {number} has other texts than tokens"
    counted: dict[str, tuple[int | None, int]] = {
        "tokens": (record.speculative.num_tokens, len(tokens) if tokens else record.speculative.num_tokens)
    }
    if record.counts is None:
        counted["rounds"] = (record.speculative.num_rounds, len(record.rounds))
    else:
        counted["accepted tokens"] = (record.counts.num_accepted_tokens, sum(record.counts.accepted_per_position))
    for what, (said, held) in counted.items():
        if said != held:
            yield f"it says {said} {what} and has {held}"
    for timing in (record.speculative, plain):
        if timing and not (1 <= timing.num_tokens <= settings["max_new_tokens"] and timing.seconds > 0):
            yield f"{timing.num_tokens} tokens in {timing.seconds} s, where {settings['max_new_tokens']} were asked for"


def _differences(place: str, stated: Any, computed: Any) -> Iterator[str]:
    """Reasons under `not_measured` are words, which a version may choose anew; all else must be equal."""
    if isinstance(computed, Mapping) and isinstance(stated, Mapping):
        for name in sorted((computed.keys() | stated.keys()) - {"not_measured"}):
            if name not in stated or name not in computed:
                yield f"{place}.{name} is {'missing' if name in computed else 'more than its records show'}"
            else:
                yield from _differences(f"{place}.{name}", stated[name], computed[name])
    elif isinstance(computed, Sequence) and isinstance(stated, Sequence) and not isinstance(computed, str):
        if len(stated) != len(computed):
            yield f"{place} has {len(stated)} entries, its records make {len(computed)}"
        else:
            for index, pair in enumerate(zip(stated, computed, strict=True)):
                yield from _differences(f"{place}[{index}]", *pair)
    elif isinstance(computed, float) and isinstance(stated, int | float):
        if not math.isclose(stated, computed, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            yield f"{place} is {stated:g}, its records make {computed:g}"
    elif stated != computed:
        yield f"{place} is {stated}, its records make {computed}"
