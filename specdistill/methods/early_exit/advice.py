"""Answers to `specdistill plan` and `specdistill doctor` about early exits."""

from functools import partial

from specdistill.methods import sizes
from specdistill.methods.base import Advice, DraftSettings
from specdistill.methods.early_exit.checkpoint import is_exit_config, read_exit_config
from specdistill.methods.early_exit.module import ExitDraft, build_exit, exit_config
from specdistill.methods.early_exit.objective import ExitDistillation
from specdistill.training.losses.divergence import forward_kl

PUBLISHED_FIGURES = sizes.MethodFigures(
    None, "none is published for an exit of this shape", None, "none is published"
)


class ExitAdvice(Advice[ExitDraft]):
    """The advice on early exits."""

    def plan_draft(
        self,
        target: sizes.ModelConfigInfo,
        draft_info: sizes.ModelConfigInfo | None,
        settings: DraftSettings,
    ) -> sizes.PlannedDraft:
        """Describe the size and the cost of an existing exit, or of one still to be trained.

        A draft step also runs the target's first layers, so their parameters count as read. See
        `Advice.plan_draft` for the arguments.
        """
        # The exit's config: that of the existing draft, or built from the recipe's keys.
        if draft_info:
            config = read_exit_config(draft_info.raw, "draft")
        else:
            names = ("exit_layer", "intermediate_size")
            config = exit_config(
                target.text, **{name: settings[name] for name in names if name in settings}
            )
        # Build an exit for a tiny target first, to see whether the layers of this model class can
        # run in two parts.
        target.build_on_tiny_target(lambda tiny: build_exit(tiny, exit_layer=config.exit_layer))

        # Count the parameters. The exit has the three matrices of an MLP and a norm. A draft step
        # also reads the target's first layers and its LM head.
        exit_size = 3 * config.hidden_size * config.intermediate_size + config.hidden_size
        head_size = config.vocab_size * config.hidden_size
        layers_size = sum(
            sizes.count_parameters_read(layer, target.text)
            for layer in target.weightless.layers[: config.exit_layer]
        )
        return sizes.PlannedDraft(
            sizes.ParameterCounts(
                exit_size, exit_size + layers_size + head_size, config.exit_layer
            ),
            # An exit has no attention.
            sizes.ModelShape(
                num_layers=1,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_attention_heads=0,
                num_key_value_heads=0,
                head_dim=0,
            ),
            config.vocab_size,
            f"the target's first {config.exit_layer} layers draft, and are not run again to verify;"
            " no engine serves it",
            PUBLISHED_FIGURES,
            recipe_keys=("draft.exit_layer=null",),
            build=partial(ExitDraft, config),
        )

    def is_described(self, draft: sizes.ModelConfigInfo, target: sizes.ModelConfigInfo) -> bool:
        """Return whether a draft's config.json belongs to an early exit."""
        return is_exit_config(draft.raw)

    def build_simulation(self, draft: ExitDraft, num_tokens: int) -> ExitDistillation:
        """Build the objective with forward KL, which simulates rounds of K draft tokens."""
        return ExitDistillation(draft, forward_kl, num_tokens)
