"""Make the plan for a target: a row for each method, and a recommendation.

The plan also says what the target alone holds. The recommendation is the method to start with, the
reason, and the commands that train or measure it. Nothing is measured.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TypedDict

from specdistill.advice.plan.accounting import (
    H100,
    Device,
    Machine,
)
from specdistill.advice.plan.budget import (
    Budget,
    check_serving,
    compute_budget,
    count_kv_itemsize,
    count_weight_bytes,
)
from specdistill.advice.plan.estimates import (
    MAX_SMALL_TARGET_PARAMETERS,
    PlanRow,
    Scenario,
    build_plan_row,
    list_assumptions,
    read_recipe,
)
from specdistill.advice.plan.options import ServingOptions
from specdistill.advice.plan.reading import check_draft_fit, find_method_of_config
from specdistill.common.project import RECIPES
from specdistill.methods import METHODS
from specdistill.methods.sizes import ASSUMED_DTYPE, ModelConfigInfo, count_weights_read
from specdistill.recipe.load import REQUIRED_MARK
from specdistill.targets.cache import is_recurrent

# Placeholders in commands, which the user fills in.
DATA = "path/to/conversations.jsonl"
BFLOAT16_TARGET = "path/to/bfloat16-weights"
PROMPTS = "path/to/prompts.jsonl"
# The consent to run a repository's own code, by the program whose command gets it.
CONSENT = {"vllm": " --trust-remote-code", "specdistill": " target.trust_remote_code=true"}
SERVER = "[http://127.0.0.1:8000]"  # the address at which `vllm serve` listens
PROMPT_TOKENS = 128  # tokens of a text that the target continues
# Learning rates for a target of billions of parameters. Recipes of small targets have higher ones.
LEARNING_RATE = 1e-3
ADAMW_LEARNING_RATE = 1e-4
# A command in the header of a recipe that runs before training, and where its line is broken.
HEADER_COMMAND = re.compile(
    r"^#   ((vllm|specdistill) (?:serve|data make|data features) .*)$", re.MULTILINE
)
LINE_BREAK_IN_HEADER = " \\\n#      "
MAX_GENERATED_SEQUENCES = 512  # the most sequences that are generated at a time
EVALUATIONS = 10  # the fewest evaluations in a run
NUM_ALTERNATIVES = 2  # the methods that are named besides the recommended one


class TargetFacts(TypedDict):
    """The facts of a plan about its target.

    Attributes:
        model: the target's name.
        revision: the commit of a Hub id.
        trust_remote_code: whether the repository's own code is run.
        model_type: the model type in its text config.
        dtype: the dtype of its weights.
        quantization: the kind of quantization of its weights; None for none.
        parameters: all parameters.
        bytes: bytes of all weights.
        kv_bytes: bytes of KV cache for a token of context; None if the class does not show it.
        parameters_read: parameters that a pass over one token reads.
        max_length: the longest context in tokens; None if the config names none.
        recurrent: whether some layers keep a recurrent state.
        on_cpu: whether the plan is for this machine's CPU.
        decode_dtype: the dtype to decode in.
        native_mtp: the config key and the number of the multi-token-prediction layers that the
            target comes with; None for none.
        recipes: the names of the shipped recipes for models of this architecture and these sizes.
    """

    model: str
    revision: str | None
    trust_remote_code: bool
    model_type: str
    dtype: str
    quantization: str | None
    parameters: int
    bytes: int
    kv_bytes: int | None
    parameters_read: int
    max_length: int | None
    recurrent: bool
    on_cpu: bool
    decode_dtype: str
    native_mtp: dict[str, str | int] | None
    recipes: list[str]


@dataclass(frozen=True)
class Plan:
    """A plan for a target.

    Attributes:
        target: facts about the target.
        methods: the row of each method.
        recommendation: the recommended method, the reason, and commands (see `recommend_method`).
        warnings: what the plan cannot know, and what does not fit.
        serving: how the target is to be served.
        alone: what each device holds while it serves without a draft.
        device: the name of the device that serves and trains.
        assumptions: the assumptions of the estimates, in sentences.
    """

    target: TargetFacts
    methods: list[PlanRow]
    recommendation: dict[str, str | None]
    warnings: list[str]
    serving: Mapping[str, object]
    alone: Budget
    device: str
    assumptions: Sequence[str]


def make_plan(
    target: ModelConfigInfo,
    draft: ModelConfigInfo | None = None,
    *,
    serving: ServingOptions | None = None,
    device: Device = H100,
    batch_size: int | None = None,
    max_length: int | None = None,
    computed: bool = False,
) -> Plan:
    """Make the plan for a target: estimates for each method, and a recommendation.

    Args:
        target: the target, by its config.json.
        draft: an existing draft, by its config.json, which replaces the one that a recipe of its
            method would train; None for none.
        serving: how the target is to be served; None for the defaults.
        device: the device that serves and trains.
        batch_size: rows of a micro-batch in training; None for the number in the recipe.
        max_length: tokens of a row in training; None for the number in the recipe.
        computed: run the training step's own code over tensors without content, for better
            estimates. This takes seconds.

    Raises:
        UserError: if the model cannot be a target, or the draft does not fit the target.
    """
    serving = check_serving(serving or ServingOptions(), target, draft)
    scenario = Scenario(target, serving, batch_size, max_length, computed, device)
    facts = _list_target_facts(scenario)
    warnings = _list_target_warnings(target)

    # Build a row for each method. An existing draft replaces the row of its method.
    rows = {method: build_plan_row(method, None, scenario) for method in METHODS}
    if draft is not None:
        method = find_method_of_config(draft, target)
        warnings += check_draft_fit(draft, target, method)
        rows[method] = build_plan_row(method, draft, scenario)
    for row in rows.values():
        warnings.extend(row.warnings)

    # Recommend a method. Its commands depend on how many devices hold the target, which is found
    # by starting from one device.
    recommendation = recommend_method(
        list(rows.values()),
        facts,
        compute_budget(target, serving.model_copy(update={"tensor_parallel": 1})),
    )
    dtype = serving.dtype or facts["dtype"]
    return Plan(
        target=facts,
        methods=list(rows.values()),
        recommendation=recommendation,
        warnings=warnings,
        serving=(
            vars(serving) | {"dtype": dtype, "kv_cache_dtype": serving.kv_cache_dtype or dtype}
        ),
        alone=compute_budget(target, serving),
        device=device.name,
        assumptions=list_assumptions(device),
    )


def _list_target_warnings(target: ModelConfigInfo) -> list[str]:
    """Return a warning for each thing that a plan needs and the target's config does not tell."""
    warnings = []
    if target.tiny_random is None:
        warnings.append(
            f"cannot check whether a {type(target.model).__name__} can be a target before its"
            " weights are loaded: building a small one to try failed"
        )
    if target.dtype is None:
        warnings.append(
            f"config.json has no dtype: assuming {str(ASSUMED_DTYPE).removeprefix('torch.')}"
        )
    settings = target.quantization
    if settings and target.stored_bytes is None:
        dtype = str(target.dtype or ASSUMED_DTYPE).removeprefix("torch.")
        warnings.append(
            f"the size of the target's {settings.get('quant_method', 'quantised')} weights is"
            f" unknown, because there is no index: counting them in {dtype}, so the cost c of an"
            " unquantized draft is estimated too low"
        )
    if target.cache is None:
        warnings.append(
            "the size of the target's KV cache is unknown, because its model class does not show"
            " it: memory is estimated without the KV cache"
        )
    return warnings


