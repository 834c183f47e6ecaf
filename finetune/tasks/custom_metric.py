"""Custom metrics: user functions, set by `metric: my_package.scores:name` in the section of a task."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.extensions import is_custom, load_custom
from pretrain.common.kinds import unknown_name_message


class INTERFACE:
    """Contract of a custom metric, checked when it is loaded."""

    @staticmethod
    def check(function: Any, name: str) -> None:
        """Raise `InputError` unless `function`, called `name` in the config, can be called as f(true, predicted)."""
        try:
            inspect.signature(function).bind(None, None)
        except (TypeError, ValueError):
            signature = f"{name.rpartition(':')[2]}(true, predicted) -> float"
            raise InputError(f"{name}: cannot be called with two arguments. Define it as {signature}.") from None


def metric_error(setting: str, built_in: Iterable[str]) -> str:
    """Return why `setting` is neither one of the `built_in` metrics nor a custom function; "" if it is valid."""
    if is_custom(setting):
        is_valid = re.fullmatch(r"[\w.]+:\w+", setting)
        return "" if is_valid else f"{setting!r} is not of the form module:function, such as my_package.scores:name"
    return unknown_name_message(setting, built_in) if setting and setting not in built_in else ""


def metric_name(setting: str) -> str:
    """Return the name of the metric: for a custom one, the name of its function."""
    return setting.rpartition(":")[2]


def custom_score(setting: str, true: Any, predicted: Any) -> dict[str, float]:
    """Return {name: value} if `setting` is a custom metric, {} if it is built-in. Raises what `load_custom` raises."""
    return {metric_name(setting): float(load_custom(setting)(true, predicted))} if ":" in setting else {}
