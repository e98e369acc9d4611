"""`specdistill <verb> key=value …`: the project's scripts behind one command.

A verb checks what it was given before it imports anything heavy, then runs the script in this process; the script stays the only place
where its work is written down.
"""

import ast
import json
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import create_model, model_validator

import specdistill
from specdistill.command import NO_SHORTHANDS, check_writable, print_help, spell_out
from specdistill.credentials import check_arguments
from specdistill.engines import engines_with
from specdistill.errors import ExitCode, ResourceError, UserError, explain, nearest
from specdistill.hub.options import AcquireOptions, ExportOptions, PublishOptions
from specdistill.launch import LaunchOptions, launch
from specdistill.methods import METHODS
from specdistill.methods.recipe import DEFAULT_METHOD, Recipe, TrainedRecipe, eval_keys_of_methods, options_by_method
from specdistill.next_step import next_step
from specdistill.project import PICO, ROOT
from specdistill.recipe.fields import ReadWhen, Section, default_of, leaves, like, one_of, option, section
from specdistill.recipe.load import load_recipe, merged
from specdistill.recipe.sections import Attention, TargetConfig, TargetRecipe

PATHS = {"pico": PICO}
DEMO_RECIPE, DEMO_FOLDER = "pico/eagle3", "runs/demo"
HELP = {"-h", "--help"}
SHORTHANDS = {"target": "target.model"}
DOCTOR_SHORTHANDS = {**SHORTHANDS, "suite": "eval.suite"}


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
    output: str | None = option(None, "JSON file for the same numbers")


WITH_TARGET = ReadWhen("with target=…", lambda it: it.model is not None)


