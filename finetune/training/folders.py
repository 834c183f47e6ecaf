"""Finds a fine-tuned model in its run folder. Imports nothing heavy, so that a wrong path is an immediate error."""

from pathlib import Path

from pretrain.common.errors import InputError

MODEL = "model"
SETTINGS = "finetune.json"


def find_model(folder: Path) -> Path | None:
    """Return the folder of the fine-tuned model: `folder` or, in a run folder, `model`; None if neither is one."""
    return next((path for path in (folder, folder / MODEL) if (path / SETTINGS).is_file()), None)


def model_folder(folder: Path) -> Path:
    """Return the folder that `find_model` returns; `InputError` if there is none."""
    if path := find_model(folder):
        return path
    raise InputError(
        f"{folder / SETTINGS}: not found. Give a fine-tuned model or its run folder, such as runs/my-task."
    )
