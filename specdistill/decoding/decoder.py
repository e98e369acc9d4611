"""The draft-verify round: propose, one target forward over the proposal, verify, trim the cache, pass the features to the draft.

Plain decoding is the same loop without a proposal, so that its speed compares with that of speculative decoding.

Near-ties of a float32 target are broken in float64: greedy output must not depend on how many tokens one pass held. A pass over five
tokens sums in a different order than five passes over one. Where the two best logits lie within that rounding, either of them may win, and
outputs that should be equal diverge. This happens about once in a hundred thousand tokens; the whole sequence then goes through the target
once more in float64, with and without a draft alike. 16-bit targets are left alone: there near-ties are frequent, and are counted instead
(specdistill.measurement.losslessness).

Several sequences share the forward passes alone: each accepts its own number of tokens and advances independently, and one that is finished
leaves the batch, which continues with the others. Greedy output of a float32 target is that of each alone, near-ties included. Row b draws
from its own generator, as many numbers in the same order as on its own, so sampled output is the same unless a number falls within float
rounding of a boundary.

Shapes: B rows (sequences), T positions, N nodes of a tree, K draft tokens, R rows with equally many draft tokens, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdistill.decoding import verify
from specdistill.decoding.proposer import DecodingState, Proposal, Proposer, TreeProposer
from specdistill.decoding.readers import CachedTarget, CompiledTarget, SequenceReader, cache_size
from specdistill.decoding.sampling import GREEDY, Generators, Random, Sampling, uniforms
from specdistill.decoding.transformers_models import check_batchable, check_reads_trees, padded
from specdistill.decoding.tree import TreeShape
from specdistill.errors import UserError
from specdistill.targets.frozen import FrozenTarget

NEAR_TIE = (
    2.0**-14
)  # of the best logit: 512 roundings of float32, where a 16-layer target was seen to err by 5

Verdict = tuple[
    Sequence[int], int
]  # indices of the accepted draft tokens, and the token after them
# Of a proposal of N draft tokens, from the target's distributions [N + 1, V] after the sequence and each of them.
VerifyRule = Callable[[Proposal, Tensor, Random], Verdict]


def exact(proposal: Proposal, probs_NV: Tensor, generator: Random) -> Verdict:
    """The rule above temperature 0: `verify.rejection` of a chain, `verify.sampled` of a tree."""
    tokens, draft_probs = proposal.tokens, proposal.probabilities
    uniforms_1N = uniforms(len(tokens) + 1, [generator]).to(probs_NV.device)
    if proposal.tree:
        return verify.sampled(tokens, proposal.tree, probs_NV, draft_probs, uniforms_1N[0])
    tokens_1N = torch.tensor([tokens], dtype=torch.long, device=probs_NV.device)
    num_accepted, next_token = verify.rejection(
        tokens_1N, probs_NV[None], None if draft_probs is None else draft_probs[None], uniforms_1N
    )
    return range(int(num_accepted)), int(next_token)


@dataclass(frozen=True)
class Round:
    """One draft-verify round.

    drafted: draft token ids; empty in plain decoding. Of a tree, the accepted path and its continuation by first children.
    num_accepted: accepted and emitted tokens; those past a stop token or the length limit do not count.
    emitted: the accepted tokens, then the target's own next token, cut at a stop token or the limit.
    num_off_path: draft tokens that are not in `drafted`: the other nodes of a tree.
    """

    drafted: tuple[int, ...]
    num_accepted: int
    emitted: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    num_off_path: int = 0


@dataclass(frozen=True)
class Generation:
    """A continuation. Its first token comes from the prefill, not from a round. `stopped`: a stop token ended it, not the limit."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    prefill_seconds: float
    seconds: float
    stopped: bool


