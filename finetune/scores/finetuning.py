"""Fine-tunings from a checkpoint and from random weights of its shape, several seeds each.

The runs are kept by a fingerprint of all that they depend on, not by the places of checkpoint and data. Those from
random weights depend on the checkpoint's shape and tokenizer alone: a second checkpoint of the same shape finds them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune import runs
from finetune.artifacts.saved import MODEL
from finetune.config import FinetuneConfig, load_config, run_name
from finetune.experiments.outcomes import Outcome, Spread, Trial
from finetune.experiments.trials import TrialRuns, raise_failure, read_outcome, run_all, trial_config
from finetune.scores.masked_model import fingerprint, text_digest
from finetune.scores.record import Record
from finetune.tasks.registry import make_task
from pretrain import preflight
from pretrain.checkpoint.released import read_released
from pretrain.checkpoint.tokenizer import is_run, read_tokenizer
from pretrain.common.errors import InputError
from pretrain.common.settings import given_values

PART = "finetuning"  # of a record
RANDOM = "random-weights"  # in the folder of all results: the runs from random weights, by fingerprint
_FINETUNED = "finetuned"  # the runs from checkpoints, by model
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
    """

    configs: tuple[Path, ...]
    seeds: int = 3
    random: bool = True
    data: Path | None = None
    overrides: tuple[str, ...] = ()
    parallel: int = 0


@dataclass(frozen=True)
class FinetuningScore:
    """The scores of one config on the set that chose its checkpoints, as fractions of 1, one for each finished run.

    Attributes:
        metric: name of the score, such as accuracy.
        part: name of the set, such as dev.
        pretrained: from the checkpoint.
        random: from random weights; () if they were not asked for.
        runs: how many were asked for of each; 0 in records of earlier versions.
    """

    metric: str
    part: str
    pretrained: tuple[float, ...]
    random: tuple[float, ...] = ()
    runs: int = 0

    @property
    def difference(self) -> float | None:
        """Mean from the checkpoint minus mean from random weights."""
        own, other = Spread.of(self.pretrained), Spread.of(self.random)
        return None if own is None or other is None else own.mean - other.mean

    @property
    def difference_in_errors(self) -> float | None:
        """The difference divided by its standard error; None without two runs of each, or if no scores differ."""
        own, other = Spread.of(self.pretrained), Spread.of(self.random)
        if own is None or other is None or own.error is None or other.error is None:
            return None
        error = math.hypot(own.error, other.error)
        return (own.mean - other.mean) / error if error else None

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        spread = {name: Spread.of(getattr(self, name)) for name in ("pretrained", "random")}
        statistics = {
            f"{name}_{what}": getattr(one, what) for name, one in spread.items() if one for what in ("mean", "error")
        }
        differences = {"difference": self.difference, "difference_in_errors": self.difference_in_errors}
        return {**asdict(self), **statistics, **differences}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> FinetuningScore:
        """The inverse of `as_data`."""
        values = tuple(data["pretrained"]), tuple(data["random"])
        return cls(data["metric"], data["part"], *values, data.get("runs", 0))


@dataclass(frozen=True)
class _Member:
    """One run of one config."""

    config: str
    random: bool
    trial: Trial


def finetuning_scores(
    folder: Path, out: Path, name: str, settings: FinetuningSettings, *, record: Record | None = None
) -> dict[str, FinetuningScore]:
    """Fine-tune with each config; runs that finished before are not repeated.

    Args:
        folder: what `pretrain.checkpoint.released.read_released` reads.
        out: folder of all results, of this checkpoint and of others.
        name: of this checkpoint's runs in it.
        settings: configs, seeds, data.
        record: gets the scores whenever a run finishes.

    Returns:
        Config's name -> its scores.

    Raises:
        InputError: as `read_plans`, or a run folder has a run with other settings.
        MachineError: Ray cannot start.
        StoppedError: a signal; the same call continues.
        RunError: runs failed; all others have finished and are recorded.
    """
    members = _members(folder, out, name, settings)
    configs = {one.config: one.trial.config for one in members}
    hows = {key: _how(config, settings) for key, config in configs.items()} if record is not None else {}
    found: list[Outcome | None] = [_earlier(one) for one in members]
    left = [number for number, outcome in enumerate(found) if outcome is None]

    def begin() -> None:
        for number in left:
            _remove_unfinished(members[number])

    def ended(outcomes: Sequence[Outcome | None]) -> None:
        for number, outcome in zip(left, outcomes, strict=True):
            found[number] = outcome
            if outcome is not None:  # scores are what is wanted, and models take space
                shutil.rmtree(members[number].trial.config.folder / MODEL, ignore_errors=True)
        if record is not None:
            new = {key: {**one.as_data(), **hows[key]} for key, one in _scores(members, found).items()}
            record.write(PART, {}, new, beside=True)

    stopped = None
    if left:
        # Only runs from random weights are shared with other checkpoints, whose processes must not run at once.
        place = out if settings.random else members[0].trial.config.folder.parents[1]
        common = members[0].trial.config.model_copy(update={"run_dir": str(place), "name": f"scores-{name}"[:63]})
        trials = [members[number].trial for number in left]
        ran = run_all(common, trials, parallel=settings.parallel, begin=begin, ended=ended)
        stopped = ran.stopped
        ended(ran.outcomes)
    else:
        ended([])
    raise_failure(TrialRuns(found, stopped))
    return _scores(members, found)


