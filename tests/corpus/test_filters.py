"""The filters of `prepare`: terms, against plain code, and corpora that are the same however made."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.errors import InputError
from pretrain.config import SourceConfig, load_config
from pretrain.corpus.filters.terms import DocumentTerms, document_terms
from pretrain.corpus.prepare import prepare
from tests.corpus.preparing import card, content, preparation

WORDS = ["the", "of", "and", "river", "bridge", "house", "light", "people"]
WORDS += ["water", "stone", "green", "winter", "paper", "music", "letter", "garden"]


# Language -> what stands between its words, and some of them.
LANGUAGES = {
    "th": ("", "เด็ก ครู ภาษา ไทย ห้อง หนังสือ โรงเรียน แม่น้ำ ฝน ตก หนัก รถไฟ สถานี ผู้คน ขาย ผลไม้ ตลาด หมอ ตรวจ"),
    "km": ("", "ខ្ញុំ ទៅ ផ្សារ ទិញ ត្រី គ្រូ សិស្ស សាលា សៀវភៅ ភាសា ខ្មែរ ភ្លៀង ធំ ផ្ទះ ទឹក ទន្លេ មនុស្ស ថ្ងៃ ព្រឹក"),
    "lo": ("", "ເດັກ ຄູ ພາສາ ລາວ ຫ້ອງ ປຶ້ມ ໂຮງຮຽນ ແມ່ນ້ຳ ຝົນ ຕົກ ໜັກ ລົດ ສະຖານີ ຄົນ ຂາຍ ໝາກໄມ້ ຕະຫຼາດ ໝໍ ກວດ ເຊົ້າ"),
    "my": ("", "ကျောင်း ဆရာ စာအုပ် ဘာသာ မြန်မာ မိုး ရွာ မြစ် ရထား ဘူတာ လူ ဈေး ရောင်း သစ်သီး ဆေးရုံ ဆရာဝန် မနက်"),
    "bo": ("་", "བོད ཡིག སློབ་གྲྭ དགེ་རྒན སློབ་མ དཔེ་ཆ སྐད་ཡིག ཆར་པ གཙང་པོ མི ཁྲོམ ཤིང་ཏོག སྨན་པ ནད་པ ཞོགས་པ ལམ"),
    "zh": ("", "学生 老师 学校 书 语言 中国 下雨 大 河流 火车 车站 人们 市场 卖 水果 医生 检查 病人 早上 走路 家"),
    "ja": ("", "がくせい 先生 学校 本 ことば 日本 雨 が 大きな 川 でんしゃ 駅 ひとびと 市場 で うる くだもの 医者"),
    "jv": ("", "ꦧꦺꦴꦕꦃ ꦒꦸꦫꦸ ꦧꦱ ꦗꦮ ꦏꦩꦂ ꦧꦸꦏꦸ ꦱꦼꦏꦺꦴꦭꦃꦲꦤ꧀ ꦏꦭꦶ ꦲꦸꦢꦤ꧀ ꦒꦼꦝꦺ ꦱꦼꦥꦸꦂ ꦮꦺꦴꦁ ꦥꦱꦂ ꦝꦺꦴꦏ꧀ꦠꦼꦂ ꦲꦺꦱꦸꦏ꧀ ꦢꦭꦤ꧀ ꦲꦺꦴꦩꦃ ꦧꦚꦸ"),
    "ko": (" ", "학생 선생님 학교 책 언어 한국 비 큰 강물 기차 역에서 사람들 시장 팔다 과일 의사 검사 환자 아침"),
    "hi": (" ", "छात्र शिक्षक विद्यालय किताब भाषा हिन्दी बारिश बड़ी नदी रेलगाड़ी स्टेशन लोग बाज़ार बेचना फल"),
    "ar": (" ", "طالب معلم مدرسة كتاب لغة العربية مطر كبير نهر قطار محطة ناس سوق يبيع فاكهة طبيب يفحص مريض صباح"),
    "el": (" ", "μαθητής δάσκαλος σχολείο βιβλίο γλώσσα ελληνική βροχή μεγάλο ποτάμι τρένο σταθμός άνθρωποι αγορά"),
    "fr": (" ", "élève maître école livre langue français pluie très grande rivière train gare où gens marché"),
    "vi": (" ", "học sinh thầy giáo trường sách tiếng Việt mưa lớn dòng sông tàu ga người chợ bán trái cây bác sĩ"),
}


def words_of(language: str, draw: random.Random, count: int) -> str:
    """A clause of random words."""
    joint, words = LANGUAGES[language]
    return joint.join(draw.choices(words.split(), k=count))


def clauses_of(language: str, seed: int, count: int = 12) -> list[str]:
    draw = random.Random(f"{language} {seed}")
    return [words_of(language, draw, draw.randint(6, 14)) for _ in range(count)]


def prose(seed: int, words: int = 120) -> str:
    """Lines of random words, most of them made up, with a few frequent ones."""
    draw = random.Random(seed)
    lines, left = [], words
    while left > 0:
        count = min(left, draw.randint(12, 30))
        left -= count
        others = ("".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(3, 9))) for _ in range(count))
        chosen = [draw.choice(WORDS) if draw.random() < 0.3 else next(others) for _ in range(count)]
        lines.append(" ".join(["The", "of", *chosen]) + ".")
    return "\n".join(lines)


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def _terms(text: str) -> list[str]:
    """Runs of letters and digits, and ideographs one by one, by a loop over characters."""
    spaced = (
        f" {one} " if "一" <= one <= "鿿" else one if one.isalnum() and one < "\U00010000" else " " for one in text
    )
    return "".join(spaced).split()


def _hashes(columns: DocumentTerms) -> list[int]:
    """Of each term."""
    count = len(columns.term_starts)
    return columns.sequence_hashes(slice(count), slice(1, count + 1)).tolist()


def test_terms_are_those_of_plain_code() -> None:
    draw = random.Random(3)
    texts = ["", *("".join(draw.choices("aéЖ漢字7 .\n\t-😀\u2028", k=draw.randint(0, 40))) for _ in range(200))]
    columns = document_terms(texts)
    found = [
        columns.units[begin:end].tobytes().decode("utf-16-le")
        for begin, end in zip(columns.term_starts, columns.term_ends, strict=True)
    ]
    for number, text in enumerate(texts):
        assert found[columns.document_starts[number] : columns.document_starts[number + 1]] == _terms(text)
    alone = [hashed for text in texts for hashed in _hashes(document_terms([text.upper()]))]
    assert _hashes(columns) == alone, "the hashes depend neither on the place nor on the case"


QUIZ = prose(7)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of lines, two of whose documents have text of a quiz; a document has a near copy."""
    folder = tmp_path_factory.mktemp("lines")
    write_lines(folder / "a.jsonl", [*(prose(seed) for seed in range(40)), f"{prose(50)} {QUIZ}"])
    write_lines(folder / "b.jsonl", [*(prose(seed) for seed in range(200, 230)), "Short."])
    write_lines(folder / "c.jsonl", [*(prose(seed) for seed in range(300, 330)), f"{prose(3)} More."])
    (folder / "quiz.txt").write_text(QUIZ.replace("\n", " "))
    return folder


