"""Generation by servers that refuse, fail, stall and die: nothing lost, nothing twice, and every row as it would be without."""

import json
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from specdistill.data import completion_server, served
from specdistill.data.answers import Answers
from specdistill.data.completion_server import CompletionServer
from specdistill.data.regeneration import Prompt
from specdistill.data.served import Task, Tokenizer, documents, generate, served_rows, tasks
from specdistill.errors import ResourceError, UserError
from specdistill.pico.corpus import CHAT_TEMPLATE
from specdistill.recipe.sections import SetAside
from tests.data.openai_server import CUT, END, STALL, Behaviour, OpenAIServer, completion, running
from tests.tiny import tiny_tokenizer

NUM = 24


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def prompts(count: int = NUM) -> list[Prompt]:
    chats = [
        Prompt(
            [],
            number,
            True,
            messages=(turn("user", f"{number}?"), turn("assistant", "-"), turn("user", "more"), turn("assistant", "-")),
        )
        for number in range(count)
    ]
    return [*chats, *(Prompt([5, 6, 7, 8 + number], count + number, False) for number in range(count // 4))]


def numbered(count: int = NUM) -> Iterator[Task]:
    return islice(tasks(prompts(count), [0.0, 0.8], 128, seed=3), count)


def chats() -> Iterator[Task]:
    return tasks([prompt for prompt in prompts() if prompt.is_chat], [0.0], 128, seed=3)


def told() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(CHAT_TEMPLATE), [END], {})


def server(made: OpenAIServer, timeout: float = 20.0) -> CompletionServer:
    connected = CompletionServer(made.address, timeout)
    connected.find_model(["tiny"])
    return connected


def turns_of(folder: Path, *servers: CompletionServer, concurrency: int = 3) -> list[Any]:
    """(context, answer) of every turn of every task, in order."""
    with Answers(folder) as answers:
        made = list(generate(numbered(), servers, answers, told(), concurrency=concurrency))
    assert [task.number for task, _ in made] == list(range(NUM))
    return [[(turn.prompt_ids, turn.answer.token_ids) for turn in turns] for _, turns in made]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_server, "FIRST_DELAY", 0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with running() as made:
        return turns_of(tmp_path_factory.mktemp("undisturbed"), server(made))


def test_each_turn_is_generated_in_the_context_of_those_before_it(undisturbed: list[Any]) -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    first = next(task for task in numbered() if task.messages)
    one, two = undisturbed[first.number]
    messages = [first.messages[0]]
    for context, answer in (one, two):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert list(context) == ids
        expected, text = completion(ids, first.seed, first.temperature, Behaviour().text)
        assert list(answer) == expected
        messages += [turn("assistant", text), first.messages[2]]


def test_a_question_leaves_nothing_to_a_model_s_own_sampling(tmp_path: Path) -> None:
    """vLLM fills in what a request leaves out from generation_config.json; what was sent is kept with the answer."""
    bodies: list[dict[str, Any]] = []
    with running(Behaviour(fault=lambda number, body: bodies.append(body))) as made, Answers(tmp_path) as answers:  # type: ignore[func-returns-value]
        ((_, (one, two)),) = generate(islice(chats(), 1), [server(made)], answers, told(), concurrency=1)
    plain = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    plain |= {"repetition_penalty": 1.0, "repeat_penalty": 1.0}
    for turn, body in zip((one, two), bodies, strict=True):
        assert {name: body[name] for name in plain} == plain == turn.answer.sampling
        assert (body["temperature"], body["seed"], body["prompt"]) == (0.0, 3, list(turn.prompt_ids))
    (kept,) = tmp_path.glob("answers-*.jsonl")
    assert all(json.loads(line)["sampling"] == plain for line in kept.read_text().splitlines())


@pytest.mark.parametrize("fault", [429, 500, 503, CUT])
def test_what_fails_for_a_while_is_asked_again(fault: Any, tmp_path: Path, undisturbed: list[Any]) -> None:
    behaviour = Behaviour(fault=lambda number, body: fault if number % 3 == 1 else None, headers={"Retry-After": "0"})
    with running(behaviour) as made:
        assert turns_of(tmp_path, server(made)) == undisturbed
    assert set(made.answered.values()) == {1}


def test_a_stalled_answer_is_given_by_another_server(tmp_path: Path, undisturbed: list[Any]) -> None:
    with running(Behaviour(fault=lambda number, body: STALL if number == 2 else None)) as one, running() as two:
        assert turns_of(tmp_path, server(one, timeout=0.5), server(two)) == undisturbed


def test_a_server_that_dies_leaves_its_work_to_the_other(
    tmp_path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_server, "PATIENCE", 0.2)
    with running() as two, running() as one:

        def dies(number: int, body: dict[str, Any]) -> int | None:
            if number == 5:
                threading.Thread(target=one.server.shutdown).start()
            return CUT if number > 4 else None

        connected = server(one), server(two)
        one.behaviour.fault = dies
        assert turns_of(tmp_path, *connected) == undisturbed


def test_when_no_server_answers_what_was_generated_is_kept(
    tmp_path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_server, "PATIENCE", 0.1)
    with (
        running(Behaviour(fault=lambda number, body: 500 if number >= 9 else None)) as made,
        pytest.raises(ResourceError, match=r"no server answers any more \(http://.*: 500 .*\); start them again"),
    ):
        turns_of(tmp_path, server(made))
    kept = len(Answers(tmp_path))
    assert kept == 9
    with running() as other:
        assert turns_of(tmp_path, server(other), concurrency=1) == undisturbed
        assert other.num_requests == len(Answers(tmp_path)) - kept


def test_a_refused_question_is_noted_and_ends_its_conversation(tmp_path: Path, undisturbed: list[Any]) -> None:
    def fault(number: int, body: dict[str, Any]) -> int | None:
        return 400 if len(body["prompt"]) % 7 == 0 else None

    with running(Behaviour(fault=fault)) as made, Answers(tmp_path) as answers:
        results = list(generate(numbered(), [server(made)], answers, told(), concurrency=3))
    refused = [turns for _, turns in results if turns[-1].answer.error]
    assert refused and all(turns[-1].answer.error.startswith("400 ") for turns in refused)
    assert all(len(turns[-1].prompt_ids) % 7 == 0 for turns in refused)


def test_a_server_that_refuses_everything_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_server, "MOST_REFUSED", 8)
    with (
        running(Behaviour(fault=lambda number, body: 400)) as made,
        pytest.raises(ResourceError, match="/v1/completions answered 400 "),
    ):
        turns_of(tmp_path, server(made))
    assert not len(Answers(tmp_path))  # what was refused is asked again when the server is mended


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (
            {"text": "ab", "token_ids": [9, 8, 0], "finish_reason": "stop"},
            (9, 8, 0),
        ),  # ended by another end than the tokenizer's
        ({"text": "ab", "token_ids": [9, 8, 2], "finish_reason": "stop"}, (9, 8, 2)),  # by one that the server alone knows
        ({"text": "ab", "token_ids": [9, 8], "finish_reason": "stop"}, (9, 8, 3)),  # llama.cpp leaves it out
        ({"text": "ab", "token_ids": [9, 8], "finish_reason": "length"}, (9, 8)),
    ],
)
def test_an_answer_has_the_token_that_ended_it(choice: dict[str, Any], expected: tuple[int, ...]) -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    tokenizer.eos_token = "<|end|>"
    assert Tokenizer(tokenizer, [0, END], {}).answer(choice) == expected


