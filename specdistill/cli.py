"""`specdistill <verb> key=value …`: the project's scripts and commands behind one name.

A verb checks what it was given before it imports anything heavy. A script runs in this process, and stays the only place where its work is
written down.
"""

import pkgutil
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import specdistill
from specdistill.command import (
    COMPARE,
    HELP,
    NO_SHORTHANDS,
    SHORTHANDS,
    TARGET,
    keys_of,
    print_help,
)
from specdistill.credentials import check_arguments
from specdistill.doctor.command import DOCTOR, doctor
from specdistill.errors import ExitCode, ResourceError, UserError, logger, nearest, reported
from specdistill.hub.command import acquire, export, publish
from specdistill.launch import LaunchOptions, run_script
from specdistill.methods import METHODS
from specdistill.methods.recipe import DEFAULT_METHOD, Recipe
from specdistill.monitor.command import monitor
from specdistill.next_step import next_step
from specdistill.planning.command import plan
from specdistill.produce.command import data
from specdistill.recipe.fields import Section
from specdistill.recipe.load import load_own_keys, load_recipe, merged
from specdistill.terminal import JSON, result

DEMO_RECIPE, DEMO_FOLDER = "pico/eagle3", "runs/demo"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb, or without one say what to type next; returns the exit code."""
    verb, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    return reported(lambda: _run(verb, rest), rest)


def _run(verb: str, arguments: list[str]) -> int:
    if verb == "help" and arguments and not arguments[0].startswith("-"):
        verb, arguments = arguments[0], [*arguments[1:], "--help"]
    if verb in {*HELP, "help"}:
        print(
            f"{specdistill.__doc__}\n\nUsage: specdistill VERB key=value …     specdistill help VERB lists its keys\n"
        )
        summaries = {name: str(row.run.__doc__).partition("\n")[0] for name, row in VERBS.items()}
        print(*(f"  {name:10} {summary}" for name, summary in summaries.items()), sep="\n")
        result(summaries)
        return ExitCode.DONE
    if verb == "--version":
        print(f"specdistill {specdistill.__version__}")
        result({"version": specdistill.__version__})
        return ExitCode.DONE
    if not verb:
        message, commands = next_step()
        print(
            message,
            *(f"  {command}" for command in commands),
            "All verbs: specdistill help",
            sep="\n",
        )
        return ExitCode.DONE
    check_arguments(arguments)
    if verb not in VERBS:
        expected = f"one of {', '.join(VERBS)}"
        raise UserError(
            f"specdistill {verb}",
            got="an unknown verb",
            expected=expected,
            nearest=nearest(verb, VERBS),
        )
    if HELP & set(arguments) and verb != "train":
        return show_help(verb, arguments)
    return VERBS[verb].run(arguments)


def show_help(verb: str, arguments: list[str]) -> int:
    row = VERBS[verb]
    print_help(
        f"specdistill {verb}: {row.run.__doc__}",
        row.sections(),
        arguments,
        row.shorthands,
        row.common.split(),
    )
    return ExitCode.DONE


def train(arguments: list[str]) -> int:
    """train a draft model (multi-GPU with launch=ddp)

    specdistill train recipe=pico/eagle3
    specdistill train recipe=mine.yaml train.output_dir=runs/mine train.num_train_epochs=2
    specdistill train recipe=mine.yaml launch=ddp num_processes=8"""
    options, others = load_own_keys(LaunchOptions, arguments)
    keys = keys_of(others)
    values = merged([key for key in keys if "=" in key])
    if "curriculum" in values:  # pico's own recipe, whose keys its script knows
        return run_script("train/target.py", others, options)
    if HELP & set(arguments):
        return show_help("train", arguments)
    method = METHODS.get(str(values.get("method", DEFAULT_METHOD)))
    if method and not method.is_trained:
        trained = [name for name, row in METHODS.items() if row.is_trained]
        raise UserError("method", got="one that needs no training", expected=" or ".join(trained))
    load_recipe(Recipe, keys)
    return run_script("train/eagle.py", others, options)


def eval(arguments: list[str]) -> int:
    """measure a draft by decoding with it: acceptance length, speedup, report, gate verdict (several GPUs: launch=ddp)

    specdistill eval recipe=pico/eagle3
    specdistill eval target=path/to/model method=eagle3 draft=path/to/draft suite=path/to/prompts.jsonl
    specdistill eval recipe=mine.yaml eval.engine=vllm eval.sweep.concurrency=4,16"""
    options, others = load_own_keys(LaunchOptions, arguments)
    return run_script("eval/run.py", others, options)


def gate(arguments: list[str]) -> int:
    """apply a gate to an existing report (exit code 0: passed, 1: failed, 4: inconclusive)

    specdistill gate report=runs/mine/report gates=release baseline=org/name@v1.2"""
    return run_script("eval/gate.py", arguments)


def compare(arguments: list[str]) -> int:
    """measure several drafts for one target in one interleaved run, and rank them; or compare one with published figures

    specdistill compare target=pico drafts=runs/demo/draft,ngram suite=pico output_dir=runs/comparison
    specdistill compare published=vllm-ci-qwen3-8b-eagle3 draft=path/to/draft
    specdistill compare published=vllm-ci-qwen3-8b-eagle3 report=runs/mine/report"""
    if any(argument.startswith("published=") for argument in arguments):
        from specdistill.comparison.published import (
            compare_published,
        )  # here, and not above, because it imports scipy

        return compare_published(arguments, _measured)
    return run_script("eval/compare.py", arguments)


def _measured(keys: list[str]) -> tuple[dict[str, Any], Path]:
    from specdistill.api import (
        WITHOUT_RECIPE,
        evaluate,
    )  # here, and not above, because it imports torch

    return evaluate(load_recipe(Recipe, [*WITHOUT_RECIPE, *keys]))


def table(arguments: list[str]) -> int:
    """print the numbers of reports as a table in Markdown

    specdistill table runs/mine/report runs/other/report
    specdistill table runs/comparison --json"""
    from specdistill.report.command import (
        print_table,
    )  # here, and not above, because it imports scipy

    return print_table(keys_of(arguments))


def demo(arguments: list[str]) -> int:
    """train and measure a draft for pico, the bundled target (minutes on a CPU)

    specdistill demo train.max_steps=50"""
    keys = [f"recipe={DEMO_RECIPE}", f"train.output_dir={DEMO_FOLDER}", *arguments]
    output_dir = load_recipe(Recipe, keys_of(keys)).train["output_dir"]
    # Checked first: a mistake must not cost the earlier demo. Only what a demo wrote is cleared; any other folder is the script's to judge.
    if output_dir == DEMO_FOLDER and (Path(DEMO_FOLDER) / "run" / "recipe.yaml").is_file():
        if Path(DEMO_FOLDER).is_symlink():
            raise UserError(
                "train.output_dir",
                got=f"{DEMO_FOLDER}, a link",
                expected="a folder, or another train.output_dir",
            )
        shutil.rmtree(DEMO_FOLDER)
    for verb in ("train", "eval"):
        command = [
            verb,
            *(key for key in keys if verb == "eval" or key != JSON),
        ]  # the report is the one result
        logger.info(f"$ specdistill {shlex.join(command)}")
        code = subprocess.run(
            [sys.executable, "-m", "specdistill", *command], check=False
        ).returncode
        if code < 0:
            raise ResourceError(
                f"specdistill {verb} was killed by signal {-code}",
                next_step="free memory and start again",
            )
        if code != ExitCode.DONE:
            return code
    return ExitCode.DONE


class Verb(NamedTuple):
    """Of the docstring of `run`, the first line says what the verb does, the others are examples.

    schemas: whose keys it takes, as pkgutil finds them. common: keys that `--help` shows; all where there are none.
    """

    run: Callable[[list[str]], int]
    schemas: str = ""
    common: str = ""
    shorthands: Mapping[str, str] = NO_SHORTHANDS

    def sections(self) -> list[type[Section]]:
        return [pkgutil.resolve_name(f"specdistill.{name}") for name in self.schemas.split()]


VERBS = {
    "demo": Verb(demo, "methods.recipe:Recipe", "train eval.num_prompts"),
    "plan": Verb(plan, "planning.command:PlanOptions", "", TARGET),
    "acquire": Verb(acquire, "hub.command:AcquireOptions", "", TARGET),
    "export": Verb(export, "hub.command:ExportOptions", "", TARGET),
    "doctor": Verb(
        doctor,
        "doctor.command:DoctorOptions",
        "draft target.model engine decode eval.suite eval.num_prompts",
        DOCTOR,
    ),
    "data": Verb(
        data,
        "methods.recipe:Recipe produce.command:ShowOptions produce.fleet:FleetOptions launch:LaunchOptions",
        "target.model data.source data.split data.columns data.max_length data.loss_mask data.regenerate.num_tokens "
        "data.regenerate.server data.shard data.cache_dir on shards documents",
    ),
    "train": Verb(
        train,
        "methods.recipe:Recipe launch:LaunchOptions",
        "method target.model target.dtype train data.source data.max_length data.regenerate.num_tokens draft.init draft.num_layers "
        "loss.divergence optimizer launch num_processes",
    ),
    "eval": Verb(
        eval,
        "methods.recipe:Recipe launch:LaunchOptions",
        "method target.model eval.draft eval.suite eval.num_prompts eval.max_new_tokens eval.num_speculative_tokens "
        "eval.temperature eval.batch_size eval.engine eval.server eval.baseline eval.output_dir gate launch num_processes",
        SHORTHANDS,
    ),
    "compare": Verb(
        compare,
        "comparison.options:CompareOptions comparison.published:PublishedOptions",
        "target.model drafts suite num_prompts max_new_tokens num_speculative_tokens temperature batch_size repeats output_dir published "
        "report",
        COMPARE,
    ),
    "gate": Verb(gate, "gate.decide:GateOptions"),
    "table": Verb(table, "report.command:TableOptions"),
    "publish": Verb(publish, "hub.command:PublishOptions"),
    "monitor": Verb(monitor, "monitor.command:MonitorOptions"),
}
