"""The exact distribution of decoded tokens: every outcome of the real rule is enumerated, none is sampled."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specdistill.decoding.proposer import Proposal
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.verify import rejection

Propose = Callable[[list[int], Sampling, list[float]], Proposal]
SAMPLING = Sampling(temperature=0.8)
LENGTH = 2


def cells(breakpoints: Tensor) -> list[tuple[float, float]]:
    """(midpoint, width) of the pieces into which breakpoints cut [0, 1)."""
    points = torch.cat((breakpoints.clamp(0, 1), torch.tensor([0.0, 1.0], dtype=torch.float64))).sort().values.tolist()
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(points) if high > low]


@torch.inference_mode()
def output_distribution(target: LlamaForCausalLM, propose: Propose, prompt: list[int], sampling: Sampling) -> Tensor:
    """The exact distribution of the next LENGTH tokens: every cell of the proposer's and of the rule's uniforms is visited."""
    size = target.config.vocab_size
    distribution = torch.zeros((size,) * LENGTH, dtype=torch.float64)

    def target_distributions(text: list[int], proposed: list[int]) -> Tensor:
        logits = target(input_ids=torch.tensor([text + proposed])).logits[:, len(text) - 1 :]
        return sampling.probabilities(logits).double()

    def proposals(text: list[int], uniforms: list[float], weight: float) -> None:
        proposal = propose(text, sampling, uniforms)
        if proposal.probabilities is not None and len(proposal.tokens) > len(uniforms):
            # The distribution of the next draft token is known: visit each of its tokens.
            sums = proposal.probabilities[len(uniforms)].double().cumsum(-1)
            for midpoint, width in cells(sums / sums[-1]):
                proposals(text, [*uniforms, midpoint], weight * width)
        else:
            verify(text, proposal, weight)

    def verify(text: list[int], proposal: Proposal, weight: float) -> None:
        tokens, k = proposal.tokens, len(proposal.tokens)
        p = target_distributions(text, tokens)
        q = None if proposal.probabilities is None else proposal.probabilities.double()[None]
        explicit = (
            torch.zeros(1, 0, size) if not k else torch.nn.functional.one_hot(torch.tensor([tokens]), size) if q is None else q
        )
        tests = [cells((p[0, i, token] / explicit[0, i, token]).unsqueeze(0)) for i, token in enumerate(tokens)]
        sums = torch.cat([(p[0, :k] - explicit[0]).clamp_min(0), p[0, k:]]).cumsum(-1)
        draws = cells((sums / sums[:, -1:].clamp_min(1e-300)).flatten())
        for cell in itertools.product(*tests, draws):
            uniforms = torch.tensor([[midpoint for midpoint, _ in cell]], dtype=torch.float64)
            volume = weight
            for _, width in cell:
                volume *= width
            count, last = rejection(torch.tensor([tokens], dtype=torch.long), p, q, uniforms)
            finish([*text, *tokens[: int(count)], int(last)], volume)

    def finish(text: list[int], weight: float) -> None:
        written = tuple(text[len(prompt) : len(prompt) + LENGTH])
        unfinished[written] = unfinished.get(written, 0.0) + weight

    unfinished: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(LENGTH):  # every round adds a token: all that leads to a text is known before its next round
        for written in [written for written in unfinished if len(written) == length]:
            proposals([*prompt, *written], [], unfinished.pop(written))
    for written, weight in unfinished.items():
        distribution[written] += weight
    return distribution


@torch.inference_mode()
def plain_distribution(target: LlamaForCausalLM, prompt: list[int], sampling: Sampling) -> Tensor:
    first = sampling.probabilities(target(input_ids=torch.tensor([prompt])).logits[0, -1:])[0]
    rows = torch.tensor([[*prompt, token] for token in range(target.config.vocab_size)])
    second = sampling.probabilities(target(input_ids=rows).logits[:, -1])
    return (first.unsqueeze(1) * second).double()
