"""`data:` of a recipe to packed rows: splits, weights, caching, and settings that cannot be used."""

import json
import logging
import os
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from specdistill.data import regeneration
from specdistill.data import training_data as module
from specdistill.data.cache import content_fingerprint
from specdistill.data.packing import collate
from specdistill.data.training_data import training_data
from specdistill.errors import ResourceError, UserError
from specdistill.pico.corpus import CHAT_TEMPLATE
from specdistill.recipe.sections import DataConfig, RegenerateConfig
from tests.processes import run_processes
from tests.tiny import tiny_target_model, tiny_tokenizer

GENERATED = RegenerateConfig(num_tokens=300, prompt_tokens=4, batch_size=8)


def config_for(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> DataConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    defaults = {"source": str(path), "max_length": 32, "validation_fraction": 0.2, "decontaminate": []}
    return DataConfig(**{**defaults, "cache_dir": str(folder / "cache"), **settings})


def replace(config: Any, **changes: Any) -> Any:
    return config.model_copy(update=changes)


def numbered(count: int) -> list[dict[str, str]]:
    return [{"text": f"text number {number:03d}"} for number in range(count)]


def texts_in(rows: Dataset) -> list[str]:
    """The documents of packed rows, decoded."""
    tokenizer, batch, found = tiny_tokenizer(), collate(list(rows)), []
    for ids, numbers in zip(batch["input_ids"], batch["document_ids"], strict=True):
        for number in numbers[numbers >= 0].unique().tolist():
            found.append(tokenizer.decode(ids[numbers == number]).removesuffix("<|endoftext|>"))
    return found


def test_documents_are_split_before_they_are_packed(tmp_path: Path) -> None:
    config = config_for(tmp_path, numbered(20))
    train, validation = training_data(config, tiny_tokenizer(), None, fingerprint="")
    kept, held_out = texts_in(train), texts_in(validation)
    assert sorted(kept + held_out) == [row["text"] for row in numbered(20)] and held_out
    assert train.column_names == ["input_ids", "loss_mask", "document_ids", "position_ids"]
    again = training_data(config, tiny_tokenizer(), None, fingerprint="")
    assert [half._fingerprint for half in again] == [train._fingerprint, validation._fingerprint]
    other, _ = training_data(replace(config, seed=1), tiny_tokenizer(), None, fingerprint="")
    assert sorted(texts_in(other)) != sorted(kept)


def test_more_rows_move_none_to_the_other_side_and_equal_ones_are_on_one(tmp_path: Path) -> None:
    """By hash, the default. A sample of exactly the share draws anew."""

    def halves(rows: list[dict[str, Any]], **settings: Any) -> list[set[str]]:
        made = training_data(config_for(tmp_path, rows, **settings), tiny_tokenizer(), None, fingerprint="")
        return [set(texts_in(half)) for half in made]

    train, validation = halves(numbered(100))
    assert 10 <= len(validation) <= 30
    more = [{"text": f"another {number}"} for number in range(50)]
    later_train, later_validation = halves([*more, *reversed(numbered(100)), *numbered(100)])
    assert train < later_train and validation < later_validation and not later_train & later_validation
    train, validation = halves(numbered(100), validation_split="sample")
    assert len(validation) == 20
    assert not validation < halves([*more, *numbered(100)], validation_split="sample")[1]


def test_answers_to_the_same_questions_are_on_one_side(tmp_path: Path) -> None:
    def chat(question: int, answer: int) -> dict[str, Any]:
        roles = ("user", f"q{question}"), ("assistant", f"a{answer}")
        return {"messages": [{"role": role, "content": content} for role, content in roles]}

    config = config_for(tmp_path, [chat(number % 20, number) for number in range(80)], max_length=64)
    halves = training_data(config, tiny_tokenizer(CHAT_TEMPLATE), None, fingerprint="")
    asked = [{text.split("<|end|>")[0] for text in texts_in(half)} for half in halves]
    assert all(asked) and not asked[0] & asked[1] and len(asked[0] | asked[1]) == 20


def test_weights_repeat_the_training_rows_of_a_source(tmp_path: Path) -> None:
    first = config_for(tmp_path, numbered(10)).source
    (tmp_path / "other").mkdir()
    second = config_for(tmp_path / "other", [{"text": f"other {number:03d}"} for number in range(10)]).source
    sources = [{"source": first, "weight": 2.5}, {"source": second, "weight": 0.5}]
    config = config_for(tmp_path, numbered(10), source=sources, validation_fraction=0.1, validation_split="sample")
    train, validation = training_data(config, tiny_tokenizer(), None, fingerprint="")
    kept = texts_in(train)
    repeated = [kept.count(row["text"]) for row in numbered(10)]
    others = [kept.count(f"other {number:03d}") for number in range(10)]
    assert set(repeated) <= {0, 2, 3} and repeated.count(3) in (4, 5) and set(others) == {0, 1} and sum(others) in (4, 5)
    assert len(texts_in(validation)) == 2 and not set(texts_in(validation)) & set(kept)


def test_assistant_tokens_alone_or_all_carry_loss(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}] * 2
    for loss_mask, expected in (("assistant", "cd<|end|>"), ("all", "<|user|>\nab<|end|><|assistant|>\ncd<|end|>")):
        config = config_for(tmp_path, rows, loss_mask=loss_mask, validation_split="sample")
        batch = collate(list(training_data(config, tiny_tokenizer(CHAT_TEMPLATE), None, fingerprint="")[0]))
        assert tiny_tokenizer().decode(batch["input_ids"][batch["loss_mask"] == 1]) == expected


