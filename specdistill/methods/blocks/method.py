"""The common part of the methods that draft blocks.

It recognizes, creates, trains, decodes with and exports their drafts.
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from datasets import Dataset
from torch import Tensor

from specdistill.methods.base import FeatureMethod
from specdistill.methods.blocks import checkpoint
from specdistill.methods.blocks.config import BlockRecipe
from specdistill.methods.blocks.module import BlockConfig, BlockDraft, Kind, build_block_draft
from specdistill.methods.blocks.objective import BlockObjective
from specdistill.methods.blocks.proposer import BlockProposer
from specdistill.methods.chains.head import create_or_load
from specdistill.methods.mask_token import choose_mask
from specdistill.methods.sizes import RawConfig
from specdistill.serving.engines.engine import Layout
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import build_divergence

# Tensors that every block drafter has. All three together occur in no head.
TENSORS = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.k_norm.weight"}


class BlockMethod(FeatureMethod[BlockRecipe, BlockDraft]):
    """A method that drafts a block of tokens in one pass.

    Attributes:
        kind: the classes of the draft and its config, and what files call them.
        own_tensors: names of tensors that only drafts of this kind have.
        objective: the class of the objective.
        proposer: the class of the proposer.
    """

    kind: ClassVar[Kind]
    own_tensors: ClassVar[frozenset[str]] = frozenset()
    objective: ClassVar[type[BlockObjective]]
    proposer: ClassVar[type[BlockProposer]]

    def has_tensors(self, names: Set[str]) -> bool:
        """Return whether these tensor names prove that a folder holds a draft of this kind."""
        return bool(self.own_tensors) and names >= TENSORS | self.own_tensors

    def is_named(self, config: RawConfig, names: Set[str]) -> bool:
        """Return whether a folder's config.json names this kind of draft."""
        stated_names = {*(config.get("architectures") or []), config.get("speculators_model_type")}
        return bool(stated_names & {*self.kind.architectures, self.kind.name})

    def create(self, recipe: BlockRecipe, target: FrozenTarget, rows: Dataset) -> BlockDraft:
        """Create the draft that a recipe describes, as it is before training.

        It is a new draft, or the trained one of `draft.init`.

        Args:
            recipe: the recipe.
            target: the target.
            rows: training data, by which the draft vocabulary and a mask token are chosen.
        """
        # Create a new draft, or load one. A new draft has an arbitrary mask token at first, because
        # no weight depends on it. If the draft has a sliding window, a block must fit into it:
        # `create_or_load` checks this for the length that the recipe states as `draft.block_size`.
        build = partial(build_block_draft, self.kind, mask_token_id=0)
        load = partial(checkpoint.load_block, self.kind)
        draft = create_or_load(
            recipe, target, build, load, chain_length_key="block_size", rows=rows
        )

        # Choose the mask token: that of the recipe, that of the draft in `draft.init`, the
        # tokenizer's, or a token that does not occur in texts.
        init = recipe.draft.init
        inherited = draft.config.mask_token_id if init else None
        mask = choose_mask(recipe.draft.mask_token_id, init, inherited, target, rows)
        draft.config = replace(draft.config, mask_token_id=mask)
        return draft

    def build_objective(
        self, draft: BlockDraft, recipe: BlockRecipe, target: FrozenTarget
    ) -> BlockObjective:
        """Build the module that computes the loss of a block drafter, with a recipe's settings."""
        # All other keys of `loss:` are arguments of the objective.
        return self.objective(
            draft,
            build_divergence(recipe.loss.divergence),
            recipe.draft.num_anchors,
            alpha=recipe.loss.d_pace,
            seed=recipe.seed,
            **recipe.loss.model_dump(exclude={"divergence", "d_pace"}),
        )

    def build_proposer(self, draft: BlockDraft, target: FrozenTarget) -> BlockProposer:
        """Build the proposer of a draft that is loaded."""
        return self.proposer(draft)

    def save(self, draft: BlockDraft, target: FrozenTarget, folder: Path) -> None:
        """Write a draft into a folder, in the layout of the method's authors."""
        checkpoint.save_block(draft, self.kind, folder)

    def load(self, folder: Path, target: FrozenTarget, *, key: str) -> BlockDraft:
        """Load a draft in the dtype of its file."""
        return checkpoint.load_block(self.kind, folder, target, key=key)

    def read_head_shape(self, config: RawConfig, num_layers: int | None) -> BlockConfig:
        """Read the shape that a draft was trained with from the content of its config.json."""
        return checkpoint.read_block_config(self.kind, config, num_layers, "draft")

    def check(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        target: TargetFiles | None,
        *,
        key: str,
        name: Path | str,
        **options: object,
    ) -> BlockConfig:
        """Check a draft's config.json and the shapes of its tensors; see `Method.check`."""
        config, _ = checkpoint.check_block(self.kind, folder, tensors, target, key=key, name=name)
        return config

    def export(
        self,
        folder: Path,
        engine: str,
        layout: Layout,
        output: Path,
        target: TargetFiles | None,
        num_tokens: int,
    ) -> None:
        """Write a draft in the layout of an engine."""
        checkpoint.export_block(self.kind, folder, engine, layout, output, target, num_tokens)
