"""The command `manifest`: print the manifest of a run, or write it to a file."""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.common.commands import add_command, config_argument, parse_path
from pretrain.common.files import atomic_open, check_outputs_differ, disk_errors

KINDS = ("kuberay", "slurm")


def add_to(commands: Any, find_config_type: Callable[[Path], Any]) -> None:
    """Add `manifest` to the subcommands of a parser; `find_config_type` returns the class of a config."""
    parser = add_command(
        commands,
        "manifest",
        functools.partial(_manifest, find_config_type),
        "write a KubeRay or SLURM manifest",
        """
  ./launch.sh manifest kuberay my.yaml --set place.image=registry/bertrain:1 --out my-run.yaml
  ./launch.sh manifest kuberay my.yaml --template my-site.yaml.j2 --set place.queue=training
  ./launch.sh manifest slurm my.yaml --set scheduling.workers=16 --set place.partition=gpu

The settings place.* choose where it runs. For anything else a cluster needs, edit a copy of KIND's template:
cluster/manifests/templates/kuberay.yaml.j2 or slurm.sbatch.j2.""",
    )
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument(
        "config", type=config_argument, metavar="CONFIG", help="YAML file of the run, or a name that `configs` lists"
    )
    parser.add_argument("--template", type=parse_path, metavar="FILE", help="your edited copy of KIND's template")
    parser.add_argument("--out", type=parse_path, metavar="FILE", help="file to write (default: standard output)")
    set_help = "override a setting of the config, or of its section `place`; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=set_help)


def _manifest(find_config_type: Callable[[Path], Any], arguments: argparse.Namespace) -> None:
    from cluster.manifests.render import render

    if arguments.out is not None:
        check_outputs_differ([arguments.out], [path for path in (arguments.config, arguments.template) if path])
    path = arguments.config
    text = render(arguments.kind, find_config_type(path), path, arguments.set, arguments.template)
    if arguments.out is None:
        print(text, end="")
        return
    with disk_errors(arguments.out), atomic_open(arguments.out, "w") as file:
        file.write(text)
