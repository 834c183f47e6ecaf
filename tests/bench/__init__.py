"""Measurements beside baselines. They use the product as anybody does; it never imports them."""

from __future__ import annotations

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """That of a program that imports this package from the clone, wherever it runs."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
