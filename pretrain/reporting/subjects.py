"""Group fine-tuning runs by data, checkpoint and settings, so that only runs of different seeds are averaged."""

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANDOM = "random weights"

# Settings of a task that name its data; the first one that is set is used. No other section has them, so they also
# identify the task's section.
_DATA = ("glue", "dataset", "train")
# Settings that do not affect the result: identity, placement, speed and precision.
_IGNORED = ("name", "run_dir", "seed", "engine", "checkpoint", "scheduling", "tracking")


@dataclass(frozen=True)
class Subject:
    """The data, initial checkpoint and settings of a fine-tuning.

    Attributes:
        data_key: the setting that names the data, such as entities.train.
        data: the task and its data, for display.
        start: the initial checkpoint, or `RANDOM`.
        settings: (dotted name, value) of all other settings except `_IGNORED`.
    """

    data_key: str
    data: str
    start: str
    settings: tuple[tuple[str, Hashable], ...]


def subject(config: Mapping[str, Any]) -> Subject | None:
    """Return the subject of a config; None for pretraining or if the config names no data."""
    sections = {name: section for name, section in config.items() if isinstance(section, Mapping)}
    task, key = next(((name, key) for name in sections for key in _DATA if sections[name].get(key)), ("", ""))
    if not task:
        return None
    name = str(config[task][key])
    display = f"{task}: {Path(name).name if key == 'train' else name}"
    if config[task].get("subset"):
        display += f" {config[task]['subset']}"
    start = RANDOM if config.get("random_weights") else str(config.get("start_from") or "")
    others = {key: value for key, value in config.items() if key not in (*_IGNORED, "start_from", "random_weights")}
    return Subject(f"{task}.{key}", display, start, tuple(_leaves(others)))


def starts(subjects: Iterable[Subject]) -> list[str]:
    """Return the distinct initial checkpoints, random weights last."""
    distinct = dict.fromkeys(subject.start for subject in subjects)
    return sorted(distinct, key=lambda start: start == RANDOM)


def differing(subjects: Sequence[Subject]) -> list[str]:
    """Return dotted names of settings in which subjects with the same data differ, except the initial checkpoint."""
    names: dict[str, None] = {}
    for data in dict.fromkeys(subject.data for subject in subjects):
        members = [dict(subject.settings) for subject in subjects if subject.data == data]
        for name in dict.fromkeys(name for member in members for name in member):
            if len({member.get(name) for member in members}) > 1:
                names[name] = None
    return list(names)


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Hashable]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _leaves(item, f"{prefix}{key}.")
        elif item is not None:
            yield f"{prefix}{key}", item if isinstance(item, Hashable) else json.dumps(item, sort_keys=True)
