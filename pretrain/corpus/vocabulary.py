"""WordPiece and byte-level BPE vocabularies: trained on word counts, or given; written in `transformers`' format."""

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
from pretrain.corpus.released import MAX_WORD_CHARACTERS, kind_of, released_from_json, takes_whole_documents
from pretrain.corpus.special_tokens import SPECIAL_TOKENS, special_ids

_MAX_COUNTED_WORDS = 3_000_000  # distinct words counted for a vocabulary, about 0.5 GB; the rarest are dropped

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
_LINE_FEED, _RETURN = "\u010a", "\u010d"  # GPT-2's characters for the bytes that separate lines of a vocab.txt
# The most frequent characters that cover this share of the text are entries; with their "##" forms, they may take half
# of all entries (Chinese has thousands).
_COVERAGE = 0.9995
# Rarer ones are added up to 1,000 characters, as in `tokenizers`' BertWordPieceTokenizer, and an eighth of the entries.
# 58 characters cover 99.95 % of English, with which 0.13 % of the words would be [UNK]; with 1,000 it is 0.01 %.
_MAX_RARE = 1000


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest id plus 1, added tokens included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def entries_of(tokenizer: Tokenizer) -> list[str]:
    """Return the entries in the order of their ids, as in a vocab.txt: "[unused7]" if the id 7 has no entry."""
    entries = [f"[unused{number}]" for number in range(vocabulary_size(tokenizer))]
    for entry, number in tokenizer.get_vocab(with_added_tokens=True).items():
        entries[number] = entry.replace("\n", _LINE_FEED).replace("\r", _RETURN)
    return entries


