"""The draft-verify round: propose, one target forward over the proposal, verify, trim the cache, hand the features back.

Plain decoding is the same loop with nothing proposed, so that speed with and without a draft compares like with like.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from specdistill.decoding import verify
from specdistill.decoding.proposers import DecodingState, Proposal, Proposer
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.ties import settle
from specdistill.errors import UserError
from specdistill.targets.frozen import Features, FrozenTarget

GREEDY = Sampling()
SampledRule = Callable[[Tensor, Tensor, Tensor | None, torch.Generator | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Round:
    """One draft-verify round.

    drafted: proposed token ids; empty in plain decoding.
    num_accepted: accepted and emitted; what lay past a stop token or the length limit does not count.
    emitted: the accepted tokens, then the target's own next token, after that cut.
    """

    drafted: tuple[int, ...]
    num_accepted: int
    emitted: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class Generation:
    """A continuation. Its first token comes from the prefill, not from a round. `stopped`: a stop token ended it, not the limit."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    prefill_seconds: float
    seconds: float
    stopped: bool


class Decoder:
    """Decodes one text at a time with a target and, optionally, a proposer; `sampled_rule` verifies when the temperature is above 0."""

    def __init__(
        self, target: FrozenTarget, proposer: Proposer | None = None, *, sampled_rule: SampledRule = verify.rejection
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.sampled_rule = sampled_rule
        self.aux_layers = proposer.aux_layers if proposer else ()

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        num_speculative_tokens: int = 0,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> Generation:
        """Continue a prompt by up to `max_new_tokens` tokens, or to a stop token of the target (which is emitted).

        `num_speculative_tokens` is K, at least 1 with a proposer. Raises UserError when prompt and continuation pass the target's context.
        """
        if self.proposer and num_speculative_tokens < 1:
            raise UserError("eval.num_speculative_tokens", got=num_speculative_tokens, expected="1 or more")
        length = len(prompt_ids) + max_new_tokens
        if not prompt_ids or max_new_tokens < 1 or length > self.target.max_length:
            got = f"a prompt of {len(prompt_ids)} tokens and {max_new_tokens} new ones"
            raise UserError(
                "eval.max_new_tokens", got=got, expected=f"at least 1 of each and {self.target.max_length} together"
            )
        if self.proposer:
            self.proposer.begin(length + num_speculative_tokens)

        start = self._now()
        # Plain layers even for sliding windows, whose own would not give back what they dropped; the mask does the rest.
        cache = DynamicCache(config=self.target.config) if self.target.is_recurrent else DynamicCache()
        logits, features = self._forward(list(prompt_ids), cache, only_last=True)
        _, first = self._verify(list(prompt_ids), Proposal([]), logits, sampling, generator)
        state = DecodingState([*prompt_ids, first], features)
        prefill_seconds = self._now() - start

        rounds = []
        stopped = first in self.target.eos_token_ids
        while not stopped and len(state.token_ids) < length:
            budget = length - len(state.token_ids)
            rounds.append(self._round(state, cache, num_speculative_tokens, budget, sampling, generator))
            stopped = state.token_ids[-1] in self.target.eos_token_ids
        tokens = tuple(state.token_ids[len(prompt_ids) :])
        return Generation(tuple(prompt_ids), tokens, tuple(rounds), prefill_seconds, self._now() - start, stopped)

    def _round(
        self,
        state: DecodingState,
        cache: DynamicCache,
        k: int,
        budget: int,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> Round:
        """Propose, verify, commit. At most `budget` tokens are emitted."""
        start = self._now()
        proposal = self.proposer.propose(state, k, sampling, generator) if self.proposer else Proposal([])
        drafted = self._now()
        last, before = state.token_ids[-1], copy.deepcopy(cache) if self.target.is_recurrent and proposal.tokens else None
        logits, features = self._forward([last, *proposal.tokens], cache)
        num_accepted, next_token = self._verify(state.token_ids, proposal, logits, sampling, generator)
        rejected = len(proposal.tokens) - num_accepted
        if rejected and before is not None:  # a recurrent state cannot go back: it goes forward again from where it was
            cache.layers = before.layers
            self._forward([last, *proposal.tokens[:num_accepted]], cache)
        elif rejected:
            cache.crop(-rejected)
        state.fresh = features.first(num_accepted + 1)
        emitted = self._cut([*proposal.tokens[:num_accepted], next_token], budget)
        state.token_ids += emitted
        kept = min(num_accepted, len(emitted))
        return Round(tuple(proposal.tokens), kept, tuple(emitted), drafted - start, self._now() - drafted)

    def _forward(self, token_ids: list[int], cache: DynamicCache, only_last: bool = False) -> tuple[Tensor, Features]:
        """The target over new tokens: logits [1, T, V] (of the last position alone if `only_last`) and features [1, T, D]."""
        ids = torch.tensor([token_ids], device=self.target.device)
        features = self.target.features(ids, self.aux_layers, past_key_values=cache)
        hidden = features.last_hidden[:, -1:] if only_last else features.last_hidden
        return self.target.logits(hidden), features

    def _verify(
        self,
        text: list[int],
        proposal: Proposal,
        logits_1KV: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> tuple[int, int]:
        """(number of accepted tokens, the token after them); the logits are those after `text` and after each proposed token."""
        tokens = torch.tensor([proposal.tokens], dtype=torch.long, device=logits_1KV.device)
        if sampling.is_greedy:
            num_accepted, next_token = verify.greedy(tokens, settle(self.target, [*text, *proposal.tokens], logits_1KV))
        else:
            law = sampling.probabilities(logits_1KV)
            draft_law = None if proposal.probabilities is None else proposal.probabilities.unsqueeze(0)
            num_accepted, next_token = self.sampled_rule(tokens, law, draft_law, generator)
        return int(num_accepted), int(next_token)

    def _cut(self, tokens: list[int], budget: int) -> list[int]:
        """Drop what lies past the budget or after the first stop token."""
        for index, token in enumerate(tokens[:budget]):
            if token in self.target.eos_token_ids:
                return tokens[: index + 1]
        return tokens[:budget]

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
