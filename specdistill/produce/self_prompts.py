"""The source `self`: prompts that the target generates itself, for a user who has none (Magpie, arXiv 2406.08464).

The chat template is cut off where a user's content begins. What the target generates from there, up to the end of the turn, is a prompt as
a user would write it. It is sampled, since greedy generation has one prompt to give.

A batch in process ends when its last rows are few; these are continued together, so that long prompts are not lost.

Of prompts that are nearly the same one is kept. They are found by MinHash (Broder 1997), and each candidate is then compared exactly: two
are as similar as the Jaccard index of their sets of word 5-grams, those that both have over those that either has. A prompt of fewer words
has one n-gram, all of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdistill.errors import UserError
from specdistill.produce.answer_rules import RULES, CheckedAnswer, Counts, Rules
from specdistill.produce.blocks import Answer, AnswerFile
from specdistill.produce.cleaning import ngrams, words
from specdistill.produce.generate import Backend
from specdistill.produce.prompts import BlockPlan, GenerationPrompt, GenerationTask
from specdistill.rows.chat import MARKER, prompt_ids
from specdistill.rows.encoding import row_hash
from specdistill.suites.conversations import render, shortened

LONGEST = 256  # tokens of a prompt
SHORTEST_ROOM = 16  # tokens that a prompt must have room for
LONG_ANSWER = 200  # tokens, or half a row: what each of the target's own prompts is assumed to give
NGRAM, HASHES = 5, 128
MISSED, ALSO_COMPARED = (
    0.9,
    0.1,
)  # weights of a pair that is missed, and of one that is compared for nothing
ALIKE = 0.5  # similarity of near duplicates: prompts are short, and a single word changes five of their 5-grams
MOST = 10  # prompts generated for each that is wanted, before the target is taken to have no more


@dataclass(frozen=True)
class Opening:
    """A chat template up to where a user's content begins.

    ids: its tokens. closing: text that follows the content; num_tokens: of the template alone. end_ids: tokens that end the content.
    special: tokens that no content holds.
    """

    ids: tuple[int, ...]
    closing: str
    num_tokens: int
    end_ids: frozenset[int]
    special: frozenset[int]

    @classmethod
    def of(
        cls, tokenizer: Any, system: str | None, end_ids: Sequence[int], where: str
    ) -> "Opening":
        """end_ids: of the target's generations. Raises UserError for a tokenizer without a template, and for a template that does not write
        the content as it is, once, after others.
        """
        expected = "prompts of your own, a file or a Hub id, or a target.model with a chat template that opens a user's turn"
        if tokenizer.chat_template is None:
            raise UserError(
                where,
                got="self for a target whose tokenizer has no chat template",
                expected=expected,
            )
        first = [] if system is None else [{"role": "system", "content": system}]
        rendered = render(tokenizer, [*first, {"role": "user", "content": MARKER}], True, where)
        before, *after = rendered.split(MARKER)
        if len(after) != 1 or not before.strip():
            got = f"self with a chat template that does not open a user's turn in {shortened(rendered)!r}"
            raise UserError(where, got=got, expected=expected)
        before, closing = (
            before.rstrip(" "),
            after[0].strip(),
        )  # content brings its own space, which would be a token of its own here
        ids, last, rest = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (before, closing, after[0])
        )
        added = tokenizer.added_tokens_decoder
        ends = frozenset(end_ids) | (added.keys() & last[:1])
        special = {
            token for token in added if added[token].special or token in ids or token in last
        }
        return cls(tuple(ids), closing, len(ids) + len(rest), ends, ends | special)

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether a content ends with these tokens."""
        return bool(ids) and ids[-1] in self.end_ids

    def checked(self, ids: list[int], tokenizer: Any) -> CheckedAnswer:
        """A content for the rules. Of a template whose turns end in plain text, that ends a prompt as well as a token does."""
        is_whole = self.ends(ids)
        text = str(tokenizer.decode(ids[:-1] if is_whole else ids, skip_special_tokens=False))
        if self.closing and self.closing in text:
            text, is_whole = text.partition(self.closing)[0], True
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return CheckedAnswer(
            Answer([*self.ids], ids, "stop" if is_whole else "length"),
            text.strip(),
            False,
            self.special,
        )


