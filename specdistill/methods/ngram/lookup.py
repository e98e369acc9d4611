"""N-gram lookup (prompt lookup; LLMA, arXiv 2304.04487).

The draft is what followed the last tokens where they occurred before.

A dictionary maps every n-gram of the sequence, `min` to `max` tokens long, to the position after
its last occurrence. Each token is indexed once, by at most max - min + 1 entries, and a proposal
looks up at most as many. So the cost of a round depends on its own tokens only, however long the
sequence is. The index grows by about 270 bytes a token at the default lengths.

The longest n-gram that is found decides, since more agreement says more about what comes next. Of
its occurrences the latest decides, because its surroundings are most like the present ones. With
x_0 .. x_{T-1} the sequence and x_s the token after that occurrence, draft token i is x_{s + i}. An
occurrence near the end has only p = T - s tokens after it. Then the sequence seems to repeat with
period p, and the draft repeats it further: x_{s + i mod p}. So every match gives as many tokens as
were asked for, and no older occurrence has to be kept.

Engines have their own rules. With `rule` they can be used here, to measure what an engine will
accept. vLLM's rule takes the first occurrence, and what follows it up to the end of the text.
llama.cpp's `ngram-simple` compares n = max tokens. The last of them has just been sampled and is
never drafted. Of the occurrences that do not begin the text, the rule takes the latest. It drafts
only if at least n tokens follow this occurrence, and if more than n + K + 1 tokens stand before the
last token of the text.
"""

from dataclasses import dataclass, field


@dataclass
class NgramLookup:
    """The index of one sequence, which grows with it. No torch: engines load it too.

    The fields are the keys of `eval.ngram`.

    Attributes:
        min: the fewest tokens of an n-gram. llama.cpp's rule uses `max` instead.
        max: the most tokens of an n-gram.
        lookup: `sequence` finds n-grams of prompt and output, `prompt` those of the prompt alone.
            The tokens that followed them may reach into the output. The prompt is the text at the
            first call of `find`, without its last token.
        rule: `specdistill`, `vllm` or `llama.cpp`.
    """

    min: int = 1
    max: int = 3
    lookup: str = "sequence"
    rule: str = "specdistill"
    # Maps an n-gram to the position after its occurrence that counts (the first or the latest).
    _next_positions: dict[tuple[int, ...], int] = field(default_factory=dict)
    _num_indexed: int = 0  # number of tokens at the beginning of the sequence that are indexed

    def __post_init__(self) -> None:
        # llama.cpp's rule compares n-grams of one length.
        if self.rule == "llama.cpp":
            self.min = self.max

    @property
    def settings(self) -> dict[str, object]:
        """The settings that have an effect under the chosen rule, for reports."""
        rule_settings = (
            {"lookup": self.lookup} if self.rule == "specdistill" else {"rule": self.rule}
        )
        return {"min": self.min, "max": self.max, **rule_settings}

    def restart(self) -> None:
        """Forget the sequence: empty the index of its n-grams."""
        self._next_positions = {}
        self._num_indexed = 0

    def find(self, text: list[int], k: int) -> list[int]:
        """Return up to k draft tokens for a sequence; none if nothing is found.

        Args:
            text: the sequence. It begins with the text of the call before.
            k: the most draft tokens.
        """
        # With lookup=prompt only the first call adds n-grams: its text is the prompt.
        if self.lookup == "sequence" or not self._num_indexed:
            self._index(text)

        # Look up the longest n-gram first, since more agreement says more about the next token.
        for n in range(min(self.max, len(text)), self.min - 1, -1):
            start = self._next_positions.get(tuple(text[-n:]))
            if start is not None:
                return self._continue_text(text, start, k)
        return []

    def _continue_text(self, text: list[int], start: int, k: int) -> list[int]:
        """Return up to k draft tokens: those that follow an earlier match in the text.

        Args:
            text: the sequence.
            start: the index in the text of the first token after the match.
            k: the most draft tokens.
        """
        # vLLM's rule ends at the end of the text.
        if self.rule == "vllm":
            return text[start : start + k]

        # llama.cpp's rule never drafts the last token of the text. It drafts only if the draft has
        # at least n tokens, where n is the length of an n-gram, and if the text has more than
        # n + k + 2 tokens.
        if self.rule == "llama.cpp":
            n = self.max
            continuation = text[start : min(start + k, len(text) - 1)]
            is_long_enough = len(continuation) >= n and len(text) > n + k + 2
            return continuation if is_long_enough else []

        # specdistill's rule always gives k tokens: past the end of the text, the tokens from
        # `start` on are repeated.
        period = len(text) - start
        return [text[start + i % period] for i in range(k)]

    def _index(self, text: list[int]) -> None:
        """Add the text's new n-grams, each with the position after it, to the index."""
        # The n-grams lie in `text[first:stop]`. Nothing follows the text's last token yet, so it is
        # left out. llama.cpp's rule also leaves out the first token and the second to last.
        first = 1 if self.rule == "llama.cpp" else 0
        stop = len(text) - (2 if self.rule == "llama.cpp" else 1)

        # Index every n-gram that ends before a new position `end`. vLLM's rule keeps the first
        # occurrence of an n-gram, the other rules keep the latest.
        for end in range(self._num_indexed + 1, stop + 1):
            for n in range(self.min, min(self.max, end - first) + 1):
                ngram = tuple(text[end - n : end])
                self._next_positions[ngram] = (
                    self._next_positions.get(ngram, end) if self.rule == "vllm" else end
                )
        self._num_indexed = stop