class ExaminedTarget(Section):
    model: str | None = option(
        None, "the draft's target, pico, a folder, a GGUF file or a Hub id; null: examine the draft alone"
    )
    revision: str | None = like(TargetConfig, "revision")
    adapter: str | None = like(TargetConfig, "adapter", read_when=WITH_TARGET)
    dtype: Literal["float32", "bfloat16", "float16"] = like(TargetConfig, "dtype", read_when=WITH_TARGET)
    attn: Attention | None = like(TargetConfig, "attn", read_when=WITH_TARGET)
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
    engine: Annotated[str, one_of(lambda: engines_with("loaders"))] | None = option(
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


IN_THIS_PROCESS = LaunchOptions()
DATA_VERBS = ("show", "generate")
IN_TERMINAL, ON_PAGE = 3, 24


class ShowOptions(Section):
    documents: int | None = option(None, f"documents to show as text; null: {IN_TERMINAL} here, {ON_PAGE} on a page", ge=1)
    output: str | None = option(None, "HTML page for the same, with plots; null: none")


WITH_A_TARGET = ReadWhen("with target=…", lambda it: it.target.model is not None)
KEYS_OF_METHODS: dict[str, Any] = dict(eval_keys_of_methods(read_when=WITH_A_TARGET))
DoctorOptions: type[CommonDoctorOptions] = create_model("DoctorOptions", __base__=CommonDoctorOptions, **KEYS_OF_METHODS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb, or without one say what to type next; returns the exit code."""
    verb, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if verb in HELP:
        print(f"{specdistill.__doc__}\n\nUsage: specdistill <verb> key=value …     specdistill <verb> --help lists its keys\n")
        for name, function in VERBS.items():
            print(f"  {name:8} {function.__doc__}")
        return ExitCode.DONE
    if verb == "--version":
        print(f"specdistill {specdistill.__version__}")
        return ExitCode.DONE
    if verb in OPTIONS and HELP & set(rest):
        schemas, shorthands = OPTIONS[verb]
        print_help(f"specdistill {verb}: {VERBS[verb].__doc__}", *schemas, shorthands=shorthands)
        return ExitCode.DONE
    try:
        if not verb:
            return _say_what_is_next()
        check_arguments(rest)
        if verb not in VERBS:
            expected = f"one of {', '.join(VERBS)}"
            raise UserError(f"specdistill {verb}", got="an unknown verb", expected=expected, nearest=nearest(verb, VERBS))
        return VERBS[verb](rest)
    except (UserError, ResourceError, KeyboardInterrupt) as error:
        return explain(error, debug="debug=true" in rest)


def _say_what_is_next() -> int:
    said, commands = next_step(Path())
    print(said, *(f"  {command}" for command in commands), "All verbs: specdistill --help", sep="\n")
    return ExitCode.DONE


def train(arguments: list[str]) -> int:
    """train a draft on a recipe, or a target of its own; launch=… in several processes, as `accelerate launch train/….py` does"""
    options, arguments = _launch_options(arguments)
    keys = _keys(arguments)
    schema = _schema_of(keys)
    method = METHODS.get(str(merged(keys).get("method", DEFAULT_METHOD)))
    script = "train/target.py" if schema is TargetRecipe else (method and method.script) or "train/eagle.py"
    if HELP & set(arguments):
        introduction = ast.get_docstring(ast.parse((ROOT / script).read_text(encoding="utf-8")))  # not imported: it needs torch
        print_help(introduction or "", schema, LaunchOptions)
        return ExitCode.DONE
    if schema is Recipe and method and method.script is None:
        trained = [name for name, row in METHODS.items() if row.script]
        raise UserError("method", got="one that needs no training", expected=" or ".join(trained))
    load_recipe(schema, keys)
    return _run_script(script, arguments, options)


def plan(arguments: list[str]) -> int:
    """say which method a target should get before anything is trained: what each costs, the speedup to expect, and on what grounds"""
    options = load_recipe(PlanOptions, _keys(arguments, SHORTHANDS))
    from specdistill.planning.budget import Serving  # here, and not above, because these import torch
    from specdistill.planning.plan import make_plan
    from specdistill.planning.printing import print_plan
    from specdistill.planning.reading import known_drafts, read
    from specdistill.planning.rows import Training

    remote = options.target.trust_remote_code
    target = read(options.target.model, key="target.model", revision=options.target.revision, trust_remote_code=remote)
    draft = read(options.draft, key="draft", trust_remote_code=remote) if options.draft else None
    serving = Serving.of(target, **options.serving.model_dump())
    made = make_plan(target, draft, serving=serving, training=Training(**vars(options.training)), computed=True)
    drafts, not_asked = known_drafts(target.name, target.hub_id) if options.hub else ([], "not asked: hub=false")
    if options.output is not None:
        found = {"not_asked": not_asked, "drafts": [asdict(entry) for entry in drafts]}
        text = json.dumps({**asdict(made), "hub": found}, indent=2, ensure_ascii=False) + "\n"
        try:
            Path(options.output).write_text(text, encoding="utf-8")
        except OSError as error:
            got = f"{options.output} ({error.strerror})"
            raise UserError("output", got=got, expected="a file that can be written") from error
    print_plan(made, drafts, not_asked)
    return ExitCode.DONE


def acquire(arguments: list[str]) -> int:
    """fetch the draft of a method for a target, checked before its weights are fetched; its folder is all that stdout says"""
    options = load_recipe(AcquireOptions, _keys(arguments, SHORTHANDS))
    from specdistill.hub.acquire import acquire as fetch  # here, and not above, because it imports torch

    of_method = {"heterogeneous_vocab": True} if options.heterogeneous_vocab else {}
    folder = fetch(
        options.method,
        options.target.model,
        options.draft,
        target_revision=options.target.revision,
        adapter=options.target.adapter,
        revision=options.revision,
        output=Path(options.output) if options.output else None,
        verify=options.verify,
        dry_run=options.dry_run,
        **of_method,
    )
    print(folder)
    return ExitCode.DONE


def export(arguments: list[str]) -> int:
    """write a draft in the layout of an inference engine, with the command that serves it"""
    given = _keys(arguments, SHORTHANDS)
    dry_run = "dry_run=true" in given
    recipes = [argument for argument in given if argument.startswith("recipe=")]
    if bool(recipes) != dry_run:
        raise UserError("recipe", got=(recipes or ["nothing"])[-1], expected="a recipe with dry_run=true, and only then")
    own = {key for key, *_ in leaves(ExportOptions) if not (dry_run and key.startswith("target."))}
    others = [argument for argument in given if dry_run and argument.partition("=")[0] not in own]
    options = load_recipe(ExportOptions, [argument for argument in given if argument not in others])
    if (options.draft is None) != dry_run:
        raise UserError("draft", got=options.draft or "nothing", expected="a folder or Hub id, or null with dry_run=true")
    recipe = load_recipe(Recipe, [*others, "train.output_dir=runs"]) if dry_run else None
    from specdistill.export import export as write
    from specdistill.export import write_untrained
    from specdistill.methods.load import locate  # here, and not above, because these import torch
    from specdistill.targets.files import TargetFiles

    source = recipe.target if recipe else options.target
    with tempfile.TemporaryDirectory() as temporary:
        draft = Path(temporary) / "draft"
        if recipe:
            write_untrained(recipe, draft)
        else:
            draft = locate(str(options.draft), key="draft")
        served = write(
            draft,
            options.engine,
            Path(options.output_dir),
            TargetFiles.of(source.model, source.revision, source.adapter) if source.model else None,
            report=Path(options.report) if options.report else None,
            dtype=options.dtype,
            num_speculative_tokens=options.num_speculative_tokens,
        )
    print(f"{'an untrained draft' if recipe else 'draft'} of method {served.method} for {options.engine}: {options.output_dir}")
    print(f"how to serve it: {Path(options.output_dir) / 'SERVE.md'}")
    return ExitCode.DONE


def doctor(arguments: list[str]) -> int:
    """examine a draft: files, fit with its target, an engine's loader, and a few prompts decoded; exit code 1 for a problem"""
    options = load_recipe(DoctorOptions, _keys(arguments, DOCTOR_SHORTHANDS))
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


def data(arguments: list[str]) -> int:
    """prepare a recipe's training data and show it (`data show`); `data generate`: by servers; `data features`: store its features"""
    if arguments[:1] == ["features"]:
        launching, others = _launch_options(arguments[1:])
        return _run_script("train/features.py", [*others, "train.output_dir=runs"], launching)  # features have no run
    verb = arguments.pop(0) if arguments[:1] and arguments[0] in DATA_VERBS else "show"
    keys = _keys(arguments)
    is_shown = [verb == "show" and key.partition("=")[0] in ShowOptions.model_fields for key in keys]
    options = load_recipe(ShowOptions, list(compress(keys, is_shown)))
    own = [key for key, shown in zip(keys, is_shown, strict=True) if not shown]
    recipe = load_recipe(Recipe, [*own, "train.output_dir=runs"])  # a recipe needs it, the rows do not
    if not isinstance(recipe, TrainedRecipe):
        raise UserError("method", got=f"{recipe.method}, which needs no training", expected="a method that is trained")
    return _generate(recipe) if verb == "generate" else _show(recipe, options)


def _show(recipe: TrainedRecipe, options: ShowOptions) -> int:
    """Training data in the terminal and, where one is asked for, on a page."""
    from specdistill.data import show  # here, and not above, because these import torch
    from specdistill.data.sources import source_names
    from specdistill.data.training_data import packed, training_documents
    from specdistill.report.rows import write_page
    from specdistill.targets.frozen import FrozenTarget

    if options.output is not None:
        check_writable(Path(options.output).parent, "output")
    target = FrozenTarget.load(**vars(recipe.target))
    documents = training_documents(
        recipe.data,
        target.tokenizer,
        target.model,
        fingerprint=target.identity.weights,
        measured_on=recipe.measured_on,
    )
    rows = packed(documents, recipe.data, target.tokenizer)
    names, max_length = source_names(recipe.data.source), recipe.data.max_length
    lengths = [show.lengths(part) for part in documents]
    halves = {
        name: show.half(len(part), of, max_length)
        for name, part, of in zip(("train", "validation"), rows, lengths, strict=True)
    }
    mixture = show.mixture(lengths[0], names)
    look = partial(show.shown, documents[0], names, tokenizer=target.tokenizer, max_length=max_length)
    show.print_data(halves, mixture, look(options.documents or IN_TERMINAL))
    if options.output is not None:
        on_page = look(options.documents or ON_PAGE)
        write_page(Path(options.output), "output", target.name, recipe.data, halves, mixture, lengths[0], on_page)
        print(f"\npage: {options.output}")
    return ExitCode.DONE


def _generate(recipe: TrainedRecipe) -> int:
    """Have servers generate a recipe's rows. They hold the weights, of which the hashes alone are read here."""
    from specdistill.data.training_data import Words, served_data
    from specdistill.targets.files import TargetFiles
    from specdistill.targets.loading import read_words

    target, regenerate = recipe.target, recipe.data.regenerate
    if not regenerate.server:
        raise UserError(
            "data.regenerate.server", got="nothing", expected="addresses of servers, with data.regenerate.num_tokens"
        )
    words = read_words(target.model, revision=target.revision, trust_remote_code=target.trust_remote_code)
    identity = TargetFiles.of(target.model, target.revision, target.adapter).identity
    train_set, eval_set = served_data(
        recipe.data, Words(*words, target.model), fingerprint=identity.weights, measured_on=recipe.measured_on
    )
    counts = " and ".join(f"{sum(part['length']):,} tokens in {len(part):,} documents" for part in (train_set, eval_set))
    print(f"for training and validation: {counts}")
    return ExitCode.DONE


def eval(arguments: list[str]) -> int:
    """decode with a draft for real, measure acceptance and speedup, write report.json and its siblings, apply the gate"""
    if _schema_of(_keys(arguments)) is TargetRecipe:
        raise UserError("recipe", got="the recipe of a target", expected="the recipe of a draft")
    return _run_script("eval/run.py", arguments)


def gate(arguments: list[str]) -> int:
    """decide from a report alone: exit code 0 passed, 1 failed"""
    return _run_script("eval/gate.py", arguments)


def compare(arguments: list[str]) -> int:
    """measure several drafts for one target in one paired run, rank them, and say why they differ"""
    return _run_script("eval/compare.py", arguments)


def publish(arguments: list[str]) -> int:
    """release a draft that passed its gate on the Hub: the weights, the evidence and a card in one commit, with a tag on it"""
    options = load_recipe(PublishOptions, _keys(arguments))
    from specdistill.hub.publish import print_outcome, publish_run, restore_release  # not above: these import torch

    if options.restore is not None:
        restore_release(options.repo, options.restore, dry_run=options.dry_run)
        return ExitCode.DONE
    outcome = publish_run(options)
    print_outcome(outcome)
    return ExitCode.CHECK_FAILED if outcome.refusals and outcome.folder is None else ExitCode.DONE


def demo(arguments: list[str]) -> int:
    """train a head for the target that ships with the package, decode with it, measure, pass the gate; key=value goes to both"""
    keys = [f"recipe={DEMO_RECIPE}", f"train.output_dir={DEMO_FOLDER}", *arguments]
    output_dir = load_recipe(Recipe, _keys(keys)).train["output_dir"]
    # Checked first: a mistake must not cost the earlier demo. Only what a demo wrote is cleared; any other folder is the script's to judge.
    if output_dir == DEMO_FOLDER and (Path(DEMO_FOLDER) / "run" / "recipe.yaml").is_file():
        shutil.rmtree(DEMO_FOLDER)
    for verb in ("train", "eval"):
        command = [verb, *keys]
        print(f"$ specdistill {shlex.join(command)}", flush=True)
        code = subprocess.run([sys.executable, "-m", "specdistill", *command], check=False).returncode
        if code < 0:
            raise ResourceError(f"specdistill {verb} was killed by signal {-code}", next_step="free memory and start again")
        if code != ExitCode.DONE:
            return code
    return ExitCode.DONE


def path(arguments: list[str]) -> int:
    """print the folder of something that ships with the package: specdistill path pico"""
    if HELP & set(arguments):
        print(f"specdistill path: {path.__doc__}")
        return ExitCode.DONE
    name = " ".join(arguments)
    if name not in PATHS:
        raise UserError("specdistill path", got=name or "nothing", expected=" or ".join(PATHS), nearest=nearest(name, PATHS))
    print(PATHS[name])
    return ExitCode.DONE


VERBS = {verb.__name__: verb for verb in (demo, plan, acquire, export, doctor, data, train, eval, compare, gate, publish, path)}
# What a verb's --help lists. Those that are not here say it themselves: scripts, and `path`.
OPTIONS: dict[str, tuple[Sequence[type[Section]], Mapping[str, str]]] = {
    "demo": ([Recipe], {}),
    "plan": ([PlanOptions], SHORTHANDS),
    "acquire": ([AcquireOptions], SHORTHANDS),
    "export": ([ExportOptions], SHORTHANDS),
    "doctor": ([DoctorOptions], DOCTOR_SHORTHANDS),
    "data": ([Recipe, ShowOptions, LaunchOptions], {}),
    "publish": ([PublishOptions], {}),
}


def _keys(arguments: list[str], shorthands: Mapping[str, str] = NO_SHORTHANDS) -> list[str]:
    """The key=value arguments that belong to the recipe, their keys written out."""
    return [
        spell_out(argument, shorthands) for argument in arguments if argument not in HELP and not argument.startswith("debug=")
    ]


def _schema_of(keys: list[str]) -> type[Recipe] | type[TargetRecipe]:
    """The schema that a recipe is written for: a target's own recipe has keys that a draft's lacks."""
    own = TargetRecipe.model_fields.keys() - Recipe.model_fields.keys()
    return TargetRecipe if own & merged(keys).keys() else Recipe


def _launch_options(arguments: list[str]) -> tuple[LaunchOptions, list[str]]:
    """How to launch, and the arguments that do not say so."""
    is_launch = [argument.partition("=")[0] in LaunchOptions.model_fields for argument in arguments]
    others = [argument for argument, of_launch in zip(arguments, is_launch, strict=True) if not of_launch]
    return load_recipe(LaunchOptions, list(compress(arguments, is_launch))), others


def _run_script(script: str, arguments: list[str], options: LaunchOptions = IN_THIS_PROCESS) -> int:
    """Run one of the project's scripts as if by `python script arguments`; its own exit code ends this process."""
    if options.launch is not None:
        return launch(ROOT / script, arguments, options)
    sys.argv = [str(ROOT / script), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return ExitCode.DONE
