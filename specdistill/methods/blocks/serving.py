"""How block drafters are given to engines: layouts of exports, and vLLM's loader. No torch.

The facts were read in vLLM 0.32's qwen3_dflash.py and configs/speculators, in the converter of
llama-cpp-python 0.3.36, and in SGLang's dflash.py. What SGLang's DSpark accepts is not known here.
So for SGLang only DFlash's layers and the plain correction are written.

vLLM runs the anchor's slot and as many slots as it drafts tokens. So slots that see each other are
served as they were trained only at the largest K. vLLM scales the embeddings that a draft borrows
from Gemma 4, as the target does (vllm-project/vllm pull request 41703).
"""

from specdistill.serving.engines.engine import HeadExport, Layout
from specdistill.serving.engines.loader import (
    LLAMA_SETTINGS,
    Limit,
    Loader,
    Setting,
    Slot,
    list_layer_slots,
)
from specdistill.serving.engines.vllm import build_speculators_config

# What some engines cannot express: (what the draft has, a test for it, what it must have instead).
PRUNED_VOCABULARY_LIMIT = Limit(
    "a pruned vocabulary",
    lambda draft: draft.draft_vocab_size < draft.vocab_size,
    "the target's vocabulary",
)
CORRECTION = Limit(
    "a correction that reads more than the token before (markov_head_type)",
    lambda draft: draft.markov_head_type != "vanilla",
    "markov_head_type vanilla",
)
SCALED_EMBEDDING = Limit(
    "a scaled embedding",
    lambda draft: draft.embedding_scale != 1,
    "a target that does not scale its embedding, or method=eagle3",
)
CAUSAL = Limit(
    "causal slots and no window",
    lambda draft: draft.is_causal and draft.sliding_window is None,
    "slots that see all of their block, because causal slots need a window in speculators",
)
CAUSALITY = Limit(
    "causal slots without a window, or a window without causal slots",
    lambda draft: draft.is_causal != (draft.sliding_window is not None),
    "both of them or neither, because SGLang makes slots causal if there is a window",
)
# The tensors that vLLM loads for a block drafter. All layers have the same ones: Llama's, and norms
# of query and key heads.
SLOTS = (
    Slot("fc.weight", "H A*D"),
    Slot("hidden_norm.weight", "H"),
    Slot("norm.weight", "H"),
    *list_layer_slots("layers.0", "H", "input_layernorm"),
    Slot("layers.0.self_attn.q_norm.weight", "E"),
    Slot("layers.0.self_attn.k_norm.weight", "E"),
    *list_layer_slots("layers.{i}", "H", "input_layernorm"),
    Slot("layers.{i}.self_attn.q_norm.weight", "E"),
    Slot("layers.{i}.self_attn.k_norm.weight", "E"),
    Slot("lm_head.weight", "W H", source="shared"),
    Slot("embed_tokens.weight", "V H", source="shared"),
    Slot("d2t", "W", "pruned"),
)
NESTED_CONFIG_KEY = "dflash_config"
# The keys of config.json that vLLM reads, in the order in which it looks for them.
SETTINGS = {
    **LLAMA_SETTINGS,
    "draft_vocab_size": Setting(("draft_vocab_size", "vocab_size")),
    "target_hidden_size": Setting(("target_hidden_size", "hidden_size")),
    "num_aux_hidden_states": Setting(
        (f"{NESTED_CONFIG_KEY}.target_layer_ids#", "target_layer_ids#"), 5
    ),
    "fc_norm": Setting(default=False),
    "norm_before_fc": Setting(default=False),
    "mask_token_id": Setting((f"{NESTED_CONFIG_KEY}.mask_token_id", "mask_token_id")),
    "is_causal": Setting(("is_causal", f"{NESTED_CONFIG_KEY}.causal"), False),
}


def build_vllm_loader(
    *slots: Slot,
    architecture: str,
    settings: dict[str, Setting],
    ignored: tuple[str, ...] = (),
    limits: tuple[Limit, ...] = (),
) -> Loader:
    """Describe how vLLM loads a block drafter in the layout of the method's authors.

    Args:
        *slots: tensors that drafts of this method have in addition to `SLOTS`. A `Slot` is a
            parameter of vLLM's model here, not a position of a block.
        architecture: the name in config.json that leads to this loader.
        settings: keys of config.json that vLLM reads for this method in addition to `SETTINGS`.
        ignored: vLLM skips tensors whose names contain one of these texts or `t2d`.
        limits: features of drafts that vLLM does not support.
    """
    return Loader(
        architectures=frozenset({architecture}),
        slots=(*SLOTS, *slots),
        # vLLM stops at a tensor that it does not know, but does not report one that the file lacks.
        unknown="refused",
        unset="silent",
        settings={**SETTINGS, **settings},
        # All versions of vLLM ("") look under two keys of config.json for the target layers that
        # the draft reads. The numbers there are one less than in this project, so 1 is added.
        aux_layers={"": {f"{NESTED_CONFIG_KEY}.target_layer_ids": 1, "target_layer_ids": 1}},
        ignored=("t2d", *ignored),
        limits=limits,
    )


def build_speculators_layout(kind: str, architecture: str) -> Layout:
    """Describe the folder of a block drafter in the layout of the speculators library.

    Its config.json is converted from that of the method's authors, who use another layout. The new
    file also names the target and the number of draft tokens, which vLLM reads from it.

    Args:
        kind: the `speculators_model_type` of the method.
        architecture: the name of the architecture in config.json.
    """

    def config(export: HeadExport) -> dict[str, object]:
        """Return the config.json, converted from that of the method's authors.

        The keys of the method are at the top level. The keys of the layers are in a section.
        """
        # For a block drafter, `export.llama` is the config.json in the layout of the method's
        # authors, as `write_block_config` returns it.
        authors_config = export.llama

        # Take the method's keys from the authors' section `dflash_config`. Leave out causality and
        # the target layers that the draft reads: at the top level, speculators has other keys for
        # these, which are added below.
        method_keys = {
            name: value
            for name, value in authors_config[NESTED_CONFIG_KEY].items()
            if name not in ("is_causal", "causal", "target_layer_ids")
        }

        # The section of the layers gets the other keys at the top level of the authors' file. One
        # of them states causality: `is_causal`. It is kept here, because `read_block_config` reads
        # it in this section when the draft is loaded again.
        layers = {
            name: value
            for name, value in authors_config.items()
            if name not in {*method_keys, NESTED_CONFIG_KEY, "target_layer_ids"}
        }
        return {
            **build_speculators_config(export, kind, architecture, layers),
            **method_keys,
            "aux_hidden_state_layer_ids": list(export.head.aux_layers),
            # In spite of its name, vLLM reads this key for layers without a window, too.
            "sliding_window_non_causal": not export.head.is_causal,
        }

    # `needs_target` ends the error for a missing target: "expected the draft's target: …".
    return Layout(config, limits=(CAUSAL,), needs_target="speculators' config.json names it")
