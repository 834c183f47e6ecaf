"""Reads questions from files, and checks that the model can answer them."""

from typing import Literal

from finetune.tasks.datasets import squad
from finetune.tasks.datasets.squad import Question
from finetune.tasks.questions.settings import QuestionsSettings
from pretrain.common.errors import InputError


class QuestionSource:
    """Reads the questions of one config. The first labeled set determines whether a question may have no answer.

    Args:
        unanswerable: `Questions.state()["unanswerable"]` of the trained model; None before training.

    Attributes:
        unanswerable: whether a question may have no answer; None until known.
    """

    def __init__(self, settings: QuestionsSettings, unanswerable: bool | None) -> None:
        self._settings = settings
        # Always skip for a trained model: its settings cannot be changed, and scores compare only strings.
        self._bad_answers: Literal["stop", "skip"] = settings.bad_answers if unanswerable is None else "skip"
        value = unanswerable if settings.unanswerable == "auto" else settings.unanswerable
        self.unanswerable: bool | None = None if value is None else bool(value)

    def read_train(self) -> list[Question]:
        """Return the training set; `InputError` if the config names none."""
        if not self._settings.train:
            raise InputError("questions.train: empty. Give a file of questions with their answers.")
        return self.read(self._settings.train, labeled=True, training=True)

    def read(self, path: str, *, labeled: bool, training: bool = False, check: bool = True) -> list[Question]:
        """Read a file; with `check`, raise `InputError` for questions without an answer if the model always answers."""
        questions = squad.read(path, labeled=labeled)
        policy = self._settings.bad_answers if training else self._bad_answers
        questions = squad.handle_bad_answers(questions, path, policy, training=training)
        unanswerable_ids = [question.id for question in questions if question.answers == ()]
        if self.unanswerable is None and labeled:
            self.unanswerable = bool(unanswerable_ids)
        if check and unanswerable_ids and not self.unanswerable:
            reason = (
                "unanswerable is false"
                if self._settings.unanswerable is False
                else "the training set has no such questions, so the model always answers"
            )
            raise InputError(
                f"{path}: {len(unanswerable_ids)} of {len(questions)} questions have no answer, first "
                f"{unanswerable_ids[0]}, but {reason}. Set unanswerable: true, or remove them from the file."
            )
        return questions
