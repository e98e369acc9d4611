"""Fresh EAGLE heads for a target: their shape follows the target's unless told otherwise, and so do their first weights."""

from typing import Any

import torch
from torch import Tensor, nn

from specdistill.drafts.checkpoint import ROPE_TYPES
from specdistill.drafts.eagle import EagleConfig, EagleDraft
from specdistill.drafts.eagle3 import Eagle3Config, Eagle3Draft
from specdistill.errors import UserError
from specdistill.targets.frozen import FrozenTarget, check_aux_layers


def build_eagle3(
    target: FrozenTarget,
    *,
    aux_layers: list[int] | None = None,
    num_layers: int = 1,
    draft_vocabulary: Tensor | None = None,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool = False,
    sliding_window: int | None = None,
    seed: int = 0,
) -> Eagle3Draft:
    """Build and initialise a head. `draft_vocabulary`: sorted target ids [W], None for the whole vocabulary.

    Raises UserError when a layer to read does not exist or the heads do not divide.
    """
    shape = _shape(
        target,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        sliding_window=sliding_window,
    )
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
        _initialise(draft)
    if draft_vocabulary is not None:
        draft.set_vocabulary(draft_vocabulary)
    _copy_from_target(draft, target)
    return draft.to(target.device)


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
    shape = _shape(
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
        _initialise(draft)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
        draft.lm_head.weight.copy_(target.lm_head.weight)
    return draft.to(target.device)


def _shape(
    target: FrozenTarget,
    *,
    num_layers: int,
    intermediate_size: int | None,
    num_attention_heads: int | None,
    num_key_value_heads: int | None,
    head_dim: int | None,
    sliding_window: int | None,
    hidden_size: int | None = None,
) -> dict[str, Any]:
    """The fields of `HeadShape`: what was asked for, and for the rest what the target has."""
    source = target.config
    rope = dict(getattr(source, "rope_parameters", None) or {})
    lacking = [name for name in ("num_key_value_heads", "rms_norm_eps") if getattr(source, name, None) is None]
    if lacking or "rope_theta" not in rope or rope.get("rope_type", "default") not in ROPE_TYPES:
        what = " and ".join(lacking) or f"rope_parameters {rope}"
        got = f"{target.name}, a {source.model_type} with{'out' * bool(lacking)} {what}"
        raise UserError("target.model", got=got, expected=f"RMS norms and one rotary embedding ({', '.join(ROPE_TYPES)})")
    heads = num_attention_heads or source.num_attention_heads
    key_value_heads = num_key_value_heads or source.num_key_value_heads
    if heads % key_value_heads:
        raise UserError("draft.num_key_value_heads", got=key_value_heads, expected=f"a divisor of {heads} attention heads")
    if num_layers < 1:
        raise UserError("draft.num_layers", got=num_layers, expected="1 or more")
    theta = float(rope.pop("rope_theta"))
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": hidden_size or target.hidden_size,
        "intermediate_size": intermediate_size or source.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim or getattr(source, "head_dim", None) or target.hidden_size // source.num_attention_heads,
        "num_layers": num_layers,
        "rms_norm_eps": source.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "max_position_embeddings": target.max_length,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "sliding_window": sliding_window,
    }


def _initialise(draft: nn.Module) -> None:
    """Matrices that keep the size of what passes through them; embeddings and what the target gives are left."""
    for name, parameter in draft.named_parameters():
        if parameter.dim() == 2 and name != "embed_tokens.weight":
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)


@torch.no_grad()
def _copy_from_target(draft: Eagle3Draft, target: FrozenTarget) -> None:
    """Embedding, head rows and final norm of the target, where the widths agree: the draft starts in the target's own space."""
    if draft.config.hidden_size != target.hidden_size:
        return
    draft.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
    draft.lm_head.weight.copy_(target.lm_head.weight[draft.target_ids_W])
    draft.norm.weight.copy_(target.backbone.norm.weight)
