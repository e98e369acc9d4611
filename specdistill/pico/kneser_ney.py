"""An n-gram language model with interpolated Kneser-Ney smoothing, pico's baseline (Kneser & Ney 1995; Chen & Goodman 1999).

    P_n(w | h) = max(c(h w) - d, 0) / c(h) + d * N1+(h .) / c(h) * P_{n-1}(w | h')

where h' drops the oldest token of h, N1+(h .) counts the different tokens seen after h, and below the highest order c counts in how
many different contexts an n-gram was seen instead of how often. The last backoff is the uniform distribution.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class KneserNey:
    """Counts of a token stream, as sorted integer keys: vocab_size ** order must fit 63 bits."""

    def __init__(self, stream: Ints, vocab_size: int, order: int = 5, discount: float = 0.75) -> None:
        assert vocab_size**order < 2**63
        self.vocab_size, self.order, self.discount = vocab_size, order, discount
        self.tables: list[tuple[Ints, Ints]] = []  # per n: keys of n-grams and their counts
        self.contexts: list[tuple[Ints, Ints, Ints]] = []  # per n: keys of contexts, total counts, different followers
        longer: Ints | None = None
        for n in range(order, 0, -1):
            if longer is None:
                keys, counts = np.unique(_windows(stream, n, vocab_size), return_counts=True)
            else:  # one for each different token before it
                keys, counts = np.unique(longer % vocab_size**n, return_counts=True)
            longer = keys
            context, start = np.unique(keys // vocab_size, return_index=True)
            totals = np.add.reduceat(counts, start)
            self.tables.insert(0, (keys, counts))
            self.contexts.insert(0, (context, totals, np.diff(np.append(start, len(keys)))))

    def probabilities(self, stream: Ints) -> NDArray[np.float64]:
        """P(token | the order - 1 tokens before it) for every token that has that many before it: [N - order + 1]."""
        result = np.full(len(stream) - self.order + 1, 1.0 / self.vocab_size)
        for n in range(1, self.order + 1):
            grams = _windows(stream[self.order - n :], n, self.vocab_size)
            counts = _lookup(*self.tables[n - 1], grams)
            keys, totals, followers = self.contexts[n - 1]
            total = _lookup(keys, totals, grams // self.vocab_size)
            different = _lookup(keys, followers, grams // self.vocab_size)
            seen = total > 0
            discounted = np.maximum(counts - self.discount, 0) + self.discount * different * result
            result = np.where(seen, discounted / np.maximum(total, 1), result)
        return result


def _windows(stream: Ints, n: int, base: int) -> Ints:
    """Every run of n tokens as one integer."""
    keys = np.zeros(len(stream) - n + 1, dtype=np.int64)
    for offset in range(n):
        keys = keys * base + stream[offset : offset + len(keys)]
    return keys


def _lookup(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """values of the wanted keys, 0 for a missing key."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], 0)
