"""The plots of the report and of a comparison, as SVG.

Every plot is 420 units wide: two fit side by side on a desktop and one on a phone, with readable labels on both.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from specdistill.report.phrases import ResultRow, between, number, percent, times

WIDTH = 420
LEFT, RIGHT = 46, 22  # margins of plots with a vertical axis
TOP, BOTTOM = 22, 30
AXIS = 16  # the height of an axis's name
LETTER = 7.6  # the width that a character of a label takes, generously
ABOVE, LONGEST = (
    14,
    int(WIDTH / LETTER),
)  # the height of a name above what it names, and the characters that fit there

NamedRows = Sequence[tuple[str, ResultRow]]
Ticks = Sequence[tuple[float, str]]  # (value, label)
Format = Callable[[float], str]


@dataclass(frozen=True)
class Scale:
    """Linear map from [low, high] to [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(
            self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1
        )


def acceptance_by_position(row: ResultRow) -> Markup | None:
    """Bars: unconditional rate of each position. Dots: the rate once the position is reached."""
    rates: Sequence[float] = row.get("acceptance_rate_per_position", [])
    if not rates:
        return None
    height = 230
    y = Scale(0, 1, height - BOTTOM - AXIS, TOP)
    slot = (WIDTH - LEFT - RIGHT) / len(rates)
    width = round(min(slot * 0.56, 56), 1)
    drawn, titles = _y_axis(y, [(share, percent(share)) for share in (0, 0.25, 0.5, 0.75, 1)]), []
    for index, (rate, conditional) in enumerate(
        zip(rates, row["conditional_acceptance_rate"], strict=True)
    ):
        centre, top, label = round(LEFT + slot * (index + 0.5), 1), y(rate), percent(rate)
        titles.append(
            f"position {index + 1}: {label} of drafts, {percent(conditional)} once reached"
        )
        place = {
            "x": round(centre - width / 2, 1),
            "y": top,
            "width": width,
            "height": round(y.start - top, 1),
        }
        drawn.append(_tag("rect", _tag("title", titles[-1]), **place, fill="var(--bar)"))
        if width > 4 * LETTER and y.start - top > 20:
            drawn.append(_text(centre, y.start - 7, label, anchor="middle", kind="strong"))
        if conditional is not None:
            drawn.append(_dot(centre, y(conditional), 4.5, "paper", "mine"))
        name = index + 1 if slot > 2 * LETTER or index % 4 == 0 else ""
        drawn.append(_text(centre, y.start + 17, name, anchor="middle"))
    drawn.append(
        _text((LEFT + WIDTH - RIGHT) / 2, height - 6, "position in the draft", anchor="middle")
    )
    return _svg(height, "Acceptance rate by position in the draft", drawn, titles)


def acceptance_by(what: str, named: NamedRows, k: int) -> Markup | None:
    """One line per row: the acceptance length and its interval, from 1 (no gain) to K + 1 (all accepted)."""
    x = Scale(1, k + 1, 16, WIDTH - 52)
    ticks = [(value, str(value)) for value in range(1, k + 2, 1 + k // 8)]
    label, axis = f"Acceptance length by {what}", "acceptance length, tokens per round"
    return _lines(named, "mean_acceptance_length", number, x, ticks, label, axis)


def speedup_by(what: str, named: NamedRows, axis: str) -> Markup | None:
    """One line per row: the speedup and its interval; dashed: plain decoding."""
    ends = [
        1.0,
        *(end for _, row in named if "speedup" in row for end in _interval(row, "speedup")),
    ]
    x = Scale(*_round_bounds(ends), 16, WIDTH - 52)
    ticks = [(value, f"{value:g}×") for value in _ticks(x.low, x.high)]
    return _lines(named, "speedup", times, x, ticks, f"Speedup {what}", axis)


def _lines(
    named: NamedRows, metric: str, formatted: Format, x: Scale, ticks: Ticks, label: str, axis: str
) -> Markup | None:
    """A line for each row with the metric: its value and its interval, below its name."""
    named = [(name, row) for name, row in named if metric in row]
    if not named:
        return None
    step, top = 30 + ABOVE, 12
    bottom = top + step * len(named)
    drawn = [_line(x(value), top, x(value), bottom, "line") for value, _ in ticks]
    drawn += [_text(x(value), bottom + 17, shown, anchor="middle") for value, shown in ticks]
    if metric == "speedup":
        drawn.append(_line(x(1.0), top, x(1.0), bottom, "muted", stroke_dasharray="3 4"))
    for index, (name, row) in enumerate(named):
        y, shown = (
            top + step * index + ABOVE + 15,
            name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}",
        )
        low, high = _interval(row, metric)
        drawn += [
            _tag(
                "rect",
                x=0,
                y=y - 22,
                width=round(len(shown) * LETTER),
                height=14,
                fill="var(--paper)",
            ),  # over the lines
            _text(0, y - 11, shown),
            _line(x(low), y, x(high), y, "bar", stroke_width=6, stroke_linecap="round"),
            _dot(x(row[metric]), y, 4.5, "good"),
            _text(WIDTH, y + 4, formatted(row[metric]), anchor="end", kind="strong"),
        ]
    drawn.append(_text((x(ticks[0][0]) + x(ticks[-1][0])) / 2, bottom + 34, axis, anchor="middle"))
    values = (f"{name}: {formatted(row[metric])}{between(row, metric)}" for name, row in named)
    return _svg(bottom + 40, label, drawn, values)


def speedup_by_k(theory: Mapping[str, Any] | None, rows: Sequence[ResultRow]) -> Markup | None:
    """Over K': the predicted speedup, its ceiling (the speedup of a draft without cost: the acceptance length), and the measured
    speedup of each row with its interval. None with neither a prediction nor a second K measured.
    """
    measured = [row for row in rows if "speedup" in row]
    if theory is None and len(measured) < 2:
        return None
    curve: list[dict[str, float]] = theory["curve"] if theory else []
    ceiling = {point["k"]: point["mean_acceptance_length"] for point in curve} or {0: 1.0}
    ceiling |= {
        row["num_speculative_tokens"]: row["mean_acceptance_length"]
        for row in rows
        if "mean_acceptance_length" in row
    }
    intervals = [_interval(row, "speedup") for row in measured]
    height = 260
    longest = max(1, int(max(ceiling)), *(row["num_speculative_tokens"] for row in measured))
    x = Scale(0, longest, LEFT + 8, WIDTH - RIGHT - 14)
    ends = [
        1.0,
        *ceiling.values(),
        *(point["predicted_speedup"] for point in curve),
        *itertools.chain(*intervals),
    ]
    y = Scale(*_round_bounds(ends), height - BOTTOM - AXIS, TOP)
    drawn = _y_axis(y, [(value, f"{value:g}×") for value in _ticks(y.low, y.high)])
    drawn += [
        _text(x(k), y.start + 17, k, anchor="middle")
        for k in range(0, longest + 1, 1 + longest // 13)
    ]
    drawn.append(_line(LEFT, y(1.0), WIDTH - RIGHT, y(1.0), "muted", stroke_dasharray="3 4"))
    highest = [(x(k), y(length)) for k, length in sorted(ceiling.items())]
    predicted = [(x(point["k"]), y(point["predicted_speedup"])) for point in curve]
    drawn.append(_path(highest, "muted", stroke_width=1.5, stroke_dasharray="6 3"))
    drawn.append(_path(predicted, "bar", stroke_width=2.5))
    for point, place in zip(curve, predicted, strict=True):
        best = theory is not None and point["k"] == theory["best_k"]
        drawn.append(_dot(*place, 5 if best else 3.5, "good" if best else "bar"))
    for row, (low, high) in zip(measured, intervals, strict=True):
        along = x(row["num_speculative_tokens"])
        drawn.append(_line(along, y(low), along, y(high), "mine", stroke_width=2))
        drawn.append(_dot(along, y(row["speedup"]), 4.5, "paper", "mine", at_k(row)))
    drawn.append(
        _text(
            (LEFT + WIDTH - RIGHT) / 2, height - 6, "K, tokens drafted per round", anchor="middle"
        )
    )
    values = [f"measured at {at_k(row)}" for row in measured] + [
        f"predicted at K = {point['k']}: {times(point['predicted_speedup'])}" for point in curve
    ]
    return _svg(height, "Speedup against K: predicted, its ceiling, and measured", drawn, values)


def at_k(row: ResultRow) -> str:
    return f"K = {row['num_speculative_tokens']}: {times(row['speedup'])}{between(row, 'speedup')}"


def _tag(name: str, content: object = "", **attributes: object) -> Markup:
    """An element; `stroke_width` is the attribute stroke-width, and None leaves an attribute out. All values are escaped."""
    given = {
        key.replace("_", "-"): escape(value)
        for key, value in attributes.items()
        if value is not None
    }
    written = "".join(f' {key}="{value}"' for key, value in given.items())
    return Markup(f"<{name}{written}>{escape(content)}</{name}>")


def _svg(height: float, label: str, drawn: Iterable[Markup], values: Iterable[str]) -> Markup:
    """values: what the figure shows, for those who do not see it."""
    inside = Markup("\n").join([_tag("desc", "; ".join(values)), *drawn])
    return _tag("svg", inside, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label)


def _text(
    x: float, y: float, content: object, *, anchor: str | None = None, kind: str | None = None
) -> Markup:
    return _tag("text", content, **{"class": kind}, x=x, y=y, text_anchor=anchor)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, **style: object) -> Markup:
    return _tag("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=f"var(--{colour})", **style)


def _path(points: Iterable[tuple[float, float]], colour: str, **style: object) -> Markup:
    written = " ".join(f"{along},{up}" for along, up in points)
    return _tag("polyline", points=written, fill="none", stroke=f"var(--{colour})", **style)


def _dot(x: float, y: float, radius: float, fill: str, stroke: str = "", title: str = "") -> Markup:
    edge = {"stroke": f"var(--{stroke})", "stroke_width": 2} if stroke else {}
    return _tag(
        "circle",
        _tag("title", title) if title else "",
        cx=x,
        cy=y,
        r=radius,
        fill=f"var(--{fill})",
        **edge,
    )


def _y_axis(y: Scale, ticks: Ticks) -> list[Markup]:
    lines = [_line(LEFT, y(value), WIDTH - RIGHT, y(value), "line") for value, _ in ticks]
    return lines + [_text(LEFT - 6, y(value) + 4, label, anchor="end") for value, label in ticks]


def _interval(row: ResultRow, metric: str) -> tuple[float, float]:
    """The metric's interval; its value twice where there is none."""
    low, high = row.get(f"{metric}_ci95", (row[metric], row[metric]))
    return low, high


def _round_bounds(values: Sequence[float]) -> tuple[float, float]:
    """The next tenths outside, with some room."""
    return max(0.0, int(min(values) * 10 - 1) / 10), int(max(values) * 10 + 1.999) / 10


def _ticks(low: float, high: float) -> list[float]:
    steps = (0.005, *(digits * 10**power for power in range(-2, 9) for digits in (1, 2, 2.5, 5)))
    step = next(step for step in steps if (high - low) / step <= 6)
    first = int(low / step + 0.999999) * step
    return [
        round(first + index * step, 3) for index in range(int((high - first) / step + 1e-9) + 1)
    ]
