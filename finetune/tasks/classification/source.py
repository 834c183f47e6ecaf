"""Where labelled texts come from: GLUE's folders, data sets, or files; all as the columns text, pair and label."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.sets import glue, tables
from finetune.tasks.classification.settings import ClassificationSettings
from pretrain.errors import InputError


class Source:
    """Tables of one config."""

    def __init__(self, settings: ClassificationSettings) -> None:
        self._settings = settings
        self._glue = glue.TASKS[settings.glue] if settings.glue else None

    def parts(self, kind: str) -> tuple[str, ...]:
        """Names of the sets that are to be read of `kind`, dev or test."""
        if self._glue:
            return self._glue.dev if kind == "dev" else self._glue.test
        return (kind,) if getattr(self._settings, kind) else ()

    @property
    def text_column(self) -> tables.Key:
        return self._glue.text if self._glue else self._settings.text_column

    @property
    def pair_column(self) -> tables.Key | None:
        """None where texts come alone."""
        if self._glue:
            return self._glue.pair
        return None if self._settings.pair_column == "" else self._settings.pair_column

    def read(self, part: str) -> tables.Table:
        """A set that must be there, with labels."""
        table = self._read(part, labelled=True)
        if table is None:
            wanted = glue.expected_files(self._settings.glue, self._settings.glue_dir, part)
            hint = " or set dev_share" if part == "dev" else ""
            raise InputError(f"classification.glue_dir: found no {wanted}. Download it{hint}.")
        return table

    def read_unlabelled(self, part: str) -> tables.Table | None:
        """A set whose labels may be missing; None where GLUE's folder has no such file."""
        return self._read(part, labelled=False)

    def read_file(self, path: str) -> tables.Table:
        """Another file, or a folder written by save_to_disk (its split `dev` is named)."""
        settings = self._settings
        if settings.glue:
            return glue.read_file(settings.glue, path)
        if Path(path).is_dir():
            split = (settings.dev if settings.dataset else "") or "train"
            return self._named(tables.read_dataset(path, self._columns(), split=split))
        return self._named(tables.read_table(path, self._columns(), layout=self._layout()))

    def check_no_dev(self) -> None:
        """Nothing is held out of a task that has an official dev set."""
        if self._glue and self._read(self._glue.dev[0], labelled=True) is not None:
            raise InputError(
                f"classification.dev_share: {self._glue.title} has an official dev set. Set dev_share to 0."
            )

    def _read(self, part: str, *, labelled: bool) -> tables.Table | None:
        settings = self._settings
        if settings.glue:
            return glue.read_split(settings.glue, settings.glue_dir, part)
        optional = [] if labelled else [settings.label_column]
        named = getattr(settings, part)
        if not settings.dataset:
            return self._named(
                tables.read_table(named, self._columns(), layout=self._layout(), optional=optional)
            )
        return self._named(
            tables.read_dataset(
                settings.dataset,
                self._columns(),
                subset=settings.subset,
                split=named or "train",
                revision=settings.revision,
                where="classification",
                optional=optional,
            )
        )

    def _columns(self) -> list[tables.Key]:
        pair = [] if self.pair_column is None else [self.pair_column]
        return [self._settings.text_column, self._settings.label_column, *pair]

    def _named(self, table: tables.Table) -> tables.Table:
        """With our names of the columns."""
        settings = self._settings
        theirs = {"text": settings.text_column, "label": settings.label_column, "pair": settings.pair_column}
        found: dict[tables.Key, list[Any]] = {
            name: table.columns[key] for name, key in theirs.items() if key in table.columns
        }
        classes = table.classes.get(settings.label_column, [])
        return replace(table, columns=found, classes={"label": classes} if classes else {})

    def _layout(self) -> tables.Layout:
        settings = self._settings
        return tables.Layout(
            settings.format, settings.encoding, settings.delimiter, settings.quoting, settings.header
        )
