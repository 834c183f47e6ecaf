"""What all kinds of sources share: inputs, the chunks they are cut into, and how a kind finds, cuts and reads them.

A chunk is what one process prepares in one go: a byte range of a plain file, a block of a decompressed stream, a
row group, a handful of small files. The cuts depend on the files only, so the corpus is the same whatever the
number of processes and however often the work was interrupted. A document is a string whose lines are its paragraphs.
Faults in an input are counted in `Problems` with its path; the rest of the input is read.
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

from pretrain.common.addresses import is_remote, join, shown
from pretrain.common.errors import InputError
from pretrain.common.extensions import is_own
from pretrain.common.wording import counted
from pretrain.config import SourceConfig
from pretrain.corpus import listing
from pretrain.storage import folders
from pretrain.storage.objects import ListedObject, ObjectStore

CHUNK_BYTES = 8 << 20  # least text per chunk
_MAX_SHOWN = 3  # faults in an error
_MAX_BAD_SHARE = 0.2  # of the characters of a text: Latin-1 has fewer in any language, GB 18030 or KOI8 more
_FEW_BAD = 5  # characters, as the accents of a short line
_MAX_NUL_SHARE = 0.25  # of the first bytes: UTF-16 has more in Latin letters, and some in other ones
_HEAD_BYTES = 4096
_BYTE_ORDER_MARKS = re.compile("^\ufeff+", re.M)  # also of files that others were appended to
_NO_UTF8 = "neither UTF-8 nor UTF-16 with a byte-order mark: left out"

COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_UNPACKED = {".gz": 3.0, ".bz2": 4.0, ".xz": 4.0}  # bytes that a byte of compressed text usually becomes
_COLUMNS = {".arrow": "huggingface", ".parquet": "parquet"}  # which no other kind reads
_ROWS = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".xml": "mediawiki"}
_PACKED = frozenset(
    (".7z", ".br", ".lz4", ".lzma", ".lzo", ".rar", ".tar", ".tbz2", ".tgz", ".txz", ".z", ".zip", ".zst", ".zstd")
)
"""What cannot be unpacked here, and would be read as text."""

BROKEN = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""The errors that reading a broken file raises, compressed or not."""


LEFT_OUT = ("paragraphs", "characters", "read_characters")
"""What is counted of paragraphs that a reader takes for no text: they, their characters, and those of all text."""


