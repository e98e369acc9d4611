"""The recipe of a draft. Each method's own is a subclass in its folder (`config.py`) with the keys that it reads alone."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, ClassVar, Literal

from pydantic import model_validator
from pydantic.fields import FieldInfo

from specdistill.errors import UserError, nearest
from specdistill.methods import METHODS, method_named
from specdistill.recipe.fields import ReadWhen, Section, default_of, like, option, section
from specdistill.recipe.sections import (
    DataConfig,
    EvalConfig,
    HiddenStatesConfig,
    PublishConfig,
    SelectionConfig,
    TargetConfig,
)

DEFAULT_METHOD = "eagle3"
# Training arguments that the Trainer reads for an optimizer of its own; of these, muon_adamw takes learning_rate and weight_decay alone.
READ_BY_ADAMW = (
    "optim",
    "optim_args",
    "optim_target_modules",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
# Patterns of training arguments that a draft's training does not follow, and why.
UNREAD = {
    "label_smoothing_factor": "a draft's loss has no labels to smooth",
    "neftune_noise_alpha": "a draft reads the target's features or tokens as they are",
    **dict.fromkeys(
        ("push_to_hub", "hub_*"),
        "`specdistill publish` releases a draft that passed its gate, with the evidence",
    ),
    "*liger_kernel*": "its kernels are for whole models of transformers",
    "*_full_eval": "a draft is evaluated as it is trained",
    "label_names": "a draft's batches have no labels",
    **dict.fromkeys(
        ("fsdp*", "deepspeed", "parallelism_config"), "accelerate_configs/ say how to shard"
    ),
    **dict.fromkeys(
        ("save_only_model", "ignore_data_skip"), "an interrupted run resumes to the same draft"
    ),
    "enable_jit_checkpoint": "an interrupted run saves by itself",
    "auto_find_batch_size": "processes share out the rows of a step, which stay as many",
    "accelerator_config": "rows are shared out so that each is read once in an epoch",
    "resume_from_checkpoint": "an interrupted run resumes when its command is repeated",
}

DECODED = "decoded_acceptance_length"
DIVERGENCE = (
    "divergence from the target's distribution: a name of specdistill/losses/divergence.py, {name: jsd, beta: 0.3} with options, or a "
    "list of {name, weight} for a weighted sum"
)


class Recipe(Section):
    """One method, one target, and how the draft is judged."""

    method: str = option(DEFAULT_METHOD, f"method of the draft: {', '.join(METHODS)}")
    target: TargetConfig = section(TargetConfig)
    train: dict[str, Any] = option(
        {},
        "fields of transformers.TrainingArguments, e.g. train.max_steps, train.num_train_epochs, train.learning_rate, "
        "train.per_device_train_batch_size, train.report_to; train.output_dir is required",
    )
    eval: EvalConfig = section(EvalConfig)
    gate: str = option("default", "gate: a name or a YAML file")
    publish: PublishConfig = section(PublishConfig)

    @classmethod
    def schema_for(cls, values: Mapping[str, Any]) -> type[Section]:
        method = values.get("method", DEFAULT_METHOD)
        return method_named(method).recipe() if isinstance(method, str) else cls  # which refuses it

    @classmethod
    def variants(cls) -> dict[str, type[Section]]:
        return {name: method.recipe() for name, method in METHODS.items()}

    def proposer_options(self) -> dict[str, Any]:
        """The method's own options of decoding: its keys of `eval:` in addition to the common ones."""
        return {name: getattr(self.eval, name) for name in own_eval_keys(type(self))}

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        if not isinstance(folder := self.train.get("output_dir"), str):
            got = "nothing" if folder is None else repr(folder)
            raise UserError("train.output_dir", got=got, expected="the folder of the run")
        if self.target.quantization and self.eval.engine != "specdistill":
            got = f"{self.target.quantization} with eval.engine={self.eval.engine}"
            raise UserError(
                "target.quantization",
                got=got,
                expected="null: an engine has options of its own, in its command",
            )
        if self.target.quantization and getattr(
            getattr(self, "hidden_states", None), "server", None
        ):
            got = f"{self.target.quantization} with hidden_states.server"
            raise UserError(
                "target.quantization",
                got=got,
                expected="null: servers compute as they were started",
            )
        return self


