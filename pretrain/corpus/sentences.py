"""Documents to sentences with `sentencex` (Wikimedia): paragraphs are boundaries; long quotations are split too."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_LONG_SENTENCE_CHARACTERS = 240  # about twice the mean; quotations in longer ones are cut into sentences
_QUOTATIONS = dict.fromkeys('"“”„«»‘’', " ")
# Tibetan's and Khmer's stops, which sentencex does not know, as one that it knows
_STOPS = {"\u0f0d \u0f0d": "  。", "\u0f0d": "。", "\u0f0e": "。", "\u17d4": "。", "\u17d5": "。"}
_BATCH_BYTES = 2 << 20  # text cut into columns at once: less costs more calls, more does not fit the cache


@dataclass(frozen=True)
class Splitting:
    """How documents are cut: into the text of their sentences, and where these start in characters."""

    split: Callable[[str], list[str]]
    starts: Callable[[str], list[int]]


def splitting_of(language: str, *, by_lines: bool) -> Splitting:
    """The splitting of documents in a language; `by_lines`: each line is a sentence."""
    if by_lines:
        return Splitting(lambda text: text.split("\n"), line_starts)
    return Splitting(lambda text: split_sentences(text, language), lambda text: sentence_starts(text, language))


def batches_of(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of documents with about _BATCH_BYTES characters each."""
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
    """The sentences of `document`, whose paragraphs are lines. Joined, they are the document again, except for blanks.

    `language` is an ISO 639-1 code; it decides abbreviations ("Dr.", "z.B."), unknown codes fall back to general rules.
    sentencex never cuts inside quotation marks, which in novels makes sentences of several hundred words; long
    ones are therefore cut a second time with the marks hidden, as are all where sentencex does not know the stops.
    """
    has_others = not document.isascii() and any(mark in document for mark in _STOPS)
    longest, hidden = (0, _QUOTATIONS | _STOPS) if has_others else (_LONG_SENTENCE_CHARACTERS, _QUOTATIONS)
    sentences = _segment(language, document.replace("\n", "\n\n"))
    parts, taken = [], 0
    for number in [n for n, sentence in enumerate(sentences) if len(sentence) > longest]:
        parts += sentences[taken:number]  # most sentences are short and are copied in long runs
        parts += _split_quotations(sentences[number], language, hidden)
        taken = number + 1
    return parts + sentences[taken:]


def sentence_starts(document: str, language: str) -> list[int]:
    """`starts_of` the sentences of `document`."""
    return starts_of(split_sentences(document, language), document)


def starts_of(sentences: Sequence[str], text: str) -> list[int]:
    """Where sentences start in a text, in characters, ascending from 0; [] if it is white space alone.

    The white space between two sentences belongs to the second, and that at the text's ends to the first and last. The
    text may have other white space than the sentences where these have line ends.
    """
    starts, end = [], 0
    for sentence in sentences:
        line, lines = sentence.strip(), []
        if "\n" in line:  # within quotations, sentences may have line ends, which `split_sentences` doubles
            line, *lines = [one for part in line.split("\n") if (one := part.strip())]
        if not line:
            continue
        # str.find takes ten times as long, and there is a blank between most sentences.
        is_next = text.startswith(line, end + 1) and text[end].isspace()
        place = end + 1 if is_next else text.find(line, end)
        if place < 0:
            continue
        starts.append(end)
        end = place + len(line)
        for line in lines:
            end = max(end, text.find(line, end) + len(line))
    return starts


def line_starts(document: str) -> list[int]:
    """As `sentence_starts`, for a document whose lines are its sentences."""
    starts, place = [], 0
    for line in document.split("\n"):
        if line.strip():
            starts.append(max(0, place - 1) if starts else 0)
        place += len(line) + 1
    return starts


def _segment(language: str, text: str) -> list[str]:
    import sentencex  # needed to prepare a corpus, not to train on it

    return sentencex.segment(language, text)  # pyright: ignore[reportAttributeAccessIssue]


def _split_quotations(sentence: str, language: str, marks: Mapping[str, str]) -> list[str]:
    """Cut `sentence` as if it had others in place of `marks`; one that opens a quotation stays with it."""
    hidden = sentence
    for mark, known in marks.items():  # 18 times as fast as str.translate on text that is not all ASCII
        hidden = hidden.replace(mark, known)
    if hidden is sentence:  # str.replace returns the string itself where it finds nothing
        return [sentence]
    cuts = list(itertools.accumulate(len(part) for part in _segment(language, hidden)))[:-1]
    for number, cut in enumerate(cuts):
        if hidden[cut - 1] == " " != sentence[cut - 1] and sentence[cut - 2].isspace():
            cuts[number] = cut - 1
    return [sentence[a:b] for a, b in itertools.pairwise([0, *cuts, len(sentence)])]
