"""Have the target answer the prompts of blocks, in this process or on servers of the target.

One loop serves both backends. A draft has to predict what the target generates, so the target's own
generations train it best: on two CPU cores, in equal time, the acceptance length went from 1.78 to
2.63. All tokens of a text carry loss, including those of its prompt. In a conversation the tokens
of the answers carry loss.
"""

import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Lock

from specdistill.common.errors import UserError
from specdistill.common.folders import exclusive_lock
from specdistill.common.progress import PREPARED_BYTES, Cost, announce, show_progress
from specdistill.common.terminal import Console
from specdistill.data.produce.answer_rules import RULES, AnswerCounts, CheckedAnswer, Rules
from specdistill.data.produce.blocks import BLOCK_COLUMNS, Answer, AnswerFile, Block, plan_blocks
from specdistill.data.produce.job import Job
from specdistill.data.produce.prompts import (
    BlockPlan,
    GenerationTask,
    Stream,
    make_prompts,
    plan_rounds,
)
from specdistill.data.produce.self_prompts import build_user_row, generate_self_prompts
from specdistill.data.produce.server_backend import ServerBackend, ServerTokenizer
from specdistill.data.produce.transformers_backend import Backend, build_transformers_backend
from specdistill.data.rows.chat import find_inner_ids
from specdistill.data.rows.files import cache_folder, on_disk, write_arrow
from specdistill.data.rows.row_set import is_whole
from specdistill.recipe.data_sources import SELF_SOURCE
from specdistill.recipe.sections import ServerRegeneration
from specdistill.serving.engines.completions import CompletionServer
from specdistill.serving.engines.server import start_request_threads

# Blocks that servers work at together. A block that is nearly complete has few requests left. The
# requests of the other blocks keep the servers busy meanwhile.
NUM_BLOCKS_AT_ONCE = 4
# A block ends at this share of its tokens, because a batch of a few rows takes as much time as a
# full one.
MIN_FILL = 0.995
# New answers of servers after which the cost of all answers is estimated. More of them make the
# estimate more precise, and let the user wait longer for it.
FIRST_ANSWERS = 64
# Generation ends with an error after so many tasks in a row without an answer that is kept, because
# so many failures are no chance.
MAX_EMPTY_TASKS = 1000


class GenerationEstimate:
    """An estimate of what generation will cost, from its first answers. It is printed once.

    Args:
        job: the work.
        num_tokens: tokens that this process will generate.

    Attributes:
        begin: when generation began, in seconds of `time.monotonic`.
        answers: how many new answers were counted.
        tokens: tokens of these answers with their contexts.
        generated: tokens of these answers alone.
        num_bytes: bytes that these answers take on the disk.
        is_announced: whether the estimate was printed.
    """

    def __init__(self, job: Job, num_tokens: int) -> None:
        self.job = job
        self.num_tokens = num_tokens
        self.begin = time.monotonic()
        self.answers = 0
        self.tokens = 0
        self.generated = 0
        self.num_bytes = 0
        self.is_announced = False
        self.lock = Lock()

    def add(self, answers: Sequence[Answer], size: int) -> None:
        """Count new answers, and announce the estimate as soon as there are enough of them.

        Args:
            answers: the answers.
            size: the bytes that they take on the disk.

        Raises:
            ResourceError: if the disk has no room for what is to come.
        """
        # Count the answers. Several threads do this.
        generated = sum(len(answer.token_ids) for answer in answers)
        with self.lock:
            self.answers = self.answers + len(answers)
            self.generated = self.generated + generated
            self.tokens += generated + sum(len(answer.context) for answer in answers)
            self.num_bytes += size

            # Wait for enough answers of servers. In this process the first batch is enough.
            is_enough = self.answers >= FIRST_ANSWERS or not isinstance(
                self.job.config.regenerate, ServerRegeneration
            )
            if self.is_announced or not is_enough or not self.generated:
                return
            self.is_announced, seconds = True, time.monotonic() - self.begin

        # Announce once what all answers will take, in proportion to the tokens generated so far.
        sample = Cost(
            self.answers,
            self.tokens,
            self.generated,
            self.num_bytes + PREPARED_BYTES * self.tokens,
            seconds,
        )
        basis = f"{self.answers:,} answers in {seconds:.1f} s"
        folder = cache_folder(self.job.config.cache_dir)
        times = self.num_tokens / self.generated
        force = self.job.config.force
        announce("generating", sample.times(times), basis, folder, force=force)

        # Stored hidden states take far more disk than answers, so they are announced, too.
        states = self.job.states
        if states and (sizes := [path.stat().st_size for path in states.glob("*.safetensors")]):
            waiting = sample._replace(num_bytes=self.answers * sum(sizes) / len(sizes))
            announce("keeping hidden states", waiting.times(times), basis, states, force=force)


