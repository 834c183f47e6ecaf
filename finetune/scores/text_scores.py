"""All scores of a checkpoint on held-out text: the held-out loss, common words and whole words."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from finetune.scores import common_words, held_out, whole_words
from finetune.scores.common_words import score_common_words
from finetune.scores.held_out import HeldOutSettings, score_held_out
from finetune.scores.masked_model import MaskedModel, text_digest
from finetune.scores.passages import NoScoreError, PassageSettings
from finetune.scores.whole_words import score_whole_words

MISSING_REASON = "why_not"  # key, in a score's values, of the reason why it could not be computed

# {name: (scoring function, its settings)}
_SCORES: dict[str, tuple[Callable[..., Any], Any]] = {
    common_words.NAME: (score_common_words, PassageSettings()),
    whole_words.NAME: (score_whole_words, PassageSettings()),
    held_out.NAME: (score_held_out, HeldOutSettings()),
}


def text_scores(
    model: MaskedModel, documents: Sequence[str], names: Sequence[str] = tuple(_SCORES), length: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compute the scores in `names` one after another, with progress on stderr.

    Yields (name, {"how": settings, "scores": values}). The values are the fields of the score's class, or only
    `MISSING_REASON` if the vocabulary lacks a word or the documents have no word to score.

    Args:
        documents: from `read_documents`.
        length: tokens per sequence for the held-out loss; 0 means 128, or the model's maximum if lower.

    Raises:
        InputError: the documents have no token, or the model has fewer positions than `length`.
    """
    digest = text_digest(*documents)
    for name in names:
        compute, settings = _SCORES[name]
        if name == held_out.NAME:
            settings = replace(settings, length=length or min(settings.length, model.max_positions))
        try:
            scores = asdict(compute(model, documents, settings))
        except NoScoreError as error:
            scores = {MISSING_REASON: str(error)}
        yield name, {"how": {"texts": digest, **asdict(settings), "precision": model.precision}, "scores": scores}
