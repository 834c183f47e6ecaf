"""Manifests: valid by the schemas of those who read them, true to the config, and without secrets."""

import contextlib
import copy
import functools
import json
import lzma
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from pydantic import ValidationError

from cluster.manifests.command import KINDS
from cluster.manifests.render import KIND_SETTINGS, fill
from cluster.manifests.render import render as render_manifest
from cluster.manifests.run import COMMAND_PATTERN, RUN_COMMANDS
from cluster.manifests.settings import ManifestSettings
from cluster.workers.actors import PROCESS_TITLE
from cluster.workers.processes import DRIVER, JOB_COMMAND
from finetune.cli import build_parsers, main
from finetune.training.config import config_type
from finetune.training.config import load_config as load_finetuning
from pretrain.common.errors import InputError
from pretrain.config import load_config
from tests.chaos import wait_for

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "cluster/manifests/templates"
_K8S = "app.kubernetes.io"
LOCK = (ROOT / "requirements.lock").read_text()

PRETRAINING = """
name: my-run
corpus: {dir: corpora/x, sources: [{kind: books, path: "it's/*.txt", license: none}]}
phases: [{sequence_length: 128, global_sequences: 256, steps: 10, peak_learning_rate: 1e-3}]
scheduling: {workers: 16, cpus_per_worker: 6}
"""
FINETUNING = """
name: my-task
start_from: exported/bert
classification: {train: train.csv, dev: dev.csv, text_column: text, label_column: label}
scheduling: {workers: 4}
"""


def render(kind: str, config: Path | str, overrides: Sequence[str] = (), copy: Path | None = None) -> str:
    """The manifest of a run, as the command line makes it."""
    return render_manifest(kind, config_type(Path(config)), config, overrides, copy)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(PRETRAINING)
    return path


@pytest.fixture
def finetuning(config: Path) -> Path:
    path = config.with_name("task.yaml")
    path.write_text(FINETUNING)
    return path


def kuberay(config: Path, *overrides: str, copy: Path | None = None) -> dict[str, dict[str, Any]]:
    """The documents of a KubeRay manifest by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(render("kuberay", config, overrides, copy))}


# KubeRay


def pod_templates(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod template within a RayJob or RayCluster."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if key in ("template", "submitterPodTemplate"):
            yield item
        elif isinstance(item, dict | list):
            yield from pod_templates(item)


@functools.cache
def kuberay_schemas() -> dict[str, list[Any]]:
    """Checks of RayJob and RayCluster by the CRDs of KubeRay's tags v1.6.2 and v1.7.0, unknown fields refused.

    The file has `openAPIV3Schema` of ray-operator/config/crd/bases/ray.io_{rayjobs,rayclusters}.yaml in the
    repository ray-project/kuberay, version v1, without descriptions.
    """
    packed = (Path(__file__).parents[1] / "schemas" / "kuberay.json.xz").read_bytes()
    releases = json.loads(lzma.decompress(packed), object_hook=strict)
    assert list(releases) == ["v1.6.2", "v1.7.0"]
    kinds = ("RayJob", "RayCluster")
    return {kind: [jsonschema.Draft202012Validator(one[kind]) for one in releases.values()] for kind in kinds}


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A part of a CRD's schema, as the API server's strict validation takes it."""
    if schema.get("x-kubernetes-int-or-string"):
        schema = {"type": ["integer", "string"]}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        schema.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return schema


def check_kuberay(documents: dict[str, dict[str, Any]]) -> None:
    """Raise where the API server would refuse a document, or drop a field of it."""
    version = kubernetes_validate.latest_version()
    for kind, document in documents.items():
        if not kind.startswith("Ray"):
            kubernetes_validate.validate(document, version, strict=True)
            continue
        whole = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]}
        kubernetes_validate.validate(whole, version, strict=True)
        bare = {**document, "metadata": {}}
        for schema in kuberay_schemas()[kind]:
            schema.validate(bare)
        for template in pod_templates(document["spec"]):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "any"}, "template": template}
            if "containers" not in template["spec"]:
                raise AssertionError("a pod without containers")
            kubernetes_validate.validate(pod, version, strict=True)


CLUSTER = "RayJob/spec/rayClusterSpec"
GROUP = f"{CLUSTER}/workerGroupSpecs/0"
WORKER = f"{GROUP}/template/spec"
_SECURITY, _LIMITS = "spec/containers/0/securityContext", "spec/containers/0/resources/limits"
LIMITS = f"{GROUP}/template/{_LIMITS}"
SUSPEND, QUEUED = "RayJob/spec/suspend", {"RayJob/metadata/labels/kueue.x-k8s.io~queue-name": "training"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["scheduling.workers=12", "place.workers_per_node=4"],
            {
                "RayJob/metadata/name": "my-run",
                **dict.fromkeys([f"{GROUP}/replicas", f"{GROUP}/minReplicas", f"{GROUP}/maxReplicas"], 3),
                # 4 workers of 6, and the command
                LIMITS: {"cpu": "25", "memory": "128Gi", "nvidia.com/gpu": "4"},
                f"{CLUSTER}/headGroupSpec/rayStartParams/num-cpus": "0",
                f"{CLUSTER}/authOptions": {"mode": "token"},
                SUSPEND: False,
            },
        ),
        (["place.kind=RayCluster"], {"RayCluster/spec/suspend": False}),
        (["place.kind=RayCluster", "place.queue=training"], {"RayCluster/spec/suspend": True}),
        (["place.queue=training", "place.prepare=true"], {SUSPEND: True} | QUEUED),  # Kueue's
        (["place.gpus=false"], {f"{LIMITS}/nvidia.com~gpu": None, f"{WORKER}/tolerations": None}),
        # Kubernetes has its own form of a name.
        (["name=Mini_v1.2-"], {"RayJob/metadata/name": "mini-v1-2", "ConfigMap/metadata/name": "mini-v1-2-files"}),
        # A run that may shrink needs fewer pods, a small one a part of a node.
        (["scheduling.min_workers=9"], {f"{GROUP}/minReplicas": 2}),
        (["scheduling.min_workers=4"], {f"{GROUP}/minReplicas": 1}),
        (["scheduling.workers=2"], {f"{GROUP}/replicas": 1, f"{LIMITS}/nvidia.com~gpu": "2"}),
    ],
)
def test_kuberay_is_valid_and_follows_the_config(config: Path, overrides: list[str], expected: dict[str, Any]) -> None:
    documents = kuberay(config, *overrides)
    check_kuberay(documents)
    assert len(documents) == 3
    assert len(list(pod_templates(documents.get("RayJob", {"spec": {}})["spec"]))) in (0, 3)
    assert {path: get_at(documents, path) for path in expected} == expected


