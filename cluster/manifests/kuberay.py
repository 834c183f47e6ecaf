"""Kubernetes with KubeRay: a RayJob, or a RayCluster for `submit`, and the objects that both need.

Fields are those of ray.io/v1 in KubeRay 1.6. Later ones (networkPolicy, the rocksdb backend) are left out: an older
operator would drop them silently.
"""

import dataclasses
import re
import shlex
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator

from cluster.manifests.base import RUN_COMMANDS, STORED_RUNS, ManifestJob, ManifestSettings
from cluster.manifests.text import as_yaml
from cluster.workers.actors import PROCESS_TITLE
from cluster.workers.processes import DRIVER, JOB_COMMAND
from pretrain.common.addresses import RUNS_VARIABLE
from pretrain.common.errors import InputError
from pretrain.common.sections import NO_SECRETS, LocalPath
from pretrain.common.wording import counted

_FILES = "/etc/bertrain"  # where every container mounts the ConfigMap
_GCS = "/var/lib/gcs"
_HEAD_MEMORY_GIB = 8
_SET = (
    "RAY_gcs_storage",
    "RAY_gcs_storage_path",
    "RAY_gcs_rpc_server_reconnect_timeout_s",
    "RAY_USAGE_STATS_ENABLED",
    "RAY_JOB_STOP_WAIT_TIME_S",
)  # or RAY_AUTH_*
_START_SECONDS = 1800  # within which all pods of a RayJob must start
_KEEP_SECONDS = 600  # for which the pods of a finished RayJob are kept
# The regular expression with which pgrep finds the run's processes: of start.sh, or of a job that `submit` started.
COMMAND = "-m ({})|/{}".format("|".join(name.replace(".", "[.]") for name in (*RUN_COMMANDS, DRIVER)), JOB_COMMAND)
_HEAD = "BERTRAIN_HEAD"  # set in the head's pod: names of pods begin with the run's, and may contain anything
_USER = 1000  # of the Containerfile
_INSTANCE = "app.kubernetes.io/instance"
# KubeRay appends to the names of what it makes; they must still be DNS names (its MaxRayJobNameLength).
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
# The resources of a pod that other settings determine.
_COUNTED = {
    "cpu": "scheduling.cpus_per_worker",
    "memory": "place.memory_per_worker_gib",
    "nvidia.com/gpu": "place.workers_per_node and place.gpus",
}


class KubeRaySettings(ManifestSettings):
    """Where and how a run is placed on Kubernetes."""

    kind: Literal["RayJob", "RayCluster"] = Field(
        default="RayJob", description="RayJob runs the config and cleans up; RayCluster waits for `submit`."
    )
    image: str = Field(
        default="bertrain:latest",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]*$",  # REGISTRY/NAME:TAG or @DIGEST
        description="Container image, built from cluster/manifests/Containerfile.",
    )
    image_pull_secrets: tuple[_ObjectName, ...] = Field(
        default=(), description="Secrets for pulling the image from a private registry."
    )
    namespace: _ObjectName = Field(default="default", description="Namespace of all objects in the manifest.")
    service_account: str = Field(
        default="",
        pattern=_OBJECT,
        description="ServiceAccount of all pods; empty uses the namespace's default. Its token is not mounted.",
    )
    priority_class: str = Field(
        default="", pattern=_OBJECT, description="PriorityClass of all pods; empty uses the cluster's default."
    )
    annotations: dict[_Qualified, str] = Field(
        default_factory=dict,
        description="Annotations of all pods, such as {karpenter.sh/do-not-disrupt: 'true'}.",
    )
    storage: LocalPath = Field(
        default="/shared",
        pattern=r"^/[^:]*$",
        description="Path at which the claim is mounted; it is the run's working directory.",
    )
    storage_claim: _ObjectName = Field(
        default="bertrain", description="PersistentVolumeClaim that all pods mount and write (ReadWriteMany)."
    )
    memory_per_worker_gib: int = Field(
        default=32, ge=2, description="Memory of each worker, shared memory included, in GiB."
    )
    node_selector: dict[_Qualified, str] = Field(
        default_factory=dict,
        json_schema_extra=NO_SECRETS,
        description="Labels of the nodes for workers, such as {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}.",
    )
    worker_annotations: dict[_Qualified, str] = Field(
        default_factory=dict,
        description="Annotations of the workers' pods only, such as {k8s.v1.cni.cncf.io/networks: rdma}.",
    )
    worker_resources: dict[_Qualified, _Amount] = Field(
        default_factory=dict,
        description="Further resources of each worker's pod, in Kubernetes notation: {rdma/hca_shared_devices_a: 1} "
        "or {vpc.amazonaws.com/efa: 4, hugepages-2Mi: 5120Mi}. RDMA also needs "
        "a container runtime without memlock limit.",
    )
    worker_environment: dict[_Variable, str] = Field(
        default_factory=dict,
        description="Environment variables of the workers, such as {NCCL_IB_HCA: mlx5, NCCL_SOCKET_IFNAME: eth0}.",
    )
    queue: str = Field(
        default="",
        pattern=_OBJECT,
        description="LocalQueue of Kueue, in which the run waits until all its pods fit; empty uses no queue.",
    )
    wandb_secret: _ObjectName = Field(
        default="wandb", description="Secret whose key `api-key` holds the W&B key; if missing, W&B is offline."
    )
    retries: int = Field(
        default=3, ge=0, description="Retries with a new cluster, each resuming the run, before the RayJob fails."
    )

    @field_validator("worker_resources")
    @classmethod
    def _check_resources(cls, amounts: dict[str, str]) -> dict[str, str]:
        for name in amounts:
            if name in _COUNTED:
                raise ValueError(f"{name} is set by {_COUNTED[name]}; remove it here")
        return amounts

    @field_validator("worker_environment")
    @classmethod
    def _check_environment(cls, variables: dict[str, str]) -> dict[str, str]:
        for name in variables:
            if name in _SET or name.startswith("RAY_AUTH_"):
                raise ValueError(f"{name} is set by the manifest; remove it here")
            if name == RUNS_VARIABLE:
                raise ValueError(f"{name} is set for all pods by place.storage; remove it here")
        return variables


