"""Which of transformers' classes a target is read as."""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

# What model classes raise for sizes, inputs or devices that they do not take: each has its own way, and their code is not ours.
CLASS_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def auto_class(config: Any) -> Any:
    """AutoModelForCausalLM; of a class for text and images that it does not know, the one that does. Text alone never reaches the encoder
    of the images.
    """
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def reads_images(config: Any) -> bool:
    """Whether a config is of a class for text and images that is no causal language model's as well."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
