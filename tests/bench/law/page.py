"""The HTML page of a scaling law: loss over FLOPs for each size, the law's curves and the best size, the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretrain.planning.law import FLOPS_PER_PARAMETER
from pretrain.planning.published import MeasuredRun, PublishedLaw
from pretrain.reporting.charts import Series, line_chart
from pretrain.reporting.pages import write_page
from tests.bench.law.fitting import best_size
from tests.bench.law.table import HEADINGS, RIGHT_ALIGNED

_COLORS = 8  # of the template
_CURVE = 60  # points of a curve: enough that none is drawn as a dot
_FURTHER = 10.0  # the curves go on to this many times the largest budget


def write(law: PublishedLaw, rows: Sequence[Sequence[str]], summary: Sequence[str], out: Path) -> Path:
    """Write the page to the file `out`, atomically, and return it; `rows` and `summary` as `command.main` prints."""
    recipe = list(law.recipe.values.items())
    facts = [("machine", law.machine), ("commit", law.commit), ("date", law.date), ("SHA-256 of the text", law.ground)]
    return write_page(
        out,
        "law.html.j2",
        beside=Path(__file__).parents[1] / "templates",
        chart=chart(law),
        headings=HEADINGS,
        right_aligned=RIGHT_ALIGNED,
        cells=rows,
        summary=summary,
        notes=[("Recipe of the runs", recipe), ("Origin", facts)],
        colors=_COLORS,
    )


def chart(law: PublishedLaw) -> str:
    """Loss over FLOPs on a logarithmic axis: dots are runs, a line is what the law says of their size.

    FLOPs are those of the model, 6 N D. What Muon adds depends on the batch, so it would move dots off their lines.
    """
    sizes: dict[str, list[MeasuredRun]] = {}
    for point in sorted(law.points, key=lambda point: point.size):
        sizes.setdefault(point.shape, []).append(point)
    series = []
    for number, (shape, points) in enumerate(sizes.items()):
        series.append(Series(shape, _curve(law, points), f"line-{number % _COLORS}"))
        series.append(Series(f"{shape}, measured", _dots(points), f"dots-{number % _COLORS}"))
    series.append(Series("best size", _best(law), "best"))
    return line_chart(
        "Held-out text, bits per character, after FLOPs of the model",
        series,
        form=lambda value: f"{value:.3f}",
        form_x=lambda value: f"{10**value:.2g}",
        x_name="FLOP",
    )


def _dots(points: Sequence[MeasuredRun]) -> list[tuple[float, float]]:
    return sorted((math.log10(_model_flops(point)), point.loss) for point in points)


def _model_flops(point: MeasuredRun) -> float:
    return FLOPS_PER_PARAMETER * point.size * point.tokens


def _range(law: PublishedLaw, least: float = 0.0) -> np.ndarray:
    """Logarithms of FLOPs, from the smallest budget to beyond the largest."""
    flops = [_model_flops(point) for point in law.points]
    return np.linspace(math.log10(max(least, min(flops))), math.log10(_FURTHER * max(flops)), _CURVE)


def _curve(law: PublishedLaw, points: Sequence[MeasuredRun]) -> list[tuple[float, float]]:
    first = min(points, key=_model_flops)
    size, unique = first.size, first.unique
    return [
        (float(x), float(law.law.loss(size, 10**x / FLOPS_PER_PARAMETER / size, unique)))
        for x in _range(law, _model_flops(first))
    ]


def _best(law: PublishedLaw) -> list[tuple[float, float]]:
    """The lowest loss of any size, on text that does not repeat."""
    return [
        (float(x), float(law.law.loss(size, 10**x / FLOPS_PER_PARAMETER / size)))
        for x in _range(law)
        for size in (best_size(law.law, 10**x),)
    ]
