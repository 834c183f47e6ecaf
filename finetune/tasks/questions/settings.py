"""The section `questions` of a config."""

from typing import Literal

from pydantic import Field, field_validator

from finetune.tasks.custom_metric import metric_error
from pretrain.common.sections import LocalPath, Section


class QuestionsSettings(Section):
    """Span questions: the answer is a span of the context (SQuAD v1.1), or there is none (v2.0)."""

    train: LocalPath = Field(
        default="",
        description="Training questions: SQuAD's nested .json of v1.1 or v2.0, or flat records as .json, .jsonl, "
        ".parquet, .csv or .tsv.",
    )
    dev: LocalPath = Field(
        default="", description="Questions to score on; they choose the checkpoint and the threshold."
    )
    test: LocalPath = Field(
        default="",
        description="Questions to answer at the end, and to score if they have answers; they choose nothing.",
    )
    stride: int = Field(
        default=128,
        ge=0,
        description="Tokens of context that adjacent windows share. This is doc_stride of Hugging Face's run_qa.py; "
        "doc_stride of Google's run_squad.py is the distance between window starts instead.",
    )
    max_question_tokens: int = Field(
        default=64, ge=1, description="Longer questions are cut to this many tokens, with a warning in the log."
    )
    max_answer_tokens: int = Field(default=30, ge=1, description="Longest answer to predict, in tokens.")
    unanswerable: Literal["auto", True, False] = Field(
        default="auto",
        description="Whether the model may predict that there is no answer (SQuAD v2.0); auto: if the training set has "
        "such questions.",
    )
    threshold: float | None = Field(
        default=None,
        description="Predict no answer if its score exceeds the best answer's by more than this; null chooses the "
        "threshold on the dev set.",
    )
    bad_answers: Literal["stop", "skip"] = Field(
        default="stop",
        description="Action for answers that are not at their answer_start: stop, or skip them.",
    )
    metric: str = Field(
        default="f1",
        description="Score that chooses checkpoint and threshold: f1, or exact, v1.1's exact_match. A custom "
        "function is my_package.scores:name.",
    )

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, metric: str) -> str:
        if problem := metric_error(metric, ("f1", "exact")):
            raise ValueError(problem)
        return metric
