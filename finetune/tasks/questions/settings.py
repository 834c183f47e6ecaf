"""The section `questions` of a config."""

from typing import Literal

from pydantic import Field, field_validator

from finetune.tasks.custom_metric import metric_error
from pretrain.common.sections import LocalPath, Section


class QuestionsSettings(Section):
    """Span questions: the answer is a span of the context (SQuAD v1.1), or there is none (v2.0)."""

    train: LocalPath = Field(
        default="",
        description="Training questions: nested .json as in SQuAD v1.1 or v2.0, or flat records in .json, .jsonl, "
        ".parquet, .csv or .tsv.",
    )
    dev: LocalPath = Field(
        default="", description="Labeled questions used to select the best checkpoint and the threshold."
    )
    test: LocalPath = Field(
        default="",
        description="Questions to answer after training, and to score if labeled; not used for any selection.",
    )
    stride: int = Field(
        default=128,
        ge=0,
        description="Tokens of context that adjacent windows share. This is doc_stride of Hugging Face's run_qa.py; "
        "doc_stride of Google's run_squad.py is the distance between window starts instead.",
    )
    max_question_tokens: int = Field(
        default=64, ge=1, description="Maximum number of tokens of a question; longer ones are cut, and the log warns."
    )
    max_answer_tokens: int = Field(default=30, ge=1, description="Maximum number of tokens of a predicted answer.")
    unanswerable: Literal["auto", True, False] = Field(
        default="auto",
        description="Whether the model may predict that there is no answer (SQuAD v2.0); auto: if the training set has "
        "unanswerable questions.",
    )
    threshold: float | None = Field(
        default=None,
        description="Predict no answer if the score of no answer exceeds the best answer's by more than this; null: "
        "tuned on the dev set.",
    )
    bad_answers: Literal["stop", "skip"] = Field(
        default="stop",
        description="Whether to stop with an error at an answer that is not at its answer_start, or to skip it.",
    )
    metric: str = Field(
        default="f1",
        description="Score used to select the best checkpoint and threshold: f1, exact (v1.1's exact_match), or a "
        "custom function, such as my_package.scores:name.",
    )

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, metric: str) -> str:
        if problem := metric_error(metric, ("f1", "exact")):
            raise ValueError(problem)
        return metric
