"""The plan: each method's row for one target, by formulas over sizes, the assumptions behind the rows, where to start, and all of it as a
person reads it.

Symbols: H hidden size, I MLP width, K draft tokens a round, alpha the acceptance rate, taken as equal at every position; c a draft step
and v a verification of K tokens, both in plain target steps at batch 1. Nothing is measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdistill.errors import UserError
from specdistill.losses.chunked import BLOCK
from specdistill.methods import METHODS
from specdistill.methods.sizes import ASSUMED_DTYPE, TOKENS_PER_SAMPLE, Described, Parts, PlannedDraft, Shape, weights_read
from specdistill.planning.accounting import Account, objective_for, training_step
from specdistill.planning.devices import DEVICES, H100, MATRIX_SHARE, TRAFFIC_SHARE, USABLE
from specdistill.planning.reading import KnownDraft, check_fit, method_of_config
from specdistill.project import RECIPES
from specdistill.report.phrases import times
from specdistill.statistics.theory import expected_acceptance_length, predicted_speedup
from specdistill.targets.cache import is_recurrent

MAX_K = 8
SHOWN_DRAFTS = 8
# What an engine adds to bytes and layers: Llama-3.1-8B with its EAGLE-3 head in vLLM issue 20780 takes 8.35 + 1.016 K ms a round where a
# plain step takes 7.07, so v = 1.18 and c = 0.144, against v = 1 and c = 0.050 of the bytes alone; 0.094 of 32 layers are 3.
VERIFY_OVERHEAD = 0.18
LAYERS_OVERHEAD = 3.0
# float32 weight, gradient and two AdamW moments; Muon keeps one moment of the matrices.
BYTES_PER_TRAINED, BYTES_PER_COPIED = 16, 4
ROWS, LENGTH = 4, 2048  # of a micro-batch
TRAINING_FLOPS = 4e14  # a second, of one H100 or H200 in bfloat16: 40 % of what its tensor cores can
ASSUMPTIONS = (
    "Nothing here is measured. Parameters follow from configs, acceptance from the sources named, speedup S = AL / (v + c·K) from both.",
    "Batch 1, short contexts. c is the larger of a step's shares of weights read and of layers run; draft and target have one dtype.",
    f"S from: the lower acceptance, v + {VERIFY_OVERHEAD} and {LAYERS_OVERHEAD:g} layers' time more a draft step, as fitted "
    "to vLLM issue 20780, and every token of a mixture to experts of its own. S to: the higher acceptance, and only the weights read "
    "take time (v = 1).",
    f"Acceptance is taken as the same at every position; K is the fewest tokens within 1 % of the best, at most {MAX_K}.",
    f"{TOKENS_PER_SAMPLE} training tokens a conversation. Disk: if hidden states were stored. Memory: features computed in each step, "
    f"{ROWS} rows of {LENGTH:,} tokens in a micro-batch, all with a loss; draft and AdamW in float32.",
    "Computed: the training step's own code was run over tensors without content, and its memory, traffic and arithmetic counted. "
    f"A device reaches {MATRIX_SHARE:.0%} of its bfloat16 peak in matrix products and {TRAFFIC_SHARE:.0%} of its bandwidth in all else, "
    f"and gives {USABLE:.0%} of its memory. Roughly: 28H + 4I numbers a layer for each token and step.",
    f"Hours: one pass over the tokens, without generating them, on one {H100.name} where computed, else on one GPU at "
    f"{TRAINING_FLOPS / 1e12:.0f} TFLOP/s; on N GPUs about an N-th.",
)


@dataclass(frozen=True)
class Expected:
    """The best K at one alpha, and what it gives."""

    num_speculative_tokens: int
    acceptance_length: float
    speedup: float


@dataclass(frozen=True)
class Row:
    """One method. Numbers that do not exist or that nobody published are None, and `note` says why.

    draft: the one that was given; None for the one that the recipe would train.
    bytes: in the target's dtype. disk_bytes: the hidden states of all training tokens. training_memory: its parts, in bytes.
    training_hours: of one GPU. training_rates: computed tokens a second on one device of each kind that holds all of this; None where the
    activations are a rough formula's. kv_bytes: KV cache of the draft for a token of context. step_ratio: c, the larger of the step_shares.
    low, high: the two ends of the speedup.
    """

    method: str
    available: bool
    note: str
    recipe: str | None
    draft: str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    parameters: int | None = None
    bytes: int | None = None
    training_tokens: int | None = None
    training_source: str | None = None
    disk_bytes: int | None = None
    training_memory_bytes: int | None = None
    training_memory: dict[str, int] | None = None
    training_hours: float | None = None
    training_rates: dict[str, float] | None = None
    kv_bytes: int | None = None
    step_ratio: float | None = None
    step_shares: dict[str, float] | None = None
    alphas: tuple[float, float] | None = None
    acceptance_source: str | None = None
    low: Expected | None = None
    high: Expected | None = None
    recipe_keys: tuple[str, ...] = ()

    @property
    def middle(self) -> float:
        """Geometric mean of the speedup's two ends; 0 where there are none."""
        return math.sqrt(self.low.speedup * self.high.speedup) if self.low and self.high else 0.0


