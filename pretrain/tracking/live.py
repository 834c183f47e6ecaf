"""Shows a run's progress on the terminal, read from its metrics.jsonl.

While a run starts, worker 0 writes the stage of the startup, such as compilation, to a file.
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
_PLAIN_SECONDS = 30.0  # interval of the lines that are printed if stdout is not a terminal
_SPEED_SECONDS = 1800.0  # averaging window of the speed, from which the remaining time is computed
_BAR_WIDTH = 24
_MAX_SCORES = 4  # maximum number of scores on the line of a fine-tuning's evaluation
# The stages of the startup.
WORKERS = "starting the workers"
CONNECT = "connecting the workers"
LOAD = "loading data and model"
WARMUP_STEP = "trying the largest batch and a checkpoint"
COMPILE = f"compiling the model, {WARMUP_STEP}"
MEASURE = "measuring the speed of matrix products"
STEPS = "training the first steps"
_STAGE_FILE = "logs/starting.txt"  # exists during startup


def write_startup_stage(run_dir: Path, stage: str) -> None:
    """Record the current stage of the startup. A full or read-only disk is ignored: other writes report it."""
    path = run_dir / _STAGE_FILE
    temporary = path.with_name(f".{path.name}.tmp")
    with contextlib.suppress(OSError):
        temporary.write_text(stage, encoding="utf-8")
        temporary.replace(path)


def end_startup(run_dir: Path) -> None:
    """Record that startup is over."""
    with contextlib.suppress(OSError):
        (run_dir / _STAGE_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def follow(
    run_dir: Path, total_steps: int, console: Console | None = None, metrics: Mapping[str, Metric] = NO_METRICS
) -> Iterator[None]:
    """Show the run's progress on the terminal while the block runs.

    `metrics` defines how the metrics of a pretraining are shown; for a fine-tuning, scores are shown.

    One live line, drawn by rich, shows step, loss, time left, accuracies, useful tokens/s, MFU and data stalls; a
    narrow terminal truncates it. Evaluations are printed above it. Before the first record, the line shows the startup
    stage. If stdout is not a terminal, a plain line is printed for each startup stage, then every 30 s.
    """
    console = console or make_console(highlight=False, soft_wrap=True)
    end_startup(run_dir)  # removes the file of an earlier start that was killed
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
    """Return the training phases of a run's config.yaml; [] if there are none or some are damaged."""
    from pretrain.config import PhaseConfig

    try:
        return [PhaseConfig.model_validate(phase) for phase in config["phases"]]
    except (KeyError, TypeError, ValueError):
        return []


def training_work(phases: Iterable[PhaseConfig], step: int) -> float:
    """Estimate the work of the first `step` steps: the maximum number of tokens, or `step` if phases are unknown."""
    tokens = 0.0
    for phase in phases:
        phase_steps = min(step, phase.steps)
        tokens += phase.first_sample(phase_steps) * phase.sequence_length
        step -= phase_steps
    return tokens or float(step)


