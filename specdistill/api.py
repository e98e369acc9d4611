"""The Python interface: the functions and classes that `import specdistill` offers.

Each function does what the command of the same name does. The keyword arguments of a call become
the arguments of that command, which checks them.

Functions raise UserError for mistakes of the user and ResourceError for failures outside, such as
of the Hub. Both are in specdistill.common.errors.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
from specdistill.hub.acquire import acquire as acquired
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
RecipeOrRun = str | os.PathLike[str] | Mapping[str, object]


def build_arguments(recipe: RecipeOrRun, keys: Mapping[str, object]) -> list[str]:
    """Return the command-line arguments, `key=value`, of a recipe and of keys that override it.

    Args:
        recipe: the name of a recipe under recipes/, a file, the folder of a run, or the sections
            themselves as mappings.
        keys: settings that take precedence over those of the recipe.
    """
    recipe_arguments = []
    sections = [keys]
    if isinstance(recipe, Mapping):
        sections = [recipe, keys]
    else:
        recorded = Path(recipe) / "run" / "recipe.yaml"
        recipe_arguments = [f"recipe={recorded if recorded.is_file() else os.fspath(recipe)}"]
    values = chain.from_iterable(map(flatten_keys, sections))
    return recipe_arguments + [
        f"{key}={json.dumps(value, ensure_ascii=False, default=os.fspath)}" for key, value in values
    ]


@dataclass(frozen=True)
class Completion(Generation):
    """The continuation of a prompt.

    Attributes:
        text: the text of the new tokens, without special tokens.
    """

    text: str


def load_target(model: str | os.PathLike[str], **keys: object) -> FrozenTarget:
    """Load a target: a causal language model that verifies the tokens of a draft.

    Args:
        model: `pico`, a folder, a GGUF file or a Hub id.
        keys: further keys of a recipe's section `target:`, e.g. dtype="bfloat16".
    """
    return FrozenTarget.load(
        **vars(validate_recipe(TargetConfig, {"model": os.fspath(model), **keys}, "target."))
    )


def load_draft(
    draft: str | os.PathLike[str], target: FrozenTarget | PreTrainedModel, **keys: object
) -> Draft:
    """Load a draft of any method, in any layout that can be read.

    Args:
        draft: a folder, or a Hub id (`org/name` or `org/name@revision`). For a draft without
            weights, `ngram` or `suffix`.
        target: a target from `load_target`, or a model that transformers loaded from a folder or
            the Hub. Such a model is put into evaluation mode without gradients.
        keys: keys of a recipe's section `eval:`: `lookup_first`, and those that only the draft's
            method reads.

    Raises:
        UserError: for a key that such a draft does not read, and for a draft that is broken or does
            not fit the target.
    """
    place = os.fspath(draft)
    method = (
        place
        if place in UNTRAINED_METHODS
        else find_method(locate(place, key="draft"), key="draft")
    )
    recipe = METHODS[method].recipe()
    read = [*list_own_eval_keys(recipe), "lookup_first"]
    unread = next((name for name in keys if name not in read), None)
    if unread:
        expected = f"one of {', '.join(read)}, which a draft of method {method} reads"
        raise UserError(
            unread, got="an unknown key", expected=expected, nearest=find_nearest(unread, read)
        )
    section = validate_recipe(select_eval_schema(recipe), keys)
    if not isinstance(target, FrozenTarget):
        name = str(target.name_or_path)
        revision = getattr(target.config, "_commit_hash", None)
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
    tree: Mapping[str, object] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Completion:
    """Continue a prompt with a draft, or with a target alone.

    The options have the names and meanings of the keys of a recipe's section `eval:`.

    Args:
        draft: a draft from `load_draft`, or a target from `load_target`, which decodes alone.
        prompt: a text or token ids.
        max_new_tokens: the most tokens to generate.
        num_speculative_tokens: K, the most draft tokens of a round.
        tree: the shape of a tree to draft in place of a chain; see `eval.tree`.
        temperature: 0 decodes greedily.
        top_p: the share of probability that is sampled from; 1 for all of it.
        top_k: how many of the most likely tokens are sampled from; 0 for all of them.
        seed: the seed of the random numbers that sampling uses.

    Returns:
        The completion. It has `text`, `token_ids` and `rounds`. For each round it lists the tokens
        drafted, how many of them were accepted, and the seconds.
    """
    keys = {
        name: value for name, value in locals().items() if name in MeasurementConfig.model_fields
    }
    settings = Settings.from_section(validate_recipe(MeasurementConfig, keys))
    target, proposer = (draft.target, draft.proposer) if isinstance(draft, Draft) else (draft, None)
    generation = Decoder(target, proposer).generate(
        target.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt,
        generator=torch.Generator().manual_seed(seed),
        **settings.decoding,
    )
    return Completion(
        **vars(generation),
        text=target.tokenizer.decode(generation.token_ids, skip_special_tokens=True),
    )


def train(
    recipe: RecipeOrRun, *, callbacks: Sequence[TrainerCallback] = (), **keys: object
) -> Path:
    """Train a draft, as `specdistill train` does. An interrupted run resumes.

    Args:
        recipe: the name of a recipe, a file or the sections as mappings.
        callbacks: callbacks of transformers' Trainer.
        keys: settings that take precedence over those of the recipe, e.g.
            train={"output_dir": "runs/a"}.

    Returns:
        The folder of the run, which holds the draft in `draft`.
    """
    arguments = build_arguments(recipe, keys)
    with rename_keys_as_typed(arguments, TRAIN):
        return train_draft(
            check_trainable(load_recipe(Recipe, select_recipe_keys(arguments, TRAIN))), callbacks
        )


class DraftConfig:
    """The settings with which a `DraftTrainer` trains.

    Args:
        output_dir: the folder of the run.
        keys: fields of transformers.TrainingArguments, and sections of a recipe, e.g.
            draft={"ttt_steps": 5}.
    """

    def __init__(self, output_dir: str | os.PathLike[str], **keys: object) -> None:
        sections = set[str]()
        for schema in Recipe.list_schemas().values():
            sections.update(schema.model_fields)
        sections.discard("train")
        fields = {name: value for name, value in keys.items() if name not in sections}
        self.output_dir = output_dir
        self.keys = {
            **{name: keys[name] for name in keys.keys() & sections},
            "train": {"output_dir": output_dir, **fields},
        }


class DraftTrainer:
    """Trains a draft for a target, in the manner of transformers' Trainer.

    Args:
        method: the method of the draft, e.g. `eagle3`.
        target: the name of the target, or a recipe's section `target:` as a mapping.
        args: the settings of the training.
        train_dataset: rows in a form that `data.source` reads, e.g. with `messages`, or the name of
            a source. None for the data that `args` names. Rows in memory are written to
            `<output_dir>.jsonl`, so that the recipe in the run's record is complete.
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
        self.rows = None if isinstance(train_dataset, str | os.PathLike) else train_dataset
        self.callbacks = callbacks
        source = train_dataset if self.rows is None else f"{os.fspath(args.output_dir)}.jsonl"
        train_keys = {
            "method": method,
            "target": target if isinstance(target, Mapping) else {"model": target},
        }
        keys = {"data": {"source": source}} if source else {}
        self.recipe = check_trainable(
            load_recipe(Recipe, build_arguments({**args.keys, **train_keys}, keys))
        )

    def train(self) -> Path:
        """Train the draft. An interrupted run resumes.

        Returns:
            The folder of the run, which holds the draft in `draft`.

        Raises:
            UserError: if `<output_dir>.jsonl` already holds other rows.
        """
        if self.rows is not None:
            place = Path(str(self.recipe.data.source))
            text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in self.rows)
            if place.exists() and place.read_bytes() != text.encode():
                got = f"other rows than those in {place}"
                raise UserError("train_dataset", got=got, expected="them, or another output_dir")
            # Each process of a launch writes the same file.
            with stage_files(place.parent) as staging:
                (staging / place.name).write_text(text, encoding="utf-8")
        return train_draft(self.recipe, self.callbacks)


