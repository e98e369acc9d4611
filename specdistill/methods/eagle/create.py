"""A fresh EAGLE-1 head for a target."""

import torch

from specdistill.methods.eagle.module import EagleConfig, EagleDraft
from specdistill.methods.heads.create import head_shape, initialize
from specdistill.targets.frozen import FrozenTarget


def build_eagle(
    target: FrozenTarget,
    *,
    num_layers: int = 1,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    fc_bias: bool = False,
    sliding_window: int | None = None,
    seed: int = 0,
) -> EagleDraft:
    """Build and initialise an EAGLE-1 head, which is as wide as its target. Raises UserError when the heads do not divide."""
    shape = head_shape(
        target,
        num_layers=num_layers,
        intermediate_size=intermediate_size,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        sliding_window=sliding_window,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = EagleDraft(EagleConfig(**shape, fc_bias=fc_bias))
        initialize(draft)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
        draft.lm_head.weight.copy_(target.lm_head.weight)
    return draft.to(target.device)
