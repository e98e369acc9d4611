"""The runs of a prompt, and its record: the same as plain data, every token with its text."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdistill.decoding.decoder import Generation
from specdistill.decoding.proposer import Proposer
from specdistill.statistics.records import Configuration, HFGenerate, PromptRecord, RoundRecord, Timing
from specdistill.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget

SPELLING_CONTEXT = 8  # tokens before a token that decide its text (spaces, halves of characters)


@dataclass
class Runs:
    """All repetitions of one prompt. Drafts that are measured together share the lists of the plain runs.

    batch: the seed of the first prompt of its batch, the same for all that were decoded together; None: alone.
    """

    prompt: Prompt
    batch: int | None = None
    speculative: list[Generation] = field(default_factory=list)
    baseline: list[Generation] = field(default_factory=list)
    hf_generate: list[HFGenerate] = field(default_factory=list)


def prompt_records(
    suite: str, configuration: Configuration, target: FrozenTarget, proposer: Proposer, runs: Sequence[Runs]
) -> list[PromptRecord]:
    """The records of a suite's prompts. Tokens are those of the first repetition, times are medians over all."""
    tokenizer, vocabulary, records = target.tokenizer, proposer.vocabulary, []
    for run in runs:
        prompt, generation, context = run.prompt, run.speculative[0], [*run.prompt.token_ids]
        (first_text,) = spell(tokenizer, context, generation.token_ids[:1])
        context.append(generation.token_ids[0])
        rounds = []
        for entry in generation.rounds:
            texts = spell(tokenizer, context, entry.drafted), spell(tokenizer, context, entry.emitted)
            accepted = entry.drafted[: entry.num_accepted]
            rounds.append(RoundRecord(entry.drafted, texts[0], accepted, entry.emitted, texts[1], entry.num_off_path))
            context += entry.emitted
        plain, hf = run.baseline[0].token_ids, run.hf_generate
        record = PromptRecord(
            suite=suite,
            configuration=configuration,
            id=prompt.id,
            category=prompt.category,
            num_prompt_tokens=len(prompt.token_ids),
            prompt=prompt.text,
            text=tokenizer.decode(generation.token_ids, skip_special_tokens=False),
            first_token=generation.token_ids[0],
            first_token_text=first_text,
            rounds=tuple(rounds),
            speculative=_timing(run.speculative),
            baseline=_timing(run.baseline),
            hf_generate=HFGenerate(hf[0].num_tokens, statistics.median(timing.seconds for timing in hf)) if hf else None,
            num_in_draft_vocabulary=None if vocabulary is None else sum(token in vocabulary for token in plain),
            batch=run.batch,
            baseline_text=tokenizer.decode(plain, skip_special_tokens=False),
        )
        records.append(record)
    return records


def _timing(generations: Sequence[Generation]) -> Timing:
    return Timing(
        num_tokens=len(generations[0].token_ids),
        num_rounds=len(generations[0].rounds),
        seconds=statistics.median(generation.seconds for generation in generations),
        prefill_seconds=statistics.median(generation.prefill_seconds for generation in generations),
        draft_seconds=statistics.median(sum(entry.draft_seconds for entry in g.rounds) for g in generations),
        verify_seconds=statistics.median(sum(entry.verify_seconds for entry in g.rounds) for g in generations),
    )


def spell(tokenizer: Any, context: Sequence[int], token_ids: Sequence[int]) -> tuple[str, ...]:
    """Each token's text after the tokens before it. Together they are the whole text, except for characters that tokens share."""
    tokens = list(context[-SPELLING_CONTEXT:])
    before, texts = tokenizer.decode(tokens), []
    for token in token_ids:
        tokens.append(token)
        after = tokenizer.decode(tokens)
        texts.append(after[len(before) :] if after.startswith(before) else tokenizer.decode([token]))
        before = after
    return tuple(texts)
