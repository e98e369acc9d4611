"""Estimate a method's row of the plan: its draft, its training, and its speedup in serving.

Symbols: H is the hidden size, I the MLP width, K the draft tokens per round, and alpha the
acceptance rate, assumed to be equal at every position. c is the cost of a draft step, and v that of
verifying K tokens. Both are in units of one plain target step. Nothing is measured.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from specdistill.advice.plan.accounting import (
    H100,
    MATRIX_SHARE,
    TRAFFIC_SHARE,
    Device,
    Machine,
    count_training_step,
)
from specdistill.advice.plan.budget import (
    ENGINE_BYTES,
    PASS_TOKENS,
    USABLE_MEMORY_SHARE,
    Budget,
    compute_budget,
    count_kv_itemsize,
    parse_dtype,
)
from specdistill.advice.plan.options import ServingOptions
from specdistill.advice.plan.reading import read_model_config
from specdistill.common.documents import read_json, read_yaml
from specdistill.common.errors import UserError
from specdistill.common.project import LAUNCHES, RECIPES
from specdistill.data.produce.job import estimate_rows
from specdistill.evaluation.statistics.theory import expected_acceptance_length, predicted_speedup
from specdistill.methods import METHODS, sizes
from specdistill.methods.base import DraftSettings
from specdistill.methods.chains.serving import describe_head_engines
from specdistill.methods.load import FRESH_INITIALIZATIONS
from specdistill.methods.sizes import ModelConfigInfo, PlannedDraft, count_weights_read
from specdistill.recipe.sections import DataConfig
from specdistill.targets.cache_size import CacheSize
from specdistill.training.length import count_step_rows, count_steps
from specdistill.training.losses.head_loss import BLOCK_ROWS

# The largest K, by the draft's passes per round. In a block of 16 the first token is known already.
MAX_K = {"K": 8, "1": 15, "0": 8}
# The overhead of an engine, in addition to bytes and layers. In vLLM issue 20780, Llama-3.1-8B with
# its EAGLE-3 head takes 8.35 + 1.016 K ms per round, and a plain step takes 7.07 ms. So v = 1.18
# and c = 0.144, while the bytes alone give v = 1 and c = 0.050. The difference in c is 0.094, the
# time that 3 of the 32 layers take.
VERIFY_OVERHEAD = 0.18
LAYERS_OVERHEAD = 3.0
# Bytes per trained parameter: a float32 weight, its gradient and two AdamW moments (Muon keeps one
# moment of the matrices). Bytes per frozen parameter that training copies: a float32 weight.
BYTES_PER_TRAINED = 16
BYTES_PER_COPIED = 4
# Operations per second of one H100 or H200 in bfloat16: 40 % of the peak of its tensor cores.
TRAINING_FLOPS = 4e14

# The micro-batch of a training that no recipe describes: rows, and tokens of a row.
BATCH_SIZE = 4
MAX_LENGTH = 2048
# The launch configuration that a recipe's header names.
LAUNCH = re.compile(r"accelerate_configs/(\w+)\.yaml(?: --num_processes (\d+))?")
# Parameters of the largest target for which the recipes of small targets are meant unchanged.
MAX_SMALL_TARGET_PARAMETERS = 100_000_000

# Keys of a config that give the shapes of the weights. Not max_window_layers and the like: files
# that a conversion wrote, such as GGUF, lack them.
SIZE_KEY = re.compile(r"(?!max_)\w+_(size|dim|heads|layers|experts|rank)|tie_word_embeddings")

RecipeKeys = dict[str, Any]  # the keys of a shipped recipe, by section


def list_assumptions(device: Device) -> tuple[str, ...]:
    """Return the assumptions behind the estimates of a plan, as paragraphs for the reader.

    Args:
        device: the device that the plan is for: a measured CPU, or a GPU with published figures.
    """
    # Two of the paragraphs differ between a measured CPU and a GPU.
    if isinstance(device, Machine):
        passes = (
            "A pass over several tokens takes as long as measured: as matrix products with as many"
            f" rows on {device.name}."
        )
        hours = f"Hours are for {device.name}, by its measured speed of matrix products and copies"
    else:
        passes = (
            "A pass takes as long as its reads, or as its arithmetic if that takes longer:"
            f" {device.flops_per_byte:.0f} operations take as long as reading one byte"
            f" ({device.name})."
        )
        hours = (
            f"GPU hours are for an {device.name} (rough estimates for a GPU that reaches"
            f" {TRAINING_FLOPS / 1e12:.0f} TFLOP/s)"
        )
    return (
        (
            "Parameters are computed from configs. Acceptance rates are published by the sources"
            " named. The speedup is S = AL / (v + c·K), where AL is the acceptance length, K the"
            " number of draft tokens per round, and v the cost of verifying them in plain target"
            " steps."
        ),
        (
            "c is the cost of a draft step in plain target steps. It is the ratio of the bytes that"
            " draft and target read (weights, KV cache), or of the layers that they run, whichever"
            f" is larger. {passes} Quantized weights count with their stored size, if the"
            " checkpoint's index states it."
        ),
        (
            "The low end of S is computed with the lower acceptance rate and an engine's overhead"
            f" (fitted to vLLM issue 20780: v is {VERIFY_OVERHEAD} larger, and a draft step takes"
            f" the time of {LAYERS_OVERHEAD:g} more layers). In a mixture of experts, each token"
            " then goes to experts of its own. The high end is computed with the higher acceptance"
            " rate, and without overhead."
        ),
        (
            "The acceptance rate is the same at every position. K is the smallest number whose S is"
            f" within 1 % of the best S, and at most {MAX_K['K']} for a draft that takes a step for"
            " each token."
        ),
        (
            f"Serving takes {ENGINE_BYTES / 2**30:g} GiB for the engine, and the activations of a"
            f" pass over {PASS_TOKENS:,} prompt tokens. The KV cache of latent attention holds"
            " latents, that of a sliding window holds the window's tokens, and a recurrent layer"
            " holds a state. Attention heads are split among the devices, and each device has at"
            " least one."
        ),
        (
            f"Training: a conversation has {sizes.TOKENS_PER_SAMPLE} tokens, all with a loss;"
            " hidden states are computed in each step; draft and AdamW are in float32. With"
            " details=true, and if a method supports it, the training step's own code runs over"
            " tensors without content, to count its memory, traffic and arithmetic. Otherwise"
            " activations are roughly 28H + 4I"
            " numbers per layer, token and step, where H is the hidden size and I the MLP's width."
            f" Matrix products reach {MATRIX_SHARE:.0%} of a device's bfloat16 peak, and all other"
            f" operations {TRAFFIC_SHARE:.0%} of its bandwidth. {USABLE_MEMORY_SHARE:.0%} of its"
            " memory can be used."
        ),
        (
            f"{hours}: they are for all steps of the recipe for this target, or else for one pass"
            " over the tokens. The time to generate the tokens is not included."
        ),
    )


@dataclass(frozen=True)
class ExpectedSpeedup:
    """The best K at one acceptance rate, with its acceptance length and its speedup."""

    num_speculative_tokens: int
    acceptance_length: float
    speedup: float


@dataclass(frozen=True)
class Launch:
    """The launch configuration of a training.

    Attributes:
        configuration: the name of a file in accelerate_configs/.
        num_processes: processes of the launch.
        is_sharded: whether the processes share the target's layers.
        device_bytes: bytes that each process holds.
    """

    configuration: str
    num_processes: int
    is_sharded: bool
    device_bytes: int


@dataclass(frozen=True)
class PlanRow:
    """The row of one method in the plan.

    Numbers that do not exist, or that nobody published, are None, and `note` says why.

    Attributes:
        method: the method.
        available: whether the target can have a draft of this method.
        note: why the method is not available, or remarks about it.
        recipe: the name of the shipped recipe that trains it; None if there is none.
        draft: the name of the given draft; None for the draft that the recipe would train.
        num_layers: layers of the draft.
        parameters: parameters of the draft.
        bytes: bytes of the draft, in its dtype.
        training_tokens: distinct training tokens.
        training_source: where that number comes from.
        trained_tokens: tokens of all training steps: those of the target's own recipe, else of one
            pass over the training tokens.
        micro_batch: rows, and tokens of a row.
        disk_bytes: bytes of the hidden states of all training tokens.
        training_memory: bytes of each part of training on one device.
        training_hours: hours of one GPU, or of this machine.
        training_launch: the launch of the recipe, else the smallest that fits; None if a machine
            cannot hold the training.
        kv_bytes: bytes of the draft's KV cache for a token of context.
        step_ratio: c, the larger of the two numbers in `step_shares`.
        step_shares: the cost of a draft step, divided by that of a target step. `weights`: by the
            bytes that they read (weights and KV cache). `layers`: by the layers that they run.
        alphas: the lower and the higher acceptance rate.
        acceptance_source: where these rates come from.
        low: the low end of the speedup in serving.
        high: the high end.
        serving: what each device holds while it serves.
        recipe_keys: keys to add to the command that trains the draft.
        warnings: contradictions to the target's config.json, in words.
        is_served: whether an engine can decode with the draft.
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
    is_served: bool = True

    @property
    def middle(self) -> float:
        """The geometric mean of the low and the high end of the speedup; 0 if there are none."""
        return math.sqrt(self.low.speedup * self.high.speedup) if self.low and self.high else 0.0


