"""EAGLE-3 as a method: how a head is recognized, created, trained, decoded with and exported."""

from collections.abc import Mapping, Set
from pathlib import Path

from datasets import Dataset
from torch import Tensor

from specdistill.common.errors import UserError
from specdistill.methods.chains.head import create_or_load, is_chain_draft
from specdistill.methods.chains.method import ChainMethod
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle3.advice import Eagle3Advice
from specdistill.methods.eagle3.checkpoint import (
    check_eagle3,
    export_eagle3,
    load_eagle3,
    read_eagle3_config,
    save_eagle3,
)
from specdistill.methods.eagle3.config import Eagle3Recipe
from specdistill.methods.eagle3.module import Eagle3Config, Eagle3Draft, build_eagle3
from specdistill.methods.sizes import RawConfig
from specdistill.serving.engines.engine import Layout
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

# Tensors that every EAGLE-3 head has, by either name of its first layer.
TENSORS = (
    {"fc.weight", "midlayer.hidden_norm.weight"},
    {"fc.weight", "layers.0.hidden_norm.weight"},
)
# What SGLang, vLLM and speculators call EAGLE-3 heads in config.json.
ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"}


class Eagle3(ChainMethod[Eagle3Recipe, Eagle3Draft]):
    """EAGLE-3 (arXiv 2503.01840): a head that reads several of the target's layers."""

    name = "eagle3"
    objective = TrainingTimeTest
    proposer = HeadProposer
    advice = Eagle3Advice()

    def has_tensors(self, names: Set[str]) -> bool:
        """Return whether these tensor names prove that a folder holds an EAGLE-3 head."""
        return is_chain_draft(names) and any(needed <= names for needed in TENSORS)

    def is_named(self, config: RawConfig, names: Set[str]) -> bool:
        """Return whether a folder seems to hold an EAGLE-3 head.

        Its config.json names the architecture of such a head, or its tensors have the usual names.
        """
        architectures = set(config.get("architectures") or [])
        has_architecture = bool(architectures & ARCHITECTURES)
        # Many projects call the first layer of an EAGLE-3 head `midlayer`.
        has_usual_names = any(name.startswith("midlayer.") for name in names)
        # `is_chain_draft` is False for drafts that predict all tokens in one pass (P-EAGLE and
        # DFlash). A head predicts one token per pass.
        return is_chain_draft(names) and (has_architecture or has_usual_names)

    def create(self, recipe: Eagle3Recipe, target: FrozenTarget, rows: Dataset) -> Eagle3Draft:
        """Create the head that a recipe describes: a new one, or the trained one of `draft.init`.

        The draft vocabulary of a new head is the most frequent tokens of the training data.
        """
        head = create_or_load(
            recipe, target, build_eagle3, load_eagle3, chain_length_key="ttt_steps", rows=rows
        )
        # Freeze the LM head if the recipe says so. This makes sense only if its weights are useful
        # already. The LM head of `draft.init` is trained. That of a new head is a copy of the
        # target's if both are equally wide, and random otherwise.
        if not recipe.draft.train_head:
            is_as_wide = head.config.hidden_size == head.config.target_hidden_size
            if not recipe.draft.init and not is_as_wide:
                raise UserError(
                    "draft.train_head",
                    got=(
                        f"false with draft.hidden_size={head.config.hidden_size}, where the LM head"
                        " starts at random"
                    ),
                    expected="true, or draft.hidden_size=null",
                )
            head.lm_head.weight.requires_grad_(False)
        return head

    def save(self, draft: Eagle3Draft, target: FrozenTarget, folder: Path) -> None:
        """Write a head into a folder, in the layout of SpecForge and SGLang."""
        save_eagle3(draft, folder)

    def load(self, folder: Path, target: FrozenTarget, *, key: str) -> Eagle3Draft:
        """Load a head in the dtype of its file."""
        return load_eagle3(folder, target, key=key)

    def read_head_shape(self, config: RawConfig, num_layers: int | None) -> Eagle3Config:
        """Read the shape that a head was trained with."""
        return read_eagle3_config(config, num_layers, "draft")

    def check(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        target: TargetFiles | None,
        *,
        key: str,
        name: Path | str,
        **options: object,
    ) -> Eagle3Config:
        """Check a head's config.json and the shapes of its tensors; see `Method.check`."""
        config, _ = check_eagle3(folder, tensors, target, key=key, name=name)
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
        export_eagle3(folder, engine, layout, output, target, num_tokens)


METHOD = Eagle3()
