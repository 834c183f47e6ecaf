"""The errors a run can end in, and the exit code each one means.

Exit codes: 0 done, 2 the user's input, 3 the machine or cluster is not fit, 4 training diverged,
75 stopped but resumable. Anything that is not a `RunError` is a bug and keeps its traceback.
"""

import unicodedata


def printable(text: str) -> str:
    """`text` with control characters as escapes, so that it stays on one line and does nothing to a terminal."""
    return "".join(repr(one)[1:-1] if is_control(one) else one for one in text)


def is_control(character: str) -> bool:
    """Whether it is a control code, a line or paragraph separator, or half of a surrogate pair."""
    return unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")


class RunError(Exception):
    """An end of the run that is no bug: one line saying where, what was found and what to do."""

    exit_code = 1


class InputError(RunError):
    """The user's own mistake: a config, a path, a file's content."""

    exit_code = 2


class MachineError(RunError):
    """The machine or cluster is not fit: disk full, too little memory, no compiler, no such worker."""

    exit_code = 3


class DivergedError(RunError):
    """Training went wrong for good; the message names the last good checkpoint."""

    exit_code = 4


class StoppedError(RunError):
    """Stopped on request with everything saved; `--resume` continues."""

    exit_code = 75
