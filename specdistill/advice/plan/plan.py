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
from specdistill.targets.cache import is_recurrent

# Placeholders in commands, which the user fills in.
DATA = "path/to/conversations.jsonl"
PROMPTS = "path/to/prompts.jsonl"
# The consent to run a repository's own code, by the program whose command gets it.
CONSENT = {"vllm": " --trust-remote-code", "specdistill": " target.trust_remote_code=true"}
SERVER = "[http://127.0.0.1:8000]"  # the address at which `vllm serve` listens
PROMPT_TOKENS = 128  # tokens of a text that the target continues
# Learning rates for a target of billions of parameters. Recipes of small targets have higher ones.
LEARNING_RATE = 1e-3
ADAMW_LEARNING_RATE = 1e-4
# A command in the header of a recipe that runs before training, and where its line is broken.
HEADER_COMMAND = re.compile(r"^#   ((vllm|specdistill) (?:serve|data make) .*)$", re.MULTILINE)
LINE_BREAK_IN_HEADER = " \\\n#      "
MAX_GENERATED_SEQUENCES = 512  # the most sequences that are generated at a time
EVALUATIONS = 10  # the fewest evaluations in a run


class TargetFacts(TypedDict):
    """The facts of a plan about its target.

    Attributes:
        model: the target's name.
        revision: the commit of a Hub id.
        trust_remote_code: whether the repository's own code is run.
        model_type: of its text config.
        dtype: of its weights.
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
        device: the name of a device.
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
    """Make the plan for a target, and for a draft of it if one is given.

    Args:
        target: the target, by its config.json.
        draft: the draft, by its config.json; None for none.
        serving: how the target is to be served; None for one sequence of usual length.
        device: the device that serves and trains.
        batch_size: as of `Scenario`.
        max_length: as of `Scenario`.
        computed: as of `Scenario`.

    Raises:
        UserError: if the target is not one, or the draft does not fit it.
    """
    serving = check_serving(serving or ServingOptions(), target, draft)
    facts = _list_target_facts(target, serving, device)
    scenario = Scenario(target, serving, batch_size, max_length, computed, device)
    warnings = _list_target_warnings(target)

    # One row for each method. A draft that exists takes the row of its method.
    rows = {method: build_plan_row(method, None, scenario) for method in METHODS}
    if draft is not None:
        method = find_method_of_config(draft, target)
        warnings += check_draft_fit(draft, target, method)
        rows[method] = build_plan_row(method, draft, scenario)
    for row in rows.values():
        warnings.extend(row.warnings)
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
    """Return warnings about what a plan cannot know of its target."""
    # Each thing that the config does not tell has a warning of its own.
    warnings = []
    if target.tiny_random is None:
        warnings.append(
            f"cannot build a small {type(target.model).__name__} to try: whether it can be a target"
            " shows when its weights are loaded"
        )
    if target.dtype is None:
        warnings.append(
            f"config.json names no dtype: assuming {str(ASSUMED_DTYPE).removeprefix('torch.')}"
        )
    settings = target.quantization
    if settings and target.stored_bytes is None:
        dtype = str(target.dtype or ASSUMED_DTYPE).removeprefix("torch.")
        warnings.append(
            f"the target's weights are {settings.get('quant_method', 'quantised')}, and no index"
            f" says their size: counting them in {dtype}, so c of an unquantized draft is too low"
        )
    if target.cache is None:
        warnings.append(
            "the target's class does not show how large its KV cache is: budgets leave it out"
        )
    return warnings


def _list_target_facts(
    target: ModelConfigInfo, serving: ServingOptions, device: Device
) -> TargetFacts:
    """Return the facts of a plan about its target."""
    # The target has a layer of its own if its config names one.
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
    }


def recommend_method(
    rows: Sequence[PlanRow], target: TargetFacts, budget: Budget | None = None
) -> dict[str, str | None]:
    """Recommend the method to start with.

    It is the method with the highest middle of its speedup, n-gram lookup included. Among drafts, a
    draft that exists and a recipe of the target's own come first, then what can be trained. Layers
    that come with the target need no training. They are recommended unless n-gram lookup has a
    higher speedup at its high end.

    Args:
        rows: the rows of the plan.
        target: the facts of the plan about the target.
        budget: what one device holds that serves the target without a draft; None if not known.

    Returns:
        `method`, the `reason`, the commands that `start` it (a line each), and the command that
        measures n-gram `lookup`. `method` and `start` are None if no method is expected to be
        faster than plain decoding.
    """
    # Measure n-gram lookup in any case: it needs no training.
    lookup = next(row for row in rows if not METHODS[row.method].is_trained)
    suite = _find_suite(rows, target)
    lookup_command = _format_eval_command(lookup, target, budget, suite)

    # Plain decoding is the fastest if even the high end is below 1.
    best = _choose_row(rows, lookup, target)
    assert best.low is not None and best.high is not None
    if best.high.speedup <= 1:
        return {
            "method": None,
            "reason": "no method promises more than plain decoding",
            "start": None,
            "lookup": lookup_command,
        }

    # Measure a draft that needs no training, or train one.
    if best.draft or not METHODS[best.method].is_trained:
        start: str | None = _format_eval_command(best, target, budget, suite)
    else:
        start = _format_training_commands(best, target, budget)
    why = _explain_choice(best, rows, lookup, target)
    reason = (
        f"an estimated {best.low.speedup:.2f} to {best.high.speedup:.2f} times the speed of plain"
        f" decoding, {why}.{_describe_needs(best, target, start)}"
    )
    return {"method": best.method, "reason": reason, "start": start, "lookup": lookup_command}


def _choose_row(rows: Sequence[PlanRow], lookup: PlanRow, target: TargetFacts) -> PlanRow:
    """Return the row of the method to start with: the draft that suits best, or n-gram lookup.

    Args:
        rows: the rows of the plan.
        lookup: the row of n-gram lookup.
        target: the facts of the plan about the target.
    """
    # The candidates: drafts with an estimate, in the order in which they suit the target.
    drafts = [row for row in rows if row.low and row.high and row is not lookup]
    drafts.sort(key=partial(_make_sort_key, target))
    has_native_layer = _has_native_layer(drafts, target)
    if has_native_layer:
        drafts.sort(key=lambda row: not METHODS[row.method].in_target)

    # The draft has to promise more than the lookup, which needs no training. A layer that comes
    # with the target needs none either, so its high end counts. Otherwise the middle does.
    get_promise = attrgetter("high.speedup" if has_native_layer else "middle")
    if drafts and get_promise(drafts[0]) > get_promise(lookup):
        return drafts[0]
    return lookup


def _has_native_layer(rows: Sequence[PlanRow], target: TargetFacts) -> bool:
    """Return whether the target comes with layers that one of the rows drafts with."""
    return bool(target["native_mtp"]) and any(METHODS[row.method].in_target for row in rows)


def _explain_choice(
    best: PlanRow, rows: Sequence[PlanRow], lookup: PlanRow, target: TargetFacts
) -> str:
    """Return why a row was chosen, as the end of a sentence.

    Args:
        best: the chosen row.
        rows: the rows of the plan.
        lookup: the row of n-gram lookup.
        target: the facts of the plan about the target.
    """
    estimated_rows = [row for row in rows if row.low and row.high]
    if best is lookup:
        return "without training, and nothing that is trained quickly promises more"
    if _has_native_layer(estimated_rows, target):
        return "its layer comes with the target"
    if best.middle == max(row.middle for row in rows):
        return "the highest middle of all methods"
    if _is_own(best, target):
        return "by a recipe of this target's own"
    return "the highest middle that fits here"


def _find_suite(rows: Sequence[PlanRow], target: TargetFacts) -> str:
    """Return the suite of a recipe of the target's own; a placeholder if there is none."""
    own_recipes = [read_recipe(str(row.recipe)) for row in rows if _is_own(row, target)]
    suites = [recipe["eval"]["suite"] for recipe in own_recipes if "suite" in recipe["eval"]]
    return str(suites[0]) if suites else PROMPTS