def _how(config: FinetuneConfig, settings: FinetuningSettings) -> dict[str, Any]:
    """How the scores of a config are measured: scores of models that differ in it cannot be compared.

    The data are told apart by their texts and labels: their tokens are those of a model's own tokenizer.
    """
    task = make_task(config.task_settings)
    sets = {"train": task.read_train(), **task.read_held_out()}
    records = ([name, task.record(example)] for name, examples in sets.items() for example in examples)
    return {
        "overrides": list(settings.overrides),
        "config": text_digest(json.dumps(_lasting(config), sort_keys=True)),
        "data": text_digest(*(json.dumps(one, sort_keys=True) for one in records)),
    }


def _lasting(config: FinetuneConfig) -> dict[str, Any]:
    """The settings that change what a run comes to, except for the places of its data."""
    return {
        "config": config.model_dump(mode="json", exclude={*_FREE, config.task_name}),
        "task": config.task_settings.model_dump(mode="json", exclude=set(_FILES)),
    }


def read_configs(folder: Path, settings: FinetuningSettings) -> dict[str, FinetuneConfig]:
    """File name without suffix -> config that starts from `folder`.

    Raises `InputError` if one is wrong, or two have the same file name.
    """
    configs: dict[str, FinetuneConfig] = {}
    for path in settings.configs:
        if path.stem in configs:
            raise InputError(f"--finetune: {path}: another config is called {path.stem}, too. Rename one.")
        start = f"start_from={json.dumps(str(folder))}"
        overrides = [*settings.overrides, start]
        configs[path.stem] = load_config(path, [*overrides, *_placed(path, overrides, settings.data)])
    return configs


def read_plans(folder: Path, settings: FinetuningSettings) -> dict[str, tuple[FinetuneConfig, runs.FinetunePlan]]:
    """File name without suffix -> config that starts from `folder`, and what is known about its runs before they train.

    Raises `InputError` if a config, its data or the checkpoint is wrong, a config has no dev set, or the checkpoint is
    that of a run that is training.
    """
    _check_over(folder)
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


def _members(folder: Path, out: Path, name: str, settings: FinetuningSettings) -> list[_Member]:
    """All runs, small configs first: faults show early."""
    members = []
    plans = sorted(read_plans(folder, settings).items(), key=lambda item: item[1][1].steps)
    own = f"{name}-{fingerprint(folder)[:12]}"
    for key, (config, plan) in plans:
        kept = f"{key}-{run_fingerprint(config)[:16]}"
        folders = {False: out / _FINETUNED / own / kept}
        if settings.random:
            folders[True] = out / RANDOM / kept
        for random, place in folders.items():
            chosen = config.model_copy(update={"random_weights": random})
            for seed in range(config.seed, config.seed + settings.seeds):
                label = f"{key}-random-{seed}" if random else f"{key}-{seed}"
                one = trial_config(chosen, run_name(label), folder=place / f"seed-{seed}", seed=seed)
                title = f"{key}, random weights, seed {seed}" if random else f"{key}, seed {seed}"
                members.append(_Member(key, random, Trial(title, one, plan.steps, test_sets=False)))
    return members


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
        "head": released.task_head(make_task(config.task_settings).head),
        **_lasting(config),
    }
    tokenizer = read_tokenizer(folder, released.vocabulary_size).to_str()
    return text_digest(json.dumps(shape, sort_keys=True), tokenizer, runs.digest(config, test_sets=False))


def _earlier(member: _Member) -> Outcome | None:
    """The outcome of a run that another place of checkpoint or data has left."""
    before, trial = _begun_elsewhere(member), member.trial
    if before is None:
        return None
    # Where the data lies is not part of the fingerprint, what it holds is.
    begun = before.model_copy(update={"run_dir": trial.config.run_dir})
    return read_outcome(Trial(trial.label, begun, trial.steps, test_sets=False))


def _remove_unfinished(member: _Member) -> None:
    """Remove an unfinished run that another place of checkpoint or data has left.

    Its checkpoints belong to a run that began from a folder which may be gone.
    """
    if _begun_elsewhere(member) is not None and _earlier(member) is None:
        shutil.rmtree(member.trial.config.folder)


def _begun_elsewhere(member: _Member) -> FinetuneConfig | None:
    """The config of a run with another place of checkpoint or data; one with the same places `run_all` continues."""
    now = member.trial.config
    path = now.folder / "config.yaml"
    if not path.is_file():
        return None
    before = load_config(path)
    same_start = Path(before.start_from).resolve() == Path(now.start_from).resolve()
    return None if same_start and before.task_settings == now.task_settings else before


def _scores(members: Sequence[_Member], outcomes: Sequence[Outcome | None]) -> dict[str, FinetuningScore]:
    """Config's name -> scores of the runs that finished."""
    done = [
        (member, outcome, outcome.score)
        for member, outcome in zip(members, outcomes, strict=True)
        if outcome is not None and outcome.score is not None
    ]
    return {
        key: FinetuningScore(
            metric=next(outcome.metric for member, outcome, _ in done if member.config == key),
            part=next(outcome.chosen_on for member, outcome, _ in done if member.config == key),
            pretrained=tuple(score for member, _, score in done if member.config == key and not member.random),
            random=tuple(score for member, _, score in done if member.config == key and member.random),
            runs=sum(member.config == key and not member.random for member in members),
        )
        for key in dict.fromkeys(member.config for member, _, _ in done)
    }
