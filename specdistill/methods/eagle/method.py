"""EAGLE-1 as a row of the table: how it is recognized, created, trained, examined, planned and exported."""

from collections.abc import Iterator
from typing import Any

import torch

from specdistill.methods import sizes
from specdistill.methods.chains import repairs
from specdistill.methods.chains.head import (
    create_or_load,
    drafts_chains,
    head_shape,
    parameter_counts,
)
from specdistill.methods.chains.method import head_method
from specdistill.methods.eagle.checkpoint import (
    check_eagle,
    config_from_json,
    export,
    load_eagle,
    save_eagle,
)
from specdistill.methods.eagle.module import EagleConfig, EagleDraft, build_eagle
from specdistill.statistics.theory import alpha_from_acceptance_length
from specdistill.targets.frozen import FrozenTarget

TENSORS = {"fc.weight", "layers.0.self_attn.q_proj.weight"}
ARCHITECTURES = {"LlamaForCausalLMEagle", "EagleLlamaForCausalLM"}
PUBLISHED = sizes.PublishedFigures(
    (alpha_from_acceptance_length(2.47, 7), alpha_from_acceptance_length(2.10, 2)),
    "AL 2.10 at K = 2 to 2.47 at K = 7 (Llama-3.1-8B, MT-bench, vLLM issue 20780)",
    68_000 * sizes.TOKENS_PER_SAMPLE,
    "68k ShareGPT conversations (arXiv 2401.15077)",
)


def is_named(config: Any, names: Any) -> bool:
    named = set(config.get("architectures") or []) & ARCHITECTURES
    # No whole model calls its tensors so.
    return drafts_chains(names) and (
        bool(named) or ("layers.0.self_attn.q_proj.weight" in names and "norm.weight" not in names)
    )


def is_described(draft: sizes.Described, target: sizes.Described) -> bool:
    """SafeAILab's heads call themselves plain Llama, but their sizes tell."""
    same_width = getattr(draft.text, "hidden_size", None) == getattr(target.text, "hidden_size", 0)
    return "eagle" in draft.calls_itself or (
        draft.is_causal_lm and same_width and draft.text.num_hidden_layers == 1
    )


def likely_causes(head: EagleDraft, target: FrozenTarget) -> Iterator[repairs.Repair]:
    """What may be wrong with an EAGLE-1 head whose files are right."""
    yield (
        "the two halves that fc reads, embedding and hidden state, are swapped",
        repairs.swap_halves_of,
        "fc",
    )
    yield from repairs.of_shape(head, target)
    yield from repairs.of_layers(head)


def planned(
    target: sizes.Described, given: sizes.Described | None, settings: dict[str, Any]
) -> sizes.PlannedDraft:
    """The head that is given, or the one that a recipe with these keys of `draft:` would train."""
    target.tried(build_eagle)
    shape = sizes.planned_shape(target, given, settings)
    keys = tuple(
        f"draft.{name}=null"
        for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    note = "reads the last hidden state, borrows the target's head"

    def build(full: FrozenTarget) -> EagleDraft:
        draft = EagleDraft(
            EagleConfig(**head_shape(full, **vars(shape)), logit_scale=full.logits.scale)
        )
        draft.borrow(full)
        return draft

    with torch.device("meta"):
        parts = parameter_counts(build(target.weightless))
    cache, counted_with = sizes.cache_of_head(shape, given), {"ttt_steps": 1}
    return sizes.PlannedDraft(
        parts,
        shape,
        target.text.vocab_size,
        note,
        PUBLISHED,
        cache,
        keys,
        counted_with,
        build=build,
    )


METHOD = head_method(
    load_eagle,
    likely_causes,
    has_tensors=lambda names: (
        drafts_chains(names) and names >= TENSORS and "layers.0.hidden_norm.weight" not in names
    ),
    is_named=is_named,
    create=lambda recipe, target, rows: create_or_load(
        recipe, target, build_eagle, load_eagle, "ttt_steps"
    ),
    save=lambda draft, target, folder: save_eagle(draft, folder),
    head_shape=lambda config, num_layers: config_from_json(config, "draft"),
    check=lambda *files, **names: check_eagle(*files, **names)[0],
    planned=planned,
    is_described=is_described,
    export=export,
)
