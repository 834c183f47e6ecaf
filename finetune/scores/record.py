"""The scores of one model as a JSON file that is written with each result, so that an evaluation can continue."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.scores.masked_model import fingerprint
from pretrain.common.errors import InputError
from pretrain.common.files import locked, write_json

MODELS = "models"  # folder of the records, among all results
MODEL = "model"  # the part that says whose scores these are


class Record:
    """The file `path`; its parts are those of an evaluation, each with how it was measured.

    Args:
        path: created with the first result.
        model: whose scores these are; `fingerprint` identifies it.

    Raises:
        InputError: the file has the scores of another model, or is damaged.
    """

    def __init__(self, path: Path, model: Mapping[str, Any]) -> None:
        self.path = path
        self._model = dict(model)
        self._content = self._read()

    @property
    def content(self) -> dict[str, Any]:
        """The whole record."""
        return self._content

    def check(self, folder: Path) -> None:
        """Raise `InputError` if the checkpoint in `folder` is not the one whose scores these are."""
        if fingerprint(folder) != self._model["fingerprint"]:
            raise InputError(
                f"{folder}: its weights have changed since the evaluation began. If its training saves checkpoints, "
                "wait for its end, or export it and evaluate the export."
            )

    def read(self, part: str, how: Mapping[str, Any]) -> dict[str, Any]:
        """The scores of a part; {} if there are none, or they were measured in another way."""
        found = self._content.get(part, {})
        return found.get("scores", {}) if found.get("how") == how else {}

    def write(self, part: str, how: Mapping[str, Any], scores: Mapping[str, Any], *, beside: bool = False) -> None:
        """Replace the scores of a part, and write the file; other processes may write other parts of it.

        With `beside`, scores of other names that were measured in the same way stay.
        """
        with locked(self.path.with_name(f".{self.path.name}.lock")):
            self._content = self._read()
            before = self.read(part, how) if beside else {}
            self._content[part] = {"how": dict(how), "scores": {**before, **scores}}
            write_json(self.path, self._content)

    def remove(self, part: str) -> None:
        """Remove a part, if it is there, and write the file."""
        with locked(self.path.with_name(f".{self.path.name}.lock")):
            self._content = self._read()
            if self._content.pop(part, None) is not None:
                write_json(self.path, self._content)

    def _read(self) -> dict[str, Any]:
        """The file's content, of this model."""
        content = read_record(self.path) if self.path.is_file() else {}
        before = content.get(MODEL, {})
        if content and before.get("fingerprint") != self._model["fingerprint"]:
            raise InputError(
                f"{self.path}: has the scores of another model ({before.get('folder')}, or what it was before), or of "
                "an earlier version of this command. Give another --name or --out, or remove the file."
            )
        return {**content, MODEL: self._model}


def read_record(path: Path) -> dict[str, Any]:
    """The content of a record. Raises `InputError` if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content.get(MODEL), dict):
            raise ValueError("no model")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path}: damaged ({error}). Remove it; the same command then measures again.") from None
    return content