@dataclass(frozen=True)
class Scenario:
    """The setting of a plan, and the cost of passes of target and draft in it.

    The cost of a pass is the number of bytes that it reads. If its arithmetic takes longer, the
    cost is the number of bytes that could be read in that time.

    Attributes:
        target: the target, by its config.json.
        serving: how the target is to be served.
        batch_size: rows of a micro-batch in training; None for the recipe's, else BATCH_SIZE.
        max_length: tokens of a row; None for the recipe's, else MAX_LENGTH.
        computed: whether to run the training step over tensors without content, if the method
            supports it (`PlannedDraft.build`). This takes seconds.
        device: the device that serves and trains.
    """

    target: ModelConfigInfo
    serving: ServingOptions
    batch_size: int | None = None
    max_length: int | None = None
    computed: bool = False
    device: Device = H100

    @cached_property
    def own_recipes(self) -> list[str]:
        """The names of the shipped recipes for the target (see `list_own_recipes`)."""
        return list_own_recipes(self.target)

    @cached_property
    def plain_step(self) -> float:
        """The cost of a plain decoding step of the target, in bytes (see the class)."""
        return self._estimate_target_pass(1, spread=True)

    def estimate_verification(self, most: int, *, spread: bool) -> list[float]:
        """Estimate v, the cost of verifying K draft tokens divided by a plain step's, for each K.

        Args:
            most: the largest K. The result has a number for each K from 1 to this.
            spread: whether each token of a mixture of experts goes to experts of its own. If not,
                all tokens of a sequence go to the same experts, whose weights are read once.
        """
        # The pass that verifies K draft tokens also reads the token before them.
        return [
            self._estimate_target_pass(k + 1, spread=spread) / self.plain_step
            for k in range(1, most + 1)
        ]

    def _estimate_target_pass(self, num_tokens: int, *, spread: bool) -> float:
        """Estimate the cost of a pass of the target over some tokens of each sequence, in bytes.

        `spread` says whether each token of a mixture of experts goes to experts of its own. If so,
        the pass reads the weights of more experts. If not, the tokens of a sequence share their
        experts, so that they count as one.
        """
        tokens_with_own_experts = self.serving.batch_size * (num_tokens if spread else 1)
        return self.count_pass_bytes(
            weights=self._count_weight_bytes(tokens_with_own_experts),
            cache=self.target.cache,
            parameters=self._parameters_per_token,
            num_tokens=num_tokens,
        )

    @cached_property
    def _parameters_per_token(self) -> float:
        """The number of the target's parameters that one token is multiplied with."""
        return count_weights_read(self.target.model)

    @cached_property
    def _count_weight_bytes(self) -> Callable[[int], float]:
        """A function that returns how many bytes of target weights a pass over n tokens reads.

        In a mixture of experts the bytes depend on n, because more tokens use more experts.
        """
        return cache(
            partial(
                count_weights_read,
                self.target.model,
                weigh=self.target.weigh(parse_dtype(self.serving.dtype)),
            )
        )

    def count_pass_bytes(
        self, weights: float, cache: CacheSize | None, parameters: float, num_tokens: int
    ) -> float:
        """Return the cost of a pass of target or draft, as a number of bytes.

        These are the bytes that the pass reads. If its arithmetic takes longer than its reads, they
        are the bytes that could be read in that time.

        Args:
            weights: bytes of weights that the pass reads.
            cache: the size of the KV cache that the pass reads; None if there is no cache.
            parameters: the number of parameters that each token is multiplied with.
            num_tokens: tokens of each sequence over which the pass runs.
        """
        context = self.serving.context
        batch_size = self.serving.batch_size
        assert context is not None
        cache_bytes = (
            cache.num_bytes(context, batch_size, count_kv_itemsize(self.serving, self.target))
            if cache
            else 0
        )
        return self.device.count_pass_bytes(
            weights + cache_bytes, parameters, batch_size * num_tokens
        )


