"""The exact distribution of decoded tokens.

Every outcome of the real rule is enumerated, none is sampled.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from specdistill.decoding.proposer import Proposal
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.verify import verify_sampled_chain

Distribution = Callable[[tuple[int, ...]], Tensor]  # a text -> float64 [V], of the token after it
Propose = Callable[[list[int], Sampling, list[float]], Proposal]
Outcome = tuple[tuple[int, ...], float]  # the tokens that a round adds, and how likely they are
SAMPLING = Sampling(temperature=0.8)


def cells(breakpoints: Tensor) -> list[tuple[float, float]]:
    """Return (midpoint, width) of the pieces into which breakpoints cut [0, 1)."""
    points = (
        torch.cat((breakpoints.clamp(0, 1), torch.tensor([0.0, 1.0], dtype=torch.float64)))
        .sort()
        .values.tolist()
    )
    return [
        ((low + high) / 2, high - low) for low, high in itertools.pairwise(points) if high > low
    ]


def random_distribution(size: int, seed: int) -> Distribution:
    """Return a random distribution after each text.

    After some texts a token has probability zero.
    """

    def distribution(text: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *text)) % 2**31)
        weights = torch.rand(size, dtype=torch.float64, generator=generator)
        if len(text) % 3 == 0:
            weights[(seed + len(text)) % size] = 0
        return weights / weights.sum()

    return distribution


def distribution_of(model: LlamaForCausalLM, sampling: Sampling = SAMPLING) -> Distribution:
    @functools.cache
    @torch.inference_mode()
    def distribution(text: tuple[int, ...]) -> Tensor:
        return sampling.compute_probabilities(model(input_ids=torch.tensor([text])).logits[0, -1:])[
            0
        ].double()

    return distribution


def plain_distribution(
    target: Distribution, prompt: tuple[int, ...] = (), length: int = 2
) -> Tensor:
    """Return the distribution [V, V, …] of the next tokens, decoded one by one."""
    size = len(target(prompt))
    distribution = torch.ones((size,) * length, dtype=torch.float64)
    for tokens in itertools.product(range(size), repeat=length):
        for index, token in enumerate(tokens):
            distribution[tokens] *= target(prompt + tokens[:index])[token]
    return distribution


def decoded(
    rounds: Callable[[tuple[int, ...]], Iterator[Outcome]], size: int, length: int
) -> Tensor:
    """Return the distribution of `length` tokens decoded in rounds.

    `rounds` gives the outcomes of a round after the tokens so far.
    """
    distribution = torch.zeros((size,) * length, dtype=torch.float64)
    unfinished: dict[tuple[int, ...], float] = {(): 1.0}
    # Every round adds a token: all that leads to a text is known before its next round.
    for done in range(length):
        for text in [text for text in unfinished if len(text) == done]:
            weight = unfinished.pop(text)
            for tokens, chance in rounds(text):
                written = (*text, *tokens)[:length]
                unfinished[written] = unfinished.get(written, 0.0) + weight * chance
    for written, weight in unfinished.items():
        distribution[written] += weight
    return distribution


def output_distribution(
    target: Distribution,
    propose: Propose,
    prompt: tuple[int, ...] = (),
    sampling: Sampling = SAMPLING,
    length: int = 2,
) -> Tensor:
    """Return the distribution of the next tokens, decoded in rounds.

    Every cell of the proposer's and of the rule's uniforms is visited.
    """
    size = len(target(prompt))

    def outcomes(text: tuple[int, ...], uniforms: list[float], weight: float) -> Iterator[Outcome]:
        proposal = propose(list(text), sampling, uniforms)
        if proposal.probabilities is not None and len(proposal.tokens) > len(uniforms):
            # The distribution of the next draft token is known: visit each of its tokens.
            sums = proposal.probabilities[len(uniforms)].double().cumsum(-1)
            for midpoint, width in cells(sums / sums[-1]):
                yield from outcomes(text, [*uniforms, midpoint], weight * width)
        else:
            yield from verified(text, proposal, weight)

    def verified(text: tuple[int, ...], proposal: Proposal, weight: float) -> Iterator[Outcome]:
        tokens, k = tuple(proposal.tokens), len(proposal.tokens)
        p = torch.stack([target(text + tokens[:index]) for index in range(k + 1)])
        q = None if proposal.probabilities is None else proposal.probabilities.double()
        explicit = (
            F.one_hot(torch.tensor(tokens, dtype=torch.long), size).double() if q is None else q
        )
        tests = [
            cells((p[i, token] / explicit[i, token]).unsqueeze(0)) for i, token in enumerate(tokens)
        ]
        sums = torch.cat([(p[:k] - explicit).clamp_min(0), p[k:]]).cumsum(-1)
        draws = cells((sums / sums[:, -1:].clamp_min(1e-300)).flatten())
        for cell in itertools.product(*tests, draws):
            midpoints, widths = zip(*cell, strict=True)
            uniforms = torch.tensor([midpoints], dtype=torch.float64)
            count, last = verify_sampled_chain(
                torch.tensor([tokens], dtype=torch.long),
                p[None],
                None if q is None else q[None],
                uniforms,
            )
            yield (*tokens[: int(count)], int(last)), weight * math.prod(widths)

    return decoded(lambda text: outcomes(prompt + text, [], 1.0), size, length)
