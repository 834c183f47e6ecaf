"""Reads Parquet files and Hugging Face data sets; class indices are converted to names."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.tasks.datasets.table import Key, RequestedColumns, Table
from pretrain.common.errors import InputError
from pretrain.common.files import reject_lfs_pointer
from pretrain.common.packages import expect


def read_dataset(
    name: str,
    columns: Sequence[Key],
    *,
    subset: str = "",
    split: str = "train",
    revision: str = "",
    where: str = "dataset",
    optional: Collection[Key] = (),
) -> Table:
    """Read the named `columns` of a split of a folder written by save_to_disk, or of a data set on the hub.

    Class indices become names. `where` is the section of the config, for errors.
    """
    from pretrain.corpus.sources.huggingface import hub_dataset, saved_dataset

    requested = RequestedColumns(columns, optional)
    source = f"{name}[{split}]"
    folder = Path(name).expanduser()
    if folder.is_dir():
        if split != "train" and not (folder / "dataset_dict.json").exists():
            raise InputError(f"{name}: has no splits, so no {split!r}. Give a folder written by a DatasetDict.")
        dataset = saved_dataset(str(folder), split)
        names = dataset.column_names
        selected = list(requested.resolve(names, source).values())
        values = dataset.with_format(None).select_columns(selected)[:]
    else:
        if not revision:
            raise InputError(
                f"{where}.revision: empty, and {name} is not a folder. A hub data set changes over time; give the "
                f"commit to read, as shown on https://huggingface.co/datasets/{name}/commits/main"
            )
        dataset = hub_dataset(where, name, subset, split, revision)
        rows = list(dataset)
        names = list(rows[0] if rows else dict.fromkeys(columns))
        selected = requested.resolve(names, source).values()
        values = {name: [row.get(name) for row in rows] for name in selected}
    return _to_table(values, requested.resolve(names, source), dataset.features or {}, source)


def read_parquet(path: Path, requested: RequestedColumns) -> Table:
    """Read the requested columns of a Parquet file."""
    expect(str(path), "pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise InputError(f"{path}: {'a folder, not a file' if path.is_dir() else 'not found'}. Check the path.")
    reject_lfs_pointer(path)
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            names = requested.resolve(schema.names, str(path))
            table = file.read(None if requested.read_all else list(names.values()))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not a Parquet file ({str(error).splitlines()[0]}).") from None
    values = {name: _arrow_values(path, table[name]) for name in table.column_names}
    selected = _to_table(values, names, _arrow_features(schema.metadata or {}), str(path))
    if not requested.read_all:
        return selected
    other_names = [name for name in values if name not in names.values()]
    rows = zip(*(values[name] for name in other_names), strict=True) if other_names else [()] * len(selected)
    return replace(selected, other_cells=[dict(zip(other_names, row, strict=True)) for row in rows])


def _to_table(
    values: Mapping[str, list[Any]], names: Mapping[Key, str], features: Mapping[str, Any], source: str
) -> Table:
    """Return the columns of `names` ({column: its name in `values`}), with class names instead of indices."""
    classes_by_column: dict[Key, list[str]] = {
        column: classes for column, name in names.items() if (classes := _class_names(features.get(name)))
    }
    cells: dict[Key, list[Any]] = {
        column: _with_class_names(values[name], classes_by_column.get(column, [])) for column, name in names.items()
    }
    rows = len(next(iter(cells.values()), []))
    return Table(cells, source, range(1, 1 + rows), ": row ", classes_by_column)


def _arrow_values(path: Path, column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        for row, value in enumerate(column, 1):  # noqa: B007
            try:
                value.as_py()
            except UnicodeDecodeError:
                break
        raise InputError(f"{path}: row {row}: bytes that are not UTF-8. Write the file again in UTF-8.") from None


def _arrow_features(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    """Return the features that `datasets` wrote into a Parquet file; {} for other files."""
    try:
        return json.loads(metadata[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}


def _class_names(feature: Any) -> list[str]:
    """Return the class names of a feature, or of the items of a list feature; [] if it has none."""
    for _ in range(2):
        names = feature.get("names") if isinstance(feature, dict) else getattr(feature, "names", None)
        if names:
            return list(names)
        feature = feature.get("feature") if isinstance(feature, dict) else getattr(feature, "feature", None)
    return []


def _with_class_names(values: list[Any], names: list[str]) -> list[Any]:
    """Replace class indices by names; -1, which `datasets` writes for a missing label, by None."""

    def to_name(value: Any) -> Any:
        if isinstance(value, list):
            return [to_name(item) for item in value]
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else None

    return [to_name(value) for value in values] if names else values
