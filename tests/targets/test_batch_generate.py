"""Batched generation compared with `generate()` of transformers, and the samples' distribution."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from specdistill.targets.batch_generate import (
    BLOCK,
    GROUPED_ATTENTION,
    generate_batch,
    prepare_generation,
    sample,
)
from tests.mtp_targets import tiny_model
from tests.tiny import tiny_target_model

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16], [17, 18, 19, 20], [21, 22, 23, 24]]
UNEQUAL = [[5], [6, 7, 8, 9, 10, 11, 12], [13, 14, 15], [16, 17]]


def generate_greedily(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    count: int,
    ends: Sequence[int] = (),
    num_parts: int = 1,
) -> list[list[int]]:
    with prepare_generation(model, torch.float32) as fast:
        return generate_batch(
            fast,
            prompts,
            [0.0] * len(prompts),
            max_new_tokens=count,
            end_ids=ends,
            seed=0,
            num_parts=num_parts,
        )


def generate_reference(
    model: PreTrainedModel, prompt: Sequence[int], count: int, ends: Sequence[int] = ()
) -> list[int]:
    options: dict[str, Any] = {"eos_token_id": list(ends) or None, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, **options
    )
    return list(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("prompts", [PROMPTS, UNEQUAL], ids=["equal", "left-padded"])
def test_greedy_rows_equal_generate_token_for_token(prompts: Sequence[Sequence[int]]) -> None:
    model, count = tiny_target_model(num_layers=2), BLOCK + 5  # the cache grows twice
    expected = [generate_reference(model, prompt, count) for prompt in prompts]
    assert generate_greedily(model, prompts, count) == expected
    assert generate_greedily(model, prompts, count, num_parts=3) == expected


def test_parts_share_the_threads_and_give_them_back() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        generate_greedily(tiny_target_model(num_layers=1), PROMPTS, 4, num_parts=2)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)


def test_rows_stop_at_their_end_tokens_and_the_others_continue() -> None:
    model, count = tiny_target_model(num_layers=2), 48
    unstopped_rows = generate_greedily(model, PROMPTS, count)
    ends = [unstopped_rows[0][3], unstopped_rows[1][17], unstopped_rows[3][30]]
    generated = generate_greedily(model, PROMPTS, count, ends)
    assert generated == [generate_reference(model, prompt, count, ends) for prompt in PROMPTS]
    assert len({len(row) for row in generated}) > 2 and all(
        not set(ends) & set(row[:-1]) for row in generated
    )


def test_recurrent_layers_keep_the_state_of_each_row() -> None:
    model = tiny_model("qwen3_next")
    unstopped_rows = generate_greedily(model, UNEQUAL, 40)
    ends = [
        row[5] for row in unstopped_rows[:3]
    ]  # most rows end early: others would leave the batch
    assert generate_greedily(model, UNEQUAL, 40, ends) == [
        generate_reference(model, prompt, 40, ends) for prompt in UNEQUAL
    ]


def test_models_with_windows_and_mixed_layers_equal_generate() -> None:
    sizes = {
        "vocab_size": 90,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    common = {
        **sizes,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    for model in (
        MistralForCausalLM(MistralConfig(**common, sliding_window=6)),
        Gemma3ForCausalLM(
            Gemma3TextConfig(
                **common, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
            )
        ),
    ):
        prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [7, 8, 9]]
        assert generate_greedily(model.eval(), prompts, 40) == [
            generate_reference(model, prompt, 40) for prompt in prompts
        ]


def test_sampling_follows_the_softmax_and_the_seed() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -40.0, 1.5])
    temperatures = torch.tensor([0.0] + [0.7] * 20_000)
    draws = sample(logits.repeat(20_001, 1), temperatures, torch.Generator().manual_seed(0))
    assert draws[0] == 0
    counts = torch.bincount(draws[1:], minlength=6)
    expected = (logits / 0.7).softmax(-1) * 20_000
    assert counts[4] == 0
    possible_ids = [0, 1, 2, 3, 5]
    assert (
        chisquare(
            counts[possible_ids].numpy(), expected[possible_ids].double().numpy(), sum_check=False
        ).pvalue
        > 0.01
    )
    assert draws.equal(
        sample(logits.repeat(20_001, 1), temperatures, torch.Generator().manual_seed(0))
    )


@pytest.mark.parametrize("num_parts", [1, 2])
def test_temperatures_mix_in_one_batch(num_parts: int) -> None:
    model = tiny_target_model(num_layers=2)
    prompts, temperatures = PROMPTS[:1] * 6, [0.0, 0.8, 0.8, 0.0, 0.0, 0.8]
    with prepare_generation(model, torch.float32) as fast:
        first, again, other = (
            generate_batch(
                fast,
                prompts,
                temperatures,
                max_new_tokens=20,
                end_ids=[],
                seed=seed,
                num_parts=num_parts,
            )
            for seed in (1, 1, 2)
        )
    assert first == again != other
    assert first[0] == first[3] == first[4] == generate_reference(model, prompts[0], 20)
    sampled = [tuple(first[row]) for row in (1, 2, 5)]
    assert len({*sampled, tuple(first[0])}) == 4


def test_generation_leaves_the_target_as_it_was() -> None:
    model = tiny_target_model(num_layers=2).train()
    with prepare_generation(model, torch.bfloat16) as fast:
        assert fast is not model and fast.dtype == torch.bfloat16
        assert fast.config._attn_implementation == GROUPED_ATTENTION
        assert fast.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.dtype == torch.float32 and model.training
    with prepare_generation(model, torch.float32) as fast:
        assert fast is model and not model.training
    assert model.config._attn_implementation == "sdpa" and model.training
