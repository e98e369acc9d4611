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

MAX_PROMPT_TOKENS = 256  # A longer prompt is dropped: it would leave less room for its answer.
MIN_PROMPT_ROOM_TOKENS = 16  # A row must have room for a prompt of so many tokens.
# Tokens that the answer to a prompt is assumed to have, unless half a row is less. It decides how
# many prompts are generated. A smaller value gives more prompts than are needed, a larger one may
# give too few, which are then answered several times.
LONG_ANSWER = 200
NGRAM = 5  # words of an n-gram by which prompts are compared
# Hash functions of MinHash. More of them find near duplicates more surely, and take longer.
HASHES = 128
# Weights of the errors of MinHash: a pair that is missed, and a pair that is compared in vain. A
# missed pair weighs more, because a pair that is compared in vain only costs time.
MISSED_PAIR_WEIGHT = 0.9
EXTRA_PAIR_WEIGHT = 0.1
# Least similarity of near duplicates. It is low because prompts are short, and a single word
# changes five of their 5-grams.
NEAR_DUPLICATE_SIMILARITY = 0.5
# Prompts that are generated for each one that is wanted. If fewer of them are kept, the target is
# taken to have no more to ask.
MAX_PROMPTS_PER_WANTED = 10


@dataclass(frozen=True)
class Opening:
    """The beginning of a rendered chat template, up to where a user's content begins.

    The target continues it with a prompt as a user would write it (the "content").

    Attributes:
        ids: the tokens of the opening.
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
        """Find what a chat template writes before and after the content of a user's turn.

        The text before the content is the opening. When the target continues it, the target writes
        the content itself, that is, a user's question. Prompts are generated in this way.

        Args:
            tokenizer: the target's tokenizer, which has the chat template.
            system: a system message before the user's turn; None for none.
            end_ids: tokens that end the target's generations.
            where: the recipe key that error messages name.

        Raises:
            UserError: if the tokenizer has no chat template, or if the template does not write the
                content exactly once, unchanged and after other text.
        """
        expected = (
            "prompts of your own, a file or a Hub id, or a target.model whose chat template writes"
            " text before the user's message, because the target continues this text with a prompt"
        )
        if tokenizer.chat_template is None:
            raise UserError(
                where,
                got="self for a target whose tokenizer has no chat template",
                expected=expected,
            )

        # Render a user's turn whose content is a marker, and split the text at the marker.
        first = [] if system is None else [{"role": "system", "content": system}]
        rendered = render_chat(
            tokenizer,
            [*first, {"role": "user", "content": MARKER}],
            generation_prompt=True,
            where=where,
        )
        before, *after = rendered.split(MARKER)
        fault = None
        if len(after) != 1:
            fault = "changes, repeats or leaves out the user's message"
        elif not before.strip():
            fault = "writes no text before the user's message"
        if fault:
            raise UserError(
                where,
                got=f"self (prompts generated by the target) with a chat template that {fault}:"
                f" {shorten_text(rendered)!r}",
                expected=expected,
            )

        # Most tokenizers put a space into the token of the word that follows it. The opening must
        # not end with the space, because the target never saw it as a token of its own.
        before = before.rstrip(" ")
        closing = after[0].strip()
        opening_ids, closing_ids, after_ids = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (before, closing, after[0])
        )

        # The tokens that end a content: those that end a generation, and the first token of the
        # closing if it was added to the tokenizer's vocabulary, as `<|im_end|>` is.
        added_tokens = tokenizer.added_tokens_decoder
        content_ends = frozenset(end_ids) | (added_tokens.keys() & closing_ids[:1])

        # The tokens that must not occur in a content: special tokens, and other added tokens that
        # the opening or the closing has.
        special = {
            token
            for token in added_tokens
            if added_tokens[token].special or token in {*opening_ids, *closing_ids}
        }
        return cls(
            ids=tuple(opening_ids),
            closing=closing,
            num_tokens=len(opening_ids) + len(after_ids),
            end_ids=content_ends,
            special=content_ends | special,
        )

    def is_end(self, ids: Sequence[int]) -> bool:
        """Return whether the last of these tokens ends a content."""
        return bool(ids) and ids[-1] in self.end_ids

    def pair_with_text(self, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> CheckedAnswer:
        """Decode a generated user's message, and return it in the form that the rules check.

        Args:
            ids: the generated tokens of the message, perhaps with an end token.
            tokenizer: the target's tokenizer.
        """
        # Drop the end token from the text. A message without one was cut at the length limit.
        is_whole = self.is_end(ids)
        text = str(tokenizer.decode(ids[:-1] if is_whole else ids, skip_special_tokens=False))

        # Some templates close a turn with plain text instead of an end token. The message ends
        # where that text begins.
        if self.closing and self.closing in text:
            text = text.partition(self.closing)[0]
            is_whole = True
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return CheckedAnswer(
            Answer([*self.ids], ids, "stop" if is_whole else "length"),
            text.strip(),
            is_text=False,
            special=self.special,
        )


def generate_self_prompts(
    plan: BlockPlan, number: int, backend: Backend, answer_file: AnswerFile, more_rules: Rules
) -> tuple[list[GenerationPrompt], AnswerCounts]:
    """Have the target generate user prompts for a source `self` of the recipe.

    The tokens to generate are divided into blocks, and these prompts are for one block. A prompt is
    dropped if it is empty, too long, repeats itself, has special tokens, or is nearly the same as
    an earlier prompt of the block. If the target has too few different prompts, fewer are returned.

    Args:
        plan: the sources, settings and tokenizer of the block.
        number: the number of the source.
        backend: generates the prompts.
        answer_file: keeps the prompts on disk; prompts that are in it are not generated again.
        more_rules: more rules that prompts are filtered by.

    Returns:
        The prompts, and how many prompts were kept and dropped.
    """
    # An opening is the rendered text before a user's message. Each system message of the source has
    # an opening of its own, and the prompts use the openings in turn.
    block = plan.block
    config = plan.config
    tokenizer = plan.tokenizer
    source = plan.sources[number]
    openings = [
        Opening.from_template(tokenizer, system, plan.end_ids, source.key)
        for system in source.entry.system or (None,)
    ]
    max_prompt_length = compute_max_prompt_length(openings, config.max_length)

    # Compute how many prompts all blocks need together, and this block's share of them. The recipe
    # may set the number (`num_prompts` of the source). Otherwise each answer needs a prompt, and
    # the number of answers is estimated: the tokens to generate, divided by the assumed length of
    # an answer. That is LONG_ANSWER tokens, or half a row if that is less.
    answer_length = min(LONG_ANSWER, config.max_length // 2)
    num_answers = max(2, -(-config.regenerate.num_tokens // answer_length))
    num_prompts = source.entry.num_prompts or num_answers
    count = block.share(num_prompts)

    # A prompt is dropped by the first of these rules that it breaks. The rule on near duplicates
    # comes last, because it remembers each prompt that it checks.
    distinct_prompts = NearDuplicates()
    rules = {name: RULES[name] for name in ("empty", "truncated", "looping", "off_template")}
    rules.update(more_rules)
    rules["near_duplicate"] = lambda candidate: not distinct_prompts.add(candidate.text)

    # Generate prompts until enough of them are kept, or until the target seems to have no more.
    texts: list[str] = []
    counts = AnswerCounts()
    num_generated = 0
    max_generated = MAX_PROMPTS_PER_WANTED * count
    while len(texts) < count and num_generated < max_generated:
        # Generate as many as are missing, divided by the share that was kept so far.
        generated_per_kept = num_generated / len(texts) if texts else 1
        num_wanted = math.ceil((count - len(texts)) * generated_per_kept)
        num_wanted = min(num_wanted, max_generated - num_generated)

        # The prompts take the openings in turn. Each block starts with a different opening, because
        # a block may want fewer prompts than there are openings.
        opened = {
            f"self{number}-{place}": openings[(place + block.number) % len(openings)]
            for place in range(num_generated, num_generated + num_wanted)
        }
        contents = _generate_contents(
            plan, opened, max_prompt_length, source.entry.temperature, backend, answer_file
        )
        num_generated += num_wanted

        # Keep the prompts that break no rule.
        for name, opening in opened.items():
            candidate = opening.pair_with_text(contents[name], tokenizer)
            if len(texts) < count and counts.is_kept(candidate, rules):
                texts.append(candidate.text)
    return [_build_prompt(plan, number, text) for text in texts], counts


def _build_prompt(plan: BlockPlan, number: int, text: str) -> GenerationPrompt:
    """Build a prompt from a user's message that the target generated, to have it answered.

    Args:
        plan: the settings and the tokenizer of the block.
        number: the number of the source.
        text: the user's message.
    """
    message: Message = {"role": "user", "content": text}
    return GenerationPrompt(
        tokenize_prompt(plan.tokenizer, [message], **plan.config.generation.template),
        hash_row(build_user_row(text), plan.config.seed),
        (message,),
        source=number,
        asked=text,
    )


class NearDuplicates:
    """A set of prompts of which no two are nearly the same."""

    def __init__(self) -> None:
        from datasketch import MinHashLSH  # slow to import

        self.shingles: list[set[tuple[str, ...]]] = []
        self.bands = MinHashLSH(
            NEAR_DUPLICATE_SIMILARITY, HASHES, weights=(EXTRA_PAIR_WEIGHT, MISSED_PAIR_WEIGHT)
        )

    def add(self, prompt: str) -> bool:
        """Add a prompt unless a similar one was added before; return True if there was none.

        A prompt without words is similar to no other prompt: the result is True.
        """
        from datasketch import MinHash

        # Compare prompts by their sets of n-grams of words, called shingles. A prompt of fewer than
        # NGRAM words has one n-gram, with all its words.
        words = split_words(prompt)
        prompt_shingles = set(list_ngrams(words, min(NGRAM, max(1, len(words)))))
        if not prompt_shingles:
            return True

        # MinHash finds the earlier prompts that are probably similar. Compare each of them exactly,
        # by the Jaccard index: the n-grams that both have / the n-grams that at least one has.
        hashes = MinHash(HASHES)
        hashes.update_batch([" ".join(shingle).encode() for shingle in prompt_shingles])
        for number in self.bands.query(hashes):
            num_common = len(prompt_shingles & self.shingles[number])
            num_either = len(prompt_shingles | self.shingles[number])
            if num_common >= NEAR_DUPLICATE_SIMILARITY * num_either:
                return False

        # No earlier prompt is similar. Add this prompt, so that later prompts are compared with it.
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
    """Have the target generate users' messages, in several passes until all of them have ended.

    The backend ends a batch for all its rows at once, when only few rows have not ended. Messages
    that are unfinished then are continued together in the next pass.

    Args:
        plan: the settings of the block.
        opened: for each message's name, the opening that the message continues: the rendered text
            before a user's message.
        longest: the most tokens of a message.
        temperature: the sampling temperature.
        backend: generates the tokens.
        answer_file: keeps the tokens on disk; tokens that are in it are not generated again.

    Returns:
        The tokens of each message by its name, up to and including the token that ends it, or cut
        at about `longest` tokens.
    """
    contents: dict[str, list[int]] = {name: [] for name in opened}
    turn = 0
    unfinished = list(opened)
    while unfinished:
        # Continue every message that has not ended: the context is its opening and its tokens so
        # far. All messages may get the same number of new tokens, `room`: enough for the shortest
        # of them to reach `longest` tokens.
        room = longest - min(len(contents[name]) for name in unfinished)
        tasks: list[GenerationTask] = []
        for name in unfinished:
            context = [*opened[name].ids, *contents[name]]
            task_name = f"{name}-{turn}"
            tasks.append(
                GenerationTask(
                    task_name,
                    GenerationPrompt(context),
                    temperature,
                    plan.seed_of(task_name),
                    len(context) + room,
                )
            )
        # `tasks.__len__` tells the backend that all tasks are needed.
        pieces = [
            turns[0].token_ids if turns else []
            for _, turns in backend.generate_answers(iter(tasks), answer_file, tasks.__len__)
        ]

        # Append each new piece to its message, up to the first token that ends a message.
        for name, piece in zip(unfinished, pieces, strict=True):
            is_end = [token in opened[name].end_ids for token in piece]
            contents[name] += piece[: is_end.index(True) + 1] if any(is_end) else piece

        # Go on with the messages that have not ended, are not too long and still grow.
        unfinished = [
            name
            for name, piece in zip(unfinished, pieces, strict=True)
            if piece and not opened[name].is_end(contents[name]) and len(contents[name]) < longest
        ]
        turn += 1
    return contents


def build_user_row(text: str) -> Row:
    """Return a row with a conversation of a single message, from the user."""
    return {"text": None, "messages": [{"role": "user", "content": text}]}


def compute_max_prompt_length(openings: Sequence[Opening], max_length: int) -> int:
    """Return how many tokens a generated prompt may have, without the text of the chat template.

    The prompt and the template's text together may take half of a row. The other half is for the
    answer.

    Args:
        openings: the rendered texts before a user's message; the longest one counts.
        max_length: tokens of a row.

    Raises:
        UserError: if a prompt could have fewer than MIN_PROMPT_ROOM_TOKENS tokens.
    """
    template_tokens = max(opening.num_tokens for opening in openings)
    room = min(MAX_PROMPT_TOKENS, max_length // 2 - template_tokens)
    if room < MIN_PROMPT_ROOM_TOKENS:
        raise UserError(
            "data.max_length",
            got=max_length,
            expected=(
                f"{2 * (template_tokens + MIN_PROMPT_ROOM_TOKENS)} or more, because half of the"
                " tokens must hold a prompt and the text of its chat template"
            ),
        )
    return room
