"""Give packed rows to a model of transformers so that no document sees another.

Several ways are tried on a few tokens, and the first one that keeps documents apart is used.

The default attention of most classes, `sdpa`, is kept within documents by a mask of T x T elements.
The first way replaces it by `attend_packed`, which gets the document boundaries instead of a mask.
Not every class supports this. The class has to get its attention from transformers by name and pass
its keywords on to this attention. It may use only causality, a sliding window and a scale. For the
other classes, the attention of the class itself is used.

Shapes: B rows, T positions, S = B T, N query heads, G key/value heads, d key head size, e value
head size, D documents.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_masks_for_generate
from transformers.utils.generic import TransformersKwargs

from specdistill.targets.anatomy import (
    CLASS_ERRORS,
    NUM_CACHED,
    NUM_TOKENS,
    find_backbone,
    reads_alike,
)
from specdistill.targets.cache import create_empty_cache
from specdistill.targets.packed_attention import attend_cached, attend_packed

NAME = "specdistill_packed"  # the name under which transformers finds the attention
# Keywords that a class may pass on to its attention, and that change nothing there.
KEYWORDS_WITHOUT_EFFECT = {*TransformersKwargs.__annotations__, "use_cache"}

# The inputs of a backbone: input_ids [B, T], position_ids [B, T], and what a packing method adds.
BackboneInputs = dict[str, Any]


class Documents(NamedTuple):
    """The places of the documents in a batch whose rows are concatenated.

    Attributes:
        cumulative_lengths: int32 [D + 1], where each document begins, then S.
        longest: tokens of the longest document.
    """

    cumulative_lengths: Tensor
    longest: int

    @classmethod
    def from_positions(cls, position_ids_BT: Tensor) -> "Documents":
        """Find the documents in rows [B, T]: position ids start again at 0 in each document.

        The host waits for the device here. Where that would be too slow,
        `specdistill.data.rows.packing` finds the documents on the host instead.
        """
        # A document begins at each position 0, and at the beginning of each row. The padding adds
        # the end of the last document, which is the number of all tokens.
        begins_BT = position_ids_BT == 0
        begins_BT[:, 0] = True
        bounds = F.pad(begins_BT.flatten().nonzero().flatten(), (0, 1), value=begins_BT.numel())
        return cls(bounds.int(), int(bounds.diff().max()))


PassOutput = TypeVar("PassOutput")
Pass = Callable[[BackboneInputs], PassOutput]


class PackingMethod(Protocol):
    """A way to give packed rows to a model. It returns what the pass returns."""

    def __call__(
        self,
        model: PreTrainedModel,
        inputs: BackboneInputs,
        documents: Documents,
        run: Pass[PassOutput],
        /,
    ) -> PassOutput:
        """Run the model over packed rows."""


def run_by_lengths(
    model: PreTrainedModel, inputs: BackboneInputs, documents: Documents, run: Pass[PassOutput]
) -> PassOutput:
    """Run a pass of a model in which `attend` replaces `sdpa`, its default attention.

    `attend` gets the places of the documents, so it needs no mask.

    Args:
        model: the model.
        inputs: the inputs of the pass.
        documents: the places of the documents in the batch.
        run: runs the pass on inputs, and returns its result.

    Raises:
        LookupError: for a model without `sdpa`.
    """
    with replace_attention(find_sdpa_configs(model)):
        return run({**inputs, **build_length_inputs(inputs["input_ids"], documents)})


def build_length_inputs(input_ids_BT: Tensor, documents: Documents) -> BackboneInputs:
    """Return the inputs of a model that tell `attend`, its attention, where documents are.

    The mask of ones has no effect on the attention. It keeps transformers from searching for
    documents itself, for which the host would have to wait for the device.
    """
    return {
        "attention_mask": torch.ones_like(input_ids_BT),
        "cu_seq_lens_q": documents.cumulative_lengths,
        "max_length_q": documents.longest,
    }


def run_unchanged(
    _model: PreTrainedModel, inputs: BackboneInputs, _documents: Documents, run: Pass[PassOutput]
) -> PassOutput:
    """Run a pass on the inputs as they are, without help for the model.

    Most model classes tell documents apart by position ids that start again at 0.
    """
    return run(inputs)


def run_in_one_row(
    _model: PreTrainedModel, inputs: BackboneInputs, _documents: Documents, run: Pass[PassOutput]
) -> PassOutput:
    """Run a pass on all rows concatenated to one row.

    With flash attention, transformers tells documents apart only in a batch of one row, for which
    it uses the kernel for variable lengths.
    """
    return run({name: tensor.flatten().unsqueeze(0) for name, tensor in inputs.items()})


def run_with_masks(
    model: PreTrainedModel, inputs: BackboneInputs, _documents: Documents, run: Pass[PassOutput]
) -> PassOutput:
    """Run a pass with attention masks that are made here from the position ids.

    Some model classes (gpt-oss) do not pass their position ids to the function of transformers that
    makes masks. But they accept masks from the caller.
    """
    # `create_masks_for_generate` takes embeddings, but reads only their shape, dtype and device. So
    # these have width 0.
    rows_BT0 = torch.empty(
        *inputs["input_ids"].shape, 0, dtype=model.dtype, device=inputs["input_ids"].device
    )
    masks = create_masks_for_generate(
        model.config.get_text_config(decoder=True),
        rows_BT0,
        attention_mask=None,
        past_key_values=None,
        position_ids=inputs["position_ids"],
    )
    return run({**inputs, "attention_mask": masks})


@torch.no_grad()
def choose_packing(model: PreTrainedModel) -> PackingMethod | None:
    """Find a way to give packed rows to a model so that their documents never see each other.

    Each way is tried on a few tokens.

    Returns:
        The first way that works. None if no way works, as for recurrent layers, whose state
        continues from one document into the next, or for ALiBi, which goes on counting positions
        where a new document begins.
    """
    # Make two rows. Each row packs two documents of half its tokens, so its position ids count up
    # twice from 0. They are dense, not an expanded view, because those of real batches are.
    backbone = find_backbone(model)
    document_length = NUM_TOKENS // 2
    ids_BT = torch.arange(2 * NUM_TOKENS, device=model.device).view(2, NUM_TOKENS)
    positions_BT = torch.arange(document_length, device=model.device).repeat(2, 2)
    inputs = {"input_ids": ids_BT, "position_ids": positions_BT}
    documents = Documents.from_positions(inputs["position_ids"])

    def run(backbone_inputs: BackboneInputs) -> Tensor:
        """Return the last hidden states of a pass."""
        last_hidden: Tensor = backbone(**backbone_inputs, use_cache=False).last_hidden_state
        return last_hidden

    # The second document of each row must have the hidden states that it has without the first
    # document. Autocast is off, because its rounding would look like one document seeing another.
    # `run_in_one_row` returns one long row, so all hidden states are viewed as two rows.
    with torch.autocast(model.device.type, enabled=False):
        alone_hidden = run({"input_ids": ids_BT[:, document_length:]})
        for method in (run_by_lengths, run_unchanged, run_in_one_row, run_with_masks):
            try:
                packed_hidden = method(model, inputs, documents, run).view(2, NUM_TOKENS, -1)
            except CLASS_ERRORS:  # The class does not accept rows in this way.
                continue
            if reads_alike(packed_hidden[:, document_length:], alone_hidden):
                return method
    return None


@dataclass(frozen=True)
class CausalMask:
    """A description of a causal mask, which `attend` gets in place of a mask tensor.

    Attributes:
        window: the most tokens of its document that a token sees, itself included; None for all up
            to itself.
    """

    window: int | None


def capture_mask(
    *, allow_is_causal_skip: bool, local_size: int | None = None, **_: object
) -> CausalMask:
    """Describe the mask that a model class asks transformers for, instead of building it.

    transformers calls this in place of its function that builds masks, and passes the description
    to `attend` as the attention mask. `attend` uses no mask. It compares the description with the
    attention that it computes, and raises if they differ.

    Args:
        allow_is_causal_skip: whether the class asks for plain causality, with or without a window.
        local_size: the tokens of the sliding window; None without one.

    Raises:
        NotImplementedError: if the class asks for more than causality and a window.
    """
    if not allow_is_causal_skip:
        raise NotImplementedError("a mask of its own")
    return CausalMask(local_size)


def attend(
    module: nn.Module,
    query_BNTd: Tensor,
    key_BGTd: Tensor,
    value_BGTe: Tensor,
    attention_mask: object,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute causal attention within documents. A model class of transformers calls this.

    The class describes its attention twice: by a mask, which `sdpa` would use, and by keywords,
    which flash attention would use. This function refuses a class if the two give different
    windows. An example is attention in chunks: the mask has a chunk size, and the keywords have no
    window.

    Args:
        module: the attention module that calls this.
        query_BNTd: [B, N, T, d]: B rows, N query heads, T positions, heads of size d.
        key_BGTd: [B, G, T, d], with G key/value heads; cached positions come before new ones.
        value_BGTe: [B, G, T, e], with values of size e for the same positions.
        attention_mask: the `CausalMask` that `capture_mask` returned.
        cu_seq_lens_q: where each document begins in the concatenated rows, then the end. None if
            the queries are the last positions of one sequence.
        max_length_q: tokens of the longest document.
        scaling: factor of the scores; None for d^-1/2.
        sliding_window: tokens that a token sees, itself included; None for all.
        is_causal: whether a token sees only those before it; None for the module's own setting.
        dropout: only 0 is supported.
        **options: other keywords, which must be None or without an effect.

    Returns:
        The output [B, T, N, e], and None in place of attention weights.

    Raises:
        NotImplementedError: for attention that is not computed here.
    """
    # Refuse everything but causality, a sliding window and a scale. Without document boundaries
    # there may be only one sequence, and with them all positions must be new.
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    used_options = {name for name, value in options.items() if value is not None}
    unknown_options = used_options - KEYWORDS_WITHOUT_EFFECT
    if cu_seq_lens_q is None:
        has_supported_shape = len(query_BNTd) == 1
    else:
        has_supported_shape = key_BGTd.shape[2] == query_BNTd.shape[2]
    has_supported_mask = is_causal and attention_mask == CausalMask(sliding_window)
    if unknown_options or dropout or not has_supported_shape or not has_supported_mask:
        raise NotImplementedError(
            f"more than causal attention: {attention_mask}, {sliding_window},"
            f" {sorted(unknown_options)}"
        )

    # Under autocast, float32 rotary tables widen queries and keys. Values keep the dtype that the
    # projections compute in.
    query, key, value = (x.to(value_BGTe.dtype) for x in (query_BNTd, key_BGTd, value_BGTe))
    if cu_seq_lens_q is None:
        return attend_cached(query, key, value, sliding_window, scaling), None

    # Concatenate the rows to [S, heads, size], attend within documents, and separate them again.
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    output_SNe, _ = attend_packed(*flat, cu_seq_lens_q, max_length_q, sliding_window, scaling)
    return output_SNe.unflatten(0, (query_BNTd.shape[0], -1)), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, capture_mask)


