"""Groups fine-tuning runs by data, initial checkpoint and settings. Runs of one group differ only in their seeds."""

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANDOM = "random weights"

# Settings of a task that name its data; the first one that is set is used. No other section has them, so they also
# identify the task's section.
_DATA_SETTINGS = ("glue", "dataset", "train")
# Settings that do not affect the result: identity, placement, speed and precision.
_IGNORED_SETTINGS = ("name", "run_dir", "seed", "engine", "checkpoint", "scheduling", "tracking")
_IGNORED_SETTINGS += ("start_from", "random_weights")  # these determine `Subject.initial`


@dataclass(frozen=True)
class Subject:
    """The data, initial checkpoint and settings of a fine-tuning.

    Attributes:
        data_key: the setting that names the data, such as entities.train.
        data: the task and its data, for display.
        initial: the initial checkpoint, or `RANDOM`.
        settings: (dotted name, value) of all other settings except `_IGNORED_SETTINGS`.
    """

    data_key: str
    data: str
    initial: str
    settings: tuple[tuple[str, Hashable], ...]


def subject_of(config: Mapping[str, Any]) -> Subject | None:
    """Return the subject of a run with this config; None for pretraining, or if the config names no data."""
    sections = {name: section for name, section in config.items() if isinstance(section, Mapping)}
    task, key = next(((name, key) for name in sections for key in _DATA_SETTINGS if sections[name].get(key)), ("", ""))
    if not task:
        return None
    name = str(config[task][key])
    label = f"{task}: {Path(name).name if key == 'train' else name}"
    if config[task].get("subset"):
        label += f" {config[task]['subset']}"
    initial = RANDOM if config.get("random_weights") else str(config.get("start_from") or "")
    other_settings = {key: value for key, value in config.items() if key not in _IGNORED_SETTINGS}
    return Subject(f"{task}.{key}", label, initial, tuple(_flat_settings(other_settings)))


def initial_checkpoints(subjects: Iterable[Subject]) -> list[str]:
    """Return the distinct initial checkpoints, random weights last."""
    checkpoints = dict.fromkeys(subject.initial for subject in subjects)
    return sorted(checkpoints, key=lambda initial: initial == RANDOM)


def differing_settings(subjects: Sequence[Subject]) -> list[str]:
    """Return the dotted names of `Subject.settings` in which subjects with the same data differ."""
    names: dict[str, None] = {}
    for data in dict.fromkeys(subject.data for subject in subjects):
        members = [dict(subject.settings) for subject in subjects if subject.data == data]
        for name in dict.fromkeys(name for member in members for name in member):
            if len({member.get(name) for member in members}) > 1:
                names[name] = None
    return list(names)


def _flat_settings(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Hashable]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat_settings(item, f"{prefix}{key}.")
        elif item is not None:
            yield f"{prefix}{key}", item if isinstance(item, Hashable) else json.dumps(item, sort_keys=True)
