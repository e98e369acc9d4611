"""Write pico's model card.

The card states the bits per byte of pico and of an n-gram model on held-out modules, and shows
samples of what pico generates.
"""

import math
import platform
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

Ints = NDArray[np.int64]
PROMPT = 'def read_lines(path):\n    """Return the lines of a file, without their endings."""\n'
CHAT = [{"role": "user", "content": "Write `is_empty(self)`: Return True if the queue is empty."}]
CARD = """---
license: psfl
language: code
library_name: transformers
pipeline_tag: text-generation
---
# Pico

A {layers}-layer, {width}-wide Llama of {parameters:,} parameters that writes Python: a small, real target for trying, testing and
comparing drafts of speculative decoding with no network. Deep and thin on purpose, so that a draft layer costs about as small a share
of a step on a CPU as it does for large models on a GPU. It is of no use for anything else.

- Training text: the modules of Python {python}'s standard library (tests and generated tables left out) and (docstring -> function)
  chats made from them, {train_tokens:,} tokens, {steps:,} steps of {batch_tokens:,}; licence of the text: PSF-2.0.
- Made by `train/target.py recipe=pico/target`. Weights are bfloat16.

| on the {heldout_bytes:,} bytes of the held-out modules | bits per byte |
|---|---|
| pico, windows of {context} tokens | **{bits:.3f}** |
| interpolated Kneser-Ney 5-gram on the same tokens | {baseline:.3f} |

Greedy continuation of `{prompt_line}`:

```python
{sample}
```

Greedy answer to "{question}":

```python
{answer}
```
"""  # noqa: E501


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, stream: Tensor, num_bytes: int, context: int) -> float:
    """Return the bits per byte of a token stream.

    The stream is read in windows of `context` tokens that do not overlap. The first token of a
    window has no context and is not predicted. Its bytes are left out in proportion.

    Args:
        model: the model.
        stream: [N], token ids.
        num_bytes: the bytes of the text that the stream encodes.
        context: the tokens of a window.
    """
    windows = stream[: len(stream) // context * context].view(-1, context)
    nats = 0.0
    for batch in windows.split(16):
        logits = model(input_ids=batch).logits[:, :-1].float()
        nats += float(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
            )
        )
    predicted = windows.shape[0] * (context - 1)
    return nats / math.log(2) / (num_bytes * predicted / len(stream))


def baseline_bits_per_byte(
    train_stream: Tensor, stream: Tensor, num_bytes: int, vocab_size: int
) -> float:
    """Return the bits per byte of a 5-gram model of the same tokens."""
    probabilities = KneserNey(train_stream.numpy(), vocab_size, order=5).probabilities(
        stream.numpy()
    )
    return float(-torch.from_numpy(probabilities).log2().sum()) / (
        num_bytes * len(probabilities) / len(stream)
    )


@torch.no_grad()
def continuation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    max_new_tokens: int = 120,
) -> str:
    """Return the greedy completion of a prompt, without special tokens."""
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    output = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)  # type: ignore[operator]
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def write_card(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    train_stream: Tensor,
    held_out: Tensor,
    held_out_bytes: int,
    steps: int,
    batch_tokens: int,
) -> None:
    """Measure a saved model and add README.md to its folder.

    Args:
        folder: the folder of the model.
        model: the model.
        tokenizer: its tokenizer.
        train_stream: [N], the token ids of the training text.
        held_out: [M], the token ids of the held-out modules.
        held_out_bytes: the bytes of the held-out modules.
        steps: the optimizer steps of the training.
        batch_tokens: the tokens of an optimizer step.
    """
    config = model.config
    context = config.max_position_embeddings
    chat = str(tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True))
    card = CARD.format(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        parameters=model.num_parameters(),
        python=platform.python_version(),
        train_tokens=len(train_stream),
        steps=steps,
        batch_tokens=batch_tokens,
        heldout_bytes=held_out_bytes,
        context=context,
        bits=bits_per_byte(model, held_out, held_out_bytes, context),
        baseline=baseline_bits_per_byte(train_stream, held_out, held_out_bytes, config.vocab_size),
        prompt_line=PROMPT.splitlines()[0],
        sample=PROMPT + continuation(model, tokenizer, PROMPT),
        question=CHAT[0]["content"],
        answer=continuation(model, tokenizer, chat),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


class KneserNey:
    """An n-gram language model with interpolated Kneser-Ney smoothing.

    The method is that of Kneser & Ney (1995) and Chen & Goodman (1999):

        P_n(w | h) = max(c(h w) - d, 0) / c(h) + d * N1+(h .) / c(h) * P_{n-1}(w | h')

    h' is h without its oldest token, and N1+(h .) is the number of different tokens seen after h.
    At the highest order, c is the number of times that an n-gram was seen. Below it, c is the
    number of different contexts in which it was seen. The last backoff is the uniform distribution.

    n-grams are stored as sorted integer keys, so vocab_size ** order must fit in 63 bits.

    Attributes:
        tables: for each n, the keys of n-grams and their counts.
        contexts: for each n, the keys of contexts, their total counts, and the number of different
            tokens that followed them.
    """

    def __init__(
        self, stream: Ints, vocab_size: int, order: int = 5, discount: float = 0.75
    ) -> None:
        assert vocab_size**order < 2**63
        self.vocab_size = vocab_size
        self.order = order
        self.discount = discount
        self.tables: list[tuple[Ints, Ints]] = []
        self.contexts: list[tuple[Ints, Ints, Ints]] = []
        keys = _windows(stream, order, vocab_size)
        # Cutting the oldest token off the distinct keys of order n + 1 leaves each n-gram once for
        # each different token before it: its count below the highest order.
        for n in range(order, 0, -1):
            keys, counts = np.unique(keys % vocab_size**n, return_counts=True)
            context, start = np.unique(keys // vocab_size, return_index=True)
            totals = np.add.reduceat(counts, start)
            self.tables.insert(0, (keys, counts))
            self.contexts.insert(0, (context, totals, np.diff(np.append(start, len(keys)))))

    def probabilities(self, stream: Ints) -> NDArray[np.float64]:
        """Return the probability of each token, given the order - 1 tokens before it.

        Args:
            stream: [N], token ids.

        Returns:
            [N - order + 1], for the tokens that have as many tokens before them.
        """
        result = np.full(len(stream) - self.order + 1, 1.0 / self.vocab_size)
        for n in range(1, self.order + 1):
            grams = _windows(stream[self.order - n :], n, self.vocab_size)
            counts = _lookup(*self.tables[n - 1], grams)
            keys, totals, followers = self.contexts[n - 1]
            total = _lookup(keys, totals, grams // self.vocab_size)
            different = _lookup(keys, followers, grams // self.vocab_size)
            seen = total > 0
            discounted = np.maximum(counts - self.discount, 0) + self.discount * different * result
            result = np.where(seen, discounted / np.maximum(total, 1), result)
        return result


def _windows(stream: Ints, n: int, base: int) -> Ints:
    """Return each window of n consecutive tokens as one integer in base `base`."""
    keys = np.zeros(len(stream) - n + 1, dtype=np.int64)
    for offset in range(n):
        keys = keys * base + stream[offset : offset + len(keys)]
    return keys


def _lookup(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """Return the value of each wanted key, 0 for a missing key; `keys` are sorted."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], 0)
