"""The section `place` of a config: settings for the manifest of each kind of cluster."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from pretrain.common.sections import ALLOW_TABS_AND_NEWLINES, LocalPath, Section

_OBJECT = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"  # name of a Kubernetes object; may be empty
_ObjectName = Annotated[str, StringConstraints(pattern=_OBJECT, min_length=1)]
_IMAGE = r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]*$"  # REGISTRY/NAME:TAG or @DIGEST
_WORD = r"^[A-Za-z0-9_.,:@/+-]*$"  # value of an sbatch option; may be empty
_CONSTRAINT = r"^[A-Za-z0-9_.,:@/+&|*()\[\]-]*$"  # expression of node features, with sbatch's operators
_TIME = r"^(\d+-)?\d+(:\d\d){0,2}$"
_START_SECONDS = 120  # time to start Ray and torch, plus a minute: SLURM's warning may come that much early


class ManifestSettings(Section):
    """Settings of the workers' nodes, for every kind of manifest."""

    workers_per_node: int = Field(default=8, ge=1, description="Workers per node; with GPUs, one per GPU.")
    gpus: bool = Field(default=True, description="Whether each worker has a GPU; false trains on CPUs.")
    cpus_per_worker: int = Field(default=8, ge=1, description="Cores per worker if scheduling.cpus_per_worker is 0.")
    prepare: bool = Field(default=False, description="Prepare the corpus on the cluster first, if it is not ready.")
    grace_seconds: int = Field(default=300, ge=30, description="Seconds to save a checkpoint when nodes are preempted.")


class KubeRaySettings(ManifestSettings):
    """Settings of a run on Kubernetes. To change anything else, edit a copy of the template."""

    kind: Literal["RayJob", "RayCluster"] = Field(
        default="RayJob", description="RayJob runs the config and cleans up; RayCluster waits for `submit`."
    )
    image: str = Field(
        default="bertrain:latest", pattern=_IMAGE, description="Container image (cluster/manifests/Containerfile)."
    )
    namespace: _ObjectName = Field(default="default", description="Namespace of all objects in the manifest.")
    storage: LocalPath = Field(
        default="/shared", pattern=r"^/[^:]*$", description="Mount path of the volume; the working directory."
    )
    storage_claim: _ObjectName = Field(default="bertrain", description="ReadWriteMany PersistentVolumeClaim to mount.")
    memory_per_worker_gib: int = Field(default=32, ge=2, description="Memory per worker, including shared memory.")
    queue: str = Field(
        default="", pattern=_OBJECT, description="Kueue LocalQueue; the run waits in it until all pods can start."
    )


class SlurmSettings(ManifestSettings):
    """Settings of a run on SLURM."""

    partition: str = Field(default="", pattern=_WORD, description="Partition; empty uses SLURM's default.")
    account: str = Field(default="", pattern=_WORD, description="Account to charge; empty uses your default.")
    qos: str = Field(default="", pattern=_WORD, description="Quality of service; empty uses the default.")
    constraint: str = Field(
        default="", pattern=_CONSTRAINT, description="Required node features: h100, h100|a100 or [rack1|rack2]."
    )
    time_limit: str = Field(
        default="24:00:00", pattern=_TIME, description="As for sbatch --time. Before it, the run saves and requeues."
    )
    storage: LocalPath = Field(
        default=".", description="Working directory, shared by all nodes; . is the folder in which sbatch is called."
    )
    srun_options: tuple[Annotated[str, Field(pattern=r"^--[a-z]")], ...] = Field(
        default=(), description="srun options: --container-image=x.sqsh. Containers need `storage` at the same path."
    )
    environment: str = Field(
        default="source .venv/bin/activate",
        json_schema_extra=ALLOW_TABS_AND_NEWLINES,
        description="Shell lines, executed by the job script, that put bertrain's python on PATH.",
    )

    @field_validator("time_limit", mode="before")
    @classmethod
    def _as_text(cls, minutes: Any) -> Any:
        """Convert `time_limit=240`, a number in YAML, to a string; for sbatch it means minutes."""
        return str(minutes) if type(minutes) is int else minutes

    @model_validator(mode="after")
    def _check_time(self) -> "SlurmSettings":
        """Check that the time limit leaves time to start and to save; SLURM may warn a minute early."""
        minimum = self.grace_seconds + _START_SECONDS
        if 0 < _parse_seconds(self.time_limit) < minimum:
            needed = f"grace_seconds ({self.grace_seconds}) to save, and {_START_SECONDS} s to start"
            raise ValueError(f"time_limit ({self.time_limit}) is less than {minimum} s: {needed}")
        return self


def _parse_seconds(time_limit: str) -> int:
    """Parse [days-]hours:minutes:seconds as `man sbatch` does: without days, up to two numbers start at minutes."""
    days, *numbers = map(int, re.split("[-:]", time_limit if "-" in time_limit else f"0-{time_limit}"))
    if "-" not in time_limit and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return days * 86400 + hours * 3600 + minutes * 60 + seconds
