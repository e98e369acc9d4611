"""Generation by servers that refuse, fail, stall and die: no answer is lost or repeated, and every
row is as without faults."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from recipes.pico.corpus import CHAT_TEMPLATE
from specdistill.common.errors import ResourceError
from specdistill.data.produce import generate
from specdistill.data.produce.answer_rules import RULES, CheckedAnswer
from specdistill.data.produce.blocks import Answer, AnswerFile
from specdistill.data.produce.generate import BlockOutput, build_documents, generate_block
from specdistill.data.produce.prompts import (
    GenerationPrompt,
    GenerationTask,
    Stream,
    assign_temperatures,
)
from specdistill.data.produce.server_backend import (
    ServerBackend,
    ServerTokenizer,
    generate_conversation,
)
from specdistill.serving.engines import completions
from specdistill.serving.engines.completions import Choice, CompletionServer, UnavailableError
from tests.data.produce.openai_server import (
    CUT,
    END,
    STALL,
    Behaviour,
    OpenAIServer,
    completion,
    running,
)
from tests.data.produce.row_sets import chat
from tests.refusals import refused
from tests.tiny import tiny_tokenizer

NUM = 24


def make_prompts(count: int = NUM) -> list[GenerationPrompt]:
    texts = [GenerationPrompt([5, 6, 7, 8 + number]) for number in range(count // 4)]
    chats = [
        GenerationPrompt([], messages=tuple(chat(f"{number}?", None, "more")["messages"]))
        for number in range(count)
    ]
    return [prompt for group in zip(*[iter(chats)] * 4, texts, strict=True) for prompt in group]


def make_tasks(
    count: int | None = NUM, temperatures: Sequence[float] = (0.0, 0.8)
) -> Iterator[GenerationTask]:
    turns = (assign_temperatures(make_prompts(), temperatures, turn) for turn in range(50))
    pairs = enumerate(islice(itertools.chain.from_iterable(turns), count))
    return (
        GenerationTask(f"task-{number}", prompt, temperature, 3 + number, 128)
        for number, (prompt, temperature) in pairs
    )


def build_tokenizer() -> ServerTokenizer:
    return ServerTokenizer(tiny_tokenizer(CHAT_TEMPLATE), [END], {})


def connect(running_server: OpenAIServer, timeout: float = 20.0) -> CompletionServer:
    server = CompletionServer(running_server.address, timeout)
    server.find_model(["tiny"])
    return server


def answer_tasks(
    folder: Path,
    *servers: CompletionServer,
    concurrency: int = 3,
    prompt_tasks: Iterator[GenerationTask] | None = None,
) -> list[Any]:
    """Return the answers of every task, in order."""
    with (
        AnswerFile(folder / "answers.jsonl", "plan") as known,
        ServerBackend(servers, build_tokenizer(), concurrency) as backend,
    ):
        pairs = list(backend.generate_answers(prompt_tasks or make_tasks(), known, lambda: 1000))
    assert [task.name for task, _ in pairs] == [f"task-{number}" for number in range(len(pairs))]
    return [turns for _, turns in pairs]


def count_known_answers(folder: Path) -> int:
    return (folder / "answers.jsonl").read_bytes().count(b"\n") - 1


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "FIRST_DELAY", 0.01)


@pytest.fixture(scope="module")
def undisturbed_answers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with running() as server:
        return answer_tasks(tmp_path_factory.mktemp("undisturbed"), connect(server))


def test_each_turn_is_generated_in_the_context_of_those_before_it(
    undisturbed_answers: list[list[Answer]],
) -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    task = next(make_tasks())
    messages = [task.prompt.messages[0]]
    for answer in undisturbed_answers[0]:
        assert (
            answer.context
            == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        )
        expected, text = completion(answer.context, task.seed, task.temperature, Behaviour().text)
        assert answer.token_ids == expected and answer.reason == "stop"
        messages += [{"role": "assistant", "content": text}, task.prompt.messages[2]]
    assert len(undisturbed_answers[0]) == 2 and len(undisturbed_answers) == NUM


def test_a_generated_turn_that_the_template_rejects_ends_its_conversation(tmp_path: Path) -> None:
    rejecting = (
        "{% for message in messages if message.role == 'assistant' %}{{ raise_exception('no such"
        " turn') }}{% endfor %}" + CHAT_TEMPLATE
    )
    tokenizer = ServerTokenizer(tiny_tokenizer(rejecting), [END], {})
    with running() as server:
        turns = generate_conversation(connect(server), next(make_tasks()), tokenizer)
    assert (turns[0].reason, turns[0].error) == ("stop", None) and turns[0].token_ids
    assert (turns[1].reason, turns[1].token_ids) == ("refused", []) and "no such turn" in str(
        turns[1].error
    )
    assert len(turns) == 2


def test_a_request_names_every_setting_of_sampling(tmp_path: Path) -> None:
    """vLLM takes settings that a request leaves out from the model's generation_config.json."""
    bodies: list[dict[str, Any]] = []
    with running(Behaviour(fault=lambda number, body: bodies.append(body))) as server:  # type: ignore[func-returns-value]
        (turns,) = answer_tasks(tmp_path, connect(server), prompt_tasks=make_tasks(1))
    plain = {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    plain |= {"repetition_penalty": 1.0, "repeat_penalty": 1.0}
    for turn, body in zip(turns, bodies, strict=True):
        assert {name: body[name] for name in plain} == plain
        assert (body["temperature"], body["seed"], body["prompt"]) == (0.0, 3, turn.context)


@pytest.mark.parametrize("fault", [429, 500, CUT])
def test_a_request_that_fails_for_a_while_is_repeated(
    fault: Any, tmp_path: Path, undisturbed_answers: list[Any]
) -> None:
    behaviour = Behaviour(
        fault=lambda number, body: fault if number % 5 == 1 else None, headers={"Retry-After": "0"}
    )
    with running(behaviour) as server:
        assert answer_tasks(tmp_path, connect(server)) == undisturbed_answers


def test_a_server_that_asks_for_a_long_delay_is_asked_again_within_ten_minutes() -> None:
    behaviour = Behaviour(fault=lambda number, body: 503, headers={"Retry-After": "9" * 30})
    with running(behaviour) as server, pytest.raises(UnavailableError) as caught:
        connect(server).complete({})
    assert caught.value.seconds == 600


def test_a_stalled_answer_is_given_by_another_server(
    tmp_path: Path, undisturbed_answers: list[Any]
) -> None:
    with (
        running(Behaviour(fault=lambda number, body: STALL if number == 2 else None)) as one,
        running() as two,
    ):
        assert (
            answer_tasks(tmp_path, connect(one, timeout=0.5), connect(two)) == undisturbed_answers
        )


def test_a_server_that_dies_leaves_its_work_to_the_other(
    tmp_path: Path, undisturbed_answers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "RETRY_TIMEOUT_S", 0.2)
    with running() as two, running(Behaviour(seconds=0.01)) as one:
        connected = connect(one, timeout=0.5), connect(two)
        threading.Timer(0.05, one.shutdown).start()
        one.behaviour.fault = lambda number, body: CUT if number > 4 else None
        assert answer_tasks(tmp_path, *connected) == undisturbed_answers


def test_generated_answers_are_kept_when_no_server_answers_any_more(
    tmp_path: Path, undisturbed_answers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "RETRY_TIMEOUT_S", 0.1)
    with (
        running(Behaviour(fault=lambda number, body: 500 if number >= 19 else None)) as server,
        pytest.raises(
            ResourceError,
            match=r"no server answers any more \(http://.*: 500 .*\); start the servers again",
        ),
    ):
        answer_tasks(tmp_path, connect(server))
    kept = count_known_answers(tmp_path)
    assert 5 <= kept < NUM
    with running() as other:
        assert answer_tasks(tmp_path, connect(other), concurrency=1) == undisturbed_answers
        assert other.num_requests <= sum(map(len, undisturbed_answers)) - kept
    assert count_known_answers(tmp_path) == NUM


def test_a_refused_question_ends_its_conversation_and_is_asked_again(
    tmp_path: Path, undisturbed_answers: list[Any]
) -> None:
    def fault(number: int, body: dict[str, Any]) -> int | None:
        return 400 if len(body["prompt"]) % 7 == 0 else None

    with running(Behaviour(fault=fault)) as server:
        results = answer_tasks(tmp_path, connect(server))
    refusals = [turns for turns in results if turns[-1].error]
    assert refusals and all(turns[-1].error.startswith("400 ") for turns in refusals)
    assert all(len(turns[-1].context) % 7 == 0 for turns in refusals) and count_known_answers(
        tmp_path
    ) == NUM - len(refusals)
    with running() as other:
        assert answer_tasks(tmp_path, connect(other)) == undisturbed_answers


@pytest.mark.parametrize("status", [400, 401])
def test_a_server_that_refuses_every_request_is_named(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MAX_REFUSED_PROMPTS", 8)
    with (
        running(Behaviour(fault=lambda number, body: status)) as server,
        pytest.raises(ResourceError, match=f"/v1/completions answered {status} "),
    ):
        answer_tasks(tmp_path, connect(server))
    assert not count_known_answers(tmp_path)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        # ends with another end token than the tokenizer's
        ({"text": "ab", "token_ids": [9, 8, 0], "finish_reason": "stop"}, [9, 8, 0]),
        # ends with an end token that only the server knows
        ({"text": "ab", "token_ids": [9, 8, 2], "finish_reason": "stop"}, [9, 8, 2]),
        # llama.cpp leaves the end token out
        ({"text": "ab", "token_ids": [9, 8], "finish_reason": "stop"}, [9, 8, 3]),
        ({"text": "ab", "token_ids": [9, 8], "finish_reason": "length"}, [9, 8]),
        # has a token of another tokenizer
        ({"text": "ab", "token_ids": [9, 10**6], "finish_reason": "length"}, None),
    ],
)
def test_an_answer_has_the_token_that_ended_it(
    choice: dict[str, Any], expected: list[int] | None
) -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    tokenizer.eos_token = "<|end|>"
    assert (
        ServerTokenizer(tokenizer, [0, END], {}).answer(
            Choice.model_validate({"choices": [choice]})
        )
        == expected
    )


