"""Masked-language-modeling quality of a checkpoint on held-out plain text, comparable within one vocabulary.

Whitespace is normalized to single spaces. A document's tokens are cut into sequences of equal length, which are masked
as in pretraining (Devlin et al. 2019, section 3.1): 15 % of the tokens are chosen; 80 % of these become the mask token,
10 % a random one. Bits per character are the bits of the chosen tokens divided by their characters: a token's
characters run from the end of the previous token to its end, so each character, including spaces between words,
belongs to exactly one token. Even so, this score is not comparable between vocabularies: the other tokens of a word
stay visible, which makes prediction easier for smaller vocabularies. The other scores of `text_scores` are comparable.

Shape letters: L tokens in a sequence or a document.
"""

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from finetune.scores.masked_model import MaskedModel, MaskedSequence, enclosing_ids, progress_bar
from pretrain.batches.masking import Masker, find_replacement_ids
from pretrain.batches.order import draw
from pretrain.batches.plan import PackedTokens
from pretrain.batches.scheme import MaskingVocabulary
from pretrain.common.errors import InputError
from pretrain.corpus.byte_words import WordBoundaries
from pretrain.corpus.formats import documents_of, files_below
from pretrain.corpus.inputs import Problems

logger = logging.getLogger(__name__)

NAME = "held_out"  # name of the score


@dataclass(frozen=True)
class HeldOutSettings:
    """Settings for cutting and masking documents.

    Attributes:
        length: maximum number of tokens in a sequence, special tokens included.
        share: share of a sequence's tokens to predict.
        seed: seed of the masks; the masks of a document depend only on its text and these settings.
    """

    length: int = 128
    share: float = 0.15
    seed: int = 0


@dataclass(frozen=True)
class HeldOutScore:
    """Quality of the prediction of masked tokens.

    Attributes:
        nats_per_token: mean cross-entropy of the masked tokens; comparable between models of one vocabulary only.
        accuracy: share of the masked tokens to which the model gives the highest probability.
        bits_per_character: -log2 of the masked tokens' probabilities divided by their characters; comparable between
            models of one vocabulary only.
        predictions: number of masked tokens, which the model predicts.
        characters: number of characters in the masked tokens.
        unknown: share of unknown tokens among the masked ones; they are easy to predict.
        tokens: number of tokens in the documents, without special tokens.
        documents: number of documents.
    """

    nats_per_token: float
    accuracy: float
    bits_per_character: float
    predictions: int
    characters: int
    unknown: float
    tokens: int
    documents: int


class TextSequence(NamedTuple):
    """A masked sequence, with counts for the score."""

    masked: MaskedSequence
    characters: int  # number of characters in the tokens to predict
    tokens: int  # number of tokens in the sequence, without special tokens


def score_held_out(model: MaskedModel, documents: Sequence[str], settings: HeldOutSettings) -> HeldOutScore:
    """Score a model on documents with normalized spaces (`read_documents`).

    Raises `InputError` if they have no token, or the model has fewer positions than `settings.length`.
    """
    if settings.length > model.max_positions:
        raise InputError(f"--length: {settings.length}, but the model has {model.max_positions} positions. Lower it.")
    sequences = list(masked_sequences(model.tokenizer, model.special_ids, documents, settings))
    return _score(model, sequences, len(documents))


def read_documents(paths: Sequence[Path]) -> list[str]:
    """Read the documents of files and folders in a fixed order, with whitespace normalized to single spaces.

    Raises `InputError` if a path does not exist or has no text. Errors within files are logged.
    """
    documents: list[str] = []
    for path in paths:
        num_before, problems = len(documents), Problems()
        for file in files_below(path, problems):
            documents += filter(None, (" ".join(text.split()) for text in documents_of(file, problems)))
        for entry in problems.entries():
            logger.warning(
                "%s: %s (%s times, first: %s)", entry["path"], entry["fault"], entry["count"], entry["first"]
            )
        if len(documents) == num_before:
            raise InputError(
                f"--texts: {path}: has no text. Give plain text, JSONL with a field `text`, or WikiExtractor files."
            )
    return documents


