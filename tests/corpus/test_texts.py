"""Text in every script and form is read as it stands: nothing is lost unseen."""

from __future__ import annotations

import bz2
import gzip
import json
import random
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.workflows.adaptation.texts import find_sources
from pretrain.common.errors import InputError
from pretrain.config import SourceConfig
from pretrain.corpus import inputs, records
from pretrain.corpus.description import describe
from pretrain.corpus.formats import kind_of
from pretrain.corpus.inputs import Problems
from pretrain.corpus.prepare import prepare
from pretrain.corpus.sentences import line_starts
from pretrain.corpus.shards import open_shards
from pretrain.corpus.sources import books, find_inputs
from pretrain.corpus.tokenize import WordTable, cut_words
from pretrain.corpus.whole_documents import document_records
from pretrain.corpus.word_counts import count_words
from pretrain.planning.estimate import preparation_lines
from tests.corpus.preparing import card, preparation
from tests.corpus.test_sources import COMPRESS
from tests.corpus.test_sources import faults as fault_counts
from tests.corpus.test_sources import read as read_source


def read(kind: str, path: Path) -> tuple[list[str], dict[str, int]]:
    """All documents of a source, and the count of each fault."""
    texts, problems = read_source(SourceConfig(kind=kind, path=str(path)))
    return texts, fault_counts(problems)


def prepared(source: SourceConfig, folder: Path, **changes: Any) -> tuple[str, dict[str, Any]]:
    """The summary line and the card of a corpus."""
    given = {"vocabulary": {"size": 300, "min_frequency": 1}, "validation_fraction": 0, "min_document_words": 20}
    line = prepare(preparation(folder, (source,), **{**given, "shard_tokens": 100_000_000, **changes}), quiet=True)
    return line, card(folder)


SENTENCES = {
    "zh": "今天天气很好我们去公园散步。",
    "ja": "今日はとても良い天気です。",
    "th": "วันนี้อากาศดีมากเราไปเดินเล่นที่สวนกันเถอะ",
    "hi": "आज मौसम बहुत अच्छा है।",
    "ar": "هل الطقس جميل اليوم؟",
    "am": "ዛሬ አየሩ ጥሩ ነው።",
    "my": "ဒီနေ့ ရာသီဥတု ကောင်းတယ်။",
    "el": "Τι κάνεις σήμερα;",
}
FRAME = "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\n{}\n\n*** END OF THE PROJECT GUTENBERG EBOOK X ***\n"


@pytest.mark.parametrize("language", SENTENCES)
def test_paragraphs_of_every_script_are_kept_below_a_heading(language: str) -> None:
    lines = [SENTENCES[language]] * 51
    problems = Problems()
    found = books.paragraphs(FRAME.format("\n\n".join(["CHAPTER I", *lines])), problems).split("\n")
    # Thai has no stops, so one line below the heading may be its title.
    assert len(found) == (50 if language == "th" else 51)
    assert problems.skip_counts["paragraphs"] == 52 - len(found)


def test_a_paragraph_ends_in_a_stop_of_any_script() -> None:
    def ended(mark: str) -> bool:
        lines = ["CHAPTER I", f"One line{mark}", "Text."]
        return len(books.paragraphs("\n\n".join(lines), Problems()).split("\n")) == 2

    stops = ".!?…。！？｡।॥။၊។៕།༎։።؟۔꧉꛳"
    assert "".join(filter(ended, stops)) == stops
    assert not list(filter(ended, "·¿་၎※՛៘%#๏&"))


def test_one_title_follows_a_heading() -> None:
    lines = ["CHAPTER I", "In Chancery", "so we met again", "and went home", "in silence"]
    assert books.paragraphs("\n\n".join(lines), Problems()).split("\n") == lines[2:]
    mixed = ["CHAPTER I", "我在NBA打球。", "I.", "Oh!", "A"]
    assert books.paragraphs("\n\n".join(mixed), Problems()).split("\n") == ["我在NBA打球。", "Oh!"]


