"""The section `entities` of a config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from finetune.tasks.custom_metric import metric_error
from finetune.tasks.datasets.files import is_encoding
from pretrain.common.sections import LocalPath, Section

_FILE_FORMATS = (
    ".jsonl, .json and .parquet have records (tokens and tags, or text and entities); .csv has one word per row; any "
    "other file has CoNLL columns. May be compressed (.gz, .bz2, .xz)."
)


class EntitiesSettings(Section):
    """Named entity recognition, from CoNLL columns, JSON or tables."""

    train: LocalPath = Field(default="", description=f"Training file. {_FILE_FORMATS}")
    dev: LocalPath = Field(default="", description="Labeled file used to select the best checkpoint; empty for none.")
    test: LocalPath = Field(
        default="", description="File to predict after training, and to score if labeled; empty for none."
    )
    token_column: int = Field(
        default=0, description="Index of the word column, from 0; negative ones count from the last column."
    )
    label_column: int = Field(
        default=-1, description="Index of the tag column, like token_column; a test file with one column is unlabeled."
    )
    scheme: Literal["auto", "iob1", "iob2", "bioes"] = Field(
        default="auto",
        description="Tagging scheme of the files (bioes includes BILOU); auto detects it in the training file.",
    )
    dev_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Without dev: fraction of the training sentences to hold out, stratified by entity type.",
    )
    tag_names: tuple[str, ...] = Field(
        default=(), description="Names of numeric tags in records, in numeric order, such as [O, B-PER, I-PER]."
    )
    encoding: str = Field(default="utf-8", description="Encoding of the files, such as utf-8 or latin-1.")
    labels: tuple[str, ...] = Field(
        default=(), description="Entity types, such as PER. Empty: all types in the training file."
    )
    document_context: bool | int = Field(
        default=False,
        description="Give the model adjacent sentences of the same document as context. true fills the window, as in "
        "the BERT paper; a number limits the tokens on each side (64 in FLERT). In CoNLL files, documents start at "
        "-DOCSTART- or `# newdoc`; without these, the file is one document. Adjacent records with the same `document` "
        "form one. Each sentence still has a separate window, so runs take longer.",
    )
    tune_outside: bool = Field(
        default=False,
        description="Subtract a penalty of -1 to 4 nats from the logits of O: the one with the best `metric` on the "
        "dev set. Finds more entities if they are rare. The dev score becomes slightly optimistic.",
    )
    metric: str = Field(
        default="f1",
        description="Score used to select the best checkpoint: f1 over entities (conlleval, seqeval), macro_f1 (mean "
        "over types), strict_f1 (seqeval's strict mode), accuracy (fraction of correct tags), or a custom function, "
        "such as my_package.scores:name.",
    )

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, metric: str) -> str:
        if problem := metric_error(metric, ("f1", "macro_f1", "strict_f1", "accuracy")):
            raise ValueError(problem)
        return metric

    @model_validator(mode="after")
    def _check_dev(self) -> EntitiesSettings:
        if self.dev and self.dev_share:
            raise ValueError("dev_share: dev is set, too; use one of the two")
        return self

    @field_validator("document_context")
    @classmethod
    def _check_context(cls, value: bool | int) -> bool | int:
        if value < 0:
            raise ValueError(f"{value} tokens of context; expected true, false or an integer >= 0")
        return value

    @field_validator("encoding")
    @classmethod
    def _check_encoding(cls, value: str) -> str:
        if not is_encoding(value):
            raise ValueError(f"{value!r} is not a Python encoding; use one such as utf-8 or latin-1")
        return value

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            # B-cell may be a type; if I-cell is listed as well, it is a tag.
            is_tag = name == "O" or (name.startswith("B-") and f"I-{name[2:]}" in value)
            if is_tag or not name or value.count(name) > 1:
                raise ValueError(f"{name!r}; expected types without prefixes, each once, such as [PER, LOC]")
        return value