@dataclass(frozen=True)
class Plan:
    target: dict[str, Any]
    methods: list[Row]
    recommendation: dict[str, str | None]
    warnings: list[str]
    assumptions: Sequence[str] = ASSUMPTIONS


def make_plan(target: Described, draft: Described | None = None, *, computed: bool = False) -> Plan:
    """Plan for a target, and for a draft of it where one is given. Raises UserError for what is no target, or no draft of it.

    computed: run the steps of training over tensors without content, which takes seconds, where a method can (`PlannedDraft.build`).

    Whether a target's logits are scaled or capped changes nothing in a plan: alphas are published ones, sizes and passes the same.
    """
    facts, warnings = _facts(target), []
    if target.stand_in is None:
        warnings.append(
            f"no small {type(target.model).__name__} can be made: whether it is a target shows when its weights are loaded"
        )
    if target.dtype is None:
        warnings.append(f"the config names no dtype: bytes are of {facts['dtype']}")
    if quantised := target.raw.get("quantization_config"):
        counted = f"bytes here are of {facts['dtype']}, and c of a draft in that is higher"
        warnings.append(f"the target's weights are {quantised.get('quant_method', 'quantised')}: {counted}")
    rows = {method: _row(method, target, computed=computed) for method in METHODS}
    if draft is not None:
        method = method_of_config(draft, target)
        warnings += check_fit(draft, target, method)
        rows[method] = row = _row(method, target, draft, computed=computed)
        if row.high and (row.parameters or 0) > target.parameters:
            sizes = f"{draft.name} has {row.parameters:,} parameters, the target {target.parameters:,}"
            warnings.append(f"{sizes}: a predicted speedup of at most {row.high.speedup:.2f}")
    return Plan(facts, list(rows.values()), recommend(list(rows.values()), facts), warnings)


