"""eval.engine=vllm against a real vLLM server that looks n-grams up, and one that does not, both on a CPU in float32."""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from specdistill.cli import main
from specdistill.decoding.decoder import Decoder
from specdistill.errors import ExitCode
from specdistill.project import PICO
from specdistill.report.files import read_report
from specdistill.suites.suite import load_suite, tokenize
from specdistill.targets.frozen import FrozenTarget
from tests.with_engines.environments import environment

pytestmark = [pytest.mark.engines, pytest.mark.slow]

K, NUM_PROMPTS, NEW_TOKENS = 3, 8, 32
SPECULATION = f'{{"method": "ngram", "num_speculative_tokens": {K}, "prompt_lookup_min": 1, "prompt_lookup_max": 3}}'
START_SECONDS = 600
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@contextmanager
def launched(folder: Path, port: int, log: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A server that starts, ended afterwards."""
    command = [
        folder / "bin" / "python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        PICO,
        "--served-model-name",
        "pico",
    ]
    fixed = [
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--enforce-eager",
        "--block-size",
        "32",
        "--no-enable-prefix-caching",
    ]
    surroundings = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    surroundings |= {**QUIET, "PATH": f"{folder / 'bin'}:{surroundings['PATH']}"}
    arguments = [*map(str, command), *fixed, "--host", "127.0.0.1", "--port", str(port), *options]
    with (
        log.open("wb") as output,
        subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, env=surroundings) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not answers(f"{address}/version"):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(1)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Addresses of the server that drafts and of the one that does not, which start side by side."""
    folder, logs = environment("vllm"), tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        started = []
        for name, options in (("ngram", ("--speculative-config", SPECULATION)), ("plain", ())):
            port, log = free_port(), logs / f"{name}.log"
            process = stack.enter_context(launched(folder, port, log, *options))
            started.append((process, f"http://127.0.0.1:{port}", log))
        for process, address, log in started:
            wait_for(process, address, log)
        yield started[0][1], started[1][1]


def measure(folder: Path, servers: tuple[str, str], *more: str) -> ExitCode:
    given = ["target=pico", "method=ngram", "suite=pico", "gate=server", f"output_dir={folder}", "eval.engine=vllm"]
    sizes = [f"eval.num_prompts={NUM_PROMPTS}", f"eval.max_new_tokens={NEW_TOKENS}", "eval.repeats=1", "eval.warmup=1"]
    addresses = [f"eval.server={servers[0]}", f"eval.baseline_server={servers[1]}"]
    with pytest.raises(SystemExit) as ended:  # the script's own end
        main(["eval", *given, *sizes, *addresses, f"eval.num_speculative_tokens={K}", *more])
    return ExitCode(ended.value.code)


def test_a_report_of_vllm_holds_its_texts_and_counts(servers: tuple[str, str], tmp_path: Path) -> None:
    # Its speed is not what is tested here, so the gate may say either.
    assert measure(tmp_path / "report", servers) in (ExitCode.DONE, ExitCode.CHECK_FAILED)
    report, samples = read_report(tmp_path / "report")
    assert report["lossless"]["greedy_identical"]
    assert report["lossless"]["prompts_checked"] == NUM_PROMPTS
    assert report["engine"]["version"].startswith("0.32.")

    target = FrozenTarget.load("pico")
    prompts = tokenize(
        load_suite("pico"), target.tokenizer, max_new_tokens=NEW_TOKENS, max_length=target.max_length, num_prompts=NUM_PROMPTS
    )
    plain = [Decoder(target).generate(prompt.token_ids, max_new_tokens=NEW_TOKENS).token_ids for prompt in prompts]
    assert [sample.token_ids for sample in samples] == plain

    row = report["results"][0]
    assert row["num_new_tokens"] == sum(map(len, plain))
    assert sum(row["accepted_per_position"]) == row["num_accepted_tokens"] > 0
    assert row["num_accepted_tokens"] <= row["num_draft_tokens"] <= K * row["num_drafts"]
    for sample in samples:
        assert sample.counts is not None
        # Each draft yields its accepted tokens and one more, all but the last of them inside the text.
        assert sample.counts.num_accepted_tokens + sample.counts.num_drafts <= len(sample.token_ids) - 1 + K


def test_another_k_is_refused(servers: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(tmp_path / "report", servers, f"eval.num_speculative_tokens={K + 2}") == ExitCode.USER_ERROR
    assert f"got {K + 2}, expected {K}, as the server at {servers[0]} drafts" in capsys.readouterr().err
