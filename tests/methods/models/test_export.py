"""Draft models are exported to each engine as a folder of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from specdistill.methods.models.checkpoint import (
    add_both_spellings,
    load_draft_model,
    save_draft_model,
)
from specdistill.serving.export import export
from specdistill.targets.files import TargetFiles
from tests.draft_models import LLAMA3
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer, write_target


def save_model(
    folder: Path, model: PreTrainedModel | None = None, tokenizer: Any = None
) -> PreTrainedModel:
    model = model or tiny_target_model(num_layers=2)
    save_draft_model(model, tokenizer or tiny_tokenizer(), folder)
    return model


@pytest.mark.parametrize("engine", ["vllm", "sglang", "gguf"])
def test_an_exported_draft_model_is_bit_equal(engine: str, tmp_path: Path) -> None:
    save_model(tmp_path / "ours", tiny_target_model(num_layers=2).bfloat16())
    assert export(tmp_path / "ours", engine, tmp_path / "out").method == "draft_model"
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "out"))
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype
        for name in before
    )
    load_draft_model(tmp_path / "out")
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"SERVE.md"}


def test_an_exported_config_serves_older_and_newer_readers(tmp_path: Path) -> None:
    save_model(tmp_path / "ours")
    export(tmp_path / "ours", "vllm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == 10000.0 and config["rope_scaling"] is None
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["dtype"] == config["torch_dtype"] == "float32"


def test_a_config_gets_both_spellings_of_its_rotary_embedding() -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    both = {"rope_theta": 10000.0, "rope_scaling": scaling, "rope_parameters": LLAMA3}
    assert add_both_spellings({"rope_parameters": LLAMA3}) == both
    older = add_both_spellings({"rope_theta": 10000.0, "rope_scaling": scaling})
    assert older == {**both, "rope_parameters": LLAMA3}
    by_kind = {"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": LLAMA3}}
    assert add_both_spellings(by_kind) == by_kind


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    """Engines compare widths, though the tokens are the same and no token has the other rows."""
    save_model(tmp_path / "ours", tiny_target_model(num_layers=2, vocab_size=264))
    for engine in ("vllm", "sglang", "gguf"):
        with refused("engine", f"{engine} for"):
            export(
                tmp_path / "ours",
                engine,
                tmp_path / "out",
                TargetFiles(str(write_target(tmp_path / engine))),
            )


def test_an_engine_that_takes_no_models_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "ours")
    with refused("engine", "speculators for "):
        export(tmp_path / "ours", "speculators", tmp_path / "out")