def masked_sequences(
    tokenizer: Tokenizer, special_ids: Mapping[str, int], documents: Sequence[str], settings: HeldOutSettings
) -> Iterator[TextSequence]:
    """Yield the masked sequences of all documents in order; each depends only on its document and the settings."""
    prefix, suffix = enclosing_ids(special_ids)
    masker = Masker.without_corpus(_masking_vocabulary(tokenizer, special_ids), settings.share, settings.length)
    content_length = settings.length - len(prefix) - len(suffix)
    if content_length < 1:
        raise InputError(f"--length: {settings.length} leaves no room for text besides the special tokens. Raise it.")
    for document in documents:
        ids, counts = encode_document(tokenizer, document)
        key = document_key(document, settings.seed)
        for index, start in enumerate(range(0, len(ids), content_length)):
            span = slice(start, start + content_length)
            input_ids = np.concatenate([prefix, ids[span], suffix])
            character_counts = np.concatenate([np.zeros_like(prefix), counts[span], np.zeros_like(suffix)])
            is_content = np.zeros(len(input_ids), bool)
            is_content[len(prefix) : len(input_ids) - len(suffix)] = True
            yield _mask(masker, input_ids, is_content, character_counts, draw(key, index))


def _mask(
    masker: Masker, ids: np.ndarray, is_content: np.ndarray, character_counts: np.ndarray, key: np.ndarray
) -> TextSequence:
    length = len(ids)
    zeros = np.zeros(length, np.int64)
    packed = PackedTokens(ids, zeros, np.arange(length), np.array([0, length]), zeros, is_content)
    masked = masker.apply(packed, key)
    sequence = MaskedSequence(masked.input_ids, masked.indices, masked.labels)
    return TextSequence(sequence, int(character_counts[masked.indices].sum()), int(is_content.sum()))


def encode_document(tokenizer: Tokenizer, document: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (token ids without special tokens; number of characters of each token), int64 [L] each."""
    encoded = tokenizer.encode(document, add_special_tokens=False)
    # Several tokens may spell one character: it belongs to the first of them.
    ends = np.maximum.accumulate(np.array([end for _, end in encoded.offsets], np.int64))
    if len(ends):
        ends[-1] = len(document)  # the tokenizer drops some characters, such as control codes
    return np.array(encoded.ids, np.int64), np.diff(ends, prepend=0)


def _masking_vocabulary(tokenizer: Tokenizer, special_ids: Mapping[str, int]) -> MaskingVocabulary:
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    special |= set(special_ids.values())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    entries = [""] * (max(vocabulary.values()) + 1)
    for entry, token_id in vocabulary.items():
        entries[token_id] = entry
    unused = {token_id for token_id, entry in enumerate(entries) if not entry}
    boundaries = WordBoundaries(np.zeros(len(entries), bool))
    return MaskingVocabulary(special_ids["mask"], find_replacement_ids(entries, special | unused), boundaries)


def document_key(document: str, seed: int) -> np.uint64:
    """Return a 64-bit hash of the document and the seed."""
    digest = hashlib.blake2b(f"{seed}\n{document}".encode(), digest_size=8).digest()
    return np.frombuffer(digest, "<u8")[0]


def _score(model: MaskedModel, sequences: Sequence[TextSequence], num_documents: int) -> HeldOutScore:
    num_predictions = sum(len(sequence.masked.labels) for sequence in sequences)
    if not num_predictions:
        raise InputError("--texts: has no token. Give documents with words.")
    with progress_bar("held-out text, masked tokens", num_predictions) as advance:
        predictions = model.predict([sequence.masked for sequence in sequences], advance)
    nats, characters = -float(predictions.log_probabilities.sum()), sum(sequence.characters for sequence in sequences)
    labels = np.concatenate([sequence.masked.labels for sequence in sequences])
    return HeldOutScore(
        nats_per_token=nats / num_predictions,
        accuracy=float(predictions.correct.mean()),
        bits_per_character=nats / math.log(2) / max(1, characters),
        predictions=num_predictions,
        characters=characters,
        unknown=float((labels == model.unknown_id).mean()),
        tokens=sum(sequence.tokens for sequence in sequences),
        documents=num_documents,
    )
