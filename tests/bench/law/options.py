"""The command line of `bench law`. Imports nothing heavy."""

from __future__ import annotations

import argparse

from pretrain.common.commands import local_path, program

_DESCRIPTION = """Fits a scaling law to runs of `bench speedrun`, and says how well it predicts others.

L(N, D) = E + A / N^alpha + B / D^beta, in bits per character (Hoffmann et al. 2022). N is the size in effective
parameters, D the tokens, of which repeated ones count less (Muennighoff et al. 2023). `pretrain --dry-run --budget`
reads the result. Of several runs of one size and budget, the best counts."""
_EPILOG = """examples:
  ./launch.sh bench law runs/speedrun
  ./launch.sh bench law runs/speedrun --only 'law-*' --holdout law-4x256-5e13-s0
  ./launch.sh bench law runs/speedrun runs/more --holdout law-6x320 --out law/ --write

Exit codes: 0 success, 2 invalid input, or too few runs."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of `bench law`."""
    parser = argparse.ArgumentParser(
        prog=f"{program()} bench law",
        description=_DESCRIPTION,
        epilog=_EPILOG.replace("./launch.sh", program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", type=local_path, nargs="+", metavar="RUNS", help="folder of `bench speedrun`, with its speedrun.json"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="take only runs or trials of this name; * stands for any characters; may be repeated (default: all)",
    )
    parser.add_argument(
        "--holdout",
        action="append",
        default=[],
        metavar="NAME",
        help="predict this run, or all runs of this trial, without fitting to it; may be repeated",
    )
    parser.add_argument(
        "--below",
        type=float,
        metavar="BITS",
        help="leave out runs that have not come below this loss: early ones, which know only how frequent words are",
    )
    parser.add_argument(
        "--out", type=local_path, metavar="DIR", help="where law.json is written (default: the first RUNS)"
    )
    parser.add_argument(
        "--write", action="store_true", help="also replace the published law, the one that `pretrain --budget` reads"
    )
    return parser
