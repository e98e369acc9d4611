"""Early exits as a row of the table: how they are recognized, created, trained, examined and planned."""

from functools import partial
from pathlib import Path
from typing import Any

from specdistill.losses.divergence import build_divergence, forward_kl
from specdistill.methods import sizes
from specdistill.methods.chains.head import create_or_load
from specdistill.methods.contract import Implementation
from specdistill.methods.early_exit.checkpoint import (
    ARCHITECTURE,
    check_exit,
    config_from_json,
    load_exit,
    save_exit,
)
from specdistill.methods.early_exit.config import ExitRecipe
from specdistill.methods.early_exit.module import ExitDraft, build_exit, exit_config
from specdistill.methods.early_exit.objective import ExitDistillation
from specdistill.methods.early_exit.proposer import ExitProposer
from specdistill.targets.frozen import FrozenTarget

PUBLISHED = sizes.PublishedFigures(
    None, "none is published for an exit of this shape", None, "none is published"
)


def is_named(config: Any, names: Any = ()) -> bool:
    return bool(config.get("architectures") == [ARCHITECTURE])


def objective(draft: ExitDraft, recipe: ExitRecipe, target: FrozenTarget) -> ExitDistillation:
    divergence = build_divergence(recipe.loss.divergence)
    return ExitDistillation(
        draft, divergence, recipe.eval.num_speculative_tokens, recipe.loss.temperature
    )


def check(*files: Any, **names: Any) -> None:
    """An exit has no shape of a head that the doctor could compare with its target's."""
    check_exit(*files, **names)


def load_proposer(folder: Path, target: FrozenTarget, *, key: str) -> ExitProposer:
    return ExitProposer(load_exit(folder, target, key=key).to(dtype=target.model.dtype), target)


def planned(
    target: sizes.Described, given: sizes.Described | None, settings: dict[str, Any]
) -> sizes.PlannedDraft:
    """The exit that is given, or the one that a recipe with these keys of `draft:` would train. A step runs the target's first layers."""
    own = {name: settings[name] for name in ("exit_layer", "intermediate_size") if name in settings}
    config = config_from_json(given.raw, "draft") if given else exit_config(target.text, **own)
    target.tried(lambda tiny: build_exit(tiny, exit_layer=config.exit_layer))
    exit_size = 3 * config.hidden_size * config.intermediate_size + config.hidden_size
    layers = sum(
        sizes.parameters_read(layer, target.text)
        for layer in target.weightless.layers[: config.exit_layer]
    )
    read = exit_size + layers + config.vocab_size * config.hidden_size
    parts = sizes.ParameterCounts(exit_size, read, config.exit_layer)
    shape = sizes.ModelShape(
        1, config.hidden_size, config.intermediate_size, 0, 0, 0
    )  # no attention
    note = f"the target's first {config.exit_layer} layers draft, and are not run again to verify; no engine serves it"
    build = partial(ExitDraft, config)
    return sizes.PlannedDraft(
        parts,
        shape,
        config.vocab_size,
        note,
        PUBLISHED,
        recipe_keys=("draft.exit_layer=null",),
        build=build,
    )


METHOD = Implementation(
    load_proposer=load_proposer,
    is_named=is_named,
    create=lambda recipe, target, rows: create_or_load(recipe, target, build_exit, load_exit),
    save=lambda draft, target, folder: save_exit(draft, folder),
    objective=objective,
    check=check,
    simulated=lambda draft, num_tokens: ExitDistillation(draft, forward_kl, num_tokens),
    planned=planned,
    is_described=lambda draft, target: is_named(draft.raw),
)
