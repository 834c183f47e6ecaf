"""The kinds of task there are, by the name of their section in the config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.tasks.base import Task

if TYPE_CHECKING:
    from finetune.config import FinetuneConfig


def make_task(config: FinetuneConfig, state: dict[str, Any] | None = None) -> Task[Any]:
    """The config's task; `state` is what a trained model kept of it."""
    from finetune.tasks.classification import Classification
    from finetune.tasks.entities.task import Entities
    from finetune.tasks.questions.task import Questions

    if config.classification is not None:
        return Classification(config.classification, state)
    if config.entities is not None:
        return Entities(config.entities, state)
    assert config.questions is not None
    return Questions(config.questions, state)