def test_long_conversations_are_cut_and_stay_on_one_side(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Twelve rows of three exchanges, each as long as most of a row; the last exchange of one fits none."""
    rows = []
    for number in range(12):
        turns = [("user", f"q{number}" + "?" * 30), ("assistant", "a")] * 3 + [("user", "x" * 64), ("assistant", "b")] * (
            number == 0
        )
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    config = config_for(tmp_path, rows, max_length=64)
    halves = training_data(config, tiny_tokenizer(CHAT_TEMPLATE), None, fingerprint="")
    numbers = [[re.findall(r"q(\d+)", text)[0] for text in texts_in(half)] for half in halves]
    assert all(numbers) and not set(numbers[0]) & set(numbers[1])
    assert sorted(numbers[0] + numbers[1]) == sorted([str(number) for number in range(12)] * 3)
    assert "12 of 12 rows are conversations longer than data.max_length=64 tokens and are cut at their turns" in caplog.text
    assert "1 of 37 documents are longer than data.max_length=64 tokens and are left out" in caplog.text


def test_one_document_a_row_without_packing(tmp_path: Path) -> None:
    config = config_for(tmp_path, numbered(20), packing=False, validation_split="sample")
    train, validation = training_data(config, tiny_tokenizer(), None, fingerprint="")
    assert (len(train), len(validation)) == (16, 4)


def test_the_target_generates_once_for_equal_inputs(tmp_path: Path) -> None:
    model, tokenizer, calls = tiny_target_model(num_layers=1), tiny_tokenizer(CHAT_TEMPLATE), []
    model.register_forward_hook(lambda *_: calls.append(1))
    config = config_for(tmp_path, numbered(20), regenerate=GENERATED)
    train, validation = training_data(config, tokenizer, model, fingerprint="weights")
    assert calls and len(train) >= 1 and len(validation) >= 1
    written = sum(len(text) for text in texts_in(train))
    assert written >= 240
    starts = {row["text"][:4] for row in numbered(20)}
    assert any(text[:4] in starts for text in texts_in(train))

    calls.clear()
    again = training_data(config, tokenizer, model, fingerprint="weights")
    assert not calls and again[0].to_list() == train.to_list()
    training_data(replace(config, packing=False), tokenizer, model, fingerprint="weights")
    assert not calls  # the same text, packed otherwise
    for changed, fingerprint in ((config, "other weights"), (replace(config, seed=1), "weights")):
        training_data(changed, tokenizer, model, fingerprint=fingerprint)
        assert calls
        calls.clear()


def test_a_few_prompts_are_of_every_source_by_its_weight(tmp_path: Path) -> None:
    sources = []
    for letter, count, weight in (("a", 60, 0.5), ("b", 20, 1)):
        path = tmp_path / f"{letter}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{letter} {number:02d} {letter * 30}"}) + "\n" for number in range(count)))
        sources.append({"source": str(path), "weight": weight})
    config = config_for(tmp_path, [], source=sources, regenerate=GENERATED, packing=False)
    train, _ = training_data(config, tiny_tokenizer(), tiny_target_model(num_layers=1), fingerprint="weights")
    from_first = [text.startswith("a") for text in texts_in(train)]
    assert len(from_first) < 20  # of 64 prompts for training
    assert 0.4 <= sum(from_first) / len(from_first) <= 0.8  # 30 to 20


def test_no_prompt_of_the_validation_rows_is_trained_on(tmp_path: Path) -> None:
    rows = [{"text": f"{letter}" * 40} for letter in "abcdefghij"]
    config = config_for(tmp_path, rows, regenerate=GENERATED)
    train, validation = training_data(config, tiny_tokenizer(), tiny_target_model(num_layers=1), fingerprint="")
    first = [{text[0] for text in texts_in(half)} for half in (train, validation)]
    assert first[0] and first[1] and not first[0] & first[1]


def test_regenerated_answers_carry_loss_without_their_questions(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": "?"}]} for number in range(6)
    ]
    for loss_mask in ("assistant", "all"):
        config = config_for(tmp_path, rows, max_length=64, regenerate=replace(GENERATED, num_tokens=120), loss_mask=loss_mask)
        train, _ = training_data(config, tiny_tokenizer(CHAT_TEMPLATE), tiny_target_model(num_layers=1), fingerprint="")
        batch = collate(list(train))
        user = batch["input_ids"] == tiny_tokenizer().convert_tokens_to_ids("<|user|>")
        heads = user & (batch["position_ids"] == 0) & (batch["document_ids"] >= 0)
        assert heads.any() and (batch["loss_mask"][heads] == (loss_mask == "all")).all() and batch["loss_mask"].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 8, "source": "chats"}, "data.max_length: got 8, expected 20 or more"),
        ({"source": "single"}, "data.source: got a single usable row"),
        ({"source": "alike"}, "data.source: got 4 usable rows that are all alike"),
        ({"source": "short"}, "data.source: got 3 rows of fewer than 3 tokens"),
        ({"regenerate": replace(GENERATED, prompt_tokens=32)}, "data.regenerate.prompt_tokens: got 32, expected 1 to 31"),
        (
            {"regenerate": GENERATED, "max_length": 300},
            "data.max_length: got 300, expected at most 256, the target's context length",
        ),
        ({"regenerate": replace(GENERATED, prompt_tokens=30)}, "data.max_length: got 32, and no row that gives a prompt"),
    ],
)
def test_settings_and_rows_that_cannot_be_used(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    chat = {"messages": [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]}
    rows = {"chats": [chat, chat], "single": numbered(1), "short": [{"text": "a"}] * 3, "alike": numbered(1) * 4}
    name = settings.get("source", "")
    config = config_for(
        tmp_path, rows.get(name, numbered(5)), **{key: value for key, value in settings.items() if key != "source"}
    )
    with pytest.raises(UserError, match=message):
        training_data(config, tiny_tokenizer(CHAT_TEMPLATE), tiny_target_model(num_layers=1), fingerprint="")


@pytest.mark.long  # a trained target
def test_a_trained_target_generates_stories(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "models" / "stories260K-hf"
    model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = str(shared_data / "train" / "tinystories" / "tinystories_val_slice.jsonl")
    regenerate = RegenerateConfig(num_tokens=1500, batch_size=16)
    config = DataConfig(source=source, max_length=256, regenerate=regenerate, cache_dir=str(tmp_path))
    train, _ = training_data(config, tokenizer, model, fingerprint="stories260K")
    batch = collate(list(train))
    assert batch["loss_mask"][batch["document_ids"] >= 0].all()
    assert int((batch["document_ids"] >= 0).sum()) == pytest.approx(1500 * 0.98 * 256 / 224, rel=0.15)
    with torch.inference_mode():
        ids = batch["input_ids"][batch["document_ids"][:, -1] >= 0][:4]
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss < 1.4  # nats a token on stories that people wrote


def test_nothing_is_logged_as_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        training_data(config_for(tmp_path, numbered(5)), tiny_tokenizer(), None, fingerprint="")
    assert not caplog.records


def test_rows_are_found_again_in_a_copied_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another machine, where the same file has another name and date."""
    for machine in ("a", "b"):
        (tmp_path / machine).mkdir()
    first = training_data(config_for(tmp_path / "a", numbered(20)), tiny_tokenizer(), None, fingerprint="")
    config = config_for(tmp_path / "b", numbered(20))
    os.utime(str(config.source), (1, 1))
    shutil.copytree(tmp_path / "a" / "cache", tmp_path / "b" / "cache")
    monkeypatch.setattr("specdistill.data.encoding.Encoder.texts", None)
    again = training_data(config, tiny_tokenizer(), None, fingerprint="")
    assert [part.to_list() for part in again] == [part.to_list() for part in first]


def test_a_large_preparation_is_costed_from_its_first_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specdistill.data.cache.LARGE", 300)
    monkeypatch.setattr("specdistill.cost.shutil.disk_usage", lambda path: SimpleNamespace(free=50_000))
    config = config_for(tmp_path, numbered(300))
    with pytest.raises(
        ResourceError, match=r"preparing data.source takes about 86.4 kB in .*, whose disk has 50.0 kB left; .*force=true"
    ):
        training_data(config, tiny_tokenizer(), None, fingerprint="")
    train, validation = training_data(replace(config, force=True), tiny_tokenizer(), None, fingerprint="")
    said = capsys.readouterr().err
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if "│" in line]
    assert rows.count(["tokens", "4,800"]) == rows.count(["loss tokens", "4,800"]) == rows.count(["rows", "300"]) == 2
    assert len(texts_in(train)) + len(texts_in(validation)) == 300
    training_data(config, tiny_tokenizer(), None, fingerprint="")
    assert "preparing" not in capsys.readouterr().err  # they are there


