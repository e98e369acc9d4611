"""Suffix decoding keeps the output unchanged, and no prompt looks its own output up."""

import random
from collections.abc import Sequence

import pytest
import torch

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.lookup_first import LookupFirstProposer
from specdistill.decoding.proposer import Proposal
from specdistill.decoding.sampling import Sampling
from specdistill.evaluation.measurement import prompt_runs, runner
from specdistill.evaluation.measurement.configurations import Settings
from specdistill.evaluation.suites.suite import Prompt
from specdistill.methods.load import load_proposer
from specdistill.methods.lookups.method import LookupProposer
from specdistill.methods.recipe import Recipe
from specdistill.methods.suffix.config import SuffixConfig
from specdistill.methods.suffix.lookup import SuffixLookup
from specdistill.recipe.load import load_recipe
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.targets.frozen import FrozenTarget
from tests.draft_models import tiny_draft_model
from tests.enumeration import distribution_of, output_distribution, plain_distribution
from tests.measuring import measure
from tests.proposers import state_of, suffix_proposer, tiny_target
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer

GREEDY = Sampling()


def propose_tokens(proposer: LookupProposer, text: list[int], k: int = 4) -> list[int]:
    return proposer.propose(state_of(text), k, GREEDY, [None])[0].tokens


def list_followers(text: Sequence[int], suffix: Sequence[int]) -> list[int]:
    """Return the token after each occurrence of the suffix, in order."""
    size = len(suffix)
    return [text[end] for end in range(size, len(text)) if text[end - size : end] == suffix]


def draft_by_counting(
    config: SuffixConfig, text: list[int], past: list[list[int]], k: int
) -> list[int]:
    """Return the same draft by a scan of all occurrences for each token and length."""
    grown, probability, most = list(text), 1.0, k
    for index in range(k):
        for length in range(min(config.max, len(grown)), config.min - 1, -1):
            suffix = grown[-length:]
            in_past = [token for output in past for token in list_followers(output, suffix)]
            if next_tokens := list_followers(text, suffix) or in_past:
                break
        else:
            break
        if index == 0:
            most = min(k, int(length * config.max_spec_factor))
        latest_first = next_tokens[::-1]
        token = max(latest_first, key=next_tokens.count)
        probability *= next_tokens.count(token) / len(next_tokens)
        if index >= most or probability < config.min_token_prob:
            break
        grown.append(token)
    return grown[len(text) :]


def test_the_most_frequent_continuation_of_the_longest_match_is_drafted() -> None:
    lookup = SuffixLookup(min_token_prob=0.5)
    text = [1, 2, 7, 1, 2, 8, 1, 2, 7, 5, 1, 2]
    assert lookup.find(text, 4) == [7]  # 2 of 3; whether 1 or 5 follows is even less sure
    # 7 1 and 7 5 are equally frequent, and this is the latest
    assert SuffixLookup().find(text, 4) == [7, 5]
    lookup.set_past_outputs([[3, 1, 2, 9], [0, 5, 1, 2, 6]])
    assert lookup.find(text, 4) == [6]  # (5, 1, 2) in a past output is longer
    lookup.set_past_outputs([])
    assert lookup.find(text, 4) == [7]


@pytest.mark.parametrize(("least", "most"), [(2, 2), (1, 3), (2, 4), (1, 24)])
@pytest.mark.parametrize(("factor", "probability"), [(1.0, 0.1), (2.5, 0.4), (0.5, 0.0)])
def test_the_trie_counts_what_a_scan_counts(
    least: int, most: int, factor: float, probability: float
) -> None:
    rng, lengths = random.Random(0), set()
    config = SuffixConfig(
        min=least,
        max=most,
        max_cached_requests=3,
        max_spec_factor=factor,
        min_token_prob=probability,
    )
    proposer = suffix_proposer(**vars(config))
    for alphabet in (1, 2, 3, 5) * 2:
        outputs: list[list[int]] = []
        for _ in range(5):
            proposer.set_past_outputs(outputs)
            proposer.begin([100])
            text = rng.choices(range(alphabet), k=rng.randint(1, 20))
            for _ in range(5):
                k = rng.randint(1, 6)
                draft = propose_tokens(proposer, text, k)
                assert draft == draft_by_counting(config, text, outputs[-3:], k)
                lengths.add(len(draft))
                text += rng.choices(range(alphabet), k=rng.randint(1, 5))
            outputs.append(text)
    assert len(lengths) > 1


def test_the_request_alone_is_looked_up_where_no_requests_are_cached() -> None:
    proposer = suffix_proposer(max_cached_requests=0)
    proposer.set_past_outputs([[1, 2, 3]])
    proposer.begin([10])
    assert propose_tokens(proposer, [1, 2]) == []


# --- The output


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    model = tiny_target_model(vocab_size=12)  # so few tokens that they repeat
    model.generation_config.eos_token_id = []
    return FrozenTarget(model, tiny_tokenizer(), name="tiny")


