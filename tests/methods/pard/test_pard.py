"""PARD trains masks as it drafts them, and a mask sees its token's past and its chain alone."""

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdistill.data.rows.packing import index_batch
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.sampling import Sampling
from specdistill.methods.load import create_draft, find_method, load_method, load_proposer
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.methods.pard.objective import ParallelDistillation, draw_masks
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.serving.export import export
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import forward_kl
from tests.heads import document_rows
from tests.proposers import state_of
from tests.refusals import refused
from tests.tiny import packed_rows, qwen, tiny_target_model

MASK, K = 2, 5
ROWS = packed_rows([[5, 6]])
MODELS = {"llama": lambda: tiny_target_model(num_layers=2, seed=5), "windows": qwen}


def pack_documents(*lengths: int, num_rows: int = 2, padding: int = 3) -> dict[str, Any]:
    """Return rows of random documents and padding.

    Every token but the first two of each document has a loss.
    """
    shape = num_rows, sum(lengths) + padding
    positions = torch.cat(
        [torch.arange(length) for length in lengths] + [torch.zeros(padding, dtype=torch.long)]
    )
    documents = torch.cat(
        [torch.full((length,), index) for index, length in enumerate(lengths)]
        + [torch.full((padding,), -1)]
    )
    ids = torch.randint(4, 250, shape, generator=torch.Generator().manual_seed(4))
    mask = ((positions > 1) & (documents >= 0)).long()
    columns = {"loss_mask": mask, "document_ids": documents, "position_ids": positions}
    return index_batch(
        {"input_ids": ids}
        | {name: column.expand(shape).clone() for name, column in columns.items()}
    )


def build_objective(
    name: str, divergence: Any = forward_kl, **options: Any
) -> ParallelDistillation:
    draft = MODELS[name]()
    draft.config.pard_token = MASK
    return ParallelDistillation(draft, divergence, num_positions=K, **options).eval()


# --- Training


