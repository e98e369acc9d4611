"""A vLLM plugin that puts a lookup in front of the draft that vLLM drafts with.

It is an entry point of `vllm.general_plugins`. vLLM calls `register` in each of its processes. The
plugin does nothing unless the environment variable LOOKUP_VARIABLE holds the keys of
`eval.lookup_first` as JSON. What follows was read in the sources of vLLM 0.32 and 0.33:
gpu_model_runner.py, llm_base_proposer.py, worker_base.py, scheduler.py.

- In every round, the draft drafts its own number of tokens (`draft_tokens`) for all rows. So its KV
  cache holds the same as without a lookup. Then the rows for which the lookup finds something get
  the looked-up tokens instead, up to `num_speculative_tokens` (K).
- The scheduler verifies and counts the tokens that each row was given. So vLLM's counters are those
  of lookup and draft together.
- vLLM verifies greedy draft tokens as certain ones (one-hot), at any temperature. Looked-up tokens
  are certain, too, so the output is the target's. For sampled draft tokens (`draft_sample_method:
  probabilistic`) vLLM keeps the draft's distributions. They would not belong to looked-up tokens.
- The last token of a row has to be known when the next ones are looked up, so scheduling is not
  asynchronous.
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
    """Let vLLM's workers look up tokens before they draft, if an environment variable says so.

    vLLM calls this function in each of its processes, as an entry point. The decorator `cache`
    makes a second call in the same process do nothing. LOOKUP_VARIABLE holds the settings of the
    lookup as JSON. Without this variable nothing changes.

    Raises:
        UserError: for settings that describe no lookup, and for a version of vLLM that the plugin
            was not written for.
    """
    lookup_text = os.environ.get(LOOKUP_VARIABLE)
    if not lookup_text:
        return
    import vllm
    from vllm.v1.worker.worker_base import WorkerBase

    # Read the lookup, and refuse a version of vLLM whose internals may differ.
    config = read_parameters(lookup_text)
    check_version(vllm.__version__)

    # Replace the constructor of vLLM's workers, the objects that run the model. The constructor
    # receives vLLM's configuration, which is checked before the lookup is put in front of the
    # draft.
    original_init = WorkerBase.__init__

    @wraps(original_init)
    def init_with_lookup(
        worker: WorkerBase, vllm_config: "VllmConfig", *arguments: object, **options: object
    ) -> None:
        """Check vLLM's options, put the lookup in front of the draft, and create the worker."""
        check_vllm(vllm_config, config)
        put_in_front(config)
        original_init(worker, vllm_config, *arguments, **options)

    WorkerBase.__init__ = init_with_lookup


def read_parameters(lookup_text: str) -> LookupFirstConfig:
    """Parse the settings of the lookup from the value of the environment variable.

    Args:
        lookup_text: a JSON object with the keys of a recipe's section `eval.lookup_first`.

    Raises:
        UserError: for unknown keys or invalid values, and for settings that vLLM cannot use.
    """
    # Parse the JSON.
    with convert_errors(
        ValueError, LOOKUP_VARIABLE, lookup_text, "the keys of eval.lookup_first as JSON"
    ):
        config = LookupFirstConfig.model_validate(parse_json(lookup_text.encode()))

    # Refuse settings that vLLM cannot use, such as a tree.
    assert VLLM.lookup is not None
    missing_key = VLLM.lookup.find_missing_key(config)
    if missing_key:
        name, expected = missing_key
        raise UserError(f"{LOOKUP_VARIABLE}.{name}", got=getattr(config, name), expected=expected)
    return config


def check_version(version: str) -> None:
    """Raise UserError for a version of vLLM that this plugin was not written for.

    The plugin replaces internal methods of vLLM. So it supports only the versions of vLLM whose
    source code was read when the plugin was written.
    """
    # `VLLM.versions` is a text, e.g. "0.32 and 0.33". Patch releases are accepted.
    minor_version = ".".join(version.split(".")[:2])
    if minor_version not in re.findall(r"\d+\.\d+", VLLM.versions):
        raise UserError(
            LOOKUP_VARIABLE,
            got=f"vLLM {version}",
            expected=f"a version that the plugin supports: {VLLM.versions}",
        )


def check_vllm(vllm_config: "VllmConfig", config: LookupFirstConfig) -> None:
    """Raise UserError if vLLM was started with options under which a lookup does not work.

    With such options, tokens could not be looked up, or vLLM would verify looked-up tokens with the
    probabilities of the draft's tokens. The docstring of this module gives the reasons.

    Args:
        vllm_config: the configuration with which vLLM was started.
        config: the settings of the lookup. `config.levels` is the number of tokens that the draft
            drafts where nothing is looked up.
    """
    # vLLM must have been started with a draft.
    draft = vllm_config.speculative_config
    if draft is None:
        raise UserError(
            LOOKUP_VARIABLE,
            got="vLLM without a draft",
            expected=f"the option --speculative-config, or no variable {LOOKUP_VARIABLE}",
        )

    # Check the options. Each entry has three parts: whether the option is refused, its value, and
    # the value that is needed instead.
    k = draft.num_speculative_tokens
    for is_refused, got, expected in (
        (
            vllm_config.use_v2_model_runner,
            "vLLM's model runner V2",
            "model runner V1: set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            vllm_config.scheduler_config.async_scheduling,
            "asynchronous scheduling",
            "the option --no-async-scheduling",
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
            "draft_tokens of at most num_speculative_tokens",
        ),
    ):
        if is_refused:
            raise UserError(LOOKUP_VARIABLE, got=got, expected=expected)


