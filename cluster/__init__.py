"""Run worker processes on this machine or on a Ray cluster. The function they call is passed by its dotted name.

Workers are started with `cluster.workers.launch.run`, which does not import `ray` itself: a child process does.
The command `submit` calls `submit`. Importing the package loads nothing heavy.
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
    `cluster.jobs.submission.make_job`, the others are options of `cluster.jobs.client.Jobs`.
    """
    from cluster.jobs.client import Jobs
    from cluster.jobs.submission import make_job

    request = make_job(function, config, **job)
    return Jobs(address, plain_http=plain_http).submit(request, wait_for_nodes=wait_for_nodes)
