"""The exact distribution of tree decoding: all candidates and outcomes are enumerated."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from specdistill.decoding.tree import ROOT, Tree, draw_distinct_tokens
from specdistill.decoding.verify import follow_target_choices, verify_sampled_tree
from tests.enumeration import (
    Distribution,
    Outcome,
    cells,
    decoded,
    plain_distribution,
    random_distribution,
)

ROUNDING = 1e-15
INSET = 1e-9  # distance from a cell's ends at which the rule is evaluated, relative to its width

# The tokens of a tree's nodes, its shape and its probability.
Candidates = list[tuple[tuple[int, ...], Tree, float]]


def list_node_texts(
    text: tuple[int, ...], tokens: tuple[int, ...], tree: Tree
) -> list[tuple[int, ...]]:
    """Return the text that ends in the root, and then the text that ends in each node."""
    texts = {ROOT: text}
    for node, parent in enumerate(tree.parents):
        texts[node] = (*texts[parent], tokens[node])
    return [texts[node] for node in range(ROOT, len(tokens))]


def enumerate_drawn_candidates(
    draft: Distribution, text: tuple[int, ...], branching: tuple[int, ...]
) -> Candidates:
    """Return every tree of candidates drawn without replacement, grown level by level."""
    candidates: Candidates = [((), Tree(()), 1.0)]
    for level, width in enumerate(branching):
        grown: Candidates = []
        for tokens, tree, probability in candidates:
            texts = list_node_texts(text, tokens, tree)
            nodes = [
                node
                for node in range(ROOT, len(tokens))
                if len(texts[node + 1]) == len(text) + level
            ]
            choices = []
            for node in nodes:
                distribution = draft(texts[node + 1])
                count = min(width, int((distribution > 0).sum()))
                choices.append(
                    [
                        (order, ordered_probability(distribution, order))
                        for order in itertools.permutations(range(len(distribution)), count)
                    ]
                )
            for choice in itertools.product(*choices):
                more, parents, grown_probability = list(tokens), list(tree.parents), probability
                for node, (order, order_probability) in zip(nodes, choice, strict=True):
                    more += order
                    parents += [node] * len(order)
                    grown_probability *= order_probability
                if grown_probability > 0:
                    grown.append((tuple(more), Tree(tuple(parents)), grown_probability))
        candidates = grown
    return candidates


def ordered_probability(distribution: Tensor, order: tuple[int, ...]) -> float:
    chance, left = 1.0, distribution.clone()
    for token in order:
        chance *= float(left[token] / left.sum())
        left[token] = 0
    return chance


def enumerate_outcomes(
    tokens: tuple[int, ...], tree: Tree, p: Tensor, q: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield two opposite corners and the volume of each cell into which the rule's uniforms fall.

    Uniforms that the rule does not read stay at 1/2.
    """

    def visit(
        node: int, low: Tensor, high: Tensor, volume: float
    ) -> Iterator[tuple[Tensor, Tensor, float]]:
        r, children = p[node + 1], tree.children[node]
        if q is None:
            for middle, width in cells(r.cumsum(0)):
                if width < ROUNDING:  # the rounding error of the sum
                    continue
                token = int(torch.searchsorted(r.cumsum(0), middle, right=True))
                ends = [end.clone() for end in (low, high)]
                ends[0][node + 1], ends[1][node + 1] = compute_corners(middle, width)
                below = [child for child in children if tokens[child] == token]
                yield from (
                    visit(below[0], *ends, volume * width) if below else [(*ends, volume * width)]
                )
            return
        distribution = q[children[0]] if children else None
        for child in children:
            token = tokens[child]
            threshold = min(1.0, float(r[token] / distribution[token]))
            for middle, width in cells(torch.tensor([threshold], dtype=torch.float64)):
                if middle < threshold:
                    ends = [end.clone() for end in (low, high)]
                    ends[0][child], ends[1][child] = compute_corners(middle, width)
                    yield from visit(child, *ends, volume * width)
            if threshold >= 1:
                return
            low, high = low.clone(), high.clone()
            low[child], high[child] = compute_corners((1 + threshold) / 2, 1 - threshold)
            volume *= 1 - threshold
            r = (r - distribution).clamp_min(0)
            r = r / r.sum()
            distribution = distribution.clone()
            distribution[token] = 0
            distribution = distribution / distribution.sum()
        for middle, width in cells(r.cumsum(0)):
            ends = [end.clone() for end in (low, high)]
            ends[0][-1], ends[1][-1] = compute_corners(middle, width)
            yield (*ends, volume * width)

    half = torch.full((len(tokens) + 1,), 0.5, dtype=torch.float64)
    yield from visit(ROOT, half, half, 1.0)


def compute_corners(middle: float, width: float) -> tuple[float, float]:
    return middle - width * (0.5 - INSET), middle + width * (0.5 - INSET)


