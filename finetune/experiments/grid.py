"""Grids of settings: the axes of a sweep, and their points."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune.training.config import GRIDS, TASKS, FinetuneConfig, TrainingConfig
from pretrain.common.errors import InputError

_NOT_AXES = ("seed", "fold", "name", "run_dir", "scheduling", "tracking")  # they differ in every run or in none
# Settings of a task that define its scores: runs that differ in them cannot be compared.
_SCORING = {"metric", "dev", "dev_share", "test", "labels", "positive", "problem_type", "glue", "dataset", "subset"}

Grid = Mapping[str, Sequence[str]]
"""{dotted name of a setting: its values as YAML}"""


@dataclass(frozen=True)
class GridPoint:
    """One combination of settings in a sweep, as {dotted name: value as YAML}."""

    settings: Mapping[str, str]

    @property
    def label(self) -> str:
        """The settings for a table, such as "learning_rate 1e-05, epochs 3"."""
        return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in self.settings.items())

    @property
    def folder(self) -> str:
        """Name of the point's folder, the same in every sweep over these settings."""
        parts = (f"{name.rpartition('.')[2]}-{value}" for name, value in self.settings.items())
        return _slug("-".join(parts), keep=".")

    @property
    def name(self) -> str:
        """The values without their settings, for names of runs."""
        return _slug("-".join(self.settings.values()))

    @property
    def overrides(self) -> list[str]:
        """The settings as arguments of --set."""
        return [f"{name}={value}" for name, value in self.settings.items()]


def parse_grid(name: str, axes: Sequence[str]) -> dict[str, list[str]]:
    """Return the published grid `name` (empty for none), replaced or extended by `axes` such as "key=value,value"."""
    grid = {key: [f"{value:g}" for value in values] for key, values in GRIDS[name].items()} if name else {}
    for axis in axes:
        key, equals, joined = axis.partition("=")
        values = [value.strip() for value in joined.split(",")]
        if not equals or not key.strip() or not all(values):
            raise InputError(
                f"--grid-set {axis}: expected key=value,value, for example training.learning_rate=1e-5,3e-5."
            )
        if key.strip().partition(".")[0] in _NOT_AXES:
            advice = f"Use --{key.strip()}s N." if key.strip() in ("seed", "fold") else "Use --set, for all runs."
            raise InputError(f"--grid-set {axis}: cannot be an axis of a grid. {advice}")
        section, _, setting = key.strip().partition(".")
        if section in TASKS and (not setting or setting.partition(".")[0] in _SCORING):
            raise InputError(
                f"--grid-set {axis}: defines the scores, so runs could not be compared. Use --set, for all runs."
            )
        grid[key.strip()] = list(dict.fromkeys(values))
    return grid


def auto_grid(training: TrainingConfig) -> dict[str, list[str]]:
    """Return a grid of learning rates and epochs around the values of a complete config (`FinetuneConfig.filled`)."""

    def around(value: float, low: float, high: float) -> list[str]:
        return [f"{value * low:.2g}", f"{value:g}", f"{value * high:.2g}"]

    rates = {"training.learning_rate": around(training.learning_rate, 0.5, 2)}
    return rates if training.steps else {**rates, "training.epochs": around(training.epochs, 2 / 3, 4 / 3)}


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


def _slug(text: str, keep: str = "") -> str:
    return re.sub(rf"[^a-z0-9{re.escape(keep)}]+", "-", text.lower()).strip("-.")
