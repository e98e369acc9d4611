"""Find likely causes of low acceptance in a head whose tensors all have the right shape.

Few tokens of a head are accepted if it is run in another way than it was trained, and nothing in
its files says so. Each likely cause is repaired in a copy of the head that shares its weights. A
copy that is closer to the target than the head itself names the cause.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from specdistill.methods.base import Advice
from specdistill.methods.chains.head import Head
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.layers import Attention, DraftModule, ModuleT, Rotary
from specdistill.methods.rope import choose_entry
from specdistill.methods.sizes import read_size
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import forward_kl

HeadT = TypeVar("HeadT", bound=Head)


class Repair(NamedTuple):
    """A likely cause of low acceptance, and a function that repairs a draft with this cause."""

    cause: str
    apply: Callable[[Any], None]


class ChainAdvice(Advice[HeadT]):
    """The answers of heads that draft chains to `specdistill plan` and `specdistill doctor`."""

    @abstractmethod
    def find_causes(self, head: HeadT, target: FrozenTarget) -> Iterator[Repair]:
        """Yield likely causes of low acceptance in a head whose files are right."""

    def build_simulation(self, draft: HeadT, num_tokens: int) -> TrainingTimeTest:
        """Build the objective of a head that drafts K tokens in a row, with forward KL as loss."""
        return TrainingTimeTest(draft, forward_kl, num_tokens)

    def find_repairs(self, draft: HeadT, target: FrozenTarget) -> Iterator[tuple[str, HeadT]]:
        """Yield each likely cause, and a copy of the head that is repaired."""
        return repair_copies(self.find_causes(draft, target), draft, target)


def repair_copies(
    repairs: Iterable[Repair], draft: ModuleT, target: FrozenTarget
) -> Iterator[tuple[str, ModuleT]]:
    """Yield each likely cause of low acceptance, with a copy of the draft in which it is repaired.

    Args:
        repairs: the causes, and functions that repair a draft.
        draft: the draft, which stays as it is. The copies share its weights.
        target: the target, whose weights the copies share, too.
    """
    # deepcopy does not copy objects that are in its memo. So all weights of draft and target go
    # into the memo, and the copies need no memory of their own.
    shared: dict[int, Tensor] = {}
    for module in (draft, target.model):
        for tensor in (*module.parameters(), *module.buffers()):
            shared[id(tensor)] = tensor

    # Every repair gets a fresh copy of the memo, because deepcopy adds to it.
    for repair in repairs:
        repaired = copy.deepcopy(draft, dict(shared))
        repair.apply(repaired)
        yield repair.cause, repaired


def find_weight_causes(draft: DraftModule) -> Iterator[Repair]:
    """Yield a repair for each weight matrix that may be swapped or transposed in the draft's file.

    Such a mistake raises no error if the shapes fit anyway.
    """
    # gate_proj and up_proj have the same shape, so a swap raises no error.
    for index, layer in enumerate(draft.layers):
        if hasattr(getattr(layer, "mlp", None), "gate_proj"):
            mlp = f"layers.{index}.mlp"
            yield Repair(
                f"{mlp}.gate_proj and up_proj are swapped",
                partial(swap_weights, first=f"{mlp}.gate_proj", second=f"{mlp}.up_proj"),
            )

    # A square matrix keeps its shape when it is transposed.
    for name, parameter in draft.named_parameters():
        is_square = parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]
        if is_square and name not in draft.shared:
            yield Repair(
                f"{name} is transposed", partial(set_weight, name=name, weight=parameter.T)
            )


def find_shape_causes(draft: DraftModule, target: FrozenTarget) -> Iterator[Repair]:
    """Yield a repair for each setting that should be the target's, but is not.

    These are the rotary embedding and the size of attention heads. A fresh draft takes the target's
    values (`plan_head_shape`), so another value in the draft's config.json may be a mistake.
    """
    config = draft.config

    # If the rotary embedding differs, try the target's.
    rope = choose_entry(getattr(target.config, "rope_parameters", None))
    theta = rope.pop("rope_theta", None)
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    if theta is not None and (float(theta), scaling) != (config.rope_theta, config.rope_scaling):
        yield Repair(
            f"the draft's rotary base (rope_theta) is {config.rope_theta:g}, but the draft was"
            f" trained with the target's, {theta:g}",
            partial(configure, fields={"rope_theta": float(theta), "rope_scaling": scaling}),
        )

    # If the size of attention heads differs, try the target's. Another size splits the same
    # matrices into another number of heads, so it raises no error.
    target_size = (
        read_size(target.config, "head_dim")
        or target.hidden_size // target.config.num_attention_heads
    )
    query_size = config.num_attention_heads * config.head_dim
    key_size = config.num_key_value_heads * config.head_dim
    is_possible = query_size % target_size == 0 and key_size % target_size == 0
    if target_size != config.head_dim and is_possible:
        cause = (
            f"the draft's attention heads have the size {config.head_dim} (num_attention_heads"
            f" {config.num_attention_heads}), but the draft was trained with the size"
            f" {target_size}"
        )
        fields = {
            "head_dim": target_size,
            "num_attention_heads": query_size // target_size,
            "num_key_value_heads": key_size // target_size,
        }
        yield Repair(cause, partial(configure, fields=fields))


def configure(draft: DraftModule, fields: dict[str, object]) -> None:
    """Change fields of a draft's config, and update the modules that depend on them.

    Args:
        draft: the draft, changed in place.
        fields: the new values by name.
    """
    draft.config = replace(draft.config, **fields)
    # Rotary tables and attention were built from the old config.
    if fields.keys() & {"rope_theta", "head_dim"}:
        draft.rotary = Rotary(draft.config)
        for module in draft.modules():
            if isinstance(module, Attention):
                module.head_dim = draft.config.head_dim


def set_weight(draft: DraftModule, name: str, weight: Tensor) -> None:
    """Replace a parameter of a draft by another tensor.

    Args:
        draft: the draft, changed in place.
        name: the parameter's full name, such as "layers.0.mlp.up_proj.weight".
        weight: the new tensor. It is copied only if it is not contiguous.
    """
    module, _, last = name.rpartition(".")
    parameter = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    setattr(draft.get_submodule(module), last, parameter)


def swap_weights(draft: DraftModule, first: str, second: str) -> None:
    """Swap the weights of two modules of a draft, given the full names of the modules."""
    first_module = draft.get_submodule(first)
    second_module = draft.get_submodule(second)
    first_module.weight, second_module.weight = second_module.weight, first_module.weight


def swap_halves(draft: DraftModule, names: Sequence[str]) -> None:
    """Change linear layers as if the two halves of their input were swapped.

    A head's first layers read the embedding and the hidden state side by side. If a file stores the
    two in the other order, this repairs the weights.

    Args:
        draft: the draft, changed in place.
        names: the names of the linear layers.
    """
    # Column i of a weight [output, input] belongs to element i of the input.
    for name in names:
        weight = draft.get_parameter(f"{name}.weight")
        first, second = weight.chunk(2, dim=1)
        set_weight(draft, f"{name}.weight", torch.cat((second, first), dim=1))
