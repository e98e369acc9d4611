"""Tiny random targets of the classes of published ones.

Each has a config.json with its sizes replaced and a chat template of the family's kind. All else in
a config stays: the class, its kinds of layers, attention and experts, how positions are scaled,
what is tied.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdistill.methods.mtp.checkpoint import build_mtp, merge_mtp_weights, save_mtp
from specdistill.targets.anatomy import find_auto_class
from specdistill.targets.frozen import FrozenTarget
from tests.data.rows.templates import (
    CHATML,
    DEEPSEEK,
    GEMMA,
    HARMONY,
    LLAMA3,
    MISTRAL,
    PHI,
    TAGGED,
    THOUGHTS_STRIPPED,
)
from tests.targets.architectures import SIZES

Config = dict[str, Any]
# Sizes of an encoder of pictures, which no text reaches. KEPT stays as published, as it costs
# nothing.
OWN_SIZES = {
    "depth": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [],
}
KEPT = {"max_position_embeddings", "model_max_length"}
# Keys about the weights of a published checkpoint; those of a tiny one are not quantized.
REMOVED = {"quantization_config", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
SURER = (
    4.0  # factor of the head's weights: so few outcomes are likely that a few draws test sampling
)


@dataclass(frozen=True)
class Family:
    """A family of models.

    template: of chats. end: the token that ends an answer.
    """

    template: str
    end: str

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer with one token a byte, and those that the template writes."""
        special = list(dict.fromkeys(["<|pad|>", self.end, *SPECIAL_TOKEN.findall(self.template)]))
        vocabulary = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        tokenizer = Tokenizer(
            models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[])
        )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=self.end,
            pad_token="<|pad|>",
            extra_special_tokens=special[2:],
            clean_up_tokenization_spaces=False,
        )
        fast.chat_template = self.template
        return fast


SPECIAL_TOKEN = re.compile(r"<[^<>\s{}']+>|\[/?INST\]")
# By how the name of a target's folder under recipes/ begins.
FAMILIES = {
    "deepseek": Family(DEEPSEEK, "<｜end▁of▁sentence｜>"),
    "gemma": Family(GEMMA, "<end_of_turn>"),
    "gpt-oss": Family(HARMONY, "<|return|>"),
    "llama": Family(LLAMA3, "<|eot_id|>"),
    "mistral": Family(MISTRAL, "</s>"),
    "pico": Family(TAGGED, "<|end|>"),
    "phi": Family(PHI, "<|im_end|>"),
    "qwen3": Family(THOUGHTS_STRIPPED, "<|im_end|>"),
}
OTHERS = Family(CHATML, "<|im_end|>")


def family_of(name: str) -> Family:
    return next(
        (family for beginning, family in FAMILIES.items() if name.startswith(beginning)), OTHERS
    )


def write_model(
    folder: Path,
    published: Config,
    family: Family,
    *,
    has_layer: bool = False,
    num_layers: int = 4,
    seed: int = 0,
) -> None:
    """Write a checkpoint with a tokenizer, for a published config.json.

    Raises KeyError for a class that transformers does not know. has_layer: whether it has a layer
    that predicts further tokens.
    """
    tokenizer = family.tokenizer()
    config = tiny_config(published, tokenizer, num_layers)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = find_auto_class(config).from_config(config).eval()
        for name, tensor in model.state_dict().items():
            if "norm" in name or "bias" in name:  # these start as a constant
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.get_output_embeddings().weight.data *= SURER
    plain = folder.with_name(f"{folder.name}-plain") if has_layer else folder
    model.save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    if has_layer:
        layer = folder.with_name(f"{folder.name}-layer")
        save_mtp(build_mtp(FrozenTarget.load(str(plain)), init="scratch", seed=seed), layer)
        merge_mtp_weights(layer, plain, folder)


def tiny_config(
    published: Config, tokenizer: PreTrainedTokenizerFast, num_layers: int
) -> PretrainedConfig:
    """Return the config of a tiny model of the same class.

    Raises KeyError for a class that transformers does not know.
    """
    config_class = CONFIG_MAPPING[published["model_type"]]
    # The class adds what the file does not say.
    whole = config_class.from_dict(dict(published)).to_dict()
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return config_class.from_dict(_shrunk(whole, {**ids, "vocab_size": len(tokenizer)}, num_layers))


def _shrunk(config: Config, vocabulary: Config, num_layers: int) -> Config:
    own = {name: _smaller(name, value) for name, value in config.items() if name not in REMOVED}
    own |= {
        name: value
        for name, value in {**vocabulary, "num_hidden_layers": num_layers}.items()
        if name in own
    }
    own |= {
        name: _shrunk(part, vocabulary, num_layers)
        for name, part in own.items()
        if name.endswith("_config") and part
    }
    if own.get("kv_lora_rank"):  # multi-head latent attention has a key for each head
        own |= {
            "num_key_value_heads": SIZES["num_attention_heads"],
            "head_dim": SIZES["qk_rope_head_dim"],
        }
    lists = {name: kinds for name, kinds in own.items() if isinstance(kinds, list)}
    own |= {
        name: _all(kinds, num_layers)
        for name, kinds in lists.items()
        if len(kinds) == config.get("num_hidden_layers")
    }
    # The encoder of pictures says num_heads instead.
    if (rope := own.get("rope_parameters")) and "num_attention_heads" in own:
        own["rope_parameters"] = _rope(rope, config, own)
    return own


def _smaller(name: str, value: Any) -> Any:
    if name in OWN_SIZES:
        return OWN_SIZES[name]
    sized = name in SIZES and name not in KEPT and isinstance(value, int | float)
    return type(value)(SIZES[name]) if sized else value


def _all(kinds: list[Any], num_layers: int) -> list[Any]:
    """Return layers of every kind in turn."""
    return (list(dict.fromkeys(kinds)) * num_layers)[:num_layers]


def _rope(rope: Config, published: Config, own: Config) -> Config:
    """Return the parameters of rotary embeddings for the fewer pairs of smaller heads.

    Layers of different kinds may have parameters of their own.
    """
    if any(isinstance(part, dict) for part in rope.values()):
        return {
            kind: _rope(part, published, own) if isinstance(part, dict) else part
            for kind, part in rope.items()
        }
    before, after = (_head_size(config) for config in (published, own))
    pairs = int(after * rope.get("partial_rotary_factor", 1.0)) // 2
    made = {
        name: value[:pairs] if name.endswith("_factor") and isinstance(value, list) else value
        for name, value in rope.items()
    }
    if sections := rope.get("mrope_section"):
        rest = [section * after // before for section in sections[1:]]
        made["mrope_section"] = [pairs - sum(rest), *rest]
    return made


def _head_size(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
