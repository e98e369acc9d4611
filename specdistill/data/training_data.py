"""From `data:` in a recipe to the two sets of packed rows that a trainer reads."""

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
from datasets import Dataset, Value, concatenate_datasets
from datasets.config import HF_DATASETS_CACHE
from datasets.distributed import split_dataset_by_node
from datasets.fingerprint import Hasher
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdistill.command import check_writable
from specdistill.cost import PREPARED_BYTES, Cost, announce
from specdistill.data.answers import VERSION, Answers
from specdistill.data.batch_generate import fast_dtype
from specdistill.data.cache import SHOWN, Columns, Row, array, cached, content_fingerprint, mapped, tokenizer_fingerprint
from specdistill.data.cleaning.left_out import cleaned
from specdistill.data.completion_server import CompletionServer
from specdistill.data.encoding import DOCUMENT_COLUMNS, ENCODED_COLUMNS, Encoder
from specdistill.data.held_out import by_hash, by_sample, row_hashes
from specdistill.data.packing import pack, pad_token_id, usable
from specdistill.data.regeneration import (
    Prompt,
    chat_prompts,
    end_token_ids,
    generated_rows,
    generating,
    row_lengths,
    text_prompts,
)
from specdistill.data.self_prompts import Generate, Opening, by_servers, in_process, room_for_prompts, self_prompts
from specdistill.data.served import Tokenizer, served_rows, tasks
from specdistill.data.sources import COLUMNS, Source, SourceEntry, load_sources
from specdistill.data.streaming import PackedStream, beginning, open_stream
from specdistill.errors import UserError
from specdistill.processes import Crew, agree, are_several, first_on_each_machine, share
from specdistill.recipe.sections import DataConfig
from specdistill.targets.packed_rows import packing
from specdistill.targets.sharding import is_shared

logger = logging.getLogger(__name__)

LONG_ANSWER = 200  # tokens, or half a row: each of the target's own prompts is taken to give so many
SHORT_ANSWER = 32  # tokens, fewer than an answer has on average, so that there are enough questions


def training_data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel | None,
    *,
    fingerprint: str,
    measured_on: Sequence[str] = (),
) -> tuple[Dataset | PackedStream, Dataset]:
    """(train, validation) rows with the columns of `packing`, split by document; at least one row each. With `streaming` the first are this
    process's share of a stream.

    With `regenerate.num_tokens` above 0 `model` generates the documents, once for each `fingerprint` of its weights. Of several processes
    the first on each machine prepares them, and the others read what it has kept. measured_on: suites that the draft will be measured on,
    whose prompts `data.decontaminate` keeps out.
    Raises UserError naming the recipe's key for settings or rows that cannot be used, and for machines whose rows or weights differ;
    ResourceError when the Hub or the disk fails.
    """
    _check(config, tokenizer, model)
    agree({"weights of target.model": fingerprint[:SHOWN]})
    in_process = config.regenerate.num_tokens > 0 and not config.regenerate.server
    with ExitStack() as stack:
        work = stack.enter_context(generating(model)) if in_process and model is not None else None
        crew = stack.enter_context(first_on_each_machine("preparing the training data", work))
        if config.streaming:
            source, preparation = open_stream(config, tokenizer, measured_on)
            documents = beginning(source, preparation, config.cache_dir)
        else:
            documents = training_documents(
                config, tokenizer, model, fingerprint=fingerprint, measured_on=measured_on, crew=crew
            )
        train, validation = packed(documents, config, tokenizer)
    if are_several():
        rows = {"training rows": content_fingerprint(train), "validation rows": content_fingerprint(validation)}
        agree(rows, otherwise=": prepare on one machine, and copy data.cache_dir")
    if config.streaming:
        made_with = [train._fingerprint, validation._fingerprint, config.model_dump(exclude={"cache_dir"})]
        own = split_dataset_by_node(source, *share())
        return PackedStream(own, preparation, config.buffer_size, train, str(Hasher.hash(made_with))), validation
    return train, validation


