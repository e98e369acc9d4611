"""The source `self`: prompts that the target generates itself, for a user who has none (Magpie, arXiv 2406.08464).

The chat template is cut off where a user's words begin. What the target generates from there, up to the end of the turn, is what a user
would say to it. It is sampled, since greedy generation has one prompt to give.

A batch ends when its last rows are few, as in `batch_generate`; these are continued together, so that long prompts are not lost.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from specdistill.data import served
from specdistill.data.answers import Answer, Answers
from specdistill.data.cache import Row
from specdistill.data.chat import opened_turn
from specdistill.data.cleaning.near_duplicates import NearDuplicates
from specdistill.data.cleaning.set_aside import RULES, Candidate, Tally
from specdistill.data.completion_server import CompletionServer
from specdistill.data.regeneration import Order, continuations
from specdistill.data.served import Task, Tokenizer
from specdistill.errors import UserError
from specdistill.processes import Crew
from specdistill.progress import progress

logger = logging.getLogger(__name__)

LONGEST = 256  # tokens of a prompt
SHORTEST_ROOM = 16  # tokens that a prompt must have room for
ALIKE = 0.5  # similarity of near duplicates: prompts are short, and a single word changes five of their 5-grams
MOST = 10  # prompts generated for each that is wanted, before the target is taken to have no more

# (contexts, most new tokens, a number for each) -> their continuations, by any means that keep them; equal arguments give equal ones.
Generate = Callable[[Sequence[Sequence[int]], int, Sequence[int]], list[list[int]]]


@dataclass(frozen=True)
class Opening:
    """A chat template up to where a user's words begin.

    ids: its tokens. closing: text that follows the words; num_tokens: without them. end_ids: tokens that end them. special: tokens that
    no words hold.
    """

    ids: tuple[int, ...]
    closing: str
    num_tokens: int
    end_ids: frozenset[int]
    special: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any, system: str | None, end_ids: Sequence[int], where: str) -> "Opening":
        """end_ids: of the target's generations. Raises UserError for a template in which no user's turn can be opened alone."""
        before, after = opened_turn(tokenizer, system, where)
        closing = after.strip()
        ids, last, rest = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, closing, after))
        added = tokenizer.added_tokens_decoder
        ends = frozenset(end_ids) | (added.keys() & last[:1])
        special = {token for token in added if added[token].special or token in ids or token in last}
        return cls(tuple(ids), closing, len(ids) + len(rest), ends, ends | special)


@dataclass
class _Prompt:
    """A prompt under way. ids: of the user's words so far."""

    opening: Opening
    ids: list[int] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        return [*self.opening.ids, *self.ids]

    @property
    def has_ended(self) -> bool:
        return bool(self.ids) and self.ids[-1] in self.opening.end_ids

    def add(self, continuation: Sequence[int]) -> None:
        """Up to the token that ends it."""
        for token in continuation:
            if not self.has_ended:
                self.ids.append(token)

    def candidate(self, tokenizer: Any) -> Candidate:
        """For the rules of `set_aside`. Of a template whose turns end in plain text, that ends a prompt as well as a token does."""
        ids, is_whole = self.ids, self.has_ended
        text = str(tokenizer.decode(ids[:-1] if is_whole else ids, skip_special_tokens=False))
        if self.opening.closing and self.opening.closing in text:
            text, is_whole = text.partition(self.opening.closing)[0], True
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = Answer(self.opening.ids, tuple(ids), "stop" if is_whole else "length", "", "", {}, {})
        return Candidate(answer, text.strip(), "", False, self.opening.special)


