"""The measurement: every prompt with and without the draft, interleaved, on an otherwise quiet device.

Timing is paired. The ways of decoding a prompt (plain, and with each draft) run one right after the other, which of them comes
first rotates, and every repetition goes through all prompts again, so that what drifts on the machine drifts for all. Medians over
the repetitions are kept, per prompt.

With a batch size above 1 prompts are decoded in batches, in the suite's order, the last batch holding what is left; all ways of decoding
get the same batches. A prompt's times are then its shares (see `BatchDecoder.generate`): an equal part of each round that it took part
in. They add up to the time that the batches took, so that totals and speedups are right. A single prompt's share says little, since it
depends on its neighbours: intervals of times resample batches.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from specdistill.decoding.batch_decoder import BatchDecoder
from specdistill.decoding.decoder import Decoder, Generation, Round
from specdistill.decoding.proposer import Proposer
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import DynamicTree, StaticTree, tree_shape
from specdistill.errors import UserError
from specdistill.measurement.batches import Batch, in_batches, some
from specdistill.statistics.configuration import ALL, Configuration
from specdistill.statistics.records import HFGenerate, PromptRecord, RoundRecord, Timing
from specdistill.statistics.theory import RoundCost
from specdistill.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget

NUM_COST_PROMPTS = 4  # prompts on which the rounds of shorter drafts are timed
NUM_HF_PROMPTS = 32  # prompts on which the library's own generate is timed as well; fewer leave its interval wider than 5 %
TEXT_CONTEXT = 8  # tokens before a token that decide how it is spelt (spaces, halves of characters)


GREEDY = Sampling()
AnyDecoder = Decoder | BatchDecoder


@dataclass(frozen=True)
class Settings:
    """How to measure; every number in tokens, prompts or repetitions. The seed is for sampling, warmup counts batches.

    tree: drafted in place of a chain; num_speculative_tokens is then its depth. context_bucket says how the prompts that it goes with
    were cut (see `Configuration`).
    """

    num_speculative_tokens: int
    max_new_tokens: int
    sampling: Sampling = GREEDY
    repeats: int = 3
    warmup: int = 2
    seed: int = 0
    batch_size: int = 1
    tree: StaticTree | DynamicTree | None = None
    context_bucket: str = ALL

    def __post_init__(self) -> None:
        if self.tree and self.tree.depth != self.num_speculative_tokens:
            expected = f"{self.tree.depth}, the depth of the tree, or eval.tree=null"
            raise UserError("eval.num_speculative_tokens", got=self.num_speculative_tokens, expected=expected)
        if self.tree and self.batch_size > 1:
            raise UserError("eval.batch_size", got=f"{self.batch_size} with a tree", expected="1, or eval.tree=null")

    @property
    def configuration(self) -> Configuration:
        tree = self.tree.settings if self.tree else None
        return Configuration(self.num_speculative_tokens, self.sampling.temperature, self.batch_size, tree, self.context_bucket)

    @classmethod
    def of(cls, section: Any) -> "Settings":
        """From a recipe's eval section, or from another command's options of the same names."""
        tree = tree_shape(**vars(section.tree)) if section.tree else None
        return cls(
            num_speculative_tokens=tree.depth if tree else section.num_speculative_tokens,
            max_new_tokens=section.max_new_tokens,
            sampling=Sampling(section.temperature, section.top_p, section.top_k),
            repeats=section.repeats,
            warmup=section.warmup,
            seed=section.seed,
            batch_size=section.batch_size,
            tree=tree,
        )


@dataclass
class Runs:
    """All repetitions of one prompt. Drafts that were measured together share the lists of the plain runs.

    batch: the seed of the first prompt of its batch, by which prompts decoded together are known; None: alone.
    """

    prompt: Prompt
    batch: int | None = None
    speculative: list[Generation] = field(default_factory=list)
    baseline: list[Generation] = field(default_factory=list)
    hf_generate: list[HFGenerate] = field(default_factory=list)


def measure(target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings) -> list[Runs]:
    """Decode every prompt `repeats` times in both ways. Sampled text is the same in each repetition: its seed is the
    prompt's.
    """
    (runs,) = measure_together(target, [proposer], prompts, settings)
    return runs


def measure_together(
    target: FrozenTarget, proposers: Sequence[Proposer], prompts: Sequence[Prompt], settings: Settings
) -> list[list[Runs]]:
    """`measure` of several drafts at once, each draft's runs in the order given: a prompt is decoded with every draft and once
    without, so that the drafts share one baseline and their times are paired with each other.
    """
    with_draft, plain = [_decoder(target, settings, proposer) for proposer in proposers], _decoder(target, settings)
    batches = in_batches(prompts, settings.batch_size)
    baselines = [
        Runs(prompt, settings.seed + batch.start if settings.batch_size > 1 else None)
        for batch in batches
        for prompt in batch.prompts
    ]
    runs = [[Runs(run.prompt, run.batch, [], run.baseline, run.hf_generate) for run in baselines] for _ in proposers]
    timed_by_hf = some(batches, math.ceil(NUM_HF_PROMPTS / settings.batch_size)) if settings.sampling.is_greedy else []

    def speculative(decoder: AnyDecoder, batch: Batch) -> list[Generation]:
        return _generate(decoder, batch, settings, settings.num_speculative_tokens)

    def baseline(batch: Batch) -> list[Generation]:
        return _generate(plain, batch, settings, 0)

    warm_up = some(batches, settings.warmup)
    with progress("measuring", len(warm_up) + settings.repeats * len(batches)) as advance, frozen_garbage_collector():
        for batch in warm_up:
            for decoder in with_draft:
                speculative(decoder, batch)
            _hf_generate(target, batch.prompts, baseline(batch))
            advance()
        for repeat in range(settings.repeats):
            for number, batch in enumerate(batches):
                shared = baselines[batch.start : batch.end]
                ways = [None, *range(len(proposers))]
                first = (repeat + number) % len(ways)
                for way in ways[first:] + ways[:first]:
                    if way is None:
                        for run, generation in zip(shared, baseline(batch), strict=True):
                            run.baseline.append(generation)
                    else:
                        own = runs[way][batch.start : batch.end]
                        for run, generation in zip(own, speculative(with_draft[way], batch), strict=True):
                            run.speculative.append(generation)
                if batch in timed_by_hf:
                    timings = _hf_generate(target, batch.prompts, [run.baseline[-1] for run in shared])
                    for run, timing in zip(shared, timings, strict=True):
                        run.hf_generate.append(timing)
                advance()
    return runs


def round_costs(target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings) -> list[RoundCost]:
    """What a round costs at every K' up to K, timed on a few prompts, the lengths one right after the other; of chains only."""
    if settings.tree:
        return []
    decoder = _decoder(target, settings, proposer)
    probed = some(in_batches(prompts, settings.batch_size), math.ceil(NUM_COST_PROMPTS / settings.batch_size))
    rounds: dict[int, list[Round]] = {k: [] for k in range(1, settings.num_speculative_tokens + 1)}
    with progress("step costs", len(probed) * len(rounds)) as advance, frozen_garbage_collector():
        for batch in probed:
            for k, done in rounds.items():
                for generation in _generate(decoder, batch, settings, k):
                    done += [entry for entry in generation.rounds if len(entry.drafted) == k]
                advance()
    return [
        RoundCost(
            k,
            1000 * statistics.median(entry.verify_seconds for entry in done),
            1000 * statistics.median(entry.draft_seconds for entry in done),
        )
        for k, done in rounds.items()
        if done
    ]


