"""Check that decoding with a draft is lossless.

Greedy completions must equal the target's token for token, sampled ones in distribution.

**Greedy.** The reference is transformers' `generate()`
(specdistill.evaluation.measurement.reference). Plain decoding of this project is never the
reference, because it would share the bugs of decoding with a draft. One pass over several tokens
rounds differently from several passes over one token each. So completions may diverge at near-ties,
where the target's two best tokens have almost equal logits. Divergences at near-ties are counted.
Any other divergence is a bug.

**Sampling.** Two tokens are drawn many times with the draft. A chi-square test compares the
frequency of each pair with the pair's exact probability. A test that never fails proves nothing, so
the same test must reject a verification rule that is wrong on purpose: the negative control.

Shapes: N draft tokens, T positions, V vocabulary.
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
    CONTROL_P_VALUE,
    MIN_EXPECTED,
    can_compare,
    run_chi_square_test,
)
from specdistill.evaluation.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget

# Two logits of a 16-bit target are a near-tie when they are at most this many roundings apart, at
# their magnitude: 3 % of the best logit in bfloat16. A larger number would excuse bugs, a smaller
# one would report rounding as bugs. For float32 the bound is NEAR_TIE.
NEAR_TIE_ROUNDINGS = 4
# Where the sampling test looks for the position at which it detects a wrong rule best: in this many
# of the shortest prompts, and in this many generated tokens after each. More of them find a better
# position, and take longer.
NUM_PROBED_PROMPTS = 16
NUM_PROBED_TOKENS = 48
# If the number of draws is not given, the test takes one draw for every TOKENS_PER_DRAW tokens that
# were measured, within these two limits. So the test takes a fixed share of a measurement's time,
# except in very short and very long measurements.
TOKENS_PER_DRAW = 4
MIN_DRAWS = 50
MAX_DRAWS = 400

# A function from the token ids of a batch's prompts to the token ids of their completions.
Generate = Callable[[tuple[tuple[int, ...], ...]], Sequence[tuple[int, ...]]]
# One entry for each prompt, as `find_divergence` returns it.
Divergences = list[FirstDivergenceDocument | None]


def check_greedy(
    target: FrozenTarget,
    proposer: Proposer,
    runs: Sequence[PromptRuns],
    settings: Settings,
    generate: Generate | None = None,
) -> Divergences:
    """Check that greedy completions with a draft equal those of transformers' `generate()`.

    The completions of transformers are called the reference.

    Args:
        target: the target model, which verifies draft tokens and generates the reference.
        proposer: the draft.
        runs: the completions of each prompt that the measurement has decoded with the draft.
        settings: the settings with which they were decoded. If tokens were sampled, the prompts are
            decoded greedily now.
        generate: a function that generates the reference (see `generate_greedily`). Several drafts
            share one, so that the reference of each batch is generated once. None: one is made
            for this call.

    Returns:
        The first divergence of each prompt, or None where its completion equals the reference.
    """
    return [
        find_divergence(target, prompt, completion, reference_ids)
        for prompt, completion, reference_ids in generate_pairs(
            target, proposer, runs, settings, generate
        )
    ]


def summarize_greedy(compared: Divergences) -> LosslessDocument:
    """Count the divergences of all prompts, for the section `lossless` of report.json.

    A divergence is the first position where the completion with the draft differs from the one
    without it. At a near-tie, where two tokens have almost equal logits, rounding explains it.
    Elsewhere it is a bug. For the outputs of a server, which returns no logits, this is unknown,
    and the keys `near_ties` and `unexplained_divergences` are absent.

    Args:
        compared: the divergence of each prompt; None for a prompt with equal completions.
    """
    divergences = [entry for entry in compared if entry]
    lossless: LosslessDocument = {
        "greedy_identical": not divergences,
        "prompts_checked": len(compared),
        "first_divergence": divergences[0] if divergences else None,
        "divergences": len(divergences),
    }

    # Divide the divergences into near-ties and bugs, if this is known for each of them.
    if any("near_tie" not in entry for entry in divergences):
        return lossless
    near_ties = sum(entry["near_tie"] for entry in divergences)
    return {
        **lossless,
        "near_ties": near_ties,
        "unexplained_divergences": len(divergences) - near_ties,
    }


def generate_greedily(target: FrozenTarget, settings: Settings) -> Generate:
    """Return a function that completes a batch greedily with transformers' `generate()`.

    The function takes the token ids of the prompts of a batch, and returns the token ids of their
    completions. It caches them, because several drafts are compared with the same completions.
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
    """Yield every prompt with two greedy completions: with the draft, and the reference.

    The reference is the completion of transformers' `generate()`. Completions that the measurement
    has decoded already are used again; missing ones are generated now.

    Args:
        target: the target model, which verifies draft tokens and generates the reference.
        proposer: the draft.
        runs: the completions of each prompt that the measurement has decoded.
        settings: the settings with which they were decoded.
        generate: a function that generates the reference of a batch; None: one is made for this
            call.

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

            # If the measurement sampled tokens, its completions are not greedy, so decode the batch
            # greedily now. Otherwise take the first repetition, which the records are made from.
            ours = (
                decode_batch(with_draft, batch, greedy)
                if is_sampled
                else [run.speculative[0] for run in batch_runs]
            )
            # Use the completions of transformers that the measurement has timed, if every prompt of
            # the batch has one. Otherwise generate them.
            if not is_sampled and all(run.hf_generate for run in batch_runs):
                references: Sequence[tuple[int, ...]] = [
                    run.hf_generate[0].token_ids for run in batch_runs
                ]
            else:
                references = generate(prompts)

            # In a batch, transformers pads prompts, which changes its rounding, and some model
            # classes misread the padding. So if the two completions of a prompt differ, generate
            # its reference once more without the other prompts, and use that one.
            for prompt, generation, token_ids in zip(batch.prompts, ours, references, strict=True):
                if len(prompts) > 1 and generation.token_ids != token_ids:
                    (token_ids,) = generate((prompt.token_ids,))
                yield prompt, generation, token_ids
                advance()


def find_divergence(
    target: FrozenTarget, prompt: Prompt, ours: Generation, theirs: tuple[int, ...]
) -> FirstDivergenceDocument | None:
    """Find where a completion first differs from the reference, and whether that is a near-tie.

    It is a near-tie if the logits of both tokens at this position are close to the best logit.
    Rounding then explains the difference. Any other difference is a bug.

    Args:
        target: the target model, whose own forward computes the logits.
        prompt: the prompt of both completions.
        ours: the completion with the draft.
        theirs: the token ids of the reference, which transformers' `generate()` has decoded.

    Returns:
        The divergence, in which `top2_gap` is the model's best logit minus its second best; None
        for equal completions.
    """
    difference = find_first_difference(prompt.id, ours.token_ids, theirs)
    if difference is None:
        return None

    # Compute the logits [V] after the tokens that both completions share. They decide the first
    # token that differs.
    shared_tokens = [*prompt.token_ids, *theirs[: difference["position"]]]
    logits_V = reference.compute_logits(target, shared_tokens, num_last=1)[-1]

    # Two logits are close if they differ by a few roundings. A floating-point number is rounded in
    # proportion to its size, so the bound is a share of the best logit.
    best, second = logits_V.topk(2).values.tolist()
    rounding = torch.finfo(getattr(torch, target.dtype)).eps
    bound = max(NEAR_TIE, NEAR_TIE_ROUNDINGS * rounding) * abs(best)

    # Check the tokens of both completions. If one completion ended earlier, it has no token (None)
    # at this position, and rounding does not explain the difference.
    tokens = difference["speculative_token"], difference["baseline_token"]
    is_near = all(token is not None and best - float(logits_V[token]) <= bound for token in tokens)
    return {**difference, "top2_gap": best - second, "near_tie": is_near}


def find_first_difference(
    prompt_id: str, ours: Sequence[int], theirs: Sequence[int]
) -> FirstDivergenceDocument | None:
    """Return the first position where two completions differ, and their tokens at this position.

    If one completion ends where the other goes on, the token of the shorter one is None.

    Args:
        prompt_id: the id of the prompt of both completions.
        ours: token ids of the completion with the draft.
        theirs: token ids of the completion without it.

    Returns:
        The difference; None for equal completions.
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
    """Return the indices of the draft tokens that may come next after an accepted path.

    In a chain this is the next draft token, or none at the end of the chain. In a tree these are
    the children of the last node of the path.

    Args:
        proposal: the draft tokens, a chain or a tree.
        path: the indices of the draft tokens that were accepted so far, in order.
    """
    # In a tree, an empty path ends at the root. In a chain, the accepted draft tokens are always
    # the first ones, so the index of the next one is their number, len(path). At the end of the
    # chain the slice is empty.
    if proposal.tree:
        return proposal.tree.children[path[-1] if path else ROOT]
    return range(len(proposal.tokens))[len(path) : len(path) + 1]


