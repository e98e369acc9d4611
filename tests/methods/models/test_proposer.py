"""A model that drafts for another keeps the greedy text and the sampling distribution exactly."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import Proposal
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.sequence import Generation
from specdistill.decoding.tree import DynamicTree
from specdistill.methods import feature_proposer
from specdistill.methods.load import load_proposer
from specdistill.methods.models.proposer import DraftModelProposer, LlamaLayers
from specdistill.methods.models.vocabulary import match_vocabularies
from specdistill.targets.frozen import FrozenTarget
from tests.draft_models import half_right, other_tokenizer, tiny_draft_model, translated, words
from tests.enumeration import (
    SAMPLING,
    Propose,
    distribution_of,
    output_distribution,
    plain_distribution,
)
from tests.proposers import state_of
from tests.refusals import refused
from tests.tiny import qwen, tiny_target_model, tiny_tokenizer

PROMPT = [5, 9, 5, 9, 20, 31]
GREEDY = Sampling()


class RecordingLayers:
    """Layers that record how many tokens each step feeds, and how many are cached after it."""

    def __init__(self, layers: LlamaLayers) -> None:
        self.layers = layers
        self.fed: list[int] = []
        self.held: list[int] = []

    def __call__(self, ids_1T: Tensor, counts: list[int]) -> Tensor:
        hidden = self.layers(ids_1T, counts)
        self.fed.append(ids_1T.shape[1])
        self.held.append(self.layers.cache.lengths[0])
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layers, name)


# --- Greedy text


@pytest.mark.parametrize("k", [1, 4])
def test_greedy_output_is_the_plain_output(target: FrozenTarget, k: int):
    plain = Decoder(target).generate(PROMPT, max_new_tokens=60)
    proposer = DraftModelProposer(half_right(target))
    fast = Decoder(target, proposer).generate(PROMPT, max_new_tokens=60, num_speculative_tokens=k)
    assert fast.token_ids == plain.token_ids
    accepted = [r.num_accepted for r in fast.rounds]
    assert all(len(r.drafted) == k for r in fast.rounds)
    assert {0, k} <= set(accepted)  # rejections and full rounds were both decoded through


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_drafting_with_the_cache_equals_drafting_without_it(
    target: FrozenTarget, architecture: str
):
    draft = half_right(target) if architecture == "llama" else qwen()
    run = Decoder(target, DraftModelProposer(draft)).generate(
        PROMPT, max_new_tokens=24, num_speculative_tokens=3
    )
    text = [*PROMPT, run.token_ids[0]]
    for entry in run.rounds:
        expected = list(text)
        for _ in range(3):
            with torch.inference_mode():
                expected.append(
                    int(draft(input_ids=torch.tensor([expected])).logits[0, -1].argmax())
                )
        assert list(entry.drafted) == expected[len(text) :]
        text += entry.emitted


def test_a_round_feeds_only_the_newly_committed_tokens(target: FrozenTarget):
    """A round's first step feeds the committed tokens that the cache lacks; the others feed one
    token each."""
    proposer = DraftModelProposer(half_right(target))
    layers = proposer.layers = RecordingLayers(proposer.layers)
    run = Decoder(target, proposer).generate(PROMPT, max_new_tokens=40, num_speculative_tokens=3)
    firsts = [len(PROMPT) + 1] + [2 if r.num_accepted == 3 else 1 for r in run.rounds[:-1]]
    assert layers.fed == [count for first in firsts for count in (first, 1, 1)]
    assert {1, 2} <= set(firsts)


# --- The distribution, exactly


def build_propose(proposer: DraftModelProposer, k: int) -> Propose:
    """Return a function that proposes after a text with uniforms that are given, not drawn."""

    @torch.inference_mode()
    def propose(text: list[int], sampling: Sampling, uniforms: list[float]) -> Proposal:
        proposer.begin([len(text) + k])
        padded = torch.tensor([[*uniforms, *[0.5] * (k - len(uniforms))]], dtype=torch.float64)
        with mock.patch.object(feature_proposer, "draw_uniforms", return_value=padded):
            return proposer.propose(state_of(text), k, sampling, [None])[0]

    return propose


TARGET_WORDS, DRAFT_WORDS = "? a b c", "b ? d a"  # the draft has no c, the target no d


def unlike(mask_token_id: int | None = None, **replacements: str) -> DraftModelProposer:
    """Return a proposer whose draft has another vocabulary than the target."""
    vocabulary = match_vocabularies(
        words(TARGET_WORDS),
        4,
        words(DRAFT_WORDS),
        4,
        heterogeneous_vocab=True,
        token_replacements=replacements,
    )
    return DraftModelProposer(
        tiny_draft_model(4, seed=2), vocabulary=vocabulary, mask_token_id=mask_token_id
    )


def alike(mask_token_id: int | None = None) -> DraftModelProposer:
    """Return a proposer whose draft has the vocabulary of the target."""
    return DraftModelProposer(tiny_draft_model(4, seed=2), mask_token_id=mask_token_id)


@pytest.mark.parametrize(
    ("make", "sampling"),
    [
        *((make, SAMPLING) for make in (alike, unlike)),
        (unlike, Sampling(1.0, top_k=3)),
        *((partial(make, mask_token_id=0), SAMPLING) for make in (alike, unlike)),
        (partial(unlike, c="d"), SAMPLING),
        (partial(unlike, c="a"), SAMPLING),
    ],
)
def test_sampled_text_has_the_targets_distribution_exactly(
    make: Callable[..., DraftModelProposer], sampling: Sampling
):
    target, prompt = distribution_of(tiny_draft_model(4, seed=1), sampling), (1, 3, 2)
    distribution = output_distribution(target, build_propose(make(), 2), prompt, sampling)
    assert torch.allclose(distribution, plain_distribution(target, prompt), rtol=0, atol=1e-6)


# --- Another vocabulary


@pytest.mark.parametrize("k", [1, 4])
def test_another_vocabulary_changes_no_greedy_text_and_its_shared_tokens_are_accepted(
    target: FrozenTarget, k: int
):
    plain = Decoder(target).generate(PROMPT, max_new_tokens=60)
    until = next(
        index
        for index, token in enumerate(plain.token_ids)
        if index > 2 and token not in plain.token_ids[:index] + tuple(PROMPT)
    )
    lacking = plain.token_ids[until]
    proposer = translated(target, missing=target.tokenizer.convert_ids_to_tokens(lacking))
    run = Decoder(target, proposer).generate(PROMPT, max_new_tokens=60, num_speculative_tokens=k)
    assert run.token_ids == plain.token_ids
    assert all(token != lacking for r in run.rounds for token in r.drafted)
    assert run.rounds[0].num_accepted == min(k, until - 1)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING])
def test_renamed_tokens_are_read_and_proposed_as_the_targets_tokens(sampling: Sampling):
    """A permuted vocabulary with renamed special tokens changes no draft if it is mapped."""
    model = tiny_target_model()
    model.lm_head.weight.data[1:4] *= 2  # so that special tokens are generated
    model.generation_config.eos_token_id = []
    target = FrozenTarget(model, tiny_tokenizer(), name="tiny")
    draft, prompt = half_right(target), [1, 20, 21, 3, 2, 20]
    renamed = translated(
        target, missing="", model=draft, endoftext="<s>", user="<u>", assistant="<a>", end="</s>"
    )
    unmapped = match_vocabularies(
        target.tokenizer,
        260,
        renamed.shared_vocabulary.draft_tokenizer,
        261,
        heterogeneous_vocab=True,
    )

    def decode(proposer: DraftModelProposer) -> Generation:
        options = {"max_new_tokens": 30, "num_speculative_tokens": 4, "sampling": sampling}
        return Decoder(target, proposer).generate(
            prompt, generator=torch.Generator().manual_seed(1), **options
        )

    reference, mapped = decode(DraftModelProposer(draft)), decode(renamed)
    assert [(entry.drafted, entry.emitted) for entry in mapped.rounds] == [
        (entry.drafted, entry.emitted) for entry in reference.rounds
    ]
    assert any(
        token < 4 for entry in mapped.rounds for token in entry.drafted[: entry.num_accepted]
    )
    without_map = decode(DraftModelProposer(renamed.draft, vocabulary=unmapped))
    assert len(without_map.rounds) > len(mapped.rounds)
    if sampling.is_greedy:
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert list(mapped.token_ids) == list(without_map.token_ids) == expected


def test_a_replacement_of_several_tokens_or_of_none_is_read_and_not_proposed():
    target, draft = tiny_tokenizer(), other_tokenizer("")
    vocabulary = match_vocabularies(
        target,
        260,
        draft,
        257,
        heterogeneous_vocab=True,
        token_replacements={"<|user|>": "\n", "<|end|>": "ab", "<|assistant|>": "", "z": "yy"},
    )
    proposer = DraftModelProposer(tiny_target_model(vocab_size=257), vocabulary=vocabulary)
    proposer.begin([20])
    with torch.inference_mode():
        proposer.propose(
            state_of(target("<|user|>cz<|end|><|assistant|>d").input_ids), 3, GREEDY, [None]
        )
    assert proposer.rows[0].ids == draft("\ncyyabd").input_ids
    left_out = {2, 3, *target("\nz").input_ids}  # the draft's line break is proposed as <|user|>
    assert proposer.vocabulary == set(range(1, 260)) - left_out


def test_context_tokens_the_draft_lacks_are_read_anew_as_their_row_grows():
    """The draft reads `c` as tokens of its text and the text after it.

    The cache holds no token of an older reading.
    """
    proposer = unlike()
    proposer.begin([20])
    text = [1, 2]
    with torch.inference_mode():
        for more in ([3], [3, 3], [1], [2, 3], [0]):
            text = [*text, *more]
            continued = proposer.propose(state_of(text), 2, GREEDY, [None])
            fresh_proposer = unlike()
            fresh_proposer.begin([20])
            assert continued == fresh_proposer.propose(state_of(text), 2, GREEDY, [None])
            assert proposer.rows[0].ids == fresh_proposer.rows[0].ids


def test_a_text_that_the_draft_cannot_read_gets_no_proposal(target: FrozenTarget):
    proposer = translated(target)
    assert proposer.shared_vocabulary is not None
    proposer.begin([20])
    beyond = len(proposer.shared_vocabulary.target_tokenizer)  # a row that no token names
    with torch.inference_mode():
        assert proposer.propose(state_of([beyond]), 3, GREEDY, [None]) == [Proposal([])]


# --- A shorter context


def test_a_sequence_longer_than_the_drafts_context_is_refused(target: FrozenTarget):
    decoder = Decoder(target, DraftModelProposer(half_right(target, context=32)))
    with refused("eval.draft", "a draft whose context is 32 tokens for a sequence of 38"):
        decoder.generate(PROMPT, max_new_tokens=28, num_speculative_tokens=4)


@pytest.mark.parametrize(("length", "num_drafted"), [(24, 9), (25, 8), (30, 3), (32, 1)])
@torch.inference_mode()
def test_as_many_tokens_are_drafted_as_the_context_has_room_for(
    target: FrozenTarget, length: int, num_drafted: int
):
    """The context has room for 32 tokens; the last draft token is not read."""
    proposer = DraftModelProposer(half_right(target, context=32), target_max_length=32)
    proposer.begin([100])
    assert len(proposer.propose(state_of([5] * length), 9, GREEDY, [None])[0].tokens) == num_drafted


@pytest.mark.parametrize(
    "shape",
    [
        {"tree": DynamicTree(budget=6, depth=4, top_k=2)},
        {"num_speculative_tokens": 4},
    ],
)
def test_a_draft_with_the_targets_context_reaches_its_end(
    target: FrozenTarget, shape: dict[str, Any]
):
    prompt = PROMPT * 36
    num_new = 256 - len(prompt)
    plain = Decoder(target).generate(prompt, max_new_tokens=num_new)
    proposer = DraftModelProposer(half_right(target), target_max_length=target.max_length)
    run = Decoder(target, proposer).generate(prompt, max_new_tokens=num_new, **shape)
    assert run.token_ids == plain.token_ids


# --- From a folder


@pytest.fixture
def draft_folder(target: FrozenTarget, tmp_path: Path) -> Path:
    half_right(target).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_loads_with_its_options_and_counts_its_parameters(
    target: FrozenTarget, draft_folder: Path
):
    proposer = load_proposer("draft_model", draft_folder, target)
    assert isinstance(proposer, DraftModelProposer)
    assert proposer.shared_vocabulary is None
    assert proposer.num_parameters == target.num_parameters
    assert proposer.num_bytes == 4 * target.num_parameters


def test_a_folder_with_another_tokenizer_needs_heterogeneous_vocab(
    target: FrozenTarget, draft_folder: Path
):
    tokenizer = other_tokenizer("a")
    tokenizer.save_pretrained(draft_folder)
    with refused("eval.draft", "a draft of 256 tokens for a target of 260"):
        load_proposer("draft_model", draft_folder, target)
    proposer = load_proposer("draft_model", draft_folder, target, heterogeneous_vocab=True)
    assert isinstance(proposer, DraftModelProposer) and proposer.shared_vocabulary is not None
    keys = {"heterogeneous_vocab": True, "token_replacements": {"<|end|>": "z"}}
    assert load_proposer("draft_model", draft_folder, target, **keys).settings == keys
