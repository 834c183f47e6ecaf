"""Settings of earlier versions: those that left, and those that have another name now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_LEFT_IN, _READ_UNTIL = "0.2", "0.3"
_LAST_COMMIT = "02149e8"  # that had all of `LEFT`

LEFT: dict[str, dict[str, Any]] = {
    "model": {
        "attention_gate": "none",
        "bigram_rows": 0,
        "norm_before_output": False,
        "qk_norm": False,
        "zero_output_init": False,
    },
    "masking": {"shifted_targets": False, "span_longest": 10, "span_probability": 0.2, "z_loss": 0.0},
    "phases": {"causal_share": 0.0},
    "optimizer": {"cautious_weight_decay": False},
    "engine": {"flash_attention": "torch", "fp8": False},
}
"""Section -> name -> the value without effect, with which a recorded config is still read."""


class Renamed(NamedTuple):
    """The name that a setting has now, and its value there for each value of the old one."""

    name: str
    values: Mapping[Any, Any]


RENAMED: dict[str, dict[str, Renamed]] = {
    "pairs": {"next_sentence": Renamed("objective", {True: "nsp", False: "none"})},
    "masking": {"whole_word": Renamed("scheme", {True: "whole_words", False: "tokens"})},
}
"""Section -> old name -> new one. Both may be given, as in recorded configs: then the new one decides."""


class LeftError(ValueError):
    """A setting of `LEFT` with an effect, by its name within its section."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} left in {_LEFT_IN}; the last commit that had it is {_LAST_COMMIT}; remove the line")


def as_now(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section with today's names. Raises `LeftError` if one had an effect that left."""
    left, renamed = LEFT.get(section, {}), RENAMED.get(section, {})
    for name, without_effect in left.items():
        if values.get(name, without_effect) != without_effect:
            raise LeftError(name)
    now = {name: value for name, value in values.items() if name not in left}
    for old, (new, of_old) in renamed.items():
        if isinstance(now.get(old), bool):
            value = of_old[now.pop(old)]
            now[new] = now.get(new) or value
    return now


def remark(section: str, name: str, value: Any) -> str:
    """What to write in place of an old name; "" if the name is no old one."""
    renamed = RENAMED.get(section, {}).get(name)
    if renamed is None or not isinstance(value, bool):
        return ""
    now = f"{renamed.name}: {renamed.values[value]}"
    return f"{section}.{name}: {str(value).lower()} is now {section}.{now}; the old name is read until {_READ_UNTIL}"
