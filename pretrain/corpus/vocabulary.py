"""Train WordPiece and byte-level BPE vocabularies on word counts, load and save them in `transformers`' format."""

import enum
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open, sha256_file, write_json
from pretrain.config import VocabularyConfig
from pretrain.corpus.byte_level import is_byte_level, repeat_words, train_byte_level
from pretrain.corpus.released import MAX_WORD_CHARACTERS, encodes_whole_documents, kind_of, released_from_json
from pretrain.corpus.special_tokens import SPECIAL_TOKENS, special_ids

_MAX_COUNTED_WORDS = 3_000_000  # maximum distinct words that are counted, in about 0.5 GB; the rarest are dropped

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
_LINE_FEED, _RETURN = "\u010a", "\u010d"  # GPT-2's characters for bytes that would separate lines in a vocab.txt
# The most frequent characters that cover this share of the text become entries; with their "##" forms, they may make up
# half of all entries (Chinese has thousands of characters).
_COVERAGE = 0.9995
# Rarer characters are added up to a total of 1,000 characters, as in `tokenizers`' BertWordPieceTokenizer, and up to an
# eighth of the entries. 58 characters cover 99.95 % of English, but 0.13 % of words would be [UNK]; with 1,000, 0.01 %.
_MAX_CHARACTERS = 1000


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest id plus 1, including added tokens."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def entries_of(tokenizer: Tokenizer) -> list[str]:
    """Return the entries in the order of their ids, as in a vocab.txt. An unused id such as 7 becomes "[unused7]"."""
    entries = [f"[unused{token_id}]" for token_id in range(vocabulary_size(tokenizer))]
    for entry, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        entries[token_id] = entry.replace("\n", _LINE_FEED).replace("\r", _RETURN)
    return entries


def tokenizer_digest(folder: Path) -> str:
    """Return a SHA-256, in hex, of the files that `save_tokenizer` wrote: vocabulary, casing and normalizer."""
    digests = {name: sha256_file(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def tokens_digest(tokenizer: Tokenizer) -> str:
    """Return a SHA-256, in hex, of what determines the tokens of documents."""
    if not encodes_whole_documents(tokenizer):
        normalizer: Any = tokenizer.normalizer
        tokenizer = bert_tokenizer(tokenizer.get_vocab(with_added_tokens=False), normalizer)
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def bert_tokenizer(vocabulary: dict[str, int], normalizer: normalizers.BertNormalizer) -> Tokenizer:
    """Make BERT's tokenizer for `vocabulary` (token -> id), with the post-processor for [CLS] A [SEP] B [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


# ---------------------------------------------------------------- reading


def read_vocabulary(path: Path, *, advice: str = "Prepare the corpus again.") -> list[str]:
    """Read the entries of a vocab.txt in the order of their ids. Raises `InputError` with `advice` on failure."""
    try:
        return split_entries(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}). {advice}") from None


def split_entries(text: str) -> list[str]:
    """Split the content of a vocab.txt into entries, without a byte-order mark.

    Only line feeds separate entries, since other line breaks may be tokens. Blank lines at the end are ignored.
    """
    return [line.rstrip("\r") for line in text.removeprefix("\ufeff").rstrip("\r\n").split("\n")]


def entry_ids(path: Path, entries: Sequence[str]) -> dict[str, int]:
    """Return {entry: id} for a vocab.txt. Raises `InputError` if an entry repeats or a special token is missing."""
    repeated = [entry for entry, count in Counter(entries).items() if count > 1]
    if repeated:
        raise InputError(f"{path}: token {repeated[0]!r} occurs twice. Every line must be a distinct token.")
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
    if missing:
        raise InputError(f"{path}: {', '.join(missing)} missing. BERT needs {' '.join(SPECIAL_TOKENS)}.")
    return vocabulary


def drop_rarest(counts: Counter[Any]) -> None:
    """Drop the words that occurred once, then twice and so on, until at most `_MAX_COUNTED_WORDS` are left."""
    dropped_count = 1
    while len(counts) > _MAX_COUNTED_WORDS:
        for word in [word for word, count in counts.items() if count <= dropped_count]:
            del counts[word]
        dropped_count += 1


class Fold(enum.Flag):
    """Differences that are ignored when documents are compared."""

    NOTHING = 0
    CASE = 1
    ACCENTS = 2


def fold_of(settings: VocabularyConfig, tokenizer: Tokenizer | None) -> Fold:
    """Return the differences that the tokenizer ignores; `tokenizer` is None if it will be trained with `settings`."""
    normalizer: Any = tokenizer.normalizer if tokenizer else None
    lowercases, strips_accents = settings.lowercase, settings.strip_accents
    strips_accents = lowercases if strips_accents is None else strips_accents
    if normalizer:
        normalized = normalizer.normalize_str("\u00e9")
        lowercases = "A" not in normalizer.normalize_str("A")
        strips_accents = "e" in normalized and "\u0301" not in normalized
    return (Fold.CASE if lowercases else Fold.NOTHING) | (Fold.ACCENTS if strips_accents else Fold.NOTHING)


def tokenizer_from_json(path: Path, text: str, *, lowercase: bool, strip_accents: bool | None = None) -> Tokenizer:
    """Load the tokenizer from the `text` of a tokenizer.json of any kind. Raises errors like `load_vocabulary`."""
    tokenizer = released_from_json(path, text)
    if kind_of(tokenizer) != "wordpiece":
        return tokenizer
    normalizer: Any = tokenizer.normalizer
    if normalizer.lowercase != lowercase:
        raise InputError(
            f"corpus.vocabulary.lowercase: {str(lowercase).lower()}, but {path} has "
            f"{str(normalizer.lowercase).lower()}. Make them agree."
        )
    in_file = lowercase if normalizer.strip_accents is None else normalizer.strip_accents
    if strip_accents not in (None, in_file):
        raise InputError(
            f"corpus.vocabulary.strip_accents: {str(strip_accents).lower()}, but {path} has {str(in_file).lower()}. "
            "Make them agree."
        )
    return tokenizer


# ---------------------------------------------------------------- training


def train(counts: dict[bytes, int], settings: VocabularyConfig) -> Tokenizer:
    """Train a vocabulary of the configured kind on `counts` of words or pieces."""
    if settings.kind == "byte_bpe":
        return train_byte_vocabulary(counts, settings.size, min_frequency=settings.min_frequency)
    return train_vocabulary(
        counts,
        settings.size,
        lowercase=settings.lowercase,
        strip_accents=settings.strip_accents,
        min_frequency=settings.min_frequency,
    )


def train_byte_vocabulary(counts: dict[bytes, int], size: int, *, min_frequency: int) -> Tokenizer:
    """Train a byte-level BPE with BERT's special tokens, which get the same ids as in a WordPiece vocabulary."""
    return train_byte_level(counts, size, SPECIAL_TOKENS, min_frequency=min_frequency)


def train_vocabulary(
    counts: dict[bytes, int], size: int, *, lowercase: bool, strip_accents: bool | None = None, min_frequency: int
) -> Tokenizer:
    """Train a WordPiece vocabulary of at most `size` entries on counts of words, which are cut as in `tokenize`.

    `strip_accents` is the same as `lowercase` by default. The same counts give the same vocabulary with the same ids.
    `tokenizers` does not guarantee this (it numbers "##" characters in the order of a randomly seeded hash map), so the
    alphabet is passed to it as special tokens.
    """
    normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    words = count_normalized_words(counts, normalizer)
    if not words:
        raise InputError("corpus.sources: no words to train a vocabulary on.")
    alphabet, inner = _alphabet(words, size)
    fixed_tokens = [*SPECIAL_TOKENS, *sorted(alphabet), *(f"##{character}" for character in sorted(inner))]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=fixed_tokens,
        initial_alphabet=sorted(alphabet),
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(repeat_words(words), trainer)
    return bert_tokenizer(tokenizer.get_vocab(with_added_tokens=False), normalizer)


def count_normalized_words(counts: dict[bytes, int], normalizer: normalizers.BertNormalizer) -> dict[str, int]:
    """Count the words that BERT's normalizer and pre-tokenizer give, sorted by word."""
    pre_tokenizer, lowercase = pre_tokenizers.BertPreTokenizer(), normalizer.lowercase
    words: Counter[str] = Counter()
    for word, count in counts.items():
        text = word.decode()
        # Nine in ten words are ASCII letters and digits (bytes.isalnum) in the right case, and do not change.
        is_plain = word.isalnum() and not (lowercase and word != word.lower())
        for piece, _ in [(text, None)] if is_plain else pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text)):
            if len(piece) <= MAX_WORD_CHARACTERS:
                words[piece] += count
    return dict(sorted(words.items()))