def recommend(rows: Sequence[Row], target: Mapping[str, Any]) -> dict[str, str | None]:
    """The method to start with, why, and the command; `target` as in a plan.

    It is the draft whose speedup has the highest middle, with two exceptions for what costs nothing. Layers that come with the target
    win unless another draft promises more at its low end; look-up wins when no draft promises more than it at the high end.
    """
    ends = {row.method: (row.low.speedup, row.high.speedup) for row in rows if row.low and row.high}
    artifact = {row.method: METHODS[row.method].artifact for row in rows}
    lookup = next(row for row in rows if artifact[row.method] is None)
    drafts = sorted((row for row in rows if row.method in ends and row is not lookup), key=lambda row: -row.middle)
    native = drafts and target["native_mtp"] and artifact[max(drafts, key=lambda row: ends[row.method][0]).method] == "layer"
    if native:
        drafts.sort(key=lambda row: artifact[row.method] != "layer")
    ranked = [*drafts, lookup] if drafts and ends[drafts[0].method][1] > ends[lookup.method][1] else [lookup, *drafts]
    best = ranked[0]
    low, high = ends[best.method]
    if high <= 1:
        return {"method": None, "reason": "no method promises more than plain decoding", "start": None}
    why = "the most of the drafts in the middle of its range, and more at its best than look-up without training"
    if best is lookup:
        why = "it needs no training, and no draft promises more at its best"
    elif native:
        why = "its layer comes with the target, and nothing else promises more at its low end"
    others = ", ".join(f"{row.method} {row.middle:.2f}" for row in ranked[1:])
    reason = f"{why}: {low:.2f} to {high:.2f} times plain decoding, middle {best.middle:.2f}{f' ({others})' if others else ''}"
    return {"method": best.method, "reason": reason, "start": _command(best, target)}


def _command(row: Row, target: Mapping[str, Any]) -> str | None:
    """What measures a draft that is there, or trains the one that the row describes; None where no recipe of the method ships."""
    if row.draft or METHODS[row.method].artifact is None:
        draft = f" draft={row.draft}" if row.draft else ""
        return f"specdistill eval target={target['model']}{draft} method={row.method} suite=… output_dir=…"
    if row.recipe is None:
        return None
    keys = [f"recipe={row.recipe}"]
    if row.recipe.split("/")[0] != target["model"]:
        keys += [f"target.model={target['model']}", "data.source=…", *row.recipe_keys]
        if target["recurrent"]:
            keys.append("data.packing=false")
    return f"specdistill train {' '.join(keys)}"


def recipe_for(method: str, target: str) -> tuple[str | None, dict[str, Any]]:
    """The recipe to start from, and its keys when it is the target's own: else that of small targets, else any of the method."""
    found = {}
    for path in sorted(RECIPES.rglob("*.yaml")):
        keys = yaml.safe_load(path.read_text(encoding="utf-8"))
        if keys.get("method") == method:
            found[path.parent.name] = (path.relative_to(RECIPES).with_suffix("").as_posix(), keys)
    if target in found:
        return found[target]
    name, _ = found.get("small") or next(iter(found.values()), (None, {}))
    return name, {}


def _facts(target: Described) -> dict[str, Any]:
    native, text, dtype = target.native_mtp, target.text, target.dtype or ASSUMED_DTYPE
    return {
        "model": target.name,
        "revision": target.revision,
        "model_type": text.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": target.parameters,
        "bytes": target.parameters * dtype.itemsize,
        "kv_bytes": kv_bytes(text, dtype.itemsize),
        "parameters_read": round(weights_read(target.model)),
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "recurrent": is_recurrent(text),
        "native_mtp": native and {"key": native[0], "layers": native[1]},
    }