@pytest.mark.distributed
def test_rows_are_prepared_once_on_each_machine_and_have_to_agree(tmp_path: Path) -> None:
    """Machine a has two processes, and machine b one. Its second file differs in a character."""
    for machine, last in (("a", "z"), ("b", "y")):
        same = [{"text": f"abc {index} def"} for index in range(20)]
        for number, rows in enumerate([same, [*same, {"text": f"abc {last}"}]]):
            (tmp_path / f"rows-{number}-{machine}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def prepare(rank: int) -> None:
        machine, texts, encode = "ab"[rank // 2], [], module.Encoder.texts
        module.Encoder.texts = lambda encoder, rows: texts.extend(rows) or encode(encoder, rows)  # type: ignore[method-assign]

        def halves(number: int) -> tuple[Dataset, Dataset]:
            file = tmp_path / f"rows-{number}-{machine}.jsonl"
            config = DataConfig(source=str(file), cache_dir=str(tmp_path / f"cache-{machine}"), max_length=16)
            return training_data(config, tiny_tokenizer(), None, fingerprint="0" * 64)

        train, validation = halves(0)
        print(len(texts), len(train), len(validation))
        try:
            halves(1)
        except UserError as error:
            print(error)

    processes = run_processes(tmp_path, prepare, 0, 1, 0)
    lines = [process.out.splitlines() for process in processes]
    assert [line[0].split()[0] for line in lines] == ["20", "0", "20"], processes[0].err
    assert len({tuple(line[0].split()[1:]) for line in lines}) == 1
    for _, said in lines:
        assert said.split(":")[0] in ("training rows", "validation rows")
        assert "in process 2 on " in said and said.endswith(": prepare on one machine, and copy data.cache_dir")


@pytest.mark.distributed
def test_every_process_generates_a_share_of_the_same_rows(tmp_path: Path) -> None:
    model = tiny_target_model(num_layers=1)
    settings = RegenerateConfig(num_tokens=700, prompt_tokens=4, batch_size=4, temperatures=[0.0, 0.8])

    def generate(config: DataConfig, rank: int) -> None:
        calls, whole = [], regeneration.generate
        regeneration.generate = lambda *inputs, **settings: calls.append(1) or whole(*inputs, **settings)
        own = replace(config, cache_dir=f"{config.cache_dir}-{'ab'[rank // 2]}")
        halves = training_data(own, tiny_tokenizer(), model, fingerprint="0" * 64)
        print(len(calls), *map(content_fingerprint, halves))

    made = {}
    for local_ranks in ((0,), (0, 1), (0, 1, 0)):
        folder = tmp_path / "".join(map(str, local_ranks))
        folder.mkdir()
        config = config_for(folder, numbered(40), regenerate=settings)
        ended = run_processes(folder, partial(generate, config), *local_ranks)
        assert [process.code for process in ended] == [0] * len(local_ranks), ended[-1].err
        made[local_ranks] = [process.out.split() for process in ended]
    assert len({tuple(out[1:]) for processes in made.values() for out in processes}) == 1
    ((alone, *_),) = made[0,]
    shares = [int(calls) for calls, *_ in made[0, 1]]
    assert min(shares) >= 0.4 * int(alone) and sum(shares) <= int(alone) + 4
    assert [calls for calls, *_ in made[0, 1, 0]] == [
        *(str(share) for share in shares),
        alone,
    ]  # a machine of two, and one of one
