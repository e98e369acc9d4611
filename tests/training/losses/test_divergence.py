import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdistill.training.losses.divergence import (
    DIVERGENCES,
    LK_DECAY,
    acceptance,
    build_divergence,
    forward_kl,
    jsd,
    tvd,
)
from tests.refusals import refused

LOG2 = math.log(2)
# p = (1/2, 1/2, 0) and q = (1/4, 1/2, 1/4): they share 3/4.
P_BY_HAND = torch.tensor([[0.5, 0.5, 0.0]])
Q_BY_HAND = torch.tensor([[0.25, 0.5, 0.25]])
FLOOR = math.log(torch.finfo(torch.float32).tiny)
LK_BY_HAND = math.exp(-LK_DECAY * 0.75)
# m = (3/8, 1/2, 1/8)
JSD_BY_HAND = 0.5 * 0.5 * math.log(4 / 3) + 0.5 * (0.25 * math.log(2 / 3) + 0.25 * LOG2)
BY_HAND = {
    "forward_kl": 0.5 * LOG2,
    "reverse_kl": -0.25 * LOG2 + 0.25 * (math.log(0.25) - FLOOR),
    "jsd": JSD_BY_HAND,
    "tvd": 0.25,
    "tvd_plus_plus": 0.25,
    "nla": -math.log(0.75),
    "lk": LK_BY_HAND * 0.5 * LOG2 + (1 - LK_BY_HAND) * 0.25,
    "cross_entropy": math.log(4),
}


def logits(seed: int, rows: int = 4, width: int = 6) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def gradient(name: str, x: Tensor, p: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    build_divergence(name)(leaf, p).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


# The gradients with respect to the logits, as formulas of p and q.


def reverse_kl_gradient(p: Tensor, q: Tensor) -> Tensor:
    ratio = (q / p).log()
    return q * (ratio - (q * ratio).sum(-1, keepdim=True))


def jsd_gradient(p: Tensor, q: Tensor) -> Tensor:
    """With m = (p + q) / 2: d/dq_w = 1/2 log (q_w / m_w), as the terms of m cancel."""
    slope = 0.5 * (q / (0.5 * (p + q))).log()
    return q * (slope - (q * slope).sum(-1, keepdim=True))


def tvd_gradient(p: Tensor, q: Tensor) -> Tensor:
    rewards = (p > q).double()
    return q * ((q * rewards).sum(-1, keepdim=True) - rewards)


def tvd_plus_plus_gradient(p: Tensor, q: Tensor) -> Tensor:
    """-E_q[(r - mean) / deviation * grad log q], term by term: grad log q_w is onehot(w) - q."""
    rewards = (p > q).double()
    mean = (q * rewards).sum(-1, keepdim=True)
    deviation = (q * (rewards - mean) ** 2).sum(-1, keepdim=True).sqrt()
    score = torch.eye(q.shape[-1]).double() - q[:, None, :]
    return -((q * (rewards - mean) / deviation)[..., None] * score).sum(1)


def nla_gradient(p: Tensor, q: Tensor) -> Tensor:
    return tvd_gradient(p, q) / torch.minimum(p, q).sum(-1, keepdim=True)


def lk_gradient(p: Tensor, q: Tensor) -> Tensor:
    weight = (-LK_DECAY * torch.minimum(p, q).sum(-1, keepdim=True)).exp()
    return weight * (q - p) + (1 - weight) * tvd_gradient(p, q)


def cross_entropy_gradient(p: Tensor, q: Tensor) -> Tensor:
    return q - torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1])


GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": lambda p, q: q - p,
    "reverse_kl": reverse_kl_gradient,
    "jsd": jsd_gradient,
    "tvd": tvd_gradient,
    "tvd_plus_plus": tvd_plus_plus_gradient,
    "nla": nla_gradient,
    "lk": lk_gradient,
    "cross_entropy": cross_entropy_gradient,
}


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "cross_entropy"])
def test_a_divergence_is_zero_at_equality_and_nowhere_else(name: str) -> None:
    x = logits(0)
    assert float(DIVERGENCES[name](x, x.softmax(-1)).sum()) == pytest.approx(0, abs=2e-6)
    for seed in range(1, 20):
        assert float(DIVERGENCES[name](logits(seed), x.softmax(-1)).sum()) > 0.05


