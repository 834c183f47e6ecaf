"""SLURM: one sbatch script that starts Ray on the job's nodes (cluster/jobs/slurm_node.py) and requeues itself."""

import shlex
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from cluster.manifests.base import STORED_RUNS, ManifestJob, ManifestSettings
from cluster.manifests.text import as_comment, here_document
from pretrain.common.addresses import RUNS_VARIABLE
from pretrain.common.sections import SEVERAL_LINES, LocalPath
from pretrain.common.wording import counted
from pretrain.common.worker import JOB_VARIABLE

_WORD = r"^[A-Za-z0-9_.,:@/+-]*$"
_START_SECONDS = 120  # for Ray, torch and a minute by which SLURM's warning may be early
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
    srun_options: tuple[Annotated[str, Field(pattern=r"^--[a-z]")], ...] = Field(
        default=(),
        description="Further options of srun, such as --container-image=bertrain.sqsh. The container needs `storage` "
        "at the same path.",
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

    @model_validator(mode="after")
    def _check_time(self) -> "SlurmSettings":
        """SLURM warns up to a minute early, and not before the start."""
        least = self.grace_seconds + _START_SECONDS
        if 0 < _seconds(self.time_limit) < least:
            raise ValueError(
                f"time_limit ({self.time_limit}) is less than {least} s: grace_seconds ({self.grace_seconds}) to save, "
                f"and {_START_SECONDS} s to start"
            )
        return self


def _seconds(time_limit: str) -> int:
    """Of [days-]hours:minutes:seconds as `man sbatch` reads it: without days, fewer numbers begin at the minutes."""
    days, dash, rest = time_limit.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if not dash and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def render(job: ManifestJob, settings: SlurmSettings) -> str:
    """The sbatch script, with the config in it."""
    return f"{_options(job, settings)}\n{_setup(job, settings)}{_start(job, settings)}\n{_end()}"


def _options(job: ManifestJob, settings: SlurmSettings) -> str:
    options = {
        "job-name": job.name,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        # As many as are free; with --ntasks-per-node it would be the fewest.
        "nodes": f"{job.min_nodes}-{job.nodes}" if _shrinks(job) else job.nodes,
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
    lines += ["#SBATCH --no-kill"] if _shrinks(job) else []
    gpus = f" with {counted(job.gpus_per_node, 'GPU')}" if job.gpus else ""
    stop = shlex.quote(f"{job.folder}/stop")
    about = f"""{job.name} on {counted(job.nodes, "node")}{gpus}. Submit with sbatch FILE; sbatch --test-only FILE says
whether it can ever start. As an array (sbatch --array=1-3 FILE), task 1 is the run {job.name}-1 with seed 1.
To save and stop for good, touch {stop}. scancel ends the run within SLURM's KillWait; what it can save until then is
kept."""
    return f"""#!/bin/bash
{as_comment(about)}
#SBATCH --exclusive
#SBATCH --requeue
{chr(10).join(lines)}
set -euo pipefail
"""


def _shrinks(job: ManifestJob) -> bool:
    """Whether the run goes on when a node is lost. The first node excepted: the job is on it."""
    return job.min_nodes < job.nodes


def _setup(job: ManifestJob, settings: SlurmSettings) -> str:
    return f"""cd -- {shlex.quote(settings.storage)}
run={shlex.quote(f"./{job.folder}" if job.folder.startswith("-") else job.folder)}
id=$SLURM_JOB_ID overrides=()
if [[ -n ${{SLURM_ARRAY_TASK_ID:-}} ]]; then # SLURM_JOB_ID of an array's last task means all of them to scontrol
    id=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID run=$run-$SLURM_ARRAY_TASK_ID
    overrides=(--set "name={job.name}-$SLURM_ARRAY_TASK_ID" --set "seed=$SLURM_ARRAY_TASK_ID")
{_task_folder(job)}fi
# Files of this job alone: another one of the same run is refused, and must not touch this one's.
job=$PWD/.slurm/$id
mkdir -p .slurm "$job" && chmod 700 "$job"
rm -f "$job"/{{exit-code,preparing,ray-token,stop}}
# A stop file that is younger counts, also one that came while the requeued job waited.
[[ -e $job/started ]] || touch "$job/started"
{here_document('cat >"$job/config.yaml"', job.config)}

# USR1: SLURM's warning of the time limit, to this script alone. The file `stop` asks for a checkpoint.
# Preparing a corpus has nothing to save: the next start continues after the last finished part.
warned='' ended='' interrupted=''
# shellcheck disable=SC2317
warn() {{
    warned=1 interrupted=1
    if [[ -e $job/preparing ]]; then
        scontrol requeue "$id"
    else
        touch "$job/stop"
    fi
}}
# TERM comes from scancel, preemption and requeueing. Who sent it decides what becomes of the job.
# shellcheck disable=SC2317
end() {{
    ended=1 interrupted=1
    [[ -e $job/preparing ]] || touch "$job/stop"
}}
trap warn USR1
trap end TERM

# shellcheck disable=SC1091
{settings.environment}
export {RUNS_VARIABLE}="$PWD/{STORED_RUNS}"
export {JOB_VARIABLE}="$job"
# A token for this start alone; whoever has it may run code on these nodes.
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' >"$job/ray-token")
export RAY_AUTH_TOKEN_PATH="$job/ray-token" RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONSAFEPATH=1
# Since 22.05 srun does not inherit this from sbatch, and Ray's processes would share a core.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# This script runs on the first node, which becomes the head. Some machines know their own name as 127.0.1.1.
head=$({{ getent ahostsv4 "$(hostname)" || true; }} | awk '$1 !~ /^127\\./ {{ print $1; exit }}')
[[ -n $head ]] || head=$(hostname -I | awk '{{ print $1 }}')
address=$head:$((20000 + SLURM_JOB_ID % 10000))
"""


def _task_folder(job: ManifestJob) -> str:
    """A line that gives a task of an array a run folder of its own, if the config names one."""
    given = shlex.quote(f"run_dir={job.run_dir}-")
    return f'    overrides+=(--set {given}"$SLURM_ARRAY_TASK_ID")\n' if job.run_dir else ""


def _start(job: ManifestJob, settings: SlurmSettings) -> str:
    *before, last = job.commands('"$1"', '"$2"')
    last += ' "${@:4}"'
    commands = " && ".join(['touch "$3"', *before, 'rm "$3"', last] if before else [last])
    cpus = job.workers_per_node * job.cpus_per_worker
    # A node on which Ray does not start ends the others, unless the run can do without it.
    options = ["--no-kill --kill-on-bad-exit=0" if _shrinks(job) else "--kill-on-bad-exit=1", *settings.srun_options]
    return f"""
# The run's own exit code goes through a file.
# shellcheck disable=SC2016
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --wait=60 \\
    {" ".join([options[0], *map(shlex.quote, options[1:])])} \\
    python -m cluster.jobs.slurm_node "$address" {cpus} {job.gpus_per_node} \\
    bash -c 'code=0; ({commands}) || code=$?; echo "$code" >"$0"' \\
    "$job/exit-code" "$job/config.yaml" "$address" "$job/preparing" "${{overrides[@]}}" &
"""


def _end() -> str:
    return """code=0
while :; do
    interrupted='' code=0
    wait $! || code=$?
    [[ -n $interrupted ]] || break # else the signal ended `wait`, not the run
done
rm -f "$job/ray-token"
trap '' TERM USR1

# The job starts again, but not a third time if no start wrote a checkpoint.
again() {
    local newest count=0 before=''
    newest=$(find "$run/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1) || true
    [[ ! -e $job/again ]] || { read -r count && read -r before; } <"$job/again" || true
    [[ $newest == "$before" ]] || count=0
    if ((count == 2)); then
        echo "error: no new checkpoint since two requeues; the job ends. $1" >&2
        rm -rf "$job"
        exit 3
    fi
    printf '%s\\n' $((count + 1)) "$newest" >"$job/again"
    scontrol requeue "$id"
    exit "$code"
}

if [[ -s $job/exit-code ]]; then
    code=$(<"$job/exit-code")
elif [[ -z $ended ]]; then
    ((code != 0)) || code=3
    again "The run did not start, or was killed: see the messages of srun and Ray above."
fi
# 75: stopped with everything saved; 130: before there was a step to save. The job continues later, unless a user
# stopped it: then it is canceled, as an exit code would make it FAILED, or start jobs that depend on its success.
if [[ ($code == 75 || $code == 130) && -z $ended ]]; then
    if [[ -z $warned && $run/stop -nt $job/started ]]; then
        scancel "$id"
    else
        again "Raise place.time_limit, or save more often (checkpoint.every_steps)."
    fi
fi
rm -rf "$job"
exit "$code"
"""
