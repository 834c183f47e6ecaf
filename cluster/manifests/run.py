"""Computes the values for the templates: the run, its nodes, and the settings of the section `place`."""

import math
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import Field, create_model

from cluster.manifests.settings import KubeRaySettings, ManifestSettings
from cluster.workers.actors import PROCESS_TITLE
from cluster.workers.processes import DRIVER, JOB_COMMAND
from pretrain.common import settings as yaml_settings
from pretrain.common.addresses import cache_folder, local_path
from pretrain.common.errors import InputError
from pretrain.config import PretrainConfig, RunConfig

RUN_COMMANDS = "finetune.cli pretrain", "finetune.cli finetune"  # commands that train, without `python -m`
_MODULES = "|".join(name.replace(".", "[.]") for name in (*RUN_COMMANDS, DRIVER))
# Regular expression with which pgrep finds the processes of a run that start.sh or `submit` started.
COMMAND_PATTERN = f"-m ({_MODULES})|/{JOB_COMMAND}"
# Pattern of names that remain DNS names after KubeRay has appended its suffixes (MaxRayJobNameLength).
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")


def template_values(
    path: Path | str, run_type: type[RunConfig], place_type: type[ManifestSettings], overrides: Sequence[str]
) -> Any:
    """Return the values that the templates use, by name, for the run in the YAML file `path`."""
    config_type = create_model(
        f"{run_type.__name__}WithPlace",
        __base__=run_type,
        # The section is validated even if it is missing, so that the error names its required settings.
        place=(place_type, Field(default={}, validate_default=True)),
    )
    config: Any = yaml_settings.load(path, config_type, overrides)
    scheduling, place = config.scheduling, config.place
    is_finetuning = not isinstance(config, PretrainConfig)
    if is_finetuning and not getattr(config, "start_from", ""):
        raise InputError(f"{path}: start_from is empty. Give the checkpoint's folder there: --set start_from=DIR.")
    if is_finetuning and place.prepare:
        raise InputError("place.prepare: only pretraining prepares a corpus. Set it to false.")
    cpus = scheduling.cpus_per_worker or place.cpus_per_worker
    workers_per_node = min(scheduling.workers, place.workers_per_node)
    # On all nodes, the manifest sets BERTRAIN_RUNS to stored-runs, so a stored run's folder is relative to that.
    stored_folder = f"stored-runs/{local_path(config.address).relative_to(cache_folder())}" if config.address else ""
    cluster_scheduling = scheduling.model_copy(update={"cpus_per_worker": cpus, "address": ""})
    return {
        "name": _object_name(config.name) if place_type is KubeRaySettings else config.name,
        "folder": stored_folder or str(config.folder),  # relative to the commands' working directory
        "run_dir": str(config.run_dir),
        "config": yaml_settings.dump(config.model_copy(update={"scheduling": cluster_scheduling}), exclude={"place"}),
        "command": "finetune" if is_finetuning else "pretrain",
        "nodes": _count_nodes(scheduling.workers, workers_per_node),
        "min_nodes": math.ceil((scheduling.min_workers or scheduling.workers) / workers_per_node),
        "workers_per_node": workers_per_node,
        "gpus_per_node": workers_per_node if place.gpus else 0,
        "cpus_per_node": workers_per_node * cpus,
        "ray_version": metadata.version("ray"),
        "command_processes": COMMAND_PATTERN,
        "run_processes": f"^{PROCESS_TITLE}|{COMMAND_PATTERN}",
        "place": place.model_dump(),
    }


def _object_name(name: str) -> str:
    """Convert a run's name to a Kubernetes object name: `Mini_v1.2` to `mini-v1-2`."""
    converted = re.sub(r"[._]", "-", name.lower()).rstrip("-")
    if not _NAME.fullmatch(converted):
        raise InputError(f"name: {name!r} must start with a letter and have at most 47 characters for KubeRay.")
    return converted


def _count_nodes(workers: int, workers_per_node: int) -> int:
    if rest := workers % workers_per_node:
        lower, higher = workers - rest, workers - rest + workers_per_node
        rule = f"must be a multiple of place.workers_per_node ({workers_per_node}); otherwise GPUs stay idle"
        raise InputError(f"scheduling.workers ({workers}) {rule}. The nearest are {lower} and {higher}.")
    return workers // workers_per_node
