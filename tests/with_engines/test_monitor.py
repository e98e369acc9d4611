"""`specdistill monitor` of a real vLLM says what the answers of that vLLM counted, request by
request."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdistill.cli.main import main
from specdistill.common.project import PICO
from specdistill.evaluation.suites.suite import load_suite, tokenize
from specdistill.serving.engines.client import CompletionRequest, EngineCompletion
from specdistill.serving.engines.server import Server
from specdistill.serving.engines.vllm import PROGRAM, VLLM
from specdistill.targets.files import TargetFiles
from specdistill.targets.loading import read_tokenizer
from tests.with_engines.conftest import K
from tests.with_engines.environments import serving

pytestmark = [pytest.mark.long, pytest.mark.engines]  # vLLM in its own environment

LOOKUP = {
    "method": "ngram",
    "num_speculative_tokens": K,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
NUM_PROMPTS = 12
NUM_TOKENS = 24

# vLLM on two busy cores answered with two drafts a second; thirty are needed for a verdict.
WATCHED_S = 30
MIN_DRAFTS = 30


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    with serving(
        log, str(PICO), "--speculative-config", json.dumps(LOOKUP), *PROGRAM.measured_draft
    ) as served:
        yield served


def complete(
    address: str, warm: threading.Event, ended: threading.Event, completions: list[EngineCompletion]
) -> None:
    """Once all prompts, then until it has ended. warm: vLLM has answered, which takes it seconds
    the first time."""
    server, client = Server(address, key="server", timeout=100.0), VLLM.client
    assert client is not None
    (model, *_), (tokenizer, *_) = (
        client.identify(server).models,
        read_tokenizer(TargetFiles("pico")),
    )
    prompts = tokenize(
        load_suite("pico"),
        tokenizer,
        max_new_tokens=NUM_TOKENS,
        max_length=512,
        num_prompts=NUM_PROMPTS,
    )
    while len(completions) < NUM_PROMPTS or not ended.is_set():
        ids = prompts[len(completions) % NUM_PROMPTS].token_ids
        completions.append(
            client.complete(server, CompletionRequest(model, ids, NUM_TOKENS, 0.0, 1.0, 0, 0), K)
        )
        warm.set()


def test_it_says_what_the_answers_counted(address: str, tmp_path: Path) -> None:
    output, completions, warm, ended = (
        tmp_path / "acceptance.json",
        [],
        threading.Event(),
        threading.Event(),
    )
    keys = ["monitor", f"server={address}", f"output={output}"]
    client = threading.Thread(target=complete, args=(address, warm, ended, completions))
    client.start()
    try:
        assert warm.wait(timeout=100)
        watched = main([*keys, f"seconds={WATCHED_S}"])
        during = json.loads(output.read_text())
    finally:
        ended.set()
        client.join()
    assert main([*keys, "seconds=0"]) == 4
    since_the_start = json.loads(output.read_text())
    counts = [completion.counts for completion in completions]
    assert since_the_start["num_drafts"] == sum(count.num_drafts for count in counts)
    assert since_the_start["num_draft_tokens"] == sum(count.num_draft_tokens for count in counts)
    assert since_the_start["num_accepted_tokens"] == sum(
        count.num_accepted_tokens for count in counts
    )
    reached = [sum(count.accepted_per_position[k] for count in counts) for k in range(K)]
    assert since_the_start["accepted_per_position"] == reached and reached[-1] > 0

    assert 0 < during["num_drafts"] <= since_the_start["num_drafts"]
    # A slow machine may answer too few requests, or too slowly, for a verdict.
    is_slow_machine = during["num_drafts"] < MIN_DRAFTS or "requests take" in during["reason"]
    if is_slow_machine:
        assert watched == 4
    else:
        low, high = during["acceptance_rate_ci95"]
        assert low < during["acceptance_rate"] < high and watched == (
            1 if high < 0.5 else 0 if low >= 0.5 else 4
        )
