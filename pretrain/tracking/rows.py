"""Merges a run's records into rows for W&B: one row per step, even if the run is restarted.

A restarted run repeats the steps after its checkpoint bit for bit, so a repeated row equals the first one. W&B itself
rejects decreasing steps, but an offline W&B run does not know the steps that earlier starts of the run have sent.
"""

import json
from pathlib import Path
from typing import Any

from pretrain.common.files import write_json
from pretrain.common.run_files import LAST_SENT

MESSAGE = "events/message"
_EVENT_STEP = "events/step"
PROBE_STEP = "probe/step"  # x axis of checkpoint scores, which are sent in the row of a later step


class MetricRows:
    """Collects the values of one step, the open step, until a record of a later step arrives.

    Args:
        folder: the run folder.
        run_id: W&B's id of the run.
        step: optimizer steps taken before this start of the run; None for a new run. If `folder` does not record the
            last row sent, all rows up to this step count as sent.

    Attributes:
        last_step: step of the last row that was sent.
        last_probe: step of the last checkpoint whose scores were sent.
    """

    def __init__(self, folder: Path, run_id: str, step: int | None) -> None:
        self._path, self._run_id = folder / LAST_SENT, run_id
        recorded = self._read()
        self.last_step, self.last_probe = recorded or (-1 if step is None else step, -1)
        if recorded is None:
            self._write()
        self._open_step: int | None = None
        self._row: dict[str, Any] = {}
        self._late_values: dict[str, Any] = {}  # values of events whose step's row was already sent

    def add(self, step: int, values: dict[str, Any], *, is_event: bool) -> tuple[int, dict[str, Any]] | None:
        """Add the values of a record at `step`. If this completes the row of an earlier step, return (step, row).

        Metrics of steps before the open one are repetitions, and are dropped. Events of these steps are new, so they
        are added to the next row, with their step as events/step.
        """
        first_open_step = self.last_step + 1 if self._open_step is None else self._open_step
        if step < first_open_step:
            if is_event:
                _merge(self._late_values, {**values, _EVENT_STEP: step})
            return None
        completed_row = self.take() if step != self._open_step else None
        self._open_step = step
        _merge(self._row, values)
        return completed_row

    def take(self) -> tuple[int, dict[str, Any]] | None:
        """Return (open step, its row), and record the step as sent; None if no step is open."""
        if self._open_step is None:
            return None
        row, self.last_step = self._row, self._open_step
        self.last_probe = row.get(PROBE_STEP, self.last_probe)
        _merge(row, self._late_values)
        self._row, self._late_values, self._open_step = {}, {}, None
        self._write()
        return self.last_step, row

    def _read(self) -> tuple[int, int] | None:
        try:
            sent = json.loads(self._path.read_text(encoding="utf-8"))
            return (int(sent["step"]), int(sent["probe"])) if sent["id"] == self._run_id else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self) -> None:
        write_json(self._path, {"id": self._run_id, "step": self.last_step, "probe": self.last_probe})


def _merge(row: dict[str, Any], values: dict[str, Any]) -> None:
    """Add `values` to `row`; existing values stay, and messages are joined."""
    messages = [x[MESSAGE] for x in (row, values) if x.get(MESSAGE)]
    row.update({**values, **row})
    if messages:
        row[MESSAGE] = "\n".join(messages)
