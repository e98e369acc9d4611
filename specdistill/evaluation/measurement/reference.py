"""Generate with transformers' own `generate()` and `forward`, as a reference for decoding.

The reference decides whether decoding is lossless, and whether plain decoding is fast enough as a
baseline. Nothing here calls this project's decoding, because a bug of that decoding would then hide
itself: if it dropped a soft cap of the logits or misread a KV cache, it would do so with the draft
and without. The penalties and bans of a target's generation config (`repetition_penalty`,
`suppress_tokens`) do not apply here, as they do not apply in this project's decoding.

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
    """Complete prompts with transformers' `generate()`, as a reference for this project's decoding.

    Each completion ends with its first stop token, or after `max_new_tokens` tokens.

    Args:
        target: the target that generates.
        prompts: token ids of each prompt of the batch.
        max_new_tokens: the most tokens of a completion.
        min_new_tokens: the fewest tokens of a completion.
        sampling: how tokens are chosen.
        streamer: an object to which `generate()` passes each token as soon as it is generated;
            None for none.

    Returns:
        The token ids of each completion, without the prompt.
    """
    longest = max(map(len, prompts))

    # Each row of the output is a prompt, padded on the left, and its completion. So every
    # completion begins at the same column. Rows that stopped early are padded after their stop
    # token.
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
    """Time transformers' `generate()` on a batch, and return its completions with their times.

    The result has the form of this project's plain decoding: each step of `generate()` after the
    first token becomes a round without draft tokens. Each prompt is charged a share of the batch's
    time, in proportion to the length of its completion. The time that `generate()` takes before its
    first step and after its last one counts as prefill.

    Args:
        target: the target that generates.
        prompts: token ids of each prompt of the batch.
        counts: the most tokens of each completion. A sampled completion has exactly this many: stop
            tokens are ruled out, and every completion is cut to its own count.
        sampling: how tokens are chosen.

    Returns:
        The completion of each prompt with its times.
    """
    # Sampled completions get a fixed length, so that they take as much work as the completions with
    # which their time is compared. Greedy completions need no fixed length: they stop at the same
    # token as the completions with which they are compared.
    limits = {
        "max_new_tokens": max(counts),
        "min_new_tokens": 0 if sampling.is_greedy else max(counts),
    }

    # Time the call as a whole, and each of its steps.
    clock = _Clock()
    start = time.perf_counter()
    generated = generate_reference(target, prompts, sampling=sampling, streamer=clock, **limits)
    seconds = time.perf_counter() - start

    # times[0] is the time before the prefill, because `generate()` streams the prompt first.
    # times[1] is the time of the first token, which ends the prefill. Steps are the differences
    # from there.
    step_seconds = [later - earlier for earlier, later in pairwise(clock.times[1:])]

    # Charge each prompt its share of every step. A round has no draft tokens, so all of its time is
    # verification.
    completions = [completion[:count] for completion, count in zip(generated, counts, strict=True)]
    num_tokens = sum(map(len, completions))
    generations = []
    for prompt, completion in zip(prompts, completions, strict=True):
        share = len(completion) / num_tokens
        rounds = tuple(
            Round(
                drafted=(),
                num_accepted=0,
                emitted=(),
                draft_seconds=0.0,
                verify_seconds=step * share,
            )
            for step in step_seconds
        )
        prefill = (seconds - sum(step_seconds)) * share
        generations.append(
            Generation(
                prompt_ids=tuple(prompt),
                token_ids=completion,
                rounds=rounds,
                prefill_seconds=prefill,
                seconds=seconds * share,
                stopped=completion[-1] in target.eos_token_ids,
            )
        )
    return generations


class _Clock(BaseStreamer):
    """A streamer that records the time at which `generate()` has each token.

    `generate()` passes tokens to a streamer on the CPU, so the device has finished computing them.
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

    V is the size of the vocabulary. The distribution is the softmax of the scores of `generate()`,
    to which transformers' own logits processors (temperature, top_k, top_p) have been applied.

    Args:
        target: the target model.
        token_ids: the tokens before the next token.
        sampling: the temperature, top_p and top_k.
    """
    # The scores are those of the first step [0], and of the only prompt of the batch [0].
    output = _generate(
        target, [token_ids], sampling, streamer=None, max_new_tokens=1, output_scores=True
    )
    probabilities: Tensor = output.scores[0][0].double().softmax(-1)
    return probabilities


@torch.inference_mode()
def compute_logits(target: FrozenTarget, token_ids: Sequence[int], num_last: int) -> Tensor:
    """Return the target's logits after each of the last `num_last` tokens of a sequence.

    The logits come from transformers' own forward of the model.

    Returns:
        [T, V] float32, T being `num_last` and V the size of the vocabulary.
    """
    # If the model class supports it, compute only these positions in the LM head: the logits of all
    # positions of a long sequence would fill the memory. Otherwise the forward returns the logits
    # of all positions, which are cut to the last ones below.
    ids = torch.tensor([list(token_ids)], device=target.device)
    options = {"logits_to_keep": num_last} if target.model._supports_logits_to_keep() else {}
    logits_1TV = target.model(input_ids=ids, use_cache=False, **options).logits
    logits_TV: Tensor = logits_1TV[0, -num_last:].float()
    return logits_TV


def _generate(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    streamer: BaseStreamer | None,
    **options: object,
) -> Any:
    """Call transformers' `generate()` on a batch, ignoring the model's own generation config.

    Args:
        target: the target that generates.
        prompts: token ids of each prompt of the batch.
        sampling: how tokens are chosen.
        streamer: an object to which `generate()` passes each token; None for none.
        **options: further keys of the `GenerationConfig`.

    Returns:
        The output of `generate()`. Its `sequences` has a row for each prompt: the padded prompt and
        its completion. With the option `output_scores`, it has `scores` as well.
    """
    # Any token can be the padding, because the mask hides it and completions are cut at their stop
    # token. Take a stop token, which certainly exists, or token 0 if the model has no stop token.
    longest = max(map(len, prompts))
    stop_ids = sorted(target.eos_token_ids)
    pad_id = min(stop_ids, default=0)

    # Pad shorter prompts on the left, so that all completions begin at the same column. The mask
    # hides the padding. Both have a row for each prompt, as long as the longest prompt.
    ids = torch.tensor(
        [[pad_id] * (longest - len(row)) + [*row] for row in prompts], device=target.device
    )
    mask = torch.tensor(
        [[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=target.device
    )
    sampling_options: dict[str, object] = {"do_sample": False}
    if not sampling.is_greedy:
        sampling_options = {"do_sample": True, **vars(sampling)}

    # Replace the model's own generation config during this call. Otherwise generate() would take
    # from it every option that is not passed here, such as a repetition penalty.
    generation_config = target.model.generation_config
    target.model.generation_config = GenerationConfig(
        eos_token_id=stop_ids or None,
        pad_token_id=pad_id,
        return_dict_in_generate=True,
        **sampling_options,
        **options,
    )
    try:
        return target.model.generate(ids, attention_mask=mask, streamer=streamer)
    finally:
        target.model.generation_config = generation_config


def _cut_at_stop(token_ids: Sequence[int], stop_ids: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens up to and including the first stop token; all of them if none stops."""
    for index, token in enumerate(token_ids):
        if token in stop_ids:
            return tuple(token_ids[: index + 1])
    return tuple(token_ids)
