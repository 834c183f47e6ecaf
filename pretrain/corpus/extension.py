"""A WordPiece vocabulary extended by whole words of a corpus, those that save the most tokens.

A word that occurs n times and takes p wordpieces costs n x p tokens; as an entry of its own it costs n. New entries
come after the old ones, so all old ids keep their meaning, and the corpus of an old vocabulary is one of the extended
one.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models

from pretrain.common.errors import InputError
from pretrain.corpus.vocabulary import bert_tokenizer, count_normal_words

LARGEST_NARROW = 1 << 16  # entries whose ids fit the 16 bits of a shard, see `shards.token_dtype`
_LEAST_COUNT = 3  # occurrences that a word needs: a row is trained by its occurrences only


class Extension(NamedTuple):
    """An extended vocabulary, and what it saves on the words it was chosen from."""

    tokenizer: Tokenizer
    words: list[str]  # the new entries, in the order of their ids
    tokens_before: int
    tokens_after: int


def extend_vocabulary(tokenizer: Tokenizer, counts: Mapping[bytes, int], most: int) -> Extension:
    """Add up to `most` words to a BERT tokenizer.

    Candidates are words of at least two wordpieces, one letter and `_LEAST_COUNT` occurrences, without unknown
    characters. Those that save the most tokens come first; the same counts give the same vocabulary.

    Args:
        tokenizer: of the checkpoint.
        counts: occurrences of words cut at ASCII blanks and marks, as `train_vocabulary` takes them.
        most: new entries at most.

    Raises:
        InputError: the tokenizer is not BERT's WordPiece, or the ids no longer fit the shards.
    """
    check_extension(tokenizer, most)
    unknown = tokenizer.token_to_id("[UNK]")
    words = count_normal_words(dict(counts), tokenizer.normalizer)
    wordpieces = _wordpieces(tokenizer, words)
    saved = {
        word: words[word] * (len(ids) - 1)
        for word, ids in wordpieces.items()
        if len(ids) > 1 and words[word] >= _LEAST_COUNT and unknown not in ids and any(map(str.isalpha, word))
    }
    chosen = sorted(saved, key=lambda word: (-saved[word], word))[:most]
    while True:
        extended = _with_entries(tokenizer, chosen)
        after = _wordpieces(extended, words)
        broken = [word for word in words if unknown in after[word] and unknown not in wordpieces[word]]
        if not broken:
            break
        # The longest match comes first: after a new word as its beginning, a longer one may have no wordpieces left.
        chosen = [entry for entry in chosen if not any(word.startswith(entry) for word in broken)]
    return Extension(extended, chosen, _tokens(words, wordpieces), _tokens(words, after))


def check_extension(tokenizer: Tokenizer, most: int) -> None:
    """Raise `InputError` if `most` words cannot be added to a tokenizer."""
    if not isinstance(tokenizer.model, models.WordPiece):
        raise InputError(
            f"corpus.vocabulary.added_words ({most}): the checkpoint's tokenizer is {type(tokenizer.model).__name__}; "
            "only WordPiece vocabularies can be extended. Set it to 0."
        )
    size = tokenizer.get_vocab_size()
    if size <= LARGEST_NARROW < size + most:
        raise InputError(
            f"corpus.vocabulary.added_words ({most}): with the {size} entries of the checkpoint's vocabulary, the ids "
            f"would exceed the 16 bits of the token shards ({LARGEST_NARROW}). "
            f"Lower it to {LARGEST_NARROW - size} or less."
        )


def old_wordpieces(tokenizer: Tokenizer, entries: Iterable[str]) -> list[list[int]]:
    """The ids in the old vocabulary of `tokenizer` that each new entry replaces."""
    entries = list(entries)
    wordpieces = _wordpieces(tokenizer, entries)
    return [wordpieces[entry] for entry in entries]


def _wordpieces(tokenizer: Tokenizer, words: Iterable[str]) -> dict[str, list[int]]:
    """The ids of each word. The words are as the normalizer and the pre-tokenizer leave them."""
    model: Any = tokenizer.model
    return {word: [token.id for token in model.tokenize(word)] for word in words}


def _with_entries(tokenizer: Tokenizer, entries: list[str]) -> Tokenizer:
    vocabulary = tokenizer.get_vocab()
    size = len(vocabulary)
    both = {**vocabulary, **{entry: size + number for number, entry in enumerate(entries)}}
    return bert_tokenizer(both, tokenizer.normalizer)  # pyright: ignore[reportArgumentType]


def _tokens(words: Mapping[str, int], wordpieces: Mapping[str, list[int]]) -> int:
    return sum(count * len(wordpieces[word]) for word, count in words.items())
