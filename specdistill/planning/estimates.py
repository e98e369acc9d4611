"""A method's row of the plan: what its draft holds, what training it takes, and what it promises where the target serves.

Symbols: H hidden size, I MLP width, K draft tokens per round, B sequences, alpha the acceptance rate, taken as equal at every
position; c a draft step and v a verification of K tokens, both in plain target steps. Nothing is measured.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

from specdistill.errors import UserError
from specdistill.files.documents import read_yaml
from specdistill.losses.chunked import BLOCK
from specdistill.methods import METHODS, sizes
from specdistill.methods.sizes import Described, PlannedDraft, weights_read
from specdistill.planning.accounting import H100, MATRIX_SHARE, TRAFFIC_SHARE, training_step
from specdistill.planning.budget import (
    ENGINE_BYTES,
    PASS_TOKENS,
    USABLE,
    Budget,
    budget,
    kv_itemsize,
    torch_dtype,
)
from specdistill.planning.command import ServingOptions
from specdistill.project import LAUNCHES, RECIPES
from specdistill.statistics.theory import expected_acceptance_length, predicted_speedup
from specdistill.targets.cache_size import CacheSize

MAX_K = {
    "K": 8,
    "1": 15,
    "0": 8,
}  # by the draft's passes per round; of a block of 16 the first token is given
# What an engine adds to bytes and layers: Llama-3.1-8B with its EAGLE-3 head in vLLM issue 20780 takes 8.35 + 1.016 K ms per round where a
# plain step takes 7.07, so v = 1.18 and c = 0.144, against v = 1 and c = 0.050 of the bytes alone; 0.094 of 32 layers are 3.
VERIFY_OVERHEAD = 0.18
LAYERS_OVERHEAD = 3.0
# Operations that take as long as a byte does: an H100 computes on 184 sequences in the time in which it reads the weights.
FLOPS_PER_BYTE = MATRIX_SHARE * H100.flops / (TRAFFIC_SHARE * H100.bandwidth)
# float32 weight, gradient and two AdamW moments; Muon keeps one moment of the matrices.
BYTES_PER_TRAINED, BYTES_PER_COPIED = 16, 4
TRAINING_FLOPS = (
    4e14  # a second, of one H100 or H200 in bfloat16: 40 % of what its tensor cores can
)
BATCH_SIZE, MAX_LENGTH = 4, 2048
GPUS_PER_MACHINE = 8
LAUNCH = re.compile(
    r"accelerate_configs/(\w+)\.yaml(?: --num_processes (\d+))?"
)  # in a recipe's header
SMALL = 100_000_000  # parameters of the largest target that the recipes of small ones are meant for as they stand


ASSUMPTIONS = (
    "Parameters follow from configs; acceptance is published, by the sources named; the speedup is S = AL / (v + c·K).",
    "c is the larger of a draft step's shares of what the target reads (weights, KV cache) and of its layers. A pass takes as long as its "
    f"reads, or as its arithmetic where that takes longer, at {FLOPS_PER_BYTE:.0f} operations per byte ({H100.name}). Quantized weights "
    "count as they are stored, where an index says how large they are.",
    f"Low end of S: the lower acceptance, v + {VERIFY_OVERHEAD}, {LAYERS_OVERHEAD:g} layers' time more per draft step (fitted to vLLM "
    "issue 20780), each token of a mixture sent to experts of its own. High end: the higher acceptance; only reads and arithmetic count.",
    f"Acceptance is the same at every position; K is the fewest tokens within 1 % of the best, at most {MAX_K['K']} of a draft that takes "
    "a step for each.",
    f"Serving: {ENGINE_BYTES / 2**30:g} GiB for the engine and activations of {PASS_TOKENS:,} prompt tokens per pass. Latent attention "
    "keeps its latent, a window its tokens, a recurrent layer its state; devices share heads, and each has at least one.",
    f"{sizes.TOKENS_PER_SAMPLE} training tokens per conversation; features computed in each step, all tokens with a loss; draft and AdamW "
    "in float32. The training step's own code runs over tensors without content, which counts its memory, traffic and arithmetic, where a "
    f"method can; roughly 28H + 4I numbers per layer, token and step elsewhere. {MATRIX_SHARE:.0%} of a device's bfloat16 peak in matrix "
    f"products, {TRAFFIC_SHARE:.0%} of its bandwidth in all else, and {USABLE:.0%} of its memory can be used.",
    f"GPU hours are of an {H100.name} (of a GPU at {TRAINING_FLOPS / 1e12:.0f} TFLOP/s where rough): all steps of the target's own recipe, "
    "else one pass over the tokens; generating them is not counted.",
)


@dataclass(frozen=True)
class ExpectedSpeedup:
    """The best K at one alpha, and what it gives."""

    num_speculative_tokens: int
    acceptance_length: float
    speedup: float


@dataclass(frozen=True)
class Launch:
    """Of training: a configuration of accelerate_configs/, whether the processes share the target's layers, and what each of them holds."""

    configuration: str
    num_processes: int
    is_sharded: bool
    device_bytes: int


