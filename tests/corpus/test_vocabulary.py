"""Vocabularies: the same counts give the same ids in every process; what is taken over is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from pretrain.common.errors import InputError
from pretrain.corpus.tokenizer_files import load_vocabulary
from pretrain.corpus.vocabulary import (
    SPECIAL_TOKENS,
    count_normalized_words,
    save_tokenizer,
    special_ids,
    train_vocabulary,
)

WORDS = ["low", "lower", "lowest", "new", "newer", "newest", "wide", "wider", "widest", "slow", "slower", "slowest"]
WORDS += ["window", "newly", "widely", ",", ".", "!", "é", "naïve", "漢字"]
COUNTS = {word.encode(): 1 + (7 * number) % 23 for number, word in enumerate(WORDS)}
TRAIN = (
    "from tests.corpus.test_vocabulary import COUNTS; from pretrain.corpus.vocabulary import train_vocabulary; "
    "print(train_vocabulary(COUNTS, 90, lowercase=True, min_frequency=1).to_str())"
)


def trained(size: int = 90, lowercase: bool = True):
    return train_vocabulary(COUNTS, size, lowercase=lowercase, min_frequency=1)


def test_training_gives_the_same_ids_in_every_process() -> None:
    """`tokenizers` alone numbers the ## characters differently each time: processes would not agree."""
    outputs = {
        subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, check=True, text=True).stdout
        for _ in range(2)
    }
    assert outputs == {f"{trained().to_str()}\n"}


def test_training_merges_the_most_frequent_first() -> None:
    vocabulary = trained().get_vocab()
    assert [token for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])][:5] == list(SPECIAL_TOKENS)
    assert {"low", "wide", "slow", "naive"} & set(vocabulary) >= {"low", "wide", "slow"}
    assert "ï" not in vocabulary  # uncased strips accents
    assert trained(size=64).get_vocab_size() == 64
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))


@pytest.mark.parametrize("lowercase", [True, False])
def test_words_are_normalized_as_by_bert_one_by_one(lowercase: bool) -> None:
    normalizer, cut = BertNormalizer(lowercase=lowercase), BertPreTokenizer()
    words = ["low", "Low", "1999", "r2d2", ",", "é", "ÉTÉ", "naïve", "漢字", "x\u0301", "\x7f", "\xa0a", "b\u2019s"]
    words += ["a" * 100, "a" * 101]
    expected: Counter[str] = Counter()
    for word in words:
        for piece, _ in cut.pre_tokenize_str(normalizer.normalize_str(word)):
            expected[piece] += 3 * (len(piece) <= 100)
    found = count_normalized_words({word.encode(): 3 for word in words}, normalizer)
    assert found == dict(sorted((+expected).items()))


def _entries_of_one_character(counts: dict[str, int], size: int) -> set[str]:
    words = {word.encode(): count for word, count in counts.items()}
    tokenizer = train_vocabulary(words, size, lowercase=True, min_frequency=1)
    assert tokenizer.get_vocab_size() <= size
    return {entry for entry in tokenizer.get_vocab() if len(entry.removeprefix("##")) == 1}


def test_the_alphabet_covers_the_text_and_takes_at_most_half_of_the_entries() -> None:
    chinese = {chr(0x4E00 + n): 1 + 4000 // (n + 1) for n in range(3000)}
    counts, total = sorted(chinese.values(), reverse=True), sum(chinese.values())
    found = _entries_of_one_character(chinese, 21128)
    assert sum(chinese[character] for character in found) >= 0.9995 * total
    assert sum(counts[: len(found) - 1]) < 0.9995 * total  # one character fewer does not cover it
    assert len(_entries_of_one_character(chinese, 1000)) == 500
    # Characters within words have "##" entries, too, which count.
    inner = {"a" + character: count for character, count in chinese.items()}
    assert len(_entries_of_one_character(inner, 1000)) in (499, 500)


def test_rare_characters_beyond_the_covered_text_are_a_thousand_in_an_eighth_of_the_entries() -> None:
    rare = {"a": 2_300_000, **{chr(0x4E00 + n): 1 for n in range(1100)}}
    assert [len(_entries_of_one_character(rare, size)) for size in (400, 4000, 30000)] == [50, 500, 1000]


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertTokenizer

    ours = trained()
    save_tokenizer(tmp_path, ours)
    for theirs in (AutoTokenizer.from_pretrained(tmp_path), BertTokenizer.from_pretrained(tmp_path)):
        assert theirs.get_vocab() == ours.get_vocab()
        encoded = theirs("Lower, newest!", "Window")
        ids = ours.encode("Lower, newest!", "Window").ids
        assert encoded["input_ids"] == ids
        assert ids[0] == special_ids(ours)["cls"]
        assert encoded["token_type_ids"] == [0] * ids.index(3) + [0] + [1] * (len(ids) - ids.index(3) - 1)
        assert theirs.mask_token_id == special_ids(ours)["mask"]


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", ""])
def test_taking_over_gives_the_same_tokenizer(tmp_path: Path, name: str) -> None:
    for lowercase in (True, False):
        ours = trained(lowercase=lowercase)
        save_tokenizer(tmp_path, ours)
        taken = load_vocabulary(tmp_path / name, lowercase=lowercase)
        for text in ("Lower NEWEST naïve 漢字 window.", "x" * 101):
            assert taken.encode(text).ids == ours.encode(text).ids


def _write(path: Path, tokens: list[str]) -> Path:
    path.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return path


def test_only_a_newline_ends_a_token(tmp_path: Path) -> None:
    tokens = [*SPECIAL_TOKENS, "a", "\u2028", "\x85", "b"]
    assert load_vocabulary(_write(tmp_path / "vocab.txt", tokens), lowercase=True).get_vocab()["b"] == 8


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.txt", None, r"v\.txt: not found"),
        ("v.txt", b"[PAD]\n[UNK]\n[SEP]\na\n", r"\[CLS\], \[MASK\] missing"),
        ("v.txt", "\n".join([*SPECIAL_TOKENS, "a", "a\n"]).encode(), "'a' occurs twice"),
        ("v.txt", b"\xff\xfe\x00", "cannot be read"),
        ("t.json", b"{}", r"not a tokenizer\.json"),
        ("t.json", {"pre_tokenizer": {"type": "Whitespace"}}, "is a vocabulary of kind released"),
        ("cased.json", {}, r"lowercase: false, but .* has true"),
    ],
)
def test_vocabularies_other_than_berts_are_refused(tmp_path: Path, name: str, content, message: str) -> None:
    if isinstance(content, dict):  # changes of our own
        content = json.dumps(json.loads(trained().to_str()) | content).encode()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_vocabulary(tmp_path / name, lowercase=name != "cased.json")


def test_a_tokenizer_json_that_names_no_type_of_model_is_read(tmp_path):
    """As bert-base-uncased's; `tokenizers` reads it, too."""
    described = json.loads(trained().to_str())
    described["model"].pop("type")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(described))
    read = load_vocabulary(path, lowercase=True)
    assert read.get_vocab() == trained().get_vocab()