def verify_with_wrong_residual(
    proposal: Proposal, probs_NV: Tensor, generator: torch.Generator | None
) -> tuple[Sequence[int], int]:
    """Verify draft tokens by a rule that is wrong on purpose, to check that a test detects it.

    After a rejection, the rule draws the next token from the target's distribution p. Correct would
    be the residual distribution max(p - q, 0), q being the draft's distribution. So the rule may
    draw a rejected token after all, and draft tokens are emitted too often. Acceptance rates do not
    show this bug, because as many draft tokens are accepted as should be.

    Args:
        proposal: the N draft tokens, a chain or a tree.
        probs_NV: [N + 1, V], the target's distribution over the V tokens of the vocabulary: row 0
            after the sequence, and row 1 + i after draft token i.
        generator: the source of random numbers.

    Returns:
        The indices of the accepted draft tokens, and the next token.
    """
    # Accept draft tokens by the right rule, and draw the next token as the wrong rule does: from p,
    # the row after the last accepted token. The generator is on the CPU, so p is moved there.
    path, right_token = verify_sampled(proposal, probs_NV, generator)
    row = path[-1] + 1 if path else 0
    p_V = probs_NV[row].cpu()
    wrong_token = int(torch.multinomial(p_V, 1, generator=generator))

    # If no draft token comes after the accepted ones, none was rejected. The right rule then draws
    # from p, too, so keep its token.
    return path, wrong_token if list_candidates(proposal, path) else right_token


