"""Shows a run's progress on the terminal, read from its metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common.errors import InputError
from pretrain.common.records import NO_METRICS, Metric, metric_lines, metrics_of, parse_record
from pretrain.common.run_files import METRICS, PROBES
from pretrain.common.wording import clock, counted, make_console, shown_scores
from pretrain.common.worker import WAITING_FILE
from pretrain.tracking import starting
from pretrain.tracking.events import PROBE_SCORES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from pretrain.config import PhaseConfig

_REFRESH_SECONDS = 0.25
_PLAIN_SECONDS = 30.0
_SETTLING_SECONDS = 2.0  # a shorter time span gives no reliable speed


@contextlib.contextmanager
def follow(
    run_dir: Path, total_steps: int, console: Console | None = None, metrics: Mapping[str, Metric] = NO_METRICS
) -> Iterator[None]:
    """Show the run's progress on the terminal while the block runs.

    `metrics` says how those of a pretraining are shown; a fine-tuning has scores.

    One live line shows step, loss, accuracy, useful tokens/s, MFU, data stalls and time left. Evaluations are printed
    above it. Before the first record, the line shows the phase of the start. If stdout is not a terminal, a plain line
    is printed for each phase of the start, and then every 30 s.
    """
    console = console or make_console(highlight=False, soft_wrap=True)
    starting.end_phases(run_dir)  # a killed start leaves its phase
    progress = LiveProgress(run_dir, total_steps, console, metrics)
    progress.poll()  # existing records belong to earlier starts of the run
    stop = threading.Event()
    draw = _draw_live if console.is_terminal else _print_plain
    thread = threading.Thread(target=draw, args=(progress, stop), name="follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def phases_of(config: Mapping[str, Any]) -> list[PhaseConfig]:
    """The phases of a run's config.yaml; [] if there are none or some are damaged."""
    from pretrain.config import PhaseConfig

    try:
        return [PhaseConfig.model_validate(phase) for phase in config["phases"]]
    except (KeyError, TypeError, ValueError):
        return []


def work(phases: Iterable[PhaseConfig], step: int) -> float:
    """Work of the first `step` steps: an upper bound in tokens, or the steps if the phases are unknown."""
    tokens = 0.0
    for phase in phases:
        done = min(step, phase.steps)
        tokens += phase.first_sample(done) * phase.sequence_length
        step -= done
    return tokens or float(step)