def test_cross_entropy_is_zero_when_q_has_all_its_mass_on_the_top_1() -> None:
    p = logits(0).softmax(-1)
    top1 = torch.nn.functional.one_hot(p.argmax(-1), 6)
    assert float(DIVERGENCES["cross_entropy"](200.0 * top1, p).sum()) == 0
    assert float(DIVERGENCES["cross_entropy"](p.log(), p).sum()) == pytest.approx(
        -float(p.max(-1).values.log().sum())
    )


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_value_equals_one_computed_by_hand(name: str) -> None:
    loss = DIVERGENCES[name](Q_BY_HAND.log(), P_BY_HAND)
    assert float(loss.sum()) == pytest.approx(BY_HAND[name], rel=1e-5)
    assert loss.shape == (1,)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_gradient_equals_its_closed_form(name: str) -> None:
    x, p = logits(1), logits(2).softmax(-1)
    expected = GRADIENTS[name](p.double(), x.double().softmax(-1))
    assert float(expected.abs().max()) > 0.05
    assert torch.allclose(gradient(name, x, p).double(), expected, atol=2e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_do_not_depend_on_how_rows_are_split(name: str) -> None:
    x, p = logits(3), logits(4).softmax(-1)
    parts = [gradient(name, x[rows], p[rows]) for rows in (slice(0, 1), slice(1, 4))]
    assert torch.allclose(gradient(name, x, p), torch.cat(parts), atol=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_no_rows_give_zero_and_stay_differentiable(name: str) -> None:
    x = logits(5, rows=0).requires_grad_()
    loss = DIVERGENCES[name](x, x.detach().softmax(-1))
    loss.sum().backward()
    assert loss.shape == (0,)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("scale", [0.0, 30.0, 1e4])
def test_values_and_gradients_stay_finite(name: str, scale: float) -> None:
    """p has exact zeros, down to one-hot; q is flat, far off, or as far off as float32 allows, in
    the right or the wrong direction."""
    hot = torch.eye(6)[:4]
    half = 0.5 * hot + 0.5 * hot.roll(1, -1)
    for p in (hot, half):
        for x in (scale * hot, scale * hot.roll(2, -1), -scale * hot, logits(6) * scale):
            assert torch.isfinite(DIVERGENCES[name](x, p).sum()), (p, x)
            assert torch.isfinite(gradient(name, x, p)).all(), (p, x)
            assert float(gradient(name, x, p).abs().max()) < 100


def test_tvd_plus_plus_survives_rewards_everywhere() -> None:
    """By rounding p may exceed q at every token: there is then nothing to prefer."""
    p = torch.tensor([[1.0, 1e-30]])
    x = torch.tensor([[-1e-7, math.log(1e-31)]])
    q = x.log_softmax(-1).exp()
    near = torch.where(p > q, p, q.nextafter(torch.tensor(2.0)))
    assert bool((near > q).all())
    assert float(gradient("tvd_plus_plus", x, near).abs().max()) < 1e-3


def test_jsd_tends_to_both_kls_and_stays_below_log_2() -> None:
    x, p = logits(1), logits(2).softmax(-1)
    forward, reverse = (
        float(DIVERGENCES[name](x, p).sum()) for name in ("forward_kl", "reverse_kl")
    )
    assert float(jsd(x, p, beta=1e-3).sum()) / 1e-3 == pytest.approx(forward, rel=0.02)
    assert float(jsd(x, p, beta=1 - 1e-3).sum()) / 1e-3 == pytest.approx(reverse, rel=0.02)
    apart = jsd(1e4 * torch.eye(6), torch.eye(6).roll(1, -1))
    assert float(apart.sum()) == pytest.approx(6 * LOG2, rel=1e-5)


def test_a_weighted_sum_adds_values_and_gradients() -> None:
    x, p = logits(1).requires_grad_(), logits(2).softmax(-1)
    loss = build_divergence([{"name": "forward_kl", "weight": 0.25}, {"name": "tvd", "weight": 3}])(
        x, p
    )
    assert torch.allclose(loss, 0.25 * forward_kl(x, p) + 3 * tvd(x, p))
    assert loss.shape == (4,)
    loss.sum().backward()
    expected = 0.25 * gradient("forward_kl", x.detach(), p) + 3 * gradient("tvd", x.detach(), p)
    assert x.grad is not None and torch.allclose(x.grad, expected, atol=1e-6)


def test_options_reach_their_divergence() -> None:
    x, p = logits(1), logits(2).softmax(-1)
    expected = float(jsd(x, p, beta=0.1).sum())
    assert float(build_divergence({"name": "jsd", "beta": 0.1})(x, p).sum()) == expected
    assert (
        float(build_divergence({"name": "jsd"})(x, p).sum())
        == float(build_divergence("jsd")(x, p).sum())
        != expected
    )
    half = build_divergence([{"name": "jsd", "beta": 0.1, "weight": 0.5}])(x, p)
    assert float(half.sum()) == pytest.approx(0.5 * expected)


def make_jsd_spec(**options: object) -> dict[str, object]:
    return {"name": "jsd", **options}


@pytest.mark.parametrize(
    ("spec", "key", "got"),
    [
        ("foward_kl", "", "'foward_kl'"),
        ([make_jsd_spec(weight=1), {"name": "tvdd", "weight": 1}], "[1]", "'tvdd'"),
        ({"forward_kl": 0.5, "jsd": 0.5}, "", "{'forward_kl': "),
        ([], "", "[]"),
        (None, "", "None"),
        (["tvd"], "[0]", "'tvd'"),
        ([make_jsd_spec()], "[0]", "{'name': 'jsd'}"),
        *(
            ([make_jsd_spec(weight=weight)], "[0].weight", repr(weight))
            for weight in (0, -1.0, math.nan, math.inf, True, "half")
        ),
        *(
            (make_jsd_spec(beta=beta), ".beta", repr(beta))
            for beta in (0.0, 1, math.nan, True, "half")
        ),
        (make_jsd_spec(beta=None), ".beta", "null"),
        (make_jsd_spec(betta=0.3), ".betta", "an unknown key"),
        ({"name": "tvd", "beta": 0.3}, ".beta", "an unknown key"),
        (make_jsd_spec(weight=0.5), ".weight", "an unknown key"),
    ],
)
def test_mistakes_in_a_divergence_are_named(spec: object, key: str, got: str) -> None:
    with refused(f"loss.divergence{key}", got):
        build_divergence(spec)


def test_acceptance_is_one_minus_total_variation() -> None:
    p, q = logits(6).softmax(-1), logits(7).softmax(-1)
    assert torch.allclose(acceptance(q, p), 1 - 0.5 * (p - q).abs().sum(-1), atol=1e-6)
    assert torch.allclose(acceptance(p, p), torch.ones(4), atol=1e-6)
    assert float(acceptance(q, p).sum()) == pytest.approx(
        4 - float(tvd(q.log(), p).sum()), rel=1e-5
    )
