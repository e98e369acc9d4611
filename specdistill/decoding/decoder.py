"""Decode in rounds: propose, verify in one pass of the target, commit, and trim the caches.

A round drafts tokens, reads them in one forward pass of the target, decides which are accepted
(`specdistill.decoding.verify`), and gives the target's hidden states to the draft. Plain decoding
is the same loop without a proposal, so its speed compares with that of speculative decoding.

**Batches.** Several sequences share only the forward passes. Each accepts its own number of tokens
and advances independently. A finished sequence leaves the batch, which continues with the others.
The greedy output of a float32 target equals that of each sequence alone, near-ties included
(`specdistill.decoding.near_ties`). Row b draws from its own generator, as many numbers in the same
order as it would alone, so sampled output is the same unless a number falls within float rounding
of a boundary.

Shapes: B rows (sequences), T positions, N nodes of a tree, K draft tokens, R rows with equally many
draft tokens, V vocabulary.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdistill.common.errors import UserError
from specdistill.decoding import verify
from specdistill.decoding.near_ties import compute_logits_in_float64, find_near_ties
from specdistill.decoding.proposer import DecodingState, Proposal, Proposer, TreeProposer
from specdistill.decoding.readers import (
    CachedTarget,
    CompiledTarget,
    SequenceReader,
    round_up_cache_size,
)
from specdistill.decoding.sampling import GREEDY, Generators, Random, Sampling, draw_uniforms
from specdistill.decoding.sequence import Generation, SequenceState
from specdistill.decoding.transformers_models import check_batchable, check_reads_trees, pad_rows
from specdistill.decoding.tree import TreeShape
from specdistill.targets.frozen import FrozenTarget

# Indices of the accepted draft tokens, and the token after them.
VerifiedPath = tuple[Sequence[int], int]
# Verifies a proposal of N draft tokens by the target's distributions [N + 1, V] after the sequence
# and after each of them.
VerifyRule = Callable[[Proposal, Tensor, Random], VerifiedPath]


def verify_sampled(proposal: Proposal, probs_NV: Tensor, generator: Random) -> VerifiedPath:
    """Decide at random which draft tokens of a chain or a tree are accepted, above temperature 0.

    Args:
        proposal: N draft tokens, and the distributions [N, V] that they were drawn from.
        probs_NV: the target's distributions [N + 1, V] after the sequence and after each draft
            token.
        generator: draws the random numbers.

    Returns:
        The indices of the accepted draft tokens, and the token after them.
    """
    tokens = proposal.tokens
    draft_probs_NV = proposal.probabilities
    uniforms_1N = draw_uniforms(len(tokens) + 1, [generator]).to(probs_NV.device)
    if proposal.tree:
        return verify.verify_sampled_tree(
            tokens, proposal.tree, probs_NV, draft_probs_NV, uniforms_1N[0]
        )
    tokens_1N = torch.tensor([tokens], dtype=torch.long, device=probs_NV.device)
    draft_probs_1NV = None if draft_probs_NV is None else draft_probs_NV[None]
    # A batch of one chain. The accepted tokens of a chain are its first ones.
    num_accepted, next_token = verify.verify_sampled_chain(
        tokens_1N, probs_NV[None], draft_probs_1NV, uniforms_1N
    )
    return range(int(num_accepted)), int(next_token)


class Decoder:
    """Decodes one sequence, or several together, with a target and, optionally, a proposer.

    Args:
        rule: above temperature 0, verifies trees, and chains of a sequence that is decoded alone.
        compiled: run the passes over proposals as a compiled graph, one graph for each number K of
            draft tokens and each size of the KV cache. For one sequence at a time, and chains only
            (`CompiledTarget`).
    """

    def __init__(
        self,
        target: FrozenTarget,
        proposer: Proposer | None = None,
        *,
        rule: VerifyRule = verify_sampled,
        compiled: bool = False,
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.rule = rule
        self.compiled = compiled
        self.aux_layers = proposer.aux_layers if proposer else ()
        self._shared_reader = proposer.reader if proposer else None
        if compiled and self._shared_reader:
            raise UserError(
                "eval.compile",
                got="true with a draft that runs layers of the target",
                expected="false",
            )
        self._reads_trees = False
        self._reads_batches = False
        # by tokens of a pass and positions of the KV cache
        self._compiled_targets: dict[tuple[int, int], CompiledTarget] = {}

    def generate(
        self, prompt_ids: Sequence[int], *, generator: Random = None, **options: Any
    ) -> Generation:
        """Continue one prompt. `options` are the other arguments of `generate_all`."""
        (generation,) = self.generate_all([prompt_ids], generators=[generator], **options)
        return generation

    @torch.inference_mode()
    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        num_speculative_tokens: int = 0,
        tree: TreeShape | None = None,
        sampling: Sampling = GREEDY,
        generators: Generators | None = None,
    ) -> list[Generation]:
        """Continue each prompt by `max_new_tokens` tokens, or up to and including a stop token.

        The prompts are decoded together as one batch. The seconds of a round are divided equally
        among the sequences that took part in it, and those of the prefill among all sequences. So
        the seconds of all generations add up to those of the batch.

        Args:
            prompts: token ids of each sequence.
            max_new_tokens: at least 1.
            num_speculative_tokens: K, at least 1 with a proposer.
            tree: the shape of the draft tokens; None for a chain.
            sampling: temperature, top-p and top-k.
            generators: one for each prompt. None: torch's default generator for all.

        Raises:
            UserError: if a prompt and its continuation exceed the target's context, or if target or
                proposer cannot handle trees, or several sequences.
        """
        if tree:
            self.check_tree()
            num_speculative_tokens = tree.depth
        if len(prompts) > 1:
            self.check_batches()
        assert max_new_tokens >= 1, max_new_tokens
        assert num_speculative_tokens >= 1 or not self.proposer, num_speculative_tokens

        # Begin the sequences
        generators = generators or [None] * len(prompts)
        all_rows = []
        for prompt_ids, generator in zip(prompts, generators, strict=True):
            all_rows.append(SequenceState(self.target, prompt_ids, max_new_tokens, generator))
        if self.proposer:
            self.proposer.begin([row.limit + num_speculative_tokens for row in all_rows])
        reader = self._get_reader(all_rows, num_speculative_tokens)

        # Read the prompts, and choose the first token of each continuation
        start = read_clock(self.target.device)
        logits_B1V, features = reader.begin([row.token_ids for row in all_rows])
        first_tokens = self.verify(all_rows, [Proposal([])] * len(all_rows), logits_B1V, sampling)
        for row, (_, first_token) in zip(all_rows, first_tokens, strict=True):
            row.token_ids.append(first_token)
        # The state shares the rows' lists of tokens, so it sees what they commit.
        state = DecodingState(
            [row.token_ids for row in all_rows], features, [len(row.prompt_ids) for row in all_rows]
        )
        rows = self._drop_finished_rows(all_rows, state, reader)
        end = read_clock(self.target.device)
        for row in all_rows:
            row.prefill_seconds = (end - start) / len(all_rows)
            row.seconds = row.prefill_seconds

        # Decode round by round
        while rows:
            start = end
            decoded_rows = rows
            self._run_round(rows, state, reader, tree or num_speculative_tokens, sampling)
            rows = self._drop_finished_rows(rows, state, reader)
            end = read_clock(self.target.device)
            for row in decoded_rows:
                row.seconds += (end - start) / len(decoded_rows)
        return [row.to_generation() for row in all_rows]

    def _get_reader(
        self, rows: Sequence[SequenceState], num_speculative_tokens: int
    ) -> SequenceReader:
        """Return the object that runs the target over the sequences and holds its KV cache.

        If `compiled` is set, a graph is compiled for each new pair of pass length and cache size,
        and reused afterwards. Only one sequence alone can be read by such a graph.
        """
        # A draft that runs layers of the target (early_exit) has a reader, which reads for both.
        if not self.compiled or len(rows) > 1:
            return self._shared_reader or CachedTarget(self.target, self.aux_layers)
        # A pass reads the last token and the draft tokens. The cache has room for the sequence at
        # its longest (`limit`), and for the draft tokens of a pass after it.
        num_tokens = 1 + num_speculative_tokens if self.proposer else 1
        shape = num_tokens, round_up_cache_size(rows[0].limit) + num_tokens
        if shape not in self._compiled_targets:
            self._compiled_targets[shape] = CompiledTarget(self.target, self.aux_layers, *shape)
        return self._compiled_targets[shape]

    def _run_round(
        self,
        rows: Sequence[SequenceState],
        state: DecodingState,
        reader: SequenceReader,
        draft_size: int | TreeShape,
        sampling: Sampling,
    ) -> None:
        """Run one round: propose draft tokens, verify them, and append the accepted ones.

        Args:
            rows: the sequences that continue.
            state: their tokens and target features, for the proposer. At the end, its features are
                replaced by those of the tokens that the target has read and kept in this round.
            reader: runs the target over the sequences.
            draft_size: the number of draft tokens of a chain, or the shape of a tree.
            sampling: temperature, top-p and top-k.
        """
        # Propose
        start = read_clock(self.target.device)
        proposals = [Proposal([])] * len(rows)
        generators = [row.generator for row in rows]
        if not isinstance(draft_size, int) and isinstance(self.proposer, TreeProposer):
            proposals = self.proposer.propose_tree(state, draft_size, sampling, generators)
        elif self.proposer:
            assert isinstance(draft_size, int)
            proposals = self.proposer.propose(state, draft_size, sampling, generators)
        drafted = read_clock(self.target.device)

        # Read the last token and the draft tokens of each row in one pass, and verify
        input_ids = []
        for row, proposal in zip(rows, proposals, strict=True):
            input_ids.append([row.token_ids[-1], *proposal.tokens])
        trees = [proposal.tree for proposal in proposals]
        logits_BTV, features = reader.read(input_ids, trees)
        verified_paths = self.verify(rows, proposals, logits_BTV, sampling)
        paths = [path for path, _ in verified_paths]

        # Forget the rejected tokens. `state.fresh` gets the features that the proposer has not read
        # yet: those of the last token and of the accepted draft tokens, `num_fresh` in each row. In
        # a chain these tokens come first, so that `num_fresh` selects them. In a tree the features
        # of the accepted path are gathered.
        reader.keep(paths)
        if any(trees):
            positions = [add_root(path) for path in paths]
            features = features.at(pad_rows(positions, self.target.device))
        state.fresh = features
        state.num_fresh = [1 + len(path) for path in paths]
        verified = read_clock(self.target.device)

        # Commit
        draft_seconds = (drafted - start) / len(rows)
        verify_seconds = (verified - drafted) / len(rows)
        for row, proposal, (path, next_token) in zip(rows, proposals, verified_paths, strict=True):
            row.commit(proposal, path, next_token, draft_seconds, verify_seconds)

    def _drop_finished_rows(
        self, rows: Sequence[SequenceState], state: DecodingState, reader: SequenceReader
    ) -> list[SequenceState]:
        """Return the rows that continue, and remove finished rows from the caches and the state.

        If every row has finished, nothing is removed, because nothing is read any more.
        """
        remaining = [index for index, row in enumerate(rows) if not row.is_finished]
        if remaining and len(remaining) < len(rows):
            # Several rows always have a `BatchKVCache`, which can drop single rows.
            cache: Any = reader.cache
            cache.keep(remaining)
            if self.proposer:
                self.proposer.keep(remaining)
            state.token_ids = [state.token_ids[index] for index in remaining]
            state.fresh = state.fresh.rows(remaining)
            state.num_fresh = [state.num_fresh[index] for index in remaining]
        return [rows[index] for index in remaining]

    def verify(
        self,
        rows: Sequence[SequenceState],
        proposals: Sequence[Proposal],
        logits_BTV: Tensor,
        sampling: Sampling,
    ) -> list[VerifiedPath]:
        """Decide for each row which draft tokens are accepted, and which token follows them.

        Args:
            rows: the B sequences.
            proposals: the draft tokens of each sequence.
            logits_BTV: the target's logits [B, T, V] after the sequence and after each draft token.
            sampling: temperature, top-p and top-k.

        Returns:
            For each row, the indices of the accepted draft tokens and the next token.
        """
        if sampling.is_greedy:
            # A near-tie is a choice between two almost equal logits. `_verify_greedy` computes it
            # again in float64.
            choices = logits_BTV.argmax(-1).tolist()
            near_ties = find_near_ties(self.target, logits_BTV)
            return [*map(self._verify_greedy, rows, proposals, choices, near_ties)]

        verified_paths: dict[int, VerifiedPath] = {}
        # Above temperature 0 a tree, or a single row, is verified alone by `self.rule`. The chains
        # of several rows are verified in groups, each of which fits into one tensor. All chains of
        # a group have equally many draft tokens, and all have distributions or none has. These two
        # facts are the key of the group; its value is the list of rows.
        groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for index, (row, proposal) in enumerate(zip(rows, proposals, strict=True)):
            if len(rows) == 1 or proposal.tree:
                logits_NV = logits_BTV[index, : len(proposal.tokens) + 1]
                probs_NV = sampling.compute_probabilities(logits_NV)
                verified_paths[index] = self.rule(proposal, probs_NV, row.generator)
            else:
                groups[len(proposal.tokens), proposal.probabilities is None].append(index)
        for (num_draft_tokens, _), indices in groups.items():
            logits_RTV = logits_BTV[:, : num_draft_tokens + 1]
            if len(indices) < len(rows):
                logits_RTV = logits_RTV[indices]
            group_paths = verify_chains(
                [proposals[index] for index in indices],
                logits_RTV,
                [rows[index].generator for index in indices],
                sampling,
            )
            verified_paths.update(zip(indices, group_paths, strict=True))
        return [verified_paths[index] for index in range(len(rows))]

    def _verify_greedy(
        self, row: SequenceState, proposal: Proposal, choices: list[int], near_ties: list[bool]
    ) -> VerifiedPath:
        """Accept the draft tokens of one row that are the target's best tokens.

        Where the two best tokens are nearly tied, float32 may choose the wrong one. Such a choice
        on the accepted path is first computed again in float64.

        Args:
            row: the sequence.
            proposal: its N draft tokens.
            choices: the target's best token after the sequence and after each draft token, N + 1 in
                all. Changed in place.
            near_ties: whether each of the N + 1 choices is a near-tie. Changed in place.

        Returns:
            The indices of the accepted draft tokens, and the next token.
        """
        tokens = proposal.tokens
        path: Sequence[int]
        # The choice in float64 may lead to another branch, which has near-ties of its own. Each
        # turn of the loop breaks at least one near-tie, so the loop ends.
        while True:
            if proposal.tree:
                path, next_token = verify.follow_target_choices(tokens, proposal.tree, choices)
            else:
                num_accepted, next_token = verify.verify_greedy_chain(tokens, choices)
                path = range(num_accepted)
            # The choices on the path: after the root, and after each accepted token.
            positions = add_root(path)
            if not any(near_ties[position] for position in positions):
                return path, next_token
            # Correct the near-ties on the path, and follow the choices again.
            sequence = [*row.token_ids, *(tokens[node] for node in path)]
            logits_1TV = compute_logits_in_float64(self.target, sequence, len(positions))
            exact_choices = logits_1TV[0].argmax(-1).tolist()
            for position, choice in zip(positions, exact_choices, strict=True):
                if near_ties[position]:
                    choices[position] = choice
                    near_ties[position] = False

    def check_tree(self) -> None:
        """Raise UserError if the proposer cannot draft trees or the target cannot verify them.

        The target is tested with a few passes, only once.
        """
        if not isinstance(self.proposer, TreeProposer):
            raise UserError(
                "eval.tree",
                got=f"a tree for {type(self.proposer).__name__}",
                text=(
                    f"eval.tree: {type(self.proposer).__name__} drafts chains only. Remove"
                    " eval.tree, or use a method that drafts trees, such as eagle3."
                ),
            )
        if not self._reads_trees:
            check_reads_trees(self.target)
            self._reads_trees = True

    def check_batches(self) -> None:
        """Raise UserError if target or proposer cannot handle several sequences at once.

        The target is tested with a few passes, only once.
        """
        if not self._reads_batches:
            check_batchable(self.target.model, self.target.name)
            if self.proposer:
                self.proposer.begin([1, 1])  # raises UserError if it cannot be batched
            self._reads_batches = True


def verify_chains(
    proposals: Sequence[Proposal],
    logits_RTV: Tensor,
    generators: Generators,
    sampling: Sampling,
) -> list[VerifiedPath]:
    """Verify R chains of equal length in one call, above temperature 0.

    Args:
        proposals: the chain of each row. Either all chains were drawn from the draft's
            distributions, or all have none (`probabilities` is None): their tokens are certain, as
            if drawn with probability 1.
        logits_RTV: the target's logits [R, T, V], after the sequence and after each draft token.
        generators: the random generator of each row.
        sampling: temperature, top-p and top-k.

    Returns:
        For each row, the indices of the accepted draft tokens and the next token.
    """
    # Each row needs T random numbers: one for the test of each draft token, and one to draw the
    # next token.
    device = logits_RTV.device
    tokens = [proposal.tokens for proposal in proposals]
    distributions = []
    for proposal in proposals:
        if proposal.probabilities is not None:
            distributions.append(proposal.probabilities)
    num_accepted_R, next_token_R = verify.verify_sampled_chain(
        torch.tensor(tokens, dtype=torch.long, device=device),
        sampling.compute_probabilities(logits_RTV),
        torch.stack(distributions) if distributions else None,
        draw_uniforms(logits_RTV.shape[1], generators).to(device),
    )
    # The accepted tokens of a chain are its first ones.
    paths = [range(num_accepted) for num_accepted in num_accepted_R.tolist()]
    return [*zip(paths, next_token_R.tolist(), strict=True)]


def add_root(path: Sequence[int]) -> list[int]:
    """Return where the root and a path's nodes are among the tokens of a pass.

    A pass reads the root (the last token of the sequence) at index 0, and node i at index i + 1. So
    the path [0, 2] gives [0, 1, 3].
    """
    return [0, *(node + 1 for node in path)]


def read_clock(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work.

    CUDA runs asynchronously: without waiting, a timer would stop before the work is done.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
