"""Records the metrics of a run in metrics.jsonl and mirrors them to W&B. Training never waits for the network."""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.files import append_open, disk_errors
from pretrain.common.records import drop_records_after, make_event, read_records, with_nulls
from pretrain.common.run_files import LAST_SENT, METRICS, PROBES
from pretrain.config import RunConfig
from pretrain.tracking.mirror import WandbMirror, new_id, wandb_arguments, wandb_mode
from pretrain.tracking.rows import MetricRows


class Tracker:
    """Writes a run's metrics.jsonl and mirrors it to W&B; does nothing if `enabled` is false.

    Args:
        config: the run's config; `config.tracking` has the W&B settings.
        run_dir: the run folder; created if missing.
        run_id: the W&B id in the resumed checkpoint; None starts a new W&B run.
        step: optimizer steps already taken. Records of later steps are dropped, since training repeats these steps;
            None means that there is no checkpoint, so all records are dropped.
        card: facts about the data, added to the run's W&B config.
        job_type: W&B's job type.
        enabled: whether to record anything; true on rank 0 only.

    Raises:
        InputError: metrics.jsonl is damaged before its last line, or W&B is set to online without a key.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        run_id: str | None,
        step: int | None,
        card: dict[str, Any],
        job_type: str,
        enabled: bool,
    ) -> None:
        self.run_id = run_id or new_id(config)
        self.file = None
        self.mirror = None
        self._step = step or 0
        self._folder, self._rows, self._last_probe = run_dir, None, -1
        if not enabled:
            return
        mode = wandb_mode(config.tracking.wandb)
        path = run_dir / METRICS
        with disk_errors(path):
            run_dir.mkdir(parents=True, exist_ok=True)
            drop_records_after(path, -1 if step is None else step)
            # Unbuffered, so that records survive a kill of the process, and `log` itself reports a full disk.
            self.file = append_open(path, buffering=0)
        if mode != "off":
            with disk_errors(path):
                rows = self._rows = MetricRows(run_dir, self.run_id, step)
            self._last_probe = rows.last_probe
            # Records that an earlier start had not sent to W&B when it was killed.
            unsent = [each for each in read_records(run_dir) if rows.last_step < each.get("step", 0) <= self._step]
            self.mirror = WandbMirror(mode, wandb_arguments(config, run_dir, self.run_id, card, job_type), rows)
            for record in unsent:
                self.mirror.log(record)

    def log(self, record: dict[str, Any]) -> None:
        """Append one record (`pretrain.run.metrics`); NaN and infinities are written as null."""
        if self.file is None:
            return
        record = with_nulls(record)
        with disk_errors(Path(self.file.name)):
            # A kill can only leave an incomplete last line, which the next start removes.
            remaining = json.dumps(record, allow_nan=False).encode() + b"\n"
            while remaining:
                remaining = remaining[self.file.write(remaining) :]
        self._mirror_record(record)
        self._mirror_probe(record["step"])
        self._step = record["step"]
        self._record_failure()

    def _mirror_probe(self, step: int) -> None:
        """Send the oldest unsent checkpoint scores in this step's row, unless the step is repeated."""
        if self.mirror is not None and self._rows is not None and step > max(self._rows.last_step, self._step):
            for record in _probes_after(self._folder, self._last_probe)[:1]:
                self.mirror.log(record, row_step=step)
                self._last_probe = record["step"]

    def log_events(self, events: Iterable[dict[str, Any]], step: int) -> None:
        """Record `events` from before this start, such as a crash, each with "event", "time" and "message"."""
        for event in events:
            self.log({**event, "step": step})

    def rewind(self, step: int) -> None:
        """Drop the records after `step`, where training continues."""
        if self.file is not None:
            path = Path(self.file.name)
            with disk_errors(path):
                self.file.close()
                drop_records_after(path, step)
                self.file = append_open(path, buffering=0)

    def mirror_end(self, event: str, step: int, message: str) -> None:
        """Send the event of the run's stop to W&B. The launcher writes it to metrics.jsonl (`append_end_event`)."""
        self._mirror_record({"event": event, "step": step, "message": message})

    def _mirror_record(self, record: dict[str, Any]) -> None:
        if self.mirror is not None:
            self.mirror.log(record)

    def _record_failure(self) -> None:
        """Record, once, that W&B failed."""
        if self.mirror is not None and (reason := self.mirror.failure):
            self.mirror = None
            message = f"W&B failed; metrics.jsonl continues without it ({reason})"
            self.log(make_event("wandb", message, step=self._step))

    @property
    def mirrored(self) -> bool:
        """True if records are sent to W&B, now or by a later `wandb sync`."""
        return self.mirror is not None

    def log_artifact(self, folder: Path) -> None:
        """Log an exported checkpoint as the W&B model artifact `model-<run id>`, without copying its files."""
        if self.mirror is not None:
            self.mirror.log_artifact(folder, f"model-{self.run_id}")

    def close(self) -> None:
        """Flush the file to disk and finish the W&B run; wait less than a minute for its uploads."""
        self._flush()
        if self.mirror is not None:
            self.mirror.close()
            self._record_failure()
            self.mirror = None
        if self.file is not None:
            self._flush()
            self.file.close()
            self.file = None

    def _flush(self) -> None:
        if self.file is not None:
            with disk_errors(Path(self.file.name)):
                os.fsync(self.file.fileno())


def send_probes(config: RunConfig) -> None:
    """Send the checkpoint scores that were computed after a finished run sent its last row, one row per checkpoint."""
    path, folder = config.folder / LAST_SENT, config.folder
    if (mode := wandb_mode(config.tracking.wandb)) != "off" and path.is_file():
        rows = MetricRows(folder, run_id := json.loads(path.read_text(encoding="utf-8"))["id"], None)
        if unsent := _probes_after(folder, rows.last_probe):
            mirror = WandbMirror(mode, wandb_arguments(config, folder, run_id, {}, "pretrain"), rows)
            for row_step, record in enumerate(unsent, rows.last_step + 1):
                mirror.log(record, row_step)
            mirror.close()


def _probes_after(folder: Path, step: int) -> list[dict[str, Any]]:
    with contextlib.suppress(InputError):  # a damaged probes.jsonl is not an error of the run
        return [record for record in read_records(folder, PROBES) if record["step"] > step]
    return []
