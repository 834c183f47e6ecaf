"""The fine-tuning command line: python -m finetune COMMAND. A command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from finetune.scores import options as scores_options
from finetune.workflows.adaptation import options
from finetune.workflows.demo import options as demo_options
from pretrain.common.addresses import hub_hint, local
from pretrain.common.commands import (
    add_command,
    add_config,
    add_dry_run,
    add_run_options,
    add_workers,
    exit_code,
    local_path,
    make_parser,
    overrides,
    positive_int,
    run_command,
    run_options,
    target_path,
)
from pretrain.common.errors import InputError
from pretrain.common.worker import torchrun_place
from pretrain.run.arguments import run_path, store_target

if TYPE_CHECKING:
    from finetune.training.config import FinetuneConfig

_PREDICT_FIELDS = {
    "text": "one text",
    "pair": "the second text of a pair",
    "question": "one question",
    "context": "the text that answers the question",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: run_command(build_parser(), given))


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command, for the command line and the command reference."""
    purpose = "Fine-tune BERT-style checkpoints for classification, named entities and question answering."
    return make_parser(purpose, (add_to, _add_export))


def add_to(commands: Any) -> None:
    """Add every command but `export` to the subcommands of a parser."""
    for add in (_add_demo, _add_adapt, _add_finetune, _add_evaluate, _add_predict, _add_sweep, _add_glue):
        add(commands)
    _add_evaluate_pretrained(commands)


# ---------------------------------------------------------------- what the commands do


def _demo(arguments: argparse.Namespace) -> None:
    from finetune.workflows.demo import command

    command.run(arguments)


def _adapt(arguments: argparse.Namespace) -> None:
    from finetune.workflows.adaptation import command

    command.run(arguments)


def _finetune(arguments: argparse.Namespace) -> None:
    from finetune.training import api, runs

    if arguments.parallel and arguments.seeds is None:
        raise InputError("--parallel: limits how many runs train at once, so it needs --seeds N.")
    if arguments.dry_run or arguments.seeds is not None:
        config = api.read_config(arguments.config, overrides(arguments), start_from=arguments.start_from)
        (_dry_run if arguments.seeds is None else _finetune_seeds)(config, arguments)
        return
    run = api.train(arguments.config, **run_options(arguments))
    if run.trained:
        print(f"{run} {runs.next_command(run.config)}")


def _dry_run(config: FinetuneConfig, arguments: argparse.Namespace) -> None:
    from finetune.training import runs
    from pretrain.run import launch, preflight

    alone = launch.is_alone(config, arguments.no_ray)
    if launch.is_follower():
        return
    finished = runs.has_model(config)
    if finished and arguments.resume:
        runs.check_same(config, over=True)
    plan = runs.plan(config, alone)
    config = preflight.with_resolved_precision(config) if arguments.resume or finished else config
    state = preflight.run_state(config.folder, finished=finished)
    print(f"{config.folder}: {state}\n{runs.describe(config, plan, show_config=arguments.show_config)}")


def _finetune_seeds(config: FinetuneConfig, arguments: argparse.Namespace) -> None:
    from finetune.experiments.sweep import run_seeds

    if arguments.no_ray or torchrun_place():
        raise InputError("--seeds: several runs need Ray. Remove --no-ray, and do not use torchrun.")
    run_seeds(
        config,
        arguments.seeds,
        parallel=arguments.parallel,
        dry_run=arguments.dry_run,
        show_config=arguments.show_config,
    )


def _sweep(arguments: argparse.Namespace) -> None:
    from finetune.experiments.grid import parse_grid
    from finetune.experiments.sweep import run_sweep
    from pretrain.common.settings import with_start

    name = arguments.grid or ("" if arguments.grid_set else "devlin")
    run_sweep(
        arguments.config,
        with_start(overrides(arguments), arguments.start_from),
        parse_grid(name, arguments.grid_set),
        seeds=arguments.seeds or 1,
        parallel=arguments.parallel,
        keep=arguments.keep,
        dry_run=arguments.dry_run,
        show_config=arguments.show_config,
    )


def _glue(arguments: argparse.Namespace) -> None:
    from finetune.experiments.glue_runs import run_glue
    from pretrain.common.settings import with_start

    run_glue(
        arguments.config,
        with_start(overrides(arguments), arguments.start_from),
        folder=arguments.glue_dir or "",
        tasks=[name for name in (arguments.tasks or "").split(",") if name],
        seeds=arguments.seeds or 1,
        parallel=arguments.parallel,
        submission=arguments.submission,
        dry_run=arguments.dry_run,
        show_config=arguments.show_config,
    )


