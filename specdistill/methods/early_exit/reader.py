"""A target read in two parts: its first E layers token by token as they are drafted, the others over all that was drafted at once.

Both are transformers' own forward of the target, over some of its layers and over one KV cache. What the first layers have read, keys,
values and the state after layer E, is what verification needs of them too: no token goes through them twice.

Shapes: T positions of a pass, D target hidden size.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdistill.decoding.readers import NEXT, PROMPT, REJECTED, CachedTarget
from specdistill.decoding.tree import Step
from specdistill.errors import UserError, refusing
from specdistill.targets.anatomy import CLASS_ERRORS, reads_alike
from specdistill.targets.frozen import Features, FrozenTarget

EXPECTED = "a target whose layers can be run in two parts"


class SplitTarget(CachedTarget):
    """A `CachedTarget` that reads in two parts: `advance` a token at a time through the first layers, then `read` them all.

    Raises UserError, naming the architecture, for a target that reads differently so.
    """

    def __init__(self, target: FrozenTarget, exit_layer: int) -> None:
        super().__init__(target, ())
        self.exit_layer = exit_layer
        self._states: list[
            Tensor
        ] = []  # [1, T, D] after layer E, of tokens that the other layers have not read
        what = f"{target.name}, a {type(target.model).__name__}"
        if target.is_recurrent:
            raise UserError("target.model", got=f"{what} with recurrent layers", expected=EXPECTED)
        with refusing(CLASS_ERRORS, "target.model", what, EXPECTED):
            self._lower, self._upper = (
                part(target, 0, exit_layer),
                part(target, exit_layer, target.num_layers),
            )
            alike = self._reads_alike()
        if not alike:
            raise UserError(
                "target.model",
                got=f"{what}, which reads differently in two parts",
                expected=EXPECTED,
            )

    def begin(self, token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Features]:
        self._states = []
        return super().begin(token_ids)

    def advance(self, ids_1T: Tensor) -> Tensor:
        """The state [1, T, D] after layer E at tokens that follow all that was read. `read` then takes them, and the next, without it."""
        state: Tensor = self._lower(
            input_ids=ids_1T, past_key_values=self.cache, use_cache=True
        ).last_hidden_state
        self._states.append(state)
        return state

    def features(self, token_ids: Sequence[Sequence[int]], step: Step | None = None) -> Features:
        ids_1T = torch.tensor(token_ids, device=self.target.device)
        if more := ids_1T.shape[1] - sum(state.shape[1] for state in self._states):
            self.advance(ids_1T[:, -more:])
        state, self._states = torch.cat(self._states, dim=1), []
        # How much is held is asked of a cache's first layer: that of layer E stands in all places before it.
        held, behind = self.cache.layers[self.exit_layer], copy.copy(self.cache)
        behind.layers = [held] * self.exit_layer + self.cache.layers[self.exit_layer :]

        def enter(
            _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            return (
                ((state, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": state})
            )

        with self.target.layers[self.exit_layer].register_forward_pre_hook(enter, with_kwargs=True):
            output = self._upper(input_ids=ids_1T, past_key_values=behind, use_cache=True)
        return Features((), output.last_hidden_state)

    @torch.inference_mode()
    def _reads_alike(self) -> bool:
        """Whether a short sequence with a rejection gives the target's own hidden states."""
        self.begin([PROMPT])
        for token in REJECTED:
            self.advance(torch.tensor([[token]], device=self.target.device))
        self.read([[*REJECTED, *NEXT]])
        self.keep([[]])
        _, found = self.read([NEXT[1:]])
        _, expected = CachedTarget(self.target, ()).begin([[*PROMPT, *NEXT]])
        return reads_alike(found.last_hidden[0], expected.last_hidden[0, -1:])


def part(target: FrozenTarget, start: int, stop: int) -> Any:
    """The target's decoder with some of its layers alone, which are its own; the final norm follows the last of all.

    Raises LookupError where layers and norm are no direct parts of it.
    """
    view = copy.copy(target.backbone)
    view._modules = dict(view._modules)
    names = {part: name for name, part in view.named_children()}
    if not names.keys() >= {target.layers, target.norm}:
        raise LookupError("its layers or its final norm are no direct parts of its decoder")
    setattr(view, names[target.layers], target.layers[start:stop])
    if stop < target.num_layers:
        setattr(view, names[target.norm], nn.Identity())
    view.config = copy.copy(view.config)
    if kinds := getattr(view.config, "layer_types", None):  # by number, of those that are run
        view.config.layer_types = kinds[start:]
    return view
