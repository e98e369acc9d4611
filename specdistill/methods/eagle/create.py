"""A fresh EAGLE-1 head for a target."""

import torch

from specdistill.methods.eagle.module import EagleConfig, EagleDraft
from specdistill.methods.heads.create import head_shape, initialize
from specdistill.targets.frozen import FrozenTarget


def build_eagle(target: FrozenTarget, *, fc_bias: bool = False, seed: int = 0, **sizes: int | None) -> EagleDraft:
    """An EAGLE-1 head before training, as wide as its target, with the `sizes` of a recipe (see specdistill.methods.heads.config).

    Raises UserError when the attention heads cannot be shared out evenly.
    """
    shape = head_shape(target, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = EagleDraft(EagleConfig(**shape, fc_bias=fc_bias))
        initialize(draft)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
        draft.lm_head.weight.copy_(target.lm_head.weight)
    return draft.to(target.device)
