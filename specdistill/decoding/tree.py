"""Trees of draft tokens: their shape, how a draft grows them, and what each node attends to.

One pass of the target verifies all branches.

    … x_t ─┬─ a ─┬─ c
           │     └─ d
           └─ b ─── e

The root is the last token of the sequence, here x_t. A node's position is one after its parent's,
whatever its slot in the KV cache. It attends to the sequence, its ancestors and itself: c attends
to … x_t a c, and not to b.

**Static and dynamic trees.** A static tree has the same shape in every round (SpecInfer, arXiv
2305.09781). A dynamic tree (EAGLE-2, arXiv 2406.16858) grows where the draft is confident. The
`top_k` best nodes of each level are expanded by their `top_k` best tokens, and the `budget` best of
all nodes are proposed. The best nodes have the highest product of the draft's probabilities from
the root on. If these are the target's probabilities, the product is the chance of being accepted.

**Candidates above temperature 0.** In a static tree the children of a node are drawn from the
draft's distribution q without replacement. `specdistill.decoding.verify` corrects this exactly. In
a dynamic tree the children are the draft's best tokens, and their probabilities decide which are
proposed. If they were drawn, this choice would change their distribution, and no rule that knows
only q could correct it. So they are not drawn: the whole tree is a function of the sequence, and
each candidate is certain (one-hot). Certain candidates leave the output's distribution unchanged
however they were chosen.

Shapes: B rows, T nodes of one level, C children of a node, N nodes of a tree, F nodes in the KV
cache, S positions in it, W draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdistill.common.errors import UserError
from specdistill.decoding.sampling import Generators, Random, Sampling, draw_tokens
from specdistill.recipe.sections import TreeConfig

ROOT = -1  # the parent of the nodes of the first level
# The most nodes of a tree. The mask grows with their square.
MAX_NODES = 1024

# Computes the logits [B, T, W] after each node of a level, from the nodes' draft tokens [B, T] and
# the indices [B, T] of their parents in the level before. Shorter rows are padded on the right.
Expand = Callable[[Tensor, Tensor], Tensor]
# Draft tokens [N], their tree and, if they were drawn, their distributions [N, W], which siblings
# share.
TreeDraft = tuple[Tensor, "Tree", Tensor | None]


@dataclass(frozen=True)
class Tree:
    """The shape of one tree.

    Attributes:
        parents: the parent of each node: an earlier node, or ROOT. A chain is (-1, 0, 1, …).
            Siblings are in order of preference.
    """

    parents: tuple[int, ...]

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The children of each node, by the node's index; ROOT is the key of the root."""
        children: dict[int, list[int]] = {node: [] for node in range(ROOT, len(self.parents))}
        for node, parent in enumerate(self.parents):
            children[parent].append(node)
        return children

    def extend_to_leaf(self, path: Sequence[int]) -> list[int]:
        """Return a path continued down to a leaf, always through the first child.

        Args:
            path: node indices that begin at a child of the root; may be empty.
        """
        path = list(path)
        children = self.children[path[-1] if path else ROOT]
        while children:
            path.append(children[0])
            children = self.children[children[0]]
        return path


