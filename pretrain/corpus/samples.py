"""Samples of documents, to check at the end of `prepare` that tokenizer.json gives the stored tokens.

A process that reads documents saves some of them next to each part file. The process that writes a shard looks up their
indices in the shard. At the end, the coordinating process reads their tokens from the shard and encodes the documents
again. The cost is bounded for any size of corpus.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from pretrain.common.errors import InputError
from pretrain.common.files import write_json
from pretrain.corpus.parts import Part
from pretrain.corpus.shards import map_array
from pretrain.corpus.whole_documents import without_special_tokens

MAX_PARTS = 32  # maximum part files of a source from which a shard takes sampled documents
_MAX_PER_PART = 16  # maximum sampled documents per part file
_LONG_CHARACTERS = 1 << 13  # length above which a document is only sampled if all are longer
_MIN_CHARACTERS, _MAX_CHARACTERS = 1 << 14, 1 << 16  # bounds of the number of characters in the sample of a shard
_TOKENS_PER_CHARACTER = 1 << 9  # number of tokens in a shard per character in its sample, within these bounds
_SUFFIX = ".sample"
_MAX_SHOWN = 6  # maximum tokens in a message

SampledDocument = tuple[str, list[int]]  # string and stored tokens of a document


def choose(texts: Sequence[str]) -> list[int]:
    """Return the indices of the documents to sample, evenly spread."""
    short = [index for index, text in enumerate(texts) if len(text) <= _LONG_CHARACTERS]
    short = short or sorted(range(len(texts)), key=lambda index: len(texts[index]))[:1]
    return short[:: -(-len(short) // _MAX_PER_PART)] if short else []


def save(path: Path, part: Part, sample: Iterable[tuple[np.ndarray, str]]) -> None:
    """Save the `sample`, (hash, string) of documents, next to the part file at `path`, except repeated documents."""
    rows = [[*digest.tolist(), text] for digest, text in sample if len(_indices_of(part, digest)) == 1]
    write_json(path.with_suffix(_SUFFIX), rows)


def load(path: Path, part: Part) -> list[tuple[str, np.ndarray]]:
    """Return (string, hash) of the sampled documents in `part`, which was loaded from the part file at `path`."""
    path = path.with_suffix(_SUFFIX)
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    sampled = [(text, np.array(digest, np.uint64)) for *digest, text in rows]
    return [(text, digest) for text, digest in sampled if len(_indices_of(part, digest))]


def limit_sample(sampled: Iterable[tuple[str, np.ndarray]], part: Part) -> list[tuple[str, int]]:
    """Limit the sample to documents that are cheap to compare, at least one; return (string, index in the shard)."""
    budget = min(max(len(part.items) // _TOKENS_PER_CHARACTER, _MIN_CHARACTERS), _MAX_CHARACTERS)
    selected: list[tuple[str, int]] = []
    for text, digest in sampled:
        if not selected or len(text) <= budget:
            selected.append((text, int(_indices_of(part, digest)[0])))
            budget -= len(text)
    return selected


def read_tokens(folder: Path, shard: str, sampled: Iterable[tuple[str, int]]) -> list[SampledDocument]:
    """Return (string, tokens in the files of the shard) of sampled documents."""
    tokens, documents = (map_array(folder / f"{shard}.{array}.npy") for array in ("tokens", "documents"))
    bounds = documents[:, 1].astype(np.int64)
    return [(text, tokens[bounds[index] : bounds[index + 1]].tolist()) for text, index in sampled]


def check_tokens(tokenizer: Tokenizer, sampled: Iterable[tuple[str, SampledDocument]]) -> None:
    """Raise `InputError`, prefixed with the document's origin, if `tokenizer` gives other tokens than are stored."""
    library_tokenizer = without_special_tokens(tokenizer)
    for origin, (text, stored) in sampled:
        encoding = library_tokenizer.encode(text, add_special_tokens=False)
        ids = encoding.ids
        if ids != stored:
            index = [token_id == stored_id for token_id, stored_id in itertools.zip_longest(ids, stored)].index(False)
            start = encoding.offsets[index][0] if index < len(ids) else len(text)
            shown = [list(map(tokenizer.id_to_token, tokens[index : index + _MAX_SHOWN])) for tokens in (stored, ids)]
            raise InputError(
                f"{origin}: the corpus and its tokenizer.json give a document different tokens, at "
                f"{text[max(0, start - 20) : start + 40]!r}: {shown[0]} and {shown[1]}. Prepare it into "
                "another corpus.dir; if that does not help, choose another vocabulary, and report this line with the "
                "tokenizer."
            )


def _indices_of(part: Part, digest: np.ndarray) -> np.ndarray:
    """Return the indices of the documents with the hash `digest`, uint64 [2]."""
    return np.flatnonzero((part.documents["hash"] == digest).all(1))
