"""A target in FP8: each number against its rounding by hand, each feature against the library's model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from specdistill.errors import UserError
from specdistill.methods.recipe import DECODED, Recipe
from specdistill.recipe.load import load_recipe
from specdistill.targets import frozen
from specdistill.targets.fp8 import Fp8Linear, in_fp8, product, round_to_fp8
from specdistill.targets.frozen import FrozenTarget
from tests.tiny import tiny_target_model, tiny_tokenizer

pytestmark = pytest.mark.long  # the rounding, number by number
KEYS = ["target.model=pico", "train.output_dir=runs/x", "target.fp8=true"]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def target_of(model: PreTrainedModel) -> FrozenTarget:
    return FrozenTarget(model.to(torch.bfloat16), tiny_tokenizer(), name="tiny")


def test_each_row_is_rounded_to_three_bits_after_the_first() -> None:
    x_MK = noise(5, 64) * torch.tensor([1.0, 1e-4, 1e4, 7.0, 0.0]).unsqueeze(1)
    rounded, scale_M1 = in_fp8(x_MK)
    assert rounded.dtype == torch.float8_e4m3fn and rounded.float().abs().amax(1).tolist() == [448.0] * 4 + [0.0]
    error = (rounded.float() * scale_M1 - x_MK).abs()
    smallest = scale_M1 * 2.0**-10  # half of the format's smallest number
    assert (error <= torch.maximum(x_MK.abs() / 16, smallest) * 1.0001).all() and error.max() > 0


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_layer_computes_the_product_of_what_was_rounded(bias: bool) -> None:
    linear, x = nn.Linear(64, 48, bias=bias), noise(3, 7, 64)
    layer = Fp8Linear(linear)
    (x_MK, x_scale), (weight, weight_scale) = in_fp8(x.flatten(0, 1)), in_fp8(linear.weight)
    exact = nn.functional.linear(
        x_MK.double() * x_scale, weight.double() * weight_scale, linear.bias.double() if bias else None
    )
    output = layer(x)
    assert output.dtype == torch.bfloat16 and output.shape == (3, 7, 48)
    assert (output.flatten(0, 1) - exact).norm() < 2**-8 * exact.norm()
    assert 0.01 < (output - linear(x)).norm() / linear(x).norm() < 0.06
    assert layer.weight.nbytes == linear.weight.numel()


@torch.no_grad()
def test_the_effect_is_that_on_the_librarys_hidden_states() -> None:
    ids, positions = torch.arange(3, 67).view(2, 32), torch.arange(32).expand(2, -1)  # in which the kernel is the library's
    is_token = torch.arange(32).expand(2, -1) < 30
    model, plain = tiny_target_model(), tiny_target_model().to(torch.bfloat16)
    target = target_of(model)
    effect = round_to_fp8(target, ids, positions, is_token, [1, 3])
    rounded = {name for name, part in model.named_modules() if isinstance(part, Fp8Linear)}
    assert len(rounded) == 4 * 7 and all(name.startswith("model.layers.") for name in rounded)
    kept = {name: tensor for name, tensor in model.state_dict().items() if tensor.dtype == torch.bfloat16}
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in kept.items())
    assert kept.keys() >= {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
    }
    outputs = [each(input_ids=ids, position_ids=positions, output_hidden_states=True) for each in (plain, model)]
    states = [[output.hidden_states[layer][is_token].float() for layer in (1, 3, -1)] for output in outputs]
    errors = [((one - other).norm(dim=-1) / one.norm(dim=-1)).mean() for one, other in zip(*states, strict=True)]
    assert effect.error == pytest.approx(float(sum(errors)) / 3, rel=1e-4) and 0.01 < effect.error < 0.2
    top1 = [output.logits[is_token].argmax(-1) for output in outputs]
    assert effect.same_top1 == pytest.approx(float((top1[0] == top1[1]).float().mean()), abs=1e-6) and effect.num_tokens == 60
    assert str(effect).endswith("(60 tokens)")


def test_routers_and_sizes_that_the_kernel_does_not_take_stay() -> None:
    model = tiny_target_model(num_layers=1)
    block: Any = model.model.layers[0].mlp
    block.gate, block.odd = nn.Linear(64, 16), nn.Linear(64, 40)
    round_to_fp8(target_of(model), torch.arange(8)[None], torch.arange(8)[None], torch.ones(1, 8, dtype=torch.bool), [])
    assert type(block.gate) is type(block.odd) is nn.Linear and type(block.gate_proj) is Fp8Linear


def test_a_class_without_linear_layers_is_refused() -> None:
    target = target_of(GPT2LMHeadModel(GPT2Config(vocab_size=160, n_embd=64, n_layer=2, n_head=2, n_positions=64)))
    with pytest.raises(UserError, match=r"^target\.fp8: got true with tiny, whose layers hold no linear layer"):
        round_to_fp8(target, torch.arange(8)[None], torch.arange(8)[None], torch.ones(1, 8, dtype=torch.bool), [])


def test_it_takes_the_hardware_and_weights_in_floating_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_target_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        UserError, match=r"^target\.fp8: got true without a GPU .* expected false, or a GPU of compute capability 8\.9"
    ):
        FrozenTarget.load(str(tmp_path), dtype="bfloat16", fp8=True)
    monkeypatch.setattr(frozen, "_check_fp8", lambda: None)
    assert FrozenTarget.load(str(tmp_path), dtype="bfloat16", fp8=True).fp8
    monkeypatch.setattr(frozen, "is_plain", lambda model: False)
    with pytest.raises(UserError, match=r"^target\.fp8: got true with .*, which is quantized already"):
        FrozenTarget.load(str(tmp_path), dtype="bfloat16", fp8=True)


@pytest.mark.parametrize("key", ["target.dtype=float32", "target.shard=layers", "target.device_map=auto"])
def test_a_target_in_parts_or_of_another_dtype_is_refused(key: str) -> None:
    with pytest.raises(UserError, match=r"^target\.fp8: got true"):
        load_recipe(Recipe, [*KEYS, "target.dtype=bfloat16", key])


def test_nothing_is_decoded_with_it() -> None:
    recipe = load_recipe(Recipe, [*KEYS, "target.dtype=bfloat16"])
    with pytest.raises(UserError, match=r"^target\.fp8: got true, expected false: what is measured"):
        recipe.target.check_measured()
    with pytest.raises(UserError, match=rf"^train\.metric_for_best_model: got {DECODED} with target\.fp8=true"):
        load_recipe(Recipe, [*KEYS, "target.dtype=bfloat16", f"train.metric_for_best_model={DECODED}", "selection.suite=pico"])


@pytest.mark.gpu
@torch.no_grad()
def test_the_kernel_computes_the_same_product() -> None:
    x, weight, bias = in_fp8(noise(70, 256)), in_fp8(noise(96, 256)), noise(96).bfloat16()
    exact = product(*x, *weight, bias)
    on_gpu = product(*(part.cuda() for part in (*x, *weight)), bias.cuda()).cpu()
    assert (on_gpu.float() - exact.float()).norm() < 2**-7 * exact.float().norm()
