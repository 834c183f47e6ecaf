"""The file scores.json of an output folder: the scores of all models evaluated with this --out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.files import locked, write_json
from pretrain.common.run_files import SCORES

MODEL = "model"  # key of the model's description in its entry; the other keys are names of scores


def read_models(out: Path) -> list[dict[str, Any]]:
    """Read the scores of all models from scores.json in `out`, sorted by name. Raises `InputError` if it is damaged."""
    path = out / SCORES
    try:
        models = json.loads(path.read_text(encoding="utf-8"))["models"] if path.is_file() else []
        return sorted(models, key=lambda entry: entry[MODEL]["name"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error!r}). Remove it, and evaluate the models again.") from None


def write_scores(out: Path, model: Mapping[str, Any], scores: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Add or replace scores of a model in the folder `out`, and return the scores of all its models.

    Other processes may write into the folder at the same time. Raises `InputError` as `check_model` does.
    """
    with locked(out / f".{SCORES}.lock"):
        check_model(out, model)
        models = {entry[MODEL]["name"]: entry for entry in read_models(out)}
        models[model["name"]] = {**models.get(model["name"], {}), MODEL: dict(model), **scores}
        write_json(out / SCORES, {"models": list(models.values())})
        return read_models(out)


def check_model(out: Path, model: Mapping[str, Any]) -> None:
    """Raise `InputError` if `out` has scores of a different model with the same name, or its scores.json is damaged."""
    for entry in read_models(out):
        recorded = entry[MODEL]
        if recorded["name"] == model["name"] and recorded["fingerprint"] != model["fingerprint"]:
            raise InputError(
                f"{out / SCORES}: has scores of another model named {recorded['name']} ({recorded['folder']}, or an "
                "older version of it). Give another --name or --out."
            )
