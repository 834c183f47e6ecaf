"""The command line: python -m cluster COMMAND. Ray is imported only where a command needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.manifests.command import add_to as add_manifest
from pretrain.commands import add_command, exit_code, local_path, make_parser
from pretrain.common.errors import InputError, printable

if TYPE_CHECKING:
    from cluster.jobs.client import Jobs


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _dispatch(given))


def _dispatch(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    return arguments.command(arguments) or 0


def _doctor(arguments: argparse.Namespace) -> int:
    from cluster import doctor

    return doctor.main(
        cluster=arguments.cluster or bool(arguments.address),
        address=arguments.address,
        folder=arguments.dir,
        as_json=arguments.json,
        plain_http=arguments.allow_plain_http,
    )


def _up(arguments: argparse.Namespace) -> None:
    from cluster import local

    if arguments.join:
        cluster = local.join(arguments.cpus_per_node, arguments.host)
        print(f"one more node of {cluster.nodes[-1].cpus} CPUs at {cluster.address}")
        return
    cluster = local.up(arguments.nodes, arguments.cpus_per_node, arguments.host)
    print(
        f"{len(cluster.nodes)} nodes of {cluster.nodes[0].cpus} CPUs; jobs at {cluster.dashboard}, workers at "
        f"{cluster.address}\nIts token lies in {cluster.token_file}, for you alone. "
        "Next: ./launch.sh submit -- pretrain CONFIG"
    )


def _down(arguments: argparse.Namespace) -> None:
    from cluster import local

    cluster = local.down()
    print(f"{len(cluster.nodes)} nodes ended" if cluster else "no cluster runs here")


def _submit(arguments: argparse.Namespace) -> int:
    from cluster.jobs.submission import read_job

    job = read_job(arguments.run, folder=arguments.dir or Path.cwd(), workers=arguments.workers)
    cluster = _jobs(arguments)
    if cluster.is_open():
        print(
            f"warning: {cluster.shown}: this cluster answers without a token, so whoever reaches it can run code there. "
            "Start its Ray anew with RAY_AUTH_MODE=token; SECURITY.md says more.",
            file=sys.stderr,
        )
    cluster.submit(job, wait_for_nodes=arguments.wait_for_nodes)
    if not arguments.follow:
        print(f"{job.name}: submitted to {cluster.shown}. Watch it with ./launch.sh logs -f {job.name}")
        return 0
    return _follow(cluster, job.name)


def _status(arguments: argparse.Namespace) -> None:
    from cluster.jobs import client

    print(client.describe(_jobs(arguments).get(arguments.job)))


def _list(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from cluster.jobs import client

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("job", "kind", "state", "submitted", "progress"):
        table.add_column(column, overflow="fold")
    for job in _jobs(arguments).all():
        metadata = job.metadata or {}
        cells = (
            str(job.submission_id),
            metadata.get("bertrain", "other"),
            client.state(job),
            client.clock(job.start_time),
            "; ".join(client.progress(job)),
        )
        table.add_row(*map(printable, cells))
    if table.row_count:
        Console(markup=False).print(table)
    else:
        print("no jobs")


def _logs(arguments: argparse.Namespace) -> int:

    cluster = _jobs(arguments)
    if arguments.follow:
        return _follow(cluster, arguments.job)
    sys.stdout.write(cluster.log(arguments.job))
    return 0


def _stop(arguments: argparse.Namespace) -> None:
    from cluster.jobs import client

    job = _jobs(arguments).stop(arguments.job)
    print(f"{arguments.job}: {client.state(job)}")


def _delete(arguments: argparse.Namespace) -> None:

    _jobs(arguments).delete(arguments.job)
    print(f"{arguments.job}: forgotten; its run folder stays")


def _jobs(arguments: argparse.Namespace) -> Jobs:
    """The jobs of the cluster that was named."""
    from cluster.jobs import client

    return client.Jobs(arguments.address, plain_http=arguments.allow_plain_http)


def _follow(cluster, name: str) -> int:
    """Print what the job prints, to its end; its exit code. Ctrl-C leaves it running."""
    from cluster.jobs import client

    try:
        for piece in cluster.follow(name):
            sys.stdout.write(piece)
            sys.stdout.flush()
        job = cluster.wait(name)
    except KeyboardInterrupt:
        print(f"\n{name}: goes on. `stop {name}` ends it, `logs -f {name}` shows it again.", file=sys.stderr)
        return 130
    print(f"{name}: {client.state(job)}", file=sys.stderr)
    return client.exit_code(job)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command, for the command line and the command reference."""
    parser = make_parser("./launch.sh", "Clusters: start one here, submit jobs to one, check one.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    submit = add_command(
        commands,
        "submit",
        _submit,
        "run a config on a cluster, or continue its run",
        """
  ./launch.sh submit -- pretrain configs/pretrain/bert-mini.yaml
  ./launch.sh submit --address http://127.0.0.1:8265 --workers 4-8 --follow -- pretrain my.yaml --set seed=1
  ./launch.sh submit -- finetune configs/finetune/sst2.yaml --from runs/bert-mini""",
    )
    _add_address(submit)
    submit.add_argument("--workers", metavar="N|MIN-MAX", help="worker processes, or a range to keep within")
    submit.add_argument("--follow", action="store_true", help="print what the job prints, to its end")
    submit.add_argument(
        "--wait-for-nodes",
        action="store_true",
        help="submit though the cluster is too small now: nodes will come, as by an autoscaler",
    )
    submit.add_argument(
        "--dir",
        type=local_path,
        metavar="FOLDER",
        help="folder on the cluster, shared by its machines, that relative paths start from; otherwise this one",
    )
    submit.add_argument(
        "run",
        nargs="+",
        metavar="-- COMMAND CONFIG [--set KEY=VALUE]... [--from DIR]",
        help="pretrain, finetune or prepare, and what it is given",
    )

    for name, function, purpose in (
        ("status", _status, "how far a job is"),
        ("stop", _stop, "have a job save a checkpoint and end, and wait for it"),
        ("delete", _delete, "forget a job that has ended; its run folder stays"),
    ):
        parser_of = add_command(commands, name, function, purpose, f"\n  ./launch.sh {name} bert-mini")
        _add_address(parser_of)
        parser_of.add_argument("job", metavar="JOB", help="the run's name")

    logs = add_command(commands, "logs", _logs, "what a job has printed", "\n  ./launch.sh logs -f bert-mini")
    _add_address(logs)
    logs.add_argument("-f", "--follow", action="store_true", help="go on to its end")
    logs.add_argument("job", metavar="JOB", help="the run's name")

    listing = add_command(commands, "list", _list, "all jobs of a cluster", "\n  ./launch.sh list")
    _add_address(listing)

    up = add_command(
        commands,
        "up",
        _up,
        "start a cluster of node processes on this machine",
        """
  ./launch.sh up
  ./launch.sh up --nodes 3 --cpus-per-node 1""",
    )
    up.add_argument("--nodes", type=_positive, default=1, metavar="N", help="node processes (default: 1)")
    up.add_argument(
        "--cpus-per-node",
        type=_positive,
        default=0,
        metavar="N",
        help="CPUs of each; otherwise the cores, shared out",
    )
    up.add_argument(
        "--host", default="", metavar="IP", help="this machine's address that the nodes of others reach it at"
    )
    up.add_argument("--join", action="store_true", help="add a node to the cluster that runs here already")
    add_command(commands, "down", _down, "end the cluster that `up` started", "\n  ./launch.sh down")
    add_manifest(commands)
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        "what this machine or a cluster has, what is missing and what to do about it",
        """
  ./launch.sh doctor
  ./launch.sh doctor --cluster
  ./launch.sh doctor --address http://127.0.0.1:8265 --dir /mnt/shared/bert""",
    )
    _add_address(doctor)
    doctor.add_argument("--cluster", action="store_true", help="check the cluster that `up` started here")
    doctor.add_argument(
        "--dir",
        type=local_path,
        metavar="FOLDER",
        help="folder that all machines of the cluster should share; otherwise this one",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default="",
        metavar="URL",
        help="the cluster's dashboard; otherwise the one that `up` started here",
    )
    parser.add_argument(
        "--allow-plain-http",
        action="store_true",
        help="send the token over unencrypted http to another machine: whoever reads it may run code on the cluster",
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"{text}: a whole number from 1 is wanted.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