def _row(method: str, target: Described, given: Described | None = None, *, computed: bool) -> Row:
    """The method's row, for the draft that is given or else for the one a recipe would train."""
    cost, plan = METHODS[method].cost, METHODS[method].implementation().planned
    recipe, settings = recipe_for(method, target.name)
    if plan is None:
        return Row(method, False, "nothing is known of its cost", recipe)
    try:
        planned: PlannedDraft = plan(target, given, settings.get("draft", {}))
    except UserError as error:
        if given is not None:
            raise
        return Row(method, False, str(error), recipe)
    parts, shape, published = planned.parts, planned.shape, planned.published
    generated = settings.get("data", {}).get("regenerate", {}).get("num_tokens")
    tokens = generated or published.training_tokens
    depth, itemsize = target.text.num_hidden_layers, (target.dtype or ASSUMED_DTYPE).itemsize
    read = weights_read(target.model)
    shares = step_shares(parts, read, depth)
    low = high = None
    if published.alphas:
        verify = [weights_read(target.model, k + 1) / read for k in range(1, MAX_K + 1)]
        low, high = speedup_range(published.alphas, verify, shares, depth, cost.passes)
    memory: dict[str, int] = {}
    disk, hours, cache, rates = 0, 0.0, 0, None
    if shape is not None:
        num_tokens, step = ROWS * LENGTH, _account(method, planned, target) if computed else None
        memory = training_memory(parts, target.parameters * itemsize, shape, planned.vocabulary, cost.unrolled, num_tokens)
        rate = TRAINING_FLOPS / (2 * read + 6 * parts.read * cost.unrolled)
        if step is not None:
            memory["activations"] = step.peak_bytes
            speeds = {device: device.tokens_per_second(step, num_tokens, 2 * read * num_tokens) for device in DEVICES}
            rates = {device.name: speed for device, speed in speeds.items() if device.holds(sum(memory.values()))}
            rate = speeds[H100]
        hours = (tokens or 0) / rate / 3600
        disk = cost.features * target.text.hidden_size * itemsize * (tokens or 0)
        cache = 2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim * itemsize
    return Row(
        method=method,
        available=True,
        note=planned.note,
        recipe=recipe,
        draft=given.name if given else None,
        num_layers=parts.num_layers,
        hidden_size=shape.hidden_size if shape else 0,
        parameters=parts.parameters,
        bytes=parts.parameters * itemsize,
        training_tokens=tokens,
        training_source=f"recipe {recipe}" if generated else published.training_source,
        disk_bytes=None if tokens is None else disk,
        training_memory_bytes=sum(memory.values()),
        training_memory=memory,
        training_hours=None if tokens is None else hours,
        training_rates=rates,
        kv_bytes=cache,
        step_ratio=max(shares.values()),
        step_shares=shares,
        alphas=published.alphas,
        acceptance_source=published.acceptance_source,
        low=low,
        high=high,
        recipe_keys=planned.recipe_keys,
    )


def _account(method: str, planned: PlannedDraft, target: Described) -> Account | None:
    """Of a step that trains the draft; None where no draft can be built without weights."""
    if planned.build is None:
        return None
    objective = objective_for(method, planned.build, METHODS[method].cost.unrolled)
    return training_step(objective, target, rows=ROWS, length=LENGTH)


def step_shares(parts: Parts, target_read: float, target_layers: int) -> dict[str, float]:
    """A draft step over a target step, by weights read and by layers run: the larger is c."""
    return {"weights": parts.read / target_read, "layers": parts.num_layers / target_layers}


def best_k(alpha: float, verify: Sequence[float], c: float, passes: str = "K") -> Expected:
    """S = AL / (v + c·K) at the fewest tokens that come within 1 % of the best, AL = 1 + alpha + … + alpha^K (arXiv 2211.17192).

    verify: v for K = 1, 2, … passes: of the draft in a round, "K", "1" or "0"; c·K stands for as many times c.
    """
    lengths = [expected_acceptance_length(alpha, k) for k in range(1, len(verify) + 1)]
    speedups = [
        float(predicted_speedup(length, verify[k - 1], {"K": c * k, "1": c, "0": 0.0}[passes]))
        for k, length in enumerate(lengths, 1)
    ]
    index = next(index for index, speedup in enumerate(speedups) if speedup >= 0.99 * max(speedups))
    return Expected(index + 1, lengths[index], speedups[index])


def speedup_range(
    alphas: tuple[float, float], verify: Sequence[float], shares: Mapping[str, float], target_layers: int, passes: str = "K"
) -> tuple[Expected, Expected]:
    """The two ends: the lower alpha with c and an engine's overhead, and the higher alpha where weights read are all that counts.

    verify: v for K = 1, 2, … by weights read: 1 for a dense target, more for a mixture whose tokens go to different experts; the higher
    end takes 1. shares: of `step_shares`. passes: of `best_k`. A draft that runs no layers launches none.
    """
    overhead = LAYERS_OVERHEAD / target_layers if shares["layers"] else 0.0
    low = best_k(alphas[0], [v + VERIFY_OVERHEAD for v in verify], max(shares.values()) + overhead, passes)
    return low, best_k(alphas[1], [1.0] * len(verify), shares["weights"], passes)


