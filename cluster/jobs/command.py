"""The commands `up`, `submit`, `list`, `status`, `logs`, `stop` and `delete`. Heavy imports are deferred."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pretrain.common.commands import add_address, add_command, add_follow, parse_path, positive_int, program
from pretrain.common.errors import NothingSavedError, printable
from pretrain.common.wording import print_table

if TYPE_CHECKING:
    from cluster.jobs.client import JobsClient

LoadFunctions = Callable[[], Mapping[str, Callable[..., Any]]]  # returns {command: function that its job runs}


def add_to(commands: Any, load_functions: LoadFunctions) -> None:
    """Add the commands to the subcommands of a parser."""
    _add_submit(commands, load_functions)
    for add in (_add_list, _add_job_commands, _add_logs, _add_up):
        add(commands)


# ---------------------------------------------------------------- implementations of the commands


def _up(arguments: argparse.Namespace) -> None:
    from cluster.workers import local

    local.up(arguments.nodes, arguments.cpus_per_node)


def _submit(load_functions: LoadFunctions, arguments: argparse.Namespace) -> int:
    from cluster.jobs.submission import make_job, parse_run

    command, config, options = parse_run(arguments.run)
    job = make_job(load_functions()[command], config, workers=arguments.workers, folder=arguments.dir, **options)
    submitted = _connect(arguments).submit(job, wait_for_nodes=arguments.wait_for_nodes)
    if arguments.follow:
        return follow_log(submitted.client, job.name)
    print(f"{submitted} Follow it with {program()} logs -f {job.name}")
    return 0


def _status(arguments: argparse.Namespace) -> None:
    from cluster.jobs import client

    cluster = _connect(arguments)
    job = cluster.get(arguments.job)
    print(client.describe(job, cluster.queued(cluster.jobs()).get(arguments.job, "")))


def _list(arguments: argparse.Namespace) -> None:
    from rich.table import Table

    from cluster.jobs import client

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("job", "kind", "state", "submitted", "progress"):
        table.add_column(column, overflow="fold")
    cluster = _connect(arguments)
    jobs = cluster.jobs()
    queue_messages = cluster.queued(jobs)
    for job in jobs:
        metadata = job.metadata or {}
        cells = (
            str(job.submission_id),
            metadata.get("bertrain", "other"),
            client.describe_state(job, queue_messages.get(str(job.submission_id), "")),
            client.format_time(job.start_time),
            "; ".join(client.progress_lines(job)),
        )
        table.add_row(*map(printable, cells))
    if table.row_count:
        print_table(table)
    else:
        print("no jobs")


def _logs(arguments: argparse.Namespace) -> int:
    cluster = _connect(arguments)
    if arguments.follow:
        return follow_log(cluster, arguments.job)
    sys.stdout.write(cluster.log(arguments.job))
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    cluster = _connect(arguments)
    code, state = cluster.exit_status(cluster.stop(arguments.job))
    print(f"{arguments.job}: {state}")
    return code if code == NothingSavedError.exit_code else 0


def _delete(arguments: argparse.Namespace) -> None:
    _connect(arguments).delete(arguments.job)
    print(f"{arguments.job}: removed from the list; its run folder is kept")


def _connect(arguments: argparse.Namespace) -> JobsClient:
    """Return a client of the cluster at --address."""
    from cluster.jobs import client

    return client.JobsClient(arguments.address, plain_http=arguments.allow_plain_http)


def follow_log(cluster: JobsClient, name: str) -> int:
    """Print the job's output until the job finishes; returns its exit code. Ctrl-C leaves the job running."""
    try:
        for chunk in cluster.follow(name):
            sys.stdout.write(chunk)
            sys.stdout.flush()
        job = cluster.wait(name)
    except KeyboardInterrupt:
        print(f"\n{name}: still running. `stop {name}` stops it, `logs -f {name}` follows it again.", file=sys.stderr)
        return 130
    code, state = cluster.exit_status(job)
    print(f"{name}: {state}", file=sys.stderr)
    return code


# ---------------------------------------------------------------- the commands' parsers


def _add_submit(commands: Any, load_functions: LoadFunctions) -> None:
    parser = add_command(
        commands,
        "submit",
        functools.partial(_submit, load_functions),
        "run a config as a job on a cluster, or resume it there",
        """
  ./launch.sh submit -- pretrain configs/pretrain/bert-mini.yaml
  ./launch.sh submit --address http://127.0.0.1:8265 --workers 4-8 --follow -- pretrain my.yaml --set seed=1
  ./launch.sh submit -- finetune configs/finetune/sst2.yaml --from runs/bert-mini""",
    )
    _add_address(parser)
    parser.add_argument("--workers", metavar="N|MIN-MAX", help="number of worker processes, or an elastic range")
    add_follow(parser, "print the job's output until it finishes")
    parser.add_argument(
        "--wait-for-nodes",
        action="store_true",
        help="submit the job even if it does not fit now: it waits for an autoscaler to add nodes",
    )
    parser.add_argument(
        "--dir",
        type=parse_path,
        metavar="DIR",
        help="working directory of the job, shared by the cluster's machines (default: the current directory)",
    )
    parser.add_argument(
        "run",
        nargs="+",
        metavar="-- COMMAND CONFIG [--set KEY=VALUE]... [--from DIR]",
        help="command to run on the cluster (pretrain, finetune or prepare), with its arguments",
    )
    # By default argparse prints the long metavar twice.
    parser.usage = "%(prog)s [options] -- COMMAND CONFIG [--set KEY=VALUE]... [--from DIR]"


def _add_list(commands: Any) -> None:
    parser = add_command(commands, "list", _list, "list the jobs of a cluster", "\n  ./launch.sh list")
    _add_address(parser)


def _add_job_commands(commands: Any) -> None:
    for name, function, purpose in (
        ("status", _status, "print the state and progress of a job"),
        ("stop", _stop, "stop a job after a checkpoint, and wait for its end"),
        ("delete", _delete, "remove a finished job from the list; its run folder stays"),
    ):
        parser = add_command(commands, name, function, purpose, f"\n  ./launch.sh {name} bert-mini")
        _add_address(parser)
        _add_job_argument(parser)


def _add_logs(commands: Any) -> None:
    parser = add_command(commands, "logs", _logs, "print the output of a job", "\n  ./launch.sh logs -f bert-mini")
    _add_address(parser)
    add_follow(parser, "print new output until the job finishes")
    _add_job_argument(parser)


def _add_up(commands: Any) -> None:
    parser = add_command(
        commands,
        "up",
        _up,
        "run a Ray cluster on this machine, until Ctrl-C",
        """
  ./launch.sh up
  ./launch.sh up --nodes 3 --cpus-per-node 1""",
    )
    parser.add_argument("--nodes", type=positive_int, default=1, metavar="N", help="number of Ray nodes (default: 1)")
    parser.add_argument(
        "--cpus-per-node",
        type=positive_int,
        default=0,
        metavar="N",
        help="CPUs of each node (default: the machine's cores, divided by the number of nodes)",
    )


def _add_address(parser: argparse.ArgumentParser) -> None:
    add_address(parser, "dashboard URL of the cluster (default: the cluster of `up` on this machine)")


def _add_job_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="name of the run")
