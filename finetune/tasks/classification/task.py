"""The task of labelled texts."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.datasets import glue, tables
from finetune.datasets.labels import Label, Problem, listed, ordered, parse, renamed, shown
from finetune.datasets.pairs import cut_pairs, spread
from finetune.datasets.text import Column, Framed, Slices, TextEncoder, frame, slide
from finetune.tasks.base import Head, Objective, Windows
from finetune.tasks.classification.decoding import THRESHOLD, Outputs
from finetune.tasks.classification.settings import SCORES, ClassificationSettings
from finetune.tasks.classification.source import TableSource
from pretrain.common.errors import InputError

logger = logging.getLogger(__name__)

_OBJECTIVES: dict[Problem, Objective] = {
    "single_label": "classes",
    "multi_label": "labels",
    "regression": "value",
}


@dataclass(frozen=True, slots=True)
class Example:
    """One text or pair; `label` is None where there is none."""

    text: str
    pair: str | None
    label: Label | None
    where: str  # its place in the files, for messages
    id: str | int | None = None


class Classification:
    """The task (finetune.task.Task) of classes, labels or values of texts.

    Args:
        state: what a trained model kept of itself: its labels, its threshold and how quotes of its training set were read.
    """

    kind = "classification"
    head: Head = "sequence"

    def __init__(self, settings: ClassificationSettings, state: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        self._source = TableSource(settings, state.get("quoting") if state else None)  # older models do not say it
        self._glue = glue.TASKS[settings.glue] if settings.glue else None
        self.problem: Problem = "regression" if settings.glue == "stsb" else settings.problem_type
        self.objective: Objective = _OBJECTIVES[self.problem]
        self.metric: str = settings.metric or (self._glue.metric if self._glue else SCORES[self.problem][0])
        self.threshold = settings.threshold or THRESHOLD
        self._names: dict[str, str] | None = None  # the files' -> ours, in order of the outputs
        self._class_weights: np.ndarray | None = None  # float64 [C]
        if state is not None:
            self._names = dict(zip(state["values"], state["labels"], strict=True))
            self.threshold = float(state["threshold"])
        elif self.problem == "regression":
            self._names = {}
        elif self._glue:
            self._names = {name: name for name in self._glue.labels.values()}
        elif settings.labels:
            self._names = dict(zip(settings.labels, settings.label_names or settings.labels, strict=True))

    # ------------------------------------------------------------ what it is

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the outputs; read from the training set if nothing else has said them."""
        return tuple(self._label_names().values())

    @property
    def asks(self) -> tuple[str, ...]:
        return ("text", "pair") if self.takes_pairs else ("text",)

    @property
    def outputs(self) -> int:
        return 1 if self.problem == "regression" else len(self.labels)

    @property
    def takes_pairs(self) -> bool:
        return self._source.pair_column is not None

    @property
    def positive(self) -> str:
        """The class that `f1` is of, of two; empty without classes."""
        return self.settings.positive or (self.labels[-1] if self.labels else "")

    def state(self) -> dict[str, Any]:
        return {
            "labels": list(self.labels),
            "values": list(self._label_names()),
            "threshold": float(self.threshold),
            "quoting": self._source.quoting,
        }

    # ------------------------------------------------------------ files in

    def read_train(self) -> list[Example]:
        table = self._source.read("train")
        raw = self._raw_labels(table)
        if self._names is None:
            self._names = self._find_labels(raw, table)
        examples = self._examples(table, raw)
        if self.settings.dev_share:
            self._source.check_no_dev()
            examples = [example for example in examples if not self._is_held_out(example)]
            if not examples:
                raise InputError(
                    f"{table.source}: dev_share {self.settings.dev_share} leaves nothing to train on. Lower it."
                )
        self._check_variety(examples, table.source)
        if self.settings.class_weights == "balanced":
            self._class_weights = self._balanced(examples, table.source)
        return examples

    def read_held_out(self) -> dict[str, list[Example]]:
        if self.settings.dev_share:
            self._source.check_no_dev()
            table = self._source.read("train")
            held_out = [example for example in self._examples(table) if self._is_held_out(example)]
            if not held_out:
                raise InputError(
                    f"{table.source}: dev_share {self.settings.dev_share} of {len(table)} examples holds none out. "
                    "Raise it."
                )
            return {"dev": held_out}
        return {part: self._examples(self._source.read(part)) for part in self._source.parts("dev")}

    def read_test(self) -> dict[str, list[Example]]:
        found = {part: self._source.read_unlabelled(part) for part in self._source.parts("test")}
        return {
            part: self._examples(table, self._raw_labels(table, labelled=False))
            for part, table in found.items()
            if table is not None
        }

    def read_file(self, path: str, *, labelled: bool = True) -> list[Example]:
        """Examples of another file, or of a folder written by save_to_disk (its split `dev` is named).

        Without `labelled`, cells that hold none of the labels are left out, and that is logged.
        """
        table = self._source.read_file(path, labelled=labelled)
        # In `lines` an unknown label may be the first word of a text.
        is_strict = labelled or (self.settings.format == "lines" and not tables.format_of(path))
        return self._examples(table, None if is_strict else self._labels_known(table))

    def example(self, record: Mapping[str, Any] | str, where: str) -> Example:
        """Of plain text, or of a record with `text` and `pair` or with the columns' names."""
        if isinstance(record, str):
            if self.takes_pairs:
                raise InputError(
                    f'{where}: one text where a pair is needed. Give {{"text": ..., "pair": ...}} as JSON.'
                )
            return Example(_text(record, where, "the text"), None, None, where)
        if not isinstance(record, Mapping):
            raise InputError(f'{where}: {shown(record)} is neither a text nor an object such as {{"text": ...}}.')
        text = _field(record, where, self._source.text_column, "text")
        if self.takes_pairs:
            return Example(text, _field(record, where, self._source.pair_column, "pair"), None, where)
        if record.get("pair") is not None:
            raise InputError(f"{where}: a pair, but the model was trained on single texts. Leave `pair` out.")
        return Example(text, None, None, where)

    def with_context(self, examples: Sequence[Example], *, ended: bool) -> tuple[list[Example], list[Example]]:
        """Each stands alone."""
        return list(examples), []

    def is_labelled(self, examples: Sequence[Example]) -> bool:
        return bool(examples) and all(example.label is not None for example in examples)

    def record(self, example: Example) -> dict[str, Any]:
        """{"id", "text", "pair", "gold": a label's name, a list of them or a value}, of these what there is."""
        gold = list(example.label) if isinstance(example.label, tuple) else example.label
        record = {"id": example.id, "text": example.text, "pair": example.pair, "gold": gold}
        return {key: value for key, value in record.items() if value is not None}

    # ------------------------------------------------------------ windows

    def windows(self, examples: Sequence[Example], encoder: TextEncoder, *, training: bool) -> Windows:
        example, framed = self._cut(examples, encoder, thin=training)
        labels = self._label_rows(examples)
        weights = 1 / np.bincount(example, minlength=len(examples))[example]
        if training and self.settings.class_weights == "balanced":
            if self._class_weights is None:
                self.read_train()
            assert self._class_weights is not None
            weights *= self._class_weights[labels[example]]
        if self.problem != "single_label":
            labels = labels.astype(np.float32)
        return Windows(
            ids=framed.ids,
            types=framed.types,
            starts=framed.starts,
            examples=example.astype(np.int64),
            asked=framed.starts[:-1].astype(np.int64),
            labels=labels[example],
            weights=weights.astype(np.float32),
            extra={},
        )

    def decode(self, examples: Sequence[Example], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        """One prediction an example (Outputs.predictions), from the mean of its windows' logits, float32 [F, C]."""
        if not len(windows):
            return []
        begins = np.flatnonzero(np.diff(windows.examples, prepend=-1))
        counts = np.diff(begins, append=len(windows))
        means_NC = np.add.reduceat(logits.astype(np.float64), begins, axis=0) / counts[:, None]
        return self._outputs().predictions(means_NC)

    def scorer_files(self, examples: Sequence[Example], predictions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        return {}

    # ------------------------------------------------------------ scores

    @property
    def tunes(self) -> bool:
        return self.problem == "multi_label" and not self.settings.threshold

    def tune(self, examples: Sequence[Example], predictions: Sequence[Mapping[str, Any]]) -> None:
        """multi_label: the threshold, one for all labels, with the best `metric` on these examples.

        Of equally good ones the nearest to 0.5. Nothing to do where the settings have one.
        """
        if not self.tunes or not examples:
            return
        self.threshold = self._outputs().best_threshold(self._label_rows(examples), predictions, self.metric)

    def score(self, examples: Sequence[Example], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The official scores of a task of GLUE, otherwise all there are; {} of examples without labels.

        Sets of labels follow from the probabilities and the present threshold, also after `tune`.
        """
        if not self.is_labelled(examples):
            return {}
        scores = self._outputs().scores(self._label_rows(examples), predictions)
        return {name: scores[name] for name in self._glue.scores} if self._glue else scores

    def details(self, examples: Sequence[Example], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Precision, recall and F1 of each class; for single_label the confusion counts [true][predicted]."""
        if not self.is_labelled(examples):
            return {}
        return self._outputs().details(self._label_rows(examples), predictions)

    def _outputs(self) -> Outputs:
        return Outputs(self.problem, self.labels, self.positive, self.threshold)

    # ------------------------------------------------------------ reading

    def _is_held_out(self, example: Example) -> bool:
        # By the texts alone, so that the same texts never are on both sides.
        key = f"{example.text}\0{example.pair or ''}".encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return int.from_bytes(digest, "little") < self.settings.dev_share * 2.0**64

    def _raw_labels(self, table: tables.Table, *, labelled: bool = True) -> list[Label | None]:
        """Labels as the files have them; all None where a set without labels is allowed and has none."""
        cells = table.columns.get("label")
        if cells is None or (not labelled and all(cell is None or cell == "" for cell in cells)):
            return [None] * len(table)
        separator = self.settings.label_separator
        return [parse(cell, self.problem, separator, table.where(row)) for row, cell in enumerate(cells)]

    def _labels_known(self, table: tables.Table) -> list[Label | None]:
        """Labels as the files have them, where they are among those of the model."""
        raw: list[Label | None] = [None] * len(table)
        unknown: list[str] = []
        cells = table.columns.get("label", [])
        is_empty = all(cell is None or cell == "" for cell in cells)
        for row, cell in enumerate(cells):
            if cell is None or is_empty or (cell == "" and self.problem != "multi_label"):
                continue
            try:
                raw[row] = parse(cell, self.problem, self.settings.label_separator, table.where(row))
                renamed(raw[row], self._label_names(), table.where(row))
            except InputError as error:
                raw[row] = None
                unknown.append(str(error))
        if unknown:
            logger.warning(
                "%d of %d labels are not known and left out of the predictions; the first: %s",
                len(unknown),
                len(table),
                unknown[0],
            )
        return raw

    def _find_labels(self, raw: Sequence[Label | None], table: tables.Table) -> dict[str, str]:
        """The files' labels -> names, in a data set's own order if it has one."""
        values = table.classes.get("label") or ordered(raw)
        names = self.settings.label_names
        if names and len(names) != len(values):
            raise InputError(
                f"classification.label_names: {len(names)} names, but {table.source} has {len(values)} labels: "
                f"{listed(values)}."
            )
        return dict(zip(values, names or values, strict=True))

    def _label_names(self) -> dict[str, str]:
        if self._names is None:
            self.read_train()
        assert self._names is not None
        return self._names

    def _examples(self, table: tables.Table, raw: Sequence[Label | None] | None = None) -> list[Example]:
        if not len(table):
            raise InputError(f"{table.source}: no examples. Give a file with at least one.")
        raw = self._raw_labels(table) if raw is None else raw
        names = self._label_names()
        texts, pairs = table.columns["text"], table.columns.get("pair")
        ids = table.columns.get("id", [None] * len(table))
        examples = []
        for row, (text, label) in enumerate(zip(texts, raw, strict=True)):
            where = table.where(row)
            pair = None if pairs is None else _text(pairs[row], where, "the second text")
            examples.append(
                Example(
                    _text(text, where, "the text"),
                    pair,
                    renamed(label, names, where),
                    where,
                    ids[row] if ids[row] is None or isinstance(ids[row], str | int) else str(ids[row]),
                )
            )
        return examples

    def _check_variety(self, examples: Sequence[Example], source: str) -> None:
        """One class or one value alone is nothing to learn; `metric` and `positive` must fit the labels."""
        if self.problem != "multi_label" and len({example.label for example in examples}) == 1:
            raise InputError(
                f"{source}: every example has the label {shown(examples[0].label)}. "
                f"Give a training set with at least two{' values' if self.problem == 'regression' else ' classes'}."
            )
        if self.problem == "multi_label" and not self.labels:
            raise InputError(f"{source}: no example has a label. Give a training set with labels.")
        if self.problem == "regression":
            deviation = float(self._label_rows(examples).std())
            if not 0.01 <= deviation <= 100:
                logger.warning(
                    "%s: values spread by %.3g; the model predicts them as they are, which it hardly learns. "
                    "Scale them to about 1.",
                    source,
                    deviation,
                )
        if self.settings.positive and self.settings.positive not in self.labels:
            raise InputError(
                f"classification.positive: {self.settings.positive!r} is no label; known: {listed(self.labels)}."
            )
        if self.metric == "f1" and len(self.labels) != 2:
            raise InputError(
                f"classification.metric: f1 needs two classes, {source} has {len(self.labels)}. Use macro_f1."
            )

    def _balanced(self, examples: Sequence[Example], source: str) -> np.ndarray:
        """float64 [C]: sklearn's compute_class_weight("balanced") of the classes there are; the others count 1."""
        counts = np.bincount(self._label_rows(examples), minlength=len(self.labels))
        absent = [name for name, count in zip(self.labels, counts, strict=True) if not count]
        if absent:
            logger.warning("%s: no example of %s", source, listed(absent))
        return np.where(counts > 0, len(examples) / ((counts > 0).sum() * np.maximum(counts, 1)), 1.0)

    # ------------------------------------------------------------ arrays

    def _label_rows(self, examples: Sequence[Example]) -> np.ndarray:
        """Numbers of classes int64 [N], sets of labels bool [N, C], or values float64 [N]; zeros without labels."""
        if self.problem == "regression":
            return np.array([example.label or 0.0 for example in examples], np.float64)
        numbers: dict[Any, int] = {name: number for number, name in enumerate(self.labels)}
        if self.problem == "single_label":
            numbers[None] = 0
            return np.array([numbers[example.label] for example in examples], np.int64)
        rows = np.zeros((len(examples), len(numbers)), bool)
        for row, example in enumerate(examples):
            if isinstance(example.label, tuple):
                rows[row, [numbers[name] for name in example.label]] = True
        return rows

    def _cut(self, examples: Sequence[Example], encoder: TextEncoder, *, thin: bool) -> tuple[np.ndarray, Framed]:
        """(example of each window, int64 [F]; the windows)"""
        room = encoder.room(pair=self.takes_pairs)
        overlap = self._overlap(room)
        first = encoder.encode([example.text for example in examples])
        if not self.takes_pairs:
            cut = slide(np.diff(first.starts), room, overlap)
            example, begin, length = self._thin(cut, len(examples)) if thin else cut
            return example, frame(encoder, _slices(first, example, begin, length))
        second = encoder.encode([example.pair or "" for example in examples])
        cut = cut_pairs(np.diff(first.starts), np.diff(second.starts), room, overlap)
        example, *stretches = self._thin(cut, len(examples)) if thin else cut
        return example, frame(
            encoder, _slices(first, example, *stretches[:2]), _slices(second, example, *stretches[2:])
        )

    def _overlap(self, room: int) -> int:
        if room < 4:
            raise InputError(f"max_length: windows have room for {room} tokens of text. Raise it.")
        overlap = self.settings.overlap
        if overlap is not None and overlap >= room // 2:
            raise InputError(
                f"classification.overlap: {overlap} must be less than half of the {room} tokens of text that a "
                f"window has room for; at most {room // 2 - 1}."
            )
        return room // 4 if overlap is None else overlap

    def _thin(self, cut: tuple[np.ndarray, ...], examples: int) -> tuple[np.ndarray, ...]:
        """At most `max_windows` of each example's windows; first item of `cut`: the example."""
        most = self.settings.max_windows
        counts = np.bincount(cut[0], minlength=examples)
        long = counts > most
        if not long.any():
            return cut
        logger.warning(
            "%d of %d texts are longer than %d windows (max_windows): training sees %d of their %d windows, "
            "evenly spread; predictions see all",
            long.sum(),
            examples,
            most,
            most * long.sum(),
            counts[long].sum(),
        )
        rows = spread(cut[0], examples, most)
        return tuple(column[rows] for column in cut)


def _slices(column: Column, text: np.ndarray, begin: np.ndarray, length: np.ndarray) -> Slices:
    return column.ids, column.starts[text] + begin, length


def _field(record: Mapping[str, Any], where: str, *names: tables.Key | None) -> str:
    """The text under the first of `names` that the record has."""
    for name in names:
        if isinstance(name, str) and name in record:
            return _text(record[name], where, repr(name))
    raise InputError(f"{where}: no {names[-1]!r}; it has {listed(record) or 'nothing'}.")


def _text(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: {what} is {shown(value)}, not text. Correct or remove it.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{where}: {what} has half of a surrogate pair at character {error.start} (\\u{ord(value[error.start]):x}). "
                "Write the whole character."
            ) from None
    return value
