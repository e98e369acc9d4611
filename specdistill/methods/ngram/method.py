"""N-gram lookup (prompt lookup; LLMA, arXiv 2304.04487): the draft is what followed the last tokens where they occurred before.

A dictionary leads from every n-gram of the sequence, `min_ngram` to `max_ngram` tokens long, to the place after its last occurrence. Each
token is indexed once, by at most max_ngram - min_ngram + 1 entries, and a proposal asks for as many at most: a round costs what its own
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
from pathlib import Path
from typing import Any

import torch

from specdistill.decoding.proposer import BatchProposer, DecodingState, Proposal, Proposer, RowByRow
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import DynamicTree, StaticTree
from specdistill.methods import sizes
from specdistill.methods.contract import Implementation
from specdistill.methods.ngram.config import NgramConfig
from specdistill.statistics.theory import alpha_from_acceptance_length
from specdistill.targets.frozen import FrozenTarget

DEFAULTS = NgramConfig()
PUBLISHED = sizes.PublishedFigures(
    (alpha_from_acceptance_length(1.54, 10), alpha_from_acceptance_length(1.75, 10)),
    "AL 1.54 (Vicuna-33B) to 1.75 (Vicuna-7B), prompt lookup on Spec-Bench, K taken as 10",
    0,
    "nothing to train",
)


@dataclass
class NgramProposer:
    """Draft tokens are certain (one-hot) at any temperature, so verification needs no distribution of theirs.

    min_ngram, max_ngram: tokens of the n-grams that are looked up; llama.cpp's rule takes the latter for both.
    lookup: `sequence` finds n-grams of prompt and output, `prompt` those of the prompt alone; what followed them may reach into the output.
        The prompt is what stands before the last token at the first proposal after `begin`.
    """

    min_ngram: int = 1
    max_ngram: int = 3
    lookup: str = "sequence"
    rule: str = "specdistill"
    vocabulary: None = None
    depends_on_width: bool = False
    aux_layers: tuple[int, ...] = ()
    num_parameters: int = 0
    num_bytes: int = 0
    _after: dict[tuple[int, ...], int] = field(
        default_factory=dict
    )  # n-gram -> index of the token after the occurrence that counts
    _indexed: int = 0  # tokens at the beginning of the sequence whose n-grams are in it

    def __post_init__(self) -> None:
        if self.rule == "llama.cpp":
            self.min_ngram = self.max_ngram

    @property
    def settings(self) -> dict[str, Any]:
        own = {"lookup": self.lookup} if self.rule == "specdistill" else {"rule": self.rule}
        return {"min": self.min_ngram, "max": self.max_ngram, **own}

    def draws(self, sampling: Sampling, tree: StaticTree | DynamicTree | None) -> bool:
        return False

    def passes(self, k: int) -> int:
        return 0

    def begin(self, max_length: int) -> None:
        self._after = {}
        self._indexed = 0

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        text = state.token_ids
        if self.lookup == "sequence" or not self._indexed:
            self._index(text)
        for n in range(min(self.max_ngram, len(text)), self.min_ngram - 1, -1):
            start = self._after.get(tuple(text[-n:]))
            if start is not None:
                return Proposal(self._continued(text, start, k))
        return Proposal([])

    def _continued(self, text: list[int], start: int, k: int) -> list[int]:
        """Up to k tokens that continue the text as it went on at `start`."""
        if self.rule == "vllm":
            return text[start : start + k]
        if self.rule == "llama.cpp":
            found = text[start : min(start + k, len(text) - 1)]
            return found if len(found) >= self.max_ngram and len(text) > self.max_ngram + k + 2 else []
        period = len(text) - start
        return [text[start + i % period] for i in range(k)]

    def batched(self) -> BatchProposer:
        return RowByRow(self)

    def _index(self, text: list[int]) -> None:
        """Take in the n-grams that end before the last token: nothing has followed that one yet."""
        left_out = 1 if self.rule == "llama.cpp" else 0  # tokens at both ends
        for end in range(self._indexed + 1, len(text) - left_out):
            for n in range(self.min_ngram, min(self.max_ngram, end - left_out) + 1):
                ngram = tuple(text[end - n : end])
                self._after[ngram] = self._after.get(ngram, end) if self.rule == "vllm" else end
        self._indexed = len(text) - left_out - 1


def load_proposer(folder: Path | None, target: FrozenTarget, *, key: str, ngram: NgramConfig = DEFAULTS) -> Proposer:
    return NgramProposer(ngram.min, ngram.max, ngram.lookup, ngram.rule)


def planned(target: sizes.Described, given: sizes.Described | None, settings: dict[str, Any]) -> sizes.PlannedDraft:
    """No weights, and nothing to train."""
    note = "looks the last tokens up in the sequence so far"
    return sizes.PlannedDraft(sizes.ParameterCounts(0, 0, 0), None, target.text.vocab_size, note, PUBLISHED)


METHOD = Implementation(load_proposer=load_proposer, lookup=NgramProposer, planned=planned, num_layers=lambda config: None)
