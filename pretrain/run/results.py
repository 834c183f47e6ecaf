"""Results of the Python API. A notebook displays them as the command prints them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from pretrain.common.packages import expect
from pretrain.common.records import is_training, read_records
from pretrain.config import ConfigT

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class SavedOutput:
    """A prepared corpus or an export: its folder on this machine, and its location (folder or address) as given."""

    folder: Path
    location: Path | str
    summary: str

    def __repr__(self) -> str:
        return self.summary


@dataclass(frozen=True, repr=False)
class Run(Generic[ConfigT]):
    """A finished run; `trained` is False if it had already finished before, so that nothing was done."""

    config: ConfigT
    trained: bool

    @property
    def folder(self) -> Path:
        """Return the run folder on this machine."""
        return self.config.folder

    @property
    def location(self) -> Path | str:
        """Return the address at which the run is stored, or its folder."""
        return self.config.address or self.folder

    def metrics(self) -> DataFrame:
        """Return the training records of metrics.jsonl as rows; docs/reference/metrics.md explains the columns."""
        return _table(filter(is_training, read_records(self.folder)))

    def evaluations(self) -> DataFrame:
        """Return the evaluations on held-out data as rows."""
        return _table(record for record in read_records(self.folder) if "split" in record)

    def __repr__(self) -> str:
        return f"{self.location}: finished."


def _table(records: Iterable[Mapping[str, Any]]) -> DataFrame:
    expect("tables of metrics", "pandas")
    from pandas import DataFrame

    return DataFrame(records)
