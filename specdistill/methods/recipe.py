"""The recipe of a draft, with the keys that all methods or several of them read.

The folder of each method has a subclass (`config.py`) with the keys that only this method reads.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator
from pydantic.fields import FieldInfo

from specdistill.common.errors import UserError, find_nearest, make_unused_key_error
from specdistill.methods import METHODS, get_method
from specdistill.recipe.fields import (
    Condition,
    Section,
    find_changed_key,
    find_default,
    format_value,
    like,
    option,
    section,
)
from specdistill.recipe.sections import (
    DataConfig,
    EvalConfig,
    HiddenStatesConfig,
    OnlineStates,
    PublishConfig,
    SelectionConfig,
    StoredStates,
    TargetConfig,
)

DEFAULT_METHOD = "eagle3"
# Training arguments that the Trainer reads for its own optimizers. Of the Trainer's settings of an
# optimizer, muon_adamw reads only learning_rate and weight_decay.
ADAMW_ONLY_KEYS = (
    "optim",
    "optim_args",
    "optim_target_modules",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
# Patterns of training arguments that the training of a draft does not read, and the reason.
UNREAD_KEY_PATTERNS = {
    "label_smoothing_factor": "a draft's loss has no labels to smooth",
    "neftune_noise_alpha": "a draft reads the target's features or tokens as they are",
    **dict.fromkeys(
        ("push_to_hub", "hub_*"),
        "`specdistill publish` releases a draft that passed its gate, with the evidence",
    ),
    "*liger_kernel*": "its kernels are for whole models of transformers",
    "*_full_eval": "a draft is evaluated as it is trained",
    "label_names": "a draft's batches have no labels",
    "batch_eval_metrics": "acceptance is counted over all batches",
    **dict.fromkeys(
        ("fsdp*", "deepspeed", "parallelism_config"), "files of accelerate_configs/ set sharding"
    ),
    **dict.fromkeys(
        ("save_only_model", "ignore_data_skip"), "an interrupted run resumes to the same draft"
    ),
    "enable_jit_checkpoint": "an interrupted run saves by itself",
    "auto_find_batch_size": "the number of rows in a step is fixed, and processes share them",
    "accelerator_config": "rows are shared out so that each is read once in an epoch",
    "resume_from_checkpoint": "an interrupted run resumes when its command is repeated",
}

DECODED_METRIC = "decoded_acceptance_length"
DIVERGENCE = (
    "divergence from the target's distribution: a name of"
    " specdistill/training/losses/divergence.py, {name: jsd, beta: 0.3} with options, or a list of"
    " {name, weight} for a weighted sum"
)


class Recipe(Section):
    """The recipe of one method and one target, and how the draft is judged."""

    method: str = option(DEFAULT_METHOD, f"method of the draft: {', '.join(METHODS)}")
    target: TargetConfig = section(TargetConfig)
    train: dict[str, Any] = option(
        {},
        "fields of transformers.TrainingArguments, e.g. train.max_steps, train.num_train_epochs,"
        " train.learning_rate, train.per_device_train_batch_size, train.report_to; train.output_dir"
        " is required",
    )
    eval: EvalConfig = section(EvalConfig)
    gate: str = option(
        "default",
        "rules a report must meet: a name or a YAML file",
    )
    publish: PublishConfig = section(PublishConfig)

    @classmethod
    def select_schema(cls, values: Mapping[str, object]) -> type[Section]:
        """Return the recipe schema of the method that a recipe's values name."""
        method = values.get("method", DEFAULT_METHOD)
        # The base schema refuses a method that is not a string.
        return get_method(method).recipe() if isinstance(method, str) else cls

    @classmethod
    def list_schemas(cls) -> dict[str, type[Section]]:
        """Return the recipe schema of each method, by its name."""
        return {name: method.recipe() for name, method in METHODS.items()}

    def list_proposer_options(self) -> dict[str, Any]:
        """Return the keys of `eval:` that only some methods have, with their values.

        `Method.load_proposer` takes them as options.
        """
        return {name: getattr(self.eval, name) for name in list_own_eval_keys(type(self))}

    @model_validator(mode="after")
    def _check_folder_and_quantization(self) -> "Recipe":
        """Check that the run has a folder, and that `target.quantization` can take effect.

        This key quantizes a target that runs inside specdistill. It has no effect on an engine or a
        server that runs the target instead.
        """
        # The run's folder has no default, because two runs must not share one.
        folder = self.train.get("output_dir")
        if not isinstance(folder, str):
            raise UserError(
                "train.output_dir",
                got="nothing" if folder is None else repr(folder),
                expected="the folder for the files of the run",
            )

        # An engine that runs the target quantizes it by options of its own.
        if self.target.quantization and self.eval.engine != "specdistill":
            raise UserError(
                "target.quantization",
                got=f"{self.target.quantization} with eval.engine={self.eval.engine}",
                expected=(
                    "target.quantization=null; to quantize, pass the engine's own options in"
                    " eval.engine_command"
                ),
            )
        # A server that is already running computes hidden states with the weights that it has.
        states_server = getattr(getattr(self, "hidden_states", None), "server", None)
        if self.target.quantization and states_server:
            raise UserError(
                "target.quantization",
                got=f"{self.target.quantization} with hidden_states.server",
                expected=(
                    "target.quantization=null, because the server has loaded its weights already"
                ),
            )
        return self


