"""Split documents into sentences with `sentencex` (Wikimedia), also at paragraph breaks and inside long quotations."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_LONG_SENTENCE_CHARACTERS = 240  # about twice the mean length; longer sentences are split inside quotations
_QUOTATION_MARKS = dict.fromkeys('"“”„«»‘’', " ")  # quotation mark -> a space
# Full stop of Tibetan or Khmer, which sentencex does not support -> a full stop that it supports.
_FULL_STOPS = {"\u0f0d \u0f0d": "  。", "\u0f0d": "。", "\u0f0e": "。", "\u17d4": "。", "\u17d5": "。"}
_BATCH_CHARACTERS = 2 << 20  # characters processed together; a larger batch does not fit in the CPU cache


@dataclass(frozen=True)
class SentenceSplitter:
    """Two functions: `split` splits a document into sentences; `starts` returns the sentences' character offsets."""

    split: Callable[[str], list[str]]
    starts: Callable[[str], list[int]]


def splitter_for(language: str, *, by_lines: bool) -> SentenceSplitter:
    """Return the splitter for documents in a language; with `by_lines`, each line is a sentence."""
    if by_lines:
        return SentenceSplitter(lambda text: text.split("\n"), line_starts)
    return SentenceSplitter(lambda text: split_sentences(text, language), lambda text: sentence_starts(text, language))


def batches_of(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of documents with about _BATCH_CHARACTERS characters in total."""
    batch: list[str] = []
    total = 0
    for text in texts:
        batch.append(text)
        total += len(text)
        if total >= _BATCH_CHARACTERS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def split_sentences(document: str, language: str) -> list[str]:
    """Split a document into sentences, whose concatenation is the document, except for whitespace.

    `language` is an ISO 639-1 code that selects abbreviations ("Dr.", "z.B."); unknown codes use general rules. Each
    line is a paragraph. sentencex never splits inside quotation marks, which can give sentences of several hundred
    words in novels. Long sentences are therefore split again without the marks; likewise, if a document has full stops
    that sentencex does not support, all sentences are split again with supported ones.
    """
    replacements, max_characters = _QUOTATION_MARKS, _LONG_SENTENCE_CHARACTERS
    if not document.isascii() and any(stop in document for stop in _FULL_STOPS):
        replacements, max_characters = _QUOTATION_MARKS | _FULL_STOPS, 0
    sentences = _segment(language, document.replace("\n", "\n\n"))
    result, copied = [], 0
    for index in [n for n, sentence in enumerate(sentences) if len(sentence) > max_characters]:
        result += sentences[copied:index]  # most sentences are short, and are copied many at a time
        result += _split_again(sentences[index], language, replacements)
        copied = index + 1
    return result + sentences[copied:]


def sentence_starts(document: str, language: str) -> list[int]:
    """Return the character offsets of the sentences of `document`; see `locate_sentences`."""
    return locate_sentences(split_sentences(document, language), document)


def locate_sentences(sentences: Sequence[str], text: str) -> list[int]:
    """Return the character offsets of sentences in a document, ascending from 0; [] if it is only whitespace.

    Whitespace between two sentences belongs to the second one, leading and trailing whitespace of the document to the
    first and the last. Where sentences have line breaks, the document may have other whitespace.
    """
    starts, end = [], 0
    for sentence in sentences:
        line, lines = sentence.strip(), []
        if "\n" in line:  # sentences with quotations may have line breaks, which `split_sentences` doubles
            line, *lines = [stripped for inner in line.split("\n") if (stripped := inner.strip())]
        if not line:
            continue
        # Most sentences are separated by one space; checking this is ten times as fast as str.find.
        is_next = text.startswith(line, end + 1) and text[end].isspace()
        start = end + 1 if is_next else text.find(line, end)
        if start < 0:
            continue
        starts.append(end)
        end = start + len(line)
        for line in lines:
            end = max(end, text.find(line, end) + len(line))
    return starts


def line_starts(document: str) -> list[int]:
    """Return the same offsets as `sentence_starts` for a document in which each line is a sentence."""
    starts, offset = [], 0
    for line in document.split("\n"):
        if line.strip():
            starts.append(max(0, offset - 1) if starts else 0)
        offset += len(line) + 1
    return starts


def _segment(language: str, text: str) -> list[str]:
    import sentencex  # only needed to prepare a corpus, not for training

    return sentencex.segment(language, text)  # pyright: ignore[reportAttributeAccessIssue]


def _split_again(sentence: str, language: str, replacements: Mapping[str, str]) -> list[str]:
    """Split `sentence` where sentencex splits it after `replacements`, which do not change its length.

    Opening quotation marks stay with the quotation.
    """
    replaced = sentence
    for mark, replacement in replacements.items():  # 18 times as fast as str.translate on text beyond ASCII
        replaced = replaced.replace(mark, replacement)
    if replaced is sentence:  # str.replace returns the same object if nothing is replaced
        return [sentence]
    cuts = list(itertools.accumulate(len(part) for part in _segment(language, replaced)))[:-1]
    for index, cut in enumerate(cuts):
        if replaced[cut - 1] == " " != sentence[cut - 1] and sentence[cut - 2].isspace():
            cuts[index] = cut - 1
    return [sentence[start:end] for start, end in itertools.pairwise([0, *cuts, len(sentence)])]