class DraftSection(Section):
    """What a recipe says of its draft. NOT_OF_SHAPE: keys that say no more of a fresh one."""

    NOT_OF_SHAPE: ClassVar[frozenset[str]] = frozenset({"init"})

    init: str | None = option(
        None, "initialization: the folder or Hub id of a trained draft; null: new weights"
    )

    def shape(self) -> dict[str, Any]:
        """What a fresh draft is built from."""
        return self.model_dump(exclude=set(self.NOT_OF_SHAPE))


class TrainedRecipe(Recipe):
    """The recipe of a method that is trained: its data, its draft and its loss as well.

    FRESH: values of `draft.init` with which no weights are taken from elsewhere.
    """

    FRESH: ClassVar[tuple[str | None, ...]] = (None,)

    data: DataConfig = section(DataConfig)
    draft: Section = section(Section)
    loss: Section = section(Section)
    selection: SelectionConfig | None = option(
        None,
        f"prompts decoded at each evaluation for train.metric_for_best_model={DECODED}; null: none",
    )
    optimizer: Literal["muon_adamw", "adamw"] = option(
        "muon_adamw", "optimizer of the draft; adamw: the Trainer's, chosen by train.optim"
    )

    @property
    def seed(self) -> int:
        """Of the draft's initialization: the Trainer's."""
        return int(self.train.get("seed", 42))  # by default as of transformers.TrainingArguments

    @property
    def evaluates_first(self) -> bool:
        """Whether the draft is evaluated before its first step, too: it starts from existing weights, and is evaluated later."""
        is_evaluated = self.train.get("eval_strategy", "no") not in ("no", False)
        return is_evaluated and getattr(self.draft, "init", None) not in self.FRESH

    @property
    def measured_on(self) -> list[str]:
        """The suites that the draft is measured on, as far as the recipe says."""
        return [
            suite for suite in (self.eval.suite, self.selection and self.selection.suite) if suite
        ]

    @model_validator(mode="after")
    def _trainer_reads_its_keys(self) -> "TrainedRecipe":
        if (
            other := next((name for name in READ_BY_ADAMW if name in self.train), None)
            if self.optimizer != "adamw"
            else None
        ):
            got = f"{self.train[other]} with optimizer {self.optimizer}"
            raise UserError(f"train.{other}", got=got, expected="no such key, or optimizer=adamw")
        for name, value in self.train.items():
            why = next((why for pattern, why in UNREAD.items() if fnmatch(name, pattern)), None)
            if why and value is not None and value is not False:
                raise UserError(f"train.{name}", got=value, expected=f"no such key: {why}")
        epochs, steps = (self.train.get(name) for name in ("num_train_epochs", "max_steps"))
        if epochs is not None and steps not in (None, -1):
            got = f"{epochs} with train.max_steps={steps}, which would decide"
            raise UserError(
                "train.num_train_epochs",
                got=got,
                expected="one of both, e.g. with train.max_steps=-1",
            )
        metric, metrics = self.train.get("metric_for_best_model"), self.metrics()
        if metric is not None and str(metric).removeprefix("eval_") not in metrics:
            close = nearest(str(metric), metrics)
            raise UserError(
                "train.metric_for_best_model",
                got=metric,
                expected=f"one of {', '.join(metrics)}",
                nearest=close,
            )
        decodes = metric is not None and str(metric).removeprefix("eval_") == DECODED
        if decodes != (self.selection is not None):
            got = f"suite {self.selection.suite}" if self.selection else "null"
            expected = f"{'a section with a suite' if decodes else 'null'}: train.metric_for_best_model={metric}"
            raise UserError("selection", got=got, expected=expected)
        if decodes and self.target.shard != "none":  # one process decodes
            got = f"{DECODED} with target.shard={self.target.shard}"
            raise UserError(
                "train.metric_for_best_model",
                got=got,
                expected="acceptance_length, or target.shard=none",
            )
        return self

    @property
    def states_folder(self) -> Any:
        """The path where hidden states wait that servers give with their answers; None where no store keeps them."""
        return getattr(getattr(self, "hidden_states", None), "waiting", None)

    @property
    def num_positions(self) -> int:
        """Drafted positions that training measures one by one."""
        return 1

    def metrics(self) -> list[str]:
        """What is measured in training, of held-out rows and by decoding: names for `train.metric_for_best_model`."""
        measured = [
            f"{name}_{k}"
            for name in ("loss", "accuracy", "acceptance")
            for k in range(1, self.num_positions + 1)
        ]
        return ["acceptance_length", "acceptance_length_sampled", "loss", *measured, DECODED]