@contextmanager
def replace_attention(configs: Sequence[PreTrainedConfig]) -> Iterator[None]:
    """Make the models of these configs use `attend` instead of `sdpa` while the block runs."""
    # The configs had `sdpa` before (see `find_sdpa_configs`).
    try:
        for config in configs:
            # A dictionary sets only the config's own attention, not that of configs within it.
            config._attn_implementation = {"": NAME}
        yield
    finally:
        for config in configs:
            config._attn_implementation = {"": "sdpa"}


def find_sdpa_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configs of a model and of its parts that choose `sdpa` as attention.

    Raises:
        LookupError: if no config does.
    """
    # Modules share configs, so each is kept once. Configs are not hashable, so the key is the id.
    configs = (getattr(part, "config", None) for part in model.modules())
    part_configs = {
        id(config): config
        for config in configs
        if isinstance(config, PreTrainedConfig) and config._attn_implementation == "sdpa"
    }
    if not part_configs:
        raise LookupError("no sdpa")
    return list(part_configs.values())


def find_length_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configs that must name `attend` as attention while a model trains on packed rows.

    A packed row holds several documents, and no token may see another document. The attention
    function `attend` ensures this, because it gets the lengths of the documents. A model uses the
    attention function that its config names. A part of a model may have a config of its own.

    Returns:
        The configs, which name `sdpa` now; the caller changes them by `replace_attention`. Empty if
        the model cannot train with `attend`: because it has attention dropout, which `attend` does
        not support, or because `attend` does not keep documents apart in this model.
    """
    if getattr(model.config, "attention_dropout", 0):
        return []
    # `choose_packing` tries several ways to keep documents apart, and returns the first that works.
    # The way that it tries first, `run_by_lengths`, is the one that uses `attend`.
    uses_attend = choose_packing(model) is run_by_lengths
    return find_sdpa_configs(model) if uses_attend else []


