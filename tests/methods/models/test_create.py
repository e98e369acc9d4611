"""Draft models: what they take over from the target, what they cost, and what is refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from specdistill.methods.models import checkpoint
from specdistill.methods.models.checkpoint import load_draft_model, save_draft_model
from specdistill.methods.models.create import (
    build_resized,
    choose_evenly_spaced,
    create_draft_model,
    from_layers,
    step_ratio,
)
from specdistill.methods.sizes import (
    ModelShape,
    count_parameters_read,
    count_weights_read,
    read_model_shape,
)
from specdistill.targets.frozen import FrozenTarget
from tests.families import OTHERS, write_model
from tests.refusals import refused
from tests.tiny import qwen, tiny_target_model, tiny_tokenizer

IDS = torch.arange(4, 52).view(2, 24)


@pytest.fixture(params=["llama", "qwen"], scope="module")
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_target_model() if request.param == "llama" else qwen()


@torch.no_grad()
def compute_logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=IDS).logits


def test_layers_are_evenly_spaced_with_both_ends() -> None:
    assert [choose_evenly_spaced(16, keep) for keep in (1, 2, 4)] == [[0], [0, 15], [0, 5, 10, 15]]
    assert choose_evenly_spaced(5, 5) == [0, 1, 2, 3, 4]


def test_a_draft_of_all_layers_is_the_target(model: PreTrainedModel) -> None:
    assert torch.equal(
        compute_logits(from_layers(model, model.config.num_hidden_layers)), compute_logits(model)
    )


def test_kept_layers_are_the_target_s_own_in_their_order(model: PreTrainedModel) -> None:
    """The draft of the first and last layers equals a target whose other layers do nothing."""
    last = model.config.num_hidden_layers - 1
    draft = from_layers(model, 2)
    emptied = from_layers(model, model.config.num_hidden_layers)
    for layer in emptied.model.layers[1:last]:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(projection.weight)
    assert torch.allclose(compute_logits(draft), compute_logits(emptied), atol=1e-5)
    assert [layer.self_attn.layer_idx for layer in draft.model.layers] == [0, 1]


def test_each_kept_layer_keeps_its_attention_type() -> None:
    assert from_layers(qwen(), 3).config.layer_types == ["full_attention"] * 3
    assert from_layers(qwen(), 4).config.layer_types[1:3] != ["full_attention"] * 2


def test_the_draft_s_weights_are_copies(model: PreTrainedModel) -> None:
    before = compute_logits(model)
    draft = from_layers(model, 2)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.zero_()
    assert torch.equal(compute_logits(model), before)


def test_a_draft_from_scratch_follows_shape_and_seed(model: PreTrainedModel) -> None:
    shape = ModelShape(2, 32, 48, 2, 1, 16)
    one, same, other = (build_resized(model, shape, seed=seed) for seed in (1, 1, 2))
    assert read_model_shape(one.config) == shape and compute_logits(one).shape == (2, 24, 260)
    assert torch.equal(compute_logits(one), compute_logits(same)) and not torch.equal(
        compute_logits(one), compute_logits(other)
    )


def test_a_step_costs_the_larger_share_of_layers_and_weights() -> None:
    target = tiny_target_model()
    assert step_ratio(target, from_layers(target, 4)) == 1
    # half the layers, and more than half of the weights read: the head stays
    layers = from_layers(target, 2)
    table = target.get_input_embeddings().weight.numel()
    share = (layers.num_parameters() - table) / (target.num_parameters() - table)
    assert step_ratio(target, layers) == pytest.approx(share) and share > 0.5
    thin = build_resized(target, ModelShape(4, 8, 8, 2, 1, 32))
    assert step_ratio(target, thin) == 1  # as deep as the target
    tied = qwen()
    assert step_ratio(tied, from_layers(tied, 1)) == pytest.approx(
        from_layers(tied, 1).num_parameters() / tied.num_parameters()
    )


def test_a_token_reads_only_its_own_experts_of_a_mixture() -> None:
    config = MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )  # two of eight experts a token
    model = MixtralForCausalLM(config)
    experts = 2 * 8 * 3 * 16 * 8  # layers, experts, matrices, each 16 by 8
    rest = model.num_parameters() - experts - 50 * 16
    assert count_weights_read(model) == pytest.approx(rest + experts / 4)
    assert count_weights_read(model, 2) == pytest.approx(rest + experts * (1 - 0.75**2))
    # the experts of one token, and the router
    assert count_parameters_read(model.model.layers[0].mlp, config) == pytest.approx(
        experts / 8 + 16 * 8
    )


def test_each_init_builds_a_draft_and_logs_its_cost(
    target: FrozenTarget, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="specdistill"):
        default = create_draft_model(target)
        scratch = create_draft_model(target, init="scratch", hidden_size=32, seed=3)
    assert read_model_shape(default.config).num_layers == 2 and scratch.config.hidden_size == 32
    assert sum("a draft step should cost" in record.message for record in caplog.records) == 2


@pytest.mark.parametrize(
    ("settings", "key", "got"),
    [
        ({"init": "layer"}, "init", "layer"),
        ({"init": "./nowhere"}, "init", "./nowhere"),
        ({"init": "layers", "hidden_size": 32}, "hidden_size", 32),
        ({"init": "layers", "num_layers": 9}, "num_layers", 9),
        ({"init": "scratch"}, "init", "scratch without a size"),
        (
            {"init": "scratch", "num_attention_heads": 3, "num_key_value_heads": 2},
            "num_key_value_heads",
            "2 for 3",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    target: FrozenTarget, settings: dict[str, Any], key: str, got: object
) -> None:
    with refused(f"draft.{key}", got):
        create_draft_model(target, **settings)


def test_a_draft_deeper_than_the_target_is_warned_of(
    target: FrozenTarget, caplog: pytest.LogCaptureFixture
) -> None:
    draft = create_draft_model(target, init="scratch", num_layers=8)
    assert draft.config.num_hidden_layers == 8
    assert [
        record.levelname for record in caplog.records if "predicted speedup" in record.message
    ] == ["WARNING"]


def test_a_target_for_text_and_images_takes_only_a_trained_draft(tmp_path: Path) -> None:
    """The class is more than a language model, and so would be a draft made of its layers."""
    write_model(tmp_path / "target", {"model_type": "gemma3"}, OTHERS)
    write_model(tmp_path / "small", {"model_type": "gemma3_text"}, OTHERS, num_layers=2)
    target = FrozenTarget.load(str(tmp_path / "target"))
    draft = create_draft_model(target, init=str(tmp_path / "small"))
    assert step_ratio(target.model, draft) >= 2 / 4
    with refused("draft.init", "layers of"):
        create_draft_model(target, init="layers")


def test_save_and_load_are_bit_equal(
    target: FrozenTarget, model: PreTrainedModel, tmp_path: Path
) -> None:
    draft = build_resized(
        model, ModelShape(2, 32, 48, 2, 1, read_model_shape(model.config).head_dim)
    )
    save_draft_model(draft, target.tokenizer, tmp_path)
    loaded, tokenizer = load_draft_model(tmp_path, key="draft.init")
    assert (
        torch.equal(compute_logits(loaded), compute_logits(draft))
        and tokenizer.get_vocab() == target.tokenizer.get_vocab()
    )
    assert torch.equal(
        compute_logits(create_draft_model(target, init=str(tmp_path))), compute_logits(draft)
    )


@pytest.mark.parametrize(("num_rows", "own_rows"), [(320, 260), (260, 384)])
def test_tables_with_other_padding_get_as_many_rows_as_the_targets(
    num_rows: int, own_rows: int, tmp_path: Path
) -> None:
    """gemma-3-27b has 262,208 rows, gemma-3-1b 262,144, and both the same tokens."""
    target = FrozenTarget(tiny_target_model(vocab_size=num_rows), tiny_tokenizer(), name="padded")
    saved_model = tiny_target_model(num_layers=1, vocab_size=own_rows)
    save_draft_model(saved_model, target.tokenizer, tmp_path)
    draft = create_draft_model(target, init=str(tmp_path))
    assert draft.config.vocab_size == compute_logits(draft).shape[-1] == num_rows
    assert torch.equal(compute_logits(draft)[..., :260], compute_logits(saved_model)[..., :260])


def test_a_model_on_the_hub_is_read_at_its_revision(
    monkeypatch: pytest.MonkeyPatch, target: FrozenTarget
) -> None:
    requests = []
    read = lambda place, **options: (  # noqa: E731
        requests.append((place, options["revision"])) or (tiny_target_model(), tiny_tokenizer())
    )
    monkeypatch.setattr(checkpoint, "read_causal_lm", read)
    for name in ("org/name@0123abc", "org/name"):
        create_draft_model(target, init=name)
    assert requests == [("org/name", "0123abc"), ("org/name", None)]


def test_an_encoder_is_refused_as_a_draft(tmp_path: Path) -> None:
    """transformers loads it as a causal language model, but every position sees the whole text."""
    BertForMaskedLM(
        BertConfig(vocab_size=260, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with refused("draft.init"):
        load_draft_model(tmp_path, key="draft.init")


@pytest.mark.parametrize(
    "broken", ["model.safetensors", "tokenizer.json", "config.json", "truncated"]
)
def test_an_incomplete_checkpoint_is_refused(
    target: FrozenTarget, tmp_path: Path, broken: str
) -> None:
    save_draft_model(from_layers(target.model, 2), target.tokenizer, tmp_path)
    weights = tmp_path / "model.safetensors"
    if broken == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        (tmp_path / broken).unlink()
    with refused("eval.draft"):
        load_draft_model(tmp_path)
