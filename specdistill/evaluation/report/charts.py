"""Draw the plots of the report and of a comparison, as SVG.

Every plot is 420 units wide. So two fit side by side on a desktop and one on a phone, with readable
labels on both.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from specdistill.evaluation.report.phrases import (
    ResultRow,
    format_bracketed_interval,
    format_number,
    format_percent,
    format_times,
)

# All lengths are in units of the SVG's viewBox. The browser scales a plot to its column.
WIDTH = 420
LEFT, RIGHT = 46, 22  # margins of plots with a vertical axis
TOP = 22
BOTTOM_MARGIN = 30
AXIS = 16  # the height of an axis's name
# The width of a character of a label. It is a generous estimate, because SVG text is only measured
# by the browser: too small a value makes labels overlap.
LETTER = 7.6
# The height of a row's name above its line, and the number of characters that fit there.
LABEL_OFFSET = 14
MAX_LABEL_CHARACTERS = int(WIDTH / LETTER)

NamedRows = Sequence[tuple[str, ResultRow]]
Ticks = Sequence[tuple[float, str]]  # (value, label)


@dataclass(frozen=True)
class Scale:
    """A linear map from [low, high] to [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the position of a value on the axis, with one decimal."""
        return round(
            self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1
        )


def draw_acceptance_by_position(row: ResultRow) -> Markup | None:
    """Return the SVG of a bar chart of the acceptance rate at each position of a draft.

    A bar shows the share of all drafts in which the position was accepted. A dot shows the share
    among the drafts that reached the position: all earlier positions were accepted.

    Args:
        row: the row of the report. The result is None if its rates are missing, because nothing was
            drafted.
    """
    rates: Sequence[float | None] = row.get("acceptance_rate_per_position", [])
    if not rates:
        return None

    # Set the scale and the width of a bar. Each position gets an equal part of the chart's width, a
    # slot. A bar takes 56 % of its slot, but at most 56 units, so that few bars are not too wide.
    height = 230
    y = Scale(0, 1, height - BOTTOM_MARGIN - AXIS, TOP)
    slot = (WIDTH - LEFT - RIGHT) / len(rates)
    width = round(min(slot * 0.56, 56), 1)
    elements = _draw_y_axis(
        y, [(share, format_percent(share)) for share in (0, 0.25, 0.5, 0.75, 1)]
    )
    titles = []

    # Draw a bar for each position, with its conditional rate as a dot.
    for index, (rate, conditional) in enumerate(
        zip(rates, row["conditional_acceptance_rate"], strict=True)
    ):
        centre = round(LEFT + slot * (index + 0.5), 1)
        top = y(rate or 0)
        label = format_percent(rate)
        titles.append(
            f"position {index + 1}: {label} of drafts, {format_percent(conditional)} once reached"
        )
        elements.append(
            _make_element(
                "rect",
                _make_element("title", titles[-1]),
                x=round(centre - width / 2, 1),
                y=top,
                width=width,
                height=round(y.start - top, 1),
                fill="var(--bar)",
            )
        )
        # The rate stands inside the bar if there is room.
        if width > 4 * LETTER and y.start - top > 20:
            elements.append(_draw_text(centre, y.start - 7, label, anchor="middle", kind="strong"))
        if conditional is not None:
            # "paper" (the background) and "mine" (an orange) are colours of the style sheet.
            elements.append(_draw_dot(centre, y(conditional), 4.5, fill="paper", stroke="mine"))
        # If the slots are narrow, only every fourth position is labelled.
        name = index + 1 if slot > 2 * LETTER or index % 4 == 0 else ""
        elements.append(_draw_text(centre, y.start + 17, name, anchor="middle"))
    elements.append(
        _draw_text((LEFT + WIDTH - RIGHT) / 2, height - 6, "position in the draft", anchor="middle")
    )
    return _draw_figure(height, "Acceptance rate by position in the draft", elements, titles)


def draw_acceptance_by(what: str, named_rows: NamedRows, k: int) -> Markup | None:
    """Return the SVG of a chart of acceptance lengths, with one line of the chart for each row.

    A dot shows the acceptance length, and a horizontal line its confidence interval. The axis goes
    from 1 (no gain) to K + 1 (all draft tokens accepted).

    Args:
        what: the difference between the rows, e.g. "category", for the chart's title.
        named_rows: the rows of the report, as pairs (name to show, row).
        k: K, draft tokens per round.
    """
    # The ticks are whole numbers, about nine at most. The axis ends 52 units before the right edge,
    # to leave room for the value of each row.
    x = Scale(1, k + 1, 16, WIDTH - 52)
    return _draw_lines(
        named_rows,
        "mean_acceptance_length",
        format_number,
        x,
        [(value, str(value)) for value in range(1, k + 2, 1 + k // 8)],
        f"Acceptance length by {what}",
        "acceptance length, tokens per round",
    )


def draw_speedup_by(what: str, named_rows: NamedRows, axis: str) -> Markup | None:
    """Return the SVG of a chart of speedups, with one line of the chart for each row.

    A dot shows the speedup, and a horizontal line its confidence interval. A dashed vertical line
    at 1 shows the speed of plain decoding.

    Args:
        what: the difference between the rows, e.g. "by category", for the chart's title.
        named_rows: the rows of the report, as pairs (name to show, row).
        axis: the name of the horizontal axis.
    """
    # The axis has room for every interval, and for 1, the speed of plain decoding. It ends 52 units
    # before the right edge, to leave room for the value of each row.
    ends = [1.0]
    for _, row in named_rows:
        if "speedup" in row:
            ends.extend(_read_interval(row, "speedup"))
    x = Scale(*_round_bounds(ends), 16, WIDTH - 52)
    ticks = [(value, f"{value:g}×") for value in _choose_ticks(x.low, x.high)]
    return _draw_lines(named_rows, "speedup", format_times, x, ticks, f"Speedup {what}", axis)


def _draw_lines(
    named_rows: NamedRows,
    metric: str,
    format_value: Callable[[float], str],
    x: Scale,
    ticks: Ticks,
    label: str,
    axis: str,
) -> Markup | None:
    """Return the SVG of a chart that shows one metric of several rows, one below the other.

    Each row has its name, and below it a dot for the metric on a horizontal line for its interval.

    Args:
        named_rows: the rows of the report, as pairs (name to show, row). Rows without the metric
            are left out; the result is None if no row is left.
        metric: the name of the metric.
        format_value: converts a value of the metric to text.
        x: the scale of the horizontal axis, value -> coordinate.
        ticks: the ticks of the horizontal axis, as pairs (value, label).
        label: the title of the chart.
        axis: the name of the horizontal axis.
    """
    named_rows = [(name, row) for name, row in named_rows if metric in row]
    if not named_rows:
        return None
    step = 30 + LABEL_OFFSET
    top = 12
    bottom = top + step * len(named_rows)

    # Draw the axis with its ticks, and a dashed line where the speed is that of plain decoding.
    elements = [_draw_line(x(value), top, x(value), bottom, "line") for value, _ in ticks]
    elements += [
        _draw_text(x(value), bottom + 17, tick_label, anchor="middle")
        for value, tick_label in ticks
    ]
    if metric == "speedup":
        elements.append(_draw_line(x(1.0), top, x(1.0), bottom, "muted", stroke_dasharray="3 4"))

    # Draw for each row its name, the interval, and the value. A long name loses its beginning.
    for index, (name, row) in enumerate(named_rows):
        y = top + step * index + LABEL_OFFSET + 15
        short_name = name
        if len(name) > MAX_LABEL_CHARACTERS:
            short_name = f"…{name[1 - MAX_LABEL_CHARACTERS :]}"
        low, high = _read_interval(row, metric)
        elements += [
            # A rectangle in the colour of the paper hides the ticks behind the name.
            _make_element(
                "rect",
                x=0,
                y=y - 22,
                width=round(len(short_name) * LETTER),
                height=14,
                fill="var(--paper)",
            ),
            _draw_text(0, y - 11, short_name),
            _draw_line(x(low), y, x(high), y, "bar", stroke_width=6, stroke_linecap="round"),
            _draw_dot(x(row[metric]), y, 4.5, "good"),
            _draw_text(WIDTH, y + 4, format_value(row[metric]), anchor="end", kind="strong"),
        ]
    elements.append(
        _draw_text((x(ticks[0][0]) + x(ticks[-1][0])) / 2, bottom + 34, axis, anchor="middle")
    )

    # Write the same values as text, for readers who do not see the chart.
    values = (
        f"{name}: {format_value(row[metric])}{format_bracketed_interval(row, metric)}"
        for name, row in named_rows
    )
    return _draw_figure(bottom + 40, label, elements, values)


def draw_speedup_by_k(theory: Mapping[str, Any] | None, rows: Sequence[ResultRow]) -> Markup | None:
    """Return the SVG of a chart of the speedup against K, the number of draft tokens per round.

    The chart shows the speedup that is predicted for each K, the measured ones with their
    intervals, and a ceiling: the speedup of a draft that takes no time, which equals the acceptance
    length.

    Args:
        theory: the report's section `theory` with the predictions; None if nothing was drafted.
        rows: rows of the report, one for each measured K; they differ only in K.

    Returns:
        The chart. None if there is no prediction and only one K was measured.
    """
    measured_rows = [row for row in rows if "speedup" in row]
    if theory is None and len(measured_rows) < 2:
        return None

    # Collect the values to draw: the predicted curve, the ceiling by K, and the measured intervals.
    # A predicted curve begins at K = 0, where the ceiling is 1. Without a curve, add this point.
    curve: list[dict[str, float]] = theory["curve"] if theory else []
    ceiling = {point["k"]: point["mean_acceptance_length"] for point in curve} or {0: 1.0}
    for row in rows:
        if "mean_acceptance_length" in row:
            ceiling[row["num_speculative_tokens"]] = row["mean_acceptance_length"]
    intervals = [_read_interval(row, "speedup") for row in measured_rows]

    # Set the scales: K from 0 to the longest draft, and a range of speedups with room for every
    # value. The keys of `ceiling` are draft lengths, so its `max` is the longest one.
    height = 260
    measured_ks = [row["num_speculative_tokens"] for row in measured_rows]
    longest = max(1, int(max(ceiling)), *measured_ks)
    predicted_speedups = [point["predicted_speedup"] for point in curve]
    speedups = [1.0, *ceiling.values(), *predicted_speedups, *itertools.chain(*intervals)]
    x = Scale(0, longest, LEFT + 8, WIDTH - RIGHT - 14)
    y = Scale(*_round_bounds(speedups), height - BOTTOM_MARGIN - AXIS, TOP)

    # Draw the axes, the ceiling, the prediction with its best K, and the measured speedups.
    elements = _draw_axes_by_k(x, y, longest)
    ceiling_points = [(x(k), y(length)) for k, length in sorted(ceiling.items())]
    elements.append(_draw_path(ceiling_points, "muted", stroke_width=1.5, stroke_dasharray="6 3"))
    elements += _draw_predicted_curve(x, y, curve, theory["best_k"] if theory else None)
    for row, interval in zip(measured_rows, intervals, strict=True):
        elements += _draw_measured_speedup(x, y, row, interval)
    elements.append(
        _draw_text(
            (LEFT + WIDTH - RIGHT) / 2, height - 6, "K, tokens drafted per round", anchor="middle"
        )
    )

    # Write the same values as text, for readers who do not see the chart.
    values = [f"measured at {format_speedup_at_k(row)}" for row in measured_rows]
    for point in curve:
        values.append(f"predicted at K = {point['k']}: {format_times(point['predicted_speedup'])}")
    return _draw_figure(
        height, "Speedup against K: predicted, its ceiling, and measured", elements, values
    )


def _draw_axes_by_k(x: Scale, y: Scale, longest: int) -> list[Markup]:
    """Return the axes of a chart over K, with a dashed line at speedup 1 for plain decoding.

    Args:
        x: the scale of the horizontal axis, K -> coordinate.
        y: the scale of the vertical axis, speedup -> coordinate.
        longest: the largest K, the number of draft tokens per round.
    """
    elements = _draw_y_axis(y, [(value, f"{value:g}×") for value in _choose_ticks(y.low, y.high)])
    # Label every K, or if there are more than 13, every second or third one and so on.
    ks = range(0, longest + 1, 1 + longest // 13)
    elements += [_draw_text(x(k), y.start + 17, k, anchor="middle") for k in ks]
    plain = _draw_line(LEFT, y(1.0), WIDTH - RIGHT, y(1.0), "muted", stroke_dasharray="3 4")
    return [*elements, plain]


def _draw_predicted_curve(
    x: Scale, y: Scale, curve: Sequence[Mapping[str, float]], best_k: int | None
) -> list[Markup]:
    """Return the curve of predicted speedups, with a dot at each K and a larger one at the best K.

    Args:
        x: the scale of the horizontal axis, K (draft tokens per round) -> coordinate.
        y: the scale of the vertical axis, speedup -> coordinate.
        curve: the points of the prediction, each with `k` and `predicted_speedup`.
        best_k: the K with the highest predicted speedup; None if there is no prediction.
    """
    points = [(x(point["k"]), y(point["predicted_speedup"])) for point in curve]
    elements = [_draw_path(points, "bar", stroke_width=2.5)]
    for point, (dot_x, dot_y) in zip(curve, points, strict=True):
        is_best = point["k"] == best_k
        radius = 5 if is_best else 3.5
        elements.append(_draw_dot(dot_x, dot_y, radius, "good" if is_best else "bar"))
    return elements


def _draw_measured_speedup(
    x: Scale, y: Scale, row: ResultRow, interval: tuple[float, float]
) -> list[Markup]:
    """Return a dot for the measured speedup of a row, on a vertical line for its interval.

    Args:
        x: the scale of the horizontal axis, K -> coordinate.
        y: the scale of the vertical axis, speedup -> coordinate.
        row: the row of the report.
        interval: the ends of the confidence interval of the speedup.
    """
    low, high = interval
    dot_x = x(row["num_speculative_tokens"])
    dot_y = y(row["speedup"])
    label = format_speedup_at_k(row)
    # "mine" (an orange) and "paper" (the background) are colours of the style sheet.
    return [
        _draw_line(dot_x, y(low), dot_x, y(high), colour="mine", stroke_width=2),
        _draw_dot(dot_x, dot_y, 4.5, fill="paper", stroke="mine", title=label),
    ]


def format_speedup_at_k(row: ResultRow) -> str:
    """Return a row's measured speedup as text, e.g. "K = 4: 1.54× (1.43 to 1.65)"."""
    speedup = f"{format_times(row['speedup'])}{format_bracketed_interval(row, 'speedup')}"
    return f"K = {row['num_speculative_tokens']}: {speedup}"


def _make_element(name: str, content: object = "", **attributes: object) -> Markup:
    """Return an SVG element as text, with its content and all attribute values escaped.

    Args:
        name: the name of the element, e.g. "rect".
        content: the text or the elements inside it. `Markup` is not escaped again.
        attributes: the attributes, with underscores for dashes: `stroke_width` sets stroke-width.
            An attribute with the value None is left out.
    """
    escaped_attributes = {
        key.replace("_", "-"): escape(value)
        for key, value in attributes.items()
        if value is not None
    }
    attribute_text = "".join(f' {key}="{value}"' for key, value in escaped_attributes.items())
    return Markup(f"<{name}{attribute_text}>{escape(content)}</{name}>")


def _draw_figure(
    height: float, label: str, elements: Iterable[Markup], values: Iterable[str]
) -> Markup:
    """Return the SVG of a chart, with a description for readers who do not see it.

    Args:
        height: the height of the chart, in the units of WIDTH.
        label: the title of the chart.
        elements: the SVG elements of the chart.
        values: the values that the chart shows, as text, for screen readers.
    """
    content = Markup("\n").join([_make_element("desc", "; ".join(values)), *elements])
    return _make_element(
        "svg", content, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label
    )


def _draw_text(
    x: float, y: float, content: object, *, anchor: str | None = None, kind: str | None = None
) -> Markup:
    """Return a text element at (x, y).

    Args:
        x: the horizontal position.
        y: the vertical position of the text's baseline.
        content: the text.
        anchor: the SVG attribute text-anchor: "middle" or "end" of the text is at x; None: start.
        kind: the CSS class of the text; None for none.
    """
    return _make_element("text", content, **{"class": kind}, x=x, y=y, text_anchor=anchor)


def _draw_line(x1: float, y1: float, x2: float, y2: float, colour: str, **style: object) -> Markup:
    """Draw a line from (x1, y1) to (x2, y2) in a colour of the style sheet."""
    return _make_element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=f"var(--{colour})", **style)


