"""Kubernetes with KubeRay: a RayJob, or a RayCluster for `submit`, and what both need beside them.

Fields are those of ray.io/v1 in KubeRay 1.6. Later ones (networkPolicy, the rocksdb backend) are left out: an older
operator would drop them without a word.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator

from cluster.manifests.base import IMAGE, RUN_COMMANDS, ManifestJob, Nodes, locked_version
from cluster.manifests.text import as_yaml
from cluster.workers.actors import PROCESS_TITLE
from cluster.workers.processes import DRIVER, JOB_ENTRYPOINT
from pretrain.common.errors import InputError
from pretrain.common.settings import NO_SECRETS, LocalPath

_FILES = "/etc/bertrain"  # where the ConfigMap lies in every container
_GCS = "/var/lib/gcs"
_HEAD_MEMORY_GIB = 8
# The regular expression with which pgrep finds the run's processes: of start.sh, or of a job that `submit` started.
_COMMAND = "-m ({})".format("|".join(name.replace(".", "[.]") for name in (*RUN_COMMANDS, JOB_ENTRYPOINT, DRIVER)))
_USER = 1000  # of the Containerfile
_INSTANCE = "app.kubernetes.io/instance"
# KubeRay adds to the names of what it makes, which then still have to be names of DNS (its MaxRayJobNameLength).
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")

_OBJECT = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"  # the name of something in Kubernetes; may be empty
_ObjectName = Annotated[str, StringConstraints(pattern=_OBJECT, min_length=1)]
# Names of labels, annotations and resources, such as nvidia.com/gpu.
_Qualified = Annotated[
    str, StringConstraints(pattern=r"^([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
]
_Amount = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    StringConstraints(pattern=r"^[0-9]+([kMGT]i?)?$"),
]
_Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
# What other settings say of a pod's resources.
_COUNTED = {
    "cpu": "scheduling.cpus_per_worker",
    "memory": "place.memory_per_worker_gib",
    "nvidia.com/gpu": "place.workers_per_node and place.gpus",
}


class KubeRaySettings(Nodes):
    """Where a run goes on Kubernetes, and how it behaves there."""

    kind: Literal["RayJob", "RayCluster"] = Field(
        default="RayJob", description="RayJob runs it and cleans up; RayCluster waits for `submit`."
    )
    image: str = Field(
        default="bertrain:latest", pattern=IMAGE, description="What cluster/manifests/Containerfile builds."
    )
    image_pull_secrets: tuple[_ObjectName, ...] = Field(
        default=(), description="Secrets with which the image is fetched from a private registry."
    )
    namespace: _ObjectName = Field(default="default", description="Namespace of everything in the file.")
    service_account: str = Field(
        default="",
        pattern=_OBJECT,
        description="ServiceAccount of all pods; empty takes the namespace's default. Its token is not mounted.",
    )
    priority_class: str = Field(
        default="", pattern=_OBJECT, description="PriorityClass of all pods; empty takes the cluster's default."
    )
    annotations: dict[_Qualified, str] = Field(
        default_factory=dict,
        description="Annotations of all pods, such as {karpenter.sh/do-not-disrupt: 'true'}.",
    )
    storage: LocalPath = Field(
        default="/shared",
        pattern=r"^/[^:]*$",
        description="Where the claim is mounted; the run starts there.",
    )
    storage_claim: _ObjectName = Field(
        default="bertrain", description="PersistentVolumeClaim that all pods can write at once (ReadWriteMany)."
    )
    memory_per_worker_gib: int = Field(default=32, ge=2, description="Memory of a worker, shared memory included.")
    node_selector: dict[_Qualified, str] = Field(
        default_factory=dict,
        json_schema_extra=NO_SECRETS,
        description="Labels of the nodes for workers, such as {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}.",
    )
    worker_annotations: dict[_Qualified, str] = Field(
        default_factory=dict,
        description="Annotations of the workers' pods alone, such as {k8s.v1.cni.cncf.io/networks: rdma}.",
    )
    worker_resources: dict[_Qualified, _Amount] = Field(
        default_factory=dict,
        description="Further resources of a worker's pod, as Kubernetes counts them: {rdma/hca_shared_devices_a: 1}, or "
        "{vpc.amazonaws.com/efa: 4, hugepages-2Mi: 5120Mi}. RDMA also needs a container runtime without a memlock limit.",
    )
    worker_environment: dict[_Variable, str] = Field(
        default_factory=dict,
        description="Environment of the workers, such as {NCCL_IB_HCA: mlx5, NCCL_SOCKET_IFNAME: eth0}.",
    )
    queue: str = Field(
        default="",
        pattern=_OBJECT,
        description="Kueue's LocalQueue; the run waits there until all its pods fit.",
    )
    suspend: bool = Field(default=False, description="Apply without starting.")
    redis_address: str = Field(
        default="",
        pattern=r"^([^@\s]+:\d+)?$",  # a password belongs in the secret
        description="host:port of a Redis for the head's state, which then outlives the loss of its node. Empty keeps it "
        "in Ray's embedded RocksDB in the head's pod, where it outlives a crash.",
    )
    redis_secret: str = Field(
        default="",
        pattern=_OBJECT,
        description="Secret with the key `password` of that Redis; empty if it has none.",
    )
    wandb_secret: _ObjectName = Field(
        default="wandb", description="Secret with the key `api-key` of W&B; where there is none, W&B stays offline."
    )
    operator_namespace: str = Field(
        default="",
        pattern=_OBJECT,
        description="Namespace of the KubeRay operator; empty lets it in from any.",
    )
    retries: int = Field(default=3, ge=0, description="New clusters, each of which resumes, before a RayJob fails.")
    start_limit_seconds: int = Field(
        default=1800, ge=0, description="A RayJob whose pods do not all start in this time fails; 0 waits for ever."
    )
    time_limit_seconds: int = Field(default=0, ge=0, description="Longest time of a RayJob; 0 has no limit.")
    keep_seconds: int = Field(default=600, ge=0, description="How long the pods of an ended RayJob stay.")

    @field_validator("worker_resources")
    @classmethod
    def _check_resources(cls, amounts: dict[str, str]) -> dict[str, str]:
        for name in amounts:
            if name in _COUNTED:
                raise ValueError(f"{name} is set by {_COUNTED[name]}; leave it out here")
        return amounts

    @field_validator("worker_environment")
    @classmethod
    def _check_environment(cls, variables: dict[str, str]) -> dict[str, str]:
        for name in variables:
            if name.startswith("RAY_"):
                raise ValueError(f"{name} is Ray's own, which the manifest sets; leave it out here")
        return variables


def render(job: ManifestJob, place: KubeRaySettings) -> str:
    """RayJob or RayCluster, the ConfigMap with its config and scripts, and a NetworkPolicy around its pods."""
    if not _NAME.fullmatch(job.name):
        raise InputError(
            f"name: {job.name!r} must begin with a letter and have at most 47 of a-z, 0-9 and '-' for KubeRay."
        )
    main = _ray_job(job, place) if place.kind == "RayJob" else _ray_cluster(job, place)
    return as_yaml([_config_map(job, place), _network_policy(job, place), main], _header(job, place))


def _header(job: ManifestJob, place: KubeRaySettings) -> str:
    gpus = f" with {job.gpus_per_node} GPUs" if job.gpus else ""
    redis = f"\n  Secret {place.redis_secret}, key password" if place.redis_secret else ""
    return f"""
{place.kind} {job.name}: {job.nodes} pods{gpus}, {job.workers_per_node} workers each. Apply with kubectl apply -f FILE.
Needed: the KubeRay operator, 1.6 or newer, and in the namespace {place.namespace}
  PersistentVolumeClaim {place.storage_claim} (ReadWriteMany)
  Secret {place.wandb_secret}, key api-key (optional){redis}
