"""Every kind of source: each document is read once however the files are split, and every fault is counted."""

from __future__ import annotations

import bz2
import errno
import gc
import gzip
import json
import lzma
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.common.errors import InputError, MachineError
from pretrain.config import SourceConfig
from pretrain.corpus import inputs, listing, records
from pretrain.corpus.inputs import Input, Problems
from pretrain.corpus.sources import books, cut, docstrings, documents, find_inputs, mediawiki, wikiextractor


def read(source: SourceConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """All documents of a source and the faults found."""
    texts, problems = [], Problems()
    names = []
    for number, item in enumerate(find_inputs(source, "corpus.sources.0")):
        for chunk in cut(source, 0, number, item):
            names.append(chunk.name)
            texts += documents(chunk, problems)
    assert names == sorted(set(names)), "chunks must sort as the corpus does"
    return texts, problems.entries()


def faults(problems: list[dict[str, Any]]) -> dict[str, int]:
    return {problem["fault"]: problem["count"] for problem in problems}


def refused(message: str, **source: Any) -> None:
    """The source is refused in one line, before it is read."""
    with pytest.raises(InputError, match=message) as error:
        find_inputs(SourceConfig.model_validate(source), "corpus.sources.0")
    assert "\n" not in str(error.value)


@pytest.fixture(params=[1, 50, 700, 1 << 20])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks from a byte to the whole file."""
    monkeypatch.setattr(inputs, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(records, "BZIP2_CHUNK_BYTES", request.param)
    monkeypatch.setattr(records, "STREAM_READ_BYTES", min(request.param, 64) + 1)
    return request.param


WIKI = [
    (f'Article "{n}"', f"Text of {n}, with <b> and é.\n\nSecond paragraph {n}. " + "word " * (n % 7)) for n in range(40)
]


def wiki_bytes() -> bytes:
    return "".join(
        f'<doc id="{n}" url="https://x?curid={n}" title="{title}">\n{title}\n\n{text}\n\n</doc>\n'
        for n, (title, text) in enumerate(WIKI)
    ).encode()


def jsonl_bytes() -> bytes:
    return "".join(json.dumps({"text": text, "id": title}) + "\n" for title, text in WIKI).encode()


def page(title: str, text: str, extra: str = "", namespace: int = 0) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return (
        f"  <page>\n    <title>{title}</title>\n    <ns>{namespace}</ns>\n{extra}    <revision>\n"
        f'      <model>wikitext</model>\n      <text bytes="{len(text)}" xml:space="preserve">{escaped}</text>\n'
        "    </revision>\n  </page>\n"
    )


PAGES = [
    page(f"P{n}", f"'''P{n}''' is page [[Number|number]] {n}.<ref>no</ref> It has {{{{convert|5|km}}}} more.")
    for n in range(30)
]
HEADER = '<mediawiki xml:lang="en">\n  <siteinfo><sitename>Wikipedia</sitename></siteinfo>\n'
OTHER_PAGES = [
    page("Talk:X", "Talk about it.", namespace=1),
    page("R", "#REDIRECT [[P1]]", extra='    <redirect title="P1" />\n'),
]
PAGE_TEXTS = [f"P{n} is page number {n}. It has more." for n in range(30)]


def dump_bytes() -> bytes:
    return (HEADER + "".join(PAGES[:10] + OTHER_PAGES + PAGES[10:]) + "</mediawiki>\n").encode()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", ["wikiextractor", "jsonl", "mediawiki"])
def test_every_document_is_read_once(tmp_path: Path, chunk_bytes: int, suffix: str, kind: str) -> None:
    data = {"wikiextractor": wiki_bytes, "jsonl": jsonl_bytes, "mediawiki": dump_bytes}[kind]()
    path = tmp_path / f"file{suffix}"
    path.write_bytes(COMPRESS[suffix](data))
    texts, problems = read(SourceConfig(kind=kind, path=str(path)))
    expected = PAGE_TEXTS if kind == "mediawiki" else [text for _, text in WIKI]
    assert [text.strip() for text in texts] == [text.strip() for text in expected]
    assert problems == []


@pytest.mark.parametrize("stream_bytes", [300, 1000, 100_000])
@pytest.mark.parametrize("aligned", [True, False])
def test_multistream_dump(tmp_path: Path, chunk_bytes: int, stream_bytes: int, aligned: bool) -> None:
    """Wikimedia's streams hold whole pages; pbzip2's cut anywhere, also inside a tag."""
    text = HEADER + "".join(PAGES) + "</mediawiki>\n"
    if aligned:
        per_stream = max(1, stream_bytes // len(PAGES[0]))
        groups = [PAGES[n : n + per_stream] for n in range(0, len(PAGES), per_stream)]
        chunks = [HEADER, *("".join(group) for group in groups), "</mediawiki>\n"]
    else:
        chunks = [text[n : n + stream_bytes] for n in range(0, len(text), stream_bytes)]
    path = tmp_path / "pages-multistream.xml.bz2"
    path.write_bytes(b"".join(bz2.compress(chunk.encode()) for chunk in chunks))
    texts, problems = read(SourceConfig(kind="mediawiki", path=str(path)))
    assert texts == PAGE_TEXTS
    assert problems == []


def test_a_damaged_stream_costs_its_pages_only(tmp_path: Path) -> None:
    streams = [bz2.compress(part.encode()) for part in (HEADER, *PAGES, "</mediawiki>\n")]
    streams[5] = streams[5][:60] + bytes(20) + streams[5][80:]
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(b"".join(streams))
    texts, problems = read(SourceConfig(kind="mediawiki", path=str(path)))
    assert texts == PAGE_TEXTS[:4] + PAGE_TEXTS[5:]
    assert len(problems) == 1
    assert problems[0]["path"] == str(path)
    assert problems[0]["fault"].startswith("broken bzip2 stream")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                '<doc id="1" title="T">\n',
                '<doc title="A "b" c" x>\n',
                "<doc id=1>\n",
                "</doc>\n",
                "</doc>",
                "\n",
                "T\n",
                "a</doc>",
            ]
        ),
        max_size=9,
    )
)
def test_wikiextractor_documents_are_those_of_one_pattern(parts: list[str]) -> None:
    """The plain way: a single pattern over the whole text."""
    pattern = re.compile(r'^<doc [^\n]*?title="([^\n]*)"[^\n]*>\n(.*?)^</doc>', re.S | re.M)
    expected = []
    for title, body in pattern.findall("".join(parts)):
        first, _, rest = body.lstrip("\n").partition("\n")
        expected.append(rest if first.strip() == title.strip() else body.lstrip("\n"))
    assert list(wikiextractor.articles("".join(parts), "x", Problems())) == expected


BARE = ['"' * (n in (10, 60)) + f"Row {n}." for n in range(100)]
BARE_TSV = "id\ttext\n" + "".join(f"{n}\t{row}\n" for n, row in enumerate(BARE))
QUOTED = ['Two\nlines, and "quotes".', "plain", "a\ttab"]
QUOTED_TSV = 'text\tid\n"Two\nlines, and ""quotes""."\t1\nplain\t2\n"a\ttab"\t3\n'
CSV = 'id,text\n1,"Two\nlines, and ""quotes""."\n2,plain\n3,too,many\n'
WRONG_LINES = '{"text": "fine"}\n{"text": 3}\nnot json\n\n{"other": 1}\n["list"]\n{"text": "half \\ud83d"}\n'
WRONG = [
    "'text' that is not a string, line 2 of chunk 0: 1",
    "line that is not JSON, line 3 of chunk 0: Expecting value: line 1 column 1 (char 0): 2",
    "line without 'text', line 5 of chunk 0: 2",
    "lone surrogate, : 1",
]
UNCLOSED, LEFT_OUT = "<doc> that is not closed or has no title", "row left out, 3 columns instead of 2"
BAD_BYTES, READ_SO = (f"Te{bad} {bad} pa{nul}per {'word ' * 99}\n" for bad, nul in (("\xff", "\0"), ("\ufffd", "")))
NO_UTF8 = "bytes that are not UTF-8, near byte"


@pytest.mark.parametrize(
    ("name", "data", "texts", "faults"),
    [
        ("wiki", f'<doc title="T">\nT\n{BAD_BYTES}</doc>\n', [READ_SO], [f"{NO_UTF8} 20: 2"]),
        ("wiki", '<doc title="T">\nT\n1\n</doc>\n<doc title="U">\n2\n', ["1\n"], [f"{UNCLOSED}, : 1"]),
        ("wiki", "No tags here.\n", [], ["no <doc> in this part of the file, it starts with 'No tags here.': 1"]),
        ("t.csv", f"{CSV}4,bad \xff\n", [*QUOTED[:2], "bad \ufffd"], [f"{NO_UTF8} 4: 1", f"{LEFT_OUT}: 1"]),
        ("t.csv", "id,text\n1,one\n" + "2,too,many\n" * 3 + "3\n4,two\n", ["one", "two"], [f"{LEFT_OUT}: 4"]),
        ("t.tsv.gz", "text\tid\nfrom a tab\t1\n", ["from a tab"], []),
        ("a.jsonl", "", [], ["empty file, : 1"]),
        ("a.jsonl.gz", "", [], ["empty file, : 1"]),
        ("a.jsonl", WRONG_LINES + "[" * 100_000 + "\n", ["fine", "half ?"], WRONG),
        ("A.TXT.GZ", "This is a compressed text.\n", ["This is a compressed text."], []),
        ("b.csv.Bz2", "id,text\n1,one\n", ["one"], []),
        ("c.jsonl.XZ", '{"text": "two"}\n', ["two"], []),
    ],
)
def test_faults_are_counted_with_their_place_and_the_rest_is_read(tmp_path, name, data, texts, faults) -> None:
    kinds: dict[str, Any] = {"wiki": "wikiextractor", "tsv": "csv", "csv": "csv", "jsonl": "jsonl", "txt": "books"}
    ends = name.lower().split(".")
    compress = COMPRESS.get(f".{ends[-1]}", bytes)
    (tmp_path / name).write_bytes(compress(data.encode("latin-1")))
    found, problems = read(SourceConfig(kind=next(kinds[one] for one in ends if one in kinds), path=str(tmp_path)))
    assert found == texts
    assert {problem["path"] for problem in problems} <= {str(tmp_path / name)}
    assert sorted(f"{one['fault']}, {one['first']}: {one['count']}" for one in problems) == faults


@pytest.mark.parametrize(("text", "texts"), [(QUOTED_TSV, QUOTED), (BARE_TSV, BARE)], ids=["standard", "none"])
def test_quotes_of_a_tsv_file_are_read_as_is_set(tmp_path: Path, text: str, texts: list[str]) -> None:
    path = tmp_path / "t.tsv.xz"
    path.write_bytes(COMPRESS[".xz"](text.encode()))
    quoting: Any = "standard" if text is QUOTED_TSV else "none"
    assert read(SourceConfig(kind="csv", path=str(path), quoting=quoting)) == (texts, [])
    with pytest.raises(InputError, match=r'xz:\d+: the cell ".* Set `quoting` of its source to standard if'):
        read(SourceConfig(kind="csv", path=str(path)))


def test_chunks_do_not_grow_with_the_file(tmp_path: Path) -> None:
    """A process holds the text of one chunk, so its memory would."""
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.truncate(20 << 30)  # sparse
    source = SourceConfig(kind="wikiextractor", path=str(path))
    (item,) = find_inputs(source, "corpus.sources.0")
    chunks = list(cut(source, 0, 0, item))
    assert max(chunk.bytes for chunk in chunks) <= inputs.CHUNK_BYTES
    assert sum(chunk.bytes for chunk in chunks) == 20 << 30


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_csv_row_may_be_larger_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(inputs, "CHUNK_BYTES", 64)
    texts = [f"Row {n}." * (1 + 100 * (n in (20, 30))) for n in range(60)]
    rows = [f"{n},{text}\n" + "1,2,3\n" * (n % 20 == 0) for n, text in enumerate(texts)]
    path = tmp_path / f"t.csv{suffix}"
    path.write_bytes(COMPRESS[suffix](("id,text\n" + "".join(rows)).encode()))
    found, problems = read(SourceConfig(kind="csv", path=str(tmp_path)))
    assert found == texts
    assert faults(problems) == {"row left out": 3}
    spans = [chunk.data for chunk in cut(SourceConfig(kind="csv", path=str(path)), 0, 0, Input((str(path),), 1))]
    assert max(len(texts) for texts in spans) <= 10, "chunks stay small after a long row"


def test_a_csv_row_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "CHUNK_BYTES", 64)
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1 << 20)
    path = tmp_path / "t.csv"
    path.write_text('id,text\n1,"It never ends.\n' + "2,x\n" * (1 << 19))
    with pytest.raises(InputError, match=r"t\.csv: a row of more than 1 MB\. Check that its quotes are closed"):
        read(SourceConfig(kind="csv", path=str(path)))


def test_a_broken_tsv_file_is_a_fault_on_the_card(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv.gz"
    rows = "".join(f'{n}\t"Row {n * n}.\n' for n in range(5000))
    path.write_bytes(gzip.compress(("id\ttext\n" + rows).encode())[:-40])
    _, problems = read(SourceConfig(kind="csv", path=str(path), quoting="none"))
    assert [fault.partition(":")[0] for fault in faults(problems)] == ["broken file"]


def test_parquet_by_row_groups(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    rows = [f"document {n}" for n in range(95)] + [None]
    pq.write_table(pa.table({"body": rows, "n": list(range(96))}), path, row_group_size=10)
    texts, problems = read(SourceConfig(kind="parquet", path=str(path), text_column="body"))
    assert texts == rows[:-1]
    assert faults(problems) == {"row whose 'body' is not text": 1}
    path.write_bytes(path.read_bytes()[:-30])
    texts, problems = read(SourceConfig(kind="parquet", path=str(path), text_column="body"))
    assert texts == []
    assert len(problems) == 1
    assert problems[0]["fault"].startswith("broken file")


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_bad_bytes_in_parquet_are_counted(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.array([b"fine", b"caf\xe9", None], pa.binary())
    kinds = {"string": pa.string(), "large_string": pa.large_string(), "string_view": pa.string_view()}
    column = text.cast(pa.string(), safe=False).dictionary_encode() if kind == "dictionary" else text
    table = pa.table({"text": column if kind == "dictionary" else column.cast(kinds[kind], safe=False)})
    pq.write_table(table, tmp_path / "t.parquet")
    texts, problems = read(SourceConfig(kind="parquet", path=str(tmp_path)))
    assert texts == ["fine", "caf\ufffd"]
    assert faults(problems) == {"bytes that are not UTF-8": 1, "row whose 'text' is not text": 1}


def test_a_saved_data_set_without_rows_is_refused(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": []}).save_to_disk(str(tmp_path / "set"))
    refused(r"set: it, or one of its splits, has no rows\.", kind="huggingface", dataset=str(tmp_path / "set"))


def test_a_data_set_from_disk(tmp_path: Path, chunk_bytes: int) -> None:
    import datasets

    rows = [f"row {n} of the set" for n in range(30)]
    folder = str(tmp_path / "set")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": rows, "n": list(range(30))})}).save_to_disk(
        folder
    )
    assert read(SourceConfig(kind="huggingface", dataset=folder)) == (rows, [])
    with pytest.raises(InputError, match=r"no split 'dev'; it has train"):
        read(SourceConfig(kind="huggingface", dataset=folder, split="dev"))
    with pytest.raises(InputError, match=r"corpus\.sources\.0\.text_column: .* no column 'body'; it has text, n"):
        read(SourceConfig(kind="huggingface", dataset=folder, text_column="body"))


def test_a_data_set_of_the_hub_is_streamed_by_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [{"text": f"row {n}"} for n in range(12)]
    asked = []

    def load(name: str, subset: str | None, **options: Any) -> Any:
        asked.append((name, subset, options))
        table = datasets.Dataset.from_list(rows)
        return table.to_iterable_dataset(num_shards=3)

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = SourceConfig(kind="huggingface", dataset="some/set", subset="20231101.en", revision="abc123")
    assert sorted(read(source)[0]) == sorted(row["text"] for row in rows)
    assert len(find_inputs(source, "x")) == 3
    assert set(map(str, asked)) == {
        str(("some/set", "20231101.en", {"split": "train", "revision": "abc123", "streaming": True}))
    }


class _Shard:
    """A streamed data set of one shard, which may break off."""

    num_shards = 1

    def __init__(self, rows: list[dict[str, Any]], error: Exception | None = None, names: Any = None) -> None:
        self.rows, self.error, self.column_names = rows, error, names

    def shard(self, num_shards: int, index: int) -> _Shard:
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.rows
        if self.error:
            raise self.error


HUB = SourceConfig(kind="huggingface", dataset="some/set", revision="abc123")


@pytest.mark.parametrize("error", [ConnectionError("Server Disconnected"), RuntimeError("Read timed out\nTrace")])
def test_a_lost_connection_to_the_hub_is_no_fault_of_the_data_and_broken_data_is(monkeypatch, error) -> None:
    import datasets
    import pyarrow as pa

    shards = [
        _Shard([{"text": "one"}], why)
        for why in (error, pa.ArrowInvalid("Parquet magic bytes not found"))
        for _ in "12"
    ]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: shards.pop(0))
    name = f"{type(error).__name__}: {str(error)[:8]}"
    with pytest.raises(
        MachineError, match=rf"hub:some/set@abc123#0/1: cannot be read to its end \({name}.*it resumes\.$"
    ):
        read(HUB)
    texts, problems = read(HUB)
    assert texts == ["one"]
    assert faults(problems) == {"broken file: Parquet magic bytes not found": 1}


@pytest.mark.parametrize("names", [None, ["body"]])
def test_a_data_set_of_the_hub_without_the_column_is_refused(monkeypatch: pytest.MonkeyPatch, names: Any) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: _Shard([{"body": "one"}], names=names))
    with pytest.raises(InputError, match=r"some/set has no column 'text'; it has body\.") as refusal:
        read(HUB)
    assert str(refusal.value).startswith("corpus.sources.0.text_column: ") == (names is not None)


def test_what_is_not_there_is_refused() -> None:
    refused(r"corpus\.sources\.0\.revision: empty", kind="huggingface", dataset="wikimedia/wikipedia")
    refused(r"corpus\.sources\.0\.path: nowhere/\*\.txt: no books file", kind="books", path="nowhere/*.txt")


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    for name in ("texts/own/a.txt", "texts/.hidden.txt", "other/b.txt", "other/below/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"This is {name}.\n")
    (texts / "linked").symlink_to(tmp_path / "other")
    (texts / "part").symlink_to(tmp_path / "other" / "below")
    (texts / "again").symlink_to(texts / "own")
    (tmp_path / "other" / "up").symlink_to(texts)
    (texts / "loop.txt").symlink_to(texts / "loop.txt")
    (texts / "nowhere.txt").symlink_to(tmp_path / "gone.txt")
    (found,) = find_inputs(SourceConfig(kind="books", path=str(texts)), "corpus.sources.0")
    names = [Path(path).relative_to(texts).as_posix() for path in found.paths]
    assert names == ["linked/b.txt", "linked/below/c.txt", "own/a.txt"]
    assert [(one["path"], one["fault"], one["first"], one["count"]) for one in found.problems] == [
        (str(texts), listing.HIDDEN, ".hidden.txt", 1),
        (str(texts), listing.BROKEN_LINK, "loop.txt", 2),
    ]


ALL_LEFT_OUT = {listing.HIDDEN: 4, listing.PREPARED: 2, listing.BROKEN_LINK: 1}


@pytest.mark.parametrize(
    ("path", "names", "left_out"),
    [
        ("", "a.txt sub/b.txt", ALL_LEFT_OUT),
        (".", "a.txt sub/b.txt", ALL_LEFT_OUT),
        ("**/*.txt", "a.txt sub/b.txt", ALL_LEFT_OUT),
        ("**/**.txt", "a.txt sub/b.txt", ALL_LEFT_OUT),
        ("**", "a.txt sub/b.txt", {**ALL_LEFT_OUT, listing.PREPARED: 5}),
        ("sub", "sub/b.txt", {listing.HIDDEN: 1}),
        ("*/*.txt", "sub/b.txt", {listing.PREPARED: 2}),
        (".git", ".git/a.txt", {}),
        (".*/*.txt", ".git/a.txt", {}),
        (".c.txt", ".c.txt", {}),
    ],
)
def test_what_is_left_out_is_counted_and_what_is_named_is_read(tmp_path, monkeypatch, path, names, left_out) -> None:
    folder = tmp_path / ".texts"  # the folder that is named may be hidden
    left = [".git/a.txt", ".venv/lib/x.txt", "sub/.ipynb_checkpoints/b.txt", ".c.txt", "old/vocab.txt", "new/x.txt"]
    for name in ("a.txt", "sub/b.txt", *left, "old/manifest.json", "old/card.json", "new/.work/settings.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("A text.\n")
    (folder / "to.txt").symlink_to("gone.txt")
    (folder / "old" / "up").symlink_to(folder)
    monkeypatch.chdir(folder)
    source = SourceConfig(kind="files" if path == "**" else "books", path=path if path == "." else str(folder / path))
    (found,) = find_inputs(source, "corpus.sources.0")
    assert " ".join(os.path.relpath(one, folder) for one in found.paths) == names
    assert {one["fault"]: one["count"] for one in found.problems} == left_out


@pytest.mark.parametrize("kind", ["jsonl", "books", "files", "sentences", "lines", "wikiextractor", "csv", "mediawiki"])
def test_a_source_of_which_nothing_is_read_says_why(tmp_path: Path, kind: str) -> None:
    for name in ("part-0.snappy.parquet", "part-1.snappy.parquet", "_SUCCESS", "texts[v2]/a*b/a.txt", "csv/a.csv.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    named = rf"no {kind} file found\. Its files are of kind parquet: set kind: parquet\."
    for path in ("*t*", "*.parquet", "part-1.snappy.parquet"):
        refused(named, kind=kind, path=str(tmp_path / path))
    (tmp_path / "texts[v2]/a*b/a.txt").rename(tmp_path / "a")
    pattern = re.escape(str(tmp_path / "texts[[]v2]" / "a[*]b" / "*.txt"))
    refused(rf"The path is a glob\. Write {pattern} to", kind=kind, path=str(tmp_path / "texts[v2]" / "a*b" / "*.txt"))
    if kind in ("jsonl", "books", "mediawiki"):
        refused(r"Its files are of kind csv: set kind: csv\.", kind=kind, path=str(tmp_path / "csv"))
        (tmp_path / "csv/gone.txt").symlink_to("gone")
        left_out = r"csv: link that leads nowhere: left out \(gone\.txt\), 1 time\. Check the path"
        refused(left_out, kind="books", path=str(tmp_path / "csv" / "*.txt"))


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("A text.\n")
    listed = os.scandir

    def scandir(path: str) -> Any:
        """As a user who may not list b; tests may run as root, who may list all."""
        if Path(path).name == "b":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    refusal = rf"corpus\.sources\.0\.path: {re.escape(str(tmp_path))}/b: cannot be read \(Permission denied\)"
    refused(refusal, kind="books", path=str(tmp_path))


@pytest.mark.parametrize("name", ["b.txt.zst", "b.ZIP", "b.tar.gz", "b.tgz", "b.txt.Z"])
def test_a_file_that_cannot_be_unpacked_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("A text.\n")
    (tmp_path / name).write_bytes(bytes(range(256)))
    for kind, path in (("books", "*"), ("books", name), ("wikiextractor", "")):
        where = str(tmp_path / path)
        refused(rf"sources\.0\.path: .*{name}: \.\w+ files cannot be read\. Unpack", kind=kind, path=where)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    for name in (b"a.txt", b"caf\xe9.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("A text.\n")
    refused(
        r"0\.path: .*/caf\\xe9\.txt: the file name is not UTF-8\. Rename the file\.", kind="books", path=str(tmp_path)
    )


@pytest.mark.parametrize(
    ("kind", "name", "data"),
    [
        ("jsonl", "a.jsonl", b'{"body": "x"}\n'),
        ("jsonl", "a.json", b'[\n  {"body": "x"}\n]\n'),
        ("csv", "a.csv", b"id,body\n1,x\n"),
    ],
)
def test_a_missing_column_is_found_before_the_work(tmp_path: Path, kind: Any, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    refused(r"text_column: .* no column 'text'; it has .*body", kind=kind, path=str(tmp_path))


BOOK = """The Project Gutenberg EBook of A Test, by Nobody

This header is not text.

*** START OF THE PROJECT GUTENBERG EBOOK A TEST ***

Produced by Somebody and the
Online Team

A TEST

CHAPTER I

In Chancery

London. Michaelmas term lately over, and the
Lord Chancellor sitting in _Lincoln's_ Inn Hall.

[Illustration: A picture
of the hall]

"What is it?" he said. The snake_case_word
stays.

      *       *       *       *       *

II.

A Short Title

WHAT! cried everyone in the room, and that was that.

Chapter the Second--Of other things

THE END

*** END OF THE PROJECT GUTENBERG EBOOK A TEST ***

License text that must go.
"""


def test_a_book_is_its_paragraphs() -> None:
    assert books.paragraphs(BOOK.replace("\n", "\r\n"), Problems()).split("\n") == [
        "London. Michaelmas term lately over, and the Lord Chancellor sitting in Lincoln's Inn Hall.",
        '"What is it?" he said. The snake_case_word stays.',
        "WHAT! cried everyone in the room, and that was that.",
    ]


def test_a_footnotes_mark_takes_nothing_along() -> None:
    text = "It was so.[Footnote 1] Then came more of it.\n\nA second paragraph [sic] stays as it is, whole."
    assert books.paragraphs(text, Problems()).split("\n") == [
        "It was so. Then came more of it.",
        "A second paragraph [sic] stays as it is, whole.",
    ]


def test_books_one_document_each_in_their_own_encodings(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("First line\nof a café paragraph.\n", encoding="utf-8")
    latin = "Character set encoding: ISO-8859-1\n\nA café in Latin.\n"
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(latin.encode("latin-1")))
    (tmp_path / "c.txt").write_bytes(b"  \n")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"A text that is cut off. " * 100)[:-12])
    (tmp_path / "notes.md").write_text("Not a book.")
    texts, problems = read(SourceConfig(kind="books", path=str(tmp_path)))
    assert texts[0] == "First line of a café paragraph."
    assert texts[1].endswith("A café in Latin.")
    assert texts[2].startswith("A text that is cut off. A text")
    assert len(texts) == 3
    assert [(Path(p["path"]).name, p["fault"].split(":")[0]) for p in problems] == [
        ("c.txt", "empty file"),
        ("d.txt.gz", "broken file"),
    ]


ARTICLE = """{{Infobox
| name = {{nowrap|X}}
}}
[[File:Foo.jpg|thumb|A [[caption]] of it]]
'''Anarchism''' is a ''[[political philosophy]]''<ref name="a">{{cite|x}}</ref> of [[self-governance|self-governed]]\
 groups.<ref name="a" /> <!-- hidden -->
It spans (; ) two lines&nbsp;here.

== Etymology ==
The word {{lang|el|ἀν}} comes, says [https://example.org a site], from [[Greek language|Greek]] , or so.
* First ''item''
* Second item

{| class="wikitable"
! A !! B
|-
| 1 || {|
| nested
|}
|}
<math>x^2</math>After.<br/>Next line. [[Category:Foo]] [[de:Anarchismus]] [[:Category:Shown|shown]]
<gallery>
File:A.jpg|pictures
</gallery>
__NOTOC__
"""


def test_markup_leaves_running_text() -> None:
    lines = mediawiki.plain_text(ARTICLE, {"file", "category", "de"}).split("\n")
    assert lines == [
        "Anarchism is a political philosophy of self-governed groups.",
        "It spans two lines here.",
        "The word comes, says a site, from Greek, or so.",
        "First item",
        "Second item",
        "After.",
        "Next line. shown",
    ]


MODULE = '''
"""Tools for reading things that nobody ever writes down.

Heading of nothing
------------------

The :class:`~a.b.Reader` reads ``many`` lines, and *then* it `stops <http://x>`_.

    >>> Reader().read()
    This output is not a sentence at all, it is code.

Example::

    this_is_code(that, must, not, appear) in the text at all.

| a | table | row | of | many | cells | here |

:param int x: The number of the things that are read at once.
"""

raise SystemExit("imported")

def f(x):
    """
    Return the sum of all numbers that were given.

    Args:
        x (int): The first of the numbers that are to be added.
    """

class C:
    """Short one."""
    if True:
        async def g(self):
            "Return the sum of all numbers that were given."
            def inner():
                """Do something rather important with the inner things."""
'''


def test_docstrings_are_read_as_running_text_without_import(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text('def f(:\n    """Never seen by anyone, because it does not parse."""\n')
    (tmp_path / "test_module.py").write_text('"""A test is left out of the text, with all that it says."""\n')
    texts, problems = read(SourceConfig(kind="docstrings", path=str(tmp_path)))
    assert [text.split("\n") for text in texts] == [
        [
            "Tools for reading things that nobody ever writes down.",
            "The Reader reads many lines, and then it stops.",
            "The number of the things that are read at once.",
            "Return the sum of all numbers that were given.",
            "The first of the numbers that are to be added.",
            "Do something rather important with the inner things.",
        ]
    ]
    assert faults(problems) == {"not valid Python: SyntaxError": 1}
    assert gc.isenabled()


@pytest.mark.parametrize("path", ["pkg/module.py", "pkg/*.py", "pkg/**/*.py", "~/pkg", "src [old]"])
def test_docstrings_are_read_from_a_file_a_glob_or_a_folder(tmp_path, monkeypatch, path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("pkg/module.py", "pkg/tests/helper.py", "src [old]/module.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'"""This is all that the module {name} has to say."""\n')
    texts, problems = read(SourceConfig(kind="docstrings", path=path))
    assert [text.split()[6] for text in texts] == ["src" if "src" in path else "pkg/module.py"]
    assert problems == []


@pytest.mark.parametrize("path", ["nowhere", "empty", "test_module.py"])
def test_docstrings_that_are_not_there(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "test_module.py").write_text('"""A test is left out of the text, with all that it says."""\n')
    refused(rf"0\.path: .*{path}: no docstrings file found", kind="docstrings", path=str(tmp_path / path))


def test_the_embedded_corpus_is_the_standard_library_and_the_packages() -> None:
    modules = docstrings.installed_modules()
    assert len(modules) == len(set(modules))
    for wanted in ("pydoc_data/topics.py", "/argparse.py", "site-packages/pydantic/root_model.py"):
        assert sum(module.endswith(wanted) for module in modules) == 1, wanted
    topics = next(module for module in modules if module.endswith("pydoc_data/topics.py"))
    before = set(sys.modules)
    texts = list(docstrings.documents((topics,), lambda path, fault: pytest.fail(fault)))
    assert "pydoc_data.topics" not in set(sys.modules) - before
    assert len(texts) > 50
    assert sum(map(len, texts)) > 100_000
