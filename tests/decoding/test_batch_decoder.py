"""Texts decoded together are those decoded alone, row by row: greedy to the token, sampled by the same draws and in distribution."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from specdistill.decoding import batch_decoder as batch
from specdistill.decoding import verify
from specdistill.decoding.batch_decoder import MAX_BATCH_SIZE, BatchDecoder
from specdistill.decoding.decoder import Decoder, Generation
from specdistill.decoding.proposer import Proposer
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.transformers_models import MaskedKVCache
from specdistill.errors import UserError
from specdistill.methods.draft_model.proposer import DraftModelProposer
from specdistill.methods.draft_model.vocabulary import SharedVocabulary
from specdistill.methods.eagle.module import build_eagle
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.mtp.checkpoint import build_mtp
from specdistill.methods.ngram.method import NgramProposer
from specdistill.suites.suite import load_suite, tokenize
from specdistill.targets.frozen import FrozenTarget
from tests import mtp_targets
from tests.draft_models import half_right
from tests.proposers import ModelProposer
from tests.tiny import qwen, tiny_target_model, tiny_tokenizer, twins

NEW_TOKENS = 24
STOPS = list(range(7, 260, 25))


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    model = tiny_target_model()
    model.generation_config.eos_token_id = STOPS
    return FrozenTarget(model, tiny_tokenizer(), name="tiny")


def prompts_of(count: int) -> list[list[int]]:
    """Random prompts of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    return [torch.randint(3, 250, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts_of(MAX_BATCH_SIZE)


@pytest.fixture(scope="module")
def plain(target: FrozenTarget) -> list[Generation]:
    """Each prompt on its own, without a draft."""
    decoder = Decoder(target)
    return [decoder.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]


def half_the_vocabulary(target: FrozenTarget) -> SharedVocabulary:
    """A draft with the target's ids, of which only the even ones are shared."""
    even = torch.arange(0, target.vocab_size, 2)
    return SharedVocabulary(even, even, target.vocab_size, target.tokenizer, target.tokenizer)


def proposer_of(name: str, target: FrozenTarget) -> Proposer | None:
    makers: dict[str, Any] = {
        "plain": lambda: None,
        "eagle3": lambda: HeadProposer(build_eagle3(target)),
        "eagle3, two layers": lambda: HeadProposer(build_eagle3(target, num_layers=2, norm_output=True)),
        "eagle3, pruned": lambda: HeadProposer(build_eagle3(target, draft_vocabulary=torch.arange(0, target.vocab_size, 3))),
        "eagle3, window": lambda: HeadProposer(build_eagle3(target, sliding_window=4)),
        "eagle": lambda: HeadProposer(build_eagle(target)),
        "mtp": lambda: HeadProposer(build_mtp(target, init="scratch")),
        "draft_model": lambda: DraftModelProposer(half_right(target)),
        "draft_model, threshold": lambda: DraftModelProposer(half_right(target), confidence_threshold=0.3),
        "draft_model, window": lambda: DraftModelProposer(half_right(target, context=24), context="window"),
        "draft_model, vocabulary": lambda: DraftModelProposer(half_right(target), vocabulary=half_the_vocabulary(target)),
        "draft_model, transformers": lambda: DraftModelProposer(qwen()),
        "the target itself": lambda: DraftModelProposer(target.model),
        "ngram": NgramProposer,
    }
    return makers[name]()  # type: ignore[no-any-return]


NAMES = [
    "plain", "eagle3", "eagle3, two layers", "eagle3, pruned", "eagle3, window", "eagle", "mtp", "draft_model", "draft_model, threshold",
    "draft_model, window", "draft_model, vocabulary", "draft_model, transformers", "the target itself", "ngram",
]  # fmt: skip


def decode(
    target: FrozenTarget, proposer: Proposer | None, prompts: Sequence[Sequence[int]], **options: Any
) -> list[Generation]:
    k = 3 if proposer else 0
    return BatchDecoder(target, proposer).generate(prompts, max_new_tokens=NEW_TOKENS, num_speculative_tokens=k, **options)


def texts(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


# --- Greedy text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_greedy_text_of_each_row_is_its_text_alone(target: FrozenTarget, plain: list[Generation], name: str, size: int) -> None:
    generations = decode(target, proposer_of(name, target), PROMPTS[:size])
    assert texts(generations) == texts(plain[:size])
    assert [generation.stopped for generation in generations] == [generation.stopped for generation in plain[:size]]


@pytest.mark.parametrize("name", ["plain", "eagle3", "draft_model", "ngram"])
def test_sixty_four_rows(target: FrozenTarget, plain: list[Generation], name: str) -> None:
    generations = decode(target, proposer_of(name, target), PROMPTS)
    assert texts(generations) == texts(plain)
    lengths = {len(generation.token_ids) for generation in generations}
    assert NEW_TOKENS in lengths and len(lengths) > 5  # some rows left early, others stayed to the end


def test_rounds_are_those_of_the_row_alone(target: FrozenTarget) -> None:
    """Not only the text: what is drafted and accepted in each round, though neighbours accept more or less, or stop."""
    for name in ("draft_model, threshold", "draft_model, window", "ngram"):
        proposer = proposer_of(name, target)
        together = decode(target, proposer, PROMPTS[:7])
        for prompt, generation in zip(PROMPTS, together, strict=False):
            alone = Decoder(target, proposer).generate(prompt, max_new_tokens=NEW_TOKENS, num_speculative_tokens=3)
            assert [(r.drafted, r.num_accepted, r.emitted) for r in generation.rounds] == [
                (r.drafted, r.num_accepted, r.emitted) for r in alone.rounds
            ], name
        accepted = {r.num_accepted for generation in together for r in generation.rounds}
        assert len(accepted) > 1


def test_holes_are_left_and_compacted_on_the_way(target: FrozenTarget, plain: list[Generation], monkeypatch: Any) -> None:
    compact, shares = MaskedKVCache._compact, []

    def watched(cache: MaskedKVCache, needed: int) -> None:
        shares.append(needed / cache.position_BS.shape[1])
        compact(cache, needed)

    monkeypatch.setattr(MaskedKVCache, "_compact", watched)
    assert texts(decode(target, proposer_of("draft_model", target), PROMPTS[:7])) == texts(plain[:7])
    assert len(shares) > 1 and all(0.5 < share < 0.75 for share in shares)


@pytest.mark.parametrize("kind", ["sliding windows", "latent attention"])
def test_targets_of_other_kinds_keep_their_text(kind: str) -> None:
    target = (
        mtp_targets.tiny_target("deepseek_v3")
        if kind == "latent attention"
        else FrozenTarget(qwen(), tiny_tokenizer(), name=kind)
    )
    target.model.generation_config.eos_token_id = STOPS
    alone = [Decoder(target).generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS[:5]]
    for proposer in (HeadProposer(build_eagle(target)), NgramProposer(), DraftModelProposer(target.model)):
        assert texts(decode(target, proposer, PROMPTS[:5])) == texts(alone)


@pytest.mark.parametrize("name", ["plain", "eagle3", "ngram"])
def test_near_ties_are_broken_as_for_one_text(name: str, monkeypatch: Any) -> None:
    target = twins()
    alone = [Decoder(target).generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS[:3]]
    assert texts(decode(target, proposer_of(name, target), PROMPTS[:3])) == texts(alone)
    monkeypatch.setattr(batch, "break_ties", lambda target, texts, drafted, logits: logits)
    assert texts(decode(target, proposer_of(name, target), PROMPTS[:3])) != texts(alone)


def test_a_trained_draft_of_pico(tmp_path: Any) -> None:
    """A draft of one layer, fitted to what pico writes: it is right often, and wrong at other places in each row."""
    pico = FrozenTarget.load("pico", device_map="cpu")
    prompts = [
        prompt.token_ids
        for prompt in tokenize(load_suite("pico"), pico.tokenizer, max_new_tokens=24, max_length=pico.max_length, num_prompts=6)
    ]
    alone = [Decoder(pico).generate(prompt, max_new_tokens=24) for prompt in prompts]
    draft = tiny_target_model(num_layers=1, vocab_size=pico.vocab_size)
    draft.config.max_position_embeddings = pico.max_length
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    for _ in range(20):
        for generation in alone:
            ids = torch.tensor([[*generation.prompt_ids[-8:], *generation.token_ids]])
            draft(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    together = BatchDecoder(pico, DraftModelProposer(draft)).generate(prompts, max_new_tokens=24, num_speculative_tokens=4)
    assert texts(together) == texts(alone)
    accepted = Counter(r.num_accepted for generation in together for r in generation.rounds)
    assert len(accepted) > 2 and sum(count * number for number, count in accepted.items()) > 20


# --- Sampled text


@pytest.mark.parametrize(
    "name", ["plain", "eagle3", "eagle3, pruned", "draft_model, threshold", "draft_model, vocabulary", "ngram"]
)
def test_sampled_text_is_the_rows_own_whatever_stands_beside_it(target: FrozenTarget, name: str) -> None:
    """The same generator gives the same text: alone, and in two batches with other neighbours."""
    proposer, sampling = proposer_of(name, target), Sampling(0.8, top_k=20)

    def seeded(*seeds: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    first = decode(target, proposer, PROMPTS[:4], sampling=sampling, generators=seeded(0, 1, 2, 3))
    second = decode(target, proposer, [PROMPTS[9], PROMPTS[2], PROMPTS[1]], sampling=sampling, generators=seeded(9, 2, 1))
    options = {"max_new_tokens": NEW_TOKENS, "num_speculative_tokens": 3 if proposer else 0, "sampling": sampling}
    alone = [
        Decoder(target, proposer).generate(PROMPTS[row], generator=torch.Generator().manual_seed(row), **options)
        for row in range(4)
    ]
    assert texts(first) == texts(alone)
    assert texts(second[1:]) == [alone[2].token_ids, alone[1].token_ids]
    assert len({generation.token_ids[:8] for generation in first}) == 4


def four_tokens(seed: int) -> FrozenTarget:
    config = LlamaConfig(
        vocab_size=4, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, head_dim=32,
        max_position_embeddings=64, initializer_range=0.15, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = []
    return FrozenTarget(model, tiny_tokenizer(), name="four tokens")


def exact_distribution(target: FrozenTarget, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Of the first three tokens."""
    distribution = {}
    for first in range(4):
        for second in range(4):
            with torch.inference_mode():
                rows = target.model(torch.tensor([[*prompt, first, second]])).logits[0].softmax(-1)[-3:].tolist()
            for third in range(4):
                distribution[first, second, third] = rows[0][first] * rows[1][second] * rows[2][third]
    return distribution


def p_value(target: FrozenTarget, proposer: Proposer) -> float:
    """That the texts of three prompts, twenty of each side by side, follow the target's distribution. Rare texts count together."""
    prompts, draws = [[0], [1, 2], [3, 3, 3]], 40
    decoder, counts = BatchDecoder(target, proposer), Counter[tuple[int, tuple[int, ...]]]()
    for draw in range(draws):
        generations = decoder.generate(
            prompts * 20,
            max_new_tokens=3,
            num_speculative_tokens=2,
            sampling=Sampling(1.0),
            generators=[torch.Generator().manual_seed(1_000 * draw + row) for row in range(60)],
        )
        counts.update((row % 3, generation.token_ids) for row, generation in enumerate(generations))
    cells = {
        (row, text): 20 * draws * p
        for row, prompt in enumerate(prompts)
        for text, p in exact_distribution(target, prompt).items()
    }
    common = [cell for cell, expected in cells.items() if expected >= 5]
    observed, expected = [counts[cell] for cell in common], [cells[cell] for cell in common]
    rare = 60 * draws - sum(observed), 60 * draws - sum(expected)
    return float(chisquare([*observed, rare[0]], [*expected, rare[1]], ddof=len(prompts) - 1).pvalue)


def test_each_rows_law_is_the_targets(monkeypatch: Any) -> None:
    """2,400 texts of three tokens against their exact probabilities; a rule that draws from p after a rejection is caught."""
    target, draft, right = four_tokens(0), four_tokens(1), verify.rejection
    assert p_value(target, DraftModelProposer(draft.model)) > 0.01

    def wrong(tokens: Any, target_probs: Any, draft_probs: Any, uniforms: Any) -> Any:
        num_accepted, _ = right(tokens, target_probs, draft_probs, uniforms)
        distribution = target_probs[torch.arange(len(tokens)), num_accepted]
        return num_accepted, verify.draw(distribution, uniforms[:, -1])

    monkeypatch.setattr(batch.verify, "rejection", wrong)
    assert p_value(target, DraftModelProposer(draft.model)) < 1e-4


# --- Times and refusals


def test_shares_of_the_time_add_up_to_the_batchs(target: FrozenTarget, monkeypatch: Any) -> None:
    """A clock that ticks once whenever it is asked: all shares together are the ticks from the first to the last."""
    ticks = [0]

    def tick(device: torch.device) -> float:
        ticks[0] += 1
        return float(ticks[0])

    monkeypatch.setattr(batch, "now", tick)
    generations = decode(target, proposer_of("draft_model", target), PROMPTS)
    assert sum(generation.seconds for generation in generations) == pytest.approx(ticks[0] - 1)
    assert len({len(generation.rounds) for generation in generations}) > 3
    for generation in generations:
        inside = sum(r.draft_seconds + r.verify_seconds for r in generation.rounds)
        assert generation.prefill_seconds == 1 / 64 and generation.prefill_seconds + inside <= generation.seconds


@pytest.mark.parametrize(
    ("prompts", "options", "says"),
    [
        ([[5]] * 65, {"max_new_tokens": 8, "num_speculative_tokens": 2}, r"eval\.batch_size: got 65, expected 1 to 64"),
        ([], {"max_new_tokens": 8, "num_speculative_tokens": 2}, r"eval\.batch_size: got 0, expected 1 to 64"),
        ([[5], [6]], {"max_new_tokens": 8, "num_speculative_tokens": 0}, r"eval\.num_speculative_tokens: got 0"),
        ([[5], []], {"max_new_tokens": 8, "num_speculative_tokens": 2}, r"eval\.max_new_tokens: got a prompt of 0 tokens"),
        (
            [[5], [6] * 250],
            {"max_new_tokens": 8, "num_speculative_tokens": 2},
            r"eval\.max_new_tokens: got a prompt of 250 tokens",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(
    target: FrozenTarget, prompts: list[list[int]], options: dict[str, int], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        BatchDecoder(target, NgramProposer()).generate(prompts, **options)


def test_what_cannot_be_batched_is_refused(target: FrozenTarget) -> None:
    recurrent = mtp_targets.tiny_target("qwen3_next")
    with pytest.raises(
        UserError, match=r"eval\.batch_size: got more than 1 for tiny qwen3_next, a model with recurrent layers"
    ):
        BatchDecoder(recurrent)
    with pytest.raises(UserError, match=r"eval\.batch_size: got more than 1 for the draft, a model with recurrent layers"):
        BatchDecoder(target, DraftModelProposer(recurrent.model))


def test_any_other_proposer_drafts_row_by_row(target: FrozenTarget, plain: list[Generation]) -> None:
    proposer = ModelProposer(half_right(target))
    generations = decode(target, proposer, PROMPTS[:3])
    assert texts(generations) == texts(plain[:3])
    assert any(r.num_accepted for generation in generations for r in generation.rounds)