def _draw_path(points: Iterable[tuple[float, float]], colour: str, **style: object) -> Markup:
    """Return a line through points.

    Args:
        points: the points (x, y).
        colour: the name of a colour in the style sheet.
        style: more SVG attributes, e.g. stroke_width.
    """
    coordinates = " ".join(f"{x},{y}" for x, y in points)
    return _make_element(
        "polyline", points=coordinates, fill="none", stroke=f"var(--{colour})", **style
    )


def _draw_dot(
    x: float, y: float, radius: float, fill: str, stroke: str = "", title: str = ""
) -> Markup:
    """Return a dot at (x, y), with an edge in the colour `stroke` and a tooltip `title`, if given.

    `fill` and `stroke` are names of colours in the style sheet.
    """
    edge = {"stroke": f"var(--{stroke})", "stroke_width": 2} if stroke else {}
    return _make_element(
        "circle",
        _make_element("title", title) if title else "",
        cx=x,
        cy=y,
        r=radius,
        fill=f"var(--{fill})",
        **edge,
    )


def _draw_y_axis(y: Scale, ticks: Ticks) -> list[Markup]:
    """Return the vertical axis: for each tick a horizontal line across the chart, and its label.

    Args:
        y: the scale of the axis, value -> coordinate.
        ticks: the ticks, as pairs (value, label).
    """
    lines = [_draw_line(LEFT, y(value), WIDTH - RIGHT, y(value), "line") for value, _ in ticks]
    return lines + [
        _draw_text(LEFT - 6, y(value) + 4, label, anchor="end") for value, label in ticks
    ]


