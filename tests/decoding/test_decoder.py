"""Decoding of a tiny target is lossless with every proposer, and exact when sampling."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import Proposal
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.sequence import Generation, SequenceState
from specdistill.decoding.tree import DynamicTree, StaticTree
from specdistill.methods.lookups.method import LookupProposer
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.methods.ngram.lookup import NgramLookup
from specdistill.targets.frozen import FrozenTarget
from tests import mtp_targets
from tests.proposers import SHAPES, SHARING, Oracle, ngram_proposer, proposer_of
from tests.refusals import refused
from tests.tiny import qwen, tiny_target_model, tiny_tokenizer

PROMPT = [5, 9, 5, 9, 20, 31]


NAMES = (
    *SHAPES,
    "dflash, pruned, causal, window",
    "dspark",
    "dspark, rnn",
    "pard",
    "pard, of transformers",
    "ngram",
    "ngram+eagle3",
    "ngram+tree of eagle3",
    *SHARING,
)


@pytest.fixture(scope="module")
def plain(target: FrozenTarget) -> Generation:
    return Decoder(target).generate(PROMPT, max_new_tokens=41)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 4])
def test_greedy_output_is_the_plain_output(
    target: FrozenTarget, plain: Generation, name: str, k: int
) -> None:
    fast = Decoder(target, proposer_of(name, target)).generate(
        PROMPT, max_new_tokens=20, num_speculative_tokens=k
    )
    assert fast.token_ids == plain.token_ids[:20]


class LargestBuffer(TorchDispatchMode):
    """A mode that records the bytes of the largest tensor that any operation returns."""

    num_bytes = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        sizes = [
            leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor)
        ]
        self.num_bytes = max([self.num_bytes, *sizes])
        return result


@pytest.mark.parametrize(
    "name", ["eagle3", "eagle", "mtp", "dflash", "dspark, rnn", "early_exit", "ngram"]
)
def test_memory_does_not_grow_with_the_square_of_a_prompt(name: str) -> None:
    model, length = tiny_target_model(), 2_000
    model.config.max_position_embeddings, model.generation_config.eos_token_id = 4_096, []
    long = FrozenTarget(model, tiny_tokenizer(), name="long")
    prompt = torch.randint(4, 260, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    with LargestBuffer() as largest:
        Decoder(long, proposer_of(name, long)).generate(
            prompt, max_new_tokens=4, num_speculative_tokens=3
        )
    # the hidden states, and less than a mask of bytes
    assert length * 64 * 4 <= largest.num_bytes < length**2 / 2


# --- What an oracle drafts, in chains and in trees

CHAIN, TREE = {"num_speculative_tokens": 4}, {"tree": StaticTree((2, 2, 2, 2))}


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_right_proposals_are_accepted_in_full(
    target: FrozenTarget, plain: Generation, shape: dict[str, Any]
) -> None:
    fast = Decoder(target, Oracle([*PROMPT, *plain.token_ids])).generate(
        PROMPT, max_new_tokens=41, **shape
    )
    assert fast.token_ids == plain.token_ids
    assert [(r.num_accepted, r.num_off_path) for r in fast.rounds] == [
        (4, 4 if shape is TREE else 0)
    ] * 8


@pytest.mark.parametrize("kind", ["windows", *mtp_targets.KINDS])
def test_targets_with_layers_of_every_kind_keep_their_text(kind: str) -> None:
    """Rejections leave no trace in windows, recurrent layers and latent attention.

    The oracle is wrong at every fifth token, and some of its other tokens are accepted.
    """
    target = (
        FrozenTarget(qwen(), tiny_tokenizer(), name=kind)
        if kind == "windows"
        else mtp_targets.tiny_target(kind)
    )
    target.model.generation_config.eos_token_id = []
    plain = Decoder(target).generate(PROMPT, max_new_tokens=24).token_ids
    reference_ids = target.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, pad_token_id=0
    )  # type: ignore[operator]
    assert list(plain) == reference_ids[0, len(PROMPT) :].tolist()
    oracle_text = [
        token if index % 5 else (token + 1) % 200 for index, token in enumerate([*PROMPT, *plain])
    ]
    for shape in [CHAIN] if target.is_recurrent else [CHAIN, TREE]:
        run = Decoder(target, Oracle(oracle_text)).generate(PROMPT, max_new_tokens=24, **shape)
        assert run.token_ids == plain
        assert 0 < sum(r.num_accepted for r in run.rounds) < sum(len(r.drafted) for r in run.rounds)
    for name in ("eagle", "mtp"):
        assert (
            Decoder(target, proposer_of(name, target))
            .generate(PROMPT, max_new_tokens=24, **CHAIN)
            .token_ids
            == plain
        )


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_length_limit_cuts_accepted_tokens(
    target: FrozenTarget, plain: Generation, shape: dict[str, Any], max_new_tokens: int
) -> None:
    run = Decoder(target, Oracle([*PROMPT, *plain.token_ids])).generate(
        PROMPT, max_new_tokens=max_new_tokens, **shape
    )
    assert run.token_ids == plain.token_ids[:max_new_tokens]
    assert sum(r.num_accepted for r in run.rounds) <= max_new_tokens - 1
    assert not run.stopped


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_a_stop_token_ends_the_text_and_nothing_past_it_counts(
    plain: Generation, shape: dict[str, Any] | None
) -> None:
    stop = plain.token_ids[6]
    first = plain.token_ids.index(stop)
    model = tiny_target_model()
    model.generation_config.eos_token_id = stop
    stopping = FrozenTarget(model, tiny_tokenizer(), name="tiny")
    oracle = Oracle([*PROMPT, *plain.token_ids]) if shape else None
    run = Decoder(stopping, oracle).generate(PROMPT, max_new_tokens=20, **(shape or {}))
    assert run.token_ids == plain.token_ids[: first + 1] and run.stopped
    assert sum(r.num_accepted for r in run.rounds) <= first


# --- Rounds, draws and refusals


def count_draws(decoder: Decoder, seed: int, **shape: Any) -> Counter[tuple[int, ...]]:
    """Return how often each (first, second, third token) was sampled."""
    options = {
        "sampling": Sampling(temperature=0.7, top_k=3),
        "generator": torch.Generator().manual_seed(seed),
        **shape,
    }
    return Counter(
        decoder.generate(PROMPT, max_new_tokens=3, **options).token_ids for _ in range(100)
    )


@pytest.fixture(scope="module")
def plain_draws(target: FrozenTarget) -> Counter[tuple[int, ...]]:
    return count_draws(Decoder(target), seed=0)


PAIRS, STATIC, DYNAMIC = (
    {"num_speculative_tokens": 2},
    {"tree": StaticTree((2, 2))},
    {"tree": DynamicTree(4, 2, 2)},
)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("eagle3, pruned", PAIRS),
        # The others are marked long: each samples a hundred texts, and any detects a wrong rule.
        *(
            pytest.param(name, PAIRS, marks=pytest.mark.long)
            for name in NAMES
            if name != "eagle3, pruned"
        ),
        *(
            pytest.param("eagle3, pruned", shape, marks=pytest.mark.long)
            for shape in (STATIC, DYNAMIC)
        ),
        *(
            pytest.param("draft_model", shape, marks=pytest.mark.long)
            for shape in (STATIC, DYNAMIC)
        ),
    ],
)
def test_sampled_text_follows_the_targets_distribution(
    target: FrozenTarget, plain_draws: Counter[tuple[int, ...]], name: str, shape: dict[str, Any]
) -> None:
    """Samples with and without the draft have one distribution; the seeds are fixed."""
    samples = plain_draws, count_draws(Decoder(target, proposer_of(name, target)), seed=1, **shape)
    keys = sorted(samples[0].keys() | samples[1].keys())
    assert chi2_contingency([[counts[key] for key in keys] for counts in samples]).pvalue > 0.01


@pytest.mark.parametrize(("prompt", "max_new_tokens"), [([], 8), (PROMPT, 251)])
def test_prompts_that_do_not_fit_are_refused(
    target: FrozenTarget, prompt: list[int], max_new_tokens: int
) -> None:
    with refused("eval.max_new_tokens"):
        Decoder(target, ngram_proposer()).generate(
            prompt, max_new_tokens=max_new_tokens, num_speculative_tokens=2
        )


# --- What a round costs


class CountingList(list[int]):
    """A list that counts how many tokens are read from it or copied."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        for token in super().__iter__():
            CountingList.num_read += 1
            yield token

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        CountingList.num_read += len(item) if isinstance(index, slice) else 1
        return item


