"""Making rows: from a source as it is, and in blocks that the target generates, with any number of
shards, servers and interruptions."""

import json
import os
import random
import re
import shutil
import socket
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from specdistill.common.errors import ResourceError, UserError
from specdistill.common.folders import exclusive_lock
from specdistill.data.produce import blocks as blocks_module
from specdistill.data.produce import generate, merge
from specdistill.data.produce.blocks import Block, plan_blocks
from specdistill.data.produce.generate import make_blocks
from specdistill.data.produce.job import Job
from specdistill.data.rows.row_set import MANIFEST, RowTarget
from specdistill.recipe.sections import DataConfig, LocalRegeneration, ServerRegeneration
from specdistill.workflows.make_data import parse_shard
from tests.data.produce.openai_server import Behaviour, running
from tests.data.produce.row_sets import (
    build_generating_target,
    chat,
    config_for,
    contents,
    decode_texts,
    make_numbered_rows,
    opened,
    read_manifest,
    replace,
    row_target,
    run_until_killed,
)
from tests.processes import run_processes
from tests.refusals import refused

GENERATED = LocalRegeneration(num_tokens=300, prompt_tokens=4, batch_size=8)


# ---- Rows of a source as it is


def test_more_rows_move_none_to_the_other_side_and_equal_rows_share_one(tmp_path: Path) -> None:
    """The default split is by hash; a sample of exactly the share is drawn anew for more rows."""

    def halves(rows: list[dict[str, Any]], **settings: Any) -> list[set[str]]:
        return [set(decode_texts(half)) for half in opened(config_for(tmp_path, rows, **settings))]

    train, validation = halves(make_numbered_rows(100))
    assert (
        10 <= len(validation) <= 30
        and len(train | validation) == 100
        and train != halves(make_numbered_rows(100), seed=1)[0]
    )
    more = [{"text": f"another {number}"} for number in range(50)]
    later_train, later_validation = halves(
        [*more, *reversed(make_numbered_rows(100)), *make_numbered_rows(100)]
    )
    assert (
        train < later_train and validation < later_validation and not later_train & later_validation
    )
    train, validation = halves(make_numbered_rows(100), validation_split="sample")
    assert len(validation) == 20
    assert not validation < halves([*more, *make_numbered_rows(100)], validation_split="sample")[1]


def test_answers_to_the_same_questions_are_on_one_side(tmp_path: Path) -> None:
    config = config_for(
        tmp_path, [chat(f"q{number % 20}", f"a{number}") for number in range(80)], max_length=64
    )
    questions = [
        {text.split("<|end|>")[0] for text in decode_texts(half)} for half in opened(config)
    ]
    assert (
        all(questions)
        and not questions[0] & questions[1]
        and len(questions[0] | questions[1]) == 20
    )


def test_weights_repeat_the_training_rows_of_a_source(tmp_path: Path) -> None:
    first = config_for(tmp_path, make_numbered_rows(10)).source
    (tmp_path / "other").mkdir()
    second = config_for(
        tmp_path / "other", [{"text": f"other {number:03d}"} for number in range(10)]
    ).source
    sources = [{"source": first, "weight": 2.5}, {"source": second, "weight": 0.5}]
    config = config_for(
        tmp_path,
        make_numbered_rows(10),
        source=sources,
        validation_fraction=0.1,
        validation_split="sample",
    )
    train, validation = opened(config)
    kept = decode_texts(train)
    repeated = [kept.count(row["text"]) for row in make_numbered_rows(10)]
    others = [kept.count(f"other {number:03d}") for number in range(10)]
    assert (
        set(repeated) <= {0, 2, 3}
        and repeated.count(3) in (4, 5)
        and set(others) == {0, 1}
        and sum(others) in (4, 5)
    )
    assert len(decode_texts(validation)) == 2 and not set(decode_texts(validation)) & set(kept)
    assert [source.documents for source in read_manifest(config).sources] == [
        sum(repeated),
        sum(others),
    ]


