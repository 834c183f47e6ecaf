"""SLURM: one sbatch script that starts Ray on the job's nodes with `ray symmetric-run` and requeues itself."""

import shlex
from typing import Any

from pydantic import Field, field_validator

from cluster.manifests.base import STORED_RUNS, ManifestJob, ManifestSettings
from cluster.manifests.text import as_comment, here_document
from pretrain.common.addresses import RUNS_VARIABLE
from pretrain.common.sections import SEVERAL_LINES, LocalPath
from pretrain.common.wording import counted

_WORD = r"^[A-Za-z0-9_.,:@/+-]*$"
_CONSTRAINT = r"^[A-Za-z0-9_.,:@/+&|*()\[\]-]*$"  # with sbatch's operators


class SlurmSettings(ManifestSettings):
    """Where and how a run is placed on SLURM."""

    partition: str = Field(default="", pattern=_WORD, description="Partition; empty uses SLURM's default.")
    account: str = Field(default="", pattern=_WORD, description="Account to charge; empty uses your default.")
    qos: str = Field(default="", pattern=_WORD, description="Quality of service; empty uses the default.")
    constraint: str = Field(
        default="",
        pattern=_CONSTRAINT,
        description="Features that the nodes must have, as for sbatch --constraint: h100, h100|a100 or [rack1|rack2].",
    )
    time_limit: str = Field(
        default="24:00:00",
        pattern=r"^(\d+-)?\d+(:\d\d){0,2}$",
        description="Time limit of one job, as for sbatch --time. Shortly before it ends, the run saves a checkpoint "
        "and is requeued.",
    )
    storage: LocalPath = Field(
        default=".",
        description="Folder that all nodes share; the run's working directory. A dot is the folder in which sbatch is "
        "called.",
    )
    environment: str = Field(
        default="source .venv/bin/activate",
        json_schema_extra=SEVERAL_LINES,
        description="Shell lines that put this project's python on the path. They are executed unchanged.",
    )

    @field_validator("time_limit", mode="before")
    @classmethod
    def _as_text(cls, minutes: Any) -> Any:
        """`time_limit=240` is a number in YAML, and a number of minutes for sbatch."""
        return str(minutes) if type(minutes) is int else minutes


def render(job: ManifestJob, settings: SlurmSettings) -> str:
    """The sbatch script, with the config in it."""
    return f"{_options(job, settings)}\n{_setup(job, settings)}\n{_start(job)}\n{_end()}"


def _options(job: ManifestJob, settings: SlurmSettings) -> str:
    options = {
        "job-name": job.name,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "nodes": job.nodes if job.min_nodes == job.nodes else f"{job.min_nodes}-{job.nodes}",
        "ntasks-per-node": 1,
        "cpus-per-task": job.workers_per_node * job.cpus_per_worker,
        "gpus-per-node": job.gpus_per_node or "",
        "mem": 0,
        "time": settings.time_limit,
        "signal": f"B:USR1@{settings.grace_seconds}",
        "output": f"{job.name}-%j.log",
        "open-mode": "append",
    }
    # sbatch removes quotes as a shell does.
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in options.items() if value != ""]
    gpus = f" with {counted(job.gpus_per_node, 'GPU')}" if job.gpus else ""
    stop = shlex.quote(f"{job.folder}/stop")
    about = f"""{job.name} on {counted(job.nodes, "node")}{gpus}. Submit with sbatch FILE.
To save and stop for good, touch {stop}; scancel ends the run at once.
Whole nodes: `ray symmetric-run` ends with `ray stop`, which ends every Ray of this user on them."""
    return f"""#!/bin/bash
{as_comment(about)}
#SBATCH --exclusive
#SBATCH --requeue
{chr(10).join(lines)}
set -euo pipefail
"""


