"""The source `self`: prompts that the target generates (Magpie, arXiv 2406.08464).

It is for users who have no prompts. The chat template is cut off where a user's content begins.
What the target generates from there, up to the end of the turn, is a prompt as a user would write
it. It is sampled, because greedy generation gives only one prompt.

In this process a batch ends when few of its rows are left. These are continued together afterwards,
so that long prompts are not lost.

Of prompts that are nearly the same, one is kept. Candidates are found by MinHash (Broder 1997), and
each candidate is then compared exactly. The similarity of two prompts is the Jaccard index of their
sets of word 5-grams: the n-grams that both have, divided by those that either has. A prompt of
fewer than five words has one n-gram, which is all of its words.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from specdistill.common.errors import UserError
from specdistill.data.produce.answer_rules import RULES, AnswerCounts, CheckedAnswer, Rules
from specdistill.data.produce.blocks import Answer, AnswerFile
from specdistill.data.produce.cleaning import list_ngrams, split_words
from specdistill.data.produce.prompts import BlockPlan, GenerationPrompt, GenerationTask
from specdistill.data.produce.transformers_backend import Backend
from specdistill.data.rows.chat import MARKER, tokenize_prompt
from specdistill.data.rows.encoding import Row, hash_row
from specdistill.evaluation.suites.conversations import Message, render_chat, shorten_text

MAX_PROMPT_TOKENS = 256  # tokens of a prompt
MIN_PROMPT_ROOM_TOKENS = 16  # tokens that a prompt must have room for
# Tokens that the answer to each of the target's own prompts is assumed to have, unless half a row
# is less.
LONG_ANSWER = 200
NGRAM = 5
HASHES = 128
# Weights of the errors of MinHash: a pair that is missed, and a pair that is compared in vain.
MISSED_PAIR_WEIGHT = 0.9
EXTRA_PAIR_WEIGHT = 0.1
# Least similarity of near duplicates. It is low because prompts are short, and a single word
# changes five of their 5-grams.
NEAR_DUPLICATE_SIMILARITY = 0.5
MAX_PROMPTS_PER_WANTED = (
    10  # prompts generated for each that is wanted, before the target is taken to have no more
)


@dataclass(frozen=True)
class Opening:
    """A chat template up to where a user's content begins.

    Attributes:
        ids: its tokens.
        closing: the text that follows the content.
        num_tokens: tokens of the template without any content.
        end_ids: tokens that end the content.
        special: tokens that no content holds.
    """

    ids: tuple[int, ...]
    closing: str
    num_tokens: int
    end_ids: frozenset[int]
    special: frozenset[int]

    @classmethod
    def from_template(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None,
        end_ids: Sequence[int],
        where: str,
    ) -> "Opening":
        """Return the opening of a tokenizer's chat template.

        Args:
            tokenizer: the target's.
            system: a system message that comes first; None for none.
            end_ids: tokens that end the target's generations.
            where: the recipe key that errors name.

        Raises:
            UserError: for a tokenizer without a template, and for a template that does not write
                the content unchanged, once, after other text.
        """
        expected = (
            "prompts of your own, a file or a Hub id, or a target.model with a chat template that"
            " opens a user's turn"
        )
        if tokenizer.chat_template is None:
            raise UserError(
                where,
                got="self for a target whose tokenizer has no chat template",
                expected=expected,
            )
        # Render a user's turn with a marker as its content, to see what comes before and after it.
        first = [] if system is None else [{"role": "system", "content": system}]
        rendered = render_chat(
            tokenizer, [*first, {"role": "user", "content": MARKER}], True, where
        )
        before, *after = rendered.split(MARKER)
        if len(after) != 1 or not before.strip():
            raise UserError(
                where,
                got="self with a chat template that does not open a user's turn in"
                f" {shorten_text(rendered)!r}",
                expected=expected,
            )
        before, closing = (
            before.rstrip(" "),
            after[0].strip(),
        )  # Content brings its own space. At the end of the opening it would be a separate token.
        ids, last, rest = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (before, closing, after[0])
        )

        # The tokens that end a content, and the special tokens that must not occur in one.
        added = tokenizer.added_tokens_decoder
        ends = frozenset(end_ids) | (added.keys() & last[:1])
        special = {
            token for token in added if added[token].special or token in ids or token in last
        }
        return cls(tuple(ids), closing, len(ids) + len(rest), ends, ends | special)

    def ends(self, ids: Sequence[int]) -> bool:
        """Return whether a content ends with these tokens."""
        return bool(ids) and ids[-1] in self.end_ids

    def checked(self, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> CheckedAnswer:
        """Return a content with its text, for the rules.

        The turns of some templates end in plain text. That text ends a prompt just as an end token
        does.
        """
        is_whole = self.ends(ids)
        text = str(tokenizer.decode(ids[:-1] if is_whole else ids, skip_special_tokens=False))
        if self.closing and self.closing in text:
            text = text.partition(self.closing)[0]
            is_whole = True
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return CheckedAnswer(
            Answer([*self.ids], ids, "stop" if is_whole else "length"),
            text.strip(),
            False,
            self.special,
        )


def generate_self_prompts(
    plan: BlockPlan, number: int, backend: Backend, answer_file: AnswerFile, more_rules: Rules
) -> tuple[list[GenerationPrompt], AnswerCounts]:
    """Generate a block's share of the prompts of a source `self`.

    A prompt is filtered if it is empty, does not end within MAX_PROMPT_TOKENS tokens or half a
    row, loops, has special tokens, or is nearly the same as an earlier prompt of the block. A
    target that has no more to say gives fewer prompts.

    Args:
        plan: what the block is generated from.
        number: the number of the source.
        backend: generates the prompts.
        answer_file: the answers that are already there, to which new ones are added.
        more_rules: rules in addition to these.

    Returns:
        The prompts, and how many were kept and filtered.
    """
    block = plan.block
    config = plan.config
    tokenizer = plan.tokenizer
    source = plan.sources[number]

    # Each system message has an opening of its own, and the openings take turns.
    openings = [
        Opening.from_template(tokenizer, system, plan.end_ids, source.key)
        for system in source.entry.system or (None,)
    ]
    longest = compute_max_prompt_length(openings, config.max_length)

    # Without a number of prompts, as many as the answers need.
    answers = max(2, -(-config.regenerate.num_tokens // min(LONG_ANSWER, config.max_length // 2)))
    count = block.share(source.entry.num_prompts or answers)
    kept_prompts: list[str] = []
    near = NearDuplicates()

    # A prompt is dropped by these rules, in this order.
    rules = {
        name: RULES[name] for name in ("empty", "truncated", "looping", "off_template")
    } | dict(more_rules)
    rules["near_duplicate"] = lambda candidate: not near.add(candidate.text)
    counts = AnswerCounts()
    num_generated = 0
    while len(kept_prompts) < count and num_generated < MAX_PROMPTS_PER_WANTED * count:
        # Generate as many as are missing, divided by the share that was kept so far.
        num_wanted = math.ceil(
            (count - len(kept_prompts)) * (num_generated / len(kept_prompts) if kept_prompts else 1)
        )
        num_wanted = min(num_wanted, MAX_PROMPTS_PER_WANTED * count - num_generated)
        # Each block starts with another opening, because a block may want fewer prompts than there
        # are openings.
        opened = {
            f"self{number}-{place}": openings[(place + block.number) % len(openings)]
            for place in range(num_generated, num_generated + num_wanted)
        }
        generated = _generate_contents(
            plan, opened, longest, source.entry.temperature, backend, answer_file
        )
        num_generated += num_wanted
        for name, opening in opened.items():
            candidate = opening.checked(generated[name], tokenizer)
            if len(kept_prompts) < count and counts.is_kept(candidate, rules):
                kept_prompts.append(candidate.text)

    # The kept texts become prompts of one user's turn.
    prompts = []
    for text in kept_prompts:
        message: Message = {"role": "user", "content": text}
        prompts.append(
            GenerationPrompt(
                tokenize_prompt(tokenizer, [message], **config.generation.template),
                hash_row(build_user_row(text), config.seed),
                (message,),
                source=number,
                asked=text,
            )
        )
    return prompts, counts


class NearDuplicates:
    """A set of prompts of which no two are nearly the same."""

    def __init__(self) -> None:
        from datasketch import MinHashLSH  # slow to import

        self.shingles: list[set[tuple[str, ...]]] = []
        self.bands = MinHashLSH(
            NEAR_DUPLICATE_SIMILARITY, HASHES, weights=(EXTRA_PAIR_WEIGHT, MISSED_PAIR_WEIGHT)
        )

    def add(self, prompt: str) -> bool:
        """Add a prompt unless a similar one is there; return whether it was added.

        A prompt without words is similar to no other.
        """
        from datasketch import MinHash

        words = split_words(prompt)
        prompt_shingles = set(list_ngrams(words, min(NGRAM, max(1, len(words)))))
        if not prompt_shingles:
            return True
        hashes = MinHash(HASHES)
        hashes.update_batch([" ".join(shingle).encode() for shingle in prompt_shingles])
        neighbors = (self.shingles[number] for number in self.bands.query(hashes))
        if any(
            len(prompt_shingles & shingles)
            >= NEAR_DUPLICATE_SIMILARITY * len(prompt_shingles | shingles)
            for shingles in neighbors
        ):
            return False
        self.bands.insert(len(self.shingles), hashes)
        self.shingles.append(prompt_shingles)
        return True


def _generate_contents(
    plan: BlockPlan,
    opened: Mapping[str, Opening],
    longest: int,
    temperature: float,
    backend: Backend,
    answer_file: AnswerFile,
) -> dict[str, list[int]]:
    """Generate the contents of users' turns.

    Args:
        plan: what the block is generated from.
        opened: the opening of each content, by a name with which the names of its tasks begin.
        longest: the most tokens of a content.
        temperature: the sampling temperature.
        backend: generates the tokens.
        answer_file: the answers that are already there, to which new ones are added.

    Returns:
        The tokens of each content by its name, up to the token that ends it or up to `longest`.
    """
    ids_by_opening: dict[str, list[int]] = {name: [] for name in opened}
    turn = 0
    unfinished = list(opened)
    while unfinished:
        # Continue every content that has not ended, as far as the shortest one may be continued.
        room = longest - min(len(ids_by_opening[name]) for name in unfinished)
        tasks: list[GenerationTask] = []
        for name in unfinished:
            context = [*opened[name].ids, *ids_by_opening[name]]
            task = f"{name}-{turn}"
            tasks.append(
                GenerationTask(
                    task,
                    GenerationPrompt(context),
                    temperature,
                    plan.seed_of(task),
                    len(context) + room,
                )
            )
        new_ids_each = [
            turns[0].token_ids if turns else []
            for _, turns in backend.generate_answers(iter(tasks), answer_file, tasks.__len__)
        ]

        # Cut each new piece at the first token that ends a content.
        for name, new in zip(unfinished, new_ids_each, strict=True):
            end = next(
                (place for place, token in enumerate(new, 1) if token in opened[name].end_ids), None
            )
            ids_by_opening[name] += new[:end]

        # Go on with the contents that have not ended.
        unfinished = [
            name
            for name, new in zip(unfinished, new_ids_each, strict=True)
            if new
            and not opened[name].ends(ids_by_opening[name])
            and len(ids_by_opening[name]) < longest
        ]
        turn += 1
    return ids_by_opening


def build_user_row(text: str) -> Row:
    """Return the row of a conversation that has one turn, a user's."""
    return {"text": None, "messages": [{"role": "user", "content": text}]}


def compute_max_prompt_length(openings: Sequence[Opening], max_length: int) -> int:
    """Return how many tokens a prompt may have.

    A prompt and its template take at most half of a row, so that the answer has the rest.

    Raises:
        UserError: if that leaves fewer than MIN_PROMPT_ROOM_TOKENS tokens.
    """
    opened = max(opening.num_tokens for opening in openings)
    room = min(MAX_PROMPT_TOKENS, max_length // 2 - opened)
    if room < MIN_PROMPT_ROOM_TOKENS:
        raise UserError(
            "data.max_length",
            got=max_length,
            expected=(
                f"{2 * (opened + MIN_PROMPT_ROOM_TOKENS)} or more: half of it holds a prompt in its"
                " chat template"
            ),
        )
    return room
