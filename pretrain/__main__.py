"""The command line: python -m pretrain COMMAND. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import InputError, RunError

if TYPE_CHECKING:
    from pretrain.config import RunConfig

BENCHMARKS = {
    "step": "useful tokens/s of a training step against transformers",
    "prepare": "text to token shards against tokenizers and datasets",
    "loader": "sequences/s of the loader against a Hugging Face collator",
    "workers": "what Ray, DeepSpeed, tracking and a second worker cost",
    "quality": "held-out loss after equal time against transformers",
    "all": "step, loader and prepare in turn, as one table, bench.json and bench.html",
    "compare": "what moved between the bench.json of two `bench all`",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a `RunError` is told in a line, a bug keeps its traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(argv)
    except RunError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _dispatch(argv: list[str]) -> int:
    # demo and bench NAME have options of their own, which argparse cannot hand on untouched.
    if argv[:1] == ["demo"]:
        return importlib.import_module("pretrain.demo").main(argv[1:]) or 0
    if argv[:1] == ["bench"] and argv[1:2] and argv[1] in BENCHMARKS:
        return importlib.import_module(f"pretrain.bench.{argv[1]}").main(argv[2:]) or 0
    arguments = _parser().parse_args(argv)
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
        from pretrain import estimate

        print(estimate.dry_run(config, on=arguments.on, mean_length=arguments.mean_length))
        return
    alone = arguments.no_ray or "RANK" in os.environ
    if os.environ.get("RANK", "0") != "0":  # under torchrun the first worker checks for all
        _train_here(config, arguments.resume, watched=False)
        return
    if arguments.no_ray and config.scheduling.workers > 1:
        raise InputError(
            f"--no-ray: trains in one process, but scheduling.workers is {config.scheduling.workers}. "
            "Add --workers 1, or start several processes with torchrun."
        )
    from pretrain import preflight
    from pretrain.config import changed_for_resume

    _check(config, alone)
    with preflight.only_run(config.folder):
        preflight.check_run_folder(config, arguments.resume, changed_for_resume)
        preflight.record_run(config, [sys.executable, *sys.orig_argv[1:]])
        if alone:
            _train_here(config, arguments.resume, watched=True)
        else:
            _train_on_ray(config, arguments.resume)
    print(f"{config.folder}: finished. Next: python -m pretrain export {config.folder} DIR")


def _check(config: RunConfig, alone: bool) -> None:
    """All that can be known to fail before anything is written or started."""
    from pretrain import preflight

    preflight.check_corpus(config)
    if not alone and not config.scheduling.address:
        from cluster.driver import nodes_fit

        cores = len(os.sched_getaffinity(0))
        nodes_fit([(cores, 0)], config.scheduling.workers, config.scheduling.cpus_per_worker, "this machine")


def _payload(config: RunConfig, resume: bool) -> dict[str, Any]:
    return {"config": config.model_dump(mode="json"), "resume": resume}


def _train_here(config: RunConfig, resume: bool, watched: bool) -> None:
    """Train in this process, alone or as one of torchrun's."""
    from pretrain import tracking, train
    from pretrain.worker import Worker

    with tracking.follow(config.folder, config.total_steps) if watched else nullcontext():
        train.main(_payload(config, resume), Worker.from_environment())


def _train_on_ray(config: RunConfig, resume: bool) -> None:
    """Train in worker processes that Ray starts and restarts."""
    from cluster.run import run
    from pretrain import tracking

    scheduling = config.scheduling
    with tracking.follow(config.folder, config.total_steps):
        run(
            "pretrain.train:main",
            _payload(config, resume),
            name=config.name,
            run_dir=config.folder,
            workers=scheduling.workers,
            cpus_per_worker=scheduling.cpus_per_worker,
            address=scheduling.address,
            max_failures=scheduling.max_failures,
        )


def _export(arguments: argparse.Namespace) -> None:
    from pretrain.checkpoint import hf

    hf.export_run(arguments.run, arguments.out, arguments.checkpoint)
    print(f"{arguments.out}: written. transformers loads it with AutoModelForPreTraining.from_pretrained.")


