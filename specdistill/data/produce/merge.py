"""Make the row set from complete blocks, or from the sources as they are.

The documents are filtered, divided into training and validation, and packed.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from numpy.typing import NDArray

from specdistill.common.documents import parse_json
from specdistill.common.errors import UserError, logger
from specdistill.common.folders import exclusive_lock
from specdistill.common.terminal import Console
from specdistill.data.produce.answer_rules import RULES
from specdistill.data.produce.blocks import plan_blocks
from specdistill.data.produce.generate import MIN_FILL
from specdistill.data.produce.job import Job
from specdistill.data.produce.self_prompts import NearDuplicates
from specdistill.data.produce.server_backend import SAMPLING
from specdistill.data.produce.sources import Source
from specdistill.data.rows.bad_rows import (
    FAULT_COLUMNS,
    check_share,
    describe_fault,
    format_bad_rows,
    merge_counts,
    split_faults,
)
from specdistill.data.rows.encoding import ENCODED_COLUMNS, HASH_RANGE, Encoder, Row
from specdistill.data.rows.files import hash_tokenizer, map_rows, read_array, read_header
from specdistill.data.rows.packing import Packed, select_usable
from specdistill.data.rows.row_set import (
    RowSetSpec,
    SourceCounts,
    SplitCounts,
    is_whole,
    write_rows,
)
from specdistill.recipe.data_sources import SELF_SOURCE, list_source_names
from specdistill.recipe.sections import DataConfig, ServerRegeneration

# A warning is logged above this share of answers that the length limit cut. Below it, the draft
# still sees how most answers end.
MAX_CUT_ANSWERS = 0.2


def merge(job: Job) -> None:
    """Make the row set of a recipe, unless it is there: packed rows for training and validation.

    The documents of generated blocks, or of the sources themselves, are filtered, divided into the
    two splits, packed into rows and written to the row set's folder.

    Args:
        job: the recipe's data settings, the target and the folders.

    Raises:
        UserError: if generated blocks are missing or belong to another recipe.
    """
    # One process makes the row set. A process that had to wait for the lock finds it complete.
    with exclusive_lock(job.folder.parent / f"{job.folder.name}.lock", "data.rows", job.folder):
        if is_whole(job.folder):
            return
        config = job.config
        tokenizer = job.target.tokenizer

        # Take the documents from generated blocks or, without generation, from the sources' rows.
        if config.regenerate.num_tokens > 0:
            sources = job.sources[0]
            train, validation, filtered, generation = _collect_from_blocks(job)
        else:
            generation = None
            train, validation, filtered, sources = _collect_from_sources(job)

        # Fill rows up with the tokenizer's padding token, its end token or token 0, whichever
        # exists first. Any token will do, because a document id of -1 marks padding.
        padding = next(
            token
            for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
            if token is not None
        )

        # Pack the documents of each split, and count its tokens.
        packed_splits = {}
        for split, documents in (("train", train), ("validation", validation)):
            packed = Packed(documents, config.max_length, config.packing, padding, config.seed)
            tokens = {**_count_tokens(documents), "tokens": packed.num_tokens}
            packed_splits[split] = (
                packed,
                SplitCounts(rows=len(packed), documents=len(documents), **tokens),
            )

        # Write the rows, with a record of the sources and of what was filtered.
        counted_sources = _count_sources(sources, config, train)
        write_rows(
            job.folder,
            packed_splits,
            {
                "fingerprint": job.fingerprint,
                "fit": RowSetSpec.from_config(config, job.target),
                "sources": counted_sources,
                "generation": generation,
                "filtered": dict(sorted(filtered.items())),
            },
        )

        # Show which rows could not be used.
        if any(source.bad_rows for source in sources):
            Console(stderr=True).print(format_bad_rows(counted_sources))


def _count_tokens(documents: Dataset) -> dict[str, int]:
    """Count all tokens of some documents, and the tokens that carry loss."""
    # The loss masks are read in batches, because all of them together may not fit the memory.
    loss_tokens_of_batches = (
        int(np.concatenate(batch["loss_mask"]).sum())
        for batch in documents.with_format("numpy").iter(batch_size=1024)
    )
    return {
        "tokens": int(read_array(documents, "length").sum()),
        "loss_tokens": sum(loss_tokens_of_batches),
    }


def _count_sources(
    sources: Sequence[Source], config: DataConfig, train: Dataset
) -> list[SourceCounts]:
    """Return, for each source of a recipe, its documents and tokens in the training split.

    Args:
        sources: the sources in the order of the recipe.
        config: the `data:` section.
        train: the documents of the training split.
    """
    # The column `source` has the number of each document's source. Count the documents of one
    # source at a time.
    source_numbers = read_array(train, "source")
    counts = []
    for number, (source, name) in enumerate(
        zip(sources, list_source_names(config.source), strict=True)
    ):
        document_indices = np.flatnonzero(source_numbers == number)
        token_counts = (
            _count_tokens(train.select(document_indices)) if len(document_indices) else {}
        )
        entry = source.entry
        counts.append(
            SourceCounts(
                source=name,
                key=source.key,
                revision=entry.revision,
                license=entry.known_license,
                weight=entry.weight,
                rows=len(source.rows),
                fingerprint=str(source.rows._fingerprint),
                documents=len(document_indices),
                rows_read=source.num_read,
                bad_rows=dict(source.bad_rows),
                **token_counts,
            )
        )
    return counts


def _describe_generation(job: Job, headers: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return a record of how the answers were generated, for the manifest of the row set.

    A warning is logged if the length limit cut many answers.

    Args:
        job: the recipe's data settings and the target.
        headers: the headers of the blocks' files, with the numbers of their answers.
    """
    # Record the settings that decide what is generated.
    settings = job.config.generation
    facts = settings.model_dump(include={"num_tokens", "prompt_tokens", "temperatures", "template"})
    facts |= {
        "seed": job.config.seed,
        "blocks": len(plan_blocks(settings.num_tokens)),
        "model": job.target.name,
    }

    # Record how many answers there are, and how many of them the length limit cut. Headers of an
    # earlier version lack these numbers.
    if all("answers" in header for header in headers):
        for name in ("answers", "cut_answers"):
            facts[name] = sum(header[name] for header in headers)
        warn_of_cut_answers(facts["cut_answers"], facts["answers"], job.config.max_length)

    # Record what generated, servers or the model in this process, and the settings that apply only
    # to the one or the other.
    if isinstance(settings, ServerRegeneration):
        return {**facts, "by": "servers", "filter": settings.filter, "sampling": SAMPLING}
    return {**facts, "by": "transformers", "batch_size": settings.batch_size}


