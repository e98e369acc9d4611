"""The exact distribution of speculative decoding: all outcomes of the rule are enumerated."""

import pytest
import torch

from specdistill.decoding.proposer import Proposal
from specdistill.decoding.sampling import Sampling, draw_tokens
from specdistill.decoding.verify import verify_greedy_chain, verify_sampled_chain
from tests.enumeration import output_distribution, plain_distribution, random_distribution

V = 3


@pytest.mark.parametrize(("k", "length", "seed"), [(1, 2, 0), (1, 3, 1), (2, 2, 2)])
def test_rejection_gives_the_targets_distribution_exactly(k: int, length: int, seed: int) -> None:
    target, draft = random_distribution(V, seed), random_distribution(V, seed + 100)

    def propose(text: list[int], _: Sampling, uniforms: list[float]) -> Proposal:
        tokens, probabilities = list(text), []
        for uniform in [*uniforms, *[0.5] * k][:k]:
            probabilities.append(draft(tuple(tokens)))
            tokens.append(
                int(
                    draw_tokens(
                        probabilities[-1][None], torch.tensor([uniform], dtype=torch.float64)
                    )
                )
            )
        return Proposal(tokens[len(text) :], torch.stack(probabilities))

    distribution = output_distribution(target, propose, length=length)
    assert torch.allclose(
        distribution, plain_distribution(target, length=length), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("one_hot", [False, True])
def test_impossible_tokens_are_rejected_and_never_drawn(uniform: float, one_hot: bool) -> None:
    """The proposed token has p(x) = 0; the uniforms include both ends of their range."""
    p = torch.tensor([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]])
    q = None if one_hot else torch.tensor([[[1.0, 0.0, 0.0]]])
    count, token = verify_sampled_chain(
        torch.tensor([[0]]), p, q, torch.full((1, 2), uniform, dtype=torch.float64)
    )
    assert (int(count), int(token)) == (0, 1 if uniform == 0 else 2)


def test_a_draft_token_is_accepted_only_below_its_ratio() -> None:
    """With p / q = 1/2 the token is rejected at u = 1/2.

    Then p - q, which is (-1/4, 1/4, 0), leaves the second token.
    """
    p, q = torch.tensor([[[0.25, 0.5, 0.25], [0.0, 0.0, 1.0]]]), torch.tensor([[[0.5, 0.25, 0.25]]])
    for uniform, expected in (
        (0.0, (1, 2)),
        (0.5 - 2**-53, (1, 2)),
        (0.5, (0, 1)),
        (1 - 2**-53, (0, 1)),
    ):
        uniforms = torch.tensor([[uniform, 0.0]], dtype=torch.float64)
        count, token = verify_sampled_chain(torch.tensor([[0]]), p, q, uniforms)
        assert (int(count), int(token)) == expected, uniform


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([4, 3, 0], (2, 2)), ([4, 3, 2], (3, 1)), ([1, 3, 2], (0, 4)), ([4], (1, 3)), ([], (0, 4))],
)
def test_greedy_accepts_the_prefix_that_matches_the_choices(
    tokens: list[int], expected: tuple[int, int]
) -> None:
    assert verify_greedy_chain(tokens, [4, 3, 2, 1][: len(tokens) + 1]) == expected
