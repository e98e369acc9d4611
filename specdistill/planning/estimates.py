"""A method's row of the plan: what its draft holds, what training it takes, and what it promises where the target serves.

Symbols: H hidden size, I MLP width, K draft tokens per round, B sequences, alpha the acceptance rate, taken as equal at every
position; c a draft step and v a verification of K tokens, both in plain target steps. Nothing is measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from specdistill.errors import UserError
from specdistill.methods import METHODS, MethodCost
from specdistill.methods.sizes import ASSUMED_DTYPE, Described, PlannedDraft, weights_read
from specdistill.planning.accounting import H100, MATRIX_SHARE, TRAFFIC_SHARE
from specdistill.planning.budget import Budget, ServingSettings, budget
from specdistill.planning.training import SMALL, Launch, MicroBatch, read_recipe, recipe_for, training_of
from specdistill.statistics.theory import expected_acceptance_length, predicted_speedup
from specdistill.targets.cache_size import CacheSize

MAX_K = {"K": 8, "1": 15, "0": 8}  # by the draft's passes per round; of a block of 16 the first token is given
# What an engine adds to bytes and layers: Llama-3.1-8B with its EAGLE-3 head in vLLM issue 20780 takes 8.35 + 1.016 K ms per round where a
# plain step takes 7.07, so v = 1.18 and c = 0.144, against v = 1 and c = 0.050 of the bytes alone; 0.094 of 32 layers are 3.
VERIFY_OVERHEAD = 0.18
LAYERS_OVERHEAD = 3.0
# Operations that take as long as a byte does: an H100 computes on 184 sequences in the time in which it reads the weights.
FLOPS_PER_BYTE = MATRIX_SHARE * H100.flops / (TRAFFIC_SHARE * H100.bandwidth)


@dataclass(frozen=True)
class ExpectedSpeedup:
    """The best K at one alpha, and what it gives."""

    num_speculative_tokens: int
    acceptance_length: float
    speedup: float


@dataclass(frozen=True)
class PlanRow:
    """One method. Numbers that do not exist or that nobody published are None, and `note` says why.

    draft: the one that was given; None for the one that the recipe would train. bytes: in the draft's dtype. training_tokens: distinct
    ones; trained_tokens: of all steps, as the recipe has them, else one pass. disk_bytes: the hidden states of all training tokens.
    micro_batch: rows and tokens of a row. training_memory: its parts on one device, in bytes. training_hours: of one GPU.
    training_is_computed: activations and hours by the training step's own code; else by a rough formula. training_launch: the recipe's,
    else the fewest devices of the kind that serves on which training fits; None where MOST_DEVICES do not hold it, with their number in
    training_devices. kv_bytes: KV cache of the draft for a token of context.
    step_ratio: c, the larger of the step_shares. low, high: the two ends of the speedup, where and as the target is to serve. serving:
    what each device holds then. warnings: what contradicts the target's config.json.
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
    trained_tokens: int | None = None
    micro_batch: tuple[int, int] | None = None
    disk_bytes: int | None = None
    training_memory_bytes: int | None = None
    training_memory: dict[str, int] | None = None
    training_hours: float | None = None
    training_is_computed: bool = False
    training_devices: int | None = None
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
class Passes:
    """Passes of a target and of a draft over B sequences of some context, by the bytes that they read, or would in the time that their
    arithmetic takes where that is longer.
    """

    target: Described
    serving: ServingSettings

    @cached_property
    def plain(self) -> float:
        """A step of the target without a draft."""
        return self._target(1, spread=True)

    @cached_property
    def verified(self) -> list[float]:
        """v for K = 1, 2, …, with every token of a mixture sent to experts of its own."""
        return [self._target(k + 1, spread=True) / self.plain for k in range(1, max(MAX_K.values()) + 1)]

    @cached_property
    def verified_at_best(self) -> list[float]:
        """v where the tokens of a sequence share their experts."""
        return [self._target(k + 1, spread=False) / self.plain for k in range(1, max(MAX_K.values()) + 1)]

    def draft(self, planned: PlannedDraft, weights: float) -> float:
        """A step of a draft, of whose weights it reads this many bytes."""
        return self._pass(weights, planned.cache, planned.parts.read, 1)

    def _target(self, num_tokens: int, *, spread: bool) -> float:
        """Over this many tokens of each sequence."""
        model, serving = self.target.model, self.serving
        read = weights_read(model, serving.batch_size * (num_tokens if spread else 1), self.target.weigh(serving.dtype))
        return self._pass(read, self.target.cache, weights_read(model), num_tokens)

    def _pass(self, weights: float, cache: CacheSize | None, parameters: float, num_tokens: int) -> float:
        """weights: bytes that it reads. parameters: that each token is multiplied with."""
        context, batch_size, itemsize = self.serving.context, self.serving.batch_size, self.serving.kv_itemsize(self.target)
        held = cache.num_bytes(context, batch_size, itemsize) if cache else 0
        return max(weights + held, 2 * parameters * batch_size * num_tokens / FLOPS_PER_BYTE)


