"""Texts decoded in a batch are those that are decoded alone, both greedy and sampled."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdistill.decoding import decoder, near_ties
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import Proposer
from specdistill.decoding.sampling import GREEDY, Sampling
from specdistill.decoding.sequence import Generation
from specdistill.decoding.tree import DynamicTree, StaticTree, TreeShape
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle.module import build_eagle
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.targets.frozen import FrozenTarget
from tests import mtp_targets
from tests.proposers import OTHERS, SHAPES, ngram_proposer, proposer_of
from tests.refusals import refused
from tests.tiny import qwen, tiny_target_model, tiny_tokenizer, twins

NEW_TOKENS = 24
STOPS = list(range(7, 260, 25))


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    model = tiny_target_model()
    model.generation_config.eos_token_id = STOPS
    return FrozenTarget(model, tiny_tokenizer(), name="tiny")


def draw_prompts(count: int) -> list[list[int]]:
    """Return random prompts of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    return [torch.randint(3, 250, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = draw_prompts(64)


@pytest.fixture(scope="module")
def plain(target: FrozenTarget) -> list[Generation]:
    """The texts of seven prompts, each decoded on its own without a draft."""
    return [Decoder(target).generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS[:7]]


# One of each way to draft. The others are marked long: there are thirty.
QUICK = (
    "plain",
    "eagle3, pruned",
    "eagle3, window",
    "mtp",
    "dflash, pruned, causal, window",
    "dspark, rnn",
    "draft_model",
    "draft_model, other vocabulary",
    "pard",
    "ngram",
    "ngram+eagle3",
    "suffix",
)
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long])
    for name in ("plain", *SHAPES, *OTHERS)
]


def build_proposer(name: str, target: FrozenTarget) -> Proposer | None:
    return None if name == "plain" else proposer_of(name, target)


def decode(
    target: FrozenTarget,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    **options: Any,
) -> list[Generation]:
    k = 3 if proposer else 0
    return Decoder(target, proposer).generate_all(
        prompts, max_new_tokens=NEW_TOKENS, num_speculative_tokens=k, **options
    )


def list_texts(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


# --- Greedy text


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_of_each_row_is_its_text_alone(
    target: FrozenTarget, plain: list[Generation], name: str
) -> None:
    """Seven rows leave the batch at different lengths until one row is left."""
    generations = decode(target, build_proposer(name, target), PROMPTS[:7])
    assert list_texts(generations) == list_texts(plain)
    assert [generation.stopped for generation in generations] == [
        generation.stopped for generation in plain
    ]


@pytest.mark.parametrize(
    "name",
    [
        "draft_model",
        "pard",
        "eagle3, window",
        "ngram",
        "ngram+eagle3",
        "ngram+draft_model",
        "suffix",
    ],
)
def test_rounds_of_each_row_are_its_rounds_alone(target: FrozenTarget, name: str) -> None:
    """Each round drafts and accepts the same, though neighbours accept more or less, or stop."""
    proposer = proposer_of(name, target)
    together = decode(target, proposer, PROMPTS[:7])
    for prompt, generation in zip(PROMPTS, together, strict=False):
        alone = Decoder(target, proposer).generate(
            prompt, max_new_tokens=NEW_TOKENS, num_speculative_tokens=3
        )
        assert [(r.drafted, r.num_accepted, r.emitted) for r in generation.rounds] == [
            (r.drafted, r.num_accepted, r.emitted) for r in alone.rounds
        ]
    assert (
        len({r.num_accepted for generation in together for r in generation.rounds}) > 1
        or name == "eagle3, window"
    )


DYNAMIC, STATIC = DynamicTree(budget=9, depth=4, top_k=3), StaticTree((3, 2, 1))
TREES: list[tuple[str, TreeShape | None]] = [
    ("eagle3", DYNAMIC),
    ("dspark, rnn", STATIC),
    ("ngram+tree of eagle3", None),  # the lookup's chains beside it
]
MORE_TREES: list[tuple[str, TreeShape | None]] = [
    ("eagle3", STATIC),
    ("dflash", DYNAMIC),
    ("draft_model", DYNAMIC),
    ("pard", STATIC),
    ("draft_model, of transformers", DYNAMIC),
    ("draft_model, other vocabulary", STATIC),
]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.5, top_p=0.4)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("name", "tree"),
    # a third of a second each
    [*TREES, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_TREES)],
)
def test_trees_of_each_row_are_its_trees_alone(
    target: FrozenTarget, name: str, tree: TreeShape | None, sampling: Sampling
) -> None:
    """Each round has the same tokens, whichever neighbours a row has; greedy text is transformers'.

    With top-p the trees of the rows differ in their nodes.
    """
    proposer = proposer_of(name, target)
    options: dict[str, Any] = {
        "max_new_tokens": 14,
        "num_speculative_tokens": 3,
        "tree": tree,
        "sampling": sampling,
    }

    def make_generator(row: int) -> torch.Generator:
        return torch.Generator().manual_seed(row)

    together = Decoder(target, proposer).generate_all(
        PROMPTS[:3], generators=[*map(make_generator, range(3))], **options
    )
    for row, (prompt, generation) in enumerate(zip(PROMPTS, together, strict=False)):
        alone = Decoder(target, proposer).generate(prompt, generator=make_generator(row), **options)
        assert [
            (r.drafted, r.num_accepted, r.emitted, r.num_off_path) for r in generation.rounds
        ] == [(r.drafted, r.num_accepted, r.emitted, r.num_off_path) for r in alone.rounds]
        if sampling.is_greedy:
            reference_ids = target.model.generate(
                torch.tensor([prompt]), max_new_tokens=14, do_sample=False
            )[0, len(prompt) :]
            assert list(generation.token_ids) == reference_ids.tolist()