class _Tail:
    """Reads the records appended to metrics.jsonl since the last read; notices if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(complete new records, whether the file was replaced or is read for the first time)."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                fresh = status.st_ino != self._inode or status.st_size < self._offset
                start = 0 if fresh else self._offset
                file.seek(start)
                data = file.read()
        except OSError:  # not there yet, or storage that fails for a moment: the next poll reads from here
            return [], False
        whole = data[: data.rfind(b"\n") + 1]
        self._inode, self._offset = status.st_ino, start + len(whole)
        return [record for line in whole.splitlines() if (record := parse_record(line)) is not None], fresh


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
        self._tail, self._probes, self._began = _Tail(run_dir / METRICS), _Tail(run_dir / PROBES), time.time()
        self._old_file = (run_dir / METRICS).exists()
        # Events of the file so far: a restart and a rollback replace the file and keep them.
        self._known_events = {_key(record) for record in _Tail(run_dir / METRICS).read()[0] if "event" in record}
        # Whether records of this start have arrived, other than events.
        self.has_news = False
        # (clock, work done) of recent records, for the time left.
        self._pace: deque[tuple[float, float]] = deque(maxlen=60)
        self._best = math.inf
        self._phases: list[PhaseConfig] = []
        self._waiting = ""
        self.phase_of_start = starting.WORKERS

    def poll(self) -> None:
        """Read new records; print evaluations, events and waits for nodes on separate lines."""
        self._print_wait()
        self._read_start()
        for record in self._probes.read()[0]:
            if record.get("time", 0.0) > self._began:
                self.console.print(_probe_line(record))
        records, fresh = self._tail.read()
        if not records and not fresh:
            return
        # Records from before this start (or restart) are history, not news.
        history = fresh and self._old_file
        self._old_file = True
        if history:
            self.last, self._best = {}, math.inf
            self._start_again()
        for record in records:
            if "event" in record:
                self._take_event(record)
                continue
            self.has_news = self.has_news or not history
            self._take(record)

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
        phase = starting.read_phase(self._run_dir)
        if phase:
            self.phase_of_start = phase
        elif self.phase_of_start != starting.WORKERS:
            self.phase_of_start = starting.STEPS

    def _start_again(self) -> None:
        """Show the phases of a start until the next record."""
        self.has_news, self.started = False, time.monotonic()
        self._pace.clear()

    def _take_event(self, record: dict[str, Any]) -> None:
        if _key(record) in self._known_events:
            return
        self._known_events.add(_key(record))
        self.console.print(f"  step {record['step']:,}: {record['message']}", style="yellow", markup=False)
        if record["event"] == "resume":
            self._start_again()
        elif record["event"] == "rollback":
            self.has_news = True  # training goes on at once

    def _take(self, record: dict[str, Any]) -> None:
        if record.get("split") == "validation":
            loss = record.get("loss")
            best = record.get("best", loss is not None and loss < self._best)
            self._best = loss if best and loss is not None else self._best
            if self.has_news:
                self.console.print(_evaluation_line(record, self.metrics, best))
            return
        self.last = record
        if self.has_news:
            self._pace.append((time.monotonic(), self._work(self.step)))

    def live_metrics(self) -> list[tuple[str, Metric]]:
        return [(name, metric) for name, metric in self.metrics.items() if metric.live]

    @property
    def started_training(self) -> bool:
        """Whether this start has written a record."""
        return self.has_news and bool(self.last)

    @property
    def step(self) -> int:
        return self.last.get("step", 0)

    def seconds_left(self) -> float | None:
        """Estimated from the speed of recent records and the tokens of later phases. None until it is known."""
        if len(self._pace) < 2:
            return None
        (before, first), (now, last) = self._pace[0], self._pace[-1]
        if last <= first or now - before < _SETTLING_SECONDS:
            return None
        left = (self._work(self.total_steps) - last) * (now - before) / (last - first)
        return max(0.0, left - (time.monotonic() - now))

    def phase(self) -> str:
        """Number and sequence length of the phase, such as `phase 1/2 (128)`; "" if there is only one phase."""
        phases = self._read_phases()
        step = self.step
        for number, phase in enumerate(phases, 1):
            if step <= phase.steps or number == len(phases):
                return f"phase {number}/{len(phases)} ({phase.sequence_length})" if len(phases) > 1 else ""
            step -= phase.steps
        return ""

    def _work(self, step: int) -> float:
        return work(self._read_phases(), step)

    def _read_phases(self) -> list[PhaseConfig]:
        """The phases; [] until the run's config exists."""
        if not self._phases:
            from pretrain.common.settings import read_values

            with contextlib.suppress(InputError):
                self._phases = phases_of(read_values(self._run_dir / "config.yaml"))
        return self._phases


def _key(event: dict[str, Any]) -> str:
    """Distinguishes an event from the others of its run."""
    return json.dumps(event, sort_keys=True)


def _draw_live(progress: LiveProgress, stop: threading.Event) -> None:
    from rich.live import Live

    with Live(console=progress.console, auto_refresh=False) as live:
        while True:
            final = stop.is_set()
            progress.poll()
            live.update(live_line(progress, progress.console.width), refresh=True)
            if final:
                return
            stop.wait(_REFRESH_SECONDS)


def _print_plain(progress: LiveProgress, stop: threading.Event) -> None:
    printed_at, printed_step, printed_phase = time.monotonic(), 0, ""
    while True:
        final = stop.is_set()
        progress.poll()
        if progress.phase_of_start != printed_phase and not progress.started_training:
            printed_phase = progress.phase_of_start
            progress.console.print(f"  {printed_phase}", style="dim", markup=False)
        due = printed_step == 0 or final or time.monotonic() - printed_at >= _PLAIN_SECONDS
        if due and progress.started_training and progress.step > printed_step:
            progress.console.print("  ".join(_pieces(progress).values()))
            printed_at, printed_step = time.monotonic(), progress.step
        if final:
            return
        stop.wait(_REFRESH_SECONDS)


