"""Words of several pieces stay whole in every kind of vocabulary; units of scripts without blanks begin at letters."""

from __future__ import annotations

import functools
import itertools
import random
import unicodedata
from collections import Counter
from typing import Any

import numpy as np
import pytest
import regex
from piece_tokenizers import LANGUAGES
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from pretrain.common import scripts
from pretrain.corpus.byte_words import speller, word_edges
from pretrain.corpus.extension import extend_vocabulary, old_pieces, saved_share
from pretrain.corpus.special_tokens import SPECIAL_TOKENS
from pretrain.corpus.vocabulary import bert_tokenizer, train_byte_vocabulary
from tests.corpus.preparing import masked_words

TEXTS = {
    **LANGUAGES,
    "ar": "كَتَبَ الوَلَدُ رِسَالَةً طَوِيلَةً، ثُمَّ قَرَأَهَا؛ وكـــتب أخرى.",
    "bn": "মানুষেরা স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে। তাঁদের বিবেক ও বুদ্ধি আছে।",
    "fa": "تمام افراد بشر آزاد به دنیا می‌آیند و کتاب‌هایشان را می‌خوانند، نمی‌دانم.",
    "he": "בְּנֵי הָאָדָם נוֹלְדוּ בְּנֵי חוֹרִין; שווים בערכם־ובזכויותיהם.",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में समानता प्राप्त है। क्‍या हिन्दी—उर्दू १९४८ में?",
    "ta": "மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்; உரிமைகளில் சமமானவர்கள்.",
    "tr": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar; İstanbul'daki akıl ve vicdana sahiptirler.",
    "vi": unicodedata.normalize("NFD", LANGUAGES["vi"]) + " Mọi người đều “tự do”.",
}
UNSPACED = {
    **{name: LANGUAGES[name] for name in ("ja", "th", "zh")},
    "bo": "འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ་སྐྱེས་ཙམ་ཉིད་ནས་ཆེ་མཐོངས་དང་།",
    "km": "មនុស្សទាំងអស់កើតមកមានសេរីភាព និងសមភាពក្នុងសេចក្ដីថ្លៃថ្នូរ",
    "kana": "コーヒーをちょっとカップで、人々はプﾞートでiPhone15も使う。",
    "lo": "ມະນຸດທຸກຄົນເກີດມາມີກຽດສັກສີ ສິດທິ ເສລີພາບ ແລະຄວາມສະເໝີພາບເທົ່າທຽມກັນ",
    "my": "လူတိုင်းသည် တူညီလွတ်လပ်သောဂုဏ်သိက္ခာဖြင့် မွေးဖွားလာသူများဖြစ်သည်။",
}
KINDS = ("cased", "uncased", "bytes", "unigram", "metaspace")


