"""Reads labeled examples from GLUE's folders, data sets or files."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from finetune.tasks.classification import checks
from finetune.tasks.classification.settings import ClassificationSettings
from finetune.tasks.classification.table_source import TableSource
from finetune.tasks.datasets import glue, splits
from finetune.tasks.datasets.annotations import NoLabel, skipped_summary
from finetune.tasks.datasets.labels import Label, ProblemType, decode_flags, excerpt, parse, sort_names, to_name, unwrap
from finetune.tasks.datasets.surrogates import check_id, check_surrogates
from finetune.tasks.datasets.table import Key, Table, listing
from pretrain.common.errors import InputError
from pretrain.common.wording import counted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Example:
    """A document or a pair of documents; `label` is None if unlabeled."""

    text: str
    pair: str | None
    label: Label | None
    where: str  # file and line, for messages
    id: str | int | None = None  # id in the file
    unused_columns: Mapping[str, Any] | None = None  # cells of other columns, to copy to the predictions


class ExampleSource:
    """Reads the examples of one config. The training set defines the labels unless settings or state do.

    Args:
        state: return value of `state()` of the trained model; None before training.
    """

    def __init__(
        self, settings: ClassificationSettings, problem_type: ProblemType, state: Mapping[str, Any] | None = None
    ) -> None:
        self._settings = settings
        self._problem_type: ProblemType = problem_type
        # {class or label: number of its training examples}, once they are read.
        self.training_counts: dict[str, int] = dict(state.get("examples", {})) if state else {}
        self.tables = TableSource(settings)
        self._logged: set[str] = set()  # warnings that were already logged
        self._names: dict[str, str] | None = None  # {label in the files: its name}, in the order of the outputs
        if state is not None:
            self._names = dict(zip(state["values"], state["labels"], strict=True))
        elif problem_type == "regression":
            self._names = {}
        elif settings.glue:
            self._names = {name: name for name in glue.TASKS[settings.glue].labels.values()}
        elif settings.configured_labels:
            self._names = {name: name for name in settings.configured_labels}

    @property
    def names(self) -> dict[str, str]:
        """{label in the files: its name}, in the order of the outputs; read from the training set if not yet known."""
        if self._names is None:
            self.read_train()
        assert self._names is not None
        return self._names

    @property
    def class_weights(self) -> np.ndarray:
        """float64 [C]: weight of each class or label in the training loss, as set or balanced."""
        weights = self._settings.class_weights
        if weights != "balanced":
            return np.array([1.0 if weights == "none" else weights.get(name, 1.0) for name in self.names.values()])
        if not self.training_counts:
            self.read_train()
        # As scikit-learn's compute_class_weight("balanced"), over the classes that occur; 1 for other classes.
        counts = np.array([self.training_counts.get(name, 0) for name in self.names.values()])
        return np.where(counts > 0, counts.sum() / ((counts > 0).sum() * np.maximum(counts, 1)), 1.0)

    def read_train(self) -> list[Example]:
        """Return the training set, without the part that `dev_share` holds out; a sample if `train_examples` is set."""
        table = self._drop_unlabeled(self.tables.read("train"))
        raw_labels = self._raw_labels(table)
        if self._names is None:
            # Keep the order of the data set's classes, if it defines any.
            self._names = {name: name for name in table.classes.get("label") or sort_names(raw_labels)}
        examples = self._examples(table, raw_labels)
        if self._settings.dev_share:
            self.tables.check_no_official_dev()
            examples = self._select(examples, held_out=False)
        if not examples:
            raise InputError(
                f"{table.source}: dev_share {self._settings.dev_share} leaves no training examples. Lower it."
            )
        examples = self._subsample(examples, table.source)
        self._check_labels(examples, table.source)
        self._check_settings(table.source)
        _warn(checks.empty_text_warnings(table))
        if self._problem_type != "regression":
            labels = [example.label for example in examples]
            _warn(checks.rare_label_warnings(self.names.values(), labels, table.source))
        self.training_counts = dict(Counter(name for example in examples for name in _classes(example)))
        return examples

    def read_held_out(self) -> dict[str, list[Example]]:
        """Return the dev sets, or the part of the training set that `dev_share` holds out."""
        if not self._settings.dev_share:
            sets = {split: self._drop_unlabeled(self.tables.read(split)) for split in self.tables.names_of_sets("dev")}
            return {split: self._check_varied(self._examples(table, warn=True), table) for split, table in sets.items()}
        self.tables.check_no_official_dev()
        table = self._drop_unlabeled(self.tables.read("train"))
        held_out = self._select(self._examples(table), held_out=True)
        if not held_out:
            raise InputError(
                f"{table.source}: dev_share {self._settings.dev_share} of {len(table)} examples leaves the "
                "dev set empty; one example of each class always stays in training. Raise it, or add examples."
            )
        return {"dev": self._check_varied(held_out, table)}

    def _check_varied(self, examples: list[Example], table: Table) -> list[Example]:
        """Return `examples`; `InputError` if all have the same value, so that no correlation is defined."""
        if self._problem_type == "regression" and len({example.label for example in examples}) == 1:
            raise InputError(
                f"{table.source}: all dev examples have the value {examples[0].label}, so no correlation can be "
                "computed to select a checkpoint. Use a dev set with different values."
            )
        return examples

    def read_test(self) -> dict[str, list[Example]]:
        """Return the test sets. Missing and unknown labels become None, with a warning in the log."""
        sets = {split: self.tables.read_unlabeled(split) for split in self.tables.names_of_sets("test")}
        return {
            split: self._examples(table, self._known_labels(table), warn=True)
            for split, table in sets.items()
            if table is not None
        }

    def read_file(self, path: str, *, labeled: bool = True) -> list[Example]:
        """Read another file, or a folder written by save_to_disk (of which the split named by the setting `dev`).

        If not `labeled`, unknown labels become None, with a warning in the log.
        """
        table = self.tables.read_file(path, labeled=labeled)
        if labeled:
            return self._examples(self._drop_unlabeled(table))
        raw_labels, label_column = self._known_labels(table), str(self.tables.column_keys.get("label", ""))
        cells = [None if isinstance(cell, NoLabel) else cell for cell in table.columns.get("label", ())]
        pairs = zip(cells, raw_labels, strict=False)
        if label_column and any(label is None and cell not in (None, "") for cell, label in pairs):
            # The column has labels that the model does not know: copy it to the predictions unchanged.
            rows = zip(table.other_cells, cells, strict=False)
            table = replace(table, other_cells=[{**other_cells, label_column: cell} for other_cells, cell in rows])
        return self._examples(table, raw_labels)

    def example(self, record: Mapping[str, Any] | str, where: str) -> Example:
        """Return an example from a string, or a record with the keys `text` and `pair` or the names of the columns."""
        pair_column = self.tables.pair_column
        if isinstance(record, str):
            if pair_column is not None:
                raise InputError(f'{where}: a string, but a pair is needed. Give {{"text": ..., "pair": ...}} as JSON.')
            return Example(_expect_text(record, where, "the text"), None, None, where)
        if not isinstance(record, Mapping):
            raise InputError(f'{where}: {excerpt(record)} is neither a string nor an object such as {{"text": ...}}.')
        text = _text_field(record, where, self.tables.text_column, "text")
        if pair_column is not None:
            return Example(text, _text_field(record, where, pair_column, "pair"), None, where)
        if record.get("pair") is not None:
            raise InputError(f"{where}: a pair, but the model was not trained on pairs. Remove `pair`.")
        return Example(text, None, None, where)

    def _select(self, examples: Sequence[Example], *, held_out: bool) -> list[Example]:
        """Return the examples that `dev_share` holds out, or if not `held_out` the rest."""
        texts = [f"{example.text}\0{example.pair or ''}" for example in examples]
        count = round(self._settings.dev_share * len(set(texts)))
        is_held_out = splits.held_out(texts, [_classes(example) for example in examples], count)
        return [example for example, flag in zip(examples, is_held_out, strict=True) if flag == held_out]

    def _drop_unlabeled(self, table: Table) -> Table:
        """Return `table` without unlabeled rows, and log their number."""
        if "label" not in table.columns:
            return table
        cells = [unwrap(cell, self._problem_type) for cell in table.columns["label"]]
        table = replace(table, columns={**table.columns, "label": cells})
        reasons = [cell for cell in cells if isinstance(cell, NoLabel)]
        if not reasons:
            return table
        line = skipped_summary(table.source, len(table), reasons)
        if len(reasons) == len(table):
            raise InputError(f"{line}. Give a file with labels.")
        if line not in self._logged:  # with dev_share, the file is read twice
            logger.warning("%s", line)
        self._logged.add(line)
        return table.select([row for row, cell in enumerate(cells) if not isinstance(cell, NoLabel)])

    def _raw_labels(self, table: Table) -> list[Label | None]:
        """Return the labels as in the files; None for unlabeled rows."""
        separator = self._settings.label_separator
        return [
            None if cell is None else parse(cell, self._problem_type, separator, table.where(row))
            for row, cell in enumerate(self._label_cells(table))
        ]

    def _label_cells(self, table: Table, errors: dict[int, str] | None = None) -> list[Any]:
        """Return the cells of the label column (None if it is missing), with 0-1 vectors replaced by lists of names.

        `errors`, if given, gets the error of each invalid row, {row: message}; otherwise, the first one is raised.
        """
        cells = table.columns.get("label")
        if cells is None:
            return [None] * len(table)
        if self._problem_type != "multi_label":
            return cells
        separator, strict = self._settings.label_separator, bool(self._settings.label_columns)
        return decode_flags(cells, separator, list(self._names or ()), table.where, strict=strict, errors=errors)

    def _known_labels(self, table: Table) -> list[Label | None]:
        """Return the labels as in the files, None where the label is missing or unknown to the model."""
        raw_labels: list[Label | None] = [None] * len(table)
        cells = [unwrap(cell, self._problem_type) for cell in table.columns.get("label", [])]
        if all(isinstance(cell, NoLabel) or cell == "" for cell in cells):
            return raw_labels
        reasons = {row: cell.reason for row, cell in enumerate(cells) if isinstance(cell, NoLabel)}
        errors = {row: f"{table.where(row)}: {reason}" for row, reason in reasons.items()}
        cells = [None if row in errors else cell for row, cell in enumerate(cells)]
        table = replace(table, columns={**table.columns, "label": cells})
        for row, cell in enumerate(self._label_cells(table, errors)):
            if row in errors:
                continue
            try:
                raw_labels[row] = parse(cell, self._problem_type, self._settings.label_separator, table.where(row))
                to_name(raw_labels[row], self.names, table.where(row))
            except InputError as error:
                raw_labels[row] = None
                errors[row] = str(error)
        if errors:
            logger.warning(
                "%d of %d labels are missing or unknown, and ignored; the first: %s",
                len(errors),
                len(table),
                errors[min(errors)],
            )
        return raw_labels

    def _examples(
        self, table: Table, raw_labels: Sequence[Label | None] | None = None, *, warn: bool = False
    ) -> list[Example]:
        """Return the examples of a table; if `warn`, warn about blank cells."""
        if not len(table):
            raise InputError(f"{table.source}: no examples. Give a file with at least one.")
        raw_labels = self._raw_labels(table) if raw_labels is None else raw_labels
        texts, pairs = table.columns["text"], table.columns.get("pair")
        ids = table.columns.get("id", [None] * len(table))
        examples = []
        for row, (text, label) in enumerate(zip(texts, raw_labels, strict=True)):
            where = table.where(row)
            pair = None if pairs is None else _expect_text(pairs[row], where, "the second text")
            text = _expect_text(text, where, "the text")
            check_id(ids[row], where)
            id_ = ids[row] if ids[row] is None or isinstance(ids[row], str | int) else str(ids[row])
            other_cells = table.other_cells[row] if table.other_cells else None
            examples.append(Example(text, pair, to_name(label, self.names, where), where, id_, other_cells))
        if warn:
            _warn(checks.empty_text_warnings(table))
        return examples

    def _subsample(self, examples: list[Example], source: str) -> list[Example]:
        """Select `train_examples` of the examples, stratified by class, in their original order."""
        count = self._settings.train_examples
        if not count:
            return examples
        if count > len(examples):
            total = counted(len(examples), "training example")
            raise InputError(
                f"classification.train_examples: {count}, but {source} has {total}. Lower it, or set 0 for all."
            )
        distinct_texts = [json.dumps([0, index, example.text, example.pair]) for index, example in enumerate(examples)]
        is_dropped = splits.held_out(distinct_texts, [_classes(example) for example in examples], len(examples) - count)
        return [example for example, dropped in zip(examples, is_dropped, strict=True) if not dropped][:count]

    def _check_labels(self, examples: Sequence[Example], source: str) -> None:
        """Raise `InputError` if all labels of the training set are the same."""
        if self._problem_type == "multi_label":
            if not self.names:
                raise InputError(f"{source}: no example has a label. Give a training set with labels.")
            return
        if len({example.label for example in examples}) == 1:
            raise InputError(
                f"{source}: every example has the label {excerpt(examples[0].label)}. Give a training set with at "
                f"least two {'values' if self._problem_type == 'regression' else 'classes'}."
            )
        if self._problem_type == "regression":
            deviation = float(np.array([example.label for example in examples], np.float64).std())
            if not 0.01 <= deviation <= 100:
                logger.warning(
                    "%s: values have a standard deviation of %.3g; the model predicts them unscaled and learns badly. "
                    "Scale them to about 1.",
                    source,
                    deviation,
                )

    def _check_settings(self, source: str) -> None:
        """Raise `InputError` if `positive`, `class_weights` or `metric` do not fit the labels."""
        labels = list(self.names.values())
        if self._settings.positive and self._settings.positive not in labels:
            raise InputError(
                f"classification.positive: {self._settings.positive!r} is not a label; known: {listing(labels)}."
            )
        if self._settings.positive and (len(labels) != 2 or self._problem_type != "single_label"):
            raise InputError("classification.positive: only supported for single_label with two classes. Remove it.")
        for name in self._settings.class_weights if isinstance(self._settings.class_weights, dict) else ():
            if name not in labels:
                raise InputError(f"classification.class_weights: {name!r} is not a label; known: {listing(labels)}.")
        if self._settings.metric == "f1" and len(labels) != 2:
            raise InputError(f"classification.metric: f1 needs two classes, {source} has {len(labels)}. Use macro_f1.")
        if self._settings.metric == "f1" and not (self._settings.positive or self._settings.glue):
            raise InputError(
                f"classification.metric: f1 needs a positive class; {source} has {labels[0]!r} and {labels[1]!r}. Set "
                "classification.positive to one of them, or use macro_f1."
            )


def _classes(example: Example) -> tuple[str, ...]:
    """Return the example's class or labels; () for a value or no label."""
    label = example.label
    return label if isinstance(label, tuple) else (label,) if isinstance(label, str) else ()


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        logger.warning("%s", warning)


def _text_field(record: Mapping[str, Any], where: str, *keys: Key | None) -> str:
    """Return the string under the first of the `keys` that the record has."""
    for key in keys:
        if isinstance(key, str) and key in record:
            return _expect_text(record[key], where, repr(key))
    raise InputError(f"{where}: no {keys[-1]!r}; it has {listing(record) or 'nothing'}.")


def _expect_text(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: {name} is {excerpt(value)}, not text. Correct or remove it.")
    check_surrogates(value, name, where)
    return value