def build_plan_row(method: str, draft_info: ModelConfigInfo | None, scenario: Scenario) -> PlanRow:
    """Describe the draft of one method for a target: its size, training, speedup and serving.

    Args:
        method: the name of the method.
        draft_info: an existing draft, by its config.json; None for a draft that a recipe would
            train.
        scenario: the target and the device, and how the target is served.

    Returns:
        The row of this method in the plan.

    Raises:
        UserError: if the existing draft does not suit the target.
    """
    # Find a shipped recipe of this method. Its settings say how the draft is built and trained.
    # There are three cases:
    # - A recipe is made for this target. `find_recipe` returns its name and its settings.
    # - Otherwise there may be a recipe for small targets, or else one for pico, the tiny target
    #   that ships with the package. `find_recipe` returns its name and empty settings.
    # - If there is no recipe at all, it returns None and empty settings.
    target = scenario.target
    recipe, settings = find_recipe(method, target.name, scenario.own_recipes)

    # In the second case, the settings of the recipe suit only a small target, or a plan for a CPU
    # (a `Machine`), where larger sizes would take too long. Read them only then.
    is_small = target.parameters <= MAX_SMALL_TARGET_PARAMETERS
    is_on_cpu = isinstance(scenario.device, Machine)
    if not settings and recipe and (is_small or is_on_cpu):
        settings = read_recipe(recipe)

    # If a method is not possible for this target, its row says why. With an existing draft that is
    # an error of the user.
    try:
        planned: PlannedDraft = (
            METHODS[method]
            .load()
            .advice.plan_draft(
                target,
                draft_info or _read_initial_draft(recipe, settings),
                settings.get("draft", {}),
            )
        )
    except UserError as error:
        if draft_info is not None:
            raise
        return PlanRow(method, available=False, note=str(error), recipe=recipe)

    # The number of training tokens is that of the recipe, or else that of published drafts.
    generated = settings.get("data", {}).get("regenerate", {}).get("num_tokens")
    draft_bytes, bytes_per_step = _count_draft_bytes(method, planned, draft_info, scenario)
    speed = _estimate_speed(planned, METHODS[method].passes, scenario, bytes_per_step)
    tokens = generated or planned.published.training_tokens
    return PlanRow(
        method=method,
        available=True,
        note="; ".join(
            filter(None, (planned.note, describe_head_engines(method, target.text.model_type)))
        ),
        recipe=recipe,
        draft=draft_info.name if draft_info else None,
        num_layers=planned.parts.num_layers,
        parameters=planned.parts.parameters,
        bytes=int(draft_bytes),
        kv_bytes=(
            planned.cache.count_bytes_per_token(count_kv_itemsize(scenario.serving, target))
            if planned.cache
            else None
        ),
        acceptance_source=planned.published.acceptance_source,
        training_tokens=tokens,
        training_source=f"recipe {recipe}" if generated else planned.published.training_source,
        serving=_estimate_serving(planned, scenario, draft_bytes, speed["high"]),
        recipe_keys=planned.recipe_keys,
        warnings=planned.warnings,
        is_served=planned.is_served,
        **speed,
        **_estimate_training(method, planned, scenario, recipe, settings, tokens),
    )


