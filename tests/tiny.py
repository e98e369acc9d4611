"""Tiny random models and tokenizers, for tests that need no trained target."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specdistill.targets.frozen import FrozenTarget

# Keys of a training of two steps, which evaluates and saves at its end.
SMALL = (
    "train.max_steps=2",
    "train.per_device_train_batch_size=4",
    "train.learning_rate=1e-3",
    "train.eval_strategy=steps",
    "train.eval_steps=2",
    "train.save_steps=2",
    "train.load_best_model_at_end=true",
    "train.metric_for_best_model=acceptance_length",
    "train.report_to=none",
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]


def tiny_target_model(
    num_layers: int = 4, hidden_size: int = 64, vocab_size: int = 260, seed: int = 0
) -> LlamaForCausalLM:
    """Return a random Llama with heads of 32 and twice as many query as key/value heads.

    Its greedy output neither ends nor repeats at once.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=max(1, hidden_size // 64),
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def qwen() -> Qwen3ForCausalLM:
    """Return a random model with tied embeddings and norms on queries and keys.

    It has layers of two kinds, and two groups of two heads.
    """
    config = Qwen3Config(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=[
            "full_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).eval()


def tiny_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte after the special ones; 260 in all."""
    vocabulary = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        extra_special_tokens=SPECIAL_TOKENS[1:],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return fast


def packed_rows(rows: Sequence[Sequence[int]]) -> Dataset:
    """Return rows of token ids as training reads them.

    Each row is one document, with a loss at every token.
    """
    columns = {
        "input_ids": [list(row) for row in rows],
        "loss_mask": [[1] * len(row) for row in rows],
        "document_ids": [[0] * len(row) for row in rows],
        "position_ids": [list(range(len(row))) for row in rows],
    }
    return Dataset.from_dict(columns)


def write_target(folder: Path, **sizes: int) -> Path:
    """Write a tiny target into a folder, and return the folder."""
    tiny_target_model(**sizes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_adapter(folder: Path, base: str, *, model: Any = None, **sizes: Any) -> Any:
    """Save a LoRA adapter with updates that are not zero, and return the adapted model."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model or tiny_target_model(**sizes), config)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
    adapted.peft_config["default"].base_model_name_or_path = base
    # "auto" would ask the Hub about the base.
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted.eval()


def write_inputs(folder: Path, num_rows: int = 60, **sizes: int) -> list[str]:
    """Write a tiny target and texts to train on, and return the keys of a recipe that name them."""
    write_target(folder / "model", **sizes)
    rows = [
        json.dumps({"text": f"Row {index} says {index * 7} and then again {index * 7}."})
        for index in range(num_rows)
    ]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return input_keys(folder)


def input_keys(folder: Path) -> list[str]:
    return [
        f"target.model={folder / 'model'}",
        f"data.source={folder / 'rows.jsonl'}",
        f"data.cache_dir={folder / 'cache'}",
        "data.max_length=64",
        "data.validation_fraction=0.1",
        "data.decontaminate=[]",
    ]


def twins() -> FrozenTarget:
    """Return a target whose every choice is a near-tie.

    The tokens of the vocabulary's second half are twins of those of the first, a few roundings
    apart.
    """
    model = tiny_target_model()
    model.generation_config.eos_token_id = []
    head = model.lm_head.weight.data
    noise = torch.rand(head[130:].shape, generator=torch.Generator().manual_seed(1)) - 0.5
    head[130:] = head[:130] * (1 + 4 * torch.finfo(torch.float32).eps * noise)
    return FrozenTarget(model, tiny_tokenizer(), name="twins")
