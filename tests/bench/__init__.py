"""Benchmarks against baselines. They use the product like any user; the product never imports them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path


def environment() -> dict[str, str]:
    """Return the environment of a program that imports this package from the clone, in any folder."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def aligned(rows: Sequence[Sequence[str]], right_aligned: Iterable[int]) -> list[str]:
    """Return lines of padded columns; columns with an index in `right_aligned` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right_aligned else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
