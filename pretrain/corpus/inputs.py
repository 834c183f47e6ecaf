"""Inputs of sources, the chunks that they are cut into, and the base class of the readers of all kinds of sources.

A process reads one chunk at a time: a byte range of a plain file, a range of a decompressed stream, a row group, or
some small files. Chunk boundaries depend only on the files, so the corpus does not depend on the number of processes or
on interruptions. A document is a string whose lines are its paragraphs. Faults in an input do not stop the preparation:
they are counted in `Problems`, and the rest of the input is read.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, ClassVar, cast

from pretrain.common.addresses import display_path, is_remote, join
from pretrain.common.errors import InputError
from pretrain.common.extensions import is_custom
from pretrain.common.wording import counted
from pretrain.config import SourceConfig
from pretrain.corpus import listing
from pretrain.storage import folders
from pretrain.storage.objects import ListedObject, ObjectStore

CHUNK_BYTES = 8 << 20  # minimum text per chunk
_MAX_SHOWN = 3  # maximum faults listed in a message
# Maximum invalid characters in text read as UTF-8: 5 plus 20 %. Latin-1 text has fewer, GB 18030 or KOI8 text more.
_MAX_INVALID, _MAX_INVALID_SHARE = 5, 0.2
_HEAD_BYTES = 4096  # number of leading bytes in which NULs are counted
_MAX_NUL_SHARE = 0.25  # maximum share of NULs in text read as UTF-8; Latin text in UTF-16 has more
_MAX_NUL_SHARE_IF_INVALID = 0.005  # maximum for text with invalid characters; other scripts in UTF-16 have more
_BYTE_ORDER_MARKS = re.compile("^\ufeff+", re.M)  # at the start of any line, since files may be concatenated
_NOT_UTF8 = "neither UTF-8 nor UTF-16 with a byte-order mark: left out"

COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_EXPANSION = {".gz": 3.0, ".bz2": 4.0, ".xz": 4.0}  # typical decompressed bytes per compressed byte of text
_BINARY_KINDS = {".arrow": "huggingface", ".parquet": "parquet"}  # suffix -> the only kind that can read it
_TEXT_KINDS = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".xml": "mediawiki"}
_UNSUPPORTED = frozenset(
    (".7z", ".br", ".lz4", ".lzma", ".lzo", ".rar", ".tar", ".tbz2", ".tgz", ".txz", ".z", ".zip", ".zst", ".zstd")
)
"""Suffixes of archives and compressed files that cannot be read, and would otherwise be mistaken for text."""

READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""The errors raised by reading a damaged file, whether it is compressed or not."""

SKIP_COUNTERS = ("paragraphs", "characters", "read_characters")
"""Keys of `Problems.skip_counts`: paragraphs skipped as non-text, characters in them, all characters read."""


