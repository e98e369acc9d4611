"""The plan: each method's row for one target, what the target alone takes, and where to start. Nothing is measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdistill.methods import METHODS
from specdistill.methods.sizes import ASSUMED_DTYPE, Described, weights_read
from specdistill.planning.advice import recommend
from specdistill.planning.budget import Budget, ServingSettings, budget, weight_bytes
from specdistill.planning.estimates import ASSUMPTIONS, PlanRow, Scenario, row_of
from specdistill.planning.reading import check_fit, method_of_config
from specdistill.targets.cache import is_recurrent

DEAR = 0.1  # a draft step that costs more of a target's than this rarely pays


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
    target: Described, draft: Described | None = None, *, serving: ServingSettings | None = None, **training: Any
) -> Plan:
    """Plan for a target, and for a draft of it where one is given. Raises UserError for what is no target, or no draft of it.

    serving: None for one sequence of usual length on one H100. training: `batch_size`, `max_length` and `computed` of `Scenario`.
    """
    serving = serving or ServingSettings.of(target)
    facts, scenario = _facts(target, serving), Scenario(target, serving, **training)
    serving.check(target, draft)
    warnings = _warnings(target)
    rows = {method: row_of(method, None, scenario) for method in METHODS}
    if draft is not None:
        method = method_of_config(draft, target)
        warnings += check_fit(draft, target, method)
        rows[method] = row = row_of(method, draft, scenario)
        warnings += _warnings_of_pair(row, draft)
    warnings += [warning for row in rows.values() for warning in row.warnings]
    recommendation = recommend(list(rows.values()), facts, budget(target, replace(serving, tensor_parallel=1)))
    return Plan(facts, list(rows.values()), recommendation, warnings, _asked(serving, target), budget(target, serving))


def _warnings(target: Described) -> list[str]:
    """What a plan cannot know of its target."""
    warnings = []
    if target.tiny_random is None:
        made = f"no small {type(target.model).__name__} can be made"
        warnings.append(f"{made}: whether it is a target shows when its weights are loaded")
    if target.dtype is None:
        warnings.append(f"the config names no dtype: bytes are of {str(ASSUMED_DTYPE).removeprefix('torch.')}")
    if (settings := target.quantization) and target.stored_bytes is None:
        dtype = str(target.dtype or ASSUMED_DTYPE).removeprefix("torch.")
        counted = f"no index says their size: bytes here are of {dtype}, and c of a draft in that is higher"
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
        "trust_remote_code": target.trust_remote_code,
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
