"""Pico: a small, deep and thin Llama that generates Python, shipped with the package so that everything runs offline: its corpus,
tokenizer, shape and training rows. `train/target.py` trains it.

Deep and thin on purpose: one draft layer then costs about a tenth of a target step on a CPU, as it does for real models on a GPU.

The corpus is the source text of Python's standard library, as raw modules and as chats. Every Python installation carries it, so pico can
be trained, distilled for and measured with no network. Modules are split into `train` and `validation` by a hash of their path, so that a
module's split does not depend on the others. Generated tables (`encodings`, `pydoc_data`) and tests are left out. Licence of the text:
PSF-2.0.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from specdistill.errors import UserError, nearest

Split = Literal["train", "validation"]

EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
MAX_MODULE_BYTES = 200_000
VALIDATION_SHARE = 16  # one module in this many is held out
MAX_CHAT_CHARACTERS = 1_600
END_OF_TEXT, USER, ASSISTANT, END_OF_TURN = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
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


@dataclass(frozen=True)
class Module:
    """One standard-library module: its path relative to the library, as `json/decoder.py`, and its text."""

    name: str
    text: str


def rows(split: str) -> tuple[str, Callable[[], Iterator[dict[str, Any]]]]:
    """The source `pico` of `specdistill.produce.sources`: a fingerprint of a split's text, and what yields its rows."""
    if split not in get_args(Split):
        raise UserError("data.split", got=split, expected=" or ".join(get_args(Split)), nearest=nearest(split, get_args(Split)))
    modules = standard_library(split)  # type: ignore[arg-type]

    def texts_and_chats() -> Iterator[dict[str, Any]]:
        for module in modules:
            yield {"text": module.text, "messages": None}
        for messages in chats(modules):
            yield {"text": None, "messages": messages}

    return hashlib.sha256("\0".join(module.text for module in modules).encode()).hexdigest(), texts_and_chats


def split_of(name: str) -> Split:
    """The split of a module, by its name alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return "validation" if int.from_bytes(digest[:4], "big") % VALIDATION_SHARE == 0 else "train"


def standard_library(split: Split, root: Path | None = None) -> list[Module]:
    """The modules of one split, sorted by name. `root` defaults to the running interpreter's library."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts) or split_of(relative.as_posix()) != split:
            continue
        raw = path.read_bytes()
        if not 0 < len(raw) <= MAX_MODULE_BYTES:
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue  # a handful of modules declare another encoding; the corpus is UTF-8 only
        modules.append(Module(relative.as_posix(), text))
    return modules


def chats(modules: list[Module]) -> list[list[dict[str, str]]]:
    """(docstring -> function) conversations: the user gives a signature and a summary, the assistant the function."""
    return [
        [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
        for module in modules
        for request, answer in documented_functions(module.text)
        if len(request) + len(answer) <= MAX_CHAT_CHARACTERS
    ]


def documented_functions(source: str) -> Iterator[tuple[str, str]]:
    """Yield (request, source without the docstring) for each function of a module that has a docstring and a body."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        summary = " ".join(docstring.split("\n\n")[0].split())
        head = lines[node.lineno - 1 : node.body[0].lineno - 1]
        body = lines[node.body[0].end_lineno or node.body[0].lineno : node.end_lineno]
        columns = node.col_offset
        code = "\n".join(line[columns:] if not line[:columns].strip() else line for line in [*head, *body]).rstrip()
        yield f"Write `{node.name}({ast.unparse(node.args)})`: {summary}", code


def train_tokenizer(texts: Iterable[str], vocab_size: int, context_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with GPT-2's word boundaries (so that llama.cpp knows it), special tokens first, no unknown token."""
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
    tokenizer: PreTrainedTokenizerFast, num_layers: int, hidden_size: int, intermediate_size: int, context_length: int
) -> LlamaConfig:
    """Heads are 64 wide (below 80, vLLM's CPU build supports only 32 and 64), one key/value head for two query heads."""
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
    """Raw modules and rendered chats of one split, each with the end-of-text token, in the order of a hash of their text."""
    modules = standard_library(split)
    texts = [module.text for module in modules]
    texts += [str(tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats(modules)]
    return sorted((text + END_OF_TEXT for text in texts), key=lambda text: hashlib.sha256(text.encode()).digest())


def token_stream(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """All documents end to end: [N] int64."""
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor(list(chain.from_iterable(ids)), dtype=torch.long)


def curriculum(
    stream: Tensor, num_steps: int, batch_tokens: int, lengths: list[int], shares: list[float], seed: int
) -> Iterator[Tensor]:
    """`num_steps` batches [rows, length] of equal token count: short rows first, because they train faster, long rows at the end.

    shares: of the steps, for each length. Every epoch cuts the stream at another offset and shuffles the rows.
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