def _evaluate(arguments: argparse.Namespace) -> None:
    from finetune.training.folders import model_folder

    model_folder(arguments.model)  # before torch is loaded
    from finetune.artifacts.evaluation import evaluate
    from pretrain.common.thread_waits import sleeping_when_crowded

    with sleeping_when_crowded():
        print(evaluate(arguments.model, arguments.file, arguments.out, arguments.precision))


def _predict(arguments: argparse.Namespace) -> None:
    source = "-" if arguments.input is None else arguments.input
    fields = {name: text for name in _PREDICT_FIELDS if (text := getattr(arguments, name)) is not None}
    if fields and arguments.input is not None:
        raise InputError(f"predict: got both {source} and --{next(iter(fields))}. Give one of them.")
    if not fields and source == "-" and sys.stdin.isatty():
        raise InputError("predict: no input. Give --text, a file, or lines on standard input.")
    from finetune.training.folders import model_folder

    folder = model_folder(arguments.model)  # before torch is loaded
    from finetune.artifacts.prediction import predict

    predict(folder, source, arguments.out, arguments.precision, fields)


def _export(arguments: argparse.Namespace) -> None:
    from finetune.training.folders import model_folder

    model_folder(arguments.model)  # before torch is loaded
    from finetune.artifacts.export import export

    written = export(arguments.model, local(arguments.out), onnx=arguments.onnx)
    store_target(arguments.out)
    print(written.replace(str(local(arguments.out)), str(arguments.out), 1))


def _evaluate_pretrained(arguments: argparse.Namespace) -> None:
    scores_options.check(arguments)  # before torch is loaded
    if arguments.dry_run:
        return
    if not arguments.model.is_dir():
        hint = hub_hint(arguments.model)
        raise InputError(f"{arguments.model}: no such folder. Give a released model, an export or a run.{hint}")
    from finetune.scores import command

    command.run(arguments)


# ---------------------------------------------------------------- their parsers


def _add_demo(commands: Any) -> None:
    parser = add_command(
        commands,
        "demo",
        _demo,
        "prepare, pretrain, fine-tune and report on the docstrings of this Python and its packages",
        demo_options.EXAMPLES,
    )
    demo_options.add_options(parser)


def _add_adapt(commands: Any) -> None:
    parser = add_command(commands, "adapt", _adapt, options.PURPOSE, options.EXAMPLES)
    options.add_options(parser)


def _add_finetune(commands: Any) -> None:
    parser = add_command(
        commands,
        "finetune",
        _finetune,
        "train a model for one task from a checkpoint",
        """
  ./launch.sh finetune configs/finetune/sst2.yaml --from exported/bert-mini
  ./launch.sh finetune my-task.yaml --from bert-base-uncased/ --workers 2
  ./launch.sh finetune my-task.yaml --set training.preset=stable --resume
  ./launch.sh finetune my-task.yaml --from bert-base-uncased/ --seeds 5""",
    )
    add_config(parser, _START)
    _add_several(parser)
    add_run_options(parser)


def _add_evaluate(commands: Any) -> None:
    parser = add_command(
        commands,
        "evaluate",
        _evaluate,
        "score a fine-tuned model on labeled data with the task's official metrics",
        """
  ./launch.sh evaluate runs/sst2
  ./launch.sh evaluate runs/sst2 other.tsv --out scores/""",
    )
    _add_model(parser)
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="labeled file (default: the dev sets of the config, and its labeled test sets)",
    )
    parser.add_argument(
        "--out",
        type=local_path,
        metavar="DIR",
        help="folder for metrics.json and predictions (default: evaluation/ in the run folder, or "
        "NAME-evaluation/ beside an export)",
    )


def _add_predict(commands: Any) -> None:
    parser = add_command(
        commands,
        "predict",
        _predict,
        "predict labels, entities or answers for a file, standard input or one text",
        """
  ./launch.sh predict runs/sst2 --text "a lovely film"
  ./launch.sh predict runs/rte --text "A man sleeps." --pair "Somebody rests."
  ./launch.sh predict runs/squad --question "Who wrote it?" --context "It was written by Ann."
  ./launch.sh predict runs/sst2 test.csv --out predictions.jsonl
  ./launch.sh predict runs/ner texts.jsonl --out spans.jsonl
  cat texts.txt | ./launch.sh predict runs/sst2""",
    )
    _add_model(parser)
    parser.add_argument(
        "input",
        nargs="?",
        metavar="FILE",
        help=".csv, .tsv, .jsonl, .json or .parquet with the config's columns, or .txt with one text per line; for "
        "entities .jsonl, .json, .parquet, .txt or CoNLL columns; without FILE or with -, lines of text or JSON are "
        "read from standard input",
    )
    parser.add_argument(
        "--out",
        type=local_path,
        metavar="FILE",
        help="file to write, beside files for the task's official scorers: .csv, .tsv, .parquet, or else JSON Lines "
        "(default: standard output)",
    )
    for name, purpose in _PREDICT_FIELDS.items():
        parser.add_argument(f"--{name}", metavar="TEXT", help=purpose)


