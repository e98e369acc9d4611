"""Generation by servers that speak OpenAI's API: the assistant's turns of conversations, and continuations of texts.

A server is sent token ids, rendered here by the target's own chat template, and gives token ids back where it can (vLLM, SGLang,
llama.cpp); of others the text is tokenised, and must come out as it was. So what is trained on is what was generated, thoughts included,
and each turn of the assistant is generated after the ones before it, in the context that the template makes of them.

Every server has as many threads as it may have requests in flight. All of them take from one queue: servers share the work as fast as
they are, and what one does not answer another does. An answer is on disk before the next question is asked (specdistill.data.answers).
"""

import itertools
import json
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from specdistill.cost import Cost
from specdistill.data.answers import Answer, Answers, Question, digest
from specdistill.data.cache import Row
from specdistill.data.chat import Message, render
from specdistill.data.cleaning.set_aside import RULES, Candidate, Tally
from specdistill.data.completion_server import CompletionServer, UnavailableError
from specdistill.data.regeneration import Prompt, repeated, row_lengths
from specdistill.engines.server import PLAIN_SAMPLING
from specdistill.errors import ResourceError, UserError
from specdistill.progress import progress

logger = logging.getLogger(__name__)

SAMPLING = {**PLAIN_SAMPLING, "repeat_penalty": 1.0}  # llama.cpp's word for the repetition penalty
POLL_SECONDS = 0.1
FIRST_ANSWERS = 64  # new ones, that say what the others will cost
MOST_BARREN = 1000  # tasks in a row of which nothing is kept, before it is no longer chance


@dataclass(frozen=True)
class Task:
    """What is generated from. messages: a conversation, whose assistant's turns are generated anew, or one after its end where it has none;
    or ids: the first tokens of a text. number: its place among the results. max_length: of a context with its answer, in tokens.
    source: its place in data.source.
    """

    number: int
    messages: tuple[Message, ...]
    ids: tuple[int, ...]
    temperature: float
    seed: int
    max_length: int
    source: int


