"""The text of one split of a corpus: vectorized lookup of documents, sentences and tokens in all its shards."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pretrain.corpus.shards import Shard

# Looking up a sample maps about seven parts of the shards into the process, usually 64 kB each. In a corpus of more
# than KEEP_MAPPED bytes, everything is unmapped again after every SAMPLES_MAPPED samples.
KEEP_MAPPED = 1 << 28
SAMPLES_MAPPED = 512
_DAMAGED = "an offset points outside its shard; the corpus is damaged"


@dataclass(frozen=True)
class Unit:
    """The unit that each of B samples is cut from: a document, or a range of consecutive documents."""

    shard: np.ndarray  # index of the shard
    start: np.ndarray  # offset of the first token within the shard
    size: np.ndarray  # number of tokens, plus one for each separator between documents
    first_document: np.ndarray  # index of the first document within the shard
    stop_document: np.ndarray  # index after the last document
    first_sentence: np.ndarray  # index of the block's first sentence; the unit's document may start in an earlier block
    stop_sentence: np.ndarray  # index after the block's last sentence

    def __getitem__(self, rows: np.ndarray) -> Unit:
        return Unit(*(column[rows] for column in vars(self).values()))


class ShardText:
    """The shards, mapped from disk. Offsets and indices are within a shard; arrays are int64 [B] unless noted."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._sentences = JoinedArrays([np.asarray(shard.sentences).view(np.int64) for shard in shards])
        self._documents = JoinedArrays([np.asarray(shard.documents).view(np.int64).reshape(-1) for shard in shards])
        self._document_tables = [np.asarray(shard.documents).view(np.int64) for shard in shards]
        self.tokens = JoinedArrays([shard.tokens for shard in shards])
        self._document_counts = np.array([len(table) - 1 for table in self._document_tables])
        mapped = [array for shard in shards for array in (shard.sentences, shard.documents, shard.tokens)]
        files = {id(array.base): array.base for array in mapped if isinstance(array.base, mmap.mmap)}
        self._mappings = list(files.values()) if sum(array.nbytes for array in mapped) > KEEP_MAPPED else []
        self._lookups = 0

    def count_lookups(self, samples: int) -> None:
        """Count the samples that are looked up; regularly unmap their pages, which stay in the page cache."""
        self._lookups += samples
        if self._lookups >= SAMPLES_MAPPED:
            self.unmap_pages()

    def unmap_pages(self) -> None:
        """Unmap the pages that lookups have mapped, if the corpus is large."""
        self._lookups = 0
        for mapping in self._mappings:
            mapping.madvise(mmap.MADV_DONTNEED)  # so that the pages are not counted as this process's memory

    def document_count(self, shard: int) -> int:
        return int(self._document_counts[shard])

    def document_start(self, shard: np.ndarray, document: np.ndarray) -> np.ndarray:
        """Return the token offset of each document; for the index after the last one, the number of tokens."""
        return self._documents.at(shard, 2 * document + 1)

    def first_sentence_of(self, shard: np.ndarray, document: np.ndarray) -> np.ndarray:
        """Return the index of each document's first sentence; for the index after the last one, the sentence count."""
        return self._documents.at(shard, 2 * document)

    def document_starts(self, shard: int, first: int, stop: int) -> np.ndarray:
        """Return the token offsets of the documents [first, stop); int64 [stop - first]."""
        return self._document_tables[shard][first:stop, 1]

    def sentence_start(self, shard: np.ndarray, sentence: np.ndarray) -> np.ndarray:
        """Return the token offset of each sentence."""
        return self._sentences.at(shard, sentence)

    def sentence_from(self, shard: np.ndarray, low: np.ndarray, high: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Return the first sentence in [low, high) that starts at or after `offset`, or `high` if none does."""
        return self.find_sentence(shard, low, high, offset)[0]

    def find_sentence(
        self, shard: np.ndarray, low: np.ndarray, high: np.ndarray, offset: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (result of `sentence_from`, start of the previous sentence, start of the sentence).

        The former start is undefined if the sentence is `low`, the latter if it is `high`.
        """
        remaining = np.maximum(high - low, 0)
        start, array = self._sentences.range_starts(shard, low, remaining), self._sentences.array
        position, last = start.copy(), start + np.maximum(remaining - 1, 0)
        for _ in range(int(remaining.max(initial=0)).bit_length()):
            half = remaining >> 1
            # Where the search is finished, `position` may be past the range and must not be read.
            is_before = array.take(np.minimum(position + half, last), mode="clip") < offset
            is_before &= remaining > 0
            half += 1
            position += half * is_before
            remaining = np.where(is_before, remaining - half, half - 1)
        return low + position - start, array.take(position - 1, mode="clip"), array.take(position, mode="clip")

    def last_document(
        self, shard: np.ndarray, first: np.ndarray, stop: np.ndarray, limit: np.ndarray, *, column: int, gap: int = 0
    ) -> np.ndarray:
        """Return the last document in [first, stop) whose offset is at most `limit`, or `first` if there is none.

        The offset is the index of its first sentence (`column` 0) or token (`column` 1) + `gap` per earlier document.
        """
        low, high = first.copy(), stop.copy()
        for _ in range(int((stop - first).max(initial=0)).bit_length()):
            middle = (low + high) >> 1
            is_reached = self._documents.at(shard, 2 * middle + column) + gap * (middle - first) <= limit
            low, high = np.where(is_reached, middle, low), np.where(is_reached, high, middle)
        return low


class DocumentSentences:
    """The starts of sentences in units that are single documents; implements `cuts.SentenceStarts`."""

    def __init__(self, text: ShardText, unit: Unit) -> None:
        self._text, self._unit = text, unit

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        text, unit = self._text, self._unit
        first = text.first_sentence_of(unit.shard, unit.first_document)
        stop = text.first_sentence_of(unit.shard, unit.stop_document)
        return np.maximum(first, unit.first_sentence), np.minimum(stop, unit.stop_sentence)

    def find_sentence(
        self, rows: np.ndarray, low: np.ndarray, high: np.ndarray, position: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shard, start = self._unit.shard[rows], self._unit.start[rows]
        following, before, after = self._text.find_sentence(shard, low, high, start + position)
        return following, before - start, after - start

    def token(self, rows: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Convert positions in the units `rows` to token offsets in their shards."""
        return self._unit.start[rows] + position


class JoinedSentences(DocumentSentences):
    """Like `DocumentSentences`, for units of several documents; each separator between them has a position."""

    def find_sentence(
        self, rows: np.ndarray, low: np.ndarray, high: np.ndarray, position: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        unit, text = self._unit[rows], self._text
        document = self._document(unit, position)
        first = np.maximum(text.first_sentence_of(unit.shard, document), unit.first_sentence)
        stop = np.minimum(text.first_sentence_of(unit.shard, document + 1), unit.stop_sentence)
        offset = unit.start + position - (document - unit.first_document)
        following = text.sentence_from(unit.shard, first, stop, offset).clip(low, np.maximum(high, low))
        return following, self._position(unit, np.maximum(following - 1, 0)), self._position(unit, following)

    def _position(self, unit: Unit, sentence: np.ndarray) -> np.ndarray:
        """Return the position in its unit at which each sentence starts."""
        document = self._text.last_document(unit.shard, unit.first_document, unit.stop_document, sentence, column=0)
        separators = np.minimum(document, unit.stop_document - 1) - unit.first_document
        return self._text.sentence_start(unit.shard, sentence) - unit.start + separators

    def token(self, rows: np.ndarray, position: np.ndarray) -> np.ndarray:
        unit = self._unit[rows]
        document = self._document(unit, position)
        end = self._text.document_start(unit.shard, document + 1)
        return np.minimum(unit.start + position - (document - unit.first_document), end)

    def _document(self, unit: Unit, position: np.ndarray) -> np.ndarray:
        """Return the document that contains each position; for a separator, the document before it."""
        limit = unit.start + position
        return self._text.last_document(unit.shard, unit.first_document, unit.stop_document, limit, column=1, gap=1)


class JoinedArrays:
    """Many arrays of one type, which a single `take` can read without copying them.

    The view `array` spans the memory from the first array to the last. Memory between arrays is never read, since every
    index is first checked against the bounds of its array.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = [np.asarray(array) for array in arrays]  # keeps the memory alive
        self._lengths = np.array([len(array) for array in self._arrays])
        itemsize = self._arrays[0].itemsize
        addresses = np.array([array.__array_interface__["data"][0] for array in self._arrays])
        lowest = self._arrays[int(addresses.argmin())]
        self._starts, excess = np.divmod(addresses - addresses.min(), itemsize)
        if excess.any() or any(array.dtype != lowest.dtype or not array.flags.c_contiguous for array in self._arrays):
            raise ValueError("arrays must be contiguous, aligned and of one type")
        length = int((self._starts + self._lengths).max())
        self.array = as_strided(lowest, (length,), (itemsize,), writeable=False)

    def at(self, array_index: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return element `index[i]` of the array with index `array_index[i]`, for each i; [B]."""
        return self.array.take(self._index(array_index, index))

    def span_starts(self, array_index: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Check the bounds of spans of at least one element; return the starts as indices into `.array`, int64 [B]."""
        self._index(array_index, start + length - 1)
        return self._index(array_index, start)

    def range_starts(self, array_index: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Like `span_starts`, but spans may also be empty, at any offset."""
        if (start + length > self._lengths[array_index]).any() or start.min(initial=0) < 0:
            raise IndexError(_DAMAGED)
        return self._starts[array_index] + start

    def _index(self, array_index: np.ndarray, index: np.ndarray) -> np.ndarray:
        # As unsigned integers, negative indices are huge, so one comparison checks both bounds.
        if (index.view(np.uint64) >= self._lengths[array_index].view(np.uint64)).any():
            raise IndexError(_DAMAGED)
        return self._starts[array_index] + index
