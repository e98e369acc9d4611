"""A plain Llama made of the parts of draft heads computes what transformers computes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdistill.decoding.kv_cache import FIRST_SIZE
from specdistill.methods.models.proposer import LlamaLayers, is_plain_llama
from tests.draft_models import LLAMA3
from tests.tiny import qwen, tiny_target_model


def build_small_llama(**changes: object) -> LlamaForCausalLM:
    config = LlamaConfig(**{**tiny_target_model(num_layers=2).config.to_dict(), **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    "changes", [{}, {"rope_parameters": LLAMA3}, {"rms_norm_eps": 1e-2}, {"head_dim": 16}]
)
def test_llama_layers_compute_what_transformers_computes(changes: dict[str, object]) -> None:
    model = build_small_llama(**changes)
    layers = LlamaLayers(model)
    ids = torch.randint(3, 200, (1, 90), generator=torch.Generator().manual_seed(0))
    layers.begin(1)
    with torch.no_grad():
        expected = model.get_decoder()(ids).last_hidden_state
        parts = [
            layers(ids[:, start:end], [end - start]) for start, end in ((0, 40), (40, 41), (41, 90))
        ]
    assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-5)


def test_llama_layers_share_the_models_weights() -> None:
    model = build_small_llama()
    layers = LlamaLayers(model)
    assert (
        layers.layers[1].mlp.up_proj.weight.data_ptr()
        == model.model.layers[1].mlp.up_proj.weight.data_ptr()
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {**LLAMA3, "rope_type": "dynamic"}},
    ],
)
def test_models_other_than_plain_llamas_are_left_to_transformers(
    changes: dict[str, object],
) -> None:
    assert is_plain_llama(build_small_llama())
    assert not is_plain_llama(build_small_llama(**changes))
    assert not is_plain_llama(qwen())


def test_the_cache_grows_without_losing_anything() -> None:
    model = build_small_llama(max_position_embeddings=4 * FIRST_SIZE)
    layers = LlamaLayers(model)
    ids = torch.randint(3, 200, (1, FIRST_SIZE + 90), generator=torch.Generator().manual_seed(0))
    layers.begin(1)
    with torch.no_grad():
        layers(ids[:, : FIRST_SIZE - 2], [FIRST_SIZE - 2])
        hidden = layers(ids[:, FIRST_SIZE - 2 :], [92])
        expected = model.get_decoder()(ids).last_hidden_state[:, -92:]
    assert torch.allclose(hidden, expected, atol=1e-5)