class Problems:
    """Faults in the inputs: a count and the first place for every (path, fault). And what readers leave out."""

    def __init__(self, entries: Iterable[dict[str, Any]] = ()) -> None:
        self._entries: dict[tuple[str, str], dict[str, Any]] = {}
        self.left_out: Counter[str] = Counter()  # LEFT_OUT -> number
        self.extend(entries)

    def add(self, path: str, fault: str, first: str = "", count: int = 1) -> None:
        """Count a fault of the file at `path`; `first` is where in the file it is, kept for the first one."""
        entry = self._entries.setdefault((path, fault), {"path": path, "fault": fault, "first": first, "count": 0})
        entry["count"] += count

    def leave_out(self, paragraph: str) -> None:
        """Count a paragraph that is no fault, but that the reader takes for no text, such as a heading."""
        self.left_out.update(paragraphs=1, characters=len(paragraph))

    def extend(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add the `entries` of another process."""
        for entry in entries:
            self.add(entry["path"], entry["fault"], entry["first"], entry["count"])

    def entries(self) -> list[dict[str, Any]]:
        """[{path, fault, first, count}], in order of arrival."""
        return list(self._entries.values())


def first_faults(entries: Sequence[dict[str, Any]]) -> str:
    """The first faults among the `entries` of `Problems`, for an error: where, what, how often."""
    parts = []
    for entry in entries[:_MAX_SHOWN]:
        first = f" ({entry['first']})" if entry["first"] else ""
        parts.append(f"{shown(entry['path'])}: {entry['fault']}{first}, {counted(entry['count'], 'time')}")
    more = [f"and {len(entries) - _MAX_SHOWN:,} more"] if len(entries) > _MAX_SHOWN else []
    return "; ".join([*parts, *more])


@dataclass(frozen=True)
class Input:
    """A file, or several small ones, or a data set: what is cut into chunks together."""

    paths: tuple[str, ...]
    bytes: int
    problems: tuple[dict[str, Any], ...] = ()  # of finding it and those after it

    @property
    def is_remote(self) -> bool:
        """Whether it is a shard of a data set on the hub, named `hub:<name>@<revision>#<shard>/<shards>`."""
        return bool(self.paths) and self.paths[0].startswith("hub:")


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of an input, as a kind of source cuts it."""

    start: int = 0  # in bytes, rows or row groups, as the kind chooses
    end: int = 0
    data: Any = None  # the content itself, if the file cannot be opened at `start`
    bytes: int = 0  # of the files, for the progress bar
    problems: list[dict[str, Any]] = field(default_factory=list)
    is_stream: bool = False  # a whole file that can only be read in order; `sources.cut_stream` cuts it


@dataclass(frozen=True, kw_only=True)
class Chunk(Span):
    """A span that knows its input. (source, input, block) is its place in the corpus."""

    source: int
    input: int
    block: int
    config: SourceConfig
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """Sorts as the corpus does."""
        return f"{self.source:03d}-{self.input:06d}-{self.block:06d}"


class SourceReader:
    """One source. Every kind subclasses this as `Reader`; by default, an input is a file, read in one chunk."""

    suffixes: ClassVar[tuple[str, ...]] = ()  # of the files to take from a folder; () takes all
    text_share: ClassVar[float] = 1.0  # bytes of text for each byte of a file, about
    lines_are_sentences: ClassVar[bool] = False  # of the documents; otherwise they are paragraphs

    def __init__(self, config: SourceConfig) -> None:
        self.config = config
        self.problems = Problems()  # of finding the inputs: what is left out

    def find(self, where: str) -> list[Input]:
        """The inputs in a fixed order. `where` is the source's place in the config, for errors.

        Raises:
            InputError: nothing is found, or it cannot be read.
        """
        return [Input((str(file),), file_size(file, where)) for file in self.find_files(where)]

    def text_bytes(self, item: Input) -> float:
        """Bytes of text, guessed from the size of the files; infinite on the hub, whose files are not listed."""
        if item.is_remote:
            return math.inf
        return self.text_share * _UNPACKED.get(compression(Path(*item.paths[:1])), 1.0) * item.bytes

    def cut(self, item: Input) -> Iterator[Span]:
        """The spans of an input, at least one; they depend on the files only."""
        yield Span(bytes=item.bytes)

    def is_stream(self, item: Input) -> bool:
        """Whether `cut` has to read the whole input in order, so that its spans carry their data."""
        return False

    def read(self, chunk: Chunk, problems: Problems) -> Iterator[str]:
        """The documents of a chunk, paragraphs as lines. Faults of the input go to `problems`."""
        raise NotImplementedError

    def takes(self, file: PurePath) -> bool:
        """Whether a file of a folder is read."""
        return not self.suffixes or plain_suffix(file) in self.suffixes

    def find_files(self, where: str) -> list[Path]:
        """The files at the config's `path`: a file, a folder, a glob, or an address, from which they are fetched.

        Raises `InputError` if there are none.
        """
        path = Path(self.config.path).expanduser()
        if is_remote(self.config.path):
            files = folders.fetch_found(self.config.path, self.stored_files(objects := ObjectStore()), objects)
        elif path.is_dir():
            files = [file for file in listing.files_in(path, f"{where}.path") if self.takes(file)]
            files = listing.visible(files, path, self.problems.add)
        elif path.exists():
            files = [path]
        else:
            files = listing.matching(path, self.problems.add)
        if not files:
            others = listing.files_in(path, f"{where}.path") if path.is_dir() else []
            raise nothing_found(self.config, where, self.problems.entries(), others)
        if _other_kind(self.config.kind, files, _COLUMNS):
            raise nothing_found(self.config, where, (), files)
        for file in files:
            _check_name(file, where)
        return sorted(files)

    def stored_files(self, objects: ObjectStore) -> dict[str, ListedObject]:
        """The objects at an address that are read, by their addresses; none is fetched."""
        address = self.config.path.rstrip("/")
        root = folders.root_of(address)
        found = folders.find(address if root == address else f"{root}/**", objects)
        if address in found:
            return found
        taken = folders.matches if root != address else lambda name, _: self.takes(PurePosixPath(name))
        names = [name.removeprefix(f"{root}/") for name in found if taken(name, address)]
        hidden = "/." in address.removeprefix(root)
        kept = listing.read_names(
            names, address, lambda name: join(root, name) in found, self.problems.add, hidden=hidden
        )
        return {join(root, name): found[join(root, name)] for name in kept}


def _check_name(file: Path, where: str) -> None:
    """Raise `InputError` for a name that no card or manifest can hold, and for a file that must be unpacked first."""
    try:
        str(file).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(file).decode("utf-8", "backslashreplace")
        raise InputError(f"{where}.path: {shown}: its name is not UTF-8. Rename it.") from None
    suffixes = {plain_suffix(file), file.suffix.lower()}
    if packed := suffixes & _PACKED:
        raise InputError(
            f"{where}.path: {file}: {min(packed)} files are not unpacked here. Unpack it, or compress it as one of "
            f"{', '.join(COMPRESSED)}."
        )


def nothing_found(
    config: SourceConfig, where: str, left_out: Sequence[dict[str, Any]] = (), others: Sequence[Path] = ()
) -> InputError:
    """The error of a source without files that are read; `where` is its place in the config. `others` are there."""
    path = Path(config.path).expanduser()
    pattern = "" if is_remote(config.path) or path.exists() else listing.escaped(path)
    advice = f"It is a pattern. Write {pattern} for the folder of that name." if pattern else "Check the path."
    if kind := _other_kind(config.kind, others, {**_COLUMNS, **_ROWS}):
        advice = f"Its files are of kind {kind}: set kind: {kind}{' and dataset' * (kind == 'huggingface')}."
    if left_out:
        advice = f"{first_faults(left_out)}. {advice}"
    return InputError(f"{where}.path: {config.path}: no {config.kind} file found. {advice}")


def _other_kind(kind: str, files: Iterable[Path], kinds: Mapping[str, str]) -> str:
    """The kind of most of the files, among `kinds` of suffixes, if it is not `kind`; else ""."""
    counts = Counter(kinds.get(plain_suffix(file), "") for file in files)
    most = max(counts, key=counts.__getitem__, default="")
    return "" if most == kind or is_own(kind) else most


def grouped(files: Iterable[Path], where: str) -> list[Input]:
    """Inputs of several small files each, CHUNK_BYTES together."""
    inputs: list[Input] = []
    paths: list[str] = []
    total = 0
    for file in files:
        paths.append(str(file))
        total += file_size(file, where)
        if total >= CHUNK_BYTES:
            inputs.append(Input(tuple(paths), total))
            paths, total = [], 0
    if paths:
        inputs.append(Input(tuple(paths), total))
    return inputs


def check_column(config: SourceConfig, where: str, file: Path, names: Callable[[Path], list[str] | None]) -> None:
    """Raise `InputError` before the work starts if `names(file)` lacks the text column.

    If the names cannot be read, no error is raised here; reading the file counts the fault.
    """
    import pyarrow as pa

    try:
        columns = names(file)
    except (ValueError, RecursionError, pa.ArrowException, *BROKEN):
        return
    if any("\0" in str(column) for column in columns or ()):
        raise InputError(f"{where}.path: {file}: {_NO_UTF8.partition(':')[0]}. Convert it to UTF-8.")
    if columns is not None and config.text_column not in columns:
        raise InputError(
            f"{where}.text_column: {file} has no column {config.text_column!r}; it has {', '.join(map(str, columns))}."
        )


class BrokenInputError(Exception):
    """A file that cannot be read to its end or in part; the rest has been yielded."""


def carried_spans(
    item: Input, blocks: Iterator[tuple[Any, int]], nothing: Any, problems: Problems | None = None
) -> Iterator[Span]:
    """Spans that carry their data, read in order by one process. The last has no data, only the faults.

    `blocks` yields (data, bytes of the file read so far) and may raise `BrokenInputError`; `nothing` is empty data.
    `problems` are those that reading the blocks finds besides.
    """
    path, problems = item.paths[0], problems or Problems()
    position = 0
    is_empty = True
    try:
        for data, read in blocks:
            yield Span(data=data, bytes=max(0, read - position))
            position, is_empty = max(position, read), False
        if is_empty and not problems.entries():
            problems.add(path, "empty file")
    except BrokenInputError as error:
        problems.add(path, str(error), f"in its last {item.bytes - position} bytes")
    yield Span(data=nothing, bytes=max(0, item.bytes - position), problems=problems.entries())


def file_size(path: Path, where: str) -> int:
    """Bytes of a file; `InputError` if it cannot be read."""
    try:
        with path.open("rb"):
            return path.stat().st_size
    except OSError as error:
        raise InputError(f"{where}.path: {path}: cannot be read ({error.strerror}). Check its permissions.") from None


def compression(path: PurePath) -> str:
    """The suffix of a compressed file, among COMPRESSED; "" of another."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else ""


def plain_suffix(path: PurePath) -> str:
    """The suffix without a compression's: `.xml` of `a.xml.bz2`."""
    return PurePath(path.stem if compression(path) else path).suffix.lower()


def open_file(path: Path) -> IO[Any]:
    """The file open for reading bytes, decompressed. `streams.open_text` also reads what is broken."""
    return cast(IO[Any], COMPRESSED[compression(path)](path)) if compression(path) else path.open("rb")


def decode(raw: bytes, path: str, offset: int, problems: Problems) -> str:
    """UTF-8 text; bad bytes become U+FFFD, which BERT's normalizer drops, and are counted. `offset` is `raw`'s.

    Text of another encoding is left out and counted: "" is returned.
    """
    nul_share = raw.count(0, 0, _HEAD_BYTES) / len(raw[:_HEAD_BYTES]) if b"\0" in raw else 0
    if nul_share > _MAX_NUL_SHARE:
        problems.add(path, _NO_UTF8)
        return ""
    try:
        text = raw.decode("utf-8")
        return _BYTE_ORDER_MARKS.sub("", text) if "\ufeff" in text else text
    except UnicodeDecodeError as error:
        text = raw.decode("utf-8", "replace")
        bad = text.count("\N{REPLACEMENT CHARACTER}") - raw.count("\N{REPLACEMENT CHARACTER}".encode())
        place = f"near byte {offset + error.start}"
        if bad > _FEW_BAD + _MAX_BAD_SHARE * len(text) or nul_share > _MAX_NUL_SHARE / 50:
            problems.add(path, _NO_UTF8, place)
            return ""
        problems.add(path, "bytes that are not UTF-8", place, bad)
        return _BYTE_ORDER_MARKS.sub("", text)


def without_surrogates(text: str, path: str, problems: Problems) -> str:
    """`text` without halves of characters, which JSON may escape ("\\ud83d") and no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        problems.add(path, "half a surrogate pair")
        return text.encode("utf-8", "replace").decode()
    return text


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
