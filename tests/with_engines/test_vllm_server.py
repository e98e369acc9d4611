"""`specdistill eval eval.engine=vllm` starts a real vLLM, on a CPU in float32.

It counts what our decoder counts, and leaves no process.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.counting import generate_here
from bench.engines import QUIET_VLLM, run
from specdistill.common.errors import ExitCode, ResourceError
from specdistill.common.project import PICO, ROOT
from specdistill.evaluation.report.files import read_report
from specdistill.evaluation.suites.suite import load_suite, tokenize
from specdistill.methods.load import load_proposer
from specdistill.methods.ngram.config import NgramConfig
from specdistill.serving.engines import ENGINES
from specdistill.serving.engines.start import start_server
from specdistill.serving.engines.vllm import PROGRAM, list_ranges
from specdistill.serving.export import export
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.scripts import specdistill
from tests.with_engines.conftest import K
from tests.with_engines.environments import QUICK_VLLM, environment, serving

pytestmark = [pytest.mark.long, pytest.mark.engines]  # vLLM in its own environment

NUM_PROMPTS, NEW_TOKENS, LOADS = 8, 48, (1, 4)
SHARED_MEMORY = Path("/dev/shm")


def build_command(draft: Path | None, folder: Path) -> list[str]:
    """Return the command that evaluates an EAGLE-3 draft, or n-gram lookup if it is None."""
    engine = f"{environment('vllm') / 'bin' / 'vllm'} serve --enforce-eager --block-size 32"
    keys = [
        "target=pico",
        *(["method=eagle3", f"draft={draft}"] if draft else ["method=ngram", "eval.ngram.min=2"]),
    ]
    keys += ["suite=pico", "gate=server", f"output_dir={folder}"]
    keys += [
        "eval.engine=vllm",
        f"eval.engine_command={engine}",
        f"eval.num_speculative_tokens={K}",
        "eval.repeats=1",
    ]
    keys += [
        f"eval.num_prompts={NUM_PROMPTS}",
        f"eval.max_new_tokens={NEW_TOKENS}",
        f"eval.sweep.concurrency={[*LOADS]}",
    ]
    return [sys.executable, "-m", "specdistill", "eval", *keys]


def start_eval(
    draft: Path | None, folder: Path, variables: dict[str, str] = QUICK_VLLM
) -> "subprocess.Popen[str]":
    surroundings = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        build_command(draft, folder), env=surroundings, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )


def wait_for_request(side: "subprocess.Popen[str]", folder: Path) -> list[psutil.Process]:
    """Wait until vLLM has a request, and return the processes of its server and of the guard."""
    log = folder / "engine" / "plain.log"
    while not (log.is_file() and "POST /v1/completions" in log.read_text()):
        assert side.poll() is None, side.stderr and side.stderr.read()[-4000:]
        time.sleep(0.2)
    return psutil.Process(side.pid).children(recursive=True)


def check_gone(processes: list[psutil.Process], shared_memory_files: set[Path]) -> None:
    assert len(processes) > 3  # vLLM's server, its core, and the guard
    _, alive = psutil.wait_procs(
        [process for process in processes if process.is_running()], timeout=20
    )
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert set(SHARED_MEMORY.glob("*")) <= shared_memory_files


@pytest.fixture
def shared_memory_files() -> set[Path]:
    """The files in shared memory before the test."""
    return set(SHARED_MEMORY.glob("*"))


@pytest.fixture
def quiet_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUIET_VLLM.items():
        monkeypatch.setenv(name, value)


def run_eval(draft: Path | None, folder: Path) -> Path:
    """Run an evaluation and return the folder of its report.

    The speed is not tested here, so the gate may pass or fail.
    """
    before = set(SHARED_MEMORY.glob("*"))
    with start_eval(draft, folder) as side:
        printed = side.communicate()[1]
    assert side.returncode in (ExitCode.DONE, ExitCode.CHECK_FAILED, ExitCode.INCONCLUSIVE), (
        printed[-4000:]
    )
    assert set(SHARED_MEMORY.glob("*")) <= before
    return folder


@pytest.fixture(scope="module")
def report_folder(
    trained_draft: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return run_eval(trained_draft("EAGLE-3.1"), tmp_path_factory.mktemp("measured") / "report")


def test_eval_counts_in_vllm_what_our_decoder_counts(
    report_folder: Path, pico: FrozenTarget, trained_draft: Callable[[str], Path]
) -> None:
    """vLLM also counts what it accepts past the end of a completion, as `generate_here` does."""
    report, samples = read_report(report_folder)
    assert report["lossless"]["greedy_identical"]
    assert report["lossless"]["prompts_checked"] == NUM_PROMPTS
    assert report["engine"]["version"].startswith("0.32.")
    prompts = tokenize(
        load_suite("pico"),
        pico.tokenizer,
        max_new_tokens=NEW_TOKENS,
        max_length=512,
        num_prompts=NUM_PROMPTS,
    )
    proposer = load_proposer("eagle3", trained_draft("EAGLE-3.1"), pico)
    alone, together = samples[:NUM_PROMPTS], samples[NUM_PROMPTS:]
    assert [sample.configuration.batch_size for sample in (alone[0], together[0])] == [*LOADS]
    for prompt, sample in zip(prompts, alone, strict=True):
        (here,) = generate_here(
            pico,
            proposer,
            [prompt.token_ids],
            max_new_tokens=len(sample.token_ids),
            num_speculative_tokens=K,
        )
        assert sample.token_ids == here.token_ids
        assert sample.counts is not None
        counts = (
            sample.counts.num_drafts,
            sample.counts.num_draft_tokens,
            sample.counts.accepted_per_position,
        )
        assert counts == (
            here.counts.num_drafts,
            here.counts.num_draft_tokens,
            here.counts.accepted_per_position,
        )
    assert [sample.token_ids for sample in together] == [sample.token_ids for sample in alone]
    assert [sample.counts for sample in together] == [sample.counts for sample in alone]


def test_vllms_own_lookup_accepts_what_its_rule_does_here(
    pico: FrozenTarget, tmp_path: Path
) -> None:
    report, samples = read_report(run_eval(None, tmp_path / "report"))
    assert report["lossless"]["greedy_identical"] and report["draft"] == {
        "model": None,
        "revision": None,
        "method": "ngram",
    }
    prompts = tokenize(
        load_suite("pico"),
        pico.tokenizer,
        max_new_tokens=NEW_TOKENS,
        max_length=512,
        num_prompts=NUM_PROMPTS,
    )
    proposer = load_proposer("ngram", None, pico, ngram=NgramConfig(rule="vllm", min=2))
    for prompt, sample in zip(prompts, samples, strict=False):
        (here,) = generate_here(
            pico,
            proposer,
            [prompt.token_ids],
            max_new_tokens=len(sample.token_ids),
            num_speculative_tokens=K,
        )
        assert sample.token_ids == here.token_ids and sample.counts is not None
        assert (sample.counts.num_drafts, sample.counts.num_accepted_tokens) == (
            here.counts.num_drafts,
            sum(here.counts.accepted_per_position),
        )


def test_speed_is_measured_at_both_loads(report_folder: Path) -> None:
    report, _ = read_report(report_folder)
    alone, together = (row for row in report["results"] if row["category"] == "all")
    assert together["baseline_tokens_per_second"] > alone["baseline_tokens_per_second"]
    assert together["speedup"] > 0


def test_eval_measures_a_synthetic_acceptance_length(tmp_path: Path) -> None:
    """vLLM accepts as many tokens as it is told, whatever is drafted; here pico drafts for itself.

    Every round accepts one token, and three of five rounds accept a second one.
    """
    length = 2.6
    drafts = {"method": "draft_model", "model": str(PICO), "num_speculative_tokens": K}
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    options = [
        "--speculative-config",
        json.dumps(drafts | synthetic),
        *PROGRAM.measured,
        *PROGRAM.measured_draft,
    ]
    options += ["--worker-extension-cls", "synthetic_on_cpu.Extension"]
    keys = [
        "target=pico",
        "method=draft_model",
        "suite=pico",
        "gate=server",
        f"output_dir={tmp_path / 'report'}",
    ]
    keys += [
        f"eval.num_speculative_tokens={K}",
        "eval.repeats=1",
        "eval.num_prompts=24",
        f"eval.max_new_tokens={NEW_TOKENS}",
    ]
    with serving(
        tmp_path / "log", str(PICO), *options, python_path=Path(__file__).parent
    ) as address:
        done = specdistill("eval", *keys, "eval.engine=vllm", f"eval.server={address}")
    assert done.returncode in (ExitCode.DONE, ExitCode.CHECK_FAILED, ExitCode.INCONCLUSIVE), (
        done.stderr[-4000:]
    )
    report, samples = read_report(tmp_path / "report")
    (row,) = (it for it in report["results"] if it["category"] == "all")
    low, high = row["acceptance_length_vllm_ci95"]
    assert low < length < high and high - low < 0.3
    counts = [sample.counts for sample in samples if sample.counts]
    reached = [sum(count.accepted_per_position[k] for count in counts) for k in range(K)]
    assert [reached[0], *reached[2:]] == [sum(count.num_drafts for count in counts), 0, 0]


def test_sigkill_of_eval_leaves_no_process(
    trained_draft: Callable[[str], Path], tmp_path: Path, shared_memory_files: set[Path]
) -> None:
    """Here eval is killed; `tests/serving/engines/test_start.py` kills the other processes."""
    # QUIET_VLLM has all the processes that vLLM has for a user.
    with start_eval(trained_draft("EAGLE-3.1"), tmp_path / "report", QUIET_VLLM) as side:
        processes = wait_for_request(side, tmp_path / "report")
        side.kill()
    check_gone(processes, shared_memory_files)


def test_the_error_for_a_draft_that_does_not_load_is_vllms_first_exception(
    quiet_vllm: None, trained_draft: Callable[[str], Path], tmp_path: Path
) -> None:
    export(
        trained_draft("EAGLE-3.1"),
        "vllm",
        tmp_path / "draft",
        TargetFiles("pico"),
        num_speculative_tokens=K,
    )
    config = tmp_path / "draft" / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLMEagle3", "Unheard"))
    options = {"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": K}
    line = [
        str(environment("vllm") / "bin" / "vllm"),
        "serve",
        str(PICO),
        "--speculative-config",
        json.dumps(options),
    ]
    with (
        pytest.raises(ResourceError, match="Unheard"),
        start_server(line, tmp_path / "log", key="eval.engine_command"),
    ):
        pytest.fail("it started")


def test_vllm_runs_the_python_and_knows_the_options_of_serve_md(
    quiet_vllm: None, trained_draft: Callable[[str], Path], tmp_path: Path
) -> None:
    """The Python of SERVE.md has a draft length for each load."""
    served = export(
        trained_draft("EAGLE-3.1"),
        "vllm",
        tmp_path / "out",
        TargetFiles("pico"),
        num_speculative_tokens=K,
    )
    vllm, served = ENGINES["vllm"], replace(served, lengths=((1, K), (8, 1), (16, 0)))
    assert vllm.snippet is not None
    text = (tmp_path / "out" / "SERVE.md").read_text()
    snippet = tmp_path / "snippet.py"
    changes = "dtype='float32', enforce_eager=True, block_size=32, disable_log_stats=False"
    lookup = (
        "from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup as lookup"
    )
    bin_folder = environment("vllm") / "bin"
    # These are the last lines of the main block, whose process has imported vLLM.
    by_load = f"print(lookup({list_ranges(served.lengths)}, 20, {K}))"
    text_of_snippet = vllm.snippet(served).replace("disable_log_stats=False", changes)
    snippet.write_text(f"{text_of_snippet}\n    {lookup}\n    {by_load}\n")
    printed = run(bin_folder / "python", snippet)
    length = float(re.search(r"acceptance length ([\d.]+)", printed)[1])  # type: ignore[index]
    assert 1 < length < K + 1
    lengths = re.findall(r"^\[[\d, ]+\]$", printed, re.M)[-1]
    assert json.loads(lengths)[1:] == [K] * 7 + [1] * 8 + [0] * 5

    help_text = run(bin_folder / "vllm", "serve", "--help=all")
    program = vllm.program
    assert program is not None
    options = {
        *re.findall(r"--[a-z][a-z-]*", text),
        *(word for word in (*program.measured, *program.measured_draft) if word.startswith("--")),
    }
    assert len(options) > 8
    for option in options:
        assert re.search(rf"^  .*{option}\b", help_text, re.M), option


def test_llama_cpp_knows_the_options_of_its_serve_md() -> None:
    source = (environment("llama.cpp") / "source/vendor/llama.cpp/common/arg.cpp").read_text()
    flags: dict[str, Any] = dict(ENGINES["gguf"].flags)
    for option in re.findall(r"--[a-z-]+", " ".join(flags.values())):
        assert f'"{option}"' in source