def _add_export(commands: Any) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        "write a fine-tuned model in the Hugging Face layout, with --onnx also as ONNX",
        """
  ./launch.sh export runs/sst2 exported/sst2
  ./launch.sh export runs/sst2 exported/sst2 --onnx""",
    )
    parser.add_argument(
        "model", type=run_path, metavar="MODEL", help="fine-tuned model, its run folder, or name of a run in runs/"
    )
    parser.add_argument(
        "out", type=target_path, metavar="DIR", help="folder or address to write; replaces an earlier export"
    )
    parser.add_argument(
        "--onnx", action="store_true", help="also write model.onnx (needs onnx, onnxscript and onnxruntime)"
    )


def _add_sweep(commands: Any) -> None:
    parser = add_command(
        commands,
        "sweep",
        _sweep,
        "fine-tune with every combination of a grid of settings",
        """
  ./launch.sh sweep my-task.yaml --from bert-base-uncased/
  ./launch.sh sweep my-task.yaml --from exported/bert-mini --grid small-bert --parallel 2
  ./launch.sh sweep my-task.yaml --grid-set training.learning_rate=1e-5,3e-5 --seeds 3""",
    )
    add_config(parser, _START)
    _add_several(parser)
    parser.add_argument(
        "--grid",
        choices=("devlin", "small-bert"),
        help="grid of Devlin et al. 2019 (18 points, the default) or of the smaller BERT models (20 points)",
    )
    parser.add_argument(
        "--grid-set",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="values of one setting, added to --grid or replacing its values; may be repeated",
    )
    parser.add_argument(
        "--keep", choices=("best", "all"), default="best", help="models to keep on disk (default: best)"
    )


def _add_glue(commands: Any) -> None:
    parser = add_command(
        commands,
        "glue",
        _glue,
        "fine-tune on every GLUE task and print the results table of the BERT paper",
        """
  ./launch.sh glue --from bert-base-uncased/ --glue-dir glue_data/
  ./launch.sh glue --from exported/bert-mini --glue-dir glue_data/ --tasks sst2,rte --seeds 5
  ./launch.sh glue template.yaml --from exported/bert-mini --glue-dir glue_data/ --submission out/""",
    )
    add_config(parser, _START, "settings for all tasks (default: those of Devlin et al. 2019)", optional=True)
    _add_several(parser)
    parser.add_argument(
        "--glue-dir", metavar="DIR", help="GLUE data with folders CoLA, SST-2, ... (sets classification.glue_dir)"
    )
    parser.add_argument(
        "--tasks",
        metavar="NAME,NAME",
        help="some of cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli (default: all in --glue-dir)",
    )
    parser.add_argument(
        "--submission",
        type=local_path,
        metavar="DIR",
        help="predict the official test sets with each task's best run, and write the files for gluebenchmark.com",
    )


def _add_evaluate_pretrained(commands: Any) -> None:
    parser = add_command(
        commands, scores_options.NAME, _evaluate_pretrained, scores_options.PURPOSE, scores_options.EXAMPLES
    )
    scores_options.add_options(parser)


# ---------------------------------------------------------------- options that several take


_START = "checkpoint to start from"


def _add_several(parser: argparse.ArgumentParser) -> None:
    add_workers(parser)
    parser.add_argument(
        "--seeds",
        type=positive_int,
        metavar="N",
        help="train N runs with seeds seed, seed + 1, ..., each in its own folder",
    )
    parser.add_argument(
        "--parallel",
        type=positive_int,
        default=0,
        metavar="N",
        help="concurrent runs (default: one per GPU, or one per machine without GPUs)",
    )
    add_dry_run(parser, "print the plan, then exit")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=run_path, metavar="MODEL", help="fine-tuned model, its run folder, or name of a run in runs/"
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="precision of the computation; auto: that of training, unless it is slow on this machine (default: auto)",
    )


if __name__ == "__main__":
    sys.exit(main())
