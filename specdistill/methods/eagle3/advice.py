"""Answers to `specdistill plan` and `specdistill doctor` about EAGLE-3 heads."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specdistill.evaluation.statistics.theory import alpha_from_acceptance_length
from specdistill.methods import sizes
from specdistill.methods.base import DraftSettings
from specdistill.methods.chains.advice import (
    ChainAdvice,
    Repair,
    configure,
    find_shape_causes,
    find_weight_causes,
    set_weight,
    swap_halves,
    swap_weights,
)
from specdistill.methods.chains.head import count_parameters
from specdistill.methods.eagle3.module import (
    Eagle3Draft,
    FirstLayer,
    build_eagle3,
    build_eagle3_config,
)
from specdistill.serving.engines.loader import choose_aux_layers
from specdistill.targets.frozen import FrozenTarget

# The range of published acceptance (two acceptance lengths, each with its K), where the figures are
# from, and how much data was used. `specdistill plan` prints them.
PUBLISHED_FIGURES = sizes.MethodFigures(
    (alpha_from_acceptance_length(2.26, 3), alpha_from_acceptance_length(3.08, 4)),
    "AL 2.26 at K = 3 (Qwen3-8B, vLLM's acceptance test) to 3.08 at K = 4 (Llama-3.1-8B, vLLM issue"
    " 20780), MT-bench; up to 5.3 on mathematics and code, K = 7 (arXiv 2607.05147)",
    532_000 * sizes.TOKENS_PER_SAMPLE,
    "532k ShareGPT and UltraChat conversations (arXiv 2503.01840)",
)
# Norms of the first layer that all have the same shape, so that they can be mistaken for each
# other.
FIRST_LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


class Eagle3Advice(ChainAdvice[Eagle3Draft]):
    """The advice on EAGLE-3 heads."""

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
        target.build_on_tiny_target(build_eagle3)
        vocabulary = target.text.vocab_size
        shape = sizes.plan_shape(target, draft_info, settings)

        # Find the size of the draft vocabulary: that of the existing head, that of the recipe, or
        # without a recipe the default that `plan` suggests. The size of an existing head depends on
        # how many layers of the target it reads, not on which, so `range` stands for them.
        aux_layers: Sequence[int] | None = None
        if draft_info:
            width = draft_info.raw.get("draft_vocab_size") or vocabulary
            aux_layers = range(draft_info.raw.get("num_aux_hidden_states") or 3)
        elif settings:
            width = settings.get("vocab_size") or vocabulary
        else:
            width = min(vocabulary, sizes.DRAFT_VOCABULARY)

        def build(full_size_target: FrozenTarget) -> Eagle3Draft:
            """Build the head for the target at its full size."""
            return Eagle3Draft(
                build_eagle3_config(full_size_target, width, aux_layers=aux_layers, **vars(shape))
            )

        # Build the head without weights, and count its parameters.
        with torch.device("meta"):
            draft = build(target.weightless)
        parts = count_parameters(draft, once_per_round={"fc.weight"})

        # ModelOpt's heads for the whole vocabulary have no LM head in their file: they use the
        # target's, which does not count as a parameter of the head.
        is_as_wide = shape.hidden_size == target.text.hidden_size
        borrows_head = (
            draft_info is not None and not draft_info.raw.get("draft_vocab_size") and is_as_wide
        )
        if borrows_head:
            parts = replace(parts, parameters=parts.parameters - width * target.text.hidden_size)
        head = "the target's head" if borrows_head else "its own head"

        # A recipe for this target should prune a large vocabulary.
        keys: tuple[str, ...] = ()
        if vocabulary > sizes.DRAFT_VOCABULARY:
            keys = (f"draft.vocab_size={sizes.DRAFT_VOCABULARY}",)
        return sizes.PlannedDraft(
            parts,
            shape,
            width,
            f"reads {len(draft.aux_layers)} of the target's layers, {head} of {width:,} tokens",
            PUBLISHED_FIGURES,
            cache=sizes.plan_cache(shape, draft_info),
            recipe_keys=keys,
            build=build,
        )

    def is_described(self, draft: sizes.ModelConfigInfo, target: sizes.ModelConfigInfo) -> bool:
        """Return whether a config.json belongs to an EAGLE-3 head."""
        has_keys = bool({"draft_vocab_size", "eagle_config"} & draft.raw.keys())
        return "eagle3" in draft.calls_itself or has_keys

    def find_causes(self, head: Eagle3Draft, target: FrozenTarget) -> Iterator[Repair]:
        """Yield likely causes of low acceptance in an EAGLE-3 head whose files raise no error.

        Each cause is a mistake that leaves all shapes right, with a function that repairs it.
        """
        # Switches that may have had the other value in training.
        config = head.config
        yield Repair(
            f"norm_before_residual is {config.norm_before_residual}, but the head was trained with"
            f" {not config.norm_before_residual}",
            switch_residual_source,
        )
        yield Repair(
            f"norm_output is {config.norm_output}, but the head was trained with"
            f" {not config.norm_output}",
            partial(configure, fields={"norm_output": not config.norm_output}),
        )

        # The input of the head: the layers that it reads, their order, the norms of its first layer
        # and the order of embedding and hidden state.
        yield from _find_other_layers(head, target)
        yield from _find_other_orders(head)
        for first, second in itertools.combinations(FIRST_LAYER_NORMS, 2):
            yield Repair(
                f"the first layer's {first} and {second} are swapped",
                partial(swap_weights, first=f"layers.0.{first}", second=f"layers.0.{second}"),
            )
        yield Repair(
            "in the first layer's q, k and v, the halves for embedding and hidden state are"
            " swapped",
            partial(swap_halves, names=[f"layers.0.self_attn.{part}_proj" for part in "qkv"]),
        )

        # The draft vocabulary and the embedding.
        if config.prunes_vocabulary:
            yield from _find_other_vocabularies(head)
        if config.own_embedding:
            name = "embed_tokens.weight"
            yield Repair(
                "the head has an embedding of its own, but was trained with the target's",
                partial(set_weight, name=name, weight=target.tensor(name)),
            )

        # Mistakes that all heads can have, such as a wrong rotary embedding or swapped matrices.
        yield from find_shape_causes(head, target)
        yield from find_weight_causes(head)


def switch_residual_source(head: Eagle3Draft) -> None:
    """Flip `norm_before_residual`: take the first layer's residual before or after the norm."""
    # The first layer keeps a copy of this switch, so both are changed.
    flipped = not head.config.norm_before_residual
    first = head.layers[0]
    assert isinstance(first, FirstLayer)
    first.norm_before_residual = flipped
    head.config = replace(head.config, norm_before_residual=flipped)


