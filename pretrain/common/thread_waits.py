"""Lets the threads of CPU kernels sleep instead of spin while other programs compete for the cores.

A kernel of T threads ends when its last thread does. Until then, and until the next kernel, OpenMP's threads spin, since
to wake a sleeping thread takes longer than most kernels do. If another program has the core of one of them, the others
spin through the time that the late one is waited for, and use up the share of the processor that it needs. With twice as
many busy threads as cores, training slows down to a fifth and less instead of a half. Sleeping threads give their
share back.

libgomp, the OpenMP of GNU that torch is built with, spins only while it has no more threads than there are cores
(GOMP_SPINCOUNT in its manual). So a pool of threads that do nothing makes the others sleep, and the end of that pool makes
them spin again. Results do not change: no kernel runs on another number of threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_LOOK_SECONDS = 0.5
# Share of its time that a thread, ready to run, waits for a core: more is a crowd, less is none.
_CROWDED, _FREE = 0.10, 0.03
_FREE_LOOKS = 4  # in a row, before threads spin again
_SPARE_TIMES = 16  # as many threads as a pool has must be free: other workers of the machine want theirs


@contextlib.contextmanager
def sleeping_when_crowded() -> Iterator[None]:
    """While entered, waiting threads of CPU kernels spin on free cores and sleep on contended ones.

    Does nothing on GPUs and where kernels have one thread, torch has another OpenMP than GNU's, the system keeps no account of
    waits, or OMP_WAIT_POLICY or GOMP_SPINCOUNT say what is wanted.
    """
    import torch

    openmp = _openmp()
    decided = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    no_need = torch.get_num_threads() == 1 or torch.cuda.is_available()
    if no_need or decided or openmp is None or not _waited_seconds():
        yield
        return
    end = threading.Event()
    watcher = threading.Thread(target=_watch, args=(lambda: _idle_pool(openmp), end), name="thread-waits", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        end.set()
        watcher.join()


def _watch(
    idle_pool: Callable[[], contextlib.AbstractContextManager[None]],
    end: threading.Event,
    waited_seconds: Callable[[], Mapping[int, float]] = lambda: _waited_seconds(),
) -> None:
    """Hold an idle pool for as long as threads wait for cores; look until `end`."""
    with contextlib.ExitStack() as pool:
        sleeping, free = False, 0
        before, at = waited_seconds(), time.monotonic()
        while not end.wait(_LOOK_SECONDS):
            now, then = waited_seconds(), time.monotonic()
            waits = [now[thread] - before[thread] for thread in now.keys() & before.keys()]
            share = max(waits, default=0.0) / (then - at)
            before, at = now, then
            free = free + 1 if share < _FREE else 0
            if not sleeping and share > _CROWDED and _may_start(_pool_size()):
                pool.enter_context(idle_pool())
                sleeping = True
            elif sleeping and free >= _FREE_LOOKS:
                pool.close()
                sleeping = False


def _waited_seconds() -> dict[int, float]:
    """How long each thread of this process was ready to run and had no core; empty if the system does not say."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended
            found[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


@contextlib.contextmanager
def _idle_pool(openmp: ctypes.CDLL) -> Iterator[None]:
    """More OpenMP threads than cores, all asleep, for as long as this is entered."""
    made, done = threading.Event(), threading.Event()

    def hold() -> None:
        # A team runs free(NULL), which does nothing. Its threads belong to this one, and end with it.
        openmp.GOMP_parallel(ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p), None, _pool_size(), 0)
        made.set()
        done.wait()

    holder = threading.Thread(target=hold, name="idle-pool", daemon=True)
    holder.start()
    made.wait()
    try:
        yield
    finally:
        done.set()
        holder.join()


def _pool_size() -> int:
    return len(os.sched_getaffinity(0)) + 1


def _may_start(threads: int) -> bool:
    """Whether so many threads more are far from any limit: where one cannot be made, libgomp ends the process."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    limits = [resource.getrlimit(resource.RLIMIT_NPROC)[0]]
    room = [limit - _threads_of_user() for limit in limits if limit != resource.RLIM_INFINITY]
    for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids")):
        with contextlib.suppress(OSError, ValueError):  # no such limit, or "max"
            room.append(int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text()))
    return all(_SPARE_TIMES * threads < one for one in room)


def _threads_of_user() -> int:
    """Threads of all processes of this user, as far as they can be seen."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.getuid():
                found += sum(1 for _ in (process / "task").iterdir())
    return found


def _openmp() -> ctypes.CDLL | None:
    """The libgomp that torch computes with, if it does."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.rpartition(" ")[2] for line in lines if "libgomp" in line}, key=_is_torchs)
    if not paths:
        return None
    with contextlib.suppress(OSError, AttributeError):
        openmp = ctypes.CDLL(paths[-1])
        openmp.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        openmp.GOMP_parallel.restype = None
        return openmp
    return None


def _is_torchs(path: str) -> bool:
    return "/torch/" in path
