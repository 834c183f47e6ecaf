"""Fine-tuning of BERT-family checkpoints for classification, named entities and span questions.

The command `finetune` calls `train`. Importing the package imports no large library.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.artifacts.predictor import Predictor
    from finetune.training.api import FinetunedRun, train

__all__ = ["load", "train"]


def load(folder: FinetunedRun | Path | str, **options: Any) -> Predictor:
    """Load a fine-tuned model for predictions: `finetune.load("runs/my-task")(["one example", "another"])`.

    `folder` is a run folder, its folder `model`, an export, or the result of `train`; `options` are passed on to
    `finetune.artifacts.predictor.Predictor`.
    """
    check_not_shadowed()
    from finetune.artifacts.predictor import Predictor

    return Predictor(folder if isinstance(folder, Path | str) else folder.folder, **options)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_not_shadowed()
    from finetune.training.api import train

    return train


def check_not_shadowed() -> None:
    """Raise `ImportError` if a user's module, such as a cluster.py next to the script, shadows one of our packages."""
    for name, subfolder in {"pretrain": "common", "cluster": "workers"}.items():
        if (spec := PathFinder.find_spec(name)) is not None:
            paths = list(spec.submodule_search_locations or ())
            if not any(Path(path, subfolder).is_dir() for path in paths):
                raise ImportError(f"{spec.origin or paths[0]} hides bertrain's package {name}. Rename it.")