class DraftSection(Section):
    """The section `draft:` of a recipe.

    Attributes:
        NOT_OF_SHAPE: keys that do not describe the shape of a fresh draft.
    """

    NOT_OF_SHAPE: ClassVar[frozenset[str]] = frozenset({"init"})

    init: str | None = option(
        None, "folder or Hub id of a trained draft whose training goes on; null: new weights"
    )

    def shape(self) -> dict[str, Any]:
        """Return the keys that a fresh draft is built from."""
        return self.model_dump(exclude=set(self.NOT_OF_SHAPE))


class TrainedRecipe(Recipe):
    """The recipe of a method that is trained: also its data, its draft and its loss.

    Attributes:
        FRESH: values of `draft.init` that take no weights from elsewhere.
    """

    FRESH: ClassVar[tuple[str | None, ...]] = (None,)

    data: DataConfig = section(DataConfig)
    draft: Section = section(Section)
    loss: Section = section(Section)
    selection: SelectionConfig | None = option(
        None,
        "the suite, and how many of its prompts each evaluation during training decodes to measure"
        f" train.metric_for_best_model={DECODED_METRIC}; null: none are decoded",
    )
    optimizer: Literal["muon_adamw", "adamw"] = option(
        "muon_adamw",
        "optimizer; muon_adamw: Muon for matrices, AdamW for other weights; adamw: the optimizer of"
        " transformers' Trainer (AdamW, unless train.optim names another one)",
    )

    @property
    def seed(self) -> int:
        """The seed of the draft's initialization, which is the Trainer's."""
        return int(self.train.get("seed", 42))  # the default of transformers.TrainingArguments

    @property
    def is_fresh(self) -> bool:
        """Whether the draft starts without training, so that it needs a full training.

        This includes a draft model that is made of some of the target's layers: without the layers
        between them, they have to learn anew. A draft of `draft.init=PATH` is not fresh.
        """
        # `FRESH` lists the values of `draft.init` that take no weights from elsewhere. `standalone`
        # means that the draft is a language model of its own. Such a draft is made of the target's
        # layers if `draft.init` is `layers` or has no value (None).
        init = getattr(self.draft, "init", None)
        return init in self.FRESH or (METHODS[self.method].standalone and init in (None, "layers"))

    @property
    def evaluates_first(self) -> bool:
        """Whether training evaluates the draft once before its first step.

        This is so if training evaluates at all, and if the draft starts from existing weights.
        """
        # `eval_strategy: no` turns evaluation off. YAML reads an unquoted `no` as false. `FRESH`
        # lists the values of `draft.init` that take no weights from elsewhere.
        is_evaluated = self.train.get("eval_strategy", "no") not in ("no", False)
        return is_evaluated and getattr(self.draft, "init", None) not in self.FRESH

    @property
    def measured_on(self) -> list[str]:
        """The suites (files of prompts) that the recipe names in `eval:` and `selection:`."""
        return [
            suite for suite in (self.eval.suite, self.selection and self.selection.suite) if suite
        ]

    @model_validator(mode="after")
    def _check_trainer_keys(self) -> "TrainedRecipe":
        """Check that every key of `train:` has an effect, and that no two of them contradict."""
        self._check_unread_trainer_keys()

        # The length of training can be given in epochs or in steps, but not in both. -1 is
        # transformers' value for "no limit of steps".
        epochs = self.train.get("num_train_epochs")
        steps = self.train.get("max_steps")
        if epochs is not None and steps not in (None, -1):
            raise UserError(
                "train.num_train_epochs",
                got=f"{epochs} with train.max_steps={steps}, which would override it",
                expected="only one of the two, for example with train.max_steps=-1",
            )

        # The metric that chooses the best checkpoint must be one that training measures. It may
        # have transformers' prefix `eval_`.
        metric = self.train.get("metric_for_best_model")
        metrics = self.metrics()
        if metric is not None and str(metric).removeprefix("eval_") not in metrics:
            raise UserError(
                "train.metric_for_best_model",
                got=metric,
                expected=f"one of {', '.join(metrics)}",
                nearest=find_nearest(str(metric), metrics),
            )
        is_decoded = metric is not None and str(metric).removeprefix("eval_") == DECODED_METRIC
        self._check_selection(is_decoded=is_decoded)
        return self

    def _check_unread_trainer_keys(self) -> None:
        """Raise UserError for a key of `train:` that has no effect."""
        # Some keys only have an effect if the Trainer's own optimizer is used.
        adamw_keys = [name for name in ADAMW_ONLY_KEYS if name in self.train]
        if adamw_keys and self.optimizer != "adamw":
            raise make_unused_key_error(
                f"train.{adamw_keys[0]}",
                self.train[adamw_keys[0]],
                f"the optimizer {self.optimizer} does not use it",
                alternative="add optimizer=adamw",
            )

        # Some keys are never used; `UNREAD_KEY_PATTERNS` says why. The values null and false are
        # allowed, because they turn the field off.
        for name, value in self.train.items():
            patterns = [pattern for pattern in UNREAD_KEY_PATTERNS if fnmatch(name, pattern)]
            if patterns and value is not None and value is not False:
                raise make_unused_key_error(
                    f"train.{name}", format_value(value), UNREAD_KEY_PATTERNS[patterns[0]]
                )

    def _check_selection(self, *, is_decoded: bool) -> None:
        """Raise UserError if `selection:` does not fit the metric that chooses the best checkpoint.

        Args:
            is_decoded: whether the metric is the acceptance length of decoded prompts.
        """
        # This metric needs the prompts of the section `selection:`, and only this metric reads
        # them. So both are given, or neither.
        needed = f"train.metric_for_best_model={DECODED_METRIC}"
        if is_decoded and self.selection is None:
            raise UserError(
                "selection.suite",
                got=f"nothing with {needed}",
                expected=SelectionConfig.model_fields["suite"].description or "",
            )
        if self.selection is not None and not is_decoded:
            raise make_unused_key_error(
                "selection.suite",
                self.selection.suite,
                f"only used with {needed}",
                alternative=f"set {needed}",
            )

        # A single process decodes the prompts, so it needs the whole target.
        if is_decoded and self.target.shard != "none":
            raise UserError(
                "train.metric_for_best_model",
                got=f"{DECODED_METRIC} with target.shard={self.target.shard}",
                expected="the metric acceptance_length, or target.shard=none",
            )

    @property
    def states_folder(self) -> Path | None:
        """The folder for hidden states that servers write while they generate training data.

        The files wait there until the feature store takes them. None if the recipe does not store
        hidden states: only the section for stored ones has the attribute `waiting`.
        """
        return getattr(getattr(self, "hidden_states", None), "waiting", None)

    @property
    def num_positions(self) -> int:
        """The number of drafted positions that training measures one by one."""
        return 1

    def metrics(self) -> list[str]:
        """Return the names of the metrics that `train.metric_for_best_model` may name.

        All of them are measured on held-out rows, except for the last one, for which prompts are
        decoded. Names with a number, such as `loss_2`, are of one drafted position.
        """
        position_metrics = []
        for name in ("loss", "accuracy", "acceptance"):
            for k in range(1, self.num_positions + 1):
                position_metrics.append(f"{name}_{k}")
        return [
            "acceptance_length",
            "acceptance_length_sampled",
            "loss",
            *position_metrics,
            DECODED_METRIC,
        ]