def get_at(document: Any, path: str) -> Any:
    """The value at a path of keys and positions, in which ~ stands for a / within a key; None if there is none."""
    for key in path.split("/"):
        document = document[int(key)] if isinstance(document, list) else document.get(key.replace("~", "/"))
    return document


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("RayJob/spec/shutdownAfterJobFinish", True),
        (f"{CLUSTER}/authOptions/mode", "tokens"),
        (f"{CLUSTER}/headGroupSpec/rayStartParams/num-cpus", 0),
        (f"{WORKER}/toleration", []),
        (f"{WORKER}/containers/0/lifecycle/preStop/exe", {}),
        ("RayJob/spec/submitterPodTemplate/spec/imagePullSecrets", ["registry"]),
        ("NetworkPolicy/spec/policyType", ["Ingress"]),
        ("ConfigMap/data/number", 1),
    ],
)
def test_a_wrong_field_fails(config: Path, path: str, value: Any) -> None:
    documents = copy.deepcopy(kuberay(config))
    place, _, last = path.rpartition("/")
    get_at(documents, place)[last] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_kuberay(documents)


# Where lines of YAML are inserted: before which line of the template, at what depth, to be found where.
HEAD_AND_WORKERS = [f"{CLUSTER}/headGroupSpec/template/spec", WORKER]
PODS = [*HEAD_AND_WORKERS, "RayJob/spec/submitterPodTemplate/spec"]
SPOTS: dict[str, tuple[str, int, list[str]]] = {
    "pod": ("automountServiceAccountToken: false", 0, PODS),
    "worker": ('  {{ "tolerations:', 2, [WORKER]),
    "head": ("  {% if not head %}", 2, PODS[:1]),
    "submitter": ("      restartPolicy: Never", 6, PODS[2:]),
    "container": ("    image: {{ place.image | tojson }}\n    working", 4, [f"{one}/containers/0" for one in PODS[:2]]),
    "env": ("    - {name: WANDB_API_KEY", 4, [f"{one}/containers/0/env" for one in HEAD_AND_WORKERS]),
    "mounts": ("    - {name: storage, mountPath", 4, [f"{one}/containers/0/volumeMounts" for one in HEAD_AND_WORKERS]),
    "volumes": ("  - {name: storage, persistent", 2, [f"{one}/volumes" for one in HEAD_AND_WORKERS]),
    "containers": ("  volumes:", 2, [f"{one}/containers" for one in HEAD_AND_WORKERS]),
    "resources": ("        memory: {{", 8, [LIMITS, LIMITS.replace("limits", "requests")]),
}
_CLAIM = "{accessModes: [ReadWriteOnce], storageClassName: nvme, resources: {requests: {storage: 1Ti}}}"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_AWAY = "{labelSelector: {matchLabels: {team: other}}, topologyKey: kubernetes.io/hostname}"
INSERTED = [  # what sites need and no setting has
    ("scheduler", "pod", "schedulerName: volcano"),
    ("priority", "pod", "priorityClassName: high"),
    ("runtime class", "worker", "runtimeClassName: nvidia"),
    ("service account", "pod", "serviceAccountName: irsa"),
    ("pull secrets", "pod", "imagePullSecrets: [{name: registry}, {name: mirror}]"),
    ("envFrom", "container", "envFrom: [{secretRef: {name: keys}}, {configMapRef: {name: nccl}}]"),
    ("S3 keys", "env", "- {name: AWS_SECRET_ACCESS_KEY, valueFrom: {secretKeyRef: {name: s3, key: secret}}}"),
    ("NCCL", "env", "- {name: NCCL_IB_HCA, value: '1e3'}"),
    ("further volumes", "volumes", "- {name: data, nfs: {server: nas, path: /data, readOnly: true}}"),
    ("their mounts", "mounts", "- {name: data, mountPath: /data, readOnly: true}"),
    ("NVMe of the node", "volumes", "- {name: nvme, hostPath: {path: /mnt/nvme, type: Directory}}"),
    ("NVMe by a claim", "volumes", f"- {{name: nvme, ephemeral: {{volumeClaimTemplate: {{spec: {_CLAIM}}}}}}}"),
    ("nodes of workers", "worker", "nodeSelector: {nvidia.com/gpu.product: H100}"),
    ("nodes of the head", "head", "{{ 'nodeSelector: {pool: cpu}' if head }}"),
    ("nodes of the submitter", "submitter", "nodeSelector: {pool: cpu}"),
    (
        "affinity",
        "worker",
        f"affinity: {{podAntiAffinity: {{{_REQUIRED}: [{_AWAY}]}}}}",
    ),
    ("spread", "worker", "topologySpreadConstraints: [{maxSkew: 1, topologyKey: z, whenUnsatisfiable: DoNotSchedule}]"),
    ("RDMA", "resources", "rdma/ib: 1"),
    ("sidecar", "containers", "- {name: exporter, image: exporter:1, ports: [{containerPort: 9400}]}"),
    ("native sidecar", "pod", "initContainers: [{name: logs, image: fluent-bit, restartPolicy: Always}]"),
]
# Lines of the template, the beginning of one and what is put in its place; what the workers' pod then has, and where.
_LABEL, _TOKEN = '"app.kubernetes.io/instance": name', "automountServiceAccountToken: "
REPLACED = [
    ("tolerations", "[{key: nvidia", "[{key: a, operator: Exists}, {key: nvidia", "spec/tolerations/0/key", "a"),
    ("Volcano", _LABEL, f'{_LABEL}, "volcano.sh/queue-name": "q"', "metadata/labels/volcano.sh~queue-name", "q"),
    ("its group", '"annotations": {', '"annotations": {"volcano.sh/x": "g"', "metadata/annotations/volcano.sh~x", "g"),
    ("YuniKorn", _LABEL, f'{_LABEL}, "queue": name', "metadata/labels/queue", "my-run"),
    ("its token", f"{_TOKEN}false", f"{_TOKEN}true", "spec/automountServiceAccountToken", True),
    ("IPC_LOCK", '["ALL"]}', '["ALL"], "add": ["IPC_LOCK"]}', f"{_SECURITY}/capabilities/add", ["IPC_LOCK"]),
    ("MIG", "nvidia.com/gpu: {{", "nvidia.com/mig-3g.40gb: {{", f"{_LIMITS}/nvidia.com~mig-3g.40gb", "8"),
    ("AMD", "nvidia.com/gpu: {{", "amd.com/gpu: {{", f"{_LIMITS}/amd.com~gpu", "8"),
    ("user", "runAsUser: 1000", "runAsUser: 2000", "spec/securityContext/runAsUser", 2000),
    ("groups", "fsGroup: 1000", "fsGroup: 7, supplementalGroups: [8]", "spec/securityContext/supplementalGroups", [8]),
]


