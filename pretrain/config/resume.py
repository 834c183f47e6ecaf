"""Settings that a resumed run must keep, and settings that it may change."""

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from pretrain.common import settings
from pretrain.common.addresses import local_run
from pretrain.common.files import checkpoint_names
from pretrain.config.engine import Precision
from pretrain.config.objectives import OBJECTIVE_FILE_SETTINGS
from pretrain.config.run import ConfigT, PretrainConfig, RunConfig
from pretrain.config.schedule import PhaseConfig

MIXING_SETTINGS = ("weights", "temperature", "max_epochs")
"""Settings of a phase that determine how much of each source it reads."""

FREE_IN_ALL_RUNS = (
    "name",
    "run_dir",
    "scheduling",
    "tracking",
    "checkpoint",
    "guard",
    "callbacks",
    "engine.zero_stage",
    "engine.micro_batch_tokens",
    "engine.activation_checkpointing",
    "engine.compile",
    # CUDA graphs add filler tokens to batches, but these are not part of the samples.
    "engine.cuda_graphs",
)
"""Settings that a resumed run of any kind may change: none affects which samples are used or how they are weighted."""

FREE_IN_PRETRAINING = (
    *FREE_IN_ALL_RUNS,
    "fork_from",
    # The text itself is compared, by its fingerprint in the checkpoint.
    "corpus",
    *(f"phases.*.{name}" for name in MIXING_SETTINGS),
    "evaluation.every_steps",
    "evaluation.probes",
    # Learning rates: a diverged run is resumed with lower ones.
    "phases.*.peak_learning_rate",
    "phases.*.warmup_steps",
    "phases.*.decay",
    "phases.*.decay_steps",
    "phases.*.final_learning_rate",
    "optimizer.muon_lr_scale",
)
FREE_WITHOUT_REPLAY = "adaptation.replay_corpus"  # may change if neither config replays its text in training


def forbidden_changes(before: PretrainConfig, after: PretrainConfig, done_steps: int) -> list[str]:
    """Return the changes, with both values, of settings that a run must keep when it resumes after `done_steps` steps.

    Phases must agree up to that step; after it, the current one may be shorter or longer, and later ones may change.
    """
    is_replayed = before.adaptation.replay_share or after.adaptation.replay_share
    free = FREE_IN_PRETRAINING if is_replayed else (*FREE_IN_PRETRAINING, FREE_WITHOUT_REPLAY)
    # Paths that both configs set may differ, since the contents are compared by fingerprint.
    free += tuple(name for name in OBJECTIVE_FILE_SETTINGS if all(map(attrgetter(name), (before, after))))
    old, new = (_first_steps(config, done_steps) for config in (before, keep_precision(after, before)))
    return settings.differences(old, new, ignore=free) or _changed_by_length(before, after, done_steps)


def _changed_by_length(before: PretrainConfig, after: PretrainConfig, done_steps: int) -> list[str]:
    """Return the settings that a new length of the current phase would change, formatted as in `differences`.

    The phases before the current one must be equal in both configs.
    """
    if not 0 < done_steps < after.total_steps:
        return []
    index, step_in_phase = after.phase_at(done_steps)
    if not step_in_phase or before.phases[index].steps == after.phases[index].steps:
        return []
    old, new = ((config.weight_decay(index), config.masking_shares(index)) for config in (before, after))
    steps = f"phases.{index}.steps ({before.phases[index].steps} -> {after.phases[index].steps}"
    return [
        *([f"{steps}, which changes its weight decay from {old[0]:.3g} to {new[0]:.3g})"] if old[0] != new[0] else []),
        *([f"{steps}, which changes its masking)"] if new[1][0] != new[1][1] else []),
    ]


def _first_steps(config: PretrainConfig, count: int) -> PretrainConfig:
    """Return `config` with only its first `count` steps: later phases are dropped, and the current one is shortened."""
    phases: list[PhaseConfig] = []
    for phase in config.phases:
        if steps := min(phase.steps, count):
            phases.append(phase.model_copy(update={"steps": steps}))
        count -= steps
    return config.model_copy(update={"phases": tuple(phases)})


def keep_precision(config: ConfigT, before: RunConfig) -> ConfigT:
    """Return `config` with the precision auto replaced by the one in `before`, which the run's start resolved."""
    if config.engine.precision != "auto" or before.engine.precision == "auto":
        return config
    return with_precision(config, before.engine.precision)


def with_precision(config: ConfigT, precision: Precision) -> ConfigT:
    """Return `config` with this `engine.precision`."""
    return config.model_copy(update={"engine": config.engine.model_copy(update={"precision": precision})})


def run_folder(values: Mapping[str, Any]) -> Path:
    """Return the run folder for a config's unvalidated values, like `RunConfig.folder` for validated ones."""
    return local_run(str(values.get("run_dir") or f"runs/{values.get('name')}"))


def used_start_from(folder: Path) -> bool:
    """Return whether the run in `folder` started from a checkpoint (`start_from`) and has written a checkpoint."""
    config = folder / "config.yaml"
    if not config.is_file() or not checkpoint_names(folder):
        return False
    return bool(settings.read_values(config).get("start_from"))
