"""What a method of drafting by a model of its own is as a row of the table: how it is recognized, created, trained, examined, planned and
exported.
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdistill.decoding.proposer import Proposer
from specdistill.losses.divergence import build_divergence
from specdistill.methods import sizes
from specdistill.methods.contract import Implementation
from specdistill.methods.models.checkpoint import (
    check_outline,
    export,
    load_draft_model,
    save_draft_model,
)
from specdistill.methods.models.create import (
    SHALLOWEST,
    check_decoder,
    create_draft_model,
    reshaped,
    with_lora,
)
from specdistill.methods.models.objective import Distillation, OnPolicyGeneration
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.methods.models.recipe import DraftModelRecipe
from specdistill.methods.models.vocabulary import match_vocabularies
from specdistill.targets.cache_size import cache_size
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.loading import read_tokenizer, read_without_weights


def create(recipe: Any, target: FrozenTarget, rows: Dataset) -> Any:
    return with_lora(
        create_draft_model(target, seed=recipe.seed, **recipe.draft.shape()),
        **vars(recipe.draft.lora),
    )


def objective(draft: Any, recipe: DraftModelRecipe, target: FrozenTarget) -> Distillation:
    return Distillation(
        draft,
        build_divergence(recipe.loss.divergence),
        num_positions=recipe.eval.num_speculative_tokens,
        on_policy=OnPolicyGeneration(
            draft, **vars(recipe.on_policy), end_ids=tuple(target.eos_token_ids), seed=recipe.seed
        ),
        **recipe.loss.model_dump(exclude={"divergence"}),
    )


def load_proposer(
    folder: Path,
    target: FrozenTarget,
    *,
    key: str,
    mask_token_id: int | None = None,
    **translation: Any,
) -> Proposer:
    model, tokenizer = load_draft_model(folder, key=key, device=target.device, dtype=target.dtype)
    sides = target.tokenizer, len(target.lm_head.weight), tokenizer, _width(model)
    vocabulary = match_vocabularies(*sides, key=key, **translation)
    return DraftModelProposer(
        model,
        vocabulary=vocabulary,
        mask_token_id=mask_token_id,
        target_max_length=target.max_length,
        key=key,
    )


def check(
    folder: Path,
    tensors: Mapping[str, Tensor],
    target: TargetFiles | None,
    *,
    key: str,
    name: Path | str,
    **options: Any,
) -> None:
    if any(tensor.is_meta for tensor in tensors.values()):
        model, tokenizer = read_without_weights(folder, key=key, name=str(name))
        check_outline(model, tensors, key=key, name=str(name))
    else:
        model, tokenizer = load_draft_model(folder, key=key)
    if target is not None:
        of_target, *_ = read_tokenizer(target)
        match_vocabularies(
            of_target, target.vocab_size, tokenizer, _width(model), key=key, **options
        )


def _width(model: Any) -> int:
    """Of the logits, which may be more than the tokenizer's tokens."""
    return len(model.get_output_embeddings().weight)


def planned(
    published: sizes.PublishedFigures,
    note: str,
    target: sizes.Described,
    given: sizes.Described | None,
    settings: dict[str, Any],
) -> sizes.PlannedDraft:
    """The model that is given, or the target in the sizes of its own recipe, else with as few layers as are worth it."""
    given_sizes = {
        name: settings[name] for name in sizes.ModelShape.__annotations__ if name in settings
    }
    if given:
        model = given.model
    else:
        check_decoder(target.model)
        given_sizes = given_sizes or {"num_layers": min(SHALLOWEST, target.text.num_hidden_layers)}
        with torch.device("meta"):
            shape = replace(sizes.shape_of(target.text), **given_sizes)
            model = AutoModelForCausalLM.from_config(reshaped(target.model.config, shape))
    shape = sizes.shape_of(model.config.get_text_config())
    parts = sizes.ParameterCounts(
        int(model.num_parameters()), sizes.weights_read(model), shape.num_layers
    )
    keys = (f"draft.num_layers={shape.num_layers}",)
    return sizes.PlannedDraft(
        parts, shape, target.text.vocab_size, note, published, cache_size(model), keys
    )


def is_named(config: Mapping[str, Any], names: Set[str]) -> bool:
    return bool(
        names
        and set(config.get("architectures") or []) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    )


def model_method(
    published: sizes.PublishedFigures, note: str = "a smaller language model with a head of its own"
) -> Implementation:
    """That of a draft model. published, note: of what `specdistill plan` says."""
    return Implementation(
        load_proposer=load_proposer,
        is_named=is_named,
        create=create,
        save=lambda draft, target, folder: save_draft_model(draft, target.tokenizer, folder),
        objective=objective,
        check=check,
        planned=partial(planned, published, note),
        is_described=lambda draft, target: draft.is_causal_lm,
        likely_cause="its tokenizer gives tokens other numbers",
        export=export,
    )
