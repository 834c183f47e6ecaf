"""Sampled documents, whose stored tokens are compared with the tokenizer.json at the end of `prepare`.

A process that reads documents saves some of them beside each part file. The process that writes a shard finds them in
it. At the end the coordinating process reads their tokens from the shard and encodes the documents again. The cost is
bounded for any size of corpus.
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
from pretrain.corpus.shards import mapped
from pretrain.corpus.whole_documents import without_special

MAX_PARTS = 32  # sampled of a source
_MAX_PER_PART = 16
_LONG_CHARACTERS = 1 << 13  # longer documents are only sampled if there are no shorter ones
_MIN_CHARACTERS, _MAX_CHARACTERS = 1 << 14, 1 << 16  # of a shard's sample
_TOKENS_PER_CHARACTER = 1 << 9  # tokens of a shard per character of its sample
_SUFFIX = ".sample"
_MAX_SHOWN = 6  # tokens in a message

Sampled = tuple[str, list[int]]  # text and stored tokens of a document


def choose(texts: Sequence[str]) -> list[int]:
    """Return the numbers of the documents to sample, evenly spread."""
    short = [number for number, text in enumerate(texts) if len(text) <= _LONG_CHARACTERS]
    short = short or sorted(range(len(texts)), key=lambda number: len(texts[number]))[:1]
    return short[:: -(-len(short) // _MAX_PER_PART)] if short else []


def save(path: Path, part: Part, sample: Iterable[tuple[np.ndarray, str]]) -> None:
    """Save (hash, text) of documents beside the part file at `path`, unless another of its documents has the hash."""
    rows = [[*hashed.tolist(), text] for hashed, text in sample if len(_rows(part, hashed)) == 1]
    write_json(path.with_suffix(_SUFFIX), rows)


def load(path: Path, part: Part) -> list[tuple[str, np.ndarray]]:
    """Return (text, hash) of the sampled documents in `part`, which was loaded from the part file at `path`."""
    path = path.with_suffix(_SUFFIX)
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    sampled = [(text, np.array(hashed, np.uint64)) for *hashed, text in rows]
    return [(text, hashed) for text, hashed in sampled if len(_rows(part, hashed))]


def within_budget(sampled: Iterable[tuple[str, np.ndarray]], part: Part) -> list[tuple[str, int]]:
    """Return (text, number in the shard of `part`) of as many documents as are cheap to compare; at least one."""
    left = min(max(len(part.items) // _TOKENS_PER_CHARACTER, _MIN_CHARACTERS), _MAX_CHARACTERS)
    kept: list[tuple[str, int]] = []
    for text, hashed in sampled:
        if not kept or len(text) <= left:
            kept.append((text, int(_rows(part, hashed)[0])))
            left -= len(text)
    return kept


def read_tokens(folder: Path, shard: str, sampled: Iterable[tuple[str, int]]) -> list[Sampled]:
    """Return (text, tokens in the files of the shard) of sampled documents."""
    tokens, documents = (mapped(folder / f"{shard}.{array}.npy") for array in ("tokens", "documents"))
    bounds = documents[:, 1].astype(np.int64)
    return [(text, tokens[bounds[number] : bounds[number + 1]].tolist()) for text, number in sampled]


def compare(tokenizer: Tokenizer, sampled: Iterable[tuple[str, Sampled]]) -> None:
    """Raise `InputError`, prefixed with the origin of the document, if `tokenizer` gives a document other tokens."""
    library = without_special(tokenizer)
    for where, (text, stored) in sampled:
        encoding = library.encode(text, add_special_tokens=False)
        ids = encoding.ids
        if ids != stored:
            first = [one == other for one, other in itertools.zip_longest(ids, stored)].index(False)
            begin = encoding.offsets[first][0] if first < len(ids) else len(text)
            names = [list(map(tokenizer.id_to_token, one[first : first + _MAX_SHOWN])) for one in (stored, ids)]
            raise InputError(
                f"{where}: the corpus and its tokenizer.json give a document different tokens, at "
                f"{text[max(0, begin - 20) : begin + 40]!r}: {names[0]} and {names[1]}. Prepare it into "
                "another corpus.dir; if that does not help, choose another vocabulary, and report this line with the "
                "tokenizer."
            )


def _rows(part: Part, hashed: np.ndarray) -> np.ndarray:
    return np.flatnonzero((part.documents["hash"] == hashed).all(1))
