"""Jobs on a real SLURM: four nodes on this machine, each with its own network, processes and temporary folder.

Needs root, Debian's slurm-wlm, munge and iproute2: `pytest -m slurm tests/manifests/test_slurm.py`.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from cluster.manifests.render import render
from cluster.workers.actors import PROCESS_TITLE
from pretrain.config import PretrainConfig
from tests.chaos import ROOT, events, last_step, losses, newest_checkpoint, settings, wait_for
from tests.corpora import make_corpus

MISSING = [name for name in ("sbatch", "munged", "ip", "nsenter") if not shutil.which(name)]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=f"needs {', '.join(MISSING) or 'root'}"),
]
SCRIPT = Path(__file__).with_name("slurm.sh")
STEPS = 1500
_ENDED = "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"


class Slurm:
    """Four nodes of one worker each; all files of a test are in `folder`, which they share."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "slurm"

    def script(self, command: str, *arguments: object, check: bool = True, **variables: str) -> str:
        """What a command of slurm.sh printed."""
        # sbatch passes the environment on; what keeps caches of the tests in /tmp stays here.
        ours = {name: value for name, value in os.environ.items() if "bertrain-tests" not in value}
        done = subprocess.run(
            ["bash", SCRIPT, command, self.state, *map(str, arguments)],
            env={
                **ours,
                "KEEP": " ".join(str(one) for one in (self.folder, ROOT) if one.parts[1] == "tmp"),
                "SLURM_CWD": str(self.folder),
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert not check or done.returncode == 0, done.stdout
        return done.stdout

    def up(self, tracking: str = "linuxproc") -> None:
        """Start SLURM, with time enough for a busy machine."""
        waits = {"SLURMD_TIMEOUT": "60", "KILL_WAIT": "120"}
        self.script("up", 4, 1, 6000, check=True, **waits, PROCTRACK=f"proctrack/{tracking}")

    def sh(self, *command: object, check: bool = True) -> str:
        return self.script("sh", *command, check=check)

    def write(self, name: str, *place: str, steps: int = STEPS, **scheduling: int) -> Path:
        """The sbatch file of a run of two workers."""
        values = settings(self.folder / "corpus", self.folder / "runs" / name, steps=steps)
        values["checkpoint"]["every_steps"] = 10**6  # only a requested stop saves
        values["scheduling"] |= {"hang_seconds": 60, **scheduling}
        config, script = self.folder / f"{name}.yaml", self.folder / f"{name}.sbatch"
        config.write_text(yaml.safe_dump(values))
        environment = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}"
        given = ["place.gpus=false", "place.workers_per_node=1", "place.grace_seconds=30"]
        given += [f"place.environment={environment}", f"place.storage={self.folder}", *place]
        script.write_text(render("slurm", PretrainConfig, config, given))
        return script

    def submit(self, script: Path, *options: str) -> str:
        """The job's id."""
        return self.sh("sbatch", "--parsable", *options, script).strip().splitlines()[-1]

    def shown(self, job: str, field: str) -> str:
        found = re.search(rf"\b{field}=(\S+)", self.sh("scontrol", "show", "job", job, check=False))
        return found[1] if found else ""

    def wait_end(self, job: str, seconds: float = 400) -> str:
        wait_for(lambda: self.shown(job, "JobState") in _ENDED, seconds)
        return self.shown(job, "JobState")

    def wait_step(self, name: str, step: int, seconds: float = 200) -> None:
        wait_for(lambda: last_step(self.folder / "runs" / name) >= step, seconds)

    def log(self, job: str) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"*-{job}.log"))

    def left_in_temporary_folders(self) -> list[str]:
        """Except torch's cache of compiled code, which the next start uses."""
        kept = {one.parts[2] for one in (self.folder, ROOT) if one.parts[1] == "tmp"} | {"torchinductor_root"}
        return [p.name for p in self.state.glob("nodes/*/tmp/*") if p.name not in kept]


@contextlib.contextmanager
def cluster(folder: Path, tracking: str = "linuxproc") -> Iterator[Slurm]:
    slurm = Slurm(folder)
    try:
        slurm.up(tracking)
        yield slurm
    finally:
        slurm.script("down", check=False)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    make_corpus(folder / "corpus", vocabulary_size=300)
    with cluster(folder) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm) -> dict[int, str]:
    """Losses by step, as text, of a run that nothing disturbs; it also shows what a job leaves behind: nothing."""
    job = slurm.submit(slurm.write("undisturbed"))
    assert slurm.wait_end(job) == "COMPLETED", slurm.log(job)
    assert not slurm.left_in_temporary_folders()
    assert not list((slurm.folder / ".slurm").iterdir())
    assert "WARN" not in slurm.log(job)
    return losses(slurm.folder / "runs/undisturbed")


