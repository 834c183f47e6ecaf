"""Fine-tune a checkpoint to a task: what the command line calls, and `import finetune` offers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from finetune.training.config import FinetuneConfig, load_config
from pretrain.common.run_files import SCORES
from pretrain.common.settings import AnyConfig, Overrides, with_start
from pretrain.run.results import Run


@dataclass(frozen=True, repr=False)
class FinetunedRun(Run[FinetuneConfig]):
    """A finished fine-tuning; `finetune.load` takes it."""

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """set -> score -> value, of every labeled dev and test set."""
        return json.loads((self.folder / SCORES).read_text(encoding="utf-8"))["scores"]

    def __repr__(self) -> str:
        from finetune.training.runs import summary

        return summary(self.config)


def train(
    config: AnyConfig,
    *,
    overrides: Overrides = (),
    start_from: Any = None,
    resume: bool = False,
    ray: bool = False,
    no_ray: bool = False,
) -> FinetunedRun:
    """Train a model for one task from a checkpoint to the end, with its progress on standard output.

    Args:
        config: a YAML file, the name of an example, nested values or a `FinetuneConfig`. Relative paths start at the
            working directory.
        overrides: settings by dotted key, such as {"training.epochs": 5}; or texts `key.path=value`.
        start_from: checkpoint to start from: folder or address of a released model, an export or a run, the name of a
            run in runs/, or what `pretrain.train` or `pretrain.export` returned; overrides that of the config.
        resume, ray, no_ray: as for `pretrain.train`.

    Raises as `pretrain.train`.
    """
    from finetune.training import runs

    read = read_config(config, overrides, start_from=start_from)
    return FinetunedRun(read, runs.start(read, resume=resume, ray=ray, no_ray=no_ray))


def read_config(config: AnyConfig, overrides: Overrides = (), *, start_from: Any = None) -> FinetuneConfig:
    """The config, with overrides and the checkpoint to start from."""
    return load_config(config, with_start(overrides, start_from), imports=True)
