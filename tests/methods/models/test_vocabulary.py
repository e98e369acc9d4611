"""Vocabularies of two tokenizers are matched token by token."""

import pytest

from specdistill.methods.models.vocabulary import describe_difference, match_vocabularies
from tests.draft_models import words
from tests.refusals import refused
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize("size", [260, 264])
def test_equal_tokenizers_need_no_translation(size: int):
    assert match_vocabularies(tiny_tokenizer(), size, tiny_tokenizer(), size) is None


def test_differing_tokens_are_named_with_both_sizes():
    with refused(
        "eval.draft",
        "a draft of 5 tokens for a target of 6, with 4 differences: id 2 is 'x', the target's 'b'",
    ):
        match_vocabularies(words("? a b c d e"), 6, words("? a x y z"), 5)


def test_a_token_of_one_side_alone_is_described_as_none_on_the_other():
    assert describe_difference(words("? a"), words("? a b")) == (
        "a draft of 3 tokens for a target of 2, with 1 differences: id 2 is 'b', the target's none"
    )


def test_the_same_tokens_in_other_special_roles_are_refused_by_name():
    target, draft = (
        words("? a </s> <end>", eos_token="</s>"),
        words("? a </s> <end>", eos_token="<end>"),
    )
    difference = describe_difference(target, draft)
    assert (
        difference is not None
        and "eos_token is '<end>' (id 3), the target's '</s>' (id 2)" in difference
    )
    with refused("train.draft"):
        match_vocabularies(target, 4, draft, 4, key="train.draft")


@pytest.mark.parametrize(("target_size", "draft_size"), [(264, 260), (260, 264), (272, 264)])
def test_padded_matrices_of_equal_tokenizers_share_the_tokenizer_s_tokens(
    target_size: int, draft_size: int
):
    shared = match_vocabularies(tiny_tokenizer(), target_size, tiny_tokenizer(), draft_size)
    assert shared is not None
    assert shared.target_ids_W.tolist() == shared.draft_ids_W.tolist() == list(range(260))
    assert shared.target_vocab_size == target_size


def test_the_intersection_pairs_the_ids_of_equal_tokens():
    shared = match_vocabularies(words("? a b c"), 4, words("c ? d a"), 4, heterogeneous_vocab=True)
    assert shared is not None
    assert shared.target_ids_W.tolist() == [0, 1, 3] and shared.draft_ids_W.tolist() == [1, 3, 0]
    assert shared.encode_for_draft([2]) == [1]  # no b in the draft's vocabulary: its unknown word


def test_tokens_beyond_the_logits_are_not_shared():
    shared = match_vocabularies(words("? a b c"), 3, words("c ? b a"), 3, heterogeneous_vocab=True)
    assert shared is not None
    assert shared.target_ids_W.tolist() == [0, 2] and shared.draft_ids_W.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("replacements", "got"),
    [({"x": "a"}, "x"), ({"b c": "a"}, "b c"), ({"": "a"}, ""), ({"c": "a"}, "c")],
)
def test_a_replacement_that_is_not_of_a_target_token_is_refused(
    replacements: dict[str, str], got: str
):
    target, draft = words("? a b c"), words("c ? d a")
    with refused("eval.token_replacements", got):
        match_vocabularies(
            target, 3, draft, 4, heterogeneous_vocab=True, token_replacements=replacements
        )
    with refused("eval.token_replacements", "replacements for a draft with the target's tokenizer"):
        match_vocabularies(
            target, 4, target, 4, heterogeneous_vocab=True, token_replacements=replacements
        )


@pytest.mark.parametrize(
    ("replacements", "pairs", "read_as"),
    [
        ({"<end>": "</s>"}, {0: 0, 1: 1, 3: 2}, {2: [2]}),
        ({"a": "</s>", "<end>": "</s>"}, {0: 0, 3: 2}, {1: [2], 2: [2]}),
        ({"<end>": "</s>", "</s>": ""}, {0: 0, 1: 1, 3: 2}, {2: []}),
        ({"</s>": "", "<end>": "</s>"}, {0: 0, 1: 1, 3: 2}, {2: []}),
        ({"<end>": "a", "a": "</s>"}, {0: 0, 1: 2, 3: 1}, {2: [2]}),
    ],
)
def test_a_replacement_takes_the_place_of_the_tokens_that_shared_its_text(
    replacements, pairs, read_as
):
    """The draft's </s> is proposed as <end>, where the target has a </s> of its own."""
    target, draft = words("? a </s> <end>"), words("? a </s> b")
    shared = match_vocabularies(
        target, 4, draft, 4, heterogeneous_vocab=True, token_replacements=replacements
    )
    assert shared is not None and shared.read_as == read_as
    assert (
        dict(zip(shared.target_ids_W.tolist(), shared.draft_ids_W.tolist(), strict=True)) == pairs
    )


def test_a_replacement_by_a_token_without_logits_is_refused():
    with refused(
        "eval.token_replacements", "b for a, but b has the token id 2 in the draft's tokenizer"
    ):
        match_vocabularies(
            words("? a c"),
            3,
            words("? c b"),
            2,
            heterogeneous_vocab=True,
            token_replacements={"a": "b"},
        )


def test_vocabularies_with_nothing_in_common_are_refused():
    with refused("eval.draft"):
        match_vocabularies(words("? a"), 2, words("x y"), 2, heterogeneous_vocab=True)
