"""Counts, scores and times as people read them."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun: "1 column", "2,000 columns". `plural` is for nouns that take more than an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The question "did you mean X?" with the nearest of `names`; "" if none is similar."""
    nearest = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {nearest[0]}?" if nearest else ""


def score_title(name: str, positive: str) -> str:
    """The name of a score for people: beside f1 of two classes stands the `positive` one, "f1 (fraud)"."""
    return f"{name} ({positive})" if positive and name in ("f1", "accuracy_and_f1") else name


def shown_scores(scores: Mapping[str, float], metric: str = "accuracy") -> dict[str, float]:
    """The scores of a set without repetition: of single labels, micro F1 is the accuracy.

    Args:
        scores: score -> value.
        metric: the main one; it stays.
    """
    accuracy, micro_f1 = scores.get("accuracy"), scores.get("micro_f1")
    if accuracy is None or micro_f1 is None or not math.isclose(accuracy, micro_f1):
        return dict(scores)
    repeated = "accuracy" if metric == "micro_f1" else "micro_f1"
    return {name: value for name, value in scores.items() if name != repeated}


def clock(seconds: float) -> str:
    """0:07, 12:31, 3:02:05, 4 d 03:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def make_console(*, stderr: bool = False, **options: Any) -> Console:
    """Where progress is shown: without control codes if that is no terminal, as in a notebook; `options` are rich's."""
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()  # notebooks set FORCE_COLOR, which rich would obey
    return Console(stderr=stderr, force_jupyter=False, force_terminal=is_terminal, **options)
