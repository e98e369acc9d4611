"""EAGLE-1 as a row of the table: how it is created, read, trained, examined and exported."""

from pathlib import Path
from typing import Any

from datasets import Dataset

from specdistill.methods.contract import Implementation
from specdistill.methods.eagle.checkpoint import config_from_json, inspect_eagle, load_eagle, save_eagle
from specdistill.methods.eagle.config import Recipe
from specdistill.methods.eagle.create import build_eagle
from specdistill.methods.eagle.export import export
from specdistill.methods.eagle.mistakes import mistakes
from specdistill.methods.eagle.module import EagleDraft
from specdistill.methods.eagle.plan import planned
from specdistill.methods.heads.create import check_same_shape
from specdistill.methods.heads.method import LIKELY_CAUSES, proposer_loader, simulation
from specdistill.methods.heads.unroll import objective
from specdistill.methods.layers import check_window
from specdistill.targets.frozen import FrozenTarget

TENSORS = {"fc.weight", "layers.0.self_attn.q_proj.weight"}
ARCHITECTURES = {"LlamaForCausalLMEagle", "EagleLlamaForCausalLM"}


def create(recipe: Recipe, target: FrozenTarget, rows: Dataset) -> EagleDraft:
    if recipe.draft.init:
        draft = load_eagle(recipe.draft.init, target, key="draft.init")
        check_same_shape(recipe.draft, draft.config)
    else:
        draft = build_eagle(target, seed=recipe.seed, **recipe.draft.shape())
    check_window(draft.config, recipe.draft.ttt_steps, key="draft.ttt_steps")
    return draft


def is_named(config: Any, names: Any) -> bool:
    named = set(config.get("architectures") or []) & ARCHITECTURES
    # No whole model calls its tensors so.
    return bool(named) or ("layers.0.self_attn.q_proj.weight" in names and "norm.weight" not in names)


def save(draft: EagleDraft, target: FrozenTarget, folder: Path) -> None:
    save_eagle(draft, folder)


METHOD = Implementation(
    load_proposer=proposer_loader(load_eagle),
    has_tensors=lambda names: names >= TENSORS and "layers.0.hidden_norm.weight" not in names,
    is_named=is_named,
    create=create,
    save=save,
    objective=objective,
    head_shape=lambda config, num_layers: config_from_json(config.get("model", config), "draft"),
    inspect=inspect_eagle,
    simulation=simulation(mistakes),
    likely_causes=LIKELY_CAUSES,
    planned=planned,
    num_layers=lambda config: config.get("model", config).get("num_hidden_layers"),
    export=export,
)
