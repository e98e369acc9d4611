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
from specdistill.decoding.decoder import Decoder, Generation, Running, break_ties, kept_features, now, propose
from specdistill.decoding.kv_cache import BatchKVCache
from specdistill.decoding.proposer import DecodingState, Proposal, Proposer
from specdistill.decoding.sampling import GREEDY, Generators, Sampling, uniforms
from specdistill.decoding.transformers_models import check_batchable, last_of, masked_pass, padded
from specdistill.decoding.tree import ROOT, Step, Tree, TreeShape
from specdistill.targets.frozen import Features, FrozenTarget


class BatchDecoder:
    """Decodes several sequences at once with a target and, optionally, a proposer.

    Raises UserError for targets and drafts that cannot be batched (see `check_batchable`).
    """

    def __init__(self, target: FrozenTarget, proposer: Proposer | None = None) -> None:
        check_batchable(target.model, target.name)
        self.target = target
        self.proposer = proposer
        self._alone = Decoder(target, proposer)
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
        tree: TreeShape | None = None,
        sampling: Sampling = GREEDY,
        generators: Generators | None = None,
    ) -> list[Generation]:
        """Continue each prompt by up to `max_new_tokens` tokens, or to a stop token of the target; see `Decoder.generate`.

        generators: one for each prompt; None: torch's default generator for all.

        Times are shares: a round's seconds are divided equally among the rows that took part in it, the prefill's among all, so that they
        add up to those of the batch. Raises UserError as `Decoder.generate` does.
        """
        if tree:
            self._alone.check_tree()
            num_speculative_tokens = tree.depth
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
            self._round(rows, state, cache, tree or num_speculative_tokens, sampling)
            rows, lap = self._drop_done(rows, state, cache), now(self.target.device)
            for row in taking_part:
                row.seconds += (lap - start) / len(taking_part)
        return [row.generation() for row in all_rows]

    def _round(
        self, rows: Sequence[Running], state: DecodingState, cache: BatchKVCache, ahead: int | TreeShape, sampling: Sampling
    ) -> None:
        """Propose `ahead` (a chain of that many tokens, or a tree), verify, commit."""
        start = now(self.target.device)
        proposals = propose(self.proposer, state, ahead, sampling, [row.generator for row in rows])
        drafted = now(self.target.device)
        fed = [[row.token_ids[-1], *proposal.tokens] for row, proposal in zip(rows, proposals, strict=True)]
        step = None
        if any(proposal.tree for proposal in proposals):
            trees = [proposal.tree or Tree(tuple(range(ROOT, len(proposal.tokens) - 1))) for proposal in proposals]
            step = Step.whole(trees, cache.lengths, self.target.device)
        logits_BTV, features = self._forward(fed, cache, step)
        verdicts = self._verify(rows, proposals, logits_BTV, sampling)
        paths = [path for path, _ in verdicts]
        state.fresh = kept_features(features, paths) if step else features
        state.num_fresh = [1 + len(path) for path in paths]
        cache.keep_paths([len(row.token_ids) for row in rows], paths)
        verified = now(self.target.device)
        draft_s, verify_s = (drafted - start) / len(rows), (verified - drafted) / len(rows)
        for row, proposal, (path, next_token) in zip(rows, proposals, verdicts, strict=True):
            row.commit(proposal, path, next_token, draft_s, verify_s)

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
        self, token_ids: Sequence[Sequence[int]], cache: BatchKVCache, step: Step | None = None, only_last: bool = False
    ) -> tuple[Tensor, Features]:
        """The target over each row's new tokens: logits [B, T, V], or [B, 1, V] after each last if `only_last`, and features [B, T, D]."""
        counts = [len(row) for row in token_ids]
        position_BT, mask = masked_pass(cache, counts, self.target.config, self.target.lm_head.weight.dtype, step)
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
    ) -> list[tuple[Sequence[int], int]]:
        """(indices of the accepted draft tokens, the token after them) of each row. Rows with chains of equally many draft tokens, all of
        them drawn or all certain, are verified together."""
        verdicts: dict[int, tuple[Sequence[int], int]] = {}
        kinds: dict[tuple[int, bool], list[int]] = {}
        for index, (row, proposal) in enumerate(zip(rows, proposals, strict=True)):
            if proposal.tree:
                logits_1KV = logits_BTV[index : index + 1, : len(proposal.tokens) + 1]
                verdicts[index] = self._alone.verify(row.token_ids, proposal, logits_1KV, sampling, row.generator)
            else:
                kinds.setdefault((len(proposal.tokens), proposal.probabilities is None), []).append(index)
        for (width, _), chosen in kinds.items():
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
            verdicts |= {index: (range(count), token) for index, (count, token) in zip(chosen, found, strict=True)}
        return [verdicts[index] for index in range(len(rows))]
