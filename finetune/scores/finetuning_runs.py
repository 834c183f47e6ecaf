"""The fine-tunings that score a checkpoint: configs, folders, and which have run before.

They are kept by a fingerprint of all that they depend on, not by the places of checkpoint and data. Those from random
weights depend on the checkpoint's shape and tokenizer alone: a second checkpoint of the same shape finds them.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.experiments.grid import GridPoint, check_effect, expand
from finetune.experiments.outcomes import Outcome, Trial
from finetune.experiments.trials import TrialRuns, read_outcome, run_all, trial_config
from finetune.scores.masked_model import fingerprint, text_digest
from finetune.training import runs
from finetune.training.config import FinetuneConfig, load_config, run_name
from finetune.training.saved import MODEL
from pretrain.checkpoint.released import read_released
from pretrain.checkpoint.tokenizer import is_run, read_tokenizer
from pretrain.common.errors import InputError
from pretrain.common.settings import given_values
from pretrain.run import preflight

RANDOM = "random-weights"  # in the folder of all results: the runs from random weights, by fingerprint
FINETUNED = "finetuned"  # the runs from checkpoints, by model
_SEED = "seed-"  # folder of a run that is scored
_CHOICE = "choice"  # folder of the run that settings are chosen by
# Added to the seed of a run that settings are chosen by: if it were scored, the best of several would count.
_CHOICE_SEED = 1000
_FILES = ("train", "dev", "test", "glue_dir")  # settings of a task that --data completes
# Settings that do not change what a run comes to.
_FREE = {"name", "run_dir", "start_from", "seed", "random_weights", "tracking", "scheduling", "checkpoint"}


@dataclass(frozen=True)
class FinetuningSettings:
    """What is fine-tuned.

    Attributes:
        configs: YAML files, whose names are those of the results.
        seeds: runs of each config, with seeds from that of the config upward.
        random: also fine-tune from random weights of the same shape.
        data: folder that relative paths of the configs' data begin at; None: the working directory.
        overrides: `key.path=value`, of all configs.
        parallel: runs at once, as in `finetune.experiments.trials.run_all`.
        grid: values of settings of `training`, from which each config chooses, see `finetuning.choices`.
    """

    configs: tuple[Path, ...]
    seeds: int = 3
    random: bool = True
    data: Path | None = None
    overrides: tuple[str, ...] = ()
    parallel: int = 0
    grid: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class GridConfig:
    """A config with the settings of one point of the grid."""

    point: GridPoint  # without settings if there is no grid
    config: FinetuneConfig
    steps: int
    folder: Path  # of its runs, by the fingerprint of what they depend on


@dataclass(frozen=True)
class Member:
    """One run of one config, from the checkpoint or from random weights."""

    config: str
    random: bool
    point: GridPoint
    trial: Trial


@dataclass(frozen=True)
class ConfigRuns:
    """A config's runs from the checkpoint, or those from random weights.

    Attributes:
        config: name of the config.
        random: whether they begin from random weights.
        folder: of the runs of all configs that begin so.
        choices: one for each point of the grid.
        seeds: of the runs that are asked for.
    """

    config: str
    random: bool
    folder: Path
    choices: Sequence[GridConfig]
    seeds: Sequence[int]

    def tried(self) -> list[Member]:
        """A run for each point of the grid, to choose by; [] if none is asked for and an earlier call has left none."""
        members = [
            self._member(one, _CHOICE, one.config.seed + _CHOICE_SEED, one.point.label, f"{one.point.name}-choice")
            for one in self.choices
        ]
        return members if self.seeds or all(_left(one) is not None for one in members) else []

    def scored(self, point: GridPoint) -> list[Member]:
        """The runs that are scored: those that are asked for, and what an earlier call has left beside them."""
        choice = next(one for one in self.choices if one.point == point)
        left = [int(one.name.removeprefix(_SEED)) for one in choice.folder.glob(f"{_SEED}*") if _is_seed(one)]
        asked = [self._seed(choice, seed) for seed in self.seeds]
        others = [self._seed(choice, seed) for seed in sorted(set(left) - set(self.seeds))]
        return [*asked, *(one for one in others if _left(one) is not None)]

    def _seed(self, choice: GridConfig, seed: int) -> Member:
        return self._member(choice, f"{_SEED}{seed}", seed, f"seed {seed}", str(seed))

    def _member(self, choice: GridConfig, folder: str, seed: int, what: str, name: str) -> Member:
        names = [self.config, *(["random"] if self.random else []), name]
        one = trial_config(choice.config, run_name("-".join(names)), folder=choice.folder / folder, seed=seed)
        label = ", ".join([self.config, *(["random weights"] if self.random else []), what])
        return Member(self.config, self.random, choice.point, Trial(label, one, choice.steps, test_sets=False))


def starts(folder: Path, out: Path, name: str, settings: FinetuningSettings) -> list[ConfigRuns]:
    """The runs of each config, from the checkpoint `folder` and from random weights.

    Small configs come first: faults show early. Raises as `read_plans`.
    """
    plans = read_plans(folder, settings)
    at = [(point, read_configs(folder, settings, point)) for point in expand(settings.grid)]
    places = {False: out / FINETUNED / f"{name}-{fingerprint(folder)[:12]}", True: out / RANDOM}
    given = []
    for key, (config, plan) in sorted(plans.items(), key=lambda item: item[1][1].steps):
        seeds = range(config.seed, config.seed + settings.seeds)
        kept = [f"{key}-{run_fingerprint(configs[key])[:16]}" for _, configs in at]
        for random, place in places.items():
            choices = [
                GridConfig(
                    point,
                    configs[key].model_copy(update={"random_weights": random}),
                    plan.steps_of(configs[key]),
                    place / own,
                )
                for (point, configs), own in zip(at, kept, strict=True)
            ]
            given.append(ConfigRuns(key, random, place, choices, seeds if settings.random or not random else ()))
    return given


def read_configs(
    folder: Path, settings: FinetuningSettings, point: GridPoint | None = None
) -> dict[str, FinetuneConfig]:
    """File name without suffix -> config that starts from `folder`, with the settings of `point`.

    Raises `InputError` if one is wrong, or two have the same file name.
    """
    configs: dict[str, FinetuneConfig] = {}
    for path in settings.configs:
        if path.stem in configs:
            raise InputError(f"--finetune: {path}: another config is called {path.stem}, too. Rename one.")
        start = f"start_from={json.dumps(str(folder))}"
        overrides = [*settings.overrides, *(point.overrides if point else []), start]
        configs[path.stem] = load_config(path, [*overrides, *_placed(path, overrides, settings.data)], imports=True)
    return configs


def read_plans(folder: Path, settings: FinetuningSettings) -> dict[str, tuple[FinetuneConfig, runs.FinetunePlan]]:
    """File name without suffix -> config that starts from `folder`, and what is known about its runs before they train.

    Raises `InputError` if a config, its data, the grid or the checkpoint is wrong, a config has no dev set, or the
    checkpoint is that of a run that is training.
    """
    if settings.configs:
        _check_over(folder)
    for key in settings.grid:
        if not key.startswith("training."):
            raise InputError(f"--grid-set {key}: only settings of training can be chosen. Use --set, for all runs.")
    for point in expand(settings.grid):
        for config in read_configs(folder, settings, point).values():
            check_effect(config, point)
    plans = {}
    for name, config in read_configs(folder, settings).items():
        plan = runs.plan(config, alone=True, test_sets=False)
        if not plan.held_out:
            raise InputError(f"--finetune: {name}: no dev set, so there is no score. Give one.")
        plans[name] = config, plan
    return plans


def _check_over(folder: Path) -> None:
    """Refuse a run that is training: each fine-tuning begins from the checkpoint that is the newest at its start."""
    if not (is_run(folder) and os.access(folder, os.W_OK)):  # the lock of a folder that is read-only cannot be tried
        return
    try:
        with preflight.only_run(folder):
            pass
    except InputError:
        raise InputError(
            f"--finetune: {folder}: this run is training. Wait for its end, or export it and evaluate the export."
        ) from None


def _placed(path: Path, overrides: Sequence[str], data: Path | None) -> list[str]:
    """Overrides that let relative paths of the task's files begin at `data`."""
    if data is None:
        return []
    given = given_values(path, FinetuneConfig, overrides)
    return [
        f"{task}.{key}={json.dumps(str(data / place))}"
        for task, section in given.items()
        if isinstance(section, dict) and not section.get("dataset")
        for key in _FILES
        if isinstance(place := section.get(key), str) and place
    ]


