"""The built-in kinds of tasks, each with its section of the config; `task.kind` names the module of a custom one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.tasks.base import Task
from finetune.tasks.classification import Classification
from finetune.tasks.entities import Entities
from finetune.tasks.questions import Questions
from pretrain.common.errors import InputError
from pretrain.common.extensions import Contract
from pretrain.common.kinds import load_kind
from pretrain.common.sections import Section, is_section

INTERFACE = Contract("TASK", Task, ("settings_type", "head", "summary"))

TASKS: tuple[type[Task[Any]], ...] = (Classification, Entities, Questions)


def make_task(settings: Section, state: Mapping[str, Any] | None = None) -> Task[Any]:
    """Create the task that these settings describe; `state` is the task's saved state in a trained model."""
    task_type = next(candidate for candidate in TASKS if isinstance(settings, candidate.settings_type))
    return task_type(settings, state)


def custom_task(module: str) -> type[Task[Any]]:
    """Return the task class in the user's `module`; raises the errors of `load_kind`."""
    task = load_kind(__name__, module).TASK
    if not is_section(task.settings_type):
        raise InputError(f"{module}: its settings_type must derive from {Section.__module__}.Section.")
    return task
