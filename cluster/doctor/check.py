"""The checks of a machine or cluster.

Each measures what its row shows, or the row says why it could not.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from cluster.doctor.rows import FAIL, PASS, WARN, Finding, show, to_json
from cluster.workers.address import without_password
from pretrain.common.errors import MachineError


def check(
    measures: str,
    *,
    cluster: bool = False,
    address: str = "",
    folder: Path | None = None,
    as_json: bool = False,
    plain_http: bool = False,
) -> int:
    """Check this machine, or a cluster, and print the findings.

    Args:
        measures: name of the module that measures a machine (`machine.Measures`).
        cluster: check a cluster rather than this machine.
        address: URL of its dashboard; empty uses the local one of `up`.
        folder: the folder that all machines of the cluster should share (default: the current one).
        as_json: print the rows as JSON rather than as a table.
        plain_http: send the token over http to other machines, too.

    Returns:
        0 if no check fails, else the exit code of an unsuitable machine. A warning is not a failure.

    Raises:
        RunError: the cluster is unreachable, refuses this client, or does not run the checks.
    """
    from rich.console import Console
    from rich.markup import escape

    what = f"the cluster {without_password(address)}".rstrip() if cluster else "this machine"
    with Console(stderr=True).status(escape(f"checking {what}")):
        rows = _cluster(measures, address, folder or Path.cwd(), plain_http) if cluster else machine_checks(measures)
    if as_json:
        print(to_json(rows))
    else:
        show(rows, Console())
        print(_summary(rows))
    return MachineError.exit_code if any(row.mark == FAIL for row in rows) else 0


def machine_checks(measures: str) -> list[Finding]:
    """What was found on this machine."""
    from cluster.doctor import machine, reduce, verdicts

    facts = machine.inspect(measures, Path.cwd())
    return [*verdicts.rows_here(facts), reduce.row_here(), verdicts.wandb_key()]


def _cluster(measures: str, address: str, folder: Path, plain_http: bool) -> list[Finding]:
    from cluster.doctor import remote

    return remote.check(measures, address, folder, plain_http=plain_http)


def _summary(rows: list[Finding]) -> str:
    count = Counter(row.mark for row in rows)
    return f"{count[PASS]} pass, {count[WARN]} warn, {count[FAIL]} fail"
