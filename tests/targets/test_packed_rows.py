"""Packed rows give a target the features that transformers computes for each document alone."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, LlamaConfig

from specdistill.advice.plan.accounting import Ledger, WeightlessTarget
from specdistill.data.rows.packing import index_batch
from specdistill.methods.sizes import ModelConfigInfo
from specdistill.targets import packed_rows
from specdistill.targets.cache import create_empty_cache
from specdistill.targets.frozen import Features, FrozenTarget
from specdistill.targets.packed_rows import (
    CausalMask,
    Documents,
    attend,
    choose_packing,
    run_by_lengths,
    run_in_one_row,
    run_unchanged,
    run_with_masks,
)
from tests.families import OTHERS, tiny_config
from tests.targets.architectures import tiny_model
from tests.tiny import qwen, tiny_target_model, tiny_tokenizer

# Together these kinds have windows shorter than the documents, scales of their own, values narrower
# than keys, chunks, caps and sinks.
KINDS = (
    "llama",
    "mistral",
    "gemma3_text",
    "granite",
    "deepseek_v3",
    "gemma2",
    "gpt_oss",
    "llama4_text",
)
WAYS = {"gemma2": run_unchanged, "gpt_oss": run_with_masks, "llama4_text": run_unchanged}
# Lengths of the documents in two rows; the last one of the first row is padding.
LENGTHS = ((1, 13, 20, 6), (40,))


def build_model(name: str) -> Any:
    return qwen() if name == "qwen3" else tiny_model(name)


def build_target(model: Any) -> FrozenTarget:
    return FrozenTarget(model, tiny_tokenizer(), name="target")


def make_batch() -> dict[str, Any]:
    """Return a batch as the trainer makes it."""
    positions = [[*range(1), *range(13), *range(20), *[0] * 6], list(range(40))]
    numbers = [
        [number for number, length in enumerate(lengths) for _ in range(length)]
        for lengths in LENGTHS
    ]
    numbers[0][-6:] = [-1] * 6
    ids = torch.randint(3, 160, (2, 40), generator=torch.Generator().manual_seed(0))
    columns = {
        "loss_mask": torch.ones_like(ids),
        "document_ids": torch.tensor(numbers),
        "position_ids": torch.tensor(positions),
    }
    return index_batch({"input_ids": ids, **columns})


def get_documents(batch: dict[str, Any]) -> Documents:
    return Documents(batch["cumulative_lengths"], batch["longest"])


def iterate_documents() -> Iterator[tuple[int, slice]]:
    for row, lengths in enumerate(LENGTHS):
        bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        yield from ((row, slice(*pair)) for pair in list(pairwise(bounds))[: 3 if row == 0 else 1])


@torch.no_grad()
def check_features(target: FrozenTarget, reference: Any, **options: Any) -> None:
    """Check that each document's features are those of the model `reference` for it alone."""
    batch = make_batch()
    together = target.features(
        batch["input_ids"], [1, 3], position_ids_BT=batch["position_ids"], **options
    )
    for row, part in iterate_documents():
        alone = reference.model(
            batch["input_ids"][row : row + 1, part], output_hidden_states=True
        ).hidden_states
        for packed, single in zip(
            (*together.aux, together.last_hidden), (alone[1], alone[3], alone[-1]), strict=True
        ):
            assert (packed[row, part] - single[0]).norm() < 1e-5 * single.norm()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", [*KINDS, "qwen3"])
def test_each_document_has_the_features_that_it_has_alone(name: str, known: bool) -> None:
    target = build_target(build_model(name))
    assert choose_packing(target.model) is WAYS.get(name, run_by_lengths)
    check_features(
        target, build_model(name), **({"documents": get_documents(make_batch())} if known else {})
    )


def test_packed_attention_under_autocast_is_as_precise_as_sdpa() -> None:
    """The target is in float32 and autocast in bfloat16, as with `train.bf16`."""
    batch, target = make_batch(), build_target(build_model("llama"))
    options = {"position_ids_BT": batch["position_ids"]}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours = target.features(batch["input_ids"], [3], **options)
        target._packing = run_unchanged
        theirs = target.features(batch["input_ids"], [3], **options)
    with torch.no_grad():
        exact = target.features(batch["input_ids"], [3], **options)
    errors = [
        float((features.aux[0] - exact.aux[0])[1].norm() / exact.aux[0][1].norm())
        for features in (ours, theirs)
    ]
    assert ours.aux[0].dtype == theirs.aux[0].dtype
    assert 0 < errors[0] < 1.2 * errors[1] < 0.1


