"""The command `evaluate-pretrained`: computes the requested scores, then prints a table and writes an HTML page."""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.scores import blimp
from finetune.scores.blimp import blimp_score, data_digest, read_blimp
from finetune.scores.follow import follow
from finetune.scores.held_out import read_documents
from finetune.scores.masked_model import MaskedModel, fingerprint
from finetune.scores.record import check_model, write_scores
from finetune.scores.text_scores import MISSING_REASON, text_scores
from finetune.scores.view import score_table, write_scores_page
from pretrain.checkpoint.released import ReleasedModel, read_released
from pretrain.common.errors import InputError
from pretrain.common.run_files import SCORES
from pretrain.common.thread_waits import sleep_when_contended
from pretrain.common.wording import print_table

PAGE = "scores.html"


def run(arguments: argparse.Namespace) -> None:
    """Evaluate a checkpoint.

    Raises `InputError` for a model or data that cannot be read.
    """
    if arguments.follow:
        follow(arguments.model, lambda folder: _results(folder, read_released(folder), arguments), arguments.pid)
        return
    out, released = arguments.out, read_released(arguments.model)
    description, models = _describe(arguments, released), list[dict[str, Any]]()
    check_model(out, description)
    for score_name, result in _results(arguments.model, released, arguments):
        models = write_scores(out, description, {score_name: result})
    page = write_scores_page(models, out / PAGE)
    print_table(score_table(models))
    print(f"{out / SCORES}, {page.resolve().as_uri()}")


def _results(
    folder: Path, released: ReleasedModel, arguments: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of the score, {"how": settings, "scores": values}) as soon as each score is computed."""
    documents = read_documents(arguments.texts)
    paradigms = read_blimp(arguments.blimp, arguments.blimp_limit) if arguments.blimp else []
    model = MaskedModel(folder, arguments.precision, released)
    score_names = arguments.text_scores if documents else ()
    with sleep_when_contended():
        for score_name, result in text_scores(model, documents, score_names, arguments.length):
            if MISSING_REASON in result["scores"]:
                print(f"skipped: {score_name.replace('_', ' ')}: {result['scores'][MISSING_REASON]}.", file=sys.stderr)
            yield score_name, result
        if paradigms:
            how = {"data": data_digest(paradigms), "limit": arguments.blimp_limit, "precision": model.precision}
            yield blimp.NAME, {"how": how, "scores": blimp_score(model, paradigms).as_data()}


def _describe(arguments: argparse.Namespace, released: ReleasedModel) -> dict[str, Any]:
    """Return the description of the model for scores.json."""
    folder, shape = arguments.model, released.model
    name = arguments.name or re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.")
    if not name:
        raise InputError(f"{folder}: this name cannot be used for the results. Give --name.")
    return {
        "name": name,
        "folder": str(folder),
        "family": released.family,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "vocabulary": released.vocabulary_size,
        "parameters": sum(tensor.numel() for tensor in released.backbone.values()),
        "fingerprint": fingerprint(folder, released),
    }
