"""Each method learns the loss tokens of its definition, and from the positions that it names.

The tests enumerate the definitions over loss masks of any shape.
"""

import random
from collections import Counter
from typing import Any

import pytest
import torch

from specdistill.data.rows.packing import COLUMNS, PADDING_DOCUMENT, index_batch
from specdistill.methods import METHODS
from specdistill.methods.blocks.objective import draw_blocks
from specdistill.methods.load import create_draft, load_method
from specdistill.methods.pard.objective import draw_masks
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.recipe.load import load_recipe
from specdistill.targets.frozen import FrozenTarget
from tests.tiny import packed_rows

K = 5
# Keys of small drafts. PARD drops no mask, so that all can be counted.
KEYS = {
    "eagle3": [f"draft.ttt_steps={K}"],
    "eagle": [f"draft.ttt_steps={K}"],
    "mtp": [f"draft.ttt_steps={K}", "draft.init=scratch"],
    "early_exit": [],
    "dflash": [f"draft.block_size={K + 1}", "draft.num_layers=2"],
    "dspark": [f"draft.block_size={K}", "draft.num_layers=2", "draft.markov_rank=8"],
    "pard": [f"draft.parallel_tokens={K}", "draft.retention=1"],
    "draft_model": [],
}
BLOCKS = ("dflash", "dspark", "pard")
HEADS = ("eagle3", "eagle", "mtp")
assert set(KEYS) == {name for name, method in METHODS.items() if method.is_trained}
Pairs = set[tuple[int, int]]


def build_batch(rows: dict[str, list[list[int]]]) -> dict[str, Any]:
    return index_batch({name: torch.tensor(rows[name]) for name in COLUMNS})


def make_random_batch(seed: int) -> dict[str, Any]:
    """Return three rows of documents of 1 to 9 tokens and padding.

    Their loss masks are of all shapes: lone tokens, gaps, all or none.
    """
    generator = random.Random(seed)
    rows: dict[str, list[list[int]]] = {name: [] for name in COLUMNS}
    for _ in range(3):
        lengths = [generator.randint(1, 9) for _ in range(generator.randint(1, 4))]
        length = sum(lengths)
        padding = 36 - length
        documents = [number for number, tokens in enumerate(lengths) for _ in range(tokens)]
        share = generator.choice((0.0, 0.1, 0.5, 0.8, 1.0))
        rows["input_ids"].append([generator.randint(4, 250) for _ in range(36)])
        rows["loss_mask"].append(
            [int(generator.random() < share) for _ in range(length)] + [0] * padding
        )
        rows["document_ids"].append(documents + [PADDING_DOCUMENT] * padding)
        rows["position_ids"].append(
            [place for tokens in lengths for place in range(tokens)] + [0] * padding
        )
    return build_batch(rows)


def list_block_pairs(batch: dict[str, Any]) -> Pairs:
    """Return each token t and distance j that blocks learn.

    The tokens t + 1 to t + j are in the document of t and carry loss.
    """
    pairs = set()
    masks, documents = batch["loss_mask"].tolist(), batch["document_ids"].tolist()
    length = len(masks[0])
    for b, (mask, document) in enumerate(zip(masks, documents, strict=True)):
        for t in range(length):
            for j in range(1, K + 1):
                reached = range(t + 1, t + j + 1)
                if t + j < length and all(
                    mask[place] and document[place] == document[t] for place in reached
                ):
                    pairs.add((b * length + t, j))
    return pairs


def count_tokens_with_context(batch: dict[str, Any], least: int) -> int:
    """Count the loss tokens with at least `least` tokens of their document before them."""
    return int(((batch["loss_mask"] == 1) & (batch["position_ids"] >= least)).sum())


def build_objective(method: str, target: FrozenTarget) -> Any:
    common = [f"method={method}", "target.model=tiny", "data.source=x", "train.output_dir=x"]
    recipe = check_trainable(
        load_recipe(Recipe, [*common, *KEYS[method], "eval.num_speculative_tokens=3"])
    )
    draft = create_draft(recipe, target, packed_rows([[5, 6, 7, 8]]))
    return load_method(method).build_objective(draft, recipe, target)


