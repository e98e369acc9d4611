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
        """Count new answers; when there are enough, announce once what all answers will cost.

        The announced cost is the time and the disk space of the whole generation.

        Args:
            answers: the new answers.
            size: the bytes that the new answers take on the disk.

        Raises:
            ResourceError: if the disk has no room for all answers.
        """
        # Count the answers, under a lock because several threads generate.
        generated = sum(len(answer.token_ids) for answer in answers)
        with self.lock:
            self.answers += len(answers)
            self.generated += generated
            self.tokens += generated + sum(len(answer.context) for answer in answers)
            self.num_bytes += size

            # With servers, wait for FIRST_ANSWERS answers. The model in this process gives a whole
            # batch at once, and one batch is enough.
            is_served = isinstance(self.job.config.regenerate, ServerRegeneration)
            is_enough = self.answers >= FIRST_ANSWERS or not is_served
            if self.is_announced or not is_enough or not self.generated:
                return
            self.is_announced = True
            seconds = time.monotonic() - self.begin

        # The cost of all answers is in proportion to the tokens that were generated so far. On the
        # disk, answers also take PREPARED_BYTES per token when they are packed into rows.
        sample = Cost(
            rows=self.answers,
            tokens=self.tokens,
            loss_tokens=self.generated,
            num_bytes=self.num_bytes + PREPARED_BYTES * self.tokens,
            seconds=seconds,
        )
        basis = f"{self.answers:,} answers in {seconds:.1f} s"
        folder = cache_folder(self.job.config.cache_dir)
        factor = self.num_tokens / self.generated
        force = self.job.config.force
        announce("generating", sample.times(factor), basis, folder, force=force)

        # If servers keep the hidden states of their answers, announce the disk space for them, too,
        # by the mean size of the files so far. It is far more than that of the answers.
        states = self.job.states
        sizes = [path.stat().st_size for path in states.glob("*.safetensors")] if states else []
        if states and sizes:
            states_cost = sample._replace(num_bytes=self.answers * sum(sizes) / len(sizes))
            announce(
                "keeping hidden states",
                states_cost.times(factor),
                basis,
                states,
                folder_key="hidden_states.path",
                force=force,
            )


def build_documents(answers: Sequence[Answer], *, all_tokens: bool) -> list[dict[str, object]]:
    """Join generated answers with their contexts to documents to train on.

    If the context of an answer begins with the document so far, as the later turns of a
    conversation do, the answer is appended to that document. Otherwise it begins a new document.

    Args:
        answers: the answers to one prompt, in the order of the conversation's turns.
        all_tokens: whether all tokens carry loss; otherwise only the tokens of answers do.

    Returns:
        The documents, each with `input_ids`, `loss_mask` and `length`.
    """
    # Each document so far, as its token ids and its loss mask.
    documents: list[tuple[list[int], list[int]]] = []
    for answer in answers:
        # Begin a new document if the context does not continue the last one.
        ids, mask = documents[-1] if documents else ([], [])
        if answer.context[: len(ids)] != ids or not ids:
            ids = []
            mask = []
            documents.append((ids, mask))

        # Append the tokens of the context that the document lacks, and then the answer.
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
        num_wanted: how many tokens there should be at the end of the current stream of tasks. The
            share MIN_FILL of them is enough.
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
        """Add the answers to one prompt to the documents of the block.

        If an answer breaks a rule, that answer and all later turns of its conversation are dropped.

        Args:
            task: the task, with the prompt.
            answers: the generated turns of the assistant, in order.

        Raises:
            UserError: if no answer was kept from MAX_EMPTY_TASKS tasks in a row.
        """
        # Keep the turns before the first one that breaks a rule. `is_kept` also counts the answer.
        kept_answers = []
        for answer in answers:
            if not self.counts.is_kept(self.pair_with_text(task, answer), self.rules):
                break
            kept_answers.append(answer)

        # Build the documents. If the prompt is the beginning of a text (without messages), its
        # tokens carry loss like those of the answer.
        prompt = task.prompt
        all_tokens = self.all_tokens or not prompt.messages
        self.rows += [
            {**document, "source": prompt.source, "row": prompt.row, "asked": prompt.asked}
            for document in build_documents(kept_answers, all_tokens=all_tokens)
        ]

        # Count the tokens. Stop with an error if too many tasks in a row gave none.
        num_tokens = sum(len(answer.token_ids) for answer in kept_answers)
        self.tokens += num_tokens
        self.advance(num_tokens)
        self.num_empty_tasks = 0 if kept_answers else self.num_empty_tasks + 1
        if self.num_empty_tasks == MAX_EMPTY_TASKS:
            # The counts also have prompts that were left out before they were asked. Only answers
            # have examples.
            examples = self.counts.examples
            rule = max(examples, key=lambda name: self.counts.filtered[name])
            raise UserError(
                "data.regenerate.filter",
                got=f"rules that dropped {MAX_EMPTY_TASKS} answers in a row; the rule `{rule}`"
                f" dropped the most answers, for example {examples[rule][:80]!r}",
                expected="rules that keep some of the answers",
            )