@dataclass(frozen=True)
class PlanRow:
    """One method. Numbers that do not exist or that nobody published are None, and `note` says why.

    draft: the one that was given; None for the one that the recipe would train. bytes: in the draft's dtype. training_tokens: distinct
    ones; trained_tokens: of all steps of the target's own recipe, else of one pass. micro_batch: rows, tokens of a row. disk_bytes: the
    hidden states of all training tokens. training_memory: its parts on one device, in bytes. training_hours: of one GPU.
    training_launch: the recipe's, else by `_launch`, None where a machine does not hold it. kv_bytes: the draft's for a token of context.
    step_shares: a draft step over a target step, by what they read (weights and KV cache) and by layers run; step_ratio: c, the larger.
    low, high: the two ends of the speedup, where and as the target is to serve. serving: what each device holds then. warnings: what
    contradicts the target's config.json.
    """

    method: str
    available: bool
    note: str
    recipe: str | None
    draft: str | None = None
    num_layers: int | None = None
    parameters: int | None = None
    bytes: int | None = None
    training_tokens: int | None = None
    training_source: str | None = None
    trained_tokens: int | None = None
    micro_batch: tuple[int, int] | None = None
    disk_bytes: int | None = None
    training_memory: dict[str, int] | None = None
    training_hours: float | None = None
    training_launch: Launch | None = None
    kv_bytes: int | None = None
    step_ratio: float | None = None
    step_shares: dict[str, float] | None = None
    alphas: tuple[float, float] | None = None
    acceptance_source: str | None = None
    low: ExpectedSpeedup | None = None
    high: ExpectedSpeedup | None = None
    serving: Budget | None = None
    recipe_keys: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def middle(self) -> float:
        """Geometric mean of the speedup's two ends; 0 where there are none."""
        return math.sqrt(self.low.speedup * self.high.speedup) if self.low and self.high else 0.0


@dataclass(frozen=True)
class Scenario:
    """What is planned for, and passes of target and draft there, by the bytes that they read, or would in the time that their arithmetic
    takes where that is longer.

    batch_size, max_length: rows of a micro-batch, tokens of a row; None: the recipe's, else BATCH_SIZE, MAX_LENGTH. computed: run the steps
    of training over tensors without content, which takes seconds, where a method can (`PlannedDraft.build`).
    """

    target: Described
    serving: ServingOptions
    batch_size: int | None = None
    max_length: int | None = None
    computed: bool = False

    @cached_property
    def plain(self) -> float:
        """A step of the target without a draft."""
        return self._target(1, spread=True)

    def verified(self, most: int, *, spread: bool) -> list[float]:
        """v for K = 1 to `most`. spread: every token of a mixture is sent to experts of its own; else those of a sequence share theirs."""
        return [self._target(k + 1, spread=spread) / self.plain for k in range(1, most + 1)]

    def _target(self, num_tokens: int, *, spread: bool) -> float:
        """Over this many tokens of each sequence."""
        read = self._read(self.serving.batch_size * (num_tokens if spread else 1))
        return self.pass_bytes(read, self.target.cache, self._parameters, num_tokens)

    @cached_property
    def _parameters(self) -> float:
        return weights_read(self.target.model)

    @cached_property
    def _read(self) -> Callable[[int], float]:
        """Bytes of the target's weights that a pass over this many tokens reads."""
        return cache(
            partial(
                weights_read,
                self.target.model,
                weigh=self.target.weigh(torch_dtype(self.serving.dtype)),
            )
        )

    def pass_bytes(
        self, weights: float, cache: CacheSize | None, parameters: float, num_tokens: int
    ) -> float:
        """A pass over this many tokens of each sequence. weights: bytes that it reads. parameters: that a token is multiplied with."""
        context, batch_size = self.serving.context, self.serving.batch_size
        assert context is not None
        held = (
            cache.num_bytes(context, batch_size, kv_itemsize(self.serving, self.target))
            if cache
            else 0
        )
        return max(weights + held, 2 * parameters * batch_size * num_tokens / FLOPS_PER_BYTE)


