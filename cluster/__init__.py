"""Runs workers on this machine or on a Ray cluster. It knows their work only as a dotted name.

Workers are started with `cluster.workers.launch.run`, which does not import `ray` itself: a child process does.
`submit` is what the command of this name calls. Importing the package loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.jobs.submission import SubmittedJob


def submit(command: str, config: Any, **options: Any) -> SubmittedJob:
    """Run a config as a job on a cluster, or continue its run there: `cluster.submit("pretrain", "my.yaml")`.

    `command` is pretrain, finetune or prepare; `config` and `options` are those of `cluster.jobs.submission.submit`.
    """
    from cluster.jobs import submission
    from finetune.cli import job_kinds

    return submission.submit(command, config, job_kinds(), **options)