def greedy_pairs(
    target: FrozenTarget, proposer: Proposer, runs: Sequence[Runs], settings: Settings
) -> Iterator[tuple[Prompt, Generation, Generation]]:
    """(prompt, greedy with the draft, greedy without) of every prompt, the latter always decoded alone: from the runs, or
    decoded once more if those were sampled or in batches.
    """
    if settings.sampling.is_greedy and settings.batch_size == 1:
        yield from ((run.prompt, run.speculative[0], run.baseline[0]) for run in runs)
        return
    greedy = replace(settings, sampling=GREEDY)
    with_draft, plain = _decoder(target, greedy, proposer), Decoder(target)
    batches = in_batches([run.prompt for run in runs], settings.batch_size)
    with progress("greedy identity", len(batches)) as advance:
        for batch in batches:
            if settings.sampling.is_greedy:
                written = [run.speculative[0] for run in runs[batch.start : batch.end]]
            else:
                written = _generate(with_draft, batch, greedy, greedy.num_speculative_tokens)
            for prompt, generation in zip(batch.prompts, written, strict=True):
                alone = plain.generate(prompt.token_ids, max_new_tokens=greedy.max_new_tokens)
                yield prompt, generation, alone
            advance()


def records(
    suite: str, configuration: Configuration, target: FrozenTarget, proposer: Proposer, runs: Sequence[Runs]
) -> list[PromptRecord]:
    """The runs as plain data; texts are spelt out by the target's tokenizer."""
    vocabulary = proposer.vocabulary
    return [_record(suite, configuration, target, run, vocabulary) for run in runs]


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar with the time left, on stderr; yields the function that advances it by one."""
    bars = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*bars, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def frozen_garbage_collector() -> Iterator[None]:
    """Keeps the garbage collector off what is there already: a pass over torch and transformers takes tens of milliseconds, and
    would strike one side of a pair.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _decoder(target: FrozenTarget, settings: Settings, proposer: Proposer | None = None) -> AnyDecoder:
    return Decoder(target, proposer) if settings.batch_size == 1 else BatchDecoder(target, proposer)


