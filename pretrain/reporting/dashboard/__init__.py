"""The dashboard of a run: one list of panels, as a W&B workspace and as an HTML page that needs no account."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from pretrain.common.errors import InputError
from pretrain.reporting.dashboard import page, workspace
from pretrain.reporting.dashboard.runs import UNFINISHED, RunRecords, find_folder, no_job, read_runs

_FOLLOW_SECONDS = 10


def write_dashboard(
    name: str,
    out: Path | None = None,
    *,
    follow: bool = False,
    address: str = "",
    find_job: Callable[[str, str], Path | None] = no_job,
) -> str:
    """Write the HTML page of one or several runs to `out` and the W&B workspace next to it; returns a message.

    Args:
        name: a run folder, a folder of runs, a run's name or a job's name (`runs.find_folder`).
        out: the HTML file; None means dashboard.html in the run folder.
        follow: rewrite the page every 10 s, and let the browser reload it, until all runs have ended.
        address: URL of the cluster of a job.
        find_job: the run folder of a job, by its name and `address`; None if there is no such job.

    Raises:
        InputError: there is no such run, it has no record, or `out` ends in .json.
    """
    folder = find_folder(name, address, find_job)
    out = out or folder / "dashboard.html"
    if out.suffix == ".json":
        raise InputError(f"{out}: the workspace is written to this file. Choose a name that ends in .html.")
    runs = read_runs(folder)
    following = follow and not _all_ended(runs)
    page.write(folder, runs, out, refresh_seconds=_FOLLOW_SECONDS if following else 0)
    message = f"{workspace.write(runs, out.with_suffix('.json'))}\n{out.resolve().as_uri()}"
    if not following:
        return message
    print(f"{message}\nUpdating the page every {_FOLLOW_SECONDS} s; Ctrl-C stops.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while not _all_ended(runs):
            time.sleep(_FOLLOW_SECONDS)
            runs = read_runs(folder)
            page.write(folder, runs, out, refresh_seconds=0 if _all_ended(runs) else _FOLLOW_SECONDS)
    return f"{out}: {'all runs have ended' if _all_ended(runs) else 'no longer updated'}"


def _all_ended(runs: list[RunRecords]) -> bool:
    return all(run.state != UNFINISHED for run in runs)
