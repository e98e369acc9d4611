"""Merging: the row set, of blocks that are all there, or of the sources as they are: filtered, split and packed."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from numpy.typing import NDArray

from specdistill.errors import UserError, logger
from specdistill.files.documents import parse_json
from specdistill.files.folders import alone
from specdistill.produce.blocks import blocks
from specdistill.produce.generate import ENOUGH
from specdistill.produce.job import Job
from specdistill.produce.self_prompts import NearDuplicates
from specdistill.produce.server_backend import SAMPLING
from specdistill.produce.sources import Source
from specdistill.recipe.data_sources import SELF, source_names
from specdistill.recipe.sections import DataConfig
from specdistill.rows.encoding import ENCODED_COLUMNS, HASH_RANGE, Encoder
from specdistill.rows.files import array, mapped, read_header, tokenizer_fingerprint
from specdistill.rows.packing import Packed, usable
from specdistill.rows.row_set import Fit, SourceCounts, SplitCounts, is_whole, write_rows


def merge(job: Job) -> None:
    """The row set, unless it is there. Raises UserError where blocks are missing, or are of another recipe."""
    with alone(job.folder.parent / f"{job.folder.name}.lock", "data.rows", job.folder):
        if is_whole(job.folder):
            return
        config, tokenizer = job.config, job.target.tokenizer
        train, validation, filtered = (
            _from_blocks(job) if config.regenerate.num_tokens > 0 else _from_sources(job)
        )
        padding = next(
            token
            for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
            if token is not None
        )
        halves = {}
        for split, documents in (("train", train), ("validation", validation)):
            packed = Packed(documents, config.max_length, config.packing, padding, config.seed)
            halves[split] = (
                packed,
                SplitCounts(rows=len(packed), documents=len(documents), **_tokens(documents)),
            )
        facts = {
            "fingerprint": job.fingerprint,
            "fit": Fit.of(config, job.target),
            "sources": _counted(job, train),
            "generation": _generation(job) if config.regenerate.num_tokens > 0 else None,
            "filtered": dict(sorted(filtered.items())),
        }
        write_rows(job.folder, halves, facts)


def _tokens(documents: Dataset) -> dict[str, int]:
    masks = (
        int(np.concatenate(batch["loss_mask"]).sum())
        for batch in documents.with_format("numpy").iter(batch_size=1024)
    )
    return {"tokens": int(array(documents, "length").sum()), "loss_tokens": sum(masks)}


def _counted(job: Job, train: Dataset) -> list[SourceCounts]:
    place, found = array(train, "source"), []
    for number, (source, name) in enumerate(
        zip(job.sources[0], source_names(job.config.source), strict=True)
    ):
        own, entry = np.flatnonzero(place == number), source.entry
        counts = SourceCounts(
            source=name,
            key=source.key,
            revision=entry.revision,
            license=entry.known_license,
            weight=entry.weight,
            rows=len(source.rows),
            fingerprint=str(source.rows._fingerprint),
            documents=len(own),
            **(_tokens(train.select(own)) if len(own) else {}),
        )
        found.append(counts)
    return found


def _generation(job: Job) -> dict[str, Any]:
    settings = job.config.regenerate
    facts = settings.model_dump(include={"num_tokens", "prompt_tokens", "temperatures", "template"})
    facts |= {
        "seed": job.config.seed,
        "blocks": len(blocks(settings.num_tokens)),
        "model": job.target.name,
    }
    if settings.server:
        return {**facts, "by": "servers", "filter": settings.filter, "sampling": SAMPLING}
    return {**facts, "by": "transformers", "batch_size": settings.batch_size}


def _from_blocks(job: Job) -> tuple[Dataset, Dataset, Counter[str]]:
    """(training, validation, how many were filtered): the documents of all blocks in their order, with the columns input_ids, loss_mask,
    length and source, without those of prompts that are nearly the same as one of an earlier block.
    """
    paths = [
        job.blocks / f"{block.name}.arrow" for block in blocks(job.config.regenerate.num_tokens)
    ]
    if missing := [path.stem for path in paths if not path.exists()]:
        got = f"{job.blocks}, which lacks {len(missing)} of {len(paths)} blocks: {', '.join(missing[:8])}"
        expected = (
            "every block: `specdistill data make` of the same recipe makes those that are missing"
        )
        raise UserError("data.shard", got=got, expected=expected)
    headers = [parse_json(read_header(path) or "{}") for path in paths]
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        if (header.get("plan"), header.get("block")) != (job.plan, number):
            got = f"{path}, block {header.get('block')} of rows {header.get('plan')}"
            raise UserError(
                "data.shard",
                got=got,
                expected=f"block {number} of {job.plan}: shards of one recipe",
            )
    documents = concatenate_datasets([Dataset.from_file(str(path)) for path in paths])
    filtered = sum((Counter(header["filtered"]) for header in headers), Counter(job.sources[1]))
    if not len(documents) and any(source.entry.source == SELF for source in job.sources[0]):
        expected = "a target that generates a user's turn (instruct models do), or prompts of your own: a file or a Hub id"
        raise UserError(
            "data.source", got="self, which gave no prompt that is kept", expected=expected
        )
    if not len(documents):
        half = f"texts of {job.config.regenerate.prompt_tokens} tokens (data.regenerate.prompt_tokens) or questions of half of it at most"
        raise UserError(
            "data.max_length",
            got=f"{job.config.max_length}, and no row that gives a prompt",
            expected=half,
        )
    total, num_tokens = (
        sum(header["tokens"] for header in headers),
        job.config.regenerate.num_tokens,
    )
    if total < ENOUGH * num_tokens:
        logger.warning(
            "the prompts of data.source were used up after %d of %d tokens", total, num_tokens
        )
    alike = _alike([Dataset.from_file(str(path))["asked"] for path in paths])
    if alike.any():
        filtered["near_duplicate"] += int(alike.sum())
        logger.warning(
            "data.source: %d of %d answers are to prompts of self that others are like",
            alike.sum(),
            len(documents),
        )
    lengths = array(documents, "length")
    indices = usable(lengths, False, job.config.max_length, filtered)
    indices = indices[~alike[indices]]
    hashes, row_of = np.unique(array(documents, "row")[indices], return_inverse=True)
    is_held_out = held_out(hashes, job.config)[row_of]
    return documents.select(indices[~is_held_out]), documents.select(indices[is_held_out]), filtered


def _alike(asked: Sequence[Sequence[str | None]]) -> NDArray[np.bool_]:
    """Which documents answer a prompt of the target's own that is nearly one of an earlier block. asked: of the documents of each block."""
    near = NearDuplicates()
    found: list[bool] = []
    for block in asked:
        is_alike: dict[str | None, bool] = {None: False}
        for prompt in block:
            if prompt is not None and prompt not in is_alike:
                is_alike[prompt] = not near.add(prompt)
        found += [is_alike[prompt] for prompt in block]
    return np.array(found, bool)


