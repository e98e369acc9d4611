"""Prompts that are decoded again: the same, however they were decoded, and not the same for another draft."""

from dataclasses import replace

import pytest

from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import tree_shape
from specdistill.measurement.configurations import Settings
from specdistill.measurement.hardware import hardware, software
from specdistill.measurement.measure import prompt_records
from specdistill.measurement.spot_check import spot_check
from specdistill.methods.draft_model.proposer import DraftModelProposer
from specdistill.statistics.metrics import METRICS, prompt_sums, value
from specdistill.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget
from tests.draft_models import half_right, tiny_draft_model
from tests.measuring import measure
from tests.tiny import tiny_target_model, tiny_tokenizer

PROMPTS = [Prompt(f"p{number}", "ab"[number % 2], "x", (20 + number, *range(30, 31 + number))) for number in range(5)]
ALONE = Settings(num_speculative_tokens=3, max_new_tokens=10, repeats=1, warmup=0)
WAYS = {
    "greedy": ALONE,
    "sampled": replace(ALONE, sampling=Sampling(0.8), seed=7),
    "in batches": replace(ALONE, sampling=Sampling(0.8), batch_size=2),
    "trees": replace(ALONE, tree=tree_shape(budget=6, depth=3, top_k=2)),
}


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")


def report_of(target, proposer, *, cpu=None):
    machine = hardware(target.device)
    return {
        "hardware": machine | ({"cpu": cpu} if cpu else {}),
        "software": software(),
        "settings": {"seed": 0, "num_speculative_tokens": 3, "drafting": dict(proposer.settings)},
        "draft": {"parameters": proposer.num_parameters, "bytes": proposer.num_bytes},
        "lossless": {},
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_few_prompts_are_decoded_the_same(target, way):
    proposer, settings = DraftModelProposer(half_right(target)), WAYS[way]
    records = prompt_records("s", settings.configuration, target, proposer, measure(target, proposer, PROMPTS, settings))
    check = spot_check(target, proposer, PROMPTS, settings, report_of(target, proposer), records, num_prompts=3)
    assert check.is_exact and check.differences == []
    assert len(check.prompts) in (3, 4)  # whole batches, the last of which has one prompt
    assert check.lossless["prompts_checked"] == len(check.prompts) and check.lossless["unexplained_divergences"] == 0


def test_another_draft_shows(target):
    proposer, other = DraftModelProposer(half_right(target)), DraftModelProposer(tiny_draft_model(target.vocab_size, seed=1))
    records = prompt_records("s", ALONE.configuration, target, proposer, measure(target, proposer, PROMPTS, ALONE))
    here = spot_check(target, other, PROMPTS, ALONE, report_of(target, proposer), records, num_prompts=2)
    assert "the report's draft has 181,312 parameters, this one" in here.differences[0]
    assert here.differences[-1].endswith("is decoded otherwise than recorded, in round 1")
    elsewhere = report_of(target, other, cpu="Another 9000")
    (said,) = spot_check(target, other, PROMPTS, ALONE, elsewhere, records, num_prompts=5).differences
    assert said.startswith("acceptance length 1.0")


def test_completions_that_the_draft_changed_come_first(target):
    proposer = DraftModelProposer(half_right(target))
    records = prompt_records("s", ALONE.configuration, target, proposer, measure(target, proposer, PROMPTS, ALONE))
    records[3] = replace(records[3], baseline_text="what the target says alone")
    check = spot_check(target, proposer, PROMPTS, ALONE, report_of(target, proposer), records, num_prompts=1)
    assert check.prompts == ["p3"]
    assert check.differences == ["p3 is decoded otherwise than recorded, in its completion"]


def test_a_tenth_more_accepted_tokens_show_on_another_machine(target):
    proposer = DraftModelProposer(half_right(target))
    records = prompt_records("s", ALONE.configuration, target, proposer, measure(target, proposer, PROMPTS, ALONE))
    most = [max(record.rounds, key=lambda entry: len(entry.accepted)) for record in records]
    more = [replace(record, rounds=(*record.rounds, entry)) for record, entry in zip(records, most, strict=True)]
    lengths = [value(METRICS["mean_acceptance_length"], prompt_sums(found)) for found in (records, more)]
    assert 0.85 < lengths[0] / lengths[1] < 0.94
    elsewhere = report_of(target, proposer, cpu="Another 9000")
    assert len(spot_check(target, proposer, PROMPTS, ALONE, elsewhere, more, num_prompts=5).differences) == 1
