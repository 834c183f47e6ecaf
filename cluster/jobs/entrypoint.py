"""A job as the cluster runs it: wait in the queue, then do what the command line would, always resuming.

Ray starts it as `python -m cluster.jobs.entrypoint`, with what `cluster.jobs.client` submitted in the environment.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping

from cluster.jobs.job_queue import wait_in_queue
from cluster.workers.target import change_folder
from pretrain.common.addresses import RUNS_VARIABLE
from pretrain.common.commands import exit_code


def main() -> int:
    """Run the job; the exit code is the command line's."""
    metadata = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]
    return exit_code(lambda: _run(metadata))


def _run(metadata: Mapping[str, str]) -> int:
    change_folder(metadata["folder"], "Submit with --dir and a folder")
    kind, name, config = metadata["bertrain"], metadata["job_submission_id"], json.loads(metadata["config"])
    if "runs" in metadata and not os.environ.get(RUNS_VARIABLE):  # the cluster's own folder is preferred
        os.environ[RUNS_VARIABLE] = metadata["runs"]
    if kind != "prepare":
        wait_in_queue(name)
    config["scheduling"]["address"] = os.environ["RAY_ADDRESS"]
    command = importlib.import_module(metadata["module"])
    # In memory: a job that is killed leaves no file behind.
    with os.fdopen(os.memfd_create(f"{name}.yaml"), "w", encoding="utf-8") as file:
        file.write(json.dumps(config))  # JSON is YAML
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"
        return command.main([kind, path, *([] if kind == "prepare" else ["--resume"])])


if __name__ == "__main__":
    sys.exit(main())