def _list_target_facts(scenario: Scenario) -> TargetFacts:
    """Return the facts about the target that a plan shows, such as its sizes and dtype."""
    # `native` is None, or the config key and the number of layers for multi-token prediction.
    target = scenario.target
    serving = scenario.serving
    device = scenario.device
    native = target.native_mtp
    text = target.text
    dtype = target.dtype or ASSUMED_DTYPE
    machine = device if isinstance(device, Machine) else None
    return {
        "model": target.name,
        "revision": target.revision,
        "trust_remote_code": target.trust_remote_code,
        "model_type": text.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": (
            target.quantization.get("quant_method", "quantised") if target.quantization else None
        ),
        "parameters": target.parameters,
        "bytes": round(count_weight_bytes(target)),
        "kv_bytes": target.cache.count_bytes_per_token(count_kv_itemsize(serving, target))
        if target.cache
        else None,
        "parameters_read": round(count_weights_read(target.model)),
        "max_length": getattr(text, "max_position_embeddings", None),
        "recurrent": is_recurrent(text),
        "on_cpu": machine is not None,
        "decode_dtype": machine.dtype if machine else str(dtype).removeprefix("torch."),
        "native_mtp": native and {"key": native[0], "layers": native[1]},
        "recipes": scenario.own_recipes,
    }