def row_of(
    method: str, target: Described, given: Described | None, passes: Passes, training: MicroBatch, *, computed: bool
) -> PlanRow:
    """The method's row, for the draft that is given or else for the one a recipe would train."""
    recipe, settings = recipe_for(method, target.name)
    plan = METHODS[method].implementation().planned
    if plan is None:
        return PlanRow(method, False, "nothing is known of its cost", recipe)
    try:
        planned: PlannedDraft = plan(target, given, settings.get("draft", {}))
    except UserError as error:
        if given is not None:
            raise
        return PlanRow(method, False, str(error), recipe)
    if not settings and recipe and target.parameters <= SMALL:
        settings = read_recipe(recipe)
    generated = settings.get("data", {}).get("regenerate", {}).get("num_tokens")
    batch = training.of(settings, getattr(target.text, "max_position_embeddings", None))
    size, read = _bytes(method, planned, target, given, passes.serving)
    speed = _speed(planned, METHODS[method].cost, passes, read)
    tokens = generated or planned.published.training_tokens
    return PlanRow(
        method=method,
        available=True,
        note=planned.note,
        recipe=recipe,
        draft=given.name if given else None,
        num_layers=planned.parts.num_layers,
        hidden_size=planned.shape.hidden_size if planned.shape else 0,
        parameters=planned.parts.parameters,
        bytes=int(size),
        kv_bytes=planned.cache.per_token(passes.serving.kv_itemsize(target)) if planned.cache else None,
        acceptance_source=planned.published.acceptance_source,
        training_tokens=tokens,
        training_source=f"recipe {recipe}" if generated else planned.published.training_source,
        serving=_serving(planned, target, passes.serving, size, speed["high"]),
        recipe_keys=planned.recipe_keys,
        warnings=planned.warnings,
        **speed,
        **training_of(method, planned, target, recipe, settings, batch, tokens, passes.serving.memory, computed=computed),
    )


def _bytes(
    method: str, planned: PlannedDraft, target: Described, given: Described | None, serving: ServingSettings
) -> tuple[float, float]:
    """Of a draft's weights, and of those that a step reads."""
    parts, itemsize = planned.parts, (serving.dtype or (given or target).dtype or target.dtype or ASSUMED_DTYPE).itemsize
    if not (METHODS[method].in_target and target.native_mtp and target.quantization):
        return parts.parameters * float(itemsize), parts.read * float(itemsize)
    tables = parts.copied / 2  # all but these are stored as the target's own layers
    read = tables * itemsize + (parts.read - tables) * target.converted_itemsize
    return parts.parameters * target.converted_itemsize, read


def _speed(planned: PlannedDraft, cost: MethodCost, passes: Passes, read: float) -> dict[str, Any]:
    """What a step costs and a round promises, as fields of a row. read: bytes of weights that a step reads."""
    parts, num_layers, alphas = planned.parts, passes.target.text.num_hidden_layers, planned.published.alphas
    shares = step_shares(passes.draft(planned, read) if parts.read else 0.0, passes.plain, parts.num_layers, num_layers)
    low = high = None
    if alphas:
        most = MAX_K[cost.passes]
        best, verify = passes.verified_at_best[:most], passes.verified[:most]
        low, high = speedup_range(alphas, verify, shares, num_layers, cost.passes, verify_at_best=best)
    return {"step_ratio": max(shares.values()), "step_shares": shares, "alphas": alphas, "low": low, "high": high}


def _serving(
    planned: PlannedDraft, target: Described, serving: ServingSettings, size: float, high: ExpectedSpeedup | None
) -> Budget | None:
    """What each device holds with a draft of this size, and the context that it costs; None for one without weights."""
    if not planned.parts.parameters:
        return None
    alone = budget(target, serving)
    held = budget(target, serving, size, planned.cache, high.num_speculative_tokens if high else 0)
    return held if held.room is None or alone.room is None else replace(held, cost=alone.room - held.room)


def step_shares(step: float, target_step: float, layers: int, target_layers: int) -> dict[str, float]:
    """A draft step over a target step, by what they read (weights and KV cache) and by layers run: the larger is c."""
    return {"weights": step / target_step, "layers": layers / target_layers}


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
    sequences. shares: of `step_shares`. passes: of `best_k`. A draft that runs no layers launches none.
    """
    overhead = LAYERS_OVERHEAD / target_layers if shares["layers"] else 0.0
    low = best_k(alphas[0], [v + VERIFY_OVERHEAD for v in verify], max(shares.values()) + overhead, passes)
    return low, best_k(alphas[1], verify_at_best or [1.0] * len(verify), shares["weights"], passes)
