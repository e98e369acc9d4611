"""A recipe that runs somebody's code is refused until the command line repeats the key."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from specdistill.common.errors import ExitCode
from specdistill.evaluation.measurement.servers import start_command
from specdistill.methods import METHODS
from specdistill.methods.models.checkpoint import save_draft_model
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.serving.engines.engine import Served
from specdistill.targets.frozen import FrozenTarget
from tests.draft_models import half_right
from tests.refusals import refused_key
from tests.scripts import specdistill
from tests.tiny import write_target

COMMAND = 'env X="a: b" vllm serve'
SECTIONS = {
    "target.trust_remote_code": ("true", "target: {model: pico, trust_remote_code: true}\n"),
    "eval.engine_command": (
        json.dumps(COMMAND),
        f"target: {{model: pico}}\neval: {{engine: vllm, engine_command: '{COMMAND}'}}\n",
    ),
}
TRUST = "target.trust_remote_code=true"


def check_refused(key: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    result = specdistill(*arguments)
    assert (result.returncode, refused_key(result.stderr)) == (ExitCode.USER_ERROR, key), result
    return result


@pytest.mark.parametrize("key", SECTIONS)
def test_a_recipe_is_refused_until_the_command_line_repeats_it(
    key: str, in_empty_folder: Path
) -> None:
    del in_empty_folder
    value, text = SECTIONS[key]
    Path("somebody.yaml").write_text(f"method: eagle3\n{text}", encoding="utf-8")
    keys = ["recipe=somebody.yaml", "train.output_dir=runs/mine", "eval.suite=pico"]
    said = check_refused(key, "eval", *keys).stderr
    assert said.startswith(
        f"error: {key}: got {value} in somebody.yaml, expected the key on the command line"
    )
    (argument,) = shlex.split(said.partition("Read the code, then add ")[2])
    check_refused("eval.draft", "eval", *keys, argument)  # the next error: there is no draft
    section, _, name = key.partition(".")
    assert load_recipe(Recipe, [*keys, argument]).model_dump()[section][name] in (True, COMMAND)
    off = f"{key}=null" if key.endswith("command") else f"{key}=false"
    assert not load_recipe(Recipe, [*keys, off]).model_dump()[section][name]


@pytest.mark.parametrize(
    "command",
    [
        "train train.output_dir=run data.source=pico",
        "data make data.source=pico",
        "data features data.source=pico",
        "export dry_run=true engine=vllm output_dir=out data.source=pico",
    ],
)
def test_no_command_accepts_trust_from_a_recipe(command: str, in_empty_folder: Path) -> None:
    del in_empty_folder
    text = "method: eagle3\ntarget: {model: ./nowhere, trust_remote_code: true}\n"
    Path("somebody.yaml").write_text(text, encoding="utf-8")
    check_refused("target.trust_remote_code", *command.split(), "recipe=somebody.yaml")


@pytest.mark.parametrize(
    "command",
    ["plan hub=false", "doctor draft=draft", "compare drafts=[ngram,draft] output_dir=out"],
)
def test_no_command_accepts_trust_from_a_file_of_its_own_keys(
    command: str, in_empty_folder: Path
) -> None:
    del in_empty_folder
    Path("somebody.yaml").write_text(SECTIONS["target.trust_remote_code"][1], encoding="utf-8")
    check_refused("target.trust_remote_code", *command.split(), "recipe=somebody.yaml")


# Consent is about the target. A draft is read by classes of transformers and of this project.

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = {model_type!r}
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a target and a draft model for it."""
    folder = tmp_path_factory.mktemp("models")
    write_target(folder / "target")
    target = FrozenTarget.load(str(folder / "target"))
    save_draft_model(half_right(target), target.tokenizer, folder / "draft")
    return folder


def add_code(models: Path, folder: Path, model_type: str) -> Path:
    """Copy the models, add code to the draft, and return the file that this code would leave."""
    shutil.copytree(models, folder, dirs_exist_ok=True)
    (folder / "draft" / "code.py").write_text(
        CODE.format(marker=str(folder / "marker"), model_type=model_type)
    )
    path = folder / "draft" / "config.json"
    auto = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnForCausalLM"}
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "model_type": model_type, "auto_map": auto})
    )
    return folder / "marker"


SUITE_KEYS = (
    "suite=pico {0}num_prompts=1 {0}max_new_tokens=4 {0}repeats=1 {0}warmup=0 {0}sampling_draws=0"
)


@pytest.mark.parametrize("model_type", ["llama", "own"])  # "own": transformers has no class for it
@pytest.mark.parametrize(
    "command",
    [
        # a whole plan
        pytest.param(
            "plan draft=draft hub=false training.batch_size=1 training.max_length=16",
            marks=pytest.mark.long,
        ),
        "doctor draft=draft eval.num_prompts=1",
        f"eval method=draft_model draft=draft output_dir=report {SUITE_KEYS.format('eval.')}",
        f"compare drafts=[ngram,draft] output_dir=comparison {SUITE_KEYS.format('')}",
    ],
    ids=lambda command: command.split()[0],
)
def test_code_of_a_draft_never_runs(
    command: str, model_type: str, models: Path, in_empty_folder: Path
) -> None:
    marker = add_code(models, in_empty_folder, model_type)
    result = specdistill(*command.split(), "target=target", TRUST)
    expected = (
        (ExitCode.DONE, ExitCode.CHECK_FAILED)
        if model_type == "llama"
        else (ExitCode.CHECK_FAILED, ExitCode.USER_ERROR)
    )
    assert result.returncode in expected and not marker.exists(), result
    assert TRUST not in result.stderr + (
        "" if command.startswith("plan") else result.stdout
    )  # no advice to trust the draft; plan repeats the key for the target


def test_an_engine_that_trusts_a_target_is_given_no_code_of_its_draft(
    models: Path, in_empty_folder: Path
) -> None:
    add_code(models, in_empty_folder, "llama")
    result = specdistill(
        "export", "draft=draft", "engine=vllm", "target=target", "output_dir=exported"
    )
    assert result.returncode == ExitCode.DONE, result
    assert not list(Path("exported").glob("*.py"))
    assert "auto_map" not in json.loads(Path("exported/config.json").read_text(encoding="utf-8"))


# Recipes for several GPUs state how many, and need no command for an engine.


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("deepseek-v3/mtp", 16),
        ("llama-3.3-70b/draft", 8),
        ("llama-3.3-70b/eagle3", 8),
        ("qwen3-next-80b-a3b/mtp", 8),
    ],
)
def test_an_engine_is_started_on_as_many_gpus_as_the_recipe_says(
    name: str, gpus: int, engine: str
) -> None:
    recipe = load_recipe(
        Recipe,
        [f"recipe={name}", "target.model=pico", "target.revision=null", f"eval.engine={engine}"],
    )
    serving = METHODS[recipe.method].serving()[engine]
    served = Served(recipe.method, Path("draft"), "T", 3, samples=False, config={}, serving=serving)
    for k in (0, 3):
        words = start_command(recipe.eval, recipe.target, served, k, 640)
        assert words[words.index("--tensor-parallel-size") + 1] == str(gpus)
    alone = load_recipe(
        Recipe,
        [
            f"recipe={name}",
            "target.model=pico",
            "target.revision=null",
            "eval.tensor_parallel=null",
        ],
    )
    assert "--tensor-parallel-size" not in start_command(alone.eval, alone.target, served, 3, 640)
