"""Hugging Face data sets: a folder written by save_to_disk, or a pinned commit of a data set on the Hub."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError, MachineError, RunError
from pretrain.common.packages import expect
from pretrain.config import SourceConfig
from pretrain.corpus import inputs
from pretrain.corpus.inputs import Chunk, Input, Span
from pretrain.corpus.text_columns import ROWS_PER_READ, ColumnReader
from pretrain.storage.objects import ObjectStore


class Reader(ColumnReader):
    """Rows of a data set on the hub, or of a folder written by save_to_disk."""

    def find(self, config_key: str) -> list[Input]:
        source, folder = self.config, Path(self.config.dataset)
        if folder.is_dir():
            return [_saved_input(source, config_key)]
        if not source.revision:
            raise InputError(
                f"{config_key}.revision: empty. A hub data set changes over time; give the commit to read, as shown on "
                f"https://huggingface.co/datasets/{source.dataset}/commits/main"
            )
        dataset = hub_dataset(config_key, source.dataset, source.subset, source.split, source.revision)
        if dataset.column_names is not None:  # None for some data sets until a row is read
            _check_column(source, f"{config_key}.text_column: ", dataset.column_names)
        count = dataset.num_shards
        return [Input((f"hub:{source.dataset}@{source.revision}#{shard}/{count}",), 0) for shard in range(count)]

    def cut(self, item: Input) -> Iterator[Span]:
        if item.is_on_hub:
            shard, shard_count = item.paths[0].rpartition("#")[2].split("/")
            yield Span(start=int(shard), end=int(shard_count))
            return
        rows = len(saved_dataset(self.config.dataset, self.config.split))
        step = max(1, rows * inputs.CHUNK_BYTES // max(item.bytes, 1))
        for start in range(0, max(rows, 1), step):
            end = min(start + step, rows)
            yield Span(start=start, end=end, bytes=item.bytes * (end - start) // max(rows, 1))

    def values(self, chunk: Chunk) -> Iterator[Any]:
        column = self.config.text_column
        if chunk.paths and chunk.paths[0].startswith("hub:"):
            for row in _hub_rows(self.config, chunk):
                _check_column(self.config, "", row)
                yield row[column]
            return
        dataset = saved_dataset(self.config.dataset, self.config.split).select_columns([column])
        for start in range(chunk.start, chunk.end, ROWS_PER_READ):
            yield from dataset[start : min(start + ROWS_PER_READ, chunk.end)][column]


def saved_dataset(folder: str, split: str) -> Any:
    """Load a split from a folder written by save_to_disk as `datasets.Dataset`. Raises `InputError` if that fails."""
    expect(folder, "datasets")
    import datasets

    try:
        dataset = datasets.load_from_disk(folder)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: not a folder written by save_to_disk ({error}).") from None
    except IndexError:  # raised by `datasets`, which writes no file for a data set without rows
        raise InputError(f"{folder}: it, or one of its splits, has no rows. Remove what is empty.") from None
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise InputError(f"{folder}: no split {split!r}; it has {', '.join(dataset)}.")  # pyright: ignore[reportArgumentType, reportCallIssue]
        dataset = dataset[split]
    return dataset


def hub_dataset(config_key: str, name: str, subset: str, split: str, revision: str) -> Any:
    """Open a split on the hub as a `datasets.IterableDataset`. `config_key` is the source's key in the config."""
    expect(f"{config_key}.dataset", "datasets")
    from huggingface_hub import constants

    try:
        if not constants.HF_HUB_OFFLINE:  # check access first: `datasets` retries, and gives one error for all causes
            ObjectStore().info(f"hf://datasets/{name}@{revision}/README.md")
        return _stream_split(name, subset, split, revision)
    except RunError as error:
        raise type(error)(f"{config_key}.dataset: {error}") from None
    except Exception as error:  # any error of the hub's client
        error_class = MachineError if isinstance(error, ConnectionError) else InputError
        reason = f"{type(error).__name__}: {inputs.one_line(error)}"
        raise error_class(f"{config_key}.dataset: {name}@{revision}: {reason}") from None


def _stream_split(name: str, subset: str, split: str, revision: str) -> Any:
    import datasets

    return datasets.load_dataset(name, subset or None, split=split, revision=revision, streaming=True)


def _hub_rows(source: SourceConfig, chunk: Chunk) -> Iterator[dict[str, Any]]:
    """Yield the rows of a shard on the hub.

    Raises `MachineError` for any error of the hub's client, such as a lost connection: this is not a fault of the data,
    and a partly read shard must not be treated as complete.
    """
    import pyarrow as pa

    try:
        yield from _stream_split(source.dataset, source.subset, source.split, source.revision).shard(
            num_shards=chunk.end, index=chunk.start
        )
    except pa.ArrowException:
        raise  # a fault in the data, which is counted
    except Exception as error:
        raise MachineError(
            f"{chunk.paths[0]}: cannot be read to its end ({type(error).__name__}: {inputs.one_line(error)}). "
            "Check the connection and run the same command again; it resumes."
        ) from error


def _check_column(source: SourceConfig, where: str, names: Collection[str]) -> None:
    if source.text_column not in names:
        raise InputError(f"{where}{source.dataset} has no column {source.text_column!r}; it has {', '.join(names)}.")


def _saved_input(source: SourceConfig, config_key: str) -> Input:
    dataset = saved_dataset(source.dataset, source.split)
    _check_column(source, f"{config_key}.text_column: ", dataset.column_names)
    files = sorted(Path(file["filename"]) for file in dataset.cache_files)
    return Input(tuple(map(str, files)), sum(file.stat().st_size for file in files))
