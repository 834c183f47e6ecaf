"""`ray up` on AWS: a cluster config that starts the image of the Containerfile on EC2 nodes around one EFS."""

from __future__ import annotations

import shlex
from typing import Any

from pydantic import Field

from cluster.manifests.base import IMAGE, ManifestJob, Nodes
from cluster.manifests.text import as_yaml
from pretrain.common.errors import InputError
from pretrain.common.settings import LocalPath

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


class RayUpSettings(Nodes):
    """Where a run goes on AWS."""

    file_system: str = Field(
        pattern=r"^fs-[0-9a-f]+$",
        description="EFS that all nodes mount, such as fs-0123456789abcdef0: --set place.file_system=ID.",
    )
    region: str = Field(default="us-west-2", pattern=r"^[a-z]+(-[a-z]+)+-[0-9]+$", description="AWS region.")
    zone: str = Field(
        default="",
        pattern=r"^[a-z0-9-]*$",
        description="Availability zone, such as us-west-2a; empty takes any.",
    )
    instance: str = Field(
        default="p4d.24xlarge",
        pattern=_INSTANCE,
        description="EC2 type of the worker nodes; workers_per_node is its GPUs.",
    )
    head_instance: str = Field(
        default="m6i.2xlarge",
        pattern=_INSTANCE,
        description="EC2 type of the head, which trains nothing.",
    )
    machine_image: str = Field(
        default="",
        pattern=r"^(ami-[0-9a-f]+)?$",
        description="AMI with Docker, NVIDIA's driver and container toolkit, and EFA's driver; empty takes Ray's choice "
        "for the region.",
    )
    efa_interfaces: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="EFA interfaces of each worker node, over which NCCL talks between nodes; empty takes all that p4d, p4de, "
        "p5, p5e and p5en have where several nodes train, 0 keeps to TCP. They need `private`, `subnet`, `security_group` "
        "and `placement_group`, and an image built with EFA.",
    )
    subnet: str = Field(
        default="",
        pattern=r"^(subnet-[0-9a-f]+)?$",
        description="Subnet of all nodes; empty takes any of the zone. EFA's traffic stays within one.",
    )
    placement_group: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9_.-]*$",
        description="Placement group of the worker nodes, of strategy cluster, made beforehand; empty places them anywhere.",
    )
    disk_gib: int = Field(default=200, ge=50, description="Disk of each node.")
    spot: bool = Field(
        default=False,
        description="Spot instances for the workers; a lost one costs the steps since the last checkpoint.",
    )
    security_group: str = Field(
        default="",
        pattern=r"^(sg-[0-9a-f]+)?$",
        description="Group of all nodes; it must let them reach each other and EFS, and with EFA let all traffic from and to "
        "itself through. Empty makes one open for SSH only.",
    )
    private: bool = Field(
        default=False,
        description="Nodes without public addresses; then call `ray up` from within the network.",
    )
    netrc: LocalPath = Field(
        default="",
        pattern=r"^([/~].*)?$",
        description="Your netrc with W&B's key, copied to the nodes; empty leaves W&B offline there.",
    )
    image: str = Field(
        default="bertrain:latest",
        pattern=IMAGE,
        description="What cluster/manifests/Containerfile builds, in a registry.",
    )
    storage: LocalPath = Field(
        default="/shared", pattern=r"^/[^:]*$", description="Where EFS is mounted; the run starts there."
    )


def render(job: ManifestJob, place: RayUpSettings) -> str:
    """The cluster config, with the run's config and command in its head's home folder."""
    efa = _efa_interfaces(job, place)
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
        "provider": _provider(place),
        "auth": {"ssh_user": "ubuntu"},
        "docker": _docker(job, place, efa),
        # The token never stands in this file: Ray copies yours to every node.
        "file_mounts": {
            _TOKEN: "~/.ray/auth_token",
            **({f"{_HOME}/.netrc": place.netrc} if place.netrc else {}),
        },
        "initialization_commands": _mount(place),
        "setup_commands": [f"chmod 600 {_TOKEN}"],
        "head_setup_commands": [
            _write(f"{_HOME}/{job.name}.yaml", job.config),
            _write(f"{_HOME}/start.sh", _start_script(job, place)),
        ],
        "available_node_types": {
            "head": {"resources": {}, "node_config": _head(place)},
            "workers": {
                "resources": {},  # as AWS tells them of the instance type
                "min_workers": job.nodes,
                "max_workers": job.nodes,
                "node_config": _worker(place, efa),
            },
        },
        "head_node_type": "head",
        "head_start_ray_commands": start,
        "worker_start_ray_commands": join,
    }
    return as_yaml([cluster], _header(job, place, efa))


def _efa_interfaces(job: ManifestJob, place: RayUpSettings) -> int:
    """EFA interfaces of each worker node; `InputError` where something that they need is missing."""
    count = place.efa_interfaces
    if count is None:
        count = _EFA_INTERFACES.get(place.instance, 0) if job.nodes > 1 else 0
    missing = [name for name in ("private", "subnet", "security_group", "placement_group") if not getattr(place, name)]
    if count and missing:
        raise InputError(
            f"place.efa_interfaces: the {count} EFA interfaces of each {place.instance} need "
            f"{', '.join(f'place.{name}' for name in missing)}. Set them, or place.efa_interfaces=0 for TCP."
        )
    return count