def build_documents(answers: Sequence[Answer], *, all_tokens: bool) -> list[dict[str, object]]:
    """Build documents from the turns of a task.

    A turn whose context continues the document so far is appended to it. The tokens of answers
    carry loss.

    Args:
        answers: the turns, in order.
        all_tokens: whether the tokens of the contexts carry loss, too.

    Returns:
        The documents as {input_ids, loss_mask, length}.
    """
    # Each document so far, as its token ids and its loss mask.
    rows: list[tuple[list[int], list[int]]] = []
    for answer in answers:
        ids, mask = rows[-1] if rows else ([], [])
        # A turn whose context does not continue the document begins a new one.
        if answer.context[: len(ids)] != ids or not ids:
            ids = []
            mask = []
            rows.append((ids, mask))

        # Append what the context adds to the document, and the answer.
        context = answer.context[len(ids) :]
        ids += [*context, *answer.token_ids]
        mask += [int(all_tokens)] * len(context) + [1] * len(answer.token_ids)
    return [{"input_ids": ids, "loss_mask": mask, "length": len(ids)} for ids, mask in rows]


@dataclass
class BlockOutput:
    """The documents that a block's answers gave so far, with counts.

    Attributes:
        rules: the rules that filter answers, by name.
        checked: pairs an answer with its text, for the rules.
        all_tokens: whether all tokens of a conversation carry loss, and not only its answers.
        advance: moves the progress bar; called with the number of new tokens.
        rows: documents with BLOCK_COLUMNS.
        counts: how many answers were kept and filtered.
        wanted: tokens that the streams answered so far have to give.
        tokens: tokens that were generated and kept.
        barren: tasks in a row of which no answer was kept.
    """

    rules: Rules
    checked: Callable[[GenerationTask, Answer], CheckedAnswer]
    all_tokens: bool
    advance: Callable[[int], object]
    rows: list[dict[str, object]] = field(default_factory=list)
    counts: AnswerCounts = field(default_factory=AnswerCounts)
    wanted: float = 0.0
    tokens: int = 0
    barren: int = 0

    @property
    def missing(self) -> float:
        """The tokens that are still missing, up to the share MIN_FILL of `wanted`."""
        return max(0.0, MIN_FILL * self.wanted - self.tokens)

    def add(self, task: GenerationTask, answers: Sequence[Answer]) -> None:
        """Keep the answers of a task up to the first one that breaks a rule.

        That answer and the turns after it are filtered, and their tokens do not count.

        Args:
            task: the task.
            answers: its turns, in order.

        Raises:
            UserError: after MAX_EMPTY_TASKS tasks in a row of which nothing was kept.
        """
        # A turn after a filtered one continues a conversation that is dropped, so it is not counted
        # at all.
        kept_answers = list(
            takewhile(
                lambda answer: self.counts.is_kept(self.checked(task, answer), self.rules), answers
            )
        )

        # Build the documents. In a text, the tokens of the prompt carry loss, too.
        prompt = task.prompt
        self.rows += [
            {**row, "source": prompt.source, "row": prompt.row, "asked": prompt.asked}
            for row in build_documents(
                kept_answers, all_tokens=self.all_tokens or not prompt.messages
            )
        ]

        # Count the tokens, and stop if no task gives any.
        tokens = sum(len(answer.token_ids) for answer in kept_answers)
        self.tokens += tokens
        self.advance(tokens)
        self.barren = 0 if kept_answers else self.barren + 1
        if self.barren == MAX_EMPTY_TASKS:
            ((rule, _),) = self.counts.filtered.most_common(1)
            raise UserError(
                "data.regenerate.filter",
                got=f"rules that {MAX_EMPTY_TASKS} answers in a row broke, most of all {rule}, e.g."
                f" {self.counts.examples[rule][:80]!r}",
                expected="some to keep",
            )