class _Tail:
    """Reads the records appended to a .jsonl file since the last read, and detects if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return (complete new records, whether they start at the file's first line: it is new or was replaced)."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                from_start = status.st_ino != self._inode or status.st_size < self._offset
                start = 0 if from_start else self._offset
                file.seek(start)
                data = file.read()
        except OSError:  # the file is missing, or storage fails temporarily: the next poll tries again
            return [], False
        lines = data[: data.rfind(b"\n") + 1]  # without an incomplete last line
        self._inode, self._offset = status.st_ino, start + len(lines)
        return [record for line in lines.splitlines() if (record := parse_record(line)) is not None], from_start


class LiveProgress:
    """State of the live line: the latest values and the speed."""

    def __init__(
        self, run_dir: Path, total_steps: int, console: Console, metrics: Mapping[str, Metric] = NO_METRICS
    ) -> None:
        self.console = console
        self.metrics = metrics
        self.total_steps = total_steps
        self._startup_began = time.monotonic()
        self.last_record: dict[str, Any] = {}  # the latest training record
        self._run_dir = run_dir
        self._tail, self._probes, self._created_at = _Tail(run_dir / METRICS), _Tail(run_dir / PROBES), time.time()
        self._has_history = (run_dir / METRICS).exists()  # whether there may be records from before this start
        # Events that were printed or existed at the start. A file replaced after a restart or rollback repeats them.
        self._known_events = {_event_key(record) for record in _Tail(run_dir / METRICS).read()[0] if "event" in record}
        self.has_records = False  # whether records other than events were written since this start
        self._phases: list[PhaseConfig] = []
        self._wait_message = ""
        self.startup_stage = WORKERS
        self.bar = _make_bar(console)
        self._task = self.bar.add_task("", total=None)

    def poll(self) -> None:
        """Read new records; print evaluations, events and waits for nodes on separate lines; update the bar."""
        self._read()
        if not self.started_training:
            text = f"{self.startup_stage}, {clock(time.monotonic() - self._startup_began)}"
            self.bar.update(self._task, description=text)
            return
        total, done = self._work_of(self.total_steps), self._work_of(self.step)
        self.bar.update(self._task, total=total, completed=done, description="  ".join(self.parts()))

    def _read(self) -> None:
        self._print_wait()
        self._read_startup_stage()
        for record in self._probes.read()[0]:
            if record.get("time", 0.0) > self._created_at:
                self.console.print(_probe_line(record), markup=False)
        records, from_start = self._tail.read()
        if not records and not from_start:
            return
        # Records from before this start (or restart) are not shown.
        is_history = from_start and self._has_history
        self._has_history = True
        if is_history:
            self.last_record = {}
            self._show_startup()
        for record in records:
            if "event" in record:
                self._handle_event(record)
                continue
            self.has_records = self.has_records or not is_history
            self._handle_record(record)

    def _print_wait(self) -> None:
        message = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            message = json.loads((self._run_dir / "logs" / WAITING_FILE).read_text(encoding="utf-8"))["message"]
        if message and message != self._wait_message:
            self.console.print(f"  {message}", style="yellow", markup=False)
        self._wait_message = message

    def _read_startup_stage(self) -> None:
        if self.started_training:
            return
        try:
            self.startup_stage = (self._run_dir / _STAGE_FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            if self.startup_stage != WORKERS:
                self.startup_stage = STEPS

    def _show_startup(self) -> None:
        """Show startup stages until the next record."""
        self.has_records, self._startup_began = False, time.monotonic()
        self.bar.reset(self._task, total=None)

    def _handle_event(self, record: dict[str, Any]) -> None:
        if _event_key(record) in self._known_events:
            return
        self._known_events.add(_event_key(record))
        self.console.print(f"  step {record['step']:,}: {record['message']}", style="yellow", markup=False)
        if record["event"] == "resume":
            self._show_startup()
        elif record["event"] == "rollback":
            self.has_records = True  # training continues immediately

    def _handle_record(self, record: dict[str, Any]) -> None:
        if record.get("split") == "validation":
            if self.has_records:
                self.console.print(_evaluation_line(record, self.metrics), markup=False)
            return
        self.last_record = record

    @property
    def started_training(self) -> bool:
        """True if a training record was written since this start of the run."""
        return self.has_records and bool(self.last_record)

    @property
    def step(self) -> int:
        return self.last_record.get("step", 0)

    def parts(self) -> list[str]:
        """Return the parts of the live line, most important first."""
        record, seconds_left = self.last_record, self.bar.tasks[0].time_remaining
        live_metrics = metric_lines(record, {name: metric for name, metric in self.metrics.items() if metric.live})
        parts = [
            f"step {self.step:,}/{self.total_steps:,}",
            _format("loss {:.3f}", record.get("loss")),
            "" if seconds_left is None else f"{clock(seconds_left)} left",
            _format("{:,} skipped", record.get("skipped_steps") or None),
            *live_metrics[:1],
            _format("{:,.0f} tokens/s", record.get("tokens_per_second")),
            _format("{:.0%} MFU", record.get("mfu")),
            *live_metrics[1:],
            _format("stall {:.1%}", record.get("data_stall_fraction")),
        ]
        return [part for part in parts if part]

    def _work_of(self, step: int) -> float:
        return training_work(self._read_phases(), step)

    def _read_phases(self) -> list[PhaseConfig]:
        """Return the training phases; [] until the run's config exists."""
        if not self._phases:
            from pretrain.common.settings import read_values

            with contextlib.suppress(InputError):
                self._phases = phases_of(read_values(self._run_dir / "config.yaml"))
        return self._phases


def _event_key(event: dict[str, Any]) -> str:
    """Return a key that identifies an event in its run."""
    return json.dumps(event, sort_keys=True)


def _make_bar(console: Console) -> Progress:
    """Create the live line: a bar, which pulses during startup, and text, truncated to the terminal's width."""
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
    """Show the live line on a terminal; otherwise print a plain line for each startup stage and every 30 s."""
    console = progress.console
    printed_at, printed_step, printed_stage = time.monotonic(), 0, ""
    with progress.bar if console.is_terminal else contextlib.nullcontext():
        while True:
            is_final = stop.is_set()
            progress.poll()
            is_due = printed_step == 0 or is_final or time.monotonic() - printed_at >= _PLAIN_SECONDS
            if console.is_terminal:
                progress.bar.refresh()
            elif not progress.started_training:
                if progress.startup_stage != printed_stage:
                    printed_stage = progress.startup_stage
                    console.print(f"  {printed_stage}", markup=False)
            elif is_due and progress.step > printed_step:
                console.print("  ".join(progress.parts()), markup=False)
                printed_at, printed_step = time.monotonic(), progress.step
            if is_final:
                return
            stop.wait(_REFRESH_SECONDS)


def _format(template: str, value: float | None) -> str:
    return "" if value is None else template.format(value)


def _evaluation_line(record: dict[str, Any], metrics: Mapping[str, Metric]) -> str:
    """Return the line of an evaluation: the metrics of a pretraining, or the first few scores of a fine-tuning."""
    scores = metric_lines(record, metrics)
    if not scores:
        values = {key: value for key, value in record.items() if isinstance(value, float) and key != "seconds"}
        first_scores = list(shown_scores(values).items())[:_MAX_SCORES]
        scores = [f"{key.replace('_', ' ')} {value:.3f}" for key, value in first_scores]
    return _line(record, "held-out", *scores, "best" if record.get("best") else "")


def _probe_line(record: dict[str, Any]) -> str:
    skipped = record.get("skipped")
    skips = f"{counted(skipped, 'checkpoint')} skipped" if skipped else ""
    return _line(record, "probes", *metric_lines(record, PROBE_SCORES), skips, record.get("error", ""))


def _line(record: dict[str, Any], *parts: str) -> str:
    return "  ".join(part for part in (f"  step {record.get('step', 0):,} {parts[0]}", *parts[1:]) if part)