def _collect_from_blocks(job: Job) -> tuple[Dataset, Dataset, Counter[str], dict[str, object]]:
    """Collect the documents of all generated blocks, filter them and hold some out for validation.

    Blocks are the parts that generation was divided into, each with a file of documents. A document
    is left out if it cannot be packed, or if it answers a generated prompt that is nearly equal to
    a prompt of an earlier block.

    Args:
        job: the recipe's data settings, the target and the folders.

    Returns:
        The training documents; the validation documents; how many documents and rows were filtered,
        by the reason; and a record of how the documents were generated.

    Raises:
        UserError: if a block is missing or belongs to another recipe, or if there is no document.
    """
    # Put the blocks together, with the counts of what was filtered in each.
    paths, headers = _find_blocks(job)
    documents = concatenate_datasets([Dataset.from_file(str(path)) for path in paths])
    sources, filtered_rows = job.sources
    filtered = sum((Counter(header["filtered"]) for header in headers), Counter(filtered_rows))
    if not len(documents):
        raise _explain_missing_documents(job, sources, filtered)

    # Warn if the sources had too few prompts for the number of tokens that the recipe asks for.
    num_generated = sum(header["tokens"] for header in headers)
    num_tokens = job.config.regenerate.num_tokens
    if num_generated < MIN_FILL * num_tokens:
        logger.warning(
            "data.source: generated only %d of %d tokens, because all its prompts were used up",
            num_generated,
            num_tokens,
        )

    # Blocks are generated independently, so near duplicates across blocks are only found here.
    is_near_duplicate = _find_near_duplicates(
        [Dataset.from_file(str(path))["asked"] for path in paths]
    )
    if is_near_duplicate.any():
        filtered["near_duplicate"] += int(is_near_duplicate.sum())
        logger.warning(
            "data.source: dropped %d of %d answers, because their generated prompts nearly repeat"
            " earlier prompts",
            is_near_duplicate.sum(),
            len(documents),
        )

    # Leave out the documents that cannot be packed, and the near duplicates.
    source_names = ", ".join(list_source_names(job.config.source))
    indices = select_usable(
        documents,
        may_cut=False,
        max_length=job.config.max_length,
        filtered=filtered,
        source=source_names,
    )
    indices = indices[~is_near_duplicate[indices]]

    # Divide the documents into training and validation. The column `row` is a hash of the source's
    # row. All documents of a row have the same hash, and come into the same split.
    row_hashes = read_array(documents, "row")[indices]
    distinct_hashes, row_of_document = np.unique(row_hashes, return_inverse=True)
    is_held_out = select_held_out(distinct_hashes, job.config)[row_of_document]
    return (
        documents.select(indices[~is_held_out]),
        documents.select(indices[is_held_out]),
        filtered,
        _describe_generation(job, headers),
    )


