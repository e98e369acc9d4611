"""The recipe of pico itself: tokenizer, shape, curriculum and training arguments.

The help of each key has its unit and its limits.
"""

from typing import Annotated, Any

from pydantic import Field, model_validator

from specdistill.common.errors import UserError
from specdistill.recipe.fields import Section, option, section


class TokenizerConfig(Section):
    """The section `tokenizer`: the size of pico's vocabulary."""

    vocab_size: int = option(
        1024, "byte-level BPE tokens, the 256 bytes and 4 special ones included", ge=260
    )


class ShapeConfig(Section):
    """The section `shape`: the sizes of pico's layers."""

    num_layers: int = option(16, "decoder layers", ge=1)
    hidden_size: int = option(128, "width", ge=64, multiple_of=64)
    intermediate_size: int = option(448, "MLP width", ge=1)
    context_length: int = option(512, "longest sequence, in tokens", ge=16)


class CurriculumConfig(Section):
    """The section `curriculum`: how long the rows are, and when."""

    batch_tokens: int = option(8192, "tokens in every optimizer step", ge=1)
    lengths: list[Annotated[int, Field(ge=2)]] = option(
        [256, 512], "row lengths, in the order they are trained", min_length=1
    )
    shares: list[Annotated[float, Field(ge=0, le=1)]] = option(
        [0.85, 0.15], "share of the steps each length gets"
    )


class TargetRecipe(Section):
    """The recipe that pico was trained by."""

    tokenizer: TokenizerConfig = section(TokenizerConfig)
    shape: ShapeConfig = section(ShapeConfig)
    curriculum: CurriculumConfig = section(CurriculumConfig)
    train: dict[str, Any] = option(..., "transformers.TrainingArguments, field by field")

    @model_validator(mode="after")
    def _curriculum_and_shape_fit(self) -> "TargetRecipe":
        rows = self.curriculum
        train = self.train
        batch = "per_device_train_batch_size"
        longest = min(self.shape.context_length, rows.batch_tokens)
        for key, got, holds, expected in (
            (
                f"train.{batch}",
                train.get(batch),
                batch not in train,
                "no such key: curriculum.batch_tokens sets it",
            ),
            (
                "train.max_steps",
                train.get("max_steps"),
                train.get("max_steps", -1) != -1,
                "a number of steps to share out",
            ),
            (
                "curriculum.shares",
                rows.shares,
                abs(sum(rows.shares) - 1) < 1e-6,
                "shares that sum to 1",
            ),
            (
                "curriculum.lengths",
                rows.lengths,
                len(rows.lengths) == len(rows.shares),
                "as many as curriculum.shares",
            ),
            (
                "curriculum.lengths",
                rows.lengths,
                max(rows.lengths) <= longest,
                f"at most {longest}: the context and a batch",
            ),
        ):
            if not holds:
                raise UserError(key, got=got, expected=expected)
        return self
