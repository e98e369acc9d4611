"""The command `specdistill VERB key=value …`: the table of verbs, the help, and the first checks.

Modules that import torch are imported inside functions, so that `--help` and mistakes in arguments
are answered at once.
"""

import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc
from typing import NamedTuple

import specdistill
from specdistill.cli.acquire import acquire
from specdistill.cli.command import print_help, report_keys_as_typed
from specdistill.cli.compare import compare
from specdistill.cli.data import data
from specdistill.cli.demo import demo
from specdistill.cli.doctor import DOCTOR, doctor
from specdistill.cli.eval import eval
from specdistill.cli.export import export
from specdistill.cli.gate import gate
from specdistill.cli.monitor import monitor
from specdistill.cli.plan import plan
from specdistill.cli.publish import publish
from specdistill.cli.table import table
from specdistill.cli.train import is_target_recipe, train
from specdistill.common.credentials import check_arguments
from specdistill.common.errors import ExitCode, UserError, find_nearest, join_lines, run_and_report
from specdistill.common.terminal import print_result
from specdistill.recipe.load import check_gguf_files
from specdistill.recipe.short_keys import COMPARE, HELP, NO_SHORTHANDS, SHORTHANDS, TARGET, TRAIN
from specdistill.workflows.next_step import describe_next_step


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `specdistill`, and return its exit code.

    Args:
        arguments: the verb and its arguments; None for those of the command line.
    """
    # Without any argument, the verb is the empty string.
    words = list(sys.argv[1:] if arguments is None else arguments) or [""]
    verb, *verb_arguments = words
    return run_and_report(lambda: _run(verb, verb_arguments), verb_arguments)


def _run(verb: str, arguments: list[str]) -> int:
    """Run one verb, or print the help, the version or the next step.

    Args:
        verb: the first argument of the command, such as `train`; empty if there is none.
        arguments: the arguments after the verb.

    Returns:
        The exit code.
    """
    # `specdistill help VERB` is the same as `specdistill VERB --help`.
    if verb == "help" and arguments and not arguments[0].startswith("-"):
        verb = arguments[0]
        arguments = [*arguments[1:], "--help"]

    # Print the help or the version. Without any argument, print the command that continues the
    # newest run.
    if verb in {*HELP, "help"}:
        return _print_help_of_verbs()
    if verb == "--version":
        print(f"specdistill {specdistill.__version__}")
        print_result({"version": specdistill.__version__})
        return ExitCode.DONE
    if not verb:
        message, commands = describe_next_step()
        print(message)
        for command in commands:
            print(f"  {command}")
        print("All verbs: specdistill help")
        return ExitCode.DONE

    # Refuse secrets and unknown verbs.
    check_arguments(arguments)
    if verb not in VERBS:
        raise UserError(
            f"specdistill {verb}",
            got="an unknown verb",
            expected=f"one of {', '.join(VERBS)}",
            nearest=find_nearest(verb, VERBS),
        )

    # Print the help of a verb. A recipe that trains the target pico has keys of its own. Their help
    # is printed by the script for such recipes, when `train` is run below.
    entry = VERBS[verb]
    if HELP & set(arguments) and not (verb == "train" and is_target_recipe(arguments)):
        print_help(
            f"specdistill {verb}: {entry.run.__doc__}",
            [pkgutil.resolve_name(f"specdistill.{name}") for name in entry.schemas.split()],
            arguments,
            shorthands=entry.shorthands,
            common=entry.common.split(),
        )
        return ExitCode.DONE

    # Run the verb. GGUF files are checked first, because that needs no slow import.
    with report_keys_as_typed(arguments, entry.shorthands):
        parts = [argument.partition("=") for argument in arguments]
        check_gguf_files((key, value) for key, _, value in parts)
        return entry.run(arguments)


def _print_help_of_verbs() -> ExitCode:
    """Print one line for each verb: the first paragraph of its docstring."""
    print(
        f"{specdistill.__doc__}\n\nUsage: specdistill VERB key=value …\n"
        "To list the keys of a verb: specdistill help VERB\n"
    )
    summaries = {}
    for name, entry in VERBS.items():
        first_paragraph = cleandoc(entry.run.__doc__ or "").partition("\n\n")[0]
        summaries[name] = join_lines(first_paragraph)
        print(f"  {name:10} {summaries[name]}")
    print_result(summaries)
    return ExitCode.DONE


class Verb(NamedTuple):
    """A verb of the command line, such as `train` in `specdistill train`.

    Attributes:
        run: the function that runs the verb with the arguments after it, and returns the exit code.
            The first paragraph of its docstring says what the verb does; the second has examples.
        schemas: the classes whose keys the verb takes, as `module:Class` below the package
            `specdistill`, separated by spaces. This is text, because importing some of the classes
            is slow.
        common: the keys that `--help` shows, separated by spaces. Empty: `--help` shows all keys.
        shorthands: short key -> recipe key.
    """

    run: Callable[[list[str]], int]
    schemas: str = ""
    common: str = ""
    shorthands: Mapping[str, str] = NO_SHORTHANDS


# The verbs, in the order in which the help lists them.
VERBS = {
    "demo": Verb(
        demo, "cli.demo:DemoOptions methods.recipe:Recipe", "quick train eval.num_prompts"
    ),
    "plan": Verb(plan, "advice.plan.options:PlanOptions", "", TARGET),
    "acquire": Verb(acquire, "hub.options:AcquireOptions", "", TARGET),
    "export": Verb(export, "cli.export:ExportOptions", "", TARGET),
    "doctor": Verb(
        doctor,
        "advice.doctor.options:DoctorOptions",
        "draft target.model engine decode eval.suite eval.num_prompts",
        DOCTOR,
    ),
    "data": Verb(
        data,
        "methods.recipe:Recipe cli.data:ShowOptions data.produce.fleet:FleetOptions"
        " cli.launch:LaunchOptions",
        "target.model data.source data.split data.columns data.max_length data.loss_mask"
        " data.regenerate.num_tokens data.regenerate.server data.shard data.cache_dir on shards"
        " documents",
        TRAIN,
    ),
    "train": Verb(
        train,
        "methods.recipe:Recipe cli.launch:LaunchOptions",
        "method target.model target.dtype train data.source data.max_length"
        " data.regenerate.num_tokens draft.init draft.num_layers loss.divergence optimizer launch"
        " num_processes",
        TRAIN,
    ),
    "eval": Verb(
        eval,
        "methods.recipe:Recipe cli.launch:LaunchOptions",
        "method target.model eval.draft eval.suite eval.num_prompts eval.max_new_tokens"
        " eval.num_speculative_tokens eval.temperature eval.quick eval.engine eval.server"
        " eval.baseline eval.output_dir gate launch",
        SHORTHANDS,
    ),
    "compare": Verb(
        compare,
        "evaluation.comparison.options:CompareOptions"
        " evaluation.comparison.published:PublishedOptions",
        "target.model drafts suite num_prompts max_new_tokens num_speculative_tokens temperature"
        " batch_size repeats quick output_dir published report",
        COMPARE,
    ),
    "gate": Verb(gate, "evaluation.gate.decide:GateOptions"),
    "table": Verb(table, "cli.table:TableOptions"),
    "publish": Verb(publish, "hub.options:PublishOptions"),
    "monitor": Verb(monitor, "cli.monitor:MonitorOptions"),
}
