"""Progress of several runs on the terminal: a line for each finished run, and a live one for those running."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.experiments.outcomes import Outcome
from pretrain.common.records import is_training, parse_record
from pretrain.common.run_files import METRICS
from pretrain.common.wording import clock, make_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

PLAIN_SECONDS = 60.0  # between two lines of progress without a terminal
_SHOWN = 4  # scores on a run's line


class TrialLine(NamedTuple):
    """What the terminal shows of a trial."""

    label: str
    folder: Path
    examples: int  # to see, over all epochs
    steps: int


class TrialsView:
    """Lines for finished trials, and a live line while entered; without a terminal, a line a minute.

    Args:
        trials: all trials.
        pending: numbers of those that run now.
        stop_file: exists once a stop was requested.
    """

    def __init__(
        self,
        trials: Sequence[TrialLine],
        pending: Sequence[int],
        stop_file: Path,
        console: Console | None = None,
    ) -> None:
        self._console = console or make_console(highlight=False, markup=False, soft_wrap=True)
        self._trials, self._stop_file = trials, stop_file
        self._running: dict[int, float] = {}  # number -> clock at its start
        self._left = list(pending)
        self._ended, self._failed = len(trials) - len(pending), 0
        self._printed = time.monotonic()
        self._live: Live | None = None
        # Progress of earlier calls does not count for the speed.
        self._before = {number: self._seen(number) for number in pending}
        self._done = 0.0  # examples that trials which have ended saw in this call
        self._first: tuple[float, float] | None = None  # (clock, examples seen) at the first progress

    def __enter__(self) -> TrialsView:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, number: int, again: bool) -> None:
        """Trial `number` has started; `again`: after a crash."""
        if again:
            self._console.print(f"  {self._trials[number].label}  crashed, restarting", style="yellow")
        self._running.setdefault(number, time.monotonic())

    def stopped(self, number: int) -> None:
        """Trial `number` has stopped at a user's request."""
        self._running.pop(number, None)
        self._console.print(f"  {self._trials[number].label}  stopped; the same command continues", style="yellow")

    def ended(self, number: int, outcome: Outcome | None) -> None:
        """Trial `number` has finished or failed."""
        seconds = time.monotonic() - self._running.pop(number, time.monotonic())
        self._left.remove(number)
        self._ended += 1
        failed = outcome is None or outcome.error is not None
        self._failed += failed
        seen = self._seen(number) if failed else self._trials[number].examples
        self._done += seen - self._before[number]
        self._console.print(outcome_line(self._trials[number].label, outcome, seconds))

    def draw(self) -> None:
        """Show the current state; cheap enough for four calls a second."""
        if self._live is not None:
            self._live.update(self._line(), refresh=True)
        elif time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._console.print(self._line())
            self._printed = time.monotonic()

    def seconds_left(self) -> float | None:
        """From the examples seen per second since the first progress; None until there is some."""
        seen = {number: self._seen(number) for number in self._left}
        done = self._done + sum(seen[number] - self._before[number] for number in self._left)
        if done <= 0:
            return None
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        start, at_first = self._first
        if done <= at_first:
            return None
        left = sum(max(0.0, self._trials[number].examples - seen[number]) for number in self._left)
        return left * (now - start) / (done - at_first)

    def _seen(self, number: int) -> float:
        trial = self._trials[number]
        return trial.examples * _last_record(trial.folder).get("step", 0) / max(1, trial.steps)

    def _line(self) -> Text:
        from rich.text import Text

        pieces = [f"{self._ended} of {len(self._trials)} done"]
        pieces += [f"{self._failed} failed"] if self._failed else []
        pieces += [self._running_piece(number) for number in self._running] or ["starting"]
        if self._stop_file.exists():
            return Text("  " + " · ".join([*pieces, "stopping"]), style="yellow", no_wrap=True, overflow="ellipsis")
        left = self.seconds_left()
        pieces += [] if left is None else [f"{clock(left)} left"]
        return Text("  " + " · ".join(pieces), style="cyan", no_wrap=True, overflow="ellipsis")

    def _running_piece(self, number: int) -> str:
        trial = self._trials[number]
        last = _last_record(trial.folder)
        if not last:
            return f"{trial.label}: starting"
        loss = f", loss {last['loss']:.3f}" if isinstance(last.get("loss"), float) else ""
        return f"{trial.label}: step {last.get('step', 0):,}/{trial.steps:,}{loss}"


def outcome_line(label: str, outcome: Outcome | None, seconds: float) -> Text:
    """A line with the scores of a run, or the reason why it failed."""
    from rich.text import Text

    if outcome is None or outcome.error is not None:
        reason = " ".join(str(outcome.error if outcome else "").split())
        return Text(f"  {label}  failed: {reason}", style="red")
    line = Text(f"  {label}")
    for part, scores in outcome.scores.items():
        names = [outcome.metric, *(name for name in scores if name not in (outcome.metric, "loss"))]
        shown = "  ".join(f"{name} {scores[name]:.4f}" for name in names[:_SHOWN] if name in scores)
        line.append(f"  {part + ': ' if len(outcome.scores) > 1 else ''}{shown}")
    line.append(f"  {clock(seconds)}", style="dim")
    return line.append(f"  {outcome.degenerate}", style="yellow") if outcome.degenerate else line


def _last_record(folder: Path) -> dict[str, Any]:
    """The newest training record of a run; {} if there is none."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, (folder / METRICS).stat().st_size - 8192))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        record = parse_record(line)  # None if it is incomplete
        if record is not None and is_training(record):
            return record
    return {}
