"""`specdistill compare`: rank drafts, or compare one draft with published figures."""

from pathlib import Path
from typing import Any

from specdistill.cli.eval import check_suite_and_gate
from specdistill.cli.launch import import_libraries
from specdistill.common.errors import ExitCode
from specdistill.common.terminal import print_result
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe, merge_values
from specdistill.recipe.short_keys import COMPARE, rename_keys_as_typed, select_recipe_keys


def compare(arguments: list[str]) -> int:
    r"""Measure and rank several drafts of a target, or compare one draft with published figures.

    specdistill compare target=pico drafts=runs/demo/draft,ngram suite=pico \
        output_dir=runs/comparison
    specdistill compare published=vllm-ci-qwen3-8b-eagle3 draft=path/to/draft
    specdistill compare published=vllm-ci-qwen3-8b-eagle3 report=runs/mine/report
    """
    # With published=NAME, one draft is compared with the figures that somebody published for it. If
    # no report of the draft is given, `compare_published` calls `_measure` to make one.
    if any(argument.startswith("published=") for argument in arguments):
        # This module imports scipy, so it is imported only here.
        from specdistill.evaluation.comparison.published import compare_published

        return compare_published(arguments, _measure)

    # Check the suite before torch is imported, which is slow. The check names the key `eval.suite`
    # in its errors; in this command the key is called `suite`. Flags, such as --json, have no `=`,
    # and are left out.
    keys = select_recipe_keys(arguments, COMPARE)
    with rename_keys_as_typed(arguments, {"suite": "eval.suite"}):
        check_suite_and_gate(merge_values([key for key in keys if "=" in key]).get("suite"), None)

    import_libraries()
    # These modules import torch, so they are imported only here.
    from specdistill.evaluation.comparison.options import CompareOptions
    from specdistill.workflows.compare import compare_drafts

    # Measure all drafts in turns, rank them, and print the ranking.
    options = load_recipe(CompareOptions, keys)
    return print_ranking(compare_drafts(options), Path(options.output_dir))


def print_ranking(comparison: dict[str, Any], folder: Path) -> ExitCode:
    """Print the ranking of a comparison, and return the exit code of the command.

    Args:
        comparison: the content of comparison.json.
        folder: the folder that the comparison was written to.

    Returns:
        DONE if every draft is lossless, else CHECK_FAILED.
    """
    # This module imports scipy, so it is imported only here.
    from specdistill.evaluation.comparison.pages import print_comparison

    print_comparison(comparison, folder)
    print_result(comparison)
    is_lossless = all(entry["lossless"] for entry in comparison["ranking"])
    return ExitCode.DONE if is_lossless else ExitCode.CHECK_FAILED


def _measure(keys: list[str]) -> tuple[dict[str, Any], Path]:
    """Measure one draft as `specdistill eval` does, and return the report and its folder.

    Args:
        keys: the `key=value` arguments of the measurement.
    """
    # This module imports torch, so it is imported only here.
    from specdistill.workflows.evaluate import ARGUMENTS_WITHOUT_RECIPE, evaluate

    return evaluate(load_recipe(Recipe, [*ARGUMENTS_WITHOUT_RECIPE, *keys]))
