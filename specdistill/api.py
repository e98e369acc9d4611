"""The Python interface, whose names `specdistill` offers, and what the scripts of train/ and eval/ do.

A call's keys become the arguments of the command, which checks them. Functions raise the UserError and ResourceError of specdistill.errors.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, TrainerCallback

from specdistill.command import COMPARE, SHORTHANDS, TARGET, keys_of
from specdistill.comparison.candidates import UNTRAINED, measure_candidates
from specdistill.comparison.compare import compare as compared
from specdistill.comparison.options import CommonOptions, CompareOptions
from specdistill.comparison.pages import FILES, write_comparison
from specdistill.decoding.assisted import Draft
from specdistill.decoding.decoder import Decoder, Generation
from specdistill.errors import UserError, nearest
from specdistill.export import check_engines
from specdistill.gate.decide import FIRST_RELEASE, Evidence, GateOptions, judge_again, read_baseline
from specdistill.gate.decide import judge as decide
from specdistill.gate.rules import load_gate
from specdistill.hub.acquire import acquire as acquired
from specdistill.hub.command import AcquireOptions, PublishOptions
from specdistill.hub.publish import Publication, publish_run
from specdistill.measurement import evaluate as measurement
from specdistill.measurement.configurations import Settings
from specdistill.measurement.measured import discard_finished
from specdistill.methods import METHODS
from specdistill.methods.load import create_draft, implementation, load_proposer, locate, method_of
from specdistill.methods.recipe import Recipe, TrainedRecipe, own_eval_keys, trainable
from specdistill.methods.target_record import save_draft
from specdistill.next_step import after
from specdistill.processes import is_first
from specdistill.produce.features import feature_store
from specdistill.produce.job import Job
from specdistill.produce.make import open_rows
from specdistill.recipe.load import flattened, load_recipe, merged, validate
from specdistill.recipe.sections import HiddenStatesConfig, MeasurementConfig, TargetConfig
from specdistill.report.files import check_replaceable, digest, staged, write_report
from specdistill.rows.row_set import RowTarget
from specdistill.suites.conversations import use_template
from specdistill.suites.suite import check_suite
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget, compile_layers
from specdistill.targets.loading import read_tokenizer
from specdistill.training import trainer as training
from specdistill.training.arguments import autocast_dtype
from specdistill.training.history import read_history
from specdistill.training.optimizer import build_optimizer
from specdistill.training.run import TrainingRun

__all__ = [
    "Draft",
    "DraftConfig",
    "DraftTrainer",
    "Report",
    "acquire",
    "compare",
    "generate",
    "judge",
]
__all__ += ["load_draft", "load_target", "measure", "publish", "train"]
WITHOUT_RECIPE = ["train.output_dir=runs/eval"]
RecipeOrRun = str | os.PathLike[str] | Mapping[str, Any]


def arguments_of(recipe: RecipeOrRun, keys: Mapping[str, Any]) -> list[str]:
    """key=value of a recipe (a name under recipes/, a file, the sections as mappings, a run's folder) and of keys over it."""
    named, sections = [], [keys]
    if isinstance(recipe, Mapping):
        sections = [recipe, keys]
    else:
        recorded = Path(recipe) / "run" / "recipe.yaml"
        named = [f"recipe={recorded if recorded.is_file() else os.fspath(recipe)}"]
    values = chain.from_iterable(map(flattened, sections))
    return named + [
        f"{key}={json.dumps(value, ensure_ascii=False, default=os.fspath)}" for key, value in values
    ]


@dataclass(frozen=True)
class Completion(Generation):
    """text: of the new tokens, without special ones."""

    text: str


def load_target(model: str | os.PathLike[str], **keys: Any) -> FrozenTarget:
    """A causal language model: `pico`, a folder, a GGUF file or a Hub id. keys: of a recipe's `target:`, e.g. dtype="bfloat16"."""
    return FrozenTarget.load(
        **vars(validate(TargetConfig, {"model": os.fspath(model), **keys}, "target."))
    )


def load_draft(
    draft: str | os.PathLike[str], target: FrozenTarget | PreTrainedModel, **keys: Any
) -> Draft:
    """The draft of a folder or Hub id (org/name@revision), of any method and in any layout that is read; or `ngram`, or `suffix`.

    target: from `load_target`, or a model that transformers loaded from a folder or the Hub, which is put into evaluation mode without
    gradients. keys: of a recipe's `eval:`, those that the draft's method alone reads, and `lookup_first`.
    """
    place = os.fspath(draft)
    method = place if place in UNTRAINED else method_of(locate(place, key="draft"), key="draft")
    recipe: Any = METHODS[method].recipe()
    read = [*own_eval_keys(recipe), "lookup_first"]
    if unread := next((name for name in keys if name not in read), None):
        expected = f"no such key: a draft of method {method} reads {', '.join(read)}"
        raise UserError(unread, got=keys[unread], expected=expected, nearest=nearest(unread, read))
    section = validate(recipe.model_fields["eval"].annotation, keys)
    if not isinstance(target, FrozenTarget):
        name, revision = str(target.name_or_path), getattr(target.config, "_commit_hash", None)
        files = TargetFiles(name, revision)
        tokenizer, *_ = read_tokenizer(files)
        target = FrozenTarget(target, tokenizer, name=name, revision=revision, files=files)
    options = {name: getattr(section, name) for name in read}
    return Draft(method, load_proposer(method, place, target, key="draft", **options), target)


def generate(
    draft: Draft | FrozenTarget,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 128,
    num_speculative_tokens: int = 4,
    tree: Mapping[str, Any] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Completion:
    """Continue a prompt, a text or token ids, with a draft, or by a target alone. The options are keys of a recipe's `eval:`.

    The result has `text`, `token_ids` and `rounds`: of each the tokens drafted, how many were accepted, and the seconds.
    """
    keys = {
        name: value for name, value in locals().items() if name in MeasurementConfig.model_fields
    }
    settings = Settings.of(validate(MeasurementConfig, keys))
    target, proposer = (draft.target, draft.proposer) if isinstance(draft, Draft) else (draft, None)
    done = Decoder(target, proposer).generate(
        target.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt,
        generator=torch.Generator().manual_seed(seed),
        **settings.decoding,
    )
    return Completion(
        **vars(done), text=target.tokenizer.decode(done.token_ids, skip_special_tokens=True)
    )


def train(recipe: RecipeOrRun, *, callbacks: Sequence[TrainerCallback] = (), **keys: Any) -> Path:
    """Train a draft as `specdistill train` does; returns the run's folder, with the draft in `draft`. An interrupted run resumes.

    recipe: a name, a file or sections. callbacks: of transformers' Trainer. keys: over the recipe's, e.g. train={"output_dir": "runs/a"}.
    """
    return train_draft(trainable(load_recipe(Recipe, arguments_of(recipe, keys))), callbacks)


def train_draft(recipe: TrainedRecipe, callbacks: Sequence[TrainerCallback] = ()) -> Path:
    """The run's folder, which then holds the draft. Every process of a launch calls it. Raises UserError for what cannot be trained so."""
    check_suite(
        recipe.eval.suite
    )  # with the gate it judges the draft later: an error in them shows now
    if recipe.selection is not None:
        check_suite(recipe.selection.suite, key="selection.suite")
    load_gate(recipe.gate)
    hidden_states = getattr(recipe, "hidden_states", HiddenStatesConfig())  # which heads have
    # Processes that read stored features while a GPU trains.
    readers = 2 if hidden_states.path and torch.cuda.is_available() else 0
    defaults = {"eval_on_start": recipe.evaluates_first, "dataloader_num_workers": readers}
    run = TrainingRun.open(recipe, target_dtype=recipe.target.dtype, **defaults)
    method = implementation(recipe.method)

    # Target and data
    runs_layers = hidden_states.runs_layers or recipe.selection is not None
    target = FrozenTarget.load(**vars(recipe.target), layers_on_disk=not runs_layers)
    check_engines(recipe, target)
    use_template(target.tokenizer, recipe)
    train_set, eval_set = open_rows(
        Job(recipe.data, RowTarget.of(target), recipe.measured_on, recipe.states_folder)
    )

    # Draft, what it learns, and the run's record before its first step
    draft = create_draft(recipe, target, train_set)
    objective = method.objective(draft, recipe, target)
    compile_layers(recipe.train, target, objective)
    run.record(
        target=target.name,
        target_revision=target.revision,
        target_weights=target.identity.weights,
        data_fingerprint=train_set._fingerprint,
        rows=len(train_set),
    )

    # Features that are kept, where each step does not have the target make its own
    autocast, rows = autocast_dtype(run.arguments), run.arguments.train_batch_size
    passes: dict[str, Any] = {"autocast": autocast, "batch_size": rows, "force": recipe.data.force}
    store = feature_store(
        hidden_states, target, getattr(draft, "aux_layers", ()), [train_set, eval_set], **passes
    )

    # Train, and save the best
    optimizer = build_optimizer(recipe.optimizer, draft, run.arguments)
    save = partial(save_draft, method, target, chat_template=recipe.data.chat_template)
    decode = measurement.decoded_acceptance_length(recipe, target)
    options: dict[str, Any] = {
        "save": save,
        "decode": decode,
        "optimizer": optimizer,
        "store": store,
    }
    trainer = training.DraftTrainer(
        objective, target, run.arguments, train_set, eval_set, **options
    )
    for callback in callbacks:
        trainer.add_callback(callback)
    run.train(trainer)
    if run.arguments.process_index == 0:
        _print_trained(run.path)
    return run.path


def _print_trained(run: Path) -> None:
    """Where the draft is, what it reached, and what to type next."""
    history = read_history(run / "draft", key="train.output_dir")
    assert history is not None
    lengths = dict(history.summary()["curve"])
    step, reached = history.saved_step, lengths.get(history.saved_step)
    simulated = f", acceptance length {reached:.2f} (simulated on held-out data)" if reached else ""
    print(f"The draft of step {step} of {history.steps} is in {run / 'draft'}{simulated}.")
    message, commands = after(run, merged([f"recipe={run / 'run' / 'recipe.yaml'}"]))
    print(message, *(f"  {command}" for command in commands), sep="\n")


class DraftConfig:
    """How a `DraftTrainer` trains: fields of transformers.TrainingArguments, and sections of a recipe, e.g. draft={"ttt_steps": 5}."""

    def __init__(self, output_dir: str | os.PathLike[str], **keys: Any) -> None:
        sections = {
            name for recipe in Recipe.variants().values() for name in recipe.model_fields
        } - {"train"}
        fields = {name: value for name, value in keys.items() if name not in sections}
        self.keys = {
            **{name: keys[name] for name in keys.keys() & sections},
            "train": {"output_dir": output_dir, **fields},
        }


class DraftTrainer:
    """Trains a draft of a method for a target: its name, or a recipe's section `target:`.

    train_dataset: rows in a form that `data.source` reads, e.g. with messages, or a source's name; None: what args say. Rows in memory are
    written to `<output_dir>.jsonl`, so that the recipe in the run's record is whole. callbacks: of transformers' Trainer.
    """

    def __init__(
        self,
        method: str,
        target: str | os.PathLike[str] | Mapping[str, Any],
        args: DraftConfig,
        train_dataset: Dataset | Sequence[Mapping[str, Any]] | str | os.PathLike[str] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.rows, self.callbacks = (
            None if isinstance(train_dataset, str | os.PathLike) else train_dataset,
            callbacks,
        )
        source = (
            train_dataset
            if self.rows is None
            else f"{os.fspath(args.keys['train']['output_dir'])}.jsonl"
        )
        own = {
            "method": method,
            "target": target if isinstance(target, Mapping) else {"model": target},
        }
        keys = {"data": {"source": source}} if source else {}
        self.recipe = trainable(load_recipe(Recipe, arguments_of({**args.keys, **own}, keys)))

    def train(self) -> Path:
        """Returns the run's folder, with the draft in `draft`. An interrupted run resumes."""
        if self.rows is not None:
            place = Path(self.recipe.data.source)
            text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in self.rows)
            if place.exists() and place.read_bytes() != text.encode():
                got = f"other rows than those in {place}"
                raise UserError("train_dataset", got=got, expected="them, or another output_dir")
            with staged(place.parent) as staging:  # each process of a launch writes the same file
                (staging / place.name).write_text(text, encoding="utf-8")
        return train_draft(self.recipe, self.callbacks)


@dataclass(frozen=True)
class Report:
    """A measured draft: report.json, its folder, and the headline over the whole suite; None: not measured. verdict: of the gate, whose
    rules with their reasons are in `data["gate"]["rules"]`: passed, failed or inconclusive.
    """

    data: dict[str, Any]
    folder: Path
    acceptance_length: float | None
    speedup: float | None
    verdict: str

    @classmethod
    def of(cls, data: dict[str, Any], folder: Path) -> "Report":
        first = data["results"][0]
        return cls(
            data,
            folder,
            first.get("mean_acceptance_length"),
            first.get("speedup"),
            data["gate"]["verdict"],
        )

    def to_dataframe(self) -> Any:
        """A pandas.DataFrame with a row for each configuration and category, the first one over the whole suite."""
        import pandas  # slow to import

        return pandas.DataFrame(self.data["results"])


def measure(recipe: RecipeOrRun | None = None, **keys: Any) -> Report:
    """Measure a draft by speculative decoding and judge it by its recipe's gate, as `specdistill eval` does; its files are written.

    recipe: a run's folder, or a recipe; None: keys say all. keys: of that command, e.g. draft="org/name", eval={"num_prompts": 16}.
    """
    first = WITHOUT_RECIPE if recipe is None or isinstance(recipe, Mapping) else []
    return Report.of(
        *evaluate(
            load_recipe(Recipe, [*first, *keys_of(arguments_of(recipe or {}, keys), SHORTHANDS)])
        )
    )


def evaluate(recipe: Recipe) -> tuple[dict[str, Any], Path]:
    """The report of a recipe's draft with the verdict of its gate, and the folder that it was written to."""
    config = recipe.eval
    folder = Path(config.output_dir or Path(recipe.train["output_dir"]) / "report")
    check_replaceable(folder, "eval.output_dir")
    rules = load_gate(recipe.gate)
    baseline = read_baseline(config.baseline, rules, "eval.baseline")
    report, records = measurement.measure(recipe, folder)
    report["digest"] = digest(report, records)
    report = decide(
        rules, Evidence(report, records), baseline, first_release=config.baseline == FIRST_RELEASE
    )
    if is_first():
        write_report(folder, report, records)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # of each machine
        discard_finished(folder / measurement.FINISHED)
    return report, folder


def judge(
    report: Report | str | os.PathLike[str], gate: str = "default", *, baseline: str | None = None
) -> Report:
    """The report, or that of a folder, with the verdict of a gate, as `specdistill gate` gives it; its files go to a folder of the gate's
    name next to it. gate: a name or a gate YAML. baseline: a report that regressions are relative to, or `none`.
    """
    folder = report.folder if isinstance(report, Report) else Path(report)
    options = load_recipe(
        GateOptions, arguments_of({"report": folder, "gates": gate, "baseline": baseline}, {})
    )
    return Report.of(judge_again(options), folder)


def compare(
    target: str | Mapping[str, Any], drafts: Sequence[str | os.PathLike[str]], **keys: Any
) -> dict[str, Any]:
    """Measure drafts for one target in one paired run and rank them, with the keys of `specdistill compare`; returns comparison.json."""
    options = load_recipe(
        CompareOptions, keys_of(arguments_of({"target": target, "drafts": drafts}, keys), COMPARE)
    )
    return compare_drafts(options)


def compare_drafts(options: CommonOptions) -> dict[str, Any]:
    """The document of a comparison, which is written to its folder with its pages."""
    folder = Path(options.output_dir)
    check_replaceable(folder, "output_dir", FILES)
    try:
        measured = measure_candidates(options)
    except UserError as error:  # what decodes names its keys as recipes do, whose section this command does not have
        error.key, error.args = error.key.removeprefix("eval."), (str(error).removeprefix("eval."),)
        raise
    comparison = compared(measured, seed=options.seed)
    write_comparison(folder, comparison, {entry.name: entry.records for entry in measured})
    return comparison


def acquire(
    method: str,
    target: str | Mapping[str, Any],
    draft: str | os.PathLike[str] | None = None,
    **keys: Any,
) -> Path:
    """The folder of a draft that fits a target, with the keys of `specdistill acquire`, which fetches it."""
    given = {"method": method, "target": target, "draft": draft}
    return acquired(load_recipe(AcquireOptions, keys_of(arguments_of(given, keys), TARGET)))


def publish(run: str | os.PathLike[str], **keys: Any) -> Publication:
    """Publish a run's draft if it passed its gate, with the keys of `specdistill publish`; `refusals` say why nothing was published."""
    return publish_run(load_recipe(PublishOptions, arguments_of({"run": run}, keys)))
