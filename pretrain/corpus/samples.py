"""Sampled documents, whose stored tokens are compared at the end of `prepare` with those of the tokenizer.json.

A process that reads text keeps some of it beside each part file. Who writes a shard finds these documents in it. At the
end the coordinating process reads their tokens from the shard's files and encodes the texts again. All that is bounded,
whatever the size of the corpus.
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

MAX_PARTS = 32  # of a source that are sampled
_MAX_PER_PART = 16
_LONG_CHARACTERS = 1 << 13  # longer documents are sampled only if there are no others
_MIN_CHARACTERS, _MAX_CHARACTERS = 1 << 14, 1 << 16  # of a shard's sample
_TOKENS_PER_CHARACTER = 1 << 9  # of a shard, for each character of its sample
_SUFFIX = ".sample"
_SHOWN = 6  # tokens in a message

Sampled = tuple[str, list[int]]  # text and stored tokens of a document


def choose(texts: Sequence[str]) -> list[int]:
    """The numbers of the documents to sample, evenly spread."""
    short = [number for number, text in enumerate(texts) if len(text) <= _LONG_CHARACTERS]
    short = short or sorted(range(len(texts)), key=lambda number: len(texts[number]))[:1]
    return short[:: -(-len(short) // _MAX_PER_PART)] if short else []


def save(path: Path, part: Part, sample: Iterable[tuple[np.ndarray, str]]) -> None:
    """Keep the (hash, text) of documents beside the part file at `path`, if no other document of it has the hash."""
    rows = [[*hashed.tolist(), text] for hashed, text in sample if len(_rows(part, hashed)) == 1]
    write_json(path.with_suffix(_SUFFIX), rows)


def found(path: Path, part: Part) -> list[tuple[str, np.ndarray]]:
    """(text, hash) of the sampled documents among those of `part`, which were loaded from the part file at `path`."""
    path = path.with_suffix(_SUFFIX)
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    sampled = [(text, np.array(hashed, np.uint64)) for *hashed, text in rows]
    return [(text, hashed) for text, hashed in sampled if len(_rows(part, hashed))]


def bounded(sampled: Iterable[tuple[str, np.ndarray]], part: Part) -> list[tuple[str, int]]:
    """(text, number in the shard of `part`) of as many documents as are cheap to compare; at least one."""
    left = min(max(len(part.items) // _TOKENS_PER_CHARACTER, _MIN_CHARACTERS), _MAX_CHARACTERS)
    kept: list[tuple[str, int]] = []
    for text, hashed in sampled:
        if not kept or len(text) <= left:
            kept.append((text, int(_rows(part, hashed)[0])))
            left -= len(text)
    return kept


def stored(folder: Path, shard: str, sampled: Iterable[tuple[str, int]]) -> list[Sampled]:
    """The texts and the tokens that the files of a shard have."""
    tokens, documents = (mapped(folder / f"{shard}.{array}.npy") for array in ("tokens", "documents"))
    bounds = documents[:, 1].astype(np.int64)
    return [(text, tokens[bounds[number] : bounds[number + 1]].tolist()) for text, number in sampled]


def compare(tokenizer: Tokenizer, sampled: Iterable[tuple[str, Sampled]]) -> None:
    """Raise `InputError`, which begins with where it is from, if a document has other tokens than `tokenizer` gives."""
    library = without_special(tokenizer)
    for where, (text, stored) in sampled:
        encoding = library.encode(text, add_special_tokens=False)
        ids = encoding.ids
        if ids != stored:
            first = [one == other for one, other in itertools.zip_longest(ids, stored)].index(False)
            begin = encoding.offsets[first][0] if first < len(ids) else len(text)
            names = [[tokenizer.id_to_token(number) for number in one[first : first + _SHOWN]] for one in (stored, ids)]
            raise InputError(
                f"{where}: the corpus and its tokenizer.json give a text other tokens, at "
                f"{text[max(0, begin - 20) : begin + 40]!r}: {names[0]} and {names[1]}. Prepare it into "
                "another corpus.dir; if that does not help, choose another vocabulary, and report this line with the "
                "tokenizer."
            )


def _rows(part: Part, hashed: np.ndarray) -> np.ndarray:
    return np.flatnonzero((part.documents["hash"] == hashed).all(1))
