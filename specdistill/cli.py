"""`specdistill <verb> key=value …`: the project's scripts behind one command.

A verb checks what it was given before it imports anything heavy, then runs the script in this process; the script stays the only place
where its work is written down.
"""

import ast
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import specdistill
from specdistill.command import print_help
from specdistill.errors import ExitCode, ResourceError, UserError, explain, nearest
from specdistill.methods import METHODS
from specdistill.project import PICO, ROOT
from specdistill.recipe import Recipe, TargetRecipe, load_recipe, schema_of

PATHS = {"pico": PICO}
DEMO_RECIPE, DEMO_FOLDER = "pico/eagle3", "runs/demo"
HELP = {"-h", "--help"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    verb, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if verb in HELP:
        return _print_usage()
    if verb == "--version":
        print(f"specdistill {specdistill.__version__}")
        return ExitCode.DONE
    try:
        if verb not in VERBS:
            expected = f"one of {', '.join(VERBS)}"
            raise UserError(f"specdistill {verb}", got="an unknown verb", expected=expected, nearest=nearest(verb, VERBS))
        return VERBS[verb](rest)
    except (UserError, ResourceError) as error:
        return explain(error, debug="debug=true" in rest)


def train(arguments: list[str]) -> int:
    """train a draft on a recipe (one process; `accelerate launch train/….py` for more), or a target of its own"""
    keys = _keys(arguments)
    schema = schema_of(keys)
    script = "train/target.py" if schema is TargetRecipe else "train/eagle.py"
    if HELP & set(arguments):
        return _script_help(script, schema)
    recipe = load_recipe(schema, keys)
    if isinstance(recipe, Recipe):
        trained_by = METHODS[recipe.method].trained_by
        if trained_by is None:
            trained = [name for name, method in METHODS.items() if method.trained_by]
            raise UserError("method", got=f"{recipe.method}, which needs no training", expected=" or ".join(trained))
        script = trained_by
    return _run_script(script, arguments)


def data(arguments: list[str]) -> int:
    """prepare a recipe's training rows, count them, and show a document with the tokens that carry loss in colour"""
    if HELP & set(arguments):
        print_help(f"specdistill data: {data.__doc__}", Recipe)
        return ExitCode.DONE
    recipe = load_recipe(Recipe, [*_keys(arguments), "train.output_dir=runs"])  # a recipe needs it, the rows do not
    from rich.console import Console  # here, and not above, because these import torch

    from specdistill.data import training_data
    from specdistill.data.preview import document, summary
    from specdistill.targets.frozen import FrozenTarget

    target = FrozenTarget.load(**vars(recipe.target))
    train_set, eval_set = training_data(recipe.data, target.tokenizer, target.model, fingerprint=target.fingerprint())
    console = Console()
    console.print(summary({"train": train_set, "validation": eval_set}))
    console.print("\nThe first document of the first row; tokens that carry loss are green:\n")
    console.print(document(train_set[0], target.tokenizer))
    return ExitCode.DONE


def eval(arguments: list[str]) -> int:
    """decode with a draft for real, measure acceptance and speedup, write report.json and its siblings, apply the gate"""
    if schema_of(_keys(arguments)) is TargetRecipe:
        raise UserError("recipe", got="the recipe of a target", expected="the recipe of a draft")
    return _run_script("eval/run.py", arguments)


def gate(arguments: list[str]) -> int:
    """decide from a report alone: exit code 0 passed, 1 failed"""
    return _run_script("eval/gate.py", arguments)


def compare(arguments: list[str]) -> int:
    """measure several drafts for one target in one paired run, rank them, and say why they differ"""
    return _run_script("eval/compare.py", arguments)


def demo(arguments: list[str]) -> int:
    """train a head for the target that ships with the package, decode with it, measure, pass the gate; key=value goes to both"""
    if HELP & set(arguments):
        print_help(f"specdistill demo: {demo.__doc__}", Recipe)
        return ExitCode.DONE
    keys = [f"recipe={DEMO_RECIPE}", f"train.output_dir={DEMO_FOLDER}", *arguments]
    output_dir = load_recipe(Recipe, _keys(keys)).train["output_dir"]
    # Checked first: a mistake must not cost the earlier demo. Only what a demo wrote is cleared; any other folder is the script's to judge.
    if output_dir == DEMO_FOLDER and (Path(DEMO_FOLDER) / "run" / "recipe.yaml").is_file():
        shutil.rmtree(DEMO_FOLDER)
    for verb in ("train", "eval"):
        command = [verb, *keys]
        print(f"$ specdistill {shlex.join(command)}", flush=True)
        code = subprocess.run([sys.executable, "-m", "specdistill", *command], check=False).returncode
        if code < 0:
            raise ResourceError(f"specdistill {verb} was killed by signal {-code}", next_step="free memory and start again")
        if code != ExitCode.DONE:
            return code
    return ExitCode.DONE


def path(arguments: list[str]) -> int:
    """print the folder of something that ships with the package: specdistill path pico"""
    if HELP & set(arguments):
        print(f"specdistill path: {path.__doc__}")
        return ExitCode.DONE
    name = " ".join(arguments)
    if name not in PATHS:
        raise UserError("specdistill path", got=name or "nothing", expected=" or ".join(PATHS), nearest=nearest(name, PATHS))
    print(PATHS[name])
    return ExitCode.DONE


VERBS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "data": data,
    "train": train,
    "eval": eval,
    "compare": compare,
    "gate": gate,
    "path": path,
}


def _print_usage() -> int:
    print(f"{specdistill.__doc__}\n\nUsage: specdistill <verb> key=value …     specdistill <verb> --help lists its keys\n")
    for name, verb in VERBS.items():
        print(f"  {name:8} {verb.__doc__}")
    return ExitCode.DONE


def _keys(arguments: list[str]) -> list[str]:
    """The key=value arguments that belong to the recipe."""
    return [argument for argument in arguments if argument not in HELP and not argument.startswith("debug=")]


def _run_script(script: str, arguments: list[str]) -> int:
    """Run one of the project's scripts as if by `python script arguments`; its own exit code ends this process."""
    sys.argv = [str(ROOT / script), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return ExitCode.DONE


def _script_help(script: str, schema: type) -> int:
    """A script's docstring and keys, without importing it."""
    introduction = ast.get_docstring(ast.parse((ROOT / script).read_text(encoding="utf-8")))
    print_help(introduction or "", schema)
    return ExitCode.DONE
