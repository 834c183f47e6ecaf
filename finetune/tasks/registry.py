"""The one list of task kinds. The config gets a section for each; a new kind is one package and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.tasks.base import Task
from finetune.tasks.classification import Classification
from finetune.tasks.entities import Entities
from finetune.tasks.questions import Questions
from pretrain.common.sections import Section

TASKS: tuple[type[Task[Any]], ...] = (
    Classification,
    Entities,
    Questions,
)


def make_task(settings: Section, state: Mapping[str, Any] | None = None) -> Task[Any]:
    """The task that these settings describe; `state` is what a trained model kept of it."""
    kind = next(task for task in TASKS if isinstance(settings, task.settings_type))
    return kind(settings, state)
