"""The text of the benchmark: at most 10 million words, sampled from a folder in the same way on every machine.

Documents are ordered by the SHA-256 of their text. The first of each source are held out: 1 % of its words, and at
least 200 documents or 1 MB. The next training document is always from the source that is furthest below its share; a
source stops at the first document that would exceed the limit. Words are separated by whitespace. Duplicates are
dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open, disk_errors, sha256_file, write_json
from pretrain.corpus.formats import PLAIN, documents_of, files_below, kind_of
from pretrain.corpus.inputs import Problems, plain_suffix

CARD = "card.json"
TRAIN, HELD_OUT = "train", "held-out"
SOURCES = {"wikiextractor": "wikipedia", PLAIN: "novels"}  # {kind of a source: its name}
# Shares of the words, about as in BERT's text: 2,500 million of Wikipedia and 800 million of books (Devlin et al. 2019,
# section 3.1).
SHARES = {"wikipedia": 0.75, "novels": 0.25}
_MIN_WORDS = 20  # minimum number of words of a document, as in corpus.min_document_words


class Limits(NamedTuple):
    """Limits of the text to sample."""

    words: int = 10_000_000  # maximum number of words for training
    held_out_share: float = 0.01  # share of a source's words to hold out
    held_out_documents: int = 200  # minimum number of held-out documents of each source, unless they have
    held_out_bytes: int = 1_000_000  # at least this size


LIMITS = Limits()


class Document(NamedTuple):
    """Metadata of one document of a source."""

    digest: str  # SHA-256 of the text, hexadecimal
    words: int
    characters: int
    bytes: int


class Drawn(NamedTuple):
    """The documents sampled from one source, in order."""

    train: list[Document]
    held_out: list[Document]


def draw_text(data: Path, out: Path, limits: Limits = LIMITS) -> dict[str, Any]:
    """Sample the text in `data` into the folder `out` and return its card; keep a folder that already has it.

    The card has, for each source, the documents, words, characters and SHA-256 of the training and the held-out text;
    `sha256` is a hash of these SHA-256 values.

    Raises `InputError` if `data` has no text or other files too, or `out` was drawn from other files.
    """
    files = _files(data)
    inputs = [[str(file.relative_to(data)) if data.is_dir() else file.name, file.stat().st_size] for file in files]
    card = _existing_card(out, {"limits": limits._asdict(), "inputs": inputs})
    if card is None:
        with disk_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        drawn = _draw(files, limits)
        _write(files, drawn, out)
        card = {**_card(drawn, out), "limits": limits._asdict(), "inputs": inputs}
        write_json(out / CARD, card)
    return card


def text_files(card: Mapping[str, Any], out: Path, part: str) -> dict[str, Path]:
    """Return {source: JSONL file of its training or held-out documents}."""
    return {name: out / parts[part]["file"] for name, parts in card["sources"].items()}


def _files(data: Path) -> list[Path]:
    files = files_below(data, Problems())
    for file in files:
        kind = kind_of(file)
        if kind not in SOURCES or (kind == PLAIN and plain_suffix(file) != ".txt"):
            raise InputError(
                f"--data: {file}: neither WikiExtractor's output nor a .txt file. Put the text alone into a folder."
            )
    return files


def _existing_card(out: Path, expected: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the card of intact text that was sampled from the same files, or None."""
    if not (out / CARD).is_file():
        return None
    card: dict[str, Any] = json.loads((out / CARD).read_text(encoding="utf-8"))
    if any(card.get(name) != value for name, value in expected.items()):
        raise InputError(
            f"--data: {out} was drawn from other files, or by another version. Give the same folder, or another --out: "
            "trials compare on one text only."
        )
    parts = [part for source in card["sources"].values() for part in (source[TRAIN], source[HELD_OUT])]
    is_intact = all((out / one["file"]).is_file() and sha256_file(out / one["file"]) == one["sha256"] for one in parts)
    return card if is_intact else None


