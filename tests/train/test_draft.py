"""Draft models train as a user trains them, with each initialization and each kind of loss."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import tiny_target_model, tiny_tokenizer, write_inputs
from tests.train.runs import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, a smaller model of its family, and a text file."""
    path = tmp_path_factory.mktemp("target")
    write_inputs(path)
    smaller, tied = tiny_target_model(num_layers=1), tiny_target_model()
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    for name, model in (("smaller", smaller), ("tied", tied)):
        model.save_pretrained(path / name)
        tiny_tokenizer().save_pretrained(path / name)
    return path


@pytest.mark.parametrize(
    "extra",
    [
        ("draft.init=scratch", "draft.hidden_size=32", "draft.num_layers=1", "loss.labels=hard"),
        # Each of these takes two seconds.
        pytest.param(
            (
                "loss.divergence=[{name: forward_kl, weight: 0.5}, {name: tvd, weight: 0.5}]",
                "loss.temperature=2.0",
                "draft.lora.rank=4",
                "train.activation_checkpointing=true",
            ),
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("on_policy.fraction=1.0", "on_policy.prompt_tokens=8", "on_policy.num_tokens=8"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_run_leaves_a_model_that_any_tool_loads(
    folder: Path, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    assert train(folder, tmp_path / "run", *extra, "method=draft_model").returncode == 0
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "draft")
    assert draft.config.vocab_size == 260
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run" / "draft")) == 260
    log = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())[
        "log_history"
    ]
    measured = next(entry for entry in log if "eval_acceptance_length" in entry)
    assert 1 <= measured["eval_acceptance_length"] <= 5
    assert 0 < measured["eval_acceptance_1"] <= 1
    assert (tmp_path / "run" / "training_curve.png").exists()


def test_a_model_that_drafts_in_one_pass_is_trained_by_the_same_script(
    folder: Path, tmp_path: Path
) -> None:
    extra = ("draft.lora.rank=4", "train.activation_checkpointing=true", "draft.parallel_tokens=3")
    assert train(folder, tmp_path / "run", *extra, "method=pard").returncode == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "draft").config.pard_token == 3
    log = json.loads((tmp_path / "run" / "run" / "history.json").read_text())["log"]
    of_positions = {
        f"eval_{name}_{k}" for name in ("loss", "accuracy", "acceptance") for k in (1, 2, 3)
    }
    assert of_positions | {"eval_cumulative_acceptance_3"} <= {
        name for entry in log for name in entry
    }


@pytest.mark.long  # trains twice, which takes three seconds
def test_an_evaluation_before_the_first_step_changes_no_weight(
    folder: Path, tmp_path: Path
) -> None:
    dropped = ("draft.lora.rank=4", "draft.lora.dropout=0.5")  # draws random numbers in every step
    weights, first = {}, {}
    for name, extra in (("measured", ()), ("not", ("train.eval_on_start=false",))):
        assert (
            train(folder, tmp_path / name, *dropped, *extra, "method=draft_model").returncode == 0
        )
        weights[name] = (tmp_path / name / "draft" / "model.safetensors").read_bytes()
        log = json.loads((tmp_path / name / "run" / "history.json").read_text())["log"]
        first[name] = [entry["eval_acceptance_length"] for entry in log if entry["step"] == 0]
    assert len(first["measured"]) == 1 and first["not"] == []
    assert weights["measured"] == weights["not"]


@pytest.mark.long  # trains, and reads what it wrote
def test_a_head_that_is_the_embedding_is_written_once_and_read_back(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    assert (
        train(folder, run, f"target.model={folder / 'tied'}", "method=draft_model").returncode == 0
    )
    draft = AutoModelForCausalLM.from_pretrained(run / "draft")
    assert (
        draft.lm_head.weight is draft.model.embed_tokens.weight and draft.config.vocab_size == 260
    )
    assert "lm_head.weight" not in load_file(run / "checkpoint-2" / "model.safetensors")
    assert "missing keys" not in caplog.text


@pytest.mark.long  # trains
def test_an_existing_model_is_trained_further(folder: Path, tmp_path: Path) -> None:
    keys = (f"draft.init={folder / 'smaller'}", "draft.num_layers=null", "method=draft_model")
    assert train(folder, tmp_path / "run", *keys).returncode == 0
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "draft").config.num_hidden_layers
        == 1
    )
