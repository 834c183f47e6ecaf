"""Split documents into sentences with `sentencex` (Wikimedia), and also between paragraphs and in long quotations."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_LONG_SENTENCE_CHARACTERS = 240  # about twice the mean; quotations in longer sentences are split
_QUOTATIONS = dict.fromkeys('"“”„«»‘’', " ")
# Full stops of Tibetan and Khmer that sentencex does not support -> a full stop that it supports.
_STOPS = {"\u0f0d \u0f0d": "  。", "\u0f0d": "。", "\u0f0e": "。", "\u17d4": "。", "\u17d5": "。"}
_BATCH_BYTES = 2 << 20  # text processed together; a larger batch does not fit in the CPU cache


@dataclass(frozen=True)
class Splitting:
    """Two functions: `split` a document into sentences, and return the character offsets where its sentences start."""

    split: Callable[[str], list[str]]
    starts: Callable[[str], list[int]]


def splitting_of(language: str, *, by_lines: bool) -> Splitting:
    """Return the splitting of documents in a language, or into lines if each line is a sentence (`by_lines`)."""
    if by_lines:
        return Splitting(lambda text: text.split("\n"), line_starts)
    return Splitting(lambda text: split_sentences(text, language), lambda text: sentence_starts(text, language))


def batches_of(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of documents with about _BATCH_BYTES characters each."""
    batch: list[str] = []
    total = 0
    for text in texts:
        batch.append(text)
        total += len(text)
        if total >= _BATCH_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def split_sentences(document: str, language: str) -> list[str]:
    """Split a document, whose paragraphs are lines, into sentences. Joined, they are the document, except for blanks.

    `language` is an ISO 639-1 code that selects abbreviations ("Dr.", "z.B."); unknown codes use general rules.
    sentencex never splits inside quotation marks, which can give sentences of several hundred words in novels. Long
    sentences are therefore split again with the marks hidden, as are sentences with full stops unknown to sentencex.
    """
    has_others = not document.isascii() and any(mark in document for mark in _STOPS)
    max_characters, hidden = (0, _QUOTATIONS | _STOPS) if has_others else (_LONG_SENTENCE_CHARACTERS, _QUOTATIONS)
    sentences = _segment(language, document.replace("\n", "\n\n"))
    result, copied = [], 0
    for number in [n for n, sentence in enumerate(sentences) if len(sentence) > max_characters]:
        result += sentences[copied:number]  # most sentences are short, and are copied many at a time
        result += _split_quotations(sentences[number], language, hidden)
        copied = number + 1
    return result + sentences[copied:]


def sentence_starts(document: str, language: str) -> list[int]:
    """Return the character offsets of the sentences of `document`; see `starts_of`."""
    return starts_of(split_sentences(document, language), document)


def starts_of(sentences: Sequence[str], text: str) -> list[int]:
    """Return the character offsets of sentences in a document, ascending from 0; [] if it is only white space.

    White space between two sentences belongs to the second one, leading and trailing white space to the first and the
    last. Where sentences have line breaks, the document may have different white space.
    """
    starts, end = [], 0
    for sentence in sentences:
        line, lines = sentence.strip(), []
        if "\n" in line:  # sentences with quotations may have line breaks, which `split_sentences` doubles
            line, *lines = [stripped for inner in line.split("\n") if (stripped := inner.strip())]
        if not line:
            continue
        # Most sentences are separated by one blank; checking this is ten times as fast as str.find.
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
    """Like `sentence_starts`, for a document whose lines are sentences."""
    starts, offset = [], 0
    for line in document.split("\n"):
        if line.strip():
            starts.append(max(0, offset - 1) if starts else 0)
        offset += len(line) + 1
    return starts


def _segment(language: str, text: str) -> list[str]:
    import sentencex  # only needed to prepare a corpus, not for training

    return sentencex.segment(language, text)  # pyright: ignore[reportAttributeAccessIssue]


def _split_quotations(sentence: str, language: str, marks: Mapping[str, str]) -> list[str]:
    """Split `sentence` where it is split after replacing `marks`; opening quotation marks stay with the quotation."""
    hidden = sentence
    for mark, replacement in marks.items():  # 18 times as fast as str.translate on text beyond ASCII
        hidden = hidden.replace(mark, replacement)
    if hidden is sentence:  # str.replace returns the same object if nothing is replaced
        return [sentence]
    cuts = list(itertools.accumulate(len(part) for part in _segment(language, hidden)))[:-1]
    for number, cut in enumerate(cuts):
        if hidden[cut - 1] == " " != sentence[cut - 1] and sentence[cut - 2].isspace():
            cuts[number] = cut - 1
    return [sentence[start:end] for start, end in itertools.pairwise([0, *cuts, len(sentence)])]
