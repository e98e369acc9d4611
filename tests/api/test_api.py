"""The Python interface: its names are stable, and each call does what the command does."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import specdistill
from specdistill import (
    DraftConfig,
    DraftTrainer,
    acquire,
    compare,
    generate,
    judge,
    load_draft,
    load_target,
    measure,
    publish,
    train,
)
from specdistill.api import build_arguments
from specdistill.common.project import ROOT
from specdistill.evaluation.gate.decide import EXIT_CODES
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from tests.refusals import refused
from tests.scripts import specdistill as command
from tests.tiny import SMALL, input_keys, write_inputs

# What a user's code relies on: whatever changes here stands in the changelog.
SIGNATURES = {
    "Draft": "(method, proposer, target)",
    "DraftConfig": "(output_dir, **keys)",
    "DraftTrainer": "(method, target, args, train_dataset=None, callbacks=())",
    "Report": "(data, folder, acceptance_length, speedup, verdict)",
    "acquire": "(method, target, draft=None, **keys)",
    "compare": "(target, drafts, **keys)",
    "generate": (
        "(draft, prompt, *, max_new_tokens=128, num_speculative_tokens=4, tree=None,"
        " temperature=0.0, top_p=1.0, top_k=0, seed=0)"
    ),
    "judge": "(report, gate='default', *, baseline=None)",
    "load_draft": "(draft, target, **keys)",
    "load_target": "(model, **keys)",
    "measure": "(recipe=None, **keys)",
    "publish": "(run, **keys)",
    "train": "(recipe, *, callbacks=(), **keys)",
}
TRAIN = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "acceptance_length",
    "report_to": "none",
}
QUICK = {"max_new_tokens": 8, "repeats": 1, "warmup": 0, "sampling_draws": 0}
PROMPT = "Row 7 says"


def format_signature(name: str) -> str:
    """Return the signature of a name, without its types."""
    found = inspect.signature(getattr(specdistill, name))
    bare = [
        parameter.replace(annotation=parameter.empty) for parameter in found.parameters.values()
    ]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def test_names_and_signatures_are_those_that_users_rely_on() -> None:
    assert {name: format_signature(name) for name in SIGNATURES} == SIGNATURES
    assert sorted(specdistill.__all__) == sorted(specdistill.api.__all__) == list(SIGNATURES)
    package = ROOT / "specdistill"
    assert [
        name
        for name in SIGNATURES
        if (package / name).exists() or (package / f"{name}.py").exists()
    ] == []
    assert not hasattr(specdistill, "trian")


def test_importing_the_package_imports_nothing_slow() -> None:
    code = (
        "import sys, specdistill; print(*{name.split('.')[0] for name in sys.modules}, '|',"
        " *dir(specdistill))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    modules, names = (set(part.split()) for part in result.stdout.split("|"))
    assert (
        modules
        & {"torch", "transformers", "datasets", "numpy", "pydantic", "omegaconf", "yaml", "rich"}
        == set()
    )
    assert names >= set(SIGNATURES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny target, rows to train on, and a suite."""
    path = tmp_path_factory.mktemp("work")
    write_inputs(path)
    rows = [{"id": str(number), "prompt": f"Row {number} says {number} "} for number in range(4)]
    (path / "suite.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8"
    )
    return path


def build_data_section(folder: Path) -> dict[str, Any]:
    return {
        "cache_dir": folder / "cache",
        "max_length": 64,
        "validation_fraction": 0.1,
        "decontaminate": [],
    }


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """Return a run that Python has trained."""
    sections = {
        "method": "eagle3",
        "target": {"model": folder / "model"},
        "draft": {"ttt_steps": 1},
    }
    keywords = {
        "data": {**build_data_section(folder), "source": folder / "rows.jsonl"},
        "train": {**TRAIN, "output_dir": folder / "run"},
    }
    return train(sections, eval={**QUICK, "suite": folder / "suite.jsonl"}, **keywords)


def read_weights(run: Path) -> bytes:
    return (run / "draft" / "model.safetensors").read_bytes()


