"""What fresh EAGLE heads have in common: a shape that follows the target's unless told otherwise, and matrices drawn at random."""

from typing import Any

from torch import nn

from specdistill.errors import UserError
from specdistill.methods.checkpoint import ROPE_TYPES
from specdistill.methods.heads.config import HeadSizes
from specdistill.recipe.fields import default_of
from specdistill.targets.frozen import FrozenTarget


def head_shape(target: FrozenTarget, *, hidden_size: int | None = None, **sizes: Any) -> dict[str, Any]:
    """The fields of `HeadShape` from the sizes of a recipe (see `HeadSizes`): what was asked for, and for the rest what the target has."""
    source, asked = target.config, HeadSizes(**sizes)
    rope = dict(getattr(source, "rope_parameters", None) or {})
    lacking = [name for name in ("num_key_value_heads", "rms_norm_eps") if getattr(source, name, None) is None]
    if lacking or "rope_theta" not in rope or rope.get("rope_type", "default") not in ROPE_TYPES:
        what = " and ".join(lacking) or f"rope_parameters {rope}"
        got = f"{target.name}, a {source.model_type} with{'out' * bool(lacking)} {what}"
        raise UserError("target.model", got=got, expected=f"RMS norms and one rotary embedding ({', '.join(ROPE_TYPES)})")
    heads = asked.num_attention_heads or source.num_attention_heads
    key_value_heads = asked.num_key_value_heads or source.num_key_value_heads
    if heads % key_value_heads:
        raise UserError("draft.num_key_value_heads", got=key_value_heads, expected=f"a divisor of {heads} attention heads")
    theta = float(rope.pop("rope_theta"))
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": hidden_size or target.hidden_size,
        "intermediate_size": asked.intermediate_size or source.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": asked.head_dim or getattr(source, "head_dim", None) or target.hidden_size // source.num_attention_heads,
        "num_layers": asked.num_layers,
        "rms_norm_eps": source.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "max_position_embeddings": target.max_length,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "sliding_window": asked.sliding_window,
    }


def initialize(draft: nn.Module) -> None:
    """Matrices that keep the size of what passes through them; embeddings and what the target gives are left."""
    for name, parameter in draft.named_parameters():
        if parameter.dim() == 2 and name != "embed_tokens.weight":
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)


def check_same_shape(asked: HeadSizes, head: Any) -> None:
    """Raises UserError for a shape asked of a trained head whose config says another."""
    for name in (*asked.shape(), *({"vocab_size"} & asked.model_fields_set)):
        value, has = getattr(asked, name), getattr(head, "draft_vocab_size" if name == "vocab_size" else name, None)
        value = tuple(value) if isinstance(value, list) else value
        if value != default_of(type(asked).model_fields[name]) and value != has:
            raise UserError(f"draft.{name}", got=value, expected=f"{has}, as {asked.init} has")
