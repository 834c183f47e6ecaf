"""Every kind of text source as one thing: inputs, cut into pieces, each a stream of documents.

A piece is what one process prepares in one go: a byte range of a plain file, a block of a decompressed stream, a
row group, a handful of small files. The cuts depend on the files alone, so the corpus is the same whatever the
number of processes and however often the work was interrupted. A document is a string whose lines are its paragraphs.
Whatever is wrong in an input is counted in `Problems` with its path, and what can be read is read.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import html
import json
import lzma
import mmap
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from pretrain.common.errors import InputError
from pretrain.config import SourceConfig
from pretrain.corpus import books, docstrings, mediawiki

PIECE_BYTES = 8 << 20  # least text per piece; files over 512 MB are cut into 64 pieces, up to:
MAX_PIECE_BYTES = 64 << 20
MAX_RECORD_BYTES = 512 << 20  # a single document this large means that the file is not what its kind says
_BZ2_PIECE_BYTES = 2 << 20
_STREAM_READ_BYTES = 1 << 18  # what a broken stream loses at most before the fault
_ROWS_PER_READ = 1000

_COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_BROKEN = (OSError, EOFError, lzma.LZMAError, zlib.error)
_SUFFIXES = {
    "parquet": (".parquet",),
    "csv": (".csv", ".tsv"),
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "books": (".txt",),
    "mediawiki": (".xml",),
}
# What a record begins with, and how many bytes of that belong to the record before.
_RECORD_START = {"wikiextractor": (b"\n<doc ", 1), "mediawiki": (b"<page>", 0), "jsonl": (b"\n", 1)}
_BZ2_STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # stream header and the first block's magic, byte-aligned
_WIKI_HEAD = re.compile(r'^<doc [^\n]*?title="([^\n]*)"[^\n]*>\n', re.M)


class Problems:
    """What was wrong in the inputs: a count and the first place for every (path, fault)."""

    def __init__(self, entries: Iterable[dict[str, Any]] = ()) -> None:
        self._entries: dict[tuple[str, str], dict[str, Any]] = {}
        self.extend(entries)

    def add(self, path: str, fault: str, first: str = "", count: int = 1) -> None:
        entry = self._entries.setdefault((path, fault), {"path": path, "fault": fault, "first": first, "count": 0})
        entry["count"] += count

    def extend(self, entries: Iterable[dict[str, Any]]) -> None:
        for entry in entries:
            self.add(entry["path"], entry["fault"], entry["first"], entry["count"])

    def entries(self) -> list[dict[str, Any]]:
        """[{path, fault, first, count}], in order of arrival."""
        return list(self._entries.values())


@dataclass(frozen=True)
class Input:
    """A file, or several small ones, or a data set: what is cut into pieces together."""

    paths: tuple[str, ...]
    bytes: int

    @property
    def is_remote(self) -> bool:
        """A shard of a data set on the hub, named `hub:<name>@<revision>#<shard>/<shards>`."""
        return bool(self.paths) and self.paths[0].startswith("hub:")


@dataclass(frozen=True)
class Piece:
    """What one process prepares in one go. (source, input, block) is its place in the corpus."""

    source: int
    input: int
    block: int
    config: SourceConfig
    paths: tuple[str, ...]
    start: int = 0  # bytes, rows or row groups, as the kind has them
    end: int = 0
    data: Any = None  # the block itself where a range of the file cannot be opened
    bytes: int = 0  # of the files, for the progress bar
    problems: list[dict[str, Any]] = field(default_factory=list)
    is_stream: bool = False  # a whole file that can only be read in order; `cut_stream` has its pieces

    @property
    def name(self) -> str:
        """Sorts as the corpus does."""
        return f"{self.source:03d}-{self.input:06d}-{self.block:06d}"


# ---------------------------------------------------------------- finding


def find_inputs(source: SourceConfig, where: str) -> list[Input]:
    """The inputs of `source`, in a fixed order. `where` is its place in the config, for errors.

    Raises `InputError` if nothing is there, it cannot be read, or the text column does not exist.
    """
    if source.kind == "huggingface":
        return _find_dataset(source, where)
    if source.kind == "docstrings":
        return _group([Path(path) for path in docstrings.find_modules(source.path)], where)
    files = _find_files(source, where)
    if source.kind == "books":
        return _group(files, where)
    inputs = [Input((str(file),), _size(file, where)) for file in files]
    _check_column(source, files[0], where)
    return inputs


def _find_files(source: SourceConfig, where: str) -> list[Path]:
    path = Path(source.path).expanduser()
    if path.is_dir():
        suffixes = _SUFFIXES.get(source.kind, ())
        files = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".")]
        if suffixes:
            files = [file for file in files if _plain_suffix(file) in suffixes]
    elif path.exists():
        files = [path]
    else:
        files = [Path(name) for name in glob.glob(str(path), recursive=True)]  # noqa: PTH207 (absolute patterns)
        files = [file for file in files if file.is_file()]
    if not files:
        raise InputError(f"{where}.path: {source.path}: no {source.kind} file there. Check the path.")
    return sorted(files)


def _plain_suffix(path: Path) -> str:
    """The suffix without a compression's: `.xml` of `a.xml.bz2`."""
    return (Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix).lower()