def training_documents(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel | None,
    *,
    fingerprint: str,
    measured_on: Sequence[str] = (),
    crew: Crew | None = None,
) -> tuple[Dataset, Dataset]:
    """(train, validation) documents before they are packed, from the cache where they were made before. crew: generates them in process;
    None: this process alone. Of a stream they are those of its beginning.

    Columns: `input_ids`; `loss_mask`, 1 where a token carries loss; `length` in tokens; `source`, its place in data.source.
    """
    if crew is None:  # with one all processes have checked, of which a target that they share needs every one
        _check(config, tokenizer, model)
    if config.streaming:
        return beginning(*open_stream(config, tokenizer, measured_on), config.cache_dir)
    if config.regenerate.num_tokens == 0:
        return _from_source(config, _sources(config, measured_on), tokenizer)
    assert model is not None
    if config.regenerate.server:
        words = Words(tokenizer, tuple(end_token_ids(model, tokenizer)), str(model.name_or_path))
        return served_data(config, words, fingerprint=fingerprint, measured_on=measured_on)
    with generating(model) as work:
        return _regenerated(config, measured_on, tokenizer, model, fingerprint, crew or Crew(work))


def packed(
    documents: tuple[Dataset, Dataset], config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset, Dataset]:
    """Both halves as rows with the columns of `packing`."""
    shape = config.max_length, config.packing, pad_token_id(tokenizer), config.seed, config.cache_dir, config.num_proc
    train, validation = (pack(part, *shape) for part in documents)
    return train, validation


def _sources(
    config: DataConfig, measured_on: Sequence[str], own_prompts: Callable[[SourceEntry, str], Dataset] | None = None
) -> list[Source]:
    loaded = load_sources(
        config.source,
        config.split,
        config.cache_dir,
        columns=config.columns,
        num_proc=config.num_proc,
        own_prompts=own_prompts,
    )
    return cleaned(loaded, config.decontaminate, config.near_duplicates, measured_on, config.cache_dir)


def _check(config: DataConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None) -> None:
    check_writable(_cache(config), "data.cache_dir")
    prompt_tokens = config.regenerate.prompt_tokens
    if not tokenizer.is_fast:
        raise UserError("target.model", got=f"the tokenizer {type(tokenizer).__name__}", expected="one with a tokenizer.json")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) if model is not None else None
    if positions is not None and config.max_length > positions:
        raise UserError("data.max_length", got=config.max_length, expected=f"at most {positions}, the target's context length")
    if config.packing and model is not None and packing(model) is None:
        got = "true with a target whose layers read one document into the next"
        raise UserError("data.packing", got=got, expected="false")
    if config.streaming and config.regenerate.num_tokens > 0:
        got = f"{config.regenerate.num_tokens} with data.streaming=true"
        expected = "0, which trains on the source as it is, or data.streaming=false"
        raise UserError("data.regenerate.num_tokens", got=got, expected=expected)
    if config.regenerate.num_tokens > 0 and prompt_tokens >= config.max_length:
        expected = f"1 to {config.max_length - 1} tokens, less than data.max_length"
        raise UserError("data.regenerate.prompt_tokens", got=prompt_tokens, expected=expected)


def _from_source(config: DataConfig, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset]:
    """(train, validation) documents: the source's rows. Training has each row of a source of weight 2 twice."""
    documents = concatenate_datasets([_encoded(source, number, tokenizer, config) for number, source in enumerate(sources)])
    lengths, is_text, number, row = (array(documents, name) for name in ("length", "is_text", "source", "row"))
    indices = usable(lengths, is_text, config.max_length)
    # Of a row that was cut all documents are on one side.
    rows, row_of = np.unique(_first_rows(sources)[number[indices]] + row[indices], return_inverse=True)
    is_held_out = np.isin(row_of, sorted(_held_out(rows, sources, config)))
    generator = random.Random(config.seed)
    train: list[int] = []
    for place, source in enumerate(sources):
        own = indices[(number[indices] == place) & ~is_held_out].tolist()
        train += own * int(source.weight) + generator.sample(own, round(source.weight % 1 * len(own)))
    if not train:
        raise UserError("data.source", got="weights that leave no row to train on", expected="larger weights")
    return documents.select(train), documents.select(indices[is_held_out])