def _pieces(progress: LiveProgress) -> dict[str, str]:
    """The parts of the line in display order; empty parts are left out."""
    last = progress.last
    left = progress.seconds_left()
    pieces = {
        "phase": progress.phase(),
        "step": f"step {progress.step:,}/{progress.total_steps:,}",
        "loss": _piece(last.get("loss"), "loss {:.3f}"),
        **{name: metric.line(last[name]) for name, metric in progress.live_metrics() if last.get(name) is not None},
        "speed": _piece(last.get("tokens_per_second"), "{:,.0f} tokens/s"),
        "mfu": _piece(last.get("mfu"), "{:.0%} MFU"),
        "stall": _piece(last.get("data_stall_fraction"), "stall {:.1%}"),
        "skipped": _piece(last.get("skipped_steps") or None, "{:,} skipped"),
        "left": "" if left is None else f"{clock(left)} left",
    }
    return {key: text for key, text in pieces.items() if text}


def _piece(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


# In order of importance: on a narrow terminal the last ones are left out first. The first metric stands before the
# others.
_PRIORITY, _LATER, _LAST = ("step", "loss", "left", "skipped", "speed"), ("mfu", "phase"), ("stall",)
_STYLES = {
    "loss": "bold",
    "speed": "cyan",
    "mfu": "cyan",
    "skipped": "yellow",
    "left": "magenta",
}


def live_line(progress: LiveProgress, width: int) -> Text:
    """The line that a terminal shows, of at most `width` columns."""
    from rich.text import Text

    if not progress.started_training:
        spin = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[int(time.monotonic() / _REFRESH_SECONDS) % 10]
        return Text(f"{spin} {progress.phase_of_start}, {clock(time.monotonic() - progress.started)}", style="dim")
    pieces = _pieces(progress)
    measured = [name for name, _ in progress.live_metrics()]
    shown: set[str] = set()
    bar_width = max(0, min(24, width // 6))
    width_left = width - 1 - bar_width - 2
    first, others = measured[:1], measured[1:]
    for key in (*_PRIORITY, *first, *_LATER, *others, *_LAST):
        if key in pieces and len(pieces[key]) + 2 <= width_left:
            shown.add(key)
            width_left -= len(pieces[key]) + 2
    line = Text(no_wrap=True, overflow="crop")
    line.append_text(_bar(progress.step / max(1, progress.total_steps), bar_width)).append("  ")
    for key, text in pieces.items():
        if key in shown:
            line.append(text, style=_STYLES.get(key, "green" if key in measured else "")).append("  ")
    return line


def _bar(share: float, width: int) -> Text:
    from rich.text import Text

    full = round(min(1.0, share) * width)
    return Text("━" * full, style="cyan").append("━" * (width - full), style="bright_black")


def _evaluation_line(record: dict[str, Any], metrics: Mapping[str, Metric], best: bool) -> Text:
    from rich.text import Text

    line = Text(f"  step {record.get('step', 0):,} held-out", style="dim", no_wrap=True, overflow="crop")
    for score in _shown_scores(record, metrics):
        line.append("  ").append(score, style="default not dim bold")
    return line.append("  best" if best else "", style="default not dim green")


def _probe_line(record: dict[str, Any]) -> Text:
    from rich.text import Text

    line = Text(f"  step {record.get('step', 0):,} probes", style="dim")
    for score in metric_lines(record, metrics_of(record, PROBE_SCORES)):
        line.append("  ").append(score, style="default not dim bold")
    if skipped := record.get("skipped"):
        line.append(f"  {counted(skipped, 'checkpoint')} skipped")
    return line.append(f"  {record['error']}" if "error" in record else "", style="default not dim yellow")


_MOST_SCORES = 4


def _shown_scores(record: dict[str, Any], metrics: Mapping[str, Metric]) -> list[str]:
    """The metrics of an evaluation of pretraining, or the first few scores of another task."""
    if known := metric_lines(record, metrics):
        return known
    others = shown_scores(
        {key: value for key, value in record.items() if isinstance(value, float) and key != "seconds"}
    )
    return [f"{key.replace('_', ' ')} {value:.3f}" for key, value in list(others.items())[:_MOST_SCORES]]
