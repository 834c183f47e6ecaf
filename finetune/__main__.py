"""The command line: python -m finetune COMMAND. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.commands import add_command, exit_code, is_alone, is_follower, local_path, make_parser, train
from pretrain.common.errors import InputError

if TYPE_CHECKING:
    from finetune.config import FinetuneConfig

_TARGET = "finetune.train:main"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return exit_code(lambda: _dispatch(given))
    except BrokenPipeError:  # `predict ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(argv: list[str]) -> int | None:
    if argv[:1] == ["demo"]:  # its options are those of the pretraining's demo
        from finetune import demo

        return demo.main(argv[1:])
    if argv[:1] == ["bench"]:
        from finetune.bench import finetuning as bench

        return bench.main(argv[1:])
    arguments = build_parser().parse_args(argv)
    return arguments.command(arguments)


def _finetune(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    if arguments.seeds is not None:
        _seeds(config, arguments)
        return
    if arguments.parallel:
        raise InputError("--parallel: says how many of several runs go at once. Add --seeds N.")
    alone = is_alone(config, arguments.no_ray)
    from finetune import runs
    from pretrain import preflight

    if is_follower():  # the first process says what is wrong
        if not arguments.dry_run and not runs.is_finished(config, resume=True):
            train(_TARGET, config, arguments.resume, 0, alone=True)
        return
    if runs.is_finished(config, arguments.resume):
        print(f"{config.folder}: finished already.")
        return
    plan = runs.plan(config, alone)
    if arguments.dry_run:
        print(runs.describe(preflight.as_begun(config) if arguments.resume else config, plan))
        return
    print(runs.describe_start(config, plan))
    with preflight.only_run(config.folder):
        config = runs.begin(config, arguments.resume, [sys.executable, *sys.orig_argv[1:]])
        train(_TARGET, config, arguments.resume, plan.steps, alone=alone)
    print(runs.summary(config))


def _seeds(config: FinetuneConfig, arguments: argparse.Namespace) -> None:
    from finetune.experiments.sweep import run_seeds

    if arguments.no_ray or "RANK" in os.environ:
        raise InputError("--seeds: several runs go through Ray. Leave --no-ray and torchrun out.")
    run_seeds(config, arguments.seeds, parallel=arguments.parallel, dry_run=arguments.dry_run)


def _sweep(arguments: argparse.Namespace) -> None:
    from finetune.experiments.sweep import parse_grid, run_sweep

    name = arguments.grid or ("" if arguments.grid_set else "devlin")
    run_sweep(
        arguments.config,
        _overrides(arguments),
        parse_grid(name, arguments.grid_set),
        seeds=arguments.seeds or 1,
        parallel=arguments.parallel,
        keep=arguments.keep,
        dry_run=arguments.dry_run,
    )


def _glue(arguments: argparse.Namespace) -> None:
    from finetune.experiments.glue_runs import run_glue

    run_glue(
        arguments.config,
        _overrides(arguments),
        folder=arguments.glue_dir or "",
        tasks=[name for name in (arguments.tasks or "").split(",") if name],
        seeds=arguments.seeds or 1,
        parallel=arguments.parallel,
        submission=arguments.submission,
        dry_run=arguments.dry_run,
    )


def _evaluate(arguments: argparse.Namespace) -> None:
    from finetune import runs
    from pretrain.common.thread_waits import sleeping_when_crowded

    with sleeping_when_crowded():
        print(runs.evaluate(arguments.model, arguments.file, arguments.out, arguments.precision))


def _predict(arguments: argparse.Namespace) -> None:
    from finetune import load
    from finetune.artifacts.predict import read_records
    from finetune.artifacts.saved import prediction_lines, write_predictions
    from pretrain.common.thread_waits import sleeping_when_crowded

    source, out = "-" if arguments.input is None else arguments.input, arguments.out
    given = {
        key: value for key in ("text", "pair", "question", "context") if (value := getattr(arguments, key)) is not None
    }
    if given and arguments.input is not None:
        raise InputError(f"predict: both {source} and --{next(iter(given))} are given. Give one of them.")
    if not given and source == "-" and sys.stdin.isatty():
        raise InputError("predict: nothing to read. Give --text, a file, or lines on standard input.")
    model = load(arguments.model, precision=arguments.precision)
    if given:
        record: Any = given["text"] if set(given) == {"text"} else given
        _write_lines(map(_as_line, model.stream_lines([(1, record)], "record")), out)
    elif source == "-" or _is_stream(Path(source)):
        with _lines(source) as (lines, where), sleeping_when_crowded():
            _write_lines(map(_as_line, model.stream_lines(read_records(lines, where), where, live=True)), out)
    else:
        examples = model.task.read_file(source, labelled=False)
        with sleeping_when_crowded():
            predictions = model.predict(examples)
        if out is None:
            _write_lines(prediction_lines(model.task, examples, predictions), None)
        else:
            write_predictions(out, model.task, examples, predictions)


def _is_stream(path: Path) -> bool:
    """Whether it is a pipe or a terminal, such as bash's <(command)."""
    return path.is_fifo() or path.is_char_device()