"""


def _metadata(job: ManifestJob, place: KubeRaySettings, name: str | None = None) -> dict[str, Any]:
    return {"name": name or job.name, "namespace": place.namespace, "labels": _labels(job)}


def _labels(job: ManifestJob) -> dict[str, str]:
    return {"app.kubernetes.io/name": "bertrain", _INSTANCE: job.name}


def _queued(metadata: dict[str, Any], place: KubeRaySettings) -> dict[str, Any]:
    if place.queue:
        metadata["labels"] = {**metadata["labels"], "kueue.x-k8s.io/queue-name": place.queue}
    return metadata


def _ray_job(job: ManifestJob, place: KubeRaySettings) -> dict[str, Any]:
    spec = {
        "entrypoint": f"bash {_FILES}/start.sh",
        # With a CPU of its own the command runs beside the workers, since the head offers none: so it outlives the head.
        "entrypointNumCpus": 1,
        "submissionMode": "K8sJobMode",
        "backoffLimit": place.retries,
        # Kueue refuses jobs that leave their cluster behind.
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": place.keep_seconds,
        "suspend": place.suspend or bool(place.queue),
        **({"preRunningDeadlineSeconds": place.start_limit_seconds} if place.start_limit_seconds else {}),
        **({"activeDeadlineSeconds": place.time_limit_seconds} if place.time_limit_seconds else {}),
        "submitterPodTemplate": _submitter(job, place),
        "rayClusterSpec": _cluster_spec(job, place),
    }
    metadata = _queued(_metadata(job, place), place)
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _ray_cluster(job: ManifestJob, place: KubeRaySettings) -> dict[str, Any]:
    metadata = _queued(_metadata(job, place), place)
    spec = {"suspend": place.suspend or bool(place.queue), **_cluster_spec(job, place)}
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}


def _cluster_spec(job: ManifestJob, place: KubeRaySettings) -> dict[str, Any]:
    redis = {"gcsFaultToleranceOptions": _redis(place)} if place.redis_address else {}
    return {
        "rayVersion": locked_version("ray"),
        "authOptions": {"mode": "token"},  # the operator makes the token and gives it to these pods alone
        **redis,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
            "template": _head_pod(job, place),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": job.nodes,
                "minReplicas": job.min_nodes,
                "maxReplicas": job.nodes,
                "rayStartParams": {},
                "template": _worker_pod(job, place),
            }
        ],
    }


def _redis(place: KubeRaySettings) -> dict[str, Any]:
    if not place.redis_secret:
        return {"redisAddress": place.redis_address}
    password = {"valueFrom": {"secretKeyRef": {"name": place.redis_secret, "key": "password"}}}
    return {"redisAddress": place.redis_address, "redisPassword": password}


def _head_pod(job: ManifestJob, place: KubeRaySettings) -> dict[str, Any]:
    embedded = [
        {"name": "RAY_gcs_storage", "value": "rocksdb"},
        {"name": "RAY_gcs_storage_path", "value": _GCS},
    ]
    container = {
        **_container("ray-head", job, place, cpus=2, memory_gib=_HEAD_MEMORY_GIB),
        "ports": [
            {"name": "gcs-server", "containerPort": 6379},
            {"name": "dashboard", "containerPort": 8265},
            {"name": "client", "containerPort": 10001},
        ],
    }
    container["env"] += [] if place.redis_address else embedded
    container["volumeMounts"].append({"name": "gcs", "mountPath": _GCS})
    # Of the pod, not of the cluster's storage: a later cluster must not take this one's state for its own.
    return _pod(job, place, container, [{"name": "gcs", "emptyDir": {}}], memory_gib=_HEAD_MEMORY_GIB)


def _worker_pod(job: ManifestJob, place: KubeRaySettings) -> dict[str, Any]:
    memory = job.workers_per_node * place.memory_per_worker_gib
    cpus = job.workers_per_node * job.cpus_per_worker + 1  # the command's, on one of the pods
    container = _container("ray-worker", job, place, cpus=cpus, memory_gib=memory)
    container["resources"] = _resources(cpus, memory, job.gpus_per_node, place.worker_resources)
    container["env"] += [{"name": name, "value": value} for name, value in place.worker_environment.items()]
    # As long as a head may need to come back; Ray's own minute is short for a pod that moves.
    container["env"].append({"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "600"})
    pod = _pod(job, place, container, [], memory_gib=memory)
    if job.gpus:
        pod["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if place.node_selector:
        pod["spec"]["nodeSelector"] = dict(place.node_selector)
    if place.worker_annotations:
        pod["metadata"]["annotations"] = {**place.annotations, **place.worker_annotations}
    return pod


def _submitter(job: ManifestJob, place: KubeRaySettings) -> dict[str, Any]:
    """The pod of `ray job submit`; KubeRay's own would not pass the restricted security profile."""
    container = {
        "name": "ray-job-submitter",
        "image": place.image,
        "securityContext": _contained(),
        "resources": _resources(cpus=1, memory_gib=1),
    }
    return _template(job, place, {"restartPolicy": "Never", "containers": [container]})


