"""A run of two processes is killed at three moments, and ends with the same draft."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.launches import tiny_files
from tests.scripts import load_script

bench: Any = load_script("bench/kills.py")


@pytest.mark.long  # two processes, launched once whole and four times until they are killed
@pytest.mark.distributed
def test_a_killed_run_resumes_to_the_same_draft(tmp_path: Path) -> None:
    files = [key for key in tiny_files(tmp_path) if key.startswith(("target.model", "data.source", "data.cache_dir"))]
    kills, same = bench.trial(tmp_path / "runs", files, 3, random.Random(0))
    assert kills and all(same)
