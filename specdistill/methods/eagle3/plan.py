"""What a plan says of EAGLE-3 heads."""

from dataclasses import replace
from typing import Any

from specdistill.methods.planned import DRAFT_VOCABULARY, TOKENS_PER_SAMPLE, GivenDraft, PlannedDraft, PlannedTarget, Published
from specdistill.methods.sizes import Parts, Shape, layer_parameters, shape_of
from specdistill.statistics.theory import alpha_from_acceptance_length

PUBLISHED = Published(
    (alpha_from_acceptance_length(2.26, 3), alpha_from_acceptance_length(3.08, 4)),
    "AL 2.26 at K = 3 (Qwen3-8B, vLLM's acceptance test) to 3.08 at K = 4 (Llama-3.1-8B, vLLM issue 20780), MT-bench; "
    "up to 5.3 on mathematics and code, K = 7 (arXiv 2607.05147)",
    532_000 * TOKENS_PER_SAMPLE,
    "532k ShareGPT and UltraChat conversations (arXiv 2503.01840)",
)


def planned(target: PlannedTarget, given: GivenDraft | None, settings: dict[str, Any]) -> PlannedDraft:
    """The head that is given, or the one that a recipe with these keys of `draft:` would train."""
    target.decoder()
    vocabulary, hidden_size = target.text.vocab_size, target.text.hidden_size
    if given:
        shape = shape_of(given.text)
        width, num_aux = given.raw.get("draft_vocab_size") or vocabulary, given.raw.get("num_aux_hidden_states") or 3
    else:
        sizes = {name: settings[name] for name in Shape.__annotations__ if name in settings}
        shape = replace(shape_of(target.text), **{"num_layers": 1, **sizes})
        width, num_aux = settings.get("vocab_size") or (vocabulary if settings else min(vocabulary, DRAFT_VOCABULARY)), 3
    parts = eagle3_head(shape, vocabulary, width, hidden_size, num_aux)
    keys = (f"draft.vocab_size={DRAFT_VOCABULARY}",) if vocabulary > DRAFT_VOCABULARY else ()
    note = f"reads {num_aux} of the target's layers, its own head of {width:,} tokens"
    return PlannedDraft(parts, shape, width, note, PUBLISHED, keys)


def eagle3_head(shape: Shape, vocab_size: int, draft_vocab_size: int, target_hidden_size: int, num_aux: int = 3) -> Parts:
    """EAGLE-3 (arXiv 2503.01840): fc [H, A·D], a first layer that reads 2H, two more norms, its own head [W, H].

    A step reads all but fc, which runs once a round. The embedding is the target's unless the widths differ.
    """
    hidden = shape.hidden_size
    layers = layer_parameters(shape, 2 * hidden) + (shape.num_layers - 1) * layer_parameters(shape, hidden)
    read = layers + 2 * hidden + draft_vocab_size * hidden
    table = vocab_size * hidden
    shared = hidden == target_hidden_size
    parameters = num_aux * target_hidden_size * hidden + read + (0 if shared else table)
    return Parts(parameters, read, shape.num_layers, copied=table if shared else 0)
