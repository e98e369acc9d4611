"""Filter the rows of the sources that hold prompts on which a draft is measured.

Overlaps are found by word n-grams as in GPT-3 (arXiv 2005.14165, appendix C). A row overlaps a
prompt if both contain the same 13 consecutive words. Words are compared in lower case and without
punctuation. In a script that is written without spaces, each character is a word. A prompt of fewer
than 13 words overlaps a text or a turn that contains all of it. A prompt of fewer than five words
overlaps only a text or a turn that says nothing else.

The rows to filter are found once and listed in a file. An entry has the `source` and the `row`;
`of`, the suite and the prompt that it overlaps; and `shared`, the words that they have in common.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from datasets.fingerprint import Hasher

from specdistill.common.documents import read_json
from specdistill.common.errors import ResourceError, UserError, logger
from specdistill.common.progress import show_progress
from specdistill.common.project import SUITES
from specdistill.data.produce.sources import Source
from specdistill.data.rows.encoding import Row
from specdistill.data.rows.files import cache_folder, is_first_here, on_disk, silence_datasets
from specdistill.evaluation.suites.suite import Suite, load_suite
from specdistill.recipe.sections import DataConfig

VERSION = 1  # Raise it when the rules below filter equal rows differently.
SUITE_NGRAM = 13  # words that a row and a prompt must have in common, as in GPT-3
# A prompt of fewer words than this only overlaps a text or turn that says nothing else: so short a
# phrase occurs in many rows that have nothing to do with the suite.
MAX_SHORT_WORDS = 5
# Characters of scripts that are written without spaces, from Thai to Chinese.
SPACELESS_CHARACTERS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
WORD = re.compile(rf"[{SPACELESS_CHARACTERS}]|[^\W{SPACELESS_CHARACTERS}]+")

WordTuple = tuple[str, ...]


def split_words(text: str) -> list[str]:
    """Split a text into words in lower case."""
    return WORD.findall(text.lower())


def list_ngrams(words: Sequence[str], n: int) -> Iterator[WordTuple]:
    """Yield every sequence of n consecutive words (an n-gram) as a tuple."""
    # Zipping n copies of the words, shifted by 0 to n - 1, gives the n-grams.
    return zip(*(words[start:] for start in range(n)), strict=False)


class SuiteIndex:
    """An index of the prompts of suites, by which overlapping rows are found.

    It holds all n-grams of SUITE_NGRAM words of each prompt. A prompt with fewer words is in it as
    a whole. A prompt that several suites have counts for the first of them.
    """

    def __init__(self, suites: Iterable[Suite]) -> None:
        # The n-grams ("pieces") by their first MAX_SHORT_WORDS words, so that few of them have to
        # be compared at each word of a row. A piece with fewer words is its own key. Each piece has
        # the name of its prompt, `suite: id of the prompt`.
        self.pieces: dict[WordTuple, dict[WordTuple, str]] = {}
        for suite in suites:
            for row in suite.rows:
                # Of a conversation, only the user's turns are a prompt.
                texts = [row.content]
                if row.kind == "messages":
                    texts = [turn["content"] for turn in row.content if turn["role"] == "user"]
                for text in texts:
                    words = split_words(text)
                    length = min(SUITE_NGRAM, max(1, len(words)))
                    for piece in list_ngrams(words, length):
                        pieces = self.pieces.setdefault(piece[:MAX_SHORT_WORDS], {})
                        pieces.setdefault(piece, f"{suite.name}: {row.id}")

    def find_overlap(self, row: Row) -> tuple[str, str] | None:
        """Find a prompt of the suites that has enough consecutive words in common with a row.

        Args:
            row: a training row: a text, or the messages of a conversation.

        Returns:
            The first such prompt, as `suite: id of the prompt`, and the words in common; None if
            there is no such prompt.
        """
        # Each turn of a conversation is compared by itself.
        texts = (
            [row["text"]]
            if row["text"] is not None
            else [message["content"] or "" for message in row["messages"] or ()]
        )

        # `self.pieces` holds the word sequences of the prompts in groups. The sequences of a group
        # begin with the same MAX_SHORT_WORDS words, the key of the group. At each place of the
        # text, take the next MAX_SHORT_WORDS words as a key, and compare the sequences of its group
        # with the text.
        #
        # If a prompt has fewer words, its key is the whole prompt. The keys of a text have fewer
        # words only if the whole text has fewer: it is then the only key. So such a short prompt
        # matches a text of exactly the same words, but not a longer text that contains them.
        for text in texts:
            words = tuple(split_words(text))
            for start in range(max(1, len(words) - MAX_SHORT_WORDS + 1)):
                key = words[start : start + MAX_SHORT_WORDS]
                for piece, prompt_name in self.pieces.get(key, {}).items():
                    if words[start : start + len(piece)] == piece:
                        return prompt_name, " ".join(piece)
        return None


def load_suites(names: Sequence[str], measured_on: Sequence[str]) -> list[Suite]:
    """Load the suites of evaluation prompts that training rows must not overlap.

    The name `all` stands for every suite that ships with the package and every suite that the draft
    will be measured on. If one of these cannot be fetched, it is skipped with a warning.

    Args:
        names: the value of `data.decontaminate`: names of suites, or `all`.
        measured_on: the suites that the draft will be measured on.

    Returns:
        The suites. If two names have the same content, it is returned once.

    Raises:
        UserError: for a name that is no suite.
        ResourceError: for a suite that `names` lists by its own name and that cannot be fetched.
    """
    # The names that `all` stands for: the suites of the package, and those of the recipe.
    implied = (
        [*sorted(path.stem for path in SUITES.glob("*.yaml")), *measured_on]
        if "all" in names
        else []
    )

    # Load each suite. A suite that the user named must be there. A suite that only `all` stands for
    # may be missing.
    suites: dict[str, Suite] = {}
    missing: dict[str, None] = {}  # names in order, without duplicates
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
            "data.decontaminate: %s could not be fetched. Rows that overlap prompts of these suites"
            " are not removed.",
            ", ".join(missing),
        )
    return list(suites.values())


def remove_overlaps(
    sources: Sequence[Source], config: DataConfig, measured_on: Sequence[str] = ()
) -> tuple[list[Source], Counter[str]]:
    """Remove the training rows that overlap a prompt on which drafts are measured.

    The rows to remove are listed in a file in the cache. Only the call that makes the file compares
    the rows with the prompts, and logs how many rows it lists.

    Args:
        sources: the sources of training rows.
        config: the `data:` section, whose `decontaminate` names the suites of prompts.
        measured_on: the suites that the draft will be measured on.

    Returns:
        The sources without the overlapping rows, and the number of removed rows, counted under the
        name `contaminated`.

    Raises:
        UserError: if every row overlaps a prompt.
    """
    # Without rows or suites there is nothing to compare.
    suites = load_suites(config.decontaminate, measured_on)
    num_rows = sum(len(source.rows) for source in sources)
    if not num_rows or not suites:
        return list(sources), Counter()

    # The name of the file is a hash of the rows and the suites, on which the list depends.
    inputs = [[source.rows._fingerprint for source in sources], [suite.sha256 for suite in suites]]
    path = cache_folder(config.cache_dir) / "filtered" / f"{Hasher.hash([VERSION, inputs])}.json"
    if not path.exists():
        overlaps = _find_overlaps(sources, suites)

        # Another process may write the same list at the same time, so the name of the temporary
        # file contains the id of this process.
        aside = path.with_suffix(f".{os.getpid()}.part")
        with on_disk(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps(overlaps, indent=1, ensure_ascii=False) + "\n"
            aside.write_text(content, encoding="utf-8")
            os.replace(aside, path)
        if overlaps:
            # `of` names a prompt by its suite and its id, as in "suite: id".
            suite_names = [str(row["of"]).partition(":")[0] for row in overlaps]
            counts = Counter(suite_names).most_common()
            suites_note = ", ".join(f"{count:,} with prompts of {suite}" for suite, count in counts)
            logger.info(
                f"Removed {len(overlaps):,} of {num_rows:,} rows that overlap evaluation prompts"
                f" ({suites_note}); they are listed in {path}"
            )
    overlaps = read_json(path)

    # Remove the rows that are listed.
    filtered_rows = {(row["source"], row["row"]) for row in overlaps}
    kept_rows = []
    for number, source in enumerate(sources):
        kept_rows.append(
            [row for row in range(len(source.rows)) if (number, row) not in filtered_rows]
        )
    if not any(kept_rows):
        raise UserError(
            "data.source",
            got=f"{len(filtered_rows)} rows, all of which overlap an evaluation prompt (listed in"
            f" {path})",
            expected="some rows that overlap no prompt, or other suites in data.decontaminate",
        )

    # Sources that lose no row stay as they are.
    with silence_datasets():
        kept_sources = [
            source
            if len(rows) == len(source.rows)
            else replace(source, rows=source.rows.select(rows).flatten_indices())
            for source, rows in zip(sources, kept_rows, strict=True)
        ]
    # `+` leaves out a count of 0.
    return kept_sources, +Counter(contaminated=len(overlaps))


def _find_overlaps(sources: Sequence[Source], suites: Sequence[Suite]) -> list[dict[str, object]]:
    """Compare every row of the sources with the prompts of the suites.

    Returns:
        An entry for each row that overlaps a prompt: the numbers of the source and of the row, the
        suite and prompt (`of`), and the words that both contain (`shared`).
    """
    index = SuiteIndex(suites)
    overlaps: list[dict[str, object]] = []
    num_rows = sum(len(source.rows) for source in sources)
    with show_progress("Comparing", num_rows, "rows") as advance:
        for number, source in enumerate(sources):
            for position, row in enumerate(source.rows):
                overlap = index.find_overlap(row)
                if overlap:
                    prompt_name, shared_words = overlap
                    overlaps.append(
                        {
                            "source": number,
                            "row": position,
                            "of": prompt_name,
                            "shared": shared_words,
                        }
                    )
                advance()
    return overlaps
