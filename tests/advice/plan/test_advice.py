"""The commands that a plan prints fit its target, and they run."""

import io
import json
import os
import shlex
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from specdistill.advice.plan.estimates import launch_of
from specdistill.advice.plan.options import ServingOptions
from specdistill.advice.plan.plan import DATA, PROMPTS, Plan, make_plan, recommend_method
from specdistill.advice.plan.reading import read_model_config
from specdistill.cli.launch import LaunchOptions, _check_launch_options
from specdistill.cli.main import main
from specdistill.cli.plan import print_plan
from specdistill.common.project import LAUNCHES, RECIPES, find_yaml
from specdistill.methods.recipe import Recipe
from specdistill.methods.sizes import ModelConfigInfo
from specdistill.recipe.load import load_own_keys, load_recipe
from specdistill.recipe.short_keys import select_recipe_keys
from tests.public_pairs import GPT_OSS_120B, LLAMA_8B, LLAMA_EAGLE3, PAIRS, QWEN35_9B
from tests.refusals import refused_key
from tests.scripts import load_script
from tests.tiny import qwen, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("no_shipped_recipe")

EVAL_KEYS = {
    "target": "target.model",
    "draft": "eval.draft",
    "suite": "eval.suite",
    "output_dir": "eval.output_dir",
}
LLAMA_300M = LLAMA_8B.config | {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 8, "max_position_embeddings": 1024
}  # fmt: skip
LLAMA_70B = LLAMA_8B.config | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64
}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "tiny": qwen().config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]},
    "short": LLAMA_300M,
    "large": LLAMA_8B.config,
    "recurrent": QWEN35_9B.config,
    "spread": {
        name: value for name, value in GPT_OSS_120B.config.items() if name != "quantization_config"
    },
}


def make_plan_from_configs(
    folder: Path, config: dict[str, Any], *, draft: dict[str, Any] | None = None
) -> Plan:
    for name, content in {"target": config, "draft": draft}.items():
        if content:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(content), encoding="utf-8")
    target = read_model_config(str(folder / "target"), key="target.model")
    return make_plan(
        target, read_model_config(str(folder / "draft"), key="draft") if draft else None
    )


def build_command(plan: Plan, method: str) -> list[str]:
    """Return the arguments of the command that a plan prints if it recommends this method.

    Only this method and n-gram lookup have an estimate.
    """
    rows = [
        replace(row, low=None, high=None) if row.method not in (method, "ngram") else row
        for row in plan.methods
    ]
    rows = [
        replace(row, high=replace(row.high, speedup=9.0)) if row.method == method else row
        for row in rows
    ]
    start = recommend_method(rows, plan.target, plan.alone)["start"]
    # A target that is spread over devices has the command of a server first.
    program, *arguments = shlex.split(str(start).splitlines()[-1])
    assert program == "specdistill"
    return arguments


def list_printed_commands(plan: Plan) -> list[list[str]]:
    """Return the commands on a screen of 100 columns, split as a shell splits them."""
    output = io.StringIO()
    with redirect_stdout(output), mock.patch.dict(os.environ, {"COLUMNS": "100"}):
        print_plan(plan, [], None, details=False)
    lines = output.getvalue().replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith("  ")]


@pytest.fixture(scope="module")
def large_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelConfigInfo]:
    """A function that returns a target of 8B or 70B parameters, with config.json and tokenizer.

    Its layers are tried once, for the first test that asks for it.
    """
    configs = {"8B": LLAMA_8B.config, "70B": LLAMA_70B}

    def read_target(name: str) -> ModelConfigInfo:
        folder = tmp_path_factory.mktemp(name) / "target"
        tiny_tokenizer().save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(configs[name]), encoding="utf-8")
        target = read_model_config(str(folder), key="target.model", trust_remote_code=True)
        assert target.cache is not None
        return target

    return cache(read_target)


def check_launch(options: LaunchOptions) -> dict[str, Any]:
    """Check a launch and return the arguments of accelerate."""
    arguments = {
        name: value
        for name, value in options.model_dump().items()
        if value is not None and name != "launch"
    }
    return _check_launch_options(find_yaml(str(options.launch), LAUNCHES, "launch"), arguments)


