"""Manifests for real clusters, made from the config of a run: KubeRay, `ray up` on AWS, SLURM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.manifests import kuberay, rayup, slurm
from cluster.manifests.base import load
from pretrain.config import RunConfig

_KINDS = {
    "kuberay": (kuberay.KubeRaySettings, kuberay.render),
    "rayup": (rayup.RayUpSettings, rayup.render),
    "slurm": (slurm.SlurmSettings, slurm.render),
}
KINDS = tuple(_KINDS)


def render(kind: str, config_type: type[RunConfig], config: Path | str, overrides: Sequence[str] = ()) -> str:
    """The manifest of a run, as the text of one file.

    Args:
        kind: one of `KINDS`.
        config_type: that of the run's config.
        config: YAML file of the run.
        overrides: `key.path=value`. Those below `place.` say where it runs; each kind's settings model describes them.

    Raises:
        InputError: the config or its section `place` is wrong, or they do not fit each other.
    """
    settings_type, make = _KINDS[kind]
    return make(*load(config, config_type, settings_type, overrides))
