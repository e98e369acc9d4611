"""The mask of methods that fill masks: a token that texts do not hold."""

from specdistill.methods.mask_token import mask_token
from specdistill.targets.frozen import FrozenTarget
from tests.draft_models import tiny_draft_model, words
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer


def test_a_mask_is_the_one_asked_for_a_free_row_or_a_token_that_is_never_generated() -> None:
    target = FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")
    padded = FrozenTarget(tiny_target_model(vocab_size=264), tiny_tokenizer(), name="padded")
    masked = FrozenTarget(
        tiny_draft_model(4, seed=1), words("? a b c", mask_token="b"), name="masked"
    )
    assert (mask_token(target, 7), mask_token(target, None)) == (
        7,
        3,
    )  # <|end|>, which ends no text here
    assert (mask_token(padded, None), mask_token(masked, None)) == (263, 2)


def test_a_mask_beyond_the_vocabulary_and_a_tokenizer_without_a_free_token_are_refused() -> None:
    full = FrozenTarget(tiny_draft_model(4, seed=1), words("? a b c", unk_token="?"), name="full")
    with refused("draft.mask_token_id", 4):
        mask_token(full, 4)
    with refused("draft.mask_token_id", holds="never generated"):
        mask_token(full, None)
