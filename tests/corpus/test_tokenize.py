"""The column tokenizer gives BertTokenizer's ids; sentences, words and hashes are what they say."""

from __future__ import annotations

import functools
import itertools
import string
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pretrain.corpus.sentences import split_sentences
from pretrain.corpus.tokenize import WordPieces, WordTable, cut_words
from pretrain.corpus.trie import TokenTrie
from pretrain.corpus.vocabulary import Fold, bert_tokenizer, save_tokenizer, train_vocabulary

ENGLISH = (
    "the quick brown fox jumps over the lazy dog while unbelievable internationalization keeps "
    "naïve façade résumé Ελληνικά русский язык don t stop 1999 2024 re-entry Zürich İstanbul 漢字 かな"
)
# What BERT's normalizer and pre-tokenizer treat specially, mixed with ordinary letters.
ODD = (
    "\t\r\x01\x0b\x7f\x85\xa0\xad\u0301\u0338\u1680\u200b\u200d\u2028\u3000\ufeff\ufffd"
    "漢字㐀𠀀䶿䷀䷿一鿿ꀀßİıſΣςéÅñŉǆ≮½²–—“”。、！١कि"
)
TEXT = st.text(
    st.one_of(
        st.sampled_from(ODD),
        st.sampled_from(string.printable.replace("\n", "")),
        st.characters(exclude_categories=["Cs"], exclude_characters="\n\0"),
    ),
    max_size=60,
)


@functools.cache
def reference(lowercase: bool, strip_accents: bool | None, folder: str):
    """Our tokenizer, and transformers' reading of the files we write for it."""
    from transformers import BertTokenizer

    counts = {word.encode(): 3 for word in (ENGLISH.lower() if lowercase else ENGLISH).split()}
    ours = train_vocabulary(counts, 300, lowercase=lowercase, strip_accents=strip_accents, min_frequency=1)
    target = Path(folder) / f"{lowercase}-{strip_accents}"
    save_tokenizer(target, ours)
    return ours, BertTokenizer.from_pretrained(target, split_special_tokens=True)


