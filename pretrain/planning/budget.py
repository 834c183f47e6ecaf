"""A budget as people type it: a time, or FLOPs."""

import re
from dataclasses import dataclass

from pretrain.common.errors import InputError

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_TIME = re.compile("".join(f"(?:{_NUMBER}{unit})?" for unit in _SECONDS))
_FEWEST_FLOPS, _MOST_FLOPS = 1e9, 1e27  # any fewer are rather a number without its unit
_MOST_SECONDS = 366 * 86400


@dataclass(frozen=True)
class Budget:
    """What a run may cost; one of the two is 0."""

    text: str
    seconds: float = 0.0  # of the whole run
    flops: float = 0.0  # that training executes


def parse_budget(text: str) -> Budget:
    """`2h`, `30m`, `90s`, `1h30m`, `2d`, or FLOPs such as `0.5e15`. Raises `InputError` for anything else."""
    given = text.strip().lower()
    match = _TIME.fullmatch(given)
    if given and match:
        seconds = sum(
            float(number) * one for number, one in zip(match.groups(), _SECONDS.values(), strict=True) if number
        )
        if 0 < seconds <= _MOST_SECONDS:
            return Budget(text.strip(), seconds=seconds)
    elif (flops := _number(given)) is not None and _FEWEST_FLOPS <= flops <= _MOST_FLOPS:
        return Budget(text.strip(), flops=flops)
    raise InputError(
        f"--budget {text}: expected a time such as 2h, 30m, 90s or 1h30m, at most a year, or FLOPs such as 0.5e15."
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
