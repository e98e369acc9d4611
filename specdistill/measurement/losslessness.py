"""Whether what is generated is the target's own. It must be: greedy completions token for token, sampled ones in distribution.

The reference is transformers' `generate()` (specdistill.measurement.reference), never decoding here without a draft, which would share its
bugs. A verification of several tokens rounds differently from passes over one, and near-ties of a float32 target are broken in float64
here. So completions may diverge where the target's best tokens are almost tied: this is counted. A divergence without a near-tie is a bug.

Sampling is tested by chi-square: two tokens are drawn many times with the draft, and their distribution is known. A test that never fails
proves nothing, so the same test must reject a rule that is wrong on purpose.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.decoding.decoder import NEAR_TIE, Decoder, Generation, exact
from specdistill.decoding.proposer import Proposal, Proposer
from specdistill.decoding.sampling import GREEDY, Sampling
from specdistill.decoding.tree import ROOT
from specdistill.measurement import reference
from specdistill.measurement.configurations import Settings
from specdistill.measurement.measure import PromptBatch, PromptRuns, decode, in_batches
from specdistill.progress import progress
from specdistill.statistics.intervals import MIN_EXPECTED, chi_square
from specdistill.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget

# Two 16-bit logits this many roundings apart, at their magnitude, are a near-tie; float32 ones at NEAR_TIE.
NEAR_TIE_ROUNDINGS = 4
NUM_PROBED_PROMPTS = 16
NUM_PROBED_TOKENS = (
    48  # generated after each of them, in search of a place where a wrong rule would show
)

Generate = Callable[[tuple[tuple[int, ...], ...]], Sequence[tuple[int, ...]]]
Divergences = list[dict[str, Any] | None]  # of each prompt: see `divergence`


def greedy_check(
    target: FrozenTarget,
    proposer: Proposer,
    runs: Sequence[PromptRuns],
    settings: Settings,
    generate: Generate | None = None,
) -> Divergences:
    """Where greedy completions are not the reference, in one configuration. generate: `generate_greedily`, of several drafts the same."""
    return [
        divergence(target, *pair)
        for pair in greedy_pairs(target, proposer, runs, settings, generate)
    ]


def summary(compared: Divergences) -> dict[str, Any]:
    """The greedy part of the report's `lossless`; without `near_ties` where it is not known of each divergence whether it is one."""
    found = [one for one in compared if one]
    lossless = {
        "greedy_identical": not found,
        "prompts_checked": len(compared),
        "first_divergence": found[0] if found else None,
        "divergences": len(found),
    }
    if any("near_tie" not in one for one in found):
        return lossless
    near_ties = sum(one["near_tie"] for one in found)
    return {**lossless, "near_ties": near_ties, "unexplained_divergences": len(found) - near_ties}


def generate_greedily(target: FrozenTarget, settings: Settings) -> Generate:
    """The reference's completions of the prompts of a batch, each batch generated once."""
    return cache(partial(reference.generate, target, max_new_tokens=settings.max_new_tokens))


def greedy_pairs(
    target: FrozenTarget,
    proposer: Proposer,
    runs: Sequence[PromptRuns],
    settings: Settings,
    generate: Generate | None = None,
) -> Iterator[tuple[Prompt, Generation, tuple[int, ...]]]:
    """(prompt, greedy with the draft, the token ids of the reference) of every prompt.

    Both are taken from greedy runs, and generated where these do not hold them. In batches a reference that differs is generated once more
    for its prompt alone, which counts: padding rounds differently, and some classes read it wrongly.
    """
    greedy, is_sampled = replace(settings, sampling=GREEDY), not settings.sampling.is_greedy
    with_draft, generate = (
        Decoder(target, proposer, compiled=settings.compile),
        generate or generate_greedily(target, settings),
    )
    with progress("Checking greedy output", len(runs), "prompts") as advance:
        for batch in in_batches([run.prompt for run in runs], settings.batch_size):
            own, prompts = (
                runs[batch.start : batch.end],
                tuple(prompt.token_ids for prompt in batch.prompts),
            )
            ours = (
                decode(with_draft, batch, greedy)
                if is_sampled
                else [run.speculative[0] for run in own]
            )
            if not is_sampled and all(run.hf_generate for run in own):
                references: Sequence[tuple[int, ...]] = [
                    run.hf_generate[0].token_ids for run in own
                ]
            else:
                references = generate(prompts)
            for prompt, generation, token_ids in zip(batch.prompts, ours, references, strict=True):
                if len(prompts) > 1 and generation.token_ids != token_ids:
                    (token_ids,) = generate((prompt.token_ids,))
                yield prompt, generation, token_ids
                advance()