@pytest.mark.long  # 32 or 80 layers are tried, and then four commands
@pytest.mark.parametrize("name", ["8B", "70B", "70B with a draft"])
def test_printed_commands_are_accepted_until_weights_are_missing(
    name: str,
    large_target: Callable[[str], ModelConfigInfo],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command is started, and fails only because the target has no weights."""
    size, _, has_draft = name.partition(" with ")
    config = LLAMA_EAGLE3.config | {
        key: LLAMA_70B[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    target = large_target(size)
    commands = list_printed_commands(
        make_plan(target, read_model_config(str(tmp_path), key="draft") if has_draft else None)
    )
    recipes: list[Any] = []
    for program, verb, *arguments in commands:
        if program == "vllm":
            shared = [
                "--tensor-parallel-size",
                "2",
                "--data-parallel-size",
                "4",
                "--trust-remote-code",
            ]
            assert [verb, *arguments] == ["serve", target.name, *shared]
            continue
        assert program == "specdistill" and "target.trust_remote_code=true" in arguments
        arguments = [
            word.replace(DATA, "data.jsonl").replace(PROMPTS, "data.jsonl") for word in arguments
        ]
        if verb != "eval":
            options, keys = load_own_keys(
                LaunchOptions, [word for word in arguments if "=" in word]
            )
            recipes.append(load_recipe(Recipe, ["train.output_dir=runs", *keys]))
            assert options.launch is None or check_launch(options)["num_processes"] == 8
            arguments = [
                word
                for word in arguments
                if word.partition("=")[0] not in LaunchOptions.model_fields
            ]
        try:
            code = main([verb, *arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        error = capsys.readouterr().err
        assert (
            code == 2
            and refused_key(error) in ("target", "target.model", "draft", "eval.suite")
            and any(
                why in error
                for why in ("without weights", "and no weights", "safetensors", "no chat template")
            )
        )
    assert [recipe.target.shard for recipe in recipes] == {
        "8B": ["none"],
        "70B": ["none", "layers"],
    }.get(name, [])
    # Training finds the rows that `data make` wrote.
    assert len({str(recipe.data) for recipe in recipes}) <= 1
    assert ("target.device_map=auto" in commands[-1]) == (size == "70B")


@pytest.mark.long  # 32 layers are tried
def test_a_batch_that_no_machine_holds_has_no_command(
    large_target: Callable[[str], ModelConfigInfo],
) -> None:
    small = ServingOptions(memory_gb=24.0)
    advice = make_plan(large_target("8B"), serving=small, batch_size=64).recommendation
    assert advice[
        "start"
    ] is None and "64 rows of 2,048 tokens does not fit into the memory of 8 devices" in str(
        advice["reason"]
    )
    server, make, train, _ = list_printed_commands(
        make_plan(large_target("8B"), serving=small, batch_size=1)
    )
    assert (
        "train.per_device_train_batch_size=1" in train
        and server[:2] == ["vllm", "serve"]
        and make[2] == "make"
    )


@pytest.mark.long  # 32 or 80 layers are tried
@pytest.mark.parametrize("name", ["llama-3.1-8b/eagle3", "llama-3.3-70b/eagle3"])
def test_a_recipe_of_the_target_s_own_has_the_row_and_the_commands_of_its_header(name: str) -> None:
    record = load_script("bench/recipes.py").load_record()[name]
    target = replace(
        read_model_config(str((RECIPES / name).parent), key="target.model"),
        name=record["of"]["target"],
    )
    plan = make_plan(target)
    (row,) = (row for row in plan.methods if row.method == "eagle3")
    assert row.recipe == name and row.micro_batch == (
        record["of"]["rows"],
        record["of"]["max_length"],
    )
    assert row.trained_tokens == record["tokens_a_step"] * record["steps"]
    assert row.training_launch is not None and launch_of(name) == (
        record["of"]["launch"],
        record["of"]["num_processes"],
    )
    assert (row.training_launch.is_sharded, row.training_launch.num_processes) == (
        record["of"]["shard"] == "layers",
        8,
    )
    server, make, train, lookup = list_printed_commands(plan)
    header = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert (
        f"#   {shlex.join(server)}" in header
        and f"#   {shlex.join(make)}" in header
        and "suite=mt-bench" in lookup
    )
    launch_keys = [f"launch={record['of']['launch']}", "num_processes=8"]
    assert train == ["specdistill", "train", f"recipe={name}", *launch_keys]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("tiny", "short") else pytest.param(name, marks=pytest.mark.long)
        for name in TARGETS
    ],
)
def test_the_command_for_a_head_fits_its_target(name: str, tmp_path: Path):
    plan = make_plan_from_configs(tmp_path, TARGETS[name])
    verb, *arguments = build_command(plan, "eagle3")
    launching, keys = load_own_keys(LaunchOptions, arguments)
    recipe: Any = load_recipe(Recipe, keys)
    (row,) = (row for row in plan.methods if row.method == "eagle3")
    longest = plan.target["max_length"]
    assert verb == "train" and f"data.source={DATA}" in keys
    assert recipe.data.max_length <= longest
    assert recipe.data.packing == (name != "recurrent")
    # The recipes of small targets are in float32.
    assert recipe.target.dtype == ("float32" if name == "tiny" else "bfloat16")
    if name != "tiny":
        assert recipe.data.regenerate.num_tokens == row.training_tokens
        assert recipe.train["num_train_epochs"] == 1 and "max_steps" not in recipe.train
        assert recipe.train["eval_steps"] == recipe.train["save_steps"] <= 0.1
        held = recipe.data.regenerate.batch_size * recipe.data.max_length
        assert held <= plan.alone.room or not plan.alone.fits
    assert (launching.num_processes, recipe.target.shard) == (
        (4, "layers") if name == "spread" else (None, "none")
    )


@pytest.mark.long  # 32 layers are tried
def test_eval_accepts_the_command_that_measures_a_draft(tmp_path: Path):
    verb, *arguments = build_command(
        make_plan_from_configs(tmp_path, LLAMA_8B.config, draft=LLAMA_EAGLE3.config), "eagle3"
    )
    keys = select_recipe_keys(
        [argument for argument in arguments if not argument.startswith("suite=")], EVAL_KEYS
    )
    recipe: Any = load_recipe(Recipe, [*keys, "eval.suite=pico-short", "train.output_dir=runs"])
    assert verb == "eval" and f"suite={PROMPTS}" in arguments
    assert (recipe.method, recipe.target.dtype, recipe.eval.draft) == (
        "eagle3",
        "bfloat16",
        str(tmp_path / "draft"),
    )
    assert recipe.eval.num_speculative_tokens == 4  # the plan has 3 to 6 as the best


def test_look_up_is_recommended_before_a_draft_that_is_faster_at_its_best_alone(tmp_path: Path):
    plan = make_plan_from_configs(tmp_path, TARGETS["tiny"])
    (lookup,) = [row for row in plan.methods if row.method == "ngram"]
    assert lookup.low is not None and lookup.high is not None

    def recommend(at_worst: float) -> str | None:
        best = replace(lookup.high, speedup=1.1 * lookup.high.speedup)
        draft = {"low": replace(lookup.low, speedup=at_worst * lookup.low.speedup), "high": best}
        rows = [
            replace(row, **draft) if row.method == "eagle3" else replace(row, low=None)
            for row in plan.methods
        ]
        return recommend_method(
            [lookup if row.method == "ngram" else row for row in rows], plan.target
        )["method"]

    assert recommend(at_worst=0.5) == "ngram"
    assert recommend(at_worst=1.0) == "eagle3"


@pytest.mark.long  # writes a checkpoint of many tensors
def test_look_up_is_recommended_where_it_promises_most_and_obstacles_are_told(tmp_path: Path):
    """gpt-oss-120b in MXFP4 reads few bytes in a step.

    So this head, which has the target's own output layer, is not cheap for it.
    """
    target, draft = PAIRS["gpt-oss-120b-eagle3"].write(tmp_path)
    described = read_model_config(str(target), key="target.model")
    advice = make_plan(described, read_model_config(str(draft), key="draft")).recommendation
    assert advice["method"] == "ngram" and "method=ngram" in str(advice["start"])
    plan = make_plan(described)
    rows = [
        replace(row, high=replace(row.high, speedup=9.0)) if row.method == "eagle3" else row
        for row in plan.methods
    ]
    advice = recommend_method(rows, plan.target, plan.alone)
    assert "target.shard" in str(advice["reason"]) and "mxfp4" in str(advice["reason"])
    rows_without_launch = [replace(row, training_launch=None) for row in rows]
    advice = recommend_method(rows_without_launch, plan.target, plan.alone)
    assert advice["start"] is None and "8 devices" in str(advice["reason"])