class Running:
    """A sequence under way: at most `limit` tokens, or up to a stop token of the target (which is emitted).

    Raises UserError when the prompt is empty, or exceeds the target's context together with the continuation.
    """

    def __init__(
        self,
        target: FrozenTarget,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        generator: Random,
    ) -> None:
        self.prompt_ids, self.token_ids, self.limit = (
            tuple(prompt_ids),
            [*prompt_ids],
            len(prompt_ids) + max_new_tokens,
        )
        if not prompt_ids or self.limit > target.max_length:
            got = f"a prompt of {len(prompt_ids)} tokens and {max_new_tokens} new ones"
            raise UserError(
                "eval.max_new_tokens",
                got=got,
                expected=f"at least 1 and {target.max_length} together",
            )
        self.generator, self.stop_ids = generator, target.eos_token_ids
        self.rounds: list[Round] = []
        self.prefill_seconds = self.seconds = 0.0

    @property
    def stopped(self) -> bool:
        return self.token_ids[-1] in self.stop_ids

    def commit(
        self,
        proposal: Proposal,
        path: Sequence[int],
        next_token: int,
        draft_s: float,
        verify_s: float,
    ) -> None:
        """Emit a round's tokens, those of the accepted path and the next, up to the limit or the first stop token."""
        tokens, tree = proposal.tokens, proposal.tree
        emitted = [*(tokens[node] for node in path), next_token][: self.limit - len(self.token_ids)]
        end = next(
            (index for index, token in enumerate(emitted, start=1) if token in self.stop_ids),
            len(emitted),
        )
        self.token_ids += emitted[:end]
        drafted = tuple(tokens[node] for node in tree.prolonged(path)) if tree else tuple(tokens)
        num_off_path = len(tokens) - len(drafted)
        self.rounds.append(
            Round(
                drafted, min(len(path), end), tuple(emitted[:end]), draft_s, verify_s, num_off_path
            )
        )

    def generation(self) -> Generation:
        new = tuple(self.token_ids[len(self.prompt_ids) :])
        return Generation(
            self.prompt_ids,
            new,
            tuple(self.rounds),
            self.prefill_seconds,
            self.seconds,
            self.stopped,
        )