def generate_block(
    num_tokens: int,
    rounds: Iterator[list[Stream]],
    backend: Backend,
    answer_file: AnswerFile,
    output: BlockOutput,
) -> None:
    """Have the tasks of a block answered, round by round, until they give the block's tokens.

    The streams of a round are answered in turn. Each gives its share of the tokens, and also what
    earlier streams were short of. When a stream has no task left, the other streams give what is
    still missing. All tasks of a round are answered before any task of the next round.

    Args:
        num_tokens: tokens of the block.
        rounds: the streams of each round.
        backend: generates the answers.
        answer_file: the answers that are already there, to which new ones are added.
        output: collects the documents that the answers give.
    """
    for streams in rounds:
        while remaining := [stream for stream in streams if stream.tasks]:
            # Divide what is missing among the streams that still have tasks.
            num_missing = num_tokens - output.tokens / MIN_FILL
            output.wanted = num_tokens - num_missing
            shares = sum(stream.share for stream in remaining)
            for stream in remaining:
                output.wanted += stream.share / shares * num_missing
                if output.missing:
                    num_answered = _answer(stream.tasks, backend, answer_file, output)
                    stream.tasks = stream.tasks[num_answered:]
            if not output.missing:
                return


def _answer(
    tasks: Sequence[GenerationTask], backend: Backend, answer_file: AnswerFile, output: BlockOutput
) -> int:
    """Have tasks answered until no token is missing, and return how many were answered.

    Args:
        tasks: the tasks of one stream, in order.
        backend: generates the answers.
        answer_file: the answers that are already there, to which new ones are added.
        output: collects the documents that the answers give.
    """
    begin = output.tokens
    num_answered = 0
    longest = max(1, tasks[0].max_length - len(tasks[0].prompt.ids))

    # The backend asks this before each batch. Before the first answer, each task is assumed to give
    # the most tokens that it may.
    def wanted() -> int:
        """Estimate how many more tasks are needed, by the tokens per task so far."""
        gained = output.tokens - begin
        return math.ceil(output.missing / (gained / num_answered if gained else longest))

    with closing(backend.generate_answers(iter(tasks), answer_file, wanted)) as answered:
        for task, answers in answered:
            num_answered += 1
            output.add(task, answers)
            if not output.missing:
                break
    return num_answered


def make_blocks(job: Job, index: int = 0, count: int = 1) -> None:
    """Generate the blocks of a shard that are not complete yet.

    Nothing happens if the row set is already there, or if the recipe generates nothing.

    Args:
        job: the work.
        index: number of the shard, from 0.
        count: how many shards there are.
    """
    # Shard `index` has every count-th block. Only those that are not there yet are generated.
    local_blocks = (
        plan_blocks(job.config.regenerate.num_tokens)[index::count]
        if job.config.regenerate.num_tokens > 0
        else []
    )
    missing = [block for block in local_blocks if not (job.blocks / f"{block.name}.arrow").exists()]
    if is_whole(job.folder) or not missing:
        return

    num_tokens = sum(block.num_tokens for block in missing)
    counts = AnswerCounts()
    settings = job.config.generation
    target = job.target
    with ExitStack() as stack:
        advance = stack.enter_context(
            show_progress("Generating training data", num_tokens, "tokens")
        )
        # The pool ends after the backend, which stops what the pool's threads wait for.
        pool = stack.enter_context(start_request_threads(NUM_BLOCKS_AT_ONCE))
        _ = job.sources  # They are read once, before threads share them.

        # Servers generate several blocks at once; the model in this process generates one after
        # the other.
        if isinstance(settings, ServerRegeneration):
            servers = [
                CompletionServer(address, settings.timeout, job.states)
                for address in settings.server
            ]
            for server in servers:
                server.find_model([target.name, Path(target.name).name])
            backend: Backend = stack.enter_context(
                ServerBackend(
                    servers,
                    ServerTokenizer(target.tokenizer, target.end_ids, settings.template),
                    settings.batch_size,
                )
            )
        else:
            backend = stack.enter_context(
                build_transformers_backend(
                    target, settings.num_tokens, settings.batch_size, job.config.max_length
                )
            )
        make_block = partial(
            _make_block,
            job,
            backend=backend,
            estimate=GenerationEstimate(job, num_tokens),
            advance=advance,
        )
        if isinstance(settings, ServerRegeneration):
            futures = [pool.submit(make_block, block) for block in missing]
            counts_of_blocks: Iterator[AnswerCounts] = (
                future.result() for future in as_completed(futures)
            )
        else:
            counts_of_blocks = map(make_block, missing)

        # Wait for the blocks, and print how many answers were kept.
        for block_counts in counts_of_blocks:
            counts.add(block_counts)
    Console(stderr=True).print(counts.table())