def row_of(method: str, given: Described | None, scenario: Scenario) -> PlanRow:
    """The method's row, for the draft that is given or else for the one a recipe would train."""
    target = scenario.target
    recipe, settings = recipe_for(method, target.name)
    if not settings and recipe and target.parameters <= SMALL:
        settings = read_recipe(recipe)
    try:
        planned: PlannedDraft = (
            METHODS[method].implementation().planned(target, given, settings.get("draft", {}))
        )
    except UserError as error:
        if given is not None:
            raise
        return PlanRow(method, False, str(error), recipe)
    generated = settings.get("data", {}).get("regenerate", {}).get("num_tokens")
    size, read = _bytes(method, planned, given, scenario)
    speed = _speed(planned, METHODS[method].passes, scenario, read)
    tokens = generated or planned.published.training_tokens
    return PlanRow(
        method=method,
        available=True,
        note=planned.note,
        recipe=recipe,
        draft=given.name if given else None,
        num_layers=planned.parts.num_layers,
        parameters=planned.parts.parameters,
        bytes=int(size),
        kv_bytes=planned.cache.per_token(kv_itemsize(scenario.serving, target))
        if planned.cache
        else None,
        acceptance_source=planned.published.acceptance_source,
        training_tokens=tokens,
        training_source=f"recipe {recipe}" if generated else planned.published.training_source,
        serving=_serving(planned, scenario, size, speed["high"]),
        recipe_keys=planned.recipe_keys,
        warnings=planned.warnings,
        **speed,
        **_training(method, planned, scenario, recipe, settings, tokens),
    )


def _bytes(
    method: str, planned: PlannedDraft, given: Described | None, scenario: Scenario
) -> tuple[float, float]:
    """Of a draft's weights, and of those that a step reads."""
    parts, target = planned.parts, scenario.target
    itemsize = (
        torch_dtype(scenario.serving.dtype)
        or (given or target).dtype
        or target.dtype
        or sizes.ASSUMED_DTYPE
    ).itemsize
    if not (METHODS[method].in_target and target.native_mtp and target.quantization):
        return parts.parameters * float(itemsize), parts.read * float(itemsize)
    tables = parts.copied / 2  # all but these are stored as the target's own layers
    read = tables * itemsize + (parts.read - tables) * target.converted_itemsize
    return parts.parameters * target.converted_itemsize, read


def _speed(planned: PlannedDraft, passes: str, scenario: Scenario, read: float) -> dict[str, Any]:
    """What a step costs and a round promises, as fields of a row. read: bytes of weights that a step reads."""
    parts, num_layers, alphas = (
        planned.parts,
        scenario.target.text.num_hidden_layers,
        planned.published.alphas,
    )
    step = scenario.pass_bytes(read, planned.cache, parts.read, 1) if parts.read else 0.0
    shares = {"weights": step / scenario.plain, "layers": parts.num_layers / num_layers}
    low = high = None
    if alphas:
        best, verify = (scenario.verified(MAX_K[passes], spread=spread) for spread in (False, True))
        low, high = speedup_range(alphas, verify, shares, num_layers, passes, verify_at_best=best)
    return {
        "step_ratio": max(shares.values()),
        "step_shares": shares,
        "alphas": alphas,
        "low": low,
        "high": high,
    }