def run_sampling_test(
    target: FrozenTarget,
    proposer: Proposer,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    num_draws: int | None,
    num_tokens: int = 0,
) -> SamplingTestDocument | str:
    """Test whether tokens that are sampled with a draft have the target's distribution.

    After one prompt, two tokens are drawn many times. The first comes from the prefill, the second
    from a round with a draft. A chi-square test compares the frequency of each pair of tokens with
    the pair's exact probability.

    The same test must reject a verification rule that is wrong on purpose (the negative control).
    This control runs first. If it does not reject the wrong rule after few draws, it continues up
    to MAX_DRAWS. The test of the right rule then takes as many draws as the control.

    Args:
        target: the target that verifies.
        proposer: the draft.
        prompts: the prompts of the measurement; `find_most_telling_prompt` chooses one of them.
        settings: the settings of the measurement. If they are greedy, the temperature is set to 1.
        num_draws: how often the two tokens are drawn; 0 for no test. None: as often as suits a
            measurement of `num_tokens` (see `choose_num_draws`).
        num_tokens: how many tokens were generated in the measurement.

    Returns:
        The value of `lossless.sampling_test` in report.json, or the reason why there is no test.
    """
    # Decide how many draws to take, and at which temperature. `sizes` are the numbers of draws
    # after which the control is evaluated.
    if num_draws == 0:
        return "eval.sampling_draws is 0"
    sizes = sorted({choose_num_draws(num_tokens), MAX_DRAWS}) if num_draws is None else [num_draws]
    if settings.sampling.is_greedy:
        settings = replace(settings, sampling=Sampling(temperature=1.0))

    # Choose a prompt, and compute the probability of each outcome after it.
    prompt_ids, prompt_id = find_most_telling_prompt(target, proposer, prompts, settings)
    max_draws = sizes[-1]
    probabilities = compute_pair_probabilities(
        target, prompt_ids, settings.sampling, MIN_EXPECTED / max_draws
    )

    # Keep the numbers of draws that are large enough for a chi-square test.
    sizes = [size for size in sizes if can_compare(probabilities, size)]
    if not sizes:
        return (
            f"in {max_draws} draws, no two outcomes are frequent enough to compare; take more draws"
        )

    # Test the wrong rule with more and more draws, until it is detected.
    draw = partial(_draw_outcomes, target, proposer, prompt_ids, settings)
    for outcomes in draw(
        verify_with_wrong_residual, sizes, arm=1, title="Testing a wrong rule, as a control"
    ):
        control = run_chi_square_test(outcomes, probabilities)
        assert control is not None  # by `can_compare`
        _, control_p_value, _ = control
        num_drawn = len(outcomes)
        if control_p_value <= CONTROL_P_VALUE:
            break

    # Test the right rule with the same number of draws.
    (outcomes,) = draw(verify_sampled, [num_drawn], arm=0, title="Testing sampling")
    result = run_chi_square_test(outcomes, probabilities)
    assert result is not None  # by `can_compare`
    statistic, p_value, num_cells = result
    return {
        "statistic": statistic,
        "p_value": p_value,
        "negative_control_p_value": control_p_value,
        "num_cells": num_cells,
        "num_draws": num_drawn,
        "prompt_id": prompt_id,
        "num_prompt_tokens": len(prompt_ids),
    }


