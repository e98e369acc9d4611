"""What a target generates in transformers' own `generate()` and `forward`: the reference for losslessness, and for the baseline's speed.

Nothing here is computed by this project's decoding, which cannot be its own judge: a soft cap that it dropped, or a KV cache that it read
wrongly, would be dropped with the draft and without. The penalties and bans of a target's generation config (`repetition_penalty`,
`suppress_tokens`) are left out, as they are in decoding.

Shapes: T positions, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from specdistill.decoding.sampling import GREEDY, Sampling
from specdistill.targets.frozen import FrozenTarget


def generate(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    min_new_tokens: int = 0,
    sampling: Sampling = GREEDY,
) -> list[tuple[int, ...]]:
    """The completions of token ids, each up to and with its first stop token. Shorter prompts of a batch are padded on the left."""
    longest = max(map(len, prompts))
    output = _generate(target, prompts, sampling, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens)
    return [_up_to_stop(row[longest:], target.eos_token_ids) for row in output.sequences.tolist()]


def next_token_probabilities(target: FrozenTarget, token_ids: Sequence[int], sampling: Sampling) -> Tensor:
    """[V] float64: the distribution that transformers samples from, after its own logits processors."""
    output = _generate(target, [token_ids], sampling, max_new_tokens=1, output_scores=True)
    probabilities: Tensor = output.scores[0][0].double().softmax(-1)
    return probabilities


@torch.inference_mode()
def logits(target: FrozenTarget, token_ids: Sequence[int]) -> Tensor:
    """[T, V] float32, after each token: the model's own forward."""
    ids = torch.tensor([list(token_ids)], device=target.device)
    rows: Tensor = target.model(input_ids=ids, use_cache=False).logits[0].float()
    return rows


def _generate(target: FrozenTarget, prompts: Sequence[Sequence[int]], sampling: Sampling, **options: Any) -> Any:
    longest, stop_ids = max(map(len, prompts)), sorted(target.eos_token_ids)
    pad = min(stop_ids, default=0)
    ids = torch.tensor([[pad] * (longest - len(row)) + [*row] for row in prompts], device=target.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=target.device)
    chosen = {"do_sample": False} if sampling.is_greedy else {"do_sample": True, **vars(sampling)}
    own = target.model.generation_config  # where generate() finds whatever it is not given
    target.model.generation_config = GenerationConfig(
        eos_token_id=stop_ids or None, pad_token_id=pad, return_dict_in_generate=True, **chosen, **options
    )
    try:
        return target.model.generate(ids, attention_mask=mask)
    finally:
        target.model.generation_config = own


def _up_to_stop(token_ids: Sequence[int], stop_ids: frozenset[int]) -> tuple[int, ...]:
    end = next((index for index, token in enumerate(token_ids, start=1) if token in stop_ids), len(token_ids))
    return tuple(token_ids[:end])