@dataclass(frozen=True)
class Report:
    """The report of a measured draft.

    Attributes:
        data: the content of report.json. The rules of the gate, with their reasons, are in
            `data["gate"]["rules"]`.
        folder: the folder of the report.
        acceptance_length: the mean over the whole suite, in tokens per round; None if it was not
            measured.
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
        """Return the report with this content, from this folder."""
        first = data["results"][0]
        return cls(
            data,
            folder,
            first.get("mean_acceptance_length"),
            first.get("speedup"),
            data["gate"]["verdict"],
        )

    def to_dataframe(self) -> Any:
        """Return the results as a pandas.DataFrame.

        It has a row for each configuration and category. The first row is for the whole suite.
        """
        import pandas  # imported here because it is slow to import

        return pandas.DataFrame(self.data["results"])


def measure(recipe: RecipeOrRun | None = None, **keys: object) -> Report:
    """Measure a draft by decoding with it, and judge it by the gate of its recipe.

    Does what `specdistill eval` does, and writes the same files.

    Args:
        recipe: the folder of a run, or a recipe. None if the keys say everything.
        keys: keys of that command, e.g. draft="org/name", eval={"num_prompts": 16}.
    """
    first = ARGUMENTS_WITHOUT_RECIPE if recipe is None or isinstance(recipe, Mapping) else []
    arguments = build_arguments(recipe or {}, keys)
    with rename_keys_as_typed(arguments, SHORTHANDS):
        return Report.of(
            *evaluate(load_recipe(Recipe, [*first, *select_recipe_keys(arguments, SHORTHANDS)]))
        )


def judge(
    report: Report | str | os.PathLike[str], gate: str = "default", *, baseline: str | None = None
) -> Report:
    """Judge a report by a gate, as `specdistill gate` does.

    The judged report is written to a folder that is named after the gate, inside the report's
    folder.

    Args:
        report: a report, or the path of one: its folder or its report.json.
        gate: the name of a gate, or a YAML file.
        baseline: the report that regressions are relative to, or `none` for a first release.

    Returns:
        The report with the verdict of the gate.
    """
    folder = report.folder if isinstance(report, Report) else Path(report)
    options = load_recipe(
        GateOptions, build_arguments({"report": folder, "gates": gate, "baseline": baseline}, {})
    )
    return Report.of(judge_again(options), folder)


def compare(
    target: str | Mapping[str, object], drafts: Sequence[str | os.PathLike[str]], **keys: object
) -> dict[str, Any]:
    """Measure drafts for one target in one interleaved run, and rank them.

    Args:
        target: the name of the target, or a recipe's section `target:` as a mapping.
        drafts: folders, Hub ids, or names of methods without weights, such as `ngram`.
        keys: keys of `specdistill compare`.

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
        draft: a folder, `org/name` or `org/name@revision`. None for the layer in the target's own
            checkpoint.
        keys: further keys of `specdistill acquire`.

    Returns:
        The folder of the draft, or of the target if its own layer drafts.
    """
    arguments = build_arguments({"method": method, "target": target, "draft": draft}, keys)
    with rename_keys_as_typed(arguments, TARGET):
        return acquired(load_recipe(AcquireOptions, select_recipe_keys(arguments, TARGET)))


def publish(run: str | os.PathLike[str], **keys: object) -> Publication:
    """Publish the draft of a run if it passed its gate, as `specdistill publish` does.

    Args:
        run: the folder of a finished run.
        keys: keys of `specdistill publish`.

    Returns:
        What was published. If nothing was, its `refusals` say why.
    """
    return publish_run(load_recipe(PublishOptions, build_arguments({"run": run}, keys)))
