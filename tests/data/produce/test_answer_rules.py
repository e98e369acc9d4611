"""Rules that filter answers: each drops the fault that names it, and no ordinary answer."""

from collections.abc import Sequence
from typing import Any, get_args

import pytest

from specdistill.data.produce.answer_rules import RULES, AnswerCounts, CheckedAnswer, has_loop
from specdistill.data.produce.blocks import Answer
from specdistill.recipe.sections import AnswerRule

ORDINARY = "The loop adds each number to the sum, and then the function returns it to its caller."


def check_answer(
    text: str = ORDINARY, ids: Sequence[int] = range(40, 90), is_text: bool = False, **answer: Any
) -> CheckedAnswer:
    made = Answer(**{"context": [1], "token_ids": list(ids), "reason": "stop", **answer})
    return CheckedAnswer(made, text, is_text, frozenset({1, 2, 3}))


def test_recipes_can_name_every_rule() -> None:
    assert get_args(AnswerRule) == (*RULES,)


@pytest.mark.parametrize(
    ("rule", "made"),
    [
        ("refused", check_answer(error="400 too long")),
        ("empty", check_answer(text=" \n")),
        ("truncated", check_answer(reason="length")),
        ("looping", check_answer(ids=(*range(40, 80), *[7, 8, 9] * 20, 3))),
        ("off_template", check_answer(ids=(40, 2, 41, 3))),
    ],
)
def test_a_rule_drops_the_fault_that_it_is_named_after(rule: str, made: CheckedAnswer) -> None:
    counts = AnswerCounts()
    assert not counts.is_kept(made, RULES) and counts.filtered == {rule: 1}
    assert AnswerCounts().is_kept(
        made, {name: breaks for name, breaks in RULES.items() if name != rule}
    )


@pytest.mark.parametrize(
    "made",
    [
        check_answer(),
        check_answer(reason="length", is_text=True),  # a text is cut on purpose
        check_answer(ids=(*range(40, 90), 3)),  # ends as the template does
        check_answer(text="да"),
        check_answer(text="He said: 你好, which means hello; it is the usual greeting."),
    ],
)
def test_ordinary_answers_are_kept(made: CheckedAnswer) -> None:
    assert AnswerCounts().is_kept(made, RULES)


def test_a_loop_is_long_and_at_the_end() -> None:
    assert not has_loop([7] * 47)
    assert has_loop([7] * 48)
    assert not has_loop([*[7] * 60, 8])
    period = [*range(30)]
    assert not has_loop(period * 3 + [99]) and has_loop(period * 4)


def test_counts_add_up_with_their_first_examples() -> None:
    several = [AnswerCounts(), AnswerCounts()]
    answers = (
        check_answer(),
        check_answer(text="", ids=()),
        check_answer(error="400 long"),
        check_answer(),
    )
    for counts, answer in zip(several * 2, answers, strict=True):
        counts.is_kept(answer, RULES)
    several[0].add(several[1])
    assert (several[0].kept, several[0].filtered) == (2, {"refused": 1, "empty": 1})
    assert (
        several[0].examples == {"refused": "400 long", "empty": ""}
        and several[0].table().row_count == 3
    )
