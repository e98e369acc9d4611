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


def contradictions(report: Mapping[str, Any], records: Sequence[PromptRecord]) -> Iterator[str]:
    """Where a report says something else than its records, in words; nothing for one that was made from them."""
    for name, computed in recomputed(report, records).items():
        yield from _differences(name, report.get(name), computed)


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