def edited(folder: Path, kind: str, before: str, after: str) -> Path:
    """A copy of the template of a kind, with a text that occurs once replaced."""
    text, copy = (TEMPLATES / KIND_SETTINGS[kind][1]).read_text(), folder / "my.j2"
    assert text.count(before) == 1
    copy.write_text(text.replace(before, after))
    return copy


@pytest.mark.parametrize("wish", INSERTED, ids=lambda wish: wish[0])
def test_a_copy_of_the_template_has_further_lines(config: Path, tmp_path: Path, wish: tuple[str, str, str]) -> None:
    _, spot, lines = wish
    before, depth, places = SPOTS[spot]
    copy = edited(tmp_path, "kuberay", before, f"{' ' * depth}{lines}\n{before}")
    check_kuberay(documents := kuberay(config, copy=copy))
    wanted = yaml.safe_load(lines.removeprefix("{{ '").removesuffix("' if head }}"))
    for place in places:
        found = get_at(documents, place)
        assert found.items() >= wanted.items() if isinstance(wanted, dict) else wanted[0] in found


@pytest.mark.parametrize("wish", REPLACED, ids=lambda wish: wish[0])
def test_a_copy_of_the_template_has_other_values(config: Path, tmp_path: Path, wish: tuple[Any, ...]) -> None:
    _, before, after, path, value = wish
    check_kuberay(documents := kuberay(config, copy=edited(tmp_path, "kuberay", before, after)))
    assert get_at(documents, f"{GROUP}/template/{path}") == value


def test_the_config_map_holds_the_run(config: Path, finetuning: Path) -> None:
    """What the pods read is the run of the config, with nothing of the place in it."""
    written = config.with_name("written.yaml")
    data = kuberay(config, "phases.0.steps=7", "name=Mini_v1.2-")["ConfigMap"]["data"]
    written.write_text(data["config.yaml"])
    assert load_config(written) == load_config(config, ["phases.0.steps=7", "name=Mini_v1.2-"])
    assert "runs/Mini_v1.2-/stop" in data["stop.sh"]
    data = kuberay(finetuning)["ConfigMap"]["data"]
    assert "python -m finetune.cli finetune" in data["start.sh"]
    written.write_text(data["config.yaml"])
    assert load_finetuning(written) == load_finetuning(finetuning, ["scheduling.cpus_per_worker=8"])