class Decoder:
    """Decodes one sequence, or several together, with a target and, optionally, a proposer. `rule` verifies above temperature 0.

    compiled: passes over proposals for one sequence are one compiled graph, for each K and each power of two of tokens; chains only
    (`CompiledTarget`).
    """

    def __init__(
        self,
        target: FrozenTarget,
        proposer: Proposer | None = None,
        *,
        rule: VerifyRule = exact,
        compiled: bool = False,
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.rule = rule
        self.compiled = compiled
        self._shared = proposer.reader if proposer else None
        if compiled and self._shared:
            raise UserError(
                "eval.compile",
                got="true with a draft that runs layers of the target",
                expected="false",
            )
        self.aux_layers = proposer.aux_layers if proposer else ()
        self._reads_trees = self._reads_batches = False
        self._compiled_targets: dict[
            tuple[int, int], CompiledTarget
        ] = {}  # by tokens of a pass and positions of the KV cache

    def generate(
        self, prompt_ids: Sequence[int], *, generator: Random = None, **options: Any
    ) -> Generation:
        """Continue a prompt, with the options of `generate_all`."""
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
        """Continue each prompt by up to `max_new_tokens` tokens, or to a stop token of the target (which is emitted).

        `num_speculative_tokens` is K, at least 1 with a proposer; a `tree` is drafted in place of a chain. generators: one for each
        prompt; None: torch's default generator for all.

        Times are shares: a round's seconds are divided equally among the rows that took part in it, the prefill's among all, so that they
        add up to those of the batch. Raises UserError when prompt and continuation exceed the target's context, or when target or proposer
        cannot handle trees, or several sequences.
        """
        if tree:
            self.check_tree()
            num_speculative_tokens = tree.depth
        if len(prompts) > 1:
            self.check_batches()
        assert max_new_tokens >= 1 and (num_speculative_tokens >= 1 or not self.proposer), (
            max_new_tokens,
            num_speculative_tokens,
        )
        all_rows = [
            Running(self.target, prompt_ids, max_new_tokens, generator)
            for prompt_ids, generator in zip(
                prompts, generators or [None] * len(prompts), strict=True
            )
        ]
        if self.proposer:
            self.proposer.begin([row.limit + num_speculative_tokens for row in all_rows])
        rows, reader = all_rows, self._reader(all_rows, num_speculative_tokens)

        start = now(self.target.device)
        logits_B1V, features = reader.begin([row.token_ids for row in rows])
        firsts = self.verify(rows, [Proposal([])] * len(rows), logits_B1V, sampling)
        for row, (_, first) in zip(rows, firsts, strict=True):
            row.token_ids.append(first)
        state = DecodingState(
            [row.token_ids for row in rows], features, [len(row.prompt_ids) for row in rows]
        )
        rows, lap = self._unfinished(rows, state, reader), now(self.target.device)
        for row in all_rows:
            row.prefill_seconds = row.seconds = (lap - start) / len(all_rows)

        while rows:
            taking_part, start = rows, lap
            self._round(rows, state, reader, tree or num_speculative_tokens, sampling)
            rows, lap = self._unfinished(rows, state, reader), now(self.target.device)
            for row in taking_part:
                row.seconds += (lap - start) / len(taking_part)
        return [row.generation() for row in all_rows]

    def _reader(self, rows: Sequence[Running], num_speculative_tokens: int) -> SequenceReader:
        """Compiles where there is no graph for a sequence as long yet."""
        if not self.compiled or len(rows) > 1:
            return self._shared or CachedTarget(self.target, self.aux_layers)
        num_tokens = 1 + num_speculative_tokens if self.proposer else 1
        shape = num_tokens, cache_size(rows[0].limit) + num_tokens
        if shape not in self._compiled_targets:
            self._compiled_targets[shape] = CompiledTarget(self.target, self.aux_layers, *shape)
        return self._compiled_targets[shape]

    def _round(
        self,
        rows: Sequence[Running],
        state: DecodingState,
        reader: SequenceReader,
        ahead: int | TreeShape,
        sampling: Sampling,
    ) -> None:
        """Propose `ahead` (a chain of that many tokens, or a tree), verify, commit."""
        start = now(self.target.device)
        proposals, generators = [Proposal([])] * len(rows), [row.generator for row in rows]
        if not isinstance(ahead, int) and isinstance(self.proposer, TreeProposer):
            proposals = self.proposer.propose_tree(state, ahead, sampling, generators)
        elif self.proposer:
            assert isinstance(ahead, int)
            proposals = self.proposer.propose(state, ahead, sampling, generators)
        drafted = now(self.target.device)
        fed = [
            [row.token_ids[-1], *proposal.tokens]
            for row, proposal in zip(rows, proposals, strict=True)
        ]
        trees = [proposal.tree for proposal in proposals]
        logits_BTV, features = reader.read(fed, trees)
        verdicts = self.verify(rows, proposals, logits_BTV, sampling)
        paths = [path for path, _ in verdicts]
        reader.keep(paths)
        if any(trees):
            features = features.at(
                padded([[0, *(node + 1 for node in path)] for path in paths], self.target.device)
            )
        state.fresh, state.num_fresh = features, [1 + len(path) for path in paths]
        verified = now(self.target.device)
        draft_s, verify_s = (drafted - start) / len(rows), (verified - drafted) / len(rows)
        for row, proposal, (path, next_token) in zip(rows, proposals, verdicts, strict=True):
            row.commit(proposal, path, next_token, draft_s, verify_s)

    def _unfinished(
        self, rows: Sequence[Running], state: DecodingState, reader: SequenceReader
    ) -> list[Running]:
        """The rows that are not done; the others leave the caches and the state."""
        remaining = [
            index
            for index, row in enumerate(rows)
            if not (row.stopped or len(row.token_ids) == row.limit)
        ]
        if remaining and len(remaining) < len(rows):
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
        rows: Sequence[Running],
        proposals: Sequence[Proposal],
        logits_BTV: Tensor,
        sampling: Sampling,
    ) -> list[Verdict]:
        """Of each row. The logits follow the sequence and each draft token. Of several sampled rows those with chains of equally many draft
        tokens, all of them drawn or all certain, are verified together."""
        if sampling.is_greedy:
            return [
                *map(
                    self._follow_best,
                    rows,
                    proposals,
                    logits_BTV.argmax(-1).tolist(),
                    near_ties(self.target, logits_BTV),
                )
            ]
        verdicts: dict[int, Verdict] = {}
        alike: dict[tuple[int, bool], list[int]] = {}
        for index, (row, proposal) in enumerate(zip(rows, proposals, strict=True)):
            if len(rows) == 1 or proposal.tree:
                probs_NV = sampling.probabilities(logits_BTV[index, : len(proposal.tokens) + 1])
                verdicts[index] = self.rule(proposal, probs_NV, row.generator)
            else:
                alike.setdefault((len(proposal.tokens), proposal.probabilities is None), []).append(
                    index
                )
        for (width, _), chosen in alike.items():
            logits_BKV = logits_BTV[:, : width + 1]
            distributions = [
                given for index in chosen if (given := proposals[index].probabilities) is not None
            ]
            num_accepted, next_token = verify.rejection(
                torch.tensor(
                    [proposals[index].tokens for index in chosen],
                    dtype=torch.long,
                    device=logits_BTV.device,
                ),
                sampling.probabilities(
                    logits_BKV if len(chosen) == len(rows) else logits_BKV[chosen]
                ),
                torch.stack(distributions) if distributions else None,
                uniforms(width + 1, [rows[index].generator for index in chosen]).to(
                    logits_BTV.device
                ),
            )
            found = zip(chosen, num_accepted.tolist(), next_token.tolist(), strict=True)
            verdicts |= {index: (range(count), token) for index, count, token in found}
        return [verdicts[index] for index in range(len(rows))]

    def _follow_best(
        self, row: Running, proposal: Proposal, choices: list[int], tied: list[bool]
    ) -> Verdict:
        """Follow the target's best tokens after the sequence and each draft token; the choices that are `tied` are first made in float64.
        That may lead to another branch, which has near-ties of its own.
        """
        tokens = proposal.tokens
        path: Sequence[int]
        while True:
            if proposal.tree:
                path, next_token = verify.follow(tokens, proposal.tree, choices)
            else:
                num_accepted, next_token = verify.greedy(tokens, choices)
                path = range(num_accepted)
            seen = [0, *(node + 1 for node in path)]
            if not any(tied[index] for index in seen):
                return path, next_token
            exact_TV = in_float64(self.target, [*row.token_ids, *(tokens[node] for node in path)])[
                0, -len(seen) :
            ]
            for index, choice in zip(seen, exact_TV.argmax(-1).tolist(), strict=True):
                if tied[index]:
                    choices[index], tied[index] = choice, False

    def check_tree(self) -> None:
        """Raises UserError when target or proposer cannot handle trees."""
        if not isinstance(self.proposer, TreeProposer):
            got = f"a tree for {type(self.proposer).__name__}, which drafts chains only"
            raise UserError("eval.tree", got=got, expected="null, or a method that drafts trees")
        if not self._reads_trees:
            check_reads_trees(self.target)
            self._reads_trees = True

    def check_batches(self) -> None:
        """Raises UserError when target or proposer cannot handle several sequences at once."""
        if not self._reads_batches:
            check_batchable(self.target.model, self.target.name)
            if self.proposer:
                self.proposer.begin([1, 1])  # which may refuse
            self._reads_batches = True


