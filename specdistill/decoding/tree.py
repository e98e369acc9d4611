"""Trees of draft tokens: their shape, how a draft grows them, and what each node attends to. One target pass verifies all branches.

    … x_t ─┬─ a ─┬─ c      The root is the last token of the sequence. A node's position is one after its parent's, whatever its slot in
           │     └─ d      the KV cache, and it attends to the sequence, its ancestors and itself: c attends to … x_t a c, not to b.
           └─ b ─── e

Two kinds. A static tree has the same shape in every round (SpecInfer, arXiv 2305.09781). A dynamic one (EAGLE-2, arXiv 2406.16858)
grows where the draft is confident: the `top_k` best nodes of each level are expanded by their `top_k` best tokens, and the `budget` best
of all nodes are proposed. Best means the highest product of the draft's probabilities from the root on: for a draft whose
probabilities are the target's, that is the chance of being accepted.

What is drawn and what is certain, at a temperature above 0. In a static tree the children of a node are drawn from the draft's
distribution q without replacement, which `specdistill.decoding.verify` corrects exactly. In a dynamic tree they are the draft's best
tokens, and their probabilities decide which are proposed. If they were drawn, choosing among them would change their distribution, and no
rule that knows only q could correct that. So they are not drawn: the whole tree is a function of the sequence, each candidate is certain
(one-hot), and certain candidates leave the output's distribution unchanged however they were chosen.

Shapes: B rows, T nodes of one level, C children of a node, N nodes of a tree, F nodes in the KV cache, S positions in it, W draft
vocabulary.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdistill.decoding.sampling import Generators, Random, Sampling, draw
from specdistill.errors import UserError
from specdistill.recipe.sections import TreeConfig

ROOT = -1
MOST_NODES = 1024

# (draft tokens [B, T] of a level's nodes, indices [B, T] of their parents in the level before), shorter rows padded on the right
# -> logits [B, T, W] after each node
Expand = Callable[[Tensor, Tensor], Tensor]
# Draft tokens [N], their tree and, where they were drawn, their distributions [N, W], the same for siblings
TreeDraft = tuple[Tensor, "Tree", Tensor | None]


@dataclass(frozen=True)
class Tree:
    """parents: of each node, an earlier one or ROOT. A chain is (-1, 0, 1, …). Siblings are in order of preference."""

    parents: tuple[int, ...]

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Of the root and of every node."""
        children: dict[int, list[int]] = {node: [] for node in range(ROOT, len(self.parents))}
        for node, parent in enumerate(self.parents):
            children[parent].append(node)
        return children

    def prolonged(self, path: Sequence[int]) -> list[int]:
        """A path from the root, continued by first children down to a leaf."""
        path = list(path)
        while below := self.children[path[-1] if path else ROOT]:
            path.append(below[0])
        return path


@dataclass(frozen=True)
class Step:
    """A pass over T nodes of each row: what the KV cache holds before and with them. All tensors on the model's device.

    num_text: cached positions of each sequence; its nodes are in the slots after them. seen_BTF: which of the F cached nodes, the T new
    ones last, are a node's ancestors or the node itself. positions: of each row's F nodes. Padding is a node that no other sees.
    """

    num_text: Sequence[int]
    seen_BTF: Tensor
    positions: Sequence[Sequence[int]]

    @classmethod
    def before(cls, num_text: Sequence[int], device: torch.device) -> "Step":
        """The sequences alone, the root at the end of each: `descend` leads to the first level."""
        return cls(
            num_text,
            torch.zeros(len(num_text), 1, 0, dtype=torch.bool, device=device),
            [()] * len(num_text),
        )

    @classmethod
    def whole(cls, trees: Sequence[Tree], num_text: Sequence[int], device: torch.device) -> "Step":
        """The root and all nodes of each row's tree in one pass; the root is not cached yet."""
        width = 1 + max(len(tree.parents) for tree in trees)
        seen, positions = np.tile(np.eye(width, dtype=bool), (len(trees), 1, 1)), []
        for seen_NF, tree, start in zip(seen, trees, num_text, strict=True):
            for node, parent in enumerate(tree.parents):
                seen_NF[node + 1] |= seen_NF[parent + 1]
            positions.append(
                (start + seen_NF.sum(1) - 1).tolist()
            )  # a node's depth is how many ancestors it has
        return cls(num_text, torch.from_numpy(seen).to(device), positions)

    def descend(self, rows_BT: Tensor) -> "Step":
        """A level below the last one; rows_BT [B, T]: indices of the new nodes' parents in the last level."""
        num_rows, count = rows_BT.shape
        own = torch.eye(count, dtype=torch.bool, device=rows_BT.device).expand(num_rows, -1, -1)
        positions = [
            (*held, *[held[-1] + 1 if held else start] * count)
            for held, start in zip(self.positions, self.num_text, strict=True)
        ]
        return Step(self.num_text, torch.cat((at_nodes(self.seen_BTF, rows_BT), own), 2), positions)

    @property
    def new_positions(self) -> list[Sequence[int]]:
        """Of each row's T nodes."""
        return [held[-self.seen_BTF.shape[1] :] for held in self.positions]

    def visible(self, window: int | None) -> Tensor:
        """[B, T, S] bool: what each node attends to, within the last `window` positions, its own included."""
        device, (num_rows, num_nodes, num_cached) = self.seen_BTF.device, self.seen_BTF.shape
        if num_rows == 1 and window is None:  # a seventh of the time
            return torch.nn.functional.pad(self.seen_BTF, (self.num_text[0], 0), value=True)
        start_B1 = torch.tensor(self.num_text, device=device).unsqueeze(1)
        slot_BF = start_B1 + torch.arange(num_cached, device=device)
        slot_S = torch.arange(max(self.num_text) + num_cached, device=device)
        seen_BTS = (slot_S < start_B1).unsqueeze(1).repeat(1, num_nodes, 1)
        seen_BTS.scatter_(2, slot_BF.unsqueeze(1).expand(-1, num_nodes, -1), self.seen_BTF)
        if window is None:
            return seen_BTS
        query_BT = torch.tensor(self.new_positions, device=device)
        key_BS = slot_S.repeat(num_rows, 1).scatter_(
            1, slot_BF, torch.tensor(self.positions, device=device)
        )
        return seen_BTS & (query_BT.unsqueeze(2) - key_BS.unsqueeze(1) < window)


