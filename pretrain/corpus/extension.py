"""A vocabulary extended by whole words of a corpus, those that save the most tokens.

A word that occurs n times and takes p tokens costs n x p of them; as an entry of its own it costs n. New entries come
after the old ones, so all old ids keep their meaning, and the corpus of an old vocabulary is one of the extended one.

WordPiece takes the longest entry. A Unigram takes an entry if its score is above that of its pieces: by a little, so
that words which do not begin with one stay as they are, and by more the more pieces, so that a longer word comes before
its beginning. A BPE takes a word that is an entry before it merges (`ignore_merges`), if it cuts texts into
words first.

Where a script has no blanks, a WordPiece or a Unigram gets the sequences of letters that byte-pair encoding finds.
"""

import collections
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from pretrain.common import scripts
from pretrain.common.errors import InputError
from pretrain.config import SourceConfig
from pretrain.corpus import sources
from pretrain.corpus.byte_level import is_byte_level, repeated
from pretrain.corpus.byte_words import entry_bytes
from pretrain.corpus.inputs import Input, Problems
from pretrain.corpus.vocabulary import forget_rarest, vocabulary_size

LARGEST_NARROW = 1 << 16  # entries whose ids fit the 16 bits of a shard, see `shards.token_dtype`
_MIN_COUNT = 3  # occurrences that a word needs: a row is trained by its occurrences only
_SAMPLED_BYTES = 256 << 20  # of text whose words are counted
# Characters that are encoded to see what is saved, of a document at most, and those that letter sequences are from
_MEASURED, _LONGEST, _LEARNED = 2 << 20, 1 << 18, 4 << 20
_ASCII_WORD = re.compile(r"\w+")
_FURTHER = 100  # sequences than can be added: beginnings of words, and words of which some are left out
_FIRST_PRIVATE = 0xF0000  # characters that stand for a letter with its marks
_ABOVE = 1e-4  # natural logarithm by which a Unigram prefers a new word to its pieces, for each piece that it saves


class Extension(NamedTuple):
    """An extended vocabulary."""

    tokenizer: Tokenizer
    words: list[str]  # the new entries, in the order of their ids


def sampled_words(
    given: Iterable[tuple[SourceConfig, Sequence[Input]]],
) -> tuple[collections.Counter[str], list[str]]:
    """How often words occur in about `_SAMPLED_BYTES` of the text that is trained on, and documents from all of it."""
    read = [(source, item) for source, items in given if not source.held_out for item in items]
    sizes = [sources.reader(source).text_bytes(item) for source, item in read]
    known = [size for size in sizes if math.isfinite(size)]
    sizes = [size if math.isfinite(size) else max(1, statistics.fmean(known or [1])) for size in sizes]
    total = max(1, sum(sizes))
    counts: collections.Counter[str] = collections.Counter()
    texts, seen, taken = list[str](), 0, 0
    for (source, item), size in zip(read, sizes, strict=True):
        left = _SAMPLED_BYTES * size / total
        for text in _documents(source, item, every=max(1, int(total / _SAMPLED_BYTES))):
            counts.update((_ASCII_WORD if text.isascii() else scripts.WORD).findall(text))
            forget_rarest(counts)
            seen, left = seen + len(text), left - len(text)
            if taken < _MEASURED * min(2, seen / min(total, _SAMPLED_BYTES)):
                texts.append(text[:_LONGEST])
                taken += len(texts[-1])
            if left <= 0:
                break
    return counts, texts


def saved_share(before: Tokenizer, after: Tokenizer, texts: Sequence[str]) -> float:
    """The share of the tokens of `before` in texts that `after` saves."""
    old, new = (
        sum(len(found.ids) for found in tokenizer.encode_batch(texts, add_special_tokens=False))
        for tokenizer in (before, after)
    )
    return 1 - new / max(1, old)


