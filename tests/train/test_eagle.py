"""train/eagle.py as a user runs it: what a run leaves, and what it says when the input is wrong."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoTokenizer

from specdistill.cli import main
from specdistill.methods.draft_model.gguf import write_gguf
from specdistill.methods.eagle3.checkpoint import load_eagle3
from specdistill.methods.recipe import Recipe
from specdistill.project import PICO, ROOT
from specdistill.recipe.load import load_recipe
from specdistill.targets import frozen
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history
from tests.refusals import refused_key
from tests.scripts import evaluate
from tests.tiny import input_keys, tiny_target_model, write_inputs

SCRIPT = str(ROOT / "train" / "eagle.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and a text file."""
    path = tmp_path_factory.mktemp("target")
    write_inputs(path)
    return path


def arguments(folder: Path, output_dir: Path, *extra: str) -> list[str]:
    return [
        *input_keys(folder),
        "draft.ttt_steps=3",
        f"train.output_dir={output_dir}",
        "train.max_steps=4",
        "train.per_device_train_batch_size=4",
        "train.learning_rate=1e-3",
        "train.eval_strategy=steps",
        "train.eval_steps=2",
        "train.save_steps=2",
        "train.load_best_model_at_end=true",
        "train.metric_for_best_model=acceptance_length",
        "train.report_to=none",
        *extra,
    ]


