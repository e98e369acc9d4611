"""The plan: each method's row for one target, the assumptions behind the rows, what the target alone takes, and where to start.

Nothing is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdistill.methods import METHODS
from specdistill.methods.sizes import ASSUMED_DTYPE, TOKENS_PER_SAMPLE, Described, weights_read
from specdistill.planning.accounting import H100, MATRIX_SHARE, TRAFFIC_SHARE
from specdistill.planning.budget import (
    ENGINE_BYTES,
    MOST_DEVICES,
    PASS_TOKENS,
    USABLE,
    Budget,
    ServingSettings,
    budget,
    weight_bytes,
)
from specdistill.planning.estimates import (
    A_BATCH,
    FLOPS_PER_BYTE,
    LAYERS_OVERHEAD,
    MAX_K,
    SMALL,
    TRAINING_FLOPS,
    VERIFY_OVERHEAD,
    MicroBatch,
    Passes,
    PlanRow,
    read_recipe,
    row_of,
)
from specdistill.planning.reading import check_fit, method_of_config
from specdistill.targets.cache import is_recurrent

DEAR = 0.1  # a draft step that costs more of a target's than this rarely pays
DATA, PROMPTS = "path/to/conversations.jsonl", "path/to/prompts.jsonl"  # the blanks of a command
PROMPT_TOKENS = 128  # of a text that the target continues
LEARNING_RATE = 1e-3  # of a target of billions; recipes of small ones have more
MOST_GENERATED = 512  # sequences at a time
EVALUATIONS = 10  # at least, in a run
ASSUMPTIONS = (
    "Nothing here is measured. Parameters follow from configs, acceptance from the sources named, speedup S = AL / (v + c·K) from both.",
    "c is the larger of a step's shares of what is read (weights, KV cache) and of layers run. A pass takes as long as reading, or as "
    f"computing where that is longer: an {H100.name} computes {FLOPS_PER_BYTE:.0f} operations a byte. Quantised weights count as they are "
    "stored, where an index says how large they are.",
    f"S from: the lower acceptance, v + {VERIFY_OVERHEAD} and {LAYERS_OVERHEAD:g} layers' time more a draft step, as fitted "
    "to vLLM issue 20780, and every token of a mixture to experts of its own. S to: the higher acceptance, and only what is read and "
    "computed takes time.",
    f"Acceptance is taken as the same at every position; K is the fewest tokens within 1 % of the best, at most {MAX_K['K']} of a draft "
    "that takes a step for each.",
    f"Serving: {ENGINE_BYTES / 2**30:g} GiB for the engine and activations of {PASS_TOKENS:,} prompt tokens a pass. Latent attention keeps "
    "its latent, a window its tokens, a recurrent layer its state; devices share heads, and each has at least one.",
    f"{TOKENS_PER_SAMPLE} training tokens a conversation. Disk: if hidden states were stored. Memory: features computed in each step, "
    "all tokens with a loss; draft and AdamW in float32.",
    "Computed: the training step's own code was run over tensors without content, and its memory, traffic and arithmetic counted. "
    f"A device reaches {MATRIX_SHARE:.0%} of its bfloat16 peak in matrix products and {TRAFFIC_SHARE:.0%} of its bandwidth in all else, "
    f"and gives {USABLE:.0%} of its memory. Roughly: 28H + 4I numbers a layer for each token and step.",
    f"Hours: one pass over the tokens, without generating them, on one {H100.name} where computed, else on one GPU at "
    f"{TRAINING_FLOPS / 1e12:.0f} TFLOP/s; on N GPUs about an N-th.",
)


@dataclass(frozen=True)
class Plan:
    """serving: what it is planned for; alone: what each device holds then without a draft."""

    target: dict[str, Any]
    methods: list[PlanRow]
    recommendation: dict[str, str | None]
    warnings: list[str]
    serving: dict[str, Any]
    alone: Budget
    assumptions: Sequence[str] = ASSUMPTIONS


def make_plan(
    target: Described,
    draft: Described | None = None,
    *,
    serving: ServingSettings | None = None,
    training: MicroBatch = A_BATCH,
    computed: bool = False,
) -> Plan:
    """Plan for a target, and for a draft of it where one is given. Raises UserError for what is no target, or no draft of it.

    serving: None for one sequence of usual length on one H100.
    computed: run the steps of training over tensors without content, which takes seconds, where a method can (`PlannedDraft.build`).

    Whether a target's logits are scaled or capped changes nothing in a plan: alphas are published ones, sizes and passes the same.
    """
    serving = serving or ServingSettings.of(target)
    facts = _facts(target, serving)
    longest = facts["max_length"]
    serving.check(target, draft)
    training = replace(training, max_length=min(training.max_length, longest or training.max_length))
    passes, alone = Passes(target, serving), budget(target, serving)
    warnings = _warnings(target)
    rows = {method: row_of(method, target, None, passes, training, computed=computed) for method in METHODS}
    if draft is not None:
        method = method_of_config(draft, target)
        warnings += check_fit(draft, target, method)
        rows[method] = row = row_of(method, target, draft, passes, training, computed=computed)
        warnings += _warnings_of_pair(row, draft)
    warnings += [warning for row in rows.values() for warning in row.warnings]
    recommendation = recommend(list(rows.values()), facts, alone, training)
    return Plan(facts, list(rows.values()), recommendation, warnings, _asked(serving, target), alone)


def _warnings(target: Described) -> list[str]:
    """What a plan cannot know of its target."""
    warnings = []
    if target.tiny_random is None:
        warnings.append(
            f"no small {type(target.model).__name__} can be made: whether it is a target shows when its weights are loaded"
        )
    if target.dtype is None:
        warnings.append(f"the config names no dtype: bytes are of {str(ASSUMED_DTYPE).removeprefix('torch.')}")
    if (settings := target.quantization) and target.stored_bytes is None:
        dtype = str(target.dtype or ASSUMED_DTYPE).removeprefix("torch.")
        counted = f"no index says how large they are, so bytes here are of {dtype}, and c of a draft in that is higher"
        warnings.append(f"the target's weights are {settings.get('quant_method', 'quantised')}: {counted}")
    if target.cache is None:
        warnings.append("its class does not show its KV cache: budgets are without it")
    return warnings


def _warnings_of_pair(row: PlanRow, draft: Described) -> list[str]:
    """Whether a draft can pay for its target, by the best of what is published."""
    warnings, c = [], row.step_ratio or 0.0
    if c > DEAR and METHODS[row.method].cost.passes == "K":
        binding = "what it reads" if row.step_shares and row.step_shares["weights"] == c else "the layers it runs"
        share = f"a step of {draft.name} takes {c:.3f} of the target's, by {binding}"
        warnings.append(f"{share}: more than a tenth seldom pays beyond a few draft tokens")
    if row.high and row.high.speedup <= 1:
        warnings.append(f"the pair cannot pay here: a predicted speedup of at most {row.high.speedup:.2f}")
    return warnings


def _asked(serving: ServingSettings, target: Described) -> dict[str, Any]:
    """What was asked for, as a report has it."""
    dtype = serving.dtype or target.dtype or ASSUMED_DTYPE
    names = {"dtype": dtype, "kv_cache_dtype": serving.kv_cache_dtype or dtype}
    return vars(serving) | {name: str(value).removeprefix("torch.") for name, value in names.items()}


def _facts(target: Described, serving: ServingSettings) -> dict[str, Any]:
    native, text, dtype = target.native_mtp, target.text, target.dtype or ASSUMED_DTYPE
    return {
        "model": target.name,
        "revision": target.revision,
        "model_type": text.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": target.quantization and target.quantization.get("quant_method", "quantised"),
        "parameters": target.parameters,
        "bytes": round(weight_bytes(target)),
        "kv_bytes": target.cache.per_token(serving.kv_itemsize(target)) if target.cache else None,
        "parameters_read": round(weights_read(target.model)),
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "max_length": getattr(text, "max_position_embeddings", None),
        "recurrent": is_recurrent(text),
        "native_mtp": native and {"key": native[0], "layers": native[1]},
    }


def recommend(
    rows: Sequence[PlanRow], target: Mapping[str, Any], alone: Budget | None = None, training: MicroBatch = A_BATCH
) -> dict[str, str | None]:
    """The method to start with, why, and the command; `target` as in a plan, `alone` its budget without a draft.

    It is what has the highest middle of its speedup, n-gram lookup included. Layers that come with the target cost no training either: they
    win unless another draft promises more at its low end, or n-gram lookup at its high end.
    """
    ends = {row.method: (row.low.speedup, row.high.speedup) for row in rows if row.low and row.high}
    lookup = next(row for row in rows if not METHODS[row.method].is_trained)
    drafts = sorted((row for row in rows if row.method in ends and row is not lookup), key=lambda row: -row.middle)
    native = drafts and target["native_mtp"] and METHODS[max(drafts, key=lambda row: ends[row.method][0]).method].in_target
    if native:
        drafts.sort(key=lambda row: not METHODS[row.method].in_target)
    promise = (lambda row: ends[row.method][1]) if native else (lambda row: row.middle)
    ranked = [*drafts, lookup] if drafts and promise(drafts[0]) > promise(lookup) else [lookup, *drafts]
    best = ranked[0]
    low, high = ends[best.method]
    if high <= 1:
        return {"method": None, "reason": "no method promises more than plain decoding", "start": None}
    why = "the most in the middle of its range"
    if best is lookup:
        why = "it needs no training, and no draft promises more"
    elif native:
        why = "its layer comes with the target, and nothing else promises more at its low end"
    others = ", ".join(f"{row.method} {row.middle:.2f}" for row in ranked[1:])
    reason = f"{why}: {low:.2f} to {high:.2f} times plain decoding, middle {best.middle:.2f}{f' ({others})' if others else ''}"
    return {
        "method": best.method,
        "reason": f"{reason}{_obstacle(best, target)}",
        "start": _command(best, target, alone, training),
    }


def _obstacle(row: PlanRow, target: Mapping[str, Any]) -> str:
    """What stands before training, as the end of a sentence."""
    if row.draft or not row.training_memory or row.training_devices == 1:
        return ""
    if row.training_devices is None:
        return f"; training it fits on none of up to {MOST_DEVICES} devices"
    kind = target["quantization"]
    return f"; target.shard takes no {kind}: save the target in {target['dtype']} first" if kind else ""


def _command(row: PlanRow, target: Mapping[str, Any], alone: Budget | None, training: MicroBatch) -> str | None:
    """What measures a draft that is there, or trains the one that the row describes; None where no recipe of the method ships."""
    folder = f"runs/{target['model'].rstrip('/').split('/')[-1].lower()}-{row.method.replace('_', '-')}"
    at_revision = [f"target.revision={target['revision']}"] if target["revision"] else []
    if row.draft or not METHODS[row.method].is_trained:
        draft = [f"draft={row.draft}"] if row.draft else []
        tokens = (row.low.num_speculative_tokens + row.high.num_speculative_tokens) // 2 if row.low and row.high else 1
        keys = [f"target={target['model']}", *at_revision, *draft, f"method={row.method}", f"target.dtype={target['dtype']}"]
        keys += [f"eval.num_speculative_tokens={tokens}", f"suite={PROMPTS}", f"output_dir={folder}/report"]
        return f"specdistill eval {' '.join(keys)}"
    if row.recipe is None or row.training_devices is None:
        return None
    keys = [f"recipe={row.recipe}"]
    if read_recipe(row.recipe)["target"]["model"] != target["model"]:
        keys += [f"target.model={target['model']}", *at_revision, f"data.source={DATA}", f"train.output_dir={folder}"]
        keys += [*row.recipe_keys, *_sizes(row, target, alone, training)]
    return f"specdistill train {' '.join(keys)}"


def _sizes(row: PlanRow, target: Mapping[str, Any], alone: Budget | None, training: MicroBatch) -> list[str]:
    """Keys that fit a recipe of small targets to this one."""
    assert row.recipe is not None and row.training_devices is not None
    recipe = read_recipe(row.recipe)
    has_length = target["max_length"] or training.max_length
    keys = ["data.packing=false"] if target["recurrent"] else []
    if target["parameters"] <= SMALL:
        return keys + ([f"data.max_length={has_length}"] if recipe["data"]["max_length"] > has_length else [])
    length = min(training.max_length, has_length)
    tokens = row.training_tokens or recipe["data"]["regenerate"]["num_tokens"]
    steps = max(1, round(tokens / (training.batch_size * length * row.training_devices)))
    every = max(1, min(1000, steps // EVALUATIONS))
    at_a_time = max(1, min(MOST_GENERATED, (alone.room or 0) // length if alone else MOST_GENERATED))
    given = {
        "target.dtype": target["dtype"],
        "data.max_length": length,
        "data.regenerate.num_tokens": tokens,
        "data.regenerate.prompt_tokens": min(PROMPT_TOKENS, length // 2),
        "data.regenerate.batch_size": 1 << (at_a_time.bit_length() - 1),
        "train.per_device_train_batch_size": training.batch_size,
        "train.max_steps": steps,
        "train.eval_steps": every,
        "train.save_steps": every,
        "train.learning_rate": LEARNING_RATE,
    }
    if row.training_devices > 1:
        given |= {"target.shard": "layers", "launch": "ddp", "num_processes": row.training_devices}
    return keys + [f"{key}={value}" for key, value in given.items()]