def tokens_of(texts: list[str], tokenizer, *, lowercase: bool) -> list[list[int]]:
    """Ids of each line of `texts`, by the column way; lines without words give nothing."""
    table = WordTable()
    cut = cut_words(texts, table, lowercase=lowercase)
    tokens, offsets = WordPieces(tokenizer, table).tokens(cut.words, cut.sentences, np.dtype(np.uint16))
    return [tokens[a:b].tolist() for a, b in itertools.pairwise(offsets)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(("lowercase", "strip_accents"), [(True, None), (False, None), (True, False), (False, True)])
@settings(max_examples=200, deadline=None)
@given(lines=st.lists(TEXT, min_size=1, max_size=4))
@example(lines=["a" * 100, "a" * 101, "é" * 101, "word " + "x" * 300 + " word"])
@example(lines=["漢\u0301字\u200d䷀漢䷀。䶿a一b鿿ꀀ", "䷀\u0301漢\u0301", "字"])
@example(lines=["[MASK] is [SEP] not special [PAD]", "[UNK]"])
@example(lines=["हिन्दी में लिखा हुआ", "Việt Nam café ÉCOLE", "الطَّقسُ جميلٌ", "วันนี้อากาศดี", "İSTANBUL Ǆ ß"])
@example(lines=["a\u0301b", "漢字kanji漢", "x≮y", "\x00".replace("\x00", "\x7f"), "Ünïcode-Zürich’s"])
def test_ids_equal_those_of_transformers(lowercase, strip_accents, folder, lines) -> None:
    ours, theirs = reference(lowercase, strip_accents, folder)
    expected = [theirs(line, add_special_tokens=False)["input_ids"] for line in lines]
    found = tokens_of(["\n".join(lines)], ours, lowercase=lowercase)
    assert [ids for ids in found if ids] == [ids for ids in expected if ids]


def test_each_ideograph_is_a_word() -> None:
    """So that text without blanks does not become one new word after the other; hexagrams are none (BERT's ranges)."""
    table = WordTable()
    cut = cut_words(["漢字,字 漢a字b\n䷀䷀漢"], table, lowercase=True)
    assert [word.decode() for word in table.words(cut.words)] == [*"漢字,字漢a字b", "䷀䷀", "漢"]
    assert cut.document_words.tolist() == [3]


def test_a_known_word_is_not_confused_with_its_neighbors() -> None:
    """Words of every length up to 40 bytes that differ in one byte only, asked for twice."""
    random = np.random.default_rng(0)
    words = sorted(
        {bytes(random.integers(97, 100, length).astype(np.uint8)) for length in range(1, 41) for _ in range(300)}
        | {str(number).encode() for number in range(50_000)}  # more than the table holds at first
    )
    table = WordTable()
    first = table.intern_words(words)
    assert sorted(first.tolist()) == list(range(len(words))) == list(range(table.size))
    order = random.permutation(len(words))
    assert (table.intern_words([words[n] for n in order]) == first[order]).all()
    assert table.words(first) == words


def test_tokens_of_words_learned_later() -> None:
    """The table of tokens follows the table of words as it grows."""
    tokenizer = bert_tokenizer(
        {t: n for n, t in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b", "c"])}, _normalizer()
    )
    table = WordTable()
    pieces = WordPieces(tokenizer, table)
    for text, expected in (("a", [5]), ("ab c", [5, 6, 7]), ("abb a zz", [5, 6, 6, 5, 1])):
        cut = cut_words([text], table, lowercase=True)
        assert pieces.tokens(cut.words, cut.sentences, np.dtype(np.uint16))[0].tolist() == expected


LETTERS = st.text("abc1", min_size=1, max_size=16)


@settings(max_examples=200, deadline=None)
@given(tokens=st.sets(st.tuples(st.booleans(), LETTERS)), words=st.lists(LETTERS, max_size=20))
@example(tokens={(False, "a"), (True, "a")}, words=["a" * 16, "aab", "b", "a"])
@example(tokens={(False, "abc"), (False, "a"), (True, "b"), (True, "bc1")}, words=["abc", "abc1", "abcb", "abb"])
def test_the_trie_finds_the_pieces_of_the_plain_way(tokens: set[tuple[bool, str]], words: list[str]) -> None:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted("##" * inner + text for inner, text in tokens)]
    tokenizer = bert_tokenizer({name: number for number, name in enumerate(dict.fromkeys(names))}, _normalizer())
    letters = np.array([word.encode() for word in words], "S16").view(np.uint8).reshape(-1, 16)
    found: list[list[int]] = [[] for _ in words]
    for word, token in zip(*TokenTrie(tokenizer).tokenize(letters), strict=True):
        found[word].append(token)
    assert found == [_plain_pieces(word, tokenizer.get_vocab()) for word in words]
    assert found == [[piece.id for piece in tokenizer.model.tokenize(word)] for word in words]


def _plain_pieces(word: str, vocabulary: dict[str, int]) -> list[int]:
    """WordPiece as BERT's paper code has it: the longest token that fits, then again from there."""
    pieces, start = [], 0
    while start < len(word):
        candidates = ["##" * (start > 0) + word[start:end] for end in range(len(word), start, -1)]
        longest = next((text for text in candidates if text in vocabulary), None)
        if longest is None:
            return [vocabulary["[UNK]"]]
        pieces.append(vocabulary[longest])
        start += len(longest) - 2 * (start > 0)
    return pieces


@pytest.mark.parametrize("lowercase", [True, False])
def test_no_character_becomes_the_mark_that_separates_words(lowercase: bool) -> None:
    """The full tokenizer distinguishes the words that take its slow path."""
    from tokenizers.normalizers import BertNormalizer

    others = "".join(chr(c) for c in range(0x110000) if chr(c) != "|" and not 0xD800 <= c < 0xE000)
    assert "|" not in BertNormalizer(lowercase=lowercase).normalize_str(others)


def test_words_beside_the_separating_mark() -> None:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "|", "é", "##e", "e"]
    with_mark = bert_tokenizer({name: number for number, name in enumerate(names)}, _normalizer())
    names.remove("|")
    without = bert_tokenizer({name: number for number, name in enumerate(names)}, _normalizer())
    lines = ["é|éé| |x", "\xa0 \u0301 | é"]
    assert tokens_of(["\n".join(lines)], with_mark, lowercase=True) == [[8, 5, 8, 7, 5, 5, 1], [5, 8]]
    assert tokens_of(["\n".join(lines)], without, lowercase=True) == [[7, 1, 7, 6, 1, 1, 1], [1, 7]]