def generate_block(
    num_tokens: int,
    rounds: Iterator[list[Stream]],
    backend: Backend,
    answer_file: AnswerFile,
    output: BlockOutput,
) -> None:
    """Generate answers until a block has enough tokens.

    The tokens to generate are divided into blocks. The tasks of a block (prompts to answer) come in
    rounds, and all tasks of a round are used before the next round. A round has several streams of
    tasks, for example conversations and texts. Each stream gives a share of the block's tokens. If
    a stream runs out of tasks, the other streams give the tokens that are missing.

    Args:
        num_tokens: how many tokens to generate.
        rounds: yields the streams of each round.
        backend: generates the answers.
        answer_file: keeps the answers on disk; answers that are in it are not generated again.
        output: collects the documents that are made of the answers.
    """
    for streams in rounds:
        while remaining := [stream for stream in streams if stream.tasks]:
            # The share MIN_FILL of the wanted tokens is enough, because the last few would take as
            # long as a full batch. With MIN_FILL = 0.995, for example, 995 generated tokens fulfill
            # 1,000 wanted tokens. `num_fulfilled` is how many wanted tokens are fulfilled so far.
            num_fulfilled = output.tokens / MIN_FILL
            num_left = num_tokens - num_fulfilled

            # Divide `num_left` among the streams that still have tasks. Each stream raises
            # `output.num_wanted` by its share, from `num_fulfilled` up to `num_tokens`. The first
            # value is computed as `num_tokens - num_left`, so that adding all shares of `num_left`
            # leads back to `num_tokens`.
            output.num_wanted = num_tokens - num_left
            total_share = sum(stream.share for stream in remaining)
            for stream in remaining:
                output.num_wanted += stream.share / total_share * num_left
                if output.num_missing:
                    num_answered = _answer_tasks(stream.tasks, backend, answer_file, output)
                    stream.tasks = stream.tasks[num_answered:]
            if not output.num_missing:
                return


def _answer_tasks(
    tasks: Sequence[GenerationTask], backend: Backend, answer_file: AnswerFile, output: BlockOutput
) -> int:
    """Generate the answers of tasks in order, until the output has all the tokens it wants.

    Args:
        tasks: the tasks of one stream.
        backend: generates the answers.
        answer_file: keeps the answers on disk; answers that are in it are not generated again.
        output: collects the documents that are made of the answers, and knows how many tokens are
            still missing.

    Returns:
        How many tasks were answered.
    """
    num_tokens_before = output.tokens
    num_answered = 0
    max_new_tokens = max(1, tasks[0].max_length - len(tasks[0].prompt.ids))

    def count_wanted() -> int:
        """Estimate how many more tasks are needed; the backend asks this before each batch.

        The estimate is the number of missing tokens, divided by the tokens per task so far. Before
        the first answer, a task is assumed to give as many tokens as it may.
        """
        num_new = output.tokens - num_tokens_before
        tokens_per_task = num_new / num_answered if num_new else max_new_tokens
        return math.ceil(output.num_missing / tokens_per_task)

    # `closing` ends the generator when the loop stops early, so that the backend cancels requests.
    with closing(backend.generate_answers(iter(tasks), answer_file, count_wanted)) as answered:
        for task, answers in answered:
            num_answered += 1
            output.add(task, answers)
            if not output.num_missing:
                break
    return num_answered


