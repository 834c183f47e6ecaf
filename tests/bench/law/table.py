"""The points of a scaling law as a table, and the law as sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pretrain.common.wording import counted
from pretrain.planning.law import Law, interval
from pretrain.planning.published import PublishedLaw

HEADINGS = ("run", "size", "parameters", "tokens", "epochs", "FLOP", "measured", "predicted", "90 %", "error", "")
RIGHT_ALIGNED = frozenset(range(2, len(HEADINGS) - 1))


def cells(law: PublishedLaw, likely: Sequence[Law]) -> list[tuple[str, ...]]:
    """A row of `HEADINGS` for each point."""
    rows = []
    for point in law.points:
        predicted = law.predicted(point)
        low, high = interval(likely, point.size, point.tokens, point.unique)
        rows.append(
            (
                point.run,
                point.shape,
                f"{point.size / 1e6:.3g} M",
                f"{point.tokens / 1e6:.3g} M",
                f"{point.tokens / point.unique:.2f}",
                f"{point.flops:.3g}",
                f"{point.loss:.4f}",
                f"{predicted:.4f}",
                f"{low:.3f}-{high:.3f}",
                f"{predicted / point.loss - 1:+.1%}",
                "held out" if point.held_out else "",
            )
        )
    return rows


def summary(law: PublishedLaw, likely: Sequence[Law]) -> list[str]:
    """The formula with the range of each coefficient, and the errors."""
    one = law.law
    values = np.array([[each.floor, each.size_exponent, each.data_exponent] for each in likely])
    spans = [f"{low:.2f}-{high:.2f}" for low, high in zip(*np.percentile(values, [5, 95], axis=0), strict=True)]
    lines = [
        f"L(N, D) = {one.floor:.3f} + {one.size_scale:.4g} / N^{one.size_exponent:.3f} + "
        f"{one.data_scale:.4g} / D^{one.data_exponent:.3f} bits per character",
        f"90 % of the likely laws: E {spans[0]}, alpha {spans[1]}, beta {spans[2]}",
        f"largest error on {counted(len(law.fitted), 'fitted run')}: {law.error(law.fitted):.1%}",
    ]
    if law.held_out:
        lines.append(f"largest error on {counted(len(law.held_out), 'held-out run')}: {law.error(law.held_out):.1%}")
    return lines
