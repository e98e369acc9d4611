"""What a plan says of draft models."""

from dataclasses import replace
from typing import Any

from specdistill.methods.draft_model.create import on_meta, propose_shape
from specdistill.methods.draft_model.pruning import check_decoder
from specdistill.methods.planned import TOKENS_PER_SAMPLE, GivenDraft, PlannedDraft, PlannedTarget, Published
from specdistill.methods.sizes import Parts, Shape, shape_of, weights_read

# Of the target's parameters; published draft models have 2 % (arXiv 2403.00858) to 10 % (arXiv 2402.01528).
SHARE = 1 / 16
PUBLISHED = Published(
    (1 - 1 / 2.01, 0.76),
    "AL 2.01 (68M for Vicuna-33B, not distilled, Spec-Bench; K not stated, so alpha is at least 1 - 1/AL) to alpha 0.76 (160M for "
    "Vicuna-7B, distilled on the domain it serves, OSD, ICML 2024)",
    532_000 * TOKENS_PER_SAMPLE,
    "assumed, as for eagle3: no figure is published for this shape",
)


def planned(target: PlannedTarget, given: GivenDraft | None, settings: dict[str, Any]) -> PlannedDraft:
    """The model that is given, in the sizes of the target's own recipe, or in the shape proposed for SHARE."""
    sizes = {name: settings[name] for name in Shape.__annotations__ if name in settings}
    if given:
        model = given.model()
    else:
        check_decoder(target.model)
        proposed = None if sizes else propose_shape(target.model, int(target.parameters * SHARE))
        model = on_meta(target.model.config, proposed or replace(shape_of(target.text), **sizes))
    shape = shape_of(model.config.get_text_config())
    parts = Parts(int(model.num_parameters()), weights_read(model), shape.num_layers)
    keys = ("draft.init=width", "draft.num_layers=null", f"draft.max_parameters={parts.parameters}")
    note = "a smaller language model with a head of its own"
    return PlannedDraft(parts, shape, target.text.vocab_size, note, PUBLISHED, keys)
