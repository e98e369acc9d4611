"""The plan: each method's row for one target, what the target alone takes, and where to start: the method that is recommended, why, and
the commands that train or measure it. Nothing is measured.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specdistill.methods import METHODS
from specdistill.methods.sizes import ASSUMED_DTYPE, Described, weights_read
from specdistill.planning.budget import Budget, budget, kv_itemsize, served, weight_bytes
from specdistill.planning.command import ServingOptions
from specdistill.planning.estimates import (
    ASSUMPTIONS,
    GPUS_PER_MACHINE,
    SMALL,
    PlanRow,
    Scenario,
    read_recipe,
    row_of,
)
from specdistill.planning.reading import check_fit, method_of_config
from specdistill.project import RECIPES
from specdistill.targets.cache import is_recurrent

DATA, PROMPTS = "path/to/conversations.jsonl", "path/to/prompts.jsonl"  # the blanks of a command
CONSENT = {"vllm": " --trust-remote-code", "specdistill": " target.trust_remote_code=true"}
SERVER = "[http://127.0.0.1:8000]"  # where `vllm serve` listens
PROMPT_TOKENS = 128  # of a text that the target continues
LEARNING_RATE, ADAMW_LEARNING_RATE = (
    1e-3,
    1e-4,
)  # of a target of billions; recipes of small ones have more
MOST_GENERATED = 512  # sequences at a time
EVALUATIONS = 10  # at least, in a run


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
    serving: ServingOptions | None = None,
    **training: Any,
) -> Plan:
    """Plan for a target, and for a draft of it where one is given. Raises UserError for what is no target, or no draft of it.

    serving: None for one sequence of usual length on one H100. training: `batch_size`, `max_length` and `computed` of `Scenario`.
    """
    serving = served(serving or ServingOptions(), target, draft)
    facts, scenario = _facts(target, serving), Scenario(target, serving, **training)
    warnings = _warnings(target)
    rows = {method: row_of(method, None, scenario) for method in METHODS}
    if draft is not None:
        method = method_of_config(draft, target)
        warnings += check_fit(draft, target, method)
        rows[method] = row_of(method, draft, scenario)
    warnings += [warning for row in rows.values() for warning in row.warnings]
    recommendation = recommend(
        list(rows.values()),
        facts,
        budget(target, serving.model_copy(update={"tensor_parallel": 1})),
    )
    dtype = serving.dtype or facts["dtype"]
    asked = vars(serving) | {"dtype": dtype, "kv_cache_dtype": serving.kv_cache_dtype or dtype}
    return Plan(
        facts, list(rows.values()), recommendation, warnings, asked, budget(target, serving)
    )


def _warnings(target: Described) -> list[str]:
    """What a plan cannot know of its target."""
    warnings = []
    if target.tiny_random is None:
        made = f"no small {type(target.model).__name__} can be made"
        warnings.append(f"{made}: whether it is a target shows when its weights are loaded")
    if target.dtype is None:
        warnings.append(
            f"the config names no dtype: bytes are of {str(ASSUMED_DTYPE).removeprefix('torch.')}"
        )
    if (settings := target.quantization) and target.stored_bytes is None:
        dtype = str(target.dtype or ASSUMED_DTYPE).removeprefix("torch.")
        counted = f"no index says their size: bytes here are of {dtype}, and c of a draft in that is higher"
        warnings.append(
            f"the target's weights are {settings.get('quant_method', 'quantised')}: {counted}"
        )
    if target.cache is None:
        warnings.append("its class does not show its KV cache: budgets are without it")
    return warnings


def _facts(target: Described, serving: ServingOptions) -> dict[str, Any]:
    native, text, dtype = target.native_mtp, target.text, target.dtype or ASSUMED_DTYPE
    return {
        "model": target.name,
        "revision": target.revision,
        "trust_remote_code": target.trust_remote_code,
        "model_type": text.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": target.quantization
        and target.quantization.get("quant_method", "quantised"),
        "parameters": target.parameters,
        "bytes": round(weight_bytes(target)),
        "kv_bytes": target.cache.per_token(kv_itemsize(serving, target)) if target.cache else None,
        "parameters_read": round(weights_read(target.model)),
        "max_length": getattr(text, "max_position_embeddings", None),
        "recurrent": is_recurrent(text),
        "native_mtp": native and {"key": native[0], "layers": native[1]},
    }


def recommend(
    rows: Sequence[PlanRow], target: Mapping[str, Any], whole: Budget | None = None
) -> dict[str, str | None]:
    """The method to start with, why, the commands that start it (`start`, a line each), and the one that measures n-gram lookup (`lookup`).

    target: as in a plan. whole: what one device holds that serves it without a draft.

    It is what has the highest middle of its speedup, n-gram lookup included; of drafts, one for which the target has a recipe of its own
    goes first, and one that can be trained. Layers that come with the target cost no training: they win unless n-gram lookup promises more
    at its high end.
    """
    ends = {row.method: (row.low.speedup, row.high.speedup) for row in rows if row.low and row.high}
    lookup = next(row for row in rows if not METHODS[row.method].is_trained)
    drafts = sorted(
        (row for row in rows if row.method in ends and row is not lookup),
        key=partial(_order, target),
    )
    native = target["native_mtp"] and any(METHODS[row.method].in_target for row in drafts)
    if native:
        drafts.sort(key=lambda row: not METHODS[row.method].in_target)
    promise = (lambda row: ends[row.method][1]) if native else (lambda row: row.middle)
    best = drafts[0] if drafts and promise(drafts[0]) > promise(lookup) else lookup
    low, high = ends[best.method]
    own = (
        keys
        for row in rows
        if row.recipe and (keys := read_recipe(row.recipe))["target"]["model"] == target["model"]
    )
    suite = next((keys["eval"]["suite"] for keys in own if "suite" in keys["eval"]), PROMPTS)
    advice: dict[str, str | None] = {"lookup": _measuring(lookup, target, whole, suite)}
    if high <= 1:
        return {
            "method": None,
            "reason": "no method promises more than plain decoding",
            "start": None,
            **advice,
        }
    why = (
        "by a recipe of this target's own"
        if _is_own(best, target)
        else "the highest middle that fits here"
    )
    if best.middle == max(row.middle for row in rows):
        why = "the highest middle of all methods"
    if best is lookup:
        why = "without training, and nothing that is trained quickly promises more"
    elif native:
        why = "its layer comes with the target"
    is_there = best.draft or not METHODS[best.method].is_trained
    start = _measuring(best, target, whole, suite) if is_there else _training(best, target, whole)
    reason = f"an estimated {low:.2f} to {high:.2f} times the speed of plain decoding, {why}.{_needs(best, target, start)}"
    return {"method": best.method, "reason": reason, "start": start, **advice}


def _order(target: Mapping[str, Any], row: PlanRow) -> tuple[bool, bool, bool, float]:
    """Drafts that are there and recipes of the target's own come first, then what can be trained, then what promises more. What fills a
    block in one pass learns slowly: with what recipes of small targets train on, others are ahead (docs/methods.md).
    """
    is_slow = target["parameters"] <= SMALL and METHODS[row.method].passes == "1"
    return (
        not (row.draft or _is_own(row, target)),
        not (row.draft or row.training_launch),
        is_slow,
        -row.middle,
    )


def _is_own(row: PlanRow, target: Mapping[str, Any]) -> bool:
    return row.recipe is not None and bool(
        read_recipe(row.recipe)["target"]["model"] == target["model"]
    )


def _needs(row: PlanRow, target: Mapping[str, Any], start: str | None) -> str:
    """What training takes, in the order in which it is decided: the launch, the sharding, who generates the data."""
    if row.draft or not row.micro_batch:
        return ""
    if (launch := row.training_launch) is None:
        rows, length = row.micro_batch
        return f" {rows} rows of {length:,} tokens on each of {GPUS_PER_MACHINE} devices are too much to train: lower training.batch_size."
    held = f" Training holds {launch.device_bytes / 2**30:.3g} GiB on "
    if launch.num_processes == 1:
        return f"{held}one device."
    kind = target["quantization"]
    refused = (
        f" (which takes no {kind}: save the target in {target['dtype']} first)" if kind else ""
    )
    shared = f"; target.shard=layers{refused}" if launch.is_sharded else ""
    served = (
        "; a server generates the data first, and ends before training"
        if start and start.startswith("vllm")
        else ""
    )
    return f"{held}each of {launch.num_processes} devices: launch={launch.configuration}{shared}{served}."


def _command(verb: str, target: Mapping[str, Any], keys: Mapping[str, Any]) -> str:
    """With those of the keys that have a value."""
    pairs = [f"{key}={value}" for key, value in keys.items() if value is not None]
    return shlex.join(["specdistill", *verb.split(), *pairs]) + (
        CONSENT["specdistill"] if target["trust_remote_code"] else ""
    )


def _folder(row: PlanRow, target: Mapping[str, Any]) -> str:
    return (
        f"runs/{target['model'].rstrip('/').split('/')[-1].lower()}-{row.method.replace('_', '-')}"
    )


def _measuring(row: PlanRow, target: Mapping[str, Any], whole: Budget | None, suite: str) -> str:
    """The command that measures a draft that is there, or n-gram lookup."""
    tokens = (
        (row.low.num_speculative_tokens + row.high.num_speculative_tokens) // 2
        if row.low and row.high
        else 1
    )
    keys = {
        "method": row.method,
        "target": target["model"],
        "target.revision": target["revision"],
        "draft": row.draft,
    }
    keys |= {
        "target.dtype": target["dtype"],
        "target.device_map": None if whole is None or whole.fits else "auto",
    }
    keys |= {
        "eval.num_speculative_tokens": tokens,
        "suite": suite,
        "output_dir": f"{_folder(row, target)}/report",
    }
    return _command("eval", target, keys)


def _training(row: PlanRow, target: Mapping[str, Any], whole: Budget | None) -> str | None:
    """The commands that train what the row describes; None where no recipe of the method ships, or no device holds it."""
    if row.recipe is None or (launch := row.training_launch) is None:
        return None
    number, trusted = launch.num_processes, target["trust_remote_code"]
    launched: dict[str, Any] = (
        {"launch": launch.configuration, "num_processes": number} if number > 1 else {}
    )
    if _is_own(row, target):
        header = (
            (RECIPES / f"{row.recipe}.yaml").read_text(encoding="utf-8").replace(" \\\n#      ", "")
        )
        before = re.findall(
            r"^#   ((vllm|specdistill) (?:serve|data make) .*)$", header, re.MULTILINE
        )
        train = _command("train", target, {"recipe": row.recipe, **launched})
        return "\n".join([*(line + CONSENT[program] * trusted for line, program in before), train])
    if number > 1:
        launched |= {"target.shard": "layers", "data.regenerate.server": SERVER}
    model = {
        "recipe": row.recipe,
        "target.model": target["model"],
        "target.revision": target["revision"],
    }
    keys = {
        **model,
        **launched,
        "data.source": DATA,
        **_sizes(row, target, whole),
        "train.output_dir": _folder(row, target),
    }
    train = _command(
        "train", target, {**keys, **dict(key.split("=", 1) for key in row.recipe_keys)}
    )
    if number == 1:
        return train
    each = (whole and whole.tensor_parallel) or 1
    options = {
        "--revision": target["revision"],
        "--tensor-parallel-size": each,
        "--data-parallel-size": number // each,
    }
    words = [
        word
        for name, value in options.items()
        if value not in (None, 1)
        for word in (name, str(value))
    ]
    server = shlex.join(["vllm", "serve", target["model"], *words]) + CONSENT["vllm"] * trusted
    of_rows = {key: value for key, value in keys.items() if key in model or key.startswith("data.")}
    return "\n".join([server, _command("data make", target, of_rows), train])


def _sizes(row: PlanRow, target: Mapping[str, Any], whole: Budget | None) -> dict[str, Any]:
    """Keys that fit a recipe of small targets to this one."""
    assert (
        row.recipe is not None and row.training_launch is not None and row.micro_batch is not None
    )
    recipe, launch, (rows, length) = read_recipe(row.recipe), row.training_launch, row.micro_batch
    keys: dict[str, Any] = {"data.packing": "false" if target["recurrent"] else None}
    if target["parameters"] <= SMALL:
        return keys | {"data.max_length": length if recipe["data"]["max_length"] > length else None}
    tokens = row.training_tokens or recipe["data"]["regenerate"]["num_tokens"]
    steps = max(1, round(tokens / (rows * length * launch.num_processes)))
    every, positions = max(1, min(1000, steps // EVALUATIONS)), METHODS[row.method].positions
    room = (whole.room or 0) // length if whole and launch.num_processes == 1 else MOST_GENERATED
    at_a_time, adamw = (
        max(1, min(MOST_GENERATED, room)),
        "adamw" if launch.configuration.startswith("zero") else None,
    )
    return keys | {
        "data.max_length": length,
        "data.regenerate.num_tokens": f"{tokens:_}",
        "data.regenerate.prompt_tokens": min(PROMPT_TOKENS, length // 2),
        "data.regenerate.batch_size": 1 << (at_a_time.bit_length() - 1),
        "target.dtype": target["dtype"],
        "draft.ttt_steps": positions
        if recipe["draft"].get("ttt_steps", positions) != positions
        else None,
        "optimizer": adamw,
        "train.per_device_train_batch_size": rows,
        "train.max_steps": steps,
        "train.eval_steps": every,
        "train.save_steps": every,
        "train.learning_rate": ADAMW_LEARNING_RATE if adamw else LEARNING_RATE,
    }
