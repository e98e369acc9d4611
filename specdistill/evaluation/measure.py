"""The measurement: every prompt with and without the draft, turn about, on an otherwise quiet device.

Timing is paired. The ways of decoding a prompt (plain, and with each draft) run one right after the other, which of them comes
first rotates, and every repetition goes through all prompts again, so that what drifts on the machine drifts for all. Medians over
the repetitions are kept, per prompt.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from specdistill.decoding.decoder import Decoder, Generation, Round
from specdistill.decoding.draft_model import DraftModelProposer
from specdistill.decoding.ngram import NgramProposer
from specdistill.decoding.proposers import HeadProposer, Proposer
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import DynamicTree, StaticTree, tree_shape
from specdistill.errors import UserError
from specdistill.evaluation.cells import ALL, Cell
from specdistill.evaluation.records import HFGenerate, PromptRecord, RoundRecord, Timing
from specdistill.evaluation.suites import Prompt, evenly
from specdistill.evaluation.theory import RoundCost
from specdistill.targets.frozen import FrozenTarget

NUM_COST_PROMPTS = 4  # prompts on which the rounds of shorter drafts are timed
NUM_HF_PROMPTS = 12  # prompts on which the library's own generate is timed as well
TEXT_CONTEXT = 8  # tokens before a token that decide how it is spelt (spaces, halves of characters)


GREEDY = Sampling()


@dataclass(frozen=True)
class Settings:
    """How to measure; every number in tokens, prompts or repetitions. The seed is for sampling.

    tree: drafted in place of a chain; num_speculative_tokens is then its depth. context_bucket says how the prompts that it goes with
    were cut (see `Cell`).
    """

    num_speculative_tokens: int
    max_new_tokens: int
    sampling: Sampling = GREEDY
    repeats: int = 3
    warmup: int = 2
    seed: int = 0
    tree: StaticTree | DynamicTree | None = None
    context_bucket: str = ALL

    def __post_init__(self) -> None:
        if self.tree and self.tree.depth != self.num_speculative_tokens:
            expected = f"{self.tree.depth}, the depth of the tree, or eval.tree=null"
            raise UserError("eval.num_speculative_tokens", got=self.num_speculative_tokens, expected=expected)

    @property
    def cell(self) -> Cell:
        tree = self.tree.settings if self.tree else None
        return Cell(self.num_speculative_tokens, self.sampling.temperature, tree=tree, context_bucket=self.context_bucket)

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
            tree=tree,
        )


@dataclass
class Runs:
    """All repetitions of one prompt. Drafts that were measured together share the lists of the plain runs."""

    prompt: Prompt
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
    with_draft, plain = [Decoder(target, proposer) for proposer in proposers], Decoder(target)
    baselines = [Runs(prompt) for prompt in prompts]
    runs = [[Runs(run.prompt, [], run.baseline, run.hf_generate) for run in baselines] for _ in proposers]
    hf_ids = {prompt.id for prompt in evenly(prompts, [prompt.category for prompt in prompts], NUM_HF_PROMPTS)}

    def speculative(decoder: Decoder, prompt: Prompt, index: int) -> Generation:
        return _generate(decoder, prompt, settings, index, settings.num_speculative_tokens)

    def baseline(prompt: Prompt, index: int) -> Generation:
        return _generate(plain, prompt, settings, index, 0)

    with progress("measuring", settings.warmup + settings.repeats * len(prompts)) as advance, settled_memory():
        for index, prompt in enumerate(evenly(prompts, [prompt.category for prompt in prompts], settings.warmup)):
            for decoder in with_draft:
                speculative(decoder, prompt, index)
            _hf_generate(target, prompt, len(baseline(prompt, index).token_ids))
            advance()
        for repeat in range(settings.repeats):
            for index, shared in enumerate(baselines):
                ways = [None, *range(len(proposers))]
                first = (repeat + index) % len(ways)
                for way in ways[first:] + ways[:first]:
                    if way is None:
                        shared.baseline.append(baseline(shared.prompt, index))
                    else:
                        runs[way][index].speculative.append(speculative(with_draft[way], shared.prompt, index))
                if settings.sampling.is_greedy and shared.prompt.id in hf_ids:
                    shared.hf_generate.append(_hf_generate(target, shared.prompt, len(shared.baseline[-1].token_ids)))
                advance()
    return runs


def shorter_drafts(target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings) -> list[RoundCost]:
    """What a round costs at every K' up to K, timed on a few prompts, the lengths one right after the other; of chains only."""
    if settings.tree:
        return []
    decoder = Decoder(target, proposer)
    probed = evenly(prompts, [prompt.category for prompt in prompts], NUM_COST_PROMPTS)
    rounds: dict[int, list[Round]] = {k: [] for k in range(1, settings.num_speculative_tokens + 1)}
    with progress("step costs", len(probed) * len(rounds)) as advance, settled_memory():
        for index, prompt in enumerate(probed):
            for k, done in rounds.items():
                done += [entry for entry in _generate(decoder, prompt, settings, index, k).rounds if len(entry.drafted) == k]
                advance()
    return [
        RoundCost(
            k,
            statistics.median(entry.verify_seconds for entry in done),
            statistics.median(entry.draft_seconds for entry in done),
        )
        for k, done in rounds.items()
        if done
    ]