def tokenizer_digest(folder: Path) -> str:
    """Return the SHA-256 of the files that `save_tokenizer` wrote, in hex: vocabulary, casing and normalizer."""
    digests = {name: sha256_file(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def tokens_digest(tokenizer: Tokenizer) -> str:
    """Return a SHA-256 that identifies the tokens of any document, in hex."""
    if not takes_whole_documents(tokenizer):
        normalizer: Any = tokenizer.normalizer
        tokenizer = bert_tokenizer(tokenizer.get_vocab(with_added_tokens=False), normalizer)
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def bert_tokenizer(vocabulary: dict[str, int], normalizer: normalizers.BertNormalizer) -> Tokenizer:
    """Make BERT's tokenizer over `vocabulary` (token -> id), with the post-processor for [CLS] A [SEP] B [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


# ---------------------------------------------------------------- reading


def read_vocabulary(path: Path, *, advice: str = "Prepare the corpus again.") -> list[str]:
    """Read the entries of a vocab.txt in the order of their ids. `InputError` with `advice` if it cannot be read."""
    try:
        return split_entries(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}). {advice}") from None


def split_entries(text: str) -> list[str]:
    """Return the entries in the content of a vocab.txt, without a byte-order mark.

    Only line feeds separate them: other line breaks may be tokens. Blank lines at the end are ignored.
    """
    return [line.rstrip("\r") for line in text.removeprefix("\ufeff").rstrip("\r\n").split("\n")]


def numbered(path: Path, entries: Sequence[str]) -> dict[str, int]:
    """Return {entry: id} for the vocab.txt at `path`; `InputError` if an entry repeats or a special one is missing."""
    repeated = [entry for entry, count in Counter(entries).items() if count > 1]
    if repeated:
        raise InputError(f"{path}: token {repeated[0]!r} occurs twice. Every line must be a distinct token.")
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
    if missing:
        raise InputError(f"{path}: {', '.join(missing)} missing. BERT needs {' '.join(SPECIAL_TOKENS)}.")
    return vocabulary


def forget_rarest(counts: Counter[Any]) -> None:
    """Bound memory: drop the words that occurred once, then twice, ... until few enough are left."""
    dropped_count = 1
    while len(counts) > _MAX_COUNTED_WORDS:
        for word in [word for word, count in counts.items() if count <= dropped_count]:
            del counts[word]
        dropped_count += 1


class Fold(enum.Flag):
    """Differences that are ignored when documents are compared: case, accents."""

    NOTHING = 0
    CASE = 1
    ACCENTS = 2


def fold_of(settings: VocabularyConfig, tokenizer: Tokenizer | None) -> Fold:
    """Return the differences that tokens do not show. `tokenizer` is None if it is to be trained."""
    normalizer: Any = tokenizer.normalizer if tokenizer else None
    uncased, strips = settings.lowercase, settings.strip_accents
    strips = uncased if strips is None else strips
    if normalizer:
        plain = normalizer.normalize_str("\u00e9")
        uncased, strips = "A" not in normalizer.normalize_str("A"), "e" in plain and "\u0301" not in plain
    return (Fold.CASE if uncased else Fold.NOTHING) | (Fold.ACCENTS if strips else Fold.NOTHING)


def tokenizer_from_json(path: Path, text: str, *, lowercase: bool, strip_accents: bool | None = None) -> Tokenizer:
    """Load the tokenizer from the `text` of a tokenizer.json of any kind; errors as in `load_vocabulary`."""
    tokenizer = released_from_json(path, text)
    if kind_of(tokenizer) != "wordpiece":
        return tokenizer
    normalizer: Any = tokenizer.normalizer
    if normalizer.lowercase != lowercase:
        raise InputError(
            f"corpus.vocabulary.lowercase: {str(lowercase).lower()}, but {path} has "
            f"{str(normalizer.lowercase).lower()}. Make them agree."
        )
    strips = lowercase if normalizer.strip_accents is None else normalizer.strip_accents
    if strip_accents not in (None, strips):
        raise InputError(
            f"corpus.vocabulary.strip_accents: {str(strip_accents).lower()}, but {path} has {str(strips).lower()}. "
            "Make them agree."
        )
    return tokenizer


# ---------------------------------------------------------------- training


def train(counts: dict[bytes, int], settings: VocabularyConfig) -> Tokenizer:
    """Train a vocabulary of the settings' kind on `counts`, as `train_vocabulary` takes them."""
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
    """Call `train_byte_level` with BERT's special tokens, which get the same ids as in a WordPiece vocabulary."""
    return train_byte_level(counts, size, SPECIAL_TOKENS, min_frequency=min_frequency)


def train_vocabulary(
    counts: dict[bytes, int], size: int, *, lowercase: bool, strip_accents: bool | None = None, min_frequency: int
) -> Tokenizer:
    """Train a WordPiece vocabulary of at most `size` entries on the counts of words cut at ASCII blanks and marks.

    `strip_accents` None means as `lowercase`.

    The same counts give the same vocabulary, id by id. `tokenizers` does not guarantee that (it numbers "##" characters
    in the order of a randomly seeded hash map), so the alphabet is passed to it as fixed tokens.
    """
    normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    words = count_normal_words(counts, normalizer)
    if not words:
        raise InputError("corpus.sources: no words to train a vocabulary on.")
    alphabet, inner = _alphabet(words, size)
    fixed = [*SPECIAL_TOKENS, *sorted(alphabet), *(f"##{character}" for character in sorted(inner))]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=fixed,
        initial_alphabet=sorted(alphabet),
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(repeat_words(words), trainer)
    return bert_tokenizer(tokenizer.get_vocab(with_added_tokens=False), normalizer)


def count_normal_words(counts: dict[bytes, int], normalizer: normalizers.BertNormalizer) -> dict[str, int]:
    """Count the words after BERT's normalizer and pre-tokenizer, in ascending order of the words."""
    cut, lowercase = pre_tokenizers.BertPreTokenizer(), normalizer.lowercase
    words: Counter[str] = Counter()
    for word, count in counts.items():
        text = word.decode()
        # Nine in ten are ASCII letters and digits (bytes.isalnum) of the right case, and do not change.
        plain = word.isalnum() and not (lowercase and word != word.lower())
        for normal, _ in [(text, None)] if plain else cut.pre_tokenize_str(normalizer.normalize_str(text)):
            if len(normal) <= MAX_WORD_CHARACTERS:
                words[normal] += count
    return dict(sorted(words.items()))


def _alphabet(words: dict[str, int], size: int) -> tuple[set[str], set[str]]:
    """Return (characters of a vocabulary of `size` entries, characters that also get a "##" entry, being inside words).

    The most frequent characters are selected, up to `_COVERAGE` and `_MAX_RARE`.
    """
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    within = {character for word in words for character in word[1:]}
    kept: set[str] = set()
    covered, entries, enough = 0, 0, _COVERAGE * counts.total()
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        entries += 1 + (character in within)
        if entries > size // (2 if covered < enough else 8) or (covered >= enough and len(kept) >= _MAX_RARE):
            break
        kept.add(character)
        covered += count
    return kept, within & kept


# ---------------------------------------------------------------- writing


def save_tokenizer(folder: Path, tokenizer: Tokenizer, declared: Mapping[str, Any] | None = None) -> None:
    """Write tokenizer.json, vocab.txt and tokenizer_config.json, the files of a released BERT.

    A byte-level BPE has a vocab.txt, too: its entries, with GPT-2's character for each byte. `declared` is the
    tokenizer_config.json of a released tokenizer; it is kept, except for the class if the kind is `released`.
    """
    tokens = entries_of(tokenizer)
    with atomic_open(folder / "tokenizer.json", "w") as file:
        file.write(tokenizer.to_str(pretty=True))
    with atomic_open(folder / "vocab.txt", "w") as file:
        file.write("\n".join([*tokens, ""]))
    ids = special_ids(tokenizer, declared)
    names = {f"{role}_token": tokenizer.id_to_token(number) for role, number in ids.items()}
    settings = {**_settings(tokenizer), "model_max_length": 512, **(declared or {}), **names}
    if takes_whole_documents(tokenizer) and not is_byte_level(tokenizer):
        # Other classes of transformers only read the entries, and hard-code the steps before the model.
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(folder / "tokenizer_config.json", settings)


def _settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the settings in tokenizer_config.json for a kind of vocabulary."""
    normalizer: Any = tokenizer.normalizer
    if takes_whole_documents(tokenizer):
        clean = {"clean_up_tokenization_spaces": False} if is_byte_level(tokenizer) else {}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **clean}
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": normalizer.lowercase,
        "strip_accents": normalizer.strip_accents,
        "tokenize_chinese_chars": normalizer.handle_chinese_chars,
    }
