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
        ("begin", "<i8"),  # index of the first token within the shard
        ("end", "<i8"),  # one past the index of the last token
        ("first", "<i8"),  # index of the first document
        ("last", "<i8"),  # one past the index of the last document
        ("first_sentence", "<i8"),  # index of the first sentence that starts at or after `begin`
        ("last_sentence", "<i8"),  # index of the first sentence that starts at or after `end`
        ("digest", "u1", (16,)),  # first 16 bytes of the SHA-256 of the elements in `ranges_of`
    ]
)
_BOUNDS = [name for name in BLOCK.names or () if name != "digest"]


def cut_blocks(documents: np.ndarray, sentences: np.ndarray, block_tokens: int = 0) -> np.ndarray:
    """Cut a shard into blocks of about `block_tokens` tokens (0: BLOCK_TOKENS), or fewer if documents are short.

    Args:
        documents: int64 [documents + 1, 2], (sentence offset, token offset) of each document.
        sentences: int64 [sentences + 1], token offset of each sentence.

    Returns:
        BLOCK [blocks], without digests.
    """
    block_tokens = block_tokens or BLOCK_TOKENS
    last_edge = int(documents[-1, 1]), len(documents) - 1, False
    edges = [(0, 0, False), *_inner_edges(documents, sentences, block_tokens), last_edge]
    blocks = np.zeros(len(edges) - 1, BLOCK)
    for block, (start, first, _), (end, last, is_split) in zip(blocks, edges, edges[1:], strict=False):
        block["begin"], block["end"], block["first"], block["last"] = start, end, first, last + is_split
    blocks = blocks[blocks["end"] > blocks["begin"]]
    for block in blocks:
        start, end = documents[block["first"], 0], documents[block["last"], 0]
        block_sentences = np.searchsorted(sentences[start : end + 1], [block["begin"], block["end"]])
        block["first_sentence"], block["last_sentence"] = start + block_sentences
    return blocks


def _inner_edges(documents: np.ndarray, sentences: np.ndarray, block_tokens: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (token offset, index of the document that starts or is split there, whether it is split) per inner edge."""
    starts, previous_edge = documents[:, 1], 0
    # Count each document with additional tokens, so that no block has more than _BLOCK_DOCUMENTS documents.
    overhead = -(-block_tokens // _BLOCK_DOCUMENTS)
    size = int(starts[-1]) + overhead * (len(documents) - 1)
    count = max(1, round(size / block_tokens))
    for edge_index in range(1, count):
        target = size * edge_index // count
        document = bisect_left(range(len(starts)), target, key=lambda n: int(starts[n]) + overhead * n)
        edge, is_split = int(starts[document]), False
        previous = max(document - 1, 0)
        previous_start, min_tokens = int(starts[previous]), block_tokens // 16
        if edge - previous_start > block_tokens:
            split = _sentence_start(documents, sentences, previous, target - overhead * previous, block_tokens // 64)
            if split - previous_start >= min_tokens and edge - split >= min_tokens:
                edge, document, is_split = split, previous, True
        if edge > previous_edge:
            yield edge, document, is_split
            previous_edge = edge


def _sentence_start(documents: np.ndarray, sentences: np.ndarray, document: int, offset: int, max_gap: int) -> int:
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
