"""How engines are given block drafters: the layouts of exports, and what vLLM's loader makes of a folder. No torch.

Read in vLLM 0.32's qwen3_dflash.py and configs/speculators, in the converter that llama-cpp-python 0.3.36 has, and of SGLang in dflash.py
alone: what its DSpark takes is not known here, so only what DFlash's layers and the plain correction are is written for it. vLLM runs the
anchor's slot and as many as it drafts tokens: slots that see each other are served as they were trained at the largest K alone.
"""

from typing import Any

from specdistill.engines.engine import HeadExport, Layout
from specdistill.engines.loader import LLAMA_SETTINGS, Limit, Loader, Setting, Slot, layer_slots
from specdistill.engines.vllm import speculators_config

PRUNED = Limit(
    "a pruned vocabulary",
    lambda draft: draft.draft_vocab_size < draft.vocab_size,
    "the target's vocabulary",
)
CORRECTION = Limit(
    "a correction by more than the token before",
    lambda draft: draft.markov_head_type != "vanilla",
    "vanilla",
)
CAUSAL = Limit(
    "causal slots and no window",
    lambda draft: draft.is_causal and draft.sliding_window is None,
    "slots that see all of their block: speculators has no others without a window",
)
CAUSALITY = Limit(
    "causal slots without a window, or a window without them",
    lambda draft: draft.is_causal != (draft.sliding_window is not None),
    "a window exactly where slots are causal: SGLang goes by that alone",
)
SLOTS = (
    Slot("fc.weight", "H A*D"),
    Slot("hidden_norm.weight", "H"),
    Slot("norm.weight", "H"),
    *(
        slot
        for layer in ("layers.0", "layers.{i}")
        for slot in (
            *layer_slots(layer, "H", "input_layernorm"),
            *(Slot(f"{layer}.self_attn.{norm}.weight", "E") for norm in ("q_norm", "k_norm")),
        )
    ),
    Slot("lm_head.weight", "W H", source="shared"),
    Slot("embed_tokens.weight", "V H", source="shared"),
    Slot("d2t", "W", "pruned"),
)
NESTED = "dflash_config"
SETTINGS = {
    **LLAMA_SETTINGS,
    "draft_vocab_size": Setting(("draft_vocab_size", "vocab_size")),
    "target_hidden_size": Setting(("target_hidden_size", "hidden_size")),
    "num_aux_hidden_states": Setting((f"{NESTED}.target_layer_ids#", "target_layer_ids#"), 5),
    "fc_norm": Setting(default=False),
    "norm_before_fc": Setting(default=False),
    "mask_token_id": Setting((f"{NESTED}.mask_token_id", "mask_token_id")),
    "is_causal": Setting(("is_causal", f"{NESTED}.causal"), False),
}


def loader(
    *slots: Slot,
    architecture: str,
    settings: dict[str, Setting],
    ignored: tuple[str, ...] = (),
    limits: tuple[Limit, ...] = (),
) -> Loader:
    """vLLM's, for the layout of a method's authors."""
    return Loader(
        architectures=frozenset({architecture}),
        slots=(*SLOTS, *slots),
        unknown="refused",
        unset="silent",
        settings={**SETTINGS, **settings},
        aux_layers={"": {f"{NESTED}.target_layer_ids": 1, "target_layer_ids": 1}},
        ignored=("t2d", *ignored),
        limits=limits,
    )


def of_speculators(kind: str, architecture: str) -> Layout:
    """speculators' folder, from which vLLM takes the target and how many tokens to draft."""

    def config(export: HeadExport) -> dict[str, Any]:
        elsewhere = ("is_causal", "causal", "target_layer_ids")
        own = {name: value for name, value in export.llama[NESTED].items() if name not in elsewhere}
        layers = {
            name: value
            for name, value in export.llama.items()
            if name not in {*own, NESTED, "target_layer_ids"}
        }
        return {
            **speculators_config(export, kind, architecture, layers),
            **own,
            "aux_hidden_state_layer_ids": list(export.head.aux_layers),
            # vLLM takes it for the causality of layers without a window, too.
            "sliding_window_non_causal": not export.head.is_causal,
        }

    return Layout(config, limits=(CAUSAL,), needs_target="speculators' config.json names it")