def _serving(
    planned: PlannedDraft, scenario: Scenario, size: float, high: ExpectedSpeedup | None
) -> Budget | None:
    """What each device holds with a draft of this size, and the context that it costs; None for one without weights."""
    if not planned.parts.parameters:
        return None
    alone = budget(scenario.target, scenario.serving)
    held = budget(
        scenario.target,
        scenario.serving,
        size,
        planned.cache,
        high.num_speculative_tokens if high else 0,
    )
    return (
        held
        if held.room is None or alone.room is None
        else replace(held, cost=alone.room - held.room)
    )


def _training(
    method: str,
    planned: PlannedDraft,
    scenario: Scenario,
    name: str | None,
    recipe: Mapping[str, Any],
    tokens: int | None,
) -> dict[str, Any]:
    """What training takes, as fields of a row. recipe: keys of the one called `name` where the row describes its run."""
    if planned.shape is None:
        nothing = None if tokens is None else 0
        return {"disk_bytes": nothing, "training_memory": {}, "training_hours": nothing}
    target, parts, row, itemsize = (
        scenario.target,
        planned.parts,
        METHODS[method],
        scenario.target.itemsize(),
    )
    train, draft = (
        recipe.get("train", {}),
        {key: value for key, value in recipe.get("draft", {}).items() if key == "ttt_steps"},
    )
    rows = scenario.batch_size or train.get("per_device_train_batch_size", BATCH_SIZE)
    length = scenario.max_length or recipe.get("data", {}).get("max_length", MAX_LENGTH)
    length = min(length, getattr(target.text, "max_position_embeddings", None) or length)
    read, positions = weights_read(target.model), draft.get("ttt_steps", row.positions)
    memory = training_memory(
        parts,
        target.parameters * itemsize,
        planned.shape,
        planned.vocabulary,
        positions,
        rows * length,
    )
    rate = TRAINING_FLOPS / (2 * read + 6 * parts.read * positions)
    if build := planned.build if scenario.computed else None:
        step = training_step(
            method, build, {**planned.counted_with, **draft}, target, rows=rows, length=length
        )
        memory["activations"] = step.peak
        rate = H100.tokens_per_second(step, rows * length, 2 * read * rows * length)
    launch, trained = _launch(target, memory, scenario.serving.memory_gb * 2**30), tokens
    if recipe:
        launch = _launched(
            target,
            memory,
            *launch_of(str(name)),
            is_sharded=recipe["target"].get("shard") == "layers",
        )
        trained = (
            train["max_steps"]
            * train.get("gradient_accumulation_steps", 1)
            * rows
            * length
            * launch.num_processes
        )
    return {
        "disk_bytes": None
        if tokens is None
        else row.features * target.text.hidden_size * itemsize * tokens,
        "micro_batch": (rows, length),
        "trained_tokens": trained,
        "training_memory": memory,
        "training_hours": None if trained is None else trained / rate / 3600,
        "training_launch": launch,
    }


def _launch(target: Described, memory: Mapping[str, int], device_memory: float) -> Launch | None:
    """The fewest devices of a machine on which training fits, and the first configuration under which it does."""
    ways = ((name, number) for number in (1, 2, 4, GPUS_PER_MACHINE) for name in ("ddp", "zero2"))
    launches = (_launched(target, memory, *way, is_sharded=way[1] > 1) for way in ways)
    return next(
        (launch for launch in launches if launch.device_bytes <= USABLE * device_memory), None
    )


def _launched(
    target: Described, memory: Mapping[str, int], name: str, number: int, *, is_sharded: bool
) -> Launch:
    """With what each process holds: of the target's layers a part and a gathered one, of the draft what the configuration leaves."""
    layers = target.itemsize() * sum(
        size.numel() for key, size in target.model.named_parameters() if ".layers." in key
    )
    spared = (
        layers - (layers / number + layers / target.text.num_hidden_layers) if is_sharded else 0
    )
    kept = {"zero2": 0.25 + 0.75 / number, "zero3": 0.25 + 1 / number}.get(
        name.partition("_")[0], 1.0
    )
    return Launch(
        name, number, is_sharded, int(sum(memory.values()) - spared - (1 - kept) * memory["draft"])
    )