def recommend_method(
    rows: Sequence[PlanRow], target: TargetFacts, budget: Budget | None = None
) -> dict[str, str | None]:
    """Recommend the method to start with, and the commands to start it.

    The first of these that applies is recommended:
    - the best shipped recipe for models of the target's architecture and sizes, without those
      whose estimate promises no speedup; not if the user named an existing draft;
    - the best draft, if its estimated speedup is higher than that of n-gram lookup;
    - n-gram lookup, which needs no training.

    No method is recommended if the choice promises no speedup: if even the high end of its
    estimated speedup is at most 1. Plain decoding is then the fastest.

    The best draft is the first one in this order:
    - multi-token-prediction layers that come with the target;
    - existing drafts, and drafts with a recipe made for this target (by its name or its sizes);
    - drafts that can be trained on one machine;
    - for small targets, drafts that do not propose all K tokens in one pass, as dflash, dspark and
      pard do;
    - drafts with a higher estimated speedup.

    Args:
        rows: the rows of the plan, one for each method.
        target: the facts of the plan about the target.
        budget: the memory of one device that serves the target without a draft; None if not known.

    Returns:
        A value for each of these keys; None where there is nothing to say:
        - `method`: the name of the method; None if plain decoding is the fastest;
        - `recipe`: the name of the recommended recipe;
        - `reason`: why this is recommended, in a sentence;
        - `start`: the commands that train or measure the draft; None if there is no method, or no
          way to train its draft here;
        - `lookup`: the command that measures n-gram lookup;
        - `alternatives`: other recipes and methods, in words;
        - `generated`: commands for the best draft without a recipe for these sizes. Their keys are
          chosen by estimates. Only given next to a recommended `recipe`.
    """
    # In any case, recommend to measure n-gram lookup, because it needs no training.
    lookup = next(row for row in rows if not METHODS[row.method].is_trained)
    suite = _find_suite(rows, target)
    lookup_command = _format_eval_command(lookup, target, budget, suite)

    # A recipe for the target's sizes comes before commands whose keys are chosen by estimates.
    recipe_rows = _list_recipe_rows(rows, target)
    other_rows = [row for row in rows if row not in recipe_rows]
    best_other_row = _choose_row(other_rows, lookup, target)
    best = recipe_rows[0] if recipe_rows else best_other_row
    recommendation: dict[str, str | None] = {
        "method": best.method,
        "recipe": best.recipe if recipe_rows else None,
        "lookup": lookup_command,
        "alternatives": _describe_alternatives(best, recipe_rows[1:], best_other_row, rows),
        "generated": None,
    }
    if recipe_rows and best_other_row is not lookup:
        recommendation["generated"] = _format_start(best_other_row, target, budget, suite)

    # If even the high end of the best speedup is below 1, plain decoding is the fastest.
    if best.high is not None and best.high.speedup <= 1:
        reason = "no method promises more than plain decoding"
        return recommendation | {"method": None, "reason": reason, "start": None}

    start = _format_start(best, target, budget, suite)
    why = "because this recipe is made for models of this architecture and these sizes"
    if not recipe_rows:
        why = _explain_choice(best, rows, lookup, target)
    if best.low and best.high:
        why = (
            f"an estimated {best.low.speedup:.2f} to {best.high.speedup:.2f} times the speed of"
            f" plain decoding, {why}"
        )
    reason = f"{why}.{_describe_needs(best, target, start)}"
    return recommendation | {"reason": reason, "start": start}


def _list_recipe_rows(rows: Sequence[PlanRow], target: TargetFacts) -> list[PlanRow]:
    """Return the rows whose recipe is made for the target's sizes, the one to start with first.

    There are none if the user named an existing draft: the question is then what this draft gains.
    """
    if any(row.draft for row in rows):
        return []
    recipe_rows = [row for row in rows if row.available and row.recipe in target["recipes"]]
    # Leave out recipes whose draft would not be faster than plain decoding, by its estimate.
    useful_rows = [row for row in recipe_rows if row.high is None or row.high.speedup > 1]
    return sorted(useful_rows, key=partial(_make_sort_key, target))