def _read_interval(row: ResultRow, metric: str) -> tuple[float, float]:
    """Return the 95 % confidence interval of a metric of a row, to draw it as a line.

    If the row has no interval, both ends are the value itself, so that the line has no length.
    """
    low, high = row.get(f"{metric}_ci95", (row[metric], row[metric]))
    return low, high


def _round_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of an axis on which all values fit: round tenths, with some room.

    The lower bound is not negative. For example, values from 1.23 to 1.58 give 1.1 and 1.7.
    """
    # Count in tenths. One tenth of room (- 1, + 1) keeps dots off the border, also for values that
    # are tenths themselves. `int` rounds down; with 0.999 added, it rounds up.
    lower = int(min(values) * 10 - 1) / 10
    upper = int(max(values) * 10 + (0.999 + 1)) / 10
    return max(0.0, lower), upper


def _choose_ticks(low: float, high: float) -> list[float]:
    """Return at most seven round values between `low` and `high`, for the ticks of an axis."""
    # Choose the smallest of the round steps 0.005, 0.01, 0.02, 0.025, 0.05, … that gives at most
    # six steps.
    steps = [0.005]
    for power in range(-2, 9):
        steps += [digits * 10**power for digits in (1, 2, 2.5, 5)]
    step = next(step for step in steps if (high - low) / step <= 6)

    # Begin at the first multiple of the step. The small constants keep rounding errors of float
    # division from adding or losing a tick at an end.
    first = int(low / step + 0.999999) * step
    return [
        round(first + index * step, 3) for index in range(int((high - first) / step + 1e-9) + 1)
    ]
