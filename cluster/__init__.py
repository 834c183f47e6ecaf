"""Runs worker processes on this machine or on a Ray cluster. They call a function passed by its dotted name.

`cluster.workers.launch.run` starts workers through a child process, so the caller does not import `ray`.
The command `submit` calls `submit`. Importing this package loads nothing heavy.
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
    **job: Any,
) -> SubmittedJob:
    """Run a config as a job on a cluster, or continue its run there: `cluster.submit(pretrain.train, "my.yaml")`.

    `function` is `pretrain.train`, `pretrain.prepare` or `finetune.train`. `job` are options of
    `cluster.jobs.submission.make_job`; `cluster.jobs.client.JobsClient` explains the others.
    """
    from cluster.jobs.client import JobsClient
    from cluster.jobs.submission import make_job

    request = make_job(function, config, **job)
    return JobsClient(address, plain_http=plain_http).submit(request, wait_for_nodes=wait_for_nodes)
