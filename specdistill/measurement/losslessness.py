"""Whether speculation changes what the target generates. It must not: greedy output token for token, sampled output in distribution.

Greedy decoding in float32 must be identical. In a 16-bit dtype the verification of several tokens at once rounds differently
from one step at a time, so outputs may diverge where the target's two best tokens are almost tied. A divergence without a near-tie is a
bug.

Sampling is tested by a two-sample chi-square test: the first two tokens are drawn many times with and without the draft. A test that never
fails proves nothing, so the same test must reject a rule that is wrong on purpose.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.decoding.decoder import Decoder, Generation, exact
from specdistill.decoding.proposer import Proposal, Proposer
from specdistill.decoding.sampling import GREEDY, Sampling
from specdistill.decoding.tree import ROOT
from specdistill.measurement.configurations import Settings
from specdistill.measurement.measure import Runs, decode, decoder_for, in_batches
from specdistill.progress import progress
from specdistill.statistics.intervals import two_sample_chi_square
from specdistill.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget

NEAR_TIE_ROUNDINGS = 4  # two logits this many roundings apart, at their magnitude, are a near-tie
TESTED_TOKENS = 2
COUNTS = ("prompts_checked", "divergences", "near_ties", "unexplained_divergences")
NUM_PROBED_PROMPTS = 16
NUM_PROBED_TOKENS = 48  # generated after each of them, in search of a place where a wrong rule would show


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
    compared = [_divergence(target, *pair) for pair in pairs]
    divergences = [divergence for divergence in compared if divergence]
    near_ties = sum(divergence["near_tie"] for divergence in divergences)
    return {
        "greedy_identical": not divergences,
        "prompts_checked": len(compared),
        "first_divergence": divergences[0] if divergences else None,
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


def _divergence(target: FrozenTarget, prompt: Prompt, with_draft: Generation, plain: Generation) -> dict[str, Any] | None:
    """The first position where the two outputs of a prompt differ. `top2_gap`: the target's best logit less its second best."""
    ours, theirs = with_draft.token_ids, plain.token_ids
    if ours == theirs:
        return None
    position, our_token, their_token = first_difference(ours, theirs)
    best, second = _logits(target, [*prompt.token_ids, *theirs[:position]])[-1].topk(2).values.tolist()
    bound = NEAR_TIE_ROUNDINGS * torch.finfo(getattr(torch, target.dtype)).eps * abs(best)
    return {
        "prompt_id": prompt.id,
        "position": position,
        "speculative_token": our_token,
        "baseline_token": their_token,
        "top2_gap": best - second,
        "near_tie": target.dtype != "float32" and best - second <= bound,
    }


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, int | None, int | None]:
    """The first position where two sequences differ, and their tokens there; None where one has ended."""
    return next((position, *pair) for position, pair in enumerate(zip_longest(ours, theirs)) if pair[0] != pair[1])


@torch.inference_mode()
def _logits(target: FrozenTarget, token_ids: Sequence[int]) -> Tensor:
    """[T, V] float32, after each token."""
    ids = torch.tensor([list(token_ids)], device=target.device)
    return target.logits(target.features(ids, ()).last_hidden)[0].float()


def candidates(proposal: Proposal, path: Sequence[int]) -> Sequence[int]:
    """Indices of the draft tokens that would continue an accepted path: one of a chain, or none; a node's children of a tree."""
    if proposal.tree:
        return proposal.tree.children[path[-1] if path else ROOT]
    return range(len(proposal.tokens))[len(path) : len(path) + 1]


def wrong_residual(proposal: Proposal, probs_NV: Tensor, generator: torch.Generator | None) -> tuple[Sequence[int], int]:
    """A rule that is wrong on purpose: where all candidates were rejected it draws from p instead of the residual distribution.

    Draft tokens are accepted as they should be, so they are emitted too often: a mistake that acceptance rates do not show.
    """
    path, next_token = exact(proposal, probs_NV, generator)
    drawn = int(torch.multinomial(probs_NV[path[-1] + 1 if path else 0].cpu(), 1, generator=generator))
    return path, drawn if candidates(proposal, path) else next_token


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
        control = two_sample_chi_square(plain, draw(Decoder(target, proposer, rule=wrong_residual), 2))
    if result is None or control is None:
        return f"{num_draws} draws hold no two outcomes that are frequent enough to compare; draw more"
    return {
        "statistic": float(result.statistic),
        "p_value": float(result.pvalue),
        "negative_control_p_value": float(control.pvalue),
        "num_cells": len(result.expected_freq),
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
    deviations: list[float] = []

    def watched(proposal: Proposal, probs_NV: Tensor, generator: torch.Generator | None) -> tuple[Sequence[int], int]:
        deviations.append(_deviation(proposal, probs_NV[0]))
        return exact(proposal, probs_NV, generator)

    decoder = Decoder(target, proposer, rule=watched)
    best_score, best = -1.0, (prompts[0].token_ids, prompts[0].id)
    for prompt in sorted(prompts, key=lambda prompt: len(prompt.token_ids))[:NUM_PROBED_PROMPTS]:
        deviations.clear()
        generation = decoder.generate(
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


def _deviation(proposal: Proposal, p_V: Tensor) -> float:
    """How far from p the first token's distribution would be under `wrong_residual`: 1/2 sum_v |min(p, q) - beta p|, since with
    beta = sum min(p, q), the chance of acceptance, it is min(p, q) + (1 - beta) p. Of drawn candidates only the first counts, where most
    are accepted; q of certain candidates is 1 at each of them.
    """
    first = candidates(proposal, [])
    if not first:
        return 0.0
    if proposal.probabilities is None:
        q_V = F.one_hot(torch.tensor([proposal.tokens[node] for node in first], device=p_V.device), len(p_V)).sum(0)
    else:
        q_V = proposal.probabilities[first[0]]
    accepted = torch.minimum(p_V, q_V.to(p_V.dtype))
    return float((accepted - accepted.sum() * p_V).abs().sum() / 2)
