"""Answers to `specdistill plan` and `specdistill doctor` about EAGLE-1 heads."""

from collections.abc import Iterator
from functools import partial

import torch

from specdistill.evaluation.statistics.theory import alpha_from_acceptance_length
from specdistill.methods import sizes
from specdistill.methods.base import DraftSettings
from specdistill.methods.chains.advice import (
    ChainAdvice,
    Repair,
    find_shape_causes,
    find_weight_causes,
    swap_halves,
)
from specdistill.methods.chains.head import count_parameters, plan_head_shape
from specdistill.methods.eagle.module import EagleConfig, EagleDraft, build_eagle
from specdistill.targets.frozen import FrozenTarget

# The range of published acceptance (two acceptance lengths, each with its K), where the figures are
# from, and how much data was used. `specdistill plan` prints them.
PUBLISHED_FIGURES = sizes.MethodFigures(
    (alpha_from_acceptance_length(2.47, 7), alpha_from_acceptance_length(2.10, 2)),
    "AL 2.10 at K = 2 to 2.47 at K = 7 (Llama-3.1-8B, MT-bench, vLLM issue 20780)",
    68_000 * sizes.TOKENS_PER_SAMPLE,
    "68k ShareGPT conversations (arXiv 2401.15077)",
)


class EagleAdvice(ChainAdvice[EagleDraft]):
    """The advice on EAGLE-1 heads."""

    def plan_draft(
        self,
        target: sizes.ModelConfigInfo,
        draft_info: sizes.ModelConfigInfo | None,
        settings: DraftSettings,
    ) -> sizes.PlannedDraft:
        """Describe the size and the cost of an existing head, or of one still to be trained.

        See `Advice.plan_draft` for the arguments.
        """
        # Build a head for a tiny model of the target's class first, to see whether this class can
        # have one.
        target.build_on_tiny_target(build_eagle)
        shape = sizes.plan_shape(target, draft_info, settings)

        def build(full_size_target: FrozenTarget) -> EagleDraft:
            """Build the head for the target at its full size."""
            draft = EagleDraft(
                EagleConfig(
                    **plan_head_shape(full_size_target, **vars(shape)),
                    logit_scale=full_size_target.logits.scale,
                )
            )
            draft.copy_from_target(full_size_target)
            return draft

        # Build the head without weights, and count its parameters.
        with torch.device("meta"):
            parts = count_parameters(build(target.weightless))
        return sizes.PlannedDraft(
            parts,
            shape,
            target.text.vocab_size,
            "reads the last hidden state, borrows the target's head",
            PUBLISHED_FIGURES,
            cache=sizes.plan_cache(shape, draft_info),
            recipe_keys=(
                "draft.intermediate_size=null",
                "draft.num_attention_heads=null",
                "draft.num_key_value_heads=null",
            ),
            counted_with={"ttt_steps": 1},
            build=build,
        )

    def is_described(self, draft: sizes.ModelConfigInfo, target: sizes.ModelConfigInfo) -> bool:
        """Return whether a config.json belongs to an EAGLE-1 head.

        The heads of SafeAILab call themselves plain Llama models, so they are recognized by their
        sizes: one layer, as wide as the target.
        """
        # The defaults None and 0 differ, because two missing sizes are not equal sizes.
        is_as_wide = getattr(draft.text, "hidden_size", None) == getattr(
            target.text, "hidden_size", 0
        )
        return "eagle" in draft.calls_itself or (
            draft.is_causal_lm and is_as_wide and draft.text.num_hidden_layers == 1
        )

    def find_causes(self, head: EagleDraft, target: FrozenTarget) -> Iterator[Repair]:
        """Yield likely causes of low acceptance in an EAGLE-1 head whose files raise no error.

        Each cause is a mistake that leaves all shapes right, with a function that repairs it.
        """
        # Embedding and hidden state are equally wide, so swapped halves raise no error.
        yield Repair(
            "in fc, the halves for embedding and hidden state are swapped",
            partial(swap_halves, names=["fc"]),
        )

        # Mistakes that all heads can have, such as a wrong rotary embedding or swapped matrices.
        yield from find_shape_causes(head, target)
        yield from find_weight_causes(head)
