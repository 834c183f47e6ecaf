"""Benchmarks of bertrain, most of them against other software; bertrain never imports them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path


def environment() -> dict[str, str]:
    """Return environment variables with which a program in any folder imports this package from the clone."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def aligned(rows: Sequence[Sequence[str]], right_aligned: Iterable[int]) -> list[str]:
    """Return lines of padded columns; columns with an index in `right_aligned` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right_aligned else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