def _draw_outcomes(
    target: FrozenTarget,
    proposer: Proposer,
    prompt_ids: Sequence[int],
    settings: Settings,
    rule: VerifyRule,
    sizes: Sequence[int],
    *,
    arm: int,
    title: str,
) -> Iterator[list[tuple[int, ...]]]:
    """Draw two tokens after a prompt many times, and yield the draws at several sample sizes.

    The sampling test takes such draws twice: with the right verification rule, and, as a control,
    with a rule that is wrong on purpose. The test must detect the wrong rule.

    Args:
        target: the target that verifies.
        proposer: the draft.
        prompt_ids: token ids of the prompt.
        settings: how tokens are sampled.
        rule: the function that verifies draft tokens: it decides which of them are accepted.
        sizes: the numbers of draws, in ascending order, at which all draws so far are yielded.
        arm: 0 for the right rule, 1 for the wrong rule. Each gets other random numbers.
        title: the title of the progress bar.

    Yields:
        All draws so far. A draw has two tokens, or one if that is a stop token.
    """
    # The first token comes from the prefill, the second from a round. Only the first draft token,
    # or the first level of a tree, decides the second token. So nothing further is drafted.
    pair_settings = replace(
        settings,
        max_new_tokens=2,
        num_speculative_tokens=1,
        tree=settings.tree.cut(1) if settings.tree else None,
    )
    decoder = Decoder(target, proposer, rule=rule, compiled=settings.compile)
    # For the settings' seed s, the right rule gets the seed 2 s and the wrong rule 2 s + 1. So
    # neither the two rules nor measurements with different seeds share random numbers.
    generator = torch.Generator().manual_seed(settings.seed * 2 + arm)

    # Continue from the draws of the last size up to the next one.
    outcomes: list[tuple[int, ...]] = []
    for size in sizes:
        num_missing = size - len(outcomes)
        with show_progress(title, num_missing, "draws") as advance:
            for _ in range(num_missing):
                pair = decoder.generate(prompt_ids, generator=generator, **pair_settings.decoding)
                outcomes.append(pair.token_ids)
                advance()
        yield outcomes


