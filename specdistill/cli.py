"""`specdistill <verb> key=value …`: the project's scripts and commands behind one name.

A verb checks what it was given before it imports anything heavy. A script runs in this process, and stays the only place where its work is
written down.
"""

import logging
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import specdistill
from specdistill.command import COMPARE, HELP, NO_SHORTHANDS, SHORTHANDS, TARGET, keys_of, print_help
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
from specdistill.project import PICO
from specdistill.recipe.fields import Section, describe
from specdistill.recipe.load import load_own_keys, load_recipe, merged
from specdistill.terminal import JSON, QUIET, result

logger = logging.getLogger(__name__)

DEMO_RECIPE, DEMO_FOLDER = "pico/eagle3", "runs/demo"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb, or without one say what to type next; returns the exit code."""
    verb, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    return reported(lambda: _run(verb, rest), rest)


def _run(verb: str, arguments: list[str]) -> int:
    if verb == "help" and arguments:
        verb, arguments = arguments[0], [*arguments[1:], "--help"]
    if verb in {*HELP, "help"}:
        print(f"{specdistill.__doc__}\n\nUsage: specdistill VERB key=value …     specdistill help VERB lists its keys\n")
        for name, row in VERBS.items():
            print(f"  {name:10} {row.run.__doc__}")
        result({name: row.run.__doc__ for name, row in VERBS.items()})
        return ExitCode.DONE
    if verb == "--version":
        print(f"specdistill {specdistill.__version__}")
        result({"version": specdistill.__version__})
        return ExitCode.DONE
    if not verb:
        message, commands = next_step(Path())
        print(message, *(f"  {command}" for command in commands), "All verbs: specdistill help", sep="\n")
        return ExitCode.DONE
    check_arguments(arguments)
    if verb not in VERBS:
        expected = f"one of {', '.join(VERBS)}"
        raise UserError(f"specdistill {verb}", got="an unknown verb", expected=expected, nearest=nearest(verb, VERBS))
    if HELP & set(arguments) and verb != "train":
        return show_help(verb, arguments)
    return VERBS[verb].run(arguments)


def show_help(verb: str, arguments: list[str]) -> int:
    row = VERBS[verb]
    introduction, examples = f"specdistill {verb}: {row.run.__doc__}", row.examples.splitlines()
    print_help(introduction, row.schemas(), arguments, shorthands=row.shorthands, common=row.common.split(), examples=examples)
    return ExitCode.DONE


def train(arguments: list[str]) -> int:
    """train a draft model (multi-GPU with launch=ddp)"""
    options, others = load_own_keys(LaunchOptions, arguments)
    keys = keys_of(others)
    values = merged(keys)
    if "curriculum" in values:  # pico's own recipe, whose keys its script knows
        return run_script("train/target.py", others, options)
    if HELP & set(arguments):
        return show_help("train", arguments)
    method = METHODS.get(str(values.get("method", DEFAULT_METHOD)))
    if method and method.script is None:
        trained = [name for name, row in METHODS.items() if row.script]
        raise UserError("method", got="one that needs no training", expected=" or ".join(trained))
    load_recipe(Recipe, keys)
    return run_script((method and method.script) or "train/eagle.py", others, options)


def eval(arguments: list[str]) -> int:
    """measure a draft by decoding with it: acceptance length, speedup, report, gate verdict"""
    return run_script("eval/run.py", arguments)


def gate(arguments: list[str]) -> int:
    """apply a gate to an existing report (exit code 0: passed, 1: failed, 4: inconclusive)"""
    return run_script("eval/gate.py", arguments)


def compare(arguments: list[str]) -> int:
    """measure several drafts for one target in one interleaved run, and rank them"""
    return run_script("eval/compare.py", arguments)


def demo(arguments: list[str]) -> int:
    """train and measure a draft for pico, the target that ships with the package (minutes on a CPU)"""
    keys = [f"recipe={DEMO_RECIPE}", f"train.output_dir={DEMO_FOLDER}", *arguments]
    output_dir = load_recipe(Recipe, keys_of(keys)).train["output_dir"]
    # Checked first: a mistake must not cost the earlier demo. Only what a demo wrote is cleared; any other folder is the script's to judge.
    if output_dir == DEMO_FOLDER and (Path(DEMO_FOLDER) / "run" / "recipe.yaml").is_file():
        if Path(DEMO_FOLDER).is_symlink():
            raise UserError("train.output_dir", got=f"{DEMO_FOLDER}, a link", expected="a folder, or another train.output_dir")
        shutil.rmtree(DEMO_FOLDER)
    for verb in ("train", "eval"):
        command = [verb, *(key for key in keys if verb == "eval" or key != JSON)]  # the report is the one result
        logger.info(f"$ specdistill {shlex.join(command)}")
        code = subprocess.run([sys.executable, "-m", "specdistill", *command], check=False).returncode
        if code < 0:
            raise ResourceError(f"specdistill {verb} was killed by signal {-code}", next_step="free memory and start again")
        if code != ExitCode.DONE:
            return code
    return ExitCode.DONE


def path(arguments: list[str]) -> int:
    """print the folder of pico, the target that ships with the package: specdistill path pico"""
    if [argument for argument in arguments if argument not in (JSON, QUIET)] != [PICO.name]:
        raise UserError("specdistill path", got=" ".join(arguments) or "nothing", expected=PICO.name)
    print(PICO)
    result({"path": PICO})
    return ExitCode.DONE


COMPLETION = """_specdistill() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" keys=""
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" = 1 ]; then COMPREPLY=($(compgen -W "{verbs}" -- "$word")); return; fi
  compopt -o nospace 2>/dev/null
  COMPREPLY=($(compgen -W "$keys" -- "$word"))
}}
complete -o default -F _specdistill specdistill"""


def completion(arguments: list[str]) -> int:
    """print shell completion of verbs and keys: source <(specdistill completion bash), or zsh"""
    if arguments not in (["bash"], ["zsh"]):
        raise UserError("specdistill completion", got=" ".join(arguments) or "nothing", expected="bash or zsh")
    keys = {name: {key: None for schema in row.schemas() for key, *_ in describe(schema)} for name, row in VERBS.items()}
    words = {
        name: [f"{key}=" for key in ("recipe", *row.shorthands, *keys[name]) if "*" not in key] for name, row in VERBS.items()
    }
    cases = "\n".join(f"    {name}) keys='{' '.join(row)}' ;;" for name, row in words.items())
    if arguments == ["zsh"]:
        print("autoload -U +X bashcompinit && bashcompinit")
    print(COMPLETION.format(cases=cases, verbs=" ".join([*VERBS, "help"])))
    return ExitCode.DONE


def _gate_keys() -> Sequence[type[Section]]:
    from specdistill.gate.decide import GateOptions  # here, and not above, because it imports scipy

    return [GateOptions]


def _compare_keys() -> Sequence[type[Section]]:
    from specdistill.comparison.options import CompareOptions  # and this one torch

    return [CompareOptions]


class Verb(NamedTuple):
    """What `run` does is its docstring. schemas: whose keys it takes. common: those that `--help` shows, all if there are none.

    examples: a line each, without `specdistill`.
    """

    run: Callable[[list[str]], int]
    schemas: Callable[[], Sequence[type[Section]]] = list
    shorthands: Mapping[str, str] = NO_SHORTHANDS
    common: str = ""
    examples: str = ""


VERBS = {
    "demo": Verb(demo, lambda: [Recipe], NO_SHORTHANDS, "train eval.num_prompts", "demo\ndemo train.max_steps=50"),
    "plan": Verb(
        plan, lambda: [PlanOptions], TARGET, "", "plan target=path/to/model\nplan target=org/name serving.batch_size=16"
    ),
    "acquire": Verb(acquire, lambda: [AcquireOptions], TARGET, "", "acquire method=eagle3 target=org/model draft=org/draft@v1"),
    "export": Verb(
        export,
        lambda: [ExportOptions],
        TARGET,
        "",
        "export engine=vllm draft=runs/mine/draft target=path/to/model output_dir=runs/mine/vllm",
    ),
    "doctor": Verb(
        doctor,
        lambda: [DoctorOptions],
        DOCTOR,
        "draft target.model target.dtype engine decode eval.suite eval.num_prompts",
        "doctor draft=runs/mine/draft target=path/to/model\ndoctor draft=org/draft engine=vllm",
    ),
    "data": Verb(
        data,
        lambda: [Recipe, ShowOptions, LaunchOptions],
        NO_SHORTHANDS,
        "target.model data.source data.split data.columns data.max_length data.loss_mask data.regenerate.num_tokens "
        "data.regenerate.server data.shard data.cache_dir documents output",
        "data show recipe=mine.yaml output=data.html\ndata make recipe=mine.yaml data.shard=0/4\ndata merge recipe=mine.yaml",
    ),
    "train": Verb(
        train,
        lambda: [Recipe, LaunchOptions],
        NO_SHORTHANDS,
        "method target.model target.dtype train data.source data.max_length data.regenerate.num_tokens draft.init draft.num_layers "
        "loss.divergence optimizer hidden_states.mode selection launch num_processes",
        "train recipe=pico/eagle3\n"
        "train recipe=mine.yaml train.output_dir=runs/mine train.num_train_epochs=2\n"
        "train recipe=mine.yaml launch=ddp num_processes=8",
    ),
    "eval": Verb(
        eval,
        lambda: [Recipe],
        SHORTHANDS,
        "method target.model eval.draft eval.suite eval.num_prompts eval.max_new_tokens eval.num_speculative_tokens "
        "eval.temperature eval.batch_size eval.engine eval.server eval.baseline eval.output_dir gate",
        "eval recipe=pico/eagle3\n"
        "eval target=path/to/model draft=path/to/draft method=eagle3 suite=prompts.jsonl output_dir=runs/report\n"
        "eval recipe=mine.yaml eval.engine=vllm eval.sweep.concurrency=4,16",
    ),
    "compare": Verb(
        compare,
        _compare_keys,
        COMPARE,
        "target.model drafts suite num_prompts max_new_tokens num_speculative_tokens temperature batch_size repeats output_dir",
        "compare target=pico drafts=runs/demo/draft,ngram suite=pico output_dir=runs/comparison",
    ),
    "gate": Verb(gate, _gate_keys, NO_SHORTHANDS, "", "gate report=runs/mine/report gates=release baseline=org/name@v1.2"),
    "publish": Verb(
        publish,
        lambda: [PublishOptions],
        NO_SHORTHANDS,
        "",
        "publish run=runs/mine repo=org/name baseline=none dry_run=true\npublish repo=org/name restore=v1",
    ),
    "monitor": Verb(
        monitor, lambda: [MonitorOptions], NO_SHORTHANDS, "", "monitor server=http://127.0.0.1:8000 seconds=300 watch=true"
    ),
    "path": Verb(path),
    "completion": Verb(completion),
}
