"""Packed rows as the trainer gives them to a target, judged by the library's own model on each
document alone."""

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

# Windows shorter than the documents, scales of a class's own, values narrower than keys, chunks,
# caps, sinks
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
# of the documents of two rows; the last of the first one is padding
LENGTHS = ((1, 13, 20, 6), (40,))


def model_of(name: str) -> Any:
    return qwen() if name == "qwen3" else tiny_model(name)


def target_of(model: Any) -> FrozenTarget:
    return FrozenTarget(model, tiny_tokenizer(), name="target")


def rows() -> dict[str, Any]:
    """A batch as the trainer has it."""
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


def documents_of(batch: dict[str, Any]) -> Documents:
    return Documents(batch["cumulative_lengths"], batch["longest"])


def each_document() -> Iterator[tuple[int, slice]]:
    for row, lengths in enumerate(LENGTHS):
        bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        yield from ((row, slice(*pair)) for pair in list(pairwise(bounds))[: 3 if row == 0 else 1])


@torch.no_grad()
def check(target: FrozenTarget, own: Any, **options: Any) -> None:
    """Every document's features are those of the library's model `own` on it alone."""
    batch = rows()
    together = target.features(
        batch["input_ids"], [1, 3], position_ids_BT=batch["position_ids"], **options
    )
    for row, part in each_document():
        alone = own.model(
            batch["input_ids"][row : row + 1, part], output_hidden_states=True
        ).hidden_states
        for packed, single in zip(
            (*together.aux, together.last_hidden), (alone[1], alone[3], alone[-1]), strict=True
        ):
            assert (packed[row, part] - single[0]).norm() < 1e-5 * single.norm()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", [*KINDS, "qwen3"])
def test_each_document_has_the_features_that_it_has_alone(name: str, known: bool) -> None:
    target = target_of(model_of(name))
    assert choose_packing(target.model) is WAYS.get(name, run_by_lengths)
    check(target, model_of(name), **({"documents": documents_of(rows())} if known else {}))


def test_under_autocast_it_computes_as_sdpa_does() -> None:
    """16 bits within a float32 target, as `train.bf16` has it; each is as far from float32 as the
    other."""
    batch, target = rows(), target_of(model_of("llama"))
    given = {"position_ids_BT": batch["position_ids"]}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours = target.features(batch["input_ids"], [3], **given)
        target._packing = run_unchanged
        theirs = target.features(batch["input_ids"], [3], **given)
    with torch.no_grad():
        exact = target.features(batch["input_ids"], [3], **given)
    errors = [
        float((features.aux[0] - exact.aux[0])[1].norm() / exact.aux[0][1].norm())
        for features in (ours, theirs)
    ]
    assert ours.aux[0].dtype == theirs.aux[0].dtype
    assert 0 < errors[0] < 1.2 * errors[1] < 0.1


def test_memory_grows_with_tokens_alone_and_nothing_waits_for_data() -> None:
    """Two layers as wide as Llama-3.1-8B's, over tensors without content: FakeTensorMode has no
    data to ask for."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=1000, max_position_embeddings=8192, dtype="bfloat16",
    )  # fmt: skip
    described = ModelConfigInfo(
        "llama", "target.model", None, None, {"architectures": ["LlamaForCausalLM"]}, config, None
    )
    described.build_on_tiny_target(lambda target: None)  # which takes data
    peaks = []
    for num_rows, length in ((4, 2048), (1, 8192)):
        with FakeTensorMode(), torch.no_grad():
            target = WeightlessTarget(described)
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
    model = model_of("llama")
    target = target_of(model)
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


def test_an_attention_that_was_named_is_kept() -> None:
    model = tiny_target_model()
    model.set_attn_implementation("eager")
    assert choose_packing(model) is run_unchanged


def test_configs_of_other_parts_keep_theirs() -> None:
    """Of a model for text and images the text's alone is switched, where it alone has sdpa."""
    config: Any = tiny_config({"model_type": "gemma3"}, OTHERS.tokenizer(), num_layers=2)
    config._attn_implementation = {"": "sdpa", "text_config": "sdpa", "vision_config": "eager"}
    model = AutoModelForCausalLM.from_config(config).eval()
    before = [model.config, model.config.text_config, model.config.vision_config]
    with packed_rows.replace_attention(packed_rows.find_sdpa_configs(model)):
        assert [each._attn_implementation for each in before] == [
            packed_rows.NAME,
            packed_rows.NAME,
            "eager",
        ]
    assert [each._attn_implementation for each in before] == ["sdpa", "sdpa", "eager"]