@dataclass(frozen=True)
class TreePass:
    """A pass over T nodes of each row's tree. All tensors are on the model's device.

    Attributes:
        num_text: cached positions of each sequence. Its nodes are in the slots after them.
        ancestors_BTF: bool, whether each of the F nodes in the KV cache is an ancestor of each of
            the T new nodes, or that node itself. The F nodes include the new ones, which come last.
        positions: the positions of each row's F nodes. Padding is a node that no other node sees.
    """

    num_text: Sequence[int]
    ancestors_BTF: Tensor
    positions: Sequence[Sequence[int]]

    @classmethod
    def begin_at_root(cls, num_text: Sequence[int], device: torch.device) -> "TreePass":
        """Return the start of a tree that has only its root; grow it with `add_level`.

        Args:
            num_text: the number of tokens in the KV cache of each sequence. The root is the last of
                them, so it counts as text here.
            device: the model's device.
        """
        # `ancestors_BTF` has one row per node of the last level. So far that is the root: T = 1. It
        # has one column per tree node in the KV cache. There is none yet, because the root is in
        # the cache as text, which every node sees: F = 0.
        num_rows = len(num_text)
        ancestors_BTF = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=device)
        no_positions: list[tuple[int, ...]] = [()] * num_rows  # of tree nodes, for each row
        return cls(num_text, ancestors_BTF, no_positions)

    @classmethod
    def cover_trees(
        cls, trees: Sequence[Tree], num_text: Sequence[int], device: torch.device
    ) -> "TreePass":
        """Return one pass that reads the root and all nodes of each tree.

        Args:
            trees: one for each row.
            num_text: the number of tokens in the KV cache of each row. The root is not one of them:
                this pass reads it, as the first node.
            device: the model's device.
        """
        # The root (node -1) has index 0, and node i has index i + 1. A node sees itself and all
        # that its parent sees. Smaller trees are padded with nodes that see only themselves.
        num_nodes = 1 + max(len(tree.parents) for tree in trees)
        ancestors = np.tile(np.eye(num_nodes, dtype=bool), (len(trees), 1, 1))
        positions = []
        for ancestors_NF, tree, start in zip(ancestors, trees, num_text, strict=True):
            for node, parent in enumerate(tree.parents):
                ancestors_NF[node + 1] |= ancestors_NF[parent + 1]
            # A node's depth is the number of its ancestors: the nodes that it sees, less itself.
            depths_N = ancestors_NF.sum(1) - 1
            positions.append((start + depths_N).tolist())
        return cls(num_text, torch.from_numpy(ancestors).to(device), positions)

    def add_level(self, parents_BT: Tensor) -> "TreePass":
        """Return the pass over the next level of nodes.

        Args:
            parents_BT: for each of the T new nodes of each of the B rows, the index of its parent
                among the nodes of the level before.
        """
        num_rows, num_nodes = parents_BT.shape
        # `ancestors_BTF` has a row for each new node and a column for each of the F nodes of all
        # levels. The ancestors of a new node are itself and the ancestors of its parent, the
        # parent included.
        themselves_TT = torch.eye(num_nodes, dtype=torch.bool, device=parents_BT.device)
        ancestors_BTF = torch.cat(
            (
                gather_nodes(self.ancestors_BTF, parents_BT),
                themselves_TT.expand(num_rows, -1, -1),
            ),
            2,
        )
        # `positions` lists the nodes of all levels. The new ones share one position: the one after
        # that of the level before, or after the text.
        positions = []
        for row_positions, start in zip(self.positions, self.num_text, strict=True):
            position = row_positions[-1] + 1 if row_positions else start
            positions.append((*row_positions, *[position] * num_nodes))
        return TreePass(self.num_text, ancestors_BTF, positions)

    @property
    def new_positions(self) -> list[Sequence[int]]:
        """The position ids of the T nodes that the pass reads, for each row."""
        num_nodes = self.ancestors_BTF.shape[1]
        return [positions[-num_nodes:] for positions in self.positions]

    def build_mask(self, window: int | None) -> Tensor:
        """Return the attention mask: which slots of the KV cache each node attends to.

        Args:
            window: a node attends to the last `window` positions, its own included. None: to all.

        Returns:
            Bool [B, T, S]: rows, nodes of this pass, slots of the KV cache.
        """
        # In the KV cache, the slots of a row's text come first. After them come the slots of its F
        # tree nodes: those of earlier passes, and the T nodes of this pass.
        device = self.ancestors_BTF.device
        num_rows, num_nodes, num_tree_slots = self.ancestors_BTF.shape

        # For one row without a window, put the text in front, which all nodes see. This takes a
        # seventh of the time of the general case.
        if num_rows == 1 and window is None:
            return torch.nn.functional.pad(self.ancestors_BTF, (self.num_text[0], 0), value=True)

        # All nodes see the whole text, and among the tree nodes their ancestors. `slot_BF` has the
        # slot of each tree node.
        start_B1 = torch.tensor(self.num_text, device=device).unsqueeze(1)
        slot_BF = start_B1 + torch.arange(num_tree_slots, device=device)
        slot_S = torch.arange(max(self.num_text) + num_tree_slots, device=device)
        mask_BTS = (slot_S < start_B1).unsqueeze(1).repeat(1, num_nodes, 1)
        mask_BTS.scatter_(2, slot_BF.unsqueeze(1).expand(-1, num_nodes, -1), self.ancestors_BTF)
        if window is None:
            return mask_BTS

        # A window counts positions, which are not the slots of a tree's nodes. `key_BS` is the
        # position of what is in each slot.
        query_BT = torch.tensor(self.new_positions, device=device)
        node_positions_BF = torch.tensor(self.positions, device=device)
        key_BS = slot_S.repeat(num_rows, 1).scatter_(1, slot_BF, node_positions_BF)
        return mask_BTS & (query_BT.unsqueeze(2) - key_BS.unsqueeze(1) < window)


