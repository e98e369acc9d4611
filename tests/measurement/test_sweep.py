import json
from dataclasses import asdict, replace

import pytest

from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import DynamicTree, StaticTree
from specdistill.errors import ResourceError, UserError
from specdistill.measurement import sweep
from specdistill.measurement.losslessness import together
from specdistill.measurement.measure import Settings, measure
from specdistill.measurement.sweep import Plan, fingerprint, folder_fingerprint, measure_configurations, plan_configurations
from specdistill.statistics.configuration import Configuration
from specdistill.suites.suite import Prompt
from tests.proposers import ModelProposer, tiny_target
from tests.simulated import SUITE

PROMPTS = [Prompt(f"p{number}", "ab"[number % 2], "x", (20 + number, 30, 40)) for number in range(2)]
MAIN = Plan(Settings(num_speculative_tokens=2, max_new_tokens=6, repeats=1, warmup=0), PROMPTS)
IDENTITY = {"draft": "one"}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def proposer(target):
    return ModelProposer(target.model)


def configurations(plans):
    return [plan.settings.configuration for plan in plans]


def test_one_axis_at_a_time_around_the_main_cell():
    cut = [PROMPTS[0]]
    plans = plan_configurations(
        MAIN, num_speculative_tokens=[1, 2, 3], temperatures=[0, 1], batch_sizes=[1, 2], contexts={64: cut, 32: cut}
    )
    assert configurations(plans) == [
        Configuration(2), Configuration(1), Configuration(3), Configuration(2, 1.0), Configuration(2, batch_size=2), Configuration(2, context_bucket="64"), Configuration(2, context_bucket="32"),
    ]  # fmt: skip
    assert [len(plan.prompts) for plan in plans] == [2, 2, 2, 2, 2, 1, 1]
    assert plans[3].settings == replace(MAIN.settings, sampling=Sampling(1.0))
    assert plan_configurations(MAIN) == [MAIN]


def test_trees_are_swept_with_their_own_depth_and_other_k_are_chains():
    tree, other = DynamicTree(8, 3, 2), StaticTree((2, 1))
    main = Plan(replace(MAIN.settings, num_speculative_tokens=3, tree=tree), PROMPTS)
    found = [plan.settings.configuration for plan in plan_configurations(main, num_speculative_tokens=[3], trees=[tree, other])]
    assert found == [Configuration(3, tree=tree.settings), Configuration(3), Configuration(2, tree=other.settings)]
    with pytest.raises(UserError, match=r"eval\.batch_size: got 2 with a tree"):
        plan_configurations(main, batch_sizes=[2])


@pytest.mark.usefixtures("simulated_clock")
def test_batches_that_stop_early_stay_the_batches_that_they_were(target, proposer, tmp_path):
    """Prompts that were decoded together share their times: what is kept says who they were."""
    prompts = [Prompt(f"p{number}", "ab"[number % 2], "x", (20 + number, 30, 40)) for number in range(40)]
    plan = Plan(replace(MAIN.settings, batch_size=5, max_new_tokens=3), prompts, 0.9)
    (configuration,) = measure_configurations(target, proposer, SUITE, [plan], identity=IDENTITY, folder=tmp_path)
    assert len(configuration.records) < len(prompts)
    for batch in {record.batch for record in configuration.records}:
        together = [
            record.baseline.seconds / record.baseline.num_tokens for record in configuration.records if record.batch == batch
        ]
        assert together == pytest.approx([together[0]] * 5)


def test_the_settings_beside_the_axis_stay():
    main = Plan(replace(MAIN.settings, sampling=Sampling(0.7, 0.9, 5)), PROMPTS)
    assert plan_configurations(main, temperatures=[1.0])[1].settings.sampling == Sampling(1.0, 0.9, 5)


def test_a_finished_cell_is_not_measured_again(target, proposer, tmp_path, monkeypatch):
    plans = plan_configurations(MAIN, num_speculative_tokens=[1], temperatures=[1.0])
    first = measure_configurations(target, proposer, SUITE, plans, identity=IDENTITY, folder=tmp_path)
    assert [record.configuration for configuration in first for record in configuration.records] == [
        configuration for configuration in configurations(plans) for _ in PROMPTS
    ]
    assert [configuration.lossless and configuration.lossless["greedy_identical"] for configuration in first] == [
        True,
        True,
        None,
    ]

    measured = []
    monkeypatch.setattr(sweep, "measure", lambda *arguments: measured.append(arguments[3].configuration) or measure(*arguments))
    assert measure_configurations(target, proposer, SUITE, plans, identity=IDENTITY, folder=tmp_path) == first
    assert measured == []
    (tmp_path / f"{fingerprint(plans[1], IDENTITY)}.json").unlink()
    again = measure_configurations(target, proposer, SUITE, plans, identity=IDENTITY, folder=tmp_path)
    assert measured == [Configuration(1)]
    assert (again[0], again[2]) == (first[0], first[2])
    assert [record.rounds for record in again[1].records] == [record.rounds for record in first[1].records]
    measure_configurations(target, proposer, SUITE, plans, identity={"draft": "two"}, folder=tmp_path)
    assert measured[1:] == configurations(plans)


