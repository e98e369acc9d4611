"""A lookup in front of the draft that vLLM drafts with: its plugin, an entry point of `vllm.general_plugins`.

vLLM calls `register` in each of its processes. It does nothing unless the environment variable LOOKUP_VARIABLE holds the keys of
`eval.lookup_first` as JSON. Read in the sources of 0.32 and 0.33: gpu_model_runner.py, llm_base_proposer.py, worker_base.py, scheduler.py.

- The draft drafts for all rows in every round, as many tokens as are its own, so that its KV cache holds what it holds without a lookup.
  Then the rows that a lookup has something for get that instead, up to `num_speculative_tokens` (K) tokens.
- The scheduler verifies and counts what each row was given, so vLLM's counters are those of the cascade.
- vLLM verifies greedy drafts as certain ones (one-hot), at any temperature. Looked-up tokens are certain, too, so its output is the
  target's. For drafts that are drawn (`draft_sample_method: probabilistic`) it keeps distributions, which would be those of other tokens.
- The next tokens have to be known when a row is looked up, so scheduling is not asynchronous. Ranks of data parallelism take as many steps
  with the draft as one another, which one without requests would not know.
"""

import copy
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

from specdistill.engines.vllm import LOOKUP_MARK, LOOKUP_VARIABLE, VLLM
from specdistill.errors import UserError, refusing
from specdistill.files.documents import parse_json
from specdistill.methods.ngram.lookup import NgramLookup
from specdistill.recipe.sections import LookupFirstConfig

DRAFTS = ("eagle", "eagle3", "mtp", "draft_model")  # speculative methods that draft token by token


@cache
def register() -> None:
    """Raises UserError for parameters that are none, and for a version of vLLM that this was not read in."""
    if not (given := os.environ.get(LOOKUP_VARIABLE)):
        return
    import vllm
    from vllm.v1.worker.worker_base import WorkerBase

    config, begin = parameters(given), WorkerBase.__init__
    check_version(vllm.__version__)

    @wraps(begin)
    def checked(worker: Any, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        check(vllm_config, config)
        put_in_front(config)
        begin(worker, vllm_config, *arguments, **options)

    WorkerBase.__init__ = checked


def parameters(given: str) -> LookupFirstConfig:
    """Raises UserError for JSON that is no `eval.lookup_first`, and for one that vLLM cannot be given."""
    with refusing(ValueError, LOOKUP_VARIABLE, given, "the keys of eval.lookup_first as JSON"):
        config = LookupFirstConfig.model_validate(parse_json(given.encode()))
    assert VLLM.lookup is not None
    if lacking := VLLM.lookup.lacks(config):
        name, expected = lacking
        raise UserError(f"{LOOKUP_VARIABLE}.{name}", got=getattr(config, name), expected=expected)
    return config


def check_version(version: str) -> None:
    if ".".join(version.split(".")[:2]) not in re.findall(r"\d+\.\d+", VLLM.versions):
        raise UserError(
            LOOKUP_VARIABLE,
            got=f"vLLM {version}",
            expected=f"a version that it knows, {VLLM.versions}",
        )


def check(vllm_config: Any, config: LookupFirstConfig) -> None:
    """Raises UserError where vLLM was started so that tokens cannot be looked up, or would not be verified as what they are."""
    draft = vllm_config.speculative_config
    if draft is None:
        raise UserError(
            LOOKUP_VARIABLE,
            got="vLLM without a draft",
            expected="--speculative-config, or no such variable",
        )
    k = draft.num_speculative_tokens
    one_by_one = f"{', '.join(DRAFTS)}, not in parallel"
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
            one_by_one,
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
    """In this process, which runs the model. Its log says so."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner.propose_draft_token_ids = looked_up_first(
        GPUModelRunner.propose_draft_token_ids, config
    )
    print(f"{LOOKUP_MARK} {config.described}", file=sys.stderr, flush=True)


def looked_up_first(
    propose: Callable[..., Any], config: LookupFirstConfig
) -> Callable[..., list[list[int]]]:
    """`GPUModelRunner.propose_draft_token_ids` behind a lookup: draft tokens of each row, of different lengths."""

    @wraps(propose)
    def proposed(
        runner: Any, scheduler_output: Any, sampled_token_ids: Any, *others: Any
    ) -> list[list[int]]:
        own, k = copy.copy(scheduler_output), scheduler_output.num_spec_tokens_to_schedule
        own.num_spec_tokens_to_schedule = min(k, config.levels)
        drafted = propose(runner, own, sampled_token_ids, *others).tolist()
        found = looked_up(runner, sampled_token_ids.tolist(), k, config)
        return [tokens or row for tokens, row in zip(found, drafted, strict=True)]

    return proposed


def looked_up(
    runner: Any, sampled: list[list[int]], k: int, config: LookupFirstConfig
) -> Iterator[list[int]]:
    """Up to k tokens for each row, none where nothing is found and for a prompt that is not read to its end.

    sampled: of each row in this round, which its text does not hold yet; what is no token of the vocabulary was rejected. A request carries
    its index, which ends with it.
    """
    batch = runner.input_batch
    for row, (name, tokens) in enumerate(zip(batch.req_ids, sampled, strict=True)):
        request, length = runner.requests[name], int(batch.num_tokens_no_spec[row])
        if runner.discard_request_mask.np[row]:
            yield []
            continue
        text, lookup = getattr(request, "specdistill", ([], None))
        if lookup is None or len(text) > length:  # a text may be taken back
            text, lookup = request.specdistill = [], NgramLookup(config.min, config.max)
        text += batch.token_ids_cpu[row, len(text) : length].tolist()
        text += [token for token in tokens if 0 <= token < batch.vocab_size]
        yield lookup.find(text, k)
