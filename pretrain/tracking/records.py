"""metrics.jsonl, the truth about a run: read, cut back, ended."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pretrain.errors import InputError
from pretrain.files import atomic_open, disk_errors

METRICS = "metrics.jsonl"


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """All records of a run's metrics.jsonl in file order; [] without one. A torn last line is left out.

    Raises `InputError` with the line's number where anything before the last line is no JSON object.
    """
    path = run_dir / METRICS
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        record = parse_record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise InputError(f"{path}:{number}: not a JSON object. Remove the line, or restore the file.")
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
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


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
