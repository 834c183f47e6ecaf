"""Manifests for real clusters, made from the config of a run: KubeRay, `ray up` on AWS, SLURM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.manifests import kuberay, rayup, slurm
from cluster.manifests.base import load

_KINDS = {
    "kuberay": (kuberay.KubeRaySettings, kuberay.render),
    "rayup": (rayup.RayUpSettings, rayup.render),
    "slurm": (slurm.SlurmSettings, slurm.render),
}
KINDS = tuple(_KINDS)


def render(kind: str, config: Path | str, overrides: Sequence[str] = ()) -> str:
    """The manifest of `kind`, one of `KINDS`, for the run in the YAML file `config`, as text of one file.

    `overrides` are `key.path=value`; those below `place.` say where it runs and are described in each kind's settings model.
    Raises `InputError` where config or place are wrong, or do not fit each other.
    """
    place, make = _KINDS[kind]
    return make(*load(config, place, overrides))
