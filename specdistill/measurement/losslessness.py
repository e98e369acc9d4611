"""Whether speculation changes what the target generates. It must not: greedy output token for token, sampled output in distribution.

Greedy decoding in float32 must be identical. In a 16-bit dtype the verification of several tokens at once rounds differently
from one step at a time, so outputs may diverge where the target's two best tokens are almost tied. A divergence without a near-tie is a
bug.

Sampling is tested by a two-sample chi-square test: the first two tokens are drawn many times with and without the draft. A test that never
fails proves nothing, so the same test must reject a rule that is wrong on purpose.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.decoding.decoder import Decoder, Generation
from specdistill.decoding.proposer import Proposer
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import ROOT, Tree
from specdistill.decoding.verify import rejection
from specdistill.decoding.verify_tree import sampled
from specdistill.measurement.configurations import GREEDY, Settings
from specdistill.measurement.measure import decode, decoder_for, in_batches
from specdistill.measurement.runs import Runs
from specdistill.progress import progress
from specdistill.statistics.intervals import two_sample_chi_square
from specdistill.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget

NEAR_TIE_ROUNDINGS = 4  # two logits this many roundings apart, at their magnitude, are a near-tie
TESTED_TOKENS = 2
COUNTS = ("prompts_checked", "divergences", "near_ties", "unexplained_divergences")
NUM_PROBED_PROMPTS = 16
NUM_PROBED_TOKENS = 48  # generated after each of them, in search of a place where a wrong rule would show


@dataclass(frozen=True)
class Divergence:
    """The first position where the two outputs of a prompt differ. `top2_gap`: the target's best logit less its second best."""

    prompt_id: str
    position: int
    speculative_token: int | None
    baseline_token: int | None
    top2_gap: float
    near_tie: bool


def greedy_check(target: FrozenTarget, proposer: Proposer, runs: Sequence[Runs], settings: Settings) -> dict[str, Any]:
    """The greedy part of the report's `lossless`, for one configuration."""
    return compare_greedy(target, greedy_pairs(target, proposer, runs, settings))


def greedy_pairs(
    target: FrozenTarget, proposer: Proposer, runs: Sequence[Runs], settings: Settings
) -> Iterator[tuple[Prompt, Generation, Generation]]:
    """(prompt, greedy with the draft, greedy without) of every prompt, the latter always decoded alone.

    Taken from the runs, or decoded once more if those were sampled or in batches.
    """
    if settings.sampling.is_greedy and settings.batch_size == 1:
        yield from ((run.prompt, run.speculative[0], run.baseline[0]) for run in runs)
        return
    greedy = replace(settings, sampling=GREEDY)
    with_draft, plain = decoder_for(target, greedy, proposer), Decoder(target)
    with progress("Checking greedy output", len(runs), "prompts") as advance:
        for batch in in_batches([run.prompt for run in runs], settings.batch_size):
            if settings.sampling.is_greedy:
                generations = [run.speculative[0] for run in runs[batch.start : batch.end]]
            else:
                generations = decode(with_draft, batch, greedy)
            for prompt, generation in zip(batch.prompts, generations, strict=True):
                yield prompt, generation, plain.generate(prompt.token_ids, max_new_tokens=greedy.max_new_tokens)
                advance()


def compare_greedy(target: FrozenTarget, pairs: Iterable[tuple[Prompt, Generation, Generation]]) -> dict[str, Any]:
    """`greedy_check` of (prompt, with the draft, without) of every prompt."""
    pairs = list(pairs)
    compared = [_divergence(target, prompt, with_draft, plain) for prompt, with_draft, plain in pairs]
    divergences = [divergence for divergence in compared if divergence]
    near_ties = sum(divergence.near_tie for divergence in divergences)
    return {
        "greedy_identical": not divergences,
        "prompts_checked": len(pairs),
        "first_divergence": vars(divergences[0]) if divergences else None,
        "divergences": len(divergences),
        "near_ties": near_ties,
        "unexplained_divergences": len(divergences) - near_ties,
    }


