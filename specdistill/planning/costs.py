"""What a draft costs to train, and the speedup to expect of it: formulas over sizes, nothing measured.

Symbols: H hidden size, I MLP width, K draft tokens a round, alpha the acceptance rate, taken as equal at every position; c a draft step
and v a verification of K tokens, both in plain target steps at batch 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdistill.methods.sizes import Parts, Shape
from specdistill.statistics.theory import expected_acceptance_length, predicted_speedup

MAX_K = 8
# What an engine adds to bytes and layers: Llama-3.1-8B with its EAGLE-3 head in vLLM issue 20780 takes 8.35 + 1.016 K ms a round where a
# plain step takes 7.07, so v = 1.18 and c = 0.144, against v = 1 and c = 0.050 of the bytes alone; 0.094 of 32 layers are 3.
VERIFY_OVERHEAD = 0.18
LAYERS_OVERHEAD = 3.0
# float32 weight, gradient and two AdamW moments; Muon keeps one moment of the matrices.
BYTES_PER_TRAINED, BYTES_PER_COPIED = 16, 4


@dataclass(frozen=True)
class Expected:
    """The best K at one alpha, and what it gives."""

    num_speculative_tokens: int
    acceptance_length: float
    speedup: float


def step_shares(parts: Parts, target_read: float, target_layers: int) -> dict[str, float]:
    """A draft step over a target step, by weights read and by layers run: the larger is c."""
    return {"weights": parts.read / target_read, "layers": parts.num_layers / target_layers}


def best_k(alpha: float, verify: Sequence[float], c: float, passes: str = "K") -> Expected:
    """S = AL / (v + c·K) at the fewest tokens that come within 1 % of the best, AL = 1 + alpha + … + alpha^K (arXiv 2211.17192).

    verify: v for K = 1, 2, … passes: of the draft in a round, "K", "1" or "0"; c·K stands for as many times c.
    """
    lengths = [expected_acceptance_length(alpha, k) for k in range(1, len(verify) + 1)]
    speedups = [
        float(predicted_speedup(length, verify[k - 1], {"K": c * k, "1": c, "0": 0.0}[passes]))
        for k, length in enumerate(lengths, 1)
    ]
    index = next(index for index, speedup in enumerate(speedups) if speedup >= 0.99 * max(speedups))
    return Expected(index + 1, lengths[index], speedups[index])


def speedup_range(
    alphas: tuple[float, float], verify: Sequence[float], shares: Mapping[str, float], target_layers: int, passes: str = "K"
) -> tuple[Expected, Expected]:
    """The two ends: the lower alpha with c and an engine's overhead, and the higher alpha where weights read are all that counts.

    verify: v for K = 1, 2, … by weights read: 1 for a dense target, more for a mixture whose tokens go to different experts; the higher
    end takes 1. shares: of `step_shares`. passes: of `best_k`. A draft that runs no layers launches none.
    """
    overhead = LAYERS_OVERHEAD / target_layers if shares["layers"] else 0.0
    low = best_k(alphas[0], [v + VERIFY_OVERHEAD for v in verify], max(shares.values()) + overhead, passes)
    return low, best_k(alphas[1], [1.0] * len(verify), shares["weights"], passes)


def training_bytes(parts: Parts, target_bytes: int, shape: Shape, vocabulary: int, num_steps: int, num_tokens: int) -> int:
    """Device memory of online training, roughly: target, draft with gradients and AdamW in float32, frozen tables, activations.

    Activations of each token and unrolled step: 8H + 4I numbers a layer in bfloat16, and four rows of logits in float32. Attention
    scores and what fused or recomputing kernels spare are left out.

    vocabulary: tokens the draft's logits span. num_steps: unrolled steps. num_tokens: in a micro-batch.
    """
    layers = 2 * (8 * shape.hidden_size + 4 * shape.intermediate_size) * parts.num_layers
    activations = num_tokens * num_steps * (layers + 16 * vocabulary)
    return target_bytes + BYTES_PER_TRAINED * parts.parameters + BYTES_PER_COPIED * parts.copied + activations
