"""Makes the threads of CPU kernels sleep instead of spin while other programs compete for the cores.

A kernel of T threads finishes with its last thread. Until then, and until the next kernel, OpenMP's threads spin,
because waking a sleeping thread takes longer than most kernels. If another program uses the core of one thread, the
others spin while they wait for it, and take CPU time that it needs. With twice as many busy threads as cores, training
runs at a fifth of its speed or less, instead of half. Sleeping threads leave their CPU time to others.

libgomp, the GNU OpenMP that torch is built with, spins only while it has no more threads than cores (GOMP_SPINCOUNT in
its manual). So a pool of idle threads makes the others sleep, and closing the pool makes them spin again. Results do
not change, because kernels keep their number of threads.
"""

import contextlib
import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pretrain.common.memory import control_groups

POLL_SECONDS = 0.5
# Shares of the time that a runnable thread waits for a core: above the first, the cores are contended; below the
# second, they are free. With only Ray's processes running, the share is about 0.03 on two cores.
_CONTENDED, _FREE = 0.10, 0.06
# Number of consecutive polls with free cores before threads spin again.
_FREE_POLLS = 4
# A pool starts only if the limits allow this many times its threads, since other workers start pools too.
_SPARE_FACTOR = 16
_FEW_PROCESSES = 10_000  # limit per user, threads included, below which it may be almost reached


@contextlib.contextmanager
def sleep_when_contended() -> Iterator[None]:
    """While entered, waiting threads of CPU kernels spin on free cores and sleep on contended ones.

    Does nothing on GPUs, if kernels have one thread, if torch uses another OpenMP than GNU's, if the system does not
    record wait times, or if OMP_WAIT_POLICY or GOMP_SPINCOUNT is set.
    """
    import torch

    openmp = loaded_openmp()
    set_by_user = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    not_needed = torch.get_num_threads() == 1 or torch.cuda.is_available()
    if not_needed or set_by_user or openmp is None or not waited_seconds():
        yield
        return
    end = threading.Event()
    watcher = threading.Thread(target=watch, args=(lambda: idle_threads(openmp), end), name="thread-waits", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        end.set()
        watcher.join()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """While entered, CPU kernels use this thread only. For memory-bound work such as copies: others would only spin."""
    import torch

    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def watch(
    idle_pool: Callable[[], contextlib.AbstractContextManager[None]],
    end: threading.Event,
    waited_seconds: Callable[[], Mapping[int, float]] = lambda: waited_seconds(),
) -> None:
    """Poll until `end` is set, and keep an idle pool while threads wait for cores."""
    with contextlib.ExitStack() as pool:
        sleeping, free_polls = False, 0
        waited_before, time_before = waited_seconds(), time.monotonic()
        while not end.wait(POLL_SECONDS):
            waited, now = waited_seconds(), time.monotonic()
            waits = [waited[thread] - waited_before[thread] for thread in waited.keys() & waited_before.keys()]
            share = max(waits, default=0.0) / (now - time_before)
            waited_before, time_before = waited, now
            free_polls = free_polls + 1 if share < _FREE else 0
            if not sleeping and share > _CONTENDED and may_start(_pool_size()):
                pool.enter_context(idle_pool())
                sleeping = True
            elif sleeping and free_polls >= _FREE_POLLS:
                pool.close()
                sleeping = False


def waited_seconds() -> dict[int, float]:
    """Return the seconds that each thread of this process waited for a core; {} if the system does not record them."""
    seconds = {}
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread may have ended
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return seconds


@contextlib.contextmanager
def idle_threads(openmp: ctypes.CDLL) -> Iterator[None]:
    """While entered, keep a pool of sleeping OpenMP threads, one more than there are cores."""
    started, done = threading.Event(), threading.Event()

    def hold() -> None:
        # The team runs free(NULL), which does nothing. Its threads belong to this thread and end with it.
        openmp.GOMP_parallel(ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p), None, _pool_size(), 0)
        started.set()
        done.wait()

    holder = threading.Thread(target=hold, name="idle-pool", daemon=True)
    holder.start()
    started.wait()
    try:
        yield
    finally:
        done.set()
        holder.join()


def _pool_size() -> int:
    return len(os.sched_getaffinity(0)) + 1


def may_start(threads: int) -> bool:
    """Return whether `threads` more threads stay far below all limits; libgomp exits if it cannot create a thread."""
    space, processes = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_NPROC))
    if space != resource.RLIM_INFINITY or (processes != resource.RLIM_INFINITY and processes < _FEW_PROCESSES):
        return False
    available: list[int] = []
    for folder in control_groups("pids"):
        with contextlib.suppress(OSError, ValueError):  # no such limit, or "max"
            available.append(int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text()))
    return all(_SPARE_FACTOR * threads < free for free in available)


def loaded_openmp() -> ctypes.CDLL | None:
    """Return the libgomp that torch uses; None if it uses another OpenMP."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.rpartition(" ")[2] for line in lines if "libgomp" in line}, key=lambda path: "/torch/" in path)
    if not paths:
        return None
    with contextlib.suppress(OSError, AttributeError):
        openmp = ctypes.CDLL(paths[-1])
        openmp.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        openmp.GOMP_parallel.restype = None
        return openmp
    return None
