"""The commands compute what record.json holds; record.py says how, and renews it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden import record
from tests.processes import needs_gradients_in_forks

FOLDER = Path(__file__).parent
RECORDED: dict[str, dict[str, Any]] = json.loads(
    (FOLDER / "record.json").read_text(encoding="utf-8")
)
# Machines differ in the last bits of a sum, and steps carry that on. With the plainest kernels in
# place of this CPU's own (MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41), curves moved by 2e-5 at
# most, those of Muon, which computes in bfloat16, by 2e-3, and no token changed, sampled ones
# included. On one machine everything is the same to the last bit, which record.py tells.
TOLERANCE, TOLERANCE_OF_MUON = 2e-4, 1e-2


@pytest.mark.long  # trains on pico; a first look before the whole record
@needs_gradients_in_forks
def test_the_first_steps_of_a_training_equal_the_record(tmp_path: Path) -> None:
    """While the learning rate rises, steps do not depend on how many follow."""
    keys = ("train.max_steps=5", "train.eval_strategy=no", "train.eval_on_start=false")
    curve = record.record_curve("eagle3", tmp_path, record.prepare(tmp_path), *keys)
    check_same_course(
        "eagle3", {what: RECORDED["curves"]["eagle3"][what][:5] for what in record.LOGGED}, curve
    )


@pytest.mark.long  # thirty commands: trainings, reports and exports
def test_the_commands_compute_what_the_record_holds(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """The new record is made in a process with one thread; this one may have begun with more.

    It is one test, so that one worker makes the record while others go on with theirs.
    """
    output = tmp_path / "golden.json"
    command = [sys.executable, str(FOLDER / "record.py"), str(output)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert output.is_file(), result.stderr
    new_record: dict[str, dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))
    assert {part: [*entries] for part, entries in new_record.items()} == {
        part: [*entries] for part, entries in RECORDED.items()
    }
    for part, entries in RECORDED.items():
        for name, recorded in entries.items():
            with subtests.test(f"{part}/{name}"):
                if part == "curves":
                    check_same_course(name, recorded, new_record[part][name])
                else:
                    assert new_record[part][name] == recorded


def check_same_course(name: str, recorded: dict[str, Any], now: dict[str, Any]) -> None:
    assert now.keys() == recorded.keys()
    is_muon = "Muon" in name
    tolerance = TOLERANCE_OF_MUON if is_muon else TOLERANCE
    for what, values in recorded.items():
        # An accuracy is a share of 300 positions, of which Muon's last bits turn one or two.
        tolerance_of_accuracy = 0.01 if is_muon and what.startswith("eval_accuracy") else 0.0
        assert now[what] == pytest.approx(values, rel=tolerance, abs=tolerance_of_accuracy), what
