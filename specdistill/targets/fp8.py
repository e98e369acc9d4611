"""A frozen target whose matrices are multiplied in FP8, and what that does to the features that a draft learns from.

Weights are rounded once, tokens before each product, to e4m3 (arXiv 2209.05433) with a scale for each row, so that its largest number is
448, the largest of the format:

    y_mn = s_m r_n sum_k p_mk q_nk        x_mk = s_m p_mk,  w_nk = r_n q_nk        p, q in e4m3, the sum in float32

So are the linear layers of the decoder layers. Embedding, norms, routers and the head stay as they are, and so do experts that a class
keeps in one parameter for all of them.

Shapes: B rows, T positions, M tokens, K inputs, N outputs, D target hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType, scaled_mm

from specdistill.errors import UserError
from specdistill.targets.frozen import Features, FrozenTarget

LARGEST = torch.finfo(torch.float8_e4m3fn).max
MULTIPLE = 16  # what the kernel asks of a matrix's sizes
ROUTERS = ("gate", "router")  # ends of their names: rounding would choose other experts
ROWS = 1024  # whose logits are compared at a time


@dataclass(frozen=True)
class Effect:
    """What rounding did to the features of a batch.

    error: |x' - x| / |x| of a feature [D], a mean over positions and over what the draft reads (auxiliary layers, last hidden state).
    same_top1: the share of positions whose most likely token is the same. num_tokens: positions of the batch, without padding.
    """

    error: float
    same_top1: float
    num_tokens: int

    def __str__(self) -> str:
        return f"features differ by {self.error:.1%}, {self.same_top1:.1%} of top-1 tokens are the same ({self.num_tokens:,} tokens)"


@torch.no_grad()
def round_to_fp8(
    target: FrozenTarget, input_ids_BT: Tensor, position_ids_BT: Tensor, is_token_BT: Tensor, aux_layers: Sequence[int]
) -> Effect:
    """Round a target where it stands, and say what that did to the features of a batch of packed rows.

    Raises UserError for a target without a linear layer that the kernel takes.
    """

    def read() -> Features:
        return target.features(input_ids_BT, aux_layers, position_ids_BT=position_ids_BT)

    before = read()
    linears = [(layer, name) for layer in target.layers for name, part in layer.named_modules() if _is_rounded(name, part)]
    if not linears:
        got = f"true with {target.name}, whose layers hold no linear layer of multiples of {MULTIPLE}"
        raise UserError("target.fp8", got=got, expected="false")
    for layer, name in linears:
        linear: Any = layer.get_submodule(name)
        layer.set_submodule(name, Fp8Linear(linear))
    after = read()
    pairs = zip((*before.aux, before.last_hidden), (*after.aux, after.last_hidden), strict=True)
    errors = [_error(plain_BTD[is_token_BT].float(), rounded_BTD[is_token_BT].float()) for plain_BTD, rounded_BTD in pairs]
    hidden = (features.last_hidden[is_token_BT].split(ROWS) for features in (before, after))
    same = [
        target.logits(plain).argmax(-1) == target.logits(rounded).argmax(-1) for plain, rounded in zip(*hidden, strict=True)
    ]
    return Effect(float(torch.stack(errors).mean()), float(torch.cat(same).float().mean()), int(is_token_BT.sum()))


class Fp8Linear(nn.Module):
    """A linear layer, rounded: [..., K] -> [..., N] in bfloat16."""

    scale_N1: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight_NK, scale_N1 = in_fp8(linear.weight)
        self.weight = nn.Parameter(weight_NK, requires_grad=False)
        self.register_buffer("scale_N1", scale_N1)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        product_MN = product(*in_fp8(x.flatten(0, -2)), self.weight, self.scale_N1, self.bias)
        output: Tensor = product_MN.unflatten(0, x.shape[:-1])
        return output


def in_fp8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(x over its scale in e4m3, the scale [M, 1] in float32)."""
    scale_M1 = x_MK.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / LARGEST  # rows of zeros, too, have a scale
    return (x_MK / scale_M1).to(torch.float8_e4m3fn), scale_M1


def product(x_MK: Tensor, x_scale_M1: Tensor, weight_NK: Tensor, weight_scale_N1: Tensor, bias_N: Tensor | None) -> Tensor:
    """[M, N] in bfloat16, on any device that torch has the product for."""
    by_row, dtype = ScalingType.RowWise, torch.bfloat16
    scales = (x_scale_M1, by_row, weight_scale_N1.T, by_row)
    product_MN: Tensor = scaled_mm(x_MK, weight_NK.T, *scales, bias=bias_N, output_dtype=dtype)
    return product_MN


def _is_rounded(name: str, part: nn.Module) -> bool:
    plain = type(part) is nn.Linear and part.in_features % MULTIPLE == part.out_features % MULTIPLE == 0
    return plain and not name.endswith(ROUTERS)


def _error(plain_MD: Tensor, rounded_MD: Tensor) -> Tensor:
    error: Tensor = ((rounded_MD - plain_MD).norm(dim=-1) / plain_MD.norm(dim=-1)).mean()
    return error