CHATS = {
    "zh": [f"你好吗{number}" for number in range(40)],
    "th": [f"สวัสดีครับ {number}" for number in range(40)],
    "en": [f"see you at {number}" for number in range(40)],
}


@pytest.mark.parametrize("language", CHATS)
def test_lines_of_a_chat_without_stops_are_text(tmp_path: Path, language: str) -> None:
    lines = CHATS[language]
    (tmp_path / "chat.txt").write_text("\n\n".join(lines), encoding="utf-8")
    assert read("books", tmp_path / "chat.txt") == (["\n".join(lines)], {})
    find_sources([tmp_path / "chat.txt"], tmp_path / "pieces.jsonl")
    pieces = (tmp_path / "pieces.jsonl").read_text().splitlines()
    assert "\n".join(json.loads(piece)["text"] for piece in pieces).split("\n") == lines


def test_what_is_left_out_as_headings_is_on_the_card_and_much_of_it_in_the_summary(tmp_path, capsys) -> None:
    text = "\n\n".join(f"This is paragraph number {number} of a text that is kept." for number in range(30))
    (tmp_path / "few.txt").write_text("CHAPTER I\n\n" + text)
    source = SourceConfig(kind="books", path=str(tmp_path / "few.txt"))
    line, made = prepared(source, tmp_path / "few")
    assert made["sources"][0]["left_out"] == {"paragraphs": 1, "characters": 9, "read_characters": 11 + len(text)}
    assert "| books-few | 1 | 9 | 0.5" in (tmp_path / "few" / "card.md").read_text()
    assert "headings" not in line
    (tmp_path / "many.txt").write_text(text + "\n\nSOME WORDS IN CAPITALS" * 10)
    line, _ = prepared(SourceConfig(kind="books", path=str(tmp_path / "many.txt")), tmp_path / "many")
    assert re.search(r"books-many: 1\d\.\d% of its text was left out as headings \(10 paragraphs\)\. If they", line)
    find_sources([tmp_path / "many.txt"], tmp_path / "pieces.jsonl")
    assert "of the text was left out as headings (10 paragraphs)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Plain words, two lines:\nof them", 6),
        ("naïve café – “quoted” 漢字", 5),  # few characters of another script add nothing
        ("今天天气很好我们去公园散步吧", 7),
        ("ひらがなカタカナ漢字", 5),
        ("สวัสดีครับวันนี้อากาศดี", 5),
        ("䷀䷀䷀䷀䷀䷀䷀䷀", 1),  # hexagrams
        ("「漢字、」（漢字）。……！", 2),
        ("ｱｲｳｴｵｶﾞ 𠀀𠀁", 4),
        ("ꦱꦏꦧꦺꦲꦤꦱꦏ", 2),  # Javanese
        ("ꀉꀊꀋꀌꀍꀎ", 3),  # Yi
        ("Tiếng Việt 한국어", 3),
        ("", 0),
    ],
)
def test_words_are_counted_in_scripts_without_blanks(text: str, words: int) -> None:
    table, texts = WordTable(), ["two words", text, "one"]
    for counted in (
        cut_words(texts, table, lowercase=True).document_words,
        document_records(texts)["words"],
    ):
        assert counted.tolist() == [2, words, 1]
    assert count_words(text) == words


