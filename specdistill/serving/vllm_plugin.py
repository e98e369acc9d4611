"""A vLLM plugin that puts a lookup in front of the draft that vLLM drafts with.

It is an entry point of `vllm.general_plugins`. vLLM calls `register` in each of its processes. The
plugin does nothing unless the environment variable LOOKUP_VARIABLE holds the keys of
`eval.lookup_first` as JSON. What follows was read in the sources of vLLM 0.32 and 0.33:
gpu_model_runner.py, llm_base_proposer.py, worker_base.py, scheduler.py.

- The draft drafts for all rows in every round, its own number of tokens (`draft_tokens`). So its KV
  cache holds the same as without a lookup. Then the rows for which the lookup finds something get
  the looked-up tokens instead, up to `num_speculative_tokens` (K).
- The scheduler verifies and counts the tokens that each row was given. So vLLM's counters are those
  of lookup and draft together.
- vLLM verifies greedy drafts as certain ones (one-hot), at any temperature. Looked-up tokens are
  certain, too, so the output is the target's. For drafts that are drawn (`draft_sample_method:
  probabilistic`) vLLM keeps distributions. They would be those of other tokens.
- The next tokens have to be known when a row is looked up, so scheduling is not asynchronous.
- Ranks of data parallelism must all take the same number of steps with the draft. A rank without
  requests would not know that number.
"""

import copy
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import TYPE_CHECKING

from specdistill.common.documents import parse_json
from specdistill.common.errors import UserError, convert_errors
from specdistill.methods.ngram.lookup import NgramLookup
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.serving.engines.vllm import LOOKUP_MARK, LOOKUP_VARIABLE, VLLM

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

# vLLM's speculative methods that draft token by token.
DRAFTS = ("eagle", "eagle3", "mtp", "draft_model")


@cache
def register() -> None:
    """Put the lookup that the environment describes in front of the draft, when a worker starts.

    Raises:
        UserError: for keys that describe no lookup, and for a version of vLLM in whose sources this
            was not read.
    """
    lookup_text = os.environ.get(LOOKUP_VARIABLE)
    if not lookup_text:
        return
    import vllm
    from vllm.v1.worker.worker_base import WorkerBase

    config = read_parameters(lookup_text)
    begin = WorkerBase.__init__
    check_version(vllm.__version__)

    @wraps(begin)
    def checked(
        worker: WorkerBase, vllm_config: "VllmConfig", *arguments: object, **options: object
    ) -> None:
        check_vllm(vllm_config, config)
        put_in_front(config)
        begin(worker, vllm_config, *arguments, **options)

    WorkerBase.__init__ = checked


def read_parameters(lookup_text: str) -> LookupFirstConfig:
    """Parse the lookup that the environment variable describes.

    Args:
        lookup_text: the keys of `eval.lookup_first` as JSON.

    Raises:
        UserError: for JSON that is no `eval.lookup_first`, and for a lookup that vLLM cannot be
            given.
    """
    with convert_errors(
        ValueError, LOOKUP_VARIABLE, lookup_text, "the keys of eval.lookup_first as JSON"
    ):
        config = LookupFirstConfig.model_validate(parse_json(lookup_text.encode()))
    assert VLLM.lookup is not None
    lacking = VLLM.lookup.find_missing_key(config)
    if lacking:
        name, expected = lacking
        raise UserError(f"{LOOKUP_VARIABLE}.{name}", got=getattr(config, name), expected=expected)
    return config


def check_version(version: str) -> None:
    """Raise UserError for a version of vLLM in whose sources this plugin was not read."""
    if ".".join(version.split(".")[:2]) not in re.findall(r"\d+\.\d+", VLLM.versions):
        raise UserError(
            LOOKUP_VARIABLE,
            got=f"vLLM {version}",
            expected=f"a version that it knows, {VLLM.versions}",
        )