@pytest.mark.parametrize("seed", range(40))
def test_the_slots_that_blocks_and_masks_learn_are_those_of_the_definition(seed: int) -> None:
    batch = make_random_batch(seed)
    expected = list_block_pairs(batch)
    anchors, is_learned = draw_blocks(batch, 64, K, seed)
    slots = [(int(anchors[n]), k + 1) for n, k in is_learned.nonzero().tolist()]
    assert len(slots) == len(set(slots)) and set(slots) == expected
    # PARD: the token itself predicts the next one, and mask i the one that is i further on.
    columns, numbers = draw_masks(batch, K, 1.0, 0.0, seed)
    masks = [
        (36 * b + int(columns[b, m]), int(numbers[b, m]) + 1)
        for b, m in (numbers < K).nonzero().tolist()
    ]
    tokens = [(place - 1, 1) for place in batch["loss_positions"].tolist() if place]
    assert len(masks) == len(set(masks)) and {*masks, *tokens} == expected
    labels = {anchor + j for anchor, j in slots}
    # every loss token that a draft can be asked for
    assert len(labels) == count_tokens_with_context(batch, 1)


@pytest.mark.parametrize("method", KEYS)
def test_each_method_learns_as_many_tokens_as_its_definition_says(
    method: str, target: FrozenTarget
) -> None:
    objective = build_objective(method, target).eval()
    for seed in range(4):
        batch = make_random_batch(seed)
        expected = [count_tokens_with_context(batch, 1)]
        if method in HEADS:
            expected = [count_tokens_with_context(batch, 2 + k) for k in range(K)]
        if method in BLOCKS:
            pairs = list_block_pairs(batch)
            expected = [sum(j == k for _, j in pairs) for k in range(1, K + 1)]
        prepared = objective.prepare(batch, None)
        with torch.no_grad():
            _, sums = objective(**prepared, **objective.read_target(target, prepared))
        assert [int(count) for count in sums.loss_tokens] == expected
        first = sum(expected) if method == "pard" else expected[0]
        assert int(objective.count_loss_tokens(prepared).sum()) == first


@pytest.mark.parametrize("place", [2, 6, 11])
@pytest.mark.parametrize("method", KEYS)
def test_one_step_on_rows_with_one_loss_token_learns(
    method: str, place: int, target: FrozenTarget
) -> None:
    """The loss token is inside a row, at its end or at the first place that all methods predict."""
    rows = [[random.Random(row).randint(4, 250) for _ in range(12)] for row in range(4)]
    packed = packed_rows(rows)[:]
    packed["loss_mask"] = [[int(column == place) for column in range(12)]] * 4
    objective = build_objective(method, target).train()
    batch = objective.prepare(build_batch(packed), 0)
    total, _ = objective(**batch, **objective.read_target(target, batch))
    (total.sum() / objective.count_loss_tokens(batch).sum()).backward()
    gradients = [
        parameter.grad.abs().sum()
        for parameter in objective.parameters()
        if parameter.grad is not None
    ]
    assert float(total.detach().sum()) > 0 and float(sum(gradients)) > 0


def test_anchors_are_drawn_equally_often_when_there_are_too_many() -> None:
    """Six of 24 possible anchors are drawn, so each is in a quarter of 2,000 draws.

    The tolerance is five standard deviations of the binomial distribution.
    """
    packed = packed_rows([list(range(4, 40)), list(range(4, 40))])[:]
    packed["loss_mask"] = [[column % 3 == 1 for column in range(36)]] * 2
    batch = build_batch(packed)
    counts: Counter[int] = Counter()
    for seed in range(2000):
        anchors, is_learned = draw_blocks(batch, 3, K, seed)
        drawn = anchors[is_learned[:, 0]].tolist()
        assert len(set(drawn)) == len(drawn) == 6
        counts.update(drawn)
    assert set(counts) == {anchor for anchor, _ in list_block_pairs(batch)}
    assert all(abs(count - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5 for count in counts.values())
