"""The tokens of whole documents in a released byte-level tokenizer, as the library itself gives them.

A document's tokens are `Tokenizer.encode(document, add_special_tokens=False)`, cut where its sentences start. There is
one intended exception, as in `tokenize`: special tokens such as `<s>` that are written out in a text are ordinary
characters here (transformers: `split_special_tokens=True`). Added tokens that are not special, such as runs of blanks,
are the library's.

Most documents take the pieces of `byte_columns` if the tokenizer divides text as GPT-2 does. All others are encoded
by the library: with another division, with an added token in the text, or with characters that NFC changes.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pretrain.corpus.byte_columns import document_pieces
from pretrain.corpus.parts import DOCUMENT, Part
from pretrain.corpus.tokenize import END_OF_DOCUMENT, BytePairs, WordTable, text_hashes
from pretrain.corpus.word_counts import document_words

_BLANKS = b" \t\r\n"

_Sentences = tuple[np.ndarray, np.ndarray]  # tokens of a document, and tokens of each of its sentences, uint32 [S]


def measured(texts: Sequence[str]) -> np.ndarray:
    """The DOCUMENT table of `texts`, without what depends on the tokenizer; a text has no NUL."""
    raw = (END_OF_DOCUMENT.join(texts) + END_OF_DOCUMENT).encode()
    text = np.frombuffer(raw, np.uint8)
    solid = ~np.isin(text, np.frombuffer(_BLANKS + b"\0", np.uint8))
    begins = solid.copy()
    begins[1:] &= ~solid[:-1]
    ends = np.flatnonzero(text == 0)
    table = np.zeros(len(texts), DOCUMENT)
    table["hash"] = text_hashes(raw, len(texts))
    table["words"] = document_words(raw, np.flatnonzero(begins), ends)
    table["bytes"] = np.diff(ends, prepend=-1) - 1
    return table


class DocumentEncoder:
    """Encodes documents with a released byte-level tokenizer; distinct pieces are kept in a `WordTable`."""

    def __init__(self, tokenizer: Tokenizer, table: WordTable) -> None:
        described = json.loads(tokenizer.to_str())
        described["post_processor"] = None
        self._whole = Tokenizer.from_str(json.dumps(described))
        self._whole.encode_special_tokens = True
        self._table = table
        self._pieces = BytePairs(self._whole, table) if _divides_as_gpt2(described) else None
        self._adds_blank = bool((described["pre_tokenizer"] or {}).get("add_prefix_space"))
        self._normalizer = self._whole.normalizer
        self._added = _shortest([token["content"] for token in described["added_tokens"] if not token["special"]])

    def encode(self, texts: Sequence[str], starts: Sequence[Sequence[int]], table: np.ndarray, dtype: np.dtype) -> Part:
        """A part of token ids.

        Args:
            texts: documents that are not empty, without NUL.
            starts: where the sentences of each document start, in characters, ascending from 0.
            table: as `measured` gives it.
            dtype: of the tokens.
        """
        fast = [number for number, text in enumerate(texts) if self._has_plain_pieces(text)]
        found = dict(zip(fast, self._from_pieces([(texts[n], starts[n]) for n in fast], dtype), strict=True))
        encoded = [found.get(n) or self._from_library(texts[n], starts[n], dtype) for n in range(len(texts))]
        table = table.copy()
        table["sentences"] = [len(sentences) for _, sentences in encoded]
        table["items"] = [len(tokens) for tokens, _ in encoded]
        items = np.concatenate([np.zeros(0, dtype), *(tokens for tokens, _ in encoded)])
        sentence_items = np.concatenate([np.zeros(0, np.uint32), *(sentences for _, sentences in encoded)])
        return Part(items, sentence_items, table, [])

    def _has_plain_pieces(self, text: str) -> bool:
        """Whether the tokens of a document are those of its pieces."""
        if self._pieces is None or any(token in text for token in self._added):
            return False
        return self._normalizer is None or text.isascii() or self._normalizer.normalize_str(text) == text

    def _from_pieces(self, documents: Sequence[tuple[str, Sequence[int]]], dtype: np.dtype) -> list[_Sentences]:
        if not documents or self._pieces is None:
            return []
        texts, starts = [], []
        for text, sentences in documents:
            # pre_tokenizers/byte_level.rs: a text gets a blank unless it begins with one.
            blank = self._adds_blank and not text.startswith(" ")
            texts.append(" " + text if blank else text)
            starts.append(np.asarray(sentences) + blank * (np.arange(len(sentences)) > 0))
        cut = document_pieces(texts, starts, self._table)
        tokens, offsets = self._pieces.tokens(cut.pieces, cut.sentences, dtype)
        counts = np.diff(offsets).astype(np.uint32)
        within = cut.documents[1:-1]
        return list(zip(np.split(tokens, offsets[within]), np.split(counts, within), strict=True))

    def _from_library(self, text: str, starts: Sequence[int], dtype: np.dtype) -> _Sentences:
        encoding = self._whole.encode(text, add_special_tokens=False)
        tokens = np.array(encoding.ids, dtype)
        first = np.array([begin for begin, _ in encoding.offsets], np.int64)
        # A token that reaches past the start of a sentence belongs to the one before.
        cuts = np.unique(np.searchsorted(first, np.asarray(starts, np.int64)))
        return tokens, np.diff(np.append(cuts[cuts < len(tokens)], len(tokens))).astype(np.uint32)


def _divides_as_gpt2(described: dict[str, Any]) -> bool:
    """Whether pieces can stand for a text in which there is no added token and which NFC leaves as it is."""
    cut, entries = described["pre_tokenizer"], described["model"]["vocab"]
    normalizes = (described["normalizer"] or {}).get("type")
    # Between pieces, `PieceEncoder` has the first id after the vocabulary's, which therefore has no gaps.
    whole = max(entries.values()) < len(entries)
    return whole and cut["type"] == "ByteLevel" and cut["use_regex"] and normalizes in (None, "NFC")


def _shortest(tokens: Sequence[str]) -> list[str]:
    """Those of `tokens` without another one within them: a text with any token has one of these."""
    return [token for token in tokens if not any(other in token for other in tokens if other != token)]
