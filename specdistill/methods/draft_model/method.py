"""Draft models as a row of the table: how one is created, read, trained, examined and exported."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdistill.decoding.proposer import Proposer
from specdistill.losses.divergence import build_divergence
from specdistill.methods.contract import Implementation
from specdistill.methods.draft_model.config import Recipe
from specdistill.methods.draft_model.create import create_draft_model, load_alike, load_draft_model, save_draft_model
from specdistill.methods.draft_model.export import export
from specdistill.methods.draft_model.lora import merged, with_lora
from specdistill.methods.draft_model.objective import Distillation
from specdistill.methods.draft_model.plan import planned
from specdistill.methods.draft_model.proposer import DraftModelProposer
from specdistill.methods.draft_model.vocabulary import match_vocabularies
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

CALIBRATION_ROWS = 16  # rows of training data whose activations say what a pruned width keeps


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
