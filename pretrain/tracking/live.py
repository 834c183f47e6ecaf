"""Shows a run's progress on the terminal, read from its metrics.jsonl.

While a run starts, worker 0 writes the startup phase, such as compilation, to a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common.errors import InputError
from pretrain.common.records import NO_METRICS, Metric, metric_lines, parse_record
from pretrain.common.run_files import METRICS, PROBES
from pretrain.common.wording import clock, counted, make_console, shown_scores
from pretrain.common.worker import WAITING_FILE
from pretrain.tracking.events import PROBE_SCORES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from pretrain.config import PhaseConfig

_REFRESH_SECONDS = 0.25
_PLAIN_SECONDS = 30.0  # between plain lines
_SPEED_SECONDS = 1800.0  # averaging window of the speed, from which the time left is computed
_BAR_WIDTH = 24
_MAX_SCORES = 4
# The phases of startup.
WORKERS = "starting the workers"
CONNECT = "connecting the workers"
LOAD = "loading data and model"
WARMUP_STEP = "trying the largest batch and a checkpoint"
COMPILE = f"compiling the model, {WARMUP_STEP}"
MEASURE = "measuring the speed of matrix products"
STEPS = "training the first steps"
_PHASE_FILE = "logs/starting.txt"  # exists during startup


def write_phase(run_dir: Path, phase: str) -> None:
    """Record the current startup phase. A full or read-only disk is ignored: other writes report it."""
    path = run_dir / _PHASE_FILE
    temporary = path.with_name(f".{path.name}.tmp")
    with contextlib.suppress(OSError):
        temporary.write_text(phase, encoding="utf-8")
        temporary.replace(path)


def end_phases(run_dir: Path) -> None:
    """Record that startup is over."""
    with contextlib.suppress(OSError):
        (run_dir / _PHASE_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def follow(
    run_dir: Path, total_steps: int, console: Console | None = None, metrics: Mapping[str, Metric] = NO_METRICS
) -> Iterator[None]:
    """Show the run's progress on the terminal while the block runs.

    `metrics` defines the display of a pretraining's metrics; a fine-tuning has scores.

    One live line, drawn by rich, shows step, loss, time left, accuracies, useful tokens/s, MFU and data stalls; a
    narrow terminal truncates it. Evaluations are printed above it. Before the first record, the line shows the startup
    phase. If stdout is not a terminal, a plain line is printed for each startup phase, then every 30 s.
    """
    console = console or make_console(highlight=False, soft_wrap=True)
    end_phases(run_dir)  # a killed start leaves the file
    progress = LiveProgress(run_dir, total_steps, console, metrics)
    progress.poll()  # existing records belong to earlier starts of the run
    stop = threading.Event()
    thread = threading.Thread(target=_show, args=(progress, stop), name="follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def phases_of(config: Mapping[str, Any]) -> list[PhaseConfig]:
    """Return the phases of a run's config.yaml; [] if there are none or some are damaged."""
    from pretrain.config import PhaseConfig

    try:
        return [PhaseConfig.model_validate(phase) for phase in config["phases"]]
    except (KeyError, TypeError, ValueError):
        return []


def work(phases: Iterable[PhaseConfig], step: int) -> float:
    """Return the work of the first `step` steps: an upper bound in tokens, or the steps if the phases are unknown."""
    tokens = 0.0
    for phase in phases:
        done = min(step, phase.steps)
        tokens += phase.first_sample(done) * phase.sequence_length
        step -= done
    return tokens or float(step)