def _header(job: ManifestJob, place: RayUpSettings, efa: int) -> str:
    fabric = (
        f"""
Needed beforehand: the placement group {place.placement_group} of strategy cluster, the security group {place.security_group}, which
lets all traffic from and to itself through, and an image built with EFA (see the Containerfile). Nodes have {efa} EFA interfaces each
and no public addresses: call ray from within their network."""
        if efa
        else ""
    )
    return f"""
{job.name} on {job.nodes} nodes of {job.workers_per_node} workers on AWS. Needs boto3, and a token of yours:{fabric}
  (umask 077; ray get-auth-token --generate >/dev/null)
  ray up FILE
  ray exec FILE 'bash ~/start.sh'        # again after a stop or a failure: it resumes
  ray dashboard FILE                     # through SSH; no port but SSH is open to the outside
  ray down FILE
"""


def _provider(place: RayUpSettings) -> dict[str, Any]:
    return {
        "type": "aws",
        "region": place.region,
        **({"availability_zone": place.zone} if place.zone else {}),
        "cache_stopped_nodes": False,
        "use_internal_ips": place.private,
    }


def _docker(job: ManifestJob, place: RayUpSettings, efa: int) -> dict[str, Any]:
    """Ray joins image and options to a line of shell, so each of them is a shell word here."""
    options = [
        "--ulimit=nofile=65536:65536",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        f"--volume={place.storage}:{place.storage}",
        "--env=RAY_AUTH_MODE=token",
        f"--env=RAY_AUTH_TOKEN_PATH={_TOKEN}",
        "--env=RAY_USAGE_STATS_ENABLED=0",
    ]
    # The image names no GPUs, without which NVIDIA's toolkit gives none; the head has none to give.
    gpus = [
        "--gpus=all",
        "--env=NVIDIA_VISIBLE_DEVICES=all",
        "--env=NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ]
    fabric = [
        "--device=/dev/infiniband",
        "--ulimit=memlock=-1:-1",
    ]  # EFA registers the memory that it sends from
    worker = [*(gpus if job.gpus else []), *(fabric if efa else [])]
    return {
        "image": shlex.quote(place.image),
        "container_name": "bertrain",
        "run_options": [shlex.quote(option) for option in options],
        **({"worker_run_options": [shlex.quote(option) for option in worker]} if worker else {}),
    }


def _mount(place: RayUpSettings) -> list[str]:
    """On each node, outside the container: EFS by NFS with the options that AWS recommends."""
    source = shlex.quote(f"{place.file_system}.efs.{place.region}.amazonaws.com:/")
    options = "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport"
    folder = shlex.quote(place.storage)
    return [
        "command -v mount.nfs4 >/dev/null || (sudo apt-get update && sudo apt-get install -y nfs-common)",
        f"sudo mkdir -p {folder}",
        f"mountpoint -q {folder} || sudo mount -t nfs4 -o {options} {source} {folder}",
        f"sudo chown {_USER}:{_USER} {folder}",
    ]


def _head(place: RayUpSettings) -> dict[str, Any]:
    return {**_node(place, place.head_instance), **_network(place)}


def _worker(place: RayUpSettings, efa: int) -> dict[str, Any]:
    return {
        **_node(place, place.instance),
        **({"NetworkInterfaces": _interfaces(place, efa)} if efa else _network(place)),
        **({"Placement": {"GroupName": place.placement_group}} if place.placement_group else {}),
        **({"InstanceMarketOptions": {"MarketType": "spot"}} if place.spot else {}),
    }


def _network(place: RayUpSettings) -> dict[str, Any]:
    return {
        **({"SubnetIds": [place.subnet]} if place.subnet else {}),
        **({"SecurityGroupIds": [place.security_group]} if place.security_group else {}),
    }


def _interfaces(place: RayUpSettings, efa: int) -> list[dict[str, Any]]:
    """An interface for IP on the first network card and one for EFA alone on each, as AWS recommends.

    Ray takes subnet and groups from here, and refuses them beside it.
    """
    common = {
        "SubnetId": place.subnet,
        "Groups": [place.security_group],
        "DeleteOnTermination": True,
    }
    first = {"NetworkCardIndex": 0, "DeviceIndex": 0, "InterfaceType": "interface", **common}
    others = [
        {"NetworkCardIndex": card, "DeviceIndex": int(card == 0), "InterfaceType": "efa-only", **common}
        for card in range(efa)
    ]
    return [first, *others]


def _node(place: RayUpSettings, instance: str) -> dict[str, Any]:
    disk = {"VolumeSize": place.disk_gib, "VolumeType": "gp3", "Encrypted": True}
    return {
        "InstanceType": instance,
        **({"ImageId": place.machine_image} if place.machine_image else {}),
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
        # IMDSv2, so that no fetched URL can be made to tell the node's credentials.
        "MetadataOptions": {"HttpTokens": "required"},
    }


def _write(path: str, text: str) -> str:
    """A shell command that writes a file."""
    return f"printf %s {shlex.quote(text)} >{shlex.quote(path)}"


def _start_script(job: ManifestJob, place: RayUpSettings) -> str:
    address = f"127.0.0.1:{_PORT}"
    commands = "\n".join(job.commands(f"{_HOME}/{job.name}.yaml", address))
    return f"""#!/bin/bash
# The run, from its newest checkpoint if there is one.
set -euo pipefail
cd -- {shlex.quote(place.storage)}
export PYTHONSAFEPATH=1
# `ray up` returns when the head is there; the others take minutes more.
until python -c "import ray, sys
ray.init('{address}', log_to_driver=False)
sys.exit(sum(node['Alive'] for node in ray.nodes()) < {job.min_nodes + 1})" 2>/dev/null; do
    echo "waiting for {job.min_nodes} nodes"
    sleep 10
done
{commands}
"""