@dataclass(frozen=True)
class StaticTree:
    """branching: children of the root, of each of its children, and so on: [4, 2, 1] has 4 + 8 + 8 nodes."""

    branching: tuple[int, ...]

    def __post_init__(self) -> None:
        key, given = "eval.tree.branching", list(self.branching)
        if not given:
            raise UserError(key, got=given, expected="numbers of children, one for each level")
        if (num_nodes := sum(itertools.accumulate(given, operator.mul))) > MOST_NODES:
            raise UserError(
                key, got=f"{given}, {num_nodes} nodes", expected=f"at most {MOST_NODES} nodes"
            )

    @property
    def depth(self) -> int:
        return len(self.branching)

    @property
    def settings(self) -> dict[str, int | list[int]]:
        return {"branching": list(self.branching)}

    def cut(self, depth: int) -> "StaticTree":
        """Its first levels, at most `depth`."""
        return StaticTree(self.branching[:depth])

    def grow(
        self, logits_BW: Tensor, expand: Expand, sampling: Sampling, generators: Generators
    ) -> list[TreeDraft]:
        """From the logits after each row's root. Under sampling a node has fewer children where q has too few tokens."""
        levels, logits = [], [*logits_BW.split(1)]  # of each row, after the nodes of its last level
        for level, width in enumerate(self.branching):
            levels.append(
                [children(*row, width, sampling) for row in zip(logits, generators, strict=True)]
            )
            if level + 1 < self.depth:
                index_BT, rows_BT = (
                    pad_sequence([row[part] for row in levels[-1]], batch_first=True)
                    for part in (0, 1)
                )
                after = zip(levels[-1], expand(index_BT, rows_BT), strict=True)
                logits = [logits_TW[: len(index_T)] for (index_T, *_), logits_TW in after]
        drafts: list[TreeDraft] = []
        for of_row in zip(*levels, strict=True):
            index, rows, probs = zip(*of_row, strict=True)
            parents: list[int] = []
            above: Sequence[int] = [ROOT]
            for rows_T in rows:
                first = len(parents)
                parents += [above[place] for place in rows_T.tolist()]
                above = range(first, len(parents))
            drafts.append(
                (
                    torch.cat(index),
                    Tree(tuple(parents)),
                    None if sampling.is_greedy else torch.cat(probs),
                )
            )
        return drafts