@pytest.mark.parametrize("name", KINDS)
def test_a_pass_over_a_kv_cache_goes_without_a_mask_where_a_class_asks_for_none(name: str) -> None:
    model = model_of(name)
    assert bool(packed_rows.find_maskless_configs(model)) == (name not in WAYS)
    target, cache, ids = (
        target_of(model),
        create_empty_cache(model.config),
        torch.arange(3, 43).unsqueeze(0),
    )
    target._maskless = [] if name in WAYS else packed_rows.find_sdpa_configs(model)  # as on a GPU
    parts = [
        target.features(part, (1,), past_key_values=cache) for part in ids.split([20, 1, 19], dim=1)
    ]
    found, expected = (
        Features.concatenate(parts),
        model(ids, output_hidden_states=True).hidden_states,
    )
    assert torch.allclose(found.aux[0], expected[1], atol=1e-5) and torch.allclose(
        found.last_hidden, expected[-1], atol=1e-5
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
def test_what_is_not_computed_is_refused(mask: Any, keywords: dict[str, Any]) -> None:
    given = (None, QUERY, KEY, KEY)
    assert attend(*given, CausalMask(None), **LENGTHS_OF, output_attentions=False, use_cache=False)[
        0
    ].shape == (2, 6, 4, 16)
    with pytest.raises(NotImplementedError):
        attend(*given, mask, **LENGTHS_OF, **keywords)


def test_masks_of_a_classs_own_are_refused() -> None:
    assert packed_rows.capture_mask(
        allow_is_causal_skip=True, local_size=4, batch_size=1
    ) == CausalMask(4)
    with pytest.raises(NotImplementedError):
        packed_rows.capture_mask(allow_is_causal_skip=False)


def test_documents_are_found_by_their_position_ids() -> None:
    found, known = Documents.from_positions(rows()["position_ids"]), documents_of(rows())
    assert (
        found.cumulative_lengths.tolist() == [0, 1, 14, *range(34, 41), 80] and found.longest == 40
    )
    assert (
        sorted(set(known.cumulative_lengths.tolist())) == [0, 1, 14, 34, 40, 80]
        and known.longest == 40
    )


def test_position_ids_that_a_class_does_not_read_keep_no_documents_apart() -> None:
    assert (
        choose_packing(
            BloomForCausalLM(
                BloomConfig(vocab_size=160, hidden_size=64, n_layer=2, n_head=4)
            ).eval()
        )
        is None
    )


def flash(
    query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, causal: bool, **_: Any
) -> Tensor:
    """Attention as flash_attn computes it, [B, T, heads, d]."""
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(
        *heads, is_causal=causal, scale=softmax_scale, enable_gqa=True
    ).transpose(1, 2)


def flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> Tensor:
    """The same of sequences one behind the other, [tokens, heads, d]."""
    parts = [slice(*bounds) for bounds in pairwise(cu_seqlens_q.tolist())]
    return torch.cat(
        [
            flash(query[None, part], key[None, part], value[None, part], **options)[0]
            for part in parts
        ]
    )


def test_flash_attention_takes_packed_rows_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks for documents in a batch of one row alone, and mixes them in any other,
    silently."""
    functions = (flash, flash_varlen, None, None, None)
    monkeypatch.setattr(
        "transformers.modeling_flash_attention_utils._lazy_imports", lambda *_, **__: functions
    )
    target = target_of(model_of("llama"))
    target.model.config._attn_implementation = "flash_attention_2"
    assert choose_packing(target.model) is run_in_one_row
    check(target, model_of("llama"))
    target._packing = run_unchanged
    with pytest.raises(AssertionError):
        check(target, model_of("llama"))


@pytest.mark.long  # two seconds: its plain form is slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_takes_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled, which would take most of a minute here."""
    monkeypatch.setattr(
        "transformers.integrations.flex_attention.WrappedFlexAttention",
        lambda training: lambda: flex_attention,
    )
    uncompiled = lambda *args, _compile, **options: create_block_mask(*args, **options)  # noqa: E731
    monkeypatch.setattr("transformers.masking_utils.create_block_mask", uncompiled)
    model = model_of("llama")
    model.set_attn_implementation("flex_attention")
    assert choose_packing(model) is run_unchanged
    check(target_of(model), model_of("llama"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3"])
def test_a_gpu_computes_the_same(name: str, dtype: torch.dtype) -> None:
    batch, own = rows(), model_of(name)
    target = target_of(model_of(name).to("cuda", dtype))
    assert choose_packing(target.model) is run_by_lengths
    on_gpu = {key: batch[key].cuda() for key in ("input_ids", "position_ids")}
    with torch.no_grad():
        features = target.features(on_gpu["input_ids"], [], position_ids_BT=on_gpu["position_ids"])
        for row, part in each_document():
            alone = own.model(batch["input_ids"][row : row + 1, part]).last_hidden_state[0]
            error = (features.last_hidden[row, part].cpu().float() - alone).norm() / alone.norm()
            assert error < (0.1 if dtype == torch.bfloat16 else 1e-4)