def run_members(
    members: Sequence[Member],
    common: Path,
    name: str,
    *,
    parallel: int = 0,
    ended: Callable[[Sequence[Outcome | None]], None] = lambda outcomes: None,
) -> TrialRuns:
    """Run those that have not finished. No other process may use the folder `common` meanwhile.

    `ended` is called with all outcomes whenever a run finishes. Models are removed: their scores are what is wanted.
    Raises as `run_all`.
    """
    found: list[Outcome | None] = [_earlier(one) for one in members]
    left = [number for number, outcome in enumerate(found) if outcome is None]

    def begin() -> None:
        for number in left:
            _remove_unfinished(members[number])

    def one_ended(outcomes: Sequence[Outcome | None]) -> None:
        for number, outcome in zip(left, outcomes, strict=True):
            found[number] = outcome
            if outcome is not None:
                shutil.rmtree(members[number].trial.config.folder / MODEL, ignore_errors=True)
        ended(found)

    if not left:
        ended(found)
        return TrialRuns(found)
    config = members[0].trial.config.model_copy(update={"run_dir": str(common), "name": name})
    trials = [members[number].trial for number in left]
    ran = run_all(config, trials, parallel=parallel, begin=begin, ended=one_ended)
    one_ended(ran.outcomes)
    return TrialRuns(found, ran.stopped)