@dataclass(frozen=True)
class DynamicTree:
    """budget: nodes proposed. depth: levels. top_k: nodes expanded in each level, and children of each of them."""

    budget: int
    depth: int
    top_k: int

    def __post_init__(self) -> None:
        most = min(MOST_NODES, self.num_candidates(self.depth))
        if not self.depth <= self.budget <= most:
            expected = (
                f"from {self.depth}, the depth, to {most}, the nodes that top_k and depth give"
            )
            raise UserError("eval.tree.budget", got=self.budget, expected=expected)

    def num_candidates(self, depth: int) -> int:
        return self.top_k + (depth - 1) * self.top_k**2

    @property
    def settings(self) -> dict[str, int | list[int]]:
        return dict(vars(self))

    def cut(self, depth: int) -> "DynamicTree":
        """A tree of at most `depth` levels and as many nodes, where that many exist."""
        shallower = min(depth, self.depth)
        return replace(
            self, depth=shallower, budget=min(self.budget, self.num_candidates(shallower))
        )

    def grow(
        self, logits_BW: Tensor, expand: Expand, sampling: Sampling, generators: Generators
    ) -> list[TreeDraft]:
        """From the logits after each row's root. Probabilities: at the sampling temperature, at 1 when greedy, before top-k and top-p."""
        temperature, width = sampling.temperature or 1.0, min(self.top_k, logits_BW.shape[-1])
        logits_BTW, score_BT = (
            logits_BW.unsqueeze(1),
            logits_BW.new_zeros(len(logits_BW), 1, dtype=torch.float32),
        )
        nodes_BT = torch.full_like(score_BT, ROOT, dtype=torch.long)
        index, scores, parents, count = [], [], [], 0
        for level in range(self.depth):
            chance_BTC, index_BTC = (logits_BTW.float() / temperature).log_softmax(-1).topk(width)
            index.append(index_BTC.flatten(1))
            scores.append((score_BT.unsqueeze(2) + chance_BTC).flatten(1))
            parents.append(nodes_BT.repeat_interleave(width, 1))
            if level + 1 < self.depth:
                score_BT, best_BT = scores[-1].topk(min(self.top_k, scores[-1].shape[1]))
                nodes_BT = count + best_BT
                logits_BTW = expand(index[-1].gather(1, best_BT), best_BT // width)
            count += index[-1].shape[1]
        # A child's score is at most its parent's, and the parent comes first: in a stable order no node is kept without its parent.
        kept_BN = (
            torch.cat(scores, 1)
            .sort(descending=True, stable=True)
            .indices[:, : self.budget]
            .sort()
            .values
        )
        index_BN, parents_BN = (torch.cat(part, 1).gather(1, kept_BN) for part in (index, parents))
        drafts: list[TreeDraft] = []
        for index_N, kept, above in zip(
            index_BN, kept_BN.tolist(), parents_BN.tolist(), strict=True
        ):
            place = {ROOT: ROOT} | {node: place for place, node in enumerate(kept)}
            drafts.append((index_N, Tree(tuple(place[node] for node in above)), None))
        return drafts


TreeShape = StaticTree | DynamicTree


def tree_shape(config: TreeConfig) -> TreeShape:
    """The tree that a recipe's `eval.tree` asks for: {budget, depth, top_k} is dynamic, {branching} static; UserError for neither."""
    numbers = config.model_dump(exclude={"branching"})
    if config.branching is not None:
        if given := [name for name, number in numbers.items() if number is not None]:
            got = f"a static tree with {', '.join(given)}"
            raise UserError(
                "eval.tree.branching", got=got, expected="branching, or budget, depth and top_k"
            )
        return StaticTree(tuple(config.branching))
    if missing := next((name for name, number in numbers.items() if number is None), None):
        expected = "a number: a tree has budget, depth and top_k, or branching"
        raise UserError(f"eval.tree.{missing}", got="nothing", expected=expected)
    return DynamicTree(**numbers)


def candidates_are_drawn(sampling: Sampling, tree: TreeShape | None) -> bool:
    """Whether a model drafts by drawing from its distribution, in a tree or (None) a chain; otherwise it takes its best tokens."""
    return not sampling.is_greedy and not isinstance(tree, DynamicTree)


def at_nodes(x_BTH: Tensor, rows_BN: Tensor) -> Tensor:
    """[B, N, H]: of each row of a batch, at some of its T nodes."""
    return x_BTH.gather(1, rows_BN.unsqueeze(2).expand(-1, -1, x_BTH.shape[2]))


def children(
    logits_TW: Tensor, generator: Random, width: int, sampling: Sampling
) -> tuple[Tensor, Tensor, Any]:
    """Up to `width` children of each of T nodes: their tokens, their parents' indices, and under sampling the distributions [W] they are
    drawn from.
    """
    if sampling.is_greedy:
        probs_TW, chosen_TC = logits_TW, logits_TW.topk(min(width, logits_TW.shape[-1])).indices
        drawn_TC = torch.ones_like(chosen_TC, dtype=torch.bool)
    else:
        probs_TW = sampling.probabilities(logits_TW)
        uniforms_TC = torch.rand(len(probs_TW), width, generator=generator, dtype=torch.float64).to(
            probs_TW.device
        )
        chosen_TC, drawn_TC = draw_distinct(probs_TW, uniforms_TC)
    rows_T = drawn_TC.nonzero()[:, 0]
    return chosen_TC[drawn_TC], rows_T, None if sampling.is_greedy else probs_TW[rows_T]


def draw_distinct(probs_TW: Tensor, uniforms_TC: Tensor) -> tuple[Tensor, Tensor]:
    """C tokens of each distribution without replacement, by one uniform in [0, 1) each: tokens [T, C], and which of them exist [T, C].

    Each is drawn from the distribution without the earlier ones; a distribution with fewer than C tokens runs out.
    """
    left_TW, tokens, exist = probs_TW.clone(), [], []
    for uniform_T in uniforms_TC.unbind(1):
        exist.append(left_TW.sum(-1) > 0)
        tokens.append(draw(left_TW, uniform_T))
        left_TW.scatter_(1, tokens[-1].unsqueeze(1), 0.0)
    return torch.stack(tokens, 1), torch.stack(exist, 1)