def test_two_servers_share_the_work(tmp_path: Path) -> None:
    with running(Behaviour(seconds=0.02)) as one, running(Behaviour(seconds=0.02)) as two:
        answer_tasks(tmp_path, connect(one), connect(two))
    assert abs(one.num_requests - two.num_requests) <= 0.2 * (one.num_requests + two.num_requests)


def test_text_is_tokenised_where_a_server_gives_no_tokens(
    tmp_path: Path, undisturbed_answers: list[Any]
) -> None:
    with running(Behaviour(returns_tokens=False)) as server:
        assert answer_tasks(tmp_path, connect(server)) == undisturbed_answers


def test_the_model_is_found_by_name_or_because_it_is_alone() -> None:
    with running(Behaviour(models=("other", "tiny"))) as server:
        assert connect(server).model == "tiny"
        with refused("data.regenerate.server", holds="which serves other, tiny"):
            CompletionServer(server.address, 1.0).find_model(["elsewhere"])
    with pytest.raises(ResourceError, match=r"/v1/models does not answer .*; start the server"):
        CompletionServer(server.address, 1.0).find_model(["tiny"])
    with refused("data.regenerate.server", "localhost:8000"):
        CompletionServer("localhost:8000", 1.0)


def test_a_key_goes_to_the_address_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Behaviour()) as server, running(Behaviour()) as other:
        monkeypatch.setenv("OPENAI_API_KEY", "of-somebody-else")
        monkeypatch.setenv(
            "SPECDISTILL_SERVER_KEYS",
            f"{server.address}/ the-key http://127.0.0.1.evil.example another-key",
        )
        for connection in (connect(server), connect(other)):
            connection.complete(
                {"model": "tiny", "prompt": [5], "seed": 0, "temperature": 0, "max_tokens": 4}
            )
        assert (server.authorization, other.authorization) == ("Bearer the-key", None)
    with refused("data.regenerate.server", "http://127.0.0.1.evil.example"):
        CompletionServer("http://127.0.0.1.evil.example", 1.0)
    monkeypatch.setenv("SPECDISTILL_SERVER_KEYS", f"{server.address} clé")
    with refused("SPECDISTILL_SERVER_KEYS"):
        CompletionServer(server.address, 1.0)