def lasting(config: FinetuneConfig) -> dict[str, Any]:
    """The settings that change what a run comes to, except for the places of its data."""
    return {
        "config": config.model_dump(mode="json", exclude={*_FREE, config.task_name}),
        "task": config.task_settings.model_dump(mode="json", exclude=set(_FILES)),
    }


def run_fingerprint(config: FinetuneConfig) -> str:
    """Hexadecimal digits of all that a run depends on but its seed and the weights that it begins from.

    These are the shape, the tokenizer, the data as the tokenizer cuts it, and the settings that change the result.
    """
    folder = Path(config.start_from)
    released = read_released(folder)
    shape = {
        "family": released.family,
        "model": released.model.model_dump(mode="json"),
        "vocabulary": released.vocabulary_size,
        "token_types": released.token_types,
        "head": released.task_head(config.make_task().head),
        **lasting(config),
    }
    tokenizer = read_tokenizer(folder, released.vocabulary_size).to_str()
    return text_digest(json.dumps(shape, sort_keys=True), tokenizer, runs.digest(config, test_sets=False))


def _is_seed(folder: Path) -> bool:
    return re.fullmatch(rf"{_SEED}\d+", folder.name) is not None


def _earlier(member: Member) -> Outcome | None:
    """The outcome of a run that another place of checkpoint or data has left."""
    return None if _begun_elsewhere(member) is None else _left(member)


def _left(member: Member) -> Outcome | None:
    """The outcome that an earlier call has left in the run's folder; None without one."""
    trial = member.trial
    path = trial.config.folder / "config.yaml"
    if not path.is_file():
        return None
    # Where the data lies is not part of the fingerprint, what it holds is.
    begun = load_config(path).model_copy(update={"run_dir": trial.config.run_dir})
    return read_outcome(Trial(trial.label, begun, trial.steps, test_sets=False))


def _remove_unfinished(member: Member) -> None:
    """Remove an unfinished run that another place of checkpoint or data has left.

    Its checkpoints belong to a run that began from a folder which may be gone.
    """
    if _begun_elsewhere(member) is not None and _earlier(member) is None:
        shutil.rmtree(member.trial.config.folder)


def _begun_elsewhere(member: Member) -> FinetuneConfig | None:
    """The config of a run with another place of checkpoint or data; one with the same places `run_all` continues."""
    now = member.trial.config
    path = now.folder / "config.yaml"
    if not path.is_file():
        return None
    before = load_config(path)
    same_start = Path(before.start_from).resolve() == Path(now.start_from).resolve()
    return None if same_start and before.task_settings == now.task_settings else before
