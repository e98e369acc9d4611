"""PARD as a row of the table (arXiv 2504.18583): a draft model that fills masks in one pass.

A checkpoint is that of any model, and its config.json says in addition `spd_type: pard` and, in `pard_token`, which token is the mask.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import Tensor

from specdistill.decoding.proposer import Proposer
from specdistill.errors import UserError
from specdistill.methods import sizes
from specdistill.methods.checkpoint import read_config
from specdistill.methods.mask_token import mask_token
from specdistill.methods.models import method as models
from specdistill.methods.pard.config import PardRecipe
from specdistill.methods.pard.objective import objective
from specdistill.statistics.theory import alpha_from_acceptance_length
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

PUBLISHED = sizes.PublishedFigures(
    (alpha_from_acceptance_length(2.52, 3),) * 2,
    "AL 2.52 at K = 3 (0.6B for Qwen3, greedy, vLLM's tests); 3.83x faster at the best K (1B for Llama-3.1-8B, mean of three suites, "
    "arXiv 2504.18583)",
    532_000 * sizes.TOKENS_PER_SAMPLE,
    "assumed, as for draft_model: no figure is published for this shape",
)
WHOLE = models.model_method(
    PUBLISHED, "a smaller language model with a head of its own, which fills masks in one pass"
)


def create(recipe: PardRecipe, target: FrozenTarget, rows: Dataset) -> Any:
    draft = models.create(recipe, target, rows)
    asked, own = recipe.draft.mask_token_id, getattr(draft.config, "pard_token", None)
    draft.config.update(
        {"pard_token": mask_token(target, own if asked is None else asked), "spd_type": "pard"}
    )
    return draft


def mask_of(folder: Path, key: str) -> int:
    """The mask that a checkpoint's config.json names. Raises UserError, naming `key`, for none, and for one beyond the embedding."""
    config = read_config(folder, key)
    mask, num_rows = config.get("pard_token"), config.get("vocab_size")
    if type(mask) is not int or type(num_rows) is not int or not 0 <= mask < num_rows:
        got = f"{folder} with pard_token {mask!r} and a vocabulary of {num_rows!r}"
        raise UserError(key, got=got, expected="a row of its embedding")
    return mask


def load_proposer(folder: Path, target: FrozenTarget, *, key: str, **options: Any) -> Proposer:
    return models.load_proposer(
        folder, target, key=key, mask_token_id=mask_of(folder, key), **options
    )


def check(
    folder: Path,
    tensors: Mapping[str, Tensor],
    target: TargetFiles | None,
    *,
    key: str,
    **options: Any,
) -> None:
    mask_of(folder, key)
    models.check(folder, tensors, target, key=key, **options)


def names_itself(config: Mapping[str, Any]) -> bool:
    return config.get("spd_type", "pard") == "pard" and "pard_token" in config


METHOD = replace(
    WHOLE,
    load_proposer=load_proposer,
    is_named=lambda config, names: names_itself(config) and models.is_named(config, names),
    create=create,
    objective=objective,
    check=check,
    is_described=lambda draft, target: names_itself(draft.raw) and draft.is_causal_lm,
)