def tasks(prompts: Sequence[Prompt], temperatures: Sequence[float], max_length: int, seed: int) -> Iterator[Task]:
    """Every prompt at every temperature, then again at those above 0 with another seed each time (`repeated`)."""
    mixed = random.Random(seed).sample(prompts, len(prompts))
    texts = [prompt for prompt in prompts if not prompt.is_chat]
    lengths = itertools.cycle(row_lengths(max_length, len(texts[0].ids)) if texts else [max_length])
    for number, (prompt, temperature) in enumerate(repeated(mixed, temperatures)):
        length = max_length if prompt.is_chat else next(lengths)
        yield Task(number, prompt.messages, tuple(prompt.ids), temperature, seed + number // len(mixed), length, prompt.source)


class Queue:
    """Tasks for several threads. One that is put back is taken first, so a thread waits for those that others have in hand."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks, self._returned, self._in_hand = tasks, deque[Task](), 0
        self._changed, self._stopped = threading.Condition(), False

    def take(self) -> Task | None:
        """None when all are finished, or the queue was stopped."""
        with self._changed:
            while not self._stopped:
                task = self._returned.popleft() if self._returned else next(self._tasks, None)
                if task is not None:
                    self._in_hand += 1
                    return task
                if not self._in_hand:
                    return None
                self._changed.wait()
            return None

    def give(self, task: Task, *, back: bool) -> None:
        """A task that was taken: finished, or to be taken by another thread."""
        with self._changed:
            self._in_hand -= 1
            if back:
                self._returned.append(task)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class Tokenizer:
    """Contexts and answers as token ids. One thread at a time: fast tokenizers are not safe for several."""

    def __init__(self, tokenizer: Any, end_ids: Sequence[int], template: dict[str, Any]) -> None:
        self.end_ids, self.special, self.template = frozenset(end_ids), frozenset(tokenizer.all_special_ids), template
        # Which of several ended an answer its text does not say: the tokenizer's own ends a turn. A server may know more of them.
        self._end = tokenizer.eos_token_id if tokenizer.eos_token_id in self.end_ids else next(iter(sorted(self.end_ids)), None)
        self._tokenizer, self._lock = tokenizer, threading.Lock()

    def context(self, messages: Sequence[Message]) -> tuple[int, ...]:
        with self._lock:
            rendered = render(self._tokenizer, messages, True, **self.template)
            return tuple(self._tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])

    def text(self, token_ids: Sequence[int]) -> str:
        """Of an answer, without the token that ended it."""
        with self._lock:
            kept = token_ids[:-1] if token_ids and token_ids[-1] in self.end_ids else token_ids
            return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def answer(self, choice: dict[str, Any]) -> tuple[int, ...] | None:
        """The token ids of a choice, with the one that ended it; None where its text does not come out of the tokenizer as it went in."""
        ids = choice.get("token_ids") or choice.get("tokens")
        if not ids:
            with self._lock:
                ids = self._tokenizer(choice["text"], add_special_tokens=False, verbose=False)["input_ids"]
                if self._tokenizer.decode(ids, skip_special_tokens=False) != choice["text"]:
                    return None
        lacks_end = choice.get("finish_reason") == "stop" and not (ids and ids[-1] in self.end_ids | self.special)
        return (*ids, self._end) if lacks_end and self._end is not None else tuple(ids)


@dataclass(frozen=True)
class Turn:
    """A context and the answer to it."""

    prompt_ids: tuple[int, ...]
    answer: Answer


def generate(
    tasks: Iterator[Task],
    servers: Sequence[CompletionServer],
    answers: Answers,
    tokenizer: Tokenizer,
    *,
    concurrency: int,
    on_tokens: Callable[[int], object] = lambda count: None,
) -> Iterator[tuple[Task, list[Turn]]]:
    """Each task with its turns, in the order of the numbers 0, 1, …, however the servers take turns.

    Answers that are known are not asked for again. Ends when its reader does; what is in flight then is finished and kept.
    Raises ResourceError when no server answers any more.
    """
    queue, stopping, done = Queue(tasks), threading.Event(), dict[int, tuple[Task, list[Turn]]]()
    given_up: dict[str, str] = {}

    def work(server: CompletionServer) -> None:
        while (task := queue.take()) is not None:
            finished = False
            try:
                done[task.number] = task, converse(server, task, answers, tokenizer, on_tokens)
                finished = True
            except UnavailableError as error:
                if not server.failed(error):
                    given_up[server.address] = str(error)
                    return
            finally:
                queue.give(task, back=not finished)
            server.pause(stopping)

    with ThreadPoolExecutor(len(servers) * concurrency) as pool:
        working: set[Future[None]] = {pool.submit(work, server) for _ in range(concurrency) for server in servers}
        try:
            for number in itertools.count():
                while number not in done and working:
                    finished, working = wait(working, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    for future in finished:
                        future.result()
                if number not in done:
                    break
                yield done.pop(number)
        finally:
            stopping.set()
            queue.stop()
    if given_up and len(given_up) == len(servers):
        why = "; ".join(f"{address}: {error}" for address, error in given_up.items())[:400]
        next_step = "start them again: what was generated is kept, and the same command goes on"
        raise ResourceError(f"no server answers any more ({why})", next_step=next_step)


def converse(
    server: CompletionServer,
    task: Task,
    answers: Answers,
    tokenizer: Tokenizer,
    on_tokens: Callable[[int], object],
) -> list[Turn]:
    """The turns of a task, each after the ones before it. It ends early with an answer that is no complete turn.

    What the server has against a question is not kept: another server, or the same one started otherwise, may answer it.
    """
    turns: list[Turn] = []
    told: list[Message] = []
    for number, before in enumerate(_contexts(task.messages)):
        told += before
        context = tokenizer.context(told) if task.messages else task.ids
        if len(context) >= task.max_length:
            break
        question = Question(digest(context), number, task.temperature, task.seed)
        answer = answers.get(question)
        if answer is None:
            answer = ask(server, context, question, tokenizer, task.max_length - len(context))
            if answer.error is None:
                answers.add(question, answer)
        on_tokens(len(answer.token_ids))
        turns.append(Turn(context, answer))
        if answer.error or answer.reason != "stop":
            break
        told.append({"role": "assistant", "content": tokenizer.text(answer.token_ids)})
    return turns


def _contexts(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """What is told before each of the assistant's turns since the turn before it; once more at the end, unless the assistant ends it."""
    told: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            yield told
            told = []
        else:
            told.append(message)
    if told or not messages:
        yield told


def ask(
    server: CompletionServer, context: tuple[int, ...], question: Question, tokenizer: Tokenizer, max_tokens: int
) -> Answer:
    """One answer. Raises UnavailableError when the server may give it later."""
    body = {
        "model": server.model,
        "prompt": list(context),
        "max_tokens": max_tokens,
        "temperature": question.temperature,
        "seed": question.seed,
        **SAMPLING,
        "skip_special_tokens": False,
        "return_token_ids": True,  # vLLM, SGLang
        "return_tokens": True,  # llama.cpp
    }
    found = server.complete(body)
    facts: dict[str, Any] = {
        "prompt_ids": context,
        "server": server.address,
        "template": tokenizer.template,
        "sampling": SAMPLING,
    }
    if isinstance(found, str):
        return Answer(token_ids=(), reason="refused", model=server.model, error=found, **facts)
    (choice, *_), model = found["choices"], str(found.get("model", server.model))
    ids, reason = tokenizer.answer(choice), str(choice.get("finish_reason"))
    error = None if ids is not None else f"text that is tokenised otherwise: {json.dumps(choice['text'][:80])}"
    return Answer(token_ids=ids or (), reason=reason, model=model, error=error, **facts)


def documents(turns: Sequence[Turn], *, all_tokens: bool) -> list[Row]:
    """Rows {input_ids, loss_mask, length} of a start's turns. Turns whose contexts continue one another share a row. Loss is on answers, or
    on all tokens.
    """
    rows: list[tuple[list[int], list[int]]] = []
    for turn in turns:
        ids, mask = rows[-1] if rows else ([], [])
        if list(turn.prompt_ids[: len(ids)]) != ids or not ids:
            ids, mask = [], []
            rows.append((ids, mask))
        told = turn.prompt_ids[len(ids) :]
        ids += [*told, *turn.answer.token_ids]
        mask += [int(all_tokens)] * len(told) + [1] * len(turn.answer.token_ids)
    return [{"input_ids": ids, "loss_mask": mask, "length": len(ids)} for ids, mask in rows]


def served_rows(
    tasks: Iterator[Task],
    servers: Sequence[CompletionServer],
    answers: Answers,
    tokenizer: Tokenizer,
    num_tokens: int,
    rules: Sequence[str],
    *,
    concurrency: int,
    loss_mask: str = "assistant",
    announced: Callable[[Cost, str], object] = lambda cost, sample: None,
) -> Iterator[Row]:
    """`num_tokens` generated tokens or a few more, as rows {input_ids, loss_mask, length, source}: those of the first tasks that give them.

    An answer that breaks a rule is left out, with what was said after it. Prints how many were, and saves it beside the answers.
    announced: is told once, after the first answers, what the rest and these cost, and the sample that says so.
    Raises UserError when all of them are.
    """
    tally, total, barren, is_announced = Tally(), 0, 0, False
    asked_of = {name: RULES[name] for name in rules}
    with answers, progress("Generating training data", num_tokens, "tokens") as advance:
        for task, turns in generate(tasks, servers, answers, tokenizer, concurrency=concurrency, on_tokens=advance):
            is_text = not task.messages
            candidates = (_candidate(turn, tokenizer, is_text) for turn in turns)
            num_kept = sum(1 for _ in itertools.takewhile(lambda candidate: tally.judge(candidate, asked_of), candidates))
            kept = turns[:num_kept]
            for row in documents(kept, all_tokens=is_text or loss_mask == "all"):
                yield {**row, "source": task.source}
            total += sum(len(turn.answer.token_ids) for turn in kept)
            barren = 0 if kept else barren + 1
            if not is_announced and answers.added.rows >= FIRST_ANSWERS and total:
                is_announced, added = True, answers.added
                useful = tally.kept / (tally.kept + tally.aside.total())
                rest = max(0, num_tokens - total) / ((added.loss_tokens or 1) * useful)
                announced(added.times(1 + rest), f"{added.rows:,.0f} answers in {added.seconds:.1f} s")
            if total >= num_tokens or barren == MOST_BARREN:
                break
    tally.save(answers.folder / "set_aside.json")
    Console(stderr=True).print(tally.table())
    for server in servers:
        logger.info("%s gave %d answers", server.address, server.num_answers)
    if barren == MOST_BARREN:
        got = f"rules that {MOST_BARREN} answers in a row broke, most of all {tally.aside.most_common(1)[0][0]}"
        raise UserError(
            "data.regenerate.set_aside", got=got, expected="some to keep: the table above shows what they look like"
        )
    if total < num_tokens:
        logger.warning("the prompts of data.source were used up after %d of %d tokens", total, num_tokens)


def _candidate(turn: Turn, tokenizer: Tokenizer, is_text: bool) -> Candidate:
    answer = turn.answer
    return Candidate(answer, tokenizer.text(answer.token_ids), tokenizer.text(turn.prompt_ids), is_text, tokenizer.special)