def test_memory_grows_with_tokens_alone_and_no_data_is_read() -> None:
    """Run two layers as wide as those of Llama-3.1-8B in FakeTensorMode, which has no data."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=1000, max_position_embeddings=8192, dtype="bfloat16",
    )  # fmt: skip
    config_info = ModelConfigInfo(
        "llama", "target.model", None, None, {"architectures": ["LlamaForCausalLM"]}, config, None
    )
    config_info.build_on_tiny_target(lambda target: None)  # beforehand, because it reads data
    peaks = []
    for num_rows, length in ((4, 2048), (1, 8192)):
        with FakeTensorMode(), torch.no_grad():
            target = WeightlessTarget(config_info)
            vars(target)["_packing"] = run_by_lengths
            ids = torch.empty(num_rows, length, dtype=torch.long)
            documents = Documents(torch.empty(33, dtype=torch.int32), length)
            with Ledger() as ledger:
                features = FrozenTarget.features(
                    target, ids, [1], position_ids_BT=torch.empty_like(ids), documents=documents
                )
        assert (
            features.last_hidden.shape == (num_rows, length, 4096)
            and features.last_hidden.dtype == torch.bfloat16
        )
        peaks.append(ledger.peak)
    assert peaks[1] <= 1.05 * peaks[0] < 2**31


def test_other_passes_keep_the_classs_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    model = build_model("llama")
    target = build_target(model)
    model.model.layers[0].register_forward_pre_hook(
        lambda *_: seen.append(model.config._attn_implementation)
    )
    ids = torch.arange(3, 9)[None]
    target._packing  # noqa: B018
    seen.clear()
    target.features(ids, [])
    target.features(ids, [], position_ids_BT=torch.arange(6)[None])
    target.features(
        ids, [], position_ids_BT=torch.arange(6)[None], attention_mask=torch.zeros(1, 1, 6, 6)
    )
    assert seen == ["sdpa", packed_rows.NAME, "sdpa"]
    monkeypatch.setattr(packed_rows, "attend_packed", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.features(ids, [], position_ids_BT=torch.arange(6)[None])
    assert model.config._attn_implementation == "sdpa"


def test_an_attention_that_the_user_names_is_kept() -> None:
    model = tiny_target_model()
    model.set_attn_implementation("eager")
    assert choose_packing(model) is run_unchanged


def test_configs_of_other_parts_keep_their_attention() -> None:
    """Only the text config of a model for text and images is switched, because only it has sdpa."""
    config: Any = tiny_config({"model_type": "gemma3"}, OTHERS.tokenizer(), num_layers=2)
    config._attn_implementation = {"": "sdpa", "text_config": "sdpa", "vision_config": "eager"}
    model = AutoModelForCausalLM.from_config(config).eval()
    configs = [model.config, model.config.text_config, model.config.vision_config]
    with packed_rows.replace_attention(packed_rows.find_sdpa_configs(model)):
        assert [part._attn_implementation for part in configs] == [
            packed_rows.NAME,
            packed_rows.NAME,
            "eager",
        ]
    assert [part._attn_implementation for part in configs] == ["sdpa", "sdpa", "eager"]


@pytest.mark.parametrize("name", KINDS)
def test_a_pass_over_a_kv_cache_goes_without_a_mask_where_a_class_asks_for_none(name: str) -> None:
    model = build_model(name)
    assert bool(packed_rows.find_maskless_configs(model)) == (name not in WAYS)
    target, cache, ids = (
        build_target(model),
        create_empty_cache(model.config),
        torch.arange(3, 43).unsqueeze(0),
    )
    target._maskless = [] if name in WAYS else packed_rows.find_sdpa_configs(model)  # as on a GPU
    parts = [
        target.features(part, (1,), past_key_values=cache) for part in ids.split([20, 1, 19], dim=1)
    ]
    features, expected = (
        Features.concatenate(parts),
        model(ids, output_hidden_states=True).hidden_states,
    )
    assert torch.allclose(features.aux[0], expected[1], atol=1e-5) and torch.allclose(
        features.last_hidden, expected[-1], atol=1e-5
    )


QUERY, KEY = (
    torch.randn(2, heads, 6, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2)
)
LENGTHS_OF = {"cu_seq_lens_q": torch.tensor([0, 6, 12], dtype=torch.int32), "max_length_q": 6}


@pytest.mark.parametrize(
    ("mask", "keywords"),
    [
        (CausalMask(None), {"softcap": 30.0}),
        (CausalMask(None), {"s_aux": torch.zeros(4)}),
        (CausalMask(None), {"position_bias": torch.zeros(1, 4, 6, 6)}),
        (CausalMask(None), {"is_causal": False}),
        (CausalMask(None), {"dropout": 0.1}),
        (CausalMask(8), {}),  # chunks have no such keyword
        (CausalMask(None), {"sliding_window": 8}),
        (None, {}),
        (torch.zeros(1, 1, 6, 6), {}),
    ],
)
def test_attention_options_that_are_not_supported_are_refused(
    mask: Any, keywords: dict[str, Any]
) -> None:
    inputs = (None, QUERY, KEY, KEY)
    assert attend(
        *inputs, CausalMask(None), **LENGTHS_OF, output_attentions=False, use_cache=False
    )[0].shape == (2, 6, 4, 16)
    with pytest.raises(NotImplementedError):
        attend(*inputs, mask, **LENGTHS_OF, **keywords)


def test_masks_of_a_classs_own_are_refused() -> None:
    assert packed_rows.capture_mask(
        allow_is_causal_skip=True, local_size=4, batch_size=1
    ) == CausalMask(4)
    with pytest.raises(NotImplementedError):
        packed_rows.capture_mask(allow_is_causal_skip=False)


def test_documents_are_found_by_their_position_ids() -> None:
    documents, known = (
        Documents.from_positions(make_batch()["position_ids"]),
        get_documents(make_batch()),
    )
    assert (
        documents.cumulative_lengths.tolist() == [0, 1, 14, *range(34, 41), 80]
        and documents.longest == 40
    )
    assert (
        sorted(set(known.cumulative_lengths.tolist())) == [0, 1, 14, 34, 40, 80]
        and known.longest == 40
    )


def test_a_class_that_ignores_position_ids_cannot_pack() -> None:
    assert (
        choose_packing(
            BloomForCausalLM(
                BloomConfig(vocab_size=160, hidden_size=64, n_layer=2, n_head=4)
            ).eval()
        )
        is None
    )


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, causal: bool, **_: Any
) -> Tensor:
    """Return attention as flash_attn computes it, [B, T, heads, d]."""
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(
        *heads, is_causal=causal, scale=softmax_scale, enable_gqa=True
    ).transpose(1, 2)


def attend_flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> Tensor:
    """Return the same for concatenated sequences, [tokens, heads, d]."""
    parts = [slice(*bounds) for bounds in pairwise(cu_seqlens_q.tolist())]
    return torch.cat(
        [
            attend_flash(query[None, part], key[None, part], value[None, part], **options)[0]
            for part in parts
        ]
    )


def test_flash_attention_reads_packed_rows_as_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers finds documents only in batches of one row, and otherwise mixes them."""
    functions = (attend_flash, attend_flash_varlen, None, None, None)
    monkeypatch.setattr(
        "transformers.modeling_flash_attention_utils._lazy_imports", lambda *_, **__: functions
    )
    target = build_target(build_model("llama"))
    target.model.config._attn_implementation = "flash_attention_2"
    assert choose_packing(target.model) is run_in_one_row
    check_features(target, build_model("llama"))
    target._packing = run_unchanged
    with pytest.raises(AssertionError):
        check_features(target, build_model("llama"))


