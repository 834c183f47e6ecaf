"""The two scores that compare vocabularies, of a checkpoint: bits of common words, and those of whole words."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from finetune.scores import common_words, whole_words
from finetune.scores.common_words import CommonWordScore, score_common_words
from finetune.scores.held_out import read_documents
from finetune.scores.masked_model import DEFAULT_MODEL, MaskedModel, ModelSettings, text_digest
from finetune.scores.passages import NoScoreError, PassageSettings
from finetune.scores.record import Record
from finetune.scores.whole_words import WholeWordScore, score_whole_words

PARTS: tuple[str, ...] = (common_words.PART, whole_words.PART)  # of a record
WHY_NOT = "why_not"  # in the place of a score: why there is none

_SCORES = {
    common_words.PART: (score_common_words, CommonWordScore),
    whole_words.PART: (score_whole_words, WholeWordScore),
}


def word_scores(
    folder: Path,
    texts: Sequence[Path],
    *,
    how: PassageSettings | None = None,
    settings: ModelSettings = DEFAULT_MODEL,
    record: Record | None = None,
) -> dict[str, dict[str, Any]]:
    """Part -> the fields of its score, or `WHY_NOT`: the vocabulary lacks a word, or a passage does not fit.

    Args and errors are those of `held_out_score`; texts are cut by characters, so its `--length` has no effect here.
    """
    documents, how = read_documents(texts), how or PassageSettings()
    common = {"texts": text_digest(*documents), **asdict(how), **settings.how()}
    hows = dict.fromkeys(PARTS, common)
    hows[common_words.PART] = {**common, "list": text_digest(*common_words.common_words())}
    found = {} if record is None else {part: record.read(part, hows[part]) for part in PARTS}
    missing = [part for part in PARTS if not _is_score(part, found.get(part, {}))]
    model = MaskedModel(folder, settings) if missing else None
    if model is not None and record is not None:
        record.check(folder)
    for part in missing:
        assert model is not None
        found[part] = _measured(part, model, documents, how)
        if record is not None:
            record.write(part, hows[part], found[part])
    return found


def _is_score(part: str, scores: dict[str, Any]) -> bool:
    """Whether this is what this version writes."""
    return scores.keys() in ({field.name for field in fields(_SCORES[part][1])}, {WHY_NOT})


def _measured(part: str, model: MaskedModel, documents: Sequence[str], how: PassageSettings) -> dict[str, Any]:
    try:
        return asdict(_SCORES[part][0](model, documents, how))
    except NoScoreError as error:
        return {WHY_NOT: str(error)}
