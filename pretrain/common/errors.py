"""The errors that end a run, and their exit codes.

Exit codes: 0 success, 2 invalid user input, 3 the machine or cluster is unsuitable, 4 training diverged, 75 stopped and
resumable, 130 stopped with nothing saved. Any other exception is a bug and keeps its traceback.
"""

import os
import sys
import unicodedata


def print_error(message: object) -> None:
    """Print each line of a message to standard error, after `error:`, which is red on a terminal.

    NO_COLOR and TERM=dumb turn the color off, and FORCE_COLOR on.
    """
    is_forced = os.environ.get("FORCE_COLOR", "") not in ("", "0")
    is_red = is_forced or (os.environ.get("TERM") != "dumb" and sys.stderr.isatty())
    prefix = "\033[1;31merror:\033[0m" if is_red and not os.environ.get("NO_COLOR") else "error:"
    for line in str(message).split("\n"):
        print(prefix, printable(line), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Escape control characters in `text`, so that it stays on one line and cannot control a terminal."""
    return "".join(repr(character)[1:-1] if is_control(character) else character for character in text)


def is_control(character: str) -> bool:
    """Return whether a character is a control code, a line or paragraph separator, or half of a surrogate pair."""
    return unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")


def version_mismatch(where: object, advice: str) -> str:
    """Return an error message: the object at `where` has a format or settings that this version does not support."""
    return f"{where}: made by another version of bertrain. {advice}"


class RunError(Exception):
    """An expected error. Its message is one line: where, what is wrong, what to do."""

    exit_code = 1


class InputError(RunError):
    """A mistake in the user's input: a config, a path, the content of a file."""

    exit_code = 2


class MachineError(RunError):
    """The machine or cluster is unsuitable: full disk, too little memory, no compiler, lost worker."""

    exit_code = 3


class DivergedError(RunError):
    """Training diverged despite rollbacks; the message names the last good checkpoint."""

    exit_code = 4


class StoppedError(RunError):
    """Stopped on request after saving a checkpoint; `--resume` continues."""

    exit_code = 75
    CONTINUE = " Continue with --resume."  # the last sentence of a message
    BETWEEN_STEPS = "stopped before the next step." + CONTINUE  # the message if no step was in progress

    def for_rerun(self) -> "StoppedError":
        """Return the error with the advice for a command that resumes if it is simply run again."""
        message = " ".join(str(self).removesuffix(self.CONTINUE).split())
        return type(self)(f"{message} Run the same command again to continue.")


class NothingSavedError(StoppedError):
    """Interrupted, or stopped on request, before there was anything to save."""

    exit_code = 130
