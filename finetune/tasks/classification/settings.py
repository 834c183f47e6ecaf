"""The section `classification` of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from finetune.tasks.classification.metrics import CLASS_SCORES, LABEL_SCORES, VALUE_SCORES
from finetune.tasks.custom_metric import metric_error
from finetune.tasks.datasets import glue
from finetune.tasks.datasets.files import is_encoding
from finetune.tasks.datasets.glue import GlueName
from finetune.tasks.datasets.labels import ProblemType
from finetune.tasks.datasets.table import Format
from pretrain.common.sections import ALLOW_TABS_AND_NEWLINES, LocalPath, Section

# Scores of each problem type. The first is used to select the best checkpoint unless `metric` names another.
SCORES: dict[ProblemType, tuple[str, ...]] = {
    "single_label": (*CLASS_SCORES, "f1"),
    "multi_label": tuple(LABEL_SCORES),
    "regression": ("pearson_and_spearman", *(name for name in VALUE_SCORES if name != "pearson_and_spearman")),
}


class ClassificationSettings(Section):
    """Classification or regression of documents, or of pairs of documents."""

    glue: GlueName = Field(default="", description="Name of a GLUE task, with its official files, labels and scores.")
    glue_dir: LocalPath = Field(default="", description="For glue: folder with the official files (CoLA, ...).")
    dataset: LocalPath = Field(
        default="",
        description="Hugging Face dataset: hub name, or folder from save_to_disk; train, dev and test name its splits.",
    )
    subset: str = Field(default="", description="For dataset: configuration name.")
    revision: str = Field(default="", description="For dataset: pinned commit, required for hub names.")
    train: LocalPath = Field(
        default="",
        description="Training set: a .csv, .tsv, .jsonl, .json or .parquet file, also compressed (.gz, .bz2, .xz).",
    )
    dev: LocalPath = Field(default="", description="Labeled set used to select the best checkpoint.")
    test: LocalPath = Field(
        default="", description="Set to predict after training, and to score if labeled; not used for any selection."
    )
    dev_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Without dev: fraction of the training set to hold out as dev set, stratified by class.",
    )
    train_examples: int = Field(
        default=0,
        ge=0,
        description="Number of training examples to use: a fixed sample, stratified by class; 0 uses all.",
    )
    format: Format = Field(default="", description="Format of the files; empty: determined by the suffix.")
    encoding: str = Field(default="utf-8", description="Encoding of text files, such as latin-1.")
    header: bool = Field(
        default=True, description="For csv, tsv: whether the first row has column names; if not, use indices from 0."
    )
    delimiter: str = Field(
        default="",
        json_schema_extra=ALLOW_TABS_AND_NEWLINES,
        description="For csv, tsv: column delimiter; empty: a comma in .csv, a tab in .tsv.",
    )
    quoting: Literal["auto", "standard", "none"] = Field(
        default="auto",
        description='For csv, tsv: standard (RFC 4180: "" escapes a quote) or none (quotes are ordinary characters). '
        "auto: standard in .csv; none in .tsv, but a cell that starts with a quote is an error.",
    )
    text_column: str | int = Field(default="text", description="Name of the text column, or its index from 0.")
    pair_column: str | int = Field(
        default="", description="Column of the second text (segment B), if examples are pairs."
    )
    label_column: str | int = Field(default="label", description="Name of the label column, or its index from 0.")
    label_columns: tuple[str | int, ...] = Field(
        default=(), description="For multi_label: one column of 0 and 1 for each label, instead of label_column."
    )
    problem_type: ProblemType = Field(
        default="single_label",
        description="Type of labels: one class, a set of labels, or a number (regression) per example. glue sets it.",
    )
    labels: tuple[str, ...] = Field(
        default=(),
        description="Labels as in the files, in the order of the outputs; empty: all in the training set, sorted.",
    )
    label_separator: str = Field(
        default="",
        json_schema_extra=ALLOW_TABS_AND_NEWLINES,
        description="For multi_label: separator between the labels in a cell; empty if cells are JSON lists.",
    )
    class_weights: Literal["none", "balanced"] | dict[str, float] = Field(
        default="none",
        description="Weights in the training loss. balanced, for single_label, weights each class by examples / "
        "(classes x examples of the class). Or weights by label, such as {fraud: 20}; 1 if not listed; for "
        "multi_label, they are weights of positive examples (torch's pos_weight).",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="For single_label: share of each label's probability to spread evenly over all classes.",
    )
    max_windows: int = Field(
        default=8,
        ge=1,
        description="Maximum number of windows of a training example, evenly spaced if longer. Predictions use all.",
    )
    positive: str = Field(
        default="", description="The positive one of two classes, for f1. Empty: no f1, except for GLUE tasks."
    )
    threshold: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Minimum probability to predict a label (multi_label; 0: tuned on the dev set), or to predict "
        "`positive` (two classes; 0 means 0.5).",
    )
    metric: str = Field(
        default="",
        description="Score used to select the best checkpoint. Empty: accuracy, micro_f1 (multi_label), "
        "pearson_and_spearman (regression), or GLUE's. Or a custom function, such as my_package.scores:name.",
    )

    @property
    def configured_labels(self) -> tuple[str, ...]:
        """The labels of `labels` or `label_columns`; () if neither is set."""
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
            raise ValueError("dev: a GLUE task uses the files in glue_dir; remove dev and test")
        if self.dev and self.dev_share:
            raise ValueError("dev_share: dev is set, too; use one of the two")
        return self

    @model_validator(mode="after")
    def _check_file_format(self) -> ClassificationSettings:
        if not is_encoding(self.encoding):
            raise ValueError(f"encoding: {self.encoding!r} is unknown; use one such as utf-8 or latin-1")
        if len(self.delimiter) > 1:
            raise ValueError(f'delimiter: {self.delimiter!r} is more than one character; for a tab, write "\\t"')
        if self.delimiter in ("\n", '"'):
            raise ValueError(f"delimiter: {self.delimiter!r} is a line end or a quote; use another")
        if not self.header and not self.glue:
            for name in ("text_column", "pair_column", "label_column"):
                if isinstance(value := getattr(self, name), str) and value:
                    raise ValueError(f"{name}: {value!r}, but without a header, columns are indices from 0")
        return self

    @model_validator(mode="after")
    def _check_labels(self) -> ClassificationSettings:
        kind = "regression" if self.glue == "stsb" else self.problem_type
        if self.glue and (self.labels or self.problem_type != "single_label"):
            raise ValueError("labels: set by glue; remove labels and problem_type")
        for name in ("labels", "label_columns"):
            if len(set(values := getattr(self, name))) != len(values):
                raise ValueError(f"{name}: an entry is repeated")
        if self.label_columns and (kind != "multi_label" or self.labels or self.label_separator):
            raise ValueError("label_columns: needs problem_type: multi_label, without labels and label_separator")
        if len(self.labels) == 1 and kind == "single_label":
            raise ValueError("labels: only one class; a classifier needs at least two")
        if kind == "regression" and self.labels:
            raise ValueError("labels: not supported for regression")
        is_pos_weight = kind == "multi_label" and self.class_weights != "balanced"
        if self.class_weights != "none" and kind != "single_label" and not is_pos_weight:
            raise ValueError(
                "class_weights: balanced needs single_label; weights by label, single_label or multi_label"
            )
        if self.label_smoothing and kind != "single_label":
            raise ValueError("label_smoothing: only supported for single_label")
        if self.threshold and kind != "multi_label" and not self.positive:
            raise ValueError("threshold: only supported for multi_label, or for two classes with positive")
        if problem := metric_error(self.metric, SCORES[kind] if not self.glue else glue.TASKS[self.glue].scores):
            raise ValueError(f"metric: {problem}")
        return self
