"""Extend a vocabulary by the words of a corpus that save the most tokens.

A word that occurs n times and has p tokens takes n x p tokens in the corpus; as a new entry, it takes n. New entries
come after the old ones, so all old ids remain valid, and so does a corpus that was prepared with the old vocabulary.

The tokenizers find new entries in different ways. WordPiece matches the longest entry. In a Unigram, the score of a new
entry exceeds the sum of its pieces' scores by a margin, which is too small to change the tokens of other words, and
grows with the number of pieces, so that a longer word is preferred to its prefix. A BPE that first splits text into
words looks up whole words before applying merges (`ignore_merges`).

In scripts without spaces, byte-pair encoding finds the sequences of letters to add to a WordPiece or Unigram.
"""

import itertools
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from pretrain.common import scripts
from pretrain.common.errors import InputError
from pretrain.config import SourceConfig
from pretrain.corpus import sources
from pretrain.corpus.byte_level import is_byte_level, repeat_words
from pretrain.corpus.byte_words import entry_bytes
from pretrain.corpus.inputs import Input, Problems
from pretrain.corpus.vocabulary import drop_rarest, vocabulary_size

MAX_UINT16_ENTRIES = 1 << 16  # maximum vocabulary size for 16-bit ids in shards, see `shards.token_dtype`
_MIN_COUNT = 3  # minimum occurrences of a new word, so that its embedding can be trained
_SAMPLED_BYTES = 256 << 20  # bytes of text in which words are counted
_MEASURED_CHARACTERS = 2 << 20  # characters of text that are encoded to measure the savings
_MAX_DOCUMENT_CHARACTERS = 1 << 18  # maximum characters of a document in this text
_LEARNED_CHARACTERS = 4 << 20  # characters of the words from which letter sequences are learned
_ASCII_WORD = re.compile(r"\w+")
_EXTRA_SEQUENCES = 100  # number of sequences learned in addition to the maximum, since not all of them are added
_FIRST_PRIVATE = 0xF0000  # first private-use character; each represents a letter with its marks
_SCORE_MARGIN = 1e-4  # log probability by which a new word's score exceeds its pieces' scores, per saved piece


class Extension(NamedTuple):
    """An extended vocabulary."""

    tokenizer: Tokenizer
    words: list[str]  # the new entries, in the order of their ids


def count_sampled_words(inputs: Iterable[tuple[SourceConfig, Sequence[Input]]]) -> tuple[Counter[str], list[str]]:
    """Count words in about `_SAMPLED_BYTES` of training text; return the counts, and a sample of its documents."""
    training_inputs = [(source, item) for source, items in inputs if not source.held_out for item in items]
    sizes = [sources.reader(source).text_bytes(item) for source, item in training_inputs]
    known_sizes = [size for size in sizes if math.isfinite(size)]
    sizes = [size if math.isfinite(size) else max(1, statistics.fmean(known_sizes or [1])) for size in sizes]
    total = max(1, sum(sizes))
    counts: Counter[str] = Counter()
    sample, seen_characters, sampled_characters = list[str](), 0, 0
    for (source, item), size in zip(training_inputs, sizes, strict=True):
        remaining = _SAMPLED_BYTES * size / total
        for text in _documents(source, item, stride=max(1, int(total / _SAMPLED_BYTES))):
            counts.update((_ASCII_WORD if text.isascii() else scripts.WORD).findall(text))
            drop_rarest(counts)
            seen_characters, remaining = seen_characters + len(text), remaining - len(text)
            if sampled_characters < _MEASURED_CHARACTERS * min(2, seen_characters / min(total, _SAMPLED_BYTES)):
                sample.append(text[:_MAX_DOCUMENT_CHARACTERS])
                sampled_characters += len(sample[-1])
            if remaining <= 0:
                break
    return counts, sample


def saved_share(old_tokenizer: Tokenizer, new_tokenizer: Tokenizer, documents: Sequence[str]) -> float:
    """Return the fraction of tokens that `new_tokenizer` saves in `documents`, compared with `old_tokenizer`."""
    old, new = (
        sum(len(encoding.ids) for encoding in tokenizer.encode_batch(documents, add_special_tokens=False))
        for tokenizer in (old_tokenizer, new_tokenizer)
    )
    return 1 - new / max(1, old)