def _explain_missing_documents(
    job: Job, sources: Sequence[Source], filtered: Mapping[str, int]
) -> UserError:
    """Return the error for a generation that kept no document.

    Args:
        job: the recipe's data settings, the target and the folders.
        sources: the sources of the prompts.
        filtered: how many answers and rows were filtered, by the reason.
    """
    if any(source.entry.source == SELF_SOURCE for source in sources):
        return UserError(
            "data.source",
            got="self, but no prompt that the target generated was kept with its answer",
            expected="a target that generates user prompts (instruct models do), or prompts of your"
            " own: a file or a Hub id",
        )

    # Either rules dropped every answer, or there was no prompt to answer.
    num_dropped_answers = sum(filtered[rule] for rule in RULES if rule in filtered)
    if num_dropped_answers:
        worst_rule = max(RULES, key=lambda rule: filtered.get(rule, 0))
        return UserError(
            "data.regenerate.filter",
            got=f"rules that dropped all {num_dropped_answers} answers; the rule `{worst_rule}`"
            " dropped the most answers",
            expected="rules that keep some of the answers",
        )
    return UserError(
        "data.max_length",
        got=f"{job.config.max_length}, but no row of data.source gives a prompt",
        text=(
            "data.max_length: generated no document, because no row of data.source gives a"
            f" prompt. A plain text must have at least {job.config.generation.prompt_tokens}"
            " tokens: use longer texts, or lower data.regenerate.prompt_tokens. The prompt of a"
            f" conversation may have at most {job.config.max_length // 2} tokens, half of"
            " data.max_length: use shorter prompts, or raise data.max_length."
        ),
    )


def _find_blocks(job: Job) -> tuple[list[Path], list[dict[str, Any]]]:
    """Find the files of all generated blocks, and check that they were made for this recipe.

    Blocks are the parts that generation was divided into, each with a file of documents.

    Args:
        job: the recipe's data settings, the target and the folders.

    Returns:
        The files in the order of the blocks, and their headers.

    Raises:
        UserError: if a block is missing or belongs to another recipe.
    """
    # Every block must be there.
    paths = [
        job.blocks / f"{block.name}.arrow"
        for block in plan_blocks(job.config.regenerate.num_tokens)
    ]
    missing = [path.stem for path in paths if not path.exists()]
    if missing:
        raise UserError(
            "data.shard",
            got=f"{job.blocks}, which lacks {len(missing)} of {len(paths)} blocks:"
            f" {', '.join(missing[:8])}",
            expected="every block; run `specdistill data make` with the same recipe to make the"
            " missing ones",
        )

    # The header of each file has the number of its block and the hash of its plan. The plan is
    # everything that the generated answers depend on. Both must be right.
    headers = [parse_json(read_header(path) or "{}") for path in paths]
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        if (header.get("plan"), header.get("block")) != (job.plan, number):
            raise UserError(
                "data.shard",
                got=f"{path}, which holds block {header.get('block')} of the generation plan"
                f" {header.get('plan')}",
                text=(
                    f"data.shard: {path} was made by another recipe, or was renamed. It holds block"
                    f" {header.get('block')} of the generation plan {header.get('plan')}, but it"
                    f" should hold block {number} of the plan {job.plan} (a plan is the hash of all"
                    " settings that the generated answers depend on). Remove the file, and run"
                    " `specdistill data make` to make it again."
                ),
            )
    return paths, headers


