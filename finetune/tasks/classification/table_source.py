"""Reads the tables of labeled examples that a config names: GLUE's folders, data sets or files."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from finetune.tasks.classification.settings import ClassificationSettings
from finetune.tasks.datasets import glue, tables
from finetune.tasks.datasets.annotations import labeled_rows
from finetune.tasks.datasets.arrow import read_dataset
from finetune.tasks.datasets.files import plain_suffix, reject_spreadsheet
from finetune.tasks.datasets.table import Converter, Key, Table, TableLayout
from pretrain.common.errors import InputError


class TableSource:
    """Reads the tables of one config; their columns are renamed to text, pair and label."""

    def __init__(self, settings: ClassificationSettings) -> None:
        self._settings = settings
        self._glue = glue.TASKS[settings.glue] if settings.glue else None

    def names_of_sets(self, split: str) -> tuple[str, ...]:
        """Return the names of the dev sets or of the test sets; `split` is dev or test."""
        if self._glue:
            return self._glue.dev if split == "dev" else self._glue.test
        return (split,) if getattr(self._settings, split) else ()

    @property
    def text_column(self) -> Key:
        """Name of the text column, or its index from 0."""
        return self._glue.text if self._glue else self._settings.text_column

    @property
    def pair_column(self) -> Key | None:
        """Name or index of the second text's column; None if examples are not pairs."""
        if self._glue:
            return self._glue.pair
        return None if self._settings.pair_column == "" else self._settings.pair_column

    def read(self, split: str) -> Table:
        """Read a labeled set that must exist."""
        table = self._read_split(split, labeled=True)
        if table is None:
            expected = glue.expected_files(self._settings.glue, self._settings.glue_dir, split)
            hint = " or set dev_share" if split == "dev" else ""
            raise InputError(f"classification.glue_dir: no {expected}. Download it{hint}.")
        return table

    def read_unlabeled(self, split: str) -> Table | None:
        """Read a set whose labels may be missing; None if GLUE's folder has no such file."""
        return self._read_split(split, labeled=False)

    def read_file(self, path: str, *, labeled: bool = True) -> Table:
        """Read another file, or a folder written by save_to_disk (of which the split named by the setting `dev`).

        A file with the training file's suffix is read with its settings, any other in the format of its suffix. If not
        `labeled`, labels may be missing, columns may be called `text` and `pair`, and `.txt` has one text per line.
        """
        settings, file = self._settings, Path(path).expanduser()
        keys = self.column_keys
        if file.is_dir():
            split = (settings.dev if settings.dataset else "") or "train"
            optional = self._optional_columns(labeled=labeled)
            table = read_dataset(str(file), [*keys.values()], split=split, optional=optional)
            return self._rename_columns(table)
        file_format, layout = tables.format_of(file), self._layout
        if file_format and file_format != tables.format_of(settings.train):
            quoting = settings.quoting if file_format == "tsv" else "auto"
            layout = TableLayout(encoding=settings.encoding, quoting=quoting, header=settings.header)
        if not labeled and not file_format and not layout.format:
            reject_spreadsheet(file)
            if plain_suffix(file) == ".txt" and "pair" not in keys:
                return tables.read_lines(file, settings.encoding)
            if not settings.glue:
                raise InputError(self._unknown_format_message(path))
        if settings.glue and file_format in ("", "tsv"):
            return glue.read_file(settings.glue, file, labeled=labeled)
        aliases = {} if labeled else {keys[name]: name for name in ("text", "pair") if name in keys}
        table = self._read_table(file, layout, labeled=labeled, aliases=aliases, read_all=True)
        return self._rename_columns(table)

    def _unknown_format_message(self, path: str) -> str:
        advice = "Name it .csv, .tsv, .jsonl, .json or .parquet"
        advice += "" if self.pair_column is not None else ", or .txt for one input per line"
        return f"{path}: its suffix does not name a table format. {advice}, or pass its lines on standard input."

    def origin(self, name: str) -> str:
        """Return where the set `name` comes from."""
        settings = self._settings
        if settings.glue:
            return f"GLUE {settings.glue} in {settings.glue_dir}"
        setting = getattr(settings, name, "")
        if name != "train" and settings.dev_share and not setting:
            return f"{settings.dev_share:.0%} of the training set, by class"
        if settings.dataset:
            dataset = " ".join(part for part in (settings.dataset, settings.subset) if part)
            return f"{dataset}, split {setting or 'train'}" + (f", {settings.revision}" if settings.revision else "")
        return setting

    def check_no_official_dev(self) -> None:
        """Raise `InputError` if `dev_share` is set for a task that has an official dev set."""
        if self._glue and self._read_split(self._glue.dev[0], labeled=True) is not None:
            raise InputError(
                f"classification.dev_share: {self._glue.title} has an official dev set. Set dev_share to 0."
            )

    def _read_split(self, split: str, *, labeled: bool) -> Table | None:
        settings = self._settings
        if settings.glue:
            return glue.read_split(settings.glue, settings.glue_dir, split)
        setting = getattr(settings, split)
        if not settings.dataset:
            return self._rename_columns(self._read_table(setting, self._layout, labeled=labeled))
        return self._rename_columns(
            read_dataset(
                settings.dataset,
                [*self.column_keys.values()],
                subset=settings.subset,
                split=setting or "train",
                revision=settings.revision,
                where="classification",
                optional=self._optional_columns(labeled=labeled),
            )
        )

    def _read_table(
        self,
        path: Path | str,
        layout: TableLayout,
        *,
        labeled: bool,
        aliases: Mapping[Key, str] = MappingProxyType({}),
        read_all: bool = False,
    ) -> Table:
        keys, optional = [*self.column_keys.values()], self._optional_columns(labeled=labeled)
        ids = ["id"] if keys.count("id") == 1 else []  # not if a setting names this column
        layout = replace(layout, convert=self._record_converter())
        return tables.read_table(
            path, keys, layout=layout, optional=optional, aliases=aliases, read_all=read_all, skip_if_repeated=ids
        )

    def _record_converter(self) -> Converter | None:
        """Return the function that converts records of annotation tools; None if the configured columns rule it out."""
        keys = self.column_keys
        text, label = keys["text"], keys.get("label")
        # If the config names a column "answer", that column is not Prodigy's.
        if not (isinstance(text, str) and isinstance(label, str)) or "answer" in keys.values():
            return None
        input_columns = [key for name, key in keys.items() if name != "label"]
        text_columns = [keys[name] for name in ("text", "pair") if name in keys]
        return partial(labeled_rows, text_columns=text_columns, label_column=label, inputs=input_columns)

    def _optional_columns(self, *, labeled: bool) -> list[Key]:
        """Return the columns that may be missing: ids, and labels if not `labeled`; but no column with another use."""
        keys = self.column_keys
        optional = {"id"} if labeled else {"id", "label"}
        required = {key for name, key in keys.items() if name.partition(":")[0] not in optional}
        return [key for name, key in keys.items() if name.partition(":")[0] in optional and key not in required]

    @property
    def column_keys(self) -> dict[str, Key]:
        """{our name of a column: its name or index in the files}; `label_columns` are called label:0, label:1, ..."""
        settings = self._settings
        text, label = self.text_column, self._glue.label if self._glue else settings.label_column
        if self._glue:
            text, label = (
                key if isinstance(key, str) else name for key, name in ((text, "sentence"), (label, "label"))
            )
        pair = {} if self.pair_column is None else {"pair": self.pair_column}
        one_hot = {f"label:{index}": key for index, key in enumerate(settings.label_columns)}
        return {"text": text, **(one_hot or {"label": label}), **pair, "id": "id"}

    def _rename_columns(self, table: Table) -> Table:
        """Return `table` with our column names, and with our names of GLUE's labels."""
        keys = self.column_keys
        columns: dict[Key, list[Any]] = {name: table.columns[key] for name, key in keys.items() if key in table.columns}
        if self._glue and "label" in columns:
            columns["label"] = [self._glue.labels.get(str(value), value) for value in columns["label"]]
        if one_hot := [columns.pop(name) for name in keys if name.startswith("label:") and name in columns]:
            # A row with only empty cells is unlabeled.
            rows = (list(row) for row in zip(*one_hot, strict=True))
            columns["label"] = [row if any(cell not in (None, "") for cell in row) else None for row in rows]
        classes = table.classes.get(keys.get("label", ""), [])
        return replace(table, columns=columns, classes={"label": classes} if classes else {})

    @property
    def _layout(self) -> TableLayout:
        """The format of the files, from the settings."""
        settings = self._settings
        return TableLayout(settings.format, settings.encoding, settings.delimiter, settings.quoting, settings.header)