def kv_bytes(config: Any, itemsize: int) -> int | None:
    """Bytes of a decoder's KV cache for a token of context, at most: a layer with a window keeps fewer tokens. None for other caches."""
    if is_recurrent(config) or getattr(config, "kv_lora_rank", None):
        return None
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers * heads * head_dim * itemsize)


def training_memory(
    parts: Parts, target_bytes: int, shape: Shape, vocabulary: int, num_steps: int, num_tokens: int
) -> dict[str, int]:
    """Device memory of online training by part, roughly: the draft is counted with gradients and AdamW in float32.

    Activations of each token and unrolled step: 28H + 4I numbers a layer in bfloat16, as `specdistill.planning.accounting` counts them in
    EAGLE-3 heads; and the logits of a block of the loss.

    vocabulary: tokens the draft's logits span. num_steps: unrolled steps. num_tokens: in a micro-batch.
    """
    layers = 2 * (28 * shape.hidden_size + 4 * shape.intermediate_size) * parts.num_layers
    activations = num_tokens * num_steps * layers + 2 * BLOCK * vocabulary
    return {
        "target": target_bytes,
        "draft": BYTES_PER_TRAINED * parts.parameters,
        "frozen tables": BYTES_PER_COPIED * parts.copied,
        "activations": activations,
    }