@cache
def put_in_front(config: LookupFirstConfig) -> None:
    """Make vLLM propose looked-up tokens in place of the draft's, and print a line to its log.

    A lookup searches the text so far for an earlier occurrence of its last tokens, and proposes the
    tokens that followed there. Where it finds none, vLLM proposes the draft's tokens, as always
    (see `wrap_propose`).

    A measurement searches vLLM's log for the line, to be sure that the server uses the lookup.
    vLLM's workers call this function when they are created. `cache` lets only the first call in a
    process act, so vLLM's method is never wrapped twice.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner.propose_draft_token_ids = wrap_propose(
        GPUModelRunner.propose_draft_token_ids, config
    )
    print(f"{LOOKUP_MARK} {config.described}", file=sys.stderr, flush=True)


def wrap_propose(
    propose: Callable[..., "Tensor"], config: LookupFirstConfig
) -> Callable[..., list[list[int]]]:
    """Wrap vLLM's method that proposes draft tokens, so that looked-up tokens replace the draft's.

    Args:
        propose: the method, `GPUModelRunner.propose_draft_token_ids`. It returns a tensor with the
            same number of draft tokens for each row of the batch.
        config: the settings of the lookup. `config.levels` is the number of tokens that the draft
            drafts.

    Returns:
        A method that returns a list of draft tokens for each row, which may differ in length.
    """

    @wraps(propose)
    def propose_with_lookup(
        runner: "GPUModelRunner",
        scheduler_output: "SchedulerOutput",
        sampled_token_ids: "Tensor",
        *remaining_arguments: object,
    ) -> list[list[int]]:
        """Return for each row the looked-up tokens, or the draft's tokens if nothing is found."""
        # Let the draft model draft for every row, also where a lookup will succeed, so that the
        # model's KV cache is the same as without a lookup. It drafts at most `config.levels`
        # tokens, while a lookup gives up to K. This smaller number is set in a copy of the
        # scheduler's output.
        k = scheduler_output.num_spec_tokens_to_schedule
        draft_output = copy.copy(scheduler_output)
        draft_output.num_spec_tokens_to_schedule = min(k, config.levels)
        draft_tokens = propose(runner, draft_output, sampled_token_ids, *remaining_arguments)

        # Rows for which the lookup finds tokens get up to K looked-up tokens instead.
        looked_up_rows = look_up_tokens(runner, sampled_token_ids.tolist(), k, config)
        rows = zip(looked_up_rows, draft_tokens.tolist(), strict=True)
        return [looked_up or drafted for looked_up, drafted in rows]

    return propose_with_lookup


def look_up_tokens(
    runner: "GPUModelRunner", sampled: list[list[int]], k: int, config: LookupFirstConfig
) -> Iterator[list[int]]:
    """Yield up to k looked-up tokens for each row of the batch.

    A lookup searches the row's own text (prompt and completion) for an earlier occurrence of its
    last tokens, and proposes the tokens that followed there. A row gets an empty list if nothing is
    found, or if vLLM has not read the row's whole prompt yet.

    Args:
        runner: vLLM's model runner, with the batch.
        sampled: for each row, the tokens that this round emitted. They are not in `runner`'s batch
            yet. vLLM marks rejected tokens with numbers outside of the vocabulary.
        k: the most tokens to look up.
        config: the settings of the lookup.
    """
    # `length` is the number of tokens of the row in vLLM's batch, without draft tokens.
    batch = runner.input_batch
    for row, (request_id, tokens) in enumerate(zip(batch.req_ids, sampled, strict=True)):
        request = runner.requests[request_id]
        length = int(batch.num_tokens_no_spec[row])

        # A row whose prompt is still being read has no next token yet.
        if runner.discard_request_mask.np[row]:
            yield []
            continue

        # Take the text of the row and the index of the lookup. Both are kept in an attribute of the
        # request. Begin anew for a new request, and if vLLM has removed tokens of the text.
        text, lookup = getattr(request, "specdistill", ([], None))
        if lookup is None or len(text) > length:
            text = []
            lookup = NgramLookup(config.min, config.max)
            request.specdistill = (text, lookup)

        # Append the tokens that vLLM has added since the last round, and the tokens of this round.
        text += batch.token_ids_cpu[row, len(text) : length].tolist()
        text += [token for token in tokens if 0 <= token < batch.vocab_size]
        yield lookup.find(text, k)