def test_long_conversations_are_cut_and_stay_on_one_side(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twelve conversations have three exchanges, each of which nearly fills a row; one has a fourth
    exchange that fits none."""
    long = [
        [f"q{number}" + "?" * 30, "a"] * 3 + ["x" * 64, "b"] * (number == 0) for number in range(12)
    ]
    config = config_for(tmp_path, [chat(*texts) for texts in long], max_length=64)
    numbers = [
        [re.findall(r"q(\d+)", text)[0] for text in decode_texts(half)] for half in opened(config)
    ]
    assert all(numbers) and not set(numbers[0]) & set(numbers[1])
    assert sorted(numbers[0] + numbers[1]) == sorted([str(number) for number in range(12)] * 3)
    assert (
        "12 of 12 rows are conversations longer than data.max_length=64 tokens and are cut at their"
        " turns" in caplog.text
    )
    assert read_manifest(config).filtered == {"too_long": 1}


@pytest.mark.parametrize(
    ("rows", "settings", "key", "got"),
    [
        (make_numbered_rows(1), {}, "data.source", "a single usable row"),
        (make_numbered_rows(1) * 4, {}, "data.source", "4 usable rows, all with the same content"),
        (
            make_numbered_rows(5),
            {"regenerate": replace(GENERATED, prompt_tokens=32)},
            "data.regenerate.prompt_tokens",
            "32",
        ),
        (
            make_numbered_rows(5),
            {"regenerate": replace(GENERATED, prompt_tokens=30)},
            "data.max_length",
            "32, but no row of data.source gives a prompt",
        ),
    ],
)
def test_settings_and_rows_that_cannot_be_used_are_refused(
    tmp_path: Path, rows: Any, settings: dict[str, Any], key: str, got: str
) -> None:
    with refused(key, got):
        opened(config_for(tmp_path, rows, **settings), build_generating_target())


# ---- Rows in blocks


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the plan for 400 tokens or more have eight blocks."""
    monkeypatch.setattr(blocks_module, "MIN_BLOCK_TOKENS", 50)
    monkeypatch.setattr(blocks_module, "SMALL_JOB_BLOCKS", 8)


def make_mixed_rows(count: int) -> list[dict[str, Any]]:
    return [
        *make_numbered_rows(count),
        *(chat(f"q{number:02d}", "-", "more", "-") for number in range(count)),
    ]


def make_row_set(
    folder: Path, config: DataConfig, target: RowTarget, shards: int
) -> dict[str, bytes]:
    """Return the files of a row set whose blocks are made by shards, the last shard first."""
    folder.mkdir(parents=True)
    job = Job(replace(config, rows=str(folder / "set")), target)
    for index in reversed(range(shards)):
        make_blocks(job, index, shards)
    merge.merge(job)
    return contents(folder / "set")


def make_generating_config(tmp_path: Path, **settings: Any) -> DataConfig:
    variant = ServerRegeneration if settings.get("server") else LocalRegeneration
    regenerate = variant(**{"num_tokens": 500, "prompt_tokens": 4, "batch_size": 8, **settings})
    return config_for(tmp_path, make_mixed_rows(20), max_length=64, regenerate=regenerate)


def test_blocks_follow_from_the_number_of_tokens_alone() -> None:
    for num_tokens, count in (
        (1, 1),
        (2_000, 1),
        (9_000, 4),
        (420_000, 4),
        (600_000, 5),
        (250_000_000, 1908),
        (10**10, 4096),
    ):
        blocks = plan_blocks(num_tokens)
        assert len(blocks) == count and sum(block.num_tokens for block in blocks) == num_tokens
        assert [block.number for block in blocks] == list(range(count))
    few, many = list(range(3)), list(range(20))
    eight_blocks = [Block(number, 8, 1000) for number in range(8)]
    shares = [block.select_rows(many)[0] for block in eight_blocks]
    assert sorted(row for share in shares for row in share) == many
    assert [block.select_rows(few) for block in eight_blocks][:4] == [
        ([0], 0, 3),
        ([1], 0, 3),
        ([2], 0, 2),
        ([0], 1, 3),
    ]


@pytest.mark.long  # the target generates its rows twice; quick by servers, below
@pytest.mark.usefixtures("small_blocks")
def test_any_number_of_shards_makes_the_same_bytes(tmp_path: Path) -> None:
    config, target = make_generating_config(tmp_path), build_generating_target()
    whole = make_row_set(tmp_path / "1", config, target, 1)
    assert len(list((tmp_path / "1").glob("*.blocks/*.arrow"))) == 8
    assert make_row_set(tmp_path / "7", config, target, 7) == whole


@pytest.mark.usefixtures("small_blocks")
def test_any_servers_and_shards_make_the_same_bytes(tmp_path: Path) -> None:
    with running() as one, running(Behaviour(seconds=0.002)) as two:
        config = make_generating_config(tmp_path, server=[one.address], batch_size=3)
        both = make_generating_config(tmp_path, server=[two.address, one.address], batch_size=5)
        whole = make_row_set(tmp_path / "1", config, row_target(), 1)
        assert (
            make_row_set(tmp_path / "2", both, row_target(), 2)
            == whole
            == make_row_set(tmp_path / "7", config, row_target(), 7)
        )
    assert two.num_requests


@pytest.mark.long  # makes the rows several times
@pytest.mark.usefixtures("small_blocks")
def test_short_answers_use_every_question_once_by_any_servers_and_shards(tmp_path: Path) -> None:
    """Answers of two tokens need far more questions than are planned. Any servers count the same
    questions as too long."""
    questions = [f"q{number:03d}" + "?" * 40 * (number % 9 == 0) for number in range(270)]
    rows = [chat(question, "-") for question in questions]
    row_sets = []
    with (
        running(Behaviour(text=lambda digest: digest[0])) as one,
        running(Behaviour(text=lambda digest: digest[0])) as two,
    ):
        for name, servers, batch_size, shards in (("1", [one], 1, 1), ("2", [two, one], 5, 3)):
            addresses = [server.address for server in servers]
            regenerate = ServerRegeneration(
                num_tokens=400, prompt_tokens=4, server=addresses, batch_size=batch_size
            )
            config = config_for(tmp_path, rows, max_length=64, regenerate=regenerate)
            row_sets.append(make_row_set(tmp_path / name, config, row_target(), shards))
        answers_of_rows = Counter[int]()
        for path in (tmp_path / "1").glob("*.blocks/*.arrow"):
            answers_of_rows.update(Dataset.from_file(str(path))["row"])
    assert row_sets[0] == row_sets[1]
    # Each question has at most one answer.
    assert 398 / 2 <= len(answers_of_rows) < 240 and set(answers_of_rows.values()) == {1}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "by_server",
    # long: the target generates its rows twice
    [pytest.param(False, marks=pytest.mark.long), True],
)
def test_an_interrupted_block_goes_on_to_the_same_bytes(
    tmp_path: Path, by_server: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with running() as server:
        config = make_generating_config(
            tmp_path, server=[server.address] if by_server else [], batch_size=4, num_tokens=400
        )
        target = row_target() if by_server else build_generating_target()
        expected = make_row_set(tmp_path / "whole", config, target, 1)
        needed, moments = server.num_requests, random.Random(0)
        job = Job(replace(config, rows=str(tmp_path / "cut" / "set")), target)
        for torn in (False, True, False):
            run_until_killed(partial(make_blocks, job), moments.randint(1, 4), torn=torn)
        capsys.readouterr()
        make_blocks(job)
        (progress,) = re.findall(
            r"Generating training data: (\d+) of (\d+) tokens, took", capsys.readouterr().err
        )
        # Earlier answers count as progress, and answers that are not kept do not.
        assert generate.MIN_FILL <= int(progress[0]) / int(progress[1]) < 1.5
        merge.merge(job)
        assert contents(job.folder) == expected
        # Only requests that were in flight are repeated.
        assert server.num_requests <= 2 * needed + 3 * 4 * 2


def test_greedy_rows_are_what_transformers_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are beginnings of texts, and conversations by `apply_chat_template`; answers go up to
    an end token."""
    monkeypatch.setattr(
        "specdistill.data.produce.transformers_backend.choose_fast_dtype",
        lambda device: torch.float32,
    )
    target = build_generating_target(num_layers=2)
    config = replace(
        make_generating_config(tmp_path, temperatures=[0.0], num_tokens=600), packing=False
    )
    job = Job(config, target)
    make_blocks(job)
    rows = [
        row for path in sorted(job.blocks.glob("*.arrow")) for row in Dataset.from_file(str(path))
    ]
    tokenizer, model = target.tokenizer, target.model
    texts = {tuple(tokenizer(row["text"])["input_ids"][:4]) for row in make_numbered_rows(20)}
    questions = [row["messages"][:1] for row in make_mixed_rows(20)[20:]]
    chats = {
        tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
        for messages in questions
    }  # type: ignore[call-overload, index]
    kinds = {"text": 0, "chat": 0}
    for row in rows:
        ids = row["input_ids"]
        head = next((head for head in chats if tuple(ids[: len(head)]) == head), tuple(ids[:4]))
        kinds["chat" if head in chats else "text"] += len(ids) - len(head)
        assert row["loss_mask"] == [int(head not in chats)] * len(head) + [1] * (
            len(ids) - len(head)
        )
        prompt = torch.tensor([head])
        limits = {"max_new_tokens": len(ids) - len(head), "eos_token_id": [0, 3], "pad_token_id": 0}
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **limits
        )
        assert ids == expected[0].tolist()
    assert kinds["text"] and kinds["chat"] == pytest.approx(200, abs=8 * 30)
    assert any(tuple(row["input_ids"][:4]) in texts for row in rows)


def test_the_target_generates_once_for_equal_inputs(tmp_path: Path) -> None:
    target, calls = build_generating_target(), []
    target.model.register_forward_hook(lambda *_: calls.append(1))
    config = config_for(tmp_path, make_numbered_rows(20), regenerate=GENERATED)
    train, validation = opened(config, target)
    first = [{text[:15] for text in decode_texts(half)} for half in (train, validation)]
    assert (
        calls
        and all(first)
        and sum(map(len, decode_texts(train) + decode_texts(validation))) >= 300
    )
    calls.clear()
    assert opened(config, target)[0].to_list() == train.to_list()
    opened(replace(config, packing=False), target)
    assert not calls  # the same text, packed otherwise
    opened(replace(config, seed=1), target)
    assert calls
    assert (read_manifest(config, target).generation or {})["num_tokens"] == 300


def test_a_few_prompts_come_from_every_source_by_its_weight(tmp_path: Path) -> None:
    sources = []
    for letter, count, weight in (("a", 60, 0.5), ("b", 20, 1)):
        path = tmp_path / f"{letter}.jsonl"
        path.write_text(
            "".join(
                json.dumps({"text": f"{letter} {number:02d} {letter * 30}"}) + "\n"
                for number in range(count)
            )
        )
        sources.append({"source": str(path), "weight": weight})
    regenerate = replace(GENERATED, num_tokens=600, temperatures=[0.8])
    config = config_for(tmp_path, [], source=sources, regenerate=regenerate, packing=False)
    halves = [decode_texts(half) for half in opened(config, build_generating_target())]
    from_first = [text.startswith("a") for half in halves for text in half if text[0] in "ab"]
    assert 0.4 <= sum(from_first) / len(from_first) <= 0.8  # weight times rows: 30 to 20


@pytest.mark.usefixtures("small_blocks")
def test_missing_blocks_and_blocks_of_another_recipe_are_named(tmp_path: Path) -> None:
    with running() as server:
        config = make_generating_config(tmp_path, server=[server.address])
        job, other = (
            Job(replace(config, seed=seed, rows=str(tmp_path / name / "set")), row_target())
            for name, seed in (("a", 0), ("b", 1))
        )
        make_blocks(job, 0, 2)
        with refused(
            "data.shard",
            job.blocks,
            holds="lacks 4 of 8 blocks: block-00001, block-00003, block-00005, block-00007",
        ):
            merge.merge(job)
        make_blocks(job, 1, 2)
        make_blocks(other, 0, 8)
    shutil.copy(other.blocks / "block-00000.arrow", job.blocks)
    with refused(
        "data.shard", job.blocks / "block-00000.arrow", holds=f"of the generation plan {other.plan}"
    ):
        merge.merge(job)
    shutil.copy(job.blocks / "block-00002.arrow", job.blocks / "block-00000.arrow")
    with refused("data.shard", holds=f"block 2 of the generation plan {job.plan}"):
        merge.merge(job)
    assert not (job.folder / MANIFEST).exists()


def test_a_second_writer_is_refused_and_told_the_process_of_the_first(tmp_path: Path) -> None:
    job = Job(make_generating_config(tmp_path), build_generating_target())
    first = f"which process {os.getpid()} on {socket.gethostname()} is writing"
    with (
        exclusive_lock(job.blocks / "block-00000.lock", "data.shard", job.blocks),
        refused("data.shard", holds=first),
    ):
        make_blocks(job)
    make_blocks(job)
    with exclusive_lock(job.folder.with_name(f"{job.folder.name}.lock"), "data.rows", job.folder):
        with refused("data.rows", job.folder, holds=first):
            merge.merge(job)
        assert not (job.folder / MANIFEST).exists()
    merge.merge(job)
    assert (job.folder / MANIFEST).exists()


SLURM = {"SLURM_ARRAY_TASK_ID": "14", "SLURM_ARRAY_TASK_MIN": "11", "SLURM_ARRAY_TASK_COUNT": "7"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2"}


@pytest.mark.parametrize(
    ("stated", "environment", "expected"),
    [
        (None, SLURM, (0, 1)),
        ("2/3", SLURM, (2, 3)),
        ("auto", SLURM, (3, 7)),
        ("auto", {**KUBERNETES, "JOB_COMPLETIONS": "5"}, (2, 5)),
        ("auto/4", KUBERNETES, (2, 4)),
        ("auto", KUBERNETES, None),
        ("auto", {}, None),
        ("3/3", {}, None),
        ("1", {}, None),
    ],
)
def test_a_shard_is_given_or_taken_from_the_array_job(
    monkeypatch: pytest.MonkeyPatch,
    stated: str | None,
    environment: dict[str, str],
    expected: tuple[int, int] | None,
) -> None:
    for name in (*SLURM, *KUBERNETES, "JOB_COMPLETIONS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if expected:
        assert parse_shard(stated) == expected
    else:
        with refused("data.shard", stated):
            parse_shard(stated)


def test_a_disk_without_room_ends_generation_after_the_first_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "specdistill.common.progress.shutil.disk_usage", lambda path: SimpleNamespace(free=5_000)
    )
    config, target = (
        config_for(tmp_path, make_numbered_rows(20), regenerate=GENERATED),
        build_generating_target(),
    )
    with pytest.raises(
        ResourceError, match=r"generating takes about .* whose disk has 5\.0 kB left"
    ):
        opened(config, target)
    (kept,) = Job(config, target).blocks.glob("*.jsonl")
    assert kept.read_bytes().count(b"\n") == 2
    assert (
        opened(replace(config, force=True), target) and "estimated from" in capsys.readouterr().err
    )


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("local_ranks", [(0, 1), (0, 1, 0)])
@pytest.mark.parametrize("is_common", [True, False])
def test_processes_of_a_launch_share_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_ranks: tuple[int, ...], is_common: bool
) -> None:
    """One machine runs two processes, and in one case a second machine runs one. Without a common
    folder each machine makes all blocks."""
    config, target, make_block = (
        make_generating_config(tmp_path),
        build_generating_target(),
        generate._make_block,
    )

    def work(rank: int) -> None:
        machine = 0 if is_common else local_ranks[: rank + 1].count(0)
        numbers: list[int] = []
        monkeypatch.setattr(
            generate,
            "_make_block",
            lambda job, block, **how: numbers.append(block.number) or make_block(job, block, **how),
        )
        machine_config = replace(config, cache_dir=str(tmp_path / f"cache-{machine}"))
        halves = opened(machine_config, target)
        print(json.dumps([numbers, [half.to_list() for half in halves]]))

    ended = run_processes(tmp_path, work, *local_ranks)
    assert [process.code for process in ended] == [0] * len(local_ranks), ended[-1].err
    numbers, halves = zip(*(json.loads(process.out) for process in ended), strict=True)
    assert all(half == halves[0] for half in halves)
    count = len(local_ranks) if is_common else 2
    assert list(numbers[:2]) == [list(range(8))[rank::count] for rank in range(2)]
    assert (
        len(local_ranks) == 2
        or numbers[2] == list(range(8))[2::3]
        or (not is_common and numbers[2] == list(range(8)))
    )


@pytest.mark.long
@pytest.mark.distributed
def test_machines_whose_rows_differ_are_named(tmp_path: Path) -> None:
    config = config_for(tmp_path, make_numbered_rows(20))
    (tmp_path / "b").mkdir()
    other = config_for(tmp_path / "b", [*make_numbered_rows(19), {"text": "another"}])

    def work(rank: int) -> None:
        with pytest.raises(
            UserError,
            match=r"in process 1 on .*: make the rows on one machine, and copy the folder",
        ):
            opened((config, other)[rank])

    ended = run_processes(tmp_path, work, 0, 0)
    assert [process.code for process in ended] == [0, 0], ended[0].err + ended[1].err
