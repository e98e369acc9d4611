"""Build pico's tokenizer, its config and its training batches.

Pico is a small Llama that generates Python. The package contains it, so that everything runs
offline. Its texts are the modules of `specdistill.data.produce.pico`, and `train/target.py` trains
it. Pico is deep and thin, so that a draft layer costs about a tenth of a target step on a CPU, as
it does for large models on a GPU.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from specdistill.data.produce.pico import Split, build_chats, load_standard_library

END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = [END_OF_TEXT, USER, ASSISTANT, END_OF_TURN]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "<|assistant|>\n{% generation %}{{ message.content }}<|end|>{% endgeneration %}\n"
    "{%- else -%}"
    "<|user|>\n{{ message.content }}<|end|>\n"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>\n{% endif -%}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, context_length: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer.

    It has GPT-2's word boundaries, which llama.cpp supports. Its first tokens are the special ones,
    and it has no unknown token.

    Args:
        texts: the training texts.
        vocab_size: the number of tokens, the special ones included.
        context_length: the longest sequence in tokens, which the tokenizer states.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        extra_special_tokens=SPECIAL_TOKENS[1:],
        clean_up_tokenization_spaces=False,
        model_max_length=context_length,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def llama_config(
    tokenizer: PreTrainedTokenizerFast,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    context_length: int,
) -> LlamaConfig:
    """Return pico's config.

    Attention heads are 64 wide: below 80, vLLM's CPU build supports only 32 and 64. Two query heads
    share a key/value head.
    """
    head_dim = 64
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // head_dim,
        num_key_value_heads=max(1, hidden_size // head_dim // 2),
        head_dim=head_dim,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids([END_OF_TEXT, END_OF_TURN]),
        pad_token_id=tokenizer.pad_token_id,
    )


def documents(split: Split, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the modules and rendered chats of a split, shuffled by a hash of their text.

    Each text ends with the end-of-text token.
    """
    modules = load_standard_library(split)
    texts = [module.text for module in modules]
    texts += [
        str(tokenizer.apply_chat_template(chat, tokenize=False)) for chat in build_chats(modules)
    ]
    return sorted(
        (text + END_OF_TEXT for text in texts),
        key=lambda text: hashlib.sha256(text.encode()).digest(),
    )


def token_stream(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the token ids of all texts, one after the other: [N] int64."""
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor(list(chain.from_iterable(ids)), dtype=torch.long)


def curriculum(
    stream: Tensor,
    num_steps: int,
    batch_tokens: int,
    lengths: list[int],
    shares: list[float],
    seed: int,
) -> Iterator[Tensor]:
    """Yield one batch of token ids per training step, with short rows first.

    Short rows train faster, and long rows at the end teach the whole context. Every epoch cuts the
    stream at another offset and shuffles the rows.

    Args:
        stream: [N], the token ids of all texts.
        num_steps: the number of batches.
        batch_tokens: the tokens of each batch.
        lengths: the row lengths, in the order in which they are trained.
        shares: the share of the steps with each row length; their sum is 1.
        seed: seeds the offsets and the shuffles.

    Yields:
        [batch_tokens // length, length] int64.
    """
    generator = torch.Generator().manual_seed(seed)
    bounds = [round(num_steps * sum(shares[: i + 1])) for i in range(len(shares))]
    step = 0
    for length, bound in zip(lengths, bounds, strict=True):
        rows = batch_tokens // length
        while step < bound:
            offset = int(torch.randint(length, (), generator=generator))
            usable = (len(stream) - offset) // length * length
            epoch = stream[offset : offset + usable].view(-1, length)
            epoch = epoch[torch.randperm(len(epoch), generator=generator)]
            for batch in epoch[: len(epoch) // rows * rows].view(-1, rows, length):
                if step == bound:
                    break
                yield batch
                step += 1