@torch.no_grad()
def find_maskless_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configs that must name `attend` as attention in passes that continue a KV cache.

    A model uses the attention function that its config names. A part of a model may have a config
    of its own. The function `attend` computes causal attention without a mask tensor. It supports
    only causality, a sliding window and a scale. So the model is run on a few tokens, once with
    `attend` and once with its own attention, and the hidden states are compared.

    Returns:
        The configs, which name `sdpa` now; the caller changes them by `replace_attention`. Empty if
        no config names `sdpa`, or if the run with `attend` fails or gives other hidden states.
    """
    backbone = find_backbone(model)
    ids_1T = torch.arange(NUM_TOKENS, device=model.device).unsqueeze(0)

    def run() -> Tensor:
        """Return the last hidden states of a second pass, which continues the cache of a first."""
        cache = create_empty_cache(model.config.get_text_config(decoder=True))
        for part_1T in ids_1T.split(NUM_CACHED, dim=1):
            hidden: Tensor = backbone(
                input_ids=part_1T, past_key_values=cache, use_cache=True
            ).last_hidden_state
        return hidden

    # Run the model with `attend`, and then with its own attention.
    try:
        configs = find_sdpa_configs(model)
        with replace_attention(configs):
            hidden_without_mask = run()
    except CLASS_ERRORS:
        return []
    return configs if reads_alike(hidden_without_mask, run()) else []
