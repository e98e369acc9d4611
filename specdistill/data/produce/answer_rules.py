"""Find answers that no draft should learn from, and count them by the first rule that they break.

- refused: the server refused the question, or the tokens of its text give another text.
- empty: there is nothing but white space.
- truncated: the length limit cut the answer. All continuations of texts are cut, and stay.
- looping: the end repeats itself.
- off_template: there are tokens before the end that only the chat template writes.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from specdistill.data.produce.blocks import Answer

# These numbers say when an answer is a loop (see `has_loop`). Lists and tables repeat a few tokens,
# too, so a loop must repeat often and over many tokens.
LONGEST_PERIOD = 64  # tokens of the longest piece that is repeated
MIN_REPETITIONS = 4  # how often the piece must come in a row
LOOP_TOKENS = 48  # tokens that the repetitions must have together


@dataclass(frozen=True)
class CheckedAnswer:
    """An answer with its text, as the rules check it.

    Attributes:
        answer: the answer.
        text: its text.
        is_text: whether it continues a text, and is no turn of a conversation.
        special: token ids that only the chat template writes.
    """

    answer: Answer
    text: str
    is_text: bool
    special: frozenset[int]

    @property
    def content(self) -> Sequence[int]:
        """The tokens of the answer without a special token that ends it."""
        ids = self.answer.token_ids
        return ids[:-1] if ids and ids[-1] in self.special else ids


def has_loop(token_ids: Sequence[int]) -> bool:
    """Return whether the end of an answer repeats itself.

    An answer loops if a piece of at most LONGEST_PERIOD tokens comes at least MIN_REPETITIONS times
    in a row at its end, over at least LOOP_TOKENS tokens.
    """
    # The end repeats with a period if it equals itself, shifted by the period.
    for period in range(1, LONGEST_PERIOD + 1):
        length = max(MIN_REPETITIONS * period, LOOP_TOKENS)
        tail = list(token_ids[-length:])
        if len(tail) == length and tail[:-period] == tail[period:]:
            return True
    return False


Rules = Mapping[str, Callable[[CheckedAnswer], bool]]  # the name of a rule -> whether it is broken

# The rules that data.regenerate.filter may list, by name.
RULES: Rules = {
    "refused": lambda candidate: candidate.answer.error is not None,
    "empty": lambda candidate: not candidate.text.strip(),
    "truncated": lambda candidate: not candidate.is_text and candidate.answer.reason == "length",
    "looping": lambda candidate: has_loop(candidate.content),
    "off_template": lambda candidate: not candidate.special.isdisjoint(candidate.content),
}


@dataclass
class AnswerCounts:
    """The counts of the answers that were kept, and of those that each rule filtered.

    Attributes:
        kept: answers that were kept.
        cut: answers in conversations that were kept although the length limit cut them.
        filtered: answers that were filtered, by the first rule that they broke.
        examples: the first answer that each rule filtered, by its end or its error, for a person to
            look at.
    """

    kept: int = 0
    cut: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def is_kept(self, candidate: CheckedAnswer, rules: Rules) -> bool:
        """Return whether an answer breaks no rule, and count it.

        An answer that breaks several rules is counted for the first of them.
        """
        for name, is_broken in rules.items():
            if is_broken(candidate):
                self.filtered[name] += 1
                self.examples.setdefault(name, candidate.answer.error or candidate.text[-200:])
                return False
        self.kept += 1
        self.cut += not candidate.is_text and candidate.answer.reason == "length"
        return True

    def add(self, counts: "AnswerCounts") -> None:
        """Add the counts of other answers. A rule that has an example already keeps it."""
        self.kept += counts.kept
        self.cut += counts.cut
        self.filtered += counts.filtered
        self.examples = {**counts.examples, **self.examples}

    def table(self) -> Table:
        """Return the counts as a table for the terminal."""
        table = Table("answers", "number", "share", "the first of them")
        total = max(1, self.kept + self.filtered.total())
        table.add_row("kept", f"{self.kept:,}", f"{self.kept / total:.1%}", "")
        if self.cut:
            table.add_row(
                "  of these cut at data.max_length",
                f"{self.cut:,}",
                f"{self.cut / self.kept:.1%}",
                "",
            )
        for name, count in self.filtered.most_common():
            table.add_row(
                name, f"{count:,}", f"{count / total:.1%}", repr(self.examples.get(name, ""))[:80]
            )
        return table
