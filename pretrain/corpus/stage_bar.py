"""Progress bars for the stages of preparation on stderr, with rate and remaining time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from pretrain.common.wording import make_console

_SETTLING_SECONDS = 1.0  # minimum duration of a stage before its rate is shown


class _Size(DownloadColumn):
    """Column with the bytes processed and, if known, the total."""

    def render(self, task: Task) -> Text:
        if task.fields["total_known"]:
            return super().render(task)
        done = task.fields["done"]
        return Text(decimal(done) if done else "", style="progress.download")


class _Rate(ProgressColumn):
    """Column with the bytes per second since the start of the stage."""

    def render(self, task: Task) -> Text:
        seconds = task.finished_time if task.finished_time is not None else task.elapsed or 0.0
        done = task.fields["done"]
        is_known = done and seconds >= _SETTLING_SECONDS
        return Text(f"{decimal(int(done / seconds))}/s" if is_known else "", style="progress.data.speed")


class StageBar:
    """A progress bar for each stage."""

    def __init__(self, *, quiet: bool) -> None:
        self.progress = Progress(
            TextColumn("{task.description:24}"),
            BarColumn(),
            _Size(),
            _Rate(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=make_console(stderr=True),
            disable=quiet,
        )

    def __enter__(self) -> StageBar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        for task in self.progress.task_ids:  # so that the bar can be started again
            self.progress.remove_task(task)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.progress.console.print(text, highlight=False, markup=False)

    @contextlib.contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar for `total` bytes, 0 if unknown; yield a function to call with the number of bytes processed."""
        task = self.progress.add_task(name, total=total or None, total_known=total > 0, done=0)
        done = 0

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            self.progress.update(task, advance=amount, done=done)

        yield advance
        self.progress.update(task, total=max(total, 1), completed=max(total, 1))
