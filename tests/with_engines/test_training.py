"""speculators 0.9 beside us in bench/train.py: a step of its trainer has our loss, and a head that it trains is decoded here."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script
from tests.tiny import input_keys, tiny_target_model, write_inputs
from tests.with_engines.environments import environment

pytestmark = [pytest.mark.long, pytest.mark.engines]  # speculators in its own environment

bench: Any = load_script("bench/train.py")
TINY: dict[str, Any] = {"hidden_size": 128, "vocab_size": 200, "num_tokens": 64, "num_steps": 3, "rounds": 2, "threads": 1}


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    environment("speculators")
    monkeypatch.setattr(bench, "bf16", lambda: False)


@pytest.mark.parametrize("trains_head", [False, True])
def test_a_step_of_speculators_has_our_loss(trains_head: bool) -> None:
    found = bench.step(bench.Options(**TINY, row_lengths=[64, 16], trains_head=trains_head))
    for each in found["layouts"]:
        losses = {name: own["loss"] for name, own in each["trainers"].items()}
        assert losses == pytest.approx(dict.fromkeys(("ours", "plain", "sdpa", "eager"), losses["ours"]), rel=1e-4)
        assert each["ratios"].keys() == {"plain", "sdpa", "eager"}


def test_heads_trained_as_long_are_decoded_together(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    tiny_target_model(num_layers=8).save_pretrained(tmp_path / "model")
    prompts = [json.dumps({"id": str(index), "prompt": f"Row {index} says"}) for index in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts), encoding="utf-8")
    keys = [*input_keys(tmp_path), "data.regenerate=null", f"eval.suite={tmp_path / 'prompts.jsonl'}"]
    keys += [f"train.{key}" for key in ("max_steps=4", "eval_strategy=no", "save_strategy=no", "load_best_model_at_end=false")]
    how = {"learning_rates": [1e-3], "packed_lengths": [64], "output_dir": str(tmp_path / "runs"), "threads": 1}
    found = bench.acceptance(bench.Options(keys=keys, **how))
    theirs = "speculators-0.001-64"
    assert list(found["lengths"]) == ["ours", theirs] and found["best"] == theirs
    assert found["speculators"][theirs]["steps"] > 1
    assert all(1 <= own["length"] <= 4 for own in found["lengths"].values())
    shown = bench.page({"acceptance": {**found, "cpu": "one", "threads": 1, "torch": "2", "bf16": False}})
    assert shown.count("| speculators | learning rate 0.001, rows of 64") == 1
