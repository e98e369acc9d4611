"""Llama-3.1-8B without its weights: the target of `make gpu` and `make cuda-check`."""

from transformers import LlamaConfig

from specdistill.methods.sizes import ModelConfigInfo

NAME = "meta-llama/Llama-3.1-8B-Instruct"
NUM_STEPS = 7  # steps of the unroll of an EAGLE-3 head for this target

# The config of the published model. Nothing is downloaded.
CONFIG = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=131072,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip
TARGET = ModelConfigInfo(
    NAME,
    key="target.model",
    hub_id=None,
    revision=None,
    raw={"architectures": ["LlamaForCausalLM"]},
    config=CONFIG,
    native_mtp=None,
)