def _generate(decoder: AnyDecoder, batch: Batch, settings: Settings, num_speculative_tokens: int) -> list[Generation]:
    """A prompt's seed is its own, whatever batch it is in."""
    generators = [torch.Generator().manual_seed(settings.seed + index) for index in range(batch.start, batch.end)]
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "num_speculative_tokens": num_speculative_tokens,
        "sampling": settings.sampling,
    }
    if isinstance(decoder, BatchDecoder):
        return decoder.generate([prompt.token_ids for prompt in batch.prompts], generators=generators, **options)
    (prompt,), (generator,), tree = batch.prompts, generators, settings.tree if decoder.proposer else None
    return [decoder.generate(prompt.token_ids, generator=generator, tree=tree, **options)]


@torch.inference_mode()
def _hf_generate(target: FrozenTarget, prompts: Sequence[Prompt], ours: Sequence[Generation]) -> list[HFGenerate]:
    """The library's greedy loop over the same numbers of tokens; prompts of a batch are padded on the left and share the time by their
    tokens.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts)
    padding, pad = [longest - len(prompt.token_ids) for prompt in prompts], min(target.eos_token_ids, default=0)
    ids = torch.tensor(
        [[pad] * left + [*prompt.token_ids] for left, prompt in zip(padding, prompts, strict=True)], device=target.device
    )
    mask = torch.tensor([[0] * left + [1] * (longest - left) for left in padding], device=target.device)
    most = max(len(generation.token_ids) for generation in ours)
    _synchronize(target.device)
    start = time.perf_counter()
    output = target.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=most, pad_token_id=pad)
    _synchronize(target.device)
    seconds = time.perf_counter() - start
    written = [min(len(generation.token_ids), output.shape[1] - longest) for generation in ours]
    return [HFGenerate(count, seconds * count / sum(written)) for count in written]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record(
    suite: str, configuration: Configuration, target: FrozenTarget, run: Runs, vocabulary: frozenset[int] | None
) -> PromptRecord:
    prompt, written = run.prompt, run.speculative[0]
    context = [*prompt.token_ids]
    (first_text,) = spell(target.tokenizer, context, written.token_ids[:1])
    context.append(written.token_ids[0])
    rounds = []
    for entry in written.rounds:
        drafted_text = spell(target.tokenizer, context, entry.drafted)
        emitted_text = spell(target.tokenizer, context, entry.emitted)
        accepted = entry.drafted[: entry.num_accepted]
        rounds.append(RoundRecord(entry.drafted, drafted_text, accepted, entry.emitted, emitted_text, entry.num_off_path))
        context += entry.emitted
    plain = run.baseline[0].token_ids
    return PromptRecord(
        suite=suite,
        configuration=configuration,
        id=prompt.id,
        category=prompt.category,
        num_prompt_tokens=len(prompt.token_ids),
        prompt=prompt.text,
        text=target.tokenizer.decode(written.token_ids, skip_special_tokens=False),
        first_token=written.token_ids[0],
        first_token_text=first_text,
        rounds=tuple(rounds),
        speculative=_timing(run.speculative),
        baseline=_timing(run.baseline),
        hf_generate=_median_hf(run.hf_generate),
        num_in_draft_vocabulary=None if vocabulary is None else sum(token in vocabulary for token in plain),
        batch=run.batch,
        baseline_text=target.tokenizer.decode(plain, skip_special_tokens=False),
    )


def _timing(generations: Sequence[Generation]) -> Timing:
    return Timing(
        num_tokens=len(generations[0].token_ids),
        num_rounds=len(generations[0].rounds),
        seconds=statistics.median(generation.seconds for generation in generations),
        prefill_seconds=statistics.median(generation.prefill_seconds for generation in generations),
        draft_seconds=statistics.median(sum(entry.draft_seconds for entry in g.rounds) for g in generations),
        verify_seconds=statistics.median(sum(entry.verify_seconds for entry in g.rounds) for g in generations),
    )


def _median_hf(timings: Sequence[HFGenerate]) -> HFGenerate | None:
    if not timings:
        return None
    return HFGenerate(timings[0].num_tokens, statistics.median(timing.seconds for timing in timings))


def spell(tokenizer: object, context: Sequence[int], token_ids: Sequence[int]) -> tuple[str, ...]:
    """Each token's text as it continues what stands before it; together they are the text, but for characters that tokens
    share.
    """
    decode = tokenizer.decode  # type: ignore[attr-defined]
    tokens = list(context[-TEXT_CONTEXT:])
    before = decode(tokens)
    texts = []
    for token in token_ids:
        tokens.append(token)
        after = decode(tokens)
        texts.append(after[len(before) :] if after.startswith(before) else decode([token]))
        before = after
    return tuple(texts)