@pytest.mark.parametrize("status", [401, 404])
def test_a_server_that_never_will_is_named_at_once(status: int, tmp_path: Path) -> None:
    with (
        running(Behaviour(fault=lambda number, body: status)) as made,
        pytest.raises(ResourceError, match=f"/v1/completions answered {status} "),
    ):
        turns_of(tmp_path, server(made))


def test_two_servers_work_at_once(tmp_path: Path, undisturbed: list[Any]) -> None:
    """Each answers its first four questions when the other has as many."""
    asked = threading.Semaphore(0), threading.Semaphore(0)

    def behaviour(own: threading.Semaphore, other: threading.Semaphore) -> Behaviour:
        def fault(number: int, body: dict[str, Any]) -> int | None:
            own.release()
            return None if number >= 4 or other.acquire(timeout=60) else 404

        return Behaviour(fault=fault)

    with running(behaviour(*asked)) as one, running(behaviour(*reversed(asked))) as two:
        assert turns_of(tmp_path, server(one, timeout=60), server(two, timeout=60)) == undisturbed
    assert min(one.num_requests, two.num_requests) >= 4


def test_text_is_tokenised_where_a_server_gives_no_tokens(tmp_path: Path, undisturbed: list[Any]) -> None:
    with running(Behaviour(returns_tokens=False)) as made:
        assert turns_of(tmp_path, server(made)) == undisturbed


