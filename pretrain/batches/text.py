"""The text of a split: vectorized lookup of documents, sentences and tokens in all its shards."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pretrain.corpus.shards import Shard

# Looking up a sample maps about seven pages of the shards into the process, usually 64 kB each. In a corpus of more
# than KEEP_MAPPED bytes they are unmapped after SAMPLES_MAPPED samples.
KEEP_MAPPED = 1 << 28
SAMPLES_MAPPED = 512
_DAMAGED = "an offset points outside its shard; the corpus is damaged"


@dataclass(frozen=True)
class Unit:
    """The units that B samples are cut from: documents, or ranges of neighboring documents."""

    shard: np.ndarray
    begin: np.ndarray  # token offset
    size: np.ndarray  # tokens, plus one between documents
    first: np.ndarray  # first document, as an index into the shard
    last: np.ndarray  # one past the last document
    first_sentence: np.ndarray  # of its block; a document that spans several blocks has others, too
    last_sentence: np.ndarray  # one past the block's last one

    def __getitem__(self, rows: np.ndarray) -> Unit:
        return Unit(*(column[rows] for column in vars(self).values()))


class ShardText:
    """Shards, mapped from disk. Offsets are within a shard; all arrays are int64 [B] unless noted."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._sentences = JoinedArrays([np.asarray(shard.sentences).view(np.int64) for shard in shards])
        self._documents = JoinedArrays([np.asarray(shard.documents).view(np.int64).reshape(-1) for shard in shards])
        self._tables = [np.asarray(shard.documents).view(np.int64) for shard in shards]
        self.tokens = JoinedArrays([shard.tokens for shard in shards])
        self._counts = np.array([len(table) - 1 for table in self._tables])
        mapped = [array for shard in shards for array in (shard.sentences, shard.documents, shard.tokens)]
        files = {id(array.base): array.base for array in mapped if isinstance(array.base, mmap.mmap)}
        self._mapped = list(files.values()) if sum(array.nbytes for array in mapped) > KEEP_MAPPED else []
        self._looked_up = 0

    def looked_up(self, samples: int) -> None:
        """Count samples looked up, and regularly unmap their pages, which stay in the page cache."""
        self._looked_up += samples
        if self._looked_up >= SAMPLES_MAPPED:
            self.forget()

    def forget(self) -> None:
        """Unmap the pages that lookups mapped, if the corpus is large."""
        self._looked_up = 0
        for mapping in self._mapped:
            mapping.madvise(mmap.MADV_DONTNEED)  # so that the pages do not count as this process's memory

    def document_count(self, shard: int) -> int:
        return int(self._counts[shard])

    def document_begin(self, shard: np.ndarray, document: np.ndarray) -> np.ndarray:
        """Return the token offset of documents, or one past the last token for the index after the last document."""
        return self._documents.at(shard, 2 * document + 1)

    def document_first(self, shard: np.ndarray, document: np.ndarray) -> np.ndarray:
        """Return the first sentence of documents, or one past the last sentence."""
        return self._documents.at(shard, 2 * document)

    def document_begins(self, shard: int, first: int, stop: int) -> np.ndarray:
        """Return the token offsets of the documents [first, stop); int64 [stop - first]."""
        return self._tables[shard][first:stop, 1]

    def offset(self, shard: np.ndarray, sentence: np.ndarray) -> np.ndarray:
        """Return the token offset of sentences."""
        return self._sentences.at(shard, sentence)

    def first_at_least(self, shard: np.ndarray, low: np.ndarray, high: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Return the first sentence in [low, high) that starts at or after `offset`, or `high`; a binary search."""
        return self.around(shard, low, high, offset)[0]

    def around(
        self, shard: np.ndarray, low: np.ndarray, high: np.ndarray, offset: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (`first_at_least`, start of the sentence before it, its start).

        The second is undefined if the first is `low`, the third if it is `high`.
        """
        left = np.maximum(high - low, 0)
        begin, array = self._sentences.ranges(shard, low, left), self._sentences.array
        place, last = begin.copy(), begin + np.maximum(left - 1, 0)
        for _ in range(int(left.max(initial=0)).bit_length()):
            half = left >> 1
            # Where nothing is left, `place` may be past the range and must not be read.
            before = array.take(np.minimum(place + half, last), mode="clip") < offset
            before &= left > 0
            half += 1
            place += half * before
            left = np.where(before, left - half, half - 1)
        return low + place - begin, array.take(place - 1, mode="clip"), array.take(place, mode="clip")

    def last_document(
        self, shard: np.ndarray, first: np.ndarray, last: np.ndarray, value: np.ndarray, *, column: int, each: int = 0
    ) -> np.ndarray:
        """Return the last document in [first, last) whose entry is at most `value`; at least `first`.

        The entry of a document is its first sentence (`column` 0) or token (1), plus `each` for every document since
        `first`.
        """
        low, high = first.copy(), last.copy()
        for _ in range(int((last - first).max(initial=0)).bit_length()):
            middle = (low + high) >> 1
            reached = self._documents.at(shard, 2 * middle + column) + each * (middle - first) <= value
            low, high = np.where(reached, middle, low), np.where(reached, high, middle)
        return low


class DocumentPlaces:
    """Sentences of units that are documents, by their offset from the start of the unit (`cuts.Places`)."""

    def __init__(self, text: ShardText, unit: Unit) -> None:
        self._text, self._unit = text, unit

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        text, unit = self._text, self._unit
        first, last = text.document_first(unit.shard, unit.first), text.document_first(unit.shard, unit.last)
        return np.maximum(first, unit.first_sentence), np.minimum(last, unit.last_sentence)

    def around(
        self, rows: np.ndarray, low: np.ndarray, high: np.ndarray, place: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shard, begin = self._unit.shard[rows], self._unit.begin[rows]
        found, before, after = self._text.around(shard, low, high, begin + place)
        return found, before - begin, after - begin

    def token(self, rows: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return the token offset of places."""
        return self._unit.begin[rows] + place


class JoinedPlaces(DocumentPlaces):
    """Like `DocumentPlaces`, for units of several documents: one more place between neighbors, for the separator."""

    def around(
        self, rows: np.ndarray, low: np.ndarray, high: np.ndarray, place: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        unit, text = self._unit[rows], self._text
        document = self._document(unit, place)
        first = np.maximum(text.document_first(unit.shard, document), unit.first_sentence)
        last = np.minimum(text.document_first(unit.shard, document + 1), unit.last_sentence)
        found = text.first_at_least(unit.shard, first, last, unit.begin + place - (document - unit.first))
        found = found.clip(low, np.maximum(high, low))
        return found, self._place(unit, np.maximum(found - 1, 0)), self._place(unit, found)

    def _place(self, unit: Unit, sentence: np.ndarray) -> np.ndarray:
        """Return the start of sentences of units."""
        document = self._text.last_document(unit.shard, unit.first, unit.last, sentence, column=0)
        return self._text.offset(unit.shard, sentence) - unit.begin + np.minimum(document, unit.last - 1) - unit.first

    def token(self, rows: np.ndarray, place: np.ndarray) -> np.ndarray:
        unit = self._unit[rows]
        document = self._document(unit, place)
        end = self._text.document_begin(unit.shard, document + 1)
        return np.minimum(unit.begin + place - (document - unit.first), end)

    def _document(self, unit: Unit, place: np.ndarray) -> np.ndarray:
        """Return the document of units that contains a place, or precedes the separator there."""
        value = unit.begin + place
        return self._text.last_document(unit.shard, unit.first, unit.last, value, column=1, each=1)


class JoinedArrays:
    """Many arrays of one type, read by one `take` in place, without a copy.

    A view spans from the lowest array in memory to the highest. Memory between arrays is never read, since every index
    is checked against the bounds of its array first.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = [np.asarray(array) for array in arrays]  # keeps the memory alive
        self._lengths = np.array([len(array) for array in self._arrays])
        bytes_each = self._arrays[0].itemsize
        addresses = np.array([array.__array_interface__["data"][0] for array in self._arrays])
        lowest = self._arrays[int(addresses.argmin())]
        self._begins, odd = np.divmod(addresses - addresses.min(), bytes_each)
        if odd.any() or any(a.dtype != lowest.dtype or not a.flags.c_contiguous for a in self._arrays):
            raise ValueError("arrays must be contiguous, aligned and of one type")
        length = int((self._begins + self._lengths).max())
        self.array = as_strided(lowest, (length,), (bytes_each,), writeable=False)

    def at(self, number: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return element `index` of array `number`, each [B]."""
        return self.array.take(self._place(number, index))

    def spans(self, number: np.ndarray, begin: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Return indices into `.array` of spans of at least one element, checked at both bounds; int64 [B]."""
        self._place(number, begin + length - 1)
        return self._place(number, begin)

    def ranges(self, number: np.ndarray, begin: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Like `spans`, for spans that may be empty and then have any offset."""
        if (begin + length > self._lengths[number]).any() or begin.min(initial=0) < 0:
            raise IndexError(_DAMAGED)
        return self._begins[number] + begin

    def _place(self, number: np.ndarray, index: np.ndarray) -> np.ndarray:
        # A negative index becomes a huge unsigned one.
        if (index.view(np.uint64) >= self._lengths[number].view(np.uint64)).any():
            raise IndexError(_DAMAGED)
        return self._begins[number] + index
