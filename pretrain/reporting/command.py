"""The commands that show runs and models as pages. Heavy modules are imported when a command runs."""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.common.addresses import is_remote
from pretrain.common.commands import add_address, add_command, checked_address, local_string, location_help, parse_path
from pretrain.common.wording import for_terminal
from pretrain.run.arguments import add_run, run_path

FindJobFolder = Callable[..., "Path | None"]  # signature of `cluster.jobs.client.run_folder`


def add_to(commands: Any, find_job_folder: FindJobFolder) -> None:
    """Add `report` and `attention` to the subcommands of a parser; `find_job_folder` finds a job's run folder."""
    _add_report(commands, find_job_folder)
    _add_attention(commands)


# ---------------------------------------------------------------- the commands


def _path_or_address(text: str) -> str:
    return checked_address(text) if is_remote(text) else local_string(text)


def _report(find_job_folder: FindJobFolder, arguments: argparse.Namespace) -> None:
    from pretrain.reporting import pages, report, workspace
    from pretrain.reporting.runs import find_folder, read_runs

    find = functools.partial(find_job_folder, plain_http=arguments.allow_plain_http)
    folders = [run_path(run) if is_remote(run) else find_folder(run, arguments.address, find) for run in arguments.run]
    out: Path = arguments.out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    write = functools.partial(report.write_report, folders, out, watched=arguments.watch)
    print(f"{for_terminal(report.summary(folders))}\n\n{write().resolve().as_uri()}")
    if arguments.workspace:
        print(workspace.write(read_runs(folders), out.with_suffix(".workspace.json")))
    if arguments.watch:
        pages.serve(write)


def _attention(arguments: argparse.Namespace) -> None:
    from pretrain.reporting.attention.page import write_attention_page

    inputs = {"text": arguments.text, "pair": arguments.pair, "texts": arguments.texts}
    summary = write_attention_page(arguments.model, arguments.out, **inputs)
    print(f"{summary}\n\n{arguments.out.resolve().as_uri()}")


# ---------------------------------------------------------------- the parsers


def _add_report(commands: Any, find_job_folder: FindJobFolder) -> None:
    parser = add_command(
        commands,
        "report",
        functools.partial(_report, find_job_folder),
        "write curves and scores of runs as one HTML page",
        """
  ./launch.sh report runs/bert-mini
  ./launch.sh report bert-mini bert-small --out both.html
  ./launch.sh report bert-mini --watch
  ./launch.sh report runs/glue --workspace
  ./launch.sh report --address http://127.0.0.1:8265 my-job""",
    )
    run_help = f"{location_help('a run, which may still be training')}; a folder of runs; or a job"
    parser.add_argument("run", nargs="+", type=_path_or_address, metavar="RUN", help=run_help)
    add_address(parser, "dashboard URL of the cluster that runs the jobs")
    parser.add_argument(
        "--out",
        type=parse_path,
        metavar="FILE",
        help="page to write (default: report.html in the run's folder, or here for several)",
    )
    parser.add_argument("--watch", action="store_true", help="serve the page on 127.0.0.1, redrawn as runs continue")
    parser.add_argument(
        "--workspace", action="store_true", help="write the panels as a W&B workspace, too, and save it if a key is set"
    )


def _add_attention(commands: Any) -> None:
    parser = add_command(
        commands,
        "attention",
        _attention,
        "write what each head of a model attends to, as HTML",
        """
  ./launch.sh attention runs/bert-mini --text "The cat sat on the mat, because the cat was tired."
  ./launch.sh attention exported/bert-mini --text "Who wrote it?" --pair "Anna wrote it." --out pair.html
  ./launch.sh attention runs/sst2 --texts sentences.txt""",
    )
    add_run(parser, "model", "a run, an export, a fine-tuned or a released model")
    parser.add_argument("--text", metavar="TEXT", help="text whose attention is drawn (default: the first of --texts)")
    parser.add_argument("--pair", metavar="TEXT", help="the second text of a pair")
    parser.add_argument(
        "--texts",
        type=parse_path,
        metavar="FILE",
        help="file with one text per line: average each head's attention over all of them, instead of over --text",
    )
    parser.add_argument(
        "--out",
        type=parse_path,
        metavar="FILE",
        default=Path("attention.html"),
        help="page to write (default: attention.html)",
    )