@dataclass(frozen=True)
class StaticTree:
    """A tree of the same shape in every round.

    Attributes:
        branching: the number of children of the root, of each of its children, and so on.
            [4, 2, 1] has 4 + 8 + 8 nodes.
    """

    branching: tuple[int, ...]

    def __post_init__(self) -> None:
        key = "eval.tree.branching"
        branching = list(self.branching)
        if not branching:
            raise UserError(
                key,
                got=branching,
                expected="one number of children for each level, such as [4, 2, 1]",
            )
        num_nodes = 0
        level_width = 1
        for num_children in branching:
            level_width *= num_children
            num_nodes += level_width
        if num_nodes > MAX_NODES:
            raise UserError(
                key, got=f"{branching}, {num_nodes} nodes", expected=f"at most {MAX_NODES} nodes"
            )

    @property
    def depth(self) -> int:
        """The number of levels."""
        return len(self.branching)

    @property
    def settings(self) -> dict[str, int | list[int]]:
        """The shape in the form of the report (JSON)."""
        return {"branching": list(self.branching)}

    def cut(self, depth: int) -> "StaticTree":
        """Return the shape of the first `depth` levels of the tree."""
        return StaticTree(self.branching[:depth])

    def grow(
        self, logits_BW: Tensor, expand: Expand, sampling: Sampling, generators: Generators
    ) -> list[TreeDraft]:
        """Draft a tree of tokens for each row, level by level.

        Above temperature 0 a node gets fewer children if top-k and top-p leave too few tokens.

        Args:
            logits_BW: the draft's logits [B, W] after each row's root, over its W tokens.
            expand: runs the draft over the nodes of a level, and returns the logits after each.
            sampling: temperature, top-p and top-k.
            generators: the random generator of each row.

        Returns:
            For each row the draft tokens of the nodes, their tree, and the distributions that they
            were drawn from (None when greedy).
        """
        # Choose the children of all nodes of a level. If another level follows, run the draft over
        # the children.
        levels: list[list[Children]] = []  # by level, then by row
        row_logits = [*logits_BW.split(1)]  # after the nodes of each row's last level
        for level, num_children in enumerate(self.branching):
            row_children = []
            for logits_TW, generator in zip(row_logits, generators, strict=True):
                row_children.append(choose_children(logits_TW, generator, num_children, sampling))
            levels.append(row_children)
            if level + 1 < self.depth:
                tokens = [children.tokens for children in row_children]
                parents = [children.parents for children in row_children]
                logits_BTW = expand(
                    pad_sequence(tokens, batch_first=True), pad_sequence(parents, batch_first=True)
                )
                row_logits = [
                    logits_TW[: len(tokens_T)]
                    for logits_TW, tokens_T in zip(logits_BTW, tokens, strict=True)
                ]

        # Join the levels of each row to one tree.
        drafts: list[TreeDraft] = []
        for row_levels in zip(*levels, strict=True):
            tokens_N = torch.cat([children.tokens for children in row_levels])
            tree = join_levels([children.parents for children in row_levels])
            distributions = []
            for children in row_levels:
                if children.probabilities is not None:
                    distributions.append(children.probabilities)
            probs_NW = torch.cat(distributions) if distributions else None
            drafts.append((tokens_N, tree, probs_NW))
        return drafts