def check_vllm(vllm_config: "VllmConfig", config: LookupFirstConfig) -> None:
    """Raise UserError if vLLM was started with options under which a lookup does not work.

    Either tokens could not be looked up, or they would not be verified as the tokens that they are.
    """
    # vLLM must have been started with a draft.
    draft = vllm_config.speculative_config
    if draft is None:
        raise UserError(
            LOOKUP_VARIABLE,
            got="vLLM without a draft",
            expected=f"--speculative-config, or no {LOOKUP_VARIABLE}",
        )

    # Each refusal: whether it applies, what vLLM has, and what is needed.
    k = draft.num_speculative_tokens
    for is_refused, got, expected in (
        (
            vllm_config.use_v2_model_runner,
            "vLLM's model runner V2",
            "V1: VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            vllm_config.scheduler_config.async_scheduling,
            "asynchronous scheduling",
            "--no-async-scheduling",
        ),
        (
            vllm_config.parallel_config.data_parallel_size > 1,
            "data parallelism",
            "a server for each device",
        ),
        (
            draft.method not in DRAFTS or draft.parallel_drafting,
            f"method {draft.method}",
            f"{', '.join(DRAFTS)}, not in parallel",
        ),
        (
            draft.draft_sample_method != "greedy",
            f"draft_sample_method {draft.draft_sample_method}",
            "greedy",
        ),
        (draft.disable_padded_drafter_batch, "disable_padded_drafter_batch", "false"),
        (
            config.levels > k,
            f"draft_tokens {config.levels} with num_speculative_tokens {k}",
            "at most as many",
        ),
    ):
        if is_refused:
            raise UserError(LOOKUP_VARIABLE, got=got, expected=expected)


@cache
def put_in_front(config: LookupFirstConfig) -> None:
    """Put the lookup in front of the draft in this process, which runs the model, and log that."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner.propose_draft_token_ids = wrap_propose(
        GPUModelRunner.propose_draft_token_ids, config
    )
    print(f"{LOOKUP_MARK} {config.described}", file=sys.stderr, flush=True)


def wrap_propose(
    propose: Callable[..., "Tensor"], config: LookupFirstConfig
) -> Callable[..., list[list[int]]]:
    """Wrap `GPUModelRunner.propose_draft_token_ids`, so that a lookup comes first.

    Args:
        propose: the method.
        config: the lookup.

    Returns:
        A method that returns the draft tokens of each row, which may differ in number.
    """

    @wraps(propose)
    def proposed(
        runner: "GPUModelRunner",
        scheduler_output: "SchedulerOutput",
        sampled_token_ids: "Tensor",
        *remaining_arguments: object,
    ) -> list[list[int]]:
        # The draft drafts its own number of tokens, whatever the lookup may draft.
        verified_output = copy.copy(scheduler_output)
        k = scheduler_output.num_spec_tokens_to_schedule
        verified_output.num_spec_tokens_to_schedule = min(k, config.levels)
        drafted = propose(runner, verified_output, sampled_token_ids, *remaining_arguments).tolist()
        return [
            tokens or row
            for tokens, row in zip(
                look_up_tokens(runner, sampled_token_ids.tolist(), k, config), drafted, strict=True
            )
        ]

    return proposed


def look_up_tokens(
    runner: "GPUModelRunner", sampled: list[list[int]], k: int, config: LookupFirstConfig
) -> Iterator[list[int]]:
    """Yield up to k looked-up tokens for each row.

    A row gets none if nothing is found, or if its prompt has not been read to its end. A request
    carries its index, which ends with it.

    Args:
        runner: vLLM's model runner.
        sampled: of each row, the tokens of this round, which its text does not hold yet. What is no
            token of the vocabulary was rejected.
        k: the most tokens.
        config: the lookup.
    """
    batch = runner.input_batch
    for row, (name, tokens) in enumerate(zip(batch.req_ids, sampled, strict=True)):
        request = runner.requests[name]
        length = int(batch.num_tokens_no_spec[row])
        if runner.discard_request_mask.np[row]:
            yield []
            continue
        text, lookup = getattr(request, "specdistill", ([], None))
        if lookup is None or len(text) > length:  # vLLM may take tokens of a text back.
            text, lookup = request.specdistill = [], NgramLookup(config.min, config.max)
        text += batch.token_ids_cpu[row, len(text) : length].tolist()
        text += [token for token in tokens if 0 <= token < batch.vocab_size]
        yield lookup.find(text, k)
