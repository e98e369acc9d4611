"""Making a row set: what the target generates, block by block, then `merge`.

open_rows       the row set that training reads, made where it is not there, the processes of a launch each a share of the blocks
make_blocks     the blocks of one shard: number i, i + n, … of all
"""

import copy
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock

from datasets import Dataset

from specdistill.engines.completions import CompletionServer
from specdistill.engines.server import asking
from specdistill.errors import UserError
from specdistill.files.folders import alone
from specdistill.processes import agree, of_all, share
from specdistill.produce.answer_rules import RULES, CheckedAnswer, Counts, Rules
from specdistill.produce.blocks import BLOCK_COLUMNS, Answer, AnswerFile, Block, blocks
from specdistill.produce.generate import Backend, BlockOutput, generate_block, transformers_backend
from specdistill.produce.job import Job
from specdistill.produce.merge import merge
from specdistill.produce.prompts import BlockPlan, GenerationTask, prompts_of, streams
from specdistill.produce.self_prompts import self_prompts, user_row
from specdistill.produce.server_backend import ServerBackend, ServerTokenizer
from specdistill.progress import PREPARED_BYTES, Cost, announce, progress
from specdistill.recipe.data_sources import SELF
from specdistill.rows.chat import inner_ids
from specdistill.rows.files import SHOWN, cache_folder, on_disk, write_arrow
from specdistill.rows.row_set import Fit, check, is_whole, read_rows
from specdistill.terminal import Console

AT_ONCE = 4  # blocks that servers work at: of one that is nearly complete few answers are missing
FIRST_ANSWERS = 64  # new ones, that say what the others will cost


def open_rows(job: Job) -> tuple[Dataset, Dataset]:
    """(train, validation) rows with the columns of `packing`: those of `data.rows`, or the recipe's own, which are made where there are
    none yet. Every process of a launch has to call it: each generates its share of the blocks, and waits for the others before and after,
    not meanwhile. The first process, of every machine if they share no folder, reads the sources and merges.

    Raises UserError for rows of another target, template or shape, for a set that is not whole, and for machines whose rows or weights
    differ.
    """
    agree({"weights of target.model": job.target.weights[:SHOWN]})
    if job.config.shard is not None:
        expected = "null: `specdistill data make` alone makes a shard of the rows"
        raise UserError("data.shard", got=job.config.shard, expected=expected)
    check(job.config, job.target)
    if job.config.rows is None and not all(of_all(is_whole(job.folder))):
        job.check()
        index, count = _shares(cache_folder(job.config.cache_dir))
        if index == 0:
            _ = job.sources  # the others find them prepared
        of_all(None)
        make_blocks(job, index, count)
        of_all(None)
        if index == 0:
            merge(job)
        of_all(None)
    train, validation, manifest = read_rows(job.folder, Fit.of(job.config, job.target))
    hashes = {shard.name: shard.hash[:SHOWN] for shard in manifest.shards}
    agree(hashes, otherwise=": make the rows on one machine, and copy the folder (data.rows)")
    return train, validation


