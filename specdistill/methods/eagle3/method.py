"""EAGLE-3 as a row of the table: how it is created, read, trained, examined and exported."""

from pathlib import Path
from typing import Any

from datasets import Dataset

from specdistill.data import draft_vocabulary
from specdistill.methods.contract import Implementation
from specdistill.methods.eagle3.checkpoint import config_from_json, inspect_eagle3, load_eagle3, save_eagle3
from specdistill.methods.eagle3.config import Recipe
from specdistill.methods.eagle3.create import build_eagle3, check_aux_layers
from specdistill.methods.eagle3.export import export
from specdistill.methods.eagle3.mistakes import mistakes
from specdistill.methods.eagle3.module import Eagle3Draft
from specdistill.methods.eagle3.plan import planned
from specdistill.methods.heads.create import check_same_shape
from specdistill.methods.heads.method import LIKELY_CAUSES, proposer_loader, simulation
from specdistill.methods.heads.unroll import objective
from specdistill.methods.layers import check_window
from specdistill.targets.frozen import FrozenTarget

TENSORS = ({"fc.weight", "midlayer.hidden_norm.weight"}, {"fc.weight", "layers.0.hidden_norm.weight"})
ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"}


def create(recipe: Recipe, target: FrozenTarget, rows: Dataset) -> Eagle3Draft:
    check_aux_layers(recipe.draft.aux_layers, target.num_layers)
    if recipe.draft.init:
        draft = load_eagle3(recipe.draft.init, target, key="draft.init")
        check_same_shape(recipe.draft, draft.config)
    else:
        vocabulary = draft_vocabulary(rows, target.vocab_size, recipe.draft.vocab_size)
        seed = recipe.seed
        draft = build_eagle3(target, seed=seed, draft_vocabulary=vocabulary, **recipe.draft.shape())
    check_window(draft.config, recipe.draft.ttt_steps, key="draft.ttt_steps")
    return draft


def is_named(config: Any, names: Any) -> bool:
    named = set(config.get("architectures") or []) & ARCHITECTURES
    return bool(named) or any(name.startswith("midlayer.") for name in names)


def save(draft: Eagle3Draft, target: FrozenTarget, folder: Path) -> None:
    save_eagle3(draft, folder)


METHOD = Implementation(
    load_proposer=proposer_loader(load_eagle3),
    has_tensors=lambda names: any(wanted <= names for wanted in TENSORS),
    is_named=is_named,
    create=create,
    save=save,
    objective=objective,
    head_shape=lambda config, num_layers: config_from_json(config, num_layers, "draft"),
    inspect=inspect_eagle3,
    simulation=simulation(mistakes),
    likely_causes=LIKELY_CAUSES,
    planned=planned,
    num_layers=lambda config: (config.get("transformer_layer_config") or config.get("model") or config).get(
        "num_hidden_layers"
    ),
    export=export,
)
