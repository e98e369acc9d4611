"""N-gram lookup continues the longest and latest match, and the output is unchanged."""

import random

import pytest
import torch

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import Proposal
from specdistill.decoding.sampling import Sampling
from specdistill.methods.load import load_proposer
from specdistill.methods.lookups.method import LookupProposer
from specdistill.methods.ngram.config import NgramConfig
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.targets.frozen import FrozenTarget
from tests.draft_models import tiny_draft_model
from tests.enumeration import distribution_of, output_distribution, plain_distribution
from tests.proposers import ngram_proposer, state_of
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer

GREEDY = Sampling()


def propose_tokens(proposer: LookupProposer, text: list[int], k: int = 3) -> list[int]:
    return proposer.propose(state_of(text), k, GREEDY, [None])[0].tokens


def draft_by_scanning(
    proposer: LookupProposer, text: list[int], num_prompt_tokens: int, k: int
) -> list[int]:
    """Return the same draft without an index.

    Scan back through the sequence for a match, then copy what follows it, and go on with the draft
    where the sequence ends.
    """
    settings = proposer.settings
    latest = (
        min(num_prompt_tokens, len(text) - 1) if settings["lookup"] == "prompt" else len(text) - 1
    )
    for n in range(settings["max"], settings["min"] - 1, -1):
        for end in range(latest, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                copied = list(text)
                for index in range(end, end + k):
                    copied.append(copied[index])
                return copied[len(text) :]
    return []


def test_the_longest_and_latest_match_is_continued() -> None:
    proposer = ngram_proposer(max=2)
    proposer.begin([100])
    text = [1, 2, 7, 9, 2, 8, 1, 2]
    assert propose_tokens(proposer, text) == [7, 9, 2]  # (1, 2) beats the later (2,)
    text += [7, 5, 2]
    assert propose_tokens(proposer, text) == [7, 5, 2]  # no (5, 2) before: the latest (2,)
    text += [77]
    assert propose_tokens(proposer, text) == []


@pytest.mark.parametrize("lookup", ["sequence", "prompt"])
@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_the_index_finds_what_a_scan_finds(lookup: str, least: int, most: int) -> None:
    rng = random.Random(0)
    proposer = ngram_proposer(least, most, lookup)
    num_full_drafts = 0
    for alphabet in (2, 3, 5) * 8:
        text = rng.choices(range(alphabet), k=rng.randint(2, 30))
        num_prompt_tokens = len(text) - 1
        proposer.begin([200])
        for _ in range(12):
            k = rng.randint(1, 6)
            draft = propose_tokens(proposer, text, k)
            assert draft == draft_by_scanning(proposer, text, num_prompt_tokens, k)
            num_full_drafts += len(draft) == k
            text += rng.choices(range(alphabet), k=rng.randint(1, 5))
    assert num_full_drafts > 50


# --- The distribution


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    model = tiny_target_model(vocab_size=12)  # so few tokens that they repeat
    model.generation_config.eos_token_id = []
    return FrozenTarget(model, tiny_tokenizer(), name="tiny")


@pytest.mark.parametrize("lookup", ["sequence", "prompt"])
@pytest.mark.parametrize("k", [1, 4])
def test_greedy_output_is_the_plain_output(target: FrozenTarget, k: int, lookup: str) -> None:
    start = [5, 1, 5, 1, 2, 3]
    # a prompt that holds something to copy
    prompt = [*start, *Decoder(target).generate(start, max_new_tokens=60).token_ids]
    plain = Decoder(target).generate(prompt, max_new_tokens=60)
    fast = Decoder(target, ngram_proposer(lookup=lookup)).generate(
        prompt, max_new_tokens=60, num_speculative_tokens=k
    )
    assert fast.token_ids == plain.token_ids
    assert any(entry.num_accepted for entry in fast.rounds)
    assert any(entry.num_accepted < len(entry.drafted) for entry in fast.rounds)


@pytest.mark.parametrize("lookup", ["sequence", "prompt"])
@pytest.mark.parametrize("prompt", [(1, 3, 2, 1), (2, 2, 3)])
def test_sampled_text_has_the_targets_distribution_exactly(
    prompt: tuple[int, ...], lookup: str
) -> None:
    target = distribution_of(tiny_draft_model(4, seed=1))
    drafted = set()

    def propose_from_prompt(text: list[int], sampling: Sampling, uniforms: list[float]) -> Proposal:
        """Return the proposal after `text` of a proposer that saw it grow from the prompt."""
        proposer = ngram_proposer(lookup=lookup)
        proposer.begin([len(text) + 2])
        for end in range(len(prompt) + 1, len(text)):
            proposer.propose(state_of(text[:end]), 2, sampling, [None])
        (proposal,) = proposer.propose(state_of(text), 2, sampling, [None])
        drafted.add(len(proposal.tokens))
        return proposal

    distribution = output_distribution(target, propose_from_prompt, prompt)
    assert torch.allclose(distribution, plain_distribution(target, prompt), rtol=0, atol=1e-6)
    assert drafted == {0, 2}  # something was drafted for some prompts, nothing for others


# --- Settings


def test_the_loader_passes_settings_to_the_lookup(target: FrozenTarget) -> None:
    default = load_proposer("ngram", None, target)
    assert (
        default.settings == ngram_proposer().settings == {"min": 1, "max": 3, "lookup": "sequence"}
    )
    proposer = load_proposer(
        "ngram", None, target, ngram=NgramConfig(min=2, max=5, lookup="prompt")
    )
    assert isinstance(proposer, LookupProposer) and proposer.settings == {
        "min": 2,
        "max": 5,
        "lookup": "prompt",
    }


@pytest.mark.parametrize(
    ("method", "options", "key", "got"),
    [
        ("ngram", ["min=0"], ".min", 0),
        ("ngram", ["min=4", "max=3"], ".min", 4),
        ("ngram", ["max=0"], ".max", 0),
        ("ngram", ["lookup=promt"], ".lookup", "'promt'"),
        ("eagle3", ["lookup=prompt"], ".lookup", "prompt"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(
    method: str, options: list[str], key: str, got: object
) -> None:
    arguments = [f"method={method}", "target.model=pico", "train.output_dir=runs"]
    with refused(f"eval.ngram{key}", got):
        load_recipe(Recipe, arguments + [f"eval.ngram.{option}" for option in options])


def draft_as_vllm(text: list[int], shortest: int, longest: int, k: int) -> list[int]:
    """Return what follows the first occurrence of the longest n-gram that is found."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + k]
    return []


def draft_as_llama_cpp(text: list[int], size_n: int, size_m: int) -> list[int]:
    """Draft as `common_ngram_simple_draft` of llama.cpp does, line by line."""
    tokens, sampled = text[:-1], text[-1]
    cur_len = len(tokens)
    if cur_len <= size_n + size_m + 1:
        return []
    pattern, match_pos = [*tokens[cur_len - size_n + 1 :], sampled], 0
    for j in range(cur_len - size_n - 1, 0, -1):
        if tokens[j : j + size_n] == pattern:
            match_pos = j
            break
    if match_pos == 0:
        return []
    copy_max = min(size_m, cur_len - (match_pos + size_n))
    return [] if copy_max < size_n else tokens[match_pos + size_n : match_pos + size_n + copy_max]


def test_the_rule_of_each_engine_drafts_what_that_engine_drafts() -> None:
    draw, num_drafts = random.Random(0), {"vllm": 0, "llama.cpp": 0}
    for _ in range(100):
        n, k, text = (
            draw.randint(1, 3),
            draw.randint(1, 5),
            [draw.randrange(4) for _ in range(draw.randint(1, 10))],
        )
        proposers = {rule: ngram_proposer(1, n, rule=rule) for rule in num_drafts}
        for proposer in proposers.values():
            proposer.begin([100])
        for _ in range(12):
            expected = {
                "vllm": draft_as_vllm(text, 1, n, k),
                "llama.cpp": draft_as_llama_cpp(text, n, k),
            }
            for rule, proposer in proposers.items():
                assert propose_tokens(proposer, text, k) == expected[rule]
                num_drafts[rule] += bool(expected[rule])
            text += [draw.randrange(4) for _ in range(draw.randint(1, 3))]
    assert min(num_drafts.values()) > 300
