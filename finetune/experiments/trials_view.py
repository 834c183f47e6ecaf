"""How several runs go, on the terminal: a line for each that has ended, and a live one for what runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.tracking.live import clock
from pretrain.tracking.records import METRICS, is_training, parse_record

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from finetune.experiments.trials import Outcome

_PLAIN_SECONDS = 60.0  # between two lines of progress where there is no terminal
_SHOWN = 4  # scores on a run's line


class View:
    """Lines for the ends of runs, and a live line while entered; where stdout is no terminal, a line a minute.

    Args:
        runs: label, folder, examples to see and steps of every run.
        pending: numbers of those that are run now.
        stop_file: its existence says that a stop was asked for.
    """

    def __init__(
        self,
        runs: Sequence[tuple[str, Path, int, int]],
        pending: Sequence[int],
        stop_file: Path,
        console: Console | None = None,
    ) -> None:
        from rich.console import Console as RichConsole

        self._console = console or RichConsole(highlight=False, markup=False, soft_wrap=True)
        self._runs, self._stop_file = runs, stop_file
        self._running: dict[int, float] = {}  # number -> clock at its start
        self._left = list(pending)
        self._ended, self._failed = len(runs) - len(pending), 0
        self._said = time.monotonic()
        self._live: Live | None = None
        # What was done in earlier calls says nothing of the pace.
        self._before = {number: self._seen(number) for number in pending}
        self._done = 0.0  # examples seen by runs of this call that have ended
        self._first: tuple[float, float] | None = None  # (clock, examples seen) when some were first heard of

    def __enter__(self) -> View:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, number: int, again: bool) -> None:
        if again:
            self._console.print(f"  {self._runs[number][0]}  crashed, starting it again", style="yellow")
        self._running.setdefault(number, time.monotonic())

    def stopped(self, number: int) -> None:
        self._running.pop(number, None)
        self._console.print(f"  {self._runs[number][0]}  stopped; the same command goes on", style="yellow")

    def ended(self, number: int, outcome: Outcome | None) -> None:
        seconds = time.monotonic() - self._running.pop(number, time.monotonic())
        self._left.remove(number)
        self._ended += 1
        if outcome is None or outcome.error is not None:
            self._failed += 1
        else:
            self._done += self._runs[number][2] - self._before[number]
        self._console.print(outcome_line(self._runs[number][0], outcome, seconds))

    def draw(self) -> None:
        """Show the state of now; cheap enough for four times a second."""
        if self._live is not None:
            self._live.update(self._line(), refresh=True)
        elif time.monotonic() - self._said >= _PLAIN_SECONDS:
            self._console.print(self._line())
            self._said = time.monotonic()

    def seconds_left(self) -> float | None:
        """By the examples seen a second since they were first heard of; None until that can be said."""
        seen = {number: self._seen(number) for number in self._left}
        done = self._done + sum(seen[number] - self._before[number] for number in self._left)
        if done <= 0:
            return None
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        began, at_first = self._first
        if done <= at_first:
            return None
        left = sum(self._runs[number][2] - seen[number] for number in self._left)
        return left * (now - began) / (done - at_first)

    def _seen(self, number: int) -> float:
        _, folder, examples, steps = self._runs[number]
        return examples * _last_record(folder).get("step", 0) / max(1, steps)

    def _line(self) -> Text:
        from rich.text import Text

        pieces = [f"{self._ended} of {len(self._runs)} done"]
        pieces += [f"{self._failed} failed"] if self._failed else []
        pieces += [self._running_piece(number) for number in self._running] or ["starting"]
        if self._stop_file.exists():
            return Text("  " + " · ".join([*pieces, "stopping"]), style="yellow", no_wrap=True, overflow="ellipsis")
        left = self.seconds_left()
        pieces += [] if left is None else [f"{clock(left)} left"]
        return Text("  " + " · ".join(pieces), style="cyan", no_wrap=True, overflow="ellipsis")

    def _running_piece(self, number: int) -> str:
        label, folder, _, steps = self._runs[number]
        last = _last_record(folder)
        if not last:
            return f"{label}: starting"
        loss = f", loss {last['loss']:.3f}" if isinstance(last.get("loss"), float) else ""
        return f"{label}: step {last.get('step', 0):,}/{steps:,}{loss}"


def outcome_line(label: str, outcome: Outcome | None, seconds: float) -> Text:
    """How a run ended, in a line: its scores, or the reason."""
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
    """The newest training record of a run; {} without one."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, (folder / METRICS).stat().st_size - 8192))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        record = parse_record(line)  # None where it is torn, or cut by the seek
        if record is not None and is_training(record):
            return record
    return {}