def _describe_alternatives(
    best: PlanRow,
    other_recipe_rows: Sequence[PlanRow],
    best_other_row: PlanRow,
    rows: Sequence[PlanRow],
) -> str | None:
    """Name what else could be done first: other shipped recipes, and the best other methods.

    Args:
        best: the recommended row.
        other_recipe_rows: the rows whose recipe is made for this target's sizes, without `best`.
        best_other_row: the best row without a recipe made for these sizes. If `best` has no such
            recipe either, the two are the same row.
        rows: the rows of the plan.

    Returns:
        The alternatives with their speedups; None if there are none.
    """
    if best is not best_other_row:
        # `best` has a recipe made for these sizes. Its alternatives are the other recipes, and one
        # method without such a recipe.
        method_rows = [best_other_row]
    else:
        # The alternatives are the other methods with the best estimated speedups.
        # `middle` is the middle of the range of a speedup.
        faster_rows = [row for row in rows if row is not best and row.middle > 1]
        faster_rows.sort(key=lambda row: -row.middle)
        method_rows = faster_rows[:NUM_ALTERNATIVES]
    texts = [f"{row.recipe}{_format_speedup(row)}" for row in other_recipe_rows]
    texts += [f"{row.method}{_format_speedup(row)}" for row in method_rows]
    return ", ".join(texts) or None


def _format_speedup(row: PlanRow) -> str:
    """Format the estimated speedup of a row in parentheses; empty without an estimate."""
    if row.low is None or row.high is None:
        return ""
    return f" ({row.low.speedup:.2f} to {row.high.speedup:.2f}×)"


def _format_start(
    row: PlanRow, target: TargetFacts, budget: Budget | None, suite: str
) -> str | None:
    """Return the commands that measure what exists already, or that train a draft.

    The result is None if training is not possible.

    Args:
        row: the row of the draft, or of n-gram lookup.
        target: the facts of the plan about the target.
        budget: the memory of one device that serves the target without a draft; None if not known.
        suite: the name or file of the prompts.
    """
    if row.draft or not METHODS[row.method].is_trained:
        return _format_eval_command(row, target, budget, suite)
    return _format_training_commands(row, target, budget)


def _choose_row(rows: Sequence[PlanRow], lookup: PlanRow, target: TargetFacts) -> PlanRow:
    """Choose the row of the recommended method: the best draft, or n-gram lookup.

    Args:
        rows: the rows of the plan.
        lookup: the row of n-gram lookup.
        target: the facts of the plan about the target.
    """
    # Sort the drafts that have an estimated speedup, the best one first. Layers that come with the
    # target move to the front; the second sort keeps the order of all others.
    drafts = [row for row in rows if row.low and row.high and row is not lookup]
    drafts.sort(key=partial(_make_sort_key, target))
    has_native_layer = _has_native_layer(drafts, target)
    if has_native_layer:
        drafts.sort(key=lambda row: not METHODS[row.method].in_target)

    # The best draft must promise more than the lookup, which needs no training. In general the
    # middles of the estimated speedups are compared. A layer that comes with the target needs no
    # training either, so it is enough if its best case is better: the high ends are compared.
    get_promise = attrgetter("high.speedup" if has_native_layer else "middle")
    if drafts and get_promise(drafts[0]) > get_promise(lookup):
        return drafts[0]
    return lookup


def _has_native_layer(rows: Sequence[PlanRow], target: TargetFacts) -> bool:
    """Return whether the target comes with multi-token-prediction layers, and a row uses them.

    `rows` are the rows of the plan to search.
    """
    return bool(target["native_mtp"]) and any(METHODS[row.method].in_target for row in rows)


def _explain_choice(
    best: PlanRow, rows: Sequence[PlanRow], lookup: PlanRow, target: TargetFacts
) -> str:
    """Return why a method is recommended, as the end of a sentence.

    Args:
        best: the chosen row.
        rows: the rows of the plan.
        lookup: the row of n-gram lookup.
        target: the facts of the plan about the target.
    """
    # Return the first reason that applies. Layers that come with the target precede all other
    # drafts, so if there are any, the chosen draft is one of them.
    estimated_rows = [row for row in rows if row.low and row.high]
    if best is lookup:
        return "without training, and no draft that can be trained quickly promises more"
    if _has_native_layer(estimated_rows, target):
        return "with a layer that comes with the target"
    if best.middle == max(row.middle for row in rows):
        return "the best estimate of all methods (by the middle of the range)"
    if _is_own(best, target):
        return "with a recipe made for this target"
    return "the best estimate of the methods that can be trained on these devices"