def render(job: ManifestJob, settings: KubeRaySettings) -> str:
    """RayJob or RayCluster, the ConfigMap with its config and scripts, and a NetworkPolicy for its pods.

    Their names have Kubernetes' form of the run's: `mini-v1-2` for `Mini_v1.2`.
    """
    name = re.sub(r"[._]", "-", job.name.lower()).rstrip("-")
    if not _NAME.fullmatch(name):
        raise InputError(
            f"name: {job.name!r} must begin with a letter and have at most 47 characters for KubeRay. Choose another "
            "name."
        )
    job = dataclasses.replace(job, name=name)
    main = _ray_job(job, settings) if settings.kind == "RayJob" else _ray_cluster(job, settings)
    return as_yaml([_config_map(job, settings), _network_policy(job, settings), main], _header(job, settings))


def _header(job: ManifestJob, settings: KubeRaySettings) -> str:
    gpus = f" with {counted(job.gpus_per_node, 'GPU')}" if job.gpus else ""
    return f"""
{settings.kind} {job.name}: {counted(job.nodes, "pod")}{gpus}, {counted(job.workers_per_node, "worker")} each.
Apply with kubectl apply -f FILE.
Needed: the KubeRay operator, 1.6 or newer, and in the namespace {settings.namespace}
  PersistentVolumeClaim {settings.storage_claim} (ReadWriteMany)
  Secret {settings.wandb_secret}, key api-key (optional)
"""


def _metadata(job: ManifestJob, settings: KubeRaySettings, name: str | None = None) -> dict[str, Any]:
    return {"name": name or job.name, "namespace": settings.namespace, "labels": _labels(job)}


def _labels(job: ManifestJob) -> dict[str, str]:
    return {"app.kubernetes.io/name": "bertrain", _INSTANCE: job.name}


def _queued(metadata: dict[str, Any], settings: KubeRaySettings) -> dict[str, Any]:
    if settings.queue:
        metadata["labels"] = {**metadata["labels"], "kueue.x-k8s.io/queue-name": settings.queue}
    return metadata


def _ray_job(job: ManifestJob, settings: KubeRaySettings) -> dict[str, Any]:
    spec = {
        "entrypoint": f"bash {_FILES}/start.sh",
        # The command requests a CPU. The head offers none, so it runs beside the workers and survives a lost head.
        "entrypointNumCpus": 1,
        "submissionMode": "K8sJobMode",
        "backoffLimit": settings.retries,
        # Kueue refuses jobs whose cluster outlives them.
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEEP_SECONDS,
        "suspend": bool(settings.queue),
        "preRunningDeadlineSeconds": _START_SECONDS,
        "submitterPodTemplate": _submitter(job, settings),
        "rayClusterSpec": _cluster_spec(job, settings),
    }
    metadata = _queued(_metadata(job, settings), settings)
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _ray_cluster(job: ManifestJob, settings: KubeRaySettings) -> dict[str, Any]:
    metadata = _queued(_metadata(job, settings), settings)
    spec = {"suspend": bool(settings.queue), **_cluster_spec(job, settings)}
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}


