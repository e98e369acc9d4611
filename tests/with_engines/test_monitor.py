"""`specdistill monitor` of a real vLLM reports the counts that its answers have."""

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
    """Complete every prompt once, then go on until `ended` is set.

    warm: Set when vLLM has answered, which takes seconds the first time.
    """
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


def test_monitor_reports_what_the_answers_counted(address: str, tmp_path: Path) -> None:
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
        exit_code = main([*keys, f"seconds={WATCHED_S}"])
        partial = json.loads(output.read_text())
    finally:
        ended.set()
        client.join()
    assert main([*keys, "seconds=0"]) == 4
    total = json.loads(output.read_text())
    counts = [completion.counts for completion in completions]
    assert total["num_drafts"] == sum(count.num_drafts for count in counts)
    assert total["num_draft_tokens"] == sum(count.num_draft_tokens for count in counts)
    assert total["num_accepted_tokens"] == sum(count.num_accepted_tokens for count in counts)
    reached = [sum(count.accepted_per_position[k] for count in counts) for k in range(K)]
    assert total["accepted_per_position"] == reached and reached[-1] > 0

    assert 0 < partial["num_drafts"] <= total["num_drafts"]
    # A slow machine may answer too few requests, or too slowly, for a verdict.
    is_slow_machine = partial["num_drafts"] < MIN_DRAFTS or "requests take" in partial["reason"]
    if is_slow_machine:
        assert exit_code == 4
    else:
        low, high = partial["acceptance_rate_ci95"]
        assert low < partial["acceptance_rate"] < high and exit_code == (
            1 if high < 0.5 else 0 if low >= 0.5 else 4
        )
