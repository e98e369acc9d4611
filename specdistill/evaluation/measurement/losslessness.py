"""Check that decoding with a draft is lossless.

Greedy completions must equal the target's token for token, sampled ones in distribution.

The reference is transformers' `generate()` (specdistill.evaluation.measurement.reference). Plain
decoding of this project is never the reference, because it would share the bugs of decoding with a
draft. A verification of several tokens rounds differently from passes over one token, and near-ties
of a float32 target are broken in float64 here. So completions may diverge where the target's best
tokens are almost tied. Such divergences are counted. A divergence without a near-tie is a bug.

Sampling is tested by chi-square: two tokens are drawn many times with the draft, and their
distribution is known. A test that never fails proves nothing, so the same test must reject a rule
that is wrong on purpose.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.common.progress import show_progress
from specdistill.decoding.decoder import Decoder, VerifyRule, verify_sampled
from specdistill.decoding.near_ties import NEAR_TIE
from specdistill.decoding.proposer import Proposal, Proposer
from specdistill.decoding.sampling import GREEDY, Sampling
from specdistill.decoding.sequence import Generation
from specdistill.decoding.tree import ROOT
from specdistill.evaluation.measurement import reference
from specdistill.evaluation.measurement.configurations import Settings
from specdistill.evaluation.measurement.prompt_runs import (
    PromptBatch,
    PromptRuns,
    count_cost_passes,
    decode_batch,
    split_into_batches,
)
from specdistill.evaluation.report.schema import (
    FirstDivergenceDocument,
    LosslessDocument,
    SamplingTestDocument,
)
from specdistill.evaluation.statistics.intervals import (
    MIN_EXPECTED,
    can_compare,
    run_chi_square_test,
)
from specdistill.evaluation.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget

# Two logits of a 16-bit target are a near-tie when they are at most this many roundings apart, at
# their magnitude. For float32 the bound is NEAR_TIE.
NEAR_TIE_ROUNDINGS = 4
NUM_PROBED_PROMPTS = 16
# Tokens generated after each of these prompts, in search of a position where a wrong rule shows.
NUM_PROBED_TOKENS = 48
# Where the number of draws is not given, the test takes one draw for every TOKENS_PER_DRAW tokens
# that were measured, within these two limits.
TOKENS_PER_DRAW = 4
MIN_DRAWS = 50
MAX_DRAWS = 400
# The wrong rule counts as detected at this p-value, which gates ask for. A test of fewer draws that
# does not detect it goes on to MAX_DRAWS.
CONTROL_P_VALUE = 0.01

Generate = Callable[[tuple[tuple[int, ...], ...]], Sequence[tuple[int, ...]]]
Divergences = list[FirstDivergenceDocument | None]  # one entry for each prompt, see `divergence`


def check_greedy(
    target: FrozenTarget,
    proposer: Proposer,
    runs: Sequence[PromptRuns],
    settings: Settings,
    generate: Generate | None = None,
) -> Divergences:
    """Compare the greedy completions of one configuration with the reference.

    Args:
        target: the target that verifies, and that generates the reference.
        proposer: the draft.
        runs: the runs of the draft, by prompt.
        settings: of the configuration; one that samples is decoded greedily as well.
        generate: as `generate_greedily` returns it. Several drafts share one, so that each batch is
            generated once; None makes a new one.

    Returns:
        The first divergence of each prompt, or None where its completion equals the reference.
    """
    return [
        find_divergence(target, *pair)
        for pair in generate_pairs(target, proposer, runs, settings, generate)
    ]


def summarize_greedy(compared: Divergences) -> LosslessDocument:
    """Return the greedy part of the report's `lossless`.

    `near_ties` and `unexplained_divergences` are absent if it is unknown for some divergence
    whether it is at a near-tie.
    """
    divergences = [entry for entry in compared if entry]
    lossless: LosslessDocument = {
        "greedy_identical": not divergences,
        "prompts_checked": len(compared),
        "first_divergence": divergences[0] if divergences else None,
        "divergences": len(divergences),
    }
    if any("near_tie" not in entry for entry in divergences):
        return lossless
    near_ties = sum(entry["near_tie"] for entry in divergences)
    return {
        **lossless,
        "near_ties": near_ties,
        "unexplained_divergences": len(divergences) - near_ties,
    }


def generate_greedily(target: FrozenTarget, settings: Settings) -> Generate:
    """Return a function that completes a batch with the reference, and generates each batch once.

    It takes the token ids of the prompts of a batch, and returns those of their completions.
    """
    return cache(
        partial(reference.generate_reference, target, max_new_tokens=settings.max_new_tokens)
    )


def generate_pairs(
    target: FrozenTarget,
    proposer: Proposer,
    runs: Sequence[PromptRuns],
    settings: Settings,
    generate: Generate | None = None,
) -> Iterator[tuple[Prompt, Generation, tuple[int, ...]]]:
    """Yield every prompt with its greedy completion and the reference's.

    Both completions are taken from greedy runs, and generated where the runs do not hold them. If
    the completions of a batch differ, the reference is generated once more for that prompt alone,
    and this one counts: padding rounds differently, and some model classes read it wrongly.

    Args:
        target: as in `check_greedy`.
        proposer: as in `check_greedy`.
        runs: as in `check_greedy`.
        settings: as in `check_greedy`.
        generate: as in `check_greedy`.

    Yields:
        The prompt, its greedy completion with the draft, and the token ids of the reference.
    """
    greedy = replace(settings, sampling=GREEDY)
    is_sampled = not settings.sampling.is_greedy
    with_draft = Decoder(target, proposer, compiled=settings.compile)
    generate = generate or generate_greedily(target, settings)
    with show_progress("Checking greedy output", len(runs), "prompts") as advance:
        for batch in split_into_batches([run.prompt for run in runs], settings.batch_size):
            batch_runs = runs[batch.start : batch.end]
            prompts = tuple(prompt.token_ids for prompt in batch.prompts)

            # With sampling, the measured completions are not greedy, so they are decoded once more.
            ours = (
                decode_batch(with_draft, batch, greedy)
                if is_sampled
                else [run.speculative[0] for run in batch_runs]
            )
            # Use the completions that were timed in `generate()`, if every prompt has one.
            if not is_sampled and all(run.hf_generate for run in batch_runs):
                references: Sequence[tuple[int, ...]] = [
                    run.hf_generate[0].token_ids for run in batch_runs
                ]
            else:
                references = generate(prompts)

            # In a batch, transformers may round differently than alone. A difference is checked
            # again alone.
            for prompt, generation, token_ids in zip(batch.prompts, ours, references, strict=True):
                if len(prompts) > 1 and generation.token_ids != token_ids:
                    (token_ids,) = generate((prompt.token_ids,))
                yield prompt, generation, token_ids
                advance()


def find_divergence(
    target: FrozenTarget, prompt: Prompt, ours: Generation, theirs: tuple[int, ...]
) -> FirstDivergenceDocument | None:
    """Return the first position where a prompt's completion differs from the reference.

    A divergence is at a near-tie if the logits of both tokens are close to the model's best.

    Args:
        target: the target, whose own forward computes the logits.
        prompt: the prompt that both complete.
        ours: the completion with the draft.
        theirs: the reference.

    Returns:
        The divergence, in which `top2_gap` is the model's best logit minus its second best; None
        for equal completions.
    """
    difference = find_first_difference(prompt.id, ours.token_ids, theirs)
    if difference is None:
        return None
    logits_V = reference.compute_logits(
        target, [*prompt.token_ids, *theirs[: difference["position"]]], 1
    )[-1]
    best, second = logits_V.topk(2).values.tolist()
    bound = max(NEAR_TIE, NEAR_TIE_ROUNDINGS * torch.finfo(getattr(torch, target.dtype)).eps) * abs(
        best
    )
    tokens = difference["speculative_token"], difference["baseline_token"]
    is_near = all(token is not None and best - float(logits_V[token]) <= bound for token in tokens)
    return {**difference, "top2_gap": best - second, "near_tie": is_near}


def find_first_difference(
    prompt_id: str, ours: Sequence[int], theirs: Sequence[int]
) -> FirstDivergenceDocument | None:
    """Return the first position where a prompt's completions differ, and their tokens there.

    The token of a completion that has ended before is None.

    Returns:
        None for equal completions.
    """
    for position, (our_token, their_token) in enumerate(zip_longest(ours, theirs)):
        if our_token != their_token:
            return {
                "prompt_id": prompt_id,
                "position": position,
                "speculative_token": our_token,
                "baseline_token": their_token,
            }
    return None


def list_candidates(proposal: Proposal, path: Sequence[int]) -> Sequence[int]:
    """Return the indices of the draft tokens that could continue an accepted path.

    For a chain this is the next draft token, or none at its end. For a tree these are the children
    of the last node of the path.
    """
    if proposal.tree:
        return proposal.tree.children[path[-1] if path else ROOT]
    return range(len(proposal.tokens))[len(path) : len(path) + 1]


def verify_with_wrong_residual(
    proposal: Proposal, probs_NV: Tensor, generator: torch.Generator | None
) -> tuple[Sequence[int], int]:
    """Verify a proposal by a rule that is wrong on purpose.

    Where all candidates were rejected, the rule draws the next token from the target's distribution
    p instead of the residual distribution. Draft tokens are accepted as often as they should be, so
    in total they are emitted too often. Acceptance rates do not show such a bug.
    """
    path, next_token = verify_sampled(proposal, probs_NV, generator)
    drawn = int(
        torch.multinomial(probs_NV[path[-1] + 1 if path else 0].cpu(), 1, generator=generator)
    )
    return path, drawn if list_candidates(proposal, path) else next_token


def run_sampling_test(
    target: FrozenTarget,
    proposer: Proposer,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    num_draws: int | None,
    num_tokens: int = 0,
) -> SamplingTestDocument | str:
    """Test that two sampled tokens follow the target's distribution.

    Sampling is as in the measurement; greedy settings are tested at temperature 1. Only the first
    level of a chain or a tree is drafted, because it decides the second token.

    The wrong rule is tested first, and decides the number of draws. If the number that the
    measurement is worth does not detect it, the test goes on to MAX_DRAWS. So a short test is
    never weaker than a gate needs.

    Args:
        target: the target that verifies.
        proposer: the draft.
        prompts: the prompts of the measurement; `find_most_telling_prompt` chooses one of them.
        settings: of the measurement.
        num_draws: how often the two tokens are drawn; 0 for no test. None: as many as a measurement
            of `num_tokens` is worth.
        num_tokens: tokens that were generated in the measurement.

    Returns:
        The report's `lossless.sampling_test`, or the reason why there is none.
    """
    # Decide how many draws to take, and at which temperature.
    if num_draws == 0:
        return "eval.sampling_draws is 0"
    sizes = sorted({choose_num_draws(num_tokens), MAX_DRAWS}) if num_draws is None else [num_draws]
    if settings.sampling.is_greedy:
        settings = replace(settings, sampling=Sampling(temperature=1.0))
    # Choose a prompt, and compute the probability of each outcome after it.
    prompt_ids, prompt_id = find_most_telling_prompt(target, proposer, prompts, settings)
    probabilities = compute_pair_probabilities(
        target, prompt_ids, settings.sampling, MIN_EXPECTED / sizes[-1]
    )
    # Keep the sizes that are large enough for a chi-square test.
    most = sizes[-1]
    sizes = [size for size in sizes if can_compare(probabilities, size)]
    if not sizes:
        return f"{most} draws hold no two outcomes that are frequent enough to compare; draw more"

    # Two tokens per draw: one draft token, and what follows it.
    first = replace(
        settings,
        max_new_tokens=2,
        num_speculative_tokens=1,
        tree=settings.tree.cut(1) if settings.tree else None,
    )

    def draw(
        arm: int, rule: VerifyRule, what: str, sizes: Sequence[int]
    ) -> Iterator[list[tuple[int, ...]]]:
        """Yield the sample once it has each of the sizes."""
        decoder = Decoder(target, proposer, rule=rule, compiled=settings.compile)
        generator = torch.Generator().manual_seed(settings.seed * 2 + arm)
        outcomes: list[tuple[int, ...]] = []
        for size in sizes:
            num_missing = size - len(outcomes)
            with show_progress(what, num_missing, "draws") as advance:
                for _ in range(num_missing):
                    outcomes.append(
                        decoder.generate(
                            prompt_ids, generator=generator, **first.decoding
                        ).token_ids
                    )
                    advance()
            yield outcomes

    # The wrong rule decides the number of draws, with which the right rule is then tested.
    for outcomes in draw(
        1, verify_with_wrong_residual, "Testing a wrong rule, as a control", sizes
    ):
        control = run_chi_square_test(outcomes, probabilities)
        num_drawn = len(outcomes)
        if control is not None and control[1] <= CONTROL_P_VALUE:
            break
    (outcomes,) = draw(0, verify_sampled, "Testing sampling", [num_drawn])
    result = run_chi_square_test(outcomes, probabilities)
    assert result is not None and control is not None  # by `can_compare`
    statistic, p_value, num_cells = result
    return {
        "statistic": statistic,
        "p_value": p_value,
        "negative_control_p_value": control[1],
        "num_cells": num_cells,
        "num_draws": num_drawn,
        "prompt_id": prompt_id,
        "num_prompt_tokens": len(prompt_ids),
    }


def count_check_passes(prompts: Sequence[Prompt], settings: Settings, num_draws: int | None) -> int:
    """Return about how many passes of the target the checks after a measurement take.

    The checks are the test of sampling and the costs of rounds.
    """
    num_passes = count_cost_passes(prompts, settings)
    if num_draws is None:
        num_draws = choose_num_draws(len(prompts) * settings.max_new_tokens * settings.repeats)
    if num_draws > 0:
        num_probed = min(len(prompts), NUM_PROBED_PROMPTS) * NUM_PROBED_TOKENS
        # Each draw takes a prefill and a round, with the right rule and again with the wrong one.
        num_passes += num_probed + 4 * num_draws
    return num_passes


def choose_num_draws(num_tokens: int) -> int:
    """Return how many draws a measurement of so many tokens is worth."""
    return min(MAX_DRAWS, max(MIN_DRAWS, num_tokens // TOKENS_PER_DRAW))


def compute_pair_probabilities(
    target: FrozenTarget, prompt_ids: Sequence[int], sampling: Sampling, least: float
) -> dict[tuple[int, ...], float]:
    """Return the reference's probability of each frequent outcome of two tokens after a prompt.

    An outcome is two tokens, or a stop token alone. Outcomes with a probability below `least` are
    left out.
    """
    probabilities: dict[tuple[int, ...], float] = {}
    first_V = reference.compute_next_token_probabilities(target, prompt_ids, sampling)
    for token in (first_V >= least).nonzero().flatten().tolist():
        if token in target.eos_token_ids:
            probabilities[(token,)] = float(first_V[token])
            continue
        pair_V = first_V[token] * reference.compute_next_token_probabilities(
            target, [*prompt_ids, token], sampling
        )
        probabilities |= {
            (token, second_token): float(pair_V[second_token])
            for second_token in (pair_V >= least).nonzero().flatten().tolist()
        }
    return probabilities


def find_most_telling_prompt(
    target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings
) -> tuple[tuple[int, ...], str]:
    """Find the beginning of a sequence after which `verify_with_wrong_residual` shows most.

    The first token comes from the prefill and the second from a round. So the score of a position
    is the probability of the token before it, times the distance between the distributions of the
    wrong rule and the right one. The temperature of the settings must be above 0.

    Returns:
        The token ids of the beginning, and the id of its prompt.
    """
    deviations: list[float] = []

    def watched(
        proposal: Proposal, probs_NV: Tensor, generator: torch.Generator | None
    ) -> tuple[Sequence[int], int]:
        deviations.append(_compute_deviation(proposal, probs_NV[0]))
        return verify_sampled(proposal, probs_NV, generator)

    decoder = Decoder(target, proposer, rule=watched)
    best_score = -1.0
    best = (prompts[0].token_ids, prompts[0].id)
    for prompt in sorted(prompts, key=lambda prompt: len(prompt.token_ids))[:NUM_PROBED_PROMPTS]:
        deviations.clear()
        room = min(NUM_PROBED_TOKENS, target.max_length - len(prompt.token_ids))
        (generation,) = decode_batch(
            decoder, PromptBatch(0, (prompt,)), replace(settings, max_new_tokens=room)
        )
        # Compute the probabilities [T, V] after the prompt and after each token of the completion.
        sequence = (*prompt.token_ids, *generation.token_ids)
        num_last = len(generation.token_ids) + 1
        probs_TV = settings.sampling.compute_probabilities(
            reference.compute_logits(target, sequence, num_last)
        )
        skipped = len(sequence) - num_last
        length = len(prompt.token_ids) + 1  # tokens of the sequence before the round
        # The first verification is that of the prefill, which belongs to no round.
        for entry, deviation in zip(generation.rounds, deviations[1:], strict=True):
            score = float(probs_TV[length - 2 - skipped, sequence[length - 1]]) * deviation
            if score > best_score:
                best_score = score
                best = (sequence[: length - 1], prompt.id)
            length += len(entry.emitted)
    return best


def _compute_deviation(proposal: Proposal, p_V: Tensor) -> float:
    """Return how far from p the first token's distribution is under `verify_with_wrong_residual`.

    The distance is 1/2 sum_v |min(p, q) - beta p|, where beta = sum min(p, q) is the acceptance
    probability: the wrong rule's distribution is min(p, q) + (1 - beta) p. Of drawn candidates only
    the first is considered, because most are accepted there. For certain candidates q is 1 at each
    of them.
    """
    first = list_candidates(proposal, [])
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
