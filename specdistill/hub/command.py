"""`specdistill acquire`, `export` and `publish`: their keys, and what they print."""

import tempfile
from pathlib import Path
from typing import Annotated

from specdistill.command import TARGET, keys_of
from specdistill.engines import engines_with
from specdistill.errors import ExitCode, UserError
from specdistill.methods import METHODS
from specdistill.methods.recipe import Recipe
from specdistill.recipe.fields import ReadWhen, Section, like, one_of, option, section
from specdistill.recipe.load import load_own_keys, load_recipe
from specdistill.recipe.sections import PublishConfig, TargetConfig
from specdistill.terminal import result


class ExportedTarget(Section):
    model: str | None = option(
        None,
        "the draft's target: pico, a folder or a Hub id; needed for method mtp and some layouts of heads",
    )
    revision: str | None = like(TargetConfig, "revision")
    adapter: str | None = like(TargetConfig, "adapter")


class AcquiredTarget(ExportedTarget):
    model: str = option(..., "the draft's target: pico, a folder, a GGUF file or a Hub id")


class AcquireOptions(Section):
    method: Annotated[str, one_of(lambda: list(METHODS))] = option(
        ..., "method of the draft (docs/methods.md)"
    )
    target: AcquiredTarget = section(AcquiredTarget)
    draft: str | None = option(
        None,
        "draft: org/name, org/name@revision or a folder; null: of method mtp, the target's own layer",
    )
    heterogeneous_vocab: bool = option(
        False,
        "accept a draft model with a different tokenizer",
        read_when=ReadWhen(
            "by methods pard and draft_model", lambda it: METHODS[it.method].standalone
        ),
    )
    dry_run: bool = option(
        False, "list what would be fetched; only configs and headers are fetched"
    )


class ExportOptions(Section):
    engine: Annotated[str, one_of(lambda: engines_with("serve_command"))] = option(
        ..., "target inference engine"
    )
    draft: str | None = option(None, "trained draft: a folder or Hub id, in any supported layout")
    output_dir: str = option(..., "new folder for the checkpoint and SERVE.md (how to serve it)")
    target: ExportedTarget = section(ExportedTarget)
    report: str | None = option(
        None, "report.json of the draft, or its folder; null: <run>/report of <run>/draft"
    )
    num_speculative_tokens: int | None = option(
        None, "K, draft tokens per round, in SERVE.md; null: the report's, or 3", ge=1
    )
    dry_run: bool = option(
        False, "export an untrained draft of recipe=…, to try its layout in an engine"
    )


class PublishOptions(PublishConfig):
    """The keys of a recipe's section `publish`, whose values are the defaults here, and those of one release."""

    run: str = option(..., "folder of a finished run: draft/, run/ and report/")
    tag: str | None = option(None, "tag of the release; null: the next of v1, v2, …")
    baseline: str | None = option(
        None,
        "none for a first release; or a new report of the last release; null: the last release as published",
    )
    force: str | None = option(
        None, "publish a refused draft, for this reason, which the card states", min_length=1
    )
    dry_run: bool = option(
        False, "write the folder and list its differences from the Hub; publish nothing"
    )
    output_dir: str | None = option(
        None, "new folder for the release; null: <run>/release, which is replaced"
    )


def acquire(arguments: list[str]) -> int:
    """fetch a published draft, checked against its target first; prints the local path

    specdistill acquire method=eagle3 target=org/model draft=org/draft@v1"""
    options = load_recipe(AcquireOptions, keys_of(arguments, TARGET))
    from specdistill.hub.acquire import (
        acquire as fetch,
    )  # here, and not above, because it imports torch

    folder = fetch(options)
    print(folder)
    result({"folder": folder})
    return ExitCode.DONE


def export(arguments: list[str]) -> int:
    """convert a draft for an inference engine, with the command that serves it

    specdistill export engine=vllm draft=runs/mine/draft target=path/to/model output_dir=runs/mine/vllm"""
    options, recipe = _what_to_export(keys_of(arguments, TARGET))
    from specdistill.export import (
        export as write,
    )  # here, and not above, because these import torch
    from specdistill.export import write_untrained
    from specdistill.methods.load import locate
    from specdistill.targets.files import TargetFiles

    source = recipe.target if recipe else options.target
    with tempfile.TemporaryDirectory() as temporary:
        if recipe:
            draft = Path(temporary) / "draft"
            write_untrained(recipe, draft)
        else:
            draft = locate(str(options.draft), key="draft")
        served = write(
            draft,
            options.engine,
            Path(options.output_dir),
            TargetFiles(source.model, source.revision, source.adapter) if source.model else None,
            report=Path(options.report) if options.report else None,
            num_speculative_tokens=options.num_speculative_tokens,
        )
    print(
        f"{'an untrained draft' if recipe else 'draft'} of method {served.method} for {options.engine}: {options.output_dir}"
    )
    print(f"how to serve it: {Path(options.output_dir) / 'SERVE.md'}")
    result({"folder": options.output_dir, "engine": options.engine, "method": served.method})
    return ExitCode.DONE


def _what_to_export(given: list[str]) -> tuple[ExportOptions, Recipe | None]:
    """The options, and with dry_run=true the recipe that the other keys give, whose target it then is."""
    is_untrained = "dry_run=true" in given
    recipes = [argument for argument in given if argument.startswith("recipe=")]
    if bool(recipes) != is_untrained:
        raise UserError(
            "recipe",
            got=(recipes or ["nothing"])[-1],
            expected="a recipe with dry_run=true, and only then",
        )
    options, of_recipe = (
        load_own_keys(ExportOptions, given)
        if is_untrained
        else (load_recipe(ExportOptions, given), [])
    )
    if (options.draft is None) != is_untrained:
        raise UserError(
            "draft",
            got=options.draft or "nothing",
            expected="a folder or Hub id, or null with dry_run=true",
        )
    return options, load_recipe(
        Recipe, [*of_recipe, "train.output_dir=runs"]
    ) if is_untrained else None


def publish(arguments: list[str]) -> int:
    """publish a draft that passed its gate: weights, report and card in one tagged commit

    specdistill publish run=runs/mine repo=org/name baseline=none dry_run=true"""
    options = load_recipe(PublishOptions, keys_of(arguments))
    from specdistill.hub.publish import print_outcome, publish_run  # not above: these import torch

    outcome = publish_run(options)
    print_outcome(outcome)
    result(outcome)
    return ExitCode.CHECK_FAILED if outcome.refusals and outcome.folder is None else ExitCode.DONE