def check(slurm: Slurm, name: str, expected: dict[int, str]) -> None:
    assert losses(slurm.folder / "runs" / name) == expected
    assert not slurm.left_in_temporary_folders()


def stop(slurm: Slurm, name: str, job: str, expected: dict[int, str]) -> None:
    """End a job that has trained long enough, and compare."""
    slurm.wait_step(name, STEPS, 400)
    run = slurm.folder / "runs" / name
    (run / "stop").touch()
    assert slurm.wait_end(job) == "CANCELLED", slurm.log(job)
    found = losses(run)
    assert list(found) == list(range(1, newest_checkpoint(run) + 1))
    assert {step: found[step] for step in expected} == expected
    assert not slurm.left_in_temporary_folders()


def test_two_nodes_are_one_run(undisturbed: dict[int, str]) -> None:
    assert list(undisturbed) == list(range(1, STEPS + 1))


def test_nodes_are_free_soon_after_the_end(slurm: Slurm) -> None:
    """A run of a few steps, whose last one is seen; 10 s leave room for a busy machine."""
    job = slurm.submit(slurm.write("short", steps=5))
    wait_for(lambda: "finished. Next" in slurm.log(job), 120)
    began = time.monotonic()
    assert slurm.wait_end(job) == "COMPLETED"
    wait_for(lambda: slurm.sh("sinfo", "-h", "-o", "%t").split() == ["idle"])
    print(f"{time.monotonic() - began:.1f} s until the nodes were idle, {slurm.log(job).count(chr(10))} lines")


