"""Common settings of the tests: no network, a cache of their own, one thread and no display.

A test whose machine lacks something is skipped, and says so.
"""

import gc
import math
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

# Set before any test module imports a library that reads these; processes of tests inherit them.
# Each worker has a fresh cache: no test passes on what an earlier run or another worker prepared.
# One thread: more would round sums otherwise, and workers would share cores.
CACHE = tempfile.mkdtemp(prefix="specdistill-tests-")
os.environ.update(
    HF_HOME=CACHE,
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    MPLBACKEND="Agg",
    OMP_NUM_THREADS="1",
)


# A shell starts background jobs with interrupts ignored; tests of interrupts would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = [] if find_spec("hypothesis") else ["fuzz"]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the options of plugins that may be missing.

    A machine with a GPU may have pytest alone, without the development extras.
    """
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "of pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    for plugin, marker in (("timeout", "timeout"), ("xdist", "xdist_group")):
        if not config.pluginmanager.hasplugin(plugin):
            config.addinivalue_line("markers", f"{marker}: of pytest-{plugin}")


def pytest_collection_finish() -> None:
    """Take all that is imported off the garbage collector, and leave it off.

    Each measurement collects in full, most of it over torch.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHE, ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    if item.get_closest_marker("browser") and not any(
        map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    ):
        pytest.skip("needs Chromium on PATH")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of prompts, conversations and a small trained model.

    It is SPECDISTILL_TEST_DATA, or ../shared/data next to the repository.
    """
    folder = Path(os.environ.get("SPECDISTILL_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set SPECDISTILL_TEST_DATA")
    return folder


@pytest.fixture(scope="module")
def target() -> Any:
    """Return a tiny random target, none of whose tokens ends a text."""
    from specdistill.targets.frozen import FrozenTarget
    from tests.tiny import tiny_target_model, tiny_tokenizer

    model = tiny_target_model()
    model.generation_config.eos_token_id = []
    return FrozenTarget(model, tiny_tokenizer(), name="tiny")


@pytest.fixture
def simulated_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Advance time.perf_counter() by about a millisecond whenever it is read.

    So timings do not depend on the machine. The steps spread by a fifth, the same in every run; the
    function that is returned starts them again.
    """
    generator, lock, seconds = random.Random(0), threading.Lock(), 0.0

    def read() -> float:
        nonlocal seconds
        with lock:
            seconds += generator.lognormvariate(math.log(1e-3), 0.2)
            return seconds

    monkeypatch.setattr(time, "perf_counter", read)
    return lambda: generator.seed(0)


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run a test where neither recipes nor sources can be found by accident."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