def _cluster_spec(job: ManifestJob, settings: KubeRaySettings) -> dict[str, Any]:
    return {
        "rayVersion": metadata.version("ray"),  # nodes must have the same
        "authOptions": {"mode": "token"},  # the operator makes the token, for these pods alone
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
            "template": _head_pod(job, settings),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": job.nodes,
                "minReplicas": job.min_nodes,
                "maxReplicas": job.nodes,
                "rayStartParams": {},
                "template": _worker_pod(job, settings),
            }
        ],
    }


def _head_pod(job: ManifestJob, settings: KubeRaySettings) -> dict[str, Any]:
    container = {
        **_container("ray-head", job, settings, cpus=2, memory_gib=_HEAD_MEMORY_GIB),
        "ports": [
            {"name": "gcs-server", "containerPort": 6379},
            {"name": "dashboard", "containerPort": 8265},
            {"name": "client", "containerPort": 10001},
        ],
    }
    own = {_HEAD: "1", "RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": _GCS}
    container["env"] += [{"name": name, "value": value} for name, value in own.items()]
    container["volumeMounts"].append({"name": "gcs", "mountPath": _GCS})
    # On the pod, not on the shared storage: a later cluster must not load this one's state.
    return _pod(job, settings, container, [{"name": "gcs", "emptyDir": {}}], memory_gib=_HEAD_MEMORY_GIB)


