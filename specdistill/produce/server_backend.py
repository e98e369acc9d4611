"""Generation by servers that speak OpenAI's API: the assistant's turns of conversations, and continuations of texts.

A server is sent token ids, rendered here by the target's own chat template, and gives token ids back where it can (vLLM, SGLang,
llama.cpp); of others the text is tokenised, and must come out as it was. So what is trained on is what was generated, thoughts included,
and each turn of the assistant is generated in the context that the template makes of those before it: as they are recorded, or, of
questions alone, as they were generated.

A thread for each request that may be in flight asks the server that has most room: servers share the work as fast as they are, and what
one does not answer another does. A task's answers are on disk before its thread takes another.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from specdistill.engines.completions import Choice, CompletionServer, UnavailableError
from specdistill.engines.vllm import PLAIN_SAMPLING
from specdistill.errors import ResourceError, logger
from specdistill.produce.blocks import Answer, AnswerFile
from specdistill.produce.prompts import GenerationTask
from specdistill.rows.chat import prompt_ids
from specdistill.rows.server_states import OF_OUTPUT, take
from specdistill.suites.conversations import Message, Tools, is_unanswered

SAMPLING = {**PLAIN_SAMPLING, "repeat_penalty": 1.0}  # llama.cpp's word for the repetition penalty


class ServerTokenizer:
    """Contexts and answers as token ids. One thread at a time: fast tokenizers are not safe for several."""

    def __init__(self, tokenizer: Any, end_ids: Sequence[int], template: dict[str, Any]) -> None:
        self.end_ids, self.special, self.template = (
            frozenset(end_ids),
            frozenset(tokenizer.all_special_ids),
            template,
        )
        # Which of several ended an answer its text does not say: the tokenizer's own ends a turn. A server may know more of them.
        self._end = (
            tokenizer.eos_token_id
            if tokenizer.eos_token_id in self.end_ids
            else next(iter(sorted(self.end_ids)), None)
        )
        self._tokenizer, self._num_ids, self._lock = tokenizer, len(tokenizer), threading.Lock()

    def context(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        with self._lock:
            return prompt_ids(self._tokenizer, messages, tools, **self.template)

    def text(self, token_ids: Sequence[int]) -> str:
        """Of an answer, without the token that ended it."""
        with self._lock:
            kept = token_ids[:-1] if token_ids and token_ids[-1] in self.end_ids else token_ids
            return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def answer(self, choice: Choice) -> list[int] | None:
        """The token ids of a choice, with the one that ended it; None where the tokenizer lacks one, or gives its text as another text."""
        ids = choice.token_ids or choice.tokens
        if not ids:
            with self._lock:
                ids = self._tokenizer(choice.text, add_special_tokens=False, verbose=False)[
                    "input_ids"
                ]
                if self._tokenizer.decode(ids, skip_special_tokens=False) != choice.text:
                    return None
        if max(ids, default=0) >= self._num_ids:
            return None
        lacks_end = choice.finish_reason == "stop" and not (
            ids and ids[-1] in self.end_ids | self.special
        )
        return [*ids, self._end] if lacks_end and self._end is not None else list(ids)


class ServerBackend:
    """Servers with up to `concurrency` requests in flight to each, for several blocks at once.

    Raises ResourceError when no server answers any more.
    """

    def __init__(
        self, servers: Sequence[CompletionServer], tokenizer: ServerTokenizer, concurrency: int
    ) -> None:
        self.servers, self.tokenizer, self.concurrency = servers, tokenizer, concurrency
        self._in_flight = dict.fromkeys(servers, 0)
        self._given_up: dict[CompletionServer, str] = {}
        self._changed, self._is_stopped = threading.Condition(), False

    def __enter__(self) -> "ServerBackend":
        self._pool = ThreadPoolExecutor(len(self.servers) * self.concurrency)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """What is in flight is finished and kept, unless the user interrupts."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        try:
            self._pool.shutdown(wait=kind is not KeyboardInterrupt, cancel_futures=True)
        finally:
            for server in self.servers:
                server.server.close()
                logger.info("%s gave %d answers", server.address, server.num_answers)

    def answers(
        self, tasks: Iterator[GenerationTask], known: AnswerFile, wanted: Callable[[], int]
    ) -> Generator[tuple[GenerationTask, list[Answer]]]:
        """As `generate.TransformersBackend.answers`."""
        asked: deque[tuple[GenerationTask, Future[list[Answer]]]] = deque()
        most = len(self.servers) * self.concurrency
        try:
            while True:
                while len(asked) < max(1, min(most, wanted())) and (task := next(tasks, None)):
                    asked.append((task, self._pool.submit(self._answered, task, known)))
                if not asked:
                    return
                task, future = asked[0]
                yield task, future.result()
                asked.popleft()
        finally:
            running = [future for _, future in asked if not future.cancel()]
            for future in running:
                future.exception()

    def _answered(self, task: GenerationTask, known: AnswerFile) -> list[Answer]:
        """The turns of a task; what a server has against a question is not kept: another one may answer it."""
        if (turns := known.turns.get(task.name)) is not None:
            return turns
        while True:
            server = self._take()
            try:
                turns = converse(server, task, self.tokenizer)
                if all(turn.error is None for turn in turns):
                    known.add({task.name: turns})
                return turns
            except UnavailableError as error:
                if not server.failed(error):
                    with self._changed:
                        self._given_up[server] = str(error)
            finally:
                with self._changed:
                    self._in_flight[server] -= 1
                    self._changed.notify_all()

    def _take(self) -> CompletionServer:
        """The server with most room, as soon as one may be asked."""
        with self._changed:
            while True:
                usable = [server for server in self.servers if server not in self._given_up]
                if not usable or self._is_stopped:
                    why = "; ".join(
                        f"{server.address}: {error}" for server, error in self._given_up.items()
                    )[:400]
                    next_step = (
                        "start them again: what was generated is kept, and the same command resumes"
                    )
                    raise ResourceError(f"no server answers any more ({why})", next_step=next_step)
                free = [server for server in usable if self._in_flight[server] < self.concurrency]
                pauses = {server: max(0.0, server.until - time.monotonic()) for server in free}
                server = min(free, key=lambda it: (pauses[it], self._in_flight[it]), default=None)
                if server is not None and not pauses[server]:
                    self._in_flight[server] += 1
                    return server
                self._changed.wait(None if server is None else pauses[server])


