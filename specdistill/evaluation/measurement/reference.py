"""Generate with transformers' own `generate()` and `forward`, as a reference for decoding.

The reference decides whether decoding is lossless, and whether plain decoding is fast enough as a
baseline. Nothing here calls this project's decoding, which cannot be its own judge: if it dropped a
soft cap or read a KV cache wrongly, it would do so with the draft and without. The penalties and
bans of a target's generation config (`repetition_penalty`, `suppress_tokens`) do not apply here;
they do not apply in decoding either.

Shapes: T positions, V vocabulary.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from specdistill.decoding.sampling import GREEDY, Sampling
from specdistill.decoding.sequence import Generation, Round
from specdistill.targets.frozen import FrozenTarget


def generate_reference(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    min_new_tokens: int = 0,
    sampling: Sampling = GREEDY,
    streamer: BaseStreamer | None = None,
) -> list[tuple[int, ...]]:
    """Return the completion of each prompt, up to and including its first stop token.

    Shorter prompts of a batch are padded on the left.

    Args:
        target: the target that generates.
        prompts: token ids of each prompt of the batch.
        max_new_tokens: the most tokens of a completion.
        min_new_tokens: the fewest tokens of a completion.
        sampling: how tokens are chosen.
        streamer: is given each token as it is generated (see `generate()`); None for none.

    Returns:
        The token ids of each completion, without the prompt.
    """
    longest = max(map(len, prompts))
    output = _generate(
        target,
        prompts,
        sampling,
        streamer,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
    )
    return [_cut_at_stop(row[longest:], target.eos_token_ids) for row in output.sequences.tolist()]


def time_generate(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    sampling: Sampling = GREEDY,
) -> list[Generation]:
    """Time `generate()`, and return its completions in the form of plain decoding.

    Each step after the first becomes a round, in which all prompts take part. The prompts of a
    batch share the time of a step in proportion to their numbers of tokens. The prefill includes
    the time that `generate()` takes before its first step and after its last.

    Args:
        target: the target that generates.
        prompts: token ids of each prompt of the batch.
        counts: the most tokens of each completion. When sampling, which gives other tokens each
            time, a completion has exactly this many tokens, whatever is drawn.
        sampling: how tokens are chosen.
    """
    limits = {
        "max_new_tokens": max(counts),
        "min_new_tokens": 0 if sampling.is_greedy else max(counts),
    }
    clock = _Clock()
    start = time.perf_counter()
    generated = generate_reference(target, prompts, sampling=sampling, streamer=clock, **limits)
    seconds = time.perf_counter() - start
    # The first of the recorded times is before the prefill: `generate()` streams the prompt.
    steps = [later - earlier for earlier, later in pairwise(clock.times[1:])]
    completions = [completion[:count] for completion, count in zip(generated, counts, strict=True)]
    num_tokens = sum(map(len, completions))
    generations = []
    for prompt, completion in zip(prompts, completions, strict=True):
        # The share of this prompt in the time of the batch.
        share = len(completion) / num_tokens
        rounds = tuple(Round((), 0, (), 0.0, step * share) for step in steps)
        prefill = (seconds - sum(steps)) * share
        generations.append(
            Generation(
                tuple(prompt),
                completion,
                rounds,
                prefill,
                seconds * share,
                completion[-1] in target.eos_token_ids,
            )
        )
    return generations


class _Clock(BaseStreamer):
    """A streamer that records when `generate()` has each token.

    `generate()` hands tokens over on the CPU, so the device has finished computing them.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def compute_next_token_probabilities(
    target: FrozenTarget, token_ids: Sequence[int], sampling: Sampling
) -> Tensor:
    """Return the distribution that transformers samples the next token from, [V] float64.

    Its own logits processors are applied.
    """
    output = _generate(target, [token_ids], sampling, None, max_new_tokens=1, output_scores=True)
    probabilities: Tensor = output.scores[0][0].double().softmax(-1)
    return probabilities


@torch.inference_mode()
def compute_logits(target: FrozenTarget, token_ids: Sequence[int], num_last: int) -> Tensor:
    """Return the logits after each of the last `num_last` tokens, [T, V] float32.

    They come from the model's own forward. Where the model class supports it, the LM head reads
    only these positions: the logits of a long prompt would fill the memory.
    """
    ids = torch.tensor([list(token_ids)], device=target.device)
    options = {"logits_to_keep": num_last} if target.model._supports_logits_to_keep() else {}
    rows: Tensor = (
        target.model(input_ids=ids, use_cache=False, **options).logits[0, -num_last:].float()
    )
    return rows


def _generate(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    streamer: BaseStreamer | None,
    **options: object,
) -> Any:
    """Call transformers' `generate()` on a batch with these options, and no others of the model.

    `options` are further keys of the `GenerationConfig`. The result is the one that `generate()`
    has with `return_dict_in_generate`.
    """
    longest = max(map(len, prompts))
    stop_ids = sorted(target.eos_token_ids)
    pad = min(stop_ids, default=0)
    # Shorter prompts are padded on the left, and the mask hides the padding.
    ids = torch.tensor(
        [[pad] * (longest - len(row)) + [*row] for row in prompts], device=target.device
    )
    mask = torch.tensor(
        [[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=target.device
    )
    chosen = {"do_sample": False} if sampling.is_greedy else {"do_sample": True, **vars(sampling)}
    # The model's own generation config is replaced for the call: generate() takes from it every
    # option that it is not given.
    generation_config = target.model.generation_config
    target.model.generation_config = GenerationConfig(
        eos_token_id=stop_ids or None,
        pad_token_id=pad,
        return_dict_in_generate=True,
        **chosen,
        **options,
    )
    try:
        return target.model.generate(ids, attention_mask=mask, streamer=streamer)
    finally:
        target.model.generation_config = generation_config


def _cut_at_stop(token_ids: Sequence[int], stop_ids: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens up to and including the first stop token."""
    end = next(
        (index for index, token in enumerate(token_ids, start=1) if token in stop_ids),
        len(token_ids),
    )
    return tuple(token_ids[:end])