def extend_vocabulary(tokenizer: Tokenizer, counts: Mapping[str, int], most: int) -> Extension:
    """Add up to `most` words to a tokenizer.

    Candidates are words of at least two tokens, one letter and `_MIN_COUNT` occurrences, without unknown characters.
    Those that save the most tokens come first; the same counts give the same vocabulary.

    Args:
        tokenizer: of the checkpoint.
        counts: occurrences of words, as `sampled_words` counts them.
        most: new entries at most.

    Raises:
        InputError: the tokenizer's format takes no words, or the ids no longer fit the shards.
    """
    check_extension(tokenizer, most)
    unknown, known = _unknown(tokenizer), tokenizer.get_vocab(with_added_tokens=True)
    words = _divided(tokenizer, counts)
    candidates = words if isinstance(tokenizer.model, models.BPE) else _with_letter_sequences(tokenizer, words, most)
    pieces = _pieces(tokenizer, {**words, **candidates})
    is_bytes = is_byte_level(tokenizer)
    saved = {
        word: count * (len(pieces[word]) - 1)
        for word, count in candidates.items()
        if len(pieces[word]) > 1 and count >= _MIN_COUNT and unknown not in pieces[word] and word not in known
        if any(map(str.isalpha, entry_bytes(word).decode("utf-8", "replace") if is_bytes else word))
    }
    chosen = sorted(saved, key=lambda word: (-saved[word], word))[:most]
    while True:
        extended = _with_entries(tokenizer, chosen)
        after = _pieces(extended, words)
        broken = [word for word in words if unknown in after[word] and unknown not in pieces[word]]
        if not broken:
            break
        # The longest match comes first: after a new word as its beginning, a longer one may have no wordpieces left.
        chosen = [entry for entry in chosen if not any(_may_begin(entry, word) for word in broken)]
    return Extension(extended, chosen)


def _may_begin(entry: str, word: str) -> bool:
    """Whether a word, or what is left of it after other entries, may begin with an entry."""
    return entry[2:] in word if entry[:2] == "##" else word.startswith(entry)


def check_extension(tokenizer: Tokenizer, most: int) -> None:
    """Raise `InputError` if `most` words cannot be added to a tokenizer."""
    where = f"corpus.vocabulary.added_words ({most})"
    model = json.loads(tokenizer.to_str())["model"]
    kind, is_cut = model["type"], len(_divided(tokenizer, {"one": 1, "two words": 1})) > 2
    # With marks of words' ends (XLM, HerBERT) an entry without one is a piece within a word.
    if kind not in ("WordPiece", "Unigram") and (not is_cut or model.get("end_of_word_suffix")):
        raise InputError(
            f"{where}: the checkpoint's tokenizer is a {kind} that does not cut texts into words, or marks "
            "their ends, so it takes no further ones. Set it to 0."
        )
    size = vocabulary_size(tokenizer)
    if size <= LARGEST_NARROW < size + most:
        raise InputError(
            f"{where}: with the {size} entries of the checkpoint's vocabulary, the ids would exceed the 16 bits of the "
            f"token shards ({LARGEST_NARROW}). Lower it to {LARGEST_NARROW - size} or less."
        )


def old_pieces(tokenizer: Tokenizer, entries: Iterable[str]) -> list[list[int]]:
    """The ids in the old vocabulary of `tokenizer` that each new entry replaces."""
    entries = list(entries)
    pieces = _pieces(tokenizer, entries)
    return [pieces[entry] for entry in entries]


def _documents(source: SourceConfig, item: Input, every: int) -> Iterator[str]:
    """Documents of every n-th chunk of an input; of all in order, if it can only be read in order."""
    step = 1 if sources.reader(source).is_stream(item) else every
    for chunk in itertools.islice(sources.cut(source, 0, 0, item), 0, None, step):
        yield from sources.documents(chunk, Problems())


