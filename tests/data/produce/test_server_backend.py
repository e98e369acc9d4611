"""Generation by servers that refuse, fail, stall and die: nothing lost, nothing twice, and every
row as it would be without."""

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


def prompts(count: int = NUM) -> list[GenerationPrompt]:
    texts = [GenerationPrompt([5, 6, 7, 8 + number]) for number in range(count // 4)]
    chats = [
        GenerationPrompt([], messages=tuple(chat(f"{number}?", None, "more")["messages"]))
        for number in range(count)
    ]
    return [it for group in zip(*[iter(chats)] * 4, texts, strict=True) for it in group]


def tasks(
    count: int | None = NUM, temperatures: Sequence[float] = (0.0, 0.8)
) -> Iterator[GenerationTask]:
    turns = (assign_temperatures(prompts(), temperatures, turn) for turn in range(50))
    pairs = enumerate(islice(itertools.chain.from_iterable(turns), count))
    return (
        GenerationTask(f"task-{number}", prompt, temperature, 3 + number, 128)
        for number, (prompt, temperature) in pairs
    )


def told() -> ServerTokenizer:
    return ServerTokenizer(tiny_tokenizer(CHAT_TEMPLATE), [END], {})


def server(made: OpenAIServer, timeout: float = 20.0) -> CompletionServer:
    connected = CompletionServer(made.address, timeout)
    connected.find_model(["tiny"])
    return connected


def answered(
    folder: Path,
    *servers: CompletionServer,
    concurrency: int = 3,
    asked: Iterator[GenerationTask] | None = None,
) -> list[Any]:
    """The answers of every task, in order."""
    with (
        AnswerFile(folder / "answers.jsonl", "plan") as known,
        ServerBackend(servers, told(), concurrency) as backend,
    ):
        made = list(backend.generate_answers(asked or tasks(), known, lambda: 1000))
    assert [task.name for task, _ in made] == [f"task-{number}" for number in range(len(made))]
    return [turns for _, turns in made]


def known(folder: Path) -> int:
    return (folder / "answers.jsonl").read_bytes().count(b"\n") - 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "FIRST_DELAY", 0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with running() as made:
        return answered(tmp_path_factory.mktemp("undisturbed"), server(made))


def test_each_turn_is_generated_in_the_context_of_those_before_it(
    undisturbed: list[list[Answer]],
) -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    task = next(tasks())
    messages = [task.prompt.messages[0]]
    for answer in undisturbed[0]:
        assert (
            answer.context
            == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        )
        expected, text = completion(answer.context, task.seed, task.temperature, Behaviour().text)
        assert answer.token_ids == expected and answer.reason == "stop"
        messages += [{"role": "assistant", "content": text}, task.prompt.messages[2]]
    assert len(undisturbed[0]) == 2 and len(undisturbed) == NUM


def test_a_generated_turn_that_the_template_rejects_ends_its_conversation(tmp_path: Path) -> None:
    rejecting = (
        "{% for message in messages if message.role == 'assistant' %}{{ raise_exception('no such"
        " turn') }}{% endfor %}" + CHAT_TEMPLATE
    )
    tokenizer = ServerTokenizer(tiny_tokenizer(rejecting), [END], {})
    with running() as made:
        turns = generate_conversation(server(made), next(tasks()), tokenizer)
    assert (turns[0].reason, turns[0].error) == ("stop", None) and turns[0].token_ids
    assert (turns[1].reason, turns[1].token_ids) == ("refused", []) and "no such turn" in str(
        turns[1].error
    )
    assert len(turns) == 2


def test_a_question_leaves_nothing_to_a_model_s_own_sampling(tmp_path: Path) -> None:
    """vLLM fills in what a request leaves out from generation_config.json."""
    bodies: list[dict[str, Any]] = []
    with running(Behaviour(fault=lambda number, body: bodies.append(body))) as made:  # type: ignore[func-returns-value]
        (turns,) = answered(tmp_path, server(made), asked=tasks(1))
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
def test_what_fails_for_a_while_is_asked_again(
    fault: Any, tmp_path: Path, undisturbed: list[Any]
) -> None:
    behaviour = Behaviour(
        fault=lambda number, body: fault if number % 5 == 1 else None, headers={"Retry-After": "0"}
    )
    with running(behaviour) as made:
        assert answered(tmp_path, server(made)) == undisturbed


def test_a_server_that_asks_for_ages_is_asked_again_within_ten_minutes() -> None:
    behaviour = Behaviour(fault=lambda number, body: 503, headers={"Retry-After": "9" * 30})
    with running(behaviour) as made, pytest.raises(UnavailableError) as caught:
        server(made).complete({})
    assert caught.value.seconds == 600


def test_a_stalled_answer_is_given_by_another_server(
    tmp_path: Path, undisturbed: list[Any]
) -> None:
    with (
        running(Behaviour(fault=lambda number, body: STALL if number == 2 else None)) as one,
        running() as two,
    ):
        assert answered(tmp_path, server(one, timeout=0.5), server(two)) == undisturbed


def test_a_server_that_dies_leaves_its_work_to_the_other(
    tmp_path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "RETRY_TIMEOUT_S", 0.2)
    with running() as two, running(Behaviour(seconds=0.01)) as one:
        connected = server(one, timeout=0.5), server(two)
        threading.Timer(0.05, one.shutdown).start()
        one.behaviour.fault = lambda number, body: CUT if number > 4 else None
        assert answered(tmp_path, *connected) == undisturbed


def test_when_no_server_answers_what_was_generated_is_kept(
    tmp_path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "RETRY_TIMEOUT_S", 0.1)
    with (
        running(Behaviour(fault=lambda number, body: 500 if number >= 19 else None)) as made,
        pytest.raises(
            ResourceError,
            match=r"no server answers any more \(http://.*: 500 .*\); start the servers again",
        ),
    ):
        answered(tmp_path, server(made))
    kept = known(tmp_path)
    assert 5 <= kept < NUM
    with running() as other:
        assert answered(tmp_path, server(other), concurrency=1) == undisturbed
        assert other.num_requests <= sum(map(len, undisturbed)) - kept
    assert known(tmp_path) == NUM


def test_a_refused_question_ends_its_conversation_and_is_asked_again(
    tmp_path: Path, undisturbed: list[Any]
) -> None:
    def fault(number: int, body: dict[str, Any]) -> int | None:
        return 400 if len(body["prompt"]) % 7 == 0 else None

    with running(Behaviour(fault=fault)) as made:
        results = answered(tmp_path, server(made))
    refusals = [turns for turns in results if turns[-1].error]
    assert refusals and all(turns[-1].error.startswith("400 ") for turns in refusals)
    assert all(len(turns[-1].context) % 7 == 0 for turns in refusals) and known(
        tmp_path
    ) == NUM - len(refusals)
    with running() as other:
        assert answered(tmp_path, server(other)) == undisturbed


@pytest.mark.parametrize("status", [400, 401])
def test_a_server_that_never_will_is_named(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MAX_REFUSED_PROMPTS", 8)
    with (
        running(Behaviour(fault=lambda number, body: status)) as made,
        pytest.raises(ResourceError, match=f"/v1/completions answered {status} "),
    ):
        answered(tmp_path, server(made))
    assert not known(tmp_path)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        # by another end than the tokenizer's
        ({"text": "ab", "token_ids": [9, 8, 0], "finish_reason": "stop"}, [9, 8, 0]),
        # by one that the server alone knows
        ({"text": "ab", "token_ids": [9, 8, 2], "finish_reason": "stop"}, [9, 8, 2]),
        # llama.cpp leaves it out
        ({"text": "ab", "token_ids": [9, 8], "finish_reason": "stop"}, [9, 8, 3]),
        ({"text": "ab", "token_ids": [9, 8], "finish_reason": "length"}, [9, 8]),
        # of another tokenizer
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
        answered(tmp_path, server(one), server(two))
    assert abs(one.num_requests - two.num_requests) <= 0.2 * (one.num_requests + two.num_requests)


def test_text_is_tokenised_where_a_server_gives_no_tokens(
    tmp_path: Path, undisturbed: list[Any]
) -> None:
    with running(Behaviour(returns_tokens=False)) as made:
        assert answered(tmp_path, server(made)) == undisturbed


def test_the_model_is_found_by_name_or_because_it_is_alone() -> None:
    with running(Behaviour(models=("other", "tiny"))) as made:
        assert server(made).model == "tiny"
        with refused("data.regenerate.server", holds="which serves other, tiny"):
            CompletionServer(made.address, 1.0).find_model(["elsewhere"])
    with pytest.raises(ResourceError, match=r"/v1/models does not answer .*; start the server"):
        CompletionServer(made.address, 1.0).find_model(["tiny"])
    with refused("data.regenerate.server", "localhost:8000"):
        CompletionServer("localhost:8000", 1.0)


def test_a_key_goes_to_the_address_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Behaviour()) as made, running(Behaviour()) as other:
        monkeypatch.setenv("OPENAI_API_KEY", "of-somebody-else")
        monkeypatch.setenv(
            "SPECDISTILL_SERVER_KEYS",
            f"{made.address}/ the-key http://127.0.0.1.evil.example another-key",
        )
        for connected in (server(made), server(other)):
            connected.complete(
                {"model": "tiny", "prompt": [5], "seed": 0, "temperature": 0, "max_tokens": 4}
            )
        assert (made.authorization, other.authorization) == ("Bearer the-key", None)
    with refused("data.regenerate.server", "http://127.0.0.1.evil.example"):
        CompletionServer("http://127.0.0.1.evil.example", 1.0)
    monkeypatch.setenv("SPECDISTILL_SERVER_KEYS", f"{made.address} clé")
    with refused("SPECDISTILL_SERVER_KEYS"):
        CompletionServer(made.address, 1.0)


def block_of(
    folder: Path, num_tokens: int, *servers: CompletionServer, rules: Sequence[str] = (),
    concurrency: int = 2, all_tokens: bool = False, num_long_prompts: int = 0
) -> BlockOutput:  # fmt: skip
    words = told()

    def candidate(task: GenerationTask, answer: Answer) -> CheckedAnswer:
        return CheckedAnswer(
            answer, words.text(answer.token_ids), not task.prompt.messages, words.special
        )

    made = BlockOutput(
        {name: RULES[name] for name in rules}, candidate, all_tokens, lambda tokens: None
    )
    # Making the tasks counts the prompts that are too long to be asked.
    made.counts.filtered.update(["long_prompt"] * num_long_prompts)
    with (
        AnswerFile(folder / "answers.jsonl", "plan") as known,
        ServerBackend(servers, words, concurrency) as backend,
    ):
        generate_block(num_tokens, iter([[Stream(list(tasks(1000)), 1.0)]]), backend, known, made)
    return made


def test_rows_are_those_of_the_first_tasks_that_give_enough_and_few_more_are_asked(
    tmp_path: Path,
) -> None:
    found = []
    for concurrency in (1, 8):
        with running() as made:
            found.append(
                block_of(tmp_path / str(concurrency), 400, server(made), concurrency=concurrency)
            )
            needed = 400 / 16  # an answer has sixteen tokens
            assert made.num_requests <= 1.3 * needed + 8
    assert found[0].rows == found[1].rows and 398 <= found[0].tokens < 440


@pytest.mark.parametrize("all_tokens", [False, True])
def test_the_loss_is_on_answers_or_on_all(all_tokens: bool, tmp_path: Path) -> None:
    with running() as made:
        rows = block_of(tmp_path, 100, server(made), all_tokens=all_tokens).rows
    chats = [row for row in rows if row["input_ids"][:2] != [5, 6]]
    assert chats and all((sum(row["loss_mask"]) == row["length"]) is all_tokens for row in chats)


def test_an_answer_that_breaks_a_rule_is_filtered_with_what_follows(tmp_path: Path) -> None:
    with running(
        Behaviour(text=lambda digest: "ab" * 30 if digest < "4" else f"answer {digest}")
    ) as made:
        found = block_of(tmp_path, 600, server(made), rules=["looping"])
    assert found.rows and not any(
        "ababab" in tiny_tokenizer().decode(row["input_ids"]) for row in found.rows
    )
    assert set(found.counts.filtered) == {"looping"} and found.tokens >= 0.99 * 600


@pytest.mark.parametrize("num_long_prompts", [0, 1000])
def test_a_block_of_which_nothing_is_kept_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_long_prompts: int
) -> None:
    monkeypatch.setattr(generate, "MAX_EMPTY_TASKS", 20)
    with (
        running(Behaviour(text=lambda digest: " ")) as made,
        refused(
            "data.regenerate.filter",
            "rules that dropped 20 answers in a row, most often the rule empty",
        ),
    ):
        block_of(tmp_path, 10**6, server(made), rules=["empty"], num_long_prompts=num_long_prompts)


def test_turns_share_a_row_where_their_contexts_continue(undisturbed: list[list[Answer]]) -> None:
    one, two = undisturbed[0]
    (row,) = build_documents([one, two], all_tokens=False)
    assert row["length"] == len(row["input_ids"]) == len(row["loss_mask"])
    assert row["input_ids"] == [*two.context, *two.token_ids]
    assert sum(row["loss_mask"]) == len(one.token_ids) + len(two.token_ids)
    assert len(build_documents([two, one], all_tokens=False)) == 2


def test_answers_of_another_recipe_are_dropped(tmp_path: Path) -> None:
    path, turns = tmp_path / "block.jsonl", [Answer([1], [2, 3], "stop")]
    with AnswerFile(path, "one") as answers:
        answers.add({"a": turns, "b": []})
    for plan, found in (("one", (turns, [])), ("other", (None, None)), ("one", (None, None))):
        with AnswerFile(path, plan) as answers:
            assert (answers.turns.get("a"), answers.turns.get("b")) == found


def test_a_disk_that_is_full_ends_it_in_one_line_and_what_is_there_stays(tmp_path: Path) -> None:
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