def test_the_heads_state_and_the_version_of_ray(config: Path) -> None:
    cluster = kuberay(config)["RayJob"]["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {one["name"]: one.get("value") for one in head["env"]}["RAY_gcs_storage"] == "rocksdb"
    assert f"ray=={cluster['rayVersion']}\n" in LOCK


def test_pods_are_contained(config: Path) -> None:
    """What the restricted profile of Kubernetes asks for, and time for a checkpoint."""
    documents = kuberay(config, "place.grace_seconds=120")
    for template in pod_templates(documents["RayJob"]["spec"]):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        container = pod["containers"][0]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        if container["name"] != "ray-job-submitter":
            assert pod["terminationGracePeriodSeconds"] > 120
        # The policy selects every pod of the run by the label that it also lets in.
        policy = documents["NetworkPolicy"]["spec"]
        assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert policy["ingress"][0]["from"] == [{"podSelector": policy["podSelector"]}]
    # The labels of the operator, by Helm and by kustomize; decision 49 has the source.
    [wanted] = [one["podSelector"]["matchLabels"] for one in policy["ingress"][1]["from"]]
    for name in ("kuberay-operator", "kuberay"):
        assert wanted.items() <= {f"{_K8S}/name": name, f"{_K8S}/component": "kuberay-operator"}.items()
    worker = get_at(documents, f"{WORKER}/containers/0/env")
    assert {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "300"} in worker  # when KubeRay gives up


@pytest.mark.parametrize("command", [DRIVER, *RUN_COMMANDS])
def test_a_pod_finds_the_run_by_programs_that_exist(command: str) -> None:
    """A renamed module would go unnoticed until a pod ends without waiting for its checkpoint."""
    module, *_ = command.split()
    assert re.search(COMMAND_PATTERN, f"python -m {command}")
    assert not re.search(COMMAND_PATTERN, f"python -m {command.replace('.', '-')[1:]}")
    path = (ROOT / module.replace(".", "/")).with_suffix(".py")
    assert 'if __name__ == "__main__":' in path.read_text()


@pytest.mark.parametrize(
    ("title", "head", "drains"),
    [
        (f"{PROCESS_TITLE}.run", False, True),  # by the name that Ray gives it (test_cluster.py checks a real one)
        ("python -m finetune.cli finetune", False, False),
        (f"{PROCESS_TITLE}.run", True, False),
        (f"python -m {DRIVER}", True, False),
    ],
)
def test_stopping_a_pod_asks_for_a_checkpoint_and_waits(
    config: Path, tmp_path: Path, title: str, head: bool, drains: bool
) -> None:
    """A worker's node is drained first, which fails here. The command, or the head, has none that could go alone."""
    (tmp_path / "runs/my-run").mkdir(parents=True)
    documents = kuberay(config, f"place.storage={tmp_path}")
    data, process = documents["ConfigMap"]["data"], in_a_pod(tmp_path / "bin", title)
    program(tmp_path / "bin", "ray", f'echo "$@" >>{tmp_path}/calls\nexit 1\n')
    spec = documents["RayJob"]["spec"]["rayClusterSpec"]
    group = spec["headGroupSpec"] if head else spec["workerGroupSpecs"][0]
    variables = {one["name"]: one.get("value", "") for one in group["template"]["spec"]["containers"][0]["env"]}
    # The run's name is part of its pods' names.
    environment = with_programs(tmp_path / "bin", **variables, HOSTNAME="multi-head-run-x-1")
    hook = subprocess.Popen(["bash", "-c", data["stop.sh"]], env=environment)
    try:
        while not (tmp_path / "runs/my-run/stop").exists():
            assert hook.poll() is None
            time.sleep(0.02)
        with pytest.raises(subprocess.TimeoutExpired):
            hook.wait(0.5)
    finally:
        process.kill()
        process.wait()
    assert hook.wait(60) == 0
    assert (tmp_path / "calls").exists() == drains


def in_a_pod(programs: Path, title: str) -> subprocess.Popen[bytes]:
    """A process of this title, the only one that pgrep and pkill find; a pod has its own, here others may train."""
    process = subprocess.Popen(["bash", "-c", f"exec -a {shlex.quote(title)} sleep 60"], start_new_session=True)
    for name in ("pgrep", "pkill"):
        program(programs, name, f'exec {shutil.which(name)} -s {process.pid} "$@"\n')
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(title.encode()):
        time.sleep(0.01)
    return process


def test_the_head_of_a_cluster_stops_the_jobs_that_it_runs(config: Path, tmp_path: Path) -> None:
    """Their runs have other names than the manifest's; the shell of Ray above a launcher must outlive it."""
    data = kuberay(config, f"place.storage={tmp_path}", "place.kind=RayCluster")["ConfigMap"]["data"]
    process = in_a_pod(tmp_path / "bin", f"/opt/bin/python3.12 /opt/bin/{JOB_COMMAND}")
    hook = ["bash", "-c", data["stop.sh"]]
    environment = with_programs(tmp_path / "bin", BERTRAIN_HEAD="1")
    try:
        threading.Thread(target=process.wait).start()  # a pod's first process reaps it, too
        assert subprocess.run(hook, env=environment, timeout=30).returncode == 0
    finally:
        process.kill()
    assert process.wait() == -signal.SIGTERM
    shell = in_a_pod(tmp_path / "bin", f"/bin/sh -c {JOB_COMMAND}")
    try:
        assert subprocess.run(hook, env=environment, timeout=30).returncode == 0
        assert shell.poll() is None
    finally:
        shell.kill()
        shell.wait()


@pytest.mark.parametrize(
    ("least", "ray", "workers", "stops"),
    [
        # The node is drained, which the run answers by itself, of fixed size or not; a drain that fails stops the run.
        (0, "exit 0", True, False),
        (8, "exit 0", True, False),
        (0, "exit 1", True, True),
        (8, "exit 1", True, True),
        # The control store is gone: `ray drain-node` waits for minutes, and the hook gives it seconds.
        (8, "exec sleep 600", True, True),
        # Nothing of the run is here. It may have started again elsewhere, and would take the request for its own.
        (0, "exit 1", False, False),
    ],
)
def test_a_run_continues_without_a_pod(
    config: Path, tmp_path: Path, least: int, ray: str, workers: bool, stops: bool
) -> None:
    (tmp_path / "runs/my-run").mkdir(parents=True)
    data = kuberay(config, f"place.storage={tmp_path}", f"scheduling.min_workers={least}")["ConfigMap"]["data"]
    programs, limit = tmp_path / "bin", "0.2" if "sleep" in ray else "20"
    program(programs, "ray", f'echo "$@" >>{tmp_path}/calls\n{ray}\n')
    program(programs, "timeout", f'echo "$@" >>{tmp_path}/calls\nexec {shutil.which("timeout")} {limit} "${{@:3}}"\n')
    # Workers, until the first search; the command is not in this pod.
    seen = tmp_path / "seen"
    found = f'[[ "$*" != *ray::* || -e {seen} ]] && exit 1\ntouch {seen}\n'
    program(programs, "pgrep", found if workers else "exit 1\n")
    assert subprocess.run(["bash", "-c", data["stop.sh"]], env=with_programs(programs), timeout=30).returncode == 0
    assert (tmp_path / "runs/my-run/stop").exists() == stops
    if workers:
        assert (tmp_path / "calls").read_text().startswith("--kill-after=5 20 ray drain-node ")


def test_a_run_at_an_address_trains_in_storage_that_all_nodes_share(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is asked for a checkpoint there, not in the cache of the machine that wrote the manifest."""
    monkeypatch.setenv("BERTRAIN_CACHE", "/my/cache")
    monkeypatch.setenv("BERTRAIN_RUNS", "/my/runs")
    address = "run_dir=s3://bucket/runs/my-run"
    folder = "stored-runs/s3/bucket/runs/my-run"
    assert "/my/" not in "".join(render(kind, config, [address]) for kind in KINDS)

    documents = kuberay(config, address)
    assert f"touch -- /shared/{folder}/stop" in documents["ConfigMap"]["data"]["stop.sh"]
    pods = [pod for pod in pod_templates(documents["RayJob"]["spec"]) if "env" in pod["spec"]["containers"][0]]
    assert len(pods) == 2
    for pod in pods:
        variables = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
        monkeypatch.setenv("BERTRAIN_RUNS", variables["BERTRAIN_RUNS"])
        assert load_config(config, [address]).folder == Path("/shared", folder)

    script = render("slurm", config, [address])
    assert f"run={folder}\n" in script
    assert 'export BERTRAIN_RUNS="$PWD/stored-runs"\n' in script


# SLURM and all scripts


def check_script(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, "-"], input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("overrides", [[], ["place.prepare=true", "place.gpus=false"], ["run_dir=two words"]])
def test_scripts_are_clean(config: Path, overrides: list[str]) -> None:
    data = kuberay(config, *overrides)["ConfigMap"]["data"]
    elastic = kuberay(config, *overrides, "scheduling.min_workers=8")["ConfigMap"]["data"]
    for text in (render("slurm", config, overrides), data["start.sh"], data["stop.sh"], elastic["stop.sh"]):
        check_script(text)


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["place.constraint='h100|a100'"], ["#SBATCH --constraint='h100|a100'"]),
        (["place.constraint='[rack1|rack2]'"], ["#SBATCH --constraint='[rack1|rack2]'"]),
        (["place.constraint='(h100&nvme)*2'"], ["#SBATCH --constraint='(h100&nvme)*2'"]),
        (["place.constraint=h100"], ["#SBATCH --constraint=h100"]),
        (["place.time_limit=40"], ["#SBATCH --time=40"]),  # minutes
        # An elastic run takes as many nodes as it gets.
        (["scheduling.min_workers=1", "scheduling.workers=2", "place.workers_per_node=1"], ["#SBATCH --nodes=1-2"]),
        (["place.srun_options=[--mpi=pmix]"], ["    --kill-on-bad-exit=1 --mpi=pmix \\"]),
        (['place.environment="module load cuda\\nsource x\\n"'], ["module load cuda", "source x"]),
    ],
)
def test_slurm_follows_the_config(config: Path, overrides: list[str], lines: list[str]) -> None:
    assert set(lines) <= set(render("slurm", config, overrides).splitlines())


def test_slurm_gets_what_a_run_needs(config: Path) -> None:
    script = render("slurm", config, ["place.partition=gpu", "place.time_limit=2-00:00:00", "place.workers_per_node=4"])
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, re.MULTILINE))
    wanted = {"job-name": "my-run", "nodes": "4", "gpus-per-node": "4", "cpus-per-task": "24", "partition": "gpu"}
    assert options.items() >= {**wanted, "time": "2-00:00:00", "signal": "B:USR1@300"}.items()
    assert "account" not in options
    assert 'slurm_node "$address" 24 4 ' in script


@pytest.mark.parametrize("prepare", ["false", "true"])
def test_slurms_shells_outlive_a_signal(config: Path, tmp_path: Path, prepare: str) -> None:
    """scancel sends SIGTERM to every process of the job; the run saves, and its exit code is kept."""
    script = render("slurm", config, [f"place.prepare={prepare}"])
    command = re.search(r"^    bash -c '(.+)' \\$", script, re.MULTILINE)
    assert command
    fake, ready = tmp_path / "python", tmp_path / "ready"
    saves = f"trap 'sleep 0.5; exit 75' TERM; touch {ready}; while :; do sleep 0.1; done"
    fake.write_text(f"#!/bin/bash\n[[ $3 == prepare ]] || {{ {saves}; }}\n")
    fake.chmod(0o755)
    words = [tmp_path / "code", "config.yaml", "address", tmp_path / "preparing"]
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(["bash", "-c", command[1], *words], env=path, start_new_session=True) as shell:
        wait_for(ready.exists)
        os.killpg(shell.pid, signal.SIGTERM)
    assert (tmp_path / "code").read_text() == "75\n"


@pytest.mark.skipif(
    not shutil.which("sbatch") or subprocess.run(["scontrol", "ping"], capture_output=True).returncode != 0,
    reason="no SLURM here",
)
def test_slurm_accepts_it(config: Path, tmp_path: Path) -> None:
    overrides = ["scheduling.workers=1", "scheduling.cpus_per_worker=1", "place.gpus=false"]
    (tmp_path / "job.sh").write_text(render("slurm", config, overrides))
    tried = subprocess.run(["sbatch", "--test-only", tmp_path / "job.sh"], capture_output=True, text=True)
    assert tried.returncode == 0, tried.stderr


def program(folder: Path, name: str, lines: str) -> None:
    """A stand-in for a program of that name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{lines}")
    (folder / name).chmod(0o755)


def with_programs(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **more}


@pytest.fixture
def slurm_job(config: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts the script as SLURM would, `lines` being the run; what was called comes into tmp_path/calls."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    place = [f"place.storage={tmp_path}", "place.environment=cd .", "place.grace_seconds=30", "place.prepare=true"]
    (tmp_path / "job.sh").write_text(render("slurm", config, place))
    program(folder, "srun", 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    for name in ("scontrol", "scancel"):
        program(folder, name, f'echo {name} "$@" >>{calls}\n')

    def start(lines: str, node: str = 'exec "${@:6}"\n', preparing: str = "true", **variables: str) -> Any:
        rest = f"[[ $2 != cluster.* ]] || {{ {node} }}\n[[ $3 != prepare ]] || {{ {preparing}; exit; }}\n{lines}"
        program(folder, "python", f'echo "$@" >>{calls}\n{rest}')
        variables = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "24", **variables}
        environment = with_programs(folder, **variables)
        return subprocess.Popen(["bash", tmp_path / "job.sh"], env=environment, stderr=subprocess.PIPE, text=True)

    return start


def test_slurm_runs_and_returns_the_exit_code(slurm_job: Any, tmp_path: Path) -> None:
    token = "cp -p $RAY_AUTH_TOKEN_PATH seen\necho $SRUN_CPUS_PER_TASK >cpus\n"
    assert slurm_job(f"{token}exit 4\n").wait(20) == 4
    calls = (tmp_path / "calls").read_text()
    assert re.search(r"^-m cluster.jobs.slurm_node [\d.]+:24711 48 8 bash ", calls)
    assert re.search(
        r"-m finetune.cli pretrain \S+/.slurm/4711/config.yaml --set scheduling.address=[\d.]+:24711 --resume\n", calls
    )
    assert "scontrol" not in calls
    assert (tmp_path / "cpus").read_text() == "24\n"  # which srun no longer takes from sbatch
    assert (tmp_path / "seen").stat().st_mode & 0o777 == 0o600
    assert re.fullmatch("[0-9a-f]{64}", (tmp_path / "seen").read_text())
    assert not list((tmp_path / ".slurm").iterdir())
    assert not (tmp_path / "runs").exists()  # the run is its own: this job did not get it


def test_a_task_of_a_slurm_array_is_a_run_of_its_own(slurm_job: Any, tmp_path: Path) -> None:
    """SLURM_JOB_ID of the last task is that of the array, with which scontrol would requeue all tasks."""
    ids = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}
    job = slurm_job("touch begun\nuntil [[ -e $BERTRAIN_JOB/stop ]]; do sleep 0.05; done\nexit 75\n", **ids)
    until_it_has_begun(job, tmp_path)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 75
    calls = (tmp_path / "calls").read_text()
    assert "--resume --set name=my-run-3 --set seed=3\n" in calls
    assert "scontrol requeue 4711_3\n" in calls


def until_it_has_begun(job: Any, folder: Path) -> None:
    while not (folder / "begun").exists():
        assert job.poll() is None
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("asked", "code", "called"),
    [
        ("USR1", 75, ["scontrol requeue 4711"]),  # SLURM's warning before the time limit
        ("USR1", 130, ["scontrol requeue 4711"]),  # before the first step
        ("stop", 75, ["scancel 4711"]),  # else SLURM would say FAILED
        ("", 75, ["scontrol requeue 4711"]),  # the cluster was too small
        ("TERM", 75, []),  # scancel
        ("USR1 TERM", 75, []),
    ],
)
def test_slurm_queues_itself_again_unless_it_was_stopped(
    slurm_job: Any, tmp_path: Path, asked: str, code: int, called: list[str]
) -> None:
    wait = f"touch begun\nuntil [[ -e $BERTRAIN_JOB/stop || -e go ]]; do sleep 0.05; done\nsleep 0.5\nexit {code}\n"
    job = slurm_job(wait)
    until_it_has_begun(job, tmp_path)
    if asked == "stop":
        (tmp_path / "runs/my-run").mkdir(parents=True)
        (tmp_path / "runs/my-run/stop").touch()
    if asked in ("stop", ""):
        (tmp_path / "go").touch()
    else:
        for name in asked.split():
            job.send_signal(signal.Signals[f"SIG{name}"])
            time.sleep(0.1)
    assert job.wait(60) == code
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [line for line in calls if line.startswith("sc")] == called


def test_slurm_gives_up_when_starts_save_nothing(slurm_job: Any, tmp_path: Path) -> None:
    """A new checkpoint begins the count again."""
    codes = []
    for step in (0, 0, 1, 1, 1, 1):
        (tmp_path / f"runs/my-run/checkpoints/step-{step:08d}").mkdir(parents=True, exist_ok=True)
        codes.append(slurm_job("exit 75\n").wait(60))
    assert codes == [75, 75, 75, 75, 3, 75]
    (tmp_path / "runs/my-run/stop").touch()  # while the job waits
    assert slurm_job("exit 130\n").wait(60) == 130
    assert (tmp_path / "calls").read_text().endswith("scancel 4711\n")


def test_slurm_does_not_call_a_canceled_run_one_that_did_not_start(slurm_job: Any, tmp_path: Path) -> None:
    """SLURM ends Ray together with the run, which leaves no exit code."""
    job = slurm_job("", node="touch begun; until [[ -e calls-end ]]; do sleep 0.05; done; exit 143;")
    until_it_has_begun(job, tmp_path)
    job.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    (tmp_path / "calls-end").touch()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 143
    assert "did not start" not in errors


def test_slurm_gives_back_a_job_that_prepares(slurm_job: Any, tmp_path: Path) -> None:
    """There is no checkpoint to ask for, and a file `stop` would end the run when the job comes back."""
    job = slurm_job("exit 0\n", preparing="touch begun; until [[ -e calls-end ]]; do sleep 0.05; done")
    until_it_has_begun(job, tmp_path)
    job.send_signal(signal.SIGUSR1)
    while "scontrol requeue 4711" not in (tmp_path / "calls").read_text():
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)  # by which SLURM takes it back
    time.sleep(0.1)
    assert not (tmp_path / ".slurm/4711/stop").exists()
    (tmp_path / "calls-end").touch()
    assert job.wait(60) == 0
    assert not list((tmp_path / ".slurm").iterdir())


