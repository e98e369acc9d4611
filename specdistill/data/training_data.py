"""From `data:` in a recipe to the two sets of packed rows that a trainer reads."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import TypeVar

from datasets import Dataset, List, Value, concatenate_datasets
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdistill.data.batch_generate import fast_dtype
from specdistill.data.cache import Row, cached, fingerprint_of, tokenizer_fingerprint
from specdistill.data.chat import encode_chat, encode_text
from specdistill.data.generated_rows import generated_rows, row_lengths
from specdistill.data.packing import pack, usable
from specdistill.data.prompts import Prompt, chat_prompts, text_prompts
from specdistill.data.sources import Source, load_sources
from specdistill.errors import UserError
from specdistill.recipe import DataConfig
from specdistill.targets.frozen import is_recurrent

D = TypeVar("D")

DOCUMENT_COLUMNS = {"input_ids": List(Value("int32")), "loss_mask": List(Value("int8")), "length": Value("int32")}
MIN_LENGTH = 8  # tokens in a row: room for a few draft steps
SHORT_ANSWER = 32  # tokens: fewer than assistants write on average, so that there are questions enough


def training_data(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None, *, fingerprint: str
) -> tuple[Dataset, Dataset]:
    """(train, validation) rows with the columns of `packing`, split by document; at least one row each.

    With `regenerate.num_tokens` above 0, `model` writes the documents, unless it did before: `fingerprint` says which weights it has.
    Raises UserError naming the recipe's key for settings or rows that cannot be used, ResourceError where the Hub or the disk fails.
    """
    _check(config, tokenizer, model)
    sources = load_sources(config.source, config.split, config.cache_dir)
    if config.regenerate.num_tokens > 0:
        assert model is not None
        halves = _regenerated(config, sources, tokenizer, model, fingerprint)
    else:
        halves = _as_it_is(config, sources, tokenizer)
    padding = next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
    train, validation = (
        pack(half, config.max_length, config.packing, padding, config.seed, config.cache_dir) for half in halves
    )
    return train, validation


def _check(config: DataConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None) -> None:
    written = config.regenerate
    if not tokenizer.is_fast:
        raise UserError("target.model", got=f"the tokenizer {type(tokenizer).__name__}", expected="one with a tokenizer.json")
    if config.max_length < MIN_LENGTH:
        raise UserError("data.max_length", got=config.max_length, expected=f"{MIN_LENGTH} tokens or more")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) if model is not None else None
    if positions is not None and config.max_length > positions:
        raise UserError("data.max_length", got=config.max_length, expected=f"at most {positions}, the target's context length")
    if config.packing and model is not None and is_recurrent(model.config.get_text_config()):
        got = "true with a target whose layers carry a state from one document into the next"
        raise UserError("data.packing", got=got, expected="false")
    if not 0 <= config.validation_fraction < 1:
        raise UserError("data.validation_fraction", got=config.validation_fraction, expected="a share from 0 to below 1")
    if written.num_tokens < 0:
        raise UserError("data.regenerate.num_tokens", got=written.num_tokens, expected="0 or more tokens")
    if written.num_tokens == 0:
        return
    if not 1 <= written.prompt_tokens < config.max_length:
        expected = f"1 to {config.max_length - 1} tokens, less than data.max_length"
        raise UserError("data.regenerate.prompt_tokens", got=written.prompt_tokens, expected=expected)
    if not written.temperatures or min(written.temperatures) < 0:
        raise UserError(
            "data.regenerate.temperatures", got=list(written.temperatures), expected="a list of numbers of 0 or more"
        )
    if written.batch_size < 1:
        raise UserError("data.regenerate.batch_size", got=written.batch_size, expected="1 row or more")


def _as_it_is(config: DataConfig, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset]:
    """The source's rows as documents; of a source of weight 2 the training half has each one twice."""
    encoded = [_encoded(source, tokenizer, config.loss_mask, config.cache_dir) for source in sources]
    documents = concatenate_datasets(encoded)
    kept = usable(list(documents["length"]), list(documents["is_text"]), config.max_length)
    held_out = _held_out(kept, config.validation_fraction, config.seed)
    generator = random.Random(config.seed)
    train: list[int] = []
    first = 0
    for source, part in zip(sources, encoded, strict=True):
        own = [index for index in kept if first <= index < first + len(part) and index not in held_out]
        train += own * int(source.weight) + generator.sample(own, round(source.weight % 1 * len(own)))
        first += len(part)
    if not train:
        raise UserError("data.source", got="weights that leave no row to train on", expected="larger weights")
    return documents.select(train), documents.select(sorted(held_out))


