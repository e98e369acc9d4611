"""Limits of engines for heads, and notes on which engines serve heads for a target. No torch.

Each limit is stated once, here. The layouts and loaders that it applies to list it. `head` is the
config of a head, `Eagle3Config` or `EagleConfig`. The notes on targets are from vLLM's
config/speculative.py, which lists the text models whose hidden states it gives to a draft
(`gemma4`, no other Gemma), and from SGLang's support of EAGLE-3 for Gemma (sgl-project/sglang pull
request 23976).
"""

from specdistill.methods import METHODS
from specdistill.serving.engines.loader import Limit

# Switches of EAGLE-3 heads that some engines do not have.
NORM_BEFORE_RESIDUAL = Limit(
    "norm_before_residual",
    lambda head: head.norm_before_residual,
    "a head whose residual is the state before its norm",
)
FC_NORM = Limit("fc_norm", lambda head: head.fc_norm, "a head without the norms of EAGLE-3.1")
NORM_OUTPUT = Limit(
    "norm_output", lambda head: head.norm_output, "a head that feeds back the state before its norm"
)
# Shapes that some engines do not have.
SEVERAL_LAYERS = Limit(
    "more than one layer",
    lambda head: head.num_layers > 1,
    "one layer, because the engine has no further layers, or further layers with other norms",
)
SLIDING_WINDOW = Limit(
    "a sliding window", lambda head: head.sliding_window is not None, "attention to all positions"
)
# An engine that always takes the target's embedding would run the head with the wrong one.
OWN_EMBEDDING = Limit(
    "an embedding of its own, as wide as the target's",
    lambda head: head.own_embedding,
    "the target's embedding; pass target= to show that this embedding is a copy of it",
)
# Which layers of the target the head reads. Engines that list states as they enter a layer have
# none for the state after the last layer.
NOT_THREE_LAYERS_READ = Limit(
    "other than three auxiliary layers",
    lambda head: len(head.aux_layers) != 3,
    "three auxiliary layers",
)
LAST_STATE_READ = Limit(
    "the state after the target's last layer",
    lambda head: head.target_num_layers in head.aux_layers,
    "layers below the target's last one",
)
LAYERS_OUT_OF_ORDER = Limit(
    "auxiliary layers out of order",
    lambda head: list(head.aux_layers) != sorted(set(head.aux_layers)),
    "ascending layers",
)
# SGLang and TensorRT-LLM skip fc if its input is as wide as its output.
WIDTH_OF_FC_INPUT = Limit(
    "a hidden state as wide as the input of fc",
    lambda head: len(head.aux_layers) * head.target_hidden_size == head.hidden_size,
    "different widths, because the engine omits fc if they are equal",
)
FC_BIAS = Limit("a bias in fc", lambda head: head.fc_bias, "a head without a bias in fc")

# The beginning of the `model_type` of a target's text model -> which engines serve heads for it.
NOTES = {
    "gemma3": "vLLM does not serve heads for Gemma 3 yet; SGLang serves EAGLE-3 heads for it",
    "gemma4": "vLLM serves heads for Gemma 4; SGLang serves only EAGLE-3 heads for it",
}


def describe_head_engines(method: str, model_type: str | None) -> str:
    """Return a note for users if not every engine serves heads for this type of target.

    Args:
        method: the name of the method.
        model_type: the type of the target's text model, such as "gemma3_text".

    Returns:
        A sentence from NOTES. Empty if no restriction is known, or the method's drafts are no
        heads.
    """
    # A head reads features, has files of its own, and some engine can serve it.
    row = METHODS[method]
    is_head = bool(row.features) and not row.in_target and bool(row.serving())
    for beginning, note in NOTES.items():
        if is_head and str(model_type).startswith(beginning):
            return note
    return ""
