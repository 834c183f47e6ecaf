"""The manifest of a run, of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.manifests import kuberay, slurm
from cluster.manifests.base import load
from pretrain.config import RunConfig

KIND_SETTINGS = {
    "kuberay": (kuberay.KubeRaySettings, kuberay.render),
    "slurm": (slurm.SlurmSettings, slurm.render),
}


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
    settings_type, make = KIND_SETTINGS[kind]
    return make(*load(config, config_type, settings_type, overrides))