class _Tail:
    """Reads the records appended to metrics.jsonl since the last read; detects that the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return (complete new records, whether the file is read from its start, as it is new or was replaced)."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                fresh = status.st_ino != self._inode or status.st_size < self._offset
                start = 0 if fresh else self._offset
                file.seek(start)
                data = file.read()
        except OSError:  # the file is missing, or storage fails temporarily: the next poll tries again
            return [], False
        complete = data[: data.rfind(b"\n") + 1]
        self._inode, self._offset = status.st_ino, start + len(complete)
        return [record for line in complete.splitlines() if (record := parse_record(line)) is not None], fresh


class LiveProgress:
    """State of the live line: the latest values and the speed."""

    def __init__(
        self, run_dir: Path, total_steps: int, console: Console, metrics: Mapping[str, Metric] = NO_METRICS
    ) -> None:
        self.console = console
        self.metrics = metrics
        self.total_steps = total_steps
        self.started = time.monotonic()
        self.last: dict[str, Any] = {}
        self._run_dir = run_dir
        self._tail, self._probes, self._started_at = _Tail(run_dir / METRICS), _Tail(run_dir / PROBES), time.time()
        self._old_file = (run_dir / METRICS).exists()
        # Events in the file so far: a restart or a rollback replaces the file but keeps them.
        self._known_events = {_event_key(record) for record in _Tail(run_dir / METRICS).read()[0] if "event" in record}
        # Whether records other than events have arrived in this start.
        self.has_records = False
        self._phases: list[PhaseConfig] = []
        self._waiting = ""
        self.phase_of_start = WORKERS
        self.bar = _make_bar(console)
        self._task = self.bar.add_task("", total=None)

    def poll(self) -> None:
        """Read new records; print evaluations, events and waits for nodes on separate lines; update the bar."""
        self._read()
        if not self.started_training:
            text = f"{self.phase_of_start}, {clock(time.monotonic() - self.started)}"
            self.bar.update(self._task, description=text)
            return
        amount, done = self._work(self.total_steps), self._work(self.step)
        self.bar.update(self._task, total=amount, completed=done, description="  ".join(self.parts()))

    def _read(self) -> None:
        self._print_wait()
        self._read_start()
        for record in self._probes.read()[0]:
            if record.get("time", 0.0) > self._started_at:
                self.console.print(_probe_line(record), markup=False)
        records, fresh = self._tail.read()
        if not records and not fresh:
            return
        # Records from before this start (or restart) are not shown.
        history = fresh and self._old_file
        self._old_file = True
        if history:
            self.last = {}
            self._restart_phases()
        for record in records:
            if "event" in record:
                self._handle_event(record)
                continue
            self.has_records = self.has_records or not history
            self._handle_record(record)

    def _print_wait(self) -> None:
        message = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            message = json.loads((self._run_dir / "logs" / WAITING_FILE).read_text(encoding="utf-8"))["message"]
        if message and message != self._waiting:
            self.console.print(f"  {message}", style="yellow", markup=False)
        self._waiting = message

    def _read_start(self) -> None:
        if self.started_training:
            return
        try:
            self.phase_of_start = (self._run_dir / _PHASE_FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            if self.phase_of_start != WORKERS:
                self.phase_of_start = STEPS

    def _restart_phases(self) -> None:
        """Show startup phases until the next record."""
        self.has_records, self.started = False, time.monotonic()
        self.bar.reset(self._task, total=None)

    def _handle_event(self, record: dict[str, Any]) -> None:
        if _event_key(record) in self._known_events:
            return
        self._known_events.add(_event_key(record))
        self.console.print(f"  step {record['step']:,}: {record['message']}", style="yellow", markup=False)
        if record["event"] == "resume":
            self._restart_phases()
        elif record["event"] == "rollback":
            self.has_records = True  # training continues immediately

    def _handle_record(self, record: dict[str, Any]) -> None:
        if record.get("split") == "validation":
            if self.has_records:
                self.console.print(_evaluation_line(record, self.metrics), markup=False)
            return
        self.last = record

    @property
    def started_training(self) -> bool:
        """Return whether this start has written a record."""
        return self.has_records and bool(self.last)

    @property
    def step(self) -> int:
        return self.last.get("step", 0)

    def parts(self) -> list[str]:
        """Return the parts of the line, most important first."""
        last, left = self.last, self.bar.tasks[0].time_remaining
        live = metric_lines(last, {name: metric for name, metric in self.metrics.items() if metric.live})
        parts = [
            f"step {self.step:,}/{self.total_steps:,}",
            _format("loss {:.3f}", last.get("loss")),
            "" if left is None else f"{clock(left)} left",
            _format("{:,} skipped", last.get("skipped_steps") or None),
            *live[:1],
            _format("{:,.0f} tokens/s", last.get("tokens_per_second")),
            _format("{:.0%} MFU", last.get("mfu")),
            *live[1:],
            _format("stall {:.1%}", last.get("data_stall_fraction")),
        ]
        return [part for part in parts if part]

    def _work(self, step: int) -> float:
        return work(self._read_phases(), step)

    def _read_phases(self) -> list[PhaseConfig]:
        """Return the phases; [] until the run's config exists."""
        if not self._phases:
            from pretrain.common.settings import read_values

            with contextlib.suppress(InputError):
                self._phases = phases_of(read_values(self._run_dir / "config.yaml"))
        return self._phases