def test_a_sampled_main_cell_is_decoded_greedily_as_well(target, proposer, tmp_path):
    main = Plan(replace(MAIN.settings, sampling=Sampling(1.0)), PROMPTS)
    (configuration,) = measure_configurations(target, proposer, SUITE, [main], identity=IDENTITY, folder=tmp_path)
    assert configuration.lossless["prompts_checked"] == 2


def test_the_fingerprint_changes_with_all_that_a_cell_depends_on():
    settings = MAIN.settings
    others = [
        Plan(replace(settings, **{name: value}), PROMPTS)
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
    others += [Plan(settings, PROMPTS[:1]), Plan(settings, [replace(PROMPTS[0], token_ids=(1,)), PROMPTS[1]])]
    found = [fingerprint(plan, IDENTITY) for plan in [MAIN, *others]] + [fingerprint(MAIN, {"draft": "two"})]
    assert len(set(found)) == len(found)
    assert fingerprint(Plan(settings, tuple(PROMPTS)), dict(IDENTITY)) == found[0]


def test_a_draft_trained_anew_is_another_draft(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "weights").write_bytes(b"one")
    before = folder_fingerprint(tmp_path)
    assert folder_fingerprint(tmp_path) == before
    (tmp_path / "inner" / "weights").write_bytes(b"two")
    assert folder_fingerprint(tmp_path) != before


def test_a_cell_is_kept_whole_or_not_at_all(target, proposer, tmp_path, monkeypatch):
    def full_disk(source, destination):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sweep.os, "replace", full_disk)
    with pytest.raises(ResourceError, match=r"No space left on device\); free the disk"):
        measure_configurations(target, proposer, SUITE, [MAIN], identity=IDENTITY, folder=tmp_path)
    assert list(tmp_path.glob("*.json")) == []


def test_losslessness_of_several_cells_is_that_of_all_their_texts():
    divergence = {"prompt_id": "p", "position": 1}
    clean = dict.fromkeys(("prompts_checked", "divergences", "near_ties", "unexplained_divergences"), 0)
    clean |= {"greedy_identical": True, "first_divergence": None, "prompts_checked": 4}
    broken = {
        **clean,
        "greedy_identical": False,
        "first_divergence": divergence,
        "divergences": 1,
        "unexplained_divergences": 1,
    }
    assert together([clean, clean]) == {**clean, "prompts_checked": 8}
    assert together([clean, broken]) == {**broken, "prompts_checked": 8}
    assert json.dumps(asdict(Configuration(1, tree={"budget": 3, "depth": 2, "top_k": 2})))


@pytest.mark.usefixtures("simulated_clock")
def test_a_cell_stops_when_it_is_sharp_and_keeps_the_suites_order(target, proposer, tmp_path, monkeypatch):
    prompts = [Prompt(f"p{number}", "ab"[number % 2], "x", (20 + number, 30, 40)) for number in range(60)]
    measured = []
    monkeypatch.setattr(sweep, "measure", lambda *arguments: measured.append(arguments[2:]) or measure(*arguments))
    settings = replace(MAIN.settings, sampling=Sampling(1.0), warmup=1, max_new_tokens=3)
    (configuration,) = measure_configurations(
        target, proposer, SUITE, [Plan(settings, prompts, 0.9)], identity=IDENTITY, folder=tmp_path
    )
    assert [len(fresh) for fresh, _ in measured] == [24]
    assert [record.id for record in configuration.records] == sorted(
        (record.id for record in configuration.records), key=lambda id: int(id[1:])
    )
    assert sum(record.category == "a" for record in configuration.records) == 12

    measured.clear()
    (whole,) = measure_configurations(
        target, proposer, SUITE, [Plan(settings, prompts, 0.001)], identity=IDENTITY, folder=tmp_path
    )
    assert [record.id for record in whole.records] == [prompt.id for prompt in prompts]
    assert [(len(fresh), options.seed, options.warmup) for fresh, options in measured] == [
        (24, 0, 1), (6, 24, 0), (8, 30, 0), (10, 38, 0), (12, 48, 0),
    ]  # fmt: skip
    assert len({fingerprint(Plan(settings, prompts, until), IDENTITY) for until in (None, 0.9, 0.001)}) == 3
