"""The command line: python -m pretrain COMMAND. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pretrain.commands import (
    add_command,
    exit_code,
    is_alone,
    is_follower,
    local_path,
    local_text,
    make_parser,
    train,
)
from pretrain.common.errors import InputError

if TYPE_CHECKING:
    from pretrain.config import PretrainConfig

_TARGET = "pretrain.train:main"

BENCHMARKS = {
    "step": "useful tokens/s of a training step against transformers",
    "prepare": "text to token shards against tokenizers and datasets",
    "loader": "sequences/s of the loader against a Hugging Face collator",
    "workers": "what Ray, DeepSpeed, tracking and a second worker cost",
    "quality": "held-out loss after equal time against transformers",
    "checkpoint": "how long a save holds up training, at once and in the background",
    "all": "step, loader and prepare in turn, as one table, bench.json and bench.html",
    "compare": "what moved between the bench.json of two `bench all`",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _dispatch(given))


def _dispatch(argv: list[str]) -> int:
    # demo and bench NAME have options of their own, which argparse cannot hand on untouched.
    if argv[:1] == ["demo"]:
        return importlib.import_module("pretrain.demo").main(argv[1:]) or 0
    if argv[:1] == ["bench"] and argv[1:2] and argv[1] in BENCHMARKS:
        return importlib.import_module(f"pretrain.bench.{argv[1]}").main(argv[2:]) or 0
    arguments = build_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    command(arguments)
    return 0


def _prepare(arguments: argparse.Namespace) -> None:
    from pretrain.corpus import prepare

    config = _config(arguments)
    if arguments.dry_run:
        from pretrain import estimate

        print(estimate.preparation_lines(prepare.describe(config)))
        return
    print(prepare.prepare(config))


def _pretrain(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    if arguments.dry_run:
        from pretrain import estimate, preflight

        config = preflight.as_begun(config) if arguments.resume else config
        print(estimate.dry_run(config, on=arguments.on, mean_length=arguments.mean_length))
        return
    alone = is_alone(config, arguments.no_ray)
    from pretrain import preflight
    from pretrain.config import changed_for_resume

    if is_follower():  # the first process says what is wrong
        if not preflight.is_finished(config):
            train(_TARGET, config, arguments.resume, 0, alone=True)
        return
    _check(config, alone)
    with preflight.only_run(config.folder):
        preflight.check_run_folder(config, arguments.resume, changed_for_resume)
        config = preflight.as_begun(config) if arguments.resume else config
        if preflight.is_finished(config):
            print(f"{config.folder}: was finished already; nothing to do")
            return
        preflight.record_run(config, [sys.executable, *sys.orig_argv[1:]])
        train(_TARGET, config, arguments.resume, config.total_steps, alone=alone)
    print(f"{config.folder}: finished. Next: ./launch.sh export {config.folder} DIR")


def _check(config: PretrainConfig, alone: bool) -> None:
    """All that can be known to fail before anything is written or started."""
    from pretrain import preflight

    preflight.check_corpus(config)
    if not alone and not config.scheduling.address:
        from cluster.workers.nodes import nodes_fit

        cores = len(os.sched_getaffinity(0))
        nodes_fit([(cores, 0)], config.scheduling.workers, config.scheduling.cpus_per_worker, "this machine")


def _export(arguments: argparse.Namespace) -> None:
    from pretrain.checkpoint import hf

    hf.export_run(arguments.run, arguments.out, arguments.checkpoint)
    print(f"{arguments.out}: written. transformers loads it with AutoModelForPreTraining.from_pretrained.")


def _report(arguments: argparse.Namespace) -> None:
    from pretrain.reporting import report

    path = report.write_report(arguments.run, arguments.out or arguments.run / "report.html")
    print(f"{report.summary(arguments.run)}\n\n{path.resolve().as_uri()}")


def _dashboard(arguments: argparse.Namespace) -> None:
    from pretrain.reporting import dashboard

    print(
        dashboard.write_dashboard(
            arguments.run,
            arguments.out,
            follow=arguments.follow,
            address=arguments.address,
            plain_http=arguments.allow_plain_http,
        )
    )


def _bench(arguments: argparse.Namespace) -> None:
    names = ", ".join(BENCHMARKS)
    raise InputError(f"bench: {arguments.name!r} is not a benchmark; choose from {names}.")


def _config(arguments: argparse.Namespace) -> PretrainConfig:
    from pretrain.config import load_config

    overrides = list(arguments.set)
    if getattr(arguments, "workers", None) is not None:
        overrides.append(f"scheduling.workers={arguments.workers}")
    return load_config(arguments.config, overrides)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command, for the command line and the command reference."""
    parser = make_parser(
        "./launch.sh",
        "Pretrain BERT-style encoders, from raw text to a checkpoint that transformers loads.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    prepare = add_command(
        commands,
        "prepare",
        _prepare,
        "raw text to vocabulary, token shards and card",
        """
  ./launch.sh prepare configs/pretrain/bert-mini.yaml
  ./launch.sh prepare configs/pretrain/bert-mini.yaml --dry-run
  ./launch.sh prepare my.yaml --set corpus.dir=/data/wiki --set corpus.processes=8""",
    )
    _add_config(prepare, "print what would be read and written, and do nothing")

    pretrain = add_command(
        commands,
        "pretrain",
        _pretrain,
        "train the encoder on a prepared corpus",
        """
  ./launch.sh pretrain configs/pretrain/bert-mini.yaml --workers 2
  ./launch.sh pretrain configs/pretrain/bert-mini.yaml --resume
  ./launch.sh pretrain configs/pretrain/bert-large-phase1-phase2.yaml --dry-run --on 8xH100
  ./launch.sh pretrain my.yaml --set phases.0.steps=100 --set engine.zero_stage=2
  torchrun --nproc-per-node 8 -m pretrain pretrain my.yaml""",
    )
    _add_config(pretrain, "print the resolved config, parameters, memory, work and time, and do nothing")
    pretrain.add_argument("--workers", type=int, metavar="N", help="worker processes (scheduling.workers)")
    pretrain.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    pretrain.add_argument(
        "--no-ray", action="store_true", help="train in this process alone (as under torchrun, without Ray)"
    )
    pretrain.add_argument(
        "--on", metavar="CLUSTER", help="dry run: time on this cluster, such as 8xH100, or `here` to measure"
    )
    pretrain.add_argument(
        "--mean-length",
        type=float,
        metavar="TOKENS",
        help="dry run: mean tokens per sequence; otherwise 0.95 of the phase's length (short pairs alone)",
    )

    export = add_command(
        commands,
        "export",
        _export,
        "write a run's checkpoint in the Hugging Face layout",
        """
  ./launch.sh export runs/bert-mini exported/bert-mini
  ./launch.sh export runs/bert-mini exported/best --checkpoint best""",
    )
    export.add_argument("run", type=local_path, metavar="RUN", help="the run folder, such as runs/bert-mini")
    export.add_argument("out", type=local_path, metavar="DIR", help="folder to write")
    export.add_argument("--checkpoint", metavar="NAME", help="a checkpoint of the run; otherwise the newest")

    report = add_command(
        commands,
        "report",
        _report,
        "a run's curves, corpus and fillings as one HTML page",
        """
  ./launch.sh report runs/bert-mini
  ./launch.sh report runs/bert-mini --out bert-mini.html""",
    )
    report.add_argument("run", type=local_path, metavar="RUN", help="the run folder, finished or not")
    report.add_argument("--out", type=local_path, metavar="FILE", help="page to write; otherwise RUN/report.html")

    dashboard = add_command(
        commands,
        "dashboard",
        _dashboard,
        "a run's curves and events as HTML page and W&B workspace",
        """
  ./launch.sh dashboard bert-mini
  ./launch.sh dashboard runs/glue --out glue.html
  ./launch.sh dashboard runs/bert-mini --follow
  ./launch.sh dashboard --address http://127.0.0.1:8265 bert-mini""",
    )
    dashboard.add_argument(
        "run",
        type=local_text,
        metavar="RUN|JOB",
        help="run folder, folder of several runs, name below runs/, or job",
    )
    dashboard.add_argument("--address", default="", metavar="URL", help="the dashboard of the cluster whose job it is")
    dashboard.add_argument(
        "--allow-plain-http",
        action="store_true",
        help="send the token over unencrypted http to another machine: whoever reads it may run code on the cluster",
    )
    dashboard.add_argument("--out", type=local_path, metavar="FILE", help="page to write; otherwise RUN/dashboard.html")
    dashboard.add_argument("--follow", action="store_true", help="write the page anew every 10 s until the run is over")

    add_command(
        commands,
        "demo",
        _bench,
        "the whole main job on an embedded corpus, ending in a report",
        """
  ./launch.sh demo
  ./launch.sh demo --help""",
    )
    names = "\n".join(f"  {name:8}  {purpose}" for name, purpose in BENCHMARKS.items())
    bench = add_command(
        commands,
        "bench",
        _bench,
        "side-by-side measurements against other software",
        f"""
  ./launch.sh bench step --help
  ./launch.sh bench all --corpus corpora/wiki --text wiki.txt --quick
  ./launch.sh bench compare before/bench.json after/bench.json

benchmarks:
{names}""",
    )
    bench.add_argument("name", metavar="NAME", help=", ".join(BENCHMARKS))
    return parser


def _add_config(parser: argparse.ArgumentParser, dry_run: str) -> None:
    parser.add_argument("config", type=local_path, metavar="CONFIG", help="the run's YAML file, see configs/pretrain")
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting; may be repeated"
    )


if __name__ == "__main__":
    sys.exit(main())