def all_filters(folder: Path) -> dict[str, Any]:
    return {"contamination": {"sets": [{"path": str(folder / "quiz.txt")}]}, "near_duplicates": {"enabled": True}}


def filtered(folder: Path, out: Path, filters: dict[str, Any], **changes: Any) -> Any:
    """A config with `filters` for the sources in `folder`, of which a and b are one source and c is another."""
    both = (
        SourceConfig(kind="jsonl", name="ab", path=str(folder / "[ab].jsonl")),
        SourceConfig(kind="jsonl", name="c", path=str(folder / "c.jsonl")),
    )
    return preparation(out, **{"sources": both, "filters": filters, **changes})


def test_the_card_counts_what_is_dropped(sources: Path, tmp_path: Path) -> None:
    prepare(filtered(sources, tmp_path / "one", all_filters(sources)), quiet=True)
    found = {entry["rule"]: entry for entry in card(tmp_path / "one")["filters"]}
    assert (found["quiz"]["documents"], found["quiz"]["by_source"]) == (2, [2, 0])
    assert (found["threshold"]["documents"], found["threshold"]["by_source"]) == (1, [0, 1])
    ab, c = card(tmp_path / "one")["sources"]
    assert (ab["documents_read"], ab["documents"], ab["too_short"]) == (72, 69, 1)
    assert (c["documents"], c["too_short"]) == (30, 0)
    shown = (tmp_path / "one" / "card.md").read_text()
    assert "## Filters" in shown
    assert "| contamination | quiz | 2 | 1.94 % | 2 | 0 |" in shown
    assert "and 3 that filters drop" in shown


