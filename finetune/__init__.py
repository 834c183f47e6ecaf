"""Fine-tuning of BERT-family checkpoints to classification, named entities and span questions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.artifacts.predictor import Predictor


def load(folder: Path | str, **options: Any) -> Predictor:
    """A fine-tuned model ready to be called: `finetune.load("runs/my-task")(["a text", "another"])`.

    `options` are those of `finetune.artifacts.predictor.Predictor`.
    """
    from finetune.artifacts.predictor import Predictor

    return Predictor(folder, **options)
