"""Where a fine-tuned model is in its run folder. Imports nothing heavy, so that a wrong path is refused at once."""

from pathlib import Path

from pretrain.common.errors import InputError

MODEL = "model"
SETTINGS = "finetune.json"


def find_model(folder: Path) -> Path | None:
    """The folder of the fine-tuned model: `folder` itself, or the `model` of a run folder; None if neither is one."""
    return next((place for place in (folder, folder / MODEL) if (place / SETTINGS).is_file()), None)


def model_folder(folder: Path) -> Path:
    """As `find_model`; `InputError` if there is none."""
    if place := find_model(folder):
        return place
    raise InputError(
        f"{folder / SETTINGS}: not found. Give a fine-tuned model or its run folder, such as runs/my-task."
    )