ROWS = [{"text": f"Row {number} says {random.Random(number).random()} and so on."} for number in range(900)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TABLE = "id,text\n" + "".join(f"{number},{row['text']}\n" for number, row in enumerate(ROWS))
ARTICLES = "".join(f'<doc id="{n}" title="T">\nT\n{row["text"]}\n</doc>\n' for n, row in enumerate(ROWS))
BOOK = "\n\n".join(row["text"] for row in ROWS)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [("jsonl", "a.jsonl", LINES), ("csv", "a.csv", TABLE), ("wikiextractor", "wiki", ARTICLES)],
)
def test_rows_before_the_cut_of_a_truncated_file_are_kept(tmp_path, suffix, kind, name, text) -> None:
    half = len(text) // 2
    data = b"".join(COMPRESS[suffix](part.encode()) for part in (text[:half], text[half:]))
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(data[: -len(data) // 10])
    found, faults = read(kind, path)
    texts = [text.strip() for text in found]
    assert len(texts) > 400
    expected = [row["text"] for row in ROWS]
    assert texts[:-1] == expected[: len(texts) - 1]
    assert expected[len(texts) - 1].startswith(texts[-1]), "the last row of a table may be cut"
    assert any(fault.startswith("broken file: ") for fault in faults)


def test_a_truncated_book_is_read_up_to_the_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(BOOK.encode())[:-2000])
    (text,), faults = read("books", tmp_path)
    assert len(text) > 10_000
    assert BOOK.replace("\n\n", "\n").startswith(text)
    assert [fault.partition(":")[0] for fault in faults] == ["broken file"]


@pytest.mark.parametrize(
    ("kind", "name", "data", "shown"),
    [
        ("jsonl", "a.jsonl.gz", LINES.encode(), r"a\.jsonl\.gz: broken file: Not a gzipped file .*, 1 time"),
        ("jsonl", "a.jsonl", LINES.encode("utf-16-le"), r"neither UTF-8 nor UTF-16 with a byte-order mark: left out"),
        ("books", "a.txt", ("今天天气很好。\n\n" * 99).encode("utf-16-be"), r"neither UTF-8 nor UTF-16"),
        ("books", "a.txt", ("今天天气很好。\n\n" * 99).encode("gb18030"), r"neither UTF-8 nor UTF-16"),
        ("wikiextractor", "wiki_00", LINES.encode(), r"JSON, as WikiExtractor's --json writes: use kind jsonl"),
        ("jsonl", "a.jsonl", b'{"text": ["a"]}\n' * 5, r"'text' that is not a string \(line 1 of chunk 0\), 5 times"),
    ],
)
def test_the_faults_that_make_a_corpus_empty_are_shown(tmp_path, kind, name, data, shown) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=shown) as error:
        prepared(SourceConfig(kind=kind, path=str(tmp_path / name)), tmp_path / "corpus")
    assert "none of 0 documents remains" in str(error.value)
    assert "min_document_words" not in str(error.value)
    assert "Check the files, and that each kind matches them" in str(error.value)


def test_the_advice_for_an_empty_corpus_fits_its_cause(tmp_path: Path) -> None:
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_text(LINES)
    with pytest.raises(InputError, match=r"Lower corpus\.min_document_words, for which 900 are too short\."):
        prepared(source, tmp_path / "corpus", min_document_words=50)


