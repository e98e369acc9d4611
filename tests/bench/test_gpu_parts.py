"""The parts of make gpu that need no other process, at tiny shapes on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_parts
from specdistill.common.errors import ExitCode


def run_part(name: str, shape: gpu_parts.Shape = gpu_parts.SMALL_SHAPE) -> dict[str, Any]:
    """Return everything that a part yields."""
    numbers: dict[str, Any] = {}
    for piece in gpu_parts.PARTS[name](shape):
        numbers |= piece
    return numbers


@pytest.mark.long  # eight short trainings
def test_every_part_of_training_and_decoding_runs(tmp_path: Path) -> None:
    parts = ["ceilings", "train", "shapes", "variants", "decoding", "generation"]
    results = {name: run_part(name) for name in parts}
    assert results["train"]["tokens_per_second"] > 0 and len(results["train"]["kernels"]) == 40
    assert set(results["train"]["parts_ms"]) == {
        "target",
        "unroll and loss",
        "backward",
        "optimizer",
    }
    losses = {name: numbers["loss"] for name, numbers in results["variants"].items()}
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-3)
    gpu.write_results(tmp_path / "cpu.json", results)
    page = gpu.format_results([tmp_path / "cpu.json"])
    assert "16 tokens" in page and "| decoding |" in page


def test_what_a_part_measured_before_it_failed_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(shape: gpu_parts.Shape) -> Any:
        yield {"tflops": shape.matrix}
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu_parts.PARTS, "ceilings", fail)
    arguments = ["part=ceilings", f"results={tmp_path / 'lines'}", "small=true"]
    assert gpu_parts.run(gpu_parts.main, gpu_parts.Options, arguments) != ExitCode.DONE
    assert json.loads((tmp_path / "lines").read_text()) == {"tflops": 64}


def test_hardware_and_software_are_recorded_before_the_measurements() -> None:
    first, *others = gpu_parts.PARTS["ceilings"](gpu_parts.SMALL_SHAPE)
    assert {"torch", "transformers", "cuda"} <= set(first["software"]) and first["hardware"]["name"]
    assert [set(piece) for piece in others] == [{"tflops"}, {"copy_gb_per_second"}]


def test_the_short_form_takes_tests_that_exist() -> None:
    options = gpu_parts.Options(part="tests", results="", short=True)
    paths = [
        argument for argument in gpu_parts.build_shape(options).tests if argument.endswith(".py")
    ]
    texts = [(gpu_parts.ROOT / path).read_text("utf-8") for path in paths]
    assert len(paths) == 3 and all("pytest.mark.gpu" in text for text in texts)
