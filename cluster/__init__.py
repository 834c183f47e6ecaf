"""Runs a function, given by its dotted name, in worker processes on this machine or on a Ray cluster.

`cluster.workers.launch.run` starts the workers through a child process, so the caller does not import `ray`.
`submit` does the same as the command `submit`. Importing the package imports no large library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.jobs.client import SubmittedJob


def submit(
    function: Callable[..., Any],
    config: Any,
    *,
    address: str = "",
    wait_for_nodes: bool = False,
    plain_http: bool = False,
    **job_options: Any,
) -> SubmittedJob:
    """Run a config as a job on a cluster, or continue its run: `cluster.submit(pretrain.train, "my.yaml")`.

    `function` is `pretrain.train`, `pretrain.prepare` or `finetune.train`. `job_options` are passed to
    `cluster.jobs.submission.make_job`; `cluster.jobs.client.JobsClient` explains the other parameters.
    """
    from cluster.jobs.client import JobsClient
    from cluster.jobs.submission import make_job

    job = make_job(function, config, **job_options)
    return JobsClient(address, plain_http=plain_http).submit(job, wait_for_nodes=wait_for_nodes)