def make_block(
    folder: Path, num_tokens: int, *servers: CompletionServer, rules: Sequence[str] = (),
    concurrency: int = 2, all_tokens: bool = False, num_long_prompts: int = 0
) -> BlockOutput:  # fmt: skip
    tokenizer = build_tokenizer()

    def check_answer(task: GenerationTask, answer: Answer) -> CheckedAnswer:
        return CheckedAnswer(
            answer, tokenizer.text(answer.token_ids), not task.prompt.messages, tokenizer.special
        )

    output = BlockOutput(
        {name: RULES[name] for name in rules}, check_answer, all_tokens, lambda tokens: None
    )
    # Making the tasks counts the prompts that are too long to be asked.
    output.counts.filtered.update(["long_prompt"] * num_long_prompts)
    with (
        AnswerFile(folder / "answers.jsonl", "plan") as known,
        ServerBackend(servers, tokenizer, concurrency) as backend,
    ):
        generate_block(
            num_tokens, iter([[Stream(list(make_tasks(1000)), 1.0)]]), backend, known, output
        )
    return output


def test_rows_come_from_the_first_tasks_that_suffice_and_few_more_are_asked(
    tmp_path: Path,
) -> None:
    blocks = []
    for concurrency in (1, 8):
        with running() as server:
            blocks.append(
                make_block(
                    tmp_path / str(concurrency), 400, connect(server), concurrency=concurrency
                )
            )
            needed = 400 / 16  # an answer has sixteen tokens
            assert server.num_requests <= 1.3 * needed + 8
    assert blocks[0].rows == blocks[1].rows and 398 <= blocks[0].tokens < 440


