"""What a plan says of EAGLE-1 heads."""

from dataclasses import replace
from typing import Any

from specdistill.methods.planned import TOKENS_PER_SAMPLE, GivenDraft, PlannedDraft, PlannedTarget, Published
from specdistill.methods.sizes import Parts, Shape, layer_parameters, shape_of
from specdistill.statistics.theory import alpha_from_acceptance_length

PUBLISHED = Published(
    (alpha_from_acceptance_length(2.47, 7), alpha_from_acceptance_length(2.10, 2)),
    "AL 2.10 at K = 2 to 2.47 at K = 7 (Llama-3.1-8B, MT-bench, vLLM issue 20780)",
    68_000 * TOKENS_PER_SAMPLE,
    "68k ShareGPT conversations (arXiv 2401.15077)",
)


def planned(target: PlannedTarget, given: GivenDraft | None, settings: dict[str, Any]) -> PlannedDraft:
    """The head that is given, or the one that a recipe with these keys of `draft:` would train."""
    target.decoder()
    sizes = {name: settings[name] for name in Shape.__annotations__ if name in settings}
    shape = shape_of(given.text) if given else replace(shape_of(target.text), **{"num_layers": 1, **sizes})
    keys = tuple(f"draft.{name}=null" for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads"))
    vocabulary = target.text.vocab_size
    note = "reads the last hidden state, borrows the target's head"
    return PlannedDraft(eagle_head(shape, vocabulary), shape, vocabulary, note, PUBLISHED, keys)


def eagle_head(shape: Shape, vocab_size: int) -> Parts:
    """EAGLE-1 (arXiv 2401.15077): fc [H, 2H] and layers, the first without its input norm; embedding and head are the target's."""
    hidden, table = shape.hidden_size, vocab_size * shape.hidden_size
    parameters = 2 * hidden**2 + shape.num_layers * layer_parameters(shape, hidden) - hidden
    return Parts(parameters, parameters + table, shape.num_layers, copied=2 * table)