def test_slurm_finds_the_heads_address_without_a_resolver(slurm_job: Any, tmp_path: Path) -> None:
    """The name of a node may be neither in DNS nor in /etc/hosts."""
    program(tmp_path / "bin", "getent", "exit 2\n")
    program(tmp_path / "bin", "hostname", '[[ ${1:-} != -I ]] && echo node || echo "10.0.0.7 10.1.0.7"\n')
    assert slurm_job("exit 0\n").wait(20) == 0
    assert "cluster.jobs.slurm_node 10.0.0.7:24711 " in (tmp_path / "calls").read_text()
    # A job whose Ray did not start is requeued.
    assert slurm_job("exit 0\n", node="exit 3;").wait(20) == 3
    assert "scontrol requeue 4711" in (tmp_path / "calls").read_text()


# All kinds


@pytest.mark.parametrize("kind", KINDS)
def test_the_commands_are_ours(config: Path, finetuning: Path, kind: str) -> None:
    """Every command line in a manifest is one that its parser takes, and resumes."""
    parser, _ = build_parsers()
    for path, count in ((config, 2), (finetuning, 1)):
        given = ["place.prepare=true"] if path == config else []
        lines = re.findall(r"python -m finetune.cli ((?:pre|fine)[^&)\n]*)", render(kind, path, given))
        assert len(lines) == count
        for line in lines:
            arguments = parser.parse_args(shlex.split(line.replace("'", "").replace('"${@:4}"', "")))
            assert arguments.set[0].startswith("scheduling.address=")
        assert arguments.resume


