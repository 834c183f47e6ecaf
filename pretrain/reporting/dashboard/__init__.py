"""The dashboard of a run: one list of panels, shown by W&B and by an HTML page that needs no account."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from pretrain.common.errors import InputError
from pretrain.reporting.dashboard import page, workspace
from pretrain.reporting.dashboard.runs import RunRecords, find_folder, read_runs

_FOLLOW_SECONDS = 10


def write_dashboard(
    name: str, out: Path | None = None, *, follow: bool = False, address: str = "", plain_http: bool = False
) -> str:
    """Write the page of the run or runs `name` to `out`, and the W&B workspace beside it; returns what to tell.

    `name` is a run folder, a run's name, or a job's (see `runs.find_folder`, also for `address` and `plain_http`).

    With `follow` the page is written anew every 10 s and a browser loads it anew, until all runs are over.

    Raises `InputError` where there is no such run, it has no record, or `out` ends in .json.
    """
    folder = find_folder(name, address, plain_http=plain_http)
    out = out or folder / "dashboard.html"
    if out.suffix == ".json":
        raise InputError(f"{out}: is where the workspace goes. Name the page something.html.")
    runs = read_runs(folder)
    following = follow and not _over(runs)
    page.write(folder, runs, out, refresh_seconds=_FOLLOW_SECONDS if following else 0)
    said = workspace.write(runs, out.with_suffix(".json"))
    said = f"{said}\n{out.resolve().as_uri()}"
    if not following:
        return said
    print(f"{said}\nWritten anew every {_FOLLOW_SECONDS} s; Ctrl-C ends this.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while not _over(runs):
            time.sleep(_FOLLOW_SECONDS)
            runs = read_runs(folder)
            page.write(folder, runs, out, refresh_seconds=0 if _over(runs) else _FOLLOW_SECONDS)
    return f"{out}: {'all is over' if _over(runs) else 'written no more'}"


def _over(runs: list[RunRecords]) -> bool:
    return all(run.state != "not finished" for run in runs)
