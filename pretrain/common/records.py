"""Reads metrics.jsonl, the source of truth about a run, and truncates it when a run resumes."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open
from pretrain.common.run_files import METRICS

SOURCE_LOSS = "source_loss/"
"""Prefix of an evaluation's fields with the loss on one source, whose name follows."""

_STRING_FIELDS = ("split", "event", "message", "error")
# Maximum absolute value of a field: larger values, infinities and NaN break the arithmetic of reports.
_MAX_VALUE = 1e300
# The end of the year 9999, the last that datetime supports.
_LATEST_TIME = 253_402_300_799


def read_records(run_dir: Path, name: str = METRICS) -> list[dict[str, Any]]:
    """Return all records of metrics.jsonl, or a similar file of the run, in file order; [] if there is none.

    An incomplete last line is ignored: a killed process may leave one.
    Raises `InputError` with the line number if a line before the last one is not a valid record.
    """
    path = run_dir / name
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_checked_record(line))
        except ValueError as error:
            if number < len(lines):
                raise InputError(f"{path}:{number}: {error}. Remove the line, or restore the file.") from None
    return records


def append_end_event(run_dir: Path, event: str, message: str, saved_step: int) -> None:
    """Append the event that ended the run, replacing an incomplete last line.

    A stop event gets the step `saved_step`; other events get the last training step. If both steps are 0, do nothing.
    """
    path = run_dir / METRICS
    if not path.is_file():
        return
    with path.open("r+b") as file:
        data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        records = (parse_record(line) for line in reversed(complete.splitlines()))
        last_step = next((record["step"] for record in records if record is not None and is_training(record)), 0)
        if not last_step and not saved_step:
            return
        file.truncate(len(complete))
        file.seek(len(complete))
        step = saved_step if event == "stop" else last_step
        file.write(json.dumps(make_event(event, message, step=step)).encode() + b"\n")


def make_event(kind: str, message: str, **fields: Any) -> dict[str, Any]:
    """Return the record of an event that happens now.

    `kind` is a constant of `pretrain.tracking.events`; `fields` are the other fields, such as `step`.
    """
    return {"event": kind, **fields, "time": time.time(), "message": message}


def is_training(record: dict[str, Any]) -> bool:
    """Return whether a record describes training steps, not an evaluation or an event."""
    return "split" not in record and "event" not in record


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of metrics.jsonl; None if the line is not a valid record."""
    try:
        return _checked_record(line)
    except ValueError:
        return None


def _checked_record(line: bytes) -> dict[str, Any]:
    """Return the record in a line. Raises `ValueError` with the reason if it is not valid."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    record: dict[str, Any] = content
    for key, value in record.items():
        expected = _expected_type(key, value, in_event="event" in record)
        if expected:
            text = repr(value)
            raise ValueError(f"{key} is {text[:60]}{'...' * (len(text) > 60)}; expected {expected}")
    return record


def _expected_type(key: str, value: Any, *, in_event: bool) -> str:
    """Return the type that `key` requires if `value` has another type; "" if it is valid."""
    if key in _STRING_FIELDS:
        return "" if isinstance(value, str) else "text"
    if key == "step":
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return "" if is_integer and 0 <= value < 2**63 else "a step number"
    if key == "time":
        return "" if _is_number(value) and 0 <= value <= _LATEST_TIME else "seconds since 1970"
    if in_event:  # the other fields depend on the kind of event
        return ""
    numbers = value if isinstance(value, list) else [value]
    return "" if all(number is None or _is_number(number) for number in numbers) else "a number"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and -_MAX_VALUE < value < _MAX_VALUE


def drop_records_after(path: Path, step: int) -> None:
    """Drop the records after `step` from a file such as metrics.jsonl; it is rewritten only if a record is dropped.

    Events after `step` are kept, except if `step` is -1: then the run starts over, and all records are dropped.
    """
    if not path.is_file():
        return
    lines = [
        json.dumps(record)
        for record in read_records(path.parent, path.name)
        if record.get("step", 0) <= step or ("event" in record and step >= 0)
    ]
    text = "".join(f"{line}\n" for line in lines)
    if text.encode() != path.read_bytes():
        with atomic_open(path, "w") as file:
            file.write(text)


def with_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with None (JSON's null) in place of NaN and infinities, which JSON does not have."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }


# ---- formatting of records


class Metric(NamedTuple):
    """One field of a training record; it has a chart if it has a title."""

    unit: str
    description: str
    title: str = ""  # title of its chart, its tile and its row on a model card
    short: str = ""  # label in progress lines; if empty, the metric appears only in its chart
    live: bool = False  # whether the progress line during training shows it

    def text(self, value: float, extra_digits: int = 0) -> str:
        """Format the value for display, with `extra_digits` more digits than in progress lines."""
        return f"{value:.{1 + extra_digits}%}" if self.unit == "fraction" else f"{value:.{3 + extra_digits}f}"

    def line(self, value: float) -> str:
        """Format label and value, such as "mlm 12.3%"."""
        return f"{self.short} {self.text(value)}"


NO_METRICS: Mapping[str, Metric] = MappingProxyType({})


def metric_lines(record: Mapping[str, Any], metrics: Mapping[str, Metric]) -> list[str]:
    """Format the metrics that a record contains, each with its short label."""
    values = ((metric, record.get(name)) for name, metric in metrics.items() if metric.short)
    return [metric.line(value) for metric, value in values if value is not None]