@pytest.mark.parametrize(("retention", "least"), [(1.0, 0.0), (0.7, 0.2), (0.5, 0.3)])
def test_dropping_masks_keeps_whole_chains_at_the_retention_rate(
    retention: float, least: float
) -> None:
    batch = pack_documents(400, 300)
    columns, numbers = draw_masks(batch, K, retention, least, seed=1)
    kept = [
        {(b, int(columns[b, m])) for b, m in (numbers == i).nonzero().tolist()} for i in range(1, K)
    ]
    assert all(later <= earlier for earlier, later in pairwise(kept))
    starts = 2 * (398 + 298)
    for i, chains in enumerate(kept, start=1):
        assert len(chains) == pytest.approx(max(least, retention**i) * starts, abs=0.03 * starts)
    again, other = (
        draw_masks(batch, K, retention, least, seed=1),
        draw_masks(batch, K, retention, least, seed=2),
    )
    assert torch.equal(columns, again[0]) and (
        retention == 1 or not torch.equal(columns[:, :50], other[0][:, :50])
    )
    # rows have 703 tokens, and their masks are padded to multiples of an eighth of that
    assert int(numbers.max()) <= K and columns.shape[1] % 88 == 0


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_training_predicts_what_the_model_says_after_a_prefix_and_masks(
    name: str, target: FrozenTarget
) -> None:
    """Logits of training are those of transformers' own forward over a prefix and masks.

    The target's probabilities are those of its forward over the text.
    """
    distributions: list[tuple[Tensor, Tensor]] = []

    def record_distributions(logits_rV: Tensor, probs_rV: Tensor) -> Tensor:
        distributions.append((logits_rV, probs_rV))
        return forward_kl(logits_rV, probs_rV)

    objective = build_objective(name, record_distributions)
    batch = objective.prepare(pack_documents(14, 11), 0)
    total, sums = objective(**batch, **objective.read_target(target, batch), measure=True)
    logits, probs = (torch.cat(part) for part in zip(*distributions, strict=True))
    expected, counts, num_loss = 0.0, [0] * K, len(batch["loss_positions"])
    places = [
        (*divmod(int(place) - 1, 28), 0, index)
        for index, place in enumerate(batch["loss_positions"])
        if place
    ]
    numbers = batch["mask_numbers"]
    for b, m in (numbers < K).nonzero().tolist():
        places.append(
            (
                b,
                int(batch["mask_columns"][b, m]),
                int(numbers[b, m]),
                num_loss + b * numbers.shape[1] + m,
            )
        )
    for b, column, number, row in places:
        text = batch["input_ids"][b, column - int(batch["position_ids"][b, column]) :]
        prefix = int(batch["position_ids"][b, column]) + 1
        alone = objective.draft(
            torch.cat((text[:prefix], text.new_full((number,), MASK)))[None]
        ).logits[0, -1]
        assert torch.allclose(logits[row], alone, atol=1e-4)
        theirs = target.model(text[None, : prefix + number]).logits[0, -1].softmax(-1)
        assert torch.allclose(probs[row], theirs, atol=1e-5)
        expected += float(forward_kl(alone[None], theirs[None]))
        counts[number] += 1
    assert float(total) == pytest.approx(expected, rel=1e-3) and min(counts) > 0
    assert (
        [int(count) for count in sums.loss_tokens]
        == [int(count) for count in sums.chains]
        == counts
    )
    assert int(objective.count_loss_tokens(batch)) == sum(counts)
    assert float(sum(sums.loss)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_slot_sees_its_tokens_past_and_its_own_chain(name: str) -> None:
    """Hidden states have no gradient at tokens after the mask's own.

    Nor do they have one at another document, row or chain.
    """
    objective = build_objective(name, retention=1.0)
    batch = objective.prepare(pack_documents(9, 8, num_rows=1), 0)
    embedded: list[Tensor] = []
    objective.draft.get_input_embeddings().register_forward_hook(
        lambda module, ids, output: embedded.append(output)
    )
    columns, numbers = batch["mask_columns"], batch["mask_numbers"]
    hidden = objective.hidden_states(batch["input_ids"], batch["position_ids"], columns, numbers)
    length = batch["input_ids"].shape[1]
    slots = [(column, column, 0) for column in range(17)]
    slots += [
        (length + m, int(columns[0, m]), int(numbers[0, m]))
        for _, m in (numbers < K).nonzero().tolist()
    ]
    for slot, column, number in slots:
        (grad,) = torch.autograd.grad(
            hidden[0, slot].square().sum(), embedded[0], retain_graph=True
        )
        read = grad[0].abs().sum(-1).nonzero().flatten().tolist()
        chain = [other for other, root, i in slots if root == column and 0 < i <= number]
        # Layers with a window stand between layers without one, through which all is seen.
        assert read == [*range(0 if column < 9 else 9, column + 1), *chain]


def test_the_target_as_its_own_draft_is_perfect_at_tokens_and_hard_labels_need_no_target(
    target: FrozenTarget,
) -> None:
    draft = copy.deepcopy(target.model)
    draft.config.pard_token = MASK
    objective = ParallelDistillation(draft, forward_kl, num_positions=1)
    batch = objective.prepare(pack_documents(12, 9), None)
    total, sums = objective(**batch, **objective.read_target(target, batch), measure=True)
    assert (
        float(total.detach()) == pytest.approx(0, abs=1e-4)
        and float(sums.correct[0]) == float(sums.loss_tokens[0]) == 34
    )
    hard = build_objective("llama", labels="hard").train()
    batch = hard.prepare(pack_documents(12, 9), 3)
    assert hard.read_target(target, batch) == {"soft_targets": None}
    loss, _ = hard(**batch, soft_targets=None)
    loss.backward()
    assert float(hard.draft.get_input_embeddings().weight.grad[MASK].abs().sum()) > 0


def test_a_memorised_text_is_drafted_in_full(target: FrozenTarget) -> None:
    """A model overfits a text that the target wrote; no label is shifted if it drafts that text."""
    prompt = [5, 9, 20, 31]
    text = [*prompt, *Decoder(target).generate(prompt, max_new_tokens=20).token_ids]
    objective = build_objective("llama", retention=1.0, labels="hard").train()
    batch = objective.prepare(index_batch(document_rows(text)), 0)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 60)
    for _ in range(60):
        loss, _ = objective(**batch, soft_targets=None)
        optimizer.zero_grad()
        (loss / objective.count_loss_tokens(batch)).backward()
        optimizer.step()
        schedule.step()
    proposer = DraftModelProposer(objective.draft, mask_token_id=MASK)
    run = Decoder(target, proposer).generate(
        prompt, max_new_tokens=20, num_speculative_tokens=K - 1
    )
    assert [*prompt, *run.token_ids] == text and [r.num_accepted for r in run.rounds[:-1]] == [
        K - 1
    ] * (len(run.rounds) - 1)