def _read_initial_draft(recipe: str | None, settings: RecipeKeys) -> ModelConfigInfo | None:
    """Read the config of the model that a shipped recipe starts from; None for a fresh draft.

    The config ships with the recipe, in a folder `draft` next to it. None is also returned if there
    is no such folder.
    """
    init = settings.get("draft", {}).get("init")
    if recipe is None or init in (None, *FRESH_INITIALIZATIONS):
        return None
    folder = RECIPES / recipe.partition("/")[0] / "draft"
    if not folder.is_dir():
        return None
    return read_model_config(str(folder), key="draft.init")


def _count_draft_bytes(
    method: str, planned: PlannedDraft, draft_info: ModelConfigInfo | None, scenario: Scenario
) -> tuple[float, float]:
    """Return the bytes of all weights of a draft, and of those that one draft step reads.

    Args:
        method: the draft's method.
        planned: the sizes of the draft.
        draft_info: the existing draft, by its config.json; None for one that is to be trained.
        scenario: the target, and how it is served.
    """
    # The dtype is the one of serving if it is given, else that of the draft's or target's config.
    parts = planned.parts
    target = scenario.target
    itemsize = (
        parse_dtype(scenario.serving.dtype)
        or (draft_info or target).dtype
        or target.dtype
        or sizes.ASSUMED_DTYPE
    ).itemsize

    # In general all weights have this dtype. The exception is a layer for multi-token prediction in
    # the checkpoint of a quantized target: the layer's own weights are quantized, too.
    if not (METHODS[method].in_target and target.native_mtp and target.quantization):
        return parts.parameters * float(itemsize), parts.read * float(itemsize)

    # `parts.parameters` are the weights of all layers. They are quantized, and such a weight takes
    # `converted_itemsize` bytes on average.
    all_bytes = parts.parameters * target.converted_itemsize

    # A step reads `parts.read` weights: those of one layer and those of the target's LM head. The
    # LM head is not quantized, so it is counted separately. Its size is half of `parts.copied`,
    # which counts two tables of equal size: the target's embedding and its LM head.
    lm_head_parameters = parts.copied / 2
    layer_parameters = parts.read - lm_head_parameters
    lm_head_bytes = lm_head_parameters * itemsize
    layer_bytes = layer_parameters * target.converted_itemsize
    return all_bytes, lm_head_bytes + layer_bytes


