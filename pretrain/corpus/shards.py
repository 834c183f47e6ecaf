"""Token shards on disk (invariants 4 and 5 in docs/invariants.md): flat, memory-mapped arrays.

    <shard>.tokens.npy     uint16 or uint32 [tokens]      concatenated sentences, without special tokens
    <shard>.sentences.npy  uint64 [sentences + 1]         token offset of each sentence
    <shard>.documents.npy  uint64 [documents + 1, 2]      (sentence offset, token offset) of each document
    <shard>.blocks.npy     BLOCK [blocks]                 ranges that are read separately (`pretrain.corpus.blocks`)

A shard has documents of one source and one split. `manifest.json` lists the shards and is written last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import resource
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from pretrain.common.errors import InputError, MachineError, version_mismatch
from pretrain.common.files import MANIFEST, allow_open_files, atomic_open, sha256_file, verify_manifest, write_json
from pretrain.common.kinds import unknown_name_message
from pretrain.corpus.block_cache import BlockCache
from pretrain.corpus.blocks import BLOCK, write_blocks

FORMAT = 1
FOLDED = "folded"  # key of the manifest: document hashes ignore case and accents if the vocabulary does
_BATCH_TOKENS, _SAMPLED_BLOCKS = (
    1 << 24,
    16,
)  # tokens per batch, and approximate number of sampled blocks, in `some_tokens`
_VERIFIED = ".proven.json"  # file that records which files of the folder were verified
_ARRAYS = ("tokens", "sentences", "documents")
BLOCKS = "blocks"  # part of the file name of a block table
COUNTS = ".samples"  # subfolder with the number of samples per block, by source and settings of the sampler
# A mapping needs no file descriptor, but before Python 3.13 mmap always keeps one.
_NO_DESCRIPTOR: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return uint16 if every id fits, else uint32."""
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)


@dataclass(frozen=True)
class Shard:
    """One memory-mapped shard, with the arrays in the module's docstring."""

    name: str
    split: str
    source: int
    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray
    blocks: np.ndarray | None = None  # BLOCK [blocks]; None for a shard in memory
    cache: BlockCache | None = None  # cache that fetches the blocks; None unless the shard is streamed