def _find_suite(rows: Sequence[PlanRow], target: TargetFacts) -> str:
    """Return the prompt suite in the recipes made for this target; a placeholder if there is none.

    A placeholder in a command is for the user to fill in.
    """
    own_recipes = [read_recipe(str(row.recipe)) for row in rows if _is_own(row, target)]
    suites = [recipe["eval"]["suite"] for recipe in own_recipes if "suite" in recipe["eval"]]
    return str(suites[0]) if suites else PROMPTS


def _make_sort_key(target: TargetFacts, row: PlanRow) -> tuple[bool, bool, bool, float]:
    """Return the sort key of a draft: the draft to start with has the smallest key.

    False sorts before True. So these come first, the most important condition at the top:
    - existing drafts, and drafts with a recipe made for this target;
    - drafts that can be trained on one machine;
    - for small targets, all drafts but those that propose all K tokens in one pass (dflash, dspark
      and pard). These learn slowly, and are behind other methods with little training data
      (docs/methods.md);
    - drafts with a higher middle of the estimated speedup.
    """
    is_slow = (
        target["parameters"] <= MAX_SMALL_TARGET_PARAMETERS and METHODS[row.method].passes == "1"
    )
    return (
        not (row.draft or _is_own(row, target)),
        not (row.draft or row.training_launch),
        is_slow,
        -row.middle,
    )


def _is_own(row: PlanRow, target: TargetFacts) -> bool:
    """Return whether a row's recipe was made for this target.

    Such a recipe names the target, or was made for models of its architecture and sizes.
    """
    return row.recipe is not None and (
        row.recipe in target["recipes"]
        or bool(read_recipe(row.recipe)["target"]["model"] == target["model"])
    )


def _describe_needs(row: PlanRow, target: TargetFacts, start: str | None) -> str:
    """Return a sentence about the memory and the devices that training takes.

    It is empty if nothing has to be trained.

    Args:
        row: the row of the recommended method.
        target: the facts of the plan about the target.
        start: the commands that the plan recommends; None if there are none.
    """
    # An existing draft, or a method without weights, needs no training.
    if row.draft or not row.micro_batch:
        return ""
    launch = row.training_launch
    if launch is None:
        rows, length = row.micro_batch
        return (
            f" Training with micro-batches of {rows} rows of {length:,} tokens does not fit into"
            f" the memory of {'this machine' if target['on_cpu'] else '8 devices'}: lower"
            " training.batch_size."
        )

    # For one process, say only how much memory training takes.
    memory_text = f" Training takes {launch.device_bytes / 2**30:.3g} GiB of memory on "
    if launch.num_processes == 1:
        return f"{memory_text}{'this machine' if target['on_cpu'] else 'one device'}."

    # For several processes, name the keys that split the work, and the server for the data.
    kind = target["quantization"]
    refused = (
        f" (not possible with {kind} weights: save the target in {target['dtype']} first)"
        if kind
        else ""
    )
    shared = f"; target.shard=layers{refused}" if launch.is_sharded else ""
    served = (
        "; a vLLM server generates the data first: stop it before training"
        if start and start.startswith("vllm")
        else ""
    )
    return (
        f"{memory_text}each of {launch.num_processes} devices:"
        f" launch={launch.configuration}{shared}{served}."
    )


def _format_command(verb: str, target: TargetFacts, keys: Mapping[str, object]) -> str:
    """Return a `specdistill` command for the shell, without the keys whose value is None.

    Args:
        verb: the command, such as `eval` or `data make`.
        target: the facts of the plan about the target.
        keys: the arguments KEY=VALUE.
    """
    # Quote the arguments for a shell. If the user has agreed to run the target repository's own
    # code, the command repeats this consent.
    pairs = [f"{key}={value}" for key, value in keys.items() if value is not None]
    consent = CONSENT["specdistill"] if target["trust_remote_code"] else ""
    return shlex.join(["specdistill", *verb.split(), *pairs]) + consent


def _name_draft_folder(row: PlanRow, target: TargetFacts) -> str:
    """Return the folder for a training run in commands, such as `runs/llama-3.1-8b-eagle3`."""
    target_name = target["model"].rstrip("/").split("/")[-1].lower()
    return f"runs/{target_name}-{row.method.replace('_', '-')}"


