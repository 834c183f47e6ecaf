"""A job as the cluster runs it: wait for its turn, then do what the command line would, always resuming.

Started by Ray as `python -m cluster.job`, with what `cluster.jobs` submitted in the environment.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.worker import change_folder
from pretrain.commands import exit_code
from pretrain.errors import InputError, MachineError, StoppedError

_POLL_SECONDS = 1.0
_SILENCE_SECONDS = 120.0  # of the cluster's head, while a job waits
_COMMANDS = {"pretrain": "pretrain", "prepare": "pretrain", "finetune": "finetune"}


def main() -> int:
    """Run the job to its end; the exit code is the command line's."""
    metadata = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]
    return exit_code(lambda: _run(metadata))


def _run(metadata: Mapping[str, str]) -> int:
    change_folder(metadata["folder"], "Submit with --dir and a folder")
    kind, name, config = metadata["bertrain"], metadata["job_submission_id"], json.loads(metadata["config"])
    if kind != "prepare":
        _await_turn(name)
    config["scheduling"]["address"] = os.environ["RAY_ADDRESS"]
    command = importlib.import_module(f"{_COMMANDS[kind]}.__main__")
    with tempfile.TemporaryDirectory(prefix="bertrain-job-") as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        return command.main([kind, str(path), *([] if kind == "prepare" else ["--resume"])])


def _await_turn(name: str) -> None:
    """Return when all jobs submitted before this one that have not ended leave room for it.

    So jobs begin in the order of their submission and none starves. Ray keeps the jobs and their needs; where room is,
    Ray decides.
    """
    from cluster import jobs

    known = jobs.Jobs(_dashboard(), plain_http=True)  # within the cluster
    stopped: list[int] = []
    heard = time.monotonic()
    before = signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    told = ""
    try:
        while True:
            ahead: list[str] | None = None
            try:
                ahead, heard = _ahead(known, name), time.monotonic()
            except MachineError:  # a head that is away for a while
                if time.monotonic() - heard > _SILENCE_SECONDS:
                    raise
            if stopped:
                raise StoppedError(
                    f"{name}: stopped while it waited for {told or 'its turn'}; nothing was begun."
                )
            if ahead == []:
                return
            if ahead and told != (told := ", ".join(ahead)):
                print(f"{name}: waits for {told}", flush=True)
            time.sleep(_POLL_SECONDS)
    finally:
        signal.signal(signal.SIGTERM, before)


def _ahead(known: Any, name: str) -> list[str]:
    """The jobs that this one has to wait for; [] when it may begin."""
    from cluster import jobs

    active = [
        job for job in known.all() if job.status not in jobs.ENDED and "workers" in (job.metadata or {})
    ]
    names = [job.submission_id for job in active]
    if name not in names:
        raise InputError(f"{name}: Ray knows no such job.")
    earlier = active[: names.index(name)]
    if not earlier:
        return []
    nodes = [node["resources_total"] for node in jobs.nodes_of(known.address)]
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    room = gpus or sum(int(node.get("CPU", 0)) for node in nodes)

    def need(job: Any, which: str) -> int:
        workers, cpus = int(job.metadata[which]), int(job.metadata["cpus_per_worker"])
        if gpus:
            return workers
        return workers * cpus if cpus else room  # unnamed: all there are, shared out

    # Those before it have, or will take, as many as they may; it can begin with the fewest.
    taken = sum(need(job, "most_workers") for job in earlier)
    fits = taken + need(active[names.index(name)], "workers") <= room
    return [] if fits else [str(job.submission_id) for job in earlier]


def _dashboard() -> str:
    """URL of the dashboard of the cluster that this job runs on."""
    from ray.dashboard.utils import ray_address_to_api_server_url

    return ray_address_to_api_server_url(os.environ["RAY_ADDRESS"])


if __name__ == "__main__":
    sys.exit(main())
