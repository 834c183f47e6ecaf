"""Quality rules: each measures one figure of every document and compares it with its threshold.

    gopher_quality, gopher_repetition   Rae et al. 2021 (arXiv:2112.11446), appendix A1.1 and table A1
    c4                                  Raffel et al. 2020 (JMLR 21), section 2.2
    fineweb                             Penedo et al. 2024 (arXiv:2406.17557), section 3.6
    characters                          our own

Words are separated by blanks and keep their punctuation. Rules of those papers that change a page or need its HTML are
left out. Paragraphs are lines here, so Gopher's rules for repeated paragraphs are those for lines.
"""

from collections.abc import Callable, Sequence

import numpy as np

from pretrain.config import QualityConfig
from pretrain.corpus.filters.repetition import repeated_lines, repeated_share, top_share
from pretrain.corpus.filters.text_columns import LETTER, ODD, TextColumns, term_hashes

_SHORT_LINE = 30  # characters; FineWeb's
_BULLETS = "•‣◦▪●⁃*-"
_ELLIPSIS = ord("…")
_PUNCTUATION = ".!?\"'”’»…。！？"  # FineWeb's and C4's, and the same marks of other scripts
_LOREM_IPSUM = "lorem ipsum"

Measure = Callable[[TextColumns, QualityConfig], np.ndarray]


def broken_rules(texts: TextColumns, config: QualityConfig) -> tuple[np.ndarray, np.ndarray]:
    """The first rule that each document breaks, and the figure that broke it.

    Returns:
        int64 [D]: index into `config.chosen_rules`, -1 if no rule is broken; float64 [D]: the figure.
    """
    count = len(texts.document_ends)
    broken, figures = np.full(count, -1), np.zeros(count)
    for number, rule in enumerate(config.chosen_rules):
        figure = MEASURES[rule](texts, config)
        threshold = config.threshold(rule)
        breaks = (figure < threshold) if rule.startswith("min_") else (figure > threshold)
        breaks &= broken < 0
        broken[breaks], figures[breaks] = number, figure[breaks]
    return broken, figures


# ---------------------------------------------------------------- what is measured, float64 or int64 [D]