def _format_eval_command(
    row: PlanRow, target: TargetFacts, budget: Budget | None, suite: str
) -> str:
    """Return the `specdistill eval` command that measures an existing draft or n-gram lookup.

    Args:
        row: the row of the draft, or of n-gram lookup.
        target: the facts of the plan about the target.
        budget: the memory of one device that serves the target without a draft; None if not known.
        suite: the name or file of the prompts.
    """
    # The number of draft tokens per round, K, is midway between the best K at the low end and the
    # best K at the high end of the speedup.
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
        "target.dtype": target["decode_dtype"],
        # If one device cannot hold the target, its layers are spread over all devices.
        "target.device_map": None if budget is None or budget.fits else "auto",
        "eval.num_speculative_tokens": tokens,
        "suite": suite,
        "output_dir": f"{_name_draft_folder(row, target)}/report",
    }
    return _format_command("eval", target, keys)


def _format_training_commands(
    row: PlanRow, target: TargetFacts, budget: Budget | None
) -> str | None:
    """Return the commands that generate the data for a draft and train it.

    Args:
        row: the row of the draft.
        target: the facts of the plan about the target.
        budget: the memory of one device that serves the target without a draft; None if not known.

    Returns:
        The commands, one in each line; None if no recipe of the method is shipped, or if training
        does not fit on a machine.
    """
    launch = row.training_launch
    if row.recipe is None or launch is None:
        return None
    number = launch.num_processes
    launched: dict[str, object] = (
        {"launch": launch.configuration, "num_processes": number} if number > 1 else {}
    )

    # A recipe made for this target lists the commands that prepare its data in its header.
    if _is_own(row, target):
        keys = {"recipe": row.recipe, **_list_target_keys(row.recipe, target), **launched}
        commands = _read_header_commands(row.recipe, target)
        return "\n".join([*commands, _format_command("train", target, keys)])

    # Otherwise adapt the recipe for small targets. On several devices a server generates the data,
    # and training splits the target's layers among the devices.
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
        **_list_size_keys(row, target, budget),
        "train.output_dir": _name_draft_folder(row, target),
    }
    recipe_keys = dict(key.split("=", 1) for key in row.recipe_keys)
    train = _format_command("train", target, {**keys, **recipe_keys})
    if number == 1:
        return train

    # The server runs on all devices. If several devices are needed to hold the target, they form a
    # replica (tensor parallelism), and there are as many replicas as fit (data parallelism).
    # If the user has agreed to run the target repository's own code, the command repeats this.
    num_devices = (budget and budget.tensor_parallel) or 1
    options = {
        "--revision": target["revision"],
        "--tensor-parallel-size": num_devices,
        "--data-parallel-size": number // num_devices,
    }
    words: list[str] = []
    for name, value in options.items():
        if value not in (None, 1):
            words.extend((name, str(value)))
    consent = CONSENT["vllm"] if target["trust_remote_code"] else ""
    server = shlex.join(["vllm", "serve", target["model"], *words]) + consent
    data_keys = {
        key: value for key, value in keys.items() if key in model or key.startswith("data.")
    }
    make_data = _format_command("data make", target, data_keys)
    return "\n".join([server, make_data, train])


def _list_target_keys(recipe: str, target: TargetFacts) -> dict[str, object]:
    """Return the keys that make a shipped recipe use this target instead of its own.

    The recipe was made for models of this architecture and these sizes. The result is empty if it
    names this very target.
    """
    settings = read_recipe(recipe)["target"]
    if settings["model"] == target["model"]:
        return {}

    # Some models are published with quantized weights, but their recipe needs weights in bfloat16.
    # Such a recipe names no target: it has REQUIRED_MARK instead. If the weights of this target are
    # quantized, too, the user has to save a copy of them in bfloat16. The command then has the
    # placeholder BFLOAT16_TARGET, which the user replaces with the folder of the copy.
    needs_copy = settings["model"] == REQUIRED_MARK and target["quantization"]

    # A revision in the recipe belongs to the recipe's own target, so `null` removes it.
    no_revision = "null" if "revision" in settings else None
    return {
        "target.model": BFLOAT16_TARGET if needs_copy else target["model"],
        "target.revision": no_revision if needs_copy else target["revision"] or no_revision,
    }