def test_the_model_is_found_by_name_or_because_it_is_alone() -> None:
    with running(Behaviour(models=("other", "tiny"))) as made:
        assert server(made).model == "tiny"
        with pytest.raises(UserError, match=r"^data\.regenerate\.server: got http://.*, which serves other, tiny"):
            CompletionServer(made.address, 1.0).find_model(["elsewhere"])
    with pytest.raises(ResourceError, match=r"/v1/models does not answer; start the server"):
        CompletionServer(made.address, 1.0).find_model(["tiny"])
    with pytest.raises(UserError, match=r"^data\.regenerate\.server: got localhost:8000"):
        CompletionServer("localhost:8000", 1.0)


def test_rows_are_those_of_the_first_tasks_that_give_enough(tmp_path: Path) -> None:
    rules: list[SetAside] = []
    with running() as made:
        rows = [
            list(
                served_rows(
                    numbered(),
                    [server(made)],
                    Answers(tmp_path / str(concurrency)),
                    told(),
                    200,
                    rules,
                    concurrency=concurrency,
                )
            )
            for concurrency in (1, 5)
        ]
    assert rows[0] == rows[1]
    generated = sum(sum(row["loss_mask"]) for row in rows[0])
    assert 200 <= generated < 300
    assert (tmp_path / "1" / "set_aside.json").is_file()


@pytest.mark.parametrize(("loss_mask", "everywhere"), [("assistant", False), ("all", True)])
def test_the_loss_is_on_answers_or_on_all(loss_mask: str, everywhere: bool, tmp_path: Path) -> None:
    with running() as made:
        asked: Any = (chats(), [server(made)], Answers(tmp_path), told(), 100, [])
        rows = list(served_rows(*asked, concurrency=2, loss_mask=loss_mask))
    assert rows and all((sum(row["loss_mask"]) == row["length"]) is everywhere for row in rows)


def test_an_answer_that_breaks_a_rule_is_left_out_with_what_follows(tmp_path: Path) -> None:
    with running(Behaviour(text=lambda digest: "ab" * 30 if digest < "4" else f"answer {digest}")) as made:
        options = {"concurrency": 2}
        rows = list(served_rows(numbered(), [server(made)], Answers(tmp_path), told(), 10**6, ["looping"], **options))
    tokenizer = tiny_tokenizer()
    assert rows and not any("ababab" in tokenizer.decode(row["input_ids"]) for row in rows)


def test_a_run_of_which_nothing_is_kept_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MOST_BARREN", 20)
    sampled = tasks(prompts(), [0.8], 128, seed=3)  # without end: a prompt gives another answer each time
    with (
        running(Behaviour(text=lambda digest: " ")) as made,
        pytest.raises(
            UserError, match=r"^data\.regenerate\.set_aside: got rules that 20 answers in a row broke, most of all empty"
        ),
    ):
        list(served_rows(sampled, [server(made)], Answers(tmp_path), told(), 10**6, ["empty"], concurrency=2))
    assert (tmp_path / "set_aside.json").is_file()


def test_turns_share_a_row_where_their_contexts_continue(tmp_path: Path) -> None:
    with running() as made, Answers(tmp_path) as answers:
        results = list(generate(numbered(), [server(made)], answers, told(), concurrency=2))
    _, turns = next(result for result in results if result[0].messages)
    (row,) = documents(turns, all_tokens=False)
    assert row["length"] == len(row["input_ids"]) == len(row["loss_mask"])
    assert row["input_ids"] == [*turns[1].prompt_ids, *turns[1].answer.token_ids]
    assert sum(row["loss_mask"]) == sum(len(turn.answer.token_ids) for turn in turns)
    apart = documents([turns[1], turns[0]], all_tokens=False)
    assert len(apart) == 2
    text_task, text_turns = next(result for result in results if not result[0].messages)
    (row,) = documents(text_turns, all_tokens=True)
    assert row["loss_mask"] == [1] * row["length"] and text_task.ids == tuple(row["input_ids"][:4])
