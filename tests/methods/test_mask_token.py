"""The mask of methods that fill masks: a token that no text holds, and warnings about others."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from specdistill.common.errors import UserError
from specdistill.data.rows.packing import PADDING_DOCUMENT, count_tokens
from specdistill.methods.load import create_draft, load_method
from specdistill.methods.mask_token import find_free_token, resolve_mask
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.targets.frozen import FrozenTarget
from tests.draft_models import tiny_draft_model, words
from tests.refusals import refused
from tests.tiny import packed_rows, tiny_target_model, tiny_tokenizer

METHODS_WITH_MASKS = {
    "dflash": ["draft.num_layers=1", "draft.block_size=4"],
    "dspark": ["draft.num_layers=1", "draft.block_size=4", "draft.markov_rank=4"],
    "pard": ["draft.num_layers=1", "draft.parallel_tokens=3"],
}
END, USER, TURN_END, WORD, RARE = 0, 1, 3, 40, 41
# Token 40 is half of the tokens, <|user|> begins each row, 41 occurs once.
ROWS = packed_rows([[USER, WORD, WORD, 50 + row] for row in range(19)] + [[USER, WORD, WORD, RARE]])
TEXTS = packed_rows([[WORD, WORD, 50 + row] for row in range(20)])


@pytest.fixture(scope="module")
def chat_target() -> FrozenTarget:
    """A target that ends its generations with <|endoftext|> or <|end|>."""
    model = tiny_target_model()
    model.generation_config.eos_token_id = [END, TURN_END]
    return FrozenTarget(
        model, tiny_tokenizer("<|user|>{{ messages[0].content }}<|assistant|>"), name="chat"
    )


def build_draft(method: str, target: FrozenTarget, rows: Dataset, *keys: str) -> Any:
    common = [f"method={method}", "target.model=tiny", "data.source=x", "train.output_dir=x"]
    method_keys = [
        key
        for key in METHODS_WITH_MASKS[method]
        if "draft.init" not in str(keys) or "num_layers" not in key
    ]
    return create_draft(load_recipe(Recipe, [*common, *method_keys, *keys]), target, rows)


def get_mask(draft: Any) -> int:
    return int(getattr(draft.config, "mask_token_id", None) or draft.config.pard_token)


def parse_suggested_mask(text: str) -> int:
    match = re.search(r"draft\.mask_token_id=(\d+)", text)
    assert match, text
    return int(match[1])


def has_token(token: int, rows: Dataset) -> bool:
    return any(token in row for row in rows["input_ids"])


def choose_mask(target: FrozenTarget, rows: Dataset, mask: int | None = None) -> int:
    counts = count_tokens(rows, target.vocab_size, with_loss=False).tolist()
    return resolve_mask(mask, target.tokenizer, target.eos_token_ids, target.vocab_size, counts)


def test_a_mask_is_the_one_asked_for_or_a_token_that_texts_do_not_hold() -> None:
    target = FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")
    padded = FrozenTarget(tiny_target_model(vocab_size=264), tiny_tokenizer(), name="padded")
    masked = FrozenTarget(
        tiny_draft_model(4, seed=1), words("? a b c", mask_token="b"), name="masked"
    )
    short = FrozenTarget(tiny_target_model(vocab_size=200), tiny_tokenizer(), name="short")
    # 3 is <|end|>, which ends no generation of this target
    assert (choose_mask(target, TEXTS, 7), choose_mask(target, TEXTS)) == (7, 3)
    assert (choose_mask(padded, TEXTS), choose_mask(masked, packed_rows([[1]]))) == (263, 2)
    assert choose_mask(masked, packed_rows([[1, 2]])) == 3  # "c": texts hold the tokenizer's mask
    # the tokenizer has more tokens than the embedding has rows
    assert choose_mask(short, packed_rows([[1, 2, 3]])) == 199


def test_padding_of_rows_does_not_count_as_text(target: FrozenTarget) -> None:
    rows = Dataset.from_dict(
        {"input_ids": [[5, 3, 3]], "document_ids": [[0, PADDING_DOCUMENT, PADDING_DOCUMENT]]}
    )
    assert choose_mask(target, rows) == 3


@pytest.mark.parametrize("method", METHODS_WITH_MASKS)
@pytest.mark.parametrize("mask", [END, TURN_END, 260])
def test_a_mask_that_ends_a_generation_or_does_not_exist_is_refused(
    method: str, mask: int, chat_target: FrozenTarget
) -> None:
    with pytest.raises(UserError) as caught:
        build_draft(method, chat_target, ROWS, f"draft.mask_token_id={mask}")
    assert caught.value.key == "draft.mask_token_id" and caught.value.got.startswith(str(mask))
    free = parse_suggested_mask(str(caught.value))
    assert not has_token(free, ROWS) and free not in (END, USER, TURN_END)
    assert get_mask(build_draft(method, chat_target, ROWS, f"draft.mask_token_id={free}")) == free


@pytest.mark.parametrize("method", METHODS_WITH_MASKS)
def test_a_special_token_that_the_data_hold_is_refused_and_not_chosen(
    method: str, chat_target: FrozenTarget
) -> None:
    with refused("draft.mask_token_id", USER, holds="20 times"):
        build_draft(method, chat_target, ROWS, f"draft.mask_token_id={USER}")
    assert get_mask(build_draft(method, chat_target, TEXTS, f"draft.mask_token_id={USER}")) == USER
    # <|assistant|>, which these rows do not hold
    assert get_mask(build_draft(method, chat_target, ROWS)) == 2


@pytest.mark.parametrize("method", METHODS_WITH_MASKS)
def test_an_ordinary_token_that_the_data_hold_is_warned_of_with_its_count(
    method: str, chat_target: FrozenTarget, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "specdistill"):
        assert (
            get_mask(build_draft(method, chat_target, ROWS, f"draft.mask_token_id={WORD}")) == WORD
        )
        (record,) = caplog.records
        message = record.getMessage()
        assert (
            message.startswith("draft.mask_token_id: 40")
            and "40 times" in message
            and "50.00%" in message
        )
        assert not has_token(parse_suggested_mask(message), ROWS)
        caplog.clear()
        build_draft(method, chat_target, ROWS, "draft.mask_token_id=77")
        assert not caplog.records


@pytest.mark.parametrize("method", METHODS_WITH_MASKS)
def test_the_mask_of_a_draft_that_is_continued_is_checked_too_and_can_be_replaced(
    method: str, chat_target: FrozenTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for mask in (END, USER, WORD, 77):
        draft = build_draft(method, chat_target, ROWS, "draft.mask_token_id=77")
        if method == "pard":
            draft.config.pard_token = mask
        else:
            draft.config = replace(draft.config, mask_token_id=mask)
        load_method(method).save(draft, chat_target, tmp_path / str(mask))
    for mask, reason in ((END, "ends a generation"), (USER, "20 times")):
        with refused("draft.init", f"the mask {mask}", holds=reason):
            build_draft(method, chat_target, ROWS, f"draft.init={tmp_path / str(mask)}")
        keys = f"draft.init={tmp_path / str(mask)}", "draft.mask_token_id=90"
        assert get_mask(build_draft(method, chat_target, ROWS, *keys)) == 90
    assert get_mask(build_draft(method, chat_target, ROWS, f"draft.init={tmp_path / '77'}")) == 77
    assert not caplog.records
    assert (
        get_mask(build_draft(method, chat_target, ROWS, f"draft.init={tmp_path / str(WORD)}"))
        == WORD
    )
    assert (
        caplog.records[0].getMessage().startswith("draft.init: the mask 40")
        and "40 times" in caplog.text
    )


@pytest.mark.parametrize("mask", [-5, 260, "x"])
def test_an_inherited_mask_that_is_no_token_is_refused(
    mask: Any, chat_target: FrozenTarget, tmp_path: Path
) -> None:
    draft = build_draft("pard", chat_target, ROWS)
    draft.config.pard_token = mask
    load_method("pard").save(draft, chat_target, tmp_path)
    with refused("draft.init", f"the mask {mask}"):
        build_draft("pard", chat_target, ROWS, f"draft.init={tmp_path}")


def test_the_rarest_token_is_the_mask_when_the_data_hold_every_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = FrozenTarget(tiny_draft_model(4, seed=1), words("? a b c", unk_token="?"), name="full")
    assert choose_mask(target, packed_rows([[1, 1, 3, 3, 2, 0]])) == 2
    assert "occurs 1 times" in caplog.text


def test_before_the_data_are_known_no_token_of_the_chat_template_is_suggested(
    chat_target: FrozenTarget,
) -> None:
    vocabulary = chat_target.tokenizer, chat_target.eos_token_ids, chat_target.vocab_size
    # the last byte: 1 and 2 are in the template, 3 ends a generation
    assert find_free_token(*vocabulary) == 259
    assert resolve_mask(USER, *vocabulary) == USER  # whether the data hold it is not known