def _alphabet(words: dict[str, int], size: int) -> tuple[set[str], set[str]]:
    """Return (characters that become entries, the ones that occur inside words and also get a "##" entry).

    The most frequent characters are selected, up to `_COVERAGE` and `_MAX_CHARACTERS`.
    """
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    inner = {character for word in words for character in word[1:]}
    selected: set[str] = set()
    covered, entry_count, required = 0, 0, _COVERAGE * counts.total()
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        entry_count += 1 + (character in inner)
        is_covered = covered >= required
        if entry_count > size // (8 if is_covered else 2) or (is_covered and len(selected) >= _MAX_CHARACTERS):
            break
        selected.add(character)
        covered += count
    return selected, inner & selected


# ---------------------------------------------------------------- writing


def save_tokenizer(folder: Path, tokenizer: Tokenizer, tokenizer_config: Mapping[str, Any] | None = None) -> None:
    """Write tokenizer.json, vocab.txt and tokenizer_config.json, the files of a released BERT.

    In the vocab.txt of a byte-level BPE, each byte is represented by GPT-2's character for it. The settings
    in `tokenizer_config`, of a released tokenizer, are kept, except for the class if the kind is `released`.
    """
    tokens = entries_of(tokenizer)
    with atomic_open(folder / "tokenizer.json", "w") as file:
        file.write(tokenizer.to_str(pretty=True))
    with atomic_open(folder / "vocab.txt", "w") as file:
        file.write("\n".join([*tokens, ""]))
    ids = special_ids(tokenizer, tokenizer_config)
    names = {f"{role}_token": tokenizer.id_to_token(token_id) for role, token_id in ids.items()}
    settings = {**_tokenizer_settings(tokenizer), "model_max_length": 512, **(tokenizer_config or {}), **names}
    if encodes_whole_documents(tokenizer) and not is_byte_level(tokenizer):
        # Other classes of transformers only read the entries, and hard-code normalizer and pre-tokenizer.
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(folder / "tokenizer_config.json", settings)


def _tokenizer_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the settings in tokenizer_config.json that depend on the kind of tokenizer."""
    normalizer: Any = tokenizer.normalizer
    if encodes_whole_documents(tokenizer):
        clean = {"clean_up_tokenization_spaces": False} if is_byte_level(tokenizer) else {}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **clean}
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": normalizer.lowercase,
        "strip_accents": normalizer.strip_accents,
        "tokenize_chinese_chars": normalizer.handle_chinese_chars,
    }
