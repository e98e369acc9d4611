"""What engines cannot express of a head: each limit is stated once, here, and listed by the layouts and loaders it applies to.

`head` is the config of a head, `Eagle3Config` or `EagleConfig`.
"""

from specdistill.engines.loader import Limit

NORM_BEFORE_RESIDUAL = Limit(
    "norm_before_residual",
    lambda head: head.norm_before_residual,
    "a head whose residual is the state before its norm",
)
FC_NORM = Limit("fc_norm", lambda head: head.fc_norm, "a head without the norms of EAGLE-3.1")
NORM_OUTPUT = Limit(
    "norm_output", lambda head: head.norm_output, "a head that feeds back the state before its norm"
)
SEVERAL_LAYERS = Limit(
    "more than one layer",
    lambda head: head.num_layers > 1,
    "one layer: there are no others, or others with other norms",
)
SLIDING_WINDOW = Limit(
    "a sliding window", lambda head: head.sliding_window is not None, "attention to all positions"
)
OWN_EMBEDDING = Limit(
    "an embedding of its own, as wide as the target's",
    lambda head: head.own_embedding,
    "the target's embedding; target= tells a copy of it from another",
)
NOT_THREE_LAYERS_READ = Limit(
    "other than three auxiliary layers", lambda head: len(head.aux_layers) != 3, "three"
)
LAST_STATE_READ = Limit(
    "the state after the target's last layer",
    lambda head: head.target_num_layers in head.aux_layers,
    "states that enter a layer",
)
LAYERS_OUT_OF_ORDER = Limit(
    "auxiliary layers out of order",
    lambda head: list(head.aux_layers) != sorted(set(head.aux_layers)),
    "ascending layers",
)
WIDTH_OF_FC_INPUT = Limit(
    "a state as wide as what fc reads",
    lambda head: len(head.aux_layers) * head.target_hidden_size == head.hidden_size,
    "different widths: with equal ones fc is omitted",
)
FC_BIAS = Limit("a bias in fc", lambda head: head.fc_bias, "a head without one")
