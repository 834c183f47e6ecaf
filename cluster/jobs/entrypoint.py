"""A job as the cluster runs it: wait in the queue, then call what the command line would, always resuming.

Ray starts it as `python -m cluster.jobs.entrypoint`, with what `cluster.jobs.client` submitted in the environment.
"""

import json
import os
import sys
from collections.abc import Mapping

from cluster.jobs.job_queue import DONE, wait_in_queue
from cluster.workers.target import change_folder, resolve
from pretrain.common.addresses import RUNS_VARIABLE
from pretrain.common.commands import exit_code


def main() -> int:
    """Run the job; the exit code is that of the command."""
    metadata = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]
    return exit_code(lambda: run(metadata), ends_process=True)


def run(metadata: Mapping[str, str]) -> None:
    change_folder(metadata["folder"], "Submit with --dir and a folder")
    name, config = metadata["job_submission_id"], json.loads(metadata["config"])
    if "runs" in metadata and not os.environ.get(RUNS_VARIABLE):  # the cluster's own folder is preferred
        os.environ[RUNS_VARIABLE] = metadata["runs"]
    if "resumes" in metadata:
        wait_in_queue(name)
    config["scheduling"]["address"] = os.environ["RAY_ADDRESS"]
    print(resolve(metadata["target"])(config, **({"resume": True} if "resumes" in metadata else {})))
    if "resumes" in metadata:
        print(f"{name}: {DONE}")


if __name__ == "__main__":
    sys.exit(main())
