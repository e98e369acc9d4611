"""Which of transformers' classes a target is read as."""

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)


def auto_class(config: Any) -> Any:
    """AutoModelForCausalLM; of a class for text and images that it does not know, the one that does. Text alone never reaches the encoder
    of the images.
    """
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def reads_images(config: Any) -> bool:
    """Whether a config is of a class for text and images that is no causal language model's as well."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
