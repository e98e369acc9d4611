"""The folders of examples/ are complete.

What their scripts run exists, and their recipes, rows and suites load and train.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdistill.cli.data import check_named_files
from specdistill.common.project import RECIPES, ROOT
from specdistill.data.produce.sources import COLUMNS, normalize_row
from specdistill.data.rows.encoding import Encoder
from specdistill.evaluation.suites.suite import load_suite
from specdistill.methods.recipe import Recipe, TrainedRecipe
from specdistill.recipe.load import load_recipe
from specdistill.recipe.short_keys import SHORTHANDS, TRAIN, select_recipe_keys
from tests.data.produce.openai_server import Behaviour, running
from tests.documented import find_unknown_keys, read_page
from tests.families import Family, family_of, write_model
from tests.scripts import specdistill
from tests.tiny import SMALL, tiny_tokenizer

EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/README.md"))
SCRIPTS = sorted(EXAMPLES.glob("*/*.sh"))
OWN_RECIPES = [
    path for path in sorted(EXAMPLES.glob("*/*.yaml")) if "\nmethod: " in read_page(path)
]
AGENT = EXAMPLES / "agent-with-tools"
TOOLS_TEMPLATE = read_page(ROOT / "tests" / "data" / "rows" / "chat_templates" / "qwen3.jinja")
# Stands in for a program: it writes down what the shell gave it. A server stays and answers once it
# has started, a job of Ray runs, and the gate says what VERDICT says.
STAND_IN = """#!/bin/bash
[ "$(basename "$0")" != curl ] || until grep -q ^vllm "$LOG"; do sleep 0.01; done
line="$(printf '%q ' "$(basename "$0")" "$@")"
echo "$line" >> "$LOG"
case "$(basename "$0") $1" in
    vllm*) exec sleep 30 ;;
    ray*) while [ "$1" != -- ]; do shift; done; shift; exec "$@" ;;
    "specdistill eval") exit "${VERDICT:-0}" ;;
