"""From logits to the distribution that is sampled: temperature, then top-k, then top-p, for the target and the draft alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

Random = torch.Generator | None  # None: torch's default generator
Generators = Sequence[Random]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 keep every token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., V] logits -> [..., V] float32 probabilities of the sampled distribution. Needs a temperature above 0."""
        assert not self.is_greedy
        scores = logits.float().flatten(0, -2) / self.temperature
        if self.top_k:
            scores = TopKLogitsWarper(self.top_k)(None, scores)
        if self.top_p < 1:
            scores = TopPLogitsWarper(self.top_p)(None, scores)
        return scores.softmax(-1).view(logits.shape)

    def confidence(self, logits_BV: Tensor) -> Tensor:
        """[B] the probability of each row's best token: at the temperature, at 1 when greedy, before top-k and top-p."""
        return (logits_BV.float() / (self.temperature or 1.0)).softmax(-1).amax(-1)


GREEDY = Sampling()


def uniforms(count: int, generators: Generators) -> Tensor:
    """[B, count] in [0, 1), each row from its own generator. float64, on the CPU."""
    return torch.stack(
        [torch.rand(count, generator=generator, dtype=torch.float64) for generator in generators]
    )


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: [B, V] weights (any positive scale) and [B] uniforms in [0, 1) -> [B] token ids. float64 inside."""
    cumulative = probabilities.double().cumsum(-1)
    threshold = uniform.double() * cumulative[:, -1]
    # right=True skips tokens of weight zero; the clamp guards a threshold that rounds up to the total.
    index = torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True).squeeze(-1)
    last = probabilities.shape[-1] - 1 - probabilities.flip(-1).gt(0).int().argmax(-1)
    return torch.minimum(index, last)