def test_filters_that_are_off_change_nothing(sources: Path, tmp_path: Path) -> None:
    off = {"near_duplicates": {"enabled": False, "threshold": 0.9}}
    prepare(filtered(sources, tmp_path / "off", off), quiet=True)
    manifest = json.loads((tmp_path / "off" / "manifest.json").read_text())
    assert not [key for key in manifest["settings"] if "filters" in key]
    assert "filters" not in card(tmp_path / "off")
    assert "filtered" not in card(tmp_path / "off")["totals"]


@pytest.mark.parametrize("processes", [2, 3])
def test_the_bytes_are_those_of_one_process(processes: int, sources: Path, tmp_path: Path) -> None:
    for name, count in (("one", 1), ("more", processes)):
        prepare(filtered(sources, tmp_path / name, all_filters(sources), processes=count), quiet=True)
    assert content(tmp_path / "one") == content(tmp_path / "more")


def test_a_corpus_of_other_filters_is_not_taken_for_this_one(sources: Path, tmp_path: Path) -> None:
    out, near = tmp_path / "one", {"enabled": True, "threshold": 0.5}
    on = {"near_duplicates": near}
    prepare(filtered(sources, out, on), quiet=True)
    assert "already prepared" in prepare(filtered(sources, out, on), quiet=True)
    near["threshold"] = 0.6
    with pytest.raises(InputError, match=r"corpus\.filters\.near_duplicates\.threshold: was 0\.5, is 0\.6"):
        prepare(filtered(sources, out, on), quiet=True)
    with pytest.raises(InputError, match=r"corpus\.filters\.near_duplicates\.threshold: was 0\.5, is None"):
        prepare(filtered(sources, out, {}), quiet=True)


@pytest.mark.parametrize("near_duplicates", [True, False])
def test_nothing_left_names_the_filters(near_duplicates: bool, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [QUIZ, f"{prose(2)} {QUIZ}"])
    (tmp_path / "quiz.txt").write_text(QUIZ.replace("\n", " "))
    source = (SourceConfig(kind="jsonl", path=str(tmp_path / "a.jsonl")),)
    strict = {**all_filters(tmp_path), "near_duplicates": {"enabled": near_duplicates}}
    with pytest.raises(InputError, match=r"Relax corpus\.filters, which drop 2"):
        prepare(preparation(tmp_path / "out", source, filters=strict), quiet=True)


def test_the_config_of_the_guide_reads_what_datatrove_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/web-text.md").read_text(encoding="utf-8")
    [written] = re.findall(r'^    JsonlWriter\("(.*)"\),$', page, re.M)
    monkeypatch.chdir(tmp_path)
    for folder in (written, "data/evaluation"):
        Path(folder).mkdir(parents=True)
    texts = [prose(1), f"{prose(2)} {QUIZ}", *(prose(seed) for seed in (3, 4, 4))]
    lines = [{"text": text, "id": f"<{n}>", "metadata": {"url": "x"}} for n, text in enumerate(texts)]
    with gzip.open(f"{written}/00000.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    Path("data/evaluation/questions.json").write_text(json.dumps([{"question": QUIZ}]))
    Path("data/evaluation/entities.conll").write_text("River O\n")
    crawl = load_config("filtered-web").corpus.sources[1]
    changes = {
        "corpus.sources": (crawl,),
        "corpus.vocabulary.size": 300,
        "corpus.validation_fraction": 0.3,
        "corpus.processes": 1,
    }
    line = prepare(load_config("filtered-web", changes), quiet=True)
    assert "3 documents (2 held out, 1 duplicate and 0 too short left out, 1 dropped by filters)" in line