def print_plan(plan: Plan, drafts: Sequence[KnownDraft], not_asked: str | None, console: Console | None = None) -> None:
    """`not_asked` says why the Hub was not asked for drafts."""
    console = console or Console(highlight=False)
    target, advice = plan.target, plan.recommendation
    read = f", {short(target['parameters_read'])} read a step" if target["parameters_read"] < 0.5 * target["parameters"] else ""
    sizes = (
        f": {target['model_type']}, {short(target['parameters'])} parameters{read}, {short(target['bytes'], 'B')} in "
        f"{target['dtype']}, {target['num_layers']} layers of {target['hidden_size']:,}, {target['vocab_size']:,} tokens\n"
    )
    console.print(Text.assemble((f"\n{target['model']}", "bold"), sizes))
    grid = Table(box=box.SIMPLE_HEAD, leading=1, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("method", "the draft", "to train it", "step, c", "accepted, AL", "speedup"):
        grid.add_column(name, no_wrap=True)
    for row in plan.methods:
        grid.add_row(*_columns(row), style="bold green" if row.method == advice["method"] else "" if row.available else "dim")
    console.print(grid)
    shown = [f"{draft.repository} ({draft.method}, {draft.downloads:,} downloads, by its {draft.found_by})" for draft in drafts]
    if len(shown) > SHOWN_DRAFTS:
        shown[SHOWN_DRAFTS:] = [f"{len(shown) - SHOWN_DRAFTS} more"]
    known = ", methods inferred from names and tags; measure one before you train" if drafts else ""
    sections = {
        "What each is": [f"{row.method}: {row.draft + ', ' if row.draft else ''}{row.note}" for row in plan.methods],
        "What each holds": [line for row in plan.methods for line in _held(row, target["kv_bytes"])],
        "Training on one device, computed": [line for row in plan.methods for line in _fits(row)],
        "Acceptance as published": [f"{row.method}: {row.acceptance_source}" for row in plan.methods if row.acceptance_source],
        "Training data": [f"{row.method}: {row.training_source}" for row in plan.methods if row.training_tokens],
        "Assumed": plan.assumptions,
        f"Drafts on the Hub{known}": shown or [not_asked or "none found"],
    }
    for title, lines in sections.items():
        if not lines:
            continue
        console.print(Text(f"\n{title}", style="bold"))
        grid = Table.grid(padding=(0, 1))
        for line in lines:  # a paragraph each, wrapped under itself
            grid.add_row(Text(" ·", style="dim"), Text(line, style="dim"))
        console.print(grid)
    for warning in plan.warnings:
        console.print(Text(f"note: {warning}", style="yellow"))
    console.print(Text.assemble((f"\nRecommended: {advice['method'] or 'none'}", "bold"), f", {advice['reason']}."))
    if advice["method"]:
        console.print(Text(f"  {advice['start'] or 'no recipe of it ships'}", style="bold"), soft_wrap=True)


def short(number: float, unit: str = "") -> str:
    """Three digits and a decimal prefix: 8.03B parameters, 16.1 GB (a byte's giga is G, a number's B)."""
    prefixes = ("", "k", "M", "G", "T", "P") if unit else ("", "k", "M", "B", "T", "P")
    power = 0
    while number >= 999.5 and power < len(prefixes) - 1:
        number, power = number / 1000, power + 1
    digits = f"{number:.0f}" if number >= 99.95 or not power else f"{number:.3g}"
    return f"{digits} {prefixes[power]}{unit}" if unit else f"{digits}{prefixes[power]}"


def _columns(row: Row) -> list[Text | str]:
    """A method's columns, up to three lines each."""
    if not row.available:
        return [row.method, "none, see below", "", "", "", "–"]
    size = "no weights"
    if row.parameters:
        size = f"{short(row.parameters)}, {short(row.bytes or 0, 'B')}\n{row.num_layers} × {row.hidden_size:,} wide"
    train = ["nothing"]
    if METHODS[row.method].artifact is not None:
        tokens = f"{short(row.training_tokens)} tokens, {row.training_hours:.0f} h" if row.training_tokens else "? tokens"
        train = [tokens, f"{short(row.training_memory_bytes or 0, 'B')} device"]
        train += [f"{short(row.disk_bytes, 'B')} disk"] if row.disk_bytes else []
    shares = row.step_shares or {}
    binding = max(shares, key=lambda name: shares[name]) if row.step_ratio else "no model"
    step = f"{row.step_ratio:.3f}\n{binding}"
    accepted, speedup = "not known", "–"
    if row.low and row.high:
        accepted = _between(f"{row.low.acceptance_length:.2f}", f"{row.high.acceptance_length:.2f}")
        accepted += f"\nK = {_between(row.low.num_speculative_tokens, row.high.num_speculative_tokens)}"
        speedup = f"{row.low.speedup:.2f} to\n{times(row.high.speedup)}"
    return [row.method, size, "\n".join(train), step, accepted, speedup]


def _held(row: Row, target_kv: int | None) -> list[str]:
    """What a draft takes of a device's memory, in words: while it is trained, and while it serves."""
    if not row.training_memory:
        return []
    parts = " + ".join(f"{name} {short(size, 'B')}" for name, size in row.training_memory.items() if size)
    beside = f", beside {short(target_kv, 'B')} of the target" if target_kv else ""
    kind = "roughly" if row.training_rates is None else "computed"
    return [f"{row.method}: to train, {kind}, {parts}; KV cache {short(row.kv_bytes or 0, 'B')} a token{beside}"]


def _fits(row: Row) -> list[str]:
    """The devices that hold a draft's training beside the target, each with its tokens a second."""
    if row.training_rates is None:
        return []
    devices = ", ".join(f"{name} ({short(rate)} tokens/s)" for name, rate in row.training_rates.items())
    where = f"fits on {devices}" if devices else "fits on no one device: target.shard=layers spreads the target"
    return [f"{row.method}: {short(row.training_memory_bytes or 0, 'B')}, {where}"]


def _between(low: Any, high: Any) -> str:
    return f"{low}" if low == high else f"{low} to {high}"