def warn_of_cut_answers(num_cut: int, num_answers: int, max_length: int) -> None:
    """Warn if the length limit cut so many answers that the draft seldom sees the end of one.

    Args:
        num_cut: how many answers the limit cut.
        num_answers: the number of all answers.
        max_length: `data.max_length`, the limit in tokens.
    """
    if num_cut > MAX_CUT_ANSWERS * num_answers:
        logger.warning(
            "%s were cut at data.max_length=%d tokens. Raise data.max_length to train on whole"
            " answers.",
            f"{num_cut:,} of {num_answers:,} answers ({num_cut / num_answers:.0%})",
            max_length,
        )


def _find_near_duplicates(prompts: Sequence[Sequence[str | None]]) -> NDArray[np.bool_]:
    """Find the documents whose prompt is generated and nearly repeats an earlier prompt.

    Args:
        prompts: for each block, the prompt of each of its documents if the target generated it, and
            None if the prompt comes from a row of a source. Only generated prompts are compared.

    Returns:
        A flag for each document of all blocks, in order: whether its prompt is a near duplicate.
    """
    distinct_prompts = NearDuplicates()
    flags: list[bool] = []
    for block in prompts:
        # Several documents of a block may answer the same prompt, which is compared once. `add`
        # returns False for a prompt that is nearly equal to an earlier one.
        is_near_duplicate: dict[str | None, bool] = {None: False}
        for prompt in block:
            if prompt is not None and prompt not in is_near_duplicate:
                is_near_duplicate[prompt] = not distinct_prompts.add(prompt)
        flags += [is_near_duplicate[prompt] for prompt in block]
    return np.array(flags, bool)


def _collect_from_sources(job: Job) -> tuple[Dataset, Dataset, Counter[str], list[Source]]:
    """Tokenize the rows of the sources, filter them and hold some out for validation.

    The rows of a source with weight 2 come twice in the training documents.

    Args:
        job: the recipe's data settings and the target.

    Returns:
        The training documents; the validation documents; how many documents and rows were filtered,
        by the reason; and the sources with the counts of rows that cannot be used.

    Raises:
        UserError: if the weights leave no document to train on, or if too many rows cannot be used.
    """
    config = job.config
    read_sources, counts = job.sources

    # Tokenize each source, and put all documents together.
    encoded = [_encode_source(source, number, job) for number, source in enumerate(read_sources)]
    sources = [source for _, source in encoded]
    documents = concatenate_datasets([source_documents for source_documents, _ in encoded])
    is_text, source_numbers, row_numbers, row_hashes = (
        read_array(documents, name) for name in ("is_text", "source", "row", "hash")
    )

    # Leave out the documents that cannot be packed. Only texts may be cut to the length of a row:
    # `_encode_source` has cut long conversations at their turns already.
    filtered = Counter(counts)
    source_names = ", ".join(list_source_names(config.source))
    indices = select_usable(
        documents,
        may_cut=is_text,
        max_length=config.max_length,
        filtered=filtered,
        source=source_names,
    )

    # Hold out some rows for validation. A long row was cut into several documents, which all must
    # be in the same split. So number the rows of all sources consecutively, and decide for each
    # row, by the hash of its first document.
    first_rows = np.cumsum([0, *(len(source.rows) for source in sources[:-1])])
    global_rows = first_rows[source_numbers[indices]] + row_numbers[indices]
    _, first_documents, row_of_document = np.unique(
        global_rows, return_index=True, return_inverse=True
    )
    is_held_out = select_held_out(row_hashes[indices[first_documents]], config)[row_of_document]

    # A source of weight 2.5 has each document twice, and a random half of them once more.
    generator = random.Random(config.seed)
    train: list[int] = []
    for number, source in enumerate(sources):
        is_trained = (source_numbers[indices] == number) & ~is_held_out
        source_documents = indices[is_trained].tolist()
        num_extra = round(source.entry.weight % 1 * len(source_documents))
        train += source_documents * int(source.entry.weight)
        train += generator.sample(source_documents, num_extra)
    if not train:
        raise UserError(
            "data.source",
            got="weights so small that no row is left to train on",
            expected="larger weights",
        )
    return documents.select(train), documents.select(indices[is_held_out]), filtered, sources


