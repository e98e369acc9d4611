"""Times of a prompt that a stall does not change, from repetitions that generate the same tokens.

Round r does the same work in every repetition. Its time is the lower median over the repetitions, and a prompt's time is the sum over its
rounds: a stall of seconds falls into one round of one repetition and is dropped with it. The lower median of two is the faster.
"""

import statistics
from collections.abc import Sequence

from specdistill.decoding.decoder import Generation
from specdistill.statistics.records import Timing

# A round is disturbed when it took this many times its lower median, and this many seconds longer.
DISTURBED_RATIO, DISTURBED_SECONDS = 3.0, 0.005


def prompt_timing(repetitions: Sequence[Generation]) -> Timing:
    """The times of a prompt with or without a draft.

    Repetitions with another number of rounds than the first, e.g. of a device that rounds differently each time, are dropped.
    """
    alike = [one for one in repetitions if len(one.rounds) == len(repetitions[0].rounds)]
    prefill = statistics.median_low(one.prefill_seconds for one in alike)
    rounds = list(zip(*(one.rounds for one in alike), strict=True))
    draft = sum(statistics.median_low(entry.draft_seconds for entry in same) for same in rounds)
    verify = sum(statistics.median_low(entry.verify_seconds for entry in same) for same in rounds)
    return Timing(
        num_tokens=len(repetitions[0].token_ids),
        num_rounds=len(rounds),
        seconds=prefill + draft + verify,
        prefill_seconds=prefill,
        draft_seconds=draft,
        verify_seconds=verify,
        num_disturbed_rounds=sum(disturbed_rounds(repetitions)),
    )


def disturbed_rounds(repetitions: Sequence[Generation]) -> list[int]:
    """How many rounds of each repetition, the prefill among them, took far longer than the same round of the others."""
    times = [
        [one.prefill_seconds, *(entry.draft_seconds + entry.verify_seconds for entry in one.rounds)] for one in repetitions
    ]
    usual = [statistics.median_low(same) for same in zip(*times, strict=False)]
    allowed = [max(DISTURBED_RATIO * seconds, seconds + DISTURBED_SECONDS) for seconds in usual]
    return [sum(took > most for took, most in zip(one, allowed, strict=False)) for one in times]
