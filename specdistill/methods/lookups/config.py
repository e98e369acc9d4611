"""The recipe of a method without weights, which looks up what may follow."""

from pydantic import model_validator

from specdistill.common.errors import UserError, make_unused_key_error
from specdistill.methods.recipe import Recipe
from specdistill.recipe.fields import format_value
from specdistill.recipe.sections import EvalConfig


class UntrainedRecipe(Recipe):
    """The recipe of a lookup: it has no training, no draft and no trees."""

    @model_validator(mode="after")
    def _check_lookup_keys(self) -> "UntrainedRecipe":
        """Raise UserError for a recipe key that has no effect, because lookups do not use it."""
        # A lookup is not trained. Of the section `train:` it uses only the folder for results.
        for name, value in self.train.items():
            if name != "output_dir":
                raise make_unused_key_error(
                    f"train.{name}", format_value(value), f"method {self.method} is not trained"
                )
        if self.eval.draft is not None:
            raise make_unused_key_error(
                "eval.draft", self.eval.draft, f"method {self.method} has no draft"
            )

        # A lookup finds only one continuation at a time, so it cannot draft trees.
        tree = self.eval.tree or self.eval.sweep.tree
        if tree:
            key = "eval.tree" if self.eval.tree else "eval.sweep.tree"
            raise make_unused_key_error(
                key, format_value(tree), f"method {self.method} drafts chains only"
            )
        if self.eval.lookup_first:
            raise make_unused_key_error(
                "eval.lookup_first",
                format_value(self.eval.lookup_first),
                f"method {self.method} is a lookup itself",
            )
        return self


def check_engine_values(
    config: EvalConfig, section: str, **allowed_values: tuple[object, ...]
) -> None:
    """Raise UserError for a value of `eval.<section>` that the chosen engine does not support.

    Args:
        config: the section `eval:`.
        section: the part of `eval:` with the method's keys.
        **allowed_values: for each key, the values that the engine supports. The error recommends
            the last one.
    """
    for name, values in allowed_values.items():
        value = getattr(getattr(config, section), name)
        if value not in values:
            raise UserError(
                f"eval.{section}.{name}",
                got=f"{value} with eval.engine={config.engine}",
                expected=str(values[-1]),
            )
