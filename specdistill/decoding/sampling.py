"""Turn logits into the distribution that is sampled, and draw from it.

Temperature comes first, then top-k, then top-p, for the target and the draft alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

Random = torch.Generator | None  # None: torch's default generator
Generators = Sequence[Random]


@dataclass(frozen=True)
class Sampling:
    """The sampling settings.

    Attributes:
        temperature: 0 is greedy.
        top_p: 1 keeps every token.
        top_k: 0 keeps every token.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always chosen."""
        return self.temperature == 0.0

    def compute_probabilities(self, logits: Tensor) -> Tensor:
        """Return the distribution that tokens are sampled from, after temperature, top-k and top-p.

        The temperature must be above 0.

        Args:
            logits: [..., V], V is the vocabulary size.

        Returns:
            Probabilities [..., V] in float32.
        """
        assert not self.is_greedy
        # The warpers of transformers take token ids, which these two do not read (None), and scores
        # of shape [rows, V]. The last line restores the shape of the logits.
        scores = logits.float().flatten(0, -2) / self.temperature
        if self.top_k:
            scores = TopKLogitsWarper(self.top_k)(None, scores)
        if self.top_p < 1:
            scores = TopPLogitsWarper(self.top_p)(None, scores)
        return scores.softmax(-1).view(logits.shape)


GREEDY = Sampling()


def draw_uniforms(count: int, generators: Generators) -> Tensor:
    """Draw `count` uniform numbers in [0, 1) from each of B generators.

    The generators are those of the B sequences of a batch. So the random numbers of a sequence do
    not depend on the other sequences.

    Returns:
        [B, count] in float64 on the CPU.
    """
    rows = []
    for generator in generators:
        rows.append(torch.rand(count, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def draw_tokens(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token from each of B distributions, given one uniform random number for each.

    The drawn token is the first whose cumulative probability exceeds the random number times the
    sum of the row. All sums are in float64.

    Args:
        probabilities: [B, V] over a vocabulary of V tokens. A row need not sum to 1.
        uniform: random numbers [B] in [0, 1).

    Returns:
        Token ids [B].
    """
    cumulative = probabilities.double().cumsum(-1)
    threshold = uniform.double() * cumulative[:, -1]
    # right=True skips tokens of weight zero.
    index = torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True).squeeze(-1)
    # If the threshold rounds up to the total, no cumulative sum exceeds it. The last token with a
    # weight is drawn then.
    last_index = probabilities.shape[-1] - 1 - probabilities.flip(-1).gt(0).int().argmax(-1)
    return torch.minimum(index, last_index)
