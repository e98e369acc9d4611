"""Read a target in two parts: first E layers token by token, the others over all draft tokens.

The first part runs while tokens are drafted, the second once for all of them. Both are
transformers' own forward pass of the target, over some of its layers and over one KV cache.
Verification needs what the first layers have computed: keys, values and the state after layer E. So
no token goes through them twice.

Shapes: T positions of a pass, D target hidden size.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdistill.common.errors import UserError, convert_errors
from specdistill.decoding.readers import NEXT_TOKENS, PROMPT, REJECTED_TOKENS, CachedTarget
from specdistill.decoding.tree import TreePass
from specdistill.targets.anatomy import CLASS_ERRORS, reads_alike
from specdistill.targets.frozen import Features, FrozenTarget

EXPECTED = "a target whose layers can be run in two parts"


class SplitTarget(CachedTarget):
    """A `CachedTarget` that reads in two parts.

    `advance` takes tokens through the first layers, one at a time. `read` then takes all these
    tokens through the later layers.

    Raises:
        UserError: naming the architecture, for a target that computes other hidden states if it
            reads in two parts.
    """

    def __init__(self, target: FrozenTarget, exit_layer: int) -> None:
        """Split the target after its first `exit_layer` layers, and test that it can be split."""
        super().__init__(target, ())
        self.exit_layer = exit_layer
        # States [1, T, D] after layer E, of tokens that the later layers have not read yet.
        self._states: list[Tensor] = []

        # Refuse a target that cannot be split. A recurrent layer cannot forget rejected tokens one
        # by one. Other classes are tried on a short sequence.
        what = f"{target.name}, a {type(target.model).__name__}"
        if target.is_recurrent:
            raise UserError("target.model", got=f"{what} with recurrent layers", expected=EXPECTED)
        with convert_errors(CLASS_ERRORS, "target.model", what, EXPECTED):
            self._first_layers = select_layers(target, 0, exit_layer)
            self._later_layers = select_layers(target, exit_layer, target.num_layers)
            matches_one_pass = self._matches_one_pass()
        if not matches_one_pass:
            raise UserError(
                "target.model",
                got=f"{what}, whose hidden states differ if its layers are run in two parts",
                expected=EXPECTED,
            )

    def begin(self, token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Features]:
        """Run all layers over the prompt of a new sequence; see `CachedTarget.begin`.

        Hidden states that are left from the previous sequence are dropped.
        """
        self._states = []
        return super().begin(token_ids)

    def advance(self, ids_1T: Tensor) -> Tensor:
        """Run only the target's first layers over the next tokens of the sequence.

        The resulting hidden states are stored. `read` continues from them, so the first layers do
        not run twice over a token.

        Args:
            ids_1T: the T tokens.

        Returns:
            The hidden states [1, T, D] after the first layers.
        """
        state: Tensor = self._first_layers(
            input_ids=ids_1T, past_key_values=self.cache, use_cache=True
        ).last_hidden_state
        self._states.append(state)
        return state

    def compute_features(
        self, token_ids: Sequence[Sequence[int]], tree_pass: TreePass | None = None
    ) -> Features:
        """Run the target over tokens, and return the hidden states after the last layer.

        A token that `advance` has already taken through the first layers runs through the later
        layers only.

        Args:
            token_ids: one row: the next tokens of the sequence.
            tree_pass: not used, because an exit drafts chains only.
        """
        # Run the first layers over the tokens that `advance` has not seen, which are the last ones.
        ids_1T = torch.tensor(token_ids, device=self.target.device)
        num_unseen = ids_1T.shape[1] - sum(state.shape[1] for state in self._states)
        if num_unseen:
            self.advance(ids_1T[:, -num_unseen:])
        state = torch.cat(self._states, dim=1)
        self._states = []

        # The KV cache has one entry per layer. The model counts the tokens before this pass by the
        # entries of the first layers. But `advance` has already written the tokens of this pass
        # into these entries, so the count would be too large. The entries of the later layers still
        # lack these tokens, and give the right count. So make a copy of the cache in which the
        # entry of a later layer stands in the places of the first layers:
        # [first 1, first 2, later 1, later 2] -> [later 1, later 1, later 1, later 2].
        later_cache = copy.copy(self.cache)
        later_entries = self.cache.layers[self.exit_layer :]
        later_cache.layers = [later_entries[0]] * self.exit_layer + later_entries

        # The later layers start from the hidden states after the first layers, not from embeddings.
        def enter(
            _layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> tuple[object, dict[str, object]]:
            """Replace the input of the first of the later layers by the stored hidden states.

            torch calls this before the layer runs, with its arguments.
            """
            # Some classes pass hidden states by position, others by name.
            if args:
                return (state, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": state}

        with self.target.layers[self.exit_layer].register_forward_pre_hook(enter, with_kwargs=True):
            output = self._later_layers(
                input_ids=ids_1T, past_key_values=later_cache, use_cache=True
            )
        return Features((), output.last_hidden_state)

    @torch.inference_mode()
    def _matches_one_pass(self) -> bool:
        """Return whether running the layers in two parts gives the same hidden state as one pass.

        The test reads a short sequence, in which draft tokens are rejected.
        """
        # Draft: take the last token of the sequence (the root) and a draft token through the first
        # layers.
        root, draft_token = REJECTED_TOKENS
        self.begin([PROMPT])
        for token in (root, draft_token):
            self.advance(torch.tensor([[token]], device=self.target.device))

        # Verify: read both in the later layers. The same pass reads two more draft tokens, which it
        # must first take through the first layers. All draft tokens are rejected below, so it does
        # not matter which tokens these two are.
        unseen_tokens = NEXT_TOKENS
        self.read([[root, draft_token, *unseen_tokens]])

        # Reject all three draft tokens. `keep` gets the indices of the accepted ones, here none,
        # and keeps the root. The sequence is now the prompt and the root.
        self.keep([[]])

        # Read the token that follows the root now. NEXT_TOKENS holds the root and this token.
        next_token = NEXT_TOKENS[1]
        _, features = self.read([[next_token]])

        # Compare the last hidden state with that of one ordinary pass over the same sequence.
        _, expected = CachedTarget(self.target, ()).begin([[*PROMPT, root, next_token]])
        return reads_alike(features.last_hidden[0], expected.last_hidden[0, -1:])


def select_layers(target: FrozenTarget, start: int, stop: int) -> nn.Module:
    """Return a view of the target's decoder that runs only the layers from `start` to `stop`.

    The layers are the target's own modules, not copies. The final norm is left out unless the
    target's last layer is included.

    Args:
        target: the target.
        start: the first layer.
        stop: the layer after the last one.

    Raises:
        LookupError: if layers and norm are no direct parts of the decoder.
    """
    # Copy the decoder and its table of submodules, but not the submodules. So some of them can be
    # replaced in the copy, and the target keeps its own.
    view = copy.copy(target.backbone)
    view._modules = dict(view._modules)

    # Replace the list of layers. If the target's last layer is not included, replace the final norm
    # by an identity, too.
    names = {part: name for name, part in view.named_children()}
    if not names.keys() >= {target.layers, target.norm}:
        raise LookupError("its layers or its final norm are no direct parts of its decoder")
    setattr(view, names[target.layers], target.layers[start:stop])
    if stop < target.num_layers:
        setattr(view, names[target.norm], nn.Identity())

    # The model looks the kind of a layer up by the layer's place in the view.
    view.config = copy.copy(view.config)
    layer_types = getattr(view.config, "layer_types", None)
    if layer_types:
        view.config.layer_types = layer_types[start:]
    decoder: nn.Module = view
    return decoder
