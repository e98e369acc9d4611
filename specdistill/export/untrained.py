"""The draft of a recipe as it is before its first step, so that its checkpoint can be tried in an engine before anything is trained."""

from pathlib import Path

import torch
from datasets import Dataset

from specdistill.data.draft_vocabulary import draft_vocabulary
from specdistill.errors import UserError
from specdistill.methods import METHODS
from specdistill.methods.draft_model.create import create_draft_model, save_draft_model
from specdistill.methods.heads.table import HEADS
from specdistill.recipe import Recipe, check_trainable
from specdistill.targets.frozen import FrozenTarget, check_aux_layers

NO_ROWS: dict[str, list[int]] = {"input_ids": [], "loss_mask": []}


def write_untrained(recipe: Recipe, folder: Path) -> None:
    """Build the draft as its training script would, without data, and save it.

    What data would choose is arbitrary here: a pruned vocabulary holds the first tokens, a pruned width is measured on them.
    Raises UserError where training would.
    """
    script = METHODS[recipe.method].trained_by
    if script is None:
        raise UserError("method", got=f"{recipe.method}, which needs no training", expected="a method with a draft to write")
    check_trainable(recipe, script)
    target = FrozenTarget.load(**vars(recipe.target))
    config = recipe.draft
    if recipe.method == "draft_model":
        calibration = torch.arange(min(target.vocab_size, target.max_length), device=target.device)[None]
        save_draft_model(create_draft_model(target, calibration=calibration, **config.small()), target.tokenizer, folder)
        return
    method = HEADS[recipe.method]
    if recipe.method == "mtp":
        draft = method.build(target, init=config.init, num_layers=config.num_layers or 1)
    elif config.init:
        draft = method.load(config.init, target, key="draft.init")
    else:
        check_aux_layers(config.aux_layers, target.num_layers)
        vocabulary = draft_vocabulary(Dataset.from_dict(NO_ROWS), target.vocab_size, config.vocab_size)
        shape = config.shape(recipe.method) | ({} if vocabulary is None else {"draft_vocabulary": vocabulary})
        draft = method.build(target, **shape)
    method.save(draft, folder)