def _normalizer():
    from tokenizers.normalizers import BertNormalizer

    return BertNormalizer(lowercase=True)


def test_columns_know_sentences_documents_words_and_bytes() -> None:
    cut = cut_words(["One two, three.\n\n \nFour!", "", "Ünï 漢"], WordTable(), lowercase=False)
    assert cut.documents.tolist() == [0, 2, 2, 3]
    assert cut.sentences.tolist() == [0, 5, 7, 9]  # One two , three . | Four ! | Ünï 漢
    assert cut.document_words.tolist() == [4, 0, 2]
    assert cut.document_bytes.tolist() == [24, 0, 9]


def test_equal_documents_have_equal_hashes() -> None:
    texts = ["The cat sat.\nIt slept.", "the CAT sat.  It\tslept.", "The cat sat. It slept!", "Thecat sat. It slept"]
    hashes = cut_words(texts, WordTable(), lowercase=True, fold=Fold.CASE).hashes
    assert (hashes[0] == hashes[1]).all()
    assert len({tuple(pair) for pair in hashes.tolist()}) == 3
    cased = cut_words([*texts, "Cafe\u0301", "Caf\u00e9", "caf\u00e9"], WordTable(), lowercase=False).hashes
    assert len({tuple(pair) for pair in cased.tolist()}) == 6, "only the composed one is equal to another"


@pytest.mark.parametrize(
    "text", ["Ёжик в тумане", "der große Igel", "ΟΔΟΣ οδοσ οδός", "In ASCII", "ça, cafe\u0301 ≠ café!", "हिन्दी é 각"]
)
def test_an_uncased_vocabulary_knows_a_text_in_all_forms(text: str) -> None:
    plain = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
    for fold in (Fold.CASE, Fold.CASE | Fold.ACCENTS, Fold.ACCENTS):
        forms = [text, unicodedata.normalize("NFD", text), text.upper(), plain]
        hashes = cut_words(forms, WordTable(), lowercase=True, fold=fold).hashes
        equal = (hashes == hashes[0]).all(axis=1).tolist()
        assert equal[1]
        assert equal[2] == (Fold.CASE in fold)
        assert equal[3] == (Fold.ACCENTS in fold or plain == unicodedata.normalize("NFC", text))


def test_splitting_keeps_every_character_and_paragraphs_apart() -> None:
    document = (
        'Mr. Smith came at 5 p.m. in May. He left.\nA heading\n"I saw. '
        + "We went on, all of us. " * 12
        + 'It rained."'
    )
    sentences = split_sentences(document, "en")
    squeeze = lambda text: "".join(text.split())  # noqa: E731
    assert squeeze("".join(sentences)) == squeeze(document)
    lines = [sentence.strip() for sentence in sentences if sentence.strip()]
    assert lines[:4] == ["Mr. Smith came at 5 p.m. in May.", "He left.", "A heading", '"I saw.']
    assert lines[-1] == 'It rained."'
    assert lines[4:-1] == ["We went on, all of us."] * 12


@pytest.mark.parametrize("sentence", ["ខ្ញុំទៅផ្សារ ខ្ញុំទិញត្រី ។ ", "བོད་ཡིག་སློབ་སྦྱོང་བྱེད། །", "ဆရာကောင်းသည်။ ", "ይህ መጽሐፍ ነው። "])
def test_stops_end_sentences_where_blanks_do_not_end_words(sentence: str) -> None:
    for count in (2, 30):
        assert split_sentences(sentence * count, "km") == [sentence] * count


def test_an_opening_quotation_mark_stays_with_its_quotation() -> None:
    said = "He said that it was " + "very " * 50 + "far. "
    assert split_sentences(said + '"We went. Then home," and so on, ' + "far, " * 60 + "she said.", "en")[1:3] == [
        '"We went. ',
        'Then home," and so on, ' + "far, " * 60 + "she said.",
    ]
