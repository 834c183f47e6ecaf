"""Starts the process that scores a run's checkpoints while the run goes on (`evaluation.probes`), and ends it.

It is the console command: `evaluate-pretrained RUN --follow` with the paths of the config. It writes probes.jsonl.
Nothing waits for it but the end of a run that finishes.
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
from pretrain.common.children import unwound_when_terminated
from pretrain.common.commands import program
from pretrain.common.errors import InputError
from pretrain.common.files import append_open, checkpoint_names
from pretrain.common.records import keep_until
from pretrain.common.run_files import PROBES
from pretrain.config import PretrainConfig
from pretrain.tracking.tracker import send_probes

WAIT_SECONDS = 600.0  # for the last scores of a run that finishes

_SETTING = "evaluation.probes"
_BLIMP_PAIRS = 20  # of each of BLiMP's 67 paradigms: the mean to 1.4 percentage points
_LOWEST_PRIORITY = 19
_GRACE_SECONDS = 5.0  # for the process to end
# Of this process's place among others: a submitted job's cluster, torchrun's workers.
_PLACES = ("RAY_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")


def check(config: PretrainConfig) -> None:
    """Raise `InputError` if a path to score on does not exist, or the command is not installed."""
    settings = config.evaluation.probes
    if missing := [text for text in settings.texts if not (text and _absolute(text).exists())]:
        raise InputError(f"{_SETTING}.texts: {missing[0]!r} does not exist. Give held-out text.")
    if settings.blimp and not any(_absolute(settings.blimp).glob("*.jsonl")):
        raise InputError(f"{_SETTING}.blimp: {settings.blimp!r} has no .jsonl file. Give the folder `data` of BLiMP.")
    if settings.is_on:
        _command(config)


@contextlib.contextmanager
def probing(config: PretrainConfig) -> Iterator[None]:
    """Score checkpoints of the run during the block, if the config says so.

    After the block, wait for the scores of the last checkpoint, for a limited time. An error in the block ends the
    process at once; the next start of the run continues.
    """
    settings, folder = config.evaluation.probes, config.folder
    names = checkpoint_names(folder)
    keep_until(folder / PROBES, int(names[-1].removeprefix("step-")) if names else -1)
    if not settings.is_on:
        yield
        return
    (folder / LOGS).mkdir(exist_ok=True)
    with append_open(folder / LOGS / "probes.log") as log:
        words = [*_command(config), "--pid", str(os.getpid())]
        kept = {name: value for name, value in environment().items() if not name.startswith(_PLACES)}
        own = {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(settings.threads)}
        # In a session of its own: Ctrl-C is the run's.
        child = subprocess.Popen(
            words, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    with contextlib.suppress(OSError):  # it has ended at once, or the system allows no such share
        os.setpriority(os.PRIO_PROCESS, child.pid, _LOWEST_PRIORITY)
        os.sched_setaffinity(child.pid, sorted(os.sched_getaffinity(0))[-settings.threads :])
        # A session is a scheduling group, and a nice value counts within its group only (autogroup in sched(7)).
        Path(f"/proc/{child.pid}/autogroup").write_text(f"{_LOWEST_PRIORITY}", encoding="utf-8")
    ending = threading.Event()
    watch = threading.Thread(target=_watch, args=(child, ending, str(log.name)), name="probes", daemon=True)
    watch.start()
    try:
        yield
        _wait(child, config)
    finally:
        ending.set()
        child.terminate()  # does nothing if it has ended
        watch.join(_GRACE_SECONDS)
        child.kill()
        watch.join()
    send_probes(config)


def _command(config: PretrainConfig) -> list[str]:
    given = importlib.metadata.entry_points(group="console_scripts", name="bertrain")
    if not (module := next((entry.module for entry in given), "")):
        raise InputError(f"{_SETTING}: need the command bertrain, which is not installed. Install the package.")
    return [sys.executable, "-m", module, *_options(config)]


def _options(config: PretrainConfig) -> list[str]:
    """The command's name and arguments."""
    settings, options = config.evaluation.probes, list[str]()
    if settings.texts:
        words = ["common_words"] if settings.common_words else []
        options += ["--texts", *(str(_absolute(text)) for text in settings.texts)]
        options += ["--text-scores", "held_out", *words]
    if settings.blimp:
        options += ["--blimp", str(_absolute(settings.blimp)), "--blimp-limit", str(_BLIMP_PAIRS)]
    own = ["--import", config.objective] if config.objective else []
    return ["evaluate-pretrained", str(config.folder), *options, *own, "--follow"]


def _absolute(path: str) -> Path:
    """The path as an argument, which cannot be taken for an option."""
    return Path(path).expanduser().absolute()


def _watch(child: subprocess.Popen[bytes], ending: threading.Event, log: str) -> None:
    """Say so if the process ends before it is done."""
    if child.wait() and not ending.is_set():
        what = f"no more checkpoints are scored; the process ended with code {child.returncode} (see {log})"
        print(f"warning: evaluation.probes: {what}. The run goes on.", file=sys.stderr)


def _wait(child: subprocess.Popen[bytes], config: PretrainConfig) -> None:
    if child.poll() is None:
        print(
            f"  training is done; waiting up to {WAIT_SECONDS:.0f} s for the scores of the last checkpoint", flush=True
        )
    in_main = threading.current_thread() is threading.main_thread()
    try:
        with unwound_when_terminated() if in_main else contextlib.nullcontext():
            child.wait(WAIT_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):  # the run itself is finished
        command = f"{program()} {shlex.join(_options(config))}"
        why = "the last checkpoint is not scored yet; the run no longer waits"
        print(f"warning: {why}. {command} does it.", file=sys.stderr)