class Problems:
    """Faults in the inputs, with the count and first location of each kind, and counts of skipped paragraphs."""

    def __init__(self, entries: Iterable[dict[str, Any]] = ()) -> None:
        self._entries: dict[tuple[str, str], dict[str, Any]] = {}
        self.skip_counts: Counter[str] = Counter()  # has the keys SKIP_COUNTERS
        self.extend(entries)

    def add(self, path: str, fault: str, first: str = "", count: int = 1) -> None:
        """Count a fault of the file at `path`; `first` is its location, recorded only for the first fault of a kind."""
        entry = self._entries.setdefault((path, fault), {"path": path, "fault": fault, "first": first, "count": 0})
        entry["count"] += count

    def count_skipped(self, paragraph: str) -> None:
        """Count a paragraph that is skipped as non-text, such as a heading; this is not a fault."""
        self.skip_counts.update(paragraphs=1, characters=len(paragraph))

    def extend(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add the `entries` of other `Problems`, such as from another process."""
        for entry in entries:
            self.add(entry["path"], entry["fault"], entry["first"], entry["count"])

    def entries(self) -> list[dict[str, Any]]:
        """Return [{path, fault, first, count}], in the order in which the faults were first found."""
        return list(self._entries.values())


def first_faults(entries: Sequence[dict[str, Any]]) -> str:
    """Describe the first `entries` of `Problems` in one line: where, what, and how often."""
    parts = []
    for entry in entries[:_MAX_SHOWN]:
        first = f" ({entry['first']})" if entry["first"] else ""
        parts.append(f"{display_path(entry['path'])}: {entry['fault']}{first}, {counted(entry['count'], 'time')}")
    more = [f"and {len(entries) - _MAX_SHOWN:,} more"] if len(entries) > _MAX_SHOWN else []
    return "; ".join([*parts, *more])


@dataclass(frozen=True)
class Input:
    """A file, several small files, or a shard of a data set; it is cut into chunks."""

    paths: tuple[str, ...]
    bytes: int  # total size of the files
    problems: tuple[dict[str, Any], ...] = ()  # faults found while listing the inputs; only the first input has them

    @property
    def is_on_hub(self) -> bool:
        """True for a shard of a data set on the hub, named `hub:<name>@<revision>#<index>/<number of shards>`."""
        return bool(self.paths) and self.paths[0].startswith("hub:")


@dataclass(frozen=True, kw_only=True)
class Span:
    """A range of an input, cut by the source's reader."""

    start: int = 0  # index of the first byte, row, row group or shard, depending on the kind of source
    end: int = 0  # index after the last one; for a shard on the hub, the number of shards
    data: Any = None  # the content itself, if the file must be read in order
    bytes: int = 0  # size in the file, for the progress bar
    problems: list[dict[str, Any]] = field(default_factory=list)  # faults found while cutting the input
    is_stream: bool = False  # whether this is a whole file that must be read in order; `sources.cut_stream` cuts it


@dataclass(frozen=True, kw_only=True)
class Chunk(Span):
    """A span with its input. (source, input, index) are indices that locate it in the corpus."""

    source: int
    input: int
    index: int
    config: SourceConfig
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name that sorts in the order of the corpus."""
        return f"{self.source:03d}-{self.input:06d}-{self.index:06d}"


class SourceReader:
    """The reader of a source; each kind subclasses it as `Reader`. By default, an input is one file and one chunk."""

    suffixes: ClassVar[tuple[str, ...]] = ()  # suffixes of the files to read in a folder; () for all files
    text_share: ClassVar[float] = 1.0  # approximate bytes of text per byte of a file
    lines_are_sentences: ClassVar[bool] = False  # whether lines of documents are sentences, not paragraphs

    def __init__(self, config: SourceConfig) -> None:
        self.config = config
        self.problems = Problems()  # files skipped while listing the inputs

    def find(self, config_key: str) -> list[Input]:
        """Return the inputs in a fixed order. `config_key` is the source's key in the config, for errors.

        Raises:
            InputError: no file is found, or one cannot be read.
        """
        return [Input((str(file),), file_size(file, config_key)) for file in self.find_files(config_key)]

    def text_bytes(self, item: Input) -> float:
        """Estimate the bytes of text from the file sizes; infinite on the hub, where sizes are unknown."""
        if item.is_on_hub:
            return math.inf
        return self.text_share * _EXPANSION.get(compression(Path(*item.paths[:1])), 1.0) * item.bytes

    def cut(self, item: Input) -> Iterator[Span]:
        """Yield one or more spans of an input; they must depend only on the files."""
        yield Span(bytes=item.bytes)

    def is_stream(self, item: Input) -> bool:
        """Return whether the input must be read in order; `cut` then yields spans with data."""
        return False

    def read(self, chunk: Chunk, problems: Problems) -> Iterator[str]:
        """Yield the documents of a chunk, with paragraphs as lines. Faults of the input are added to `problems`."""
        raise NotImplementedError

    def accepts(self, file: PurePath) -> bool:
        """Return whether a file in a folder is read."""
        return not self.suffixes or plain_suffix(file) in self.suffixes

    def find_files(self, config_key: str) -> list[Path]:
        """Return the files at the config's `path`: a file, a folder, a glob, or an object-store URL, which is fetched.

        Raises `InputError` if there are none.
        """
        path = Path(self.config.path).expanduser()
        if is_remote(self.config.path):
            files = folders.fetch_found(self.config.path, self.stored_files(store := ObjectStore()), store)
        elif path.is_dir():
            files = [file for file in listing.files_in(path, f"{config_key}.path") if self.accepts(file)]
            files = listing.visible_files(files, path, self.problems.add)
        elif path.exists():
            files = [path]
        else:
            files = listing.matching_files(path, self.problems.add)
        if not files:
            other_files = listing.files_in(path, f"{config_key}.path") if path.is_dir() else []
            raise no_files_error(self.config, config_key, self.problems.entries(), other_files)
        if _other_kind(self.config.kind, files, _BINARY_KINDS):
            raise no_files_error(self.config, config_key, (), files)
        for file in files:
            _check_name(file, config_key)
        return sorted(files)

    def stored_files(self, store: ObjectStore) -> dict[str, ListedObject]:
        """Return the objects to read if the config's `path` is an object-store URL, by URL; none is fetched."""
        address = self.config.path.rstrip("/")
        root = folders.root_of(address)
        listed = folders.find(address if root == address else f"{root}/**", store)
        if address in listed:
            return listed
        is_input = folders.matches if root != address else lambda name, _: self.accepts(PurePosixPath(name))
        names = [name.removeprefix(f"{root}/") for name in listed if is_input(name, address)]
        has_dot = "/." in address.removeprefix(root)
        selected = listing.select_names(
            names, address, lambda name: join(root, name) in listed, self.problems.add, include_hidden=has_dot
        )
        return {join(root, name): listed[join(root, name)] for name in selected}


def _check_name(file: Path, config_key: str) -> None:
    """Raise `InputError` if a file's name is not valid UTF-8, or if the file must be unpacked first."""
    try:
        str(file).encode()
    except UnicodeEncodeError:
        printable_name = os.fsencode(file).decode("utf-8", "backslashreplace")
        raise InputError(f"{config_key}.path: {printable_name}: the file name is not UTF-8. Rename the file.") from None
    suffixes = {plain_suffix(file), file.suffix.lower()}
    if unsupported := suffixes & _UNSUPPORTED:
        raise InputError(
            f"{config_key}.path: {file}: {min(unsupported)} files cannot be read. Unpack it, or compress it as one of "
            f"{', '.join(COMPRESSED)}."
        )


def no_files_error(
    config: SourceConfig, config_key: str, faults: Sequence[dict[str, Any]] = (), other_files: Sequence[Path] = ()
) -> InputError:
    """Return the error for a source without files to read. `faults` and `other_files` were found instead."""
    path = Path(config.path).expanduser()
    pattern = "" if is_remote(config.path) or path.exists() else listing.escaped_pattern(path)
    advice = f"The path is a glob. Write {pattern} to escape the folder's name." if pattern else "Check the path."
    if kind := _other_kind(config.kind, other_files, {**_BINARY_KINDS, **_TEXT_KINDS}):
        advice = f"Its files are of kind {kind}: set kind: {kind}{' and dataset' * (kind == 'huggingface')}."
    if faults:
        advice = f"{first_faults(faults)}. {advice}"
    return InputError(f"{config_key}.path: {config.path}: no {config.kind} file found. {advice}")


def _other_kind(kind: str, files: Iterable[Path], kinds: Mapping[str, str]) -> str:
    """Return the most common kind of the files, by their suffixes in `kinds`, unless it is `kind`; else ""."""
    counts = Counter(kinds.get(plain_suffix(file), "") for file in files)
    most_common = max(counts, key=counts.__getitem__, default="")
    return "" if most_common == kind or is_custom(kind) else most_common


def grouped(files: Iterable[Path], config_key: str) -> list[Input]:
    """Group small files into inputs of about CHUNK_BYTES."""
    inputs: list[Input] = []
    paths: list[str] = []
    total = 0
    for file in files:
        paths.append(str(file))
        total += file_size(file, config_key)
        if total >= CHUNK_BYTES:
            inputs.append(Input(tuple(paths), total))
            paths, total = [], 0
    if paths:
        inputs.append(Input(tuple(paths), total))
    return inputs


def check_column(
    config: SourceConfig, config_key: str, file: Path, read_names: Callable[[Path], list[str] | None]
) -> None:
    """Raise `InputError` if the text column is not in `read_names(file)`. Called before preparing.

    If the names cannot be read, nothing is raised: the fault is counted when the file is read.
    """
    import pyarrow as pa

    try:
        columns = read_names(file)
    except (ValueError, RecursionError, pa.ArrowException, *READ_ERRORS):
        return
    if any("\0" in str(column) for column in columns or ()):
        raise InputError(f"{config_key}.path: {file}: {_NOT_UTF8.partition(':')[0]}. Convert it to UTF-8.")
    if columns is not None and config.text_column not in columns:
        raise InputError(
            f"{config_key}.text_column: {file} has no column {config.text_column!r}; it has "
            f"{', '.join(map(str, columns))}."
        )


class BrokenInputError(Exception):
    """A file cannot be read completely; all readable data has been yielded."""


def data_spans(
    item: Input, batches: Iterator[tuple[Any, int]], empty_data: Any, problems: Problems | None = None
) -> Iterator[Span]:
    """Yield the spans of an input that is read in order: spans with data, then a last one with only the faults.

    `batches` yields (data, bytes of the file read so far), may raise `BrokenInputError`, and may add faults to
    `problems`. `empty_data` is the data of the last span.
    """
    path, problems = item.paths[0], problems or Problems()
    position, is_empty = 0, True
    try:
        for data, bytes_read in batches:
            yield Span(data=data, bytes=max(0, bytes_read - position))
            position, is_empty = max(position, bytes_read), False
        if is_empty and not problems.entries():
            problems.add(path, "empty file")
    except BrokenInputError as error:
        problems.add(path, str(error), f"in its last {item.bytes - position} bytes")
    yield Span(data=empty_data, bytes=max(0, item.bytes - position), problems=problems.entries())


def file_size(path: Path, config_key: str) -> int:
    """Return the size of a file in bytes. Raises `InputError` if it cannot be read."""
    try:
        with path.open("rb"):
            return path.stat().st_size
    except OSError as error:
        raise InputError(f"{config_key}.path: {path}: cannot be read ({error.strerror}). Check permissions.") from None


def compression(path: PurePath) -> str:
    """Return the suffix in COMPRESSED of a compressed file; "" for other files."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else ""


def plain_suffix(path: PurePath) -> str:
    """Return the suffix without a compression suffix: `.xml` for `a.xml.bz2`."""
    return PurePath(path.stem if compression(path) else path).suffix.lower()


def open_file(path: Path) -> IO[Any]:
    """Open a file for reading decompressed bytes; for files that may be damaged, use `streams.open_text`."""
    return cast(IO[Any], COMPRESSED[compression(path)](path)) if compression(path) else path.open("rb")


def decode(raw: bytes, path: str, offset: int, problems: Problems) -> str:
    """Decode UTF-8. Invalid bytes are counted and become U+FFFD, which BERT's normalizer drops.

    For text in another encoding, a fault is counted, and "" is returned. `offset` is the offset of `raw` in the file.
    """
    nul_share = raw.count(0, 0, _HEAD_BYTES) / len(raw[:_HEAD_BYTES]) if b"\0" in raw else 0
    if nul_share > _MAX_NUL_SHARE:
        problems.add(path, _NOT_UTF8)
        return ""
    try:
        text = raw.decode("utf-8")
        return _BYTE_ORDER_MARKS.sub("", text) if "\ufeff" in text else text
    except UnicodeDecodeError as error:
        text = raw.decode("utf-8", "replace")
        invalid = text.count("\N{REPLACEMENT CHARACTER}") - raw.count("\N{REPLACEMENT CHARACTER}".encode())
        location = f"near byte {offset + error.start}"
        if invalid > _MAX_INVALID + _MAX_INVALID_SHARE * len(text) or nul_share > _MAX_NUL_SHARE_IF_INVALID:
            problems.add(path, _NOT_UTF8, location)
            return ""
        problems.add(path, "bytes that are not UTF-8", location, invalid)
        return _BYTE_ORDER_MARKS.sub("", text)


def without_surrogates(text: str, path: str, problems: Problems) -> str:
    """Replace lone surrogates, which JSON can contain as escapes ("\\ud83d") but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        problems.add(path, "lone surrogate")
        return text.encode("utf-8", "replace").decode()
    return text


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