def set_vocabulary(head: Eagle3Draft, d2t: Tensor) -> None:
    """Replace a head's map from draft ids to target ids."""
    head.d2t = d2t


def _find_other_layers(head: Eagle3Draft, target: FrozenTarget) -> Iterator[Repair]:
    """Yield a repair for each choice of target layers that the head may have been trained on.

    These are the layers one after and one before those in the head's config, because some projects
    count layers from 0 and others from 1; and the default layers.
    """
    # The default layers are three, so they fit only a head that reads three.
    aux_layers = head.config.aux_layers
    candidates = [
        tuple(layer + 1 for layer in aux_layers),
        tuple(layer - 1 for layer in aux_layers),
    ]
    if len(aux_layers) == 3:
        candidates.append(tuple(choose_aux_layers(target.num_layers)))

    # `dict.fromkeys` drops candidates that occur twice.
    for layers in dict.fromkeys(candidates):
        is_possible = all(0 <= layer <= target.num_layers for layer in layers)
        if layers != aux_layers and is_possible:
            yield Repair(
                f"the head reads the target after layers {list(aux_layers)}, but was trained on"
                f" {list(layers)}",
                partial(configure, fields={"aux_layers": layers}),
            )


def _find_other_orders(head: Eagle3Draft) -> Iterator[Repair]:
    """Yield a repair for each order in which fc may have read the target's layers in training.

    fc reads the hidden states of several layers side by side. With more than three layers there are
    too many orders, so only the reverse one is tried.
    """
    # The columns of fc that belong to each auxiliary state.
    blocks = head.fc.weight.chunk(len(head.config.aux_layers), dim=1)
    in_order = tuple(range(len(blocks)))
    orders = [in_order[::-1]]
    if len(blocks) <= 3:
        orders = list(itertools.permutations(in_order))

    # Permute the columns instead of the states, so that only this weight changes.
    for order in orders:
        if order != in_order:
            cause = (
                "fc was trained on the auxiliary states in another order:"
                f" {[index + 1 for index in order]}"
            )
            weight = torch.cat([blocks[index] for index in order], dim=1)
            yield Repair(cause, partial(set_weight, name="fc.weight", weight=weight))


def _find_other_vocabularies(head: Eagle3Draft) -> Iterator[Repair]:
    """Yield a repair for each mistake that the map `d2t` of a file may contain.

    `d2t` should hold, for each draft token, its target id minus its draft id.
    """
    # Undo each mistake. The corrected map is possible if its target ids ascend within the
    # vocabulary.
    draft_ids = torch.arange(len(head.d2t), device=head.d2t.device)
    for cause, d2t in (
        ("d2t is too large by one", head.d2t - 1),
        ("d2t is too small by one", head.d2t + 1),
        ("d2t holds target ids, not offsets", head.d2t - draft_ids),
    ):
        ids = d2t + draft_ids
        is_inside = bool((ids >= 0).all()) and bool((ids < head.config.vocab_size).all())
        if is_inside and bool((ids.diff() > 0).all()):
            yield Repair(cause, partial(set_vocabulary, d2t=d2t))