@pytest.mark.parametrize("length", [20, 200])
@pytest.mark.parametrize("name", ["eagle3", "ngram", "draft_model"])
@pytest.mark.parametrize("in_batches", [False, True])
def test_a_round_reads_as_many_tokens_however_long_the_text_is(
    target: FrozenTarget, name: str, length: int, in_batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer, begin_row, marks = proposer_of(name, target), SequenceState.__init__, []
    begin_draft, commit = DraftModelProposer.begin, SequenceState.commit

    def count_row_reads(row: SequenceState, *arguments: Any) -> None:
        begin_row(row, *arguments)
        row.token_ids = CountingList(row.token_ids)

    def count_draft_reads(draft: DraftModelProposer, max_lengths: Sequence[int]) -> None:
        begin_draft(draft, max_lengths)
        for row in draft.rows:
            row.ids = CountingList(row.ids)

    def mark_round(row: SequenceState, *arguments: Any) -> None:
        marks.append(CountingList.num_read)
        commit(row, *arguments)

    monkeypatch.setattr(SequenceState, "__init__", count_row_reads)
    monkeypatch.setattr(DraftModelProposer, "begin", count_draft_reads)
    monkeypatch.setattr(SequenceState, "commit", mark_round)
    prompt = [5 + index * index % 97 for index in range(length)]
    options = {"max_new_tokens": 40, "num_speculative_tokens": 4}
    if in_batches:
        Decoder(target, proposer).generate_all([prompt], **options)
    else:
        Decoder(target, proposer).generate(prompt, **options)
    rounds = [after - before for before, after in pairwise(marks)]
    assert len(rounds) > 6 and statistics.median(rounds) <= 60


def test_a_pass_moves_no_keys_of_the_text(target: FrozenTarget) -> None:
    """In 150 rounds the KV cache hardly ever moves to another address."""
    addresses = []

    class AddressRecorder(LookupProposer):
        def propose(self, *arguments: Any) -> list[Proposal]:
            addresses.append(readers[-1].cache.layers[0].keys.data_ptr())
            return super().propose(*arguments)

    readers: list[Any] = []

    class ReaderRecorder(Decoder):
        def _get_reader(self, *arguments: Any) -> Any:
            readers.append(super()._get_reader(*arguments))
            return readers[-1]

    ReaderRecorder(target, AddressRecorder(NgramLookup())).generate(
        PROMPT, max_new_tokens=240, num_speculative_tokens=1
    )
    assert len(addresses) > 100 and sum(one != other for one, other in pairwise(addresses)) <= 2