def _event_key(event: dict[str, Any]) -> str:
    """Return a key that identifies an event in its run."""
    return json.dumps(event, sort_keys=True)


def _make_bar(console: Console) -> Progress:
    """Create the live line: a bar, which pulses while the run starts, and text, truncated to the line's width."""
    from rich.highlighter import ReprHighlighter
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    text = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return Progress(
        BarColumn(min(_BAR_WIDTH, console.width // 6)),
        TextColumn("{task.description}", markup=False, highlighter=ReprHighlighter(), table_column=text),
        console=console,
        auto_refresh=False,
        expand=True,
        speed_estimate_period=_SPEED_SECONDS,
        get_time=lambda: time.monotonic(),
    )


def _show(progress: LiveProgress, stop: threading.Event) -> None:
    """Show the live line on a terminal; otherwise print a plain line for each startup phase and every 30 s."""
    console = progress.console
    printed_at, printed_step, printed_phase = time.monotonic(), 0, ""
    with progress.bar if console.is_terminal else contextlib.nullcontext():
        while True:
            final = stop.is_set()
            progress.poll()
            due = printed_step == 0 or final or time.monotonic() - printed_at >= _PLAIN_SECONDS
            if console.is_terminal:
                progress.bar.refresh()
            elif not progress.started_training:
                if progress.phase_of_start != printed_phase:
                    printed_phase = progress.phase_of_start
                    console.print(f"  {printed_phase}", markup=False)
            elif due and progress.step > printed_step:
                console.print("  ".join(progress.parts()), markup=False)
                printed_at, printed_step = time.monotonic(), progress.step
            if final:
                return
            stop.wait(_REFRESH_SECONDS)


def _format(template: str, value: float | None) -> str:
    return "" if value is None else template.format(value)


def _evaluation_line(record: dict[str, Any], metrics: Mapping[str, Metric]) -> str:
    """Return the metrics of an evaluation of pretraining, or the first few scores of another task."""
    scores = metric_lines(record, metrics)
    if not scores:
        numbers = {key: value for key, value in record.items() if isinstance(value, float) and key != "seconds"}
        first = list(shown_scores(numbers).items())[:_MAX_SCORES]
        scores = [f"{key.replace('_', ' ')} {value:.3f}" for key, value in first]
    return _line(record, "held-out", *scores, "best" if record.get("best") else "")


def _probe_line(record: dict[str, Any]) -> str:
    skipped = record.get("skipped")
    skips = f"{counted(skipped, 'checkpoint')} skipped" if skipped else ""
    return _line(record, "probes", *metric_lines(record, PROBE_SCORES), skips, record.get("error", ""))


def _line(record: dict[str, Any], *parts: str) -> str:
    return "  ".join(part for part in (f"  step {record.get('step', 0):,} {parts[0]}", *parts[1:]) if part)
