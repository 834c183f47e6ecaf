"""Scores of a checkpoint on held-out text besides the held-out loss: of common words, whole words, and by position."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from finetune.scores import common_words, positions, whole_words
from finetune.scores.common_words import CommonWordScore, score_common_words
from finetune.scores.held_out import read_documents
from finetune.scores.masked_model import DEFAULT_MODEL, MaskedModel, ModelSettings, text_digest
from finetune.scores.passages import NoScoreError, PassageSettings
from finetune.scores.positions import PositionScore, PositionSettings, score_positions
from finetune.scores.record import Record
from finetune.scores.whole_words import WholeWordScore, score_whole_words

WORD_PARTS: tuple[str, ...] = (common_words.PART, whole_words.PART)  # of a record; they compare vocabularies
PARTS: tuple[str, ...] = (*WORD_PARTS, positions.PART)
WHY_NOT = "why_not"  # in the place of a score: why there is none

# What measures, and what it returns, with its settings.
_SCORES: dict[str, tuple[Callable[..., Any], type[Any], Any]] = {
    common_words.PART: (score_common_words, CommonWordScore, PassageSettings()),
    whole_words.PART: (score_whole_words, WholeWordScore, PassageSettings()),
    positions.PART: (score_positions, PositionScore, PositionSettings()),
}


def text_scores(
    folder: Path,
    texts: Sequence[Path],
    *,
    parts: Sequence[str] = PARTS,
    settings: ModelSettings = DEFAULT_MODEL,
    record: Record | None = None,
) -> dict[str, dict[str, Any]]:
    """Part -> the fields of its score, or `WHY_NOT`: the vocabulary lacks a word, or the text is too short.

    Other args and errors are those of `held_out_score`; its `--length` has no effect here.
    """
    documents = read_documents(texts)
    digest = text_digest(*documents)
    hows = {part: {"texts": digest, **asdict(_SCORES[part][2]), **settings.how()} for part in parts}
    if common_words.PART in hows:
        hows[common_words.PART]["list"] = text_digest(*common_words.common_words())
    found = {} if record is None else {part: record.read(part, how) for part, how in hows.items()}
    missing = [part for part in parts if not _is_score(part, found.get(part, {}))]
    model = MaskedModel(folder, settings) if missing else None
    if model is not None and record is not None:
        record.check(folder)
    for part in missing:
        assert model is not None
        found[part] = _measured(part, model, documents)
        if record is not None:
            record.write(part, hows[part], found[part])
    return found


def _is_score(part: str, scores: dict[str, Any]) -> bool:
    """Whether this is what this version writes."""
    return scores.keys() in ({field.name for field in fields(_SCORES[part][1])}, {WHY_NOT})


def _measured(part: str, model: MaskedModel, documents: Sequence[str]) -> dict[str, Any]:
    measure, _, how = _SCORES[part]
    try:
        return asdict(measure(model, documents, how))
    except NoScoreError as error:
        return {WHY_NOT: str(error)}
