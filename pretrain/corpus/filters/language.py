"""Language identification with lingua, offline: documents of other languages than those asked for are dropped.

A document is kept as soon as a first look at it finds a language to keep; only the others are looked at more closely.
Latin and Esperanto count only where they are asked for: names and technical terms are taken for them. lingua's time
grows with the number of languages, so the first look compares with few, unless near relatives are not among them.
English is recognized by its most frequent words, which takes a tenth of the time.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pretrain.common.errors import InputError, MachineError
from pretrain.config import LanguageConfig
from pretrain.corpus.filters.text_columns import TextColumns, term_hashes
from pretrain.corpus.filters.verdicts import Verdicts

_FEWEST_WORDS = 20  # of a document whose language can be told
_FIRST_LOOK = 100  # characters
SAMPLE_CHARACTERS = 500  # of a closer look
_SLICES = 5  # of the sample: one quotation does not decide
_FREQUENT = {"ar", "ca", "cs", "de", "en", "es", "fr", "id", "it", "ja", "nl", "pl", "pt", "ro", "ru", "sk", "sv", "tr"}
_APART = {"de", "en", "fr", "it", "pl"}  # languages without a near relative outside of _FREQUENT
_CERTAIN = 0.9  # distance of a first look's most probable language from the next
# A fifth of the words of English text, at least 15 % in 98 % of Wikipedia's articles; of any other language hardly one.
_ENGLISH_WORDS = ("the", "of", "and", "to", "that", "with", "from", "was", "were", "which", "his", "this", "by")
_ENGLISH_SHARE = 0.12


class Language:
    """Identifies the languages of documents; the models are loaded with the first."""

    def __init__(self, config: LanguageConfig) -> None:
        self._config = config
        self._first: Any = None
        self._closer: Any = None

    def judge(self, texts: Sequence[str], columns: TextColumns) -> Verdicts:
        """The verdicts; documents of fewer than 20 words stay. Of a table of numbers the language is unknown."""
        if self._closer is None:
            self._first, self._closer = detectors(set(self._config.keep))
        too_few = np.diff(columns.terms) < _FEWEST_WORDS
        english = _are_english(columns) if "en" in self._config.keep else np.zeros(len(texts), bool)
        found = [
            "" if short else "en" if sure else self._language(text)
            for text, short, sure in zip(texts, too_few, english, strict=True)
        ]
        keep = {"", *self._config.keep}
        return Verdicts(("other_language",), np.array([-1 if code in keep else 0 for code in found]), found)

    def _language(self, text: str) -> str:
        first = _identified(self._first, _slices(text, _FIRST_LOOK, 1))
        if first in self._config.keep:
            return first
        return _identified(self._closer, _slices(text, SAMPLE_CHARACTERS, _SLICES))


def _are_english(columns: TextColumns) -> np.ndarray:
    """bool [D]: documents of which at least `_ENGLISH_SHARE` are frequent English words."""
    terms = columns.grams(1)
    frequent = np.zeros(len(terms), bool)
    for word in _ENGLISH_WORDS:
        frequent |= terms == term_hashes(word)[0]
    found = np.diff(np.append(0, np.cumsum(frequent))[columns.terms])
    return found >= _ENGLISH_SHARE * np.maximum(1, np.diff(columns.terms))


def _identified(detector: Any, text: str) -> str:
    language = detector.detect_language_of(text)
    return _code(language) if language else "unknown"


def _slices(text: str, size: int, count: int) -> str:
    """`size` characters of `text` from `count` places that are equally far from each other."""
    if len(text) <= size:
        return text
    width, step = size // count, len(text) / count
    return "\n".join(text[start : start + width] for start in (int((n + 0.5) * step - width / 2) for n in range(count)))


def detectors(keep: set[str]) -> tuple[Any, Any]:
    """What takes the first look, and what looks more closely."""
    lingua = _lingua()
    spoken = lingua.Language.all_spoken_ones()
    candidates = [one for one in lingua.Language.all() if one in spoken or _code(one) in keep]
    few = [one for one in candidates if _code(one) in _FREQUENT] if keep <= _APART else candidates
    # Of texts of over 120 characters the models of the accurate mode give the same verdicts, and take 1 GB.
    first, closer = (
        lingua.LanguageDetectorBuilder.from_languages(*chosen).with_low_accuracy_mode() for chosen in (few, candidates)
    )
    return first.with_minimum_relative_distance(_CERTAIN).build(), closer.build()


def _code(language: Any) -> str:
    return language.iso_code_639_1.name.lower()


def check_language(config: LanguageConfig) -> None:
    """Raise `MachineError` if lingua is missing, `InputError` if it does not know one of the languages."""
    known = {_code(language) for language in _lingua().Language.all()}
    for code in config.keep:
        if code not in known:
            some = ", ".join(sorted(known)[:8])
            raise InputError(
                f"corpus.filters.language.keep: lingua does not know {code!r}. Give ISO 639-1 codes, such as {some}."
            )


def _lingua() -> Any:
    try:
        import lingua
    except ImportError:
        raise MachineError(
            "corpus.filters.language: lingua, the extra `language`, is not installed. "
            f"Run: {sys.executable} -m pip install lingua-language-detector"
        ) from None
    return lingua