def _estimate_speed(
    planned: PlannedDraft, passes: str, scenario: Scenario, bytes_per_step: float
) -> dict[str, Any]:
    """Estimate the cost of a draft step and the speedup in serving.

    Args:
        planned: the sizes of the draft.
        passes: how many passes the draft takes per round: "K" for one per draft token, "1" for one
            in total, "0" for a lookup.
        scenario: the target and the device, and how the target is served.
        bytes_per_step: bytes of weights that a draft step reads.

    Returns:
        Fields of a PlanRow, by name.
    """
    # Compute c, the cost of a draft step relative to a target step, in two ways: by the bytes that
    # each reads, and by the layers that each runs. A lookup reads no weights, and costs nothing.
    parts = planned.parts
    num_layers = scenario.target.text.num_hidden_layers
    alphas = planned.published.alphas
    draft_step = 0.0
    if parts.read:
        draft_step = scenario.count_pass_bytes(
            weights=bytes_per_step, cache=planned.cache, parameters=parts.read, num_tokens=1
        )
    shares = {
        "weights": draft_step / scenario.plain_step,
        "layers": parts.num_layers / num_layers,
    }

    # Compute both ends of the speedup, if acceptance rates of such drafts are published. For the
    # low end, each token of a mixture of experts goes to experts of its own (`spread`).
    low = high = None
    if alphas:
        verify = scenario.estimate_verification(MAX_K[passes], spread=True)
        verify_at_best = scenario.estimate_verification(MAX_K[passes], spread=False)
        low, high = compute_speedup_range(
            alphas, verify, shares, num_layers, passes, verify_at_best=verify_at_best
        )
    return {
        "step_ratio": max(shares.values()),
        "step_shares": shares,
        "alphas": alphas,
        "low": low,
        "high": high,
    }


def _estimate_serving(
    planned: PlannedDraft, scenario: Scenario, draft_bytes: float, high: ExpectedSpeedup | None
) -> Budget | None:
    """Compute the memory of each device that serves the target with a draft.

    Args:
        planned: the sizes of the draft.
        scenario: the target and the device, and how the target is served.
        draft_bytes: bytes of the draft's weights.
        high: the high end of the estimated speedup, which is reached with K draft tokens per round.
            The memory is computed for this K; without an estimate (None), for K = 0.

    Returns:
        The memory budget; None for a draft without weights, which takes no memory.
    """
    if not planned.parts.parameters:
        return None

    # The `room` of a budget is the number of tokens of context that fit into the memory. With a
    # draft fewer tokens fit than without one. The difference is the draft's `cost`.
    alone = compute_budget(scenario.target, scenario.serving)
    budget = compute_budget(
        scenario.target,
        scenario.serving,
        draft_bytes,
        planned.cache,
        num_speculative_tokens=high.num_speculative_tokens if high else 0,
    )
    if budget.room is None or alone.room is None:
        return budget
    return replace(budget, cost=alone.room - budget.room)


def _estimate_training(
    method: str,
    planned: PlannedDraft,
    scenario: Scenario,
    recipe: str | None,
    settings: RecipeKeys,
    tokens: int | None,
) -> dict[str, Any]:
    """Estimate the memory, hours and disk space of training a draft.

    Args:
        method: the method.
        planned: the sizes of the draft.
        scenario: the target and the device.
        recipe: the name of the recipe; None if there is none.
        settings: the keys of this recipe, if the draft is trained with the recipe unchanged; else
            empty.
        tokens: distinct training tokens; None if they are not known.

    Returns:
        Fields of a PlanRow, by name.
    """
    # A draft without weights, such as a lookup, needs no training: its method states 0 training
    # tokens. So disk space and hours are 0. As for every draft, they are None if the number of
    # tokens is None.
    if planned.shape is None:
        zero_or_unknown = None if tokens is None else 0
        return {
            "disk_bytes": zero_or_unknown,
            "training_memory": {},
            "training_hours": zero_or_unknown,
        }
    target = scenario.target
    itemsize = target.itemsize()
    rows, length = _choose_micro_batch(scenario, settings)

    # Estimate memory and speed of a training step. Of the recipe's section `draft`, only the number
    # of unrolled steps matters here. Then choose on how many devices to train, so that memory
    # suffices.
    draft_keys = {
        key: value for key, value in settings.get("draft", {}).items() if key == "ttt_steps"
    }
    memory, tokens_per_second = estimate_training_needs(
        method,
        planned,
        target,
        scenario.device,
        draft_keys,
        (rows, length),
        itemsize,
        computed=scenario.computed,
    )
    device_memory = scenario.serving.memory_gb * 2**30
    launch = _choose_launch(target, memory, device_memory, scenario.device.most_per_machine)

    # Training takes one pass over the tokens with this launch. But if a recipe is used unchanged,
    # the recipe's own launch and number of steps count.
    trained = tokens
    if settings:
        configuration, num_processes = launch_of(str(recipe))
        is_sharded = settings["target"].get("shard") == "layers"
        launch = describe_launch(
            target, memory, configuration, num_processes, is_sharded=is_sharded
        )
        train = {**settings["train"], "per_device_train_batch_size": rows}
        default = DataConfig.model_fields["validation_fraction"].default
        held_out = settings["data"].get("validation_fraction", default)
        num_rows = estimate_rows(tokens, length, held_out) if tokens else None
        num_steps = count_steps(train, num_rows, launch.num_processes)
        assert num_steps is not None, f"recipe {recipe} names no number of tokens"
        trained = num_steps * count_step_rows(train, launch.num_processes) * length

    # If hidden states are stored, a token takes the vectors that the draft reads: for each feature,
    # one of the target's hidden size.
    bytes_per_token = METHODS[method].features * target.text.hidden_size * itemsize
    return {
        "disk_bytes": None if tokens is None else bytes_per_token * tokens,
        "micro_batch": (rows, length),
        "trained_tokens": trained,
        "training_memory": memory,
        "training_hours": None if trained is None else trained / tokens_per_second / 3600,
        "training_launch": launch,
    }


