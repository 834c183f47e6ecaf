"""metrics.jsonl, the truth about a run: read, cut back, ended."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open, disk_errors

METRICS = "metrics.jsonl"

_TEXTS = ("split", "event", "message")
_LARGEST = 1e300  # a number beyond it, or none, stops whoever calculates with it
_LAST_SECOND = 253_402_300_799  # of the year 9999, the last that can be shown


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """All records of a run's metrics.jsonl in file order; [] without one. A torn last line is left out.

    Raises `InputError` with the line's number where anything before the last line is no record.
    """
    path = run_dir / METRICS
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_record(line))
        except ValueError as error:
            if number < len(lines):
                raise InputError(f"{path}:{number}: {error}. Remove the line, or restore the file.") from None
    return records


def note_end(run_dir: Path, event: str, message: str) -> None:
    """Add the event that a run has ended with; nothing where it has no record yet."""
    records = read_records(run_dir)
    steps = [record["step"] for record in records if is_training(record)]
    if not steps:
        return
    records.append({"event": event, "step": max(steps), "time": time.time(), "message": message})
    with disk_errors(run_dir), atomic_open(run_dir / METRICS, "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def is_training(record: dict[str, Any]) -> bool:
    """Whether a record is of training steps, and not of an evaluation or an event."""
    return "split" not in record and "event" not in record


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record in a line of metrics.jsonl; None where there is none."""
    try:
        return _record(line)
    except ValueError:
        return None


def _record(line: bytes) -> dict[str, Any]:
    """The record in a line; `ValueError` says what is wrong with it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    for key, value in record.items():
        expected = _expected(key, value, in_event="event" in record)
        if expected:
            shown = repr(value)
            raise ValueError(f"{key} is {shown[:60]}{'...' * (len(shown) > 60)}; expected {expected}")
    return record


def _expected(key: str, value: Any, *, in_event: bool) -> str:
    """What should stand under `key` where `value` is something else; "" where it is right."""
    if key in _TEXTS:
        return "" if isinstance(value, str) else "text"
    if key == "step":
        whole = isinstance(value, int) and not isinstance(value, bool)
        return "" if whole and 0 <= value < 2**63 else "a step"
    if key == "time":
        return "" if _is_number(value) and 0 <= value <= _LAST_SECOND else "seconds since 1970"
    if in_event:  # each kind of event has details of its own
        return ""
    numbers = value if isinstance(value, list) else [value]
    return "" if all(one is None or _is_number(one) for one in numbers) else "a number"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and -_LARGEST < value < _LARGEST


def keep_until(path: Path, step: int) -> None:
    """Rewrite metrics.jsonl, where needed, so that whole records up to `step` are left, in their order.

    Events past it are left too, for a run that goes on: that it was set back does not undo what happened.
    """
    if not path.is_file():
        return
    lines = [
        json.dumps(record)
        for record in read_records(path.parent)
        if record.get("step", 0) <= step or ("event" in record and step >= 0)
    ]
    text = "".join(f"{line}\n" for line in lines)
    if text.encode() != path.read_bytes():
        with atomic_open(path, "w") as file:
            file.write(text)
