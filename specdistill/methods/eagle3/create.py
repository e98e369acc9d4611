"""A fresh EAGLE-3 head for a target, and the layers that it reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdistill.engines.limits import engine_aux_layers
from specdistill.errors import UserError
from specdistill.methods.eagle3.module import Eagle3Config, Eagle3Draft
from specdistill.methods.heads.create import head_shape, initialize
from specdistill.targets.frozen import FrozenTarget


def build_eagle3(
    target: FrozenTarget,
    *,
    aux_layers: list[int] | None = None,
    draft_vocabulary: Tensor | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool = False,
    seed: int = 0,
    **sizes: int | None,
) -> Eagle3Draft:
    """A head before training. `draft_vocabulary`: sorted target ids [W], None for the whole vocabulary; the others are keys of a recipe.

    Raises UserError when a layer to read does not exist or the attention heads cannot be shared out evenly.
    """
    shape = head_shape(target, **sizes)
    config = Eagle3Config(
        **shape,
        draft_vocab_size=target.vocab_size if draft_vocabulary is None else len(draft_vocabulary),
        target_hidden_size=target.hidden_size,
        aux_layers=tuple(check_aux_layers(aux_layers, target.num_layers)),
        target_num_layers=target.num_layers,
        fc_norm=fc_norm,
        norm_output=norm_output,
        norm_before_residual=norm_before_residual,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = Eagle3Draft(config)
        initialize(draft)
    if draft_vocabulary is not None:
        draft.set_vocabulary(draft_vocabulary)
    _copy_from_target(draft, target)
    return draft.to(target.device)


def default_aux_layers(num_layers: int) -> list[int]:
    """The engines' default; for targets too shallow for it, three different layers spread over the depth."""
    layers = engine_aux_layers(num_layers)
    return layers if layers == sorted(set(layers)) else sorted({min(1, num_layers), num_layers // 2, max(num_layers - 1, 0)})


def check_aux_layers(aux_layers: Sequence[int] | None, num_layers: int) -> list[int]:
    """The layers asked for, or the default. Raises UserError for repeated ones and for one outside 0..n."""
    layers = default_aux_layers(num_layers) if aux_layers is None else list(aux_layers)
    if not layers or not all(0 <= layer <= num_layers for layer in layers) or len(set(layers)) != len(layers):
        raise UserError("draft.aux_layers", got=layers, expected=f"different layers in 0..{num_layers} (the target's depth)")
    return layers


@torch.no_grad()
def _copy_from_target(draft: Eagle3Draft, target: FrozenTarget) -> None:
    """Embedding, head rows and final norm of the target, where the widths agree: the draft starts in the target's own space."""
    if draft.config.hidden_size != target.hidden_size:
        return
    draft.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
    draft.lm_head.weight.copy_(target.lm_head.weight[draft.target_ids_W])
    draft.norm.weight.copy_(target.backbone.norm.weight)
