"""The command that a plan prints: its target can be given it, and it runs."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdistill.cli import main
from specdistill.command import keys_of
from specdistill.launch import LaunchOptions
from specdistill.methods.recipe import Recipe
from specdistill.planning.plan import DATA, PROMPTS, Plan, make_plan, recommend
from specdistill.planning.reading import read
from specdistill.recipe.load import load_own_keys, load_recipe
from tests.public_pairs import GPT_OSS_120B, LLAMA_8B, LLAMA_EAGLE3, PAIRS, QWEN35_9B
from tests.tiny import qwen, write_inputs

OF_EVAL = {"target": "target.model", "draft": "eval.draft", "suite": "eval.suite", "output_dir": "eval.output_dir"}
LLAMA_300M = LLAMA_8B.config | {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 1024
}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "tiny": qwen().config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]},
    "short": LLAMA_300M,
    "large": LLAMA_8B.config,
    "recurrent": QWEN35_9B.config,
    "spread": {name: value for name, value in GPT_OSS_120B.config.items() if name != "quantization_config"},
}


def plan_of(folder: Path, config: dict[str, Any], *, draft: dict[str, Any] | None = None) -> Plan:
    for name, content in {"target": config, "draft": draft}.items():
        if content:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(content), encoding="utf-8")
    target = read(str(folder / "target"), key="target.model")
    return make_plan(target, read(str(folder / "draft"), key="draft") if draft else None)


def command(plan: Plan, method: str) -> list[str]:
    """The arguments of the command that a plan would print if nothing but this method, and n-gram lookup, promised anything."""
    only = [replace(row, low=None, high=None) if row.method not in (method, "ngram") else row for row in plan.methods]
    only = [replace(row, high=replace(row.high, speedup=9.0)) if row.method == method else row for row in only]
    start = recommend(only, plan.target, plan.alone)["start"]
    assert start is not None and start.startswith("specdistill ")
    return shlex.split(start)[1:]


@pytest.mark.parametrize(
    "name", [name if name in ("tiny", "short") else pytest.param(name, marks=pytest.mark.long) for name in TARGETS]
)
def test_the_command_for_a_head_is_one_that_its_target_can_be_given(name: str, tmp_path: Path):
    plan = plan_of(tmp_path, TARGETS[name])
    verb, *arguments = command(plan, "eagle3")
    launching, keys = load_own_keys(LaunchOptions, arguments)
    recipe: Any = load_recipe(Recipe, keys)
    (row,) = (row for row in plan.methods if row.method == "eagle3")
    longest = plan.target["max_length"]
    assert verb == "train" and f"data.source={DATA}" in keys
    assert recipe.data.max_length <= longest
    assert recipe.data.packing == (name != "recurrent")
    # The recipes of small targets are for those, and in float32
    assert recipe.target.dtype == ("float32" if name == "tiny" else "bfloat16")
    if name != "tiny":
        batch = recipe.train["per_device_train_batch_size"] * recipe.data.max_length * (launching.num_processes or 1)
        assert recipe.data.regenerate.num_tokens == row.training_tokens
        assert recipe.train["max_steps"] == pytest.approx(row.training_tokens / batch, rel=0.01)
        held = recipe.data.regenerate.batch_size * recipe.data.max_length
        assert held <= plan.alone.room or not plan.alone.fits
    assert (launching.num_processes, recipe.target.shard) == ((8, "layers") if name == "spread" else (None, "none"))


def test_the_command_that_measures_a_draft_is_one_that_eval_takes(tmp_path: Path):
    verb, *arguments = command(plan_of(tmp_path, LLAMA_8B.config, draft=LLAMA_EAGLE3.config), "eagle3")
    given = keys_of([argument for argument in arguments if not argument.startswith("suite=")], OF_EVAL)
    recipe: Any = load_recipe(Recipe, [*given, "eval.suite=pico-short", "train.output_dir=runs"])
    assert verb == "eval" and f"suite={PROMPTS}" in arguments
    assert (recipe.method, recipe.target.dtype, recipe.eval.draft) == ("eagle3", "bfloat16", str(tmp_path / "draft"))
    assert recipe.eval.num_speculative_tokens == 4  # 3 to 6 are the best


def test_look_up_is_recommended_before_a_draft_that_is_faster_at_its_best_alone(tmp_path: Path):
    plan = plan_of(tmp_path, TARGETS["tiny"])
    (lookup,) = [row for row in plan.methods if row.method == "ngram"]
    assert lookup.low is not None and lookup.high is not None

    def recommended(at_worst: float) -> str | None:
        best = replace(lookup.high, speedup=1.1 * lookup.high.speedup)
        draft = {"low": replace(lookup.low, speedup=at_worst * lookup.low.speedup), "high": best}
        rows = [replace(row, **draft) if row.method == "eagle3" else replace(row, low=None) for row in plan.methods]
        return recommend([lookup if row.method == "ngram" else row for row in rows], plan.target)["method"]

    assert recommended(at_worst=0.5) == "ngram"
    assert recommended(at_worst=1.0) == "eagle3"


@pytest.mark.long  # writes a checkpoint of many tensors
def test_look_up_is_recommended_where_it_promises_most_and_obstacles_are_told(tmp_path: Path):
    """gpt-oss-120b in MXFP4 reads so little a step that this head, with the target's own output layer, is not cheap for it."""
    target, draft = PAIRS["gpt-oss-120b-eagle3"].write(tmp_path)
    described = read(str(target), key="target.model")
    advice = make_plan(described, read(str(draft), key="draft")).recommendation
    assert advice["method"] == "ngram" and "method=ngram" in str(advice["start"])
    plan = make_plan(described)
    only = [replace(row, high=replace(row.high, speedup=9.0)) if row.method == "eagle3" else row for row in plan.methods]
    advice = recommend(only, plan.target, plan.alone)
    assert "target.shard" in str(advice["reason"]) and "mxfp4" in str(advice["reason"])
    nowhere = [replace(row, training_devices=None) if row.method == "eagle3" else row for row in only]
    advice = recommend(nowhere, plan.target, plan.alone)
    assert advice["start"] is None and "64" in str(advice["reason"])


@pytest.mark.long  # a whole training
def test_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """As printed, but for its data, two steps, and little of it generated."""
    keys = dict(key.split("=", 1) for key in write_inputs(tmp_path))
    monkeypatch.chdir(tmp_path)
    plan = make_plan(read(keys["target.model"], key="target.model"))
    arguments = [re.sub(re.escape(DATA), keys["data.source"], argument) for argument in command(plan, "eagle3")]
    few = ["train.max_steps=2", "train.eval_steps=2", "train.save_steps=2", "data.max_length=64"]
    few += ["data.regenerate.num_tokens=3000", "data.regenerate.batch_size=8", "data.regenerate.prompt_tokens=8"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *few, f"data.cache_dir={tmp_path / 'cache'}"])
    assert not ended.value.code, capsys.readouterr().err
    (made,) = (tmp_path / "runs").iterdir()
    assert (made / "draft" / "model.safetensors").is_file()