def count_check_passes(prompts: Sequence[Prompt], settings: Settings, num_draws: int | None) -> int:
    """Estimate how many passes of the target the checks after a measurement take.

    The checks are the sampling test, and the timing of rounds with fewer draft tokens.

    Args:
        prompts: the prompts of the measurement.
        settings: the settings of the measurement.
        num_draws: how often the sampling test draws tokens; 0 for no test. None: a number that
            suits the most tokens that the measurement may generate (see `choose_num_draws`).
    """
    # Count the passes of the timing.
    num_passes = count_cost_passes(prompts, settings)

    # Add the passes of the sampling test. First it decodes some prompts to choose one of them, with
    # one pass for each token at most. Then it draws tokens. A draw takes two passes: a prefill and
    # a round. All draws are taken twice: for the test itself, and for its negative control, in
    # which a wrong verification rule must be detected.
    if num_draws is None:
        num_draws = choose_num_draws(len(prompts) * settings.max_new_tokens * settings.repeats)
    if num_draws > 0:
        num_probe_passes = min(len(prompts), NUM_PROBED_PROMPTS) * NUM_PROBED_TOKENS
        num_draw_passes = 2 * 2 * num_draws
        num_passes += num_probe_passes + num_draw_passes
    return num_passes


def choose_num_draws(num_tokens: int) -> int:
    """Return how many draws the sampling test takes after a measurement of `num_tokens` tokens.

    A longer measurement gets a longer test: one draw for every TOKENS_PER_DRAW tokens, and at least
    MIN_DRAWS and at most MAX_DRAWS.
    """
    return min(MAX_DRAWS, max(MIN_DRAWS, num_tokens // TOKENS_PER_DRAW))


def compute_pair_probabilities(
    target: FrozenTarget, prompt_ids: Sequence[int], sampling: Sampling, min_probability: float
) -> dict[tuple[int, ...], float]:
    """Compute the exact probability of each frequent pair of tokens after a prompt.

    The probabilities come from transformers, not from this project's decoding. If the first token
    is a stop token, there is no second one. Pairs less probable than `min_probability` are left
    out.

    Returns:
        The two tokens, or the stop token -> the probability.
    """
    probabilities: dict[tuple[int, ...], float] = {}
    # p(a, b) = p(a) p(b | a), so a pair is at most as probable as its first token a. If a is less
    # probable than `min_probability`, so are all pairs that begin with it, and the pass that
    # computes p(b | a) is saved.
    first_V = reference.compute_next_token_probabilities(target, prompt_ids, sampling)
    for token in (first_V >= min_probability).nonzero().flatten().tolist():
        if token in target.eos_token_ids:
            probabilities[(token,)] = float(first_V[token])
            continue
        pair_V = first_V[token] * reference.compute_next_token_probabilities(
            target, [*prompt_ids, token], sampling
        )
        for second_token in (pair_V >= min_probability).nonzero().flatten().tolist():
            probabilities[(token, second_token)] = float(pair_V[second_token])
    return probabilities


def find_most_telling_prompt(
    target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings
) -> tuple[tuple[int, ...], str]:
    """Find the text after which the sampling test detects a wrong verification rule best.

    The wrong rule is `verify_with_wrong_residual`. The test draws two tokens after a text: token 1
    in the prefill, and token 2 in a round with a draft. Only token 2 can show the wrong rule,
    because draft tokens are verified only in a round.

    To find the text, some prompts are decoded. The test could repeat any round of a completion:
    token 2 is the first token of the round, and token 1 the token before it. So each round gets a
    score: the probability of token 1, times how much the wrong rule changes the distribution of
    token 2. With a high score, many draws of the test come to this round, and the wrong rule shows
    in it. The temperature must be above 0.

    Returns:
        The token ids of the text that ends just before token 1 of the round with the highest score,
        and the id of the prompt with which the text begins.
    """
    # Decode as usual. For each round, record how much the wrong rule would change its first token.
    deviations: list[float] = []

    def verify_and_record(
        proposal: Proposal, probs_NV: Tensor, generator: torch.Generator | None
    ) -> tuple[Sequence[int], int]:
        """Verify draft tokens as usual, and record how well a wrong rule would show in this round.

        The sampling test must detect `verify_with_wrong_residual`, a rule that is wrong on purpose.
        It does so best at a round in which this rule would change the distribution of the round's
        first token a lot. To find such a round, the size of the change is appended to `deviations`.

        The decoder calls this function in each round. Row 0 of `probs_NV` [N + 1, V] is the
        target's distribution of the round's first token.
        """
        deviations.append(_compute_deviation(proposal, probs_NV[0]))
        return verify_sampled(proposal, probs_NV, generator)

    decoder = Decoder(target, proposer, rule=verify_and_record)
    best_score = -1.0
    best = (prompts[0].token_ids, prompts[0].id)
    by_length = sorted(prompts, key=lambda prompt: len(prompt.token_ids))
    for prompt in by_length[:NUM_PROBED_PROMPTS]:
        # Decode the prompt, as far as the target's context allows.
        deviations.clear()
        max_new_tokens = min(NUM_PROBED_TOKENS, target.max_length - len(prompt.token_ids))
        (generation,) = decode_batch(
            decoder, PromptBatch(0, (prompt,)), replace(settings, max_new_tokens=max_new_tokens)
        )

        # Compute the probabilities [T, V] of each token of the completion, and of one more. The
        # logits of the prompt's first `skipped` tokens are not needed, so row t holds the
        # probabilities of the token at position `skipped` + t + 1 of the sequence.
        sequence = (*prompt.token_ids, *generation.token_ids)
        num_last = len(generation.token_ids) + 1
        probs_TV = settings.sampling.compute_probabilities(
            reference.compute_logits(target, sequence, num_last)
        )
        skipped = len(sequence) - num_last
        length = len(prompt.token_ids) + 1  # tokens of the sequence before the round

        # Score each round. Its token 1, the token before the round, is at `position`. The first
        # recorded deviation is that of the prefill, which is no round.
        for entry, deviation in zip(generation.rounds, deviations[1:], strict=True):
            position = length - 1
            row = position - 1 - skipped
            score = float(probs_TV[row, sequence[position]]) * deviation
            if score > best_score:
                best_score = score
                best = (sequence[:position], prompt.id)
            length += len(entry.emitted)
    return best


def _compute_deviation(proposal: Proposal, p_V: Tensor) -> float:
    """Compute how much a wrong verification rule changes the distribution of a round's first token.

    `find_most_telling_prompt` looks for a round in which this number is large. The wrong rule is
    `verify_with_wrong_residual`. Over a vocabulary of V tokens, let

    - p [V] be the target's distribution of the round's first token, which a lossless rule keeps;
    - a [V] be the probability that each token is drafted and accepted;
    - beta = sum_v a be the probability that a draft token is accepted.

    After a rejection, the wrong rule draws from p. So it gives the token the distribution
    a + (1 - beta) p. The result is the total variation distance between this distribution and p,
    which is 1/2 sum_v |a - beta p|.

    Args:
        proposal: the draft tokens of the round.
        p_V: the target's distribution of the round's first token.
    """
    # The draft tokens at the first position: one of a chain, or the children of a tree's root.
    candidates = list_candidates(proposal, [])
    if not candidates:
        return 0.0

    # q [V] is the probability that each token is drafted. If the candidates were not drawn (greedy
    # drafting), q is 1 at each of them, and 0 elsewhere. Otherwise the first candidate was drawn
    # from q. For a tree this is an approximation, because it ignores the other candidates.
    if proposal.probabilities is None:
        tokens = [proposal.tokens[node] for node in candidates]
        q_V = F.one_hot(torch.tensor(tokens, device=p_V.device), len(p_V)).sum(0)
    else:
        q_V = proposal.probabilities[candidates[0]]

    # a = min(p, q): a drafted token is accepted with probability min(1, p / q).
    accepted_V = torch.minimum(p_V, q_V.to(p_V.dtype))
    return float((accepted_V - accepted_V.sum() * p_V).abs().sum() / 2)
