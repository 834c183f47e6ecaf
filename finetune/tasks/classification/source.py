"""Where labelled texts come from: GLUE's folders, data sets, or files; all as the columns text, pair and label."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.datasets import glue, tables
from finetune.datasets.files import plain_suffix
from finetune.tasks.classification.settings import ClassificationSettings
from pretrain.common.errors import InputError


class TableSource:
    """Tables of one config.

    Args:
        quoting: how quotes of the training set were read, where a trained model says it.
    """

    def __init__(self, settings: ClassificationSettings, quoting: tables.Quoting | None = None) -> None:
        self._settings = settings
        self._quoting: tables.Quoting | None = quoting
        self._glue = glue.TASKS[settings.glue] if settings.glue else None

    def parts(self, kind: str) -> tuple[str, ...]:
        """Names of the sets that are to be read of `kind`, dev or test."""
        if self._glue:
            return self._glue.dev if kind == "dev" else self._glue.test
        return (kind,) if getattr(self._settings, kind) else ()

    @property
    def quoting(self) -> tables.Quoting | None:
        """How quotes of the training set, a .tsv, are read; None where it has none or is not read yet."""
        return self._quoting

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
        if part == "train":
            self._quoting = self._quoting or table.quoting
        return table

    def read_unlabelled(self, part: str) -> tables.Table | None:
        """A set whose labels may be missing; None where GLUE's folder has no such file."""
        return self._read(part, labelled=False)

    def read_file(self, path: str, *, labelled: bool = True) -> tables.Table:
        """Another file, or a folder written by save_to_disk (its split `dev` is named).

        A file with the training file's suffix is read as that one is, any other as its own suffix says. Without
        `labelled` the label may be missing, texts may stand under `text` and `pair`, and `.txt` has a text a line.
        """
        settings, place = self._settings, Path(path).expanduser()
        keys = self._keys()
        if place.is_dir():
            split = (settings.dev if settings.dataset else "") or "train"
            optional = [keys["id"]] if labelled else [keys["id"], keys["label"]]
            table = tables.read_dataset(str(place), [*keys.values()], split=split, optional=optional)
            return self._named(table)
        kind, layout = tables.format_of(place), self._layout(path)
        if kind and kind != tables.format_of(settings.train):
            layout = tables.TableFormat(encoding=settings.encoding, header=settings.header)
        if not labelled and not kind and not layout.format:
            if plain_suffix(place) == ".txt" and "pair" not in keys:
                return tables.read_texts(place, settings.encoding)
            if not settings.glue:
                raise InputError(self._formless(path))
        if settings.glue and kind in ("", "tsv"):
            return glue.read_file(settings.glue, place, labelled=labelled)
        optional = [keys["id"]] if labelled else [keys["id"], keys["label"]]
        aliases = {} if labelled else {keys[name]: name for name in ("text", "pair") if name in keys}
        table = tables.read_table(place, [*keys.values()], layout=layout, optional=optional, aliases=aliases)
        return self._named(table)

    def _formless(self, path: str) -> str:
        known = "Name it .csv, .tsv, .jsonl, .json or .parquet"
        texts = "" if self.pair_column is not None else ", or .txt for a text a line"
        return f"{path}: its suffix says no format. {known}{texts}, or give its lines on standard input."

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
        keys = self._keys()
        optional = [keys["id"]] if labelled else [keys["id"], keys["label"]]
        named = getattr(settings, part)
        if not settings.dataset:
            return self._named(
                tables.read_table(named, [*keys.values()], layout=self._layout(named), optional=optional)
            )
        return self._named(
            tables.read_dataset(
                settings.dataset,
                [*keys.values()],
                subset=settings.subset,
                split=named or "train",
                revision=settings.revision,
                where="classification",
                optional=optional,
            )
        )

    def _keys(self) -> dict[str, tables.Key]:
        """Our names of the columns -> theirs. In other forms than their own, GLUE's tasks have names for all."""
        settings = self._settings
        text, label = self.text_column, self._glue.label if self._glue else settings.label_column
        if self._glue:
            text, label = (
                key if isinstance(key, str) else name for key, name in ((text, "sentence"), (label, "label"))
            )
        pair = {} if self.pair_column is None else {"pair": self.pair_column}
        return {"text": text, "label": label, **pair, "id": "id"}

    def _named(self, table: tables.Table) -> tables.Table:
        """With our names of the columns, and of GLUE's labels."""
        keys = self._keys()
        found: dict[tables.Key, list[Any]] = {
            name: table.columns[key] for name, key in keys.items() if key in table.columns
        }
        if self._glue and "label" in found:
            found["label"] = [self._glue.labels.get(str(value), value) for value in found["label"]]
        classes = table.classes.get(keys["label"], [])
        return replace(table, columns=found, classes={"label": classes} if classes else {})

    def _layout(self, path: str) -> tables.TableFormat:
        """How a file is read; one may be too short to show what its quotes are, so all are as in the training set."""
        settings, quoting = self._settings, self._settings.quoting
        if quoting == "auto" and self._quoting and (settings.format or tables.format_of(path)) == "tsv":
            quoting = self._quoting
        return tables.TableFormat(settings.format, settings.encoding, settings.delimiter, quoting, settings.header)