@functools.cache
def trained(kind: str) -> Tokenizer:
    """A small vocabulary of all texts; of the metaspace BPE, rare characters are spelled by bytes."""
    texts = [*TEXTS.values(), *UNSPACED.values()]
    counts = Counter(f" {word}".encode() for text in texts for word in text.split())
    if kind == "bytes":
        return train_byte_vocabulary(counts, 700, min_frequency=1)
    if kind in ("cased", "uncased"):
        normalizer = normalizers.BertNormalizer(lowercase=kind == "uncased")
        divide = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
        words = [word for text in texts for word, _ in divide(normalizer.normalize_str(text))]
        pieces = {f"##{word[n : n + size]}" for word in words for n in range(1, len(word)) for size in (1, 1 + n % 3)}
        entries = [*SPECIAL_TOKENS, *sorted({word[:size] for word in words for size in (1, 2)} | pieces)]
        return bert_tokenizer({entry: number for number, entry in enumerate(entries)}, normalizer)
    cut: Any = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(vocab_size=700, special_tokens=["<unk>"], unk_token="<unk>")
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=known, limit_alphabet=150)
    tokenizer.pre_tokenizer = cut
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def units_and_words(kind: str, text: str) -> tuple[list[str], list[tuple[int, int]], list[tuple[int, int]]]:
    """Units, and where they and the words of letters stand in the text without blanks."""
    tokenizer = trained(kind)
    normalizer: Any = tokenizer.normalizer or normalizers.Sequence([])
    units = [unit.replace(" ", "") for unit in masked_words(tokenizer, text)]
    ends = list(itertools.accumulate(map(len, units), initial=0))
    words, place = [], 0
    for part in normalizer.normalize_str(text).split():
        words += [(place + m.start(), place + m.end()) for m in regex.finditer(r"[\p{L}\p{M}\u200c\u200d]+", part)]
        place += len(part)
    assert "".join(units) == "".join(normalizer.normalize_str(text).split())
    return units, list(itertools.pairwise(ends)), words


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("language", [name for name in TEXTS if name not in UNSPACED])
def test_no_word_of_several_pieces_is_cut_and_no_unit_is_longer(language: str, kind: str) -> None:
    _, units, words = units_and_words(kind, TEXTS[language])
    cut = [word for word in words if any(word[0] < begin < word[1] for begin, _ in units)]
    longer = [unit for unit in units if sum(begin < unit[1] and end > unit[0] for begin, end in words) > 1]
    assert (cut, longer) == ([], [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("language", list(UNSPACED))
def test_where_blanks_are_rare_units_begin_at_letters(language: str, kind: str) -> None:
    units, _, _ = units_and_words(kind, UNSPACED[language])
    assert not [unit for unit in units if regex.match(r"[\p{M}ะาำๆະາーっょッョ]", unit)]
    assert max(map(len, units)) < 24


def test_text_that_blanks_segment_has_its_words() -> None:
    """Japanese checkpoints of text cut into words: "##" continues; others never have it before an ideograph."""
    entries, ids = ["大", "##学", "##で", "コ", "##ーヒ"], np.arange(5)
    assert word_edges(entries, None, is_segmented=True).begins(ids).tolist() == [True, False, False, True, False]
    assert word_edges(entries, None).begins(ids).tolist() == [True, True, True, True, False]
    assert word_edges(["เ", "##ท", "##ศ", "##abc", "##12"], None).begins(ids).tolist() == [
        True,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("entries", "begins"),
    [
        (["Ġ\u00e0\u00a4", "\u00b9", "\u00e0\u00a5", "\u012a", "\u00e0\u00a5", "\u00a4", "a"], "1000101"),
        (["Ġa", "\u00e2", "\u0122", "\u013b", "s"], "11001"),
        (["Ġa", "\u00f0", "\u0141", "\u013a\u0122b"], "1100"),
        (["Ġa", "\u00e0", "b", "\u00a5"], "1000"),  # broken
    ],
    ids=["है।a", "a\u2019s", "a\U0001f600b", "broken"],
)
def test_a_character_of_several_tokens_has_its_class(entries: list[str], begins: str) -> None:
    known = sorted({*pre_tokenizers.ByteLevel.alphabet(), *entries})
    spell = speller(known)
    assert spell is not None
    ids = np.array([known.index(entry) for entry in entries])
    assert word_edges(known, spell).begins(ids).astype(int).tolist() == list(map(int, begins))


THAI = ["แม่น้ำ", "โรงพยาบาล", "หนังสือ", "สถานี", "ผู้โดยสาร", "ภาษา", "เกิด"]
KANA = ["テレビ", "カップ", "りんご", "たべる", "ちょっと", "でんしゃ"]
HINDI = ["किसानों", "योजना", "विद्यालय", "समस्याओं", "पढ़ते", "है", "हिन्दी"]


@pytest.mark.parametrize("kind", ["cased", "uncased", "unigram", "bytes"])
@pytest.mark.parametrize(("words", "blank", "least"), [(HINDI, " ", 0.5), (THAI, "", 0.3), (KANA, "", 0.3)])
def test_added_words_of_any_script_save_what_is_said(words: list[str], blank: str, least: float, kind: str) -> None:
    draw = random.Random(0)
    texts = [blank.join(draw.choices(words, k=30 if blank else 8)) + "।" for _ in range(90)]
    old = small_tokenizer(kind, "".join(words))
    counts = Counter(word for text in texts for word in scripts.WORD.findall(text))
    found = extend_vocabulary(old, counts, 20)
    tokens = [
        sum(len(one.encode(text, add_special_tokens=False).ids) for text in texts) for one in (old, found.tokenizer)
    ]
    assert saved_share(old, found.tokenizer, texts) == pytest.approx(1 - tokens[1] / tokens[0])
    assert all(len(pieces) > 1 for pieces in old_pieces(old, found.words))
    if kind == "bytes":  # GPT-2's division: no words of marks or without blanks
        assert bool(found.words) is (words is not KANA)
        return
    assert 1 - tokens[1] / tokens[0] > least
    normalizer: Any = old.normalizer or normalizers.Sequence([])
    entries = {entry.removeprefix("##").lstrip("▁") for entry in found.words}
    assert not [entry for entry in entries if regex.match(r"[\p{M}าーっょ]", entry)]
    if blank:
        assert entries <= {normalizer.normalize_str(word) for word in words}


def small_tokenizer(kind: str, letters: str) -> Tokenizer:
    """Every character is an entry."""
    if kind == "bytes":
        return train_byte_vocabulary({b"a": 1}, 261, min_frequency=1)
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram([("<unk>", -20.0), *((one, -5.0) for one in sorted({*letters, "▁"}))], 0))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
        return tokenizer
    normalizer = normalizers.BertNormalizer(lowercase=kind == "uncased")
    known = sorted(set(normalizer.normalize_str(letters)))
    entries = [*SPECIAL_TOKENS, *known, *(f"##{one}" for one in known)]
    return bert_tokenizer({entry: number for number, entry in enumerate(entries)}, normalizer)


def test_words_with_joiners_and_numbers() -> None:
    """BERT drops a joiner; a number has no letter, in whatever digits."""
    texts = ["کتاب‌هایشان را می‌خوانند ١٢٣٤ و १९४८"] * 5
    for kind, expected in (("cased", ["کتابهایشان", "میخوانند"]), ("unigram", ["▁کتاب‌هایشان", "▁می‌خوانند"])):
        old = small_tokenizer(kind, "".join(texts))
        counts = Counter(word for text in texts for word in scripts.WORD.findall(text))
        assert extend_vocabulary(old, counts, 2).words == expected
    old = small_tokenizer("bytes", "")
    assert extend_vocabulary(old, {"१९४८": 9}, 2).words == []
