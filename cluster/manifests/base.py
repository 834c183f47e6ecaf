"""What all manifests take from a run's config: its commands, its number of nodes, the config itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, create_model

from pretrain.common import settings as yaml_settings
from pretrain.common.addresses import cache, local
from pretrain.common.errors import InputError
from pretrain.common.sections import Section
from pretrain.config import PretrainConfig, RunConfig

_PROGRAM = "finetune.cli"  # of python -m
RUN_COMMANDS = f"{_PROGRAM} pretrain", f"{_PROGRAM} finetune"  # they train
STORED_RUNS = "stored-runs"  # in place.storage: BERTRAIN_RUNS of all nodes, below which runs at addresses train


class ManifestSettings(Section):
    """The section `place` of a config: the nodes for the workers. Each kind of manifest adds its own settings."""

    workers_per_node: int = Field(
        default=8, ge=1, description="Worker processes of each node. With GPUs, the number of the node's GPUs."
    )
    gpus: bool = Field(default=True, description="Whether each worker has a GPU; false trains on CPUs.")
    cpus_per_worker: int = Field(
        default=8, ge=1, description="CPU cores of each worker, if scheduling.cpus_per_worker is 0."
    )
    prepare: bool = Field(
        default=False,
        description="Prepare the corpus on the cluster first. A corpus that is ready is used as it is.",
    )
    grace_seconds: int = Field(
        default=300,
        ge=30,
        description="Seconds to finish the step and write a checkpoint when nodes are preempted.",
    )


S = TypeVar("S", bound=ManifestSettings)


@dataclass(frozen=True)
class ManifestJob:
    """A run, distributed across identical nodes."""

    name: str
    folder: str  # the run folder, relative to the folder in which the commands start
    config: str  # resolved, as YAML
    subcommands: tuple[str, ...]  # in order; the last one trains, the others prepare
    nodes: int
    min_nodes: int  # fewer than `nodes` only if the run is elastic
    workers_per_node: int
    cpus_per_worker: int
    gpus: bool
    run_dir: str = ""  # as the config has it

    @property
    def gpus_per_node(self) -> int:
        """One GPU for each worker of a node; 0 without GPUs."""
        return self.workers_per_node if self.gpus else 0

    def commands(self, config: str, address: str) -> list[str]:
        """Shell commands that do the work on the Ray cluster at `address`; both arguments are shell words.

        With --resume the first start begins at step 0, so that all starts are the same command.
        """
        *before, last = self.subcommands
        arguments = f"{config} --set scheduling.address={address}"
        lines = [*(f"{one} {arguments}" for one in before), f"{last} {arguments} --resume"]
        return [f"python -m {_PROGRAM} {line}" for line in lines]


def load(path: Path | str, run_type: type[RunConfig], kind: type[S], overrides: Sequence[str]) -> tuple[ManifestJob, S]:
    """The run in the YAML file `path`, and the settings of its section `place`, with `overrides` of both."""
    config_type = create_model(
        f"{run_type.__name__}WithPlace",
        __base__=run_type,
        # Validated even if it is missing, so that the error names the required settings.
        place=(kind, Field(default={}, validate_default=True)),
    )
    config: Any = yaml_settings.load(path, config_type, overrides)
    return _job(path, config, config.place), config.place


def _job(path: Path | str, config: RunConfig, settings: ManifestSettings) -> ManifestJob:
    scheduling = config.scheduling
    finetunes = not isinstance(config, PretrainConfig)
    if finetunes and not getattr(config, "start_from", ""):
        raise InputError(
            f"{path}: start_from is empty. Give the checkpoint's folder on the cluster: --set start_from=DIR."
        )
    if finetunes and settings.prepare:
        raise InputError("place.prepare: only pretraining prepares a corpus. Set it to false.")
    cpus = scheduling.cpus_per_worker or settings.cpus_per_worker
    resolved = config.model_copy(
        update={"scheduling": scheduling.model_copy(update={"cpus_per_worker": cpus, "address": ""})}
    )
    per_node = min(scheduling.workers, settings.workers_per_node)
    return ManifestJob(
        name=config.name,
        folder=_folder(config),
        config=yaml_settings.dump(resolved, exclude={"place"}),
        subcommands=("finetune",) if finetunes else (*(["prepare"] if settings.prepare else []), "pretrain"),
        nodes=_nodes(scheduling.workers, per_node),
        min_nodes=math.ceil((scheduling.min_workers or scheduling.workers) / per_node),
        workers_per_node=per_node,
        cpus_per_worker=cpus,
        gpus=settings.gpus,
        run_dir=str(config.run_dir),
    )


def _folder(config: RunConfig) -> str:
    """The run folder on the nodes; that of an address does not depend on this machine's cache."""
    if not config.address:
        return str(config.folder)
    return f"{STORED_RUNS}/{local(config.address).relative_to(cache())}"


def _nodes(workers: int, per_node: int) -> int:
    if workers % per_node:
        lower = workers // per_node * per_node
        raise InputError(
            f"scheduling.workers ({workers}) must be a multiple of place.workers_per_node ({per_node}); "
            f"otherwise GPUs stay idle. The nearest multiples are {lower} and {lower + per_node}."
        )
    return workers // per_node