def _choose_micro_batch(scenario: Scenario, settings: RecipeKeys) -> tuple[int, int]:
    """Return the number of rows of a micro-batch in training, and the tokens of a row.

    Each is the number in the options, else that in the recipe's settings, else a default. A row is
    no longer than the target's longest context.
    """
    train = settings.get("train", {})
    rows = scenario.batch_size or train.get("per_device_train_batch_size", BATCH_SIZE)
    length = scenario.max_length or settings.get("data", {}).get("max_length", MAX_LENGTH)
    context = getattr(scenario.target.text, "max_position_embeddings", None)
    return rows, min(length, context or length)


def estimate_training_needs(
    method: str,
    planned: PlannedDraft,
    target: ModelConfigInfo,
    device: Device,
    draft_keys: DraftSettings,
    micro_batch: tuple[int, int],
    itemsize: int,
    *,
    computed: bool = True,
    is_mixed: bool = True,
    runs_layers: bool = True,
) -> tuple[dict[str, int], float]:
    """Estimate the memory of training on one device, and how many tokens per second it trains on.

    Args:
        method: the method.
        planned: the sizes of the draft, which must have layers.
        target: the target.
        device: the device that trains.
        draft_keys: keys of the recipe's section `draft`.
        micro_batch: rows, and tokens of a row.
        itemsize: bytes of a number of the target's weights.
        computed: whether to run the training step's own code over tensors without content, if the
            method supports it. Otherwise both results are rough.
        is_mixed: whether the step runs under bfloat16 autocast.
        runs_layers: whether each step runs the target's layers. If not, their hidden states are
            read from disk.

    Returns:
        The bytes of each part of the memory, by name, and the tokens per second.
    """
    # Estimate the memory roughly from the sizes. A head is unrolled over several positions, each of
    # which has activations.
    assert planned.shape is not None
    rows, length = micro_batch
    num_tokens = rows * length
    positions = draft_keys.get("ttt_steps", METHODS[method].positions)
    memory = estimate_training_memory(
        planned.parts,
        target.parameters * itemsize,
        planned.shape,
        planned.vocabulary,
        positions,
        num_tokens,
    )

    # If the step's own code can run without weights, count its operations. This gives a better
    # number for the activations.
    layer_weights = sizes.count_layer_weights_read(target.model) if runs_layers else 0.0
    if computed and planned.build is not None:
        step = count_training_step(
            method,
            planned.build,
            {**planned.counted_with, **draft_keys},
            target,
            rows=rows,
            length=length,
            is_mixed=is_mixed,
        )
        memory["activations"] = step.peak
        # The ledger does not count the target's layers, so their operations are added: two for each
        # weight and token.
        layer_flops = 2 * layer_weights * num_tokens
        return memory, device.estimate_tokens_per_second(step, num_tokens, layer_flops)

    # Otherwise count two operations per weight and token for the forward pass of the target, and
    # six per weight and position for forward and backward of the draft.
    other_weights = count_weights_read(target.model) - sizes.count_layer_weights_read(target.model)
    target_weights = layer_weights + other_weights
    flops_per_token = 2 * target_weights + 6 * planned.parts.read * positions
    flops_per_second = (
        MATRIX_SHARE * device.flops if isinstance(device, Machine) else TRAINING_FLOPS
    )
    return memory, flops_per_second / flops_per_token


def _choose_launch(
    target: ModelConfigInfo, memory: Mapping[str, int], device_memory: float, most: int
) -> Launch | None:
    """Choose the launch configuration that trains on the fewest devices of a machine.

    With several processes, the target's layers are split among them.

    Args:
        target: the target.
        memory: bytes of each part of training on one device.
        device_memory: bytes of memory that a device has.
        most: the most devices of a machine.

    Returns:
        The first configuration whose memory fits; None if none fits.
    """
    # Try few devices before many, and plain data parallelism (ddp) before ZeRO stage 2.
    for num_processes in (1, 2, 4, 8):
        if num_processes > most:
            break
        for name in ("ddp", "zero2"):
            is_sharded = num_processes > 1
            launch = describe_launch(target, memory, name, num_processes, is_sharded=is_sharded)
            if launch.device_bytes <= USABLE_MEMORY_SHARE * device_memory:
                return launch
    return None