def self_prompts(
    openings: Sequence[Opening],
    count: int,
    longest: int,
    generate: Generate,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[Row]:
    """`count` prompts, an equal share from each opening, as rows {text, messages} with the user's words alone.

    longest: tokens of a prompt, at most LONGEST. One that is empty, not ended by then, looping, with special tokens or nearly the same as
    an earlier one is set aside, and counted in a table. Fewer come, with a warning, of a target that has no more to say.
    """
    kept: list[Row] = []
    near = NearDuplicates(ALIKE, lambda place: kept[place[1]])
    tally, num_generated = Tally("prompts"), 0

    def is_duplicate(candidate: Candidate) -> bool:
        return near.original(_row(candidate.text), (0, len(kept))) is not None

    rules = {name: RULES[name] for name in ("empty", "truncated", "looping", "off_template")} | {"duplicate": is_duplicate}
    with progress("Generating prompts", count, "prompts") as advance:
        while len(kept) < count and num_generated < MOST * count:
            wanted = math.ceil((count - len(kept)) * (num_generated / len(kept) if kept else 1))
            wanted = min(wanted, MOST * count - num_generated)
            prompts = [_Prompt(openings[number % len(openings)]) for number in range(num_generated, num_generated + wanted)]
            _finish(prompts, longest, num_generated, generate)
            num_generated += wanted
            for prompt in prompts:
                candidate = prompt.candidate(tokenizer)
                if len(kept) < count and tally.judge(candidate, rules):
                    kept.append(_row(candidate.text))
                    advance(1)
    Console(stderr=True).print(tally.table())
    if len(kept) < count:
        logger.warning(
            "data.source: self gave %d of %d prompts: of %d all others are set aside", len(kept), count, num_generated
        )
    yield from kept


def _finish(prompts: Sequence[_Prompt], longest: int, first: int, generate: Generate) -> None:
    """Continue prompts until each has ended or has `longest` tokens. first: the number of the first of them, among all."""
    numbers = list(range(len(prompts)))
    while numbers:
        under_way = [prompts[number] for number in numbers]
        room = longest - min(len(prompt.ids) for prompt in under_way)
        made = generate([prompt.context for prompt in under_way], room, [first + number for number in numbers])
        for prompt, continuation in zip(under_way, made, strict=True):
            prompt.add(continuation)
        more = {number for number, continuation in zip(numbers, made, strict=True) if continuation}
        numbers = [it for it in numbers if it in more and not prompts[it].has_ended and len(prompts[it].ids) < longest]


def _row(text: str) -> Row:
    return {"text": None, "messages": [{"role": "user", "content": text}]}


def in_process(
    crew: Crew, answers: Answers, end_ids: Sequence[int], temperature: float, *, name: str, batch_size: int, seed: int
) -> Generate:
    """Generation by processes that are `generating`. name: the target's."""

    def generate(contexts: Sequence[Sequence[int]], max_new_tokens: int, numbers: Sequence[int]) -> list[list[int]]:
        orders = []
        for begin in range(0, len(contexts), batch_size):
            batch = [list(context) for context in contexts[begin : begin + batch_size]]
            own = seed * 1_000_003 + numbers[begin]
            orders.append(Order(batch, [temperature] * len(batch), max_new_tokens, sorted(end_ids), own))
        return continuations(orders, crew, answers, name)

    return generate


def by_servers(
    servers: Sequence[CompletionServer],
    answers: Answers,
    tokenizer: Tokenizer,
    temperature: float,
    *,
    concurrency: int,
    seed: int,
) -> Generate:
    """Generation by servers; of what they refuse the continuation is empty."""

    def generate(contexts: Sequence[Sequence[int]], max_new_tokens: int, numbers: Sequence[int]) -> list[list[int]]:
        tasks = (
            Task(place, (), tuple(context), temperature, seed * 1_000_003 + number, len(context) + max_new_tokens, 0)
            for place, (context, number) in enumerate(zip(contexts, numbers, strict=True))
        )
        made = served.generate(tasks, servers, answers, tokenizer, concurrency=concurrency)
        return [list(turns[0].answer.token_ids) for _, turns in made]

    return generate


def room_for_prompts(openings: Sequence[Opening], max_length: int) -> int:
    """Tokens that a prompt may have: with its template half of a row, of which an answer has the rest. Raises UserError for too few."""
    opened = max(opening.num_tokens for opening in openings)
    room = min(LONGEST, max_length // 2 - opened)
    if room < SHORTEST_ROOM:
        expected = f"{2 * (opened + SHORTEST_ROOM)} or more: half of it holds a prompt in its chat template"
        raise UserError("data.max_length", got=max_length, expected=expected)
    return room
