"""Multi-token prediction as a row of the table: how a layer is recognized, created, trained, examined, planned and exported."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from specdistill.engines.engine import Layout
from specdistill.methods import sizes
from specdistill.methods.chains import repairs
from specdistill.methods.chains.method import head_method
from specdistill.methods.mtp import checkpoint
from specdistill.methods.mtp.module import MtpDraft
from specdistill.methods.mtp.tensor_names import NATIVE_KEYS, naming_of
from specdistill.statistics.theory import alpha_from_acceptance_length
from specdistill.targets.cache_size import CacheSize
from specdistill.targets.frozen import FrozenTarget

PUBLISHED = sizes.PublishedFigures(
    (alpha_from_acceptance_length(2.95, 3), alpha_from_acceptance_length(3.23, 3)),
    "AL 2.95 (Qwen3.5-4B, the floor that vllm-project/speculators tests) to 3.23 (Qwen3.5-9B tuned on GSM8K, same source) at "
    "K = 3; DeepSeek-V3's first draft token is accepted at 0.85 to 0.90 (arXiv 2412.19437)",
    5_000 * sizes.TOKENS_PER_SAMPLE,
    "5k conversations tune it to a domain (vllm-project/speculators); it comes trained with the target",
)
FRESH = sizes.PublishedFigures(
    None, "none is published for a fresh layer on a frozen target", None, "none is published"
)


def native_layers(raw: Mapping[str, Any], names: Set[str], text: Any) -> tuple[str, int] | None:
    """What config.json states, unless the names of tensors belie it; what transformers makes of the file does not count."""
    if (
        names
        and naming_of(text.model_type).find_prefix(names, getattr(text, "num_hidden_layers", 0))
        is None
    ):
        return None
    parts = (raw, raw.get("text_config") or {})
    return next(((key, part[key]) for part in parts for key in NATIVE_KEYS if part.get(key)), None)


def likely_causes(head: MtpDraft, target: FrozenTarget) -> Iterator[repairs.Repair]:
    """What may be wrong with a multi-token-prediction layer whose files are right."""
    yield (
        "the two halves that fc reads, embedding and hidden state, are swapped",
        repairs.swap_halves_of,
        "fc",
    )
    yield (
        "the norms of embedding and hidden state are swapped",
        repairs.swap,
        "token_norm",
        "hidden_norm",
    )
    yield from repairs.of_layers(head)


def planned(
    target: sizes.Described, given: sizes.Described | None, settings: dict[str, Any]
) -> sizes.PlannedDraft:
    """The layers that come with the target, or a fresh one of their kind."""
    target.tried(MtpDraft)
    last = target.weightless.layers[-1]
    key, num_layers = target.native_mtp or (None, 1)
    own = sum(parameter.numel() for parameter in last.parameters())
    read = sizes.parameters_read(last, target.text)
    # Each layer is fc [H, 2H], three norms and a decoder layer; a step runs one of them, and embedding and head are the target's.
    fuse, table = (
        2 * target.text.hidden_size**2 + 3 * target.text.hidden_size,
        target.text.vocab_size * target.text.hidden_size,
    )
    parts = sizes.ParameterCounts(
        num_layers * (fuse + own), fuse + read + table, 1, copied=2 * table
    )
    note = (
        f"the target's own ({key}: {num_layers})"
        if key
        else f"a fresh layer: the config has no {', no '.join(NATIVE_KEYS)}"
    )
    shape, published = (
        replace(sizes.shape_of(target.text), num_layers=1),
        PUBLISHED if key else FRESH,
    )
    keys = ("draft.init=null",) if key else ()
    warnings: tuple[str, ...] = ()
    if key is None and (stated := native_layers(target.raw, frozenset(), target.text)):
        warnings = (
            f"its config.json says {stated[0]}: {stated[1]}, and its files have no such layer",
        )
    full = (
        [layer for layer in target.cache.layers if layer.size and layer.window is None]
        if target.cache
        else []
    )
    cache = (
        CacheSize((full[-1],)) if full else None
    )  # of one layer as the target's last that sees all tokens
    return sizes.PlannedDraft(
        parts, shape, target.text.vocab_size, note, published, cache, keys, warnings=warnings
    )


def check_served(engine: str, layout: Layout, draft: MtpDraft, target: FrozenTarget) -> None:
    if target.files:
        checkpoint.check_target(engine, target.files)


METHOD = head_method(
    checkpoint.load_mtp,
    likely_causes,
    is_named=lambda config, names: (
        bool(names) and config.get("architectures") == [checkpoint.ARCHITECTURE]
    ),
    create=lambda recipe, target, rows: checkpoint.build_mtp(
        target, init=recipe.draft.init, seed=recipe.seed
    ),
    save=lambda draft, target, folder: checkpoint.save_mtp(draft, folder),
    check=checkpoint.check_mtp,
    check_native=checkpoint.check_native,
    planned=planned,
    is_described=lambda draft, target: "mtp" in draft.calls_itself,
    native_layers=native_layers,
    check_served=check_served,
    export=checkpoint.export,
)
