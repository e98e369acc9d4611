"""What is measured: a main configuration, and around it every other value of one setting at a time.

One axis at a time, not the grid: a reader asks what K, the temperature, the batch or the context change about the configuration they
serve, and a grid of the same values costs their product.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdistill.decoding.sampling import GREEDY, Sampling
from specdistill.decoding.tree import TreeShape, tree_shape
from specdistill.errors import UserError
from specdistill.recipe.sections import SweepConfig
from specdistill.statistics.records import ALL, Configuration
from specdistill.suites.suite import Prompt


@dataclass(frozen=True)
class Settings:
    """How to measure; every number in tokens, prompts or repetitions. The seed is for sampling, warmup counts batches.

    tree: drafted in place of a chain; num_speculative_tokens is then its depth.
    context_bucket: how the prompts were cut (see `Configuration`).
    compile: the target's passes (see `Decoder`).
    """

    num_speculative_tokens: int
    max_new_tokens: int
    sampling: Sampling = GREEDY
    repeats: int = 3
    warmup: int = 2
    seed: int = 0
    batch_size: int = 1
    tree: TreeShape | None = None
    context_bucket: str = ALL
    compile: bool = False

    def __post_init__(self) -> None:
        if self.tree and self.tree.depth != self.num_speculative_tokens:
            expected = f"{self.tree.depth}, the depth of the tree, or eval.tree=null"
            raise UserError(
                "eval.num_speculative_tokens", got=self.num_speculative_tokens, expected=expected
            )
        if self.compile and (self.tree or self.batch_size > 1):
            got = f"true with {'a tree' if self.tree else f'{self.batch_size} prompts at a time'}"
            raise UserError(
                "eval.compile", got=got, expected="false: one shape is compiled, that of a chain"
            )

    @property
    def configuration(self) -> Configuration:
        tree = self.tree.settings if self.tree else None
        return Configuration(
            self.num_speculative_tokens,
            self.sampling.temperature,
            self.batch_size,
            tree,
            self.context_bucket,
        )

    @property
    def decoding(self) -> dict[str, Any]:
        """Options of `Decoder.generate_all`."""
        return {
            name: getattr(self, name)
            for name in ("max_new_tokens", "num_speculative_tokens", "tree", "sampling")
        }

    @property
    def described(self) -> dict[str, Any]:
        """As a report's `settings` state them."""
        named = ("max_new_tokens", "batch_size", "seed", "warmup", "repeats")
        sampling, tree = vars(self.sampling), self.configuration.tree
        values = {name: getattr(self, name) for name in named}
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            **sampling,
            "tree": tree,
            **values,
        }

    @classmethod
    def of(cls, section: Any) -> "Settings":
        """From a recipe's eval section, or from another command's options of the same names."""
        tree = tree_shape(section.tree) if section.tree else None
        alike = ("max_new_tokens", "repeats", "warmup", "seed", "batch_size", "compile")
        return cls(
            tree.depth if tree else section.num_speculative_tokens,
            tree=tree,
            sampling=Sampling(section.temperature, section.top_p, section.top_k),
            **{name: getattr(section, name) for name in alike},
        )


@dataclass(frozen=True)
class MeasurementPlan:
    """A configuration to measure: its settings, and its prompts.

    Raises UserError when there are fewer prompts than a batch holds.
    """

    settings: Settings
    prompts: Sequence[Prompt]

    def __post_init__(self) -> None:
        if len(self.prompts) < self.settings.batch_size:
            got = f"{self.settings.batch_size} for {len(self.prompts)} prompts"
            raise UserError(
                "eval.batch_size", got=got, expected="at most as many as there are prompts"
            )


def plan_configurations(
    main: MeasurementPlan, axes: SweepConfig, contexts: Mapping[int, Sequence[Prompt]]
) -> list[MeasurementPlan]:
    """The main configuration, then those of each axis in the order of its values, none of them twice.

    Other K are chains, also where the main configuration drafts trees. contexts: prompt length in tokens -> prompts cut to it.
    """
    settings, trees = main.settings, [tree_shape(tree) for tree in axes.tree]
    others = [
        *(
            (replace(settings, num_speculative_tokens=k, tree=None), main.prompts)
            for k in axes.num_speculative_tokens
        ),
        *(
            (replace(settings, sampling=replace(settings.sampling, temperature=t)), main.prompts)
            for t in axes.temperature
        ),
        *((replace(settings, batch_size=size), main.prompts) for size in axes.batch_size),
        *(
            (replace(settings, num_speculative_tokens=tree.depth, tree=tree), main.prompts)
            for tree in trees
        ),
        *((replace(settings, context_bucket=str(bucket)), cut) for bucket, cut in contexts.items()),
    ]
    plans = [main]
    for other, prompts in others:
        if other.configuration not in [plan.settings.configuration for plan in plans]:
            plans.append(MeasurementPlan(other, prompts))
    return plans
