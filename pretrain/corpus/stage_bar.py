"""Progress of the stages of preparation on stderr, with rate and time left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class StageBar:
    """A bar for each stage."""

    def __init__(self, *, quiet: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description:24}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
            disable=quiet,
        )

    def __enter__(self) -> StageBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._progress.console.print(text, highlight=False, markup=False)

    @contextlib.contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar over `total` bytes; yields a function to call with the bytes done."""
        task = self._progress.add_task(name, total=total or None)
        yield lambda amount: self._progress.update(task, advance=amount)
        self._progress.update(task, total=max(total, 1), completed=max(total, 1))
