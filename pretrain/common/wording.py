"""Formats counts, scores and times for people, and prints to terminals."""

from __future__ import annotations

import difflib
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a number and its noun: "1 column", "2,000 columns". `plural` is for irregular plurals."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the question "did you mean X?" with the names nearest to `name`; "" if none is similar."""
    similar = nearest(name, names)
    return f"did you mean {either(similar)}?" if similar else ""


def either(names: Sequence[str]) -> str:
    """Join names as "a, b or c"."""
    return " or ".join(names).replace(" or ", ", ", max(len(names) - 2, 0))


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return up to three names that start with `name`, else the most similar name; `cutoff` as in difflib."""
    known = list(names)
    matches = sorted((other for other in known if other.startswith(name)), key=len) if name.strip("-") else []
    shortest = [other for index, other in enumerate(matches) if not other.startswith(tuple(matches[:index]))]
    return shortest[:3] or difflib.get_close_matches(name, known, n=1, cutoff=cutoff)


def score_title(name: str, positive: str) -> str:
    """Return the displayed name of a score; for F1 of two classes, with the `positive` class: "f1 (fraud)"."""
    return f"{name} ({positive})" if positive and name in ("f1", "accuracy_and_f1") else name


def shown_scores(scores: Mapping[str, float], metric: str = "accuracy") -> dict[str, float]:
    """Return the scores to display: only one of accuracy and micro F1 if they are equal (one label per example).

    Args:
        scores: name -> value.
        metric: name of the main score, which is always displayed.
    """
    accuracy, micro_f1 = scores.get("accuracy"), scores.get("micro_f1")
    if accuracy is None or micro_f1 is None or not math.isclose(accuracy, micro_f1):
        return dict(scores)
    duplicate = "accuracy" if metric == "micro_f1" else "micro_f1"
    return {name: value for name, value in scores.items() if name != duplicate}


def clock(seconds: float) -> str:
    """Format a duration: 0:07, 12:31, 3:02:05, 4 d 03:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def for_terminal(text: str) -> str:
    """Wrap lines at the terminal's width, indented to their last column; without a terminal, return `text` as it is."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        column_starts = [match.end() for match in re.finditer(r"(?<=\S) {2,}", line[: width // 2])]
        indent = " " * (column_starts[-1] if column_starts else len(line) - len(line.lstrip()) + 2)
        options = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": indent}
        lines += textwrap.wrap(line, width, **options) if len(line) > width else [line]
    return "\n".join(lines)


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal, or 200 characters wide if stdout is not a terminal."""
    from rich.console import Console

    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200).print(table)


def make_console(*, stderr: bool = False, **options: Any) -> Console:
    """Create a rich console for progress, without control codes outside a terminal; `options` are passed to rich."""
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()  # notebooks set FORCE_COLOR, which rich would obey
    return Console(stderr=stderr, force_jupyter=False, force_terminal=is_terminal, **options)