def launch(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train/eagle.py", *args])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(SCRIPT, run_name="__main__")
    return int(caught.value.code or 0)


def test_a_run_leaves_a_draft_its_record_and_a_curve(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(monkeypatch, *arguments(folder, tmp_path / "run")) == 0
    run = tmp_path / "run"
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


def test_a_gguf_file_is_trained_for_measured_examined_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by who serves it with llama.cpp: the file is all there is."""
    tiny_target_model(num_layers=2, vocab_size=1024).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(PICO).save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "gguf", "q8_0")
    (target,) = (tmp_path / "gguf").glob("*.gguf")
    rows = [{"prompt": f"Write {number} and {number * 7}."} for number in range(12)]
    for name in ("rows.jsonl", "suite.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "gate.yaml").write_text("- {metric: lossless.greedy_identical, equals: true}\n", encoding="utf-8")

    run = tmp_path / "run"
    keys = [f"target.model={target}" if key.startswith("target.model") else key for key in arguments(tmp_path, run)]
    generated = [
        "data.regenerate.num_tokens=300",
        "data.regenerate.batch_size=8",
        "data.validation_fraction=0.3",
        "train.max_steps=2",
    ]
    measured = [f"eval.suite={tmp_path / 'suite.jsonl'}", "eval.max_new_tokens=8", "eval.repeats=1", "eval.warmup=0"]
    assert launch(monkeypatch, *keys, *generated, *measured, "eval.sampling_draws=0", f"gate={tmp_path / 'gate.yaml'}") == 0
    assert evaluate(f"recipe={run / 'run' / 'recipe.yaml'}") == 0
    report = json.loads((run / "report" / "report.json").read_text())
    assert report["gate"]["passed"] and report["target"]["model"] == str(target)
    capsys.readouterr()
    assert main(["data", "show", f"recipe={run / 'run' / 'recipe.yaml'}"]) == 0
    assert "<|user|>\nWrite " in capsys.readouterr().out
    assert main(["doctor", f"draft={run / 'draft'}", f"target={target}", "decode=false"]) == 0


@pytest.mark.long  # compiles
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does it
def test_a_compiled_step_is_one_graph_and_learns_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a backend that traces all and generates no code, which would take minutes."""
    compiled, short = (
        ("train.torch_compile=true", "train.torch_compile_backend=aot_eager"),
        ("draft.ttt_steps=2", "train.max_steps=2"),
    )
    for name, extra in (("plain", ()), ("compiled", compiled)):
        counters.clear()
        assert launch(monkeypatch, *arguments(folder, tmp_path / name, *short, *extra)) == 0
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    one, two = (load_file(tmp_path / name / "draft" / "model.safetensors") for name in ("plain", "compiled"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-3), name


def test_regeneration_and_a_pruned_vocabulary_go_the_same_way(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = ["data.regenerate.num_tokens=1500", "data.regenerate.prompt_tokens=8", "draft.vocab_size=50", "train.max_steps=2"]
    assert launch(monkeypatch, *arguments(folder, tmp_path / "run", *extra)) == 0
    config = json.loads((tmp_path / "run" / "draft" / "config.json").read_text())
    assert config["draft_vocab_size"] == 50


def test_a_head_that_is_not_trained_stays_the_targets(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = ["draft.train_head=false", "draft.vocab_size=50", "train.max_steps=2"]
    assert launch(monkeypatch, *arguments(folder, tmp_path / "run", *extra)) == 0
    target = FrozenTarget.load(str(folder / "model"))
    draft = load_eagle3(tmp_path / "run" / "draft", target)
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[draft.target_ids_W])
    assert not torch.equal(draft.norm.weight, target.norm.weight)  # the rest was trained


def test_a_target_in_fp8_says_what_that_does_to_its_features(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a CPU the same rounded numbers are multiplied in float32."""
    monkeypatch.setattr(frozen, "_check_fp8", lambda: None)
    keys = ["target.dtype=bfloat16", "train.bf16=true", "target.fp8=true"]
    assert launch(monkeypatch, *arguments(folder, tmp_path / "run", *keys)) == 0
    history = read_history(tmp_path / "run" / "draft", key="drafts")
    assert history is not None and history.fp8 is not None and history.summary()["fp8"] == history.fp8
    assert 0 < history.fp8["error"] < 0.2 and 0.5 < history.fp8["same_top1"] <= 1 and 64 < history.fp8["num_tokens"] <= 4 * 64
    assert "FP8" in capfd.readouterr().err


def test_training_goes_on_from_an_earlier_draft(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(monkeypatch, *arguments(folder, tmp_path / "first", "train.max_steps=2")) == 0
    start = f"draft.init={tmp_path / 'first' / 'draft'}"
    assert launch(monkeypatch, *arguments(folder, tmp_path / "second", start, "train.learning_rate=0.0")) == 0
    one, two = ((tmp_path / name / "draft" / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert one == two
    assert launch(monkeypatch, *arguments(folder, tmp_path / "third", start, "draft.fc_norm=true")) == 2
    assert refused_key(capfd.readouterr().err) == "draft.fc_norm"


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ("draft.aux_layers=[1,9]", "draft.aux_layers"),
        ("draft.vocab_size=5000", "draft.vocab_size"),
        ("draft.init=nowhere", "draft.init"),
        ("draft.ttt_steps=0", "draft.ttt_steps"),
        ("target.model=nowhere/at/all", "target.model"),
        ("data.source=nowhere.jsonl", "data.source"),
        ("data.max_length=2", "data.max_length"),
        ("train.learning_rte=1", "train.learning_rte"),
        ("target.dtype=bfloat16", "train.bf16"),
        ("target.fp8=true", "target.fp8"),
        ("loss.step_decay=2", "loss.step_decay"),
        ("loss.temperature=0", "loss.temperature"),
        ("loss.divergence=tdv", "loss.divergence"),
        ("loss.divergence={name: jsd, beta: 1}", "loss.divergence.beta"),
        ("optimizer=adam", "optimizer"),
        ("method=draft_model", "draft.ttt_steps"),
        ("on_policy.fraction=0.5", "on_policy"),
        ("loss.labels=hard", "loss.labels"),
        ("draft.lora.rank=4", "draft.lora"),
        ("eval.tree={budget: 2, depth: 3, top_k: 2}", "eval.tree.budget"),
        ("draft.sliding_window=2", "draft.ttt_steps"),
        ("draft.fc_bias=true", "draft.fc_bias"),
        ("draft={hidden_size: 48, train_head: false}", "draft.train_head"),
        ("train.num_train_epochs=0", "train.num_train_epochs"),
        ("train.metric_for_best_model=aceptance_length", "train.metric_for_best_model"),
        ("train.metric_for_best_model=accuracy_3", "train.metric_for_best_model"),
        ("train.report_to=wandb", "train.report_to"),
        ("train.lr_scheduler_type=cosine_with_min_lr", "train.lr_scheduler_type"),
        ("train.neftune_noise_alpha=5", "train.neftune_noise_alpha"),
        ("train.fp16=true", "train.fp16"),
        ("eval.suite=pico-shrt", "eval.suite"),
        ("gate=defualt", "gate"),
        ("train.push_to_hub=true", "train.push_to_hub"),
        ("train.resume_from_checkpoint=nowhere", "train.resume_from_checkpoint"),
        ("train.save_only_model=true", "train.save_only_model"),
        ("train.output_dir=pyproject.toml/run", "train.output_dir"),
        ("data.cache_dir=pyproject.toml/cache", "data.cache_dir"),
        ("target.attn=flash_attention_2", "target.model"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], extra: str, key: str
) -> None:
    assert launch(monkeypatch, *arguments(folder, tmp_path / "run", extra)) == 2
    assert refused_key(capfd.readouterr().err) == key
    assert not (tmp_path / "run").exists()
