"""`ray up` on AWS: a cluster config that starts the Containerfile's image on EC2 nodes that share one EFS."""

import shlex
from typing import Any

from pydantic import Field

from cluster.manifests.base import IMAGE, STORED_RUNS, ManifestJob, ManifestSettings
from cluster.manifests.text import as_yaml
from pretrain.common.addresses import RUNS_VARIABLE
from pretrain.common.errors import InputError
from pretrain.common.sections import LocalPath
from pretrain.common.wording import counted

_HOME, _USER = "/home/bertrain", 1000  # of the Containerfile
_TOKEN = f"{_HOME}/.ray/auth_token"
_PORT = 6379

# EFA interfaces of an instance type: AWS, "Maximize network bandwidth on EC2 instances with multiple network cards".
_EFA_INTERFACES = {
    "p4d.24xlarge": 4,
    "p4de.24xlarge": 4,
    "p5.48xlarge": 32,
    "p5e.48xlarge": 32,
    "p5en.48xlarge": 16,
}
_INSTANCE = r"^[a-z0-9-]+\.[a-z0-9-]+$"


class RayUpSettings(ManifestSettings):
    """Where and how a run is placed on AWS."""

    file_system: str = Field(
        pattern=r"^fs-[0-9a-f]+$",
        description="EFS that all nodes mount, such as fs-0123456789abcdef0: --set place.file_system=ID.",
    )
    region: str = Field(default="us-west-2", pattern=r"^[a-z]+(-[a-z]+)+-[0-9]+$", description="AWS region.")
    zone: str = Field(
        default="",
        pattern=r"^[a-z0-9-]*$",
        description="Availability zone, such as us-west-2a; empty allows any.",
    )
    instance: str = Field(
        default="p4d.24xlarge",
        pattern=_INSTANCE,
        description="EC2 instance type of the worker nodes. Set workers_per_node to its number of GPUs.",
    )
    head_instance: str = Field(
        default="m6i.2xlarge",
        pattern=_INSTANCE,
        description="EC2 instance type of the head node, which does not train.",
    )
    machine_image: str = Field(
        default="",
        pattern=r"^(ami-[0-9a-f]+)?$",
        description="AMI with Docker, NVIDIA's driver and container toolkit, and EFA's driver; empty uses Ray's "
        "default for the region.",
    )
    efa_interfaces: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="EFA interfaces of each worker node, through which NCCL communicates between nodes. Empty uses all "
        "interfaces of p4d, p4de, p5, p5e and p5en if several nodes train; 0 uses TCP. They need `private`, `subnet`, "
        "`security_group` and `placement_group`, and an image built with EFA.",
    )
    subnet: str = Field(
        default="",
        pattern=r"^(subnet-[0-9a-f]+)?$",
        description="Subnet of all nodes; empty allows any of the zone. EFA traffic stays within one subnet.",
    )
    placement_group: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9_.-]*$",
        description="Existing placement group of the worker nodes, of strategy cluster; empty places them anywhere.",
    )
    disk_gib: int = Field(default=200, ge=50, description="Disk of each node, in GiB.")
    spot: bool = Field(
        default=False,
        description="Use spot instances for the workers; a lost one costs the steps since the last checkpoint.",
    )
    security_group: str = Field(
        default="",
        pattern=r"^(sg-[0-9a-f]+)?$",
        description="Security group of all nodes. It must allow traffic among them and to EFS and, with EFA, all "
        "traffic from and to itself. If empty, one is created that is open for SSH only.",
    )
    private: bool = Field(
        default=False,
        description="Nodes have no public addresses; call `ray up` from within their network.",
    )
    netrc: LocalPath = Field(
        default="",
        pattern=r"^([/~].*)?$",
        description="Your netrc file with the W&B key, copied to the nodes; if empty, W&B is offline there.",
    )
    image: str = Field(
        default="bertrain:latest",
        pattern=IMAGE,
        description="Container image in a registry, built from cluster/manifests/Containerfile.",
    )
    storage: LocalPath = Field(
        default="/shared",
        pattern=r"^/[^:]*$",
        description="Path at which EFS is mounted; it is the run's working directory.",
    )


