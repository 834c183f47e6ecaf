"""A job's process on the cluster: calls the function of the job's command. A training waits in the queue first.

Ray starts it as `bertrain job`, with the metadata from `cluster.jobs.client` in the environment.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from cluster.jobs.job_queue import DONE, wait_in_queue
from cluster.workers.target import change_folder
from pretrain.common.addresses import RUNS_VARIABLE


def run(load_functions: Callable[[], Mapping[str, Callable[..., Any]]]) -> None:
    """Run the job. `load_functions` returns {command: function}; it is called late, since its imports are slow."""
    metadata = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]
    change_folder(metadata["folder"], "Submit with --dir and a folder")
    name, config = metadata["job_submission_id"], json.loads(metadata["config"])
    if "runs" in metadata and not os.environ.get(RUNS_VARIABLE):  # a folder that the cluster sets takes precedence
        os.environ[RUNS_VARIABLE] = metadata["runs"]
    if "resumes" in metadata:
        wait_in_queue(name)
    config["scheduling"]["address"] = os.environ["RAY_ADDRESS"]
    print(load_functions()[metadata["bertrain"]](config, **({"resume": True} if "resumes" in metadata else {})))
    if "resumes" in metadata:
        print(f"{name}: {DONE}")