def describe_launch(
    target: ModelConfigInfo, memory: Mapping[str, int], name: str, number: int, *, is_sharded: bool
) -> Launch:
    """Compute the memory of each process of a launch configuration.

    Args:
        target: the target.
        memory: bytes of each part of training on one device, without any splitting.
        name: name of the configuration in accelerate_configs/, such as `ddp` or `zero2`.
        number: number of processes.
        is_sharded: whether the target's layers are split among the processes.

    Returns:
        The launch configuration with the bytes that each process holds.
    """
    # If the target's layers are split, a process holds its part of them, and the layer that it is
    # running, gathered from all processes.
    layer_bytes = target.itemsize() * sum(
        size.numel() for key, size in target.model.named_parameters() if ".layers." in key
    )
    spared_bytes = 0.0
    if is_sharded:
        held_bytes = layer_bytes / number + layer_bytes / target.text.num_hidden_layers
        spared_bytes = layer_bytes - held_bytes

    # ZeRO splits the training state of the draft, which has 16 bytes per parameter. Stage 2 splits
    # gradient and moments (12 bytes), so each process keeps a quarter whole. Stage 3 splits all 16
    # bytes; each process also holds the gathered weights (4 bytes, a quarter).
    kept_shares = {"zero2": 0.25 + 0.75 / number, "zero3": 0.25 + 1 / number}
    kept_share = kept_shares.get(name.partition("_")[0], 1.0)
    device_bytes = sum(memory.values()) - spared_bytes - (1 - kept_share) * memory["draft"]
    return Launch(name, number, is_sharded, int(device_bytes))


def list_own_recipes(target: ModelConfigInfo) -> list[str]:
    """Return the names of the shipped recipes for models of a target's architecture and sizes.

    A fine-tune of a model has the shapes of that model's weights, whatever it is called.
    """
    names = []
    for config_path in sorted(RECIPES.glob("*/config.json")):
        # Most configs have another hidden size. Their models need not be built.
        raw = read_json(config_path)
        text = raw.get("text_config") or raw
        if text.get("hidden_size") != target.text.hidden_size:
            continue
        folder = config_path.parent
        model = read_model_config(str(folder), key="recipe")
        if _list_weight_sizes(model) == _list_weight_sizes(target):
            names += [f"{folder.name}/{path.stem}" for path in sorted(folder.glob("*.yaml"))]
    return [name for name in names if _has_files(name)]


def _list_weight_sizes(model: ModelConfigInfo) -> dict[str, object]:
    """Return the settings of a language model on which the shapes of its weights depend."""
    keys = model.text.to_dict()
    weight_sizes = {key: value for key, value in keys.items() if SIZE_KEY.fullmatch(key)}
    return {"model_type": model.text.model_type, **weight_sizes}


def _has_files(recipe: str) -> bool:
    """Return whether the files exist that a shipped recipe reads.

    Recipes for a target in runs/ read what a script of the repository wrote there.
    """
    model = str(read_recipe(recipe)["target"]["model"])
    return not model.startswith("runs/") or Path(model).exists()


def find_recipe(
    method: str, target: str, own_recipes: Sequence[str] = ()
) -> tuple[str | None, RecipeKeys]:
    """Find the shipped recipe that trains a method for a target.

    Args:
        method: the method.
        target: the target's name.
        own_recipes: the names of the recipes for models of the target's sizes.

    Returns:
        The name and the keys of the recipe that names the target or is for its sizes. If there is
        none: the name of the recipe for small targets, or else of the one for pico (the tiny target
        that ships with the package), and no keys. If there is neither: None and no keys.
    """
    names = sorted(
        path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml")
    )

    # Read all shipped recipes of the method.
    recipes = {}
    for name in names:
        keys = read_recipe(name)
        if keys.get("method") == method:
            recipes[name] = keys

    # Prefer a recipe made for this target, then the one of small targets, then the one of pico.
    for name, keys in recipes.items():
        if name in own_recipes or keys["target"]["model"] == target:
            return name, keys
    for folder in ("small", "pico"):
        for name in recipes:
            if name.startswith(f"{folder}/"):
                return name, {}
    return None, {}