@pytest.mark.parametrize("kind", ["list", "struct"])
def test_a_parquet_column_that_is_no_text_is_refused(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[Any] = [["a", "b"]] if kind == "list" else [{"body": "a"}]
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=rf"sources\.0\.text_column: 'text' in .*a\.parquet is {kind}<.*, not text"):
        find_inputs(SourceConfig(kind="parquet", path=str(tmp_path)), "corpus.sources.0")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_with_a_byte_order_mark_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    monkeypatch.setattr(inputs, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(records, "STREAM_READ_BYTES", 333)
    expected = [row["text"] for row in ROWS]
    for kind, name, text in (("jsonl", "a.jsonl", LINES), ("csv", "a.csv", TABLE), ("sentences", "a.txt", BOOK)):
        raw = f"\ufeff{text}".encode(encoding)
        for path, data in ((tmp_path / name, raw), (tmp_path / f"{name}.gz", gzip.compress(raw))):
            path.write_bytes(data)
            assert read(kind, path) == (expected, {})
    assert read("books", tmp_path / "a.txt") == (["\n".join(expected)], {})


def test_a_table_in_utf16_without_a_byte_order_mark_is_refused_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(TABLE.encode("utf-16-le"))
    with pytest.raises(InputError, match=r"a\.csv: neither UTF-8 nor UTF-16 with a byte-order mark\. Convert it"):
        find_inputs(SourceConfig(kind="csv", path=str(tmp_path)), "corpus.sources.0")


OBJECTS = [{"text": f'Text "{number}", [é], {{漢}}\n\\', "more": [{"a": number}, []]} for number in range(60)]
FORMS: dict[str, Callable[[], str]] = {
    "array": lambda: json.dumps(OBJECTS, ensure_ascii=False),
    "indented": lambda: json.dumps(OBJECTS, indent=2, ensure_ascii=False),
    "lines of an array": lambda: "[\n" + ",\n".join(map(json.dumps, OBJECTS)) + "\n]\n",
    "indented objects": lambda: "\n".join(json.dumps(one, indent=4, ensure_ascii=False) for one in OBJECTS),
    "byte-order mark": lambda: "\ufeff" + json.dumps(OBJECTS, indent="\t").replace("\n", "\r\n"),
}


@pytest.mark.parametrize("chunk_bytes", [1, 900, 1 << 20])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_json_in_an_array_or_indented_is_read(tmp_path, monkeypatch, form, suffix, chunk_bytes) -> None:
    monkeypatch.setattr(inputs, "CHUNK_BYTES", chunk_bytes)
    data = FORMS[form]().encode()
    (tmp_path / f"a.json{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    assert read("jsonl", tmp_path) == ([one["text"] for one in OBJECTS], {})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda text: text[:-200], "JSON that cannot be read: "),
        (lambda text: text[:-2], "JSON array without an end"),
        (lambda text: text.replace('"text": "Text \\"50', '"text" "Text \\"50'), "JSON that cannot be read: Expecting"),
    ],
)
def test_a_broken_array_is_read_up_to_there(tmp_path: Path, change: Callable[[str], str], fault: str) -> None:
    (tmp_path / "a.json").write_text(change(json.dumps(OBJECTS, indent=2)))
    texts, faults = read("jsonl", tmp_path)
    assert texts == [one["text"] for one in OBJECTS[: len(texts)]]
    assert len(texts) >= 50
    assert len(faults) == 1
    assert next(iter(faults)).startswith(fault)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_array_that_is_too_large_is_refused(tmp_path, monkeypatch, suffix) -> None:
    data = FORMS["array"]().encode()
    (tmp_path / f"a.json{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    monkeypatch.setattr("pretrain.corpus.json_values.MAX_BYTES", len(data))
    assert read("jsonl", tmp_path) == ([one["text"] for one in OBJECTS], {})
    monkeypatch.setattr("pretrain.corpus.json_values.MAX_BYTES", len(data) - 1)
    with pytest.raises(InputError, match=r"a\.json.*: more than 0 GB of JSON .* Write it as JSONL"):
        read("jsonl", tmp_path) if suffix else find_inputs(SourceConfig(kind="jsonl", path=str(tmp_path)), "sources.0")
    (tmp_path / f"a.json{suffix}").unlink()
    (tmp_path / "a.jsonl").write_text(LINES)
    assert read("jsonl", tmp_path)[1] == {}, "lines are read in parts"


def test_files_of_json_without_a_suffix_are_found_in_a_folder(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / "AA").mkdir(exist_ok=True)
        (tmp_path / f"AA/wiki_0{number}").write_text(LINES)
    (tmp_path / "AA/wiki_02.bz2").write_bytes(bz2.compress(LINES.encode()))
    (tmp_path / "README").write_text("Not JSON.")
    texts, faults = read("jsonl", tmp_path)
    assert (len(texts), faults) == (3 * len(ROWS), {})
    assert kind_of(tmp_path / "AA/wiki_02.bz2") == "jsonl"
    assert kind_of(tmp_path / "README") == "books"


@settings(max_examples=100, deadline=None)
@given(
    drawn=st.lists(st.lists(st.sampled_from(["One. Two", "a", "漢字。字"]), min_size=1, max_size=3), max_size=5),
    blank=st.sampled_from(["\n", " \n", "\t\n\n", "\r\n"]),
    size=st.integers(1, 40),
)
def test_documents_of_sentences_are_those_between_blank_lines(tmp_path_factory, drawn, blank, size) -> None:
    path = tmp_path_factory.mktemp("lines") / "a"
    path.write_bytes(blank.join("".join(f"{line}\n" for line in lines) for lines in drawn).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "CHUNK_BYTES", size)
        patch.setattr(records, "STREAM_READ_BYTES", 7)
        expected = ["\n".join(lines) for lines in drawn]
        assert read("sentences", path)[0] == expected
        packed = path.with_suffix(".gz")
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert read("sentences", packed)[0] == expected


@pytest.mark.parametrize("kind", ["wordpiece", "byte_bpe"])
def test_the_sentences_of_the_file_are_those_of_the_corpus(tmp_path: Path, kind: str) -> None:
    lines = [[f"Mr. {m} came. He saw {n}. he went" for m in range(n % 5 + 1)] for n in range(40)]
    (tmp_path / "text").write_text("\n\n".join("\n".join(document) for document in lines))
    vocabulary = {"kind": kind, "size": 400, "min_frequency": 1}
    source = SourceConfig(kind="sentences", path=str(tmp_path / "text"))
    prepared(source, tmp_path / "corpus", vocabulary=vocabulary, min_document_words=0)
    counts = [np.diff(shard.documents[:, 0].astype(int)) for shard in open_shards(tmp_path / "corpus", "train").shards]
    assert sorted(np.concatenate(counts).tolist()) == sorted(len(document) for document in lines)


def test_lines_start_where_they_start() -> None:
    assert line_starts("One. Two\nthree\nx") == [0, 8, 14]
    assert line_starts("\n a\n\nb") == [0, 4]
    assert line_starts(" \n") == []


def test_many_unknown_tokens_have_a_hint(tmp_path: Path) -> None:
    words = [f"{SENTENCES['th'] * 4}{number} สวัสดี ครับ" for number in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "a.jsonl"))
    line, made = prepared(source, tmp_path / "corpus")
    assert made["totals"]["unknown_rate"] > 0.01
    assert "Too many tokens are [UNK]: set corpus.vocabulary.kind: byte_bpe" in line
    line, _ = prepared(source, tmp_path / "bytes", vocabulary={"kind": "byte_bpe", "size": 400})
    assert "unknown tokens" not in line


