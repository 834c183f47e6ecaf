"""Chooses held-out sentences, masks a word in each, and predicts it with an exported model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import regex

from pretrain.common import scripts
from pretrain.common.errors import InputError
from pretrain.corpus.byte_words import entry_decoder, entry_strings
from pretrain.corpus.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pretrain.batches.batch import MaskedSequence
    from pretrain.corpus.shards import TokenShards

NUM_GUESSES = 5
_SENTENCE_END = regex.compile(r"\p{Sentence_Terminal}")


@dataclass(frozen=True)
class MaskedSentence:
    """A sentence with one token to predict: its token ids without special tokens, and the index of this token."""

    tokens: tuple[int, ...]
    masked_index: int


@dataclass(frozen=True)
class Filling:
    """The model's predictions for a masked sentence.

    Attributes:
        before: text before the mask, with its trailing space.
        after: text after the mask, with its leading space.
        truth: the original token.
        guesses: the most probable tokens with their probabilities.
        rank: rank of the original token in the whole vocabulary, from 1.
        probability: probability of the original token.
    """

    before: str
    after: str
    truth: str
    guesses: tuple[tuple[str, float], ...]
    rank: int
    probability: float


def held_out_sentences(shards: TokenShards, vocabulary: Sequence[str], count: int) -> list[MaskedSentence]:
    """Choose up to `count` readable sentences, spread over the held-out documents, each with a whole word to predict.

    The choice depends only on the shards, so reports of different runs on one corpus are comparable.
    """
    chosen: list[MaskedSentence] = []
    decode = entry_decoder(vocabulary)
    seen: set[tuple[int, ...]] = set()
    for tokens in _spread_sentences(shards, 40 * count):
        entries = [vocabulary[token] for token in tokens]
        indices = maskable_words(entry_strings(entries, decode) if decode else list(map(spell_wordpiece, entries)))
        if indices and tokens not in seen:
            seen.add(tokens)
            # A fixed stride through the candidate words avoids a bias to the first or last ones.
            chosen.append(MaskedSentence(tokens, indices[(7 * len(chosen) + 3) % len(indices)]))
            if len(chosen) == count:
                break
    return chosen


def fill(export_dir: Path, sentences: Sequence[MaskedSentence]) -> list[Filling]:
    """Predict the masked token of each sentence with the exported model, in fp32.

    Raises `InputError` if the export is damaged or has no masked-language-modeling head.
    """
    import torch

    from pretrain.batches.batch import masked_batch
    from pretrain.checkpoint import hf
    from pretrain.checkpoint.tokenizer import ModelTokenizer
    from pretrain.model.heads import PretrainingModel

    if not sentences:
        return []
    shape, state, next_sentence = hf.load(export_dir)
    if "heads.mlm_bias" not in state:
        raise InputError(f"{export_dir}: has no masked-language-modeling head. Export a pretraining checkpoint.")
    vocabulary = read_vocabulary(export_dir / "vocab.txt", advice="Export the run again.")
    with torch.device("meta"):
        model = PretrainingModel(shape, len(state["embeddings.word"]), next_sentence).eval()
    model.to_empty(device="cpu").load_state_dict(state)
    order = sorted(range(len(sentences)), key=lambda index: len(sentences[index].tokens))
    _, tokenizer, special = ModelTokenizer.read(export_dir)
    batch = masked_batch([mask_sentence(sentences[index], special) for index in order])
    with torch.inference_mode():
        # Drop the logits of rows that pad the vocabulary.
        probabilities = model.masked_logits(batch)[:, : len(vocabulary)].softmax(-1).tolist()
    by_index = dict(zip(order, probabilities, strict=True))
    return [
        make_filling(sentence, by_index[index], tokenizer, special["mask"]) for index, sentence in enumerate(sentences)
    ]


# ---- choosing sentences


def _spread_sentences(shards: TokenShards, count: int) -> Iterator[tuple[int, ...]]:
    """Yield `count` sentences from documents spread over the corpus."""
    documents = [(shard, index) for shard in shards.shards for index in range(len(shard.documents) - 1)]
    if not documents:
        return
    for index in range(count):
        # Multiples of the golden ratio modulo 1 are evenly spread: each falls into a gap between earlier ones.
        shard, document = documents[int(index * 0.6180339887498949 % 1 * len(documents))]
        first, stop = (int(shard.documents[n, 0]) for n in (document, document + 1))
        sentence = first + (5 * index + 1) % (stop - first)
        start, end = (int(shard.sentences[n]) for n in (sentence, sentence + 1))
        yield tuple(int(token) for token in shard.tokens[start:end])


def spell_wordpiece(entry: str) -> str:
    """Spell an entry of a WordPiece vocabulary as `entry_strings` does: a whole word starts with a space."""
    return entry[2:] if entry.startswith("##") else f" {entry}"


def maskable_words(tokens: Sequence[str]) -> list[int]:
    """Return indices of tokens that are whole words of at least three letters; [] if the sentence is unsuitable.

    `tokens` are the spellings of the sentence's tokens; words start with a space.
    """
    num_words = sum(_is_word(text.strip()) for text in tokens)
    is_readable = 10 <= len(tokens) <= 40 and num_words >= 0.8 * len(tokens) and " [UNK]" not in tokens
    if not is_readable or not _SENTENCE_END.fullmatch(tokens[-1].strip()):
        return []
    followers = [*tokens[1:], ""]
    return [
        index
        for index, (text, follower) in enumerate(zip(tokens, followers, strict=True))
        if len(text) >= 4 and text[0] == " " and _is_word(text[1:]) and not follower[:1].isalnum()
    ]


def _is_word(text: str) -> bool:
    return scripts.CONTINUATION.sub("", text).isalpha()


# ---- predicting masked tokens


def mask_sentence(sentence: MaskedSentence, special: Mapping[str, int]) -> MaskedSequence:
    """Return the sentence with its token masked, enclosed in the special tokens cls and sep.

    Args:
        special: ids of the special tokens by role.
    """
    from pretrain.batches.batch import MaskedSequence

    cls, sep, mask = (special[role] for role in ("cls", "sep", "mask"))
    ids, positions = np.array([cls, *sentence.tokens, sep]), np.array([1 + sentence.masked_index])
    labels = ids[positions]
    ids[positions] = mask
    return MaskedSequence(ids, positions, labels)


def make_filling(sentence: MaskedSentence, probabilities: list[float], tokenizer: Tokenizer, mask_id: int) -> Filling:
    """Return the model's predictions for the masked token, as text.

    Args:
        probabilities: probabilities of all vocabulary entries.
        mask_id: id of the mask token.
    """

    def decode_token(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=False).strip()

    tokens, truth = list(sentence.tokens), sentence.tokens[sentence.masked_index]
    tokens[sentence.masked_index] = mask_id
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    before, _, after = text.partition(str(tokenizer.id_to_token(mask_id)))
    best = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[:NUM_GUESSES]
    return Filling(
        before=f"{before.strip()} ".lstrip(),
        after=after,
        truth=decode_token(truth),
        guesses=tuple((decode_token(token), probabilities[token]) for token in best),
        rank=1 + sum(p > probabilities[truth] for p in probabilities),
        probability=probabilities[truth],
    )