def divergence(
    target: FrozenTarget, prompt: Prompt, ours: Generation, theirs: tuple[int, ...]
) -> dict[str, Any] | None:
    """The first position where a prompt's completion is not the reference, or None. At a near-tie both tokens are among the model's best.

    `top2_gap`: the model's best logit less its second best.
    """
    found = first_difference(prompt.id, ours.token_ids, theirs)
    if found is None:
        return None
    logits_V = reference.logits(target, [*prompt.token_ids, *theirs[: found["position"]]])[-1]
    best, second = logits_V.topk(2).values.tolist()
    bound = max(NEAR_TIE, NEAR_TIE_ROUNDINGS * torch.finfo(getattr(torch, target.dtype)).eps) * abs(
        best
    )
    tokens = found["speculative_token"], found["baseline_token"]
    is_near = all(token is not None and best - float(logits_V[token]) <= bound for token in tokens)
    return {**found, "top2_gap": best - second, "near_tie": is_near}


def first_difference(
    prompt_id: str, ours: Sequence[int], theirs: Sequence[int]
) -> dict[str, Any] | None:
    """The first position where a prompt's completions differ, and their tokens there, null where one has ended; None for equal ones."""
    for position, (our_token, their_token) in enumerate(zip_longest(ours, theirs)):
        if our_token != their_token:
            return {
                "prompt_id": prompt_id,
                "position": position,
                "speculative_token": our_token,
                "baseline_token": their_token,
            }
    return None


def candidates(proposal: Proposal, path: Sequence[int]) -> Sequence[int]:
    """Indices of the draft tokens that would continue an accepted path: one of a chain, or none; a node's children of a tree."""
    if proposal.tree:
        return proposal.tree.children[path[-1] if path else ROOT]
    return range(len(proposal.tokens))[len(path) : len(path) + 1]


def wrong_residual(
    proposal: Proposal, probs_NV: Tensor, generator: torch.Generator | None
) -> tuple[Sequence[int], int]:
    """A rule that is wrong on purpose: where all candidates were rejected it draws from p instead of the residual distribution.

    Draft tokens are accepted as they should be, so they are emitted too often: a bug that acceptance rates do not show.
    """
    path, next_token = exact(proposal, probs_NV, generator)
    drawn = int(
        torch.multinomial(probs_NV[path[-1] + 1 if path else 0].cpu(), 1, generator=generator)
    )
    return path, drawn if candidates(proposal, path) else next_token


