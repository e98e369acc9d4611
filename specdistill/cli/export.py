"""`specdistill export`: convert a draft for an inference engine, or say how to serve a lookup."""

import tempfile
from pathlib import Path
from typing import Annotated

from specdistill.cli.launch import import_libraries
from specdistill.common.errors import ExitCode, UserError
from specdistill.common.terminal import print_result
from specdistill.hub.options import ExportedTarget
from specdistill.methods import METHODS
from specdistill.methods.recipe import Recipe
from specdistill.recipe.fields import Section, allow_names, option, section
from specdistill.recipe.load import load_own_keys, load_recipe
from specdistill.recipe.short_keys import TARGET, select_recipe_keys
from specdistill.serving.engines import ENGINES, list_engines_with

LOOKUPS = [name for name, method in METHODS.items() if not method.is_trained]


class ExportOptions(Section):
    """The options of `specdistill export`."""

    engine: Annotated[
        str, allow_names(lambda: [*list_engines_with("serve_command"), "llama.cpp"])
    ] = option(..., "inference engine to export for; llama.cpp is the same as gguf")
    method: Annotated[str, allow_names(lambda: LOOKUPS)] | None = option(
        None,
        f"lookup to serve, which needs no trained draft: {' or '.join(LOOKUPS)}; null: export a"
        " draft (draft=PATH, or dry_run=true)",
    )
    draft: str | None = option(None, "trained draft: a folder or Hub id, in any supported layout")
    output_dir: str = option(..., "new folder for the checkpoint and SERVE.md (how to serve it)")
    target: ExportedTarget = section(ExportedTarget)
    report: str | None = option(
        None,
        "report of the draft or lookup: a report.json or its folder; null: the folder `report` next"
        " to the draft's folder, if there is one; for a lookup, no report",
    )
    num_speculative_tokens: int | None = option(
        None,
        "K, the draft tokens per round that SERVE.md sets; null: as in the report, or 3 without"
        " a report",
        ge=1,
    )
    dry_run: bool = option(
        False,
        "export an untrained draft of recipe=NAME, to try whether an engine loads it",
    )


def export(arguments: list[str]) -> int:
    r"""Convert a draft for an inference engine, and write down the command that serves it.

    specdistill export engine=vllm draft=runs/mine/draft target=path/to/model \
        output_dir=runs/mine/vllm
    specdistill export engine=vllm method=ngram target=path/to/model report=runs/lookup \
        output_dir=runs/lookup-vllm
    """
    options, recipe = _read_export_request(select_recipe_keys(arguments, TARGET))
    import_libraries()
    # These modules import torch, so they are imported only here.
    from specdistill.methods.load import locate
    from specdistill.serving.export import export as export_draft
    from specdistill.serving.export import export_lookup, write_untrained
    from specdistill.targets.files import TargetFiles

    # Collect what every kind of export needs. With an untrained draft, the recipe names the target.
    # Most engines read the file layout that has their own name. `layouts` is only set for an engine
    # that reads a layout of another name: llama.cpp reads `gguf`.
    target = recipe.target if recipe else options.target
    engine = ENGINES[options.engine]
    layout_name = engine.layouts or engine.name
    output_dir = Path(options.output_dir)
    trained_draft = locate(options.draft, key="draft") if options.draft else None
    target_files = (
        TargetFiles(target.model, target.revision, target.adapter) if target.model else None
    )
    report = Path(options.report) if options.report else None
    k = options.num_speculative_tokens

    # Export a lookup, the trained draft, or an untrained one that is written to a temporary folder
    # first.
    if options.method:
        kind = "the lookup"
        exported = export_lookup(
            options.method,
            layout_name,
            output_dir,
            target_files,
            report=report,
            num_speculative_tokens=k,
        )
    else:
        kind = "an untrained draft" if recipe else "the draft"
        with tempfile.TemporaryDirectory() as temporary:
            draft = trained_draft or Path(temporary) / "draft"
            if recipe:
                write_untrained(recipe, draft)
            exported = export_draft(
                draft,
                layout_name,
                output_dir,
                target_files,
                report=report,
                num_speculative_tokens=k,
            )

    # Print where the export is, and which file says how to serve it.
    print(f"Exported {kind} (method {exported.method}) for {options.engine} to {output_dir}.")
    print(f"How to serve it: {output_dir / 'SERVE.md'}")
    print_result(
        {"folder": options.output_dir, "engine": options.engine, "method": exported.method}
    )
    return ExitCode.DONE


def _read_export_request(arguments: list[str]) -> tuple[ExportOptions, Recipe | None]:
    """Return the options of an export, and with dry_run=true the recipe of the untrained draft.

    An export is of a trained draft (draft=PATH), of a lookup (method=NAME), or of an untrained
    draft, to try an engine (dry_run=true recipe=NAME). For an untrained draft, keys that are no
    options of this command belong to the recipe.

    Args:
        arguments: the `key=value` arguments.

    Returns:
        The options, and the recipe of the untrained draft; None for a trained draft or a lookup.

    Raises:
        UserError: unless the arguments name exactly one of the three.
    """
    # recipe=NAME and dry_run=true are only allowed together.
    is_untrained = "dry_run=true" in arguments
    recipe_arguments = [argument for argument in arguments if argument.startswith("recipe=")]
    if bool(recipe_arguments) != is_untrained:
        raise UserError(
            "recipe",
            got=recipe_arguments[-1] if recipe_arguments else "nothing",
            text=(
                "recipe: dry_run=true exports an untrained draft, which recipe=NAME describes. Type"
                " both, or type draft=PATH of a trained draft without them."
            ),
        )

    # Separate the options of this command from the keys of the recipe. `method` is both: for a
    # lookup it is an option, and for an untrained draft it is a key of the recipe.
    method_keys = [argument for argument in arguments if argument.startswith("method=")]
    options, recipe_keys = (
        load_own_keys(ExportOptions, [key for key in arguments if key not in method_keys])
        if is_untrained
        else (load_recipe(ExportOptions, arguments), [])
    )

    # draft=PATH is required for a trained draft, and not allowed for an untrained one or a lookup.
    if [options.draft is not None, options.method is not None, is_untrained].count(True) != 1:
        raise UserError(
            "draft",
            got=options.draft or "nothing",
            text=(
                "draft: type either draft=PATH of a trained draft, or method=ngram for a lookup, or"
                " dry_run=true with recipe=NAME for an untrained draft."
            ),
        )

    # A recipe requires `train.output_dir`, although an untrained draft is not written there.
    if not is_untrained:
        return options, None
    return options, load_recipe(Recipe, [*recipe_keys, *method_keys, "train.output_dir=runs"])
