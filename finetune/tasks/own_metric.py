"""A score of the user's own, which `metric: my_package.scores:name` names in the section of a task."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.extensions import is_own, own
from pretrain.common.kinds import not_one_of


class KIND:
    """What such a name has to be."""

    @staticmethod
    def check(found: Any, name: str) -> None:
        """Raise `InputError` unless it can be called with what is true and what is predicted."""
        try:
            inspect.signature(found).bind(None, None)
        except (TypeError, ValueError):
            what = f"{name.rpartition(':')[2]}(true, predicted) -> float"
            raise InputError(f"{name}: cannot be called with two arguments. A score is a function {what}.") from None


def why_no_metric(setting: str, known: Iterable[str]) -> str:
    """Why a setting is none of the `known` scores and cannot be one's own; "" if it is or can."""
    if is_own(setting):
        fits = re.fullmatch(r"[\w.]+:\w+", setting)
        return "" if fits else f"{setting!r} is no function of your own such as my_package.scores:name"
    return not_one_of(setting, known) if setting and setting not in known else ""


def metric_name(setting: str) -> str:
    """The name of the score that a setting names."""
    return setting.rpartition(":")[2]


def own_score(setting: str, true: Any, predicted: Any) -> dict[str, float]:
    """The user's own score by its name, {} if the setting names none. Raises `InputError` as `own`."""
    return {metric_name(setting): float(own(setting)(true, predicted))} if ":" in setting else {}
