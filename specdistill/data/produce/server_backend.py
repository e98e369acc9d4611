"""Generate on servers that speak OpenAI's API: turns of the assistant, and continuations of texts.

A server is sent token ids, which are rendered here by the target's own chat template. It returns
token ids if it can (vLLM, SGLang, llama.cpp). The text of other servers is tokenized, and must
decode to the same text again. So a draft is trained on exactly what was generated, including
reasoning. Each turn of the assistant is generated after the context that the template makes of the
messages before it. These are the recorded messages, or, if a row has questions alone, the generated
ones.

A thread for each request that may be in flight asks the server that has most room. Therefore
servers share the work in proportion to their speed, and a request that one server fails to answer
goes to another. The answers of a task are on the disk before its thread takes another task.
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

from transformers import PreTrainedTokenizerBase

from specdistill.common.errors import ResourceError, UserError, logger
from specdistill.data.produce.blocks import Answer, AnswerFile
from specdistill.data.produce.prompts import GenerationTask
from specdistill.data.rows.chat import tokenize_prompt
from specdistill.data.rows.store import OUTPUT_STATES_REQUEST, take_hidden_states
from specdistill.evaluation.suites.conversations import Message, Tools, is_unanswered
from specdistill.serving.engines.completions import Choice, CompletionServer, UnavailableError
from specdistill.serving.engines.vllm import PLAIN_SAMPLING

SAMPLING = {**PLAIN_SAMPLING, "repeat_penalty": 1.0}  # llama.cpp's name of the repetition penalty


class ServerTokenizer:
    """Converts contexts and answers to token ids.

    A lock admits one thread at a time, because fast tokenizers are not safe for several.

    Attributes:
        end_ids: tokens that end a generation.
        special: the tokenizer's special tokens.
        template: additional arguments of the chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        template: dict[str, Any],
    ) -> None:
        self.end_ids = frozenset(end_ids)
        self.special = frozenset(tokenizer.all_special_ids)
        self.template = template
        # The text of an answer does not say which of several end tokens ended it. The tokenizer's
        # own end token ends a turn. A server may know more end tokens.
        self._end_id: int | None = (
            tokenizer.eos_token_id
            if tokenizer.eos_token_id in self.end_ids
            else min(self.end_ids, default=None)
        )
        self._tokenizer = tokenizer
        self._num_ids = len(tokenizer)
        self._lock = threading.Lock()

    def context(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Return the tokens of a conversation with the generation prompt."""
        with self._lock:
            return tokenize_prompt(self._tokenizer, messages, tools, **self.template)

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode an answer, without the token that ended it."""
        with self._lock:
            text_ids = token_ids[:-1] if token_ids and token_ids[-1] in self.end_ids else token_ids
            return str(self._tokenizer.decode(list(text_ids), skip_special_tokens=False))

    def answer(self, choice: Choice) -> list[int] | None:
        """Return the token ids of a server's choice, including the one that ended it.

        Returns:
            The token ids; None if the tokenizer lacks one of them, or if the choice has only a text
            that the tokenizer turns into another text.
        """
        # Take the token ids that the server returned. Otherwise tokenize its text, which must give
        # the same text back.
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

        # Some servers leave out the token that ended the answer.
        has_end = bool(ids) and ids[-1] in self.end_ids | self.special
        if choice.finish_reason == "stop" and not has_end and self._end_id is not None:
            return [*ids, self._end_id]
        return list(ids)


class ServerBackend:
    """Generates on servers, with up to `concurrency` requests in flight to each of them.

    Several blocks may use the backend at once. Its methods raise ResourceError when no server
    answers any more.

    Attributes:
        servers: the servers.
        tokenizer: converts contexts and answers.
        concurrency: the most requests in flight to each server.
    """

    def __init__(
        self, servers: Sequence[CompletionServer], tokenizer: ServerTokenizer, concurrency: int
    ) -> None:
        self.servers = servers
        self.tokenizer = tokenizer
        self.concurrency = concurrency
        self._in_flight = dict.fromkeys(servers, 0)
        self._given_up: dict[CompletionServer, str] = {}
        self._changed = threading.Condition()
        self._is_stopped = False

    def __enter__(self) -> "ServerBackend":
        self._pool = ThreadPoolExecutor(len(self.servers) * self.concurrency)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the requests in flight and keep their answers, unless the user interrupts."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        try:
            self._pool.shutdown(wait=kind is not KeyboardInterrupt, cancel_futures=True)
        finally:
            for server in self.servers:
                server.server.close()
                logger.info("%s gave %d answers", server.address, server.num_answers)

    def generate_answers(
        self,
        tasks: Iterator[GenerationTask],
        answer_file: AnswerFile,
        count_wanted: Callable[[], int],
    ) -> Generator[tuple[GenerationTask, list[Answer]]]:
        """Yield each task with its turns, as `TransformersBackend.generate_answers` does."""
        # Tasks are yielded in their order, whichever answer comes first.
        requests: deque[tuple[GenerationTask, Future[list[Answer]]]] = deque()
        num_places = len(self.servers) * self.concurrency
        try:
            while True:
                # Keep as many requests in flight as there are places, but no more than are wanted.
                while len(requests) < max(1, min(num_places, count_wanted())):
                    next_task = next(tasks, None)
                    if next_task is None:
                        break
                    future = self._pool.submit(self._generate_turns, next_task, answer_file)
                    requests.append((next_task, future))
                if not requests:
                    return

                # The request is removed last, so that it is finished below if the caller stops.
                task, future = requests[0]
                yield task, future.result()
                requests.popleft()
        finally:
            # The caller needs no more answers: cancel the requests that are not sent yet, and wait
            # for the others, whose answers are kept.
            running = [future for _, future in requests if not future.cancel()]
            for future in running:
                future.exception()

    def _generate_turns(self, task: GenerationTask, answer_file: AnswerFile) -> list[Answer]:
        """Return the turns of a task, from the file or from a server.

        Turns with a server's error are not kept in the file, because another server may answer the
        question.
        """
        turns = answer_file.turns.get(task.name)
        if turns is not None:
            return turns

        # Ask servers until one of them answers. A server that fails too often is given up.
        while True:
            server = self._wait_for_server()
            try:
                turns = generate_conversation(server, task, self.tokenizer)
                if all(turn.error is None for turn in turns):
                    answer_file.add({task.name: turns})
                return turns
            except UnavailableError as error:
                if not server.record_failure(error):
                    with self._changed:
                        self._given_up[server] = str(error)
            finally:
                with self._changed:
                    self._in_flight[server] -= 1
                    self._changed.notify_all()

    def _wait_for_server(self) -> CompletionServer:
        """Wait for a server that may be asked, and return the one with the fewest requests.

        Raises:
            ResourceError: when no server answers any more.
        """
        with self._changed:
            while True:
                usable = [server for server in self.servers if server not in self._given_up]
                if not usable or self._is_stopped:
                    reason = "; ".join(
                        f"{server.address}: {error}" for server, error in self._given_up.items()
                    )[:400]
                    raise ResourceError(
                        f"no server answers any more ({reason})",
                        next_step="start them again, and run the same command; it keeps all answers"
                        " so far and continues",
                    )

                # Of the servers that may get another request, prefer those that need no pause after
                # a failure, and among them the one with the fewest requests in flight.
                free = [server for server in usable if self._in_flight[server] < self.concurrency]
                pauses = {server: max(0.0, server.until - time.monotonic()) for server in free}
                server = min(
                    free,
                    key=lambda candidate: (pauses[candidate], self._in_flight[candidate]),
                    default=None,
                )
                if server is not None and not pauses[server]:
                    self._in_flight[server] += 1
                    return server

                # Wait until a request ends, or until the shortest pause is over.
                self._changed.wait(None if server is None else pauses[server])


def generate_conversation(
    server: CompletionServer, task: GenerationTask, tokenizer: ServerTokenizer
) -> list[Answer]:
    """Have a server generate the turns of a task, each after the ones before it.

    The conversation ends early with an answer that is no complete turn.
    """
    # `messages` grows by the recorded messages before each turn, and by the generated turn.
    turns: list[Answer] = []
    messages: list[Message] = []
    for new_messages in _list_contexts(task.prompt.messages):
        messages += new_messages
        try:
            context = (
                tokenizer.context(messages, task.prompt.tools)
                if task.prompt.messages
                else task.prompt.ids
            )
        except UserError as error:
            if not turns:
                raise
            # The template accepts the prompt, but not what was generated after it.
            turns.append(Answer([], [], "refused", str(error)))
            break

        # Stop at a context as long as a row, and after an answer that did not end by itself.
        if len(context) >= task.max_length:
            break
        answer = ask(server, context, task, tokenizer)
        turns.append(answer)
        if answer.error or answer.reason != "stop":
            break
        messages.append({"role": "assistant", "content": tokenizer.text(answer.token_ids)})
    return turns


def _list_contexts(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Divide a conversation at the turns that are yet to be generated.

    Yields:
        The messages before each such turn, from the previous such turn on. A prompt without a
        conversation yields an empty list.
    """
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
    """Ask a server for one answer.

    Args:
        server: the server.
        context: the tokens of the context.
        task: the task, for its length, temperature and seed.
        tokenizer: converts the answer.

    Returns:
        The answer. Its `error` is set if the server refuses the question, or if the target's
        tokenizer cannot express the answer.

    Raises:
        UnavailableError: when the server may give the answer later.
    """
    # The parameters of all engines; each of them ignores the ones that it does not know.
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
        **(OUTPUT_STATES_REQUEST if server.states else {}),
    }

    # A server that refuses the request gives an answer with the reason.
    choice = server.complete(body)
    if isinstance(choice, str):
        return Answer(context, [], "refused", choice)

    # Keep the hidden states that the server wrote with its answer.
    if server.states and choice.states:
        read_ids = [*context, *(choice.token_ids or ())][:-1]
        take_hidden_states(
            Path(choice.states), read_ids, server.server, server.states, prompt=context
        )

    # An answer whose tokens are not the target's is not used.
    ids = tokenizer.answer(choice)
    reason = str(choice.finish_reason)
    error = None
    if ids is None:
        error = f"an answer in other tokens than the target's: {json.dumps(choice.text[:80])}"
    return Answer(context, ids or [], reason, error)