def extend_vocabulary(tokenizer: Tokenizer, counts: Mapping[str, int], max_words: int) -> Extension:
    """Add up to `max_words` words to a tokenizer.

    Candidates are words with at least two tokens, one letter and `_MIN_COUNT` occurrences, without unknown characters.
    The words that save the most tokens are chosen; the same counts give the same vocabulary.

    Args:
        tokenizer: tokenizer of the checkpoint.
        counts: occurrences of words, from `count_sampled_words`.
        max_words: maximum number of new entries.

    Raises:
        InputError: the tokenizer's format does not allow new words, or the ids would not fit in the shards' type.
    """
    check_extension(tokenizer, max_words)
    unknown_id, entries = _unknown_id(tokenizer), tokenizer.get_vocab(with_added_tokens=True)
    words = _count_pre_tokens(tokenizer, counts)
    is_bpe = isinstance(tokenizer.model, models.BPE)
    candidates = words if is_bpe else _with_letter_sequences(tokenizer, words, max_words)
    old_ids = _ids_of(tokenizer, {**words, **candidates})
    is_bytes = is_byte_level(tokenizer)
    saved_tokens = {
        word: count * (len(old_ids[word]) - 1)
        for word, count in candidates.items()
        if len(old_ids[word]) > 1 and count >= _MIN_COUNT and unknown_id not in old_ids[word] and word not in entries
        if any(map(str.isalpha, entry_bytes(word).decode("utf-8", "replace") if is_bytes else word))
    }
    chosen = sorted(saved_tokens, key=lambda word: (-saved_tokens[word], word))[:max_words]
    while True:
        extended = _with_entries(tokenizer, chosen)
        new_ids = _ids_of(extended, words)
        now_unknown = [word for word in words if unknown_id in new_ids[word] and unknown_id not in old_ids[word]]
        if not now_unknown:
            break
        # If WordPiece matches a new entry first, the rest of a longer word may match no entry, so the word is [UNK].
        chosen = [entry for entry in chosen if not any(_may_match(entry, word) for word in now_unknown)]
    return Extension(extended, chosen)


def _may_match(entry: str, word: str) -> bool:
    """Return whether an entry may match in a word: at its start or, with "##", after other entries."""
    return entry[2:] in word if entry[:2] == "##" else word.startswith(entry)


def check_extension(tokenizer: Tokenizer, max_words: int) -> None:
    """Raise `InputError` if `max_words` words cannot be added to a tokenizer."""
    setting = f"corpus.vocabulary.added_words ({max_words})"
    model = json.loads(tokenizer.to_str())["model"]
    kind, splits_words = model["type"], len(_count_pre_tokens(tokenizer, {"one": 1, "two words": 1})) > 2
    # With end-of-word marks (XLM, HerBERT), an entry without a mark only matches inside a word.
    if kind not in ("WordPiece", "Unigram") and (not splits_words or model.get("end_of_word_suffix")):
        raise InputError(
            f"{setting}: the checkpoint's tokenizer is a {kind} that does not split text into words, or marks "
            "the end of words, so words cannot be added. Set it to 0."
        )
    size = vocabulary_size(tokenizer)
    if size <= MAX_UINT16_ENTRIES < size + max_words:
        raise InputError(
            f"{setting}: with the {size} entries of the checkpoint's vocabulary, the ids would exceed the 16 bits of "
            f"the token shards ({MAX_UINT16_ENTRIES}). Lower it to {MAX_UINT16_ENTRIES - size} or less."
        )


def replaced_ids(tokenizer: Tokenizer, entries: Iterable[str]) -> list[list[int]]:
    """Return, for each new entry, the ids in the old vocabulary (of `tokenizer`) that it replaces."""
    entries = list(entries)
    pieces = _ids_of(tokenizer, entries)
    return [pieces[entry] for entry in entries]


def _documents(source: SourceConfig, item: Input, stride: int) -> Iterator[str]:
    """Yield the documents of every `stride`-th chunk of an input, or of all chunks if it must be read in order."""
    step = 1 if sources.reader(source).is_stream(item) else stride
    for chunk in itertools.islice(sources.cut(source, 0, 0, item), 0, None, step):
        yield from sources.documents(chunk, Problems())


