"""What a target generates in transformers' own `generate()` and `forward`: the reference for losslessness, and for the baseline's speed.

Nothing here is computed by this project's decoding, which cannot be its own judge: a soft cap that it dropped, or a KV cache that it read
wrongly, would be dropped with the draft and without. The penalties and bans of a target's generation config (`repetition_penalty`,
`suppress_tokens`) do not apply, as in decoding.

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

from specdistill.decoding.decoder import Generation, Round
from specdistill.decoding.sampling import GREEDY, Sampling
from specdistill.targets.frozen import FrozenTarget


def generate(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    min_new_tokens: int = 0,
    sampling: Sampling = GREEDY,
    streamer: BaseStreamer | None = None,
) -> list[tuple[int, ...]]:
    """The completions of token ids, each up to and with its first stop token. Shorter prompts of a batch are padded on the left."""
    longest = max(map(len, prompts))
    limits = {"max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens}
    output = _generate(target, prompts, sampling, streamer, **limits)
    return [_up_to_stop(row[longest:], target.eos_token_ids) for row in output.sequences.tolist()]


def timed_generate(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    sampling: Sampling = GREEDY,
) -> list[Generation]:
    """The completions with times as plain decoding has them: a round for each step after the first, in which all prompts take part.

    counts: tokens at most of each completion; sampled, which gives other tokens each time, it is the number, whatever is drawn.
    The prompts of a batch share the time of a step by their numbers of tokens. What `generate()` does before its first step and after
    its last is in the prefill.
    """
    limits = {
        "max_new_tokens": max(counts),
        "min_new_tokens": 0 if sampling.is_greedy else max(counts),
    }
    clock, start = _Clock(), time.perf_counter()
    whole = generate(target, prompts, sampling=sampling, streamer=clock, **limits)
    seconds = time.perf_counter() - start
    steps = [
        later - earlier for earlier, later in pairwise(clock.times[1:])
    ]  # the first is before the prefill
    completions = [completion[:count] for completion, count in zip(whole, counts, strict=True)]
    num_tokens = sum(map(len, completions))
    generations = []
    for prompt, completion in zip(prompts, completions, strict=True):
        share = len(completion) / num_tokens
        rounds = tuple(Round((), 0, (), 0.0, step * share) for step in steps)
        prefill = (seconds - sum(steps)) * share
        stopped = completion[-1] in target.eos_token_ids
        generations.append(
            Generation(tuple(prompt), completion, rounds, prefill, seconds * share, stopped)
        )
    return generations


class _Clock(BaseStreamer):
    """When `generate()` has a token, which it hands over on the CPU: so the device has made it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def next_token_probabilities(
    target: FrozenTarget, token_ids: Sequence[int], sampling: Sampling
) -> Tensor:
    """[V] float64: the distribution that transformers samples from, after its own logits processors."""
    output = _generate(target, [token_ids], sampling, None, max_new_tokens=1, output_scores=True)
    probabilities: Tensor = output.scores[0][0].double().softmax(-1)
    return probabilities


@torch.inference_mode()
def logits(target: FrozenTarget, token_ids: Sequence[int]) -> Tensor:
    """[T, V] float32, after each token: the model's own forward."""
    ids = torch.tensor([list(token_ids)], device=target.device)
    rows: Tensor = target.model(input_ids=ids, use_cache=False).logits[0].float()
    return rows


def _generate(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    streamer: BaseStreamer | None,
    **options: Any,
) -> Any:
    longest, stop_ids = max(map(len, prompts)), sorted(target.eos_token_ids)
    pad = min(stop_ids, default=0)
    ids = torch.tensor(
        [[pad] * (longest - len(row)) + [*row] for row in prompts], device=target.device
    )
    mask = torch.tensor(
        [[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=target.device
    )
    chosen = {"do_sample": False} if sampling.is_greedy else {"do_sample": True, **vars(sampling)}
    own = target.model.generation_config  # where generate() finds whatever it is not given
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
        target.model.generation_config = own


def _up_to_stop(token_ids: Sequence[int], stop_ids: frozenset[int]) -> tuple[int, ...]:
    end = next(
        (index for index, token in enumerate(token_ids, start=1) if token in stop_ids),
        len(token_ids),
    )
    return tuple(token_ids[:end])
