"""LoRA for draft models (arXiv 2106.09685), by peft: train low-rank updates, ship a plain model."""

import copy

import peft
from transformers import PreTrainedModel

from specdistill.errors import UserError


def with_lora(
    draft: PreTrainedModel, *, rank: int, alpha: int = 16, dropout: float = 0.0, target_modules: list[str] | None = None
) -> PreTrainedModel | peft.PeftModel:
    """Freeze the draft and give its linear layers updates B A x * alpha / rank, zero at first; rank 0 gives the draft as it is.

    Raises UserError when `target_modules` are no linear layers of the draft.
    """
    if rank == 0:
        return draft
    modules: str | list[str] = "all-linear" if target_modules is None else target_modules
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules, task_type="CAUSAL_LM")
    try:
        return peft.get_peft_model(draft, config)
    except ValueError as error:
        expected = "ends of names of the draft's linear layers, such as q_proj"
        raise UserError("draft.lora.target_modules", got=target_modules, expected=expected) from error


def merged(draft: PreTrainedModel | peft.PeftModel) -> PreTrainedModel:
    """The plain model: W + B A * alpha / rank, in a copy, so that training can go on. A draft without LoRA is returned as it is."""
    if not isinstance(draft, peft.PeftModel):
        return draft
    plain: PreTrainedModel = copy.deepcopy(draft).merge_and_unload().eval().requires_grad_(True)
    return plain
