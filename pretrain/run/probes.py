"""Starts and stops the process that scores a run's checkpoints during training (`evaluation.probes`).

The process runs the command `evaluate-pretrained RUN --follow` on the data that the config names, and writes
probes.jsonl. The run does not wait for it, except at the end of training, for the last scores.
"""

import contextlib
import importlib.metadata
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from cluster.workers.launch import LOGS, environment
from pretrain.common.children import unwind_on_sigterm
from pretrain.common.commands import program
from pretrain.common.errors import InputError
from pretrain.common.files import append_open, checkpoint_names
from pretrain.common.records import drop_records_after
from pretrain.common.run_files import PROBES
from pretrain.config import PretrainConfig
from pretrain.tracking.tracker import send_probes

WAIT_SECONDS = 600.0  # how long a finished run waits for its last scores

_SETTING = "evaluation.probes"
_BLIMP_PAIRS = 20  # sentence pairs per BLiMP paradigm: the mean over all 67 has a standard error below 1.4 points
_LOWEST_PRIORITY = 19  # nice value
_EXIT_SECONDS = 5.0  # how long the process may take to exit before it is killed
# Prefixes of environment variables that would make the process join the job's Ray cluster or torchrun's workers.
_CLUSTER_VARIABLES = ("RAY_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")


def check(config: PretrainConfig) -> None:
    """Raise `InputError` if the data to score on does not exist, or the command bertrain is not installed."""
    settings = config.evaluation.probes
    if missing := [path for path in settings.texts if not (path and _absolute(path).exists())]:
        raise InputError(f"{_SETTING}.texts: {missing[0]!r} does not exist. Use held-out text.")
    if settings.blimp and not any(_absolute(settings.blimp).glob("*.jsonl")):
        raise InputError(f"{_SETTING}.blimp: {settings.blimp!r} has no .jsonl file. Use the folder `data` of BLiMP.")
    if settings.is_on:
        _command(config)


@contextlib.contextmanager
def probing(config: PretrainConfig) -> Iterator[None]:
    """Score checkpoints of the run during the block, if the config enables it.

    After the block, wait up to `WAIT_SECONDS` for the scores of the last checkpoint. If the block raises, the scoring
    process is terminated immediately, and the next start of the run scores the remaining checkpoints.
    """
    settings, folder = config.evaluation.probes, config.folder
    checkpoints = checkpoint_names(folder)
    drop_records_after(folder / PROBES, int(checkpoints[-1].removeprefix("step-")) if checkpoints else -1)
    if not settings.is_on:
        yield
        return
    (folder / LOGS).mkdir(exist_ok=True)
    with append_open(folder / LOGS / "probes.log") as log:
        command = [*_command(config), "--pid", str(os.getpid())]
        inherited = {name: value for name, value in environment().items() if not name.startswith(_CLUSTER_VARIABLES)}
        child_environment = {**inherited, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(settings.threads)}
        # The process gets a new session, so that Ctrl-C reaches only the run.
        child = subprocess.Popen(
            command, env=child_environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    with contextlib.suppress(OSError):  # the process has exited already, or the system does not allow these changes
        os.setpriority(os.PRIO_PROCESS, child.pid, _LOWEST_PRIORITY)
        os.sched_setaffinity(child.pid, sorted(os.sched_getaffinity(0))[-settings.threads :])
        # Nice values apply only within a session, so the session gets the lowest priority, too (autogroup in sched(7)).
        Path(f"/proc/{child.pid}/autogroup").write_text(f"{_LOWEST_PRIORITY}", encoding="utf-8")
    stopping = threading.Event()
    watcher = threading.Thread(target=_watch, args=(child, stopping, str(log.name)), name="probes", daemon=True)
    watcher.start()
    try:
        yield
        _wait_for_scores(child, config)
    finally:
        stopping.set()
        child.terminate()  # does nothing if the process has exited
        watcher.join(_EXIT_SECONDS)
        child.kill()
        watcher.join()
    send_probes(config)


def _command(config: PretrainConfig) -> list[str]:
    entries = importlib.metadata.entry_points(group="console_scripts", name="bertrain")
    if not (module := next((entry.module for entry in entries), "")):
        raise InputError(f"{_SETTING}: needs the command bertrain, which is not installed. Install the package.")
    return [sys.executable, "-m", module, *_arguments(config)]


def _arguments(config: PretrainConfig) -> list[str]:
    """Return the subcommand and its arguments."""
    settings, options = config.evaluation.probes, list[str]()
    if settings.texts:
        scores = ["held_out", *(["common_words"] if settings.common_words else [])]
        options += ["--texts", *(str(_absolute(path)) for path in settings.texts)]
        options += ["--text-scores", *scores]
    if settings.blimp:
        options += ["--blimp", str(_absolute(settings.blimp)), "--blimp-limit", str(_BLIMP_PAIRS)]
    imports = ["--import", config.objective] if config.objective else []
    return ["evaluate-pretrained", str(config.folder), *options, *imports, "--follow"]


def _absolute(path: str) -> Path:
    """Return the absolute path, which no command takes for an option."""
    return Path(path).expanduser().absolute()


def _watch(child: subprocess.Popen[bytes], stopping: threading.Event, log_path: str) -> None:
    """Wait until the process exits, and print a warning if it failed."""
    if child.wait() and not stopping.is_set():
        problem = f"no more checkpoints are scored; the process exited with code {child.returncode} (see {log_path})"
        print(f"warning: evaluation.probes: {problem}. The run continues.", file=sys.stderr)


def _wait_for_scores(child: subprocess.Popen[bytes], config: PretrainConfig) -> None:
    if child.poll() is None:
        print(f"  training is done; waiting up to {WAIT_SECONDS:.0f} s for the last checkpoint's scores", flush=True)
    is_main_thread = threading.current_thread() is threading.main_thread()
    try:
        with unwind_on_sigterm() if is_main_thread else contextlib.nullcontext():
            child.wait(WAIT_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):  # the run itself is finished
        command = f"{program()} {shlex.join(_arguments(config))}"
        problem = "stopped waiting for the scores of the last checkpoint"
        print(f"warning: {problem}. To compute them, run: {command}", file=sys.stderr)
