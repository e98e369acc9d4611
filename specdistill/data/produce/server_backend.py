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
        # If a server leaves out the token that ended an answer, `answer` appends one. Which of
        # several end tokens it was is not known. Take the tokenizer's own if it ends generations,
        # or else the one with the lowest id.
        self._end_id: int | None = (
            tokenizer.eos_token_id
            if tokenizer.eos_token_id in self.end_ids
            else min(self.end_ids, default=None)
        )
        self._tokenizer = tokenizer
        self._num_ids = len(tokenizer)
        self._lock = threading.Lock()

    def context(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Return the token ids of the prompt for the next turn of the assistant.

        Args:
            messages: the conversation before the turn.
            tools: the tools that the conversation may call.
        """
        with self._lock:
            return tokenize_prompt(self._tokenizer, messages, tools, **self.template)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer, without the token that ended the answer."""
        with self._lock:
            text_ids = token_ids[:-1] if token_ids and token_ids[-1] in self.end_ids else token_ids
            return str(self._tokenizer.decode(list(text_ids), skip_special_tokens=False))

    def answer(self, choice: Choice) -> list[int] | None:
        """Return the token ids of an answer, including the token that ended the answer.

        Args:
            choice: an entry of `choices` in a server's response.

        Returns:
            The token ids. None if the answer cannot be trained on: it has a token id that the
            tokenizer lacks, or only a text that changes when it is tokenized and decoded.
        """
        # Use the token ids in the response, under the name that vLLM and SGLang or llama.cpp give
        # them. Without token ids, tokenize the text, and check that the tokens decode to the text.
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

        # Some servers leave out the token that ended the answer. Append it.
        has_end = bool(ids) and ids[-1] in self.end_ids | self.special
        if choice.finish_reason == "stop" and not has_end and self._end_id is not None:
            return [*ids, self._end_id]
        return list(ids)


class ServerBackend:
    """Generates on servers, with up to `concurrency` requests in flight to each of them.

    Several blocks, the parts that generation is divided into, may use the backend at once. Its
    methods raise ResourceError when no server answers any more.

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
        """Have the servers answer tasks, and yield each task with its answers, in the given order.

        Args:
            tasks: the tasks.
            answer_file: keeps the answers on disk; answers that are in it are not requested again.
            count_wanted: returns how many more tasks are expected to be needed, including submitted
                tasks that were not yielded yet.

        Yields:
            (a task, the generated turns of the assistant).
        """
        # The queue has the requests that were submitted, in the order of their tasks. Answers may
        # come in another order.
        requests: deque[tuple[GenerationTask, Future[list[Answer]]]] = deque()
        num_places = len(self.servers) * self.concurrency
        try:
            while True:
                # Submit requests until every server has `concurrency` of them, but no more than the
                # caller wants.
                while len(requests) < max(1, min(num_places, count_wanted())):
                    next_task = next(tasks, None)
                    if next_task is None:
                        break
                    future = self._pool.submit(self._generate_turns, next_task, answer_file)
                    requests.append((next_task, future))
                if not requests:
                    return

                # Wait for the oldest request. It is removed after the `yield`, so that `finally`
                # still sees it if the wait is interrupted.
                task, future = requests[0]
                yield task, future.result()
                requests.popleft()
        finally:
            # The caller needs no more answers. Cancel the requests that are not sent yet, and wait
            # for the requests that are running, because their answers are kept in the file.
            running = [future for _, future in requests if not future.cancel()]
            for future in running:
                future.exception()

    def _generate_turns(self, task: GenerationTask, answer_file: AnswerFile) -> list[Answer]:
        """Return the answers to a task, from the file if it has them, or else from a server.

        New answers are added to the file, except answers with an error: when the command is run
        again, another server may answer.
        """
        turns = answer_file.turns.get(task.name)
        if turns is not None:
            return turns

        # Ask servers until one of them answers. `_wait_for_server` counts the request as in flight,
        # so it is subtracted at the end. `record_failure` returns False for a server that has
        # failed for too long without an answer. Such a server is not asked again.
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
        """Wait until a server may get another request, and return that server.

        The request is already counted as in flight when the server is returned.

        Raises:
            ResourceError: if every server has failed for too long, or if the backend was closed.
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
                        next_step="start the servers again, and run the same command; it keeps all"
                        " answers so far and continues",
                    )

                # After a failure, a server gets a pause. Of the servers with fewer than
                # `concurrency` requests in flight, choose the one with the shortest pause. If
                # several have no pause, choose the one with the fewest requests.
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

                # Wait until a request ends (without a limit if all servers are busy), or until the
                # shortest pause is over.
                self._changed.wait(None if server is None else pauses[server])


def generate_conversation(
    server: CompletionServer, task: GenerationTask, tokenizer: ServerTokenizer
) -> list[Answer]:
    """Have a server generate the missing turns of the assistant in a conversation, one by one.

    The context of each turn contains the turns that were generated before. If a turn fails or does
    not end by itself, the later turns are not generated. A prompt that is a text gets one answer,
    its continuation.

    Args:
        server: the server.
        task: the prompt, with the temperature, the seed and the limit on tokens.
        tokenizer: converts messages to tokens, and answers to text.

    Returns:
        The generated turns.
    """
    # `messages` is the conversation so far: messages of the data, and the turns that were generated
    # between them.
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
            # The template accepted the first prompt, so it rejects a turn that was generated. Keep
            # the turns before, and record the rejection.
            turns.append(Answer([], [], "refused", str(error)))
            break

        # Stop if the context has no room for an answer, and after an answer that failed or that the
        # length limit cut.
        if len(context) >= task.max_length:
            break
        answer = ask(server, context, task, tokenizer)
        turns.append(answer)
        if answer.error or answer.reason != "stop":
            break
        messages.append({"role": "assistant", "content": tokenizer.text(answer.token_ids)})
    return turns


def _list_contexts(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Divide a conversation at the turns of the assistant that are to be generated.

    Such a turn has no content. If messages follow the last one, the answer to them is to be
    generated, too. For example, [user, empty, user] gives [user] and [user].

    Args:
        messages: the conversation; empty if the prompt is a text, which is to be continued once.

    Yields:
        For each turn to generate, the messages between the previous such turn and this one. For a
        text, that is one empty list.
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
    """Send a completion request to a server, and return its answer.

    Args:
        server: the server.
        context: the token ids that the server continues.
        task: the temperature, the seed and `max_length`, the largest number of tokens that context
            and answer may have together.
        tokenizer: converts the answer to token ids of the target.

    Returns:
        The answer. Its `error` is set if the server refuses the request, or if the answer cannot be
        written in the target's tokens.

    Raises:
        UnavailableError: if the server fails now but may give the answer later.
    """
    # The request has the parameters of all supported engines. An engine ignores those that it does
    # not know.
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

    # Keep the hidden states that the server wrote with its answer. The server generated the last
    # token without reading it.
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
