"""Outcomes of workers and drivers as plain data: a user's exceptions may fail to pickle, strings do not."""

from pretrain.common.errors import DivergedError, InputError, MachineError, NothingSavedError, RunError, StoppedError

CRASH = "crash"

_ERRORS: dict[str, type[RunError]] = {
    kind.__name__: kind for kind in (RunError, InputError, MachineError, DivergedError, StoppedError, NothingSavedError)
}


class WorkerError(Exception):
    """The failure of a worker's target, as strings.

    `kind` is the class name of a `RunError`, or `CRASH` for everything else.
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
    """Return {"kind": name of the nearest class in `_ERRORS`, "message": text}; `error_from` is the inverse."""
    kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS)
    return {"kind": kind, "message": str(error)}


def error_from(data: dict[str, str]) -> RunError:
    """Return the `RunError` for {"kind": class name, "message": text}."""
    return _ERRORS[data["kind"]](data["message"])
