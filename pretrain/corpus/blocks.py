"""Blocks of a shard: ranges of about a million tokens that can each be read and verified separately.

    <shard>.blocks.npy  BLOCK [blocks]

A block consists of whole documents. Only documents with more tokens than a block are split, at a sentence boundary if
there is one nearby.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pretrain.common.files import atomic_open, sha256_file

BLOCK_TOKENS = 1 << 20
_BLOCK_DOCUMENTS = 1 << 14  # maximum documents per block, to bound the memory of `batches.blocks.Units`

ARRAYS: tuple[str, ...] = ("documents", "sentences", "tokens")  # arrays of a shard, in the order of `block_digest`

BLOCK = np.dtype(
    [
        ("begin", "<i8"),  # token offset within the shard
        ("end", "<i8"),
        ("first", "<i8"),  # index of the first document
        ("last", "<i8"),  # one past the index of the last document
        ("first_sentence", "<i8"),  # index of the first sentence that starts at or after `begin`
        ("last_sentence", "<i8"),  # index of the first sentence that starts at or after `end`
        ("digest", "u1", (16,)),  # first 16 bytes of the SHA-256 of the elements in `ranges_of`
    ]
)
_BOUNDS = [name for name in BLOCK.names or () if name != "digest"]


def cut_blocks(documents: np.ndarray, sentences: np.ndarray, tokens: int = 0) -> np.ndarray:
    """Cut a shard into blocks of about `tokens` tokens (0: BLOCK_TOKENS), or fewer where documents are short.

    Args:
        documents: int64 [documents + 1, 2], (sentence offset, token offset) of each document.
        sentences: int64 [sentences + 1], token offset of each sentence.

    Returns:
        BLOCK [blocks], without digests.
    """
    tokens = tokens or BLOCK_TOKENS
    edges = [(0, 0, False), *_edges(documents, sentences, tokens), (int(documents[-1, 1]), len(documents) - 1, False)]
    blocks = np.zeros(len(edges) - 1, BLOCK)
    for block, (start, first, _), (end, last, is_divided) in zip(blocks, edges, edges[1:], strict=False):
        block["begin"], block["end"], block["first"], block["last"] = start, end, first, last + is_divided
    blocks = blocks[blocks["end"] > blocks["begin"]]
    for block in blocks:
        first, last = documents[block["first"], 0], documents[block["last"], 0]
        sentence_offsets = np.searchsorted(sentences[first : last + 1], [block["begin"], block["end"]])
        block["first_sentence"], block["last_sentence"] = first + sentence_offsets
    return blocks


def _edges(documents: np.ndarray, sentences: np.ndarray, tokens: int) -> Iterator[tuple[int, int, bool]]:
    """Yield each inner block boundary: (token offset, document that starts or is split there, whether it is split)."""
    starts, previous_edge = documents[:, 1], 0
    # Count some tokens more for each document, so that no block has more than _BLOCK_DOCUMENTS documents.
    overhead = -(-tokens // _BLOCK_DOCUMENTS)
    size = int(starts[-1]) + overhead * (len(documents) - 1)
    count = max(1, round(size / tokens))
    for edge_index in range(1, count):
        target = size * edge_index // count
        document = bisect_left(range(len(starts)), target, key=lambda n: int(starts[n]) + overhead * n)
        edge, is_divided = int(starts[document]), False
        previous = max(document - 1, 0)
        previous_start, min_tokens = int(starts[previous]), tokens // 16
        if edge - previous_start > tokens:
            nearest = _sentence_near(documents, sentences, previous, target - overhead * previous, tokens // 64)
            if nearest - previous_start >= min_tokens and edge - nearest >= min_tokens:
                edge, document, is_divided = nearest, previous, True
        if edge > previous_edge:
            yield edge, document, is_divided
            previous_edge = edge


def _sentence_near(documents: np.ndarray, sentences: np.ndarray, document: int, offset: int, max_gap: int) -> int:
    """Return the start of the first sentence within `max_gap` tokens after `offset`, or `offset` if there is none."""
    starts = sentences[documents[document, 0] : documents[document + 1, 0]]
    index = int(np.searchsorted(starts, offset))
    return int(starts[index]) if index < len(starts) and starts[index] - offset <= max_gap else offset


def ranges_of(blocks: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the range of each block in each array of the shard: (start, end), int64 [B] each.

    In `documents` and `sentences`, adjacent blocks share the entry at their boundary.
    """
    return {
        "documents": (blocks["first"], blocks["last"] + 1),
        "sentences": (blocks["first_sentence"], blocks["last_sentence"] + 1),
        "tokens": (blocks["begin"], blocks["end"]),
    }


def concatenate_tables(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate tables of blocks: return a view if they are adjacent in memory, else a copy without digests."""
    base = tables[0].base if tables else None
    ends = [table.ctypes.data + table.nbytes for table in tables]
    starts = [table.ctypes.data for table in tables[1:]]
    if not isinstance(base, np.ndarray) or ends[:-1] != starts or any(table.base is not base for table in tables):
        return np.concatenate([table[_BOUNDS] for table in (np.zeros(0, BLOCK), *tables)])
    first = (tables[0].ctypes.data - base.ctypes.data) // BLOCK.itemsize
    return base[first : first + sum(map(len, tables))]


def block_digest(contents: Iterator[bytes | memoryview]) -> bytes:
    """Return the digest of a block from the bytes of its documents, sentences and tokens; 16 bytes."""
    sha256 = hashlib.sha256()
    for content in contents:
        sha256.update(content)
    return sha256.digest()[:16]


def write_blocks(path: Path, arrays: dict[str, np.ndarray]) -> str:
    """Write the table of blocks of a shard with the given arrays; return the file's SHA-256."""
    int64 = {name: np.asarray(arrays[name]).view(np.int64) for name in ("documents", "sentences")}
    blocks = cut_blocks(int64["documents"], int64["sentences"])
    bounds = ranges_of(blocks)
    for index, block in enumerate(blocks):
        ranges = (arrays[name][start[index] : end[index]] for name, (start, end) in bounds.items())
        block["digest"] = np.frombuffer(block_digest(np.ascontiguousarray(part).data for part in ranges), np.uint8)
    with atomic_open(path) as file:
        np.save(file, blocks, allow_pickle=False)
    return sha256_file(path)
