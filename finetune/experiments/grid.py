"""Grids of settings for a sweep: axes (setting and values) and points (combinations)."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune.training.config import GRIDS, TASKS, FinetuneConfig, TrainingConfig
from pretrain.common.errors import InputError

_NOT_AXES = ("seed", "fold", "name", "run_dir", "scheduling", "tracking")  # set by the sweep, or common to all runs
# Settings of a task that define its scores: runs that differ in them cannot be compared.
_SCORE_KEYS = {"metric", "dev", "dev_share", "test", "labels", "positive", "problem_type", "glue", "dataset", "subset"}

Grid = Mapping[str, Sequence[str]]
"""{dotted name of a setting: the values to try, as YAML}"""


@dataclass(frozen=True)
class GridPoint:
    """One combination of settings in a sweep, as {dotted name: value as YAML}."""

    settings: Mapping[str, str]

    @property
    def label(self) -> str:
        """The settings as text, such as "learning_rate 1e-05, epochs 3"."""
        return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in self.settings.items())

    @property
    def folder_name(self) -> str:
        """Name of the point's folder, the same in every sweep over these settings."""
        parts = (f"{name.rpartition('.')[2]}-{value}" for name, value in self.settings.items())
        return _slug("-".join(parts), also_allowed=".")

    @property
    def name(self) -> str:
        """The values, joined as a part of run names, such as "1e-05-3"."""
        return _slug("-".join(self.settings.values()))

    @property
    def overrides(self) -> list[str]:
        """The settings as arguments of --set."""
        return [f"{name}={value}" for name, value in self.settings.items()]


def parse_grid(name: str, axes: Sequence[str]) -> dict[str, list[str]]:
    """Return the published grid `name` ("" for none), extended and overridden by `axes` such as "key=value,value"."""
    grid = {key: [f"{value:g}" for value in values] for key, values in GRIDS[name].items()} if name else {}
    for axis in axes:
        key, equals, value_list = axis.partition("=")
        values = [value.strip() for value in value_list.split(",")]
        if not equals or not key.strip() or not all(values):
            raise InputError(
                f"--grid-set {axis}: expected key=value,value, for example training.learning_rate=1e-5,3e-5."
            )
        if key.strip().partition(".")[0] in _NOT_AXES:
            advice = f"Use --{key.strip()}s N." if key.strip() in ("seed", "fold") else "Set it with --set."
            raise InputError(f"--grid-set {axis}: cannot be an axis of a grid. {advice}")
        task, _, setting = key.strip().partition(".")
        if task in TASKS and (not setting or setting.partition(".")[0] in _SCORE_KEYS):
            raise InputError(
                f"--grid-set {axis}: defines the scores, so runs could not be compared. Set it for all runs with --set."
            )
        grid[key.strip()] = list(dict.fromkeys(values))
    return grid


def auto_grid(training: TrainingConfig) -> dict[str, list[str]]:
    """Return a grid of learning rates and epochs around the values of a complete config (`FinetuneConfig.filled`)."""

    def values_around(value: float, low_factor: float, high_factor: float) -> list[str]:
        return [f"{value * low_factor:.2g}", f"{value:g}", f"{value * high_factor:.2g}"]

    grid = {"training.learning_rate": values_around(training.learning_rate, 0.5, 2)}
    return grid if training.steps else {**grid, "training.epochs": values_around(training.epochs, 2 / 3, 4 / 3)}


def check_effect(config: FinetuneConfig, point: GridPoint) -> None:
    """Raise `InputError` if a setting of the point has no effect in the config."""
    if config.training.steps and "training.epochs" in point.settings:
        raise InputError(
            "training.steps: is set and overrides training.epochs, so a grid of epochs has no effect. Remove one of "
            "the two."
        )


def expand(grid: Grid) -> list[GridPoint]:
    """Return the points of a grid; the last setting changes fastest."""
    return [GridPoint(dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]


def _slug(text: str, also_allowed: str = "") -> str:
    return re.sub(rf"[^a-z0-9{re.escape(also_allowed)}]+", "-", text.lower()).strip("-.")