@pytest.mark.parametrize("kind", KINDS)
def test_no_secret_gets_into_a_manifest(config: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for name in ("WANDB_API_KEY", "RAY_AUTH_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, "canary-5f1e")
    text = render(kind, config)
    assert "canary-5f1e" not in text
    assert "kind: Secret" not in text
    for document in yaml.safe_load_all(text) if kind == "kuberay" else []:
        for template in pod_templates(document.get("spec", {})):
            for variable in template["spec"]["containers"][0].get("env", []):
                assert ("value" in variable) != bool(re.search("KEY|TOKEN|PASSWORD", variable["name"]))


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*/*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_have_manifests(path: Path) -> None:
    assert tuple(KIND_SETTINGS) == KINDS  # listed twice, so that --help imports nothing
    start = ["start_from=/shared/bert"] if path.parent.name == "finetune" else []
    for kind in KINDS:
        assert render(kind, path, start)


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["cluster", "manifest", *map(str, arguments)])
    return main()


@pytest.mark.parametrize(
    ("kind", "overrides", "error"),
    [
        ("kuberay", ["place.imag=x"], "place.imag is not a known setting; did you mean image?"),
        ("kuberay", ["name=9lives"], "name: '9lives' must start with a letter"),
        ("kuberay", ["scheduling.workers=9"], "multiple of place.workers_per_node (8)"),
        ("kuberay", ["phases.0.step=1"], "phases.0.step is not a known setting; did you mean"),
        ("kuberay", ["place.storage=shared"], "place.storage is 'shared'; expected text matching the pattern '^/"),
        ("kuberay", ["place.image=x --privileged"], "place.image is 'x --privileged'; expected text"),
        ("slurm", ["place.storage=s3://bucket/run"], "place.storage: 's3://bucket/run' is a remote address"),
        ("slurm", ['place.storage="a\\nb"'], "place.storage is 'a\\nb', which contains control characters (\\n)"),
        ("slurm", ['run_dir="a\\ntouch canary"'], "run_dir is 'a\\ntouch canary', which contains control characters"),
        ("slurm", ["place.time_limit=4.5"], "place.time_limit is 4.5; expected text"),
        ("slurm", ["place.time_limit=6"], "place: time_limit (6) is less than 420 s: grace_seconds (300) to save, and"),
        ("slurm", ["place.partition=a b"], "place.partition is 'a b'; expected text matching the pattern"),
        ("slurm", ["place.constraint=a;b"], "place.constraint is 'a;b'; expected text matching the pattern"),
        ("kuberay", ["place.queue=Me"], "place.queue is 'Me'; expected text matching the pattern"),
    ],
)
def test_bad_input_is_one_line(config: Path, monkeypatch, capsys, kind: str, overrides: list[str], error: str) -> None:
    code = run_command(monkeypatch, kind, config, *[word for one in overrides for word in ("--set", one)])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert error in captured.err
    assert captured.err.count("\n") == 1


def test_a_finetuning_needs_its_checkpoint(finetuning: Path) -> None:
    with pytest.raises(InputError, match="start_from is empty"):
        render("slurm", finetuning, ["start_from="])
    with pytest.raises(InputError, match="only pretraining prepares a corpus"):
        render("slurm", finetuning, ["place.prepare=true"])


def test_out_writes_what_would_be_printed(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "slurm", config) == 0
    assert run_command(monkeypatch, "slurm", config, "--out", tmp_path / "job.sh") == 0
    assert (tmp_path / "job.sh").read_text() == capsys.readouterr().out
    before = config.read_text()
    assert run_command(monkeypatch, "slurm", config, "--out", config) == 2
    assert "is also an input" in capsys.readouterr().err
    assert config.read_text() == before


def test_the_container_file_takes_its_versions_from_the_lock() -> None:
    text = (ROOT / "cluster/manifests/Containerfile").read_text()
    installs = re.findall(r"pip install .*", text)
    assert installs
    assert all("--constraint requirements.lock" in line for line in installs)
    assert not re.search(r"\w==\d", text)
    assert re.search(r"^ARG BASE=python:3\.1[0-3]-", text, re.MULTILINE)  # requires-python
    assert "--uid 1000" in text  # runAsUser of the pods


# Hostile values

_CANARY = "CANARY"  # stands for the path of a file that must not come into being
HOSTILE = [
    f"x\ntouch {_CANARY}\n",
    f"x\r\ntouch {_CANARY}",
    f"x\u2028touch {_CANARY}\x85touch {_CANARY}",
    f"x\nCONFIG\ntouch {_CANARY}\n",
    f"x; touch {_CANARY} #",
    f"x & touch {_CANARY} | touch {_CANARY}",
    f"$(touch {_CANARY})",
    f"`touch {_CANARY}`",
    f"'; touch {_CANARY}; '",
    f"'$(touch {_CANARY})'",
    f'"; touch {_CANARY}; "',
    f"\\'; touch {_CANARY} \\",
    f'x\' $(touch {_CANARY}) "$(touch {_CANARY})"',
    f"${{x:=$(touch {_CANARY})}}",
    f"x\n#SBATCH --wrap='touch {_CANARY}'\ntouch {_CANARY}",
    f"-rf $(touch {_CANARY})",
    f"--privileged --volume=/:/host $(touch {_CANARY})",
    f"!!python/object/apply:os.system ['touch {_CANARY}']",
    f"{{a: *b}} # - &b {_CANARY}",
    "\x1b]0;x\x07 %s %n * ? [a] ~ {a,b}",
    f"{{{{ 7 * 7 }}}} {{% raw %}} {{# {_CANARY} #}} {{{{ place.image }}}}",
    f"x{{% endfilter %}}{{% set command = '$(touch {_CANARY})' %}}",
    f"---\nkind: Secret\ndata: {{a: {_CANARY}}}\n...\n",
    f"x\n    command: [touch, {_CANARY}]\n",
    f"x #\ttouch {_CANARY}",
    f"\ufeff&a *a ? [{_CANARY}",
    f"%TAG ! tag:x\n|2\n >- {_CANARY}",
    f"😀\u200b\u202e{_CANARY}\ud7ff\x7f",
    "1e3",
    "~",
    " \n",
    f"\\u0022 \\x22, a: {_CANARY}\\",
]
# Executed as it stands, and so described.
SHELL_LINES = {"environment"}


def accepted(settings: type[ManifestSettings], value: str, folder: Path) -> Any:
    """Settings in which every text that passes their own checks is hostile; a whole config has further checks."""
    given: dict[str, Any] = {}
    names = [name for name in settings.model_fields if name not in SHELL_LINES]
    for name in names:
        for wanted in (value, f"{folder}/{value}", (value,), {value: "x"}, {"x": value}, {"X": value}):
            with contextlib.suppress(ValidationError):
                given = settings.model_validate({**given, name: wanted}, strict=True).model_dump(include={*given, name})
    return settings.model_validate(given)


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in which the programs that a manifest calls only record their arguments in tmp_path/calls."""
    folder = tmp_path / "bin"
    record = f'printf "%s\\n" "$0 $*" >>{tmp_path}/calls\n'
    for name in ("docker", "sudo", "mount", "scontrol", "scancel", "ray"):
        program(folder, name, record)
    program(folder, "mountpoint", "exit 1\n")
    program(folder, "pgrep", "exit 1\n")
    program(folder, "srun", 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    node = f'[[ $2 != cluster.* ]] || {{ cp .slurm/1/config.yaml {tmp_path}; exec "${{@:6}}"; }}\n'
    program(folder, "python", record + node)
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "16"}
    return with_programs(folder, **slurm, HOSTNAME="run-workers-1", RAY_ADDRESS="127.0.0.1:1")


def scripts_of(kind: str, text: str) -> list[str]:
    """Every piece of shell in a manifest, as those who read it would run it."""
    if kind == "slurm":
        return [text]
    data = next(one for one in yaml.safe_load_all(text) if one["kind"] == "ConfigMap")["data"]
    return [data["start.sh"], data["stop.sh"]]


def values_with(value: str, canary: object, place: ManifestSettings) -> dict[str, Any]:
    """What a template gets; all texts that a config may choose are `value`."""
    config = f"a: {value!r}\nCONFIG\ntouch {canary}\nCONFIG_\n  touch {canary}\n"
    numbers = {"nodes": 2, "min_nodes": 1, "workers_per_node": 8, "gpus_per_node": 8, "cpus_per_node": 16}
    texts = {"name": "my-run", "folder": value, "run_dir": value, "command": "pretrain", "ray_version": "2"}
    processes = {"command_processes": COMMAND_PATTERN, "run_processes": COMMAND_PATTERN}
    return {**numbers, **texts, **processes, "config": config, "place": {**place.model_dump(), "prepare": True}}


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("kind", KINDS)
def test_no_value_is_executed(kind: str, value: str, tmp_path: Path, stand_ins: dict[str, str]) -> None:
    """Whatever a text contains, the scripts of a manifest parse, run, and execute nothing of it."""
    canary, work = tmp_path / "canary", tmp_path / "work"
    value = value.replace(_CANARY, str(canary))
    settings = accepted(KIND_SETTINGS[kind][0], value, work)
    if kind == "slurm":
        settings = settings.model_copy(update={"environment": "cd ."})
    if not settings.storage.startswith(str(tmp_path)):
        settings = settings.model_copy(update={"storage": str(work)})
    for folder in (Path(settings.storage), work, tmp_path / "home"):
        folder.mkdir(parents=True, exist_ok=True)
    text = fill(kind, values := values_with(value, canary, settings))
    for script in scripts_of(kind, text):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        environment = {**stand_ins, "HOME": str(tmp_path / "home")}
        subprocess.run(["bash", "-c", script], env=environment, cwd=work, timeout=60, capture_output=True)
    assert not canary.exists()
    assert "-m finetune.cli pretrain " in (tmp_path / "calls").read_text()  # the script ran to its last line
    if kind == "slurm":
        assert (tmp_path / "config.yaml").read_text() == values["config"]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_no_value_is_yaml(value: str) -> None:
    """Also texts that would not pass their checks, as those of a copy of the template may have none."""

    def documents(text: str) -> list[Any]:
        place = KIND_SETTINGS["kuberay"][0]().model_dump()
        place = {key: text if isinstance(one, str) and key != "kind" else one for key, one in place.items()}
        values = {**values_with(text, "", KIND_SETTINGS["kuberay"][0]()), "place": place, "name": text, "config": text}
        found = list(yaml.safe_load_all(fill("kuberay", values)))
        assert found[0]["data"].pop("config.yaml") == text
        found[0].pop("data")  # scripts: see above
        return found

    plain = json.dumps(documents("MARK")).replace("MARK", json.dumps(value)[1:-1])
    assert documents(value) == json.loads(plain)


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_in_a_template_passes_a_filter(kind: str) -> None:
    """Blocks of the template's own lines are indented, and one setting is shell by its description."""
    text = re.sub(r"{#.*?#}", "", (TEMPLATES / KIND_SETTINGS[kind][1]).read_text(), flags=re.DOTALL)
    text = re.sub(r"{% filter comment %}.*?{% endfilter", "", text, flags=re.DOTALL)
    for expression in re.findall(r"{{ (.*?) }}", text):
        constant = re.fullmatch(r"""("[^"]*"|prepare)( if .*)?""", expression) or expression == "place.environment"
        script = r"sh" if kind == "slurm" else r"sh|tojson|block\(4\)|indent\(\d+\)"
        assert constant or re.search(rf"\| ({script}|heredoc\(.*\))$", expression), expression


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a\n{{ place.imag | tojson }}", "line 2: 'dict object' has no attribute 'imag'. "),
        ("a\n\n{{ nodez }}", "line 3: 'nodez' is undefined. "),
        ("{{ nodez | sh }}", "line 1: 'nodez' is undefined. "),
        ("a\n{% endif %}", "line 2: Encountered unknown tag 'endif'. "),
        ("a\n{{ nodes ", "line 2: unexpected end of template, expected 'end of print statement'. "),
        ("{{ nodes | json }}", "line 1: No filter named 'json'. "),
        ("{{ nodes + name }}", "line 1: unsupported operand type(s) for +: 'int' and 'str'. "),
        ("{{ ''.__class__.__mro__ }}", "line 1: access to attribute '__class__' of 'str' object is unsafe. "),
        ("{% include '/etc/passwd' %}", "line 1: no loader for this environment specified. "),
        ("", "No such file or directory. "),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_template_is_one_line(config, tmp_path, monkeypatch, capsys, kind: str, text: str, error: str) -> None:
    if text:
        (tmp_path / "my.j2").write_text(text)
    assert run_command(monkeypatch, kind, config, "--template", tmp_path / "my.j2") == 2
    own = TEMPLATES / KIND_SETTINGS[kind][1]
    expected = f"error: {tmp_path}/my.j2: {error}Correct it, or start with a copy of {own}.\n"
    assert capsys.readouterr() == ("", expected)
