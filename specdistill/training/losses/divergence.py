"""Compute divergences: how far a draft's distribution q is from the target's p, token by token.

Shapes: R rows, one for each loss token, W draft vocabulary. `target_probs_RW` is p restricted to
the draft vocabulary and renormalised there. It takes no gradient and may hold exact zeros. alpha =
sum_w min(p_w, q_w) is the probability that a token drawn from q is accepted. All divergences are
computed in float32.

    forward_kl     KL(p || q)                                arXiv 2310.08461, covers all of p
    reverse_kl     KL(q || p)                                arXiv 2310.08461, seeks its mode
    jsd            beta KL(p || m) + (1 - beta) KL(q || m)   arXiv 2306.13649, m = beta p + (1 -
                                                             beta) q
    tvd            1 - alpha                                 arXiv 2310.08461, the rejection rate;
                                                             weak where p and q hardly overlap
    tvd_plus_plus  1 - alpha, another gradient               arXiv 2403.00858, tvd with normalised
                                                             rewards
    nla            -log alpha                                arXiv 2602.23881
    lk             l KL(p || q) + (1 - l) (1 - alpha)        arXiv 2602.23881, l = exp(-3 alpha):
                                                             from KL to tvd as p and q meet
    cross_entropy  -log q(argmax p)                          arXiv 2401.10774, the target's top-1
                                                             alone

Each function returns one value per row, in nats. No function here averages over rows: the trainer
(specdistill.training.trainer) divides the sum once, by the count of the whole global batch. A mean
taken here would make the gradient depend on how the batch was split.

To add a divergence, write a function in this file and add it to DIVERGENCES. Its keyword-only
arguments, numbers with a default, are its options in a recipe.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field, create_model
from torch import Tensor

from specdistill.common.errors import UserError, find_nearest
from specdistill.recipe.fields import Section
from specdistill.recipe.load import validate_recipe

KEY = "loss.divergence"
# How fast the LK mix turns from KL to total variation as acceptance grows. 3 is the paper's value.
LK_DECAY = 3.0

# The type of a divergence: draft logits [R, W], target probabilities [R, W], options -> nats [R]
Divergence = Callable[..., Tensor]


def forward_kl(draft_logits_RW: Tensor, target_probs_RW: Tensor) -> Tensor:
    """Compute KL(p || q) = sum_w p_w (log p_w - log q_w) for each of R tokens, in nats.

    p is the target's distribution over W tokens, and q the draft's. The value is zero iff q = p.
    Its gradient with respect to the draft's logits is q - p.
    """
    log_q = draft_logits_RW.float().log_softmax(-1)
    # sum p log p is constant for the draft, but without it the value would not be zero for q = p.
    # torch.xlogy would take twice the time on a CPU.
    negative_entropy_R = (target_probs_RW * _compute_floored_log(target_probs_RW)).sum(-1)
    return negative_entropy_R - (target_probs_RW * log_q).sum(-1)


def reverse_kl(draft_logits_RW: Tensor, target_probs_RW: Tensor) -> Tensor:
    """Compute KL(q || p) = sum_w q_w (log q_w - log p_w) for each of R tokens, in nats.

    p is the target's distribution over W tokens, and q the draft's. The gradient with respect to
    the draft's logit w is q_w (log q_w - log p_w - KL). Where p is zero the divergence would be
    infinite, so log p is at least -87.3, the logarithm of float32's smallest normal number.
    """
    log_q = draft_logits_RW.float().log_softmax(-1)
    return (log_q.exp() * (log_q - _compute_floored_log(target_probs_RW))).sum(-1)


def jsd(
    draft_logits_RW: Tensor,
    target_probs_RW: Tensor,
    *,
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5,
) -> Tensor:
    """Compute beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

    This is the generalized Jensen-Shannon divergence (arXiv 2306.13649, equation 1), for each of R
    tokens. p is the target's distribution over W tokens, and q the draft's. The value is never
    above log 2. Divided by beta, the value tends to the forward KL as beta -> 0. Divided by 1 -
    beta, the value tends to the reverse KL as beta -> 1.
    """
    log_q = draft_logits_RW.float().log_softmax(-1)
    log_p = _compute_floored_log(target_probs_RW)
    # log m = log(beta p + (1 - beta) q)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    forward = target_probs_RW * (log_p - log_m)
    reverse = log_q.exp() * (log_q - log_m)
    return (beta * forward + (1 - beta) * reverse).sum(-1)


def tvd(draft_logits_RW: Tensor, target_probs_RW: Tensor) -> Tensor:
    """Compute the total variation 1/2 sum_w |p_w - q_w| for each of R tokens.

    p is the target's distribution over W tokens, and q the draft's. The value is 1 - alpha, the
    probability that a token drawn from the draft is rejected. Its gradient with respect to the
    draft's logit w is q_w (Q - r_w), where r_w is 1 if p_w > q_w, else 0, and Q = sum_w q_w r_w.
    """
    q = draft_logits_RW.float().softmax(-1)
    return 0.5 * (target_probs_RW - q).abs().sum(-1)


def tvd_plus_plus(draft_logits_RW: Tensor, target_probs_RW: Tensor) -> Tensor:
    """Compute `tvd` with another gradient: -E_q[A_w grad log q_w] (arXiv 2403.00858).

    p is the target's distribution over W tokens, and q the draft's. A token w has the reward r_w =
    1 if p_w > q_w, else 0, and the advantage A_w = (r_w - mean) / deviation.

    The paper draws w from q, and takes mean and deviation of the rewards over a batch. Here the
    expectation is exact, and mean and deviation are those under q: the mean is Q = sum_w q_w r_w,
    and the variance is Q (1 - Q).

    So the gradient is the one of `tvd`, divided by sqrt(Q (1 - Q)). Its norm is at most 1, and it
    stays strong where q puts little mass on the tokens that p prefers. If no token has a reward,
    the gradient is zero.
    """
    log_q = draft_logits_RW.float().log_softmax(-1)
    # Compute the advantage A, which is a constant for the gradient: (1 - Q) / sqrt(Q (1 - Q)) for a
    # token with a reward, and -Q / sqrt(Q (1 - Q)) for a token without. `hit_R` is Q, and `miss_R`
    # is 1 - Q.
    with torch.no_grad():
        q = log_q.exp()
        rewarded = target_probs_RW > q
        hit_R = (q * rewarded).sum(-1, keepdim=True)
        miss_R = (q * ~rewarded).sum(-1, keepdim=True)
        deviation_R = (hit_R * miss_R).clamp_min(torch.finfo(torch.float32).tiny).sqrt()
        # The clamp avoids 0 / 0: `hit_R` is zero if no token has a reward, and `miss_R` is zero if
        # every token has one. The second case occurs where rounding makes every q_w smaller than
        # p_w. Then the sum `miss_R` is exactly zero, but 1 - Q might not be.
        advantage_RW = torch.where(rewarded, miss_R, -hit_R) / deviation_R
        value_R = tvd(draft_logits_RW, target_probs_RW)

    # Return the value of `tvd` without its gradient, and add the surrogate minus its detached copy:
    # this is zero, and brings only the gradient of the surrogate.
    surrogate_R = -(q * advantage_RW * log_q).sum(-1)
    return value_R + surrogate_R - surrogate_R.detach()


def nla(draft_logits_RW: Tensor, target_probs_RW: Tensor) -> Tensor:
    """Compute -log alpha, with alpha = sum_w min(p_w, q_w), for each of R tokens.

    p is the target's distribution over W tokens, and q the draft's (arXiv 2602.23881). alpha is the
    probability that a token drawn from q is accepted. The gradient is the one of `tvd`, divided by
    alpha. For a one-hot p the value is the cross-entropy. It is computed in logarithms, because
    alpha itself would be rounded to zero where p and q hardly overlap.
    """
    # log alpha = logsumexp_w min(log p_w, log q_w). A token with p_w = 0 gives -inf, which adds
    # nothing.
    log_q = draft_logits_RW.float().log_softmax(-1)
    return -torch.minimum(target_probs_RW.log(), log_q).logsumexp(-1)


def lk(draft_logits_RW: Tensor, target_probs_RW: Tensor) -> Tensor:
    """Compute l KL(p || q) + (1 - l) (1 - alpha), l = exp(-LK_DECAY alpha) (arXiv 2602.23881).

    p is the target's distribution over W tokens, and q the draft's. alpha = sum_w min(p_w, q_w) is
    the probability that a token drawn from q is accepted. So the loss moves from KL to 1 - alpha as
    the draft improves. The weight l takes no gradient.
    """
    # 1 - alpha is computed as 1/2 sum_w |p_w - q_w|. In the weight it is detached.
    log_q = draft_logits_RW.float().log_softmax(-1)
    kl_R = (target_probs_RW * (_compute_floored_log(target_probs_RW) - log_q)).sum(-1)
    distance_R = 0.5 * (target_probs_RW - log_q.exp()).abs().sum(-1)
    weight_R = (-LK_DECAY * (1 - distance_R.detach())).exp()
    return weight_R * kl_R + (1 - weight_R) * distance_R


def cross_entropy(draft_logits_RW: Tensor, target_probs_RW: Tensor) -> Tensor:
    """Compute -log q(argmax p) for each of R tokens, the loss for greedy decoding.

    p is the target's distribution over W tokens, and q the draft's. The value is zero iff q has all
    its mass on the target's top-1 token. Its gradient with respect to the draft's logits is q -
    onehot(argmax p).
    """
    log_q = draft_logits_RW.float().log_softmax(-1)
    return -log_q.gather(-1, target_probs_RW.argmax(-1, keepdim=True)).squeeze(-1)


# The divergences by the names that recipes use.
DIVERGENCES: dict[str, Divergence] = {
    divergence.__name__: divergence
    for divergence in (forward_kl, reverse_kl, jsd, tvd, tvd_plus_plus, nla, lk, cross_entropy)
}
FORMS = (
    "a name, {name: jsd, beta: 0.3}, or for a sum [{name: forward_kl, weight: 0.5}, {name: tvd,"
    " weight: 0.5}]"
)


def build_divergence(spec: object) -> Divergence:
    """Return the divergence that a recipe's `loss.divergence` describes.

    Args:
        spec: a name, a mapping of `name` and options, or, for a sum, a list of such mappings with a
            `weight` each.

    Raises:
        UserError: for an unknown name or option, and for a weight or an option outside its range.
    """
    # One divergence, with or without options.
    if isinstance(spec, str):
        return _build_term({"name": spec}, KEY)
    if not isinstance(spec, list):
        return _build_term(spec, KEY)

    # A weighted sum of divergences.
    if not spec:
        raise UserError(KEY, got="[]", expected=FORMS)
    terms = []
    for index, term in enumerate(spec):
        key = f"{KEY}[{index}]"
        if not isinstance(term, Mapping) or "weight" not in term:
            raise UserError(
                key,
                got=repr(term),
                expected="{name: …, weight: …}, with the options of the divergence if any",
            )
        # The weight is checked like an option, and then taken out of the options.
        divergence = _build_term(term, key, weight=(float, Field(gt=0)))
        terms.append((divergence.keywords.pop("weight"), divergence))

    def sum_terms(draft_logits_RW: Tensor, target_probs_RW: Tensor) -> Tensor:
        """Compute the weighted sum of the divergences, [R]."""
        return torch.stack(
            [weight * term(draft_logits_RW, target_probs_RW) for weight, term in terms]
        ).sum(0)

    return sum_terms


def _build_term(spec: object, key: str, **more_fields: Any) -> partial[Tensor]:
    """Check the name and the options of one divergence, and return it with the options set.

    Args:
        spec: a mapping of `name` and options.
        key: the recipe key to name in errors.
        **more_fields: further options that the divergence itself does not have, with type and
            default as `pydantic.create_model` takes them. In a weighted sum this is `weight`. They
            become keywords of the returned partial, and the caller must remove them there.
    """
    # Find the divergence by its name.
    if not isinstance(spec, Mapping) or "name" not in spec:
        raise UserError(key, got=repr(spec), expected=FORMS)
    name = spec["name"]
    if not isinstance(name, str) or name not in DIVERGENCES:
        raise UserError(
            key,
            got=repr(name),
            expected=f"one of {', '.join(DIVERGENCES)}",
            nearest=find_nearest(str(name), DIVERGENCES),
        )

    # Its keyword-only parameters are its options, which pydantic checks like keys of a recipe.
    fields = {}
    for parameter in inspect.signature(DIVERGENCES[name]).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            fields[parameter.name] = (parameter.annotation, parameter.default)
    schema = create_model(name, __base__=Section, **{**fields, **more_fields})
    values = {option: value for option, value in spec.items() if option != "name"}
    return partial(DIVERGENCES[name], **vars(validate_recipe(schema, values, f"{key}.")))


def _compute_floored_log(probs_RW: Tensor) -> Tensor:
    """Compute log p, but finite where p is zero, so that p log p is 0 there and not NaN."""
    return probs_RW.clamp_min(torch.finfo(torch.float32).tiny).log()


def acceptance(draft_probs_RW: Tensor, target_probs_RW: Tensor) -> Tensor:
    """Compute alpha = sum_w min(p_w, q_w) for each of R tokens, [R].

    p is the target's distribution over the W tokens of the draft, and q the draft's. alpha is the
    probability that speculative sampling accepts a token that is drawn from q (arXiv 2211.17192,
    theorem 3.5). p must *not* be renormalised over the draft's tokens, because the draft never
    proposes the target's other tokens.
    """
    return torch.minimum(draft_probs_RW, target_probs_RW).sum(-1)