def test_the_time_limit(slurm: Slurm, undisturbed: dict[int, str]) -> None:
    """The limit is set while the run trains, so that a slow machine trains, too."""
    run = slurm.folder / "runs/limit"
    job = slurm.submit(slurm.write("limit", steps=10**6), "--time=10")
    slurm.wait_step("limit", 200)
    slurm.sh("scontrol", "update", f"JobId={job}", f"TimeLimit={int(slurm.shown(job, 'RunTime').split(':')[1]) + 2}")
    wait_for(lambda: slurm.shown(job, "Restarts") == "1", 300)
    slurm.sh("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    slurm.wait_step("limit", newest_checkpoint(run) + 50, 400)
    stop(slurm, "limit", job, undisturbed)
    assert slurm.log(job).count("error: stopped at step") == 2


def test_a_limit_while_it_starts(slurm: Slurm, undisturbed: dict[int, str]) -> None:
    """The warning comes a few seconds after the start. The second start has more time."""
    job = slurm.submit(slurm.write("starting"), "--time=1", "--signal=B:USR1@57")
    wait_for(lambda: slurm.shown(job, "Restarts") == "1", 120)
    slurm.sh("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    assert slurm.wait_end(job) == "COMPLETED", slurm.log(job)
    check(slurm, "starting", undisturbed)


def test_two_requeues_without_a_checkpoint_end_the_job(slurm: Slurm) -> None:
    """Here srun starts nothing. A new checkpoint would begin the count again."""
    job = slurm.submit(slurm.write("never", "place.srun_options=[--chdir=/nowhere, --no-such-option]"))
    assert slurm.wait_end(job, 900) == "FAILED"
    assert "error: no new checkpoint since two requeues; the job ends. The run did not start" in slurm.log(job)
    assert slurm.shown(job, "Restarts") == "2"
    assert not slurm.left_in_temporary_folders()


def test_scancel_saves_and_the_same_file_continues(slurm: Slurm, undisturbed: dict[int, str]) -> None:
    job = slurm.submit(slurm.write("canceled"))
    slurm.wait_step("canceled", 200)
    slurm.sh("scancel", job)
    assert slurm.wait_end(job, 150) == "CANCELLED"
    wait_for(lambda: slurm.sh("sinfo", "-h", "-o", "%t").split() == ["idle"])
    assert newest_checkpoint(slurm.folder / "runs/canceled") >= 200
    assert not slurm.left_in_temporary_folders()
    assert slurm.wait_end(slurm.submit(slurm.folder / "canceled.sbatch")) == "COMPLETED"
    check(slurm, "canceled", undisturbed)


def test_the_stop_file(slurm: Slurm, undisturbed: dict[int, str]) -> None:
    """Also while the job starts. It ends for good, and is not called failed."""
    script = slurm.write("stopped")
    for step in (0, 300):
        job = slurm.submit(script)
        started = slurm.folder / ".slurm" / job / "started"
        wait_for(started.exists)
        if step:
            slurm.wait_step("stopped", step)
        (slurm.folder / "runs/stopped").mkdir(parents=True, exist_ok=True)
        (slurm.folder / "runs/stopped/stop").touch()
        assert slurm.wait_end(job) == "CANCELLED", slurm.log(job)
        assert slurm.shown(job, "Restarts") == "0"
    assert slurm.wait_end(slurm.submit(script)) == "COMPLETED"
    check(slurm, "stopped", undisturbed)


@pytest.mark.parametrize("tracking", ["linuxproc", "cgroup"])
def test_a_node_loses_power(tmp_path: Path, slurm: Slurm, undisturbed: dict[int, str], tracking: str) -> None:
    """Its job is requeued and continues, also where SLURM does not find what is left on the other node."""
    if tracking == "cgroup" and not Path("/sys/fs/cgroup/freezer").is_dir():
        pytest.skip("needs the freezer of cgroup v1")
    slurm.script("down", check=False)
    try:
        with cluster(slurm.folder, tracking):
            script = slurm.write(f"power-{tracking}")
            script.write_text(script.read_text().replace("every_steps: 1000000", "every_steps: 100", 1))
            job = slurm.submit(script)
            slurm.wait_step(f"power-{tracking}", 300)
            slurm.script("kill", "sn2")
            wait_for(lambda: slurm.shown(job, "JobState") == "PENDING", 200)
            slurm.script("boot", "sn2")
            assert slurm.wait_end(job) == "COMPLETED", slurm.log(job)
            check(slurm, f"power-{tracking}", undisturbed)
    finally:
        slurm.up()


def test_a_run_that_can_shrink_does(slurm: Slurm, undisturbed: dict[int, str]) -> None:
    script = slurm.write("shrinks", min_workers=1)
    script.write_text(script.read_text().replace("every_steps: 1000000", "every_steps: 100", 1))
    job = slurm.submit(script)
    slurm.wait_step("shrinks", 300)
    slurm.script("kill", "sn2")
    try:
        assert slurm.wait_end(job) == "COMPLETED", slurm.log(job)
    finally:
        slurm.script("boot", "sn2")
    assert slurm.shown(job, "Restarts") == "0"
    found = losses(slurm.folder / "runs/shrinks")
    numbers, expected = (list(map(float.fromhex, one.values())) for one in (found, undisturbed))
    assert numbers == pytest.approx(expected, abs=1e-5)
    assert events(slurm.folder / "runs/shrinks", "restart")


def test_the_same_file_twice(slurm: Slurm, undisturbed: dict[int, str]) -> None:
    """The second one is refused, and neither its end nor its signals disturb the first, which can still restart."""
    script = slurm.write("twice", steps=10**6)
    first = slurm.submit(script)
    slurm.wait_step("twice", 10)
    second = slurm.submit(script)
    wait_for(lambda: (slurm.folder / ".slurm" / second / "started").exists())
    slurm.sh("scancel", "--signal=TERM", "--batch", second)
    assert slurm.wait_end(second) == "FAILED"
    assert "another process is training in it" in slurm.log(second)
    next(one for one in psutil.process_iter() if one.cmdline()[:1] == [PROCESS_TITLE + ".run"]).kill()
    wait_for(lambda: events(slurm.folder / "runs/twice", "restart"), 120)
    stop(slurm, "twice", first, undisturbed)


def test_an_array_is_seeds(slurm: Slurm) -> None:
    job = slurm.submit(slurm.write("array", steps=30), "--array=1-3")
    for task in (1, 2, 3):
        assert slurm.wait_end(f"{job}_{task}") == "COMPLETED"
    found = [losses(slurm.folder / f"runs/array-{task}") for task in (1, 2, 3)]
    assert [list(one) for one in found] == [list(range(1, 31))] * 3
    assert len({str(one) for one in found}) == 3
    assert not (slurm.folder / "runs/array").exists()


def test_two_jobs_on_different_nodes(slurm: Slurm) -> None:
    """The end of one does not touch the other."""
    one, other = [slurm.write(name, steps=steps, workers=1) for name, steps in (("one", 50), ("other", STEPS))]
    first, second = slurm.submit(other), slurm.submit(one)
    assert slurm.wait_end(second) == "COMPLETED"
    assert slurm.shown(first, "JobState") == "RUNNING"
    assert slurm.wait_end(first) == "COMPLETED"


def test_a_job_that_never_fits(slurm: Slurm) -> None:
    script = slurm.write("big", workers=5)
    assert "Requested node configuration is not available" in slurm.sh("sbatch", "--test-only", script, check=False)