def render(job: ManifestJob, settings: RayUpSettings) -> str:
    """The cluster config, with the run's config and start script for the head's home folder."""
    efa = _efa_interfaces(job, settings)
    start = [
        "ray stop",
        f"ulimit -n 65536; ray start --head --port={_PORT} --num-cpus=0 --num-gpus=0 --dashboard-host=127.0.0.1 "
        "--autoscaling-config=~/ray_bootstrap_config.yaml",
    ]
    join = [
        "ray stop",
        f"ulimit -n 65536; ray start --address=$RAY_HEAD_IP:{_PORT} --num-gpus={job.gpus_per_node}",
    ]
    cluster = {
        "cluster_name": job.name,
        "max_workers": job.nodes,
        "provider": _provider(settings),
        "auth": {"ssh_user": "ubuntu"},
        "docker": _docker(job, settings, efa),
        # The token is never part of this file: Ray copies yours to every node.
        "file_mounts": {
            _TOKEN: "~/.ray/auth_token",
            **({f"{_HOME}/.netrc": settings.netrc} if settings.netrc else {}),
        },
        "initialization_commands": _mount(settings),
        "setup_commands": [f"chmod 600 {_TOKEN}"],
        "head_setup_commands": [
            _write(f"{_HOME}/{job.name}.yaml", job.config),
            _write(f"{_HOME}/start.sh", _start_script(job, settings)),
        ],
        "available_node_types": {
            "head": {"resources": {}, "node_config": _head(settings)},
            "workers": {
                "resources": {},  # as AWS reports them for the instance type
                "min_workers": job.nodes,
                "max_workers": job.nodes,
                "node_config": _worker(settings, efa),
            },
        },
        "head_node_type": "head",
        "head_start_ray_commands": start,
        "worker_start_ray_commands": join,
    }
    return as_yaml([cluster], _header(job, settings, efa))


def _efa_interfaces(job: ManifestJob, settings: RayUpSettings) -> int:
    """EFA interfaces of each worker node; `InputError` if a setting that they need is missing."""
    count = settings.efa_interfaces
    if count is None:
        count = _EFA_INTERFACES.get(settings.instance, 0) if job.nodes > 1 else 0
    needed = ("private", "subnet", "security_group", "placement_group")
    missing = [name for name in needed if not getattr(settings, name)]
    if count and missing:
        raise InputError(
            f"place.efa_interfaces: the {count} EFA interfaces of each {settings.instance} need "
            f"{', '.join(f'place.{name}' for name in missing)}. Set them, or place.efa_interfaces=0 for TCP."
        )
    return count


def _header(job: ManifestJob, settings: RayUpSettings, efa: int) -> str:
    fabric = (
        f"""
Prerequisites: the placement group {settings.placement_group} of strategy cluster, the security group
{settings.security_group}, which allows all traffic from and to itself, and an image built with EFA (see the
Containerfile). Each node has {efa} EFA interfaces and no public address: call ray from within their network."""
        if efa
        else ""
    )
    size = f"{counted(job.nodes, 'node')} of {counted(job.workers_per_node, 'worker')}"
    return f"""
{job.name} on {size} on AWS. Needs boto3, and your own token:{fabric}
  (umask 077; ray get-auth-token --generate >/dev/null)
  ray up FILE
  ray exec FILE 'bash ~/start.sh'        # repeat it after a stop or a failure: it resumes
  ray dashboard FILE                     # through SSH; no port but SSH is open to the outside
  ray down FILE
"""


def _provider(settings: RayUpSettings) -> dict[str, Any]:
    return {
        "type": "aws",
        "region": settings.region,
        **({"availability_zone": settings.zone} if settings.zone else {}),
        "cache_stopped_nodes": False,
        "use_internal_ips": settings.private,
    }