def _read_header_commands(recipe: str, target: TargetFacts) -> list[str]:
    """Return the commands in a shipped recipe's header that prepare its data, for a target."""
    # `target_keys` is empty if the recipe names this target: its commands then keep their target.
    target_keys = _list_target_keys(recipe, target)
    text = (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8")
    commands = []
    # Join commands that are broken into two lines, and replace the recipe's own target.
    for line, program in HEADER_COMMAND.findall(text.replace(LINE_BREAK_IN_HEADER, "")):
        words = [word for word in shlex.split(line) if not word.startswith("target.model=")]
        if program == "vllm" and target_keys:
            # `vllm serve MODEL --revision COMMIT`: both belong to the recipe's own target.
            options = words[3:]
            if options[:1] == ["--revision"]:
                options = options[2:]
            if target["revision"]:
                options = ["--revision", target["revision"], *options]
            words = [*words[:2], target["model"], *options]
        elif program == "specdistill":
            words += [f"{key}={value}" for key, value in target_keys.items() if value is not None]
        # If the user has agreed to run the target repository's own code, the command repeats this.
        consent = CONSENT[program] if target["trust_remote_code"] else ""
        commands.append(shlex.join(words) + consent)
    return commands


def _list_size_keys(row: PlanRow, target: TargetFacts, budget: Budget | None) -> dict[str, object]:
    """Return the keys that adapt a recipe for small targets to the sizes of this target.

    A key with the value None is left out of the command: the recipe's own value then applies.

    Args:
        row: the row of the draft, which has a recipe and a launch.
        target: the facts of the plan about the target.
        budget: the memory of one device that serves the target without a draft; None if not known.
    """
    assert (
        row.recipe is not None and row.training_launch is not None and row.micro_batch is not None
    )
    recipe = read_recipe(row.recipe)
    launch = row.training_launch
    rows, length = row.micro_batch

    # Packing puts several documents into a row. Recurrent layers would carry their state from one
    # document to the next, so packing is turned off for them.
    keys: dict[str, object] = {"data.packing": "false" if target["recurrent"] else None}

    # On a CPU, use the dtype that was measured to be faster.
    if target["on_cpu"] and target["decode_dtype"] != target["dtype"]:
        keys["target.dtype"] = target["decode_dtype"]

    # A small target is trained as in the recipe. Only the rows are shortened, if they are longer
    # than the target's context.
    if target["parameters"] <= MAX_SMALL_TARGET_PARAMETERS or target["on_cpu"]:
        return keys | {"data.max_length": length if recipe["data"]["max_length"] > length else None}

    # A larger target takes one pass over the tokens, and is evaluated at least EVALUATIONS times,
    # at least every 1,000 steps. Intervals are shares of the run, so that they suit data of any
    # size.
    tokens = row.training_tokens or recipe["data"]["regenerate"]["num_tokens"]
    steps = max(1, round(tokens / (rows * length * launch.num_processes)))
    interval = f"{min(1 / EVALUATIONS, 1000 / steps):.2g}"
    positions = METHODS[row.method].positions

    # Choose how many sequences are generated at a time: as many as the KV cache has room for,
    # rounded down to a power of two. With several processes a server decides that itself.
    room = MAX_GENERATED_SEQUENCES
    if budget and launch.num_processes == 1:
        room = (budget.room or 0) // length
    at_a_time = max(1, min(MAX_GENERATED_SEQUENCES, room))

    # The optimizer of the recipes, Muon, needs whole matrices. ZeRO splits them, so AdamW is used
    # with ZeRO.
    adamw = "adamw" if launch.configuration.startswith("zero") else None
    return keys | {
        "data.max_length": length,
        "data.regenerate.num_tokens": f"{tokens:_}",
        "data.regenerate.prompt_tokens": min(PROMPT_TOKENS, length // 2),
        "data.regenerate.batch_size": 1 << (at_a_time.bit_length() - 1),
        "target.dtype": target["dtype"],
        "draft.ttt_steps": (
            positions if recipe["draft"].get("ttt_steps", positions) != positions else None
        ),
        "optimizer": adamw,
        "train.per_device_train_batch_size": rows,
        "train.num_train_epochs": 1,
        "train.eval_steps": interval,
        "train.save_steps": interval,
        "train.learning_rate": ADAMW_LEARNING_RATE if adamw else LEARNING_RATE,
    }
