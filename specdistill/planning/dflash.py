"""DFlash drafts as a row of the plan: their sizes and what they hold when engines serve them. They are neither trained nor
decoded here yet.

A draft of several layers as Qwen3's drafts a block in one pass (arXiv 2602.06036); keys and values of what was accepted come
from the hidden states of some of the target's layers, through `fc`. Embedding and head are the target's.
"""

from typing import Any

from specdistill.errors import UserError
from specdistill.methods import Cost
from specdistill.methods.sizes import Described, Parts, PlannedDraft, Published, cache_of_head, layer_parameters, shape_of
from specdistill.statistics.theory import alpha_from_acceptance_length

COST = Cost("1")
MOST_TOKENS = 15  # of the block of 16 that published drafts have, all but the first
PUBLISHED = Published(
    (alpha_from_acceptance_length(3.11, 7), alpha_from_acceptance_length(6.49, 15)),
    "AL 3.11 at K = 7 (Qwen3-8B, MT-bench, T = 1, arXiv 2607.05147) to 6.49 at K = 15 (Qwen3-8B, mean of seven tasks, greedy, "
    "arXiv 2602.06036)",
    None,
    "not trained here",
)


def planned(target: Described, given: Described | None, settings: dict[str, Any]) -> PlannedDraft:
    """Of the draft that is given. Raises UserError for one without the layers that it reads."""
    raw = given.raw if given else {}
    layers = (raw.get("dflash_config") or {}).get("target_layer_ids") or raw.get("aux_hidden_state_layer_ids")
    if given is None or not layers:
        raise UserError("draft", got="a config.json without target_layer_ids", expected="that of a DFlash draft")
    shape, vocabulary = shape_of(given.text), target.text.vocab_size
    hidden = shape.hidden_size
    each = layer_parameters(shape, hidden) + 2 * shape.head_dim  # with norms of queries and keys
    parameters = len(layers) * hidden**2 + 2 * hidden + shape.num_layers * each
    block = raw.get("block_size") or MOST_TOKENS + 1
    note = f"drafts {block - 1} tokens in one pass from {len(layers)} of the target's layers; not trained or decoded here yet"
    parts = Parts(parameters, parameters + vocabulary * hidden, shape.num_layers)
    return PlannedDraft(parts, shape, vocabulary, note, PUBLISHED, cache_of_head(shape, given))