def test_a_lowercase_vocabulary_may_keep_accents(tmp_path: Path) -> None:
    text = "आज मौसम बहुत अच्छा है। हम पार्क में टहलने जाते हैं। Élan café NAÏVE."
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{text} {n}"}) + "\n" for n in range(30)))
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "a.jsonl"))
    vocabulary = {"size": 300, "min_frequency": 1, "strip_accents": False}
    changes = {"min_document_words": 5, "language": "hi"}
    _, made = prepared(source, tmp_path / "corpus", vocabulary=vocabulary, **changes)
    entries = (tmp_path / "corpus/vocab.txt").read_text().split("\n")
    assert {"मौसम", "café", "élan", "naïve"} <= set(entries)
    assert made["vocabulary"]["strip_accents"] is False
    assert "uncased, with accents" in (tmp_path / "corpus/card.md").read_text()
    written = json.loads((tmp_path / "corpus/tokenizer_config.json").read_text())
    assert (written["do_lower_case"], written["strip_accents"]) == (True, False)
    with pytest.raises(InputError, match=r"corpus\.vocabulary\.strip_accents: was False, is None"):
        prepared(source, tmp_path / "corpus", vocabulary={"size": 300, "min_frequency": 1}, **changes)
    for given_path in ("vocab.txt", "tokenizer.json"):
        path = str(tmp_path / "corpus" / given_path)
        target = tmp_path / given_path.partition(".")[0]
        prepared(source, target, vocabulary={"path": path, "strip_accents": False}, **changes)
        for name in ("train-00000.tokens.npy", "tokenizer.json"):
            assert (target / name).read_bytes() == (tmp_path / "corpus" / name).read_bytes()
    with pytest.raises(InputError, match=r"vocabulary\.strip_accents: true, but .*tokenizer\.json has false"):
        prepared(source, tmp_path / "x", vocabulary={"path": path, "strip_accents": True}, **changes)


