"""The Python interface: the functions and classes that `import specdistill` provides.

A function such as `train` does what the command `specdistill train` does. Its keyword arguments are
turned into the `key=value` arguments of that command, and checked in the same way.

Functions raise UserError for mistakes of the user, and ResourceError for failures outside, for
example of the Hub. Both are in specdistill.common.errors.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, TrainerCallback

from specdistill.common.errors import UserError, find_nearest
from specdistill.decoding.assisted import Draft
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.sequence import Generation
from specdistill.evaluation.comparison.candidates import UNTRAINED_METHODS
from specdistill.evaluation.comparison.options import CompareOptions
from specdistill.evaluation.gate.decide import (
    GateOptions,
    judge_again,
)
from specdistill.evaluation.measurement.configurations import Settings
from specdistill.evaluation.report.files import stage_files
from specdistill.hub.acquire import acquire as fetch_draft
from specdistill.hub.options import AcquireOptions, PublishOptions
from specdistill.hub.publish import Publication, publish_run
from specdistill.methods import METHODS
from specdistill.methods.load import find_method, load_proposer, locate
from specdistill.methods.recipe import (
    Recipe,
    check_trainable,
    list_own_eval_keys,
    select_eval_schema,
)
from specdistill.recipe.load import flatten_keys, load_recipe, validate_recipe
from specdistill.recipe.sections import MeasurementConfig, TargetConfig
from specdistill.recipe.short_keys import (
    COMPARE,
    SHORTHANDS,
    TARGET,
    TRAIN,
    rename_keys_as_typed,
    select_recipe_keys,
)
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.loading import read_tokenizer
from specdistill.workflows.compare import compare_drafts
from specdistill.workflows.evaluate import ARGUMENTS_WITHOUT_RECIPE, evaluate
from specdistill.workflows.train import train_draft

__all__ = [
    "Draft",
    "DraftConfig",
    "DraftTrainer",
    "Report",
    "acquire",
    "compare",
    "generate",
    "judge",
    "load_draft",
    "load_target",
    "measure",
    "publish",
    "train",
]
# The name or file of a recipe, the folder of a run, or the sections of a recipe as mappings.
RecipeOrRun = str | os.PathLike[str] | Mapping[str, object]


def build_arguments(recipe: RecipeOrRun, keys: Mapping[str, object]) -> list[str]:
    """Turn a recipe, and keys that override it, into arguments of the command line (`key=value`).

    Args:
        recipe: the name of a recipe under recipes/, a file, the folder of a run, or the sections of
            a recipe as mappings.
        keys: settings that take precedence over those of the recipe.
    """
    # A recipe that is not given as mappings becomes `recipe=NAME`. For the folder of a run, this is
    # the recipe that the run was trained with. The keys come last, so that they take precedence.
    arguments = []
    sections = [keys]
    if isinstance(recipe, Mapping):
        sections = [recipe, keys]
    else:
        recorded_recipe = Path(recipe) / "run" / "recipe.yaml"
        name = recorded_recipe if recorded_recipe.is_file() else os.fspath(recipe)
        arguments = [f"recipe={name}"]

    # Each key in a section becomes `section.key=value`. Values are written in JSON, which is YAML
    # too, and paths as text.
    for section in sections:
        for key, value in flatten_keys(section):
            text = json.dumps(value, ensure_ascii=False, default=os.fspath)
            arguments.append(f"{key}={text}")
    return arguments


@dataclass(frozen=True)
class Completion(Generation):
    """The continuation of a prompt: the new tokens, the rounds that made them, and their text.

    Attributes:
        text: the text of the new tokens, without special tokens.
    """

    text: str


def load_target(model: str | os.PathLike[str], **keys: object) -> FrozenTarget:
    """Load a target, the causal language model that verifies the tokens of a draft.

    Args:
        model: `pico` (a tiny built-in model), a folder, a GGUF file or a Hub id.
        keys: further keys of a recipe's section `target:`, e.g. dtype="bfloat16".
    """
    values = {"model": os.fspath(model), **keys}
    config = validate_recipe(TargetConfig, values, "target.")
    return FrozenTarget.load(**vars(config))


def load_draft(
    draft: str | os.PathLike[str], target: FrozenTarget | PreTrainedModel, **keys: object
) -> Draft:
    """Load a draft of any method, from a checkpoint in any supported layout.

    Args:
        draft: a folder, or a Hub id (`org/name` or `org/name@revision`), or `ngram` or `suffix` for
            a draft without weights.
        target: a target from `load_target`, or a model that transformers loaded from a folder or
            the Hub. Such a model is put into evaluation mode, and its gradients are switched off.
        keys: keys of the section `eval:` of a recipe: `lookup_first`, and the keys that only the
            method of this draft reads.

    Raises:
        UserError: for a key that a draft of this method does not read, and for a draft that is
            broken or does not fit the target.
    """
    # Find out the method of the draft, from its name or from its files.
    draft_name = os.fspath(draft)
    if draft_name in UNTRAINED_METHODS:
        method = draft_name
    else:
        method = find_method(locate(draft_name, key="draft"), key="draft")

    # Check the keys: only some keys of a recipe's section `eval:` belong to a draft.
    recipe = METHODS[method].recipe()
    draft_keys = [*list_own_eval_keys(recipe), "lookup_first"]
    for name in keys:
        if name not in draft_keys:
            raise UserError(
                name,
                got="an unknown key",
                expected=f"one of the keys for a draft of method {method}: {', '.join(draft_keys)}",
                nearest=find_nearest(name, draft_keys),
            )
    section = validate_recipe(select_eval_schema(recipe), keys)

    # Wrap a model of transformers with what a target needs besides: its tokenizer and its files.
    if not isinstance(target, FrozenTarget):
        target_name = str(target.name_or_path)
        revision = getattr(target.config, "_commit_hash", None)
        files = TargetFiles(target_name, revision)
        tokenizer, *_ = read_tokenizer(files)
        target = FrozenTarget(target, tokenizer, name=target_name, revision=revision, files=files)

    # Load the object that drafts during decoding.
    options = {name: getattr(section, name) for name in draft_keys}
    proposer = load_proposer(method, draft_name, target, key="draft", **options)
    return Draft(method, proposer, target)


def generate(
    draft: Draft | FrozenTarget,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 128,
    num_speculative_tokens: int = 4,
    tree: Mapping[str, object] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Completion:
    """Continue a prompt by speculative decoding with a draft, or with the target alone.

    The options have the same names and meanings as the keys of a recipe's section `eval:`.

    Args:
        draft: a draft from `load_draft`, or a target from `load_target`, which decodes without a
            draft.
        prompt: a text or token ids.
        max_new_tokens: the most tokens to generate.
        num_speculative_tokens: K, the most draft tokens of a round.
        tree: the shape of a tree to draft instead of a chain, as in `eval.tree`.
        temperature: the sampling temperature; 0 decodes greedily.
        top_p: sample from the most likely tokens that together have this probability; 1 for all.
        top_k: sample from this many of the most likely tokens; 0 for all.
        seed: the seed of the random numbers for sampling.

    Returns:
        The completion, with `text`, `token_ids` and `rounds`. A round has the draft tokens, how
        many of them were accepted, and the seconds of drafting and of verifying.
    """
    # Check the arguments that are also keys of a recipe's section `eval:`, as a recipe is checked.
    # `locals()` has them all: so far the function has no other variables than its arguments.
    keys = {
        name: value for name, value in locals().items() if name in MeasurementConfig.model_fields
    }
    settings = Settings.from_section(validate_recipe(MeasurementConfig, keys))

    # Decode. The prompt and the completion are converted with the tokenizer of the target.
    target = draft.target if isinstance(draft, Draft) else draft
    proposer = draft.proposer if isinstance(draft, Draft) else None
    prompt_ids = target.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    generation = Decoder(target, proposer).generate(
        prompt_ids, generator=torch.Generator().manual_seed(seed), **settings.decoding
    )
    text = target.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
    return Completion(**vars(generation), text=text)


def train(
    recipe: RecipeOrRun, *, callbacks: Sequence[TrainerCallback] = (), **keys: object
) -> Path:
    """Train a draft, as `specdistill train` does. An interrupted run resumes.

    Args:
        recipe: the name of a recipe, a file, or the sections of a recipe as mappings.
        callbacks: callbacks of transformers' Trainer.
        keys: settings that take precedence over those of the recipe, e.g.
            train={"output_dir": "runs/a"}.

    Returns:
        The folder of the run, which holds the draft in `draft`.
    """
    # TRAIN has the short keys of `specdistill train`. Within the block, errors name a short key as
    # it was passed, and not by the full key that it stands for.
    arguments = build_arguments(recipe, keys)
    with rename_keys_as_typed(arguments, TRAIN):
        loaded_recipe = load_recipe(Recipe, select_recipe_keys(arguments, TRAIN))
        return train_draft(check_trainable(loaded_recipe), callbacks)


class DraftConfig:
    """The settings of a `DraftTrainer`.

    Args:
        output_dir: the folder of the run.
        keys: fields of transformers.TrainingArguments, such as learning_rate=1e-3, and sections of
            a recipe, such as draft={"ttt_steps": 5}.
    """

    def __init__(self, output_dir: str | os.PathLike[str], **keys: object) -> None:
        # An argument whose name is a section or key of a recipe, of any method, sets it. All other
        # arguments are fields of TrainingArguments, which a recipe has in its section `train`.
        sections = set[str]()
        for schema in Recipe.list_schemas().values():
            sections.update(schema.model_fields)
        sections.discard("train")
        recipe_sections = {name: value for name, value in keys.items() if name in sections}
        train_fields = {name: value for name, value in keys.items() if name not in sections}
        self.output_dir = output_dir
        self.keys = {**recipe_sections, "train": {"output_dir": output_dir, **train_fields}}


class DraftTrainer:
    """Trains a draft for a target, with an interface like that of transformers' Trainer.

    Args:
        method: the method of the draft, e.g. `eagle3`.
        target: the name of the target, or a recipe's section `target:` as a mapping.
        args: the settings of the training.
        train_dataset: rows in a form that `data.source` reads, for example with `messages`, or the
            name of a source. None for the data that `args` names. Rows are written to the file
            `<output_dir>.jsonl`, so that the recorded recipe of the run names all its data.
        callbacks: callbacks of transformers' Trainer.
    """

    def __init__(
        self,
        method: str,
        target: str | os.PathLike[str] | Mapping[str, object],
        args: DraftConfig,
        train_dataset: Dataset
        | Sequence[Mapping[str, object]]
        | str
        | os.PathLike[str]
        | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        # A text or path names a source of data. Rows are kept in `self.rows`, and `train` writes
        # them to a file, which is the source. `self.rows` is None if there are none to write.
        self.rows = None if isinstance(train_dataset, str | os.PathLike) else train_dataset
        self.callbacks = callbacks
        source = train_dataset if self.rows is None else f"{os.fspath(args.output_dir)}.jsonl"

        # Check the recipe. `method` and `target` take precedence over the sections of `args`.
        method_and_target = {
            "method": method,
            "target": target if isinstance(target, Mapping) else {"model": target},
        }
        data_keys = {"data": {"source": source}} if source else {}
        self.recipe = check_trainable(
            load_recipe(Recipe, build_arguments({**args.keys, **method_and_target}, data_keys))
        )

    def train(self) -> Path:
        """Train the draft. An interrupted run resumes.

        Returns:
            The folder of the run, which holds the draft in `draft`.

        Raises:
            UserError: if `<output_dir>.jsonl` already holds other rows.
        """
        # Write the rows of `train_dataset` to the file that the recipe names as its data. If an
        # earlier run has written this file, it must have the same rows, and is not overwritten with
        # others.
        if self.rows is not None:
            path = Path(str(self.recipe.data.source))
            text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in self.rows)
            if path.exists() and path.read_bytes() != text.encode():
                raise UserError(
                    "train_dataset",
                    got=f"other rows than those in {path}, which an earlier run wrote",
                    expected="the same rows again, or another output_dir for a new run",
                )
            # Each process of a launch writes the same content. Staging writes to a temporary folder
            # and moves the file in one step, so that no process reads half of it.
            with stage_files(path.parent) as staging:
                (staging / path.name).write_text(text, encoding="utf-8")
        return train_draft(self.recipe, self.callbacks)


@dataclass(frozen=True)
class Report:
    """The report of a measured draft.

    Attributes:
        data: the content of report.json. `data["gate"]["rules"]` has the rules of the gate, with
            the outcome of each.
        folder: the folder of the report.
        acceptance_length: the mean acceptance length over the whole suite, in tokens per round;
            None if it was not measured.
        speedup: the speedup over the whole suite; None if it was not measured.
        verdict: the verdict of the gate: passed, failed or inconclusive.
    """

    data: dict[str, Any]
    folder: Path
    acceptance_length: float | None
    speedup: float | None
    verdict: str

    @classmethod
    def of(cls, data: dict[str, Any], folder: Path) -> "Report":
        """Build a Report from the content of a report.json and its folder."""
        # The first result is for all prompts of the suite, in the main configuration.
        whole_suite = data["results"][0]
        return cls(
            data,
            folder,
            acceptance_length=whole_suite.get("mean_acceptance_length"),
            speedup=whole_suite.get("speedup"),
            verdict=data["gate"]["verdict"],
        )

    def to_dataframe(self) -> Any:
        """Return the results as a pandas.DataFrame.

        The table has one row for each configuration of the measurement and each category of
        prompts. The first row is for all prompts in the main configuration.
        """
        import pandas  # imported here because it is slow to import

        return pandas.DataFrame(self.data["results"])


def measure(recipe: RecipeOrRun | None = None, **keys: object) -> Report:
    """Measure a draft by decoding with it, and judge it by the gate of its recipe.

    This does what `specdistill eval` does, and writes the same files.

    Args:
        recipe: a recipe as a name, a file or a mapping, or the folder of a run; None if `keys` has
            all settings.
        keys: keys of `specdistill eval`, e.g. draft="org/name", eval={"num_prompts": 16}.
    """
    # The key `train.output_dir` is required. A recipe's file and a run have it. They get no
    # default: a default is an argument, and every argument overrides the values of a file. A
    # mapping and `keys` may lack the key, so they get a default (ARGUMENTS_WITHOUT_RECIPE). Their
    # values are arguments, too. A later argument overrides an earlier one, so the default comes
    # first.
    is_file_or_run = recipe is not None and not isinstance(recipe, Mapping)
    defaults = [] if is_file_or_run else ARGUMENTS_WITHOUT_RECIPE
    arguments = build_arguments(recipe or {}, keys)
    with rename_keys_as_typed(arguments, SHORTHANDS):
        recipe_keys = select_recipe_keys(arguments, SHORTHANDS)
        report, folder = evaluate(load_recipe(Recipe, [*defaults, *recipe_keys]))
    return Report.of(report, folder)


def judge(
    report: Report | str | os.PathLike[str], gate: str = "default", *, baseline: str | None = None
) -> Report:
    """Judge an existing report by a gate, as `specdistill gate` does.

    The report with the new verdict is written to a folder with the name of the gate, inside the
    folder of the report.

    Args:
        report: a report, or the path of one: its folder or its report.json.
        gate: the name of a gate, or a YAML file.
        baseline: an earlier report that the draft is compared with. The text `none` says that this
            is a first release, so the gate's rules about regressions are left out. Without a
            baseline (None), these rules fail.

    Returns:
        The report with the verdict of the gate.
    """
    folder = report.folder if isinstance(report, Report) else Path(report)
    keys = {"report": folder, "gates": gate, "baseline": baseline}
    options = load_recipe(GateOptions, build_arguments(keys, {}))
    return Report.of(judge_again(options), folder)


def compare(
    target: str | Mapping[str, object], drafts: Sequence[str | os.PathLike[str]], **keys: object
) -> dict[str, Any]:
    """Measure drafts for one target in turns, and rank them, as `specdistill compare` does.

    Args:
        target: the name of the target, or a recipe's section `target:` as a mapping.
        drafts: folders, Hub ids, or names of methods without weights, such as `ngram`.
        keys: further keys of `specdistill compare`.

    Returns:
        The content of comparison.json.
    """
    arguments = build_arguments({"target": target, "drafts": drafts}, keys)
    with rename_keys_as_typed(arguments, COMPARE):
        return compare_drafts(load_recipe(CompareOptions, select_recipe_keys(arguments, COMPARE)))


def acquire(
    method: str,
    target: str | Mapping[str, object],
    draft: str | os.PathLike[str] | None = None,
    **keys: object,
) -> Path:
    """Fetch a draft that fits a target, as `specdistill acquire` does.

    Args:
        method: the method of the draft.
        target: the name of the target, or the section `target:` as a mapping.
        draft: a folder, `org/name` or `org/name@revision`. None for the layer for multi-token
            prediction in the target's own checkpoint (method `mtp`).
        keys: further keys of `specdistill acquire`.

    Returns:
        The folder of the draft. It is the folder of the target if `draft` is None.
    """
    arguments = build_arguments({"method": method, "target": target, "draft": draft}, keys)
    with rename_keys_as_typed(arguments, TARGET):
        return fetch_draft(load_recipe(AcquireOptions, select_recipe_keys(arguments, TARGET)))


def publish(run: str | os.PathLike[str], **keys: object) -> Publication:
    """Publish the draft of a run if it passed its gate, as `specdistill publish` does.

    Args:
        run: the folder of a finished run.
        keys: further keys of `specdistill publish`.

    Returns:
        The outcome. Its `refusals` are the reasons against publishing, if there are any.
    """
    return publish_run(load_recipe(PublishOptions, build_arguments({"run": run}, keys)))
