"""Block drafters draft what training predicts, leak nothing, and load as they were saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdistill.data.rows.packing import index_batch
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import DecodingState
from specdistill.decoding.sampling import Sampling
from specdistill.methods import METHODS
from specdistill.methods.blocks.attention import BlockKVCache
from specdistill.methods.blocks.checkpoint import load_block, save_block
from specdistill.methods.blocks.module import BlockDraft, build_block_draft, choose_default_layers
from specdistill.methods.blocks.objective import BlockObjective, draw_blocks, split_blocks
from specdistill.methods.blocks.proposer import BlockProposer
from specdistill.methods.load import find_method, load_proposer
from specdistill.serving.engines.loader import check_loader
from specdistill.serving.export import export
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import build_divergence, forward_kl
from tests.heads import KINDS, build_block, document_rows
from tests.refusals import refused
from tests.serving import layouts
from tests.targets.architectures import tiny_model
from tests.tiny import tiny_tokenizer

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "dflash, causal": ("dflash", {"is_causal": True}),
    "dflash, window": ("dflash", {"sliding_window": 9}),
    "dflash, causal window, pruned": (
        "dflash",
        {"is_causal": True, "sliding_window": 10, "draft_vocabulary": torch.arange(5, 105, 4)},
    ),
    "dspark": ("dspark", {}),
    "dspark, gated, pruned": (
        "dspark",
        {"markov_head_type": "gated", "draft_vocabulary": torch.arange(5, 105, 4)},
    ),
    "dspark, rnn": (
        "dspark",
        {"markov_head_type": "rnn", "is_causal": True, "enable_confidence_head": False},
    ),
}
Variant = tuple[str, BlockDraft]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, target: FrozenTarget) -> Variant:
    method, shape = VARIANTS[request.param]
    return method, build_block(method, target, **shape)


def pack_documents(*lengths: int) -> dict[str, Any]:
    """Return a row of random documents, with a loss at every token but the first three of each."""
    ids = torch.randint(3, 250, (1, sum(lengths)), generator=torch.Generator().manual_seed(4))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    rows = {
        "input_ids": ids,
        "loss_mask": (positions > 2).long(),
        "document_ids": documents,
        "position_ids": positions,
    }
    return index_batch(rows)


def build_objective(
    draft: BlockDraft, divergence: Any = forward_kl, **options: Any
) -> BlockObjective:
    return BlockObjective(draft, divergence, 64, **options).eval()


@torch.no_grad()
def test_drafts_are_drawn_from_the_logits_that_training_predicts(
    variant: Variant, target: FrozenTarget
) -> None:
    """A drafted chain is appended as if it had been accepted.

    In training, the block of its anchor then has the logits that the chain was drawn from.
    """
    _, draft = variant
    text = torch.randint(3, 250, (14,), generator=torch.Generator().manual_seed(3)).tolist()
    features = target.features(torch.tensor([text[:-1]]), draft.aux_layers)
    proposer, k = BlockProposer(draft), draft.config.num_drafted
    proposer.begin([len(text) + k])
    state = DecodingState([text], features, [len(text) - 1])
    (chain,) = proposer.propose(state, k, Sampling(0.7), [torch.Generator().manual_seed(1)])

    logits_of_calls: list[Tensor] = []

    def record_logits(logits_rW: Tensor, _probs_rW: Tensor) -> Tensor:
        logits_of_calls.append(logits_rW)
        return logits_rW.sum(-1)

    rows = document_rows([*text, *chain.tokens])
    objective = build_objective(draft, record_logits)
    batch = objective.prepare(index_batch(rows), None)
    objective(**batch, **objective.read_target(target, batch))
    logits_NKW = torch.cat(logits_of_calls).view(*batch["has_loss"].shape, -1)
    (index,) = (batch["anchors"] == len(text) - 1).nonzero()[0]
    assert chain.probabilities is not None
    expected = (logits_NKW[index] / 0.7).softmax(-1)
    assert torch.allclose(chain.probabilities[:, draft.target_ids_W], expected, atol=1e-5)


def test_a_block_sees_its_anchor_and_features_before_it_and_nothing_else(
    variant: Variant, target: FrozenTarget
) -> None:
    """A block's hidden states have gradients only at features that the block may read.

    These are the features before its anchor, in its document and within the window.
    """
    _, draft = variant
    batch = pack_documents(25, 18)
    anchors, _ = draw_blocks(batch, 64, draft.config.num_drafted, None)
    positions = batch["position_ids"][0]
    starts = anchors - positions[anchors]
    features = target.features(
        batch["input_ids"], draft.aux_layers, position_ids_BT=batch["position_ids"]
    )
    aux = tuple(feature.clone().requires_grad_() for feature in features.aux)
    shape = draft.config
    memory = BlockKVCache(
        anchors, starts, split_blocks(batch, anchors, 9), 9, shape.sliding_window, shape.is_causal
    )
    like = features.last_hidden
    context = draft.context(type(features)(aux, like)), draft.rotary(like, batch["position_ids"])
    slots = positions[anchors].unsqueeze(1) + torch.arange(9)
    hidden = draft(batch["input_ids"][0, anchors], draft.rotary(like, slots), memory, context)
    for index, (anchor, start) in enumerate(zip(anchors.tolist(), starts.tolist(), strict=True)):
        first_slot = torch.autograd.grad(
            hidden[index, 0].square().sum(), aux[0], retain_graph=True
        )[0]
        read = first_slot[0].abs().sum(-1).nonzero().flatten().tolist()
        window = draft.config.sliding_window
        # The first slot sees the later slots, which see less far back than it does.
        first = start if window is None else max(start, anchor - window + 1)
        assert read == [*range(first, anchor)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_in_chunks_and_in_one_call_equals_masked_attention(
    is_causal: bool, window: int | None
) -> None:
    """Outputs and gradients of 49 blocks in two documents agree; two query heads share a key head.

    On a CPU flex attention has no gradient, so only its output is compared.
    """
    torch.manual_seed(0)
    anchors = torch.cat((torch.arange(1, 30), torch.arange(40, 80, 2)))
    starts = torch.where(anchors < 33, 0, 33)
    num_blocks, num_tokens = len(anchors), 90
    shapes = [
        (num_blocks, 4, 9, 16),
        (num_blocks, 2, 9, 16),
        (num_blocks, 2, 9, 16),
        (2, num_tokens, 16),
        (2, num_tokens, 16),
    ]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    weights = torch.randn(shapes[0])

    def attend_plainly(
        query: Tensor, key: Tensor, value: Tensor, key_GSd: Tensor, value_GSd: Tensor
    ) -> Tensor:
        rows = []
        for block in range(num_blocks):
            for slot in range(9):
                anchor, start = int(anchors[block]), int(starts[block])
                first = start if window is None else max(start, anchor + slot - window + 1)
                last = slot + 1 if is_causal else 9
                k = torch.cat(
                    (key_GSd[:, first:anchor], key[block, :, :last]), 1
                ).repeat_interleave(2, 0)
                v = torch.cat(
                    (value_GSd[:, first:anchor], value[block, :, :last]), 1
                ).repeat_interleave(2, 0)
                scores = (k @ query[block, :, slot].unsqueeze(-1)).squeeze(-1) * 16**-0.5
                rows.append((scores.softmax(-1).unsqueeze(1) @ v).squeeze(1))
        return torch.stack(rows).view(num_blocks, 9, 4, 16).transpose(1, 2)

    position_ids = torch.cat((torch.arange(33), torch.arange(57)))[None]
    memory = BlockKVCache(
        anchors,
        starts,
        split_blocks({"position_ids": position_ids}, anchors, 9),
        9,
        window,
        is_causal,
    )
    results = []
    for form in (attend_plainly, memory.attend_in_chunks):
        output = form(*inputs)
        results.append((output, *torch.autograd.grad((output * weights).sum(), inputs)))
    for tensor, expected in zip(results[1], results[0], strict=True):
        assert torch.allclose(tensor, expected, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(memory.attend_in_one_call(*inputs), results[0][0], atol=1e-5)


def test_an_anchor_is_a_token_whose_next_one_is_learned() -> None:
    batch = pack_documents(7, 4, 12)
    anchors, has_loss = draw_blocks(batch, 64, 4, None)
    counted = anchors[has_loss[:, 0]].tolist()
    # The last token of a prompt is an anchor, as in drafting; a document's last token has no next
    # one.
    assert counted == [2, 3, 4, 5, 9, 13, 14, 15, 16, 17, 18, 19, 20, 21]
    assert has_loss[: len(counted)].sum(1).tolist() == [4, 3, 2, 1, 1, 4, 4, 4, 4, 4, 4, 3, 2, 1]
    # The prompt of a second turn: what comes after it cannot be reached from an anchor before it.
    turns = index_batch(
        {**batch, "loss_mask": batch["loss_mask"].index_fill(1, torch.tensor([16]), 0)}
    )
    anchors, has_loss = draw_blocks(turns, 64, 4, None)
    assert has_loss[anchors == 14].tolist() == [[True, False, False, False]]
    drawn = [draw_blocks(batch, 4, 4, seed)[0].tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and all(
        set(anchors) <= set(counted) and len(anchors) == 4 for anchors in drawn
    )
    none = draw_blocks(
        index_batch({**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}), 64, 4, None
    )
    assert not none[1].any()


@pytest.mark.parametrize(
    "options",
    [{"alpha": 0.5}, {"step_decay": 0.7, "confidence_weight": 1.0}],
    ids=["d_pace", "decay"],
)
def test_a_short_training_learns_its_rows(target: FrozenTarget, options: dict[str, Any]) -> None:
    draft = build_block("dspark", target, block_size=4).train()
    objective = BlockObjective(draft, build_divergence("lk"), 16, **options)
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer, batch, losses = torch.optim.Adam(trained, 1e-2), pack_documents(40, 30), []
    for step in range(25):
        blocks = objective.prepare(batch, step)
        total, _ = objective(**blocks, **objective.read_target(target, blocks))
        optimizer.zero_grad()
        (total / objective.count_loss_tokens(blocks)).backward()
        optimizer.step()
        losses.append(float(total.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert all(
        parameter.grad is None
        for name, parameter in draft.named_parameters()
        if name in draft.shared
    )
    objective.eval()
    blocks = objective.prepare(batch, None)
    _, sums = objective(**blocks, **objective.read_target(target, blocks), measure=True)
    assert (
        sums.table().shape == (8, 4)
        and sums.table()[1].tolist() == blocks["has_loss"].sum(0).tolist()
    )


def test_rows_with_nothing_to_learn_give_no_gradient_and_no_nan(target: FrozenTarget) -> None:
    draft = build_block("dspark", target)
    objective = build_objective(draft)
    batch = pack_documents(8, 8)
    batch = objective.prepare(
        index_batch({**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}), 0
    )
    total, _ = objective(**batch, **objective.read_target(target, batch))
    total.backward()
    assert total.item() == 0 and int(objective.count_loss_tokens(batch)) == 0
    assert all(
        parameter.grad is None or not parameter.grad.any() for parameter in draft.parameters()
    )


def test_save_and_load_are_bit_equal(
    variant: Variant, target: FrozenTarget, tmp_path: Path
) -> None:
    method, draft = variant
    save_block(draft.bfloat16(), KINDS[method], tmp_path)
    loaded = load_block(KINDS[method], tmp_path, target)
    assert loaded.config == draft.config
    assert all(
        torch.equal(tensor, loaded.state_dict()[name].to(tensor))
        for name, tensor in draft.state_dict().items()
    )
    assert find_method(tmp_path) == method
    plain = Decoder(target).generate([5, 9, 20], max_new_tokens=20)
    fast = Decoder(target, load_proposer(method, tmp_path, target)).generate(
        [5, 9, 20], max_new_tokens=20, num_speculative_tokens=4
    )
    assert fast.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({"mask_token_id": 5000}, "mask_token_id 5000"),
        ({"target_layer_ids": [0, 7]}, "after layers [1, 8]"),
        ({"mask_token_id": None}, "without mask_token_id"),
        ({"target_layer_ids": []}, "without target_layer_ids"),
        ({"block_size": "8"}, "block_size '8'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_a_broken_config_is_refused(
    target: FrozenTarget, tmp_path: Path, changes: dict[str, Any], holds: str
) -> None:
    save_block(build_block("dflash", target), KINDS["dflash"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= changes
    config["dflash_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused("eval.draft", holds=holds):
        load_block(KINDS["dflash"], tmp_path, target)


def test_more_tokens_than_a_block_has_are_refused(target: FrozenTarget) -> None:
    decoder = Decoder(target, BlockProposer(build_block("dflash", target, block_size=4)))
    with refused("eval.num_speculative_tokens", "4 with a draft whose block_size is 4"):
        decoder.generate([5, 9], max_new_tokens=8, num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("draft.aux_layers", {"aux_layers": [0, 2]}),
        ("draft.aux_layers", {"aux_layers": [9]}),
    ],
)
def test_layers_that_the_target_does_not_have_are_refused(
    target: FrozenTarget, key: str, options: dict[str, Any]
) -> None:
    with refused(key):
        build_block("dflash", target, **options)


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return layouts.saved_target(tmp_path_factory.mktemp("target"))


PRUNED = {"draft_vocabulary": torch.arange(5, 105, 4)}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "gguf", "speculators"])
@pytest.mark.parametrize(
    ("method", "shape"),
    [("dflash", {}), ("dspark", PRUNED), ("dspark", {"is_causal": True, "sliding_window": 9})],
)
def test_an_exported_draft_loads_with_its_config(
    saved_target: FrozenTarget, tmp_path: Path, engine: str, method: str, shape: dict[str, Any]
) -> None:
    """Where vLLM's loader is known, it finds nothing wrong.

    It reports the mask and the layers when config.json does not name them.
    """
    draft = build_block(method, saved_target, **shape)
    save_block(draft, KINDS[method], tmp_path / "draft")
    export(tmp_path / "draft", engine, tmp_path / engine, TargetFiles(saved_target.name))
    assert load_block(KINDS[method], tmp_path / engine, saved_target).config == draft.config
    for loader in METHODS[method].serving()[engine].loaders:
        config = json.loads((tmp_path / engine / "config.json").read_text())
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in load_file(tmp_path / engine / "model.safetensors").items()
        }
        report = check_loader(loader, config, shapes, draft.config, saved_target)
        assert (report.refused, report.silent) == ([], [])
        del (
            config["is_causal"],
            config["dflash_config"]["causal"],
            config["dflash_config"]["mask_token_id"],
            config["mask_token_id"],
        )
        config["dflash_config"]["target_layer_ids"] = [2, 3]
        silent_errors = " ".join(
            check_loader(loader, config, shapes, draft.config, saved_target).silent
        )
        assert (
            "mask_token_id" in silent_errors
            and "after layers [3, 4]" in silent_errors
            and ("is_causal" in silent_errors) == draft.config.is_causal
        )


@pytest.mark.parametrize(
    ("engine", "method", "shape", "holds"),
    [
        ("sglang", "dflash", {"is_causal": True}, "causal slots without a window"),
        ("sglang", "dspark", {"sliding_window": 9}, "causal slots without a window"),
        ("sglang", "dflash", PRUNED, "a pruned vocabulary"),
        ("gguf", "dflash", PRUNED, "a pruned vocabulary"),
        ("vllm", "dspark", {"markov_head_type": "rnn"}, "a correction that reads more"),
        ("gguf", "dspark", {"markov_head_type": "gated"}, "a correction that reads more"),
        ("speculators", "dflash", {"is_causal": True}, "causal slots and no window"),
    ],
)
def test_a_draft_that_an_engine_cannot_express_is_refused(
    saved_target: FrozenTarget,
    tmp_path: Path,
    engine: str,
    method: str,
    shape: dict[str, Any],
    holds: str,
) -> None:
    save_block(build_block(method, saved_target, **shape), KINDS[method], tmp_path / "draft")
    with refused("engine", holds=holds):
        export(tmp_path / "draft", engine, tmp_path / "out", TargetFiles(saved_target.name))
    assert not (tmp_path / "out").exists()


def test_a_fresh_draft_scales_its_logits_as_the_target_does() -> None:
    target = FrozenTarget(tiny_model("granite"), tiny_tokenizer(), name="granite")
    draft, hidden = (
        build_block_draft(KINDS["dflash"], target, num_layers=2, block_size=4, mask_token_id=2),
        torch.randn(1, 3, target.hidden_size),
    )
    assert target.logits.scale != 1
    assert torch.allclose(
        draft.logits(draft.norm(hidden)), target.logits(target.norm(hidden)), atol=1e-5
    )


def test_default_layers_are_spread_as_the_authors_spread_them() -> None:
    """The expected ids are DFlash's `target_layer_ids` for Qwen3-8B, which count from 0.

    A shallow target has fewer layers.
    """
    assert [layer - 1 for layer in choose_default_layers(36)] == [1, 9, 17, 25, 33]
    assert (choose_default_layers(6), choose_default_layers(3), choose_default_layers(1)) == (
        [2, 3, 4],
        [1, 2],
        [1],
    )
