"""Draft models as a row of the table: how one is recognized, created, trained, examined, planned and exported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdistill.decoding.proposer import Proposer
from specdistill.losses.divergence import build_divergence
from specdistill.methods.contract import Implementation
from specdistill.methods.draft_model.config import Recipe
from specdistill.methods.draft_model.create import (
    create_draft_model,
    load_alike,
    load_draft_model,
    on_meta,
    propose_shape,
    save_draft_model,
)
from specdistill.methods.draft_model.export import export
from specdistill.methods.draft_model.lora import merged, with_lora
from specdistill.methods.draft_model.objective import Distillation
from specdistill.methods.draft_model.proposer import DraftModelProposer
from specdistill.methods.draft_model.pruning import check_decoder
from specdistill.methods.draft_model.vocabulary import match_vocabularies
from specdistill.methods.sizes import (
    TOKENS_PER_SAMPLE,
    Described,
    Parts,
    PlannedDraft,
    Published,
    Shape,
    shape_of,
    weights_read,
)
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

CALIBRATION_ROWS = 16  # rows of training data whose activations say what a pruned width keeps
# Of the target's parameters; published draft models have 2 % (arXiv 2403.00858) to 10 % (arXiv 2402.01528).
SHARE = 1 / 16
PUBLISHED = Published(
    (1 - 1 / 2.01, 0.76),
    "AL 2.01 (68M for Vicuna-33B, not distilled, Spec-Bench; K not stated, so alpha is at least 1 - 1/AL) to alpha 0.76 (160M for "
    "Vicuna-7B, distilled on the domain it serves, OSD, ICML 2024)",
    532_000 * TOKENS_PER_SAMPLE,
    "assumed, as for eagle3: no figure is published for this shape",
)


def create(recipe: Recipe, target: FrozenTarget, rows: Dataset) -> Any:
    calibration = torch.tensor(rows[:CALIBRATION_ROWS]["input_ids"], device=target.device)
    seed = recipe.seed
    model = create_draft_model(target, calibration=calibration, seed=seed, **recipe.draft.shape())
    return with_lora(model, **vars(recipe.draft.lora))


def save(draft: Any, target: FrozenTarget, folder: Path) -> None:
    save_draft_model(merged(draft), target.tokenizer, folder)


def objective(draft: Any, recipe: Recipe, target: FrozenTarget) -> Distillation:
    loss = recipe.loss
    return Distillation(
        draft,
        build_divergence(loss.divergence),
        temperature=loss.temperature,
        labels=loss.labels,
        num_positions=recipe.eval.num_speculative_tokens,
        reference=load_alike(loss.reference, target, key="loss.reference") if loss.reference else None,
        selected=loss.selected,
    )


def load_proposer(
    folder: Path,
    target: FrozenTarget,
    *,
    key: str,
    confidence_threshold: float | None = None,
    draft_context: str = "refuse",
    heterogeneous_vocab: bool = False,
) -> Proposer:
    model, tokenizer = load_draft_model(folder, key=key, device=target.device, dtype=target.dtype)
    vocabulary = match_vocabularies(
        target.tokenizer,
        target.lm_head.weight.shape[0],
        tokenizer,
        model.get_output_embeddings().weight.shape[0],
        heterogeneous=heterogeneous_vocab,
        key=key,
    )
    return DraftModelProposer(
        model,
        vocabulary=vocabulary,
        confidence_threshold=confidence_threshold,
        context=draft_context,
        target_max_length=target.max_length,
    )


def inspect(folder: Path, target: TargetFiles | None) -> None:
    load_draft_model(folder, key="draft")


def planned(target: Described, given: Described | None, settings: dict[str, Any]) -> PlannedDraft:
    """The model that is given, in the sizes of the target's own recipe, or in the shape proposed for SHARE."""
    sizes = {name: settings[name] for name in Shape.__annotations__ if name in settings}
    if given:
        model = given.model
    else:
        check_decoder(target.model)
        proposed = None if sizes else propose_shape(target.model, int(target.parameters * SHARE))
        model = on_meta(target.model.config, proposed or replace(shape_of(target.text), **sizes))
    shape = shape_of(model.config.get_text_config())
    parts = Parts(int(model.num_parameters()), weights_read(model), shape.num_layers)
    keys = ("draft.init=width", "draft.num_layers=null", f"draft.max_parameters={parts.parameters}")
    note = "a smaller language model with a head of its own"
    return PlannedDraft(parts, shape, target.text.vocab_size, note, PUBLISHED, keys)


METHOD = Implementation(
    load_proposer=load_proposer,
    is_named=lambda config, names: bool(
        names and set(config.get("architectures") or []) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    ),
    create=create,
    save=save,
    objective=objective,
    inspect=inspect,
    planned=planned,
    likely_causes=("its tokenizer gives tokens other numbers",),
    export=export,
)