def _container(name: str, job: ManifestJob, place: KubeRaySettings, *, cpus: int, memory_gib: int) -> dict[str, Any]:
    return {
        "name": name,
        "image": place.image,
        "workingDir": place.storage,
        "env": [
            {
                "name": "WANDB_API_KEY",
                "valueFrom": {"secretKeyRef": {"name": place.wandb_secret, "key": "api-key", "optional": True}},
            },
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
            {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(place.grace_seconds)},  # Ray's own is 3
        ],
        "resources": _resources(cpus, memory_gib),
        "securityContext": _contained(),
        "volumeMounts": [
            {"name": "storage", "mountPath": place.storage},
            {"name": "files", "mountPath": _FILES, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        "lifecycle": {"preStop": {"exec": {"command": ["bash", f"{_FILES}/stop.sh"]}}},
    }


def _resources(
    cpus: int, memory_gib: int, gpus: int = 0, further: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Requests equal to limits: Ray counts what the limit says, and such pods are evicted last."""
    amounts = {
        "cpu": str(cpus),
        "memory": f"{memory_gib}Gi",
        **({"nvidia.com/gpu": str(gpus)} if gpus else {}),
        **further,
    }
    return {"requests": amounts, "limits": amounts}


def _pod(
    job: ManifestJob,
    place: KubeRaySettings,
    container: dict[str, Any],
    volumes: list[dict[str, Any]],
    *,
    memory_gib: int,
) -> dict[str, Any]:
    spec = {
        "terminationGracePeriodSeconds": place.grace_seconds + 30,  # stop.sh, then Ray's own end
        "containers": [container],
        "volumes": [
            {"name": "storage", "persistentVolumeClaim": {"claimName": place.storage_claim}},
            {"name": "files", "configMap": {"name": _files(job)}},
            # Kubernetes gives 64 MiB; Ray's object store wants 30 % of the memory, and NCCL some more.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{memory_gib // 2}Gi"}},
            *volumes,
        ],
    }
    return _template(job, place, spec)


def _template(job: ManifestJob, place: KubeRaySettings, spec: dict[str, Any]) -> dict[str, Any]:
    """A pod template with what all pods of the run have."""
    metadata = {
        "labels": _labels(job),
        **({"annotations": dict(place.annotations)} if place.annotations else {}),
    }
    pulled = [{"name": name} for name in place.image_pull_secrets]
    common = {
        **({"serviceAccountName": place.service_account} if place.service_account else {}),
        "automountServiceAccountToken": False,
        **({"priorityClassName": place.priority_class} if place.priority_class else {}),
        **({"imagePullSecrets": pulled} if pulled else {}),
        "securityContext": _pod_security(),
    }
    return {"metadata": metadata, "spec": {**common, **spec}}


def _pod_security() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "fsGroupChangePolicy": "OnRootMismatch",  # else every start walks through the whole storage
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _contained() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _files(job: ManifestJob) -> str:
    return f"{job.name}-files"


def _config_map(job: ManifestJob, place: KubeRaySettings) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, place, _files(job)),
        "data": {
            "config.yaml": job.config,
            "start.sh": _start_script(job, place),
            "stop.sh": _stop_script(job, place),
        },
    }


def _start_script(job: ManifestJob, place: KubeRaySettings) -> str:
    *before, last = job.commands(f"{_FILES}/config.yaml", '"$RAY_ADDRESS"')
    lines = "".join(f"{line}\n" for line in before)
    return f"""#!/bin/bash
# The run, from its newest checkpoint if there is one. Ray sets RAY_ADDRESS for its jobs.
set -euo pipefail
cd -- {shlex.quote(place.storage)}
export PYTHONSAFEPATH=1
{lines}exec {last}
"""


def _stop_script(job: ManifestJob, place: KubeRaySettings) -> str:
    stop = shlex.quote(f"{place.storage}/{job.folder}/stop" if job.folder[0] != "/" else f"{job.folder}/stop")
    ours = f"pgrep -f '^{PROCESS_TITLE}|{_COMMAND}' >/dev/null"
    # Not from a pod with nothing of the run: the run may go on elsewhere, or have been started again.
    ask = f"{{ {ours} && touch -- {stop} 2>/dev/null; }} || exit 0 # nothing of the run here, or no run folder: nothing to save"
    # The run goes on with the others, or with a replacement, if the command itself is not in this pod.
    # Without an answer of the control store `ray drain-node` waits for many minutes, longer than the pod has.
    return f"""#!/bin/bash
# Before a pod ends: asks the run for a checkpoint, and waits until nothing of it runs in this pod.
if [[ $HOSTNAME == *-head-* ]] || pgrep -f -- '{_COMMAND}' >/dev/null ||
    ! timeout --kill-after=5 20 ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'the pod ends' \\
        --deadline-remaining-seconds {place.grace_seconds}; then
    {ask}
fi
for ((second = 0; second < {place.grace_seconds}; second++)); do
    {ours} || exit 0
    sleep 1
done
"""


def _network_policy(job: ManifestJob, place: KubeRaySettings) -> dict[str, Any]:
    """Ray's ports are open to the pods of this run and, for the dashboard's API, to the operator. Token or not."""
    namespaces = (
        {"matchLabels": {"kubernetes.io/metadata.name": place.operator_namespace}} if place.operator_namespace else {}
    )
    operator = {
        "namespaceSelector": namespaces,
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    mine = {"matchLabels": {_INSTANCE: job.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, place),
        "spec": {
            "podSelector": mine,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": mine}]},
                {"from": [operator], "ports": [{"protocol": "TCP", "port": 8265}]},
            ],
        },
    }