@pytest.mark.parametrize(
    ("vocabulary", "equal"),
    [({}, 30), ({"strip_accents": False}, 20), ({"lowercase": False}, 10), ({"path": "given", "lowercase": True}, 30)],
)
def test_held_out_text_in_another_form_is_not_trained_on(tmp_path: Path, vocabulary: Any, equal: int) -> None:
    texts = [f"Ёжик {n} встретил медвежонка в тумане, и они пили чай." for n in range(10)]
    more = [f"Лиса {n} спит в лесу." for n in range(10)]
    forms = {"h": texts, "t": [*texts, *map(str.upper, texts), *(text.replace("Ё", "Е") for text in texts), *more]}
    for name, its in forms.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in its))
    h, t = (SourceConfig(kind="jsonl", name=n, path=str(tmp_path / f"{n}.jsonl"), held_out=n == "h") for n in forms)
    given = {"validation_fraction": 0, "min_document_words": 3, "vocabulary": {"size": 300, **vocabulary}}
    if "path" in vocabulary:
        prepare(preparation(tmp_path / "given", [h, t], **{**given, "vocabulary": {"size": 300}}), quiet=True)
        given["vocabulary"] = {**vocabulary, "path": str(tmp_path / "given")}
    line = prepare(preparation(tmp_path / "together", [t, h], **given), quiet=True)
    assert f"{equal} of them copies of held-out text" in line
    prepare(preparation(tmp_path / "grown", [h], **given), quiet=True)
    line = prepare(preparation(tmp_path / "grown", [h, t], **given), quiet=True)
    assert card(tmp_path / "grown")["sources"][1]["duplicates"] == equal
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text.upper()}) + "\n" for text in texts + more))
    late = SourceConfig(kind="jsonl", name="late", path=str(tmp_path / "t.jsonl"), held_out=True)
    if vocabulary.get("lowercase", True):
        with pytest.raises(InputError, match=r"10 documents to hold out \(late: 10 equal"):
            prepare(preparation(tmp_path / "grown", [h, late], **given), quiet=True)


def test_accents_that_follow_the_case_are_no_other_setting(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "a.jsonl"))
    vocabulary = {"size": 300, "min_frequency": 1}
    prepared(source, tmp_path / "corpus", vocabulary=vocabulary, min_document_words=0)
    same = {**vocabulary, "strip_accents": True}
    line, _ = prepared(source, tmp_path / "corpus", vocabulary=same, min_document_words=0)
    assert "already prepared" in line


@pytest.mark.parametrize("size", [16, 40, 1 << 20])
def test_no_line_of_files_with_byte_order_marks_that_were_appended_is_lost(tmp_path, monkeypatch, size) -> None:
    monkeypatch.setattr(inputs, "CHUNK_BYTES", size)
    monkeypatch.setattr(records, "STREAM_READ_BYTES", 33)
    texts = [f"Text {number} élan." for number in range(9)]
    thirds = [texts[:3], texts[3:6], texts[6:]]
    rows = ["".join(json.dumps({"text": text}) + "\n" for text in third) for third in thirds]
    for kind, parts in (
        ("jsonl", ["", *rows, ""]),
        ("jsonl", [part.strip() for part in rows]),
        ("lines", ["\n".join([*third, ""]) for third in thirds]),
        ("sentences", ["\n\n".join([*third, ""]) for third in thirds]),
        ("wikiextractor", ["".join(f'<doc title="T">\nT\n{text}\n</doc>\n' for text in third) for third in thirds]),
        ("csv", ["text,id\n" + "".join(f"{text},1\n" for text in texts)]),
    ):
        data = "".join(f"\ufeff{part}" for part in parts)
        for name, written in {
            "a": data.encode(),
            "a.xz": COMPRESS[".xz"](data.encode()),
            "a.gz": b"".join(gzip.compress(f"\ufeff{part}".encode()) for part in parts),
            "b": data.encode("utf-16-le"),
        }.items():
            (tmp_path / name).write_bytes(written)
            found, faults = read(kind, tmp_path / name)
            assert ([text.strip() for text in found], faults) == (texts, {}), (kind, name)
    (tmp_path / "b.txt").write_text("\ufeffOne.\n\ufeffTwo.\n")
    assert (read("books", tmp_path / "b.txt")[0], read("files", tmp_path / "b.txt")[0]) == (
        ["One. Two."],
        ["One.\nTwo.\n"],
    )