def sampling_test(
    target: FrozenTarget,
    proposer: Proposer,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    num_draws: int,
) -> dict[str, Any] | str:
    """The report's `lossless.sampling_test`, or the reason why there is none: two tokens sampled as measured, greedy settings at T = 1.

    Of a chain or a tree only the first level is drafted: it decides the second token.
    """
    if not num_draws:
        return "eval.sampling_draws is 0"
    if settings.sampling.is_greedy:
        settings = replace(settings, sampling=Sampling(temperature=1.0))
    prompt_ids, prompt_id = most_telling_prompt(target, proposer, prompts, settings)
    probabilities = pair_probabilities(
        target, prompt_ids, settings.sampling, MIN_EXPECTED / num_draws
    )
    first = replace(
        settings,
        max_new_tokens=2,
        num_speculative_tokens=1,
        tree=settings.tree.cut(1) if settings.tree else None,
    )

    found = []
    for arm, (what, rule) in enumerate(
        (("Testing sampling", exact), ("Testing a wrong rule, as a control", wrong_residual))
    ):
        decoder = Decoder(target, proposer, rule=rule, compiled=settings.compile)
        generator, outcomes = torch.Generator().manual_seed(settings.seed * 2 + arm), []
        with progress(what, num_draws, "draws") as advance:
            for _ in range(num_draws):
                outcomes.append(
                    decoder.generate(prompt_ids, generator=generator, **first.decoding).token_ids
                )
                advance()
        found.append(chi_square(outcomes, probabilities))
    result, control = found
    if result is None or control is None:
        return (
            f"{num_draws} draws hold no two outcomes that are frequent enough to compare; draw more"
        )
    statistic, p_value, num_cells = result
    return {
        "statistic": statistic,
        "p_value": p_value,
        "negative_control_p_value": control[1],
        "num_cells": num_cells,
        "num_draws": num_draws,
        "prompt_id": prompt_id,
        "num_prompt_tokens": len(prompt_ids),
    }


def pair_probabilities(
    target: FrozenTarget, prompt_ids: Sequence[int], sampling: Sampling, least: float
) -> dict[tuple[int, ...], float]:
    """The two tokens after a prompt, or a stop token alone: the reference's probability of each outcome that has at least `least`."""
    found: dict[tuple[int, ...], float] = {}
    first_V = reference.next_token_probabilities(target, prompt_ids, sampling)
    for token in (first_V >= least).nonzero().flatten().tolist():
        if token in target.eos_token_ids:
            found[(token,)] = float(first_V[token])
            continue
        pair_V = first_V[token] * reference.next_token_probabilities(
            target, [*prompt_ids, token], sampling
        )
        found |= {
            (token, other): float(pair_V[other])
            for other in (pair_V >= least).nonzero().flatten().tolist()
        }
    return found


def most_telling_prompt(
    target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings
) -> tuple[tuple[int, ...], str]:
    """The beginning of a sequence after which `wrong_residual` shows most, and the id of its prompt.

    The first token comes from the prefill and the second from a round, so the score of a position is the probability of the token
    before it times the distance of the wrong rule's distribution from the right one. The settings are sampled ones.
    """
    deviations: list[float] = []

    def watched(
        proposal: Proposal, probs_NV: Tensor, generator: torch.Generator | None
    ) -> tuple[Sequence[int], int]:
        deviations.append(_deviation(proposal, probs_NV[0]))
        return exact(proposal, probs_NV, generator)

    decoder = Decoder(target, proposer, rule=watched)
    best_score, best = -1.0, (prompts[0].token_ids, prompts[0].id)
    for prompt in sorted(prompts, key=lambda prompt: len(prompt.token_ids))[:NUM_PROBED_PROMPTS]:
        deviations.clear()
        room = min(NUM_PROBED_TOKENS, target.max_length - len(prompt.token_ids))
        (generation,) = decode(
            decoder, PromptBatch(0, (prompt,)), replace(settings, max_new_tokens=room)
        )
        sequence = (*prompt.token_ids, *generation.token_ids)
        probs_TV = settings.sampling.probabilities(reference.logits(target, sequence))
        length = len(prompt.token_ids) + 1  # before the round
        for entry, deviation in zip(
            generation.rounds, deviations[1:], strict=True
        ):  # the first verification is the prefill's
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
        q_V = F.one_hot(
            torch.tensor([proposal.tokens[node] for node in first], device=p_V.device), len(p_V)
        ).sum(0)
    else:
        q_V = proposal.probabilities[first[0]]
    accepted = torch.minimum(p_V, q_V.to(p_V.dtype))
    return float((accepted - accepted.sum() * p_V).abs().sum() / 2)
