"""`specdistill <verb> key=value …`: the project's scripts and commands behind one name.

A verb checks what it was given before it imports anything heavy. A script runs in this process, and stays the only place where its work is
written down.
"""

import ast
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import specdistill
from specdistill.command import HELP, NO_SHORTHANDS, TARGET, keys_of, print_help
from specdistill.credentials import check_arguments
from specdistill.doctor.command import DOCTOR, DoctorOptions, doctor
from specdistill.errors import ExitCode, ResourceError, UserError, nearest, reported
from specdistill.hub.command import AcquireOptions, ExportOptions, PublishOptions, acquire, export, publish
from specdistill.launch import LaunchOptions, run_script
from specdistill.methods import METHODS
from specdistill.methods.recipe import DEFAULT_METHOD, Recipe
from specdistill.monitor.command import MonitorOptions, monitor
from specdistill.next_step import next_step
from specdistill.planning.command import PlanOptions, plan
from specdistill.produce.command import ShowOptions, data
from specdistill.project import PICO, ROOT
from specdistill.recipe.fields import Section
from specdistill.recipe.load import load_own_keys, load_recipe, merged

DEMO_RECIPE, DEMO_FOLDER = "pico/eagle3", "runs/demo"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb, or without one say what to type next; returns the exit code."""
    verb, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    return reported(lambda: _run(verb, rest), debug="debug=true" in rest)


def _run(verb: str, arguments: list[str]) -> int:
    if verb in HELP:
        print(f"{specdistill.__doc__}\n\nUsage: specdistill <verb> key=value …     specdistill <verb> --help lists its keys\n")
        for name, row in VERBS.items():
            print(f"  {name:8} {row.run.__doc__}")
        return ExitCode.DONE
    if verb == "--version":
        print(f"specdistill {specdistill.__version__}")
        return ExitCode.DONE
    if not verb:
        message, commands = next_step(Path())
        print(message, *(f"  {command}" for command in commands), "All verbs: specdistill --help", sep="\n")
        return ExitCode.DONE
    check_arguments(arguments)
    if verb not in VERBS:
        expected = f"one of {', '.join(VERBS)}"
        raise UserError(f"specdistill {verb}", got="an unknown verb", expected=expected, nearest=nearest(verb, VERBS))
    row = VERBS[verb]
    if row.schemas and HELP & set(arguments):
        print_help(f"specdistill {verb}: {row.run.__doc__}", *row.schemas, shorthands=row.shorthands)
        return ExitCode.DONE
    return row.run(arguments)


def train(arguments: list[str]) -> int:
    """train a recipe's draft, or pico itself (several GPUs: launch=ddp)"""
    options, arguments = load_own_keys(LaunchOptions, arguments)
    keys = keys_of(arguments)
    values = merged(keys)
    if "curriculum" in values:  # pico's own recipe, whose keys its script knows
        return run_script("train/target.py", arguments, options)
    method = METHODS.get(str(values.get("method", DEFAULT_METHOD)))
    script = (method and method.script) or "train/eagle.py"
    if HELP & set(arguments):
        introduction = ast.get_docstring(ast.parse((ROOT / script).read_text(encoding="utf-8")))  # not imported: it needs torch
        print_help(introduction or "", Recipe, LaunchOptions)
        return ExitCode.DONE
    if method and method.script is None:
        trained = [name for name, row in METHODS.items() if row.script]
        raise UserError("method", got="one that needs no training", expected=" or ".join(trained))
    load_recipe(Recipe, keys)
    return run_script(script, arguments, options)


def eval(arguments: list[str]) -> int:
    """decode with a draft, measure acceptance length and speedup, write the report, apply the gate"""
    return run_script("eval/run.py", arguments)


def gate(arguments: list[str]) -> int:
    """apply a gate to an existing report: exit code 0 passed, 1 failed, 4 inconclusive"""
    return run_script("eval/gate.py", arguments)


def compare(arguments: list[str]) -> int:
    """measure several drafts for one target in one paired run, rank them, and say why they differ"""
    return run_script("eval/compare.py", arguments)


def demo(arguments: list[str]) -> int:
    """train a head for pico, the target that ships with the package, and measure it; key=value goes to `train` and `eval`"""
    keys = [f"recipe={DEMO_RECIPE}", f"train.output_dir={DEMO_FOLDER}", *arguments]
    output_dir = load_recipe(Recipe, keys_of(keys)).train["output_dir"]
    # Checked first: a mistake must not cost the earlier demo. Only what a demo wrote is cleared; any other folder is the script's to judge.
    if output_dir == DEMO_FOLDER and (Path(DEMO_FOLDER) / "run" / "recipe.yaml").is_file():
        if Path(DEMO_FOLDER).is_symlink():
            raise UserError("train.output_dir", got=f"{DEMO_FOLDER}, a link", expected="a folder, or another train.output_dir")
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
    """print the folder of pico, the target that ships with the package: specdistill path pico"""
    if HELP & set(arguments):
        print(f"specdistill path: {path.__doc__}")
        return ExitCode.DONE
    if arguments != [PICO.name]:
        raise UserError("specdistill path", got=" ".join(arguments) or "nothing", expected=PICO.name)
    print(PICO)
    return ExitCode.DONE


class Verb(NamedTuple):
    """What runs, with a docstring for `--help`, and whose keys `<verb> --help` lists; without schemas, `run` answers `--help` itself."""

    run: Callable[[list[str]], int]
    schemas: Sequence[type[Section]] = ()
    shorthands: Mapping[str, str] = NO_SHORTHANDS


VERBS = {
    "demo": Verb(demo, [Recipe]),
    "plan": Verb(plan, [PlanOptions], TARGET),
    "acquire": Verb(acquire, [AcquireOptions], TARGET),
    "export": Verb(export, [ExportOptions], TARGET),
    "doctor": Verb(doctor, [DoctorOptions], DOCTOR),
    "data": Verb(data, [Recipe, ShowOptions, LaunchOptions]),
    "train": Verb(train),
    "eval": Verb(eval),
    "compare": Verb(compare),
    "gate": Verb(gate),
    "publish": Verb(publish, [PublishOptions]),
    "monitor": Verb(monitor, [MonitorOptions]),
    "path": Verb(path),
}