def launch_of(recipe: str) -> tuple[str, int]:
    """Read how a shipped recipe is launched, from the comments at its top.

    Args:
        recipe: the name of the recipe.

    Returns:
        The name of the configuration in accelerate_configs/, and the number of processes.
    """
    # The first launch command in the comments counts.
    text = (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8")
    (name, number), *_ = LAUNCH.findall(text)
    # Without `--num_processes`, the configuration itself says how many processes there are.
    return name, int(number or read_yaml(LAUNCHES / f"{name}.yaml")["num_processes"])


@cache
def read_recipe(name: str) -> RecipeKeys:
    """Read the keys of a shipped recipe, by section."""
    keys: RecipeKeys = read_yaml(RECIPES / f"{name}.yaml")
    return keys


def select_best_k(
    alpha: float, verify: Sequence[float], c: float, passes: str = "K"
) -> ExpectedSpeedup:
    """Choose the number K of draft tokens per round that gives nearly the best speedup.

    The speedup is S = AL / (v + c·n), with the acceptance length AL = 1 + alpha + … + alpha^K
    (arXiv 2211.17192) and n passes of the draft per round. The smallest K whose S is within 1 % of
    the best S is chosen.

    Args:
        alpha: the acceptance rate, the same at every position.
        verify: v for K = 1, 2, …: the cost of verifying K draft tokens, in plain target steps.
        c: the cost of one pass of the draft, in plain target steps.
        passes: n, the passes that the draft takes per round: "K" for one per draft token, "1" for
            one in total, "0" for a lookup.
    """
    # Compute S for every K.
    lengths = [expected_acceptance_length(alpha, k) for k in range(1, len(verify) + 1)]
    speedups = []
    for k, (length, v) in enumerate(zip(lengths, verify, strict=True), 1):
        draft_cost = {"K": c * k, "1": c, "0": 0.0}[passes]
        speedups.append(float(predicted_speedup(length, v, draft_cost)))

    # Take the smallest K that is nearly the best. A larger K would only be faster if the acceptance
    # rate is really as high as estimated.
    index = next(index for index, speedup in enumerate(speedups) if speedup >= 0.99 * max(speedups))
    return ExpectedSpeedup(index + 1, lengths[index], speedups[index])


def compute_speedup_range(
    alphas: tuple[float, float],
    verify: Sequence[float],
    shares: Mapping[str, float],
    target_layers: int,
    passes: str = "K",
    *,
    verify_at_best: Sequence[float] | None = None,
) -> tuple[ExpectedSpeedup, ExpectedSpeedup]:
    """Return the low and the high end of the estimated speedup, each with its best K.

    The low end has the lower acceptance rate, and the overhead of an engine in drafting and
    verifying. The high end has the higher acceptance rate and no overhead.

    Args:
        alphas: the lower and the higher acceptance rate.
        verify: the cost of verifying K = 1, 2, … draft tokens, in plain target steps.
        shares: the cost of a draft step, divided by that of a target step: `weights` by the bytes
            that they read, `layers` by the layers that they run.
        target_layers: layers of the target.
        passes: how many passes the draft takes per round: "K" for one per draft token, "1" for one
            in total, "0" for a lookup.
        verify_at_best: the costs of verifying at the high end. None: verifying costs as much as a
            plain step at every K, as for a dense target with few sequences.
    """
    # For the low end, take the larger of the two cost estimates, and add the overhead of an engine
    # to the draft step and to verification. For a draft step, this is the time that LAYERS_OVERHEAD
    # of the target's layers take; a draft that runs no layers has no overhead.
    lower_alpha, higher_alpha = alphas
    draft_overhead = LAYERS_OVERHEAD / target_layers if shares["layers"] else 0.0
    slow_draft_step = max(shares.values()) + draft_overhead
    slow_verify = [v + VERIFY_OVERHEAD for v in verify]
    low = select_best_k(lower_alpha, slow_verify, slow_draft_step, passes)

    # For the high end, a draft step costs only the bytes that it reads.
    fast_verify = verify_at_best or [1.0] * len(verify)
    high = select_best_k(higher_alpha, fast_verify, shares["weights"], passes)
    return low, high


def estimate_training_memory(
    parts: sizes.ParameterCounts,
    target_bytes: int,
    shape: sizes.ModelShape,
    vocabulary: int,
    num_steps: int,
    num_tokens: int,
) -> dict[str, int]:
    """Estimate roughly how many bytes each part of training takes on one device.

    The device holds the target's weights, and in float32 the draft with its gradients and AdamW's
    state. Many drafts also use the target's embedding and LM head, of which training holds a copy
    in float32 that it does not change: the frozen tables. Activations are assumed to be 28H + 4I
    bfloat16 numbers per layer, token and drafted position, where H is the hidden size and I the
    MLP's width. These factors were counted in EAGLE-3 heads. The logits of one block of the loss
    are added.

    Args:
        parts: the parameters of the draft.
        target_bytes: bytes of the target's weights.
        shape: the sizes of the draft's layers.
        vocabulary: tokens that the draft's logits span.
        num_steps: drafted positions.
        num_tokens: tokens of a micro-batch.
    """
    # A bfloat16 number takes two bytes.
    bytes_per_token = 2 * (28 * shape.hidden_size + 4 * shape.intermediate_size) * parts.num_layers
    return {
        "target": target_bytes,
        "draft": BYTES_PER_TRAINED * parts.parameters,
        "frozen tables": BYTES_PER_COPIED * parts.copied,
        "activations": num_tokens * num_steps * bytes_per_token + 2 * BLOCK_ROWS * vocabulary,
    }
