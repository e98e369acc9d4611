import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdistill
from specdistill.evaluation.measurement.hardware import WEIGHTS_PER_THREAD, fit_threads


@pytest.fixture
def eight_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def make_target(num_bytes: int) -> Any:
    return SimpleNamespace(model=SimpleNamespace(get_memory_footprint=lambda: num_bytes))


@pytest.mark.parametrize(
    ("num_bytes", "threads"),
    [(1, 1), (3 * WEIGHTS_PER_THREAD + 1, 3), (99 * WEIGHTS_PER_THREAD, 8)],
)
def test_a_target_gets_as_many_threads_as_its_weights_keep_busy(
    eight_threads: None, num_bytes: int, threads: int
):
    fit_threads(make_target(num_bytes))
    assert torch.get_num_threads() == threads


def test_the_number_of_threads_that_a_user_sets_stays(
    eight_threads: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    fit_threads(make_target(1))
    assert torch.get_num_threads() == 8


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "10000"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None), ({"GOMP_SPINCOUNT": "5"}, "5")],
)
def test_threads_spin_briefly_unless_a_user_says_otherwise(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    importlib.reload(specdistill)
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_a_vllm_process_that_loads_our_plugin_keeps_its_own_spinning(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "vllm", sys)
    importlib.reload(specdistill)
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.long  # a process that loads torch
@pytest.mark.parametrize(("given", "spins"), [({}, "10000"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")])
def test_libgomp_takes_these_settings_when_torch_loads(given: dict[str, str], spins: str):
    bare = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    environment = {**bare, **given, "OMP_DISPLAY_ENV": "VERBOSE"}
    command = [sys.executable, "-c", "import specdistill, torch"]
    shown = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stderr
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("this torch is not built with libgomp")
    assert f"GOMP_SPINCOUNT = '{spins}'" in shown
