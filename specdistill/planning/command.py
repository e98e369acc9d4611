"""`specdistill plan`: its keys, and what it prints."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from specdistill.command import TARGET, keys_of
from specdistill.errors import ExitCode, UserError
from specdistill.recipe.fields import Section, like, option, section
from specdistill.recipe.load import load_recipe
from specdistill.recipe.sections import TargetConfig

JSON = "--json"


class PlannedTarget(Section):
    model: str = like(TargetConfig, "model")
    revision: str | None = like(TargetConfig, "revision")
    trust_remote_code: bool = like(TargetConfig, "trust_remote_code")


class ServingOptions(Section):
    context: int | None = option(
        None, "tokens of a sequence, prompt and completion; null: 4,096, or the target's most if less", ge=1
    )
    batch_size: int = option(1, "sequences decoded together", ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "weights of target and draft; null: as their configs say"
    )
    kv_cache_dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = option(None, "of keys and values; null: dtype")
    tensor_parallel: int = option(1, "devices that share target and draft", ge=1)
    memory_gb: float = option(80.0, "memory of one device in GiB, as 80 of an H100", gt=0)
    gpu_memory_utilization: float = option(0.92, "share of it that the engine takes", gt=0, le=1)


class PlannedTraining(Section):
    batch_size: int = option(4, "rows of a micro-batch on one device", ge=1)
    max_length: int = option(2048, "tokens of a row; at most what the target has", ge=8)


class PlanOptions(Section):
    target: PlannedTarget = section(PlannedTarget)
    draft: str | None = option(None, "a draft that exists, folder or Hub id; of both only the configs are read")
    serving: ServingOptions = section(ServingOptions)
    training: PlannedTraining = section(PlannedTraining)
    hub: bool = option(True, "search the Hub for drafts of the target")
    output: str | None = option(None, "JSON file for all numbers, their sources and assumptions; --json prints it")


def plan(arguments: list[str]) -> int:
    """say which method a target should get before anything is trained: what each costs, the speedup to expect, and on what grounds"""
    options = load_recipe(PlanOptions, keys_of([argument for argument in arguments if argument != JSON], TARGET))
    from specdistill.planning.budget import ServingSettings  # here, and not above, because these import torch
    from specdistill.planning.estimates import MicroBatch
    from specdistill.planning.plan import make_plan
    from specdistill.planning.printing import print_plan
    from specdistill.planning.reading import known_drafts, read

    remote = options.target.trust_remote_code
    target = read(options.target.model, key="target.model", revision=options.target.revision, trust_remote_code=remote)
    draft = read(options.draft, key="draft", trust_remote_code=remote) if options.draft else None
    serving = ServingSettings.of(target, **options.serving.model_dump())
    made = make_plan(target, draft, serving=serving, training=MicroBatch(**vars(options.training)), computed=True)
    drafts, not_asked = known_drafts(target.name, target.hub_id) if options.hub else ([], "not asked: hub=false")
    found = {"not_asked": not_asked, "drafts": [asdict(entry) for entry in drafts]}
    text = json.dumps({**asdict(made), "hub": found}, indent=2, ensure_ascii=False) + "\n"
    if options.output is not None:
        try:
            Path(options.output).write_text(text, encoding="utf-8")
        except OSError as error:
            got = f"{options.output} ({error.strerror})"
            raise UserError("output", got=got, expected="a file that can be written") from error
    if JSON in arguments:
        print(text, end="")
    else:
        print_plan(made, drafts, not_asked)
    return ExitCode.DONE
