"""The recipe of a method without weights, which looks up what may follow."""

from typing import Any

from pydantic import model_validator

from specdistill.errors import UserError
from specdistill.methods.recipe import Recipe
from specdistill.recipe.sections import EvalConfig


class UntrainedRecipe(Recipe):
    @model_validator(mode="after")
    def _looks_up(self) -> "UntrainedRecipe":
        because = f"with method {self.method}"
        other = next((name for name in self.train if name != "output_dir"), None)
        if other:
            raise UserError(
                f"train.{other}",
                got=f"{self.train[other]} {because}",
                expected="no such key: it is not trained",
            )
        if self.eval.draft is not None:
            raise UserError(
                "eval.draft",
                got=f"{self.eval.draft} {because}",
                expected="no such key: it has no draft",
            )
        if self.eval.tree or self.eval.sweep.tree:
            raise UserError(
                "eval.tree",
                got=f"a tree with method {self.method}",
                expected="no such key: it drafts chains only",
            )
        if self.eval.lookup_first:
            got = f"a lookup in front of method {self.method}"
            raise UserError("eval.lookup_first", got=got, expected="null: it is one itself")
        return self


def check_of_engine(config: EvalConfig, section: str, **own: tuple[Any, ...]) -> None:
    """Raises UserError for a value of `eval.<section>` that is none of the engine's own, of which an error names the last."""
    for name, values in own.items():
        if (value := getattr(getattr(config, section), name)) not in values:
            raise UserError(
                f"eval.{section}.{name}",
                got=f"{value} with eval.engine={config.engine}",
                expected=str(values[-1]),
            )
