"""Pico's model card, with its bits per byte on held-out modules and samples of its generations."""

import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specdistill.pico.kneser_ney import KneserNey

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
"""


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, stream: Tensor, num_bytes: int, context: int) -> float:
    """Bits per byte of a stream, in windows of `context` tokens that do not overlap.

    The first token of a window has no context and is not predicted; its bytes are left out in proportion.
    """
    windows = stream[: len(stream) // context * context].view(-1, context)
    nats = 0.0
    for batch in windows.split(16):
        logits = model(input_ids=batch).logits[:, :-1].float()
        nats += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
    predicted = windows.shape[0] * (context - 1)
    return nats / math.log(2) / (num_bytes * predicted / len(stream))


def baseline_bits_per_byte(train_stream: Tensor, stream: Tensor, num_bytes: int, vocab_size: int) -> float:
    """The same measure for a 5-gram model of the same tokens."""
    probabilities = KneserNey(train_stream.numpy(), vocab_size, order=5).probabilities(stream.numpy())
    return float(-torch.from_numpy(probabilities).log2().sum()) / (num_bytes * len(probabilities) / len(stream))


@torch.no_grad()
def continuation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, max_new_tokens: int = 120) -> str:
    """Greedy continuation of a prompt."""
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
    python: str,
) -> None:
    """Measure a saved model and add README.md to its folder."""
    config = model.config
    context = config.max_position_embeddings
    chat = str(tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True))
    card = CARD.format(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        parameters=model.num_parameters(),
        python=python,
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
