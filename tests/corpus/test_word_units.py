"""Words of all scripts: masked as a whole in every kind of vocabulary, and added to one."""

from __future__ import annotations

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
from pretrain.corpus.byte_words import entry_bytes, entry_decoder, word_boundaries
from pretrain.corpus.extension import extend_vocabulary, replaced_ids, saved_share
from pretrain.corpus.special_tokens import SPECIAL_TOKENS
from pretrain.corpus.vocabulary import bert_tokenizer, train_byte_vocabulary
from tests.corpus.preparing import masked_words

UNSPACED = {
    **{name: LANGUAGES[name] for name in ("ja", "th", "zh")},
    "bo": "འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ་སྐྱེས་ཙམ་ཉིད་ནས་ཆེ་མཐོངས་དང་།",
    "km": "មនុស្សទាំងអស់កើតមកមានសេរីភាព និងសមភាពក្នុងសេចក្ដីថ្លៃថ្នូរ",
    "kana": "コーヒーをちょっとカップで、人々はプﾞートでiPhone15も使う。",
    "lo": "ມະນຸດທຸກຄົນເກີດມາມີກຽດສັກສີ ສິດທິ ເສລີພາບ ແລະຄວາມສະເໝີພາບເທົ່າທຽມກັນ",
    "my": "လူတိုင်းသည် တူညီလွတ်လပ်သောဂုဏ်သိက္ခာဖြင့် မွေးဖွားလာသူများဖြစ်သည်။",
}
SPACED = {
    **{name: text for name, text in LANGUAGES.items() if name not in UNSPACED},
    "ar": "كَتَبَ الوَلَدُ رِسَالَةً طَوِيلَةً، ثُمَّ قَرَأَهَا؛ وكـــتب أخرى.",
    "bn": "মানুষেরা স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে। তাঁদের বিবেক ও বুদ্ধি আছে।",
    "fa": "تمام افراد بشر آزاد به دنیا می‌آیند و کتاب‌هایشان را می‌خوانند، نمی‌دانم.",
    "he": "בְּנֵי הָאָדָם נוֹלְדוּ בְּנֵי חוֹרִין; שווים בערכם־ובזכויותיהם.",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में समानता प्राप्त है। क्‍या हिन्दी—उर्दू १९४८ में?",
    "ta": "மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்; உரிமைகளில் சமமானவர்கள்.",
    "tr": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar; İstanbul'daki akıl ve vicdana sahiptirler.",
    "vi": unicodedata.normalize("NFD", LANGUAGES["vi"]) + " Mọi người đều “tự do”.",
}