def _size(path: Path, where: str) -> int:
    try:
        with path.open("rb"):
            return path.stat().st_size
    except OSError as error:
        raise InputError(f"{where}.path: {path}: cannot be read ({error.strerror}). Check its permissions.") from None


def _group(files: list[Path], where: str) -> list[Input]:
    """Small files together, PIECE_BYTES at a time."""
    inputs: list[Input] = []
    paths: list[str] = []
    total = 0
    for file in files:
        paths.append(str(file))
        total += _size(file, where)
        if total >= PIECE_BYTES:
            inputs.append(Input(tuple(paths), total))
            paths, total = [], 0
    if paths:
        inputs.append(Input(tuple(paths), total))
    return inputs


def _check_column(source: SourceConfig, file: Path, where: str) -> None:
    """Fail now, not in an hour, if the first file has no such column. A broken file is left to the reading."""
    import pyarrow as pa

    try:
        if source.kind == "parquet":
            import pyarrow.parquet as pq

            names = pq.read_schema(file).names
        elif source.kind == "csv":
            names = _csv_header(file)
        elif source.kind == "jsonl":
            with _open(file) as lines:
                row = json.loads(lines.readline())
            names = list(row) if isinstance(row, dict) else []
        else:
            return
    except (ValueError, RecursionError, pa.ArrowException, *_BROKEN):
        return
    if source.text_column not in names:
        raise InputError(
            f"{where}.text_column: {file} has no column {source.text_column!r}; it has {', '.join(map(str, names))}."
        )


def _find_dataset(source: SourceConfig, where: str) -> list[Input]:
    folder = Path(source.dataset)
    if folder.is_dir():
        dataset = saved_dataset(source)
        if source.text_column not in dataset.column_names:
            raise InputError(
                f"{where}.text_column: {folder} has no column {source.text_column!r}; "
                f"it has {', '.join(dataset.column_names)}."
            )
        files = sorted(Path(file["filename"]) for file in dataset.cache_files)
        return [Input(tuple(map(str, files)), sum(file.stat().st_size for file in files))]
    if not source.revision:
        raise InputError(
            f"{where}.revision: empty. A hub data set changes over time; give the commit to read, as shown on "
            f"https://huggingface.co/datasets/{source.dataset}/commits/main"
        )
    shards = hub_dataset(source, where).num_shards
    return [Input((f"hub:{source.dataset}@{source.revision}#{shard}/{shards}",), 0) for shard in range(shards)]


def saved_dataset(source: SourceConfig) -> Any:
    import datasets

    try:
        dataset = datasets.load_from_disk(source.dataset)
    except (OSError, ValueError) as error:
        raise InputError(f"{source.dataset}: not a folder written by save_to_disk ({error}).") from None
    if isinstance(dataset, datasets.DatasetDict):
        if source.split not in dataset:
            raise InputError(f"{source.dataset}: no split {source.split!r}; it has {', '.join(dataset)}.")  # pyright: ignore[reportArgumentType, reportCallIssue]
        dataset = dataset[source.split]
    return dataset


