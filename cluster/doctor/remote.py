"""Checks a cluster from a client, which needs access to its dashboard only.

`check` submits a job that prints its findings, and then deletes the job.
"""

import contextlib
import json
import secrets
from pathlib import Path
from typing import Any

from cluster.doctor.driver import FINDINGS_PREFIX
from cluster.doctor.rows import WARN, Finding
from cluster.jobs import client
from pretrain.common.errors import MachineError, RunError

_JOB_SECONDS = 300.0  # time limit of the job: more than the sum of the time limits within it
_STOP_SECONDS = 10.0  # time limit for stopping the job


def check(measurement_module: str, address: str, folder: Path, *, plain_http: bool = False) -> list[Finding]:
    """Check the cluster whose dashboard is at `address`, or the local cluster; its machines should share `folder`.

    See `machine.check` for `measurement_module`, and `client.JobsClient` for `plain_http`.

    Raises:
        InputError: there is no such cluster, or it rejects the token.
        MachineError: the cluster does not respond, or cannot run the job.
    """
    cluster = client.JobsClient(address, plain_http=plain_http)
    access = Finding("access", "requires a token")
    if cluster.is_open():
        advice = "Anyone who can connect can run code there. Restart Ray with RAY_AUTH_MODE=token; see SECURITY.md."
        access = Finding("access", "answers without a token", WARN, advice)
    name = f"doctor-{secrets.token_hex(4)}"
    metadata = {"bertrain": "doctor", "folder": str(folder.absolute()), "measures": measurement_module}
    cluster.start(name, "python -m cluster.doctor.driver", metadata)
    try:
        job = cluster.wait(name, _JOB_SECONDS, "The cluster's head is too busy for the checks; try again later.")
        return [access, *parse_findings(cluster.log(name), f"{name} on {cluster.safe_url}", job)]
    finally:
        with contextlib.suppress(RunError):
            cluster.stop(name, _STOP_SECONDS)
            cluster.delete(name)


def parse_findings(log: str, job_name: str, job: Any) -> list[Finding]:
    """Return the findings that the job printed; `MachineError` if it printed none."""
    lines = [line for line in log.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith(FINDINGS_PREFIX):
            return [Finding(**row) for row in json.loads(line.removeprefix(FINDINGS_PREFIX))]
    last = lines[-1].removeprefix("error: ") if lines else client.describe_state(job)
    raise MachineError(
        f"{job_name}: the checks did not run: {last} The head node needs the same .venv and files as this machine."
    )
