"""The distribution of speculative decoding's output, exactly: every outcome of the real rule is enumerated, none is sampled."""

import itertools

import pytest
import torch
from torch import Tensor

from specdistill.decoding.sampling import uniforms
from specdistill.decoding.verify import greedy, rejection
from tests.enumeration import cells

V = 3


def random_distribution(seed: int, rows: int) -> Tensor:
    """[rows, V] float64 distributions; every third row has a token of probability zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, V, dtype=torch.float64, generator=generator)
    weights[::3, seed % V] = 0
    return weights / weights.sum(-1, keepdim=True)


def output_distribution(
    target: dict[tuple[int, ...], Tensor], draft: dict[tuple[int, ...], Tensor], length: int, k: int
) -> Tensor:
    """The exact distribution of `length` tokens decoded in rounds of k: the rule is evaluated on every cell of its uniforms."""
    distribution = torch.zeros((V,) * length, dtype=torch.float64)

    def walk(prefix: tuple[int, ...], weight: float) -> None:
        if len(prefix) >= length:
            distribution[prefix[:length]] += weight
            return
        for tokens in itertools.product(range(V), repeat=k):
            chance = weight
            for index, token in enumerate(tokens):
                chance *= float(draft[prefix + tokens[:index]][token])
            if chance == 0:
                continue
            p = torch.stack([target[prefix + tokens[:index]] for index in range(k + 1)])
            q = torch.stack([draft[prefix + tokens[:index]] for index in range(k)])
            ratios = [p[i, token] / q[i, token] for i, token in enumerate(tokens)]
            tests = [cells(ratio.unsqueeze(0)) for ratio in ratios]
            residuals = torch.cat([(p[:k] - q).clamp_min(0), p[k:]])
            sums = residuals.cumsum(-1)
            draws = cells((sums / sums[:, -1:].clamp_min(1e-300)).flatten())
            for cell in itertools.product(*tests, draws):
                uniforms = torch.tensor([[midpoint for midpoint, _ in cell]], dtype=torch.float64)
                volume = chance
                for _, width in cell:
                    volume *= width
                count, token = rejection(torch.tensor([tokens]), p[None], q[None], uniforms)
                walk(prefix + tokens[: int(count)] + (int(token),), volume)

    walk((), 1.0)
    return distribution


@pytest.mark.parametrize(("k", "length", "seed"), [(1, 2, 0), (1, 3, 1), (2, 2, 2)])
def test_rejection_gives_the_targets_law_exactly(k: int, length: int, seed: int) -> None:
    prefixes = [p for n in range(length + k + 1) for p in itertools.product(range(V), repeat=n)]
    target = dict(zip(prefixes, random_distribution(seed, len(prefixes)), strict=True))
    draft = dict(zip(prefixes, random_distribution(seed + 100, len(prefixes)), strict=True))
    expected = torch.zeros((V,) * length, dtype=torch.float64)
    for tokens in itertools.product(range(V), repeat=length):
        expected[tokens] = torch.stack([target[tokens[:i]][token] for i, token in enumerate(tokens)]).prod()
    assert torch.allclose(output_distribution(target, draft, length, k), expected, rtol=0, atol=1e-12)


def test_one_hot_draft_equals_its_explicit_distribution() -> None:
    tokens = torch.tensor([[2, 0]])
    p = random_distribution(5, 3)[None]
    q = torch.nn.functional.one_hot(tokens, V).double()
    for seed in range(50):
        uniforms = torch.rand(1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        implicit = rejection(tokens, p, None, uniforms)
        explicit = rejection(tokens, p, q, uniforms)
        assert [int(x) for x in implicit] == [int(x) for x in explicit]


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    p = random_distribution(7, 4)[None]
    tokens = p[:, :3].argmax(-1)
    for seed in range(20):
        count, _ = rejection(tokens, p, p[:, :3], uniforms(4, [torch.Generator().manual_seed(seed)]))
        assert int(count) == 3


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("one_hot", [False, True])
def test_impossible_tokens_are_rejected_and_never_drawn(uniform: float, one_hot: bool) -> None:
    """p(x) = 0, also at the ends of what a uniform can be."""
    p = torch.tensor([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]])
    q = None if one_hot else torch.tensor([[[1.0, 0.0, 0.0]]])
    count, token = rejection(torch.tensor([[0]]), p, q, torch.full((1, 2), uniform, dtype=torch.float64))
    assert (int(count), int(token)) == (0, 1 if uniform == 0 else 2)


def test_a_draft_token_is_accepted_below_its_ratio_alone() -> None:
    """p / q = 1/2: at u = 1/2 it is rejected. Of p - q, which is (-1/4, 1/4, 0), the second token is left."""
    p, q = torch.tensor([[[0.25, 0.5, 0.25], [0.0, 0.0, 1.0]]]), torch.tensor([[[0.5, 0.25, 0.25]]])
    for test, expected in ((0.0, (1, 2)), (0.5 - 2**-53, (1, 2)), (0.5, (0, 1)), (1 - 2**-53, (0, 1))):
        uniforms = torch.tensor([[test, 0.0]], dtype=torch.float64)
        count, token = rejection(torch.tensor([[0]]), p, q, uniforms)
        assert (int(count), int(token)) == expected, test


@pytest.mark.parametrize(
    ("tokens", "expected"), [([4, 3, 0], (2, 2)), ([4, 3, 2], (3, 1)), ([1, 3, 2], (0, 4)), ([4], (1, 3)), ([], (0, 4))]
)
def test_greedy_accepts_the_prefix_that_matches_the_choices(tokens: list[int], expected: tuple[int, int]) -> None:
    assert greedy(tokens, [4, 3, 2, 1][: len(tokens) + 1]) == expected