def sentence(number: int) -> str:
    return f"Sentence {number} {'has so many more words ' * (number % 5)}and ends here."


WRAPPED = "\n".join(textwrap.wrap(" ".join(map(sentence, range(2000))), 72))
LARGE = {
    "sentences": "\n\n".join("\n".join(map(sentence, range(n, n + 4 + n % 5))) for n in range(600)),
    "paragraphs": "\n\n".join(sentence(n) * 3 for n in range(900)),
    "no stops": "\n\n".join("\n".join(sentence(n * k).lower().strip(".") for k in range(8)) for n in range(300)),
    "long documents": "\n\n".join("\n".join(map(sentence, range(n, n + 300))) for n in range(12)),
    "lines": "\n".join(" ".join(map(sentence, range(n, n + 4))) for n in range(600)),
    "Thai lines": "\n".join(SENTENCES["th"] * (2 + n % 3) for n in range(600)),
    "a book": "\n\n".join(WRAPPED[n : n + 720] for n in range(0, len(WRAPPED), 720)),
    "one paragraph": WRAPPED,
}
FITS = {"lines": "lines", "Thai lines": "lines", "a book": "", "one paragraph": ""}


@pytest.mark.parametrize("form", LARGE)
def test_the_kind_that_fits_a_large_file_is_said_before_it_is_read(tmp_path: Path, form: str) -> None:
    path, fits, corpus = tmp_path / "large.txt.gz", FITS.get(form, "sentences"), tmp_path / "corpus"
    path.write_bytes(gzip.compress(LARGE[form].encode()))
    config = preparation(corpus, [SourceConfig(kind="books", path=str(path))])
    assert (f": set kind: {fits}, which reads each" in preparation_lines(describe(config))) == bool(fits)
    with pytest.raises(InputError, match=f"s.0.kind: books .*: {fits}, which" if fits else "all held out") as error:
        prepare(config, quiet=True)
    assert "elete" not in str(error.value)
    assert corpus.exists() != bool(fits), "whether it was read"
    if fits:
        config = preparation(corpus, [SourceConfig(kind=fits, path=str(path))], min_document_words=1)
        assert "set kind" not in preparation_lines(describe(config))
        assert " held out, " in prepare(config, quiet=True)


def test_the_terminal_and_the_card_say_what_was_left_out_and_what_is_one_document(tmp_path: Path, capsys) -> None:
    """The corpus is in the folder that is read, and is the same when it is prepared again."""
    for name in ("a.jsonl", ".git/b.jsonl", ".cache/c.jsonl", "in/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LINES)
    (tmp_path / "d.jsonl").symlink_to("gone")
    (tmp_path / "large").write_text(LARGE["lines"])
    own = SourceConfig(kind="jsonl", name="all", path=str(tmp_path))
    large = SourceConfig(kind="sentences", path=str(tmp_path / "large"))
    config = preparation(tmp_path / "in/corpus", [own, large], min_document_words=5)
    for _ in range(2):
        line = prepare(config, quiet=True)
        assert "hidden file, or file in a hidden folder: left out (.cache/c.jsonl), 2 times; " in line
        assert "link that leads nowhere: left out (d.jsonl), 1 time." in line
        assert "| link that leads nowhere: left out | 1 | d.jsonl |" in (tmp_path / "in/corpus/card.md").read_text()
        lines = preparation_lines(describe(config))
        assert all(one in lines for one in ("hidden file", "link that", "prepared corpus: left out (in/corpus/"))
    assert "already prepared" in line
    assert card(tmp_path / "in/corpus")["sources"][0]["files"] == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "file of a prepared corpus: left out (in/corpus/" in said
    assert said.count("corpus.sources.1.kind: sentences makes one document of") == 1
    assert "set kind: lines, which reads each line as a document." in said
    with pytest.raises(ValueError, match=r"is the folder that sources\.1 reads"):
        preparation(tmp_path, [large, own])