def _documents(files: Sequence[Path]) -> Iterator[tuple[str, Document, str]]:
    """Yield (source, document, text) of every distinct document that is long enough."""
    seen: set[str] = set()
    for file in files:
        source = SOURCES[kind_of(file)]
        for text in documents_of(file, Problems()):
            raw, words = text.encode(), len(text.split())
            digest = hashlib.sha256(raw).hexdigest()
            if words >= _MIN_WORDS and digest not in seen:
                seen.add(digest)
                yield source, Document(digest, words, len(text), len(raw)), text


def _draw(files: Sequence[Path], limits: Limits) -> dict[str, Drawn]:
    found: dict[str, list[Document]] = {}
    for source, document, _ in _documents(files):
        found.setdefault(source, []).append(document)
    held_out = {name: _held_out(sorted(found[name]), limits) for name in SHARES if name in found}
    left = {name: sorted(found[name])[len(held_out[name]) :] for name in held_out}
    train = _in_turn(left, limits.words)
    if not train or not all(train.values()):
        raise InputError(
            f"--data: too little text: of Wikipedia and of novels, {limits.held_out_documents} documents or "
            f"{limits.held_out_bytes / 1e6:g} MB are held out, and one of them has no more. Add text."
        )
    return {name: Drawn(train[name], held_out[name]) for name in train}


def _held_out(ordered: Sequence[Document], limits: Limits) -> list[Document]:
    min_words = limits.held_out_share * sum(document.words for document in ordered)
    taken: list[Document] = []
    words = size = 0
    for document in ordered:
        enough = len(taken) >= limits.held_out_documents or size >= limits.held_out_bytes
        if enough and words >= min_words:
            break
        taken.append(document)
        words, size = words + document.words, size + document.bytes
    return taken


def _in_turn(ordered: Mapping[str, Sequence[Document]], limit: int) -> dict[str, list[Document]]:
    """Return documents with at most `limit` words in total, in `SHARES` as long as all sources have text."""
    taken: dict[str, list[Document]] = {name: [] for name in ordered}
    words = dict.fromkeys(ordered, 0)
    rest = {name: iter(documents) for name, documents in ordered.items()}
    while rest:
        name = min(rest, key=lambda one: words[one] / SHARES[one])
        document = next(rest[name], None)
        if document is None or sum(words.values()) + document.words > limit:
            del rest[name]
            continue
        taken[name].append(document)
        words[name] += document.words
    return taken


def _write(files: Sequence[Path], drawn: Mapping[str, Drawn], out: Path) -> None:
    """Write the sampled documents as JSONL, in order."""
    wanted = {document.digest for one in drawn.values() for part in one for document in part}
    texts = {document.digest: text for _, document, text in _documents(files) if document.digest in wanted}
    for name, one in drawn.items():
        for part, documents in ((TRAIN, one.train), (HELD_OUT, one.held_out)):
            with atomic_open(out / f"{name}.{part}.jsonl", "w") as file:
                for document in documents:
                    file.write(json.dumps({"text": texts[document.digest]}, ensure_ascii=False) + "\n")


def _card(drawn: Mapping[str, Drawn], out: Path) -> dict[str, Any]:
    sources = {
        name: {
            part: {
                "documents": len(documents),
                "words": sum(document.words for document in documents),
                "characters": sum(document.characters for document in documents),
                "file": f"{name}.{part}.jsonl",
                "sha256": sha256_file(out / f"{name}.{part}.jsonl"),
            }
            for part, documents in ((TRAIN, one.train), (HELD_OUT, one.held_out))
        }
        for name, one in drawn.items()
    }
    digests = [source[part]["sha256"] for source in sources.values() for part in (TRAIN, HELD_OUT)]
    return {
        "sha256": hashlib.sha256("\n".join(digests).encode()).hexdigest(),
        "words": sum(source[TRAIN]["words"] for source in sources.values()),
        "sources": sources,
    }