def test_a_model_that_takes_no_masks_is_refused() -> None:
    model: Any = tiny_target_model(num_layers=1)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with refused("draft.init", holds="rotary angles"):
        ParallelDistillation(model, forward_kl)


# --- Drafting


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_draft_is_one_pass_over_masks_that_the_cache_forgets(name: str) -> None:
    """Tokens are drawn from what transformers computes after the text and masks.

    This holds over rounds of rows of different lengths.
    """
    model = MODELS[name]()
    proposer, sampling = DraftModelProposer(model, mask_token_id=MASK), Sampling(0.7)
    assert [proposer.count_passes(k) for k in (0, 1, 5)] == [0, 1, 1]
    for texts in ([[5, 9, 30, 31]], [[5, 9, 30], [7, 8, 9, 10, 11, 12]]):
        proposer.begin([40] * len(texts))
        for grown in ([], [40], [41, 42, 43]):
            texts = [[*text, *grown[: len(grown) - b]] for b, text in enumerate(texts)]
            state, generators = (
                state_of(texts[0]),
                [torch.Generator().manual_seed(1) for _ in texts],
            )
            state.token_ids = texts
            for text, chain in zip(
                texts, proposer.propose(state, 4, sampling, generators), strict=True
            ):
                logits = model(torch.tensor([[*text, MASK, MASK, MASK]])).logits[0, len(text) - 1 :]
                assert chain.probabilities is not None and len(chain.tokens) == 4
                assert torch.allclose(
                    chain.probabilities, sampling.compute_probabilities(logits), atol=1e-5
                )


# --- Checkpoints


@pytest.fixture
def draft_folder(target: FrozenTarget, tmp_path: Path) -> Path:
    """The folder of a fresh draft as training writes it."""
    recipe = load_recipe(
        Recipe,
        [
            "method=pard",
            "target.model=tiny",
            "data.source=x",
            "train.output_dir=x",
            "draft.num_layers=2",
        ],
    )
    method = load_method("pard")
    draft = create_draft(recipe, target, ROWS)
    method.save(draft, target, tmp_path / "draft")
    return tmp_path / "draft"


def test_a_checkpoint_records_its_mask_and_is_recognized_as_pard(
    draft_folder: Path, target: FrozenTarget, tmp_path: Path
) -> None:
    config = json.loads((draft_folder / "config.json").read_text())
    assert (config["spd_type"], config["pard_token"], config["architectures"]) == (
        "pard",
        3,
        ["LlamaForCausalLM"],
    )
    assert (
        find_method(draft_folder) == "pard"
        and load_proposer("pard", draft_folder, target).count_passes(4) == 1
    )
    with refused("eval.draft", holds="method pard"):
        load_proposer("draft_model", draft_folder, target)
    served = export(draft_folder, "vllm", tmp_path / "out")
    assert served.serving.options(served.config) == {"parallel_drafting": True}
    line = '{"method": "draft_model", "parallel_drafting": true, "model"'
    assert line in (tmp_path / "out" / "SERVE.md").read_text()
    assert (
        find_method(tmp_path / "out") == "pard"
        and json.loads((tmp_path / "out" / "config.json").read_text())["pard_token"] == 3
    )
    with refused("engine"):
        export(draft_folder, "sglang", tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "got"),
    [({"pard_token": 260}, "pard_token 260"), ({"pard_token": "x"}, "pard_token 'x'")],
)
def test_a_mask_without_a_row_is_refused(
    change: dict[str, Any], got: str, draft_folder: Path, target: FrozenTarget
) -> None:
    config = json.loads((draft_folder / "config.json").read_text())
    (draft_folder / "config.json").write_text(json.dumps(config | change))
    with refused("eval.draft", holds=got):
        load_proposer("pard", draft_folder, target)


def test_a_mask_is_that_of_the_recipe_or_of_the_draft_that_is_continued(
    draft_folder: Path, target: FrozenTarget
) -> None:
    common = ["method=pard", "target.model=tiny", "data.source=x", "train.output_dir=x"]

    def create_mask(*keys: str) -> Any:
        return create_draft(load_recipe(Recipe, [*common, *keys]), target, ROWS).config.pard_token

    assert create_mask("draft.mask_token_id=7") == 7
    config = json.loads((draft_folder / "config.json").read_text())
    (draft_folder / "config.json").write_text(json.dumps(config | {"pard_token": 9}))
    assert create_mask(f"draft.init={draft_folder}") == 9  # a continued draft keeps its mask
