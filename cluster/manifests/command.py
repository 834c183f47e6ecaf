"""./launch.sh manifest: the manifest of a run, printed or written to a file."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common.commands import add_command, config_argument, local_path
from pretrain.common.files import atomic_open, disk_errors, expect_other

if TYPE_CHECKING:
    from pretrain.config import RunConfig

KINDS = ("kuberay", "slurm")


def add_to(commands: Any, config_type: Callable[[Path], type[RunConfig]]) -> None:
    """Add `manifest` to the subcommands of a parser; `config_type` says of what kind a config is."""
    parser = add_command(
        commands,
        "manifest",
        functools.partial(_manifest, config_type),
        "write a KubeRay or SLURM manifest",
        """
  ./launch.sh manifest kuberay my.yaml --set place.image=registry/bertrain:1 --out my-run.yaml
  ./launch.sh manifest kuberay my.yaml --set place.kind=RayCluster --set place.queue=training
  ./launch.sh manifest slurm my.yaml --set scheduling.workers=16 --set place.partition=gpu

The settings below place. say where it runs; cluster/manifests/{kuberay,slurm}.py describe them.""",
    )
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument(
        "config", type=config_argument, metavar="CONFIG", help="YAML file of the run, or a name of `configs`"
    )
    parser.add_argument("--out", type=local_path, metavar="FILE", help="file to write (default: standard output)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting of the config or of its section place; may be repeated",
    )


def _manifest(config_type: Callable[[Path], type[RunConfig]], arguments: argparse.Namespace) -> None:
    from cluster.manifests.render import render

    if arguments.out is not None:
        expect_other([arguments.out], [arguments.config])
    text = render(arguments.kind, config_type(arguments.config), arguments.config, arguments.set)
    if arguments.out is None:
        print(text, end="")
        return
    with disk_errors(arguments.out), atomic_open(arguments.out, "w") as file:
        file.write(text)
