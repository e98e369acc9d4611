"""What a device makes of a training step that was accounted for: whether it holds it, and how many tokens a second it takes.

Peaks are the makers' (dense bfloat16 with float32 sums); the shares of them that a step reaches are assumed, and nothing is measured.
"""

from dataclasses import dataclass

from specdistill.planning.accounting import Account

USABLE = 0.92  # of the memory: the rest is the driver's context and what the allocator cannot use
MATRIX_SHARE, TRAFFIC_SHARE = 0.5, 0.8  # of the peaks, reached by matrix products and by all other operations


@dataclass(frozen=True)
class Device:
    """memory: bytes. flops, bandwidth: a second; bandwidth in bytes."""

    name: str
    memory: float
    flops: float
    bandwidth: float

    def holds(self, size: float) -> bool:
        return size <= USABLE * self.memory

    def tokens_per_second(self, step: Account, num_tokens: int, other_flops: float) -> float:
        """Of a step over so many tokens. other_flops: of what the account leaves out, the target's layers."""
        products = (step.flops + other_flops) / (MATRIX_SHARE * self.flops)
        return num_tokens / (products + step.traffic_bytes / (TRAFFIC_SHARE * self.bandwidth))


H100 = Device("H100", 80 * 2**30, 989e12, 3.35e12)
DEVICES = (
    Device("RTX 4090", 24 * 2**30, 165e12, 1.01e12),
    Device("L40S", 45 * 2**30, 362e12, 0.864e12),
    Device("A100 80GB", 80 * 2**30, 312e12, 2.04e12),
    H100,
    Device("H200", 140 * 2**30, 989e12, 4.8e12),
    Device("B200", 179 * 2**30, 2250e12, 8e12),
)