def make_blocks(job: Job, index: int = 0, count: int = 1) -> None:
    """Generate the blocks of one shard, except those that are complete already.

    The tokens to generate are divided into blocks, and the blocks among `count` shards. Nothing
    happens if the row set is already there, or if the recipe generates nothing.

    Args:
        job: the recipe's data settings, the target and the folders.
        index: the number of the shard, from 0.
        count: how many shards there are.
    """
    # A shard has every count-th block. Find the blocks whose files are not there yet.
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
        # The pool of threads is opened before the backend, so the backend is closed first. Closing
        # the backend ends the waiting of the pool's threads.
        pool = stack.enter_context(start_request_threads(NUM_BLOCKS_AT_ONCE))
        _ = job.sources  # This property reads the sources. Read them before threads share them.
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

    Args:
        job: the recipe's data settings and the target.

    Raises:
        UserError: if a server has several models, unless exactly one of them has the target's name;
            or if this process lacks a part of the target's weights.
        ResourceError: if a server does not answer.
    """
    # Without servers, the target in this process generates.
    settings = job.config.generation
    target = job.target
    if not isinstance(settings, ServerRegeneration):
        return build_transformers_backend(
            target, settings.num_tokens, settings.batch_size, job.config.max_length
        )
    # A server may name the model by its whole name or by the last part of the name.
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
    """Generate the documents of a block, one part of the generation, and write them to its file.

    Answers that an earlier, killed process left on the disk are not generated again.

    Args:
        job: the recipe's data settings, the target and the folders.
        block: the block.
        backend: generates the answers.
        estimate: counts new answers, to announce what all answers will cost.
        advance: moves the progress bar; called with the number of new tokens.

    Returns:
        How many answers were kept, and how many each rule filtered. All counts are 0 if the file of
        the block exists already, e.g. because another process has made it.
    """
    # Several threads may each make a block. A fast tokenizer must not be used by several threads,
    # so each block gets a copy of it.
    path = job.blocks / f"{block.name}.arrow"
    tokenizer = copy.deepcopy(job.target.tokenizer)
    plan = BlockPlan(block, job.config, job.sources[0], tokenizer, job.target.end_ids)
    output = _create_output(plan, advance)

    # Only one process at a time may make this block. If an earlier process was killed while it held
    # the lock, probably for memory, a warning names the recipe key that saves memory. With servers
    # there is no such key.
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
    """Create the object that filters and collects the answers of a block.

    The tokens to generate are divided into blocks, and each block has such an object.

    Args:
        plan: the sources, settings and tokenizer of the block.
        advance: moves the progress bar; called with the number of new tokens.
    """
    # Answers of servers are filtered by the rules of the recipe. Answers of the model in this
    # process are all kept.
    settings = plan.config.regenerate
    names = settings.filter if isinstance(settings, ServerRegeneration) else ()
    rules: Rules = {name: RULES[name] for name in names}

    # The decoder converts answers to text. `template` has arguments for rendering conversations,
    # which are not needed here.
    decoder = ServerTokenizer(plan.tokenizer, plan.end_ids, template={})
    # Special tokens in the middle of an answer break a rule, except the special tokens around
    # reasoning and tool calls. `find_inner_ids` finds these exceptions, which are only needed if
    # there are rules.
    special = decoder.special - find_inner_ids(plan.tokenizer) if rules else decoder.special

    def pair_with_text(task: GenerationTask, answer: Answer) -> CheckedAnswer:
        """Return an answer in the form that the rules check: with its text and two facts.

        Without rules, the text is empty, because decoding it would take time. The facts:
        - `is_text`: the answer continues a text. Otherwise it is a turn of a conversation.
        - `special`: the special tokens that must not occur in the middle of an answer.
        """
        text = decoder.text(answer.token_ids) if rules else ""
        is_text = not task.prompt.messages
        return CheckedAnswer(answer, text, is_text=is_text, special=special)

    return BlockOutput(
        rules, pair_with_text, all_tokens=plan.config.loss_mask == "all", advance=advance
    )


def _generate_own_prompts(
    job: Job, plan: BlockPlan, backend: Backend, answer_file: AnswerFile, counts: AnswerCounts
) -> dict[int, list[GenerationPrompt]]:
    """Have the target generate prompts for each source `self` of the recipe.

    A source `self` has no rows: the target writes the user's questions, and later answers them.
    The tokens to generate are divided into blocks, and these prompts are for one block.

    Args:
        job: the recipe's data settings, the target and the folders.
        plan: the sources, settings and tokenizer of the block.
        backend: generates the prompts.
        answer_file: keeps the prompts on disk; prompts that are in it are not generated again.
        counts: the counts of the block. The number of prompts that were filtered is added to them.

    Returns:
        The prompts of each source `self`, by the number of the source.
    """

    def overlaps_suite(candidate: CheckedAnswer) -> bool:
        """Return whether a generated prompt overlaps a prompt that drafts are measured on."""
        return job.suite_index.find_overlap(build_user_row(candidate.text)) is not None

    own_prompts = {}
    for number, source in enumerate(plan.sources):
        if source.entry.source == SELF_SOURCE:
            own_prompts[number], prompt_counts = generate_self_prompts(
                plan, number, backend, answer_file, {"contaminated": overlaps_suite}
            )
            # The counts are of answers. A prompt is no answer, so a kept prompt is not counted.
            counts.add(replace(prompt_counts, kept=0))
    return own_prompts