def _setup(job: ManifestJob, settings: SlurmSettings) -> str:
    return f"""cd -- {shlex.quote(settings.storage)}
# shellcheck disable=SC1091
{settings.environment}
export {RUNS_VARIABLE}="$PWD/{STORED_RUNS}"
run={shlex.quote(f"./{job.folder}" if job.folder.startswith("-") else job.folder)}
mkdir -p "$run"
rm -f "$run/exit-code" "$run/preparing"
{here_document('cat >"$run/submitted.yaml"', job.config)}

# A token for this start alone; whoever has it may run code on these nodes.
make_token='import secrets; print(secrets.token_hex(32), end="")'
(umask 077 && rm -f "$run/ray-token" && python -c "$make_token" >"$run/ray-token")
RAY_AUTH_TOKEN_PATH=$(realpath "$run/ray-token")
export RAY_AUTH_TOKEN_PATH RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONSAFEPATH=1
# Since 22.05 srun does not inherit this from sbatch, and Ray's processes would share a core.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export RAY_TMPDIR=/tmp/ray-$SLURM_JOB_ID RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300

# This script runs on the first node, which becomes the head. Some machines know their own name as 127.0.1.1.
head=$({{ getent ahostsv4 "$(hostname)" || true; }} | awk '$1 !~ /^127\\./ {{ print $1; exit }}')
[[ -n $head ]] || head=$(hostname -I | awk '{{ print $1 }}')
address=$head:$((20000 + SLURM_JOB_ID % 10000))
"""


def _start(job: ManifestJob) -> str:
    *before, last = job.commands('"$1"', '"$2"')
    commands = " && ".join(['touch "$3"', *before, 'rm "$3"', last] if before else [last])
    gpus = f" --num-gpus={job.gpus_per_node}" if job.gpus else " --num-gpus=0"
    cpus = job.workers_per_node * job.cpus_per_worker
    return f"""# USR1: SLURM's warning of the time limit, to this script alone. The file `stop` asks for a checkpoint.
# Preparing a corpus has nothing to save: the next start continues after the last finished part.
warned='' ended='' interrupted=''
# shellcheck disable=SC2317
warn() {{
    warned=1 interrupted=1
    if [[ -e $run/preparing ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        touch "$run/stop"
    fi
}}
# TERM comes from scancel, preemption and requeueing. Who sent it decides what becomes of the job.
# shellcheck disable=SC2317
end() {{
    ended=1 interrupted=1
    [[ -e $run/preparing ]] || touch "$run/stop"
}}
trap warn USR1
trap end TERM

# The run's own exit code goes through a file: srun reports the highest of all nodes, and the others exit with Ray.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=0 --wait=60 ray symmetric-run --address "$address" \\
    --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus={cpus}{gpus} -- \\
    bash -c 'code=0; ({commands}) || code=$?; echo "$code" >"$0"; exit "$code"' \\
    "$run/exit-code" "$run/submitted.yaml" "$address" "$run/preparing" &
"""


def _end() -> str:
    return """code=0
while :; do
    interrupted='' code=0
    wait $! || code=$?
    [[ -n $interrupted ]] || break # else the signal ended `wait`, not the run
done
if [[ -s $run/exit-code ]]; then
    code=$(<"$run/exit-code")
elif [[ -z $ended ]]; then # `ray symmetric-run` exits with 0 if Ray did not start
    echo "error: the run did not start, or was killed; see the messages of srun and Ray above." >&2
    ((code != 0)) || code=3
fi
rm -f "$run/ray-token"
srun rm -rf "$RAY_TMPDIR" || rm -rf "$RAY_TMPDIR" # srun starts nothing in a job that is canceled

# 75: stopped with everything saved; 130: before there was a step to save. After a warning the job continues later.
# Stopped by hand, it is canceled: an exit code would make it FAILED, or start jobs that depend on its success.
if [[ ($code == 75 || $code == 130) && -z $ended ]]; then
    trap '' TERM
    if [[ -n $warned ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        scancel "$SLURM_JOB_ID"
    fi
fi
exit "$code"
"""
