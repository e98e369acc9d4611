"""What a method of block drafting is as a row of the table: how it is recognized, created, trained, examined, planned and exported."""

from collections.abc import Iterator, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdistill.losses.divergence import forward_kl
from specdistill.methods import sizes
from specdistill.methods.blocks import checkpoint
from specdistill.methods.blocks.checkpoint import Kind
from specdistill.methods.blocks.module import BlockDraft, block_config
from specdistill.methods.blocks.objective import BlockObjective, objective
from specdistill.methods.blocks.proposer import BlockProposer
from specdistill.methods.chains import repairs
from specdistill.methods.chains.head import create_or_load, initialized, parameter_counts
from specdistill.methods.contract import Implementation
from specdistill.methods.feature_proposer import loaded_proposer
from specdistill.targets.frozen import FrozenTarget

TENSORS = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.k_norm.weight"}
ALL_ANCHORS = 1 << 20


def build(
    kind: Kind,
    target: FrozenTarget,
    *,
    draft_vocabulary: Tensor | None = None,
    seed: int = 0,
    **options: Any,
) -> BlockDraft:
    """A draft before training. draft_vocabulary: sorted target ids [W], None for all; options: keys of a recipe's `draft:`."""
    width = target.vocab_size if draft_vocabulary is None else len(draft_vocabulary)
    config = kind.config(**block_config(target, width, **options))
    target.features(
        torch.zeros(1, 1, dtype=torch.long, device=target.device), config.aux_layers
    )  # which may refuse
    draft = initialized(lambda: kind.draft(config), seed)
    draft.begin(target, draft_vocabulary)
    with torch.no_grad():  # the head is the target's, and engines do not scale what a draft's gives
        draft.norm.weight.mul_(target.logits.scale)
    if draft.markov_head is not None:
        draft.markov_head.begin(draft.embed_tokens.weight, draft.lm_head.weight)
    return draft.to(target.device)


def likely_causes(draft: BlockDraft, target: FrozenTarget) -> Iterator[repairs.Repair]:
    """What may be wrong with a block drafter whose files are right."""
    config, layers = draft.config, draft.config.aux_layers
    for shifted in (tuple(layer + by for layer in layers) for by in (1, -1)):
        if all(0 < layer <= target.num_layers for layer in shifted):
            cause = f"it reads the target after layers {list(layers)}: it was trained on {list(shifted)}"
            yield cause, repairs.configure, {"aux_layers": shifted}
    cause = f"sample_from_anchor is {config.sample_from_anchor}: it was trained with the other"
    yield cause, repairs.configure, {"sample_from_anchor": not config.sample_from_anchor}
    cause = f"its slots see {'those before them' if config.is_causal else 'all of their block'}: it was trained with the other"
    yield cause, repairs.configure, {"is_causal": not config.is_causal}
    yield from repairs.of_shape(draft, target)
    yield from repairs.of_layers(draft)


def planned(
    kind: Kind,
    published: sizes.PublishedFigures,
    defaults: dict[str, Any],
    target: sizes.Described,
    given: sizes.Described | None,
    settings: dict[str, Any],
) -> sizes.PlannedDraft:
    """The draft that is given, or the one that a recipe with these keys of `draft:` would train."""
    asked = (
        defaults
        | {name: value for name, value in settings.items() if name in defaults}
        | {"mask_token_id": 0}
    )
    aux_layers = asked.pop("aux_layers")
    target.tried(lambda tiny: build(kind, tiny, **asked))
    shape = sizes.planned_shape(target, given, asked)
    width = (
        given.raw.get("draft_vocab_size") if given else settings.get("vocab_size")
    ) or target.text.vocab_size
    sizes_of_draft = {**asked, **vars(shape)}

    def whole(full: FrozenTarget) -> BlockDraft:
        return kind.draft(
            kind.config(**block_config(full, width, aux_layers=aux_layers, **sizes_of_draft))
        )

    with torch.device("meta"):
        draft = whole(target.weightless)
    parts = parameter_counts(draft, once_per_round={"fc.weight"})
    note = f"blocks of {draft.config.block_size}, reads {len(draft.aux_layers)} of the target's layers, borrows its head"
    keys = tuple(
        f"draft.{name}={asked[name]}"
        for name in ("num_layers", "block_size", "markov_rank")
        if name in asked
    )
    return sizes.PlannedDraft(
        parts, shape, width, note, published, sizes.cache_of_head(shape, given), keys, build=whole
    )


def is_named(kind: Kind, config: Any, names: Set[str]) -> bool:
    named = {*(config.get("architectures") or []), config.get("speculators_model_type")}
    return bool(named & {*kind.architectures, kind.name})


def block_method(
    kind: Kind, published: sizes.PublishedFigures, recipe: Any, tensors: Set[str] = frozenset()
) -> Implementation:
    """tensors: names that this kind's drafts have in addition, and no other's."""
    defaults = recipe.model_fields["draft"].annotation().shape()
    return Implementation(
        load_proposer=partial(loaded_proposer, partial(checkpoint.load, kind), BlockProposer),
        has_tensors=lambda names: bool(tensors) and names >= TENSORS | tensors,
        is_named=partial(is_named, kind),
        create=lambda recipe, target, rows: create_or_load(
            recipe, target, partial(build, kind), partial(checkpoint.load, kind), "block_size", rows
        ),
        save=lambda draft, target, folder: checkpoint.save(draft, kind, folder),
        objective=objective,
        head_shape=lambda config, num_layers: checkpoint.config_from_json(
            kind, config, num_layers, "draft"
        ),
        check=lambda *files, **names: checkpoint.check(kind, *files, **names)[0],
        simulated=lambda draft, num_tokens: BlockObjective(draft, forward_kl, ALL_ANCHORS),
        repaired=partial(repairs.on_copies, likely_causes),
        planned=partial(planned, kind, published, defaults),
        is_described=lambda draft, target: kind.name in draft.calls_itself,
        export=partial(checkpoint.export, kind),
    )
