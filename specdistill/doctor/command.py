"""`specdistill doctor`: its keys, and its exit code."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import create_model, model_validator

from specdistill.command import TARGET, keys_of
from specdistill.engines import engines_with
from specdistill.errors import ExitCode, UserError
from specdistill.methods.recipe import eval_keys_of_methods, options_by_method
from specdistill.recipe.fields import ReadWhen, Section, default_of, like, one_of, option, section
from specdistill.recipe.load import load_recipe
from specdistill.recipe.sections import AttentionImplementation, TargetConfig

DOCTOR = {**TARGET, "suite": "eval.suite"}  # short keys
WITH_TARGET = ReadWhen("with target=…", lambda it: it.model is not None)


class ExaminedTarget(Section):
    model: str | None = option(
        None, "the draft's target, pico, a folder, a GGUF file or a Hub id; null: examine the draft alone"
    )
    revision: str | None = like(TargetConfig, "revision")
    adapter: str | None = like(TargetConfig, "adapter", read_when=WITH_TARGET)
    dtype: Literal["float32", "bfloat16", "float16"] = like(TargetConfig, "dtype", read_when=WITH_TARGET)
    attn: AttentionImplementation | None = like(TargetConfig, "attn", read_when=WITH_TARGET)
    device_map: str | None = like(TargetConfig, "device_map", read_when=WITH_TARGET)
    trust_remote_code: bool = like(TargetConfig, "trust_remote_code", read_when=WITH_TARGET)


class DoctorPrompts(Section):
    suite: str | None = option(
        None, "prompts to decode: a suite's name, a YAML or jsonl file; null: the run's own, else pico-short"
    )
    num_prompts: int = option(8, "prompts to decode, spread over the suite", ge=1)


class CommonDoctorOptions(Section):
    draft: str = option(..., "folder or Hub id of a trained draft, in any layout that is read")
    target: ExaminedTarget = section(ExaminedTarget)
    engine: Annotated[str, one_of(lambda: engines_with("loader_version"))] | None = option(
        None, "whose loader to check it against; null: none"
    )
    decode: bool = option(
        True, "with a target: decode a few prompts, and look for what undone would bring the draft closer to it"
    )
    eval: DoctorPrompts = section(DoctorPrompts)

    @model_validator(mode="after")
    def _prompts_are_decoded(self) -> "CommonDoctorOptions":
        if self.eval != DoctorPrompts() and not (self.decode and self.target.model):
            raise UserError("eval", got="prompts to decode", expected="none without target=…, or with decode=false")
        return self

    @model_validator(mode="after")
    def _weights_are_loaded_to_decode(self) -> "CommonDoctorOptions":
        for name in ("dtype", "attn", "device_map"):
            value = getattr(self.target, name)
            if not self.decode and value != default_of(ExaminedTarget.model_fields[name]):
                expected = "no such key with decode=false, which reads the target's files alone"
                raise UserError(f"target.{name}", got=value, expected=expected)
        return self


WITH_A_TARGET = ReadWhen("with target=…", lambda it: it.target.model is not None)
KEYS_OF_METHODS: dict[str, Any] = dict(eval_keys_of_methods(read_when=WITH_A_TARGET))
DoctorOptions: type[CommonDoctorOptions] = create_model("DoctorOptions", __base__=CommonDoctorOptions, **KEYS_OF_METHODS)


def doctor(arguments: list[str]) -> int:
    """examine a draft: files, fit with its target, an engine's loader, and a few prompts decoded; exit code 1 for a problem"""
    options = load_recipe(DoctorOptions, keys_of(arguments, DOCTOR))
    from specdistill.doctor.diagnosis import diagnose, print_diagnosis  # here, and not above, because these import torch
    from specdistill.methods.load import locate

    in_target = options.draft == options.target.model  # its own layer, of which no weights are read
    made = diagnose(
        Path(options.draft) if in_target else locate(options.draft, key="draft"),
        options.engine,
        decode=options.decode,
        suite=options.eval.suite,
        num_prompts=options.eval.num_prompts,
        options_of=lambda method: options_by_method(options, [method])[0],
        **({} if options.target.model is None else vars(options.target)),
    )
    print_diagnosis(made)
    return ExitCode.DONE if made.is_sound else ExitCode.CHECK_FAILED