def _docker(job: ManifestJob, settings: RayUpSettings, efa: int) -> dict[str, Any]:
    """Ray joins image and options into a shell command, so each of them is a shell word here."""
    options = [
        "--ulimit=nofile=65536:65536",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        f"--volume={settings.storage}:{settings.storage}",
        f"--env={RUNS_VARIABLE}={settings.storage}/{STORED_RUNS}",
        "--env=RAY_AUTH_MODE=token",
        f"--env=RAY_AUTH_TOKEN_PATH={_TOKEN}",
        "--env=RAY_USAGE_STATS_ENABLED=0",
    ]
    # The image names no GPUs, so NVIDIA's toolkit would expose none; the head has none.
    gpus = [
        "--gpus=all",
        "--env=NVIDIA_VISIBLE_DEVICES=all",
        "--env=NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ]
    # EFA registers the memory that it sends from.
    fabric = ["--device=/dev/infiniband", "--ulimit=memlock=-1:-1"]
    worker = [*(gpus if job.gpus else []), *(fabric if efa else [])]
    return {
        "image": shlex.quote(settings.image),
        "container_name": "bertrain",
        "run_options": [shlex.quote(option) for option in options],
        **({"worker_run_options": [shlex.quote(option) for option in worker]} if worker else {}),
    }


def _mount(settings: RayUpSettings) -> list[str]:
    """Commands for each node, outside the container: mount EFS by NFS with the options that AWS recommends."""
    source = shlex.quote(f"{settings.file_system}.efs.{settings.region}.amazonaws.com:/")
    options = "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport"
    folder = shlex.quote(settings.storage)
    return [
        "command -v mount.nfs4 >/dev/null || (sudo apt-get update && sudo apt-get install -y nfs-common)",
        f"sudo mkdir -p {folder}",
        f"mountpoint -q {folder} || sudo mount -t nfs4 -o {options} {source} {folder}",
        f"sudo chown {_USER}:{_USER} {folder}",
    ]


def _head(settings: RayUpSettings) -> dict[str, Any]:
    return {**_node(settings, settings.head_instance), **_network(settings)}


def _worker(settings: RayUpSettings, efa: int) -> dict[str, Any]:
    return {
        **_node(settings, settings.instance),
        **({"NetworkInterfaces": _interfaces(settings, efa)} if efa else _network(settings)),
        **({"Placement": {"GroupName": settings.placement_group}} if settings.placement_group else {}),
        **({"InstanceMarketOptions": {"MarketType": "spot"}} if settings.spot else {}),
    }


def _network(settings: RayUpSettings) -> dict[str, Any]:
    return {
        **({"SubnetIds": [settings.subnet]} if settings.subnet else {}),
        **({"SecurityGroupIds": [settings.security_group]} if settings.security_group else {}),
    }


def _interfaces(settings: RayUpSettings, efa: int) -> list[dict[str, Any]]:
    """An interface for IP on the first network card and one for EFA alone on each, as AWS recommends.

    Ray reads subnet and groups from here, and refuses them next to it.
    """
    common = {
        "SubnetId": settings.subnet,
        "Groups": [settings.security_group],
        "DeleteOnTermination": True,
    }
    first = {"NetworkCardIndex": 0, "DeviceIndex": 0, "InterfaceType": "interface", **common}
    others = [
        {"NetworkCardIndex": card, "DeviceIndex": int(card == 0), "InterfaceType": "efa-only", **common}
        for card in range(efa)
    ]
    return [first, *others]


def _node(settings: RayUpSettings, instance: str) -> dict[str, Any]:
    disk = {"VolumeSize": settings.disk_gib, "VolumeType": "gp3", "Encrypted": True}
    return {
        "InstanceType": instance,
        **({"ImageId": settings.machine_image} if settings.machine_image else {}),
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
        # IMDSv2, so that a manipulated URL cannot fetch the node's credentials.
        "MetadataOptions": {"HttpTokens": "required"},
    }


def _write(path: str, text: str) -> str:
    """A shell command that writes a file."""
    return f"printf %s {shlex.quote(text)} >{shlex.quote(path)}"


def _start_script(job: ManifestJob, settings: RayUpSettings) -> str:
    address = f"127.0.0.1:{_PORT}"
    commands = "\n".join(job.commands(f"{_HOME}/{job.name}.yaml", address))
    return f"""#!/bin/bash
# The run, from its newest checkpoint if there is one.
set -euo pipefail
cd -- {shlex.quote(settings.storage)}
export PYTHONSAFEPATH=1
# `ray up` returns when the head is up; the other nodes take minutes more.
until python -c "import ray, sys
ray.init('{address}', log_to_driver=False)
sys.exit(sum(node['Alive'] for node in ray.nodes()) < {job.min_nodes + 1})" 2>/dev/null; do
    echo "waiting for {job.min_nodes} nodes"
    sleep 10
done
{commands}
"""
