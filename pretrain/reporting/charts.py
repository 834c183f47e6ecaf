"""Line charts as inline SVG, for pages that need no network and adapt to phones and dark mode.

The page defines colors and fonts (templates/page.html.j2); the report's script shows the values under the pointer.
A chart consists of its geometry, in a coordinate system 400 units wide, and its values as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]
Formatter = Callable[[float], str]

_WIDTH, _HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 12, 26
_MAX_POINTS, _MIN_POINTS = 300, 60  # maximum number of points per curve in a chart of few curves, and of many
_MAX_CHART_POINTS = 2400  # maximum number of points per chart, but each curve may have _MIN_POINTS
_LETTER_WIDTH = 6.5  # average width of a letter in axis labels
_FEW_POINTS = 40  # a curve with at most this many points is not smoothed, and shows each point as a dot


@dataclass(frozen=True)
class Series:
    """One curve. `kind` is its CSS class. With `smooth`, its moving average is drawn over the faint raw curve."""

    name: str
    points: Points
    kind: str = "train"
    smooth: bool = False


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    format_y: Formatter,
    format_x: Formatter,
    marks: Sequence[tuple[float, str, str]] = (),
    from_zero: bool = False,
) -> str:
    """Return a <figure> with title, legend and SVG; "" if no series has a point.

    Args:
        title: title of the chart, with its unit.
        series: the curves, each in ascending order of x.
        format_y: formats a y value.
        format_x: formats an x value.
        marks: vertical lines as (x, label on the left, label on the right); both labels are empty for events.
        from_zero: start the y axis at 0.
    """
    nonempty = [curve for curve in series if curve.points]
    if not nonempty:
        return ""
    max_points = min(_MAX_POINTS, max(_MIN_POINTS, _MAX_CHART_POINTS // len(nonempty)))
    curves = [_Curve.of(curve, max_points) for curve in nonempty]
    xs = [x for curve in curves for x, _ in curve.raw]
    ys = [y for curve in curves for _, y in curve.raw]
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys), 4)
    x_ticks = ticks(min(xs), max(xs), 4, inside=True)
    frame = _Frame(min(xs), max(xs), min(y_ticks[0], *ys), max(y_ticks[-1], *ys))
    parts = [
        *(_grid_line(frame, y, format_y(y)) for y in y_ticks),
        *(_x_tick_label(frame, x, format_x(x)) for x in x_ticks),
        *(_mark(frame, *mark) for mark in marks if frame.x_low <= mark[0] <= frame.x_high),
        *(_curve_svg(frame, curve) for curve in curves),
    ]
    data = escape(_pointer_data(frame, curves, format_y, format_x), quote=True)
    return (
        f'<figure class="chart" data-chart="{data}">'
        f"<figcaption><b>{escape(title)}</b>{_legend(nonempty)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
        f'{"".join(parts)}<g class="cursor"></g></svg></figure>'
    )


def ticks(low: float, high: float, count: int, inside: bool = False) -> list[float]:
    """Return about `count` round numbers that cover `low` to `high`; with `inside`, all within that range."""
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-288):  # equal within floating-point precision
        high = low + (abs(low) if abs(low) > 1e-300 else 1.0)
    min_step = (high - low) / count
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= min_step * (1 - 1e-10))
    first = math.ceil(low / step - 1e-9) if inside else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if inside else math.ceil(high / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))  # a step has two significant digits
    return [round(index * step, digits) for index in range(first, last + 1)]


@dataclass(frozen=True)
class _Curve:
    """A downsampled series: `line`, smoothed if requested and long enough, is drawn over `raw`."""

    name: str
    kind: str
    raw: Points
    line: Points

    @classmethod
    def of(cls, series: Series, max_points: int) -> _Curve:
        raw, line = _downsample(series.points, max_points)
        smooth = series.smooth and len(line) > _FEW_POINTS
        return cls(series.name, series.kind, raw, _smooth(line) if smooth else line)


@dataclass(frozen=True)
class _Frame:
    """The ranges of both axes, and the mapping from values to coordinates."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        fraction = (value - self.x_low) / ((self.x_high - self.x_low) or 1.0)
        return round(_LEFT + fraction * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        fraction = (value - self.y_low) / ((self.y_high - self.y_low) or 1.0)
        return round(_HEIGHT - _BOTTOM - fraction * (_HEIGHT - _TOP - _BOTTOM), 1)


def _grid_line(frame: _Frame, y: float, label: str) -> str:
    y_position = frame.y(y)
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y_position}" y2="{y_position}"/>'
        f'<text x="{_LEFT - 6}" y="{y_position + 4}" text-anchor="end">{escape(label)}</text>'
    )


def _x_tick_label(frame: _Frame, x: float, label: str) -> str:
    position, anchor = frame.x(x), "middle"
    if position + _LETTER_WIDTH * len(label) / 2 > _WIDTH:  # the label would be cut off
        position, anchor = _WIDTH, "end"
    return f'<text x="{position}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{escape(label)}</text>'


def _mark(frame: _Frame, x: float, left: str, right: str) -> str:
    at_x = frame.x(x)
    return (
        f'<line class="{"mark" if left else "event"}" x1="{at_x}" x2="{at_x}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" />'
        f'<text x="{at_x - 5}" y="{_TOP + 10}" text-anchor="end">{escape(left)}</text>'
        f'<text x="{at_x + 5}" y="{_TOP + 10}">{escape(right)}</text>'
    )


def _curve_svg(frame: _Frame, curve: _Curve) -> str:
    faint = "" if curve.line is curve.raw else _polyline(frame, curve.raw, f"{curve.kind} raw")
    dots = curve.line if len(curve.line) <= _FEW_POINTS else []
    circles = "".join(f'<circle class="{curve.kind}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="2.6" />' for x, y in dots)
    return faint + _polyline(frame, curve.line, curve.kind) + circles


def _polyline(frame: _Frame, points: Points, kind: str) -> str:
    coordinates = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in points)
    return f'<polyline class="{kind}" points="{coordinates}"/>'


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    return "".join(f'<span class="{curve.kind}">{escape(curve.name)}</span>' for curve in series)


def _downsample(points: Points, max_points: int) -> tuple[Points, Points]:
    """Cut a curve into at most `max_points` intervals; return (their minima and maxima, to show spikes; the means)."""
    length = math.ceil(len(points) / max_points)
    if length < 2:
        return points, points
    intervals = [points[start : start + length] for start in range(0, len(points), length)]
    extremes = [{min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])} for part in intervals]
    means = [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in intervals]
    return [point for pair in extremes for point in sorted(pair)], means


def _smooth(points: Points) -> Points:
    """Return the centered moving average over a twentieth of the curve; the window shrinks at its start and end."""
    half_width = max(1, len(points) // 40)
    smoothed = []
    for index, (x, _) in enumerate(points):
        half = min(half_width, index, len(points) - 1 - index)
        window = points[index - half : index + half + 1]
        smoothed.append((x, sum(y for _, y in window) / len(window)))
    return smoothed


def _pointer_data(frame: _Frame, curves: Sequence[_Curve], format_y: Formatter, format_x: Formatter) -> str:
    """Return JSON for the script that shows values under the pointer: each curve's points, as coordinates and text."""
    return json.dumps(
        [
            {
                "name": curve.name,
                "kind": curve.kind,
                "points": [[frame.x(x), frame.y(y), f"step {format_x(x)}", format_y(y)] for x, y in curve.line],
            }
            for curve in curves
        ],
        separators=(",", ":"),
        ensure_ascii=False,
    )
