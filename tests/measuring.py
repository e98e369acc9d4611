"""A measurement of prompts with one draft, without a plan."""

from collections.abc import Sequence

from specdistill.decoding.proposer import Proposer
from specdistill.measurement.configurations import Settings
from specdistill.measurement.measure import PromptRuns, measure_together
from specdistill.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget


def measure(
    target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings
) -> list[PromptRuns]:
    (runs,) = measure_together(target, [proposer], prompts, settings)
    return runs
