"""The options of `specdistill doctor`."""

from typing import Annotated, Literal

from pydantic import create_model, model_validator

from specdistill.common.errors import make_unused_key_error
from specdistill.methods.recipe import list_method_eval_keys
from specdistill.recipe.fields import (
    Condition,
    Section,
    allow_names,
    find_default,
    like,
    option,
    section,
)
from specdistill.recipe.sections import AttentionImplementation, LookupFirstConfig, TargetConfig
from specdistill.serving.engines import list_engines_with

TARGET_IS_GIVEN = Condition("with target=PATH", lambda target: target.model is not None)
DECODING_IS_ON = Condition(
    "where it is decoded: with target=PATH and decode=true",
    lambda options: options.target.model and options.decode,
)


class ExaminedTarget(Section):
    """The target that the draft is examined with."""

    model: str | None = option(
        None,
        "target of the draft: pico (a tiny built-in model), a folder, a GGUF file or a Hub id;"
        " null: examine the draft without a target",
    )
    revision: str | None = like(TargetConfig, "revision")
    adapter: str | None = like(TargetConfig, "adapter", condition=TARGET_IS_GIVEN)
    dtype: Literal["float32", "bfloat16", "float16"] = like(
        TargetConfig, "dtype", condition=TARGET_IS_GIVEN
    )
    attn: AttentionImplementation | None = like(TargetConfig, "attn", condition=TARGET_IS_GIVEN)
    device_map: str | None = like(TargetConfig, "device_map", condition=TARGET_IS_GIVEN)
    trust_remote_code: bool = like(TargetConfig, "trust_remote_code", condition=TARGET_IS_GIVEN)
    cache: bool = like(TargetConfig, "cache")


class DoctorPrompts(Section):
    """The prompts that the doctor decodes."""

    suite: str | None = option(
        None,
        "prompts to decode: a suite's name, a YAML or jsonl file; null: prompts of the draft's"
        " training run, else the suite pico-short",
    )
    num_prompts: int = option(8, "number of prompts to decode, spread over the suite", ge=1)
    lookup_first: LookupFirstConfig | None = option(
        None,
        "also decode with this n-gram or suffix lookup in front of the draft; with engine=, it must"
        " be one that the engine supports",
    )


class CommonDoctorOptions(Section):
    """The options that `specdistill doctor` has for every kind of draft."""

    draft: str = option(..., "folder or Hub id of a trained draft, in any supported layout")
    target: ExaminedTarget = section(ExaminedTarget)
    engine: Annotated[str, allow_names(lambda: list_engines_with("loader_version"))] | None = (
        option(
            None,
            "check that the loader of this engine accepts the draft; null: check no engine",
        )
    )
    decode: bool = option(
        True,
        "with target=PATH: decode a few prompts, and look for the cause if few draft tokens are"
        " accepted",
    )
    eval: DoctorPrompts = option(DoctorPrompts(), "the prompts to decode", condition=DECODING_IS_ON)

    @model_validator(mode="after")
    def _check_target_options(self) -> "CommonDoctorOptions":
        """Refuse `target.dtype`, `attn` and `device_map` with decode=false: they have no effect."""
        for name in ("dtype", "attn", "device_map"):
            value = getattr(self.target, name)
            if not self.decode and value != find_default(ExaminedTarget.model_fields[name]):
                raise make_unused_key_error(
                    f"target.{name}", value, "nothing is decoded with decode=false"
                )
        return self


OPTIONS_HAVE_TARGET = Condition(
    "with target=PATH", lambda options: options.target.model is not None
)
DoctorOptions: type[CommonDoctorOptions] = create_model(
    "DoctorOptions",
    __base__=CommonDoctorOptions,
    **list_method_eval_keys(condition=OPTIONS_HAVE_TARGET),
)
