"""Fine-tunes a checkpoint on a task: the functions that the commands and `import finetune` call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.training import runs
from finetune.training.config import FinetuneConfig, forbidden_changes, load_config
from pretrain.common.records import NO_METRICS
from pretrain.common.run_files import SCORES
from pretrain.common.settings import AnyConfig, Overrides, with_start
from pretrain.run import launch
from pretrain.run.results import Run


@dataclass(frozen=True, repr=False)
class FinetunedRun(Run[FinetuneConfig]):
    """A finished fine-tuning, which `finetune.load` accepts."""

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Scores of every labeled dev and test set, as {set: {score: value}}."""
        return json.loads((self.folder / SCORES).read_text(encoding="utf-8"))["scores"]

    def __repr__(self) -> str:
        return runs.summary(self.config)


def train(
    config: AnyConfig,
    *,
    overrides: Overrides = (),
    start_from: Any = None,
    resume: bool = False,
    ray: bool = False,
    no_ray: bool = False,
    callbacks: Sequence[Any] = (),
) -> FinetunedRun:
    """Fine-tune a checkpoint on one task, with progress on standard output.

    Arguments and errors are as in `pretrain.train`, but `config` is a fine-tuning config.
    """

    def check(config: FinetuneConfig, in_process: bool) -> int | None:
        if runs.is_finished(config, resume):
            return None
        plan = runs.plan(config, in_process)
        print(runs.describe_start(config, plan))
        return plan.steps

    loaded = read_config(config, overrides, start_from=start_from)
    if resume:
        launch.download(loaded.run_dir)
    kind = launch.RunKind(
        "finetune.training.train:main",
        check=check,
        is_finished=lambda config: runs.is_finished(config, resume=True),
        find_changed=forbidden_changes,
        metrics=NO_METRICS,
        callbacks=tuple(callbacks),
    )
    old_config = launch.earlier_config(loaded, resume)
    return FinetunedRun(loaded, launch.start_run(kind, loaded, old_config, resume=resume, ray=ray, no_ray=no_ray))


def read_config(config: AnyConfig, overrides: Overrides = (), *, start_from: Any = None) -> FinetuneConfig:
    """Load the config and apply the overrides and `start_from`, the checkpoint to start from."""
    return load_config(config, with_start(overrides, start_from), imports=True)
