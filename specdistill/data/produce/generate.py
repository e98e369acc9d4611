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
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
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
    GenerationPrompt,
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
            self.answers += len(answers)
            self.generated += generated
            self.tokens += generated + sum(len(answer.context) for answer in answers)
            self.num_bytes += size

            # Wait for enough answers of servers. In this process the first batch is enough.
            is_served = isinstance(self.job.config.regenerate, ServerRegeneration)
            is_enough = self.answers >= FIRST_ANSWERS or not is_served
            if self.is_announced or not is_enough or not self.generated:
                return
            self.is_announced = True
            seconds = time.monotonic() - self.begin

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
        factor = self.num_tokens / self.generated
        force = self.job.config.force
        announce("generating", sample.times(factor), basis, folder, force=force)

        # Stored hidden states take far more disk than answers, so they are announced, too.
        states = self.job.states
        sizes = [path.stat().st_size for path in states.glob("*.safetensors")] if states else []
        if states and sizes:
            states_cost = sample._replace(num_bytes=self.answers * sum(sizes) / len(sizes))
            announce("keeping hidden states", states_cost.times(factor), basis, states, force=force)


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
    documents: list[tuple[list[int], list[int]]] = []
    for answer in answers:
        ids, mask = documents[-1] if documents else ([], [])
        # A turn whose context does not continue the document begins a new one.
        if answer.context[: len(ids)] != ids or not ids:
            ids = []
            mask = []
            documents.append((ids, mask))

        # Append what the context adds to the document, and the answer.
        new_context = answer.context[len(ids) :]
        ids += [*new_context, *answer.token_ids]
        mask += [int(all_tokens)] * len(new_context) + [1] * len(answer.token_ids)
    return [{"input_ids": ids, "loss_mask": mask, "length": len(ids)} for ids, mask in documents]


