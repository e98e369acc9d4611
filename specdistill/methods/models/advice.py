"""Answers to `specdistill plan` and `specdistill doctor` about draft models."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from specdistill.methods import sizes
from specdistill.methods.base import Advice, DraftSettings
from specdistill.methods.models.create import (
    MIN_LAYERS,
    check_decoder,
    resize_config,
)
from specdistill.targets.cache_size import cache_size


class ModelAdvice(Advice[PreTrainedModel]):
    """The advice on draft models.

    Args:
        published: the acceptance and training data that others published for such drafts.
        note: what such a draft is, in words.
    """

    likely_cause = "the draft's tokenizer gives tokens other ids than the target's"

    def __init__(self, published: sizes.MethodFigures, note: str) -> None:
        self.published = published
        self.note = note

    def plan_draft(
        self,
        target: sizes.ModelConfigInfo,
        draft_info: sizes.ModelConfigInfo | None,
        settings: DraftSettings,
    ) -> sizes.PlannedDraft:
        """Return the size and cost of a draft model, for `specdistill plan`.

        Args:
            target: the target, described by its config.json.
            draft_info: an existing draft, described by its config.json; None for a draft that is
                still to be trained.
            settings: the recipe's settings of the draft. If no draft exists, the planned model has
                the target's class and the sizes in the settings. If the settings name no size, it
                has `MIN_LAYERS` layers (or the target's only one) as large as the target's.
        """
        # Take the existing draft, or build the target's class in another shape. Unless a recipe
        # asks for fresh weights (`scratch`), layers of the target are copied, and only layers like
        # Llama's can be.
        if draft_info:
            model = draft_info.model
        else:
            if settings.get("init") != "scratch":
                check_decoder(target.model)
            names = [name for name in sizes.ModelShape.__annotations__ if name in settings]
            changed = {name: settings[name] for name in names}
            if not changed:
                changed = {"num_layers": min(MIN_LAYERS, target.text.num_hidden_layers)}
            # On the meta device the model has shapes, but takes no memory.
            with torch.device("meta"):
                target_shape = replace(sizes.read_model_shape(target.text), **changed)
                model = type(target.model)(resize_config(target.model.config, target_shape))

        # Count the parameters, and the weights that one step reads.
        shape = sizes.read_model_shape(model.config.get_text_config())
        num_parameters = int(model.num_parameters())
        return sizes.PlannedDraft(
            sizes.ParameterCounts(
                num_parameters, sizes.count_weights_read(model), shape.num_layers
            ),
            shape,
            target.text.vocab_size,
            self.note,
            self.published,
            cache=cache_size(model),
            recipe_keys=(f"draft.num_layers={shape.num_layers}",),
        )

    def is_described(self, draft: sizes.ModelConfigInfo, target: sizes.ModelConfigInfo) -> bool:
        """Return whether a config.json belongs to a whole language model."""
        return draft.is_causal_lm
