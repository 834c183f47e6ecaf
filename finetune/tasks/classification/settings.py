"""The section `classification` of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from finetune.tasks.classification.metrics import CLASS_SCORES, LABEL_SCORES, VALUE_SCORES
from finetune.tasks.datasets import glue
from finetune.tasks.datasets.files import is_encoding
from finetune.tasks.datasets.glue import Name as GlueName
from finetune.tasks.datasets.labels import Problem
from finetune.tasks.datasets.table import Format
from finetune.tasks.own_metric import metric_error
from pretrain.common.sections import ALLOW_TABS_AND_NEWLINES, LocalPath, Section

# Scores of each problem. The first one chooses the checkpoint unless the settings name another.
SCORES: dict[Problem, tuple[str, ...]] = {
    "single_label": (*CLASS_SCORES, "f1"),
    "multi_label": tuple(LABEL_SCORES),
    "regression": ("pearson_and_spearman", *(name for name in VALUE_SCORES if name != "pearson_and_spearman")),
}


class ClassificationSettings(Section):
    """Classes, sets of labels or values of documents, or of pairs of documents."""

    glue: GlueName = Field(default="", description="Name of a GLUE task; sets its official files, labels and scores.")
    glue_dir: LocalPath = Field(default="", description="glue: folder with the official downloads (CoLA, SST-2, ...).")
    dataset: LocalPath = Field(
        default="",
        description="Hugging Face: hub name, or a folder written by save_to_disk. train, dev and test name its splits.",
    )
    subset: str = Field(default="", description="dataset: configuration name.")
    revision: str = Field(default="", description="dataset: pinned commit, required for hub names.")
    train: LocalPath = Field(
        default="",
        description="Training set: a .csv, .tsv, .jsonl, .json or .parquet file, also compressed (.gz, .bz2, .xz).",
    )
    dev: LocalPath = Field(default="", description="Labeled set that chooses the checkpoint.")
    test: LocalPath = Field(
        default="",
        description="Set to predict at the end, and to score if labeled; it chooses nothing.",
    )
    dev_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Without dev: fraction of the training set to hold out, stratified by class.",
    )
    train_examples: int = Field(
        default=0,
        ge=0,
        description="Train on this number of examples only, drawn from every class by a hash; 0 uses all.",
    )
    format: Format = Field(
        default="",
        description="Format of the files; empty: determined by their suffix.",
    )
    encoding: str = Field(default="utf-8", description="Encoding of text files, such as latin-1.")
    header: bool = Field(
        default=True, description="csv, tsv: the first row has the column names; if false, columns are numbered from 0."
    )
    delimiter: str = Field(
        default="",
        json_schema_extra=ALLOW_TABS_AND_NEWLINES,
        description="csv, tsv: the character between columns; empty is a comma in .csv, a tab in .tsv.",
    )
    quoting: Literal["auto", "standard", "none"] = Field(
        default="auto",
        description='csv, tsv: standard (RFC 4180: "" inside quotes), none (a quote is a character); auto: standard in '
        ".csv; in .tsv none, and no cell may begin with a quote.",
    )
    text_column: str | int = Field(default="text", description="Column of the text: its name, or its number from 0.")
    pair_column: str | int = Field(
        default="", description="Column of the second text, if examples are pairs; segment B."
    )
    label_column: str | int = Field(default="label", description="Column of the label: its name, or its number from 0.")
    label_columns: tuple[str | int, ...] = Field(
        default=(), description="multi_label: columns of 0 and 1, one for each label, in place of label_column."
    )
    problem_type: Problem = Field(
        default="single_label",
        description="Kind of label: one class, any number of labels, or a value per example. glue sets it.",
    )
    labels: tuple[str, ...] = Field(
        default=(),
        description="Labels as in the files, in the order of the outputs; empty: all of the training set, sorted.",
    )
    label_separator: str = Field(
        default="",
        json_schema_extra=ALLOW_TABS_AND_NEWLINES,
        description="multi_label: separator of labels in a cell; empty for cells that are JSON lists.",
    )
    class_weights: Literal["none", "balanced"] | dict[str, float] = Field(
        default="none",
        description="Weights in the training loss. single_label: balanced weights each class by examples / (classes "
        "x its examples). Or the weights themselves, such as {fraud: 20}, 1 for the others; multi_label: of examples "
        "that have the label (torch's pos_weight).",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="single_label: this share of each training label is spread evenly over all classes.",
    )
    max_windows: int = Field(
        default=8,
        ge=1,
        description="Training uses at most this many windows per example, evenly spaced; predictions use all.",
    )
    positive: str = Field(
        default="", description="Of two classes, the positive one, for f1. Empty: no f1, except for GLUE's tasks."
    )
    threshold: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Minimum probability of a predicted label; 0 chooses it on the dev set. With two classes, the "
        "minimum probability of `positive`; 0 means 0.5.",
    )
    metric: str = Field(
        default="",
        description="Score that chooses the checkpoint. Empty: accuracy, micro_f1, pearson_and_spearman, or GLUE's. A "
        "custom function is my_package.scores:name.",
    )

    @property
    def outputs(self) -> tuple[str, ...]:
        """The labels in the settings, as in the files; () if there are none."""
        return self.labels or tuple(map(str, self.label_columns))

    @field_validator("class_weights", mode="before")
    @classmethod
    def _check_weights(cls, value: Any) -> Any:
        weights = value.values() if isinstance(value, Mapping) else [1 if value in ("none", "balanced") else 0]
        if not all(type(weight) in (int, float) and 0 < weight < math.inf for weight in weights):
            raise ValueError("expected none, balanced, or weights above 0 by label, such as {fraud: 20}")
        return value

    @model_validator(mode="after")
    def _check_sources(self) -> ClassificationSettings:
        if sum(map(bool, (self.glue, self.dataset, self.train and not self.dataset))) > 1:
            raise ValueError("glue: set only one of glue, dataset and train")
        if not (self.glue or self.dataset or self.train):
            raise ValueError("train: one of train, dataset and glue is needed")
        if self.glue and not self.glue_dir:
            raise ValueError("glue_dir: glue needs the folder with the official downloads")
        if self.glue and (self.dev or self.test):
            raise ValueError("dev: a task of GLUE uses the files in glue_dir; leave dev and test out")
        if self.dev and self.dev_share:
            raise ValueError("dev_share: there is a dev set; set one of the two")
        return self

    @model_validator(mode="after")
    def _check_form(self) -> ClassificationSettings:
        if not is_encoding(self.encoding):
            raise ValueError(f"encoding: {self.encoding!r} is unknown; for example utf-8, latin-1")
        if len(self.delimiter) > 1:
            raise ValueError(f"delimiter: {self.delimiter!r} is more than one character; a tab is '\\t' in quotes")
        if self.delimiter in ("\n", '"'):
            raise ValueError(f"delimiter: {self.delimiter!r} is a line end or a quote; set another")
        if not self.header and not self.glue:
            for name in ("text_column", "pair_column", "label_column"):
                if isinstance(value := getattr(self, name), str) and value:
                    raise ValueError(f"{name}: {value!r}, but without a header columns are numbers from 0")
        return self

    @model_validator(mode="after")
    def _check_labels(self) -> ClassificationSettings:
        kind = "regression" if self.glue == "stsb" else self.problem_type
        if self.glue and (self.labels or self.problem_type != "single_label"):
            raise ValueError("labels: glue sets them; leave labels and problem_type out")
        for name in ("labels", "label_columns"):
            if len(set(values := getattr(self, name))) != len(values):
                raise ValueError(f"{name}: an entry occurs twice")
        if self.label_columns and (kind != "multi_label" or self.labels or self.label_separator):
            raise ValueError(
                "label_columns: name the labels of problem_type: multi_label; leave the other settings out"
            )
        if len(self.labels) == 1 and kind == "single_label":
            raise ValueError("labels: only one class; a classifier needs two or more")
        if kind == "regression" and self.labels:
            raise ValueError("labels: regression has none")
        by_label = kind == "multi_label" and self.class_weights != "balanced"
        if self.class_weights != "none" and kind != "single_label" and not by_label:
            raise ValueError("class_weights: balanced is for single_label, weights by label for multi_label, too")
        if self.label_smoothing and kind != "single_label":
            raise ValueError("label_smoothing: is for single_label")
        if self.threshold and kind != "multi_label" and not self.positive:
            raise ValueError("threshold: is for several labels, or for two classes with positive")
        if problem := metric_error(self.metric, SCORES[kind] if not self.glue else glue.TASKS[self.glue].scores):
            raise ValueError(f"metric: {problem}")
        return self
