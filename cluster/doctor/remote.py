"""The checks of a cluster, from the client's side: a job that reports its findings and is then deleted.

The client needs access to the cluster's dashboard only.
"""

import contextlib
import json
import secrets
from pathlib import Path
from typing import Any

from cluster.doctor import machine, nodes
from cluster.doctor.driver import MARK
from cluster.doctor.rows import Finding
from cluster.jobs import client
from pretrain.common.errors import MachineError, RunError

_JOB_SECONDS = 300.0  # more than the sum of the job's own limits
_STOP_SECONDS = 10.0


def check(measures: str, address: str, folder: Path, *, plain_http: bool = False) -> list[Finding]:
    """Check the cluster whose dashboard is at `address`, or the local one; `folder` should be shared by its machines.

    `measures` as `check.check`, `plain_http` as for `client.Jobs`.

    Raises:
        InputError: no such cluster, or it refuses the token.
        MachineError: it does not answer, or cannot run the job.
    """
    cluster = client.Jobs(address, plain_http=plain_http)
    access = nodes.judge_access(cluster.is_open())
    name = f"doctor-{secrets.token_hex(4)}"
    metadata = {"bertrain": "doctor", "folder": str(folder.absolute()), "measures": measures}
    cluster.start(name, "cluster.doctor.driver", metadata)
    try:
        job = cluster.wait(name, _JOB_SECONDS, "The cluster's head is too busy for the checks; try again later.")
        result = result_of(cluster.log(name), f"{name} on {cluster.shown}", job)
    finally:
        with contextlib.suppress(RunError):
            cluster.stop(name, _STOP_SECONDS)
            cluster.delete(name)
    rows = [Finding(**row) for row in result["rows"]]
    return [access, nodes.judge_client(machine.versions(machine.measures_of(measures)), result["head"]), *rows]


def result_of(log: str, name: str, job: Any) -> dict[str, Any]:
    """What the job printed as its result; `MachineError` if it printed none."""
    lines = [line for line in log.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    last = lines[-1].removeprefix("error: ") if lines else client.state(job)
    raise MachineError(
        f"{name}: the checks did not run: {last} The head node needs the same .venv and files as this machine."
    )
