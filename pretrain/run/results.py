"""What the functions for Python return: a prepared corpus, a run that has trained, an export."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from pretrain.common.records import is_training, read_records
from pretrain.config import R

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class Corpus:
    """A prepared corpus: its folder, and what it holds as text."""

    folder: Path
    summary: str

    def card(self) -> dict[str, Any]:
        """The corpus card: sources, counts, shares and examples of what was left out."""
        return json.loads((self.folder / "card.json").read_text(encoding="utf-8"))

    def __repr__(self) -> str:
        return self.summary


@dataclass(frozen=True, repr=False)
class Run(Generic[R]):
    """A run that has trained to its end.

    Attributes:
        config: its settings.
        trained: whether it trained now; False if it was finished before.
    """

    config: R
    trained: bool = True

    @property
    def folder(self) -> Path:
        """The run folder on this machine."""
        return self.config.folder

    @property
    def place(self) -> Path | str:
        """The address at which the run is stored, or its folder."""
        return self.config.address or self.folder

    def metrics(self) -> DataFrame:
        """The training records of metrics.jsonl, a row each; docs/reference/metrics.md explains the columns."""
        return self._table("")

    def evaluations(self) -> DataFrame:
        """The evaluations on held-out data, a row each."""
        return self._table("split")

    def _table(self, field: str) -> DataFrame:
        from pandas import DataFrame

        records = read_records(self.folder)
        return DataFrame([one for one in records if (field in one if field else is_training(one))])

    def __repr__(self) -> str:
        last = next((one for one in reversed(read_records(self.folder)) if is_training(one) and one.get("loss")), None)
        return f"{self.place}: finished." + (f" Loss {last['loss']:.4f} at step {last['step']:,}." if last else "")


@dataclass(frozen=True, repr=False)
class Export:
    """A model in the Hugging Face layout, or in bertrain's own for the reason `own`.

    Attributes:
        folder: where it is on this machine.
        place: the address at which it is stored, or the folder.
        loader: the class of `transformers` that loads all of it; "" if none does.
        own: the settings for which `transformers` cannot load it; "" if it can.
    """

    folder: Path
    place: Path | str
    loader: str
    own: str

    def __repr__(self) -> str:
        if self.own:
            return f"{self.place}: written for bertrain's own commands. transformers cannot load it ({self.own})."
        return f"{self.place}: written. transformers loads it with {self.loader}.from_pretrained."