@pytest.mark.parametrize("all_tokens", [False, True])
def test_the_loss_is_on_answers_or_on_all_tokens(all_tokens: bool, tmp_path: Path) -> None:
    with running() as server:
        rows = make_block(tmp_path, 100, connect(server), all_tokens=all_tokens).rows
    chats = [row for row in rows if row["input_ids"][:2] != [5, 6]]
    assert chats and all((sum(row["loss_mask"]) == row["length"]) is all_tokens for row in chats)


def test_an_answer_that_breaks_a_rule_is_filtered_with_what_follows(tmp_path: Path) -> None:
    with running(
        Behaviour(text=lambda digest: "ab" * 30 if digest < "4" else f"answer {digest}")
    ) as server:
        block = make_block(tmp_path, 600, connect(server), rules=["looping"])
    assert block.rows and not any(
        "ababab" in tiny_tokenizer().decode(row["input_ids"]) for row in block.rows
    )
    assert set(block.counts.filtered) == {"looping"} and block.tokens >= 0.99 * 600


@pytest.mark.parametrize("num_long_prompts", [0, 1000])
def test_a_block_that_keeps_no_answer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_long_prompts: int
) -> None:
    monkeypatch.setattr(generate, "MAX_EMPTY_TASKS", 20)
    with (
        running(Behaviour(text=lambda digest: " ")) as server,
        refused(
            "data.regenerate.filter",
            "rules that dropped 20 answers in a row; the rule `empty` dropped the most answers",
        ),
    ):
        make_block(
            tmp_path, 10**6, connect(server), rules=["empty"], num_long_prompts=num_long_prompts
        )


def test_turns_share_a_row_where_their_contexts_continue(
    undisturbed_answers: list[list[Answer]],
) -> None:
    one, two = undisturbed_answers[0]
    (row,) = build_documents([one, two], all_tokens=False)
    assert row["length"] == len(row["input_ids"]) == len(row["loss_mask"])
    assert row["input_ids"] == [*two.context, *two.token_ids]
    assert sum(row["loss_mask"]) == len(one.token_ids) + len(two.token_ids)
    assert len(build_documents([two, one], all_tokens=False)) == 2


def test_answers_of_another_recipe_are_dropped(tmp_path: Path) -> None:
    path, turns = tmp_path / "block.jsonl", [Answer([1], [2, 3], "stop")]
    with AnswerFile(path, "one") as answers:
        answers.add({"a": turns, "b": []})
    for plan, expected in (("one", (turns, [])), ("other", (None, None)), ("one", (None, None))):
        with AnswerFile(path, plan) as answers:
            assert (answers.turns.get("a"), answers.turns.get("b")) == expected


def test_a_full_disk_ends_in_one_line_and_the_answers_stay(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "block.jsonl", "one") as answers:
        answers.add({"a": []})
        write = answers._file.write
        answers._file = type("Full", (),
            {"write": lambda _, data: write(data[:4]), "tell": answers._file.tell,
                                          "truncate": answers._file.truncate,
                                          "close": answers._file.close})()  # fmt: skip
        with pytest.raises(
            ResourceError,
            match=r"No space left on device\); free disk space, or set data.cache_dir",
        ):
            answers.add({"b": []})
    with AnswerFile(tmp_path / "block.jsonl", "one") as answers:
        assert answers.turns.get("a") == [] and answers.turns.get("b") is None
