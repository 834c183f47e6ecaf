"""Converts outcomes of workers and drivers to plain data, since a user's exceptions may not be picklable."""

from pretrain.common.errors import DivergedError, InputError, MachineError, NothingSavedError, RunError, StoppedError

CRASH = "crash"

_ERRORS: dict[str, type[RunError]] = {
    kind.__name__: kind for kind in (RunError, InputError, MachineError, DivergedError, StoppedError, NothingSavedError)
}


class WorkerError(Exception):
    """A worker's failure, as strings.

    `kind` is the class name of a `RunError`, or `CRASH` for any other exception.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def one_line(error: BaseException) -> str:
    """Return an exception's class and message on one line of at most 300 characters."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def as_data(error: RunError) -> dict[str, str]:
    """Return {"kind": name of the error's most specific class in `_ERRORS`, "message": text}, for `error_from`."""
    kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS)
    return {"kind": kind, "message": str(error)}


def error_from(data: dict[str, str]) -> RunError:
    """Return the `RunError` that `as_data` converted."""
    return _ERRORS[data["kind"]](data["message"])