esac
"""
ROWS = ["data.regenerate.num_tokens=500", "data.regenerate.batch_size=16"]
MEASURED = ["eval.num_prompts=2", "eval.max_new_tokens=12", "eval.repeats=1", "eval.warmup=0"]
# Keys that make the commands of the scripts small.
SHRUNK = {
    "plan": ["serving.context=128", "training.batch_size=1", "training.max_length=64"],
    "data": ROWS,
    "train": [*ROWS, *SMALL, "train.per_device_train_batch_size=2"],
    "eval": [*MEASURED, "eval.sampling_draws=40"],
}


def run_with_stand_ins(
    script: Path, folder: Path, *arguments: str, **variables: str
) -> tuple[int, list[Any]]:
    """Run a script with stand-ins for its programs.

    Returns its exit code and the words of each command.
    """
    programs = folder / "bin"
    programs.mkdir()
    for name in ("specdistill", "vllm", "curl", "ray"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    (folder / "log").touch()
    environment = {**os.environ, "PATH": path, "LOG": str(folder / "log"), **variables}
    ended = subprocess.run(
        ["bash", script, *arguments], cwd=folder, env=environment, check=False, timeout=60
    )
    return ended.returncode, list(map(shlex.split, read_page(folder / "log").splitlines()))


def check_keys(commands: list[list[str]]) -> None:
    for program, verb, *words in commands:
        if program == "specdistill":
            keys = [word.partition("=")[0] for word in words if "=" in word]
            assert find_unknown_keys(verb, keys) == [], (verb, keys)


def test_the_index_lists_every_folder_and_readmes_are_short() -> None:
    listed = re.findall(
        r"^\| \[([\w.-]+)\]\(\1/README\.md\)", read_page(EXAMPLES / "README.md"), re.M
    )
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
    assert len(FOLDERS) == 5
    for folder in FOLDERS:
        assert len(read_page(folder / "README.md").split()) <= 250, folder
        # recipe.yaml names the suite.
        files = {path.name for path in folder.iterdir()} - {"README.md", "suite.yaml"}
        assert [name for name in files if name not in read_page(folder / "README.md")] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_scripts_parse_as_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        ("llama-3.1-8b-eagle3", "vllm curl data train eval export"),
        ("small-model-cpu", "plan train eval export"),
        ("agent-with-tools", "vllm curl data data train eval export"),
    ],
)
def test_a_script_takes_every_step_and_ends_as_the_gate_says(
    script: str, steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, commands = run_with_stand_ins(
        EXAMPLES / script / "run.sh", tmp_path, "org/model", VERDICT="4"
    )
    assert code == 4
    named = [command[1 if command[0] == "specdistill" else 0] for command in commands]
    assert named == steps.split()

    # The recipe trains what the later commands read, from files that are there.
    monkeypatch.chdir(EXAMPLES / script)
    check_keys(commands)
    by_verb = {command[1]: command[2:] for command in commands if command[0] == "specdistill"}
    training = [key for key in by_verb["train"] if not key.startswith(("launch=", "num_proc"))]
    recipe = load_recipe(Recipe, select_recipe_keys(training, TRAIN))
    assert isinstance(recipe, TrainedRecipe)
    check_named_files(recipe)
    run = recipe.train["output_dir"]
    assert by_verb["eval"] == [f"recipe={run}/run/recipe.yaml"]
    assert {f"draft={run}/draft", f"target={recipe.target.model}"} < set(by_verb["export"])


def test_the_server_of_a_script_serves_the_target_of_its_recipe(tmp_path: Path) -> None:
    for number, (name, file) in enumerate(
        {
            "llama-3.1-8b-eagle3": RECIPES / "llama-3.1-8b" / "eagle3.yaml",
            "agent-with-tools": AGENT / "recipe.yaml",
        }.items()
    ):
        (tmp_path / str(number)).mkdir()
        _, commands = run_with_stand_ins(EXAMPLES / name / "run.sh", tmp_path / str(number))
        target = yaml.safe_load(read_page(file))["target"]
        (server,) = [command for command in commands if command[0] == "vllm"]
        assert server[1:5] == ["serve", target["model"], "--revision", target["revision"]]


def test_jobs_of_ray_make_all_shards_before_they_train(tmp_path: Path) -> None:
    shutil.copy(RECIPES / "llama-3.1-8b" / "eagle3.yaml", tmp_path / "mine.yaml")
    code, commands = run_with_stand_ins(EXAMPLES / "cluster" / "ray.sh", tmp_path)
    assert code == 0
    check_keys(commands)
    data_job, make, merge, train_job, train = commands
    address = ["job", "submit", "--address", "http://127.0.0.1:8265"]
    assert data_job[1:5] == address and train_job[1:5] == address
    assert train_job[5:7] == ["--entrypoint-num-gpus", "8"]
    keys = ["recipe=mine.yaml", "data.cache_dir=cache", "data.regenerate.server=[]"]
    assert make[2:] == ["make", *keys, "on=ray", "shards=100", "gpus=1"]
    assert merge[2:] == ["merge", *keys]
    assert train[2:] == [*keys, "launch=ddp", "num_processes=8"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        load_recipe(Recipe, keys)


def test_ray_has_the_options_of_the_jobs() -> None:
    pytest.importorskip("ray")
    from ray.dashboard.modules.job.cli import submit

    assert {"address", "entrypoint_num_gpus"} <= {option.name for option in submit.params}


@pytest.mark.parametrize("path", OWN_RECIPES, ids=lambda path: path.parent.name)
def test_recipes_load_and_name_files_that_exist(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    recipe = load_recipe(Recipe, select_recipe_keys([f"recipe={path.name}"], SHORTHANDS))
    assert isinstance(recipe, TrainedRecipe)
    check_named_files(recipe)
    assert re.fullmatch(r"[0-9a-f]{40}", str(recipe.target.revision))
    assert (ROOT / "eval" / "gates" / f"{recipe.gate}.yaml").is_file()


def test_the_workflow_trains_the_recipe_that_its_readme_copies() -> None:
    folder = EXAMPLES / "github-actions"
    (job,) = yaml.safe_load(read_page(folder / "release.yml"))["jobs"].values()
    assert f"recipe.yaml {job['with']['recipe']}\n" in read_page(folder / "README.md")
    # The gate asks for a baseline.
    assert yaml.safe_load(read_page(folder / "recipe.yaml"))["gate"] == "release"
    assert job["with"]["baseline"].startswith(f"{job['with']['repo']}@")


def test_an_agents_calls_and_answers_carry_loss_and_nothing_else() -> None:
    tokenizer = tiny_tokenizer(TOOLS_TEMPLATE.removesuffix("\n"))
    encode = Encoder(tokenizer, "assistant", 10_000)
    lines = read_page(AGENT / "conversations.jsonl").splitlines()
    num_calls = 0
    for number, line in enumerate(lines):
        raw = json.loads(line)
        (row,) = normalize_row(raw, f"row {number}", tokenizer)
        learned = []
        for document in encode({**dict.fromkeys(COLUMNS), **row}, 0):
            pairs = zip(document["input_ids"], document["loss_mask"], strict=True)
            learned.append(tokenizer.decode([token for token, has_loss in pairs if has_loss]))
        for message in raw["messages"]:
            if message["role"] != "assistant":
                assert not any(message["content"] in text for text in learned), message
                continue
            if message["content"]:
                assert any(message["content"] in text for text in learned), message
            for call in message.get("tool_calls", ()):
                num_calls += 1
                assert any(call["function"]["arguments"] in text for text in learned), call
    assert len(lines) == 10 and num_calls >= 10


def test_the_agents_suite_measures_each_kind_of_turn() -> None:
    suite = load_suite(str(AGENT / "suite.yaml"))
    assert {row.category for row in suite.rows} == {"tool_call", "structured_output", "prose"}
    messages = [
        json.loads(line)["messages"] for line in read_page(AGENT / "prompts.jsonl").splitlines()
    ]
    turns = [turn for prompt in messages for turn in prompt if turn["role"] == "assistant"]
    assert len(suite.rows) == len(turns)


def run_small(commands: list[list[str]], *replaced: str) -> None:
    """Run the recorded commands of a script with short lengths.

    Keys of `replaced` stand for those of the script in `data` and `train`.
    """
    for command in commands:
        if command[0] != "specdistill":
            continue
        verb, *words = command[1:]
        kept = [word for word in words if not word.startswith(("launch=", "num_processes="))]
        extra = replaced if verb in ("data", "train") else ()
        ended = specdistill(verb, *kept, *extra, *SHRUNK.get(verb, ()))
        # A draft that has hardly been trained may fail its gate.
        assert ended.returncode in ((0, 1, 4) if verb == "eval" else (0,)), ended.stderr[-2000:]


def check_run(run: str) -> None:
    report = json.loads(read_page(Path(run, "report", "report.json")))
    assert report["gate"]["verdict"] in ("passed", "failed", "inconclusive")
    assert report["lossless"]["unexplained_divergences"] == 0
    assert Path(run, "vllm", "SERVE.md").is_file()


@pytest.mark.long  # from the data to the export
def test_the_small_model_example_runs_from_its_data_to_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(EXAMPLES / "small-model-cpu", tmp_path / "example")
    write_model(tmp_path / "model", {"model_type": "llama"}, family_of("smollm2"))
    monkeypatch.chdir(folder)
    _, commands = run_with_stand_ins(folder / "run.sh", tmp_path, str(tmp_path / "model"))
    keys = ["data.decontaminate=[prompts.jsonl]", f"data.cache_dir={tmp_path / 'cache'}"]
    run_small(commands, *keys)
    check_run("runs/small-eagle3")


@pytest.mark.long  # from the data to the export
def test_the_agent_example_runs_from_its_data_to_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(AGENT, tmp_path / "example")
    published = json.loads(read_page(RECIPES / "qwen3-8b" / "config.json"))
    write_model(tmp_path / "model", published, Family(TOOLS_TEMPLATE, "<|im_end|>"))
    monkeypatch.chdir(folder)
    recipe = read_page(folder / "recipe.yaml")
    recipe = recipe.replace("Qwen/Qwen3-8B\n", f"{tmp_path / 'model'}\n")
    recipe = re.sub(r"\n  revision: .*", "", recipe)
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    script = read_page(folder / "run.sh").replace("Qwen/Qwen3-8B", str(tmp_path / "model"))
    (folder / "run.sh").write_text(script, encoding="utf-8")
    _, commands = run_with_stand_ins(folder / "run.sh", tmp_path)
    with running(Behaviour(returns_tokens=False)) as server:
        run_small(
            commands,
            f"data.regenerate.server=[{server.address}]",
            "data.decontaminate=[suite.yaml]",
            f"data.cache_dir={tmp_path / 'cache'}",
            "data.max_length=4096",
            "draft.vocab_size=128",
            "train.torch_compile=false",
        )
    check_run("runs/agent-with-tools")
    report = json.loads(read_page(Path("runs/agent-with-tools/report/report.json")))
    assert "tool_call" in {row["category"] for row in report["results"]}