def converse(
    server: CompletionServer, task: GenerationTask, tokenizer: ServerTokenizer
) -> list[Answer]:
    """The turns of a task, each after the ones before it. It ends early with an answer that is no complete turn."""
    turns: list[Answer] = []
    messages: list[Message] = []
    for before in _contexts(task.prompt.messages):
        messages += before
        context = (
            tokenizer.context(messages, task.prompt.tools)
            if task.prompt.messages
            else task.prompt.ids
        )
        if len(context) >= task.max_length:
            break
        answer = ask(server, context, task, tokenizer)
        turns.append(answer)
        if answer.error or answer.reason != "stop":
            break
        messages.append({"role": "assistant", "content": tokenizer.text(answer.token_ids)})
    return turns


def _contexts(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The messages before each turn that is yet to be generated, since the one before it."""
    before: list[Message] = []
    for message in messages:
        if is_unanswered(message):
            yield before
            before = []
        else:
            before.append(message)
    if before or not messages:
        yield before


def ask(
    server: CompletionServer, context: list[int], task: GenerationTask, tokenizer: ServerTokenizer
) -> Answer:
    """One answer. Raises UnavailableError when the server may give it later."""
    body = {
        "model": server.model,
        "prompt": context,
        "max_tokens": task.max_length - len(context),
        "temperature": task.temperature,
        "seed": task.seed,
        **SAMPLING,
        "skip_special_tokens": False,
        "return_token_ids": True,  # vLLM, SGLang
        "return_tokens": True,  # llama.cpp
        **(OF_OUTPUT if server.states else {}),
    }
    choice = server.complete(body)
    if isinstance(choice, str):
        return Answer(context, [], "refused", choice)
    if server.states and choice.states:
        read = [*context, *(choice.token_ids or ())][:-1]
        take(Path(choice.states), read, server.server, server.states, context)
    ids, reason = tokenizer.answer(choice), str(choice.finish_reason)
    error = (
        None
        if ids is not None
        else f"an answer in other tokens than the target's: {json.dumps(choice.text[:80])}"
    )
    return Answer(context, ids or [], reason, error)