def output_distribution(
    target: Distribution,
    candidates: Callable[[tuple[int, ...]], Candidates],
    draft: Distribution | None,
    size: int,
    length: int,
) -> Tensor:
    """Return the exact distribution of `length` tokens that are decoded in rounds of trees.

    Without a `draft` the candidates are certain.
    """

    def rounds(text: tuple[int, ...]) -> Iterator[Outcome]:
        for tokens, tree, chance in candidates(text):
            texts = list_node_texts(text, tokens, tree)
            p = torch.stack([target(ending) for ending in texts])
            q = (
                None
                if draft is None
                else torch.stack([draft(texts[parent + 1]) for parent in tree.parents])
            )
            for low, high, volume in enumerate_outcomes(tokens, tree, p, q):
                path, token = verify_sampled_tree(tokens, tree, p, q, low)
                assert (path, token) == verify_sampled_tree(tokens, tree, p, q, high), (
                    "not constant on a cell"
                )
                yield (*(tokens[node] for node in path), token), chance * volume

    return decoded(rounds, size, length)


@pytest.mark.parametrize(
    ("size", "branching", "length"),
    [(3, (2,), 2), (3, (2, 1), 2), (3, (1, 2), 2), (3, (3,), 2), (3, (2, 2), 1), (10, (2,), 1)],
)
def test_candidates_drawn_without_replacement_leave_the_targets_distribution(
    size: int, branching: tuple[int, ...], length: int
) -> None:
    target, draft = random_distribution(size, 1), random_distribution(size, 2)
    distribution = output_distribution(
        target, lambda text: enumerate_drawn_candidates(draft, text, branching), draft, size, length
    )
    assert torch.allclose(
        distribution, plain_distribution(target, length=length), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("parents", [(-1, -1, 0, 0, 1), (-1, 0, 1), (-1, -1, -1)])
def test_certain_candidates_leave_the_targets_distribution_however_chosen(
    parents: tuple[int, ...],
) -> None:
    """As in a dynamic tree, the draft's best tokens are chosen, and the text decides the shape."""
    target, draft, size = random_distribution(5, 1), random_distribution(5, 2), 5

    def choose_best(text: tuple[int, ...]) -> Candidates:
        tree = Tree(parents if len(text) % 2 == 0 else parents[:2])
        tokens: tuple[int, ...] = ()
        for node, parent in enumerate(tree.parents):
            before = list_node_texts(text, tokens, Tree(tree.parents[:node]))[parent + 1]
            rank = tree.children[parent].index(node)
            tokens = (*tokens, int(draft(before).argsort(descending=True)[rank]))
        return [(tokens, tree, 1.0)]

    distribution = output_distribution(target, choose_best, None, size, 2)
    assert torch.allclose(distribution, plain_distribution(target), rtol=0, atol=1e-12)


def test_draws_without_replacement_have_their_distribution() -> None:
    distribution = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    volumes: dict[tuple[int, ...], float] = {}

    def visit(uniforms: list[float], volume: float) -> None:
        padded = torch.tensor([[*uniforms, *[0.5] * (4 - len(uniforms))]], dtype=torch.float64)
        tokens, exist = draw_distinct_tokens(distribution.unsqueeze(0), padded)
        assert exist.tolist() == [[True, True, True, False]]
        order = tuple(tokens[0, : len(uniforms)].tolist())
        if len(uniforms) == 3:
            volumes[order] = volumes.get(order, 0.0) + volume
            return
        left = distribution.clone()
        left[list(order)] = 0
        for middle, width in cells(left.cumsum(0) / left.sum()):
            visit([*uniforms, middle], volume * width)

    visit([], 1.0)
    assert volumes.keys() == set(itertools.permutations((0, 2, 3)))
    for order, total_volume in volumes.items():
        assert total_volume == pytest.approx(ordered_probability(distribution, order), abs=1e-12)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_impossible_candidates_are_rejected_and_never_drawn(uniform: float) -> None:
    """Two siblings have probability 0 in p; they are tried as drawn and as certain candidates."""
    p = torch.tensor([[0.0, 0.0, 0.5, 0.5], [1.0, 0, 0, 0], [1.0, 0, 0, 0]])
    q = torch.tensor([[0.5, 0.25, 0.25, 0.0]] * 2)
    for probabilities in (q, None):
        path, token = verify_sampled_tree(
            [0, 1],
            Tree((ROOT, ROOT)),
            p,
            probabilities,
            torch.full((3,), uniform, dtype=torch.float64),
        )
        assert path == [] and token in (2, 3)


def test_the_targets_choices_are_followed_as_far_as_the_tree_goes() -> None:
    tree, tokens = Tree((ROOT, ROOT, 0, 0, 1)), [7, 8, 5, 6, 9]
    assert follow_target_choices(tokens, tree, [8, 0, 9, 0, 0, 3]) == ([1, 4], 3)
    assert follow_target_choices(tokens, tree, [7, 6, 0, 0, 2, 0]) == ([0, 3], 2)
    assert follow_target_choices(tokens, tree, [9, 0, 0, 0, 0, 0]) == ([], 9)
