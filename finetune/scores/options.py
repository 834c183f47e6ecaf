"""The command line of `evaluate-pretrained`. Imports nothing heavy."""

import argparse
from typing import Any

from pretrain.common.addresses import hub_hint
from pretrain.common.commands import add_command, add_follow, check_effects, parse_path, positive_int
from pretrain.common.errors import InputError
from pretrain.common.run_files import CONFIG_FILE, SCORES
from pretrain.run.arguments import add_run

_DEFAULT_OUT = "runs/scores"
_TEXT_SCORES = ("common_words", "whole_words", "held_out")
_EXAMPLES = """
  ./launch.sh evaluate-pretrained runs/bert-mini --texts held-out.txt --blimp blimp/data
  ./launch.sh evaluate-pretrained bert-base-uncased/ --blimp blimp/data --blimp-limit 100
  ./launch.sh evaluate-pretrained exported/other --texts held-out.txt --out scores/"""


def add_to(commands: Any) -> None:
    """Add `evaluate-pretrained` to the subcommands of a parser."""
    purpose = "score a pretrained encoder on held-out text and BLiMP"
    parser = add_command(commands, "evaluate-pretrained", _run, purpose, _EXAMPLES)
    add_run(parser, "model", "a run, an export or a released model")
    parser.add_argument(
        "--out",
        type=parse_path,
        default=_DEFAULT_OUT,
        metavar="DIR",
        help=f"folder for the results of all models (default: {_DEFAULT_OUT})",
    )
    purpose = "score each checkpoint that the run MODEL saves, until its last, and append to its probes.jsonl"
    add_follow(parser, f"{purpose} (as evaluation.probes does)")
    parser.add_argument("--pid", type=positive_int, metavar="PID", help="--follow: exit when process PID has exited")
    parser.add_argument("--name", metavar="NAME", help="name of the model in the results (default: its folder name)")
    _add_scores(parser)


def _check(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for options without effect, and for paths that do not exist."""
    has_texts, follows = bool(arguments.texts), arguments.follow
    if not (has_texts or arguments.blimp):
        raise InputError("evaluate-pretrained: nothing to score. Give --texts or --blimp.")
    if (arguments.out / CONFIG_FILE).exists():
        raise InputError(f"--out: {arguments.out} is a run folder; its {SCORES} would change. Give another folder.")
    effects = {
        "--length": (arguments.length, has_texts, "without --texts"),
        "--text-scores": (arguments.text_scores != _TEXT_SCORES, has_texts, "without --texts"),
        "--blimp-limit": (arguments.blimp_limit, bool(arguments.blimp), "without --blimp"),
        "--pid": (arguments.pid, follows, "without --follow"),
        "--out": (str(arguments.out) != _DEFAULT_OUT, not follows, "with --follow, which writes into the run"),
        "--name": (arguments.name, not follows, "with --follow, which writes into the run"),
    }
    check_effects(effects)
    for option, paths in {"--texts": arguments.texts, "--blimp": [arguments.blimp]}.items():
        if missing := [path for path in paths if path is not None and not path.exists()]:
            raise InputError(f"{option}: {missing[0]} does not exist.")


def _run(arguments: argparse.Namespace) -> None:
    _check(arguments)  # before torch is loaded
    if not arguments.model.is_dir():
        hint = hub_hint(arguments.model)
        raise InputError(f"{arguments.model}: no such folder. Give a released model, an export or a run.{hint}")
    from finetune.scores import command

    command.run(arguments)


def _add_scores(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--texts",
        nargs="+",
        action="extend",
        type=parse_path,
        default=[],
        metavar="PATH",
        help="score on text that the model was not trained on: plain text (one document per file), JSONL with a field "
        "`text`, WikiExtractor's files, or folders of them",
    )
    parser.add_argument(
        "--text-scores",
        nargs="+",
        choices=_TEXT_SCORES,
        default=_TEXT_SCORES,
        metavar="SCORE",
        help=f"scores to compute on --texts (default: {', '.join(_TEXT_SCORES)})",
    )
    parser.add_argument(
        "--length",
        type=positive_int,
        default=0,
        metavar="N",
        help="tokens per sequence for the score held_out (default: 128, or the model's maximum if lower)",
    )
    parser.add_argument("--blimp", type=parse_path, metavar="DIR", help="score on BLiMP; DIR has its .jsonl files")
    parser.add_argument(
        "--blimp-limit", type=positive_int, default=0, metavar="N", help="score only N pairs of each paradigm"
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="precision of the computation (default: fp32)",
    )
