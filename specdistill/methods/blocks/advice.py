"""The answers of block drafters to `specdistill plan` and `specdistill doctor`."""

from collections.abc import Iterator
from functools import partial

import torch

from specdistill.methods import sizes
from specdistill.methods.base import Advice, DraftSettings
from specdistill.methods.blocks.config import BlockDraftConfig
from specdistill.methods.blocks.module import BlockDraft, Kind, block_config, build_block_draft
from specdistill.methods.blocks.objective import BlockObjective
from specdistill.methods.chains.advice import (
    Repair,
    configure,
    find_shape_causes,
    find_weight_causes,
    repair_copies,
)
from specdistill.methods.chains.head import count_parameters
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import forward_kl

# More blocks than a row has tokens, so that a block begins at every token.
ALL_ANCHORS = 1 << 20


class BlockAdvice(Advice[BlockDraft]):
    """The answers of block drafters to `specdistill plan` and `specdistill doctor`."""

    def __init__(
        self,
        kind: Kind,
        published: sizes.MethodFigures,
        draft_config: type[BlockDraftConfig],
    ) -> None:
        """Describe a method of block drafting.

        Args:
            kind: the method of block drafting.
            published: acceptance and training data that others published.
            draft_config: the schema of a recipe's `draft:`.
        """
        self.kind = kind
        self.published = published
        self.defaults = draft_config().shape()

    def plan_draft(
        self,
        target: sizes.ModelConfigInfo,
        draft_info: sizes.ModelConfigInfo | None,
        settings: DraftSettings,
    ) -> sizes.PlannedDraft:
        """Describe the size and the cost of an existing draft, or of one still to be trained.

        See `Advice.plan_draft` for the arguments.
        """
        # Collect the options of the draft: those of the recipe, and the method's defaults. Any mask
        # token will do, because sizes do not depend on it.
        options = {name: settings.get(name, value) for name, value in self.defaults.items()}
        options["mask_token_id"] = 0

        # Build the draft for a tiny target first, to see whether a draft can be built for this
        # model class. The tiny target has few layers, so `aux_layers` is left to the default.
        aux_layers = options.pop("aux_layers")
        target.build_on_tiny_target(lambda tiny: build_block_draft(self.kind, tiny, **options))

        # Find the shape, and the width of the draft vocabulary.
        shape = sizes.plan_shape(target, draft_info, options)
        width = draft_info.raw.get("draft_vocab_size") if draft_info else settings.get("vocab_size")
        width = width or target.text.vocab_size

        def build(full: FrozenTarget) -> BlockDraft:
            """Build the draft for the target at its full size, in the planned shape."""
            fields = {**options, **vars(shape), "aux_layers": aux_layers}
            return self.kind.draft(self.kind.config(**block_config(full, width, **fields)))

        # Build the draft without weights, and count its parameters.
        with torch.device("meta"):
            draft = build(target.weightless)
        keys = [name for name in ("num_layers", "block_size", "markov_rank") if name in options]
        return sizes.PlannedDraft(
            count_parameters(draft, once_per_round={"fc.weight"}),
            shape,
            width,
            f"blocks of {draft.config.block_size}, reads {len(draft.aux_layers)} of the target's"
            " layers, borrows its head",
            self.published,
            cache=sizes.plan_cache(shape, draft_info),
            recipe_keys=tuple(f"draft.{name}={options[name]}" for name in keys),
            build=build,
        )

    def is_described(self, draft: sizes.ModelConfigInfo, target: sizes.ModelConfigInfo) -> bool:
        """Return whether a draft's config.json says that the draft is one of this method.

        The target is not needed here.
        """
        return self.kind.name in draft.calls_itself

    def build_simulation(self, draft: BlockDraft, num_tokens: int) -> BlockObjective:
        """Build an objective that simulates drafting on given text, with a block at every token.

        It measures how far the draft is from the target (forward KL), and how many draft tokens
        would be accepted, without decoding. A block always drafts all its tokens, so `num_tokens`
        is not used.
        """
        return BlockObjective(draft, forward_kl, ALL_ANCHORS)

    def find_repairs(
        self, draft: BlockDraft, target: FrozenTarget
    ) -> Iterator[tuple[str, BlockDraft]]:
        """Yield likely causes of low acceptance, each with a copy of the draft that is repaired."""
        return repair_copies(find_causes(draft, target), draft, target)


def find_causes(draft: BlockDraft, target: FrozenTarget) -> Iterator[Repair]:
    """Yield likely causes of low acceptance in a block drafter whose files raise no error.

    Each cause is a mistake in config.json or in the weights that leaves all shapes right.
    """
    # Some projects number the layers of a target from 0 and others from 1. So the right layers may
    # be one before or one after the layers in the config.
    config = draft.config
    for offset in (1, -1):
        layers = tuple(layer + offset for layer in config.aux_layers)
        if all(0 < layer <= target.num_layers for layer in layers):
            yield Repair(
                f"the draft reads the target after layers {list(config.aux_layers)}, but was"
                f" trained on {list(layers)}",
                partial(configure, fields={"aux_layers": layers}),
            )

    # Two switches, each of which may have had the other value in training. The anchor is the known
    # token at which a block begins.
    yield Repair(
        f"sample_from_anchor is {config.sample_from_anchor} (whether the anchor's slot predicts a"
        f" token, too), but the draft was trained with {not config.sample_from_anchor}",
        partial(configure, fields={"sample_from_anchor": not config.sample_from_anchor}),
    )
    yield Repair(
        f"is_causal is {config.is_causal} (whether a slot sees only the slots before it), but the"
        f" draft was trained with {not config.is_causal}",
        partial(configure, fields={"is_causal": not config.is_causal}),
    )

    # Mistakes that heads can have, too: a wrong rotary embedding, swapped matrices and so on.
    yield from find_shape_causes(draft, target)
    yield from find_weight_causes(draft)
