"""Part files, with which the stages of preparation pass documents on: a few megabytes of documents as flat arrays.

Part files are written atomically: a part file that exists is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from pretrain.common.files import atomic_open
from pretrain.corpus.filters.near_duplicates import Sketches

# A row of the table of documents: hash, and numbers of sentences, items (see `Part`), words and bytes.
DOCUMENT = np.dtype([("hash", "<u8", 2), ("sentences", "<u4"), ("items", "<u4"), ("words", "<u4"), ("bytes", "<u4")])


def random_order(hashes: np.ndarray) -> np.ndarray:
    """Return sort keys (uint64 [D]) for the random order of a source's documents, from their hashes (uint64 [D, 2]).

    They are independent of both halves of a hash, which select held-out documents and the sample for the vocabulary.
    """
    return hashes[:, 0] ^ hashes[:, 1]


@dataclass(frozen=True)
class Part:
    """Documents as flat arrays; in a part file, they are in random order.

    Items are token ids or, before there is a vocabulary, indices into `distinct_words`.
    """

    items: np.ndarray  # uint16 or uint32 [items]
    sentence_items: np.ndarray  # uint32 [sentences], number of items per sentence
    documents: np.ndarray  # DOCUMENT [documents]
    distinct_words: list[bytes]  # words or, for a byte-level BPE, pieces; [] for token ids
    sketches: Sketches | None = None  # only if near-duplicates are searched; stored in a separate file

    def save(self, path: Path) -> None:
        """Write the part file."""
        words = self.distinct_words
        with atomic_open(path) as file:
            for array in (self.documents, self.items, self.sentence_items):
                np.save(file, array, allow_pickle=False)
            np.save(file, np.fromiter(map(len, words), np.uint32, len(words)), allow_pickle=False)
            np.save(file, np.frombuffer(b"".join(words), np.uint8), allow_pickle=False)

    @classmethod
    def load(cls, path: Path) -> Part:
        """Read a part file."""
        with path.open("rb") as file:
            table, items, sentence_items, lengths, joined = (np.load(file, allow_pickle=False) for _ in range(5))
        text, ends = joined.tobytes(), np.cumsum(lengths).tolist()
        words = [text[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
        return cls(items, sentence_items, table, words)

    @classmethod
    def load_selected(cls, path: Path, documents: np.ndarray) -> Part:
        """Read the documents with the given ascending indices from a part file of token ids."""
        with path.open("rb") as file:
            table, items, sentence_items = np.load(file, allow_pickle=False), _map_array(file), _map_array(file)
        start, stop = documents[0], documents[-1] + 1
        first_sentence = int(table["sentences"][:start].sum(dtype=np.int64))
        first_item = int(table["items"][:start].sum(dtype=np.int64))
        table = table[start:stop]
        sentence_items = sentence_items[first_sentence:][: int(table["sentences"].sum(dtype=np.int64))]
        items = items[first_item:][: int(table["items"].sum(dtype=np.int64))]
        keep = np.zeros(len(table), bool)
        keep[documents - start] = True
        return cls(items, sentence_items, table, []).select(keep)

    def reorder(self, order: np.ndarray) -> Part:
        """Return the documents with the indices `order`, in that order, without sketches."""
        sentences = _range_indices(self.documents["sentences"], order)
        items = _range_indices(self.documents["items"], order)
        return Part(self.items[items], self.sentence_items[sentences], self.documents[order], self.distinct_words)

    def select(self, keep: np.ndarray) -> Part:
        """Return the documents for which `keep`, bool [documents], is true."""
        if keep.all():
            return self
        sentences = np.repeat(keep, self.documents["sentences"])
        items = np.repeat(sentences, self.sentence_items)
        sketches = self.sketches.select(keep) if self.sketches else None
        sentence_items = self.sentence_items[sentences]
        return Part(self.items[items], sentence_items, self.documents[keep], self.distinct_words, sketches)


def _range_indices(sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the element indices of consecutive ranges with the given sizes, after the ranges are reordered."""
    sizes = sizes.astype(np.int64)
    starts, counts = (np.cumsum(sizes) - sizes)[order], sizes[order]
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def _map_array(file: IO[bytes]) -> np.ndarray:
    """Memory-map the array at the current position of `file`, and seek to its end."""
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if not shape[0]:
        return np.zeros(0, dtype)
    start = file.tell()
    array = np.memmap(file, dtype, "r", start, shape)
    file.seek(start + array.nbytes)
    return array


def count_documents(path: Path) -> int:
    """Return the number of documents in a part file."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        return np.lib.format.read_array_header_1_0(file)[0][0]


def load_document_table(path: Path) -> np.ndarray:
    """Read only the DOCUMENT table of a part file."""
    with path.open("rb") as file:
        return np.load(file, allow_pickle=False)
