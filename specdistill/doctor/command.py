"""`specdistill doctor`: its keys, what it prints, and its exit code."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import create_model, model_validator
from rich.text import Text

from specdistill.command import TARGET, keys_of
from specdistill.engines import engines_with
from specdistill.errors import ExitCode, UserError
from specdistill.methods.recipe import eval_keys_of_methods
from specdistill.recipe.fields import ReadWhen, Section, default_of, like, one_of, option, section
from specdistill.recipe.load import load_recipe
from specdistill.recipe.sections import AttentionImplementation, LookupFirstConfig, TargetConfig
from specdistill.terminal import Console, result

if TYPE_CHECKING:
    from specdistill.doctor.diagnosis import Diagnosis

STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim"}  # of findings, the worst first
INDENT = 9
DOCTOR = {**TARGET, "suite": "eval.suite"}  # short keys
WITH_TARGET = ReadWhen("with target=…", lambda it: it.model is not None)


class ExaminedTarget(Section):
    model: str | None = option(
        None, "pico, a folder, a GGUF file or a Hub id; null: examine the draft alone"
    )
    revision: str | None = like(TargetConfig, "revision")
    adapter: str | None = like(TargetConfig, "adapter", read_when=WITH_TARGET)
    dtype: Literal["float32", "bfloat16", "float16"] = like(
        TargetConfig, "dtype", read_when=WITH_TARGET
    )
    attn: AttentionImplementation | None = like(TargetConfig, "attn", read_when=WITH_TARGET)
    device_map: str | None = like(TargetConfig, "device_map", read_when=WITH_TARGET)
    trust_remote_code: bool = like(TargetConfig, "trust_remote_code", read_when=WITH_TARGET)


class DoctorPrompts(Section):
    suite: str | None = option(
        None, "prompts: a suite's name, a YAML or jsonl file; null: the run's own, else pico-short"
    )
    num_prompts: int = option(8, "prompts to decode, spread over the suite", ge=1)
    lookup_first: LookupFirstConfig | None = option(
        None, "a lookup in front of the draft, which the engine must have"
    )


class CommonDoctorOptions(Section):
    draft: str = option(..., "folder or Hub id of a trained draft, in any layout that is read")
    target: ExaminedTarget = section(ExaminedTarget)
    engine: Annotated[str, one_of(lambda: engines_with("loader_version"))] | None = option(
        None, "whose loader to check it against; null: none"
    )
    decode: bool = option(
        True,
        "with a target: decode a few prompts, and look for a repair that brings the draft closer to it",
    )
    eval: DoctorPrompts = section(DoctorPrompts)

    @model_validator(mode="after")
    def _only_decoding_reads_them(self) -> "CommonDoctorOptions":
        """Prompts, and how the target's weights are loaded."""
        fields, names = ExaminedTarget.model_fields, ("dtype", "attn", "device_map")
        loading = [
            f"target.{name}"
            for name in names
            if getattr(self.target, name) != default_of(fields[name])
        ]
        given = [*(["eval"] if self.eval != DoctorPrompts() else []), *loading]
        if given and not (self.decode and self.target.model):
            expected = "no such key without target=…, or with decode=false: nothing is decoded"
            raise UserError(given[0], got="a value", expected=expected)
        return self


WITH_A_TARGET = ReadWhen("with target=…", lambda it: it.target.model is not None)
KEYS_OF_METHODS: dict[str, Any] = dict(eval_keys_of_methods(read_when=WITH_A_TARGET))
DoctorOptions: type[CommonDoctorOptions] = create_model(
    "DoctorOptions", __base__=CommonDoctorOptions, **KEYS_OF_METHODS
)


def doctor(arguments: list[str]) -> int:
    """check a draft: files, fit with its target, an engine's loader, decoding (exit code 1: a problem)

    specdistill doctor draft=runs/mine/draft target=path/to/model
    specdistill doctor draft=org/draft engine=vllm"""
    options = load_recipe(DoctorOptions, keys_of(arguments, DOCTOR))
    from specdistill.doctor.diagnosis import (
        diagnose,
    )  # here, and not above, because it imports torch

    made = diagnose(options)
    print_diagnosis(made)
    result(made)
    return ExitCode.DONE if made.is_sound else ExitCode.CHECK_FAILED


def print_diagnosis(made: "Diagnosis") -> None:
    """What the draft is, every finding with what to do about it, what was accepted, and the verdict."""
    console = Console(soft_wrap=True)
    console.print(
        Text(f"{made.folder}", style="bold").append(f": {made.description}", style="not bold")
    )
    for finding in sorted(made.findings, key=lambda finding: list(STYLES).index(finding.severity)):
        line = Text(f"{finding.severity:<{INDENT}}", style=STYLES[finding.severity]).append(
            finding.what, style="not bold"
        )
        console.print(line)
        if finding.do:
            console.print(" " * INDENT + finding.do)
    if made.prompts:
        console.print(f"prompts: {made.prompts}")
    if decoded := made.acceptance:
        what = f"acceptance length {decoded.length:.2f} with {decoded.num_tokens} draft tokens, greedy, {decoded.num_rounds} rounds"
        if simulated := made.recorded:
            what += f"; training simulated {simulated.length:.2f} with {simulated.num_tokens}"
        console.print(what)
    if behind := made.behind_lookup:
        most = f"up to {behind.num_tokens} looked-up tokens per round"
        console.print(f"with the lookup in front: acceptance length {behind.length:.2f} ({most})")
    count = Counter(finding.severity for finding in made.findings)
    counted = [
        f"{count[kind]} {kind}{'s' * (count[kind] != 1)}"
        for kind in ("problem", "warning")
        if count[kind]
    ]
    console.print(Text(", ".join(counted) or "no problem found", style="bold"))
