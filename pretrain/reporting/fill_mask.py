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
from pretrain.corpus.byte_words import spelled, speller
from pretrain.corpus.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pretrain.batches.batch import MaskedSequence
    from pretrain.corpus.shards import TokenShards

NUM_GUESSES = 5
_END = regex.compile(r"\p{Sentence_Terminal}")


@dataclass(frozen=True)
class MaskedSentence:
    """A sentence with one token to predict: token ids without special tokens, and the index of the token to mask."""

    tokens: tuple[int, ...]
    masked: int


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
    spell = speller(vocabulary)
    seen: set[tuple[int, ...]] = set()
    for tokens in _spread_sentences(shards, 40 * count):
        entries = [vocabulary[token] for token in tokens]
        words = maskable_words(spelled(entries, spell) if spell else list(map(with_space, entries)))
        if words and tokens not in seen:
            seen.add(tokens)
            # A fixed stride through the candidate words avoids a bias to the first or last ones.
            chosen.append(MaskedSentence(tokens, words[(7 * len(chosen) + 3) % len(words)]))
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
        start, stop = (int(shard.documents[n, 0]) for n in (document, document + 1))
        sentence = start + (5 * index + 1) % (stop - start)
        start, end = (int(shard.sentences[n]) for n in (sentence, sentence + 1))
        yield tuple(int(token) for token in shard.tokens[start:end])


def with_space(entry: str) -> str:
    """Spell an entry of a WordPiece vocabulary as `spelled` does: a whole word starts with a space."""
    return entry[2:] if entry.startswith("##") else f" {entry}"


def maskable_words(tokens: Sequence[str]) -> list[int]:
    """Return indices of tokens that are whole words of at least three letters; [] if the sentence is unsuitable.

    `tokens` are spellings, with the spaces before words.
    """
    words = sum(_is_word(text.strip()) for text in tokens)
    has_length = 10 <= len(tokens) <= 40
    if not has_length or words < 0.8 * len(tokens) or " [UNK]" in tokens or not _END.fullmatch(tokens[-1].strip()):
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
    """Return the sentence with its token masked, between the first and last special token.

    Args:
        special: ids of the special tokens by role.
    """
    from pretrain.batches.batch import MaskedSequence

    first, last, mask = (special[role] for role in ("cls", "sep", "mask"))
    ids, index = np.array([first, *sentence.tokens, last]), np.array([1 + sentence.masked])
    label = ids[index]
    ids[index] = mask
    return MaskedSequence(ids, index, label)


def make_filling(sentence: MaskedSentence, probabilities: list[float], tokenizer: Tokenizer, mask: int) -> Filling:
    """Return the model's predictions for the masked token, as text.

    Args:
        probabilities: probabilities of all vocabulary entries.
        mask: the id of the mask token.
    """

    def decode_token(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=False).strip()

    tokens, truth = list(sentence.tokens), sentence.tokens[sentence.masked]
    tokens[sentence.masked] = mask
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    before, _, after = text.partition(str(tokenizer.id_to_token(mask)))
    best = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[:NUM_GUESSES]
    return Filling(
        before=f"{before.strip()} ".lstrip(),
        after=after,
        truth=decode_token(truth),
        guesses=tuple((decode_token(token), probabilities[token]) for token in best),
        rank=1 + sum(p > probabilities[truth] for p in probabilities),
        probability=probabilities[truth],
    )
