"""Commands that use a trained model: `evaluate`, `predict`, `export`. Heavy modules are imported when one runs."""

import argparse
import sys
from typing import Any

from finetune.training.folders import find_model, model_folder
from pretrain.common.addresses import local_path
from pretrain.common.commands import add_command, parse_path, target_path
from pretrain.common.errors import InputError
from pretrain.run.arguments import add_run, run_path, store_target

_PREDICT_FIELDS = {
    "text": "input text",
    "pair": "second text of a pair",
    "question": "question",
    "context": "text that contains the answer",
}


def add_to(commands: Any) -> None:
    """Add `evaluate`, `predict` and `export` to the subcommands of a parser."""
    for add in (_add_evaluate, _add_predict, _add_export):
        add(commands)


# ---------------------------------------------------------------- the commands


def _evaluate(arguments: argparse.Namespace) -> None:
    model_folder(arguments.model)  # fails for a wrong path before torch is loaded
    from finetune.artifacts.evaluation import evaluate
    from pretrain.common.thread_waits import sleep_when_contended

    with sleep_when_contended():
        print(evaluate(arguments.model, arguments.file, arguments.out, **_predictor_options(arguments)))


def _predict(arguments: argparse.Namespace) -> None:
    source = "-" if arguments.input is None else arguments.input
    fields = {name: text for name in _PREDICT_FIELDS if (text := getattr(arguments, name)) is not None}
    if fields and arguments.input is not None:
        raise InputError(f"predict: got both {source} and --{next(iter(fields))}. Give one of them.")
    if not fields and source == "-" and sys.stdin.isatty():
        raise InputError("predict: no input. Give --text, a file, or lines on standard input.")
    folder = model_folder(arguments.model)  # fails for a wrong path before torch is loaded
    from finetune.artifacts.prediction import predict

    predict(folder, source, arguments.out, fields, **_predictor_options(arguments))


def _predictor_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("precision", "threshold")}


def _export(arguments: argparse.Namespace) -> None:
    """Export a pretraining run's checkpoint, or a fine-tuned model."""
    if not arguments.run.is_dir():  # checked before torch is loaded
        raise InputError(f"{arguments.run}: no such folder. Give a run or a fine-tuned model, such as runs/bert-mini.")
    options = {name: getattr(arguments, name) for name in ("checkpoint", "averaged", "average")}
    if find_model(arguments.run) is None:
        if arguments.onnx:
            raise InputError(f"--onnx: needs a fine-tuned model, and {arguments.run} is not one. Fine-tune it first.")
        from pretrain.run import api

        print(api.export(arguments.run, arguments.out, **options))
        return
    if given := [name for name, value in options.items() if value]:
        raise InputError(f"--{given[0]}: needs a pretraining run, and {arguments.run} is fine-tuned. Remove it.")
    from finetune.artifacts.export import export

    summary = export(arguments.run, local_path(arguments.out), onnx=arguments.onnx)
    store_target(arguments.out)
    print(summary.replace(str(local_path(arguments.out)), str(arguments.out), 1))


# ---------------------------------------------------------------- parsers


def _add_evaluate(commands: Any) -> None:
    parser = add_command(
        commands,
        "evaluate",
        _evaluate,
        "score a fine-tuned model with the official metrics",
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
        type=parse_path,
        metavar="DIR",
        help="folder for metrics.json and predictions (default: evaluation/ in the run folder, or "
        "NAME-evaluation/ next to an export)",
    )


def _add_predict(commands: Any) -> None:
    parser = add_command(
        commands,
        "predict",
        _predict,
        "predict labels, entities or answers for a file or text",
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
        help=".csv, .tsv, .jsonl, .json or .parquet with the config's columns, or .txt with one input per line; for "
        "entities .jsonl, .json, .parquet, .txt or CoNLL columns; without FILE or with -, lines of text or JSON are "
        "read from standard input",
    )
    parser.add_argument(
        "--out",
        type=parse_path,
        metavar="FILE",
        help="file to write, and files for the task's official scorers next to it: .csv, .tsv, .parquet, or else JSON "
        "Lines (default: standard output)",
    )
    for name, description in _PREDICT_FIELDS.items():
        parser.add_argument(f"--{name}", metavar="TEXT", help=description)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "model", "a fine-tuned model or its run")
    parser.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="precision of the computation; auto: as in training, unless it is slow on this machine (default: auto)",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="P",
        help="minimum probability to predict a label (multi_label) or the positive class (default: the model's)",
    )


def _add_export(commands: Any) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        "write a run's model in Hugging Face's layout, or as ONNX",
        """
  ./launch.sh export runs/bert-mini exported/bert-mini
  ./launch.sh export runs/bert-mini exported/best --checkpoint best
  ./launch.sh export runs/sst2 exported/sst2 --onnx""",
    )
    add_run(parser, "run", "a pretraining run, a fine-tuning run or a fine-tuned model")
    parser.add_argument(
        "out", type=target_path, metavar="DIR", help="folder or address to write; replaces an earlier export"
    )
    parser.add_argument("--checkpoint", metavar="NAME", help="checkpoint of a pretraining run (default: the latest)")
    parser.add_argument(
        "--average",
        type=run_path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="average the weights of a pretraining run with the weights of these runs, such as forks of it",
    )
    parser.add_argument(
        "--averaged",
        action="store_true",
        help="write the average of the weights of a pretraining run's last steps (see phases.N.averaged_share)",
    )
    parser.add_argument(
        "--onnx",
        action="store_true",
        help="also write model.onnx of a fine-tuned model (needs onnx, onnxscript and onnxruntime)",
    )
