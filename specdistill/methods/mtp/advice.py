"""Answers to `specdistill plan` and `specdistill doctor` about multi-token-prediction layers."""

from collections.abc import Iterator, Set
from functools import partial

from transformers import PreTrainedConfig

from specdistill.evaluation.statistics.theory import alpha_from_acceptance_length
from specdistill.methods import sizes
from specdistill.methods.base import DraftSettings
from specdistill.methods.chains.advice import (
    ChainAdvice,
    Repair,
    find_weight_causes,
    swap_halves,
    swap_weights,
)
from specdistill.methods.mtp.module import MtpDraft
from specdistill.methods.mtp.tensor_names import NATIVE_KEYS, SERVED_TYPES, find_naming
from specdistill.targets.cache_size import CacheSize
from specdistill.targets.frozen import FrozenTarget

PUBLISHED_FIGURES = sizes.MethodFigures(
    (alpha_from_acceptance_length(2.95, 3), alpha_from_acceptance_length(3.23, 3)),
    "AL 2.95 (Qwen3.5-4B, the floor that vllm-project/speculators tests) to 3.23 (Qwen3.5-9B tuned"
    " on GSM8K, same source) at K = 3; DeepSeek-V3's first draft token is accepted at 0.85 to 0.90"
    " (arXiv 2412.19437)",
    5_000 * sizes.TOKENS_PER_SAMPLE,
    "5k conversations tune it to a domain (vllm-project/speculators); it comes trained with the"
    " target",
)
FRESH_LAYER_FIGURES = sizes.MethodFigures(
    None, "none is published for a fresh layer on a frozen target", None, "none is published"
)


class MtpAdvice(ChainAdvice[MtpDraft]):
    """The advice on multi-token-prediction layers."""

    def plan_draft(
        self,
        target: sizes.ModelConfigInfo,
        draft_info: sizes.ModelConfigInfo | None,
        settings: DraftSettings,
    ) -> sizes.PlannedDraft:
        """Return the size and cost of a multi-token-prediction layer, for `specdistill plan`.

        Args:
            target: the target, described by its config.json.
            draft_info: an existing draft, which this method does not need.
            settings: the recipe's settings of the draft, which this method does not need.

        Returns:
            The figures of the layers that come with the target, or of a fresh layer if none do.
        """
        # Build the layer for a tiny target, to check that the target's class can have one.
        target.build_on_tiny_target(MtpDraft)
        text = target.text
        key, num_mtp_layers = target.native_mtp or (None, 1)

        # With hidden size H, each layer has a projection fc [H, 2H], three norms [H] and a decoder
        # layer of the class of the target's last layer. A step runs one such layer, and reads the
        # target's LM head. The checkpoint has neither LM head nor embedding: training holds copies
        # of the target's.
        last = target.weightless.layers[-1]
        decoder_size = sum(parameter.numel() for parameter in last.parameters())
        fuse_size = 2 * text.hidden_size**2 + 3 * text.hidden_size
        table_size = text.vocab_size * text.hidden_size
        parts = sizes.ParameterCounts(
            parameters=num_mtp_layers * (fuse_size + decoder_size),
            read=fuse_size + sizes.count_parameters_read(last, text) + table_size,
            num_layers=1,  # the layers that a step runs
            copied=2 * table_size,
        )

        # A layer that comes with the target is assumed to be served by the engines that its maker
        # names. A fresh layer is served only for some types of targets.
        is_served = key is not None or text.model_type in SERVED_TYPES
        note = f"a fresh layer: the config has no {', no '.join(NATIVE_KEYS)}"
        if key:
            note = f"the target's own ({key}: {num_mtp_layers})"
        if not is_served:
            note += f"; no engine serves such a layer for {text.model_type}"
        warnings: tuple[str, ...] = ()
        native_layers = self.find_native_layers(target.raw, frozenset(), text)
        if key is None and native_layers is not None:
            stated_key, stated_number = native_layers
            warnings = (
                f"its config.json says {stated_key}: {stated_number}, and its files have no such"
                " layer",
            )

        # The cost of training is counted by the hidden size and the width of the MLP (or of an
        # expert) alone, because a class may have no other widths that all its layers share.
        width = getattr(text, "intermediate_size", None) or text.moe_intermediate_size

        # The draft's KV cache is as large as that of the target's last full-attention layer.
        cached_layers = target.cache.layers if target.cache else ()
        full = [layer for layer in cached_layers if layer.size and layer.window is None]
        return sizes.PlannedDraft(
            parts,
            sizes.ModelShape(
                num_layers=1,
                hidden_size=text.hidden_size,
                intermediate_size=width,
                num_attention_heads=0,
                num_key_value_heads=0,
                head_dim=0,
            ),
            text.vocab_size,
            note,
            PUBLISHED_FIGURES if key else FRESH_LAYER_FIGURES,
            cache=CacheSize((full[-1],)) if full else None,
            recipe_keys=("draft.init=null",) if key else (),
            warnings=warnings,
            is_served=is_served,
        )

    def is_described(self, draft: sizes.ModelConfigInfo, target: sizes.ModelConfigInfo) -> bool:
        """Return whether a config.json belongs to a multi-token-prediction draft."""
        return "mtp" in draft.calls_itself

    def find_native_layers(
        self, raw: sizes.RawConfig, names: Set[str], text: PreTrainedConfig
    ) -> tuple[str, int] | None:
        """Find the multi-token-prediction layers that a target's config.json announces.

        Args:
            raw: the content of config.json. transformers adds default values when it reads the
                file, so its config may announce layers that the file does not.
            names: the names of the target's tensors; empty if they are not known.
            text: the target's text config, as transformers reads it.

        Returns:
            The key that announces the layers and their number. None if there is no such key, or if
            the names are known and no tensor belongs to such a layer.
        """
        # If the names are known, one of them must belong to such a layer.
        if names:
            num_layers = getattr(text, "num_hidden_layers", 0)
            if find_naming(text.model_type).find_prefix(names, num_layers) is None:
                return None

        # A multimodal model states the keys in its text config.
        for part in (raw, raw.get("text_config") or {}):
            for key in NATIVE_KEYS:
                if part.get(key):
                    return key, part[key]
        return None

    def find_causes(self, head: MtpDraft, target: FrozenTarget) -> Iterator[Repair]:
        """Yield possible faults of an MTP layer whose files are complete, each with a trial repair.

        `specdistill doctor` applies each repair and checks whether the draft accepts more.
        """
        # The input of `fc` is one vector: the embedding of the next token, and then the hidden
        # state. A file may hold weights of `fc` for the other order.
        yield Repair(
            "the two halves that fc reads, embedding and hidden state, are swapped",
            partial(swap_halves, names=["fc"]),
        )
        yield Repair(
            "the norms of embedding and hidden state are swapped",
            partial(swap_weights, first="token_norm", second="hidden_norm"),
        )
        yield from find_weight_causes(head)
