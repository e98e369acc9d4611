"""Suffix decoding (arXiv 2411.04975): the draft is what most often followed the last tokens, in the request or in outputs of earlier ones.

Let x be the sequence and the draft tokens so far. The longest suffix of x, of `min` to `max` tokens, that was followed by a token in the
request (prompt and output) or in a past output decides; if both have it, the request, which is most like itself. The next draft token is
the one that followed it most often, of several the latest. Its share of all that followed estimates its probability, and the product of
the shares that of the draft: it ends before this falls below `min_token_prob`, or after `max_spec_factor` tokens for each that agreed.

Two tries (trie.py) hold the counts, one for the request and one for all past outputs. A round costs at most `max`^2 steps of a dictionary
for each token that it drafts or commits, however long the texts are. Memory grows by about 450 bytes per token of source code.

Past outputs are those that `remember` is given; the proposer adds nothing by itself.
"""

from collections.abc import Sequence
from typing import Any

from specdistill.methods import sizes
from specdistill.methods.lookups import lookup_method
from specdistill.methods.suffix.config import SuffixConfig
from specdistill.methods.suffix.trie import SuffixTrie

PUBLISHED = sizes.PublishedFigures(
    None, "none published for a suite and K alone", 0, "nothing to train"
)


class SuffixLookup:
    """The request's trie and that of past outputs, which copies share. keys: of `eval.suffix`."""

    def __init__(self, **keys: Any) -> None:
        self.config = SuffixConfig(**keys)
        self.settings = self.config.model_dump()
        self._request, self._past = SuffixTrie(self.config.max), SuffixTrie(self.config.max)
        self._outputs: list[Sequence[int]] = []  # of earlier requests, which `_past` counts

    def restart(self) -> None:
        """Forget the request."""
        self._request = SuffixTrie(self.config.max)

    def remember(self, outputs: Sequence[Sequence[int]]) -> None:
        """See `specdistill.decoding.proposer.Remembering`. Counts them all again unless some were only added."""
        kept = (
            list(outputs[-self.config.max_cached_requests :])
            if self.config.max_cached_requests
            else []
        )
        if kept[: len(self._outputs)] != self._outputs:
            self._outputs, self._past = [], SuffixTrie(self.config.max)
        for output in kept[len(self._outputs) :]:
            self._past.extend(output)
            self._past.end()
        self._outputs = kept

    def find(self, text: list[int], k: int) -> list[int]:
        """Up to k draft tokens for a request that begins with the text before."""
        self._request.extend(text[len(self._request.tokens) :])
        tokens, text, probability = list[int](), text[-self.config.max :], 1.0
        token, share, length = self._next(text, self.config.max)
        most = min(k, int(self.config.max_spec_factor * length))
        while (
            len(tokens) < most
            and length
            and (probability := probability * share) >= self.config.min_token_prob
        ):
            tokens.append(token)
            text = [*text, token][-self.config.max :]
            token, share, length = self._next(text, length + 1)
        return tokens

    def _next(self, text: list[int], longest: int) -> tuple[int, float, int]:
        """The likeliest token after the longest suffix of up to `longest` tokens that something followed, its share, and how long that
        suffix is; 0 for none."""
        for length in range(min(longest, len(text)), self.config.min - 1, -1):
            for trie in (self._request, self._past):
                if found := trie.next_token(text[-length:]):
                    return *found, length
        return 0, 0.0, 0


NOTE = "looks the last tokens up in the sequence so far and in earlier outputs"
METHOD = lookup_method("suffix", SuffixLookup, note=NOTE, published=PUBLISHED)