def _worker_pod(job: ManifestJob, settings: KubeRaySettings) -> dict[str, Any]:
    memory = job.workers_per_node * settings.memory_per_worker_gib
    cpus = job.workers_per_node * job.cpus_per_worker + 1  # the command's, on one of the pods
    container = _container("ray-worker", job, settings, cpus=cpus, memory_gib=memory)
    container["resources"] = _resources(cpus, memory, job.gpus_per_node, settings.worker_resources)
    container["env"] += [{"name": name, "value": value} for name, value in settings.worker_environment.items()]
    # How long a head may be lost. After as long, KubeRay gives the RayJob up; Ray's default of 60 is short for a pod
    # that moves.
    container["env"].append({"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "300"})
    pod = _pod(job, settings, container, [], memory_gib=memory)
    if job.gpus:
        pod["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if settings.node_selector:
        pod["spec"]["nodeSelector"] = dict(settings.node_selector)
    if settings.worker_annotations:
        pod["metadata"]["annotations"] = {**settings.annotations, **settings.worker_annotations}
    return pod


def _submitter(job: ManifestJob, settings: KubeRaySettings) -> dict[str, Any]:
    """The pod of `ray job submit`; KubeRay's default would violate the restricted security profile."""
    container = {
        "name": "ray-job-submitter",
        "image": settings.image,
        "securityContext": _contained(),
        "resources": _resources(cpus=1, memory_gib=1),
    }
    return _template(job, settings, {"restartPolicy": "Never", "containers": [container]})


def _container(name: str, job: ManifestJob, settings: KubeRaySettings, *, cpus: int, memory_gib: int) -> dict[str, Any]:
    return {
        "name": name,
        "image": settings.image,
        "workingDir": settings.storage,
        "env": [
            {
                "name": "WANDB_API_KEY",
                "valueFrom": {"secretKeyRef": {"name": settings.wandb_secret, "key": "api-key", "optional": True}},
            },
            {"name": RUNS_VARIABLE, "value": f"{settings.storage}/{STORED_RUNS}"},
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
            {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(settings.grace_seconds)},  # Ray's default is 3
        ],
        "resources": _resources(cpus, memory_gib),
        "securityContext": _contained(),
        "volumeMounts": [
            {"name": "storage", "mountPath": settings.storage},
            {"name": "files", "mountPath": _FILES, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        "lifecycle": {"preStop": {"exec": {"command": ["bash", f"{_FILES}/stop.sh"]}}},
    }


def _resources(
    cpus: int, memory_gib: int, gpus: int = 0, further: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Requests equal to limits: Ray reads the limits, and such pods are evicted last."""
    amounts = {
        "cpu": str(cpus),
        "memory": f"{memory_gib}Gi",
        **({"nvidia.com/gpu": str(gpus)} if gpus else {}),
        **further,
    }
    return {"requests": amounts, "limits": amounts}


def _pod(
    job: ManifestJob,
    settings: KubeRaySettings,
    container: dict[str, Any],
    volumes: list[dict[str, Any]],
    *,
    memory_gib: int,
) -> dict[str, Any]:
    spec = {
        "terminationGracePeriodSeconds": settings.grace_seconds + 30,  # stop.sh, then Ray's own shutdown
        "containers": [container],
        "volumes": [
            {"name": "storage", "persistentVolumeClaim": {"claimName": settings.storage_claim}},
            {"name": "files", "configMap": {"name": _files(job)}},
            # Kubernetes gives 64 MiB; Ray's object store needs 30 % of the memory, and NCCL some more.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{memory_gib // 2}Gi"}},
            *volumes,
        ],
    }
    return _template(job, settings, spec)


def _template(job: ManifestJob, settings: KubeRaySettings, spec: dict[str, Any]) -> dict[str, Any]:
    """A pod template with what all pods of the run have in common."""
    metadata = {
        "labels": _labels(job),
        **({"annotations": dict(settings.annotations)} if settings.annotations else {}),
    }
    pulled = [{"name": name} for name in settings.image_pull_secrets]
    common = {
        **({"serviceAccountName": settings.service_account} if settings.service_account else {}),
        "automountServiceAccountToken": False,
        **({"priorityClassName": settings.priority_class} if settings.priority_class else {}),
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
        "fsGroupChangePolicy": "OnRootMismatch",  # otherwise every start traverses the whole storage
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _contained() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _files(job: ManifestJob) -> str:
    return f"{job.name}-files"


def _config_map(job: ManifestJob, settings: KubeRaySettings) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, settings, _files(job)),
        "data": {
            "config.yaml": job.config,
            "start.sh": _start_script(job, settings),
            "stop.sh": _stop_script(job, settings),
        },
    }


def _start_script(job: ManifestJob, settings: KubeRaySettings) -> str:
    *before, last = job.commands(f"{_FILES}/config.yaml", '"$RAY_ADDRESS"')
    lines = "".join(f"{line}\n" for line in before)
    return f"""#!/bin/bash
# The run, from its newest checkpoint if there is one. Ray sets RAY_ADDRESS for its jobs.
set -euo pipefail
cd -- {shlex.quote(settings.storage)}
export PYTHONSAFEPATH=1
{lines}exec {last}
"""


def _stop_script(job: ManifestJob, settings: KubeRaySettings) -> str:
    stop = shlex.quote(f"{settings.storage}/{job.folder}/stop" if job.folder[0] != "/" else f"{job.folder}/stop")
    ours = f"pgrep -f '^{PROCESS_TITLE}|{COMMAND}' >/dev/null"
    # Not from a pod without processes of the run: the run may continue elsewhere, or have been started again.
    ask = f"{{ {ours} && touch -- {stop} 2>/dev/null; }} || exit 0 # no process of the run, or no run folder"
    if settings.kind == "RayCluster":  # The launcher of each job, whatever its run's name; not the shell above it.
        jobs = f"^[^ ]*python[0-9.]* [^ ]*/{JOB_COMMAND}"
        ask = f"pkill --signal TERM -f '{jobs}' || exit 0 # no jobs in this pod"
    # The run continues with the other pods, or with a replacement, if the command itself is not in this pod.
    # If the control store does not answer, `ray drain-node` waits for many minutes, longer than the pod has.
    return f"""#!/bin/bash
# Before a pod terminates: requests a checkpoint, and waits until no process of the run is left in this pod.
if [[ -n ${{{_HEAD}:-}} ]] || pgrep -f -- '{COMMAND}' >/dev/null ||
    ! timeout --kill-after=5 20 ray drain-node \\
        --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'the pod terminates' \\
        --deadline-remaining-seconds {settings.grace_seconds}; then
    {ask}
fi
for ((second = 0; second < {settings.grace_seconds}; second++)); do
    {ours} || exit 0
    sleep 1
done
"""


def _network_policy(job: ManifestJob, settings: KubeRaySettings) -> dict[str, Any]:
    """Opens Ray's ports to the pods of this run and, for the dashboard's API, to the operator; to nobody else."""
    operator = {
        "namespaceSelector": {},  # any
        # Helm and kustomize give the operator different names, but the same component.
        "podSelector": {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}},
    }
    mine = {"matchLabels": {_INSTANCE: job.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, settings),
        "spec": {
            "podSelector": mine,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": mine}]},
                {"from": [operator], "ports": [{"protocol": "TCP", "port": 8265}]},
            ],
        },
    }
