"""The bench of a GPU, on little of everything without one: its parts run, a failing one is named and the next ones run."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdistill.errors import ExitCode
from tests.scripts import load_script

gpu: Any = load_script("bench/gpu.py")


@pytest.mark.long  # eight short trainings
def test_every_part_of_training_and_decoding_runs(tmp_path: Path) -> None:
    parts = ["ceilings", "train", "shapes", "variants", "decoding", "generation", "launches"]
    assert gpu.main(gpu.Options(parts=parts, small=True, output_dir=str(tmp_path))) == ExitCode.DONE
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    assert list(results) == parts
    assert results["train"]["tokens_per_second"] > 0 and len(results["train"]["kernels"]) == 40
    assert set(results["train"]["parts_ms"]) == {
        "target",
        "unroll and loss",
        "backward",
        "optimizer",
    }
    losses = {
        name: found["loss"]
        for name, found in results["variants"].items()
        if isinstance(found, dict)
    }
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-3)
    assert "16 tokens" in gpu.page([path]) and "| decoding |" in gpu.page([path])


def test_a_part_that_fails_is_named_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(shape: Any) -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu.PARTS, "shapes", broken)
    options = gpu.Options(parts=["shapes", "ceilings"], small=True, output_dir=str(tmp_path))
    assert gpu.main(options) == ExitCode.CHECK_FAILED
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    assert (
        results["shapes"]["failed"] == "RuntimeError: no such kernel"
        and results["ceilings"]["copy_gb_per_second"] >= 0
    )