def _as_line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False)


def _write_lines(lines: Iterable[str], out: Path | None) -> None:
    """Into the file `out`, whole or not at all, or at once on standard output."""
    from pretrain.common.files import atomic_open

    if out is None:
        for line in lines:
            print(line, flush=True)
        return
    with atomic_open(out, "w") as file:
        for line in lines:
            file.write(line + "\n")


def _export(arguments: argparse.Namespace) -> None:
    from finetune.artifacts.export import export

    print(export(arguments.model, arguments.out, onnx=arguments.onnx))


def _lines(source: str) -> Any:
    """A context with the lines of a file or of standard input, and what to call it."""
    import contextlib

    @contextlib.contextmanager
    def opened() -> Iterator[tuple[Any, str]]:
        name = "standard input" if source == "-" else source
        try:
            # Whatever the locale: a container's would let through bytes that are no UTF-8.
            with nullcontext(sys.stdin.buffer) if source == "-" else Path(source).open("rb") as raw:
                yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="\n"), name
        except UnicodeDecodeError as error:
            raise InputError(f"{name}: not UTF-8 ({error.reason} at byte {error.start}). Convert it first.") from None
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise InputError(f"{name}: cannot be read ({error.strerror}).") from None

    return opened()


def _config(arguments: argparse.Namespace) -> FinetuneConfig:
    from finetune.config import load_config

    return load_config(arguments.config, _overrides(arguments))


