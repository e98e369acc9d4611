"""A tiny model in place of a target behaves as its class does, apart from its widths."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig

from specdistill.targets.frozen import build_tiny_target
from tests.refusals import refused
from tests.tiny import qwen


@pytest.mark.parametrize(
    ("kind", "options", "scale", "cap"),
    [
        ("llama", {}, 1.0, None),
        ("gemma2", {}, 1.0, 30.0),
        ("granite", {"logits_scaling": 8.0}, 1 / 8, None),
        ("cohere", {}, 1 / 16, None),
        ("gpt2", {}, 1.0, None),
        ("mixtral", {"num_hidden_layers": 2}, 1.0, None),
    ],
)
def test_widths_are_divided_and_the_rest_is_kept(
    kind: str, options: dict[str, Any], scale: float, cap: float | None
) -> None:
    config = CONFIG_MAPPING[kind](**options)
    target = build_tiny_target(config, "small")
    assert target is not None
    assert target.num_layers == config.num_hidden_layers
    assert target.config.num_attention_heads == config.num_attention_heads
    assert 64 <= target.hidden_size < config.hidden_size
    assert target.logits.scale == pytest.approx(scale) and target.logits.cap == cap


def test_a_small_config_keeps_its_sizes() -> None:
    model = qwen()
    target = build_tiny_target(model.config, "small")
    assert target is not None
    assert [parameter.shape for parameter in target.model.parameters()] == [
        parameter.shape for parameter in model.parameters()
    ]


def test_a_class_that_is_refused_at_every_size_is_refused() -> None:
    with refused("target.model", "it, a MambaForCausalLM: passes over a KV cache"):
        build_tiny_target(CONFIG_MAPPING["mamba"](num_hidden_layers=2), "it")


@pytest.mark.long  # tries many sizes
def test_sizes_that_never_go_together_have_no_tiny_random_target() -> None:
    assert (
        build_tiny_target(
            LlamaConfig(num_attention_heads=8, num_key_value_heads=3, hidden_size=16_384), "it"
        )
        is None
    )
