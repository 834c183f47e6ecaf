"""Pretraining of encoder-only language models, from raw text to a checkpoint that transformers can load.

The commands call `prepare`, `train` and `export`. Importing the package imports no large library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pretrain.common.errors import DivergedError, InputError, MachineError, RunError, StoppedError
from pretrain.common.packages import check_not_shadowed

if TYPE_CHECKING:
    from pretrain.run.api import export, prepare, train

__all__ = ["DivergedError", "InputError", "MachineError", "RunError", "StoppedError", "export", "prepare", "train"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_not_shadowed("cluster")
    from pretrain.run import api

    return getattr(api, name)
