"""Answers that no draft should learn from: found by rule, and counted by the first rule that they break.

refused: the server refused the question, or the tokens of its text give another text. empty: nothing but space. truncated:
cut by the length limit (of texts all are, and stay). looping: the end repeats itself. off_template: tokens that only the chat template
writes, before the end.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from specdistill.produce.blocks import Answer

LONGEST_PERIOD, REPEATS, LOOP_TOKENS = 64, 4, 48


@dataclass(frozen=True)
class CheckedAnswer:
    """An answer with its text. special: token ids that the chat template alone writes."""

    answer: Answer
    text: str
    is_text: bool
    special: frozenset[int]

    @property
    def content(self) -> Sequence[int]:
        """Its tokens without one that ends it."""
        ids = self.answer.token_ids
        return ids[:-1] if ids and ids[-1] in self.special else ids


def loops(token_ids: Sequence[int]) -> bool:
    """Whether the end repeats a piece of up to LONGEST_PERIOD tokens, REPEATS times and over LOOP_TOKENS at least."""
    for period in range(1, LONGEST_PERIOD + 1):
        length = max(REPEATS * period, LOOP_TOKENS)
        tail = token_ids[-length:]
        if len(tail) == length and all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return True
    return False


Rules = Mapping[str, Callable[[CheckedAnswer], bool]]

# The names that data.regenerate.filter may list.
RULES: Rules = {
    "refused": lambda it: it.answer.error is not None,
    "empty": lambda it: not it.text.strip(),
    "truncated": lambda it: not it.is_text and it.answer.reason == "length",
    "looping": lambda it: loops(it.content),
    "off_template": lambda it: not it.special.isdisjoint(it.content),
}


@dataclass
class Counts:
    """How many answers were kept, and filtered by which rule; the first of each, to look at."""

    kept: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def keeps(self, candidate: CheckedAnswer, rules: Rules) -> bool:
        """Whether an answer breaks no rule; the first that it breaks is counted."""
        broken = next((name for name, breaks in rules.items() if breaks(candidate)), None)
        if broken is None:
            self.kept += 1
        else:
            self.filtered[broken] += 1
            self.examples.setdefault(broken, candidate.answer.error or candidate.text[-200:])
        return broken is None

    def add(self, other: "Counts") -> None:
        self.kept, self.filtered = self.kept + other.kept, self.filtered + other.filtered
        self.examples = {**other.examples, **self.examples}

    def table(self) -> Table:
        table = Table("answers", "number", "share", "the first of them")
        total = max(1, self.kept + self.filtered.total())
        table.add_row("kept", f"{self.kept:,}", f"{self.kept / total:.1%}", "")
        for name, count in self.filtered.most_common():
            table.add_row(
                name, f"{count:,}", f"{count / total:.1%}", repr(self.examples.get(name, ""))[:80]
            )
        return table
