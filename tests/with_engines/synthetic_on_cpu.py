"""vLLM's synthetic acceptance without a GPU.

Its CPU build asserts that nobody asks for it, since its C++ kernel lacks the rule.

Here is the rule of vLLM's Triton kernel, for greedy requests. Rates, random numbers and counters
are vLLM's.
"""

from typing import Any

from vllm.v1.sample import rejection_sampler as vllm


def accept(
    output_ids: Any,
    ends: Any,
    draft_ids: Any,
    argmax: Any,
    bonus_ids: Any,
    _is_greedy: Any,
    _most: Any,
    uniform: Any,
    rates: Any,
    _: Any,
) -> None:
    begin = 0
    for request, end in enumerate(ends.tolist()):
        for position, draft_id in enumerate(draft_ids[begin:end].tolist()):
            is_accepted = bool(uniform[begin + position] < rates[position]) and draft_id >= 0
            output_ids[request, position] = draft_id if is_accepted else argmax[begin + position]
            if not is_accepted:
                break
        else:
            output_ids[request, end - begin] = bonus_ids[request]
        begin = end


vllm.rejection_greedy_sample_kernel._impl = accept


class Extension:
    """The worker extension whose name makes vLLM load this module."""
