"""Encoding of whole documents with released tokenizers, exactly like the `tokenizers` library.

A document's tokens are `Tokenizer.encode(document, add_special_tokens=False)`, cut where its sentences start. One
exception is intended, as in tokenize.py: special tokens such as `<s>` that are written out in a document are ordinary
characters here (`split_special_tokens=True` in transformers, which does not work for entries of a Unigram). Added
tokens that are not special, such as runs of spaces, are kept.

Most documents are cut into pieces by a splitter (splitters.py), and the tokens of pieces are cached. The library
encodes a whole document if there is no splitter for the tokenizer, or if the document contains an added token or
characters that are normalized across the boundaries of pieces.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pretrain.corpus.parts import DOCUMENT, Part
from pretrain.corpus.pieces import DocumentPieces
from pretrain.corpus.splitters import added_whitespace, splitter_for
from pretrain.corpus.tokenize import END_OF_DOCUMENT, WordTable, document_hashes
from pretrain.corpus.vocabulary import Fold
from pretrain.corpus.word_counts import document_words

_IS_NON_SPACE = bytes(byte not in b"\0 \t\r\n" for byte in range(256))  # for `bytes.translate`

_EncodedDocument = tuple[np.ndarray, np.ndarray]  # (token ids; number of tokens of each sentence, uint32 [S])


def document_records(texts: Sequence[str], *, fold: Fold = Fold.NOTHING) -> np.ndarray:
    """Return DOCUMENT records (hash, words, bytes) of documents without NUL; `fold` as in `document_hashes`."""
    raw = (END_OF_DOCUMENT.join(texts) + END_OF_DOCUMENT).encode()
    is_non_space = np.frombuffer(raw.translate(_IS_NON_SPACE), bool)
    is_word_start = is_non_space.copy()
    is_word_start[1:] &= ~is_non_space[:-1]
    ends = np.flatnonzero(np.frombuffer(raw, np.uint8) == 0)
    documents = np.zeros(len(texts), DOCUMENT)
    documents["hash"] = document_hashes(raw, len(texts), fold=fold)
    documents["words"] = document_words(raw, np.flatnonzero(is_word_start), ends)
    documents["bytes"] = np.diff(ends, prepend=-1) - 1
    return documents


class DocumentEncoder:
    """Encodes whole documents with a released tokenizer; `word_table` holds the distinct pieces, each encoded once."""

    def __init__(self, tokenizer: Tokenizer, word_table: WordTable) -> None:
        self._tokenizer = without_special_tokens(tokenizer)
        self._word_table = word_table
        self.splitter = splitter_for(self._tokenizer, word_table)
        self._no_cut_tokens = _without_superstrings(_no_cut_tokens(json.loads(self._tokenizer.to_str())))

    def encode(
        self, texts: Sequence[str], starts: Sequence[Sequence[int]], documents: np.ndarray, dtype: np.dtype
    ) -> Part:
        """Encode documents as a `Part` whose items are token ids of type `dtype`.

        Args:
            texts: documents that are not empty, without NUL.
            starts: character offsets of the sentences of each document, ascending from 0.
            documents: result of `document_records`.
        """
        chosen = [index for index, text in enumerate(texts) if self.may_encode_by_piece(text)]
        by_piece = self.encode_by_piece(chosen, [texts[n] for n in chosen], [starts[n] for n in chosen], dtype)
        encoded = [by_piece.get(n) or self._encode_whole(texts[n], starts[n], dtype) for n in range(len(texts))]
        documents = documents.copy()
        documents["sentences"] = [len(sentences) for _, sentences in encoded]
        documents["items"] = [len(tokens) for tokens, _ in encoded]
        items = np.concatenate([np.zeros(0, dtype), *(tokens for tokens, _ in encoded)])
        sentence_items = np.concatenate([np.zeros(0, np.uint32), *(sentences for _, sentences in encoded)])
        return Part(items, sentence_items, documents, [])

    def may_encode_by_piece(self, text: str) -> bool:
        """Return whether a document may be passed to `encode_by_piece`."""
        if self.splitter is None or any(token in text for token in self._no_cut_tokens):
            return False
        return self.splitter.can_split(text)

    def encode_by_piece(
        self, indices: list[int], texts: list[str], starts: list[Sequence[int]], dtype: np.dtype
    ) -> dict[int, _EncodedDocument]:
        """Return {index: encoded document} of the documents whose pieces have the same tokens in context as alone."""
        if not indices or self.splitter is None or self.splitter.piece_encoder is None:
            return {}
        cut = self.splitter.cut(texts, starts, self._word_table)
        tokens, offsets = self.splitter.piece_encoder.tokens(cut.pieces, cut.sentences, dtype)
        counts = np.diff(offsets).astype(np.uint32)
        inner_starts = cut.documents[1:-1]  # first sentence of each document except the first
        encoded_texts = zip(np.split(tokens, offsets[inner_starts]), np.split(counts, inner_starts), strict=True)
        are_context_free = _all_true_by_document(self.splitter.are_context_free(cut.pieces), cut)
        encoded = zip(indices, encoded_texts, are_context_free, strict=True)
        # Pieces, and therefore sentences, may have no tokens.
        return {index: (ids, sizes[sizes > 0]) for index, (ids, sizes), is_context_free in encoded if is_context_free}

    def _encode_whole(self, text: str, starts: Sequence[int], dtype: np.dtype) -> _EncodedDocument:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        tokens = np.array(encoding.ids, dtype)
        token_starts = np.array([start for start, _ in encoding.offsets], np.int64)
        # A token that crosses the start of a sentence belongs to the previous sentence.
        cuts = np.unique(np.searchsorted(token_starts, np.asarray(starts, np.int64)))
        return tokens, np.diff(np.append(cuts[cuts < len(tokens)], len(tokens))).astype(np.uint32)


def _all_true_by_document(mask: np.ndarray, cut: DocumentPieces) -> list[bool]:
    """Return, for each document, whether `mask`, bool [P], is true for all its pieces."""
    false_before = np.append(0, np.cumsum(~mask))
    return (np.diff(false_before[cut.sentences[cut.documents]]) == 0).tolist()


def without_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of the tokenizer that encodes special tokens written out in documents as ordinary characters.

    A Unigram or WordPiece matches an entry wherever its characters occur, such as in a document about `<mask>`. The
    entries of special tokens are therefore renamed so that they never match. Special tokens that are plain words remain
    unchanged. BPE merges pairs, which never produces special tokens.
    """
    spec = json.loads(tokenizer.to_str())
    spec["post_processor"] = None
    model, added = spec["model"], spec["added_tokens"]
    if model["type"] != "BPE":
        names = [token["content"] for token in added if token["special"] and not token["content"].isalnum()]
        renamed = {name: f"\0\0{name}" for name in names}  # two NULs, since `_LibraryPieces` joins pieces with one
        for token in added:
            token["content"] = renamed.get(token["content"], token["content"])
        if model["type"] == "Unigram":
            model["vocab"] = [[renamed.get(entry, entry), score] for entry, score in model["vocab"]]
        else:
            model["vocab"] = {renamed.get(entry, entry): token_id for entry, token_id in model["vocab"].items()}
            model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
    copy = Tokenizer.from_str(json.dumps(spec))
    copy.encode_special_tokens = True
    return copy


def _no_cut_tokens(spec: dict[str, Any]) -> list[str]:
    """Return the added tokens that forbid cutting a document: all but special ones and runs of `added_whitespace`."""
    run_characters = set(added_whitespace(spec))
    contents = [token["content"] for token in spec["added_tokens"] if not token["special"]]
    return [content for content in contents if len(set(content)) > 1 or content[0] not in run_characters]


def _without_superstrings(tokens: Sequence[str]) -> list[str]:
    """Return the tokens that contain no other token: a string that contains any token contains one of these."""
    return [token for token in tokens if not any(other in token for other in tokens if other != token)]
