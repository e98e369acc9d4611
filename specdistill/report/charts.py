"""The coordinates of the report's plots, in units of an SVG's viewBox; the template draws them.

Every plot is 420 units wide: two fit side by side on a desktop and one on a phone, with readable labels on both.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdistill.report.latency import KINDS
from specdistill.report.numbers import between, duration, number, percent, times
from specdistill.statistics.theory import best_point

WIDTH = 420
LEFT, RIGHT = 46, 12  # margins of plots with a vertical axis
TOP, BOTTOM = 22, 30
AXIS = 16  # the height of an axis's name
BESIDE = 108  # the width of names beside what they name
LETTER = 7.6  # the width that a character of a label takes, generously
ABOVE, LONGEST = 14, int(WIDTH / LETTER)  # the height of a name above what it names, and the characters that fit there


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
    height, bottom = 230, 230 - BOTTOM - AXIS
    y = Scale(0, 1, bottom, TOP)
    slot = (WIDTH - LEFT - RIGHT) / len(rates)
    width = round(min(slot * 0.56, 56), 1)
    bars = []
    for index, (rate, conditional) in enumerate(zip(rates, row["conditional_acceptance_rate"], strict=True)):
        centre = round(LEFT + slot * (index + 0.5), 1)
        bars.append(
            {
                "x": round(centre - width / 2, 1),
                "width": width,
                "y": y(rate),
                "height": round(y(0) - y(rate), 1),
                "centre": centre,
                "label": percent(rate),
                "labelled": width > 4 * LETTER and bottom - y(rate) > 20,
                "name": str(index + 1) if slot > 2 * LETTER or index % 4 == 0 else "",
                "dot": None if conditional is None else y(conditional),
                "dot_label": percent(conditional),
            }
        )
    ticks = [{"y": y(share), "label": percent(share)} for share in (0, 0.25, 0.5, 0.75, 1)]
    return {"height": height, "bottom": bottom, "bars": bars, "ticks": ticks, "left": LEFT, "right": WIDTH - RIGHT}


def acceptance_by(names: Iterable[str], rows: Iterable[Mapping[str, Any]], k: int) -> dict[str, Any] | None:
    """One line a row: the acceptance length and its interval, from 1 (no gain) to K + 1 (all accepted)."""
    lines = [(name, row, "mean_acceptance_length") for name, row in zip(names, rows, strict=True)]
    shown = [line for line in lines if line[2] in line[1]]
    if not shown:
        return None
    return _lines(shown, 1, k + 1, [(value, str(value)) for value in range(1, k + 2, 1 + k // 8)], number)


def speedup_by(names: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """One line a row: the speedup and its interval; `one` is the x of plain decoding."""
    return _speedup_lines([(name, row) for name, row in zip(names, rows, strict=True) if "speedup" in row])


def speedup_by_candidate(reports: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any] | None:
    """`speedup_by` of several candidates, with their names above their lines."""
    return _speedup_lines([(name, report["results"][0]) for name, report in reports], left=16, above=ABOVE)


def _speedup_lines(
    rows: Sequence[tuple[str, Mapping[str, Any]]], left: float = BESIDE, above: float = 0
) -> dict[str, Any] | None:
    if not rows:
        return None
    ends = [end for _, row in rows for end in row.get("speedup_ci95", (row["speedup"],))]
    floor, ceiling = _round_bounds(min(1.0, *ends), max(1.0, *ends))
    ticks = [(value, f"{value:g}×") for value in _ticks(floor, ceiling)]
    plot = _lines([(name, row, "speedup") for name, row in rows], floor, ceiling, ticks, times, left=left, above=above)
    return {**plot, "one": _line_scale(floor, ceiling, left)(1.0)}


def _line_scale(low: float, high: float, left: float) -> Scale:
    return Scale(low, high, left, WIDTH - 44)


def _lines(
    rows: Sequence[tuple[str, Mapping[str, Any], str]],
    low: float,
    high: float,
    ticks: Sequence[tuple[float, str]],
    label: Callable[[float], str],
    *,
    left: float = BESIDE,
    above: float = 0,
) -> dict[str, Any]:
    """A line for each (name, row, metric): the metric's value and its interval, on one horizontal axis.

    Names have `left` units beside the lines, or `above` units above each.
    """
    x, step, top = _line_scale(low, high, left), 30 + above, 12
    lines = []
    names = _short([name for name, _, _ in rows], LONGEST if above else 16)
    for index, (name, (_, row, metric)) in enumerate(zip(names, rows, strict=True)):
        value = row[metric]
        start, end = row.get(f"{metric}_ci95", (value, value))
        lines.append(
            {
                "y": top + step * index + above + 15,
                "name": name,
                "x": x(value),
                "low": x(start),
                "high": x(end),
                "label": label(value),
            }
        )
    bottom = top + step * len(lines)
    marks = [{"x": x(value), "label": text} for value, text in ticks]
    return {"height": bottom + 26, "lines": lines, "ticks": marks, "top": top, "bottom": bottom, "names_above": bool(above)}


def acceptance_against_cost(
    ranking: Sequence[Mapping[str, Any]], reports: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """A point a candidate: c to the right, the acceptance length and its interval upward; a line joins the points of the frontier.

    Left and up is better. None when no candidate drafted anything.
    """
    shown = [(entry, reports[entry["name"]]) for entry in ranking if "theory" in reports[entry["name"]]]
    if not shown:
        return None
    height, bottom = 240, 240 - BOTTOM - 14
    costs = [report["theory"]["c"] for _, report in shown]
    rows = [report["results"][0] for _, report in shown]
    intervals = [row.get("mean_acceptance_length_ci95", (row["mean_acceptance_length"],) * 2) for row in rows]
    floor, ceiling = _round_bounds(min(low for low, _ in intervals), max(high for _, high in intervals))
    right = max(costs) * 1.15 or 1.0
    x, y = Scale(0, right, LEFT, WIDTH - RIGHT), Scale(floor, ceiling, bottom, TOP)
    names = [entry["name"] for entry, _ in shown]
    points = []
    for index, ((entry, _), cost, row, (low, high)) in enumerate(zip(shown, costs, rows, intervals, strict=True)):
        place = {"x": x(cost), "y": y(row["mean_acceptance_length"]), "low": y(low), "high": y(high)}
        side = "end" if place["x"] > WIDTH * 0.6 else "start"
        room = (place["x"] - LEFT if side == "end" else WIDTH - place["x"]) - 9
        name = _short(names, int(room / LETTER))[index]
        label = {"label": name, "anchor": side, "label_x": place["x"] + (-9 if side == "end" else 9)}
        points.append({**place, **label, "frontier": entry["on_pareto_frontier"], "best": entry["rank"] == 1})
    _spread_labels(points, 15, bottom)
    frontier = sorted((point["x"], point["y"]) for point in points if point["frontier"])
    return {**_axes(x, y, _ticks(0, right)), "height": height, "points": points, "path": _path(frontier)}


def acceptance_while_training(candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """A line for each candidate with a curve: simulated acceptance length against optimizer steps, its name where it ends.

    Left and up is better: the same acceptance for less training. None when none of them has a curve.
    """
    shown = [(entry["name"], entry["training"]) for entry in candidates if entry["training"] and entry["training"]["curve"]]
    if not shown:
        return None
    names, line = [name for name, _ in shown], 28  # a name with the time below it
    height = max(240, TOP + BOTTOM + 14 + line * len(shown))
    bottom, right = height - BOTTOM - 14, WIDTH - 140
    steps, lengths = zip(*(point for _, training in shown for point in training["curve"]), strict=True)
    floor, ceiling = _round_bounds(min(lengths), max(lengths))
    x, y = Scale(0, max(steps) or 1, LEFT, right), Scale(floor, ceiling, bottom, TOP)
    lines = []
    for index, (_, training) in enumerate(shown):
        points = [(x(step), y(length)) for step, length in training["curve"]]
        end = dict(zip("xy", points[-1], strict=True))
        name = _short(names, int((WIDTH - end["x"] - 8) / LETTER))[index]
        time = "" if training["seconds"] is None else duration(training["seconds"])
        lines.append({**end, "path": _path(points), "label": name, "time": time})
    _spread_labels(lines, line, bottom - 14)
    whole_steps = [int(step) for step in _ticks(0, max(steps) or 1) if step == int(step)]
    return {**_axes(x, y, whole_steps), "height": height, "lines": lines}


def _axes(x: Scale, y: Scale, x_values: Iterable[float], unit: str = "") -> dict[str, Any]:
    """Ticks of both axes, and where the plot ends; unit: behind the labels of the vertical one."""
    return {
        "x_ticks": [{"x": x(value), "label": f"{value:,}" if isinstance(value, int) else f"{value:g}"} for value in x_values],
        "y_ticks": [{"y": y(value), "label": f"{value:g}{unit}"} for value in _ticks(y.low, y.high)],
        "left": LEFT,
        "right": x.end,
        "bottom": y.start,
    }


def _spread_labels(points: Sequence[dict[str, Any]], line: float, lowest: float) -> None:
    """Gives each point a `label_y`: its own height, moved down from other labels and up from `lowest` where they would overlap."""
    ordered = sorted(points, key=lambda point: (point["y"], point["x"]))

    def nearby(point: dict[str, Any], others: Sequence[dict[str, Any]]) -> list[float]:
        return [other["label_y"] for other in others if abs(other["x"] - point["x"]) < WIDTH / 2]

    for index, point in enumerate(ordered):
        point["label_y"] = max([point["y"] + 4, *(label + line for label in nearby(point, ordered[:index]))])
    for index, point in reversed(list(enumerate(ordered))):
        point["label_y"] = min([point["label_y"], lowest, *(label - line for label in nearby(point, ordered[index + 1 :]))])


def _short(names: Sequence[str], length: int) -> list[str]:
    """Names of at most `length` characters: long ones lose the words that all long ones begin or end with, then their middle."""
    long = [name.split("-") for name in names if len(name) > length]
    if len(long) < 2:
        long = []
    start = _num_shared(words[:-1] for words in long)
    enough = all(len("-".join(words[start:])) < length for words in long)
    end = 0 if enough else _num_shared(words[:start:-1] for words in long)
    half = (length - 1) // 2
    short = []
    for name in names:
        if len(name) > length:
            words = name.split("-")
            name = "…" * (start > 0) + "-".join(words[start : len(words) - end]) + "…" * (end > 0)
        short.append(name if len(name) <= length else f"{name[: length - 1 - half]}…{name[-half:]}")
    return short


def _num_shared(lists: Iterable[Sequence[str]]) -> int:
    """The number of equal items that all lists begin with."""
    return len(list(itertools.takewhile(lambda items: len(set(items)) == 1, zip(*lists, strict=False))))


def speedup_by_k(theory: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Over K': the predicted speedup, its ceiling (the speedup of a draft without cost: the acceptance length), and the measured
    speedup of each row with its interval. None with neither a prediction nor a second K measured.
    """
    measured = [row for row in rows if "speedup" in row]
    if theory is None and len(measured) < 2:
        return None
    curve: list[dict[str, float]] = theory["curve"] if theory else []
    ceiling = {point["k"]: point["mean_acceptance_length"] for point in curve} or {0: 1.0}
    ceiling |= {row["num_speculative_tokens"]: row["mean_acceptance_length"] for row in rows if "mean_acceptance_length" in row}
    intervals = [row.get("speedup_ci95", (row["speedup"], row["speedup"])) for row in measured]
    values = [1.0, *ceiling.values(), *(point["predicted_speedup"] for point in curve), *itertools.chain(*intervals)]
    height, bottom = 260, 260 - BOTTOM - AXIS
    low, high = _round_bounds(min(values), max(values))
    longest = max(1, int(max(ceiling)), *(row["num_speculative_tokens"] for row in measured))
    x, y = Scale(0, longest, LEFT + 8, WIDTH - RIGHT - 14), Scale(low, high, bottom, TOP)
    return {
        **_axes(x, y, range(0, longest + 1, 1 + longest // 13), "×"),
        "right": WIDTH - RIGHT,
        "height": height,
        "predicted": [
            {
                "x": x(point["k"]),
                "y": y(point["predicted_speedup"]),
                "best": theory is not None and point["k"] == theory["best_k"],
            }
            for point in curve
        ],
        "path": _path((x(point["k"]), y(point["predicted_speedup"])) for point in curve),
        "ceiling": _path((x(k), y(length)) for k, length in sorted(ceiling.items())),
        "measured": [
            {
                "x": x(row["num_speculative_tokens"]),
                "y": y(row["speedup"]),
                "low": y(low_high[0]),
                "high": y(low_high[1]),
                "label": f"K = {row['num_speculative_tokens']}: {times(row['speedup'])}{between(row, 'speedup')}",
            }
            for row, low_high in zip(measured, intervals, strict=True)
        ],
        "best_label": f"best at K = {theory['best_k']}: {times(best_point(curve)['predicted_speedup'])}" if theory else "",
        "one": y(1.0),
    }


def _path(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{along},{up}" for along, up in points)


def time_per_token(latency: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """A bar each for plain decoding and decoding with the draft: milliseconds a token, by what they go into."""
    sides = [(name, latency[side]) for side, name in (("baseline", "plain"), ("speculative", "with draft")) if side in latency]
    bars = [(name, tuple((kind, parts[kind]) for kind in KINDS if kind in parts)) for name, parts in sides]
    return _stacked(bars) if bars else None


def time_per_token_by_candidate(reports: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any] | None:
    """`time_per_token` of several candidates, below the plain decoding that they share."""
    rows = [(name, report["results"][0]) for name, report in reports]
    if any("verify_ms" not in row or "baseline_step_ms" not in row for _, row in rows):
        return None
    names = _short([name for name, _ in rows], LONGEST)
    drafts = [(name, _draft_parts(row)) for name, (_, row) in zip(names, rows, strict=True)]
    return _stacked([("plain", _plain_parts(rows[0][1])), *drafts], left=0, above=ABOVE)


Parts = tuple[tuple[str, float], ...]  # (kind, milliseconds a token)


def _plain_parts(row: Mapping[str, Any]) -> Parts:
    tokens, total = row["num_new_tokens"], 1000 / row["baseline_tokens_per_second"]
    step = row["baseline_step_ms"] * (tokens - row["num_prompts"]) / tokens
    return ("target", step), ("rest", total - step)


def _draft_parts(row: Mapping[str, Any]) -> Parts:
    tokens, total = row["num_new_tokens"], 1000 / row["tokens_per_second"]
    draft = row.get("draft_ms", 0.0) * row["num_draft_tokens"] / tokens
    verify = row["verify_ms"] * row["num_rounds"] / tokens
    return ("draft", draft), ("target", verify), ("rest", total - draft - verify)


def _stacked(rows: Sequence[tuple[str, Parts]], *, left: float = 88, above: float = 0) -> dict[str, Any]:
    """A bar for each name, its parts one after the other; names as in `_lines`."""
    step_height, top = 52 + above, 8
    x = Scale(0, max(sum(milliseconds for _, milliseconds in parts) for _, parts in rows), left, WIDTH - 72)
    bars = []
    for index, (name, parts) in enumerate(rows):
        total, start, segments = sum(milliseconds for _, milliseconds in parts), 0.0, []
        for kind, milliseconds in parts:
            milliseconds = max(milliseconds, 0.0)
            segments.append(
                {"kind": kind, "x": x(start), "width": round(x(start + milliseconds) - x(start), 1), "ms": milliseconds}
            )
            start += milliseconds
        bars.append(
            {
                "name": name,
                "y": top + step_height * index + above,
                "segments": segments,
                "end": x(start),
                "label": f"{number(total, max(0, 3 - len(str(int(total)))))} ms",  # three digits
            }
        )
    return {"height": top + len(rows) * step_height, "bars": bars, "left": left, "names_above": bool(above)}


def _round_bounds(low: float, high: float) -> tuple[float, float]:
    """The next tenths outside, with some room."""
    return max(0.0, int(low * 10 - 1) / 10), int(high * 10 + 1.999) / 10


def _ticks(low: float, high: float) -> list[float]:
    steps = (0.005, *(digits * 10**power for power in range(-2, 9) for digits in (1, 2, 2.5, 5)))
    step = next(step for step in steps if (high - low) / step <= 6)
    first = int(low / step + 0.999999) * step
    return [round(first + index * step, 3) for index in range(int((high - first) / step + 1e-9) + 1)]
