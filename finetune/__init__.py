"""Fine-tuning of BERT-family checkpoints to classification, named entities and span questions.

`train` is what the command `finetune` calls. Importing the package loads nothing heavy.
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
    """A fine-tuned model ready to be called: `finetune.load("runs/my-task")(["a text", "another"])`.

    `folder` is a run folder, its model, an export, or what `train` returned; `options` are those of
    `finetune.artifacts.predictor.Predictor`.
    """
    expect_ours()
    from finetune.artifacts.predictor import Predictor

    return Predictor(folder if isinstance(folder, Path | str) else folder.folder, **options)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    expect_ours()
    from finetune.training.api import train

    return train


def expect_ours() -> None:
    """Raise `ImportError` if a module of the user's own, such as a cluster.py beside the script, hides our package."""
    for name, inner in {"pretrain": "common", "cluster": "workers"}.items():
        if (found := PathFinder.find_spec(name)) is not None:
            places = list(found.submodule_search_locations or ())
            if not any(Path(place, inner).is_dir() for place in places):
                raise ImportError(f"{found.origin or places[0]} hides bertrain's package {name}. Rename it.")
