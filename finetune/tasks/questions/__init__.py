"""Span questions: the answer is a span of the context, or, as in SQuAD v2.0, the context has none."""

from finetune.tasks.datasets.squad import Question as Example
from finetune.tasks.questions.settings import QuestionsSettings
from finetune.tasks.questions.task import Questions

__all__ = ["Example", "Questions", "QuestionsSettings"]