@pytest.mark.long  # two seconds: flex_attention is slow without compilation
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_reads_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention is not compiled here, which would take most of a minute."""
    monkeypatch.setattr(
        "transformers.integrations.flex_attention.WrappedFlexAttention",
        lambda training: lambda: flex_attention,
    )
    uncompiled = lambda *args, _compile, **options: create_block_mask(*args, **options)  # noqa: E731
    monkeypatch.setattr("transformers.masking_utils.create_block_mask", uncompiled)
    model = build_model("llama")
    model.set_attn_implementation("flex_attention")
    assert choose_packing(model) is run_unchanged
    check_features(build_target(model), build_model("llama"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3"])
def test_a_gpu_computes_the_same_features(name: str, dtype: torch.dtype) -> None:
    batch, reference = make_batch(), build_model(name)
    target = build_target(build_model(name).to("cuda", dtype))
    assert choose_packing(target.model) is run_by_lengths
    on_gpu = {key: batch[key].cuda() for key in ("input_ids", "position_ids")}
    with torch.no_grad():
        features = target.features(on_gpu["input_ids"], [], position_ids_BT=on_gpu["position_ids"])
        for row, part in iterate_documents():
            alone = reference.model(batch["input_ids"][row : row + 1, part]).last_hidden_state[0]
            error = (features.last_hidden[row, part].cpu().float() - alone).norm() / alone.norm()
            assert error < (0.1 if dtype == torch.bfloat16 else 1e-4)