def _divided(tokenizer: Tokenizer, counts: Mapping[str, int]) -> collections.Counter[str]:
    """Words as they reach the tokenizer's model after a blank."""
    normalizer: Any = tokenizer.normalizer
    divider: Any = tokenizer.pre_tokenizer
    words: collections.Counter[str] = collections.Counter()
    for word, count in counts.items():
        text = normalizer.normalize_str(f" {word}") if normalizer else f" {word}"
        for part, _ in divider.pre_tokenize_str(text) if divider else [(text, None)]:
            words[part] += count
    return words


def _pieces(tokenizer: Tokenizer, words: Iterable[str]) -> dict[str, list[int]]:
    """The ids of each word, which is as `_divided` leaves it."""
    model: Any = tokenizer.model
    inner = model
    if isinstance(model, models.WordPiece):  # whose first pieces are the entries with "##", too
        entries = {entry[2:]: number for entry, number in tokenizer.get_vocab().items() if entry[:2] == "##"}
        entries[model.unk_token] = _unknown(tokenizer) or 0
        inner: Any = models.WordPiece(entries, unk_token=model.unk_token, continuing_subword_prefix="")
    taken = ((word, inner.tokenize(word[2:]) if word[:2] == "##" else model.tokenize(word)) for word in words)
    return {word: [token.id for token in tokens] for word, tokens in taken}


def _with_letter_sequences(tokenizer: Tokenizer, words: Mapping[str, int], most: int) -> collections.Counter[str]:
    """Words between blanks, and sequences of letters of scripts without them, by byte-pair encoding: how often each is.

    The units of that encoding are letters with their marks.
    """
    runs = {word: count for word, count in words.items() if not word.isascii() and scripts.BEGINS_UNIT.search(word)}
    found = collections.Counter({word: count for word, count in words.items() if word not in runs})
    letters: dict[str, str] = {}
    coded: dict[str, int] = {}
    step = max(1, sum(map(len, runs)) // _LEARNED)
    for word in sorted(runs)[::step]:
        units = (letters.setdefault(one, chr(_FIRST_PRIVATE + len(letters))) for one in scripts.CLUSTER.findall(word))
        coded["".join(units)] = step * runs[word]
    learned, first = Tokenizer(models.BPE()), list(letters.values())  # in this order, or it would be that of a hash map
    size = len(letters) + most + _FURTHER
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=_MIN_COUNT, special_tokens=first, show_progress=False)
    learned.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    learned.train_from_iterator(repeated(coded), trainer)
    spelled = {ord(code): letter for letter, code in letters.items()}
    mark = "##" if isinstance(tokenizer.model, models.WordPiece) else ""
    model: Any = learned.model
    for word, count in coded.items():
        for number, piece in enumerate(model.tokenize(word)):
            found[mark * (number > 0) + piece.value.translate(spelled)] += count
    return found


def _unknown(tokenizer: Tokenizer) -> int | None:
    model = json.loads(tokenizer.to_str())["model"]
    return model["unk_id"] if model["type"] == "Unigram" else tokenizer.token_to_id(model.get("unk_token") or "")


def _with_entries(tokenizer: Tokenizer, entries: list[str]) -> Tokenizer:
    described, size = json.loads(tokenizer.to_str()), vocabulary_size(tokenizer)
    model, added = described["model"], {token["content"]: token["id"] for token in described["added_tokens"]}
    if model["type"] == "Unigram":  # the place of an entry is its id, so those of added tokens are filled
        scores = [score for _, score in model["vocab"]]
        names = {number: content for content, number in added.items()}
        gaps = range(len(scores), size)
        pieces = _pieces(tokenizer, entries)
        model["vocab"] += [[names.get(number, f"[unused{number}]"), min(scores)] for number in gaps]
        for entry in entries:
            own = [scores[number] for number in pieces[entry]]
            model["vocab"].append([entry, sum(own) + _ABOVE * (len(own) - 1)])
    else:  # added tokens are entries from now on, or they would get other ids
        model["vocab"] |= added | {entry: size + number for number, entry in enumerate(entries)}
        if model["type"] == "BPE":
            model["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(described))
