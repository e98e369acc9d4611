"""The plugin runs in a real vLLM, on a CPU in float32.

A lookup in front of a head accepts what it accepts in our decoder, prompt by prompt.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.counting import Counts, generate_here, sum_counts
from bench.engines import install_plugin
from specdistill.common.errors import ExitCode, ResourceError
from specdistill.common.project import PICO, ROOT
from specdistill.evaluation.report.files import read_report
from specdistill.evaluation.suites.suite import load_suite, tokenize
from specdistill.methods.load import load_proposer
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.serving.engines.start import start_server
from specdistill.serving.engines.vllm import LOOKUP_VARIABLE
from specdistill.targets.frozen import FrozenTarget
from tests.with_engines.environments import QUICK_VLLM, environment

pytestmark = [pytest.mark.long, pytest.mark.engines]  # vLLM in its own environment

SUITE, NUM_PROMPTS, NEW_TOKENS, LOADS, K = "pico-edit", 8, 48, (1, 4), 6
LOOKUP = LookupFirstConfig(min=2, max=5, draft_tokens=3)


@pytest.fixture(scope="module")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return install_plugin(tmp_path_factory.mktemp("site"))


def run_eval(
    method: str, draft: Path, folder: Path, python_path: str, *more: str
) -> "subprocess.CompletedProcess[str]":
    engine = (
        f"env PYTHONPATH={python_path} {environment('vllm') / 'bin' / 'vllm'} serve --enforce-eager"
        " --block-size 32"
    )
    keys = [
        "target=pico",
        f"method={method}",
        f"draft={draft}",
        f"suite={SUITE}",
        "gate=server",
        f"output_dir={folder}",
    ]
    keys += [
        "eval.engine=vllm",
        f"eval.engine_command={engine}",
        f"eval.num_speculative_tokens={K}",
        "eval.repeats=1",
    ]
    keys += [
        f"eval.num_prompts={NUM_PROMPTS}",
        f"eval.max_new_tokens={NEW_TOKENS}",
        "eval.warmup=1",
        *more,
    ]
    surroundings = {**os.environ, **QUICK_VLLM, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "specdistill", "eval", *keys]
    return subprocess.run(
        line, env=surroundings, cwd=ROOT, capture_output=True, text=True, check=False
    )


BEHIND = f"eval.lookup_first={LOOKUP.model_dump_json(exclude_none=True)}"


@pytest.mark.parametrize(
    ("method", "name"), [("eagle3", "EAGLE-3.1"), ("draft_model", "draft model")]
)
def test_a_lookup_in_front_of_a_draft_accepts_what_it_does_here(
    method: str,
    name: str,
    plugin_path: str,
    trained_draft: Callable[[str], Path],
    pico: FrozenTarget,
    tmp_path: Path,
) -> None:
    """With one request at a time and with four, every counter is that of our decoder.

    The output is that of vLLM without a draft.
    """
    draft = trained_draft(name)
    done = run_eval(
        method,
        draft,
        tmp_path / "report",
        plugin_path,
        BEHIND,
        f"eval.sweep.concurrency={[*LOADS]}",
    )
    assert done.returncode in (
        ExitCode.DONE,
        ExitCode.CHECK_FAILED,
        ExitCode.INCONCLUSIVE,
    ), done.stderr[-4000:]
    report, samples = read_report(tmp_path / "report")
    assert (
        report["lossless"]["greedy_identical"]
        and report["lossless"]["prompts_checked"] == NUM_PROMPTS
    )
    assert report["settings"]["drafting"] == {"lookup_first": LOOKUP.described}
    prompts = tokenize(
        load_suite(SUITE),
        pico.tokenizer,
        max_new_tokens=NEW_TOKENS,
        max_length=512,
        num_prompts=NUM_PROMPTS,
    )
    alone, behind = (
        load_proposer(method, draft, pico),
        load_proposer(method, draft, pico, lookup_first=LOOKUP),
    )
    head, cascade = [], []
    for prompt, *both in zip(prompts, samples[:NUM_PROMPTS], samples[NUM_PROMPTS:], strict=True):
        limits = {"max_new_tokens": len(both[0].token_ids), "num_speculative_tokens": K}
        (here,) = generate_here(pico, behind, [prompt.token_ids], **limits)
        cascade.append(here)
        head += generate_here(
            pico,
            alone,
            [prompt.token_ids],
            **limits | {"num_speculative_tokens": LOOKUP.draft_tokens},
        )
        for there in both:
            assert there.token_ids == here.token_ids and there.counts is not None
            counts = (
                there.counts.num_drafts,
                there.counts.num_draft_tokens,
                pad_to_k(there.counts.accepted_per_position),
            )
            assert Counts(*counts) == here.counts
    assert sum_counts(cascade).mean_acceptance_length > sum_counts(head).mean_acceptance_length
    # The draft alone does not reach the last position.
    assert sum_counts(cascade).accepted_per_position[-1] > 0


def pad_to_k(accepted: tuple[int, ...]) -> tuple[int, ...]:
    return (*accepted, *[0] * (K - len(accepted)))


def test_without_the_plugin_nothing_is_measured(
    trained_draft: Callable[[str], Path], tmp_path: Path
) -> None:
    done = run_eval("eagle3", trained_draft("EAGLE-3.1"), tmp_path / "report", "", BEHIND)
    assert done.returncode == ExitCode.RESOURCE_ERROR
    assert "does not use the lookup" in done.stderr and "specdistill[vllm]" in done.stderr
    assert not (tmp_path / "report" / "report.json").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method probabilistic"),
        # tests/serving/test_vllm_plugin.py has both refusals; one of them shows that no server
        # starts.
        pytest.param(
            {"num_speculative_tokens": 2},
            "draft_tokens 3 with num_speculative_tokens 2",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_vllm_that_cannot_look_up_does_not_start(
    changes: dict[str, Any],
    said: str,
    plugin_path: str,
    trained_draft: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Other refusals cannot be tested: the CPU build has no model runner V2, and schedules
    synchronously whatever its options say."""
    variables = {
        **QUICK_VLLM,
        "PYTHONPATH": plugin_path,
        LOOKUP_VARIABLE: LOOKUP.model_dump_json(exclude_none=True),
    }
    config = {
        "method": "eagle3",
        "model": str(trained_draft("EAGLE-3.1")),
        "num_speculative_tokens": K,
        **changes,
    }
    words = [
        str(environment("vllm") / "bin" / "vllm"),
        "serve",
        str(PICO),
        "--speculative-config",
        json.dumps(config),
    ]
    words += [
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--enforce-eager",
        "--block-size",
        "32",
    ]
    line = ["env", *(f"{name}={value}" for name, value in variables.items()), *words]
    with (
        pytest.raises(ResourceError, match=f"{LOOKUP_VARIABLE}: got {said}"),
        start_server(line, tmp_path / "log", key="eval.engine_command"),
    ):
        pytest.fail("it started")