@pytest.mark.parametrize("kind", ["sliding windows", "latent attention"])
def test_targets_of_other_kinds_keep_their_text(kind: str) -> None:
    target = (
        mtp_targets.tiny_target("deepseek_v3")
        if kind == "latent attention"
        else FrozenTarget(qwen(), tiny_tokenizer(), name=kind)
    )
    target.model.generation_config.eos_token_id = STOPS
    alone = [Decoder(target).generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS[:5]]
    for proposer in (
        HeadProposer(build_eagle(target)),
        ngram_proposer(),
        DraftModelProposer(target.model),
    ):
        assert list_texts(decode(target, proposer, PROMPTS[:5])) == list_texts(alone)
    assert list_texts(
        decode(target, DraftModelProposer(target.model), PROMPTS[:5], tree=DYNAMIC)
    ) == list_texts(alone)


@pytest.fixture(scope="module")
def near_tie_texts() -> tuple[FrozenTarget, list[tuple[int, ...]]]:
    """A target of near-ties, and the texts of three prompts, each decoded on its own."""
    target = twins()
    alone = [Decoder(target).generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS[:3]]
    return target, list_texts(alone)


@pytest.mark.parametrize("name", ["plain", "eagle3", "ngram"])
def test_near_ties_are_broken_as_for_one_text(
    near_tie_texts: tuple[FrozenTarget, list[tuple[int, ...]]], name: str, monkeypatch: Any
) -> None:
    target, alone = near_tie_texts
    assert list_texts(decode(target, build_proposer(name, target), PROMPTS[:3])) == alone
    monkeypatch.setattr(near_ties, "NEAR_TIE", -1.0)
    assert list_texts(decode(target, build_proposer(name, target), PROMPTS[:3])) != alone


# --- Sampled text


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "eagle3, pruned",
        "draft_model",
        "draft_model, shared half",
        "ngram+eagle3",
        # as with those above; half a second each
        pytest.param("eagle3", marks=pytest.mark.long),
        pytest.param("ngram", marks=pytest.mark.long),
    ],
)
def test_sampled_text_of_a_row_does_not_depend_on_the_others(
    target: FrozenTarget, name: str
) -> None:
    """The same generator gives the same text alone and in two batches with other neighbours."""
    proposer, sampling = build_proposer(name, target), Sampling(0.8, top_k=20)

    def make_generators(*seeds: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    first = decode(
        target, proposer, PROMPTS[:4], sampling=sampling, generators=make_generators(0, 1, 2, 3)
    )
    second = decode(
        target,
        proposer,
        [PROMPTS[9], PROMPTS[2], PROMPTS[1]],
        sampling=sampling,
        generators=make_generators(9, 2, 1),
    )
    options = {
        "max_new_tokens": NEW_TOKENS,
        "num_speculative_tokens": 3 if proposer else 0,
        "sampling": sampling,
    }
    alone = [
        Decoder(target, proposer).generate(
            PROMPTS[row], generator=torch.Generator().manual_seed(row), **options
        )
        for row in range(4)
    ]
    assert list_texts(first) == list_texts(alone)
    assert list_texts(second[1:]) == [alone[2].token_ids, alone[1].token_ids]
    assert len({generation.token_ids[:8] for generation in first}) == 4


# --- Times and refusals


def test_shares_of_the_time_add_up_to_that_of_the_batch(
    target: FrozenTarget, monkeypatch: Any
) -> None:
    """The clock ticks once whenever it is read; the shares add up to the ticks in between."""
    ticks = [0]

    def tick(device: torch.device) -> float:
        ticks[0] += 1
        return float(ticks[0])

    monkeypatch.setattr(decoder, "read_clock", tick)
    generations = decode(target, proposer_of("draft_model", target), PROMPTS)
    assert sum(generation.seconds for generation in generations) == pytest.approx(ticks[0] - 1)
    assert len({len(generation.rounds) for generation in generations}) > 3
    for generation in generations:
        seconds_in_rounds = sum(r.draft_seconds + r.verify_seconds for r in generation.rounds)
        assert (
            generation.prefill_seconds == 1 / 64
            and generation.prefill_seconds + seconds_in_rounds <= generation.seconds
        )


@pytest.mark.parametrize(
    ("prompts", "got"),
    [
        ([[5], []], "a prompt of 0 tokens"),
        ([[5], [6] * 250], "a prompt of 250 tokens"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(
    target: FrozenTarget, prompts: list[list[int]], got: str
) -> None:
    with refused("eval.max_new_tokens", got):
        Decoder(target, ngram_proposer()).generate_all(
            prompts, max_new_tokens=8, num_speculative_tokens=2
        )


def test_recurrent_models_are_refused_in_batches(target: FrozenTarget) -> None:
    recurrent = mtp_targets.tiny_target("qwen3_next")
    with refused(
        "eval.batch_size", "more than 1 for tiny qwen3_next, a model with recurrent layers"
    ):
        Decoder(recurrent).check_batches()
    with refused("eval.batch_size", "more than 1 for the draft, a model with recurrent layers"):
        Decoder(target, DraftModelProposer(recurrent.model)).check_batches()
