"""The method to start with, why, and a command that suits the target, whose only blanks are where data and prompts are."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdistill.methods import METHODS
from specdistill.planning.budget import MOST_DEVICES, Budget
from specdistill.planning.rows import A_BATCH, SMALL, Row, Training, read_recipe

DATA, PROMPTS = "path/to/conversations.jsonl", "path/to/prompts.jsonl"
PROMPT_TOKENS = 128  # of a text that the target continues
LEARNING_RATE = 1e-3  # of a target of billions; recipes of small ones have more
MOST_GENERATED = 512  # sequences at a time
EVALUATIONS = 10  # at least, in a run


def recommend(
    rows: Sequence[Row], target: Mapping[str, Any], alone: Budget | None = None, training: Training = A_BATCH
) -> dict[str, str | None]:
    """The method to start with, why, and the command; `target` as in a plan, `alone` its budget without a draft.

    It is what has the highest middle of its speedup, look-up included. Layers that come with the target cost no training either: they win
    unless another draft promises more at its low end, or look-up at its high end.
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


def _obstacle(row: Row, target: Mapping[str, Any]) -> str:
    """What stands before training, as the end of a sentence."""
    if row.draft or not row.training_memory or row.training_devices == 1:
        return ""
    if row.training_devices is None:
        return f"; training it fits on none of up to {MOST_DEVICES} devices"
    kind = target["quantization"]
    return f"; target.shard takes no {kind}: save the target in {target['dtype']} first" if kind else ""


def _command(row: Row, target: Mapping[str, Any], alone: Budget | None, training: Training) -> str | None:
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


def _sizes(row: Row, target: Mapping[str, Any], alone: Budget | None, training: Training) -> list[str]:
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