def trained(kind: str) -> Tokenizer:
    """A small vocabulary of all texts; the metaspace BPE spells rare characters by bytes."""
    texts = [*SPACED.values(), *UNSPACED.values()]
    if kind == "bytes":
        counts = Counter(f" {word}".encode() for text in texts for word in text.split())
        return train_byte_vocabulary(counts, 700, min_frequency=1)
    if kind in ("cased", "uncased"):
        return bert(kind, " ".join(texts), longest=3)
    known = ["<unk>"]
    tokenizer, size = Tokenizer(models.Unigram()), {"vocab_size": 700, "show_progress": False}
    trainer: Any = trainers.UnigramTrainer(special_tokens=known, unk_token="<unk>", **size)
    if kind == "metaspace":
        known += [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        trainer = trainers.BpeTrainer(special_tokens=known, limit_alphabet=150, **size)
    cut: Any = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.pre_tokenizer = cut
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def bert(kind: str, text: str, longest: int) -> Tokenizer:
    """A WordPiece of all characters, and of pieces of up to `longest`, which depend on the place in the word."""
    normalizer, divide = normalizers.BertNormalizer(lowercase=kind == "uncased"), pre_tokenizers.BertPreTokenizer()
    words = {word for word, _ in divide.pre_tokenize_str(normalizer.normalize_str(text))}
    pieces = {word[n : n + size] for word in words for n in range(len(word)) for size in (1, 1 + n % longest)}
    entries = [*SPECIAL_TOKENS, *sorted(pieces), *(f"##{piece}" for piece in sorted(pieces))]
    return bert_tokenizer({entry: number for number, entry in enumerate(entries)}, normalizer)


@pytest.mark.parametrize("kind", ["cased", "uncased", "bytes", "unigram", "metaspace"])
def test_a_unit_is_a_word_and_where_blanks_are_rare_begins_at_a_letter(kind: str) -> None:
    tokenizer = trained(kind)
    normalizer: Any = tokenizer.normalizer or normalizers.Sequence([])
    for name, text in (SPACED | UNSPACED).items():
        units, parts = masked_words(tokenizer, text), normalizer.normalize_str(text).split()
        units = [unit.replace(" ", "") for unit in units]
        assert "".join(units) == "".join(parts)
        if name in UNSPACED:
            assert not [unit for unit in units if regex.match(r"[\p{M}ะาำๆະາーっょッョ]", unit)]
            assert kind == "bytes" or max(map(len, units)) < 24  # one token may end a letter and begin the next
            continue
        edges, words, place = list(itertools.pairwise(itertools.accumulate(map(len, units), initial=0))), [], 0
        for part in parts:
            words += [
                [place + edge for edge in one.span()] for one in regex.finditer(r"[\p{L}\p{M}\u200c\u200d]+", part)
            ]
            place += len(part)
        covering = [unit for word in words for unit in edges if unit[0] < word[1] and unit[1] > word[0]]
        assert len(words) == len(covering) == len(set(covering)), (name, units)


def test_text_that_blanks_segment_has_its_words() -> None:
    """Japanese checkpoints of text cut into words: "##" continues; others never have it before an ideograph."""
    entries, ids = ["大", "##学", "##で", "コ", "##ーヒ"], np.arange(5)
    segmented, others = word_boundaries(entries, None, is_segmented=True), word_boundaries(entries, None)
    assert segmented.word_starts(ids).tolist() == [True, False, False, True, False]
    assert others.word_starts(ids).tolist() == [True, True, True, True, False]
    boundaries = word_boundaries(["เ", "##ท", "##ศ", "##abc", "##12"], None)
    assert boundaries.word_starts(ids).tolist() == [True, False, True, True, False]


@pytest.mark.parametrize(
    ("tokens", "begins"),
    [
        ("Ġ\u00e0\u00a4 \u00b9 \u00e0\u00a5 \u012a \u00e0\u00a5 \u00a4 a", "1000101"),  # है।a
        ("Ġa \u00e2 \u0122 \u013b s", "11001"),  # a\u2019s
        ("Ġa \u00f0 \u0141 \u013a\u0122b", "1100"),  # a, an emoji and b
        ("Ġa \u00e0 b \u00a5", "1000"),  # broken
        ("Ġ\u00e0\u00b8 \u0123\u00e0\u00b8 \u0124\u00e0\u00b8 \u00b1\u00e0 \u00b8 \u0123", "101001"),  # กขัก
    ],
)
def test_a_character_of_several_tokens_has_its_class(tokens: str, begins: str) -> None:
    known = sorted({*pre_tokenizers.ByteLevel.alphabet(), *tokens.split()})
    boundaries = word_boundaries(known, entry_decoder(known) or entry_bytes)
    ids = np.array(list(map(known.index, tokens.split())))
    assert boundaries.word_starts(ids).tolist() == [b == "1" for b in begins]


THAI = ["แม่น้ำ", "โรงพยาบาล", "หนังสือ", "สถานี", "ผู้โดยสาร", "ภาษา", "เกิด"]
KANA = ["テレビ", "カップ", "りんご", "たべる", "ちょっと", "でんしゃ"]
HINDI = ["किसानों", "योजना", "विद्यालय", "समस्याओं", "पढ़ते", "है", "हिन्दी"]


def extended(kind: str, texts: list[str], most: int) -> tuple[Tokenizer, Tokenizer, list[str]]:
    """A tokenizer whose entries are characters or bytes, the extended one, and its words."""
    known = sorted({*"".join(texts), "▁"})
    old = Tokenizer(models.Unigram([("<unk>", -20.0), *((one, -5.0) for one in known)], 0))
    old.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    if kind != "unigram":
        old = train_byte_vocabulary({b"a": 1}, 261, min_frequency=1) if kind == "bytes" else bert(kind, texts[0], 1)
    found = extend_vocabulary(old, Counter(word for text in texts for word in scripts.WORD.findall(text)), most)
    assert all(len(pieces) > 1 for pieces in replaced_ids(old, found.words))
    return old, found.tokenizer, found.words


@pytest.mark.parametrize("kind", ["cased", "uncased", "unigram", "bytes"])
@pytest.mark.parametrize(("words", "least"), [(HINDI, 0.5), (THAI, 0.3), (KANA, 0.3)], ids=["hi", "th", "kana"])
def test_added_words_of_any_script_save_tokens(words: list[str], least: float, kind: str) -> None:
    draw, blank = random.Random(0), " " * (words is HINDI)
    texts = [blank.join(words), *(blank.join(draw.choices(words, k=8)) + "।" for _ in range(90))]
    old, new, found = extended(kind, texts, 20)
    if kind == "bytes" and words is not HINDI:  # only what stands between blanks can be an entry
        assert not found
        return
    assert saved_share(old, new, texts) > least
    if kind == "bytes":
        return
    entries = {entry.removeprefix("##").lstrip("▁") for entry in found}
    assert not [entry for entry in entries if regex.match(r"[\p{M}าーっょ]", entry)]
    normalizer: Any = old.normalizer or normalizers.Sequence([])
    assert words is not HINDI or entries <= {normalizer.normalize_str(word) for word in words}


def test_words_with_joiners_and_numbers() -> None:
    """BERT drops a joiner; a number has no letter, in whatever digits."""
    texts = ["کتاب‌هایشان را می‌خوانند ١٢٣٤ و १९४८"] * 5
    assert extended("cased", texts, 2)[2] == ["کتابهایشان", "میخوانند"]
    assert extended("unigram", texts, 2)[2] == ["▁کتاب‌هایشان", "▁می‌خوانند"]
    assert extended("bytes", ["१९४८"] * 9, 2)[2] == []
