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
        is_text: whether the answer continues a text. Otherwise it is a turn of a conversation.
        special: token ids that only the chat template writes.
    """

    answer: Answer
    text: str
    is_text: bool
    special: frozenset[int]

    @property
    def content(self) -> Sequence[int]:
        """The tokens of the answer, without its last token if that is a special token."""
        ids = self.answer.token_ids
        return ids[:-1] if ids and ids[-1] in self.special else ids


def has_loop(token_ids: Sequence[int]) -> bool:
    """Return whether an answer ends in a loop, in which the same piece repeats again and again.

    The answer loops if it ends with at least MIN_REPETITIONS copies of a piece of at most
    LONGEST_PERIOD tokens, and if the copies together have at least LOOP_TOKENS tokens.
    """
    # Try every length of the piece (the period). The end of the answer, of `length` tokens, repeats
    # with this period if it equals itself, shifted by the period.
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
        examples: for each rule, the end or the error of the first answer that it filtered, for a
            person to look at.
    """

    kept: int = 0
    cut: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def is_kept(self, candidate: CheckedAnswer, rules: Rules) -> bool:
        """Check an answer against the rules, count it, and return whether it is kept.

        An answer that breaks several rules is counted only for the first of them.

        Args:
            candidate: the answer with its text.
            rules: for each rule's name, a function that returns whether an answer breaks the rule.
        """
        for name, is_broken in rules.items():
            if is_broken(candidate):
                self.filtered[name] += 1
                self.examples.setdefault(name, candidate.answer.error or candidate.text[-200:])
                return False
        self.kept += 1
        # Count an answer of a conversation that the length limit cut. A continuation of a text is
        # not counted, because it always ends at the limit.
        self.cut += not candidate.is_text and candidate.answer.reason == "length"
        return True

    def add(self, counts: "AnswerCounts") -> None:
        """Add the counts of other answers to these.

        If both have an example of an answer that a rule filtered, the example here is kept.
        """
        self.kept += counts.kept
        self.cut += counts.cut
        self.filtered += counts.filtered
        self.examples = {**counts.examples, **self.examples}

    def table(self) -> Table:
        """Return a table of how many answers were kept, and how many each rule filtered."""
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
