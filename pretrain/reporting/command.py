"""The commands that show runs and models as pages. Each imports what it needs when it runs."""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.common.commands import add_address, add_command, add_follow, local_path, local_text
from pretrain.run.arguments import add_run

FindJob = Callable[..., "Path | None"]  # as `cluster.jobs.client.run_folder`


def add_to(commands: Any, find_job: FindJob) -> None:
    """Add `report`, `dashboard` and `attention` to the subcommands of a parser; `find_job` finds a job's run folder."""
    _add_report(commands)
    _add_dashboard(commands, find_job)
    _add_attention(commands)


# ---------------------------------------------------------------- what the commands do


def _report(arguments: argparse.Namespace) -> None:
    from pretrain.reporting import report

    path = report.write_report(arguments.run, arguments.out or arguments.run / "report.html")
    print(f"{report.summary(arguments.run)}\n\n{path.resolve().as_uri()}")


def _dashboard(find_job: FindJob, arguments: argparse.Namespace) -> None:
    from pretrain.reporting import dashboard

    print(
        dashboard.write_dashboard(
            arguments.run,
            arguments.out,
            follow=arguments.follow,
            address=arguments.address,
            find_job=functools.partial(find_job, plain_http=arguments.allow_plain_http),
        )
    )


def _attention(arguments: argparse.Namespace) -> None:
    from pretrain.reporting.attention.page import write_attention_page

    given = {"text": arguments.text, "pair": arguments.pair, "texts": arguments.texts}
    summary = write_attention_page(arguments.model, arguments.out, **given)
    print(f"{summary}\n\n{arguments.out.resolve().as_uri()}")


# ---------------------------------------------------------------- their parsers


def _add_report(commands: Any) -> None:
    parser = add_command(
        commands,
        "report",
        _report,
        "write a run's curves, corpus card and fill-mask examples as one HTML page",
        """
  ./launch.sh report runs/bert-mini
  ./launch.sh report runs/bert-mini --out bert-mini.html""",
    )
    add_run(parser, "run", "a run, which may still be training")
    parser.add_argument("--out", type=local_path, metavar="FILE", help="page to write (default: RUN/report.html)")


def _add_dashboard(commands: Any, find_job: FindJob) -> None:
    parser = add_command(
        commands,
        "dashboard",
        functools.partial(_dashboard, find_job),
        "write the curves and scores of runs as an HTML page and a W&B workspace",
        """
  ./launch.sh dashboard bert-mini
  ./launch.sh dashboard runs/glue --out glue.html
  ./launch.sh dashboard runs/bert-mini --follow
  ./launch.sh dashboard --address http://127.0.0.1:8265 bert-mini""",
    )
    parser.add_argument(
        "run",
        type=local_text,
        metavar="RUN|JOB",
        help="run folder, folder of several runs, name of a run in runs/, or job",
    )
    add_address(parser, "dashboard URL of the cluster that runs the job")
    parser.add_argument("--out", type=local_path, metavar="FILE", help="page to write (default: RUN/dashboard.html)")
    add_follow(parser, "update the page every 10 s until the run finishes")


def _add_attention(commands: Any) -> None:
    parser = add_command(
        commands,
        "attention",
        _attention,
        "write what each head of a model attends to, on a text, as one HTML page",
        """
  ./launch.sh attention runs/bert-mini --text "The cat sat on the mat, because the cat was tired."
  ./launch.sh attention exported/bert-mini --text "Who wrote it?" --pair "Anna wrote it." --out pair.html
  ./launch.sh attention runs/sst2 --texts sentences.txt""",
    )
    add_run(parser, "model", "a run, an export, a fine-tuned or a released model")
    parser.add_argument("--text", metavar="TEXT", help="text to draw (default: the first of --texts)")
    parser.add_argument("--pair", metavar="TEXT", help="the second text of a pair")
    parser.add_argument(
        "--texts",
        type=local_path,
        metavar="FILE",
        help="file with one text per line: average each head's attention over all of them, instead of --text alone",
    )
    parser.add_argument(
        "--out",
        type=local_path,
        metavar="FILE",
        default=Path("attention.html"),
        help="page to write (default: attention.html)",
    )
