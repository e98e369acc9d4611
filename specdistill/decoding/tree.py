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

Shapes: T nodes of one level, B children of a node, N nodes of a tree, F nodes in the KV cache, S positions in it, W draft vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from specdistill.decoding.sampling import Random, Sampling, draw
from specdistill.errors import UserError

ROOT = -1
MOST_NODES = 1024

# (draft tokens [T] of a level's nodes, indices [T] of their parents in the level before) -> logits [T, W] after each node
Expand = Callable[[Tensor, Tensor], Tensor]
# Draft tokens [N], their tree and, where they were drawn, their distributions [N, W], the same for siblings
TreeDraft = tuple[Tensor, "Tree", Tensor | None]


@dataclass(frozen=True)
class Tree:
    """parents: of each node, an earlier one or ROOT. A chain is (-1, 0, 1, …). Siblings are in order of preference."""

    parents: tuple[int, ...]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """1 for the root's children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

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
    """A pass over T nodes: what the KV cache holds before and with them. All tensors on the model's device.

    num_text: cached positions of the sequence. seen_TF: which of the F cached nodes, the T new ones last, are a node's ancestors or the
    node itself. positions: of the F nodes.
    """

    num_text: int
    seen_TF: Tensor
    positions: tuple[int, ...] = ()

    @classmethod
    def before(cls, num_text: int, device: torch.device) -> "Step":
        """The sequence alone, the root at its end: `descend` leads to the first level."""
        return cls(num_text, torch.zeros(1, 0, dtype=torch.bool, device=device))

    @classmethod
    def whole(cls, tree: Tree, num_text: int, device: torch.device) -> "Step":
        """The root and all nodes of a tree in one pass; the root is not cached yet."""
        seen = np.eye(len(tree.parents) + 1, dtype=bool)
        for node, parent in enumerate(tree.parents):
            seen[node + 1] |= seen[parent + 1]
        positions = (num_text, *(num_text + depth for depth in tree.depths))
        return cls(num_text, torch.from_numpy(seen).to(device), positions)

    def descend(self, rows_T: Tensor) -> "Step":
        """A level below the last one; rows_T [T]: indices of the new nodes' parents in the last level."""
        position = self.positions[-1] + 1 if self.positions else self.num_text
        own = torch.eye(len(rows_T), dtype=torch.bool, device=rows_T.device)
        return Step(self.num_text, torch.cat((self.seen_TF[rows_T], own), 1), (*self.positions, *[position] * len(rows_T)))

    @property
    def positions_T(self) -> tuple[int, ...]:
        return self.positions[len(self.positions) - len(self.seen_TF) :]

    def visible(self, window: int | None) -> Tensor:
        """[T, S] bool: what each node attends to, within the last `window` positions, its own included."""
        seen_TS = torch.nn.functional.pad(self.seen_TF, (self.num_text, 0), value=True)
        if window is None:
            return seen_TS
        queries = torch.tensor(self.positions_T, device=seen_TS.device)
        cached = torch.tensor(self.positions, dtype=torch.long, device=seen_TS.device)
        keys = torch.cat((torch.arange(self.num_text, device=seen_TS.device), cached))
        return seen_TS & (queries[:, None] - keys < window)


@dataclass(frozen=True)
class StaticTree:
    """branching: children of the root, of each of its children, and so on: [4, 2, 1] has 4 + 8 + 8 nodes."""

    branching: tuple[int, ...]

    def __post_init__(self) -> None:
        key, given = "eval.tree.branching", list(self.branching)
        if not given:
            raise UserError(key, got=given, expected="numbers of children, one for each level")
        if self.num_nodes > MOST_NODES:
            raise UserError(key, got=f"{given}, {self.num_nodes} nodes", expected=f"at most {MOST_NODES} nodes")

    @property
    def depth(self) -> int:
        return len(self.branching)

    @property
    def num_nodes(self) -> int:
        return sum(math.prod(self.branching[: level + 1]) for level in range(self.depth))

    @property
    def settings(self) -> dict[str, int | list[int]]:
        return {"branching": list(self.branching)}

    def cut(self, depth: int) -> "StaticTree":
        """Its first levels, at most `depth`."""
        return StaticTree(self.branching[:depth])

    def grow(self, logits_1W: Tensor, expand: Expand, sampling: Sampling, generator: Random) -> TreeDraft:
        """From the logits after the root. Under sampling a node has fewer children where q has too few tokens."""
        logits_TW, nodes = logits_1W, [ROOT]
        index: list[Tensor] = []
        parents: list[int] = []
        distributions: list[Tensor] = []
        for level, width in enumerate(self.branching):
            if sampling.is_greedy:
                chosen_TB = logits_TW.topk(min(width, logits_TW.shape[-1])).indices
                drawn_TB = torch.ones_like(chosen_TB, dtype=torch.bool)
            else:
                probs_TW = sampling.probabilities(logits_TW)
                uniforms = torch.rand(len(nodes), width, generator=generator, dtype=torch.float64).to(probs_TW.device)
                chosen_TB, drawn_TB = draw_distinct(probs_TW, uniforms)
            rows_T = drawn_TB.nonzero()[:, 0]
            index.append(chosen_TB[drawn_TB])
            if not sampling.is_greedy:
                distributions.append(probs_TW[rows_T])
            nodes, above = list(range(len(parents), len(parents) + len(rows_T))), nodes
            parents += [above[row] for row in rows_T.tolist()]
            if level + 1 < self.depth:
                logits_TW = expand(index[-1], rows_T)
        return torch.cat(index), Tree(tuple(parents)), torch.cat(distributions) if distributions else None