def self_prompts(
    plan: BlockPlan, number: int, backend: Backend, known: AnswerFile, more_rules: Rules
) -> tuple[list[GenerationPrompt], Counts]:
    """The block's share of a source's prompts, and what was filtered. number: the source's; more_rules: in addition to its own.

    One that is empty, not ended in LONGEST tokens or half a row, looping, with special tokens or nearly the same as an earlier one of the
    block is filtered. Fewer come of a target that has no more to say.
    """
    block, config, tokenizer, source = plan.block, plan.config, plan.tokenizer, plan.sources[number]
    systems = source.entry.system or (None,)
    openings = [Opening.of(tokenizer, system, plan.end_ids, source.key) for system in systems]
    longest = room_for_prompts(openings, config.max_length)
    answers = max(2, -(-config.regenerate.num_tokens // min(LONG_ANSWER, config.max_length // 2)))
    count = block.share(source.entry.num_prompts or answers)
    kept: list[dict[str, Any]] = []
    near = NearDuplicates()
    rules = {
        name: RULES[name] for name in ("empty", "truncated", "looping", "off_template")
    } | dict(more_rules)
    rules["near_duplicate"] = lambda it: not near.add(it.text)
    counts, num_generated = Counts(), 0
    while len(kept) < count and num_generated < MOST * count:
        wanted = math.ceil((count - len(kept)) * (num_generated / len(kept) if kept else 1))
        wanted = min(wanted, MOST * count - num_generated)
        # Openings take turns over the blocks, of which one may want fewer prompts than there are openings.
        opened = {
            f"self{number}-{place}": openings[(place + block.number) % len(openings)]
            for place in range(num_generated, num_generated + wanted)
        }
        generated = _generated(plan, opened, longest, source.entry.temperature, backend, known)
        num_generated += wanted
        for name, opening in opened.items():
            candidate = opening.checked(generated[name], tokenizer)
            if len(kept) < count and counts.keeps(candidate, rules):
                kept.append(user_row(candidate.text))
    prompts = []
    for row in kept:
        (message,) = row["messages"]
        ids = prompt_ids(tokenizer, [message], **config.regenerate.template)
        prompts.append(
            GenerationPrompt(
                ids, row_hash(row, config.seed), (message,), source=number, asked=message["content"]
            )
        )
    return prompts, counts


class NearDuplicates:
    """Prompts that are not alike."""

    def __init__(self) -> None:
        from datasketch import MinHashLSH  # slow to import

        self.shingles: list[set[tuple[str, ...]]] = []
        self.bands = MinHashLSH(ALIKE, HASHES, weights=(ALSO_COMPARED, MISSED))

    def add(self, prompt: str) -> bool:
        """Take a prompt in, unless one that was taken in is like it. One without words is like no other, and no other like it."""
        from datasketch import MinHash

        said = words(prompt)
        own = set(ngrams(said, min(NGRAM, max(1, len(said)))))
        if not own:
            return True
        hashes = MinHash(HASHES)
        hashes.update_batch([" ".join(shingle).encode() for shingle in own])
        found = (self.shingles[number] for number in self.bands.query(hashes))
        if any(len(own & other) >= ALIKE * len(own | other) for other in found):
            return False
        self.bands.insert(len(self.shingles), hashes)
        self.shingles.append(own)
        return True


def _generated(
    plan: BlockPlan,
    opened: Mapping[str, Opening],
    longest: int,
    temperature: float,
    backend: Backend,
    known: AnswerFile,
) -> dict[str, list[int]]:
    """Contents as tokens, each up to the one that ends it or `longest`. opened: by names that those of their tasks begin with."""
    found: dict[str, list[int]] = {name: [] for name in opened}
    turn, unfinished = 0, list(opened)
    while unfinished:
        room = longest - min(len(found[name]) for name in unfinished)
        tasks: list[GenerationTask] = []
        for name in unfinished:
            context, task = [*opened[name].ids, *found[name]], f"{name}-{turn}"
            tasks.append(
                GenerationTask(
                    task,
                    GenerationPrompt(context),
                    temperature,
                    plan.seed_of(task),
                    len(context) + room,
                )
            )
        made = [
            turns[0].token_ids if turns else []
            for _, turns in backend.answers(iter(tasks), known, tasks.__len__)
        ]
        for name, new in zip(unfinished, made, strict=True):
            end = next(
                (place for place, token in enumerate(new, 1) if token in opened[name].end_ids), None
            )
            found[name] += new[:end]
        unfinished = [
            name
            for name, new in zip(unfinished, made, strict=True)
            if new and not opened[name].ends(found[name]) and len(found[name]) < longest
        ]
        turn += 1
    return found


def user_row(text: str) -> dict[str, Any]:
    return {"text": None, "messages": [{"role": "user", "content": text}]}


def room_for_prompts(openings: Sequence[Opening], max_length: int) -> int:
    """Tokens that a prompt may have: with its template half of a row, of which an answer has the rest. Raises UserError for too few."""
    opened = max(opening.num_tokens for opening in openings)
    room = min(LONGEST, max_length // 2 - opened)
    if room < SHORTEST_ROOM:
        expected = f"{2 * (opened + SHORTEST_ROOM)} or more: half of it holds a prompt in its chat template"
        raise UserError("data.max_length", got=max_length, expected=expected)
    return room
