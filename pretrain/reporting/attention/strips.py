"""Charts of one value per head, by layer, as inline SVG in the style of the other charts."""

from collections.abc import Callable
from html import escape

import numpy as np

from pretrain.reporting.charts import ticks

_WIDTH, _HEIGHT = 400, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 12, 26
_SPREAD = 0.6  # share of a layer's width that the dots of its heads take


def percent(share: float) -> str:
    """Format a share: 0.4567 as 45.7 %."""
    return f"{100 * share:.3g}\N{NO-BREAK SPACE}%"


def strip_chart(title: str, values: np.ndarray, uniform: float, *, format_y: Callable[[float], str]) -> str:
    """Return a <figure> with one dot per head, a line through the layers' means, and a line at `uniform`.

    Args:
        title: title of the chart.
        values: float [layers, heads], not negative.
        uniform: the value under uniform attention.
        format_y: formats a value.
    """
    layers, heads = values.shape
    y_ticks = ticks(0.0, max(float(values.max()), uniform, 1e-3), 4)

    def x(layer: int, head: float) -> float:
        width = (_WIDTH - _LEFT - _RIGHT) / layers
        offset = 0.5 + _SPREAD * ((head + 0.5) / heads - 0.5)
        return round(_LEFT + width * (layer + offset), 1)

    def y(value: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / y_ticks[-1]), 1)

    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>'
        f'<text x="{_LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{escape(format_y(tick))}</text>'
        for tick in y_ticks
    ]
    parts.append(f'<line class="mark" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(uniform)}" y2="{y(uniform)}"/>')
    label_interval = -(-layers // 12)
    parts += [
        f'<text x="{x(layer, (heads - 1) / 2)}" y="{_HEIGHT - 8}" text-anchor="middle">{layer + 1}</text>'
        for layer in range(0, layers, label_interval)
    ]
    means = " ".join(f"{x(layer, (heads - 1) / 2)},{y(float(values[layer].mean()))}" for layer in range(layers))
    parts.append(f'<polyline class="train" points="{means}"/>')
    parts += [
        f'<circle class="train" data-head="{layer + 1}-{head + 1}" cx="{x(layer, head)}" '
        f'cy="{y(float(values[layer, head]))}" r="3"><title>head {layer + 1}-{head + 1}: '
        f"{escape(format_y(float(values[layer, head])))}</title></circle>"
        for layer in range(layers)
        for head in range(heads)
    ]
    label = f"{escape(title, quote=True)}, of each head, by layer"
    return (
        f'<figure class="chart strip"><figcaption><b>{escape(title)}</b></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg></figure>"
    )