def hub_dataset(source: SourceConfig, where: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(
            source.dataset,
            source.subset or None,
            split=source.split,
            revision=source.revision,
            streaming=True,
        )
    except Exception as error:  # whatever the hub's client raises: no network, no such name, commit or split
        raise InputError(
            f"{where}.dataset: {source.dataset}@{source.revision}: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from None


# ---------------------------------------------------------------- cutting


def cut(
    source: SourceConfig, source_number: int, input_number: int, item: Input, *, streams: bool = False
) -> Iterator[Piece]:
    """The pieces of one input; at least one, so that nothing goes unreported.

    A file that can only be read in order is read here, into pieces that carry their text; with `streams` it is one
    piece, to be cut by whoever prepares it.
    """
    place = (source_number, input_number)
    path = Path(item.paths[0]) if item.paths else Path()
    if source.kind in ("books", "docstrings"):
        yield Piece(*place, 0, source, item.paths, bytes=item.bytes)
    elif source.kind == "parquet":
        yield from _cut_parquet(source, place, item)
    elif source.kind == "huggingface":
        yield from _cut_dataset(source, place, item)
    elif source.kind != "csv" and path.suffix not in _COMPRESSED:
        size = min(MAX_PIECE_BYTES, max(PIECE_BYTES, item.bytes // 64))
        yield from _cut_ranges(source, place, item, size)
    elif source.kind == "mediawiki" and path.suffix == ".bz2" and _is_multistream(path):
        yield from _cut_ranges(source, place, item, _BZ2_PIECE_BYTES)
    elif streams:
        yield Piece(*place, 0, source, item.paths, bytes=item.bytes, is_stream=True)
    else:
        blocks = _csv_blocks(source, path) if source.kind == "csv" else _stream_blocks(source, path)
        yield from _feed(source, place, item, blocks)


def cut_stream(piece: Piece) -> Iterator[Piece]:
    """The pieces of a file that can only be read in order, one after the other with its text."""
    return cut(piece.config, piece.source, piece.input, Input(piece.paths, piece.bytes))


def _cut_ranges(source: SourceConfig, place: tuple[int, int], item: Input, size: int) -> Iterator[Piece]:
    for block, start in enumerate(range(0, max(item.bytes, 1), size)):
        end = min(start + size, item.bytes)
        yield Piece(*place, block, source, item.paths, start, end, bytes=end - start)


def _cut_parquet(source: SourceConfig, place: tuple[int, int], item: Input) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    problems = Problems()
    try:
        groups = pq.read_metadata(item.paths[0]).num_row_groups
    except (OSError, pa.ArrowException) as error:
        groups = 0
        problems.add(item.paths[0], f"broken file: {_one_line(error)}")
    for block in range(groups):
        yield Piece(*place, block, source, item.paths, block, block + 1, bytes=item.bytes // groups)
    if not groups:
        yield Piece(*place, 0, source, item.paths, problems=problems.entries())


def _cut_dataset(source: SourceConfig, place: tuple[int, int], item: Input) -> Iterator[Piece]:
    if item.is_remote:
        shard, shards = item.paths[0].rpartition("#")[2].split("/")
        yield Piece(*place, 0, source, item.paths, int(shard), int(shards))
        return
    rows = len(saved_dataset(source))
    step = max(1, rows * PIECE_BYTES // max(item.bytes, 1))
    for block, start in enumerate(range(0, max(rows, 1), step)):
        end = min(start + step, rows)
        yield Piece(*place, block, source, item.paths, start, end, bytes=item.bytes * (end - start) // max(rows, 1))


def _is_multistream(path: Path) -> bool:
    """Whether a second bzip2 stream begins in the first 64 MB: then any range of the file can be read by itself."""
    with path.open("rb") as file:
        return _BZ2_STREAM.search(file.read(64 << 20), 1) is not None


def _feed(
    source: SourceConfig, place: tuple[int, int], item: Input, blocks: Iterator[tuple[Any, int]]
) -> Iterator[Piece]:
    """Pieces that carry their data, read in order by one process. The last has none, only the faults."""
    path, problems = item.paths[0], Problems()
    block = position = 0
    try:
        for data, read in blocks:
            yield Piece(*place, block, source, item.paths, data=data, bytes=read - position)
            position = read
            block += 1
        if not block:
            problems.add(path, "empty file")
    except _BrokenInputError as error:
        problems.add(path, str(error), f"in its last {item.bytes - position} bytes")
    nothing = [] if source.kind == "csv" else b""
    left = max(0, item.bytes - position)
    yield Piece(*place, block, source, item.paths, data=nothing, bytes=left, problems=problems.entries())


class _BrokenInputError(Exception):
    """A file that cannot be read to its end or in part; the rest has been yielded."""


def _stream_blocks(source: SourceConfig, path: Path) -> Iterator[tuple[bytes, int]]:
    """(whole records of about PIECE_BYTES, bytes of the compressed file read so far)."""
    token, shift = _RECORD_START[source.kind]
    rest, searched = bytearray(), 0
    fault, ended = "", False
    with path.open("rb") as raw, _COMPRESSED[path.suffix](raw) as stream:
        while not ended:
            try:
                read = stream.read(_STREAM_READ_BYTES)
            except _BROKEN as error:
                fault, read = _one_line(error), b""
            rest += read
            ended = not read
            if len(rest) >= searched + PIECE_BYTES and not ended:
                last = rest.rfind(token, 1)
                if last > 0:
                    yield bytes(rest[: last + shift]), raw.tell()
                    del rest[: last + shift]
                searched = len(rest)
            if searched > MAX_RECORD_BYTES:
                raise InputError(_no_records(source, path))
        if rest:
            yield bytes(rest), raw.tell()
    if fault:
        raise _BrokenInputError(f"broken file: {fault}")


def _csv_blocks(source: SourceConfig, path: Path) -> Iterator[tuple[list[bytes | None], int]]:
    """(texts of a block of rows as bytes, bytes of the file read so far)."""
    import pyarrow as pa

    bad_rows: list[str] = []
    with path.open("rb") as raw:
        try:
            for batch in _open_csv(path, raw, source.text_column, bad_rows):
                yield batch.column(0).to_pylist(), raw.tell()
        except (ValueError, pa.ArrowException, *_BROKEN) as error:
            if "Empty CSV" not in str(error):
                raise _BrokenInputError(f"broken file: {_one_line(error)}") from None
    if bad_rows:
        raise _BrokenInputError(f"{len(bad_rows)} rows left out, the first with {bad_rows[0]}")


def _open_csv(path: Path, raw: IO[bytes], column: str, bad_rows: list[str]) -> Any:
    """A reader of record batches with the text column alone, as bytes; all columns if it is not there."""
    import pyarrow as pa
    from pyarrow import csv

    def skip(row: Any) -> str:
        bad_rows.append(f"{row.actual_columns} columns instead of {row.expected_columns}")
        return "skip"

    stream = _COMPRESSED[path.suffix](raw) if path.suffix in _COMPRESSED else raw
    return csv.open_csv(
        pa.PythonFile(stream, "r"),
        read_options=csv.ReadOptions(block_size=PIECE_BYTES, use_threads=False),
        parse_options=csv.ParseOptions(
            delimiter="\t" if _plain_suffix(path) == ".tsv" else ",",
            newlines_in_values=True,
            invalid_row_handler=skip,
        ),
        convert_options=csv.ConvertOptions(
            include_columns=[column],
            column_types={column: pa.binary()},
            strings_can_be_null=False,
            check_utf8=False,
        ),
    )


def _csv_header(path: Path) -> list[str]:
    import csv
    import io

    with _open(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        return next(csv.reader(text, delimiter="\t" if _plain_suffix(path) == ".tsv" else ","), [])


# ---------------------------------------------------------------- reading


def documents(piece: Piece, problems: Problems) -> Iterator[str]:
    """The documents of `piece`: paragraphs are lines; no NUL, no lone surrogate. Faults go to `problems`."""
    problems.extend(piece.problems)
    kind, path = piece.config.kind, piece.paths[0]
    if kind == "books":
        texts = _books(piece, problems)
    elif kind == "docstrings":
        texts = docstrings.documents(piece.paths, lambda path, fault: problems.add(path, fault))
    elif kind in ("parquet", "csv", "huggingface"):
        texts = _column_texts(piece, problems)
    else:
        data = piece.data if piece.data is not None else _read_range(piece, problems)
        if kind == "jsonl":
            texts = _jsonl_texts(data, piece, problems)
        elif kind == "mediawiki":
            texts = mediawiki.documents(
                data,
                lambda raw: _decode(raw, path, piece.start, problems),
                lambda fault: problems.add(path, fault),
            )
        else:
            texts = _wikiextractor_texts(_decode(data, path, piece.start, problems), path, problems)
    for text in texts:
        yield text.replace("\0", "") if "\0" in text else text


def _read_range(piece: Piece, problems: Problems) -> bytes:
    """The records that begin in [start, end) of the file."""
    path = Path(piece.paths[0])
    if not path.stat().st_size:
        problems.add(str(path), "empty file")
        return b""
    token, shift = _RECORD_START[piece.config.kind]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        if path.suffix == ".bz2":
            return _read_streams(text, piece, token, problems)

        def next_record(position: int) -> int:
            if position == 0:
                return 0
            found = text.find(token, position - shift)
            return len(text) if found < 0 else found + shift

        begin, end = next_record(piece.start), next_record(piece.end)
        if end - begin > MAX_RECORD_BYTES:
            raise InputError(_no_records(piece.config, path))
        return text[begin:end]


def _read_streams(text: mmap.mmap, piece: Piece, token: bytes, problems: Problems) -> bytes:
    """The records that begin in the bzip2 streams that begin in [start, end) of the file."""
    first = _BZ2_STREAM.search(text, piece.start)
    if not first or first.start() >= piece.end:
        return b""
    position, parts, own = first.start(), [], None
    tail = b""  # what follows our streams, up to the first record that is the next piece's
    while position < len(text):
        if own is None and position >= piece.end:
            own = len(parts)
        try:
            stream, position = _read_stream(text, position)
        except (OSError, EOFError, ValueError) as error:
            problems.add(piece.paths[0], f"broken bzip2 stream: {_one_line(error)}", f"byte {position}")
            following = _BZ2_STREAM.search(text, position + 1)
            position = following.start() if following else len(text)
            continue
        if own is None:
            parts.append(stream)
            continue
        # One byte short of the token may lie before the border: such a record began in our streams.
        if not tail:
            tail = b"".join(parts)[-(len(token) - 1) :]
            border = len(tail)
        tail += stream
        found = tail.find(token, border)
        if found >= 0:
            parts.append(tail[border:found])
            break
    else:
        if tail:
            parts.append(tail[border:])
    data = b"".join(parts)
    begin = 0 if piece.start == 0 else data.find(token)
    return data[begin:] if begin >= 0 else b""


def _read_stream(text: mmap.mmap, position: int) -> tuple[bytes, int]:
    """One whole bzip2 stream and the position behind it."""
    decompressor = bz2.BZ2Decompressor()
    parts = []
    while not decompressor.eof:
        read = text[position : position + (1 << 20)]
        if not read:
            raise EOFError("it ends in the middle of a stream")
        parts.append(decompressor.decompress(read))
        position += len(read) - len(decompressor.unused_data)
    return b"".join(parts), position


def _wikiextractor_texts(text: str, path: str, problems: Problems) -> Iterator[str]:
    count = position = 0
    # Only the heads are matched by a pattern; finding the ends is 10 times as fast as matching up to them.
    while head := _WIKI_HEAD.search(text, position):
        start = head.end()
        end = start if text.startswith("</doc>", start) else text.find("\n</doc>", start) + 1
        if not end:
            break
        position = end + len("</doc>")
        count += 1
        title, body = head[1], text[start:end].lstrip("\n")
        first, _, rest = body.partition("\n")
        # Some versions of WikiExtractor leave the entities of the dump in titles and texts.
        is_title = first.strip() in (title.strip(), html.unescape(title).strip())
        yield html.unescape(rest if is_title else body)
    begun = count
    if text.count("<doc") != count:  # five times as fast as the next line, and mostly equal
        begun = text.count("\n<doc ") + text.startswith("<doc ")
    if begun > count:
        problems.add(path, "<doc> that is not closed or has no title", count=begun - count)
    elif not begun and text.strip():
        problems.add(path, "no <doc> in this part of the file", f"it begins {text.strip()[:40]!r}")


def _jsonl_texts(data: bytes, piece: Piece, problems: Problems) -> Iterator[str]:
    path, column = piece.paths[0], piece.config.text_column
    for number, line in enumerate(_decode(data, path, piece.start, problems).split("\n")):
        if not line or line.isspace():
            continue
        try:
            text = json.loads(line)[column]
        except (ValueError, RecursionError) as error:
            problems.add(path, "line that is not JSON", f"line {number + 1} of block {piece.block}: {error}")
        except (KeyError, TypeError):
            problems.add(path, f"line without {column!r}", f"line {number + 1} of block {piece.block}")
        else:
            if isinstance(text, str):
                yield _without_surrogates(text, path, problems)
            else:
                problems.add(path, f"{column!r} that is not text", f"line {number + 1} of block {piece.block}")


def _column_texts(piece: Piece, problems: Problems) -> Iterator[str]:
    import pyarrow as pa

    path = piece.paths[0]
    values: Iterable[Any]
    if piece.config.kind == "csv":
        values = piece.data
    elif piece.config.kind == "parquet":
        values = _parquet_values(piece)
    else:
        values = _dataset_values(piece)
    try:
        for value in values:
            if isinstance(value, bytes):
                yield _decode(value, path, 0, problems)
            elif isinstance(value, str):
                yield _without_surrogates(value, path, problems)
            else:
                problems.add(path, f"row whose {piece.config.text_column!r} is not text")
    except (OSError, pa.ArrowException) as error:
        problems.add(path, f"broken file: {_one_line(error)}", f"rows or row group from {piece.start} on")


def _parquet_values(piece: Piece) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if piece.start == piece.end:
        return
    with pq.ParquetFile(piece.paths[0], memory_map=True) as file:
        column = piece.config.text_column
        if column not in file.schema_arrow.names:
            raise InputError(f"{piece.paths[0]}: no column {column!r}; it has {', '.join(file.schema_arrow.names)}.")
        for batch in file.iter_batches(_ROWS_PER_READ, row_groups=[piece.start], columns=[column]):
            texts = batch.column(0)
            # Not validated by Arrow: as bytes, a bad one is ours to report.
            yield from (texts.cast(pa.binary()) if pa.types.is_string(texts.type) else texts).to_pylist()


def _dataset_values(piece: Piece) -> Iterator[Any]:
    source = piece.config
    if piece.paths and piece.paths[0].startswith("hub:"):
        dataset = hub_dataset(source, "huggingface").shard(num_shards=piece.end, index=piece.start)
        for row in dataset:
            yield row[source.text_column]
        return
    dataset = saved_dataset(source).select_columns([source.text_column])
    for start in range(piece.start, piece.end, _ROWS_PER_READ):
        yield from dataset[start : min(start + _ROWS_PER_READ, piece.end)][source.text_column]


def _books(piece: Piece, problems: Problems) -> Iterator[str]:
    for path in piece.paths:
        try:
            with _open(Path(path)) as file:
                raw = cast(bytes, file.read())
        except _BROKEN as error:
            problems.add(path, f"broken file: {_one_line(error)}")
            continue
        if not raw.strip():
            problems.add(path, "empty file")
            continue
        text = raw.decode("latin-1") if books.is_latin1(raw) else _decode(raw, path, 0, problems)
        yield books.paragraphs(text)


def _open(path: Path) -> IO[Any]:
    return cast(IO[Any], _COMPRESSED[path.suffix](path)) if path.suffix in _COMPRESSED else path.open("rb")


def _decode(raw: bytes, path: str, offset: int, problems: Problems) -> str:
    """UTF-8 text; bad bytes become U+FFFD, which BERT's normaliser drops, and are counted."""
    try:
        return raw.decode("utf-8-sig" if raw.startswith(b"\xef\xbb\xbf") else "utf-8")
    except UnicodeDecodeError as error:
        text = raw.decode("utf-8", "replace")
        bad = text.count("\N{REPLACEMENT CHARACTER}") - raw.count("\N{REPLACEMENT CHARACTER}".encode())
        problems.add(path, "bytes that are not UTF-8", f"near byte {offset + error.start}", bad)
        return text


def _without_surrogates(text: str, path: str, problems: Problems) -> str:
    """JSON may escape half a character ("\\ud83d"), which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        problems.add(path, "half a surrogate pair")
        return text.encode("utf-8", "replace").decode()
    return text


def _no_records(source: SourceConfig, path: Path) -> str:
    token = _RECORD_START[source.kind][0].decode().strip() or "line end"
    return f"{path}: no {token!r} in {MAX_RECORD_BYTES >> 20} MB. Is it really of kind {source.kind}?"


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
