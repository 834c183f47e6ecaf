"""Single texts and pairs to a class, a set of labels or a value; long texts as windows whose logits are averaged."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from finetune.metrics import classification as metrics
from finetune.sets import glue, tables
from finetune.sets.files import is_encoding
from finetune.sets.glue import Name as GlueName
from finetune.sets.labels import Label, Problem, listed, ordered, parse, renamed, shown
from finetune.sets.pairs import cut_pairs, spread
from finetune.task import Head, Objective, Windows
from finetune.text import Column, Framed, Slices, TextEncoder, frame, slide
from pretrain.errors import InputError
from pretrain.settings import Section

logger = logging.getLogger(__name__)

# Of each problem; the first chooses the checkpoint unless the settings say otherwise.
_SCORES = {
    "single_label": ("accuracy", "f1", "macro_f1", "micro_f1", "matthews"),
    "multi_label": ("micro_f1", "macro_f1", "subset_accuracy"),
    "regression": ("pearson_and_spearman", "pearson", "spearman"),
}
_OBJECTIVES: dict[Problem, Objective] = {
    "single_label": "classes",
    "multi_label": "labels",
    "regression": "value",
}
_THRESHOLD = 0.5
_CANDIDATES = 100  # probabilities among which thresholds are tried on the dev set


class ClassificationSettings(Section):
    """Labelled texts, one or a pair a row, and what is predicted of them."""

    glue: GlueName = Field(
        default="", description="A task of GLUE by name: its official files, labels and scores."
    )
    glue_dir: str = Field(
        default="", description="glue: folder with the official downloads (CoLA, SST-2, ...)."
    )
    dataset: str = Field(
        default="",
        description="Hugging Face: hub name, or a folder written by save_to_disk. train, dev and test name its splits.",
    )
    subset: str = Field(default="", description="dataset: configuration name.")
    revision: str = Field(default="", description="dataset: pinned commit, required for hub names.")
    train: str = Field(
        default="",
        description="Training set: a .csv, .tsv, .jsonl, .json or .parquet file, also compressed (.gz, .bz2, .xz).",
    )
    dev: str = Field(default="", description="Labelled set that chooses the checkpoint.")
    test: str = Field(default="", description="Set to predict at the end, with labels or without.")
    dev_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Without dev: share of the training set held out instead, by a hash of the texts.",
    )
    format: tables.Format = Field(
        default="",
        description="Format of the files; empty follows their suffix. lines: a label, a blank, the text (TREC).",
    )
    encoding: str = Field(default="utf-8", description="Encoding of text files, such as latin-1.")
    header: bool = Field(
        default=True, description="csv, tsv: the first row names the columns; otherwise they are numbers."
    )
    delimiter: str = Field(
        default="",
        description="csv, tsv: the character between columns; empty is a comma in .csv, a tab in .tsv.",
    )
    quoting: Literal["auto", "standard", "none"] = Field(
        default="auto",
        description='csv, tsv: standard (RFC 4180: "" inside quotes), none (a quote is a character); auto: none in .tsv.',
    )
    text_column: str | int = Field(
        default="text", description="Column of the text: its name, or its number from 0."
    )
    pair_column: str | int = Field(
        default="", description="Column of the second text, if texts come in pairs; segment B."
    )
    label_column: str | int = Field(
        default="label", description="Column of the label: its name, or its number from 0."
    )
    problem_type: Problem = Field(
        default="single_label",
        description="One class a text, any number of labels, or a number. glue sets it itself.",
    )
    labels: tuple[str, ...] = Field(
        default=(),
        description="Labels as in the files, in the order of the outputs; empty: those of the training set, sorted.",
    )
    label_names: tuple[str, ...] = Field(
        default=(), description="Names to show for labels, in the same order, where the files have numbers."
    )
    label_separator: str = Field(
        default="", description="multi_label: what separates labels in a cell; empty: cells are JSON lists."
    )
    class_weights: Literal["none", "balanced"] = Field(
        default="none",
        description="single_label: balanced weighs each class by examples / (classes x its examples) in training.",
    )
    overlap: int | None = Field(
        default=None,
        ge=0,
        description="Tokens that neighbouring windows of a long text share; empty: a quarter of a window's room.",
    )
    max_windows: int = Field(
        default=8,
        ge=1,
        description="Training sees at most this many windows of a text, spread evenly; predictions see all.",
    )
    positive: str = Field(
        default="", description="Class whose F1 is `f1` where there are two; empty takes the last label."
    )
    threshold: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="multi_label: least probability of a label; 0 finds it on the dev set.",
    )
    metric: str = Field(
        default="",
        description="Score that chooses the checkpoint; empty: accuracy, micro_f1, pearson_and_spearman, or GLUE's own.",
    )

    @model_validator(mode="after")
    def _check_sources(self) -> ClassificationSettings:
        if sum(map(bool, (self.glue, self.dataset, self.train and not self.dataset))) > 1:
            raise ValueError("glue: only one of glue, dataset and train can give the texts")
        if not (self.glue or self.dataset or self.train):
            raise ValueError("train: one of train, dataset and glue is needed")
        if self.glue and not self.glue_dir:
            raise ValueError("glue_dir: glue needs the folder with the official downloads")
        if self.glue and (self.dev or self.test):
            raise ValueError("dev: the files of a task of GLUE are those in glue_dir; leave dev and test out")
        if self.dev and self.dev_share:
            raise ValueError("dev_share: there is a dev set; set one of the two")
        return self

    @model_validator(mode="after")
    def _check_form(self) -> ClassificationSettings:
        if not is_encoding(self.encoding):
            raise ValueError(f"encoding: {self.encoding!r} is unknown; for example utf-8, latin-1")
        if len(self.delimiter) > 1:
            raise ValueError(
                f"delimiter: {self.delimiter!r} is more than one character; a tab is '\\t' in quotes"
            )
        if not self.header and not self.glue:
            for name in ("text_column", "pair_column", "label_column"):
                if isinstance(value := getattr(self, name), str) and value:
                    raise ValueError(f"{name}: {value!r}, but without a header columns are numbers from 0")
        return self

    @model_validator(mode="after")
    def _check_labels(self) -> ClassificationSettings:
        kind = "regression" if self.glue == "stsb" else self.problem_type
        if self.glue and (self.labels or self.label_names or self.problem_type != "single_label"):
            raise ValueError("labels: glue has its own; leave labels, label_names and problem_type out")
        for name in ("labels", "label_names"):
            if len(set(values := getattr(self, name))) != len(values):
                raise ValueError(f"{name}: one stands there twice")
        if self.labels and self.label_names and len(self.labels) != len(self.label_names):
            raise ValueError(f"label_names: {len(self.label_names)} names for {len(self.labels)} labels")
        if len(self.labels) == 1 and kind == "single_label":
            raise ValueError("labels: one class alone; a classifier needs two or more")
        if kind == "regression" and (self.labels or self.label_names):
            raise ValueError("labels: regression has none")
        if self.class_weights != "none" and kind != "single_label":
            raise ValueError("class_weights: only single_label has classes to weigh")
        known = _SCORES[kind] if not self.glue else glue.TASKS[self.glue].scores
        if self.metric and self.metric not in known:
            raise ValueError(f"metric: {self.metric!r} is not a score here; known: {', '.join(known)}")
        return self


@dataclass(frozen=True, slots=True)
class Example:
    """One text or pair; `label` is None where there is none."""

    text: str
    pair: str | None
    label: Label | None
    where: str  # its place in the files, for messages


class Classification:
    """The task (finetune.task.Task) of classes, labels or values of texts.

    Args:
        state: what a trained model kept of itself: its labels and its threshold.
    """

    kind = "classification"
    head: Head = "sequence"

    def __init__(self, settings: ClassificationSettings, state: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        self._glue = glue.TASKS[settings.glue] if settings.glue else None
        self.problem: Problem = "regression" if settings.glue == "stsb" else settings.problem_type
        self.objective: Objective = _OBJECTIVES[self.problem]
        self.metric: str = settings.metric or (self._glue.metric if self._glue else _SCORES[self.problem][0])
        self.threshold = settings.threshold or _THRESHOLD
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
    def outputs(self) -> int:
        return 1 if self.problem == "regression" else len(self.labels)

    @property
    def takes_pairs(self) -> bool:
        return self._glue.pair is not None if self._glue else self.settings.pair_column != ""

    @property
    def positive(self) -> str:
        """The class that `f1` is of, of two."""
        return self.settings.positive or self.labels[-1]

    def state(self) -> dict[str, Any]:
        return {
            "labels": list(self.labels),
            "values": list(self._label_names()),
            "threshold": float(self.threshold),
        }

    # ------------------------------------------------------------ files in

    def read_train(self) -> list[Example]:
        table = self._needed("train")
        raw = self._raw_labels(table)
        if self._names is None:
            self._names = self._find_labels(raw, table)
        examples = self._examples(table, raw)
        if self.settings.dev_share:
            self._check_no_dev()
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
            self._check_no_dev()
            table = self._needed("train")
            held_out = [example for example in self._examples(table) if self._is_held_out(example)]
            if not held_out:
                raise InputError(
                    f"{table.source}: dev_share {self.settings.dev_share} of {len(table)} examples holds none out. "
                    "Raise it."
                )
            return {"dev": held_out}
        if not self._glue and not self.settings.dev:
            return {}
        parts = self._glue.dev if self._glue else ("dev",)
        return {part: self._examples(self._needed(part)) for part in parts}

    def read_test(self) -> dict[str, list[Example]]:
        if not self._glue and not self.settings.test:
            return {}
        parts = self._glue.test if self._glue else ("test",)
        found = {part: self._table(part, labelled=False) for part in parts}
        return {
            part: self._examples(table, self._raw_labels(table, labelled=False))
            for part, table in found.items()
            if table is not None
        }

    def read_file(self, path: str) -> list[Example]:
        """Labelled examples of another file, or of a folder written by save_to_disk (its split `dev` is named)."""
        if self.settings.glue:
            return self._examples(glue.read_file(self.settings.glue, path))
        columns, _ = self._columns(labelled=True)
        if Path(path).is_dir():
            split = (self.settings.dev if self.settings.dataset else "") or "train"
            return self._examples(self._ours(tables.read_dataset(path, columns, split=split)))
        return self._examples(self._ours(tables.read_table(path, columns, layout=self._layout())))

    def example(self, record: Mapping[str, Any] | str, where: str) -> Example:
        """Of plain text, or of a record with `text` and `pair` or with the columns' names."""
        pair_name = self._glue.pair if self._glue else self.settings.pair_column
        if isinstance(record, str):
            if self.takes_pairs:
                raise InputError(
                    f'{where}: one text where a pair is needed. Give {{"text": ..., "pair": ...}} as JSON.'
                )
            return Example(_text(record, where, "the text"), None, None, where)
        if not isinstance(record, Mapping):
            raise InputError(
                f'{where}: {shown(record)} is neither a text nor an object such as {{"text": ...}}.'
            )
        text_name = self._glue.text if self._glue else self.settings.text_column
        text = _field(record, where, text_name, "text")
        if self.takes_pairs:
            return Example(text, _field(record, where, pair_name, "pair"), None, where)
        if record.get("pair") is not None:
            raise InputError(f"{where}: a pair, but the model was trained on single texts. Leave `pair` out.")
        return Example(text, None, None, where)

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

    def decode(
        self, examples: Sequence[Example], windows: Windows, logits: np.ndarray
    ) -> list[dict[str, Any]]:
        """One prediction an example, from the mean of its windows' logits, float32 [F, C].

        single_label: {"label", "score", "scores": {name: probability}}; multi_label: {"labels", "scores"};
        regression: {"value"}.
        """
        if not len(windows):
            return []
        begins = np.flatnonzero(np.diff(windows.examples, prepend=-1))
        counts = np.diff(begins, append=len(windows))
        mean_NC = np.add.reduceat(logits.astype(np.float64), begins, axis=0) / counts[:, None]
        if self.problem == "regression":
            return [{"value": value} for value in mean_NC[:, 0].tolist()]
        names = self.labels
        if self.problem == "multi_label":
            chances_NC = 0.5 * (1 + np.tanh(mean_NC / 2))  # the logistic function, without overflow
            return [
                {
                    "labels": [
                        name for name, chance in zip(names, chances, strict=True) if self._holds(chance)
                    ],
                    "scores": dict(zip(names, chances, strict=True)),
                }
                for chances in chances_NC.tolist()
            ]
        chances_NC = np.exp(mean_NC - mean_NC.max(1, keepdims=True))
        chances_NC /= chances_NC.sum(1, keepdims=True)
        best_N = mean_NC.argmax(1).tolist()
        return [
            {"label": names[best], "score": chances[best], "scores": dict(zip(names, chances, strict=True))}
            for best, chances in zip(best_N, chances_NC.tolist(), strict=True)
        ]

    # ------------------------------------------------------------ scores

    def tune(self, examples: Sequence[Example], predictions: Sequence[Mapping[str, Any]]) -> None:
        """multi_label: the threshold, one for all labels, with the best `metric` on these examples.

        Of equally good ones the nearest to 0.5. Nothing to do where the settings have one.
        """
        if self.problem != "multi_label" or self.settings.threshold or not examples:
            return
        true_NC = self._label_rows(examples)
        chances_NC = self._chances(predictions)
        values = np.unique(chances_NC)
        # All thresholds between two neighbouring probabilities are the same: the middle stands for them. Of many
        # it is some, and the one nearest below each hundredth, as most probabilities of rare labels are near 0.
        values = np.unique(chances_NC)
        between = (values[1:] + values[:-1]) / 2
        some = np.linspace(0, len(between) - 1, min(_CANDIDATES, len(between))).round().astype(int)
        hundredths = np.searchsorted(between, np.arange(1, 100) / 100, side="right") - 1
        candidates = [_THRESHOLD, *between[np.union1d(some, hundredths[hundredths >= 0])].tolist()]
        candidates.sort(key=lambda candidate: abs(candidate - _THRESHOLD))
        scores = [self._set_scores(true_NC, chances_NC >= candidate)[self.metric] for candidate in candidates]
        self.threshold = candidates[int(np.argmax(scores))]

    def score(
        self, examples: Sequence[Example], predictions: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        """The official scores of a task of GLUE, otherwise all there are; {} of examples without labels.

        Sets of labels follow from the probabilities and the present threshold, also after `tune`.
        """
        if not examples or any(example.label is None for example in examples):
            return {}
        scores = self._all_scores(examples, predictions)
        return {name: scores[name] for name in self._glue.scores} if self._glue else scores

    def details(
        self, examples: Sequence[Example], predictions: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Precision, recall and F1 of each class; for single_label the confusion counts [true][predicted]."""
        if not examples or any(example.label is None for example in examples):
            return {}
        if self.problem == "regression":
            errors = self._values(predictions) - self._label_rows(examples)
            return {
                "mean_absolute_error": float(np.abs(errors).mean()),
                "mean_squared_error": float((errors**2).mean()),
            }
        if self.problem == "multi_label":
            true_NC, predicted_NC = self._label_rows(examples), self._sets(predictions)
            return {
                "threshold": float(self.threshold),
                "by_type": _by_type(self.labels, metrics.label_counts(true_NC, predicted_NC)),
            }
        matrix = self._confusion(examples, predictions)
        return {
            "confusion": {"labels": list(self.labels), "counts": matrix.tolist()},
            "by_type": _by_type(self.labels, metrics.class_counts(matrix)),
        }

    def _all_scores(
        self, examples: Sequence[Example], predictions: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        if self.problem == "regression":
            true, predicted = self._label_rows(examples), self._values(predictions)
            pearson, spearman = metrics.pearson(true, predicted), metrics.spearman(true, predicted)
            return {
                "pearson": pearson,
                "spearman": spearman,
                "pearson_and_spearman": (pearson + spearman) / 2,
            }
        if self.problem == "multi_label":
            return self._set_scores(self._label_rows(examples), self._sets(predictions))
        matrix = self._confusion(examples, predictions)
        counts = metrics.class_counts(matrix)
        scores = {
            "accuracy": metrics.accuracy(matrix),
            "macro_f1": counts.macro_f1(present=True),
            "micro_f1": counts.micro_f1,
            "matthews": metrics.matthews(matrix),
        }
        if len(self.labels) == 2:
            scores["f1"] = float(counts.f1[self.labels.index(self.positive)])
            scores["accuracy_and_f1"] = (scores["accuracy"] + scores["f1"]) / 2
        return scores

    def _set_scores(self, true_NC: np.ndarray, predicted_NC: np.ndarray) -> dict[str, float]:
        counts = metrics.label_counts(true_NC, predicted_NC)
        return {
            "micro_f1": counts.micro_f1,
            "macro_f1": counts.macro_f1(present=False),
            "subset_accuracy": metrics.subset_accuracy(true_NC, predicted_NC),
        }

    def _confusion(self, examples: Sequence[Example], predictions: Sequence[Mapping[str, Any]]) -> np.ndarray:
        numbers = {name: number for number, name in enumerate(self.labels)}
        predicted = np.array([numbers[prediction["label"]] for prediction in predictions], np.int64)
        return metrics.confusion(self._label_rows(examples), predicted, len(numbers))

    def _chances(self, predictions: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """float64 [N, C]"""
        names = self.labels
        rows = [[one["scores"][name] for name in names] for one in predictions]
        return np.array(rows, np.float64).reshape(len(rows), len(names))

    def _sets(self, predictions: Sequence[Mapping[str, Any]]) -> np.ndarray:
        return self._chances(predictions) >= self.threshold

    def _holds(self, chance: float) -> bool:
        return chance >= self.threshold

    def _values(self, predictions: Sequence[Mapping[str, Any]]) -> np.ndarray:
        return np.array([prediction["value"] for prediction in predictions], np.float64)

    # ------------------------------------------------------------ reading

    def _table(self, part: str, *, labelled: bool = True) -> tables.Table | None:
        """The columns text, pair, label of one set; None where GLUE's folder has no such file."""
        settings = self.settings
        if settings.glue:
            return glue.read_split(settings.glue, settings.glue_dir, part)
        columns, optional = self._columns(labelled=labelled)
        named = getattr(settings, part)
        if settings.dataset:
            return self._ours(
                tables.read_dataset(
                    settings.dataset,
                    columns,
                    subset=settings.subset,
                    split=named or "train",
                    revision=settings.revision,
                    where="classification",
                    optional=optional,
                )
            )
        return self._ours(tables.read_table(named, columns, layout=self._layout(), optional=optional))

    def _columns(self, *, labelled: bool) -> tuple[list[tables.Key], list[tables.Key]]:
        """(columns to read, those of them that may be missing)"""
        settings = self.settings
        columns: list[tables.Key] = [settings.text_column, settings.label_column]
        if self.takes_pairs:
            columns.append(settings.pair_column)
        return columns, [] if labelled else [settings.label_column]

    def _ours(self, table: tables.Table) -> tables.Table:
        settings = self.settings
        theirs = {"text": settings.text_column, "label": settings.label_column, "pair": settings.pair_column}
        found: dict[tables.Key, list[Any]] = {
            name: table.columns[key] for name, key in theirs.items() if key in table.columns
        }
        classes = table.classes.get(settings.label_column, [])
        return replace(table, columns=found, classes={"label": classes} if classes else {})

    def _layout(self) -> tables.Layout:
        settings = self.settings
        return tables.Layout(
            settings.format, settings.encoding, settings.delimiter, settings.quoting, settings.header
        )

    def _needed(self, part: str) -> tables.Table:
        table = self._table(part)
        if table is None:
            wanted = glue.expected_files(self.settings.glue, self.settings.glue_dir, part)
            hint = " or set dev_share" if part == "dev" else ""
            raise InputError(f"classification.glue_dir: found no {wanted}. Download it{hint}.")
        return table

    def _check_no_dev(self) -> None:
        if self._glue and self._table(self._glue.dev[0]) is not None:
            raise InputError(
                f"classification.dev_share: {self._glue.title} has an official dev set. Set dev_share to 0."
            )

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
        examples = []
        for row, (text, label) in enumerate(zip(texts, raw, strict=True)):
            where = table.where(row)
            pair = None if pairs is None else _text(pairs[row], where, "the second text")
            examples.append(
                Example(_text(text, where, "the text"), pair, renamed(label, names, where), where)
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

    def _cut(
        self, examples: Sequence[Example], encoder: TextEncoder, *, thin: bool
    ) -> tuple[np.ndarray, Framed]:
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
            long.sum(), examples, most, most * long.sum(), counts[long].sum(),
        )  # fmt: skip
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


def _by_type(names: Sequence[str], counts: metrics.Counts) -> dict[str, dict[str, float]]:
    columns = (counts.precision.tolist(), counts.recall.tolist(), counts.f1.tolist(), counts.true.tolist())
    return {
        name: {"precision": precision, "recall": recall, "f1": f1, "support": support}
        for name, precision, recall, f1, support in zip(names, *columns, strict=True)
    }
