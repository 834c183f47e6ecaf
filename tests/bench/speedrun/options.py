"""The command line of `bench speedrun`. Imports nothing heavy."""

from __future__ import annotations

import argparse

from finetune.scores.options import add_blimp, add_finetunings
from pretrain.common.commands import add_set, add_workers, local_path, program

DEFAULT_BUDGETS = (0.5e15, 2e15, 4e15)
NOVELS = 0.25  # share of the words that is drawn from them, about as in BERT's text
_DESCRIPTION = """Trains a config on a fixed text with fixed budgets of FLOPs, and says what it learned.

The text is drawn from --data: at most 10 million words, and others that are held out. A budget counts every FLOP of
matrix products that training executes; the phases of the config keep their proportions. Each budget is an ordinary
pretraining in --out/runs. Bits of common words decide: they compare vocabularies. The same command again continues
what was stopped and skips what is finished."""
_EPILOG = """examples:
  ./launch.sh bench speedrun configs/pretrain/bert-mini.yaml --data text/ --budget 0.5e15
  ./launch.sh bench speedrun configs/pretrain/modernbert-mini.yaml --data text/ --blimp blimp/data --workers 2
  ./launch.sh bench speedrun my.yaml --data text/ --set name=fast --set phases.0.peak_learning_rate=2e-3

Exit codes: 0 success, 2 invalid input, or no budget can be spent, 3 fine-tunings failed, 4 they or all runs diverged,
75 stopped; the same command continues."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of `bench speedrun`."""
    parser = argparse.ArgumentParser(
        prog=f"{program()} bench speedrun",
        description=_DESCRIPTION,
        epilog=_EPILOG.replace("./launch.sh", program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "config", type=local_path, metavar="CONFIG", help="YAML file of a pretraining; its text is not used"
    )
    parser.add_argument(
        "--data",
        type=local_path,
        required=True,
        metavar="DIR",
        help="folder with WikiExtractor's files and novels (*.txt), and nothing else",
    )
    parser.add_argument(
        "--novels",
        type=float,
        default=NOVELS,
        metavar="SHARE",
        help=f"share of the words that is drawn from novels (default: {NOVELS}, as in BERT's text); what is held out "
        "is the same for every share",
    )
    parser.add_argument(
        "--budget",
        type=float,
        action="append",
        metavar="FLOP",
        help="FLOPs to train with; may be repeated (default: 0.5e15, 2e15 and 4e15)",
    )
    parser.add_argument(
        "--out", type=local_path, default="runs/speedrun", metavar="DIR", help="all results (default: runs/speedrun)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the run (default: that of the config)")
    add_set(parser)
    add_workers(parser)
    add_blimp(parser)
    add_finetunings(parser, prefix="finetune-")
    parser.add_argument(
        "--log",
        type=local_path,
        metavar="FILE",
        help="append the runs as rows to the Markdown table that ends this file",
    )
    return parser
