"""Rows that hold prompts a draft is measured on, found by word n-grams as in GPT-3 (arXiv 2005.14165, appendix C).

A row overlaps a prompt when 13 words in a row are in both. Words are compared in lower case and without punctuation; a character of a
script that is written without spaces is a word. A prompt of fewer words overlaps a text or turn that holds all of it, one of fewer than
five only one that says nothing else.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdistill.errors import ResourceError
from specdistill.project import SUITES
from specdistill.suites.suite import Suite, SuiteRow, check_suite, load_suite

NGRAM, SHORT = 13, 5
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Thai to Chinese
WORD = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+")

Words = tuple[str, ...]


@dataclass(frozen=True)
class Overlap:
    """prompt: its id in the suite. words: what a row has in common with it."""

    suite: str
    prompt: str
    words: str


class SuiteIndex:
    """The word n-grams of suites' prompts. A prompt that several suites hold is the first one's."""

    def __init__(self, suites: Iterable[Suite]) -> None:
        self.long: dict[Words, tuple[str, str]] = {}
        self.short: dict[Words, list[tuple[Words, tuple[str, str]]]] = {}  # by their first words
        self.shortest: dict[Words, tuple[str, str]] = {}
        for suite in suites:
            for row in suite.rows:
                for text in _said(row):
                    self._add(tuple(words(text)), (suite.name, row.id))

    def _add(self, said: Words, place: tuple[str, str]) -> None:
        if len(said) >= NGRAM:
            for ngram in ngrams(said, NGRAM):
                self.long.setdefault(ngram, place)
        elif len(said) >= SHORT:
            self.short.setdefault(said[:SHORT], []).append((said, place))
        elif said:
            self.shortest.setdefault(said, place)

    def overlap(self, row: Mapping[str, Any]) -> Overlap | None:
        """The first overlap of a row in one of the common forms of `sources`."""
        texts = [row["text"]] if row["text"] is not None else [turn["content"] for turn in row["messages"]]
        return next(filter(None, map(self._overlap, texts)), None)

    def _overlap(self, text: str) -> Overlap | None:
        said = words(text)
        if found := next(filter(self.long.__contains__, ngrams(said, NGRAM)), None):
            return Overlap(*self.long[found], " ".join(found))
        for start, first in enumerate(ngrams(said, SHORT)):
            for prompt, place in self.short.get(first, ()):
                if tuple(said[start : start + len(prompt)]) == prompt:
                    return Overlap(*place, " ".join(prompt))
        if whole := self.shortest.get(tuple(said[:SHORT])):  # which is of fewer words, so that `said` is, too
            return Overlap(*whole, " ".join(said))
        return None


def load_suites(names: Sequence[str], measured_on: Sequence[str]) -> tuple[list[Suite], list[str]]:
    """The suites of `data.decontaminate`, and the names of those that could not be fetched.

    `all` stands for every suite that ships and those that the draft will be measured on: of these, what the network does not give is
    left out. Raises UserError for a name that is none, ResourceError for a suite that is named and cannot be fetched.
    """
    implied = [*sorted(path.stem for path in SUITES.glob("*.yaml")), *measured_on] if "all" in names else []
    suites: dict[str, Suite] = {}
    missing: dict[str, None] = {}
    for name in [*(name for name in names if name != "all"), *implied]:
        check_suite(name, key="data.decontaminate")
        try:
            suite = load_suite(name)
        except ResourceError:
            if name in names:
                raise
            missing[name] = None
        else:
            suites.setdefault(suite.sha256, suite)
    return list(suites.values()), list(missing)


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def ngrams(said: Sequence[str], n: int) -> Iterator[Words]:
    return zip(*(said[start:] for start in range(n)), strict=False)


def _said(row: SuiteRow) -> list[str]:
    """What a prompt says; of a conversation what the user does."""
    if row.kind != "messages":
        return [row.content]
    return [turn["content"] for turn in row.content if turn["role"] == "user"]
