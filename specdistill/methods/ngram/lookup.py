"""N-gram lookup (prompt lookup; LLMA, arXiv 2304.04487): the draft is what followed the last tokens where they occurred before.

A dictionary leads from every n-gram of the sequence, `min` to `max` tokens long, to the place after its last occurrence. Each
token is indexed once, by at most max - min + 1 entries, and a proposal asks for as many at most: a round costs what its own
tokens cost, however long the sequence is. The index grows by about 270 bytes a token at the default lengths.

The longest n-gram that is found decides, since more agreement says more about what comes next; of its occurrences the latest, whose
surroundings are most like the present ones. With x_0 .. x_{T-1} the sequence and x_s the token after that occurrence, draft token i is
x_{s + i}. An occurrence near the end has only p = T - s tokens after it: the sequence seems to repeat with period p, and the draft
repeats it further, x_{s + i mod p}. So every match gives as many tokens as were asked for, and no older occurrence has to be kept.

Engines have rules of their own, which `rule` names, so that what they will accept can be measured here. vLLM's takes the first occurrence,
and what follows it up to the end of the text. llama.cpp's `ngram-simple` compares n = max tokens, the last of which has just been sampled
and is never drafted; it takes the latest occurrence that does not begin the text, if n tokens or more follow it, in a text of more than
n + K + 1 tokens.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class NgramLookup:
    """The index of one sequence, which grows with it. The fields are the keys of `eval.ngram`. No torch: engines load it too.

    min, max: tokens of the n-grams that are looked up; llama.cpp's rule takes the latter for both.
    lookup: `sequence` finds n-grams of prompt and output, `prompt` those of the prompt alone; what followed them may reach into the output.
        The prompt is what stands before the last token when it is asked first.
    """

    min: int = 1
    max: int = 3
    lookup: str = "sequence"
    rule: str = "specdistill"
    _after: dict[tuple[int, ...], int] = field(
        default_factory=dict
    )  # n-gram -> index of the token after what counts of it
    _indexed: int = 0  # tokens at the beginning of the sequence whose n-grams are in it

    def __post_init__(self) -> None:
        if self.rule == "llama.cpp":
            self.min = self.max

    @property
    def settings(self) -> dict[str, Any]:
        own = {"lookup": self.lookup} if self.rule == "specdistill" else {"rule": self.rule}
        return {"min": self.min, "max": self.max, **own}

    def restart(self) -> None:
        """Forget the sequence."""
        self._after = {}
        self._indexed = 0

    def find(self, text: list[int], k: int) -> list[int]:
        """Up to k draft tokens for a sequence that begins with the one before; none where nothing is found."""
        if self.lookup == "sequence" or not self._indexed:
            self._index(text)
        for n in range(min(self.max, len(text)), self.min - 1, -1):
            start = self._after.get(tuple(text[-n:]))
            if start is not None:
                return self._continued(text, start, k)
        return []

    def _continued(self, text: list[int], start: int, k: int) -> list[int]:
        """Up to k tokens that continue the text as it went on at `start`."""
        if self.rule == "vllm":
            return text[start : start + k]
        if self.rule == "llama.cpp":
            found = text[start : min(start + k, len(text) - 1)]
            return found if len(found) >= self.max and len(text) > self.max + k + 2 else []
        period = len(text) - start
        return [text[start + i % period] for i in range(k)]

    def _index(self, text: list[int]) -> None:
        """Take in the n-grams that end before the last token: nothing has followed that one yet."""
        left_out = 1 if self.rule == "llama.cpp" else 0  # tokens at both ends
        for end in range(self._indexed + 1, len(text) - left_out):
            for n in range(self.min, min(self.max, end - left_out) + 1):
                ngram = tuple(text[end - n : end])
                self._after[ngram] = self._after.get(ngram, end) if self.rule == "vllm" else end
        self._indexed = len(text) - left_out - 1