def select_held_out(hashes: NDArray[np.integer], config: DataConfig) -> NDArray[np.bool_]:
    """Choose which rows are held out for validation: at least one row, and never all rows.

    With `data.validation_split=sample` the rows are drawn at random. Otherwise the hash of a row
    decides. The split of a row then depends only on its content and the seed, not on the other
    rows, and equal rows come into the same split.

    Args:
        hashes: a hash of the content of each row, from 0 to HASH_RANGE - 1.
        config: the `data:` section.

    Returns:
        A flag for each row: whether it is held out.

    Raises:
        UserError: for a single row, or if all rows are equal.
    """
    # Each split needs a row. If hashes decide, equal rows count as one.
    distinct = np.unique(hashes)
    is_sample = config.validation_split == "sample"
    num_candidates = len(hashes) if is_sample else len(distinct)
    if num_candidates < 2:
        raise UserError(
            "data.source",
            got="a single usable row"
            if len(hashes) < 2
            else f"{len(hashes)} usable rows, all with the same content",
            expected="two or more different rows: at least one is held out for validation",
        )

    # Draw the fraction `data.validation_fraction` of the rows at random.
    if is_sample:
        count = min(len(hashes) - 1, max(1, round(config.validation_fraction * len(hashes))))
        held_out_rows = random.Random(config.seed).sample(range(len(hashes)), count)
        return np.isin(np.arange(len(hashes)), held_out_rows)

    # Hold out the rows whose hashes are in the lowest fraction of the range of hashes. The limit is
    # at least the second smallest and at most the largest hash, so that both splits have a row.
    count = int(np.searchsorted(distinct, math.ceil(config.validation_fraction * HASH_RANGE)))
    is_held_out: NDArray[np.bool_] = hashes < distinct[min(max(count, 1), len(distinct) - 1)]
    return is_held_out


def _encode_row(
    encoder: Encoder, on_bad_row: str, row: Row, number: int
) -> Sequence[Mapping[str, object]]:
    """Tokenize a row to documents; for a row that cannot be used, return a record of its fault.

    Args:
        encoder: converts rows to documents.
        on_bad_row: the value of `data.on_bad_row`. With `stop` the error of the row is raised.
        row: the row.
        number: the row's number in its source, from 0.
    """
    try:
        return encoder(row, number)
    except UserError as error:
        # Errors about the content of a row have a kind. Other errors are wrong settings.
        if not error.kind or on_bad_row == "stop":
            raise
        return [describe_fault(error, row.get("place") or f"row {number + 1}", number)]


def _encode_source(source: Source, number: int, job: Job) -> tuple[Dataset, Source]:
    """Tokenize the rows of a source to documents, and count the rows that cannot be used.

    Args:
        source: the source.
        number: the number of the source in the recipe, which becomes a column of its documents.
        job: the recipe's data settings and the target.

    Returns:
        The documents of the source, and a copy of `source` with the counts of rows that cannot be
        used.

    Raises:
        UserError: if more rows than `data.max_bad_rows` allows cannot be used.
    """
    config = job.config
    tokenizer = job.target.tokenizer
    encoder = Encoder(
        tokenizer, config.loss_mask, config.max_length, source.key, number, config.seed
    )

    # Everything that the result depends on. For equal inputs the result is loaded from the cache.
    inputs = [
        "encoded",
        source.rows._fingerprint,
        number,
        config.on_bad_row,
        hash_tokenizer(tokenizer),
        tokenizer.chat_template,
        config.loss_mask,
        config.max_length,
        config.seed,
    ]
    encoded = map_rows(
        source.rows,
        partial(_encode_row, encoder, config.on_bad_row),
        {**ENCODED_COLUMNS, **FAULT_COLUMNS},
        inputs,
        "Tokenizing",
        config,
    )

    # Count the rows with faults, and stop if there are too many.
    encoded, bad_rows, _ = split_faults(encoded)
    if bad_rows:
        source = replace(source, bad_rows=merge_counts(source.bad_rows, bad_rows))
        check_share(source.bad_rows, source.num_read, source.entry.source, source.key, config)

    # Warn of rows that became several documents because they were cut.
    _, num_documents_of_row = np.unique(read_array(encoded, "row"), return_counts=True)
    num_cut = int((num_documents_of_row > 1).sum())
    if num_cut:
        logger.warning(
            "%s: %d of %d rows are conversations longer than data.max_length=%d tokens and are cut"
            " at their turns",
            source.key,
            num_cut,
            len(source.rows),
            config.max_length,
        )
    return encoded, source