def now(device: torch.device) -> float:
    """Seconds on the clock, once the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def near_ties(target: FrozenTarget, logits_BTV: Tensor) -> list[list[bool]]:
    """[B][T]: where the two best logits lie within NEAR_TIE of each other; nowhere in another dtype than float32."""
    if not (target.is_plain and target.model.dtype == logits_BTV.dtype == torch.float32):
        return [[False] * logits_BTV.shape[1]] * len(logits_BTV)
    best_BT, second_BT = logits_BTV.topk(2).values.unbind(-1)
    tied: list[list[bool]] = (best_BT - second_BT <= NEAR_TIE * best_BT.abs()).tolist()
    return tied


def in_float64(target: FrozenTarget, token_ids: Sequence[int]) -> Tensor:
    """Logits [1, T, V] after each token. The float32 weights are converted in place and back, which loses nothing.

    Raises UserError for a class that insists on another dtype.
    """
    experts, dtype = target.config._experts_implementation, torch.get_default_dtype()
    with torch.inference_mode(False), torch.no_grad():
        target.model.double()
        torch.set_default_dtype(torch.float64)  # of constants that a class makes in its forward
        target.model.set_experts_implementation(
            "eager"
        )  # torch's grouped product of experts has no float64
        try:
            ids = torch.tensor([list(token_ids)], device=target.device)
            return target.logits(target.features(ids, ()).last_hidden)
        except RuntimeError as error:
            got = f"float32 for {target.name}, whose class does not compute in float64, by which near-ties are broken"
            raise UserError("target.dtype", got=got, expected="bfloat16 or float16") from error
        finally:
            torch.set_default_dtype(dtype)
            target.model.set_experts_implementation(experts)
            target.model.float()