def _words(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    return np.diff(texts.words)


def _mean_word_length(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    return _solid_characters(texts) / np.maximum(1, np.diff(texts.words))


def _symbols(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    units = texts.units
    hashes = _count_at(np.flatnonzero(units == ord("#")), texts)
    dots = units == ord(".")
    # Three dots are one ellipsis, as are the further dots of a longer run.
    begins = np.flatnonzero(dots[:-2] & dots[1:-1] & dots[2:] & ~np.append(False, dots[:-3]))
    ellipses = _count_at(begins, texts) + _count_at(np.flatnonzero(units == _ELLIPSIS), texts)
    return np.maximum(hashes, ellipses) / np.maximum(1, np.diff(texts.words))


def _bullet_lines(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    return _share_of_lines(np.isin(texts.units[texts.line_starts], _units(_BULLETS)), texts)


def _ellipsis_lines(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    last = texts.line_ends - 1
    dots = texts.units == ord(".")
    three = dots[last] & dots[np.maximum(last - 1, 0)] & dots[np.maximum(last - 2, 0)]
    return _share_of_lines(three | (texts.units[last] == _ELLIPSIS), texts)


def _alphabetic_words(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    letters = np.append(np.int32(0), np.cumsum(texts.kinds >= LETTER, dtype=np.int32))
    has_letter = letters[texts.word_ends] > letters[texts.word_starts]
    return _per_document(has_letter, texts.words) / np.maximum(1, np.diff(texts.words))


def _stop_words(texts: TextColumns, config: QualityConfig) -> np.ndarray:
    terms = texts.grams(1)
    found = np.zeros(len(texts.document_ends), np.int64)
    for word in config.stop_words:
        hashes = term_hashes(word)
        if hashes.size:
            found += np.diff(np.searchsorted(np.flatnonzero(terms == hashes[0]), texts.terms)) > 0
    return found


def _punctuated_lines(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    return _share_of_lines(np.isin(texts.units[texts.line_ends - 1], _units(_PUNCTUATION)), texts)


def _short_lines(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    return _share_of_lines(texts.line_ends - texts.line_starts <= _SHORT_LINE, texts)


def _lines_per_word(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    return np.maximum(0, np.diff(texts.lines) - 1) / np.maximum(1, np.diff(texts.words))


def _curly_brackets(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    return _count_at(np.flatnonzero((texts.units == ord("{")) | (texts.units == ord("}"))), texts)


def _lorem_ipsum(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    words = term_hashes(_LOREM_IPSUM)
    terms = texts.grams(1)
    begins = terms == words[0]
    begins[:-1] &= terms[1:] == words[1]
    begins[-1:] = False
    return _per_document(begins, texts.terms)


def _odd_characters(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    odd = _count_at(np.flatnonzero(texts.kinds == ODD), texts)
    return odd / np.maximum(1, _solid_characters(texts))


def _repeated_lines(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    return _share_of_lines(repeated_lines(texts), texts)


def _repeated_line_characters(texts: TextColumns, _: QualityConfig) -> np.ndarray:
    lengths = texts.line_ends - texts.line_starts
    repeated = _per_document(lengths * repeated_lines(texts), texts.lines)
    return repeated / np.maximum(1, _per_document(lengths, texts.lines))


def _top_gram(n: int) -> Measure:
    return lambda texts, config: top_share(texts, n, config.threshold(f"max_top_{n}_gram"))


def _repeated_grams(n: int) -> Measure:
    return lambda texts, config: repeated_share(texts, n, config.threshold(f"max_repeated_{n}_grams"))


MEASURES: dict[str, Measure] = {
    "min_words": _words,
    "max_words": _words,
    "min_mean_word_length": _mean_word_length,
    "max_mean_word_length": _mean_word_length,
    "max_symbols_per_word": _symbols,
    "max_bullet_lines": _bullet_lines,
    "max_ellipsis_lines": _ellipsis_lines,
    "min_alphabetic_words": _alphabetic_words,
    "min_stop_words": _stop_words,
    "max_repeated_lines": _repeated_lines,
    "max_repeated_line_characters": _repeated_line_characters,
    **{f"max_top_{n}_gram": _top_gram(n) for n in (2, 3, 4)},
    **{f"max_repeated_{n}_grams": _repeated_grams(n) for n in range(5, 11)},
    "min_punctuated_lines": _punctuated_lines,
    "max_short_lines": _short_lines,
    "max_lines_per_word": _lines_per_word,
    "max_curly_brackets": _curly_brackets,
    "max_lorem_ipsum": _lorem_ipsum,
    "max_odd_characters": _odd_characters,
}
"""Rule -> what it compares with its threshold: one that begins with min_ asks for at least that, max_ for at most."""


# ---------------------------------------------------------------- sums over documents


def _per_document(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """int64 [D]: sums of `values` from `first[d]` to before `first[d + 1]`."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums[first[1:]] - sums[first[:-1]]


def _count_at(places: np.ndarray, texts: TextColumns) -> np.ndarray:
    """int64 [D]: how many of the ascending `places` are in each document."""
    return np.diff(np.searchsorted(places, texts.document_ends), prepend=0)


def _share_of_lines(chosen: np.ndarray, texts: TextColumns) -> np.ndarray:
    return _per_document(chosen, texts.lines) / np.maximum(1, np.diff(texts.lines))


def _solid_characters(texts: TextColumns) -> np.ndarray:
    return _per_document(texts.word_ends - texts.word_starts, texts.words)


def _units(characters: Sequence[str]) -> np.ndarray:
    return np.array([ord(character) for character in characters], np.uint16)
