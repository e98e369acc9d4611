"""EAGLE-3 as a row of the table: how it is recognized, created, trained, examined, planned and exported."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset

from specdistill.engines.loader import engine_aux_layers
from specdistill.errors import UserError
from specdistill.methods import sizes
from specdistill.methods.chains import repairs
from specdistill.methods.chains.head import create_or_load, drafts_chains, parameter_counts
from specdistill.methods.chains.method import head_method
from specdistill.methods.eagle3.checkpoint import (
    check_eagle3,
    config_from_json,
    export,
    load_eagle3,
    save_eagle3,
)
from specdistill.methods.eagle3.config import Eagle3Recipe
from specdistill.methods.eagle3.module import Eagle3Draft, build_eagle3, eagle3_config
from specdistill.statistics.theory import alpha_from_acceptance_length
from specdistill.targets.frozen import FrozenTarget

TENSORS = (
    {"fc.weight", "midlayer.hidden_norm.weight"},
    {"fc.weight", "layers.0.hidden_norm.weight"},
)
ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"}
PUBLISHED = sizes.PublishedFigures(
    (alpha_from_acceptance_length(2.26, 3), alpha_from_acceptance_length(3.08, 4)),
    "AL 2.26 at K = 3 (Qwen3-8B, vLLM's acceptance test) to 3.08 at K = 4 (Llama-3.1-8B, vLLM issue 20780), MT-bench; "
    "up to 5.3 on mathematics and code, K = 7 (arXiv 2607.05147)",
    532_000 * sizes.TOKENS_PER_SAMPLE,
    "532k ShareGPT and UltraChat conversations (arXiv 2503.01840)",
)


def is_named(config: Any, names: Any) -> bool:
    named = set(config.get("architectures") or []) & ARCHITECTURES
    return drafts_chains(names) and (
        bool(named) or any(name.startswith("midlayer.") for name in names)
    )


def create(recipe: Eagle3Recipe, target: FrozenTarget, rows: Dataset) -> Any:
    head: Eagle3Draft = create_or_load(recipe, target, build_eagle3, load_eagle3, "ttt_steps", rows)
    if not recipe.draft.train_head:
        if not recipe.draft.init and head.config.owns_embedding:
            width = f"false with draft.hidden_size={head.config.hidden_size}, where its rows start at random"
            raise UserError(
                "draft.train_head", got=width, expected="true, or draft.hidden_size=null"
            )
        head.lm_head.weight.requires_grad_(False)
    return head


def likely_causes(head: Eagle3Draft, target: FrozenTarget) -> Iterator[repairs.Repair]:
    """What may be wrong with an EAGLE-3 head whose files are right."""
    config, aux_layers, depth = head.config, list(head.config.aux_layers), target.num_layers

    def residual(repaired: Any) -> None:
        repaired.layers[0].norm_before_residual = not config.norm_before_residual

    yield (
        f"norm_before_residual is {config.norm_before_residual}: it was trained with the other",
        residual,
    )
    other_output = {"norm_output": not config.norm_output}
    yield (
        f"norm_output is {config.norm_output}: it was trained with the other",
        repairs.configure,
        other_output,
    )
    # One more, one less, the engines' default
    others = [[layer + 1 for layer in aux_layers], [layer - 1 for layer in aux_layers]]
    others += [engine_aux_layers(depth)] if len(aux_layers) == 3 else []
    for layers in dict.fromkeys(map(tuple, others)):
        if layers != config.aux_layers and all(0 <= layer <= depth for layer in layers):
            cause = (
                f"it reads the target after layers {aux_layers}: it was trained on {list(layers)}"
            )
            yield cause, repairs.configure, {"aux_layers": layers}
    blocks = head.fc.weight.chunk(len(aux_layers), dim=1)
    orders = (
        itertools.permutations(range(len(blocks)))
        if len(blocks) <= 3
        else [tuple(range(len(blocks)))[::-1]]
    )
    for order in orders:
        if list(order) != sorted(order):
            cause = f"fc reads the auxiliary states in another order than it was trained on: {[index + 1 for index in order]}"
            yield (
                cause,
                repairs.set_weight,
                "fc.weight",
                torch.cat([blocks[index] for index in order], dim=1),
            )
    for one, other in itertools.combinations(
        ("input_layernorm", "hidden_norm", "post_attention_layernorm"), 2
    ):
        yield (
            f"the first layer's {one} and {other} are swapped",
            repairs.swap,
            f"layers.0.{one}",
            f"layers.0.{other}",
        )
    projections = (f"layers.0.self_attn.{part}_proj" for part in "qkv")
    cause = (
        "the halves that the first layer's q, k and v read, embedding and hidden state, are swapped"
    )
    yield cause, repairs.swap_halves_of, *projections
    if config.prunes_vocabulary:
        yield from _repairs_of_vocabulary(head)
    if config.own_embedding:
        own = target.tensor("embed_tokens.weight")
        yield (
            "its embedding is not the target's: it was trained with that",
            repairs.set_weight,
            "embed_tokens.weight",
            own,
        )
    yield from repairs.of_shape(head, target)
    yield from repairs.of_layers(head)


def _repairs_of_vocabulary(head: Eagle3Draft) -> Iterator[repairs.Repair]:
    draft_ids = torch.arange(len(head.d2t), device=head.d2t.device)
    for cause, d2t in (
        ("d2t is too large by one", head.d2t - 1),
        ("d2t is too small by one", head.d2t + 1),
        ("d2t holds target ids, not offsets", head.d2t - draft_ids),
    ):
        ids = d2t + draft_ids
        if (
            bool((ids >= 0).all())
            and bool((ids < head.config.vocab_size).all())
            and bool((ids.diff() > 0).all())
        ):
            yield cause, setattr, "d2t", d2t


def planned(
    target: sizes.Described, given: sizes.Described | None, settings: dict[str, Any]
) -> sizes.PlannedDraft:
    """The head that is given, or the one that a recipe with these keys of `draft:` would train."""
    target.tried(build_eagle3)
    vocabulary, hidden_size = target.text.vocab_size, target.text.hidden_size
    shape = sizes.planned_shape(target, given, settings)
    aux_layers: Sequence[int] | None = None
    width = settings.get("vocab_size") or (
        vocabulary if settings else min(vocabulary, sizes.DRAFT_VOCABULARY)
    )
    if given:
        width, aux_layers = (
            given.raw.get("draft_vocab_size") or vocabulary,
            range(given.raw.get("num_aux_hidden_states") or 3),
        )

    def build(full: FrozenTarget) -> Eagle3Draft:
        return Eagle3Draft(eagle3_config(full, width, aux_layers=aux_layers, **vars(shape)))

    with torch.device("meta"):
        draft = build(target.weightless)
    parts = parameter_counts(draft, once_per_round={"fc.weight"})
    borrows_head = (
        given is not None
        and not given.raw.get("draft_vocab_size")
        and shape.hidden_size == hidden_size
    )
    if borrows_head:  # as ModelOpt writes heads for the whole vocabulary
        parts = replace(parts, parameters=parts.parameters - width * hidden_size)
    keys = (
        (f"draft.vocab_size={sizes.DRAFT_VOCABULARY}",)
        if vocabulary > sizes.DRAFT_VOCABULARY
        else ()
    )
    head = "the target's head" if borrows_head else "its own head"
    note = f"reads {len(draft.aux_layers)} of the target's layers, {head} of {width:,} tokens"
    return sizes.PlannedDraft(
        parts, shape, width, note, PUBLISHED, sizes.cache_of_head(shape, given), keys, build=build
    )


METHOD = head_method(
    load_eagle3,
    likely_causes,
    has_tensors=lambda names: drafts_chains(names) and any(wanted <= names for wanted in TENSORS),
    is_named=is_named,
    create=create,
    save=lambda draft, target, folder: save_eagle3(draft, folder),
    head_shape=lambda config, num_layers: config_from_json(config, num_layers, "draft"),
    check=lambda *files, **names: check_eagle3(*files, **names)[0],
    planned=planned,
    is_described=lambda draft, target: (
        "eagle3" in draft.calls_itself
        or bool({"draft_vocab_size", "eagle_config"} & draft.raw.keys())
    ),
    export=export,
)