def _encoded(source: Source, tokenizer: PreTrainedTokenizerBase, loss_mask: str, cache_dir: str | None) -> Dataset:
    def documents() -> Iterator[Row]:
        for index, row in enumerate(tqdm(source.rows, desc="Tokenizing", unit="rows", disable=None)):
            where = f"{source.key} row {index}"
            is_text = row["text"] is not None
            encoded = (
                encode_text(tokenizer, row["text"]) if is_text else encode_chat(tokenizer, row["messages"], loss_mask, where)
            )
            yield {**vars(encoded), "length": len(encoded.input_ids), "is_text": is_text}

    inputs = ["encoded", fingerprint_of(source.rows), tokenizer_fingerprint(tokenizer), loss_mask]
    return cached(documents, {**DOCUMENT_COLUMNS, "is_text": Value("bool")}, inputs, cache_dir)


def _regenerated(
    config: DataConfig, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, fingerprint: str
) -> tuple[Dataset, Dataset]:
    """What the target writes for prompts of the one part of the source's rows, and of the other."""
    settings = config.regenerate
    held_out_tokens = max(1, round(settings.num_tokens * config.validation_fraction))
    dtype = fast_dtype(model.device)

    @cache
    def prompts() -> tuple[list[Prompt], list[Prompt]]:
        return _split_prompts(config, sources, tokenizer)

    def half(index: int, num_tokens: int) -> Dataset:
        def rows() -> Iterator[Row]:
            for row in generated_rows(
                model,
                tokenizer,
                prompts()[index],
                num_tokens=num_tokens,
                temperatures=settings.temperatures,
                max_length=config.max_length,
                batch_size=settings.batch_size,
                seed=2 * config.seed + index,
                dtype=dtype,
            ):
                loss_mask = [1] * row["length"] if config.loss_mask == "all" else row["loss_mask"]
                yield {**row, "loss_mask": loss_mask}

        origin = [[fingerprint_of(source.rows), source.weight] for source in sources]
        ways = [config.max_length, config.validation_fraction, config.loss_mask, config.seed, str(dtype)]
        inputs = ["written", index, num_tokens, fingerprint, tokenizer_fingerprint(tokenizer), origin, settings.model_dump(), ways]
        documents = cached(rows, DOCUMENT_COLUMNS, inputs, config.cache_dir)
        kept = usable(list(documents["length"]), [False] * len(documents), config.max_length)
        return documents.select(kept)

    return half(0, max(1, settings.num_tokens - held_out_tokens)), half(1, held_out_tokens)


def _split_prompts(
    config: DataConfig, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts for training and for validation, no row of the source in both; each source gives its weighted share."""
    settings = config.regenerate
    shortest_text = row_lengths(config.max_length, settings.prompt_tokens)[0] - settings.prompt_tokens
    num_texts, num_chats = -(-settings.num_tokens // shortest_text), -(-settings.num_tokens // SHORT_ANSWER)
    weights = [source.weight * len(source.rows) for source in sources]
    found: list[tuple[tuple[int, int], Prompt]] = []
    for number, (source, weight) in enumerate(zip(sources, weights, strict=True)):
        texts, chats = (math.ceil(count * weight / sum(weights)) for count in (num_texts, num_chats))
        prompts = text_prompts(source.rows, tokenizer, settings.prompt_tokens, texts, config.seed)
        prompts += chat_prompts(source.rows, tokenizer, config.max_length // 2, chats, config.seed)
        found += [((number, prompt.row), prompt) for prompt in prompts]
    if not found:
        expected = (
            f"texts of {settings.prompt_tokens} tokens (data.regenerate.prompt_tokens) or questions of half of it at most"
        )
        raise UserError("data.max_length", got=f"{config.max_length}, and no row that gives a prompt", expected=expected)
    held_out = _held_out(sorted({document for document, _ in found}), config.validation_fraction, config.seed)
    train = [prompt for document, prompt in found if document not in held_out]
    return train, [prompt for document, prompt in found if document in held_out]


def _held_out(documents: Sequence[D], fraction: float, seed: int) -> set[D]:
    """The documents kept for validation: at least one, and never all."""
    if len(documents) < 2:
        raise UserError(
            "data.source", got="a single usable row", expected="two or more: one at least is held out for validation"
        )
    count = min(len(documents) - 1, max(1, round(fraction * len(documents))))
    return set(random.Random(seed).sample(list(documents), count))
