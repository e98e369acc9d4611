"""EAGLE-1 as a method: how a head is recognized, created, trained, decoded with and exported."""

from collections.abc import Mapping, Set
from pathlib import Path

from datasets import Dataset
from torch import Tensor

from specdistill.methods.chains.head import create_or_load, is_chain_draft
from specdistill.methods.chains.method import ChainMethod
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle.advice import EagleAdvice
from specdistill.methods.eagle.checkpoint import (
    check_eagle,
    export_eagle,
    load_eagle,
    read_eagle_config,
    save_eagle,
)
from specdistill.methods.eagle.config import EagleRecipe
from specdistill.methods.eagle.module import EagleConfig, EagleDraft, build_eagle
from specdistill.methods.sizes import RawConfig
from specdistill.serving.engines.engine import Layout
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

# A tensor name without the `model.` that transformers puts in front of the layers of whole models.
QUERY = "layers.0.self_attn.q_proj.weight"
# What SGLang and vLLM call EAGLE-1 heads in config.json.
ARCHITECTURES = {"LlamaForCausalLMEagle", "EagleLlamaForCausalLM"}


class Eagle(ChainMethod[EagleRecipe, EagleDraft]):
    """EAGLE-1 (arXiv 2401.15077): a head that continues the target's last hidden states."""

    name = "eagle"
    objective = TrainingTimeTest
    proposer = HeadProposer
    advice = EagleAdvice()

    def has_tensors(self, names: Set[str]) -> bool:
        """Return whether these tensor names prove that a folder holds an EAGLE-1 head."""
        # An EAGLE-3 head also has `fc` and layers, but its first layer has a `hidden_norm`.
        is_eagle = {"fc.weight", QUERY} <= names and "layers.0.hidden_norm.weight" not in names
        return is_chain_draft(names) and is_eagle

    def is_named(self, config: RawConfig, names: Set[str]) -> bool:
        """Return whether a folder seems to hold an EAGLE-1 head.

        Its config.json names the architecture of such a head, or its tensors have the usual names.
        """
        architectures = set(config.get("architectures") or [])
        has_architecture = bool(architectures & ARCHITECTURES)
        # Unlike whole models and EAGLE-3 heads, EAGLE-1 heads have no final norm.
        has_usual_names = QUERY in names and "norm.weight" not in names
        # `is_chain_draft` is False for drafts that predict all tokens in one pass (P-EAGLE and
        # DFlash). A head predicts one token per pass.
        return is_chain_draft(names) and (has_architecture or has_usual_names)

    def create(self, recipe: EagleRecipe, target: FrozenTarget, rows: Dataset) -> EagleDraft:
        """Create the head that a recipe describes: a new one, or the trained one of `draft.init`.

        The training data `rows` is not needed, because the head has the target's vocabulary.
        """
        # `ttt_steps` draft steps in a row must fit into the head's sliding window, if it has one.
        return create_or_load(recipe, target, build_eagle, load_eagle, chain_length_key="ttt_steps")

    def save(self, draft: EagleDraft, target: FrozenTarget, folder: Path) -> None:
        """Write a head into a folder, in the layout of SafeAILab."""
        save_eagle(draft, folder)

    def load(self, folder: Path, target: FrozenTarget, *, key: str) -> EagleDraft:
        """Load a head in the dtype of its file."""
        return load_eagle(folder, target, key=key)

    def read_head_shape(self, config: RawConfig, num_layers: int | None) -> EagleConfig:
        """Read the shape that a head was trained with."""
        return read_eagle_config(config, "draft")

    def check(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        target: TargetFiles | None,
        *,
        key: str,
        name: Path | str,
        **options: object,
    ) -> EagleConfig:
        """Check a head's config.json and the shapes of its tensors; see `Method.check`."""
        config, _ = check_eagle(folder, tensors, target, key=key, name=name)
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
        """Write a head in the layout of an engine; see `Method.export`."""
        export_eagle(folder, engine, layout, output, target, num_tokens)


METHOD = Eagle()