def _make_sort_key(target: TargetFacts, row: PlanRow) -> tuple[bool, bool, bool, float]:
    """Return the key by which drafts are sorted: the draft to start with has the smallest.

    Drafts that exist and recipes of the target's own come first, then drafts that can be trained.
    For small targets block drafters come later: they learn slowly, and with the training data of
    recipes for small targets other methods are ahead (docs/methods.md). Then the higher middle of
    the speedup comes first.
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
    """Return whether a row's recipe is the target's own."""
    return row.recipe is not None and bool(
        read_recipe(row.recipe)["target"]["model"] == target["model"]
    )


def _describe_needs(row: PlanRow, target: TargetFacts, start: str | None) -> str:
    """Return a sentence about the needs of training; empty if nothing is trained.

    It names the launch, the sharding and what generates the data, in the order in which they are
    decided.
    """
    # A draft that exists, or that is not trained, needs no training.
    if row.draft or not row.micro_batch:
        return ""
    launch = row.training_launch
    if launch is None:
        rows, length = row.micro_batch
        return (
            f" Training with {rows} rows of {length:,} tokens at a time does not fit on"
            f" {'this machine' if target['on_cpu'] else '8 devices'}: lower training.batch_size."
        )

    # One process: say only how much memory it takes.
    memory_text = f" Training holds {launch.device_bytes / 2**30:.3g} GiB on "
    if launch.num_processes == 1:
        return f"{memory_text}{'this machine' if target['on_cpu'] else 'one device'}."

    # Several processes: name the launch, and how the target is divided among them.
    kind = target["quantization"]
    refused = (
        f" (which does not take {kind} weights: save the target in {target['dtype']} first)"
        if kind
        else ""
    )
    shared = f"; target.shard=layers{refused}" if launch.is_sharded else ""
    served = (
        "; a server generates the data first, and ends before training"
        if start and start.startswith("vllm")
        else ""
    )
    return (
        f"{memory_text}each of {launch.num_processes} devices:"
        f" launch={launch.configuration}{shared}{served}."
    )


def _format_command(verb: str, target: TargetFacts, keys: Mapping[str, object]) -> str:
    """Return the shell command, leaving out keys whose value is None."""
    # Quote the arguments for a shell. The consent to run a repository's code comes last.
    pairs = [f"{key}={value}" for key, value in keys.items() if value is not None]
    consent = CONSENT["specdistill"] if target["trust_remote_code"] else ""
    return shlex.join(["specdistill", *verb.split(), *pairs]) + consent


def _name_draft_folder(row: PlanRow, target: TargetFacts) -> str:
    """Return a folder for the run, named after the target and the method."""
    target_name = target["model"].rstrip("/").split("/")[-1].lower()
    return f"runs/{target_name}-{row.method.replace('_', '-')}"


def _format_eval_command(
    row: PlanRow, target: TargetFacts, budget: Budget | None, suite: str
) -> str:
    """Return the command that measures a draft that exists, or n-gram lookup."""
    # Take the K in the middle of both ends.
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
        "target.device_map": None if budget is None or budget.fits else "auto",
        "eval.num_speculative_tokens": tokens,
        "suite": suite,
        "output_dir": f"{_name_draft_folder(row, target)}/report",
    }
    return _format_command("eval", target, keys)


def _format_training_commands(
    row: PlanRow, target: TargetFacts, budget: Budget | None
) -> str | None:
    """Return the commands that train the draft of a row, a line each.

    Returns:
        The commands; None if no recipe of the method ships, or no device can hold the training.
    """
    launch = row.training_launch
    if row.recipe is None or launch is None:
        return None
    number = launch.num_processes
    trusted = target["trust_remote_code"]
    launched: dict[str, object] = (
        {"launch": launch.configuration, "num_processes": number} if number > 1 else {}
    )

    # A recipe for this target has its commands in its header.
    if _is_own(row, target):
        text = (RECIPES / f"{row.recipe}.yaml").read_text(encoding="utf-8")
        commands = []
        for line, program in HEADER_COMMAND.findall(text.replace(LINE_BREAK_IN_HEADER, "")):
            commands.append(line + CONSENT[program] * trusted)
        commands.append(_format_command("train", target, {"recipe": row.recipe, **launched}))
        return "\n".join(commands)

    # Several devices: servers generate the data, and training shards the target.
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

    # The server takes all devices, each replica as many as hold the target.
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
    server = shlex.join(["vllm", "serve", target["model"], *words]) + CONSENT["vllm"] * trusted
    data_keys = {
        key: value for key, value in keys.items() if key in model or key.startswith("data.")
    }
    make_data = _format_command("data make", target, data_keys)
    return "\n".join([server, make_data, train])


def _list_size_keys(row: PlanRow, target: TargetFacts, budget: Budget | None) -> dict[str, object]:
    """Return the keys that adapt a recipe of small targets to this target."""
    assert (
        row.recipe is not None and row.training_launch is not None and row.micro_batch is not None
    )
    recipe = read_recipe(row.recipe)
    launch = row.training_launch
    rows, length = row.micro_batch

    # Recurrent layers would carry state from one document of a packed row into the next.
    keys: dict[str, object] = {"data.packing": "false" if target["recurrent"] else None}

    # A CPU decodes in the dtype that is faster on it.
    if target["on_cpu"] and target["decode_dtype"] != target["dtype"]:
        keys["target.dtype"] = target["decode_dtype"]

    # A small target keeps the recipe's steps. Only longer rows than fit are shortened.
    if target["parameters"] <= MAX_SMALL_TARGET_PARAMETERS or target["on_cpu"]:
        return keys | {"data.max_length": length if recipe["data"]["max_length"] > length else None}

    # A larger target trains once over the tokens, in rows that fit its devices.
    tokens = row.training_tokens or recipe["data"]["regenerate"]["num_tokens"]
    steps = max(1, round(tokens / (rows * length * launch.num_processes)))
    every = max(1, min(1000, steps // EVALUATIONS))
    positions = METHODS[row.method].positions

    # Generate as many sequences at a time as the KV cache has room for, rounded down to a power of
    # two. With several processes a server generates them.
    room = MAX_GENERATED_SEQUENCES
    if budget and launch.num_processes == 1:
        room = (budget.room or 0) // length
    at_a_time = max(1, min(MAX_GENERATED_SEQUENCES, room))

    # ZeRO divides the state of AdamW. Muon needs whole matrices, so it is replaced there.
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
        "train.max_steps": steps,
        "train.eval_steps": every,
        "train.save_steps": every,
        "train.learning_rate": ADAMW_LEARNING_RATE if adamw else LEARNING_RATE,
    }
