"""Multi-token prediction as a method.

This file says how a layer is recognized, created, trained, decoded with and exported.
"""

from collections.abc import Mapping, Set
from pathlib import Path

from datasets import Dataset
from torch import Size, Tensor

from specdistill.methods.chains.method import ChainMethod
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.mtp import checkpoint
from specdistill.methods.mtp.advice import MtpAdvice
from specdistill.methods.mtp.config import MtpRecipe
from specdistill.methods.mtp.module import MtpDraft
from specdistill.methods.sizes import RawConfig
from specdistill.serving.engines.engine import Layout
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget


class Mtp(ChainMethod[MtpRecipe, MtpDraft]):
    """Multi-token prediction (arXiv 2412.19437): a layer of the target's own kind."""

    name = "mtp"
    objective = TrainingTimeTest
    proposer = HeadProposer
    advice = MtpAdvice()

    def is_named(self, config: RawConfig, names: Set[str]) -> bool:
        """Return whether a folder calls itself a multi-token-prediction draft."""
        return bool(names) and config.get("architectures") == [checkpoint.ARCHITECTURE]

    def create(self, recipe: MtpRecipe, target: FrozenTarget, rows: Dataset) -> MtpDraft:
        """Create the draft of a recipe: the target's own layer, a fresh or a trained one.

        `draft.init` says which (see `checkpoint.build_mtp`).
        """
        return checkpoint.build_mtp(target, init=recipe.draft.init, seed=recipe.seed)

    def save(self, draft: MtpDraft, target: FrozenTarget, folder: Path) -> None:
        """Write a layer into a folder, in specdistill's own layout."""
        checkpoint.save_mtp(draft, folder)

    def load(self, folder: Path, target: FrozenTarget, *, key: str) -> MtpDraft:
        """Load a layer in the dtype of its file."""
        return checkpoint.load_mtp(folder, target, key=key)

    def check(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        target: TargetFiles | None,
        *,
        key: str,
        name: Path | str,
        **options: object,
    ) -> None:
        """Check a draft's folder by its config.json and the names and shapes of its tensors.

        Other heads return a `HeadShape`: the sizes and settings of their layers, which the caller
        compares with the target's. This method returns None, because the sizes of the decoder layer
        are known only to the target's class.
        """
        checkpoint.check_mtp(folder, tensors, target, key=key, name=name)

    def check_native(self, shapes: Mapping[str, Size], target: TargetFiles) -> int:
        """Check the layer in a target's own checkpoint, and return the number of its tensors."""
        return checkpoint.check_native(shapes, target)

    def check_served(
        self, engine: str, layout: Layout, draft: MtpDraft, target: FrozenTarget
    ) -> None:
        """Check that the engine loads a multi-token-prediction layer from the target's checkpoint.

        A target that was made in memory has no checkpoint, and is not checked.
        """
        if target.files:
            checkpoint.check_mtp_target(engine, target.files)

    def export(
        self,
        folder: Path,
        engine: str,
        layout: Layout,
        output: Path,
        target: TargetFiles | None,
        num_tokens: int,
    ) -> None:
        """Write a copy of the target's checkpoint with the draft's layer in it, for an engine."""
        checkpoint.export_mtp(folder, engine, layout, output, target, num_tokens)


METHOD = Mtp()