@dataclass(frozen=True)
class DynamicTree:
    """budget: nodes proposed. depth: levels. top_k: nodes expanded in each level, and children of each of them."""

    budget: int
    depth: int
    top_k: int

    def __post_init__(self) -> None:
        most = min(MOST_NODES, self.num_candidates(self.depth))
        if not self.depth <= self.budget <= most:
            expected = f"from {self.depth}, the depth, to {most}, the nodes that top_k and depth give"
            raise UserError("eval.tree.budget", got=self.budget, expected=expected)

    def num_candidates(self, depth: int) -> int:
        return self.top_k + (depth - 1) * self.top_k**2

    @property
    def settings(self) -> dict[str, int | list[int]]:
        return dict(vars(self))

    def cut(self, depth: int) -> "DynamicTree":
        """A tree of at most `depth` levels and as many nodes, where that many exist."""
        shallower = min(depth, self.depth)
        return replace(self, depth=shallower, budget=min(self.budget, self.num_candidates(shallower)))

    def grow(self, logits_1W: Tensor, expand: Expand, sampling: Sampling, generator: Random) -> TreeDraft:
        """From the logits after the root. Probabilities are those at the sampling temperature, at 1 when greedy, before top-k and top-p."""
        temperature, width = sampling.temperature or 1.0, min(self.top_k, logits_1W.shape[-1])
        logits_TW, score_T = logits_1W, logits_1W.new_zeros(1, dtype=torch.float32)
        nodes_T = torch.full((1,), ROOT, device=logits_1W.device)
        index, scores, parents, count = [], [], [], 0
        for level in range(self.depth):
            chances_TW = (logits_TW.float() / temperature).log_softmax(-1)
            chance_TB, index_TB = chances_TW.topk(width)
            score_TB = score_T.unsqueeze(1) + chance_TB
            index.append(index_TB.flatten())
            scores.append(score_TB.flatten())
            parents.append(nodes_T.repeat_interleave(width))
            if level + 1 < self.depth:
                score_T, best_T = scores[-1].topk(min(self.top_k, len(scores[-1])))
                nodes_T = count + best_T
                logits_TW = expand(index[-1][best_T], best_T // width)
            count += len(index[-1])
        # A child's score is at most its parent's, and the parent comes first: in a stable order no node is kept without its parent.
        kept_N = torch.cat(scores).sort(descending=True, stable=True).indices[: self.budget].sort().values
        place = {ROOT: ROOT} | {node: place for place, node in enumerate(kept_N.tolist())}
        return torch.cat(index)[kept_N], Tree(tuple(place[node] for node in torch.cat(parents)[kept_N].tolist())), None


TreeShape = StaticTree | DynamicTree


def tree_shape(
    *, budget: int | None = None, depth: int | None = None, top_k: int | None = None, branching: list[int] | None = None
) -> TreeShape:
    """The tree that a recipe's `eval.tree` asks for: {budget, depth, top_k} is dynamic, {branching} static; UserError for neither."""
    numbers = {"budget": budget, "depth": depth, "top_k": top_k}
    given = [name for name, number in numbers.items() if number is not None]
    if branching is not None and given:
        got = f"a static tree with {', '.join(given)}"
        raise UserError("eval.tree.branching", got=got, expected="branching, or budget, depth and top_k")
    if branching is not None:
        return StaticTree(tuple(branching))
    if budget is None or depth is None or top_k is None:
        missing = next(name for name in numbers if name not in given)
        expected = "a number: a tree has budget, depth and top_k, or branching"
        raise UserError(f"eval.tree.{missing}", got="nothing", expected=expected)
    return DynamicTree(budget, depth, top_k)


def candidates_are_drawn(sampling: Sampling, tree: TreeShape | None) -> bool:
    """Whether a model drafts by drawing from its distribution, in a tree or (None) a chain; otherwise it takes its best tokens."""
    return not sampling.is_greedy and not isinstance(tree, DynamicTree)


def draw_distinct(probs_TW: Tensor, uniforms_TB: Tensor) -> tuple[Tensor, Tensor]:
    """B tokens of each row without replacement, by one uniform in [0, 1) each: tokens [T, B], and which of them exist [T, B].

    Each is drawn from the distribution without the earlier ones; a distribution with fewer than B tokens runs out.
    """
    left_TW, tokens, exist = probs_TW.clone(), [], []
    for uniform_T in uniforms_TB.unbind(1):
        exist.append(left_TW.sum(-1) > 0)
        tokens.append(draw(left_TW, uniform_T))
        left_TW.scatter_(1, tokens[-1].unsqueeze(1), 0.0)
    return torch.stack(tokens, 1), torch.stack(exist, 1)