def _make_block(
    job: Job,
    block: Block,
    *,
    backend: Backend,
    estimate: GenerationEstimate,
    advance: Callable[[int], object],
) -> AnswerCounts:
    """Generate a block, from its first answer or from where a killed process left it.

    Args:
        job: the work.
        block: the block.
        backend: generates the answers.
        estimate: counts new answers, to estimate what all of them will cost.
        advance: moves the progress bar; called with the number of new tokens.

    Returns:
        How many answers were kept and filtered.
    """
    path = job.blocks / f"{block.name}.arrow"
    config = job.config
    target = job.target
    settings = config.regenerate
    rules: Rules = {}

    # Answers of servers are filtered by the rules of the recipe. Answers of the model in this
    # process are all kept.
    if isinstance(settings, ServerRegeneration):
        rules = {name: RULES[name] for name in settings.filter}

    # Several threads make blocks, and fast tokenizers are not safe for several threads. Therefore
    # each block gets a copy of the tokenizer.
    plan = BlockPlan(block, config, job.sources[0], copy.deepcopy(target.tokenizer), target.end_ids)
    decoder = ServerTokenizer(plan.tokenizer, target.end_ids, {})
    special = decoder.special - find_inner_ids(plan.tokenizer) if rules else decoder.special

    def checked(task: GenerationTask, answer: Answer) -> CheckedAnswer:
        """Pair an answer with its text, which is decoded only if there are rules to read it."""
        text = decoder.text(answer.token_ids) if rules else ""
        return CheckedAnswer(answer, text, not task.prompt.messages, special)

    output = BlockOutput(rules, checked, config.loss_mask == "all", advance)
    batch_key = "" if isinstance(settings, ServerRegeneration) else "data.regenerate.batch_size"
    with exclusive_lock(path.with_suffix(".lock"), "data.shard", path, saves_memory=batch_key):
        if path.exists():
            return AnswerCounts()

        # Generate the target's own prompts first, then the answers to all prompts.
        of_self = {}
        with AnswerFile(path.with_suffix(".jsonl"), job.plan, estimate.add) as answer_file:
            for number, source in enumerate(plan.sources):
                if source.entry.source == SELF_SOURCE:
                    to_others = {
                        "contaminated": lambda candidate: (
                            job.suite_index.find_overlap(build_user_row(candidate.text)) is not None
                        )
                    }
                    of_self[number], counts = generate_self_prompts(
                        plan, number, backend, answer_file, to_others
                    )
                    output.counts.add(replace(counts, kept=0))
            prompts = make_prompts(plan, of_self, output.counts.filtered)
            generate_block(
                block.num_tokens, plan_rounds(plan, prompts), backend, answer_file, output
            )

        # The header says what the block was made from.
        header = {
            "plan": job.plan,
            "block": block.number,
            "tokens": output.tokens,
            "answers": output.counts.kept,
            "cut_answers": output.counts.cut,
            "filtered": dict(sorted(output.counts.filtered.items())),
        }

        # Write the documents, which replace the file of answers.
        with on_disk(job.blocks):
            columns = {}
            for name in BLOCK_COLUMNS:
                columns[name] = [row[name] for row in output.rows]
            write_arrow(path, BLOCK_COLUMNS, [columns], json.dumps(header))
            path.with_suffix(".jsonl").unlink()
    return output.counts
