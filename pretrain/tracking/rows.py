"""What W&B gets of a run's records: one row a step, each step once, however often the run is restarted.

A restarted run repeats the steps after its checkpoint bit for bit, so the first row of a step is as good as a second.
W&B itself refuses steps that go back, but an offline run does not know what earlier ones have sent.
"""

import json
from pathlib import Path
from typing import Any

from pretrain.common.files import write_json
from pretrain.common.run_files import LAST_SENT

MESSAGE = "events/message"
_EVENT_STEP = "events/step"
PROBE_STEP = "probe/step"  # the x axis of scores of checkpoints, which come later than their step


class MetricRows:
    """Collects the values of a step until a later one comes.

    Args:
        folder: the run folder.
        run_id: W&B's id of the run.
        step: steps taken before this start; nothing up to it is sent if nobody knows what was sent before. None begins
            a new run.

    Attributes:
        last: the last step that was sent.
        probe: the last checkpoint's step whose scores were sent.
    """

    def __init__(self, folder: Path, run_id: str, step: int | None) -> None:
        self._path, self._id = folder / LAST_SENT, run_id
        known = self._read()
        self.last, self.probe = known or (-1 if step is None else step, -1)
        if known is None:
            self._write()
        self._step: int | None = None
        self._row: dict[str, Any] = {}
        self._late: dict[str, Any] = {}  # of events at steps whose row was sent

    def add(self, step: int, values: dict[str, Any], *, event: bool) -> tuple[int, dict[str, Any]] | None:
        """Take the values of a record at `step`; the complete row of an earlier step, and that step, if it is over.

        Values at a step before the newest one are those of a repetition, and left out. An event there did happen, so it
        comes into the next row, with its own step as events/step.
        """
        open_step = self.last + 1 if self._step is None else self._step
        if step < open_step:
            if event:
                _merge(self._late, {**values, _EVENT_STEP: step})
            return None
        done = self.take() if step != self._step else None
        self._step = step
        _merge(self._row, values)
        return done

    def take(self) -> tuple[int, dict[str, Any]] | None:
        """The row that is being collected, and its step, which counts as sent from here on; None without one."""
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
            found = json.loads(self._path.read_text(encoding="utf-8"))
            return (int(found["step"]), int(found["probe"])) if found["id"] == self._id else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self) -> None:
        write_json(self._path, {"id": self._id, "step": self.last, "probe": self.probe})


def _merge(row: dict[str, Any], values: dict[str, Any]) -> None:
    """Add `values` to `row`; what it has stays, and messages are joined."""
    messages = [one[MESSAGE] for one in (row, values) if one.get(MESSAGE)]
    row.update({**values, **row})
    if messages:
        row[MESSAGE] = "\n".join(messages)
