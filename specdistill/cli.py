"""`specdistill <verb> key=value …`: the project's scripts behind one command.

A verb checks what it was given before it imports anything heavy, then runs the script in this process; the script stays the only place
where its work is written down.
"""

import ast
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import specdistill
from specdistill.command import HELP, TARGET, keys_of, print_help
from specdistill.credentials import check_arguments
from specdistill.doctor.command import DOCTOR, DoctorOptions, doctor
from specdistill.errors import ExitCode, ResourceError, UserError, explain, nearest
from specdistill.hub.options import AcquireOptions, ExportOptions, PublishOptions
from specdistill.launch import LaunchOptions, launch_options, run_script
from specdistill.methods import METHODS
from specdistill.methods.recipe import DEFAULT_METHOD, Recipe
from specdistill.next_step import next_step
from specdistill.planning.command import PlanOptions, plan
from specdistill.produce import command as data_command
from specdistill.project import PICO, ROOT
from specdistill.recipe.fields import Section, leaves
from specdistill.recipe.load import load_recipe, merged
from specdistill.recipe.sections import TargetRecipe

PATHS = {"pico": PICO}
DEMO_RECIPE, DEMO_FOLDER = "pico/eagle3", "runs/demo"
REMOVED_DATA_VERBS = {"generate": "make"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb, or without one say what to type next; returns the exit code."""
    verb, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if verb in HELP:
        print(f"{specdistill.__doc__}\n\nUsage: specdistill <verb> key=value …     specdistill <verb> --help lists its keys\n")
        for name, function in VERBS.items():
            print(f"  {name:8} {function.__doc__}")
        return ExitCode.DONE
    if verb == "--version":
        print(f"specdistill {specdistill.__version__}")
        return ExitCode.DONE
    if verb in OPTIONS and HELP & set(rest):
        schemas, shorthands = OPTIONS[verb]
        print_help(f"specdistill {verb}: {VERBS[verb].__doc__}", *schemas, shorthands=shorthands)
        return ExitCode.DONE
    try:
        if not verb:
            return _say_what_is_next()
        check_arguments(rest)
        if verb not in VERBS:
            expected = f"one of {', '.join(VERBS)}"
            raise UserError(f"specdistill {verb}", got="an unknown verb", expected=expected, nearest=nearest(verb, VERBS))
        return VERBS[verb](rest)
    except (UserError, ResourceError, KeyboardInterrupt) as error:
        return explain(error, debug="debug=true" in rest)


def _say_what_is_next() -> int:
    said, commands = next_step(Path())
    print(said, *(f"  {command}" for command in commands), "All verbs: specdistill --help", sep="\n")
    return ExitCode.DONE


def train(arguments: list[str]) -> int:
    """train a draft on a recipe, or a target of its own; launch=… in several processes, as `accelerate launch train/….py` does"""
    options, arguments = launch_options(arguments)
    keys = keys_of(arguments)
    schema = _schema_of(keys)
    method = METHODS.get(str(merged(keys).get("method", DEFAULT_METHOD)))
    script = "train/target.py" if schema is TargetRecipe else (method and method.script) or "train/eagle.py"
    if HELP & set(arguments):
        introduction = ast.get_docstring(ast.parse((ROOT / script).read_text(encoding="utf-8")))  # not imported: it needs torch
        print_help(introduction or "", schema, LaunchOptions)
        return ExitCode.DONE
    if schema is Recipe and method and method.script is None:
        trained = [name for name, row in METHODS.items() if row.script]
        raise UserError("method", got="one that needs no training", expected=" or ".join(trained))
    load_recipe(schema, keys)
    return run_script(script, arguments, options)


def acquire(arguments: list[str]) -> int:
    """fetch the draft of a method for a target, checked before its weights are fetched; its folder is all that stdout says"""
    options = load_recipe(AcquireOptions, keys_of(arguments, TARGET))
    from specdistill.hub.acquire import acquire as fetch  # here, and not above, because it imports torch

    of_method = {"heterogeneous_vocab": True} if options.heterogeneous_vocab else {}
    folder = fetch(
        options.method,
        options.target.model,
        options.draft,
        target_revision=options.target.revision,
        adapter=options.target.adapter,
        revision=options.revision,
        output=Path(options.output) if options.output else None,
        verify=options.verify,
        dry_run=options.dry_run,
        **of_method,
    )
    print(folder)
    return ExitCode.DONE


def export(arguments: list[str]) -> int:
    """write a draft in the layout of an inference engine, with the command that serves it"""
    given = keys_of(arguments, TARGET)
    dry_run = "dry_run=true" in given
    recipes = [argument for argument in given if argument.startswith("recipe=")]
    if bool(recipes) != dry_run:
        raise UserError("recipe", got=(recipes or ["nothing"])[-1], expected="a recipe with dry_run=true, and only then")
    own = {key for key, *_ in leaves(ExportOptions) if not (dry_run and key.startswith("target."))}
    others = [argument for argument in given if dry_run and argument.partition("=")[0] not in own]
    options = load_recipe(ExportOptions, [argument for argument in given if argument not in others])
    if (options.draft is None) != dry_run:
        raise UserError("draft", got=options.draft or "nothing", expected="a folder or Hub id, or null with dry_run=true")
    recipe = load_recipe(Recipe, [*others, "train.output_dir=runs"]) if dry_run else None
    from specdistill.export import export as write
    from specdistill.export import write_untrained
    from specdistill.methods.load import locate  # here, and not above, because these import torch
    from specdistill.targets.files import TargetFiles

    source = recipe.target if recipe else options.target
    with tempfile.TemporaryDirectory() as temporary:
        draft = Path(temporary) / "draft"
        if recipe:
            write_untrained(recipe, draft)
        else:
            draft = locate(str(options.draft), key="draft")
        served = write(
            draft,
            options.engine,
            Path(options.output_dir),
            TargetFiles.of(source.model, source.revision, source.adapter) if source.model else None,
            report=Path(options.report) if options.report else None,
            dtype=options.dtype,
            num_speculative_tokens=options.num_speculative_tokens,
        )
    print(f"{'an untrained draft' if recipe else 'draft'} of method {served.method} for {options.engine}: {options.output_dir}")
    print(f"how to serve it: {Path(options.output_dir) / 'SERVE.md'}")
    return ExitCode.DONE


def data(arguments: list[str]) -> int:
    """make a recipe's training rows (`data make`), merge shards of them (`merge`), show them (`show`), store features (`features`)"""
    verb = arguments.pop(0) if arguments[:1] and "=" not in arguments[0] and arguments[0] not in HELP else "show"
    if verb == "features":
        launching, others = launch_options(arguments)
        return run_script("train/features.py", [*others, "train.output_dir=runs"], launching)  # features have no run
    if verb not in data_command.VERBS:
        verbs = [*data_command.VERBS, "features"]
        near = REMOVED_DATA_VERBS.get(verb) or nearest(verb, verbs)
        raise UserError("specdistill data", got=verb, expected=f"one of {', '.join(verbs)}", nearest=near)
    return data_command.run(verb, keys_of(arguments))


def eval(arguments: list[str]) -> int:
    """decode with a draft for real, measure acceptance and speedup, write report.json and its siblings, apply the gate"""
    if _schema_of(keys_of(arguments)) is TargetRecipe:
        raise UserError("recipe", got="the recipe of a target", expected="the recipe of a draft")
    return run_script("eval/run.py", arguments)


def gate(arguments: list[str]) -> int:
    """decide from a report alone: exit code 0 passed, 1 failed"""
    return run_script("eval/gate.py", arguments)


def compare(arguments: list[str]) -> int:
    """measure several drafts for one target in one paired run, rank them, and say why they differ"""
    return run_script("eval/compare.py", arguments)


def publish(arguments: list[str]) -> int:
    """release a draft that passed its gate on the Hub: the weights, the evidence and a card in one commit, with a tag on it"""
    options = load_recipe(PublishOptions, keys_of(arguments))
    from specdistill.hub.publish import print_outcome, publish_run, restore_release  # not above: these import torch

    if options.restore is not None:
        restore_release(options.repo, options.restore, dry_run=options.dry_run)
        return ExitCode.DONE
    outcome = publish_run(options)
    print_outcome(outcome)
    return ExitCode.CHECK_FAILED if outcome.refusals and outcome.folder is None else ExitCode.DONE


def demo(arguments: list[str]) -> int:
    """train a head for the target that ships with the package, decode with it, measure, pass the gate; key=value goes to both"""
    keys = [f"recipe={DEMO_RECIPE}", f"train.output_dir={DEMO_FOLDER}", *arguments]
    output_dir = load_recipe(Recipe, keys_of(keys)).train["output_dir"]
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


VERBS = {verb.__name__: verb for verb in (demo, plan, acquire, export, doctor, data, train, eval, compare, gate, publish, path)}
# What a verb's --help lists. Those that are not here say it themselves: scripts, and `path`.
OPTIONS: dict[str, tuple[Sequence[type[Section]], Mapping[str, str]]] = {
    "demo": ([Recipe], {}),
    "plan": ([PlanOptions], TARGET),
    "acquire": ([AcquireOptions], TARGET),
    "export": ([ExportOptions], TARGET),
    "doctor": ([DoctorOptions], DOCTOR),
    "data": ([Recipe, data_command.ShowOptions, LaunchOptions], {}),
    "publish": ([PublishOptions], {}),
}


def _schema_of(keys: list[str]) -> type[Recipe] | type[TargetRecipe]:
    """The schema that a recipe is written for: a target's own recipe has keys that a draft's lacks."""
    own = TargetRecipe.model_fields.keys() - Recipe.model_fields.keys()
    return TargetRecipe if own & merged(keys).keys() else Recipe