class LayerSizes(DraftSection):
    """Sizes of a fresh draft's decoder layers; null takes the target's."""

    num_layers: int = option(1, "decoder layers of the draft", ge=1)
    intermediate_size: int | None = option(None, "MLP width; null: the target's", ge=1)
    num_attention_heads: int | None = option(None, "attention heads; null: the target's", ge=1)
    num_key_value_heads: int | None = option(None, "key/value heads; null: the target's", ge=1)
    head_dim: int | None = option(
        None, "size of an attention head; null: the target's", ge=2, multiple_of=2
    )
    rope_theta: float | None = option(
        None,
        "base of the rotary embedding; null: that of the target's full-attention layers",
        gt=0,
    )
    sliding_window: int | None = option(
        None, "sliding attention window in tokens; null: full attention", ge=2
    )


class DivergenceConfig(Section):
    """The loss of a draft that learns the target's distributions."""

    divergence: Any = option("forward_kl", DIVERGENCE)
    temperature: float = option(
        1.0, "temperature of the loss: divides the logits of draft and target", ge=0.01
    )


class SoftLossConfig(DivergenceConfig):
    """The loss of a draft that learns the target's distributions at several drafted positions."""

    step_decay: float = option(
        0.8, "loss weight of drafted position k is step_decay ** k", ge=0, le=1
    )