class LayerSizes(DraftSection):
    """Sizes of a fresh draft's decoder layers; null takes the target's."""

    num_layers: int = option(1, "decoder layers of the draft", ge=1)
    intermediate_size: int | None = option(None, "MLP width; null: the target's", ge=1)
    num_attention_heads: int | None = option(None, "null: the target's", ge=1)
    num_key_value_heads: int | None = option(None, "null: the target's", ge=1)
    head_dim: int | None = option(None, "null: the target's", ge=2, multiple_of=2)
    sliding_window: int | None = option(
        None, "sliding attention window in tokens; null: full attention", ge=2
    )


class DivergenceConfig(Section):
    """Of what learns the target's distributions."""

    divergence: Any = option("forward_kl", DIVERGENCE)
    temperature: float = option(1.0, "divides both sets of logits", ge=0.01)


class SoftLossConfig(DivergenceConfig):
    """At several drafted positions."""

    step_decay: float = option(
        0.8, "loss weight of drafted position k is step_decay ** k", ge=0, le=1
    )


class FeatureRecipe(TrainedRecipe):
    """The recipe of a draft that reads the target's features."""

    hidden_states: HiddenStatesConfig = section(HiddenStatesConfig)

    @model_validator(mode="after")
    def _features_are_stored_of_targets_that_stay(self) -> "FeatureRecipe":
        if self.hidden_states.mode != "online" and self.target.shard != "none":
            got = f"{self.target.shard} with hidden_states.mode={self.hidden_states.mode}"
            raise UserError("target.shard", got=got, expected="none, or hidden_states.mode=online")
        return self


def own_eval_keys(schema: type[Recipe]) -> dict[str, FieldInfo]:
    """Keys of `eval:` that only recipes of this schema have."""
    own: Any = schema.model_fields["eval"].annotation
    return {
        name: field
        for name, field in own.model_fields.items()
        if name not in EvalConfig.model_fields
    }


def eval_keys_of_methods(*, read_when: ReadWhen | None = None) -> dict[str, tuple[Any, Any]]:
    """Keys of `eval:` that only some methods read, with type and field, as pydantic's `create_model` takes them.

    read_when: in place of the keys' own, for a command that has no `eval.engine`.
    """
    keys = {}
    for method in METHODS.values():
        section: Any = method.recipe().model_fields["eval"].annotation
        for name, field in own_eval_keys(method.recipe()).items():
            keys[name] = (field.annotation, like(section, name, read_when=read_when))
    return keys


def options_by_method(options: Section, methods: Sequence[str]) -> list[dict[str, Any]]:
    """The options of a command that each method's proposer takes. Raises UserError for one that is set and that none of them reads."""
    by_method = [
        {name: getattr(options, name) for name in own_eval_keys(METHODS[method].recipe())}
        for method in methods
    ]
    for name in eval_keys_of_methods():
        value, default = getattr(options, name), default_of(type(options).model_fields[name])
        if value != default and not any(name in own for own in by_method):
            readers = [
                method for method, row in METHODS.items() if name in own_eval_keys(row.recipe())
            ]
            got = f"{value} with method {' and '.join(dict.fromkeys(methods))}"
            raise UserError(
                name, got=got, expected=f"no such key: only {' and '.join(readers)} reads it"
            )
    return by_method


def trainable(recipe: Recipe) -> TrainedRecipe:
    """The recipe. Raises UserError for a method that needs no training, and for a divergence or a tree that cannot be built."""
    if not isinstance(recipe, TrainedRecipe):
        raise UserError(
            "method",
            got=f"{recipe.method}, which needs no training",
            expected="a method that is trained",
        )
    from specdistill.decoding.tree import (
        tree_shape,
    )  # not at the top: recipes are read without torch
    from specdistill.losses.divergence import build_divergence

    if recipe.eval.tree:
        tree_shape(recipe.eval.tree)
    if divergence := getattr(getattr(recipe, "loss", None), "divergence", None):
        build_divergence(divergence)
    return recipe