def recipe_for(method: str, target: str) -> tuple[str | None, dict[str, Any]]:
    """The target's own recipe of a method, with its keys; else that of small targets, or of pico, without."""
    names = sorted(
        path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml")
    )
    found = {name: keys for name in names if (keys := read_recipe(name)).get("method") == method}
    if own := next(
        (name for name, keys in found.items() if keys["target"]["model"] == target), None
    ):
        return own, found[own]
    return next(
        (name for folder in ("small", "pico") for name in found if name.startswith(f"{folder}/")),
        None,
    ), {}


def launch_of(recipe: str) -> tuple[str, int]:
    """The configuration and the number of processes with which a shipped recipe's header starts it."""
    (name, number), *_ = LAUNCH.findall((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8"))
    return name, int(number or read_yaml(LAUNCHES / f"{name}.yaml")["num_processes"])


@cache
def read_recipe(name: str) -> dict[str, Any]:
    """A shipped recipe's keys."""
    keys: dict[str, Any] = read_yaml(RECIPES / f"{name}.yaml")
    return keys


def best_k(alpha: float, verify: Sequence[float], c: float, passes: str = "K") -> ExpectedSpeedup:
    """S = AL / (v + c·K) at the fewest tokens that come within 1 % of the best, AL = 1 + alpha + … + alpha^K (arXiv 2211.17192).

    verify: v for K = 1, 2, … passes: of the draft per round, "K", "1" or "0"; c·K stands for that many times c.
    """
    lengths = [expected_acceptance_length(alpha, k) for k in range(1, len(verify) + 1)]
    speedups = [
        float(predicted_speedup(length, verify[k - 1], {"K": c * k, "1": c, "0": 0.0}[passes]))
        for k, length in enumerate(lengths, 1)
    ]
    index = next(index for index, speedup in enumerate(speedups) if speedup >= 0.99 * max(speedups))
    return ExpectedSpeedup(index + 1, lengths[index], speedups[index])


def speedup_range(
    alphas: tuple[float, float],
    verify: Sequence[float],
    shares: Mapping[str, float],
    target_layers: int,
    passes: str = "K",
    *,
    verify_at_best: Sequence[float] | None = None,
) -> tuple[ExpectedSpeedup, ExpectedSpeedup]:
    """The two ends: the lower alpha with c and an engine's overhead, and the higher alpha where what is read is all that counts.

    verify: v for K = 1, 2, …, by what is read. verify_at_best: at the higher end; None for 1, a dense target with few
    sequences. shares: of a row. passes: of `best_k`. A draft that runs no layers launches none.
    """
    overhead = LAYERS_OVERHEAD / target_layers if shares["layers"] else 0.0
    low = best_k(
        alphas[0], [v + VERIFY_OVERHEAD for v in verify], max(shares.values()) + overhead, passes
    )
    return low, best_k(alphas[1], verify_at_best or [1.0] * len(verify), shares["weights"], passes)


def training_memory(
    parts: sizes.ParameterCounts,
    target_bytes: int,
    shape: sizes.ModelShape,
    vocabulary: int,
    num_steps: int,
    num_tokens: int,
) -> dict[str, int]:
    """Device memory of online training by part, roughly: the draft with gradients and AdamW in float32; of activations 28H + 4I numbers per
    layer, token and drafted position in bfloat16, as `accounting` counts them in EAGLE-3 heads, and the logits of a block of the loss.

    vocabulary: tokens the draft's logits span. num_steps: drafted positions. num_tokens: in a micro-batch.
    """
    layers = 2 * (28 * shape.hidden_size + 4 * shape.intermediate_size) * parts.num_layers
    activations = num_tokens * num_steps * layers + 2 * BLOCK * vocabulary
    return {
        "target": target_bytes,
        "draft": BYTES_PER_TRAINED * parts.parameters,
        "frozen tables": BYTES_PER_COPIED * parts.copied,
        "activations": activations,
    }