@dataclass(frozen=True)
class DynamicTree:
    """A tree that grows where the draft is confident.

    Attributes:
        budget: the number of nodes proposed.
        depth: the number of levels.
        top_k: how many nodes are expanded in each level, and how many children each of them gets.
    """

    budget: int
    depth: int
    top_k: int

    def __post_init__(self) -> None:
        max_budget = min(MAX_NODES, self.count_candidates(self.depth))
        if not self.depth <= self.budget <= max_budget:
            raise UserError(
                "eval.tree.budget",
                got=self.budget,
                expected=(
                    f"a number of nodes from {self.depth} (the depth) to {max_budget} (the most"
                    " that top_k and depth allow)"
                ),
            )

    def count_candidates(self, depth: int) -> int:
        """Return how many nodes are candidates in a tree of this depth, before the best are kept.

        The root gets `top_k` children. On each later level `top_k` nodes get `top_k` children each:
        with top_k = 4 and depth 3, there are 4 + 16 + 16 candidates.
        """
        return self.top_k + (depth - 1) * self.top_k**2

    @property
    def settings(self) -> dict[str, int | list[int]]:
        """The shape in the form of the report (JSON)."""
        return dict(vars(self))

    def cut(self, depth: int) -> "DynamicTree":
        """Return a shape of at most `depth` levels.

        The budget of nodes stays the same, unless the smaller tree has fewer candidates.
        """
        new_depth = min(depth, self.depth)
        new_budget = min(self.budget, self.count_candidates(new_depth))
        return replace(self, depth=new_depth, budget=new_budget)

    def grow(
        self, logits_BW: Tensor, expand: Expand, sampling: Sampling, generators: Generators
    ) -> list[TreeDraft]:
        """Draft a tree of tokens for each row, level by level, and keep the best nodes.

        A node's score is the sum of the draft's log probabilities on the path from the root to the
        node. They are computed at the sampling temperature (1 when greedy), before top-k and top-p.

        Args:
            logits_BW: the draft's logits [B, W] after each row's root, over its W tokens.
            expand: runs the draft over the nodes of a level, and returns the logits after each.
            sampling: only the temperature is used.
            generators: not used, because nothing is drawn.

        Returns:
            For each row the draft tokens of the nodes, their tree, and None (no distributions,
            because the tokens are not drawn).
        """
        temperature = sampling.temperature or 1.0
        num_children = min(self.top_k, logits_BW.shape[-1])
        logits_BTW = logits_BW.unsqueeze(1)
        # The scores and indices of the T nodes to expand next, at first only the root.
        score_BT = logits_BW.new_zeros(len(logits_BW), 1, dtype=torch.float32)
        nodes_BT = torch.full_like(score_BT, ROOT, dtype=torch.long)
        # One entry per level: a tensor [B, T * C] with C candidates for each expanded node.
        tokens = []
        scores = []
        parents = []
        num_nodes = 0
        for level in range(self.depth):
            # Each expanded node gets its best tokens as children.
            log_probs_BTW = (logits_BTW.float() / temperature).log_softmax(-1)
            log_probs_BTC, tokens_BTC = log_probs_BTW.topk(num_children)
            del log_probs_BTW  # as large as the vocabulary, and not needed while the draft runs
            tokens.append(tokens_BTC.flatten(1))
            scores.append((score_BT.unsqueeze(2) + log_probs_BTC).flatten(1))
            parents.append(nodes_BT.repeat_interleave(num_children, 1))
            # The best nodes of the level are expanded next.
            if level + 1 < self.depth:
                score_BT, best_BT = scores[-1].topk(min(self.top_k, scores[-1].shape[1]))
                nodes_BT = num_nodes + best_BT
                logits_BTW = expand(tokens[-1].gather(1, best_BT), best_BT // num_children)
            num_nodes += tokens[-1].shape[1]

        # A child's score is at most its parent's, and the parent comes first. So in a stable order
        # no node is kept without its parent.
        order = torch.cat(scores, 1).sort(descending=True, stable=True).indices
        kept_BN = order[:, : self.budget].sort().values
        tokens_BN = torch.cat(tokens, 1).gather(1, kept_BN)
        parents_BN = torch.cat(parents, 1).gather(1, kept_BN)
        # A parent is an index among all candidates. Replace it by the index among the kept nodes.
        drafts: list[TreeDraft] = []
        for tokens_N, kept_nodes, row_parents in zip(
            tokens_BN, kept_BN.tolist(), parents_BN.tolist(), strict=True
        ):
            new_index = {ROOT: ROOT}
            for index, node in enumerate(kept_nodes):
                new_index[node] = index
            tree = Tree(tuple(new_index[parent] for parent in row_parents))
            drafts.append((tokens_N, tree, None))
        return drafts


TreeShape = StaticTree | DynamicTree


def build_tree_shape(config: TreeConfig, key: str = "eval.tree") -> TreeShape:
    """Return the tree shape that a section of a recipe describes.

    `branching` alone describes a static tree; `budget`, `depth` and `top_k` a dynamic one.

    Args:
        config: the section.
        key: the key of the section, which errors name.

    Raises:
        UserError: if keys of both kinds are mixed, if one of the three keys of a dynamic tree is
            missing, or for sizes that no tree can have.
    """
    # The errors name keys of `eval.tree`. Rename them to the keys of the given section.
    try:
        return _build_tree_shape(config)
    except UserError as error:
        for name in type(config).model_fields:
            error.rename_key(f"eval.tree.{name}", f"{key}.{name}")
        raise


def _build_tree_shape(config: TreeConfig) -> TreeShape:
    """Return the tree shape that a section describes. Errors name the keys of `eval.tree`."""
    sizes = config.model_dump(exclude={"branching"})
    if config.branching is not None:
        surplus_names = [name for name, size in sizes.items() if size is not None]
        if surplus_names:
            raise UserError(
                "eval.tree.branching",
                got=f"a static tree with {', '.join(surplus_names)}",
                expected=(
                    "branching alone (a static tree), or budget, depth and top_k (a dynamic tree)"
                ),
            )
        return StaticTree(tuple(config.branching))
    for name, size in sizes.items():
        if size is None:
            raise UserError(
                f"eval.tree.{name}",
                got="nothing",
                expected="a number: give budget, depth and top_k, or branching alone",
            )
    return DynamicTree(**sizes)


def has_drawn_candidates(sampling: Sampling, tree: TreeShape | None) -> bool:
    """Return whether a draft model draws its draft tokens at random from its distribution.

    It does so above temperature 0. Greedy drafts and dynamic trees consist of the model's best
    tokens, which are not drawn.

    Args:
        sampling: the sampling settings.
        tree: the shape of the proposal; None for a chain.
    """
    return not sampling.is_greedy and not isinstance(tree, DynamicTree)


def gather_nodes(x_BTH: Tensor, nodes_BN: Tensor) -> Tensor:
    """Return the vectors of N selected nodes of each row.

    Args:
        x_BTH: a vector of size H for each of T nodes [B, T, H].
        nodes_BN: the indices [B, N] of the selected nodes; an index may occur several times.

    Returns:
        [B, N, H].
    """
    return x_BTH.gather(1, nodes_BN.unsqueeze(2).expand(-1, -1, x_BTH.shape[2]))


@dataclass(frozen=True)
class Children:
    """The children of all nodes of one level of one row.

    Attributes:
        tokens: [C], of all children, in the order of their parents.
        parents: [C], indices of their parents in the level.
        probabilities: [C, W], the distributions that the children were drawn from; None if they
            were not drawn.
    """

    tokens: Tensor
    parents: Tensor
    probabilities: Tensor | None


def choose_children(
    logits_TW: Tensor, generator: Random, num_children: int, sampling: Sampling
) -> Children:
    """Choose up to `num_children` draft tokens after each node of one level of one row.

    Greedy sampling takes the best tokens. Otherwise they are drawn without replacement, and fewer
    if the distribution runs out of tokens.

    Args:
        logits_TW: the draft's logits after each of the T nodes, over its W tokens.
        generator: draws the random numbers.
        num_children: the most children of a node.
        sampling: temperature, top-p and top-k.
    """
    if sampling.is_greedy:
        tokens_TC = logits_TW.topk(min(num_children, logits_TW.shape[-1])).indices
        parents_TC = torch.arange(len(logits_TW), device=logits_TW.device).unsqueeze(1)
        return Children(tokens_TC.flatten(), parents_TC.expand_as(tokens_TC).flatten(), None)
    probs_TW = sampling.compute_probabilities(logits_TW)
    uniforms_TC = torch.rand(len(probs_TW), num_children, generator=generator, dtype=torch.float64)
    tokens_TC, exists_TC = draw_distinct_tokens(probs_TW, uniforms_TC.to(probs_TW.device))
    # The first column of the indices is the node that each existing child belongs to.
    parents_C = exists_TC.nonzero()[:, 0]
    return Children(tokens_TC[exists_TC], parents_C, probs_TW[parents_C])


def draw_distinct_tokens(probs_TW: Tensor, uniforms_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Draw C different tokens from each of T distributions.

    A token that was drawn gets probability 0 for the later draws. A distribution with fewer than C
    tokens runs out, and its last tokens do not exist.

    Args:
        probs_TW: the distributions [T, W] over W tokens.
        uniforms_TC: random numbers [T, C] in [0, 1), one for each token.

    Returns:
        The tokens [T, C], and which of them exist, bool [T, C].
    """
    remaining_TW = probs_TW.clone()
    tokens = []
    exists = []
    for uniform_T in uniforms_TC.unbind(1):
        exists.append(remaining_TW.sum(-1) > 0)
        tokens_T = draw_tokens(remaining_TW, uniform_T)
        tokens.append(tokens_T)
        remaining_TW.scatter_(1, tokens_T.unsqueeze(1), 0.0)
    return torch.stack(tokens, 1), torch.stack(exists, 1)


def join_levels(level_parents: Sequence[Tensor]) -> Tree:
    """Return one tree from the parents of each level's nodes.

    Args:
        level_parents: for each level, the parent of each node, as an index within the level before.
    """
    parents: list[int] = []
    previous_nodes: Sequence[int] = [ROOT]
    for parents_T in level_parents:
        # Replace indices within a level by indices within the whole tree.
        first_node = len(parents)
        parents += [previous_nodes[index] for index in parents_T.tolist()]
        previous_nodes = range(first_node, len(parents))
    return Tree(tuple(parents))