def together(checks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`greedy_check` of several configurations as one."""
    return {
        "greedy_identical": all(check["greedy_identical"] for check in checks),
        "first_divergence": next((check["first_divergence"] for check in checks if check["first_divergence"]), None),
        **{name: sum(check[name] for check in checks) for name in COUNTS},
    }


def _divergence(target: FrozenTarget, prompt: Prompt, with_draft: Generation, plain: Generation) -> Divergence | None:
    ours, theirs = with_draft.token_ids, plain.token_ids
    if ours == theirs:
        return None
    position, our_token, their_token = first_difference(ours, theirs)
    best, second = _logits(target, [*prompt.token_ids, *theirs[:position]])[-1].topk(2).values.tolist()
    bound = NEAR_TIE_ROUNDINGS * torch.finfo(getattr(torch, target.dtype)).eps * abs(best)
    return Divergence(
        prompt.id,
        position,
        our_token,
        their_token,
        best - second,
        near_tie=target.dtype != "float32" and best - second <= bound,
    )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, int | None, int | None]:
    """The first position where two sequences differ, and their tokens there; None where one has ended."""
    return next((position, *pair) for position, pair in enumerate(zip_longest(ours, theirs)) if pair[0] != pair[1])


@torch.inference_mode()
def _logits(target: FrozenTarget, token_ids: Sequence[int]) -> Tensor:
    """[T, V] float32, after each token."""
    ids = torch.tensor([list(token_ids)], device=target.device)
    return target.logits(target.features(ids, ()).last_hidden)[0].float()


def wrong_residual(
    tokens_BK: Tensor, target_probs_BKV: Tensor, draft_probs_BKV: Tensor | None, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """A rule that is wrong on purpose: after a rejection it draws from p instead of the residual distribution.

    Draft tokens are accepted as they should be, so they are emitted too often: a mistake that acceptance rates do not show.
    """
    num_accepted, next_token = rejection(tokens_BK, target_probs_BKV, draft_probs_BKV, generator)
    rows = torch.arange(len(tokens_BK), device=tokens_BK.device)
    distribution = target_probs_BKV[rows, num_accepted]
    rejected = num_accepted < tokens_BK.shape[1]
    drawn = torch.multinomial(distribution.cpu(), 1, generator=generator).squeeze(-1).to(next_token.device)
    return num_accepted, torch.where(rejected, drawn, next_token)


def wrong_tree_residual(
    tokens: Sequence[int],
    tree: Tree,
    target_probs_NV: Tensor,
    draft_probs_NV: Tensor | None,
    generator: torch.Generator | None = None,
) -> tuple[list[int], int]:
    """`wrong_residual` for trees: where all children of a node were rejected it draws from p."""
    path, next_token = sampled(tokens, tree, target_probs_NV, draft_probs_NV, generator)
    last = path[-1] if path else ROOT
    if tree.children[last]:
        next_token = int(torch.multinomial(target_probs_NV[last + 1].cpu(), 1, generator=generator))
    return path, next_token


def sampling_test(
    target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings, *, num_draws: int
) -> dict[str, Any] | str:
    """The report's `lossless.sampling_test`, or the reason why there is none.

    Of a chain or a tree only the first level is drafted: it decides the second token.
    """
    if not num_draws:
        return "eval.sampling_draws is 0"
    prompt_ids, prompt_id = most_telling_prompt(target, proposer, prompts, settings)
    tree = settings.tree.cut(1) if settings.tree else None

    def draw(decoder: Decoder, arm: int) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(settings.seed * 3 + arm)
        outcomes = []
        for _ in range(num_draws):
            generation = decoder.generate(
                prompt_ids,
                max_new_tokens=TESTED_TOKENS,
                num_speculative_tokens=1 if decoder.proposer else 0,
                tree=tree if decoder.proposer else None,
                sampling=Sampling(temperature=1.0),
                generator=generator,
            )
            outcomes.append(generation.token_ids)
            advance()
        return outcomes

    with progress("Testing sampling", 3 * num_draws, "draws") as advance:
        plain = draw(Decoder(target), 0)
        result = two_sample_chi_square(plain, draw(Decoder(target, proposer), 1))
        wrong = Decoder(target, proposer, sampled_rule=wrong_residual, tree_rule=wrong_tree_residual)
        control = two_sample_chi_square(plain, draw(wrong, 2))
    if result is None or control is None:
        return f"{num_draws} draws hold no two outcomes that are frequent enough to compare; draw more"
    return {
        "statistic": result.statistic,
        "p_value": result.p_value,
        "negative_control_p_value": control.p_value,
        "num_cells": result.num_cells,
        "num_draws": num_draws,
        "prompt_id": prompt_id,
        "num_prompt_tokens": len(prompt_ids),
    }


def most_telling_prompt(
    target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings
) -> tuple[tuple[int, ...], str]:
    """The beginning of a sequence after which `wrong_residual` shows most, and the id of its prompt.

    The first token comes from the prefill and the second from a round, so the score of a position is the probability of the token
    before it times the distance of the wrong rule's distribution from the right one.
    """
    best_score, best = -1.0, (prompts[0].token_ids, prompts[0].id)
    for prompt in sorted(prompts, key=lambda prompt: len(prompt.token_ids))[:NUM_PROBED_PROMPTS]:
        deviations: list[float] = []
        chains, trees = partial(_watched_rejection, deviations), partial(_watched_tree, deviations)
        generation = Decoder(target, proposer, sampled_rule=chains, tree_rule=trees).generate(
            prompt.token_ids,
            max_new_tokens=min(NUM_PROBED_TOKENS, target.max_length - len(prompt.token_ids)),
            num_speculative_tokens=settings.num_speculative_tokens,
            tree=settings.tree,
            sampling=Sampling(temperature=1.0),
            generator=torch.Generator().manual_seed(settings.seed),
        )
        sequence = (*prompt.token_ids, *generation.token_ids)
        probs_TV = _logits(target, sequence).softmax(-1)
        length = len(prompt.token_ids) + 1  # before the round
        for entry, deviation in zip(generation.rounds, deviations[1:], strict=True):  # the first verification is the prefill's
            score = float(probs_TV[length - 2, sequence[length - 1]]) * deviation
            if score > best_score:
                best_score, best = score, (sequence[: length - 1], prompt.id)
            length += len(entry.emitted)
    return best


def _watched_rejection(
    deviations: list[float],
    tokens_BK: Tensor,
    target_probs_BKV: Tensor,
    draft_probs_BKV: Tensor | None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """`rejection`, recording how far from p the first token's distribution would be under `wrong_residual`."""
    if tokens_BK.shape[1]:
        p = target_probs_BKV[0, 0]
        q = F.one_hot(tokens_BK[0, 0], len(p)) if draft_probs_BKV is None else draft_probs_BKV[0, 0]
        deviations.append(_deviation(p, q))
    else:
        deviations.append(0.0)
    return rejection(tokens_BK, target_probs_BKV, draft_probs_BKV, generator)


def _watched_tree(
    deviations: list[float],
    tokens: Sequence[int],
    tree: Tree,
    target_probs_NV: Tensor,
    draft_probs_NV: Tensor | None,
    generator: torch.Generator | None = None,
) -> tuple[list[int], int]:
    """`_watched_rejection` for trees. Of drawn candidates only the first counts, where most are accepted."""
    p, first = target_probs_NV[0], tree.children[ROOT]
    if draft_probs_NV is None:
        q = F.one_hot(torch.tensor([tokens[node] for node in first], device=p.device), len(p)).sum(0)
    else:
        q = draft_probs_NV[first[0]]
    deviations.append(_deviation(p, q))
    return sampled(tokens, tree, target_probs_NV, draft_probs_NV, generator)


def _deviation(p_V: Tensor, q_V: Tensor) -> float:
    """1/2 sum_v |min(p, q) - beta p|: with beta = sum min(p, q), the chance of acceptance, the wrong rule's distribution is
    min(p, q) + (1 - beta) p. q is one-hot for a certain candidate, and 1 at each of several.
    """
    accepted = torch.minimum(p_V, q_V.to(p_V.dtype))
    return float((accepted - accepted.sum() * p_V).abs().sum() / 2)
