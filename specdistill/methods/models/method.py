"""The base of the methods whose draft is a model of its own.

This file says how such a draft is recognized, created, decoded with and exported.
"""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdistill.common.errors import UserError
from specdistill.methods.base import Method
from specdistill.methods.models.checkpoint import (
    check_outline,
    export_draft_model,
    load_draft_model,
    save_draft_model,
)
from specdistill.methods.models.config import ModelRecipe
from specdistill.methods.models.create import (
    add_lora,
    create_draft_model,
)
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.methods.models.vocabulary import check_rows, match_vocabularies
from specdistill.methods.sizes import RawConfig
from specdistill.serving.engines.engine import Layout
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.loading import read_tokenizer, read_without_weights

ModelRecipeT = TypeVar("ModelRecipeT", bound=ModelRecipe)

# Files that hold a vocabulary: of tokenizers, of SentencePiece, of BPE in two formats, and of
# Mistral.
VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")


class ModelMethod(Method[ModelRecipeT, PreTrainedModel]):
    """A method whose draft is a whole language model.

    Attributes:
        proposer: the class that decodes with the draft.
    """

    proposer: ClassVar[type[DraftModelProposer]]

    def find_mask(self, folder: Path, key: str) -> int | None:
        """Return the draft's mask token; None for a model that drafts token by token."""
        return None

    def is_named(self, config: RawConfig, names: Set[str]) -> bool:
        """Return whether a folder has weights, and its config.json names a causal language model.

        Args:
            config: the content of config.json. Its key `architectures` lists model classes. One of
                them must be a causal language model of transformers.
            names: the names of the tensors in the folder; empty if it has no weights.
        """
        has_weights = bool(names)
        architectures = set(config.get("architectures") or [])
        known_classes = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        return has_weights and bool(architectures & known_classes)

    def create(self, recipe: ModelRecipeT, target: FrozenTarget, rows: Dataset) -> PreTrainedModel:
        """Create the draft model of a recipe, with LoRA updates if the recipe asks for LoRA."""
        draft = create_draft_model(target, seed=recipe.seed, **recipe.draft.shape())
        adapted = add_lora(draft, **vars(recipe.draft.lora))
        # peft's wrapper passes everything on to the model inside.
        return cast(PreTrainedModel, adapted)

    def save(self, draft: PreTrainedModel, target: FrozenTarget, folder: Path) -> None:
        """Write a model, with the target's tokenizer."""
        save_draft_model(draft, target.tokenizer, folder)

    def load_proposer(
        self, folder: Path | None, target: FrozenTarget, *, key: str, **options: Any
    ) -> DraftModelProposer:
        """Load a draft model, and return the proposer that drafts with it.

        Args:
            folder: the folder of the draft model.
            target: the target.
            key: the recipe key to name in errors.
            **options: arguments of `match_vocabularies`, which say how to draft with a tokenizer
                that is not the target's.
        """
        assert folder is not None  # only methods without weights have none

        # Load the model, and match its tokens with the target's. The mask token is None for a
        # model that drafts token by token.
        mask = self.find_mask(folder, key)
        model, tokenizer = load_draft_model(
            folder, key=key, device=target.device, dtype=target.dtype
        )
        vocabulary = match_vocabularies(
            target.tokenizer,
            len(target.lm_head.weight),
            tokenizer,
            count_logits(model),
            key=key,
            **options,
        )
        return self.proposer(
            model,
            vocabulary=vocabulary,
            mask_token_id=mask,
            target_max_length=target.max_length,
            key=key,
        )

    def check(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        target: TargetFiles | None,
        *,
        key: str,
        name: Path | str,
        **options: Any,
    ) -> None:
        """Check a draft model by its config, the headers of its weight files and its tokenizer."""
        # `find_mask` raises an error for a wrong mask token. That fault is reported first.
        self.find_mask(folder, key)
        if not any(_is_vocabulary_file(path) for path in folder.iterdir()):
            raise UserError(
                key,
                got=f"{name} without the files of a tokenizer",
                expected=(
                    "tokenizer.json and tokenizer_config.json next to the weights, from the"
                    " tokenizer that the draft was trained with"
                ),
            )

        # Build the model on the meta device, and compare it with the headers of the weights.
        model, tokenizer = read_without_weights(folder, key=key, name=str(name))
        check_outline(model, tensors, key=key, name=str(name))
        check_rows(tokenizer, count_logits(model), key, name)

        # Without a target, the vocabularies cannot be compared.
        if target is not None:
            target_tokenizer, *_ = read_tokenizer(target)
            match_vocabularies(
                target_tokenizer,
                target.vocab_size,
                tokenizer,
                count_logits(model),
                key=key,
                **options,
            )

    def export(
        self,
        folder: Path,
        engine: str,
        layout: Layout,
        output: Path,
        target: TargetFiles | None,
        num_tokens: int,
    ) -> None:
        """Write a draft model for an engine: config, weights and tokenizer, as of any model."""
        export_draft_model(folder, engine, layout, output, target, num_tokens)


def _is_vocabulary_file(path: Path) -> bool:
    """Return whether a file's name is one under which a tokenizer keeps its vocabulary."""
    return any(path.match(pattern) for pattern in VOCABULARY_FILES)


def count_logits(model: PreTrainedModel) -> int:
    """Return how many logits a model has, which may be more than the tokenizer's tokens."""
    return len(model.get_output_embeddings().weight)
