import pytest
import torch

from specdistill.decoding.sampling import Sampling, draw_tokens

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_temperature_divides_logits() -> None:
    assert torch.allclose(Sampling(0.5).compute_probabilities(LOGITS), (LOGITS / 0.5).softmax(-1))


def test_top_k_and_top_p_keep_the_head_and_renormalise() -> None:
    kept = LOGITS[:, :2].softmax(-1)[0].tolist()
    assert Sampling(1.0, top_k=2).compute_probabilities(LOGITS)[0].tolist() == pytest.approx(
        [*kept, 0, 0]
    )
    nucleus = Sampling(1.0, top_p=0.7).compute_probabilities(LOGITS)[0]
    assert nucleus.tolist() == pytest.approx([*kept, 0, 0])


def test_draw_inverts_the_cdf_and_never_picks_a_token_of_weight_zero() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]])
    for uniform, token in ((0.0, 1), (0.2499, 1), (0.2501, 3), (1 - 1e-16, 3)):
        assert int(draw_tokens(weights, torch.tensor([uniform], dtype=torch.float64))) == token
