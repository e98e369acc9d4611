"""EAGLE heads train as a user trains them, and a run leaves a draft, its record and a curve."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoTokenizer

from specdistill.cli.main import main
from specdistill.common.project import PICO
from specdistill.methods.eagle3.checkpoint import load_eagle3
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history
from tests.gguf_writer import write_gguf
from tests.refusals import refused_key
from tests.scripts import evaluate
from tests.tiny import tiny_target_model, write_inputs
from tests.train.runs import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and a text file."""
    path = tmp_path_factory.mktemp("target")
    write_inputs(path)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    assert train(folder, folder / "run", "train.max_steps=4").returncode == 0
    return folder / "run"


def test_a_run_leaves_a_draft_its_record_and_a_curve(folder: Path, run: Path) -> None:
    target = FrozenTarget.load(str(folder / "model"))
    assert load_eagle3(run / "draft", target).config.vocab_size == 260
    assert json.loads((run / "run" / "provenance.json").read_text())["data_fingerprint"]
    assert load_recipe(Recipe, [f"recipe={run / 'run' / 'recipe.yaml'}"]).draft.ttt_steps == 3
    assert (run / "training_curve.png").exists()
    history = read_history(run / "draft", key="drafts")
    assert history is not None and history.seconds is not None
    assert [step for step, _ in history.summary()["curve"]] == [2, 4]
    log = json.loads((run / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert any("eval_acceptance_length" in entry for entry in log)


@pytest.mark.long  # four commands, one after another
def test_a_gguf_target_works_in_train_eval_doctor_and_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user serves the target with llama.cpp and has only the file.

    The file has no chat template, so all commands use the one that the recipe names.
    """
    tiny_target_model(num_layers=2, vocab_size=1024).save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    (tmp_path / "mine.jinja").write_text(template, encoding="utf-8")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "gguf").mkdir()
    target = write_gguf(tmp_path / "model", tmp_path / "gguf" / "model.gguf", "q8_0")
    rows = [{"prompt": f"Write {number} and {number * 7}."} for number in range(12)]
    for name, asked in (
        ("rows.jsonl", rows),
        ("suite.jsonl", [{"user": row["prompt"]} for row in rows]),
    ):
        (tmp_path / name).write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    (tmp_path / "gate.yaml").write_text(
        "- {metric: lossless.greedy_identical, equals: true}\n", encoding="utf-8"
    )

    run = tmp_path / "run"
    generated = [
        "data.regenerate.num_tokens=300",
        "data.regenerate.batch_size=8",
        "data.validation_fraction=0.3",
    ]
    generated.append(f"data.chat_template={tmp_path / 'mine.jinja'}")
    measured = [
        f"eval.suite={tmp_path / 'suite.jsonl'}",
        "eval.max_new_tokens=8",
        "eval.repeats=1",
        "eval.warmup=0",
    ]
    gate = ["eval.sampling_draws=0", f"gate={tmp_path / 'gate.yaml'}"]
    assert (
        train(tmp_path, run, f"target.model={target}", *generated, *measured, *gate).returncode == 0
    )
    assert (run / "draft" / "target_chat_template.jinja").read_text(encoding="utf-8") == template
    assert evaluate(f"recipe={run / 'run' / 'recipe.yaml'}") == 0
    report = json.loads((run / "report" / "report.json").read_text())
    assert report["gate"]["passed"] and report["target"]["model"] == target.name
    capsys.readouterr()
    assert main(["data", "show", f"recipe={run / 'run' / 'recipe.yaml'}"]) == 0
    assert "<|user|>\nWrite " in capsys.readouterr().out
    assert main(["doctor", f"draft={run / 'draft'}", f"target={target}", "decode=false"]) == 0

    # Without the recipe, the commands use the template of the draft.
    suite, both = f"suite={tmp_path / 'suite.jsonl'}", f"output_dir={tmp_path / 'both'}"
    quick = ["max_new_tokens=8", "repeats=1", "warmup=0", "sampling_draws=0"]
    drafts = f"drafts=[{run / 'draft'},ngram]"
    assert main(["compare", f"target={target}", drafts, suite, both, *quick]) == 0
    completions = [
        [json.loads(line)["text"] for line in (folder / "samples.jsonl").read_text().splitlines()]
        for folder in (run / "report", tmp_path / "both" / "draft", tmp_path / "both" / "ngram")
    ]
    assert completions[0] == completions[1] == completions[2]
    capsys.readouterr()
    assert main(["doctor", f"draft={run / 'draft'}", f"target={target}", suite]) in (0, 1)
    assert "Write 0 and 0." in capsys.readouterr().out


@pytest.mark.long  # compiles
@pytest.mark.parametrize("keys", [["draft.ttt_steps=2"], ["method=draft_model"]])
def test_compiled_layers_learn_the_same(folder: Path, tmp_path: Path, keys: list[str]) -> None:
    """The backend traces everything and generates no code, which would take minutes."""
    compiled = ("train.torch_compile=true", "train.torch_compile_backend=aot_eager")
    for name, extra in (("plain", ()), ("compiled", compiled)):
        counters.clear()
        assert train(folder, tmp_path / name, *keys, *extra).returncode == 0
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    one, two = (
        load_file(tmp_path / name / "draft" / "model.safetensors") for name in ("plain", "compiled")
    )
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-3), name


@pytest.mark.long  # trains
def test_a_head_that_is_not_trained_stays_the_targets(folder: Path, tmp_path: Path) -> None:
    """The head has a pruned vocabulary, whose coverage is printed and recorded."""
    extra = ["draft.train_head=false", "draft.vocab_size=50"]
    done = train(folder, tmp_path / "run", *extra)
    assert done.returncode == 0
    coverage = json.loads((tmp_path / "run/run/provenance.json").read_text())["vocabulary_coverage"]
    assert 0.9 < coverage <= 1 and f"covers {coverage:.1%} of the tokens with loss" in done.stderr
    target = FrozenTarget.load(str(folder / "model"))
    draft = load_eagle3(tmp_path / "run" / "draft", target)
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[draft.target_ids_W])
    assert not torch.equal(draft.norm.weight, target.norm.weight)  # the rest was trained


@pytest.mark.long  # trains, and loads tensorboard
def test_a_tracker_has_every_figure_by_step(folder: Path, tmp_path: Path) -> None:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    assert (
        train(
            folder,
            tmp_path / "run",
            "train.report_to=tensorboard",
            "train.logging_steps=1",
            "train.eval_steps=1",
        ).returncode
        == 0
    )
    (path,) = (tmp_path / "run" / "runs").glob("*/events.out.*")
    read = events.EventAccumulator(str(path)).Reload()
    steps, rates = zip(
        *((event.step, event.value) for event in read.Scalars("eval/cumulative_acceptance_3")),
        strict=True,
    )
    log = [
        entry
        for entry in json.loads((tmp_path / "run/run/history.json").read_text())["log"]
        if "eval_loss" in entry
    ]
    assert steps == (1, 2) and rates == pytest.approx(
        [entry["eval_cumulative_acceptance_3"] for entry in log]
    )
    assert {"train/loss", "train/grad_norm", "train/tokens_per_second"} <= {*read.Tags()["scalars"]}


@pytest.mark.long  # trains once more
def test_training_continues_an_earlier_draft(folder: Path, run: Path, tmp_path: Path) -> None:
    start = f"draft.init={run / 'draft'}"
    assert train(folder, tmp_path / "second", start, "train.learning_rate=0.0").returncode == 0
    one, two = (
        (path / "draft" / "model.safetensors").read_bytes() for path in (run, tmp_path / "second")
    )
    assert one == two
    refused = train(folder, tmp_path / "third", start, "draft.fc_norm=true")
    assert refused.returncode == 2 and refused_key(refused.stderr) == "draft.fc_norm"