def _report(arguments: argparse.Namespace) -> None:
    from pretrain import report

    path = report.write_report(arguments.run, arguments.out or arguments.run / "report.html")
    print(f"{report.summary(arguments.run)}\n\n{path.resolve().as_uri()}")


def _bench(arguments: argparse.Namespace) -> None:
    names = ", ".join(BENCHMARKS)
    raise InputError(f"bench: {arguments.name!r} is not a benchmark; choose from {names}.")


def _config(arguments: argparse.Namespace) -> RunConfig:
    from pretrain.config import load_config

    overrides = list(arguments.set)
    if getattr(arguments, "workers", None) is not None:
        overrides.append(f"scheduling.workers={arguments.workers}")
    return load_config(arguments.config, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain",
        description="Pretrain BERT-style encoders, from raw text to a checkpoint that transformers loads.",
        epilog="Exit codes: 0 done, 2 your input, 3 the machine or cluster is not fit, 4 training diverged, "
        "75 stopped but resumable, 130 interrupted.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    prepare = _command(commands, "prepare", _prepare, "raw text to vocabulary, token shards and card", """
  python -m pretrain prepare configs/pretrain/bert-mini.yaml
  python -m pretrain prepare configs/pretrain/bert-mini.yaml --dry-run
  python -m pretrain prepare my.yaml --set corpus.dir=/data/wiki --set corpus.processes=8""")  # fmt: skip
    _add_config(prepare, "print what would be read and written, and do nothing")

    pretrain = _command(commands, "pretrain", _pretrain, "train the encoder on a prepared corpus", """
  python -m pretrain pretrain configs/pretrain/bert-mini.yaml --workers 2
  python -m pretrain pretrain configs/pretrain/bert-mini.yaml --resume
  python -m pretrain pretrain configs/pretrain/bert-large-phase1-phase2.yaml --dry-run --on 8xH100
  python -m pretrain pretrain my.yaml --set phases.0.steps=100 --set engine.zero_stage=2
  torchrun --nproc-per-node 8 -m pretrain pretrain my.yaml""")  # fmt: skip
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

    export = _command(commands, "export", _export, "write a run's checkpoint in the Hugging Face layout", """
  python -m pretrain export runs/bert-mini exported/bert-mini
  python -m pretrain export runs/bert-mini exported/best --checkpoint best""")  # fmt: skip
    export.add_argument("run", type=Path, metavar="RUN", help="the run folder, such as runs/bert-mini")
    export.add_argument("out", type=Path, metavar="DIR", help="folder to write")
    export.add_argument("--checkpoint", metavar="NAME", help="a checkpoint of the run; otherwise the newest")

    report = _command(commands, "report", _report, "a run's curves, corpus and fillings as one HTML page", """
  python -m pretrain report runs/bert-mini
  python -m pretrain report runs/bert-mini --out bert-mini.html""")  # fmt: skip
    report.add_argument("run", type=Path, metavar="RUN", help="the run folder, finished or not")
    report.add_argument("--out", type=Path, metavar="FILE", help="page to write; otherwise RUN/report.html")

    _command(commands, "demo", _bench, "the whole main job on an embedded corpus, ending in a report", """
  python -m pretrain demo
  python -m pretrain demo --help""")  # fmt: skip
    names = "\n".join(f"  {name:8}  {purpose}" for name, purpose in BENCHMARKS.items())
    bench = _command(commands, "bench", _bench, "side-by-side measurements against other software", f"""
  python -m pretrain bench step --help
  python -m pretrain bench all --corpus corpora/wiki --text wiki.txt --quick
  python -m pretrain bench compare before/bench.json after/bench.json

benchmarks:
{names}""")  # fmt: skip
    bench.add_argument("name", metavar="NAME", help=", ".join(BENCHMARKS))
    return parser


def _command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], None], purpose: str, examples: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"examples:{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=function)
    return parser


def _add_config(parser: argparse.ArgumentParser, dry_run: str) -> None:
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="the run's YAML file, see configs/pretrain"
    )
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting; may be repeated"
    )


if __name__ == "__main__":
    sys.exit(main())
