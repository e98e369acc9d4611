"""Finished configurations are found again, by all that they depend on."""

from dataclasses import replace

import pytest

from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import StaticTree
from specdistill.errors import ResourceError
from specdistill.measurement.configurations import MeasurementPlan, Settings
from specdistill.measurement.measured import (
    FinishedConfigurations,
    MeasuredConfiguration,
    fingerprint,
    measurement_identity,
)
from specdistill.report import files
from specdistill.statistics.records import Configuration
from specdistill.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget
from tests.proposers import ngram_proposer
from tests.simulated import SUITE, simulate

PROMPTS = [
    Prompt(f"p{number}", "ab"[number % 2], "x", (20 + number, 30, 40)) for number in range(2)
]
MAIN = MeasurementPlan(
    Settings(num_speculative_tokens=2, max_new_tokens=6, repeats=1, warmup=0), PROMPTS
)
IDENTITY = {"draft": "one"}
MEASURED = MeasuredConfiguration(
    simulate(2), [None, {"position": 1}], {"seconds": 1.5, "peak_memory_bytes": 7}
)


def test_a_finished_configuration_is_read_back_equal(tmp_path):
    store = FinishedConfigurations(tmp_path / "configurations", IDENTITY)
    other = replace(MEASURED, compared=[])
    assert (
        store.measured(MAIN, lambda _: MEASURED)
        == store.measured(MAIN, lambda _: other)
        == MEASURED
    )
    assert store.measured(replace(MAIN, prompts=PROMPTS[:1]), lambda _: other) == other
    assert (
        FinishedConfigurations(tmp_path / "configurations", {"draft": "two"}).measured(
            MAIN, lambda _: other
        )
        == other
    )


def test_a_tree_is_read_back_too(tmp_path):
    tree = StaticTree((2, 1))
    records = [
        replace(record, configuration=Configuration(2, tree=tree.settings))
        for record in MEASURED.records
    ]
    plan, measured = (
        MeasurementPlan(replace(MAIN.settings, tree=tree), PROMPTS),
        replace(MEASURED, records=records),
    )
    store = FinishedConfigurations(tmp_path, IDENTITY)
    assert (
        store.measured(plan, lambda _: measured)
        == store.measured(plan, lambda _: MEASURED)
        == measured
    )


def test_the_identity_names_target_draft_suite_and_machine(tmp_path):
    target = FrozenTarget.load("pico")

    def identity(draft=None, **options):
        return measurement_identity(
            target, ngram_proposer(**options), SUITE, method="ngram", draft=draft
        )

    assert identity() == identity(max=3) != identity(max=4)
    assert fingerprint(MAIN, identity()) != fingerprint(MAIN, identity(max=4))
    (tmp_path / "weights").write_bytes(b"one")
    before = identity(str(tmp_path))
    (tmp_path / "weights").write_bytes(b"two")  # the draft is trained again
    assert identity() != before != identity(str(tmp_path))


def test_the_fingerprint_changes_with_all_that_a_configuration_depends_on():
    settings = MAIN.settings
    others = [
        MeasurementPlan(replace(settings, **{name: value}), PROMPTS)
        for name, value in {
            "num_speculative_tokens": 3,
            "max_new_tokens": 7,
            "sampling": Sampling(0.0, 0.9),
            "repeats": 2,
            "warmup": 1,
            "seed": 1,
            "context_bucket": "64",
        }.items()
    ]
    others += [
        MeasurementPlan(settings, PROMPTS[:1]),
        MeasurementPlan(settings, [replace(PROMPTS[0], token_ids=(1,)), PROMPTS[1]]),
    ]
    found = [fingerprint(plan, IDENTITY) for plan in [MAIN, *others]] + [
        fingerprint(MAIN, {"draft": "two"})
    ]
    assert len(set(found)) == len(found)
    assert fingerprint(MeasurementPlan(settings, tuple(PROMPTS)), dict(IDENTITY)) == found[0]


def test_a_configuration_is_stored_whole_or_not_at_all(tmp_path, monkeypatch):
    def full_disk(source, destination):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full_disk)
    with pytest.raises(ResourceError, match="No space left on device"):
        FinishedConfigurations(tmp_path, IDENTITY).measured(MAIN, lambda _: MEASURED)
    assert list(tmp_path.glob("*.json")) == []