def _overrides(arguments: argparse.Namespace) -> list[str]:
    """--set and the settings that have an option of their own."""
    overrides = list(arguments.set)
    if arguments.workers is not None:
        overrides.append(f"scheduling.workers={arguments.workers}")
    if arguments.start_from is not None:
        overrides.append(f"start_from={json.dumps(str(arguments.start_from))}")
    return overrides


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command, for the command line and the command reference."""
    parser = make_parser(
        "./launch.sh",
        "Fine-tune BERT-family checkpoints to classification, named entities and span questions.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    finetune = add_command(
        commands,
        "finetune",
        _finetune,
        "train a task's model from a checkpoint",
        """
  ./launch.sh finetune configs/finetune/sst2.yaml --from exported/bert-mini
  ./launch.sh finetune my-task.yaml --from bert-base-uncased/ --workers 2
  ./launch.sh finetune my-task.yaml --set training.preset=stable --resume
  ./launch.sh finetune my-task.yaml --from bert-base-uncased/ --seeds 5""",
    )
    _add_config(finetune)
    _add_several(finetune)
    finetune.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    finetune.add_argument(
        "--no-ray", action="store_true", help="train in this process alone (as under torchrun, without Ray)"
    )

    sweep = add_command(
        commands,
        "sweep",
        _sweep,
        "try a grid of settings, through Ray Tune",
        """
  ./launch.sh sweep my-task.yaml --from bert-base-uncased/
  ./launch.sh sweep my-task.yaml --from exported/bert-mini --grid small-bert --parallel 2
  ./launch.sh sweep my-task.yaml --grid-set training.learning_rate=1e-5,3e-5 --seeds 3""",
    )
    _add_config(sweep)
    _add_several(sweep)
    sweep.add_argument(
        "--grid",
        choices=("devlin", "small-bert"),
        help="that of Devlin et al. (18 points; the default) or of the smaller models (20 points)",
    )
    sweep.add_argument(
        "--grid-set",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="values of one setting, in place of or beside those of --grid; may be repeated",
    )
    sweep.add_argument(
        "--keep",
        choices=("best", "all"),
        default="best",
        help="whose models stay on the disk (default: best)",
    )

    glue = add_command(
        commands,
        "glue",
        _glue,
        "every task of GLUE, and the table of the BERT paper",
        """
  ./launch.sh glue --from bert-base-uncased/ --glue-dir glue_data/
  ./launch.sh glue --from exported/bert-mini --glue-dir glue_data/ --tasks sst2,rte --seeds 5
  ./launch.sh glue template.yaml --from exported/bert-mini --glue-dir glue_data/ --submission out/""",
    )
    _add_config(glue, "settings for all tasks (default: those of Devlin et al.)", optional=True)
    _add_several(glue)
    glue.add_argument(
        "--glue-dir",
        metavar="DIR",
        help="GLUE's downloads, with folders CoLA, SST-2, ... (classification.glue_dir)",
    )
    glue.add_argument(
        "--tasks",
        metavar="NAME,NAME",
        help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli; otherwise all there are",
    )
    glue.add_argument(
        "--submission",
        type=local_path,
        metavar="DIR",
        help="predict the official test sets with each task's best run, and write gluebenchmark.com's files",
    )

    evaluate = add_command(
        commands,
        "evaluate",
        _evaluate,
        "official scores on a labelled file",
        """
  ./launch.sh evaluate runs/sst2
  ./launch.sh evaluate runs/sst2 other.tsv --out scores/""",
    )
    _add_model(evaluate)
    evaluate.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="labelled file; otherwise the dev sets of the config, and its test sets that have labels",
    )
    evaluate.add_argument(
        "--out",
        type=local_path,
        metavar="DIR",
        help="folder for metrics.json and predictions (default: evaluation/ in the run folder, EXPORT-evaluation/ beside "
        "an export)",
    )

    predict = add_command(
        commands,
        "predict",
        _predict,
        "predictions for a file, or for lines of text or JSON",
        """
  ./launch.sh predict runs/sst2 --text "a lovely film"
  ./launch.sh predict runs/rte --text "A man sleeps." --pair "Somebody rests."
  ./launch.sh predict runs/squad --question "Who wrote it?" --context "It was written by Ann."
  ./launch.sh predict runs/sst2 test.csv --out predictions.jsonl
  ./launch.sh predict runs/ner texts.jsonl --out spans.jsonl
  cat texts.txt | ./launch.sh predict runs/sst2""",
    )
    _add_model(predict)
    predict.add_argument(
        "input",
        nargs="?",
        metavar="FILE",
        help=".csv, .tsv, .jsonl, .json, .parquet with the config's columns, or .txt with a text a line; otherwise, "
        "or with -, lines of text or JSON on standard input",
    )
    predict.add_argument(
        "--out",
        type=local_path,
        metavar="FILE",
        help="JSON Lines to write, and beside them what the task's scorers read; otherwise standard output",
    )
    for name, what in (
        ("text", "one text"),
        ("pair", "its second text"),
        ("question", "a question"),
        ("context", "the text to answer from"),
    ):
        predict.add_argument(f"--{name}", metavar="TEXT", help=what)

    export = add_command(
        commands,
        "export",
        _export,
        "a model to take along: Hugging Face layout, ONNX",
        """
  ./launch.sh export runs/sst2 exported/sst2
  ./launch.sh export runs/sst2 exported/sst2 --onnx""",
    )
    export.add_argument("model", type=Path, metavar="MODEL", help="a fine-tuned model, or its run folder")
    export.add_argument("out", type=local_path, metavar="DIR", help="folder to make; an earlier export is replaced")
    export.add_argument(
        "--onnx", action="store_true", help="also write model.onnx (packages: onnx, onnxscript, onnxruntime)"
    )
    return parser


def _add_config(
    parser: argparse.ArgumentParser,
    what: str = "the task's YAML file, see configs/finetune",
    optional: bool = False,
) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", nargs="?" if optional else None, help=what)
    parser.add_argument(
        "--from",
        dest="start_from",
        type=local_path,
        metavar="DIR",
        help="checkpoint to start from: a released one, an export or a run (start_from)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (scheduling.workers)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting; may be repeated"
    )


def _add_several(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds",
        type=_count,
        metavar="N",
        help="this many runs, with seed, seed + 1, ..., each in a folder of its own",
    )
    parser.add_argument(
        "--parallel",
        type=_count,
        default=0,
        metavar="N",
        help="runs at once (default: one a GPU, or one a machine without GPUs)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


_count.__name__ = "whole number above 0"  # what argparse calls it


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="a fine-tuned model, or its run folder")
    parser.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="of the arithmetic (default: auto, as the model was trained, unless this machine is slow in it)",
    )


if __name__ == "__main__":
    sys.exit(main())
