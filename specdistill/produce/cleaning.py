"""Rows of the sources that are not trained on: those that hold prompts a draft is measured on.

Prompts are found by word n-grams as in GPT-3 (arXiv 2005.14165, appendix C): a row overlaps a prompt when 13 words in a row are in both.
Words are compared in lower case and without punctuation; a character of a script that is written without spaces is a word. A prompt of
fewer words overlaps a text or turn that holds all of it, one of fewer than five only one that says nothing else.

What is filtered is found once, and listed in a file: source and row; `of`, the suite and prompt that it overlaps; `shared`, their words in
common.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasets.fingerprint import Hasher

from specdistill.errors import ResourceError, UserError, logger
from specdistill.files.documents import read_json
from specdistill.produce.sources import Source
from specdistill.progress import progress
from specdistill.project import SUITES
from specdistill.recipe.sections import DataConfig
from specdistill.rows.files import cache_folder, is_first_here, on_disk, quiet
from specdistill.suites.suite import Suite, load_suite

VERSION = 1  # of the rules below: raise it when equal rows are filtered differently
SUITE_NGRAM, SHORT = 13, 5
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Thai to Chinese
WORD = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+")

WordTuple = tuple[str, ...]


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def ngrams(words: Sequence[str], n: int) -> Iterator[WordTuple]:
    return zip(*(words[start:] for start in range(n)), strict=False)


class SuiteIndex:
    """The word n-grams of suites' prompts, and shorter prompts whole. One that several suites hold is the first one's."""

    def __init__(self, suites: Iterable[Suite]) -> None:
        self.pieces: dict[
            WordTuple, dict[WordTuple, str]
        ] = {}  # by their first SHORT words, or all of fewer
        for suite in suites:
            for row in suite.rows:
                texts = [row.content]
                if row.kind == "messages":
                    texts = [turn["content"] for turn in row.content if turn["role"] == "user"]
                for prompt in map(words, texts):
                    for piece in ngrams(prompt, min(SUITE_NGRAM, max(1, len(prompt)))):
                        self.pieces.setdefault(piece[:SHORT], {}).setdefault(
                            piece, f"{suite.name}: {row.id}"
                        )

    def overlap(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        """(`suite: prompt`, the words in common) of the first overlap of a row in one of the common forms of `sources`."""
        texts = (
            [row["text"]]
            if row["text"] is not None
            else [turn["content"] or "" for turn in row["messages"]]
        )
        for own in map(tuple, map(words, texts)):
            for start in range(
                max(1, len(own) - SHORT + 1)
            ):  # a piece of fewer words is found only where it is all of `own`
                for piece, place in self.pieces.get(own[start : start + SHORT], {}).items():
                    if own[start : start + len(piece)] == piece:
                        return place, " ".join(piece)
        return None


def load_suites(names: Sequence[str], measured_on: Sequence[str]) -> list[Suite]:
    """The suites of `data.decontaminate`, with which rows are compared; warns of those that could not be fetched.

    `all` stands for every suite that ships and those that the draft will be measured on: of these, what the network does not give is
    skipped. Raises UserError for a name that is none, ResourceError for a suite that is named and cannot be fetched.
    """
    implied = (
        [*sorted(path.stem for path in SUITES.glob("*.yaml")), *measured_on]
        if "all" in names
        else []
    )
    suites: dict[str, Suite] = {}
    missing: dict[str, None] = {}
    for name in [*(name for name in names if name != "all"), *implied]:
        try:
            suite = load_suite(name, key="data.decontaminate")
        except ResourceError:
            if name in names:
                raise
            missing[name] = None
        else:
            suites.setdefault(suite.sha256, suite)
    if missing and is_first_here():
        logger.warning(
            "data.decontaminate: %s could not be fetched, and no row is compared with them",
            ", ".join(missing),
        )
    return list(suites.values())


def cleaned(
    sources: Sequence[Source], config: DataConfig, measured_on: Sequence[str] = ()
) -> tuple[list[Source], Counter[str]]:
    """The sources without the rows that overlap a prompt of the suites, and how many these are by the rule.

    Their fingerprints change with what is filtered. When rows are first filtered so, prints how many they are, and where they are listed.
    Raises UserError if all are.
    """
    suites = load_suites(config.decontaminate, measured_on)
    num_rows = sum(len(source.rows) for source in sources)
    if not num_rows or not suites:
        return list(sources), Counter()
    inputs = [[source.rows._fingerprint for source in sources], [suite.sha256 for suite in suites]]
    path = cache_folder(config.cache_dir) / "filtered" / f"{Hasher.hash([VERSION, inputs])}.json"
    if not path.exists():
        index, found = SuiteIndex(suites), list[dict[str, Any]]()
        with progress("Comparing", num_rows, "rows") as advance:
            for number, source in enumerate(sources):
                for position, row in enumerate(source.rows):
                    if overlap := index.overlap(row):
                        found.append(
                            {
                                "source": number,
                                "row": position,
                                "of": overlap[0],
                                "shared": overlap[1],
                            }
                        )
                    advance()
        aside = path.with_suffix(f".{os.getpid()}.part")
        with on_disk(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(
                json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            os.replace(aside, path)
        if found:
            of = Counter(row["of"].partition(":")[0] for row in found).most_common()
            holds = ", ".join(f"{count:,} with prompts of {suite}" for suite, count in of)
            logger.info(
                f"{len(found):,} of {num_rows:,} rows are filtered ({holds}), listed in {path}"
            )
    found = read_json(path)
    gone = {(row["source"], row["row"]) for row in found}
    kept = [
        [row for row in range(len(source.rows)) if (number, row) not in gone]
        for number, source in enumerate(sources)
    ]
    if not any(kept):
        expected = "rows that overlap no suite, or other data.decontaminate"
        raise UserError(
            "data.source",
            got=f"{len(gone)} rows that are all filtered (see {path})",
            expected=expected,
        )
    with quiet():
        return [
            source
            if len(rows) == len(source.rows)
            else replace(source, rows=source.rows.select(rows).flatten_indices())
            for source, rows in zip(sources, kept, strict=True)
        ], +Counter(contaminated=len(found))
