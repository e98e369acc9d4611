"""The recipe of a draft. Each method's own is a subclass in its folder (`config.py`): the keys that it reads and no others."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from specdistill.errors import UserError, nearest
from specdistill.methods import METHODS
from specdistill.recipe import DataConfig, EvalConfig, Section, TargetConfig, option, section

DEFAULT_METHOD = "eagle3"


class Recipe(Section):
    """One method, one target, and how the draft is judged."""

    method: str = option(DEFAULT_METHOD, f"how the draft proposes tokens: {', '.join(METHODS)}")
    target: TargetConfig
    train: dict[str, Any] = option({}, "transformers.TrainingArguments, field by field; output_dir is required")
    eval: EvalConfig = section(EvalConfig)
    gate: str = option("default", "gate name, or a gate YAML")

    @classmethod
    def schema_for(cls, values: Mapping[str, Any]) -> type[Section]:
        method = values.get("method", DEFAULT_METHOD)
        if not isinstance(method, str) or method not in METHODS:
            got = f"keys below it ({', '.join(method)})" if isinstance(method, dict) else repr(method)
            close = nearest(str(method), METHODS)
            raise UserError("method", got=got, expected=f"one of {', '.join(METHODS)}", nearest=close)
        return METHODS[method].recipe()

    @classmethod
    def variants(cls) -> dict[str, type[Section]]:
        return {name: method.recipe() for name, method in METHODS.items()}

    def proposer_options(self) -> dict[str, Any]:
        """The method's own options of decoding: its keys of `eval:` beside the common ones."""
        return {name: getattr(self.eval, name) for name in own_eval_keys(type(self))}

    @model_validator(mode="after")
    def _has_an_output_folder(self) -> "Recipe":
        if self.train.get("output_dir") is None:
            raise UserError("train.output_dir", got="nothing", expected="a value (the folder of the run)")
        return self


class TrainedRecipe(Recipe):
    """The recipe of a method that is trained: its data, its draft and its loss as well."""

    data: DataConfig = section(DataConfig)
    draft: Section = section(Section)
    loss: Section = section(Section)
    optimizer: Literal["muon_adamw", "adamw"] = option(
        "muon_adamw", "optimizer of the draft; adamw leaves train.optim to the Trainer"
    )

    @model_validator(mode="after")
    def _one_optimizer(self) -> "TrainedRecipe":
        if self.optimizer != "adamw" and "optim" in self.train:
            got = f"{self.train['optim']} with optimizer {self.optimizer}"
            raise UserError("train.optim", got=got, expected="no such key, or optimizer=adamw")
        return self


def own_eval_keys(schema: type[Recipe]) -> list[str]:
    """Keys of `eval:` that only recipes of this schema have."""
    own = schema.model_fields["eval"].annotation
    assert own is not None and issubclass(own, EvalConfig)
    return [name for name in own.model_fields if name not in EvalConfig.model_fields]


def check_trainable(recipe: Recipe, script: str) -> None:
    """Raises UserError when `script` does not train the recipe's method."""
    trained_by = METHODS[recipe.method].script
    if trained_by != script:
        own = [name for name, method in METHODS.items() if method.script == script]
        who = f"which {trained_by} trains" if trained_by else "which needs no training"
        raise UserError("method", got=f"{recipe.method}, {who}", expected=" or ".join(own))
