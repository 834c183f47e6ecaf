"""Line charts as inline SVG, for pages that must work without a network, on a phone and in the dark.

Colours, fonts and the reading-off by pointer come from the page (templates/report.html.j2); a chart brings
only its geometry, in a coordinate system of 400 x 220, and its values as JSON for the page's script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]
Form = Callable[[float], str]

_WIDTH, _HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 12, 26
_MOST_POINTS = 300  # a curve of more is averaged down to this; a screen shows no more
_FEW_POINTS = 40  # a curve of no more shows each as a dot and is never smoothed


@dataclass(frozen=True)
class Series:
    """One curve: `kind` is its CSS class; `smooth` draws a noisy one faintly, below its moving average."""

    name: str
    points: Points
    kind: str = "train"
    smooth: bool = False


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    form: Form,
    form_x: Form,
    x_name: str = "step",
    marks: Sequence[tuple[float, str, str]] = (),
    from_zero: bool = False,
) -> str:
    """A <figure> with title, legend and SVG; "" where no series has a point.

    Args:
        title: what is drawn, with its unit.
        series: the curves, each by ascending x.
        form: writes a value of y; `form_x` one of x.
        x_name: what x is.
        marks: vertical lines, such as between phases: (x, what is left of it, what is right of it).
        from_zero: begin the y axis at 0.
    """
    shown = [one for one in series if one.points]
    if not shown:
        return ""
    curves = [_Curve.of(one) for one in shown]
    xs = [x for curve in curves for x, _ in curve.raw]
    ys = [y for curve in curves for _, y in curve.raw]
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys), 4)
    x_ticks = ticks(min(xs), max(xs), 4, inside=True)
    frame = _Frame(min(xs), max(xs), min(y_ticks[0], *ys), max(y_ticks[-1], *ys))
    parts = [
        *(_horizontal(frame, y, form(y)) for y in y_ticks),
        *(_tick_x(frame, x, form_x(x)) for x in x_ticks),
        *(_mark(frame, *mark) for mark in marks if frame.x_low <= mark[0] <= frame.x_high),
        *(_drawing(frame, curve) for curve in curves),
    ]
    data = escape(_data(frame, curves, form, form_x, x_name), quote=True)
    return (
        f'<figure class="chart" data-chart="{data}">'
        f"<figcaption><b>{escape(title)}</b>{_legend(shown)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(parts)}<g class=cursor></g></svg></figure>"
    )


def ticks(low: float, high: float, count: int, inside: bool = False) -> list[float]:
    """About `count` round numbers that span from `low` to `high`; with `inside`, that lie between them."""
    if high - low < 1e-300:  # equal, or too near for arithmetic
        high = low + (abs(low) if abs(low) > 1e-300 else 1.0)
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9) if inside else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if inside else math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


@dataclass(frozen=True)
class _Curve:
    """A series as it is drawn: thinned out, and smoothed where that was asked for and there is enough."""

    name: str
    kind: str
    raw: Points
    line: Points

    @classmethod
    def of(cls, series: Series) -> _Curve:
        raw = _thin(series.points)
        smooth = series.smooth and len(raw) > _FEW_POINTS
        return cls(series.name, series.kind, raw, _smooth(raw) if smooth else raw)


@dataclass(frozen=True)
class _Frame:
    """The ranges of both axes and where their values lie in the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        share = (value - self.x_low) / ((self.x_high - self.x_low) or 1.0)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / ((self.y_high - self.y_low) or 1.0)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _horizontal(frame: _Frame, y: float, label: str) -> str:
    at = frame.y(y)
    return (
        f'<line class=grid x1={_LEFT} x2={_WIDTH - _RIGHT} y1="{at}" y2="{at}"/>'
        f'<text x={_LEFT - 6} y="{at + 4}" text-anchor=end>{escape(label)}</text>'
    )


def _tick_x(frame: _Frame, x: float, label: str) -> str:
    return f'<text x="{frame.x(x)}" y={_HEIGHT - 6} text-anchor=middle>{escape(label)}</text>'


def _mark(frame: _Frame, x: float, left: str, right: str) -> str:
    at = frame.x(x)
    return (
        f'<line class=mark x1="{at}" x2="{at}" y1={_TOP} y2={_HEIGHT - _BOTTOM} />'
        f'<text x="{at - 5}" y={_TOP + 10} text-anchor=end>{escape(left)}</text>'
        f'<text x="{at + 5}" y={_TOP + 10}>{escape(right)}</text>'
    )


def _drawing(frame: _Frame, curve: _Curve) -> str:
    faint = "" if curve.line is curve.raw else _path(frame, curve.raw, f"{curve.kind} raw")
    dots = curve.line if len(curve.line) <= _FEW_POINTS else []
    circles = "".join(
        f'<circle class={curve.kind} cx="{frame.x(x)}" cy="{frame.y(y)}" r=2.6 />' for x, y in dots
    )
    return faint + _path(frame, curve.line, curve.kind) + circles


def _path(frame: _Frame, points: Points, kind: str) -> str:
    steps = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in points)
    return f'<polyline class="{kind}" points="{steps}"/>'


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    return "".join(f"<span class={one.kind}>{escape(one.name)}</span>" for one in series)


def _thin(points: Points) -> Points:
    """At most `_MOST_POINTS` points: means of equal stretches."""
    size = math.ceil(len(points) / _MOST_POINTS)
    if size < 2:
        return points
    stretches = [points[first : first + size] for first in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in stretches]


def _smooth(points: Points) -> Points:
    """Centred moving average over a twentieth of the curve, narrower towards its ends."""
    reach = max(1, len(points) // 40)
    out = []
    for at, (x, _) in enumerate(points):
        near = min(reach, at, len(points) - 1 - at)
        window = points[at - near : at + near + 1]
        out.append((x, sum(y for _, y in window) / len(window)))
    return out


def _data(frame: _Frame, curves: Sequence[_Curve], form: Form, form_x: Form, x_name: str) -> str:
    """What the page's script needs to read values off: per curve its points in the drawing and as text."""
    return json.dumps(
        [
            {
                "name": curve.name,
                "kind": curve.kind,
                "points": [
                    [frame.x(x), frame.y(y), f"{x_name} {form_x(x)}".strip(), form(y)] for x, y in curve.line
                ],
            }
            for curve in curves
        ],
        separators=(",", ":"),
        ensure_ascii=False,
    )
