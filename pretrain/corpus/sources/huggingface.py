"""Data sets of Hugging Face: a folder written by save_to_disk, or a pinned commit of one on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.config import SourceConfig
from pretrain.corpus import inputs
from pretrain.corpus.inputs import Input, Piece, Span
from pretrain.corpus.text_columns import ROWS_PER_READ, ColumnReader


class Reader(ColumnReader):
    """Rows of a data set of the hub, or of a folder written by save_to_disk."""

    def find(self, where: str) -> list[Input]:
        source, folder = self.config, Path(self.config.dataset)
        if folder.is_dir():
            return [_saved_input(source, where)]
        if not source.revision:
            raise InputError(
                f"{where}.revision: empty. A hub data set changes over time; give the commit to read, as shown on "
                f"https://huggingface.co/datasets/{source.dataset}/commits/main"
            )
        shards = hub_dataset(source, where).num_shards
        return [Input((f"hub:{source.dataset}@{source.revision}#{shard}/{shards}",), 0) for shard in range(shards)]

    def cut(self, item: Input) -> Iterator[Span]:
        if item.is_remote:
            shard, shards = item.paths[0].rpartition("#")[2].split("/")
            yield Span(start=int(shard), end=int(shards))
            return
        rows = len(saved_dataset(self.config))
        step = max(1, rows * inputs.PIECE_BYTES // max(item.bytes, 1))
        for start in range(0, max(rows, 1), step):
            end = min(start + step, rows)
            yield Span(start=start, end=end, bytes=item.bytes * (end - start) // max(rows, 1))

    def values(self, piece: Piece) -> Iterator[Any]:
        column = self.config.text_column
        if piece.paths and piece.paths[0].startswith("hub:"):
            for row in hub_dataset(self.config, "huggingface").shard(num_shards=piece.end, index=piece.start):
                yield row[column]
            return
        dataset = saved_dataset(self.config).select_columns([column])
        for start in range(piece.start, piece.end, ROWS_PER_READ):
            yield from dataset[start : min(start + ROWS_PER_READ, piece.end)][column]


def saved_dataset(source: SourceConfig) -> Any:
    """The `datasets.Dataset` of the split in a folder written by save_to_disk; `InputError` if it is none."""
    import datasets

    try:
        dataset = datasets.load_from_disk(source.dataset)
    except (OSError, ValueError) as error:
        raise InputError(f"{source.dataset}: not a folder written by save_to_disk ({error}).") from None
    if isinstance(dataset, datasets.DatasetDict):
        if source.split not in dataset:
            raise InputError(f"{source.dataset}: no split {source.split!r}; it has {', '.join(dataset)}.")  # pyright: ignore[reportArgumentType, reportCallIssue]
        dataset = dataset[source.split]
    return dataset


def hub_dataset(source: SourceConfig, where: str) -> Any:
    """The `datasets.IterableDataset` of the split on the hub, streamed. `where` is the config's place, for errors."""
    import datasets

    try:
        return datasets.load_dataset(
            source.dataset,
            source.subset or None,
            split=source.split,
            revision=source.revision,
            streaming=True,
        )
    except Exception as error:  # any error of the hub's client: no network, no such name, commit or split
        raise InputError(
            f"{where}.dataset: {source.dataset}@{source.revision}: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from None


def _saved_input(source: SourceConfig, where: str) -> Input:
    dataset = saved_dataset(source)
    if source.text_column not in dataset.column_names:
        raise InputError(
            f"{where}.text_column: {source.dataset} has no column {source.text_column!r}; "
            f"it has {', '.join(dataset.column_names)}."
        )
    files = sorted(Path(file["filename"]) for file in dataset.cache_files)
    return Input(tuple(map(str, files)), sum(file.stat().st_size for file in files))