class FeatureRecipe(TrainedRecipe):
    """The recipe of a draft that reads the target's features."""

    hidden_states: HiddenStatesConfig = section(OnlineStates)

    @model_validator(mode="after")
    def _check_stored_features(self) -> "FeatureRecipe":
        """Raise UserError if hidden states are stored while the target is sharded over GPUs."""
        if isinstance(self.hidden_states, StoredStates) and self.target.shard != "none":
            raise UserError(
                "target.shard",
                got=f"{self.target.shard} with hidden_states.mode={self.hidden_states.mode}",
                expected="none, or hidden_states.mode=online",
            )
        return self


def select_eval_schema(schema: type[Recipe]) -> type[EvalConfig]:
    """Return the schema of the section `eval:` of a recipe schema."""
    # Each method's recipe class annotates its field `eval` with the method's own section class.
    section = schema.model_fields["eval"].annotation
    assert isinstance(section, type) and issubclass(section, EvalConfig)
    return section


def list_own_eval_keys(schema: type[Recipe]) -> dict[str, FieldInfo]:
    """Return the keys of a recipe schema's `eval:` that are not in the `eval:` of all recipes."""
    return {
        name: field
        for name, field in select_eval_schema(schema).model_fields.items()
        if name not in EvalConfig.model_fields
    }


def list_method_eval_keys(*, condition: Condition | None = None) -> dict[str, Any]:
    """Return the keys of `eval:` that only some methods have, to define options of a command.

    Args:
        condition: when the keys are used in the command. It replaces the condition that each key
            has in a recipe. None keeps the conditions of the recipe. They may read other keys, such
            as `eval.engine`, so a command that lacks those keys must pass a condition.

    Returns:
        Type and field of each key by name, as pydantic's `create_model` takes them.
    """
    # `like` copies a key of the recipe, so that the option has the same default, help and limits.
    keys: dict[str, tuple[object, object]] = {}
    for method in METHODS.values():
        section = select_eval_schema(method.recipe())
        for name, field in list_own_eval_keys(method.recipe()).items():
            keys[name] = (field.annotation, like(section, name, condition=condition))
    return keys


def list_method_options(options: Section, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each method the options of a command that the method uses.

    Args:
        options: the options of the command.
        methods: the names of the methods.

    Returns:
        For each of `methods`, its options by name.

    Raises:
        UserError: if an option is set that none of the methods uses.
    """
    # Select the options of each method.
    options_by_method = []
    for method in methods:
        options_by_method.append(
            {name: getattr(options, name) for name in list_own_eval_keys(METHODS[method].recipe())}
        )

    # Each option that is not at its default must be used by one of the methods. The error names
    # the methods that would use it. If the option is a section, the error names the changed key.
    for name in list_method_eval_keys():
        value = getattr(options, name)
        default = find_default(type(options).model_fields[name])
        is_used = any(name in method_options for method_options in options_by_method)
        if value != default and not is_used:
            readers = [
                method
                for method, table_row in METHODS.items()
                if name in list_own_eval_keys(table_row.recipe())
            ]
            key, changed = find_changed_key(name, value, default)
            raise make_unused_key_error(
                key,
                format_value(changed),
                f"not used with method {' or '.join(dict.fromkeys(methods))}, only with"
                f" {', '.join(readers)}",
            )
    return options_by_method


def check_trainable(recipe: Recipe) -> TrainedRecipe:
    """Check that a recipe can be used for training, and return it.

    Raises:
        UserError: if its method needs no training, or if its loss (`loss.divergence`) or its draft
            tree (`eval.tree`) is not valid.
    """
    if not isinstance(recipe, TrainedRecipe):
        raise UserError(
            "method",
            got=f"{recipe.method}, which needs no training",
            expected="a method that is trained, such as eagle3",
        )

    # These imports are not at the top, because recipes are read without torch.
    from specdistill.decoding.tree import build_tree_shape
    from specdistill.training.losses.divergence import build_divergence

    # Build the tree and the divergence once, so that a wrong value is reported before anything is
    # loaded.
    if recipe.eval.tree:
        build_tree_shape(recipe.eval.tree)
    divergence = getattr(getattr(recipe, "loss", None), "divergence", None)
    if divergence:
        build_divergence(divergence)
    return recipe
