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
    documents, model, found = read_documents(texts), None, dict[str, dict[str, Any]]()
    digest = text_digest(*documents)
    for part in parts:
        measure, score, chosen = _SCORES[part]
        how = {"texts": digest, **asdict(chosen), **settings.how()}
        if part == common_words.PART:
            how["list"] = text_digest(*common_words.common_words())
        found[part] = {} if record is None else record.read(part, how)
        if found[part].keys() in ({field.name for field in fields(score)}, {WHY_NOT}):  # else it is another version's
            continue
        if model is None:
            model = MaskedModel(folder, settings)
            if record is not None:
                record.check(folder)
        try:
            found[part] = asdict(measure(model, documents, chosen))
        except NoScoreError as error:
            found[part] = {WHY_NOT: str(error)}
        if record is not None:
            record.write(part, how, found[part])
    return found
