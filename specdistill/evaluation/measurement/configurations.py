"""Plan what is measured: a main configuration, and variants that change one of its settings each.

A sweep varies one setting (axis) at a time, not the whole grid. A reader asks what K, the
temperature, the batch size or the context length change about the configuration that they serve.
The cost of a grid would be the product of the numbers of values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdistill.common.errors import UserError
from specdistill.decoding.sampling import GREEDY, Sampling
from specdistill.decoding.tree import TreeShape, build_tree_shape
from specdistill.evaluation.statistics.records import ALL_PROMPTS, Configuration
from specdistill.evaluation.suites.suite import Prompt, Suite, count_measured, cut_prompts, tokenize
from specdistill.recipe.sections import EvalConfig, SweepConfig


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement.

    Attributes:
        num_speculative_tokens: K; for a tree, its depth.
        max_new_tokens: the most tokens of a completion.
        sampling: how tokens are chosen.
        repeats: how often every prompt is decoded.
        warmup: batches that are decoded before anything is timed.
        seed: the seed of the first prompt; each further prompt has the next number. The test of
            sampling and the bootstrap derive their seeds from it, too.
        batch_size: prompts that are decoded together.
        tree: the shape of the tree that is drafted; None drafts a chain.
        context_bucket: the length to which the prompts were cut (see `Configuration`).
        compile: whether the target's passes are compiled (see `Decoder`).
        quick: whether this is a quick look, which cannot pass a gate.

    Raises:
        UserError: for a K that is not the depth of the tree, and for `compile` with a tree or a
            batch.
    """

    num_speculative_tokens: int
    max_new_tokens: int
    sampling: Sampling = GREEDY
    repeats: int = 3
    warmup: int = 2
    seed: int = 0
    batch_size: int = 1
    tree: TreeShape | None = None
    context_bucket: str = ALL_PROMPTS
    compile: bool = False
    quick: bool = False

    def __post_init__(self) -> None:
        # With a tree, K is the depth of the tree.
        if self.tree and self.tree.depth != self.num_speculative_tokens:
            raise UserError(
                "eval.num_speculative_tokens",
                got=self.num_speculative_tokens,
                expected=f"{self.tree.depth}, the depth of the tree, or eval.tree=null",
            )

        # The decoder compiles a pass for one fixed shape.
        if self.compile and (self.tree or self.batch_size > 1):
            reason = "a tree" if self.tree else f"{self.batch_size} prompts at a time"
            raise UserError(
                "eval.compile",
                got=f"true with {reason}",
                expected="false, because only chains of one prompt at a time are compiled",
            )

    @property
    def configuration(self) -> Configuration:
        """The settings in which configurations of a report differ, such as K and temperature."""
        return Configuration(
            self.num_speculative_tokens,
            self.sampling.temperature,
            self.batch_size,
            self.tree.settings if self.tree else None,
            self.context_bucket,
        )

    @property
    def decoding(self) -> dict[str, Any]:
        """The settings as keyword arguments of `Decoder.generate_all`, which decodes a batch."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "num_speculative_tokens": self.num_speculative_tokens,
            "tree": self.tree,
            "sampling": self.sampling,
        }

    @property
    def described(self) -> dict[str, Any]:
        """The settings as a dict for the section `settings` of report.json."""
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            **vars(self.sampling),  # temperature, top_p and top_k
            "tree": self.configuration.tree,
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "warmup": self.warmup,
            "repeats": self.repeats,
            **({"quick": True} if self.quick else {}),
        }

    @classmethod
    def from_section(cls, section: Any) -> "Settings":
        """Make settings from a recipe's section `eval`, or from options with the same names.

        Args:
            section: an object with an attribute for each setting.
        """
        # K is the number of draft tokens per round; with a tree, the depth of the tree.
        tree = build_tree_shape(section.tree) if section.tree else None
        return cls(
            num_speculative_tokens=tree.depth if tree else section.num_speculative_tokens,
            max_new_tokens=section.max_new_tokens,
            sampling=Sampling(section.temperature, section.top_p, section.top_k),
            repeats=section.repeats,
            warmup=section.warmup,
            seed=section.seed,
            batch_size=section.batch_size,
            tree=tree,
            compile=section.compile,
            quick=section.quick,
        )


@dataclass(frozen=True)
class MeasurementPlan:
    """A configuration to measure: its settings and its prompts.

    Attributes:
        settings: the settings of plain decoding and, if `settings_each` is empty, of every draft.
        prompts: the prompts, in the order in which they are measured.
        settings_each: the settings of each draft, if drafts differ in K or tree.

    Raises:
        UserError: when there are fewer prompts than a batch holds.
    """

    settings: Settings
    prompts: Sequence[Prompt]
    settings_each: Sequence[Settings] = ()

    def __post_init__(self) -> None:
        if len(self.prompts) < self.settings.batch_size:
            raise UserError(
                "eval.batch_size",
                got=f"{self.settings.batch_size} for {len(self.prompts)} prompts",
                expected=f"at most {len(self.prompts)}, the number of prompts",
            )

    def draft_settings(self, number: int) -> Settings:
        """Return the settings of the draft with this index."""
        return self.settings_each[number] if self.settings_each else self.settings

    def process_share(self, rank: int, num_processes: int) -> "MeasurementPlan":
        """Return the plan of one process, if several processes share the prompts of this plan.

        Each process gets about the same number of prompts of every category. No two processes use
        the same random seeds.

        Args:
            rank: the index of the process, from 0.
            num_processes: the number of processes.

        Raises:
            UserError: when a process would have fewer prompts than a batch holds.
        """
        if num_processes == 1:
            return self
        num_prompts = len(self.prompts)
        batch_size = self.settings.batch_size
        if num_prompts // num_processes < batch_size:
            raise UserError(
                "num_processes",
                got=f"{num_processes} for {num_prompts} prompts, {batch_size} at a time",
                expected="fewer processes, so that each has at least one batch",
            )

        # Order the prompts by category, and deal them out in turn, like cards.
        by_category = sorted(self.prompts, key=lambda prompt: prompt.category)
        # A prompt's seed is `seed` plus the index of the prompt in its process, and such an index
        # is below `num_prompts`. So no two prompts share a seed.
        seed = self.settings.seed + rank * num_prompts
        return MeasurementPlan(
            replace(self.settings, seed=seed),
            by_category[rank::num_processes],
            [replace(settings, seed=seed) for settings in self.settings_each],
        )


def plan_configurations(
    main: MeasurementPlan, axes: SweepConfig, contexts: Mapping[int, Sequence[Prompt]]
) -> list[MeasurementPlan]:
    """Plan the main configuration, and variants that each change one setting of it.

    The settings that are varied (axes) are K, the temperature, the batch size, the tree and the
    context length. Duplicates are left out.

    Args:
        main: the settings and prompts of the main configuration.
        axes: the values to measure of each setting, except that the context lengths in `axes` are
            ignored: `contexts` has them, with their prompts.
        contexts: context length in tokens -> the prompts cut to that length.

    Returns:
        The plans, the main one first.
    """
    settings = main.settings

    # Vary one setting at a time, with all other settings as in the main configuration. A tree has
    # its own K, its depth, so a variant with another K drafts a chain (tree=None).
    variants: list[tuple[Settings, Sequence[Prompt]]] = []
    for k in axes.num_speculative_tokens:
        variants.append((replace(settings, num_speculative_tokens=k, tree=None), main.prompts))
    for temperature in axes.temperature:
        sampling = replace(settings.sampling, temperature=temperature)
        variants.append((replace(settings, sampling=sampling), main.prompts))
    for batch_size in axes.batch_size:
        variants.append((replace(settings, batch_size=batch_size), main.prompts))
    for tree_config in axes.tree:
        tree = build_tree_shape(tree_config)
        variant = replace(settings, num_speculative_tokens=tree.depth, tree=tree)
        variants.append((variant, main.prompts))
    for length, prompts_of_length in contexts.items():
        variants.append((replace(settings, context_bucket=str(length)), prompts_of_length))

    # A variant that equals an earlier configuration is not measured twice.
    plans = [main]
    configurations = [settings.configuration]
    for variant, prompts in variants:
        if variant.configuration not in configurations:
            plans.append(MeasurementPlan(variant, prompts))
            configurations.append(variant.configuration)
    return plans


def plan_measurement(
    config: EvalConfig,
    suite: Suite,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    vocab_size: int | None = None,
    logs: bool = True,
) -> list[MeasurementPlan]:
    """Plan all configurations that a recipe's section `eval` asks for, the main one first.

    Args:
        config: the recipe's section `eval`.
        suite: the suite of prompts that is measured. It may name settings to vary (sweep), too.
        tokenizer: the target's tokenizer.
        max_length: the target's context, in tokens.
        vocab_size: the size of the target's vocabulary, which token ids must be below. None: token
            ids are not checked.
        logs: whether to log how many prompts are measured, and to warn of prompts that a chat model
            is given as plain text.

    Raises:
        UserError: for prompts that cannot be measured with these settings.
    """
    # The suite may list values to measure for each setting. If the recipe lists values for a
    # setting, these replace the suite's values for that setting.
    recipe_axes = {name: values for name, values in vars(config.sweep).items() if values}
    axes = suite.sweep.model_copy(update=recipe_axes)

    # Tokenize the prompts as they are, and once more cut to each context length.
    limits: dict[str, Any] = {
        "num_prompts": count_measured(suite, config.num_prompts, logs=logs),
        "max_new_tokens": config.max_new_tokens,
        "max_length": max_length,
    }
    prompts = tokenize(suite, tokenizer, vocab_size=vocab_size, logs=logs, **limits)
    main_plan = MeasurementPlan(Settings.from_section(config), prompts)
    contexts = cut_prompts(suite, tokenizer, axes.context, **limits)
    return plan_configurations(main_plan, axes, contexts)