@dataclass(frozen=True)
class TokenShards:
    """One split of a corpus. `special_ids` is {role: id} of special tokens; `sources` is the list in the manifest."""

    folder: Path
    fingerprint: str
    vocabulary_size: int
    special_ids: dict[str, int]
    sources: list[dict[str, Any]]
    shards: list[Shard]
    fingerprints: tuple[str, ...] = ()  # digest of each source's tokens
    split: str = "train"
    grown: int = 0  # number of times that sources were added

    def of_source(self, source: int) -> list[int]:
        """Return the indices in `shards` of the shards of a source."""
        return [index for index, shard in enumerate(self.shards) if shard.source == source]

    @property
    def is_streamed(self) -> bool:
        """True if blocks are fetched when they are needed."""
        return any(shard.cache is not None for shard in self.shards)

    def close(self) -> None:
        """Stop fetching blocks of streamed shards."""
        for cache in {id(shard.cache): shard.cache for shard in self.shards if shard.cache}.values():
            cache.close()

    def some_tokens(self) -> Iterator[np.ndarray]:
        """Yield the tokens of all shards in batches; of streamed shards, only some evenly spread blocks."""
        for index, shard in enumerate(self.shards):
            if shard.cache is None or shard.blocks is None:
                for start in range(0, len(shard.tokens), _BATCH_TOKENS):
                    yield shard.tokens[start : start + _BATCH_TOKENS]
            elif index % max(1, len(self.shards) // _SAMPLED_BLOCKS) == 0:
                lease = shard.cache.hold(shard.cache.global_indices(np.array([index]), np.array([0])))
                yield shard.tokens[: int(shard.blocks["end"][0])]
                del lease

    def source_fingerprint(self, source: int) -> str:
        """Return a digest of a source's tokens, independent of other sources (invariant 1)."""
        return self.fingerprints[source] if self.fingerprints else f"{self.fingerprint} {source}"

    def weights(self, overrides: Mapping[str, float], where: str) -> list[float]:
        """Return the weight of each source: from `overrides`, which has weights by name, or else from the corpus.

        Raises `InputError`, prefixed with `where`, if a name is unknown or all weights are 0.
        """
        names = [source["name"] for source in self.sources if "name" in source] if overrides else []
        for name in overrides:
            if name not in names:
                raise InputError(f"{where}: {unknown_name_message(name, names)}")
        weights = [float(overrides.get(source.get("name", ""), source.get("weight", 1.0))) for source in self.sources]
        if overrides and not any(w for w, source in zip(weights, self.sources, strict=True) if "name" in source):
            raise InputError(f"{where}: all weights are 0. Give one of {', '.join(names)} a positive weight.")
        return weights


def open_shards(folder: Path, split: str) -> TokenShards:
    """Open the shards of `split` ("train" or "validation"). File sizes are checked, but contents are not read.

    Raises:
        InputError: the folder is not a prepared corpus, or a file is missing, truncated or of another format.
        MachineError: a file exists but cannot be opened or read.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).exists():
        raise InputError(f"{folder}: not a prepared corpus (no {MANIFEST}). Run `prepare` with this config first.")
    return shards_of(folder, check_version(verify_manifest(folder, check_hashes=False), folder), split)


def shards_of(folder: Path, manifest: dict[str, Any], split: str) -> TokenShards:
    """Open the shards of `split` in a manifest. Raises errors like `open_shards`."""
    allow_open_files(len(_ARRAYS) * len(manifest["shards"]))
    return TokenShards(
        folder=folder,
        fingerprint=manifest["fingerprint"],
        vocabulary_size=manifest["vocabulary_size"],
        special_ids=manifest["special_ids"],
        sources=manifest["sources"],
        shards=[_open_shard(folder, entry, manifest) for entry in manifest["shards"] if entry["split"] == split],
        fingerprints=source_fingerprints(manifest),
        split=split,
        grown=manifest.get("grown", 0),
    )


def verify_shards(folder: Path) -> None:
    """Compare the SHA-256 of all files with the manifest. Raises `InputError` for the first difference.

    A verified file is only read again if its size, modification time or inode has changed. The verified files are
    recorded in the folder, if it is writable.
    """
    folder = Path(folder)
    manifest = check_version(verify_manifest(folder, check_hashes=False), folder)
    try:
        verified = json.loads((folder / _VERIFIED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        verified = {}
    states = {name: [entry["sha256"], *_file_state(folder / name)] for name, entry in manifest["files"].items()}
    for name, state in states.items():
        if verified.get(name) != state and sha256_file(folder / name) != state[0]:
            raise InputError(
                f"{folder / name}: its SHA-256 differs from the manifest's; it was changed or damaged on disk. "
                "Restore it or prepare the corpus again."
            )
    if verified != states:
        with contextlib.suppress(OSError, InputError, MachineError):
            write_json(folder / _VERIFIED, states)


def source_fingerprints(manifest: dict[str, Any]) -> tuple[str, ...]:
    """Return the fingerprint of each source in a manifest, in order."""
    return tuple(source_fingerprint(manifest, index) for index in range(len(manifest["sources"])))


def source_fingerprint(manifest: dict[str, Any], source: int) -> str:
    """Return a digest of the vocabulary and of the shards of a source."""
    files = manifest["files"]
    names = [entry["name"] for entry in manifest["shards"] if entry["source"] == source]
    arrays = [files[f"{name}.{array}.npy"]["sha256"] for name in names for array in _ARRAYS]
    contents = [manifest["format"], manifest["special_ids"], files["vocab.txt"]["sha256"], arrays]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def _file_state(path: Path) -> list[int]:
    """Return the size, modification time and inode of a file."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def check_version(manifest: dict[str, Any], where: Path | str) -> dict[str, Any]:
    """Return the manifest of the corpus at `where`. Raises `InputError` if another version of bertrain prepared it."""
    if manifest.get("format") != FORMAT or FOLDED not in manifest:
        advice = "Prepare the text again, into another corpus.dir or after removing this one."
        raise InputError(version_mismatch(where, advice))
    return manifest


def _open_shard(folder: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> Shard:
    arrays = {array: map_array(folder / f"{entry['name']}.{array}.npy") for array in _ARRAYS}
    for array, (dtype, shape) in array_types(entry, manifest).items():
        if (arrays[array].dtype, arrays[array].shape) != (dtype, shape):
            raise InputError(
                f"{folder / entry['name']}.{array}.npy: {arrays[array].dtype} {arrays[array].shape}, but the manifest "
                f"has {dtype} {shape}. Prepare the corpus again."
            )
    tokens, sentences, documents = (arrays[array] for array in _ARRAYS)
    blocks = read_blocks(folder, entry)
    return Shard(entry["name"], entry["split"], entry["source"], tokens, sentences, documents, blocks)


def array_types(entry: dict[str, Any], manifest: dict[str, Any]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Return (dtype, shape) of each array of a shard."""
    return {
        "tokens": (np.dtype(manifest["dtype"]), (entry["tokens"],)),
        "sentences": (np.dtype(np.uint64), (entry["sentences"] + 1,)),
        "documents": (np.dtype(np.uint64), (entry["documents"] + 1, 2)),
    }


def read_blocks(folder: Path, entry: dict[str, Any]) -> np.ndarray:
    """Read the block table of a shard."""
    name = f"{entry['name']}.{BLOCKS}.npy"
    try:
        blocks = np.load(folder / name, allow_pickle=False)
    except OSError as error:
        raise _unreadable(folder / name, error) from None
    except ValueError as error:
        raise InputError(f"{folder / name}: damaged ({error}). Prepare the corpus again.") from None
    if blocks.dtype != BLOCK:
        raise InputError(f"{folder / name}: not a table of blocks ({blocks.dtype}). Prepare the corpus again.")
    return blocks


def map_array(path: Path) -> np.ndarray:
    """Memory-map the array in a .npy file, read-only."""
    try:
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("unexpected version of .npy")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            if fortran or dtype.hasobject:
                raise ValueError("unexpected array layout")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **_NO_DESCRIPTOR)
            return np.ndarray(shape, dtype, mapping, offset=file.tell())
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error}). Prepare the corpus again.") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> MachineError:
    """Return the error for a file of a shard that cannot be opened or read."""
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        advice = "Raise the limit (ulimit -n), or prepare the corpus with larger shards (corpus.shard_tokens)."
        return MachineError(
            f"{path}: cannot be opened in addition to the other shards: the limit of open files is {limit}. {advice}"
        )
    return MachineError(f"{path}: cannot be read ({error.strerror}). Check its storage and its permissions.")


class ShardWriter:
    """Writes one shard of known size incrementally. The files only appear if the `with` block does not raise.

    with ShardWriter(folder, "train-00000", tokens=9, sentences=3, documents=1, dtype=dtype) as writer:
        writer.add(tokens, sentence_tokens, document_sentences)
    writer.hashes  # file name -> SHA-256
    """

    def __init__(
        self, folder: Path, name: str, *, tokens: int, sentences: int, documents: int, dtype: np.dtype
    ) -> None:
        self._folder, self._name, self._dtype = Path(folder), name, dtype
        self._totals = (tokens, sentences, documents)
        self._counts = [0, 0, 0]
        self._stack = contextlib.ExitStack()
        self._files: dict[str, _HashedFile] = {}
        self.hashes: dict[str, str] = {}

    def __enter__(self) -> ShardWriter:
        tokens, sentences, documents = self._totals
        shapes: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
            "tokens": (self._dtype, (tokens,)),
            "sentences": (np.dtype("<u8"), (sentences + 1,)),
            "documents": (np.dtype("<u8"), (documents + 1, 2)),
        }
        with contextlib.ExitStack() as stack:
            for array, (dtype, shape) in shapes.items():
                file = _HashedFile(stack.enter_context(atomic_open(self._folder / f"{self._name}.{array}.npy")))
                header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)  # pyright: ignore[reportArgumentType]
                self._files[array] = file
            self._files["sentences"].write(np.zeros(1, "<u8"))
            self._files["documents"].write(np.zeros(2, "<u8"))
            self._stack = stack.pop_all()
        return self

    def add(self, tokens: np.ndarray, sentence_tokens: np.ndarray, document_sentences: np.ndarray) -> None:
        """Append documents: tokens, number of tokens per sentence, number of sentences per document."""
        tokens_before, sentences_before, _ = self._counts
        sentence_ends = np.cumsum(sentence_tokens, dtype=np.uint64)
        document_ends = np.cumsum(document_sentences, dtype=np.uint64)
        token_ends = np.concatenate([np.zeros(1, np.uint64), sentence_ends])[document_ends]
        self._files["tokens"].write(tokens.astype(self._dtype, copy=False))
        self._files["sentences"].write(sentence_ends + np.uint64(tokens_before))
        self._files["documents"].write(
            np.stack([document_ends + np.uint64(sentences_before), token_ends + np.uint64(tokens_before)], axis=1)
        )
        for index, array in enumerate((tokens, sentence_tokens, document_sentences)):
            self._counts[index] += len(array)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if error is None and tuple(self._counts) != self._totals:
            error = ValueError(f"{self._name}: {self._counts} tokens, sentences, documents, not {self._totals}")
            self._stack.__exit__(type(error), error, None)
            raise error
        self._stack.__exit__(kind, error, trace)
        if error is None:
            self.hashes = {f"{self._name}.{array}.npy": file.digest() for array, file in self._files.items()}
            path = self._folder / f"{self._name}.{BLOCKS}.npy"
            arrays = {array: map_array(self._folder / f"{self._name}.{array}.npy") for array in _ARRAYS}
            self.hashes[path.name] = write_blocks(path, arrays)


class _HashedFile:
    """A file that computes the SHA-256 of the data written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()

    def write(self, data: Any) -> None:
        view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data if isinstance(data, np.ndarray) else data
        self._sha256.update(view)
        self._file.write(view)

    def digest(self) -> str:
        return self._sha256.hexdigest()
