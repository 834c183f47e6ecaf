"""The file scores.json of an output folder: the scores of all models evaluated into it (`--out`)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.files import locked, write_json
from pretrain.common.run_files import SCORES

MODEL = "model"  # key of the model's description in each entry of scores.json; the other keys are names of scores


def read_models(out: Path) -> list[dict[str, Any]]:
    """Read the scores of all models from scores.json in `out`, sorted by name. Raises `InputError` if it is damaged."""
    path = out / SCORES
    try:
        models = json.loads(path.read_text(encoding="utf-8"))["models"] if path.is_file() else []
        return sorted(models, key=lambda entry: entry[MODEL]["name"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error!r}). Remove it, and evaluate the models again.") from None


def write_scores(out: Path, model_info: Mapping[str, Any], scores: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Add or replace scores of a model in the folder `out`, and return the scores of all its models.

    Other processes may write there at the same time. `model_info` has the keys name, folder and fingerprint, among
    others. Raises `InputError` in the same cases as `check_model`.
    """
    with locked(out / f".{SCORES}.lock"):
        check_model(out, model_info)
        models = {entry[MODEL]["name"]: entry for entry in read_models(out)}
        models[model_info["name"]] = {**models.get(model_info["name"], {}), MODEL: dict(model_info), **scores}
        write_json(out / SCORES, {"models": list(models.values())})
        return read_models(out)


def check_model(out: Path, model_info: Mapping[str, Any]) -> None:
    """Raise `InputError` if `out` has scores of a different model with the same name, or its scores.json is damaged."""
    for entry in read_models(out):
        recorded = entry[MODEL]
        if recorded["name"] == model_info["name"] and recorded["fingerprint"] != model_info["fingerprint"]:
            raise InputError(
                f"{out / SCORES}: has scores of another model named {recorded['name']}, or an earlier version of this "
                f"one (evaluated from {recorded['folder']}). Choose another --name or --out."
            )
