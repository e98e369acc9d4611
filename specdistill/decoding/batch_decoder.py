"""The draft-verify round for several sequences at once. Each row's output is that of `Decoder`; rows only share the forward passes.

Rows accept different numbers of tokens and advance independently (`BatchKVCache`). A finished row leaves the batch, which continues with
the others.

Greedy output of a float32 target equals `Decoder`'s token for token, near-ties included (specdistill.decoding.decoder). Sampled output
follows the target's distribution in each row, whatever the other rows hold. Row b draws from its own generator, as many numbers in the
same order as `Decoder`, so its output is the same unless a number falls within float rounding of a boundary.

Shapes: B rows, T positions of one pass, K draft tokens, R rows with equally many draft tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdistill.decoding import verify
from specdistill.decoding.decoder import Generation, Running, break_ties, now
from specdistill.decoding.kv_cache import BatchKVCache
from specdistill.decoding.proposer import DecodingState, Proposal, Proposer
from specdistill.decoding.sampling import GREEDY, Generators, Sampling, uniforms
from specdistill.decoding.transformers_models import check_batchable, last_of, masked_pass, padded
from specdistill.targets.frozen import Features, FrozenTarget


class BatchDecoder:
    """Decodes several sequences at once with a target and, optionally, a proposer.

    Raises UserError for targets and drafts that cannot be batched (see `check_batchable`).
    """

    def __init__(self, target: FrozenTarget, proposer: Proposer | None = None) -> None:
        check_batchable(target.model, target.name)
        self.target = target
        self.proposer = proposer
        self.aux_layers = proposer.aux_layers if proposer else ()
        if proposer:
            proposer.begin([1, 1])  # which may refuse

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        num_speculative_tokens: int = 0,
        sampling: Sampling = GREEDY,
        generators: Generators | None = None,
    ) -> list[Generation]:
        """Continue each prompt by up to `max_new_tokens` tokens, or to a stop token of the target; see `Decoder.generate`.

        generators: one for each prompt; None: torch's default generator for all.

        Times are shares: a round's seconds are divided equally among the rows that took part in it, the prefill's among all, so that they
        add up to those of the batch. Raises UserError as `Decoder.generate` does.
        """
        all_rows = [
            Running.begin(self, prompt_ids, max_new_tokens, num_speculative_tokens, generator)
            for prompt_ids, generator in zip(prompts, generators or [None] * len(prompts), strict=True)
        ]
        if self.proposer:
            self.proposer.begin([row.limit + num_speculative_tokens for row in all_rows])

        start = now(self.target.device)
        rows, cache = all_rows, BatchKVCache(len(all_rows), self.target.device)
        logits_B1V, features = self._forward([row.token_ids for row in rows], cache, only_last=True)
        firsts = self._verify(rows, [Proposal([])] * len(rows), logits_B1V, sampling)
        for row, (_, first) in zip(rows, firsts, strict=True):
            row.token_ids.append(first)
        state = DecodingState([row.token_ids for row in rows], features, [len(row.prompt_ids) for row in rows])
        rows, lap = self._drop_done(rows, state, cache), now(self.target.device)
        for row in all_rows:
            row.prefill_seconds = row.seconds = (lap - start) / len(all_rows)

        while rows:
            taking_part, start = rows, lap
            self._round(rows, state, cache, num_speculative_tokens, sampling)
            rows, lap = self._drop_done(rows, state, cache), now(self.target.device)
            for row in taking_part:
                row.seconds += (lap - start) / len(taking_part)
        return [row.generation() for row in all_rows]

    def _round(self, rows: Sequence[Running], state: DecodingState, cache: BatchKVCache, k: int, sampling: Sampling) -> None:
        """Propose, verify, commit."""
        start = now(self.target.device)
        if self.proposer:
            proposals = self.proposer.propose(state, k, sampling, [row.generator for row in rows])
        else:
            proposals = [Proposal([])] * len(rows)
        drafted = now(self.target.device)
        fed = [[row.token_ids[-1], *proposal.tokens] for row, proposal in zip(rows, proposals, strict=True)]
        logits_BTV, state.fresh = self._forward(fed, cache)
        verdicts = self._verify(rows, proposals, logits_BTV, sampling)
        state.num_fresh = [1 + num_accepted for num_accepted, _ in verdicts]
        cache.truncate([len(row.token_ids) + num_accepted for row, (num_accepted, _) in zip(rows, verdicts, strict=True)])
        verified = now(self.target.device)
        draft_s, verify_s = (drafted - start) / len(rows), (verified - drafted) / len(rows)
        for row, proposal, (num_accepted, next_token) in zip(rows, proposals, verdicts, strict=True):
            row.commit(proposal.tokens, proposal.tokens[:num_accepted], next_token, draft_s, verify_s)

    def _drop_done(self, rows: list[Running], state: DecodingState, cache: BatchKVCache) -> list[Running]:
        """The rows that are not done; the others leave the caches and the state."""
        remaining = [index for index, row in enumerate(rows) if not row.is_done]
        if remaining and len(remaining) < len(rows):
            cache.keep(remaining)
            if self.proposer:
                self.proposer.keep(remaining)
            state.token_ids = [state.token_ids[index] for index in remaining]
            state.fresh = state.fresh.rows(remaining)
            state.num_fresh = [state.num_fresh[index] for index in remaining]
        return [rows[index] for index in remaining]

    def _forward(
        self, token_ids: Sequence[Sequence[int]], cache: BatchKVCache, only_last: bool = False
    ) -> tuple[Tensor, Features]:
        """The target over each row's new tokens: logits [B, T, V], or [B, 1, V] after each last if `only_last`, and features [B, T, D]."""
        counts = [len(row) for row in token_ids]
        position_BT, mask = masked_pass(cache, counts, self.target.config, self.target.lm_head.weight.dtype)
        features = self.target.features(
            padded(token_ids, self.target.device),
            self.aux_layers,
            position_ids_BT=position_BT,
            attention_mask=mask,
            past_key_values=cache,
        )
        hidden = features.last_hidden
        if only_last:
            hidden = last_of(hidden, counts).unsqueeze(1)
        return self.target.logits(hidden), features

    def _verify(
        self, rows: Sequence[Running], proposals: Sequence[Proposal], logits_BTV: Tensor, sampling: Sampling
    ) -> list[tuple[int, int]]:
        """(number of accepted tokens, the token after them) of each row. Rows with equally many draft tokens, all of them drawn or
        all certain, are verified together."""
        verdicts = [(0, 0)] * len(rows)
        kinds = [(len(proposal.tokens), proposal.probabilities is None) for proposal in proposals]
        for width, are_certain in set(kinds):
            chosen = [index for index, kind in enumerate(kinds) if kind == (width, are_certain)]
            drafted, logits_RKV = [proposals[index].tokens for index in chosen], logits_BTV[chosen, : width + 1]
            if sampling.is_greedy:
                texts = [rows[index].token_ids for index in chosen]
                choices = break_ties(self.target, texts, drafted, logits_RKV).argmax(-1).tolist()
                found = [verify.greedy(*pair) for pair in zip(drafted, choices, strict=True)]
            else:
                distributions = [given for index in chosen if (given := proposals[index].probabilities) is not None]
                uniforms_RK = uniforms(width + 1, [rows[index].generator for index in chosen]).to(logits_BTV.device)
                num_accepted, next_token = verify.rejection(
                    torch.tensor(drafted, dtype=torch.long, device=logits_BTV.device),
                    sampling.probabilities(logits_RKV),
                    torch.stack(distributions) if distributions else None,
                    uniforms_RK,
                )
                found = [*zip(num_accepted.tolist(), next_token.tolist(), strict=True)]
            for index, verdict in zip(chosen, found, strict=True):
                verdicts[index] = verdict
        return verdicts
