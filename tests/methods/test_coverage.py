"""The share of the training data that a pruned vocabulary covers, where it is new or inherited."""

import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from specdistill.data.rows.packing import check_coverage
from specdistill.methods.load import create_draft, load_method
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.targets.frozen import FrozenTarget
from tests.tiny import packed_rows

# The methods with `draft.vocab_size`, and keys of small drafts.
KEYS = {
    "eagle3": [],
    "dflash": ["draft.num_layers=1", "draft.block_size=4"],
    "dspark": ["draft.num_layers=1", "draft.block_size=4", "draft.markov_rank=4"],
}
# Token 10 is 40 % of the tokens with loss, 11 is 30 %, 12 is 20 %, and ten others are 1 % each; 200
# never has a loss.
LOSS_TOKENS = [10] * 40 + [11] * 30 + [12] * 20 + list(range(20, 30))
FIRST, OTHER = 0, 100  # shifts of the token ids: two data sets without a common token


def build_rows(shift: int) -> Dataset:
    rows = packed_rows([[200, token + shift] for token in LOSS_TOKENS])
    return rows.remove_columns("loss_mask").add_column("loss_mask", [[0, 1]] * len(LOSS_TOKENS))


def build_draft(method: str, target: FrozenTarget, rows: Dataset, *keys: str) -> Any:
    common = [f"method={method}", "target.model=tiny", "data.source=x", "train.output_dir=x"]
    return create_draft(load_recipe(Recipe, [*common, *KEYS.get(method, []), *keys]), target, rows)


@pytest.mark.parametrize("method", KEYS)
@pytest.mark.parametrize(
    ("size", "share", "level"), [(1, 0.4, "WARNING"), (2, 0.7, "WARNING"), (4, 0.91, "INFO")]
)
def test_the_coverage_of_a_new_vocabulary_is_logged_and_a_low_one_is_warned_of(
    method: str,
    size: int,
    share: float,
    level: str,
    target: FrozenTarget,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = build_rows(FIRST)
    with caplog.at_level(logging.INFO, "specdistill"):
        draft = build_draft(method, target, rows, f"draft.vocab_size={size}")
        assert check_coverage(rows, target.vocab_size, draft, None) == share
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelname == level and f"covers {share:.1%}" in message
    if level == "WARNING":  # the message names the smallest size that is enough
        assert message.startswith("draft.vocab_size: ") and "draft.vocab_size=3 " in message


@pytest.mark.parametrize("method", KEYS)
def test_the_coverage_of_an_inherited_vocabulary_is_that_of_the_new_data(
    method: str, target: FrozenTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save = load_method(method).save
    save(build_draft(method, target, build_rows(FIRST), "draft.vocab_size=4"), target, tmp_path)
    draft = build_draft(method, target, build_rows(OTHER), f"draft.init={tmp_path}")
    with caplog.at_level(logging.INFO, "specdistill"):
        assert check_coverage(build_rows(FIRST), target.vocab_size, draft, str(tmp_path)) == 0.91
        assert check_coverage(build_rows(OTHER), target.vocab_size, draft, str(tmp_path)) == 0
    same, other = caplog.records
    assert (same.levelname, other.levelname) == (
        "INFO",
        "WARNING",
    ) and "covers 91.0%" in same.getMessage()
    message = other.getMessage()
    assert (
        message.startswith("draft.init: ")
        and "covers 0.0%" in message
        and "draft.init=null draft.vocab_size=3 " in message
    )


@pytest.mark.parametrize("method", ["eagle3", "dflash", "draft_model"])
def test_the_coverage_of_a_whole_vocabulary_is_not_logged(
    method: str, target: FrozenTarget, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "specdistill"):
        draft = build_draft(method, target, build_rows(FIRST))
        caplog.clear()
        assert check_coverage(build_rows(FIRST), target.vocab_size, draft, None) is None
    assert not caplog.records
