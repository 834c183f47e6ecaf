"""Custom metrics: user functions, set by `metric: my_package.scores:name` in the section of a task."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.extensions import is_custom, load_custom
from pretrain.common.kinds import not_one_of


class KIND:
    """Contract of a custom metric."""

    @staticmethod
    def check(function: Any, name: str) -> None:
        """Raise `InputError` unless it can be called as f(true, predicted)."""
        try:
            inspect.signature(function).bind(None, None)
        except (TypeError, ValueError):
            signature = f"{name.rpartition(':')[2]}(true, predicted) -> float"
            raise InputError(f"{name}: cannot take two arguments. A score is a function {signature}.") from None


def metric_error(setting: str, known: Iterable[str]) -> str:
    """Return why a setting is neither one of the `known` scores nor a custom score; "" if it is valid."""
    if is_custom(setting):
        fits = re.fullmatch(r"[\w.]+:\w+", setting)
        return "" if fits else f"{setting!r} does not name a custom function, such as my_package.scores:name"
    return not_one_of(setting, known) if setting and setting not in known else ""


def metric_name(setting: str) -> str:
    """Return the name of the score that a setting refers to."""
    return setting.rpartition(":")[2]


def own_score(setting: str, true: Any, predicted: Any) -> dict[str, float]:
    """Return {name: value} of the custom score, {} if the setting names none. Raises `InputError` as `load_custom`."""
    return {metric_name(setting): float(load_custom(setting)(true, predicted))} if ":" in setting else {}