def _encoded(source: Source, number: int, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Dataset:
    encoder = Encoder(tokenizer, config.loss_mask, config.max_length, source.key, number)
    if source.rows.data.column("messages").null_count < len(source.rows):
        encoder.prove()
    how = [config.loss_mask, config.max_length]
    inputs = ["encoded", source.rows._fingerprint, number, tokenizer_fingerprint(tokenizer), how]
    what, num_proc, cache_dir = "Tokenizing", config.num_proc, config.cache_dir
    said = _announced(f"preparing {source.key}", config)
    encoded = mapped(
        source.rows,
        encoder,
        ENCODED_COLUMNS,
        inputs,
        what=what,
        num_proc=num_proc,
        cache_dir=cache_dir,
        sampled=partial(_sampled, said),
    )
    _, num_documents = np.unique(array(encoded, "row"), return_counts=True)
    if num_cut := int((num_documents > 1).sum()):
        told = "%s: %d of %d rows are conversations longer than data.max_length=%d tokens and are cut at their turns"
        logger.warning(told, source.key, num_cut, len(source.rows), config.max_length)
    return encoded


def _sampled(announced: Callable[[Cost, str], None], made: Columns, rows: int, of: int, seconds: float) -> None:
    """Tells what preparing `of` rows costs, from what the first `rows` of them gave in so many seconds."""
    tokens = sum(made["length"])
    loss_tokens = sum(int(sum(mask)) for mask in made["loss_mask"])
    sample = Cost(len(made["length"]), tokens, loss_tokens, PREPARED_BYTES * tokens, seconds)
    announced(sample.times(of / rows), f"the first {rows:,} rows")


def _regenerated(
    config: DataConfig,
    measured_on: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    fingerprint: str,
    crew: Crew,
) -> tuple[Dataset, Dataset]:
    """(train, validation) documents: generations of the target from prompts of two disjoint parts of the source's rows."""
    settings = config.regenerate
    held_out_tokens = max(1, round(settings.num_tokens * config.validation_fraction))
    model_inputs = [fingerprint, str(fast_dtype(model.device)), tokenizer_fingerprint(tokenizer)]
    name, ends = str(model.name_or_path), end_token_ids(model, tokenizer)

    def own_prompts(entry: SourceEntry, key: str) -> Dataset:
        def generate(answers: Answers, end_ids: Sequence[int]) -> Generate:
            _check_generates(model, settings.num_tokens)
            size, seed = settings.batch_size, config.seed
            return in_process(crew, answers, end_ids, entry.temperature, name=name, batch_size=size, seed=seed)

        made_with = [*model_inputs, settings.batch_size]
        return _own_prompts(config, entry, key, Words(tokenizer, tuple(ends), name), made_with, generate)

    sources = _sources(config, measured_on, own_prompts)

    @cache
    def prompts() -> tuple[list[Prompt], list[Prompt]]:
        return _split_prompts(config, sources, tokenizer)

    def part(index: int, num_tokens: int) -> Dataset:
        def rows() -> Iterator[Row]:
            _check_generates(model, settings.num_tokens)
            with Answers(_folder(config, model_inputs)) as answers:
                yield from generated_rows(
                    crew,
                    answers,
                    prompts()[index],
                    num_tokens,
                    settings.temperatures,
                    config.max_length,
                    settings.batch_size,
                    seed=2 * config.seed + index,
                    end_ids=ends,
                    name=name,
                    loss_mask=config.loss_mask,
                    announced=_announced("generating", config, is_told=index == 0),
                )

        row_inputs = [[source.rows._fingerprint, source.weight] for source in sources]
        shape = [config.max_length, config.validation_fraction, config.validation_split, config.loss_mask, config.seed]
        how = settings.model_dump(include={"num_tokens", "prompt_tokens", "temperatures", "batch_size"})
        inputs = ["generated", index, num_tokens, model_inputs, row_inputs, shape, how]
        documents = cached(rows, DOCUMENT_COLUMNS, inputs, config.cache_dir)
        return documents.select(usable(array(documents, "length"), False, config.max_length))

    return part(0, max(1, settings.num_tokens - held_out_tokens)), part(1, held_out_tokens)


def _check_generates(model: PreTrainedModel, num_tokens: int) -> None:
    """Each process generates batches of its own, with layers in memory."""
    if is_shared(model) or any(weight.is_meta for weight in model.parameters()):
        why = "target.shard" if is_shared(model) else "hidden_states.mode=offline"
        got = f"{num_tokens} with {why}, and no rows that were generated before"
        expected = "0, or `specdistill data` first, with target.shard=none in one process"
        raise UserError("data.regenerate.num_tokens", got=got, expected=expected)


@dataclass(frozen=True)
class Words:
    """What is needed of a target that servers hold. end_ids: tokens that end a generation. name: that it was loaded by."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    name: str


def served_data(
    config: DataConfig, words: Words, *, fingerprint: str, measured_on: Sequence[str] = ()
) -> tuple[Dataset, Dataset]:
    """(train, validation) documents generated by `data.regenerate.server`, for `training_data` to find. Needs no weights.

    Answers are kept in a folder of data.cache_dir, whatever becomes of this process.
    """
    settings, tokenizer = config.regenerate, words.tokenizer
    held_out_tokens = max(1, round(settings.num_tokens * config.validation_fraction))
    servers = [CompletionServer(address, settings.timeout) for address in settings.server]
    told = Tokenizer(tokenizer, words.end_ids, settings.template)
    made_with = [fingerprint, tokenizer_fingerprint(tokenizer), settings.template]
    folder = _folder(config, [*made_with, config.max_length])

    @cache
    def find_models() -> None:
        for server in servers:
            server.find_model([words.name, Path(words.name).name])

    def own_prompts(entry: SourceEntry, key: str) -> Dataset:
        def generate(answers: Answers, end_ids: Sequence[int]) -> Generate:
            find_models()
            size, seed = settings.batch_size, config.seed
            return by_servers(servers, answers, told, entry.temperature, concurrency=size, seed=seed)

        return _own_prompts(config, entry, key, words, made_with, generate)

    sources = _sources(config, measured_on, own_prompts)

    @cache
    def prompts() -> tuple[list[Prompt], list[Prompt]]:
        find_models()
        return _split_prompts(config, sources, tokenizer)

    def part(index: int, num_tokens: int) -> Dataset:
        def rows() -> Iterator[Row]:
            asked = tasks(prompts()[index], settings.temperatures, config.max_length, config.seed)
            return served_rows(
                asked,
                servers,
                Answers(folder),
                told,
                num_tokens,
                settings.set_aside,
                concurrency=settings.batch_size,
                loss_mask=config.loss_mask,
                announced=_announced("generating", config, is_told=index == 0),
            )

        row_inputs = [[source.rows._fingerprint, source.weight] for source in sources]
        how = settings.model_dump(include={"num_tokens", "prompt_tokens", "temperatures", "set_aside"})
        shape = [config.max_length, config.validation_fraction, config.validation_split, config.loss_mask, config.seed]
        inputs = ["served", index, num_tokens, made_with, row_inputs, shape, how]
        documents = cached(rows, DOCUMENT_COLUMNS, inputs, config.cache_dir)
        return documents.select(usable(array(documents, "length"), False, config.max_length))

    return part(0, max(1, settings.num_tokens - held_out_tokens)), part(1, held_out_tokens)


def _own_prompts(
    config: DataConfig,
    entry: SourceEntry,
    key: str,
    words: Words,
    made_with: Sequence[object],
    generate: Callable[[Answers, Sequence[int]], Generate],
) -> Dataset:
    """Rows of the source `self`. generate: of the answers that are kept, and tokens that end a prompt."""
    openings = [Opening.of(words.tokenizer, system, words.end_ids, key) for system in (entry.system or (None,))]
    longest = room_for_prompts(openings, config.max_length)
    count = entry.num_prompts or max(2, -(-config.regenerate.num_tokens // min(LONG_ANSWER, config.max_length // 2)))

    def rows() -> Iterator[Row]:
        end_ids = sorted(frozenset[int]().union(*(opening.end_ids for opening in openings)))
        with Answers(_folder(config, ["self", *made_with])) as answers:
            yield from self_prompts(openings, count, longest, generate(answers, end_ids), words.tokenizer)

    inputs = ["self", made_with, count, longest, entry.temperature, entry.system, config.seed]
    made = cached(rows, COLUMNS, inputs, config.cache_dir)
    if len(made) < 2:
        expected = "a target that generates a user's turn, as instruct models do, or prompts of your own: a file or a Hub id"
        raise UserError(key, got=f"self, which gave {len(made)} prompts that are kept", expected=expected)
    return made


def _announced(doing: str, config: DataConfig, *, is_told: bool = True) -> Callable[[Cost, str], None]:
    """Tells what a pass costs, and refuses one that the disk has no room for."""

    def announced(cost: Cost, sample: str) -> None:
        if is_told:  # the validation rows' share is small
            announce(doing, cost, sample, _cache(config), force=config.force)

    return announced


def _cache(config: DataConfig) -> Path:
    return Path(config.cache_dir or HF_DATASETS_CACHE)


def _folder(config: DataConfig, made_with: object) -> Path:
    """Where answers made with these are kept."""
    return _cache(config) / "answers" / str(Hasher.hash([VERSION, made_with]))


def _split_prompts(
    config: DataConfig, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts for training and for validation, no row of the source in both; each source gives its weighted share."""
    settings = config.regenerate
    shortest_text = row_lengths(config.max_length, settings.prompt_tokens)[0] - settings.prompt_tokens
    num_texts, num_chats = -(-settings.num_tokens // shortest_text), -(-settings.num_tokens // SHORT_ANSWER)
    weights = [source.weight * len(source.rows) for source in sources]
    placed: list[tuple[float, tuple[int, int], Prompt]] = []  # (place, (source, row), prompt)
    for number, (source, weight) in enumerate(zip(sources, weights, strict=True)):
        texts, chats = (math.ceil(count * weight / sum(weights)) for count in (num_texts, num_chats))
        for prompts in (
            text_prompts(source.rows, tokenizer, settings.prompt_tokens, texts, config.seed),
            chat_prompts(source.rows, tokenizer, config.max_length // 2, chats, config.seed),
        ):
            placed += [
                ((place + 0.5) / weight, (number, prompt.row), replace(prompt, source=number))
                for place, prompt in enumerate(prompts)
            ]
    # More prompts than will be needed: as many of the first ones are of each source as its weight says.
    candidates = [(document, prompt) for _, document, prompt in sorted(placed, key=lambda it: it[0])]
    if not candidates:
        expected = (
            f"texts of {settings.prompt_tokens} tokens (data.regenerate.prompt_tokens) or questions of half of it at most"
        )
        raise UserError("data.max_length", got=f"{config.max_length}, and no row that gives a prompt", expected=expected)
    documents = sorted({document for document, _ in candidates})
    first = _first_rows(sources)
    rows = np.array([first[number] + row for number, row in documents])
    held_out = {documents[position] for position in _held_out(rows, sources, config)}
    train = [prompt for document, prompt in candidates if document not in held_out]
    return train, [prompt for document, prompt in candidates if document in held_out]


def _first_rows(sources: Sequence[Source]) -> NDArray[np.int64]:
    """The number of each source's first row, where the rows of all are counted through."""
    return np.cumsum([0, *(len(source.rows) for source in sources[:-1])])


def _held_out(rows: NDArray[np.int64], sources: Sequence[Source], config: DataConfig) -> set[int]:
    """Positions in `rows`, counted through all sources, of what is held out for validation."""
    if config.validation_split == "sample":
        return by_sample(len(rows), config.validation_fraction, config.seed)
    hashes = np.concatenate([_hashes(source, config) for source in sources])
    return by_hash(hashes[rows], config.validation_fraction)


def _hashes(source: Source, config: DataConfig) -> NDArray[np.int64]:
    inputs = ["hashes", source.rows._fingerprint, config.seed]
    hashing, columns = partial(row_hashes, seed=config.seed), {"hash": Value("int64")}
    made = mapped(source.rows, hashing, columns, inputs, what="Hashing", num_proc=config.num_proc, cache_dir=config.cache_dir)
    return array(made, "hash")
