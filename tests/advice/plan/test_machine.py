"""A plan for a machine without a GPU uses the measured costs of that machine."""

import json
import time
from pathlib import Path

import pytest
import torch

from specdistill.advice.plan import accounting
from specdistill.advice.plan.accounting import (
    Machine,
    measure_machine,
)
from specdistill.advice.plan.options import ServingOptions
from specdistill.advice.plan.plan import Plan, make_plan
from specdistill.advice.plan.reading import read_model_config
from specdistill.cli.main import main
from specdistill.cli.plan import choose_device
from tests.refusals import refused_key

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "dtype": "bfloat16",
}
# Measured on two cores in float32, whose kernels suit four rows and more.
UNEVEN = {1: 1.0, 2: 2.0, 3: 2.3, 4: 1.3, 5: 1.1, 32: 2.0}
LINEAR = {1: 1.0, 32: 32.0}


def make_machine(row_costs: dict[int, float]) -> Machine:
    return Machine("a machine", 1e11, 1e10, dtype="float32", row_costs=row_costs, memory_gb=8.0)


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(tmp_path)


def make_plan_on_machine(
    row_costs: dict[int, float], target: str, monkeypatch: pytest.MonkeyPatch
) -> Plan:
    monkeypatch.setattr(accounting, "measure_machine", lambda *sizes: make_machine(row_costs))
    described = read_model_config(target, key="target")
    device, serving = choose_device(ServingOptions(), described)
    return make_plan(described, serving=serving, device=device)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="plans for its accelerator")
def test_a_plan_for_a_machine_without_a_gpu_uses_its_measured_costs(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan_on_machine(UNEVEN, target, monkeypatch)
    assert (plan.device, plan.serving["memory_gb"], plan.serving["dtype"]) == (
        "a machine",
        8.0,
        "float32",
    )
    assert "target.dtype=float32" in str(plan.recommendation["lookup"])
    ngram = next(row for row in plan.methods if row.method == "ngram")
    assert ngram.alphas is not None and ngram.low is not None and ngram.high is not None
    # The speedup is that of the published rate, with the costs of rows on this machine.
    lengths = {k: sum(ngram.alphas[1] ** i for i in range(k + 1)) for k in (1, 2, 3, 4)}
    assert ngram.high.speedup == pytest.approx(
        max(length / UNEVEN[k + 1] for k, length in lengths.items()), rel=0.02
    )
    assert ngram.low.speedup < ngram.high.speedup and ngram.high.num_speculative_tokens >= 3
    # The machine is one device.
    assert all(
        row.training_launch is None or row.training_launch.num_processes == 1
        for row in plan.methods
    )


@pytest.mark.skipif(torch.accelerator.is_available(), reason="plans for its accelerator")
def test_no_method_is_recommended_where_cost_grows_with_the_rows(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan_on_machine(LINEAR, target, monkeypatch)
    assert plan.recommendation["method"] is None
    assert plan.recommendation["reason"] == "no method promises more than plain decoding"


@pytest.mark.usefixtures("given_training_step")
def test_a_plan_says_which_device_it_is_for(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accounting, "measure_machine", lambda *sizes: make_machine(UNEVEN))
    assert main(["plan", f"target={target}", "hub=false", "serving.device=h100"]) == 0
    assert "Estimates for H100; serving.device=cpu estimates for this machine." in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["plan", f"target={target}", "hub=false", "serving.device=cpu"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "Estimates for a machine; serving.device=h100 estimates for a GPU." in printed
        and "GPU h " not in printed
    )
    assert main(["plan", f"target={target}", "serving.device=tpu"]) == 2
    assert refused_key(capsys.readouterr().err) == "serving.device"


def test_a_target_that_this_machine_does_not_hold_is_planned_for_a_gpu() -> None:
    assert not accounting.can_hold_target(10**12)


def test_measured_costs_are_those_of_matrix_products() -> None:
    start = time.perf_counter()
    measured = measure_machine(256, 512, 256 * 512 * 8)
    assert time.perf_counter() - start < 5
    assert measured.row_costs is not None and measured.row_costs[1] == 1.0
    assert measured.dtype in ("float32", "bfloat16")
    matrix, rows = torch.ones(512, 256), torch.ones(1, 512, 256)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        torch.nn.functional.linear(rows, matrix)
        seconds.append(time.perf_counter() - start)
    # The operations are stated as a peak, of which matrix products reach half.
    assert measured.flops / 2 == pytest.approx(2 * 512 * matrix.numel() / min(seconds), rel=0.9)
    # Costs of more rows than were measured grow in proportion.
    assert measured.count_pass_bytes(1.0, 1.0, 320) == pytest.approx(10 * measured.row_costs[32])