def greedy_pairs(
    target: FrozenTarget, proposer: Proposer, runs: Sequence[Runs], settings: Settings
) -> Iterator[tuple[Prompt, Generation, Generation]]:
    """(prompt, greedy with the draft, greedy without) of every prompt: from the runs, or decoded once more if those were
    sampled.
    """
    if settings.sampling.is_greedy:
        yield from ((run.prompt, run.speculative[0], run.baseline[0]) for run in runs)
        return
    with_draft, plain = Decoder(target, proposer), Decoder(target)
    greedy = Settings(settings.num_speculative_tokens, settings.max_new_tokens, tree=settings.tree)
    with progress("greedy identity", len(runs)) as advance:
        for run in runs:
            yield (
                run.prompt,
                _generate(with_draft, run.prompt, greedy, 0, greedy.num_speculative_tokens),
                _generate(plain, run.prompt, greedy, 0, 0),
            )
            advance()


def records(suite: str, cell: Cell, target: FrozenTarget, proposer: Proposer, runs: Sequence[Runs]) -> list[PromptRecord]:
    """The runs as plain data; texts are spelt out by the target's tokenizer."""
    vocabulary = draft_vocabulary(proposer)
    return [_record(suite, cell, target, run, vocabulary) for run in runs]


def draft_vocabulary(proposer: Proposer) -> frozenset[int] | None:
    """The target's token ids that the draft can propose; None when it can propose any token of the text."""
    if isinstance(proposer, HeadProposer):
        return frozenset(proposer.target_ids_W.tolist())
    if isinstance(proposer, DraftModelProposer) and proposer.vocabulary:
        return frozenset(proposer.vocabulary.target_ids_W.tolist())
    return None


def draft_sampling(proposer: Proposer, sampling: Sampling, tree: StaticTree | DynamicTree | None = None) -> str:
    """`greedy` when each drafted token is a certain guess, as in every dynamic tree, `probabilistic` when it is drawn from the
    draft's law.
    """
    if tree:
        return "probabilistic" if tree.candidates_are_drawn(sampling) else "greedy"
    return "greedy" if sampling.is_greedy or isinstance(proposer, NgramProposer) else "probabilistic"


def draft_settings(proposer: Proposer) -> dict[str, Any]:
    """What the report's settings say of the method's own; null where they are another method's."""
    settings: dict[str, Any] = dict.fromkeys(("confidence_threshold", "draft_context", "ngram"))
    if isinstance(proposer, DraftModelProposer):
        settings |= {"confidence_threshold": proposer.confidence_threshold, "draft_context": proposer.context}
    if isinstance(proposer, NgramProposer):
        settings["ngram"] = {"min": proposer.min_ngram, "max": proposer.max_ngram, "lookup": proposer.lookup}
    return settings


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar with the time left, on stderr; yields the function that advances it by one."""
    bars = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*bars, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def settled_memory() -> Iterator[None]:
    """Keeps the garbage collector off what is there already: a pass over torch and transformers takes tens of milliseconds, and
    would strike one side of a pair.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _generate(decoder: Decoder, prompt: Prompt, settings: Settings, index: int, num_speculative_tokens: int) -> Generation:
    return decoder.generate(
        prompt.token_ids,
        max_new_tokens=settings.max_new_tokens,
        num_speculative_tokens=num_speculative_tokens,
        tree=settings.tree if decoder.proposer else None,
        sampling=settings.sampling,
        generator=torch.Generator().manual_seed(settings.seed + index),
    )


@torch.inference_mode()
def _hf_generate(target: FrozenTarget, prompt: Prompt, num_tokens: int) -> HFGenerate:
    """The library's greedy loop over the same number of tokens."""
    ids = torch.tensor([prompt.token_ids], device=target.device)
    _synchronize(target.device)
    start = time.perf_counter()
    output = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        pad_token_id=min(target.eos_token_ids, default=0),
    )
    _synchronize(target.device)
    return HFGenerate(output.shape[1] - ids.shape[1], time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record(suite: str, cell: Cell, target: FrozenTarget, run: Runs, vocabulary: frozenset[int] | None) -> PromptRecord:
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
        cell=cell,
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