def _count_pre_tokens(tokenizer: Tokenizer, counts: Mapping[str, int]) -> Counter[str]:
    """Normalize and pre-tokenize words, each after a space; return the counts of the resulting pre-tokens."""
    normalizer: Any = tokenizer.normalizer
    pre_tokenizer: Any = tokenizer.pre_tokenizer
    words: Counter[str] = Counter()
    for word, count in counts.items():
        text = normalizer.normalize_str(f" {word}") if normalizer else f" {word}"
        for pre_token, _ in pre_tokenizer.pre_tokenize_str(text) if pre_tokenizer else [(text, None)]:
            words[pre_token] += count
    return words


def _ids_of(tokenizer: Tokenizer, words: Iterable[str]) -> dict[str, list[int]]:
    """Return the token ids of each word; words are pre-tokens, as in the result of `_count_pre_tokens`."""
    model: Any = tokenizer.model
    continuation_model: Any = model
    if isinstance(model, models.WordPiece):  # a second model encodes words that start with "##"
        continuations = {entry[2:]: token_id for entry, token_id in tokenizer.get_vocab().items() if entry[:2] == "##"}
        continuations[model.unk_token] = _unknown_id(tokenizer) or 0
        continuation_model = models.WordPiece(continuations, unk_token=model.unk_token, continuing_subword_prefix="")
    split = ((word, word[2:], continuation_model) if word[:2] == "##" else (word, word, model) for word in words)
    return {word: [token.id for token in word_model.tokenize(text)] for word, text, word_model in split}


def _with_letter_sequences(tokenizer: Tokenizer, words: Mapping[str, int], max_words: int) -> Counter[str]:
    """Count words and, in scripts without spaces, sequences of letters that byte-pair encoding finds."""
    unspaced = {word: count for word, count in words.items() if not word.isascii() and scripts.STARTS_UNIT.search(word)}
    sequences = Counter({word: count for word, count in words.items() if word not in unspaced})
    letter_codes: dict[str, str] = {}  # letter with its marks -> private-use character
    coded: dict[str, int] = {}
    step = max(1, sum(map(len, unspaced)) // _LEARNED_CHARACTERS)
    for word in sorted(unspaced)[::step]:
        units = scripts.CLUSTER.findall(word)
        code = "".join(letter_codes.setdefault(unit, chr(_FIRST_PRIVATE + len(letter_codes))) for unit in units)
        coded[code] = step * unspaced[word]
    learned, codes = Tokenizer(models.BPE()), list(letter_codes.values())  # in a fixed order, instead of a hash map's
    size = len(letter_codes) + max_words + _EXTRA_SEQUENCES
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=_MIN_COUNT, special_tokens=codes, show_progress=False)
    learned.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    learned.train_from_iterator(repeat_words(coded), trainer)
    letters = {ord(code): letter for letter, code in letter_codes.items()}
    mark = "##" if isinstance(tokenizer.model, models.WordPiece) else ""
    model: Any = learned.model
    for word, count in coded.items():
        for index, piece in enumerate(model.tokenize(word)):
            sequences[mark * (index > 0) + piece.value.translate(letters)] += count
    return sequences


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    model = json.loads(tokenizer.to_str())["model"]
    return model["unk_id"] if model["type"] == "Unigram" else tokenizer.token_to_id(model.get("unk_token") or "")


def _with_entries(tokenizer: Tokenizer, entries: list[str]) -> Tokenizer:
    spec, size = json.loads(tokenizer.to_str()), vocabulary_size(tokenizer)
    model, added = spec["model"], {token["content"]: token["id"] for token in spec["added_tokens"]}
    if model["type"] == "Unigram":  # the index of an entry is its id, so the ids of added tokens must have entries
        scores = [score for _, score in model["vocab"]]
        names = {token_id: content for content, token_id in added.items()}
        gaps = range(len(scores), size)
        pieces = _ids_of(tokenizer, entries)
        model["vocab"] += [[names.get(n, f"[unused{n}]"), min(scores)] for n in gaps]
        for entry in entries:
            piece_scores = [scores[token_id] for token_id in pieces[entry]]
            model["vocab"].append([entry, sum(piece_scores) + _SCORE_MARGIN * (len(piece_scores) - 1)])
    else:  # added tokens must become entries to keep their ids
        model["vocab"] |= added | {entry: size + index for index, entry in enumerate(entries)}
        if model["type"] == "BPE":
            model["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(spec))
