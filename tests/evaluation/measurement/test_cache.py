"""Finished configurations and decoded batches are found again, by all that they depend on."""

from dataclasses import replace

import pytest

from specdistill.common.errors import ResourceError
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.sequence import Generation, Round
from specdistill.decoding.tree import StaticTree
from specdistill.evaluation.measurement.cache import (
    MeasurementCache,
    discard_cache,
    identify_draft,
)
from specdistill.evaluation.measurement.configurations import MeasurementPlan, Settings
from specdistill.evaluation.measurement.prompt_runs import sum_seconds
from specdistill.evaluation.measurement.results import ConfigurationResult, DraftResult
from specdistill.evaluation.report import files
from specdistill.evaluation.statistics.records import Configuration
from specdistill.evaluation.suites.suite import Prompt
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
RESULT = ConfigurationResult(
    [DraftResult(simulate(2), [None, {"prompt_id": "a", "position": 1}])],
    {"seconds": 1.5, "peak_memory_bytes": 7},
)
BATCHES = [
    [
        [Generation((1, 2), (3, 4), (Round((4,), 1, (4,), 0.1, 0.2),), 0.5, 0.75 + number, False)],
        [Generation((1, 2), (3, 4), (), 0.25, 0.5, True)],
    ]
    for number in range(3)
]


def test_a_finished_configuration_is_read_back_equal(tmp_path):
    folder = tmp_path / "configurations"
    cache = MeasurementCache(folder, IDENTITY)
    fingerprint = cache.compute_fingerprint(MAIN)
    assert cache.load_result(fingerprint) is None
    cache.save_result(fingerprint, RESULT)
    assert cache.load_result(fingerprint) == RESULT
    assert cache.load_result(cache.compute_fingerprint(replace(MAIN, prompts=PROMPTS[:1]))) is None
    other = MeasurementCache(folder, {"draft": "two"})
    assert other.load_result(other.compute_fingerprint(MAIN)) is None


def test_a_configuration_with_a_tree_is_read_back_equal(tmp_path):
    tree = StaticTree((2, 1))
    records = [
        replace(record, configuration=Configuration(2, tree=tree.settings))
        for record in RESULT.drafts[0].records
    ]
    result = replace(RESULT, drafts=[replace(RESULT.drafts[0], records=records)])
    cache = MeasurementCache(tmp_path, IDENTITY)
    fingerprint = cache.compute_fingerprint(
        MeasurementPlan(replace(MAIN.settings, tree=tree), PROMPTS)
    )
    cache.save_result(fingerprint, result)
    assert cache.load_result(fingerprint) == result


def test_decoded_batches_are_read_back_without_a_truncated_one(tmp_path):
    cache = MeasurementCache(tmp_path, IDENTITY)
    fingerprint = cache.compute_fingerprint(MAIN)
    assert cache.load_batches(fingerprint) == []
    for batch in BATCHES[:2]:
        cache.append_batch(fingerprint, batch)
    assert cache.load_batches(fingerprint) == BATCHES[:2]
    path = tmp_path / f"{fingerprint}.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert cache.load_batches(fingerprint) == BATCHES[:1]
    cache.append_batch(fingerprint, BATCHES[2])
    assert cache.load_batches(fingerprint) == [BATCHES[0], BATCHES[2]]
    assert sum_seconds(BATCHES[:2]) == 0.75 + 0.5 + 1.75 + 0.5


def test_a_finished_configuration_takes_the_place_of_its_batches(tmp_path):
    folder = tmp_path / "configurations"
    cache = MeasurementCache(folder, IDENTITY)
    fingerprint = cache.compute_fingerprint(MAIN)
    cache.append_batch(fingerprint, BATCHES[0])
    cache.save_result(fingerprint, RESULT)
    assert [path.name for path in folder.iterdir()] == [f"{fingerprint}.json"]
    (folder / "mine.json").write_text("{}")
    discard_cache(folder)
    assert [path.name for path in folder.iterdir()] == ["mine.json"]
    (folder / "mine.json").unlink()
    discard_cache(folder)
    assert not folder.exists()


def test_without_a_folder_nothing_is_kept():
    cache = MeasurementCache(None)
    fingerprint = cache.compute_fingerprint(MAIN)
    cache.append_batch(fingerprint, BATCHES[0])
    cache.save_result(fingerprint, RESULT)
    assert cache.load_batches(fingerprint) == []
    assert cache.load_result(fingerprint) is None


def test_the_identity_names_target_draft_suite_and_machine(tmp_path):
    target = FrozenTarget.load("pico")

    def build_identity(draft=None, **options):
        return identify_draft(target, ngram_proposer(**options), SUITE, method="ngram", draft=draft)

    assert build_identity() == build_identity(max=3) != build_identity(max=4)
    fingerprints = [
        MeasurementCache(None, own_identity).compute_fingerprint(MAIN)
        for own_identity in (build_identity(), build_identity(max=4))
    ]
    assert fingerprints[0] != fingerprints[1]
    (tmp_path / "weights").write_bytes(b"one")
    before = build_identity(str(tmp_path))
    (tmp_path / "weights").write_bytes(b"two")  # the draft is trained again
    assert build_identity() != before != build_identity(str(tmp_path))


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
    others += [
        MeasurementPlan(settings, PROMPTS, [replace(settings, num_speculative_tokens=k), settings])
        for k in (3, 4)
    ]
    cache = MeasurementCache(None, IDENTITY)
    fingerprints = [cache.compute_fingerprint(plan) for plan in [MAIN, *others]]
    fingerprints.append(MeasurementCache(None, {"draft": "two"}).compute_fingerprint(MAIN))
    assert len(set(fingerprints)) == len(fingerprints)
    same_cache = MeasurementCache(None, dict(IDENTITY))
    assert (
        same_cache.compute_fingerprint(MeasurementPlan(settings, tuple(PROMPTS))) == fingerprints[0]
    )


def test_a_configuration_is_stored_whole_or_not_at_all(tmp_path, monkeypatch):
    def fail_on_full_disk(source, destination):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", fail_on_full_disk)
    cache = MeasurementCache(tmp_path, IDENTITY)
    with pytest.raises(ResourceError, match="No space left on device"):
        cache.save_result(cache.compute_fingerprint(MAIN), RESULT)
    assert list(tmp_path.glob("*.json")) == []