@pytest.mark.parametrize("k", [1, 4])
def test_greedy_output_is_that_of_generate(target: FrozenTarget, k: int) -> None:
    """A sequence and a batch are decoded, with the outputs of other prompts to look up."""
    prompts = [[5, 1, 5, 1, 2, 3], [7, 3, 3], [2, 9, 4, 1]]
    expected = [
        tuple(
            target.model.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False)[
                0, len(prompt) :
            ].tolist()
        )
        for prompt in prompts
    ]
    proposer = suffix_proposer()
    proposer.set_past_outputs(expected[1:])
    options = {"max_new_tokens": 60, "num_speculative_tokens": k}
    alone = [Decoder(target, proposer).generate(prompt, **options) for prompt in prompts]
    batch = Decoder(target, proposer).generate_all(prompts, **options)
    assert (
        [generation.token_ids for generation in alone]
        == [generation.token_ids for generation in batch]
        == expected
    )
    assert [[entry.drafted for entry in generation.rounds] for generation in alone] == [
        [entry.drafted for entry in generation.rounds] for generation in batch
    ]
    assert any(entry.num_accepted for entry in alone[0].rounds)
    assert any(entry.num_accepted < len(entry.drafted) for entry in alone[0].rounds)


@pytest.mark.parametrize("prompt", [(1, 3, 2, 1), (2, 2, 3)])
def test_sampled_text_has_the_targets_distribution_exactly(prompt: tuple[int, ...]) -> None:
    target = distribution_of(tiny_draft_model(4, seed=1))
    drafted = set()

    def propose_from_text(text: list[int], sampling: Sampling, uniforms: list[float]) -> Proposal:
        proposer = suffix_proposer(max_spec_factor=2)
        proposer.set_past_outputs([(1, 2)])
        proposer.begin([len(text) + 2])
        (proposal,) = proposer.propose(state_of(text), 2, sampling, [None])
        drafted.add(len(proposal.tokens))
        return proposal

    distribution = output_distribution(target, propose_from_text, prompt)
    assert torch.allclose(distribution, plain_distribution(target, prompt), rtol=0, atol=1e-6)
    assert {0, 2} <= drafted


# --- Past outputs in a measurement


class RecordingProposer(LookupProposer):
    """A lookup that records the past outputs that it knows whenever a sequence begins."""

    seen: list[tuple[Sequence[int], ...]]

    def begin(self, max_lengths: Sequence[int]) -> None:
        super().begin(max_lengths)
        if max_lengths != [1, 1]:  # a decoder begins so to ask whether batches are supported
            self.seen += [tuple(self.lookup._past_outputs)] * len(max_lengths)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("behind_lookup", [False, True])
def test_a_prompt_knows_the_outputs_before_it_and_never_its_own(
    batch_size: int, behind_lookup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds in each repetition, and where prompts are decoded again."""
    target, recording = tiny_target(), RecordingProposer(SuffixLookup())
    recording.seen = []
    config = LookupFirstConfig(method="suffix", draft_tokens=1)
    proposer = (
        LookupFirstProposer(suffix_proposer(), recording, config) if behind_lookup else recording
    )
    prompts = [Prompt(str(n), "a", f"{n}", tuple(range(n + 1, n + 5))) for n in range(4)]
    settings = Settings(2, 6, repeats=2, warmup=1, batch_size=batch_size)
    monkeypatch.setattr(
        prompt_runs, "count_disturbed_rounds", lambda generations: [1] * len(generations)
    )
    monkeypatch.setattr(runner, "MAX_EXTRA_REPETITIONS", 1)
    runs = measure(target, proposer, prompts, settings)
    outputs = [run.baseline[0].token_ids for run in runs]
    repetition = [tuple(outputs[: n - n % batch_size]) for n in range(4)]
    assert recording.seen == [()] * batch_size + 3 * repetition
    assert recording.lookup._past_outputs == []


# --- Settings


def test_the_loader_passes_settings_to_the_lookup(target: FrozenTarget) -> None:
    assert load_proposer("suffix", None, target).settings == SuffixConfig().model_dump()
    config = SuffixConfig(
        min=2, max=5, max_cached_requests=7, max_spec_factor=3.0, min_token_prob=0.25
    )
    assert load_proposer("suffix", None, target, suffix=config).settings == config.model_dump()


@pytest.mark.parametrize(
    ("options", "key", "got"),
    [
        (["eval.suffix.min=0"], "eval.suffix.min", 0),
        (["eval.suffix.min=4", "eval.suffix.max=3"], "eval.suffix.min", 4),
        (["eval.suffix.max_spec_factor=0"], "eval.suffix.max_spec_factor", 0),
        (
            ["eval.suffix.max_spec_factor=0.2", "eval.suffix.max=4"],
            "eval.suffix.max_spec_factor",
            0.2,
        ),
        (["eval.suffix.min_token_prob=1.5"], "eval.suffix.min_token_prob", 1.5),
        (["eval.suffix.max_cached_requests=-1"], "eval.suffix.max_cached_requests", -1),
        (["eval.engine=vllm"], "eval.suffix.max_cached_requests", "10000 with eval.engine=vllm"),
        (["eval.engine=vllm", "eval.suffix.min=2"], "eval.suffix.min", "2 with eval.engine=vllm"),
        (["eval.tree={branching: [2]}"], "eval.tree", "{"),
        (["eval.lookup_first={}"], "eval.lookup_first", "{"),
        (["train.max_steps=5"], "train.max_steps", "5"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(
    options: list[str], key: str, got: object
) -> None:
    with refused(key, got):
        load_recipe(
            Recipe, ["method=suffix", "target.model=pico", "train.output_dir=runs", *options]
        )