def _from_sources(job: Job) -> tuple[Dataset, Dataset, Counter[str]]:
    """As `_from_blocks`, the source's rows as they are. Training has each row of a source of weight 2 twice."""
    config, (sources, counts) = job.config, job.sources
    documents = concatenate_datasets(
        [_encoded(source, number, job) for number, source in enumerate(sources)]
    )
    columns = ("length", "is_text", "source", "row", "hash")
    lengths, is_text, number, row, hashes = (array(documents, name) for name in columns)
    filtered = Counter(counts)
    indices = usable(lengths, is_text, config.max_length, filtered)
    # Of a row that was cut all documents are on one side.
    first_rows = np.cumsum([0, *(len(source.rows) for source in sources[:-1])])
    _, first, row_of = np.unique(
        first_rows[number[indices]] + row[indices], return_index=True, return_inverse=True
    )
    is_held_out = held_out(hashes[indices[first]], config)[row_of]
    generator = random.Random(config.seed)
    train: list[int] = []
    for place, source in enumerate(sources):
        own = indices[(number[indices] == place) & ~is_held_out].tolist()
        train += own * int(source.entry.weight) + generator.sample(
            own, round(source.entry.weight % 1 * len(own))
        )
    if not train:
        raise UserError(
            "data.source", got="weights that leave no row to train on", expected="larger weights"
        )
    return documents.select(train), documents.select(indices[is_held_out]), filtered


def held_out(hashes: NDArray[np.int64], config: DataConfig) -> NDArray[np.bool_]:
    """Which rows are held out for validation, by their hashes (`row_hash`): one at least, and never all.

    By hash, a row's side depends on nothing but what it holds and the seed: it stays there when others are added or filtered, wherever it
    stands, and equal rows are on one side. Raises UserError for a single row, or if all are equal.
    """
    distinct, is_sample = np.unique(hashes), config.validation_split == "sample"
    if (len(hashes) if is_sample else len(distinct)) < 2:
        got = (
            "a single usable row"
            if len(hashes) < 2
            else f"{len(hashes)} usable rows that are all alike"
        )
        raise UserError(
            "data.source", got=got, expected="two or more: one at least is held out for validation"
        )
    if is_sample:
        count = min(len(hashes) - 1, max(1, round(config.validation_fraction * len(hashes))))
        return np.isin(
            np.arange(len(hashes)), random.Random(config.seed).sample(range(len(hashes)), count)
        )
    count = int(np.searchsorted(distinct, math.ceil(config.validation_fraction * HASH_RANGE)))
    return hashes < distinct[min(max(count, 1), len(distinct) - 1)]


def _encoded(source: Source, number: int, job: Job) -> Dataset:
    config, tokenizer = job.config, job.target.tokenizer
    encoder = Encoder(
        tokenizer, config.loss_mask, config.max_length, source.key, number, config.seed
    )
    made_with = [
        tokenizer_fingerprint(tokenizer),
        tokenizer.chat_template,
        config.loss_mask,
        config.max_length,
        config.seed,
    ]
    inputs = ["encoded", source.rows._fingerprint, number, *made_with]
    encoded = mapped(source.rows, encoder, ENCODED_COLUMNS, inputs, "Tokenizing", config)
    _, num_documents = np.unique(array(encoded, "row"), return_counts=True)
    if num_cut := int((num_documents > 1).sum()):
        message = "%s: %d of %d rows are conversations longer than data.max_length=%d tokens and are cut at their turns"
        logger.warning(message, source.key, num_cut, len(source.rows), config.max_length)
    return encoded