def _shares(folder: Path) -> tuple[int, int]:
    """This process's number among those that share a folder, and how many they are: all of a launch, or those of a machine."""
    rank, count = share()
    if count == 1:
        return 0, 1
    mark = folder / f"launch-{of_all(uuid.uuid4().hex)[0]}"
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    of_all(None)
    is_common = all(of_all(mark.exists()))
    if rank == 0:
        mark.unlink()
    return (
        (rank, count)
        if is_common
        else (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    )


def shard_of(stated: str | None) -> tuple[int, int]:
    """(i, n) of `data.shard`, i from 0; `auto` is an array job's own. Raises UserError for no shard, and outside of such a job."""
    expected = "i/n with i from 0 to n - 1, or auto in an array job of Slurm or an indexed one of Kubernetes (auto/n: of n)"
    index, _, count = ("0/1" if stated is None else stated).partition("/")
    if index == "auto":
        env = os.environ
        if "SLURM_ARRAY_TASK_ID" in env:
            index = str(int(env["SLURM_ARRAY_TASK_ID"]) - int(env.get("SLURM_ARRAY_TASK_MIN", "0")))
            count = count or env.get("SLURM_ARRAY_TASK_COUNT", "")
        else:
            index, count = (
                env.get("JOB_COMPLETION_INDEX", ""),
                count or env.get("JOB_COMPLETIONS", ""),
            )
        if not index or not count:
            got = "auto without SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT, or JOB_COMPLETION_INDEX and JOB_COMPLETIONS"
            raise UserError("data.shard", got=got, expected=expected)
    if not index.isdecimal() or not count.isdecimal() or int(index) >= int(count):
        raise UserError("data.shard", got=stated, expected=expected)
    return int(index), int(count)


def make_blocks(job: Job, index: int = 0, count: int = 1) -> None:
    """The blocks of a shard that are not complete yet; nothing where the row set is there, or nothing is generated."""
    own = (
        blocks(job.config.regenerate.num_tokens)[index::count]
        if job.config.regenerate.num_tokens > 0
        else []
    )
    missing = [block for block in own if not (job.blocks / f"{block.name}.arrow").exists()]
    if is_whole(job.folder) or not missing:
        return
    num_tokens, counts = sum(block.num_tokens for block in missing), Counts()
    settings, target = job.config.regenerate, job.target
    with ExitStack() as stack:
        advance = stack.enter_context(progress("Generating training data", num_tokens, "tokens"))
        pool = stack.enter_context(
            asking(AT_ONCE)
        )  # ends after the backend, which stops what its threads wait for
        _ = job.sources  # read once, before threads share them
        if settings.server:
            servers = [
                CompletionServer(address, settings.timeout, job.states)
                for address in settings.server
            ]
            for server in servers:
                server.find_model([target.name, Path(target.name).name])
            tokenizer = ServerTokenizer(target.tokenizer, target.end_ids, settings.template)
            backend: Backend = stack.enter_context(
                ServerBackend(servers, tokenizer, settings.batch_size)
            )
        else:
            backend = stack.enter_context(
                transformers_backend(target, settings.num_tokens, settings.batch_size)
            )
        made = partial(
            _make_block,
            job,
            backend=backend,
            estimate=GenerationEstimate(job, num_tokens),
            advance=advance,
        )
        if settings.server:
            found: Iterator[Counts] = (
                it.result() for it in as_completed([pool.submit(made, block) for block in missing])
            )
        else:
            found = map(made, missing)
        for block_counts in found:
            counts.add(block_counts)
    Console(stderr=True).print(counts.table())


def _make_block(
    job: Job,
    block: Block,
    *,
    backend: Backend,
    estimate: "GenerationEstimate",
    advance: Callable[[int], object],
) -> Counts:
    """A block from its first answer, or from where a killed process left it, to its documents."""
    path, config, target = job.blocks / f"{block.name}.arrow", job.config, job.target
    rules: Rules = {
        name: RULES[name] for name in config.regenerate.filter if config.regenerate.server
    }
    plan = BlockPlan(block, config, job.sources[0], copy.deepcopy(target.tokenizer), target.end_ids)
    decoder = ServerTokenizer(plan.tokenizer, target.end_ids, {})
    special = decoder.special - inner_ids(plan.tokenizer) if rules else decoder.special

    def checked(task: GenerationTask, answer: Answer) -> CheckedAnswer:
        text = decoder.text(answer.token_ids) if rules else ""
        return CheckedAnswer(answer, text, not task.prompt.messages, special)

    made = BlockOutput(rules, checked, config.loss_mask == "all", advance)
    with alone(path.with_suffix(".lock"), "data.shard", path):
        if path.exists():
            return Counts()
        of_self = {}
        with AnswerFile(path.with_suffix(".jsonl"), job.plan, estimate.add) as known:
            for number, source in enumerate(plan.sources):
                if source.entry.source == SELF:
                    to_others = {
                        "contaminated": lambda it: (
                            job.suite_index.overlap(user_row(it.text)) is not None
                        )
                    }
                    of_self[number], counts = self_prompts(plan, number, backend, known, to_others)
                    made.counts.add(replace(counts, kept=0))
            planned = streams(plan, *prompts_of(plan, of_self, made.counts.filtered))
            generate_block(block.num_tokens, planned, backend, known, made)
        filtered = dict(sorted(made.counts.filtered.items()))
        header = {
            "plan": job.plan,
            "block": block.number,
            "tokens": made.tokens,
            "filtered": filtered,
        }
        with on_disk(job.blocks):
            columns = {name: [row[name] for row in made.rows] for name in BLOCK_COLUMNS}
            write_arrow(path, BLOCK_COLUMNS, [columns], json.dumps(header))
            path.with_suffix(".jsonl").unlink()
    return made.counts


class GenerationEstimate:
    """What generation will cost, by its first answers; `announce` prints it once."""

    def __init__(self, job: Job, num_tokens: int) -> None:
        self.job, self.num_tokens = job, num_tokens
        self.begin, self.answers, self.tokens, self.generated, self.num_bytes = (
            time.monotonic(),
            0,
            0,
            0,
            0,
        )
        self.is_announced, self.lock = False, Lock()

    def add(self, answers: Sequence[Answer], size: int) -> None:
        """Count answers that take `size` bytes. Raises ResourceError where the disk has no room for what is to come."""
        generated = sum(len(it.token_ids) for it in answers)
        with self.lock:
            self.answers, self.generated = self.answers + len(answers), self.generated + generated
            self.tokens += generated + sum(len(it.context) for it in answers)
            self.num_bytes += size
            is_enough = self.answers >= FIRST_ANSWERS or not self.job.config.regenerate.server
            if self.is_announced or not is_enough or not self.generated:
                return
            self.is_announced, seconds = True, time.monotonic() - self.begin
        sample = Cost(
            self.answers,
            self.tokens,
            self.generated,
            self.num_bytes + PREPARED_BYTES * self.tokens,
            seconds,
        )
        basis, folder = (
            f"{self.answers:,} answers in {seconds:.1f} s",
            cache_folder(self.job.config.cache_dir),
        )
        times, force = self.num_tokens / self.generated, self.job.config.force
        announce("generating", sample.times(times), basis, folder, force=force)
        if (states := self.job.states) and (
            sizes := [it.stat().st_size for it in states.glob("*.safetensors")]
        ):
            waiting = sample._replace(num_bytes=self.answers * sum(sizes) / len(sizes))
            announce("keeping hidden states", waiting.times(times), basis, states, force=force)