@pytest.mark.long  # trains once more
def test_train_gives_the_draft_of_the_command(run: Path, folder: Path, tmp_path: Path) -> None:
    keys = [
        *input_keys(folder),
        *SMALL,
        "method=eagle3",
        "draft.ttt_steps=1",
        f"train.output_dir={tmp_path / 'run'}",
    ]
    assert command("train", *keys).returncode == 0
    assert read_weights(run) == read_weights(tmp_path / "run")


class StepCounter(TrainerCallback):
    steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1


def test_a_draft_trainer_trains_on_rows_in_memory_as_on_those_of_a_file(
    run: Path, folder: Path, tmp_path: Path
) -> None:
    rows = [
        json.loads(line)
        for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    config = DraftConfig(
        tmp_path / "runs" / "mine", draft={"ttt_steps": 1}, data=build_data_section(folder), **TRAIN
    )
    step_counter = StepCounter()
    trainer = DraftTrainer(
        "eagle3", folder / "model", config, Dataset.from_list(rows), callbacks=[step_counter]
    )
    assert not (tmp_path / "runs").exists()  # nothing is written before it trains
    assert trainer.train() == tmp_path / "runs" / "mine"
    assert step_counter.steps == 2
    assert read_weights(tmp_path / "runs" / "mine") == read_weights(run)
    recipe = load_recipe(Recipe, build_arguments(tmp_path / "runs" / "mine", {}))
    kept = tmp_path / "runs" / "mine.jsonl"
    assert recipe.model_dump()["data"]["source"] == str(kept)
    kept.write_text("somebody's own\n")
    with refused("train_dataset", "other rows"):
        trainer.train()
    assert kept.read_text() == "somebody's own\n"
    with refused("draft.num_layer"):
        DraftTrainer("eagle3", "pico", DraftConfig("runs/a", draft={"num_layer": 2}))
    with refused("method", "ngram"):
        DraftTrainer("ngram", "pico", DraftConfig("runs/a"))


def test_a_run_is_measured_and_judged_as_by_the_commands(run: Path, tmp_path: Path) -> None:
    report = measure(run, eval={"num_prompts": 3})
    assert report.folder == run / "report"
    assert report.data == json.loads((run / "report" / "report.json").read_text(encoding="utf-8"))
    first = report.data["results"][0]
    assert (report.acceptance_length, report.speedup) == (
        first["mean_acceptance_length"],
        first["speedup"],
    )
    assert first["num_prompts"] == 3
    table = report.to_dataframe()
    assert (len(table), table["speedup"][0]) == (len(report.data["results"]), report.speedup)

    judged = judge(report, "pico")
    assert command(
        "gate", f"report={report.folder}", "gates=pico", f"output_dir={tmp_path / 'pico'}"
    ).returncode == int(EXIT_CODES[judged.verdict])
    assert (
        judged.data["gate"]
        == json.loads((run / "report" / "pico" / "report.json").read_text(encoding="utf-8"))["gate"]
    )
    assert judged.data["gate"]["rules"] != report.data["gate"]["rules"]


def test_drafts_without_a_recipe_are_measured_and_compared(folder: Path, tmp_path: Path) -> None:
    named = {"target": str(folder / "model"), "output_dir": tmp_path / "report"}
    report = measure(
        method="ngram", suite=folder / "suite.jsonl", eval={**QUICK, "ngram": {"max": 3}}, **named
    )
    assert report.folder == tmp_path / "report"
    assert report.data["settings"]["drafting"]["max"] == 3
    compared = compare(
        named["target"],
        ["ngram", "suffix"],
        suite=folder / "suite.jsonl",
        output_dir=tmp_path / "all",
        **QUICK,
    )
    assert {entry["name"] for entry in compared["ranking"]} == {"ngram", "suffix"}
    assert compared == json.loads(
        (tmp_path / "all" / "comparison.json").read_text(encoding="utf-8")
    )


def test_a_draft_generates_what_transformers_generates_without_it(run: Path, folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokens = AutoTokenizer.from_pretrained(folder / "model")(PROMPT, return_tensors="pt")
    plain = model.generate(**tokens, max_new_tokens=16, do_sample=False)
    draft = load_draft(run / "draft", model)
    assert (draft.method, draft.target.model) == ("eagle3", model)
    assert torch.equal(
        model.generate(**tokens, max_new_tokens=16, do_sample=False, custom_generate=draft), plain
    )

    for model_or_draft in (
        draft,
        load_draft("ngram", load_target(folder / "model"), ngram={"max": 3}),
        draft.target,
    ):
        done = generate(model_or_draft, PROMPT, max_new_tokens=16, num_speculative_tokens=3)
        assert [*done.prompt_ids, *done.token_ids] == plain[0].tolist()
        assert done.text == draft.target.tokenizer.decode(
            plain[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True
        )
        assert sum(len(each.emitted) for each in done.rounds) == len(done.token_ids) - 1
        assert max(len(each.drafted) for each in done.rounds) == (
            0 if model_or_draft is draft.target else 3
        )
    sampled = [
        generate(draft, done.prompt_ids, max_new_tokens=16, temperature=1.0, seed=seed).text
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_arguments_mean_what_they_mean_in_a_recipe(tmp_path: Path) -> None:
    train = {
        "output_dir": Path("a b"),
        "learning_rate": 1e-5,
        "max_steps": 3,
        "lr_scheduler_kwargs": {},
    }
    over = {
        "loss": {"divergence": [{"name": "jsd", "beta": 0.3, "weight": 1.5}]},
        "train": {"max_steps": 4},
    }
    rows = {"source": "Zürich 🙂: x\n.jsonl", "rows": None}
    recipe: Any = load_recipe(
        Recipe, build_arguments({"target": {"model": "pico"}, "train": train, "data": rows}, over)
    )
    assert recipe.train == {**train, "output_dir": "a b", "max_steps": 4}
    assert (recipe.data.source, recipe.data.rows) == (rows["source"], None)
    assert recipe.loss.divergence == over["loss"]["divergence"]
    with pytest.raises(TypeError, match="PathLike"):
        build_arguments({"data": {"source": Dataset.from_list([{"text": "a"}])}}, {})
    # A call may allow somebody's code to run; a file may not.
    (tmp_path / "mine.yaml").write_text(
        "target: {model: pico, trust_remote_code: true}\ntrain: {output_dir: runs/a}\n"
    )
    with refused("target.trust_remote_code"):
        load_recipe(Recipe, build_arguments(tmp_path / "mine.yaml", {}))
    assert load_recipe(
        Recipe, build_arguments(tmp_path / "mine.yaml", {"target": {"trust_remote_code": True}})
    )


def test_mistakes_are_refused_by_their_key(run: Path, folder: Path, tmp_path: Path) -> None:
    target = load_target(folder / "model")
    with refused("target.dtpye"):
        load_target("pico", dtpye="float32")
    with refused("temperature"):
        load_draft("ngram", target, temperature=1.0)
    with refused("ngram"):
        load_draft(run / "draft", target, ngram={"max": 3})
    with refused("draft", holds="no folder"):
        load_draft(tmp_path / "nothing", target)
    with refused("top_p"):
        generate(target, PROMPT, top_p=0.5)
    with refused("run"):
        publish(tmp_path, repo="org/name")
    with refused("method", "'nope'"):
        acquire("nope", "pico")


USER = """
from specdistill import DraftConfig, DraftTrainer, generate, judge, load_draft, load_target, measure, train

target = load_target("pico", dtype="float32")
draft = load_draft("runs/mine/draft", target)
text: str = generate(draft, "def f(", max_new_tokens=8).text
accepted: list[int] = [each.num_accepted for each in generate(draft, [1, 2]).rounds]
run = train("pico/eagle3", train={"output_dir": "runs/mine"})
trainer = DraftTrainer(method="eagle3", target="pico", args=DraftConfig("runs/b", max_steps=2), train_dataset=[{"text": "a"}])
length: float | None = measure(trainer.train()).acceptance_length
verdict: str = judge(measure(run), "release", baseline="none").verdict
wrong: int = judge(run).verdict
"""  # noqa: E501


@pytest.mark.long  # mypy reads torch and transformers
def test_mypy_accepts_a_users_calls_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    flags = [
        "--strict",
        "--follow-imports=silent",
        "--no-error-summary",
        f"--cache-dir={tmp_path / 'cache'}",
    ]
    command = [sys.executable, "-m", "mypy", *flags, "user.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    ).stdout
    last = USER.count("\n")
    assert [line.split(" error:")[0] for line in found.splitlines()] == [f"user.py:{last}:"], found
