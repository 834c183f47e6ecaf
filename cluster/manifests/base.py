"""What all manifests take from a run's config: its commands, its size on nodes, the config itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, create_model

from finetune.config import TASKS, FinetuneConfig
from pretrain.common import settings
from pretrain.common.errors import InputError
from pretrain.common.settings import Section
from pretrain.config import PretrainConfig, RunConfig

IMAGE = r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]*$"  # REGISTRY/NAME:TAG or @DIGEST
RUN_COMMANDS = _PRETRAIN, _FINETUNE = "pretrain pretrain", "finetune finetune"  # of python -m; they train
_LOCK = Path(__file__).resolve().parents[2] / "requirements.lock"


class Nodes(Section):
    """The nodes that the workers share. Each kind of manifest adds its own settings in a class settings model."""

    workers_per_node: int = Field(default=8, ge=1, description="Worker processes of a node; one for each of its GPUs.")
    gpus: bool = Field(default=True, description="Each worker has a GPU; false trains on CPUs.")
    cpus_per_worker: int = Field(
        default=8, ge=1, description="CPU cores of a worker where scheduling.cpus_per_worker is 0."
    )
    prepare: bool = Field(
        default=False,
        description="Prepare the corpus on the cluster first; one that is ready stays as it is.",
    )
    grace_seconds: int = Field(
        default=300, ge=30, description="Time for the last step and its checkpoint when the nodes are taken away."
    )


P = TypeVar("P", bound=Nodes)


@dataclass(frozen=True)
class ManifestJob:
    """A run, shared out over nodes that are all alike."""

    name: str
    folder: str  # the run folder, relative to where the commands start
    config: str  # resolved, as YAML
    subcommands: tuple[str, ...]  # of python -m, in order; all but the last only prepare
    nodes: int
    min_nodes: int  # fewer than `nodes` only where the run may shrink
    workers_per_node: int
    cpus_per_worker: int
    gpus: bool

    @property
    def gpus_per_node(self) -> int:
        return self.workers_per_node if self.gpus else 0

    def commands(self, config: str, address: str) -> list[str]:
        """Shell commands that do the work on the Ray cluster at `address`; both arguments are shell words.

        With --resume a first start begins at step 0, so that a start and every further one are the same command.
        """
        *before, last = self.subcommands
        given = f"{config} --set scheduling.address={address}"
        return [*(f"python -m {one} {given}" for one in before), f"python -m {last} {given} --resume"]


def load(path: Path | str, place: type[P], overrides: Sequence[str]) -> tuple[ManifestJob, P]:
    """The run in the YAML file `path` and the place given by overrides below `place.`."""
    kind = FinetuneConfig if settings.names(path) & set(TASKS) else PretrainConfig
    # Validated though it is a default, so that what a place needs is asked for by name.
    placed = create_model(
        f"Placed{kind.__name__}", __base__=kind, place=(place, Field(default={}, validate_default=True))
    )
    config: Any = settings.load(path, placed, overrides)
    return _job(path, config, config.place), config.place


def locked_version(package: str) -> str:
    """The version of a package in requirements.lock, which images and clusters have to run too."""
    for line in _LOCK.read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition(";")[0].partition("==")
        if name == package:
            return version.strip()
    raise KeyError(package)


def _job(path: Path | str, config: RunConfig, place: Nodes) -> ManifestJob:
    scheduling = config.scheduling
    finetunes = isinstance(config, FinetuneConfig)
    if finetunes and not config.start_from:
        raise InputError(
            f"{path}: start_from is empty. Name the checkpoint's folder on the cluster: --set start_from=DIR."
        )
    if finetunes and place.prepare:
        raise InputError("place.prepare: only pretraining has a corpus to prepare. Leave it false.")
    cpus = scheduling.cpus_per_worker or place.cpus_per_worker
    resolved = config.model_copy(
        update={"scheduling": scheduling.model_copy(update={"cpus_per_worker": cpus, "address": ""})}
    )
    per_node = min(scheduling.workers, place.workers_per_node)
    return ManifestJob(
        name=config.name,
        folder=str(config.folder),
        config=settings.dump(resolved, exclude={"place"}),
        subcommands=(_FINETUNE,) if finetunes else (*(["pretrain prepare"] if place.prepare else []), _PRETRAIN),
        nodes=_nodes(scheduling.workers, per_node),
        min_nodes=math.ceil((scheduling.min_workers or scheduling.workers) / per_node),
        workers_per_node=per_node,
        cpus_per_worker=cpus,
        gpus=place.gpus,
    )


def _nodes(workers: int, per_node: int) -> int:
    if workers % per_node:
        raise InputError(
            f"scheduling.workers ({workers}) must be a multiple of place.workers_per_node ({per_node}), "
            f"or GPUs stay idle; nearest: {workers // per_node * per_node} and {(workers // per_node + 1) * per_node}."
        )
    return workers // per_node
