"""The command line of `adapt`. Imports nothing heavy."""

import argparse
from typing import Any

from pretrain.common.commands import (
    WORKERS_DEFAULT,
    add_command,
    add_set,
    add_start,
    add_workers,
    check_effects,
    parse_path,
    positive_int,
)
from pretrain.run.arguments import run_path

_DEFAULT_REPLAY = 0.2
_EXAMPLES = """
  ./launch.sh adapt novels/ --from bert-base-uncased/ --out adapted/
  ./launch.sh adapt notes.txt papers.jsonl --from runs/bert-mini --out adapted/ --minutes 30
  ./launch.sh adapt notes.txt --from bert-base-uncased/ --out adapted/ --general wiki.txt --new-words 500"""


def add_to(commands: Any) -> None:
    """Add `adapt` to the subcommands of a parser."""
    purpose = "continue pretraining on your text; show gains and losses"
    parser = add_command(commands, "adapt", _run, purpose, _EXAMPLES)
    parser.add_argument(
        "texts",
        nargs="+",
        type=parse_path,
        metavar="TEXT",
        help="text to adapt to: files or folders (plain text, JSONL, CSV, Parquet, a Wikipedia dump, "
        "WikiExtractor output)",
    )
    add_start(parser, "checkpoint to continue from", type=run_path, required=True)
    parser.add_argument("--out", type=parse_path, required=True, metavar="DIR", help="folder for all output")
    duration = parser.add_mutually_exclusive_group()
    duration.add_argument(
        "--steps", type=positive_int, metavar="N", help="optimizer steps (default: depends on the size of the text)"
    )
    duration.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="train for about M minutes on this machine; a few timed steps determine the number of steps",
    )
    parser.add_argument(
        "--general",
        action="append",
        type=parse_path,
        metavar="TEXT",
        help="text like the checkpoint's training data, to measure forgetting; may be repeated",
    )
    parser.add_argument(
        "--replay",
        type=float,
        default=_DEFAULT_REPLAY,
        metavar="SHARE",
        help="share of the training sequences that come from --general (default: 0.2)",
    )
    parser.add_argument(
        "--new-words",
        type=positive_int,
        default=0,
        metavar="N",
        help="add up to N words of the text to the vocabulary (default: 0)",
    )
    add_workers(parser, WORKERS_DEFAULT)
    add_set(parser, "override a pretraining setting; may be repeated")


def _run(arguments: argparse.Namespace) -> None:
    from finetune.workflows.adaptation import stages

    check_effects({"--replay": (arguments.replay != _DEFAULT_REPLAY, arguments.general, "without --general")})
    stages.run(arguments)
