"""The command `evaluate-pretrained`: the parts that were asked for, one after another, then table, JSON and page."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from finetune.experiments.grid import parse_grid
from finetune.experiments.results import show
from finetune.scores import held_out
from finetune.scores.blimp import blimp_score, read_blimp
from finetune.scores.finetuning import finetuning_scores
from finetune.scores.finetuning_runs import FinetuningSettings, read_plans
from finetune.scores.follow import follow
from finetune.scores.held_out import HeldOutSettings, held_out_score
from finetune.scores.masked_model import ModelSettings, fingerprint
from finetune.scores.record import MODELS, Record, read_record
from finetune.scores.text_scores import PARTS, WHY_NOT, text_scores
from finetune.scores.view import score_table, write_scores_page
from pretrain.checkpoint.released import read_released
from pretrain.common.errors import InputError, RunError
from pretrain.common.files import write_json
from pretrain.common.run_files import SCORES
from pretrain.common.thread_waits import sleeping_when_crowded

PAGE = "scores.html"


def run(arguments: argparse.Namespace) -> None:
    """Evaluate a checkpoint; what an earlier call measured in the same way is not measured again.

    Raises:
        InputError: options without effect, or a model or data that cannot be read.
        MachineError: layers are to be compiled, and there is no C++ compiler that works.
        RunError: fine-tunings failed or were stopped; all else is written.
    """
    if arguments.follow:
        follow(arguments.model, lambda **given: _measure(argparse.Namespace(**vars(arguments) | given)), arguments.pid)
        return
    record, failure = _measure(arguments)
    _report(arguments, record)
    if failure is not None:
        raise failure


def _measure(arguments: argparse.Namespace) -> tuple[Record, RunError | None]:
    """(the scores, why fine-tunings are missing)."""
    name = _name(arguments)
    if arguments.blimp:
        read_blimp(arguments.blimp, arguments.blimp_limit)
    read_plans(arguments.model, _finetunings(arguments))  # the parts before the fine-tunings may take hours
    record = Record(arguments.out / MODELS / f"{name}.json", _identity(arguments.model, name))
    with sleeping_when_crowded():
        skipped = _predictions(arguments, record)
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    if arguments.finetune:
        try:
            finetuning_scores(arguments.model, arguments.out, name, _finetunings(arguments), record=record)
        except InputError:
            raise
        except RunError as error:
            return record, error
    return record, None


def _name(arguments: argparse.Namespace) -> str:
    name = arguments.name or re.sub(r"[^A-Za-z0-9._-]+", "-", arguments.model.resolve().name).strip("-.")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}", name):
        raise InputError(
            f"--name: {name!r} cannot name the results. Give up to 48 letters, digits, dots, dashes and underscores."
        )
    return name


def _identity(folder: Path, name: str) -> dict[str, Any]:
    """What the results say of the model."""
    released = read_released(folder)
    shape = released.model
    return {
        "name": name,
        "folder": str(folder),
        "family": released.family,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "vocabulary": released.vocabulary_size,
        "parameters": sum(tensor.numel() for tensor in released.backbone.values()),
        "fingerprint": fingerprint(folder),
    }


def _predictions(arguments: argparse.Namespace, record: Record) -> list[str]:
    """Measure what needs a head for masked language modeling. Returns why a part is skipped.

    Without such a head both parts are skipped if there are fine-tunings to do; else that is the command's error.
    """
    if not (arguments.texts or arguments.blimp):
        return []
    _, missing = read_released(arguments.model).prediction_state()
    if missing and arguments.finetune:
        parts = [name for name, given in (("--texts", arguments.texts), ("--blimp", arguments.blimp)) if given]
        return [f"{' and '.join(parts)}: {arguments.model} has no head for masked language modeling ({missing})."]
    settings = ModelSettings(arguments.precision, arguments.compile)
    skipped: list[str] = []
    if arguments.texts:
        how, given = HeldOutSettings(arguments.length), arguments.text_scores
        if held_out.PART in given:
            held_out_score(arguments.model, arguments.texts, how=how, settings=settings, record=record)
        parts = [part for part in PARTS if part in given]
        found = text_scores(arguments.model, arguments.texts, parts=parts, settings=settings, record=record)
        skipped = [f"{part.replace('_', ' ')}: {one[WHY_NOT]}." for part, one in found.items() if WHY_NOT in one]
    if arguments.blimp:
        blimp_score(arguments.model, arguments.blimp, limit=arguments.blimp_limit, settings=settings, record=record)
    return skipped


def _finetunings(arguments: argparse.Namespace) -> FinetuningSettings:
    return FinetuningSettings(
        configs=tuple(arguments.finetune),
        seeds=arguments.seeds,
        random=not arguments.no_random,
        data=arguments.data,
        overrides=tuple(arguments.set),
        parallel=arguments.parallel,
        grid=parse_grid("", arguments.grid_set),
    )


def _report(arguments: argparse.Namespace, record: Record) -> None:
    """Write scores.json and the page of all models in the folder, and print this model's scores beside theirs."""
    out: Path = arguments.out
    models = [read_record(path) for path in sorted((out / MODELS).glob("*.json"))]
    write_json(out / SCORES, {"models": models})
    page = write_scores_page(models, out / PAGE)
    if arguments.json:
        print(json.dumps(record.content, indent=2, ensure_ascii=False))
        return
    show(score_table(models))
    print(f"{out / SCORES}, {page.resolve().as_uri()}")
