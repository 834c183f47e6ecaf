"""A run's records as rows for W&B: exactly one per step, even if the run is restarted.

A restarted run repeats the steps after its checkpoint bit for bit, so a repeated row equals the first one. W&B itself
rejects decreasing steps, but an offline run does not know which steps earlier starts have sent.
"""

import json
from pathlib import Path
from typing import Any

from pretrain.common.files import write_json
from pretrain.common.run_files import LAST_SENT

MESSAGE = "events/message"
_EVENT_STEP = "events/step"
PROBE_STEP = "probe/step"  # the x axis of checkpoint scores, which are sent after their step


class MetricRows:
    """Collects the values of a step until a later step starts.

    Args:
        folder: the run folder.
        run_id: W&B's id of the run.
        step: steps taken before this start; if earlier rows are not recorded, nothing up to `step` is sent. None
            starts a new run.

    Attributes:
        last: the last step that was sent.
        probe: step of the last checkpoint whose scores were sent.
    """

    def __init__(self, folder: Path, run_id: str, step: int | None) -> None:
        self._path, self._id = folder / LAST_SENT, run_id
        saved = self._read()
        self.last, self.probe = saved or (-1 if step is None else step, -1)
        if saved is None:
            self._write()
        self._step: int | None = None
        self._row: dict[str, Any] = {}
        self._late: dict[str, Any] = {}  # events at steps whose row was already sent

    def add(self, step: int, values: dict[str, Any], *, event: bool) -> tuple[int, dict[str, Any]] | None:
        """Add the values of a record at `step`; return an earlier step and its row if it is now complete.

        Values at a step before the latest are repeated and dropped. Events at such steps are new, so they are added to
        the next row, with their step as events/step.
        """
        open_step = self.last + 1 if self._step is None else self._step
        if step < open_step:
            if event:
                _merge(self._late, {**values, _EVENT_STEP: step})
            return None
        completed = self.take() if step != self._step else None
        self._step = step
        _merge(self._row, values)
        return completed

    def take(self) -> tuple[int, dict[str, Any]] | None:
        """Return the current step and row, and record the step as sent; None without a row."""
        if self._step is None:
            return None
        row, self.last = self._row, self._step
        self.probe = row.get(PROBE_STEP, self.probe)
        _merge(row, self._late)
        self._row, self._late, self._step = {}, {}, None
        self._write()
        return self.last, row

    def _read(self) -> tuple[int, int] | None:
        try:
            sent = json.loads(self._path.read_text(encoding="utf-8"))
            return (int(sent["step"]), int(sent["probe"])) if sent["id"] == self._id else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self) -> None:
        write_json(self._path, {"id": self._id, "step": self.last, "probe": self.probe})


def _merge(row: dict[str, Any], values: dict[str, Any]) -> None:
    """Add `values` to `row`; existing values stay, and messages are joined."""
    messages = [x[MESSAGE] for x in (row, values) if x.get(MESSAGE)]
    row.update({**values, **row})
    if messages:
        row[MESSAGE] = "\n".join(messages)
