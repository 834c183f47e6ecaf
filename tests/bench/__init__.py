"""Measurements beside baselines. They use the product as anybody does; it never imports them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path


def environment() -> dict[str, str]:
    """That of a program that imports this package from the clone, wherever it runs."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def aligned(rows: Sequence[Sequence[str]], right_aligned: Iterable[int]) -> list[str]:
    """Lines of padded columns; the columns numbered in `right_aligned` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right_aligned else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
