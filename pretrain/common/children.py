"""Runs child processes and waits for them; stops them if this process is terminated."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

_GRACE_SECONDS = 20  # time for a program to stop its child processes and remove its temporary files


@contextlib.contextmanager
def unwind_on_sigterm() -> Iterator[None]:
    """Inside the context, SIGTERM raises `SystemExit`, so that temporary folders are removed and children stopped."""
    previous = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_program(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program until it exits, and return its exit code and output.

    If an exception interrupts the wait, the program gets SIGTERM, and after `_GRACE_SECONDS` SIGKILL.
    """
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        try:
            output, errors = program.communicate()
        except BaseException:
            try:
                program.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.communicate(timeout=_GRACE_SECONDS)
            finally:
                program.kill()  # does nothing if it has exited
            raise
    return subprocess.CompletedProcess(command, program.returncode, output, errors)
