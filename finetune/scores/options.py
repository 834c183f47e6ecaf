"""The command line of `evaluate-pretrained`. Imports nothing heavy."""

import argparse
from typing import Any

from pretrain.common.addresses import hub_hint
from pretrain.common.commands import add_command, add_follow, add_set, local_path, positive_int
from pretrain.common.errors import InputError
from pretrain.common.run_files import CONFIG_FILE, SCORES
from pretrain.run.arguments import add_run

_OUT = "runs/scores"
_TEXT_SCORES = ("held_out", "common_words", "whole_words", "positions")
_EXAMPLES = """
  ./launch.sh evaluate-pretrained runs/bert-mini --texts held-out.txt --blimp blimp/data
  ./launch.sh evaluate-pretrained bert-base-uncased/ --blimp blimp/data --blimp-limit 100 --json
  ./launch.sh evaluate-pretrained runs/bert-mini --finetune configs/finetune/transfer/*.yaml --data data/ --seeds 5
  ./launch.sh evaluate-pretrained runs/bert-mini --finetune configs/finetune/transfer/cola.yaml --data data/ \\
      --grid-set training.learning_rate=1e-4,3e-4,1e-3
  ./launch.sh evaluate-pretrained exported/other --texts held-out.txt --out scores/"""


def add_to(commands: Any) -> None:
    """Add `evaluate-pretrained` to the subcommands of a parser."""
    purpose = "score a pretrained encoder: held-out text, BLiMP, fine-tunings"
    parser = add_command(commands, "evaluate-pretrained", _run, purpose, _EXAMPLES)
    add_run(parser, "model", "a run, an export or a released model")
    parser.add_argument(
        "--out",
        type=local_path,
        default=_OUT,
        metavar="DIR",
        help=f"folder of all results (default: {_OUT})",
    )
    purpose = "score checkpoints of the run MODEL into its probes.jsonl as they are saved, until the last"
    add_follow(parser, f"{purpose} (evaluation.probes does so from the config)")
    parser.add_argument("--pid", type=positive_int, metavar="PID", help="--follow: end when this process is gone")
    parser.add_argument("--dry-run", action="store_true", help="check the options, then exit")
    parser.add_argument("--name", metavar="NAME", help="of the model in the results (default: that of its folder)")
    parser.add_argument("--json", action="store_true", help="print the model's scores as JSON instead of a table")
    _add_predictions(parser)
    _add_finetunings(parser)


def check(arguments: argparse.Namespace) -> None:
    """Refuse options without effect, and paths that do not exist."""
    predicts = bool(arguments.texts or arguments.blimp)
    if not (predicts or arguments.finetune):
        raise InputError("evaluate-pretrained: nothing to measure. Give --texts, --blimp or --finetune.")
    if (arguments.out / CONFIG_FILE).exists():
        raise InputError(f"--out: {arguments.out} is the folder of a run, whose {SCORES} stays. Give another folder.")
    needs = {
        "--length": (arguments.length != 128, bool(arguments.texts), "--texts"),
        "--text-scores": (arguments.text_scores != _TEXT_SCORES, bool(arguments.texts), "--texts"),
        "--blimp-limit": (arguments.blimp_limit, bool(arguments.blimp), "--blimp"),
        "--seeds": (arguments.seeds != 3, bool(arguments.finetune), "--finetune"),
        "--precision": (arguments.precision != "fp32", predicts, "--texts or --blimp"),
        "--compile": (arguments.compile, predicts, "--texts or --blimp"),
        "--pid": (arguments.pid, arguments.follow, "--follow"),
        **{
            f"--{option.replace('_', '-')}": (getattr(arguments, option), bool(arguments.finetune), "--finetune")
            for option in ("data", "no_random", "parallel", "grid_set", "set")
        },
    }
    for option, (given, has_effect, needed) in needs.items():
        if given and not has_effect:
            raise InputError(f"{option}: has no effect without {needed}. Give that, or leave {option} out.")
    unused = {"--out": str(arguments.out) != _OUT, "--name": arguments.name, "--json": arguments.json}
    for option, given in unused.items():
        if arguments.follow and given:
            raise InputError(f"{option}: has no effect with --follow, which writes into the run. Leave it out.")
    given = {"--texts": arguments.texts, "--blimp": [arguments.blimp], "--finetune": arguments.finetune}
    for option, paths in given.items():
        if missing := [path for path in paths if path is not None and not path.exists()]:
            raise InputError(f"{option}: {missing[0]} does not exist.")


def _run(arguments: argparse.Namespace) -> None:
    check(arguments)  # before torch is loaded
    if arguments.dry_run:
        return
    if not arguments.model.is_dir():
        hint = hub_hint(arguments.model)
        raise InputError(f"{arguments.model}: no such folder. Give a released model, an export or a run.{hint}")
    from finetune.scores import command

    command.run(arguments)


def _add_predictions(parser: argparse.ArgumentParser) -> None:
    """What needs a head for masked language modeling."""
    parser.add_argument(
        "--texts",
        nargs="+",
        action="extend",
        type=local_path,
        default=[],
        metavar="PATH",
        help="score on text that the model was not trained on; bits of common words compare vocabularies: "
        "plain text (one document a file), JSONL with `text`, "
        "WikiExtractor's files, or folders of them",
    )
    parser.add_argument(
        "--text-scores",
        nargs="+",
        choices=_TEXT_SCORES,
        default=_TEXT_SCORES,
        metavar="SCORE",
        help=f"--texts: only some of {', '.join(_TEXT_SCORES)}",
    )
    parser.add_argument(
        "--length",
        type=positive_int,
        default=128,
        metavar="N",
        help="--texts: tokens of a sequence, for bits per character and accuracy (default: 128)",
    )
    parser.add_argument("--blimp", type=local_path, metavar="DIR", help="score on BLiMP: folder with its .jsonl files")
    parser.add_argument(
        "--blimp-limit", type=positive_int, default=0, metavar="N", help="score only N pairs of each paradigm"
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="--texts, --blimp: precision of the computation (default: fp32)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="--texts, --blimp: compile the layers with torch.compile; faster for a whole BLiMP, but it starts later",
    )


def _add_finetunings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--finetune",
        nargs="+",
        action="extend",
        type=local_path,
        default=[],
        metavar="CONFIG",
        help="fine-tune with these configs, such as those in configs/finetune/transfer",
    )
    parser.add_argument(
        "--data",
        type=local_path,
        metavar="DIR",
        help="--finetune: folder that relative paths of data begin at",
    )
    parser.add_argument(
        "--seeds",
        type=positive_int,
        default=3,
        metavar="N",
        help="--finetune: runs of each config, with seeds seed, seed + 1, ... (default: 3)",
    )
    parser.add_argument(
        "--no-random",
        action="store_true",
        help="--finetune: leave out the same fine-tunings from random weights of the model's shape",
    )
    parser.add_argument(
        "--parallel",
        type=positive_int,
        default=0,
        metavar="N",
        help="--finetune: concurrent runs (default: one per GPU, or one per machine without GPUs)",
    )
    parser.add_argument(
        "--grid-set",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="--finetune: each config takes the best of these values of a setting of training, for the checkpoint and "
        "for random weights apart; may be repeated",
    )
    add_set(parser, "--finetune: override a setting of all configs; may be repeated")