@dataclass
class BlockOutput:
    """The documents that a block's answers gave so far, with counts.

    Attributes:
        rules: the rules that filter answers, by name.
        pair_with_text: pairs an answer with its text, for the rules.
        all_tokens: whether all tokens of a conversation carry loss, and not only its answers.
        advance: moves the progress bar; called with the number of new tokens.
        rows: documents with BLOCK_COLUMNS.
        counts: how many answers were kept and filtered.
        num_wanted: tokens that the streams answered so far have to give.
        tokens: tokens that were generated and kept.
        num_empty_tasks: tasks in a row of which no answer was kept.
    """

    rules: Rules
    pair_with_text: Callable[[GenerationTask, Answer], CheckedAnswer]
    all_tokens: bool
    advance: Callable[[int], object]
    rows: list[dict[str, object]] = field(default_factory=list)
    counts: AnswerCounts = field(default_factory=AnswerCounts)
    num_wanted: float = 0.0
    tokens: int = 0
    num_empty_tasks: int = 0

    @property
    def num_missing(self) -> float:
        """The tokens that are still missing, up to the share MIN_FILL of `num_wanted`."""
        return max(0.0, MIN_FILL * self.num_wanted - self.tokens)

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
        kept_answers = []
        for answer in answers:
            if not self.counts.is_kept(self.pair_with_text(task, answer), self.rules):
                break
            kept_answers.append(answer)

        # Build the documents. In a text, the tokens of the prompt carry loss, too.
        prompt = task.prompt
        all_tokens = self.all_tokens or not prompt.messages
        self.rows += [
            {**document, "source": prompt.source, "row": prompt.row, "asked": prompt.asked}
            for document in build_documents(kept_answers, all_tokens=all_tokens)
        ]

        # Count the tokens, and stop if no task gives any.
        num_tokens = sum(len(answer.token_ids) for answer in kept_answers)
        self.tokens += num_tokens
        self.advance(num_tokens)
        self.num_empty_tasks = 0 if kept_answers else self.num_empty_tasks + 1
        if self.num_empty_tasks == MAX_EMPTY_TASKS:
            ((rule, _),) = self.counts.filtered.most_common(1)
            raise UserError(
                "data.regenerate.filter",
                got=f"rules that {MAX_EMPTY_TASKS} answers in a row broke, most of all {rule}, e.g."
                f" {self.counts.examples[rule][:80]!r}",
                expected="rules that keep some of the answers",
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
            output.num_wanted = num_tokens - num_missing
            total_share = sum(stream.share for stream in remaining)
            for stream in remaining:
                output.num_wanted += stream.share / total_share * num_missing
                if output.num_missing:
                    num_answered = _answer_tasks(stream.tasks, backend, answer_file, output)
                    stream.tasks = stream.tasks[num_answered:]
            if not output.num_missing:
                return


def _answer_tasks(
    tasks: Sequence[GenerationTask], backend: Backend, answer_file: AnswerFile, output: BlockOutput
) -> int:
    """Have tasks answered until no token is missing, and return how many were answered.

    Args:
        tasks: the tasks of one stream, in order.
        backend: generates the answers.
        answer_file: the answers that are already there, to which new ones are added.
        output: collects the documents that the answers give.
    """
    num_tokens_before = output.tokens
    num_answered = 0
    max_new_tokens = max(1, tasks[0].max_length - len(tasks[0].prompt.ids))

    # The backend asks this before each batch. Before the first answer, each task is assumed to give
    # the most tokens that it may.
    def count_wanted() -> int:
        """Estimate how many more tasks are needed, by the tokens per task so far."""
        num_new = output.tokens - num_tokens_before
        tokens_per_task = num_new / num_answered if num_new else max_new_tokens
        return math.ceil(output.num_missing / tokens_per_task)

    with closing(backend.generate_answers(iter(tasks), answer_file, count_wanted)) as answered:
        for task, answers in answered:
            num_answered += 1
            output.add(task, answers)
            if not output.num_missing:
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
    if job.config.regenerate.num_tokens == 0 or is_whole(job.folder):
        return
    shard_blocks = plan_blocks(job.config.regenerate.num_tokens)[index::count]
    missing = [block for block in shard_blocks if not (job.blocks / f"{block.name}.arrow").exists()]
    if not missing:
        return

    num_tokens = sum(block.num_tokens for block in missing)
    counts = AnswerCounts()
    with ExitStack() as stack:
        advance = stack.enter_context(
            show_progress("Generating training data", num_tokens, "tokens")
        )
        # The pool is opened before the backend, and so ends after it. The backend stops what the
        # pool's threads wait for.
        pool = stack.enter_context(start_request_threads(NUM_BLOCKS_AT_ONCE))
        _ = job.sources  # They are read once, before threads share them.
        backend = stack.enter_context(_build_backend(job))
        make_block = partial(
            _make_block,
            job,
            backend=backend,
            estimate=GenerationEstimate(job, num_tokens),
            advance=advance,
        )

        # Servers generate several blocks at once; the model in this process generates one after
        # the other.
        counts_of_blocks: Iterator[AnswerCounts]
        if isinstance(job.config.regenerate, ServerRegeneration):
            futures = [pool.submit(make_block, block) for block in missing]
            counts_of_blocks = (future.result() for future in as_completed(futures))
        else:
            counts_of_blocks = map(make_block, missing)

        # Wait for the blocks, and print how many answers were kept.
        for block_counts in counts_of_blocks:
            counts.add(block_counts)
    Console(stderr=True).print(counts.table())


def _build_backend(job: Job) -> AbstractContextManager[Backend]:
    """Prepare the servers of the recipe, or the target in this process, to generate answers.

    Raises:
        UserError: for servers of another model, or for a target that is not complete here.
        ResourceError: if a server does not answer.
    """
    settings = job.config.generation
    target = job.target
    if not isinstance(settings, ServerRegeneration):
        return build_transformers_backend(
            target, settings.num_tokens, settings.batch_size, job.config.max_length
        )
    servers = [
        CompletionServer(address, settings.timeout, job.states) for address in settings.server
    ]
    for server in servers:
        server.find_model([target.name, Path(target.name).name])
    tokenizer = ServerTokenizer(target.tokenizer, target.end_ids, settings.template)
    return ServerBackend(servers, tokenizer, settings.batch_size)


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
    # Several threads make blocks, and fast tokenizers are not safe for several threads. Therefore
    # each block gets a copy of the tokenizer.
    path = job.blocks / f"{block.name}.arrow"
    tokenizer = copy.deepcopy(job.target.tokenizer)
    plan = BlockPlan(block, job.config, job.sources[0], tokenizer, job.target.end_ids)
    output = _create_output(plan, advance)

    # One process makes a block at a time. If an earlier one was killed, a warning names the key
    # that saves memory; on servers no key of the recipe does.
    is_served = isinstance(job.config.regenerate, ServerRegeneration)
    batch_key = "" if is_served else "data.regenerate.batch_size"
    with exclusive_lock(path.with_suffix(".lock"), "data.shard", path, saves_memory=batch_key):
        if path.exists():
            return AnswerCounts()

        # Generate the target's own prompts first, then the answers to all prompts.
        with AnswerFile(path.with_suffix(".jsonl"), job.plan, estimate.add) as answer_file:
            self_prompts = _generate_own_prompts(job, plan, backend, answer_file, output.counts)
            prompts = make_prompts(plan, self_prompts, output.counts.filtered)
            generate_block(
                block.num_tokens, plan_rounds(plan, prompts), backend, answer_file, output
            )

        # Write the documents, which replace the file of answers. The header says what the block
        # was made from.
        header = {
            "plan": job.plan,
            "block": block.number,
            "tokens": output.tokens,
            "answers": output.counts.kept,
            "cut_answers": output.counts.cut,
            "filtered": dict(sorted(output.counts.filtered.items())),
        }
        columns = {}
        for name in BLOCK_COLUMNS:
            columns[name] = [row[name] for row in output.rows]
        with on_disk(job.blocks):
            write_arrow(path, BLOCK_COLUMNS, [columns], json.dumps(header))
            path.with_suffix(".jsonl").unlink()
    return output.counts


def _create_output(plan: BlockPlan, advance: Callable[[int], object]) -> BlockOutput:
    """Return the empty output of a block, with the rules that its answers are filtered by."""
    # Answers of servers are filtered by the rules of the recipe. Answers of the model in this
    # process are all kept.
    settings = plan.config.regenerate
    names = settings.filter if isinstance(settings, ServerRegeneration) else ()
    rules: Rules = {name: RULES[name] for name in names}

    # The tokens that no answer may have before its end: special tokens, except those that mark
    # reasoning and tool calls.
    decoder = ServerTokenizer(plan.tokenizer, plan.end_ids, {})
    special = decoder.special - find_inner_ids(plan.tokenizer) if rules else decoder.special

    def pair_with_text(task: GenerationTask, answer: Answer) -> CheckedAnswer:
        """Pair an answer with its text, which is decoded only if there are rules to read it."""
        text = decoder.text(answer.token_ids) if rules else ""
        return CheckedAnswer(answer, text, not task.prompt.messages, special)

    return BlockOutput(rules, pair_with_text, plan.config.loss_mask == "all", advance)


def _generate_own_prompts(
    job: Job, plan: BlockPlan, backend: Backend, answer_file: AnswerFile, counts: AnswerCounts
) -> dict[int, list[GenerationPrompt]]:
    """Have the target generate the prompts of each source `self`.

    Args:
        job: the work.
        plan: the plan of the block.
        backend: generates the prompts.
        answer_file: the answers that are already there, to which new ones are added.
        counts: the counts of the block, to which the prompts that were filtered are added.

    Returns:
        The prompts, by the number of the source.
    """

    def overlaps_suite(candidate: CheckedAnswer) -> bool:
        """Return whether a prompt overlaps a prompt on which the draft will be measured."""
        return job.suite_index.find_overlap(build_user_row(candidate.text)) is not None

    own_prompts = {}
    for number, source in enumerate(plan.sources):
        if source.entry.source == SELF_SOURCE:
            own_prompts[number], prompt_counts = generate_self_prompts(
                plan, number, backend, answer_file, {"contaminated": overlaps_suite}
            )
            # A prompt is no answer, so only the filtered ones are counted.
            counts.add(replace(prompt_counts, kept=0))
    return own_prompts
