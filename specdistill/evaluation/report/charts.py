"""Where everything in the report's plots stands, in the units of an SVG's viewBox; the template draws it.

Every plot is 420 units wide, so that four of them fit a desktop in pairs and a phone one by one, with readable labels on both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdistill.evaluation.report.wording import number, percent, times
from specdistill.evaluation.theory import best_point

WIDTH = 420
LEFT, RIGHT = 40, 12  # margins of plots with a vertical axis
TOP, BOTTOM = 22, 30


@dataclass(frozen=True)
class Scale:
    """Linear map from [low, high] to [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


def acceptance_by_position(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Bars: unconditional rate of each position. Dots: the rate once the position is reached."""
    rates: Sequence[float] = row.get("acceptance_rate_per_position", [])
    if not rates:
        return None
    height = 210
    y = Scale(0, 1, height - BOTTOM, TOP)
    slot = (WIDTH - LEFT - RIGHT) / len(rates)
    bars = []
    for index, (rate, conditional) in enumerate(zip(rates, row["conditional_acceptance_rate"], strict=True)):
        centre = round(LEFT + slot * (index + 0.5), 1)
        width = round(min(slot * 0.56, 56), 1)
        bars.append(
            {
                "x": round(centre - width / 2, 1),
                "width": width,
                "y": y(rate),
                "height": round(y(0) - y(rate), 1),
                "centre": centre,
                "label": percent(rate),
                "name": str(index + 1),
                "dot": None if conditional is None else y(conditional),
                "dot_label": percent(conditional),
            }
        )
    ticks = [{"y": y(share), "label": percent(share)} for share in (0, 0.25, 0.5, 0.75, 1)]
    return {"height": height, "bars": bars, "ticks": ticks, "left": LEFT, "right": WIDTH - RIGHT}


def acceptance_by_category(rows: Sequence[Mapping[str, Any]], k: int) -> dict[str, Any] | None:
    """One line a row: the acceptance length and its interval, from 1 (no gain) to K + 1 (all accepted)."""
    shown = [row for row in rows if "mean_acceptance_length" in row]
    if not shown:
        return None
    left, step, top = 108, 30, 12
    x = Scale(1, k + 1, left, WIDTH - 44)
    lines = []
    for index, row in enumerate(shown):
        length = row["mean_acceptance_length"]
        low, high = row.get("mean_acceptance_length_ci95", (length, length))
        name = row["category"].replace("_", " ")
        lines.append(
            {
                "y": top + step * index + step / 2,
                "name": name if len(name) <= 16 else f"{name[:15]}…",
                "x": x(length),
                "low": x(low),
                "high": x(high),
                "label": number(length),
            }
        )
    bottom = top + step * len(shown)
    ticks = [{"x": x(value), "label": str(value)} for value in range(1, k + 2)]
    return {"height": bottom + 26, "lines": lines, "ticks": ticks, "top": top, "bottom": bottom}


def speedup_by_k(theory: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The predicted curve over K', and the measured point with its interval at K."""
    height = 210
    curve, k = theory["curve"], theory["K"]
    low, high = row.get("speedup_ci95", (row["speedup"], row["speedup"]))
    values = [1.0, low, high, *(point["predicted_speedup"] for point in curve)]
    floor, ceiling = _round_bounds(min(values), max(values))
    x, y = Scale(0, k, LEFT + 8, WIDTH - RIGHT - 14), Scale(floor, ceiling, height - BOTTOM, TOP)
    points = [
        {"x": x(point["k"]), "y": y(point["predicted_speedup"]), "k": point["k"], "best": point["k"] == theory["best_k"]}
        for point in curve
    ]
    best = best_point(curve)
    ticks = [{"y": y(value), "label": f"{value:g}×"} for value in _ticks(floor, ceiling)]
    return {
        "height": height,
        "points": points,
        "path": " ".join(f"{point['x']},{point['y']}" for point in points),
        "measured": {"x": x(k), "y": y(row["speedup"]), "low": y(low), "high": y(high), "label": times(row["speedup"])},
        "best_label": f"best K = {theory['best_k']}: {times(best['predicted_speedup'])}",
        "one": y(1.0),
        "ticks": ticks,
        "left": LEFT,
        "right": WIDTH - RIGHT,
    }


def time_per_token(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Milliseconds that one token costs, plain and with the draft, and what they go into."""
    if "verify_ms" not in row or "baseline_step_ms" not in row:
        return None
    tokens = row["num_new_tokens"]
    with_draft, plain = 1000 / row["tokens_per_second"], 1000 / row["baseline_tokens_per_second"]
    draft = row.get("draft_ms", 0.0) * row["num_draft_tokens"] / tokens
    verify = row["verify_ms"] * row["num_rounds"] / tokens
    step = row["baseline_step_ms"] * (tokens - row["num_prompts"]) / tokens
    left, step_height, top = 88, 52, 8
    x = Scale(0, max(with_draft, plain), left, WIDTH - 62)
    bars = []
    for index, (name, total, parts) in enumerate(
        (
            ("plain", plain, (("target", step), ("rest", plain - step))),
            ("with draft", with_draft, (("draft", draft), ("target", verify), ("rest", with_draft - draft - verify))),
        )
    ):
        start, segments = 0.0, []
        for kind, milliseconds in parts:
            milliseconds = max(milliseconds, 0.0)
            segments.append(
                {"kind": kind, "x": x(start), "width": round(x(start + milliseconds) - x(start), 1), "ms": milliseconds}
            )
            start += milliseconds
        bars.append(
            {"name": name, "y": top + step_height * index, "segments": segments, "end": x(start), "label": f"{total:.2f} ms"}
        )
    return {"height": top + 2 * step_height, "bars": bars, "left": left}


def _round_bounds(low: float, high: float) -> tuple[float, float]:
    """The next tenths outside, with some room."""
    return max(0.0, int(low * 10 - 1) / 10), int(high * 10 + 1.999) / 10


def _ticks(low: float, high: float) -> list[float]:
    step = next(step for step in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0) if (high - low) / step <= 6)
    first = int(low / step + 0.999999) * step
    return [round(first + index * step, 2) for index in range(int((high - first) / step + 1e-9) + 1)]
