"""Our training step and its plain form have the same loss, and bench/train.py writes its page."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import engines
from tests.refusals import refused
from tests.scripts import load_script

bench: Any = load_script("bench/train.py")
TINY: dict[str, Any] = {
    "others": ["plain"], "hidden_size": 64, "vocab_size": 200, "num_tokens": 64,
    "row_lengths": [64, 16], "num_steps": 3,
    "block_size": 4, "num_anchors": 16,
    "loss_rows": 40, "loss_steps": 4, "rounds": 3, "threads": 1,
}  # fmt: skip


@pytest.fixture
def output_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the files of the results and of the page, with computation in float32."""
    results, page = tmp_path / "train.json", tmp_path / "page.md"
    page.write_text("before\n<!-- train -->\n<!-- /train -->\nafter\n", encoding="utf-8")
    monkeypatch.setattr(bench, "RESULTS", results)
    monkeypatch.setattr(bench, "PAGE", page)
    monkeypatch.setattr(bench, "uses_bf16", lambda: False)
    return results, page


@pytest.mark.long  # ten processes that train
def test_the_plain_forms_have_the_same_loss(output_files: tuple[Path, Path]) -> None:
    assert bench.main(bench.Options(**TINY)) == 0
    results, page = output_files
    found = json.loads(results.read_text(encoding="utf-8"))
    for each in (*found["step"]["layouts"], *found["block"]["layouts"], found["loss"]):
        ours, plain = (each["trainers"][name] for name in ("ours", "plain"))
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5) and ours["loss"] > 0.1
        assert min(ours[part] for part in ("forward", "backward", "peak", "tokens_per_second")) > 0
    assert [(each["rows"], each["length"]) for each in found["step"]["layouts"]] == [
        (1, 64),
        (4, 16),
    ]
    shown = page.read_text(encoding="utf-8")
    assert shown.startswith(
        "before\n<!-- train -->\n### An EAGLE-3 head's step"
    ) and shown.endswith("<!-- /train -->\nafter\n")
    assert shown.count("| plain form |") == 5 and shown.count("| 4 × 16 | ours |") == 2
    assert (
        "64 tokens, an EAGLE-3 head trained on 3 draft steps in a row, its LM head frozen." in shown
        and "### A DFlash drafter's step" in shown
    )


def test_a_ratio_leaves_out_the_first_round_and_is_shown() -> None:
    def build_timings(*seconds: float, peak: float) -> list[dict[str, float]]:
        parts = {"forward": 0.5, "backward": 0.4, "optimizer": 0.1, "loss": 1.0, "peak": peak}
        return [{"seconds": each, **parts} for each in seconds]

    steps = {
        "ours": build_timings(50.0, 1.0, 2.0, 1.0, peak=300),
        "plain": build_timings(1.0, 4.0, 4.0, 4.0, peak=1000),
    }
    summary = bench.summarize_steps(steps, num_tokens=100)
    assert summary["trainers"]["ours"]["tokens_per_second"] == 100
    ratio = summary["ratios"]["plain"]
    assert ratio["speed"] == pytest.approx(3.0) and ratio["memory"] == 0.3
    low, high = ratio["speed_ci95"]
    assert 2.0 <= low < 3.0 < high <= 4.0
    shape = {
        "hidden_size": 64,
        "vocab_size": 1200,
        "num_tokens": 100,
        "block_size": 4,
        "num_anchors": 16,
    }
    machine = {"cpu": "a CPU", "threads": 2, "bf16": False, "torch": "2"}
    shown = bench.format_page(
        {"block": {**shape, **machine, "layouts": [{"rows": 2, "length": 50, **summary}]}}
    )
    assert (
        "64, a vocabulary of 1,200, 100 tokens, 16 blocks of 4 positions; the DFlash drafter has"
        " five layers" in shown
    )
    assert "| 2 × 50 | plain form | 25 | 500, 400, 100 | 1.0 KiB | 3.00× (" in shown


def test_speculators_is_refused_where_it_is_not_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "FOLDER", tmp_path)
    with refused("others", "speculators"), bench.start_trainer("speculators", {}, 1):
        pass
