"""Groups fine-tuning runs by data, checkpoint and settings, so that only runs of different seeds are averaged."""

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANDOM = "random weights"

# Settings of a task that name its data; the first one that is set counts. No other section has such settings, so they
# also identify the task's section.
_DATA = ("glue", "dataset", "train")
# Sections that do not affect what is trained: identity, placement, speed and precision.
_IGNORED = ("name", "run_dir", "seed", "engine", "checkpoint", "scheduling", "tracking")


@dataclass(frozen=True)
class Subject:
    """What one fine-tuning was trained on.

    Attributes:
        data_key: the setting that names the data, such as entities.train.
        data: the task and its data, as text to show.
        start: the initial checkpoint, or `RANDOM`.
        settings: (dotted name, value) of all other settings except `_IGNORED`.
    """

    data_key: str
    data: str
    start: str
    settings: tuple[tuple[str, Hashable], ...]


def subject(config: Mapping[str, Any]) -> Subject | None:
    """The subject of the run with this config; None for pretraining, and if the config names no data."""
    sections = {name: section for name, section in config.items() if isinstance(section, Mapping)}
    task, given = next(((name, key) for name in sections for key in _DATA if sections[name].get(key)), ("", ""))
    if not task:
        return None
    name = str(config[task][given])
    shown = f"{task}: {Path(name).name if given == 'train' else name}"
    if config[task].get("subset"):
        shown += f" {config[task]['subset']}"
    start = RANDOM if config.get("random_weights") else str(config.get("start_from") or "")
    others = {key: value for key, value in config.items() if key not in (*_IGNORED, "start_from", "random_weights")}
    return Subject(f"{task}.{given}", shown, start, tuple(_leaves(others)))


def starts(subjects: Iterable[Subject]) -> list[str]:
    """The distinct initial checkpoints, random weights last."""
    distinct = dict.fromkeys(one.start for one in subjects)
    return sorted(distinct, key=lambda start: start == RANDOM)


def differing(subjects: Sequence[Subject]) -> list[str]:
    """Dotted names of the settings in which subjects with the same data differ, besides the initial checkpoint."""
    names: dict[str, None] = {}
    for data in dict.fromkeys(one.data for one in subjects):
        members = [dict(one.settings) for one in subjects if one.data == data]
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
