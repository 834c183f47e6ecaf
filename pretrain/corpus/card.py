"""The corpus card: statistics of a corpus and its sources, for programs (card.json) and people (card.md)."""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.common.addresses import display_path
from pretrain.common.files import atomic_open, read_manifest, write_json
from pretrain.common.wording import counted
from pretrain.corpus.card_tables import evaluation_lines, filter_lines, reading_lines, skipped_lines, table_row
from pretrain.corpus.filters.evaluation_sets import MIN_TERMS
from pretrain.corpus.inputs import first_faults

CARD_FILES = ("card.json", "card.md")
_SUMMED_KEYS = (  # keys of the sources' entries that are summed in the totals
    "documents_read",
    "too_short",
    "duplicates",
    "documents",
    "validation_documents",
    "sentences",
    "words",
    "tokens",
    "unknown_tokens",
    "text_bytes",
    "input_bytes",
)
_MAX_LISTED_FILES = 100  # maximum files listed per source
_MAX_LISTED_PROBLEMS = 50  # maximum faults listed in card.md
MAX_LEFT_OUT = 0.05  # maximum share of a source's characters skipped as headings without a hint
_MAX_UNKNOWN = 0.01  # maximum share of unknown tokens without a hint


def shard_statistics(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the unknown tokens and length histograms of a source, from the results of `stages.write_shard`."""
    lengths = {}
    for unit in ("document", "sentence"):
        counts = np.sum([result["lengths"][unit] for result in results], axis=0, dtype=np.int64) if results else []
        lengths[f"{unit}_lengths"] = _filled_bins(np.asarray(counts))
    return {"unknown_tokens": sum(result["unknown"] for result in results), **lengths}


def _filled_bins(counts: np.ndarray) -> dict[str, int]:
    """Return {"1": n, "2-3": n, "4-7": n, ...}: the counts that are not 0, by range of the number of tokens."""
    filled = np.flatnonzero(counts)
    names = {bits: "1" if bits == 1 else f"{1 << bits - 1}-{(1 << bits) - 1}" for bits in filled.tolist()}
    return {names[bits]: int(counts[bits]) for bits in filled.tolist()}


def write_card(
    folder: Path,
    sources: list[dict[str, Any]],
    hashes: list[dict[str, str]],
    problems: list[dict[str, Any]],
    *,
    vocabulary_size: int,
    kind: str,
    lowercase: bool,
    strip_accents: bool | None,
    language: str,
    shards: list[dict[str, Any]],
    readings: tuple[list[dict[str, Any]], list[str]],
    extension: dict[str, Any] | None,
    filtered: list[dict[str, Any]],
    evaluation: list[dict[str, Any]],
    old_card: dict[str, Any],
) -> None:
    """Write card.json and card.md.

    `hashes` has {path: SHA-256} of each new source's files, `readings` the result of `finish.ReadingCounter`,
    `extension` the entries about words added to the vocabulary, `filtered` and `evaluation` the entries of filters and
    of evaluation sets. If sources were added to a corpus, `old_card` is its card; its sources come first in `sources`,
    and are not in `hashes`.
    """
    old_sources = old_card.get("sources", [])
    totals = {key: sum(source[key] for source in sources) for key in _SUMMED_KEYS} | _lost_entry(sources)
    totals["unknown_rate"] = totals["unknown_tokens"] / max(totals["tokens"], 1)  # pyright: ignore[reportArgumentType]
    totals["shards"] = len(shards)
    casing = {"lowercase": lowercase}
    if strip_accents not in (None, lowercase):
        casing["strip_accents"] = bool(strip_accents)
    source_entries = [{**entry, **source} for entry, source in zip(old_sources, sources, strict=False)]
    source_entries += map(_with_files, sources[len(old_sources) :], hashes)
    faults = [*old_card.get("problems", []), *problems]
    card = {
        "vocabulary": {"size": vocabulary_size, **casing, **_kind_entry(kind), **(extension or {})},
        "language": language,
        "totals": totals,
        "sources": source_entries,
        "problems": [{**problem, "path": display_path(problem["path"])} for problem in faults],
    }
    for key, value in zip(("readings", "phases"), readings, strict=True):
        if value:
            card[key] = value
    if filtered:
        card["filters"] = filtered
        totals["filtered"] = sum(entry["documents"] for entry in filtered)
    if evaluation:
        card["evaluation_sets"] = evaluation
    write_json(folder / "card.json", card)
    with atomic_open(folder / "card.md", "w") as file:
        file.write(_to_markdown(card))


def _lost_entry(sources: list[dict[str, Any]]) -> dict[str, int]:
    """Return an entry on the training documents dropped as copies of held-out text; {} if there are none."""
    lost = sum(source.get("lost_to_held_out", 0) for source in sources)
    return {"lost_to_held_out": lost} if lost else {}


def _with_files(source: dict[str, Any], hashes: dict[str, str]) -> dict[str, Any]:
    """Return a source's entry, extended by the number of its files and the hashes of the first ones."""
    listed = list(hashes.items())[:_MAX_LISTED_FILES]
    return {**source, "files": len(hashes), "file_hashes": {display_path(path): digest for path, digest in listed}}


_NO_WORDS_ADDED = " (no words added: none has several tokens and occurs at least three times)"
_KIND_NAMES = {"wordpiece": "WordPiece", "byte_bpe": "Byte-level BPE", "released": "Released"}


def _kind_entry(kind: str) -> dict[str, str]:
    """Return the card's entry for the kind of vocabulary; {} for WordPiece."""
    return {} if kind == "wordpiece" else {"kind": kind}


def summary_line(folder: Path, outcome: str) -> str:
    """Summarize a prepared corpus in one line."""
    manifest = read_manifest(folder)
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    totals = card["totals"]
    faults = sum(problem["count"] for problem in card["problems"])
    vocabulary = f"vocabulary {manifest['vocabulary_size']:,}"
    if "added" in card["vocabulary"]:
        added, saved = card["vocabulary"]["added"], card["vocabulary"]["saved_share"]
        vocabulary += f" ({added:,} words added, {saved:.1%} fewer tokens)" if added else _NO_WORDS_ADDED
    line = (
        f"{display_path(folder)}: {outcome}: {counted(totals['documents'], 'document')} "
        f"({totals['validation_documents']:,} held out, {counted(totals['duplicates'], 'duplicate')} and "
        f"{totals['too_short']:,} too short left out"
        f"{_if_any(', {:,} dropped by filters', totals, 'filtered')}"
        f"{_if_any(', {:,} of them copies of held-out text', totals, 'lost_to_held_out')}), "
        f"{counted(totals['sentences'], 'sentence')}, {totals['tokens']:,} tokens in "
        f"{counted(totals['shards'], 'shard')}, {vocabulary}, unknown {100 * totals['unknown_rate']:.3f} %."
    )
    line += "".join(_hints(card))
    if not faults:
        return line
    return f"{line} {counted(faults, 'fault')} in the input: {first_faults(card['problems'])}. See {folder}/card.md."


def _hints(card: dict[str, Any]) -> Iterator[str]:
    """Yield warnings about sources without remaining documents, and settings to change if much of the text is lost."""
    for index, source in enumerate(card["sources"]):
        if source["documents_read"] and not source["documents"]:
            filtered = sum(entry["by_source"][index] for entry in card.get("filters", []))
            yield (
                f" {source['name']}: none of its {counted(source['documents_read'], 'document')} is left "
                f"({counted(source['duplicates'], 'duplicate')}, {source['too_short']:,} too short, {filtered:,} "
                f"dropped by filters){', so it is not evaluated' if source.get('held_out') else ''}."
            )
        left_out = source.get("left_out")
        if left_out and left_out["characters"] > MAX_LEFT_OUT * left_out["read_characters"]:
            share = left_out["characters"] / left_out["read_characters"]
            yield (
                f" {source['name']}: {share:.1%} of its text was left out as headings "
                f"({counted(left_out['paragraphs'], 'paragraph')}). If they are text, give it as another kind, such as "
                "sentences or jsonl."
            )
    for entry in card.get("evaluation_sets", []):
        if too_short := entry.get("too_short"):  # cards of older versions lack it
            searchable = "none" if too_short == entry["texts"] else f"{entry['texts'] - too_short:,}"
            yield (
                f" Evaluation set {entry['name']}: {searchable} of its {counted(entry['texts'], 'text')} can be "
                f"searched for; {too_short:,} have fewer than {MIN_TERMS} words."
            )
    if card["totals"]["unknown_rate"] > _MAX_UNKNOWN:
        vocabulary = card["vocabulary"]
        hint = ", strip_accents: false" if vocabulary["lowercase"] and vocabulary.get("strip_accents") is None else ""
        yield (
            " Too many tokens are [UNK]: set corpus.vocabulary.kind: byte_bpe, which has none, a "
            f"larger corpus.vocabulary.size{hint}, or a vocabulary of this language."
        )


def _if_any(wording: str, totals: dict[str, Any], key: str) -> str:
    """Return `wording` with the total inserted; "" if the total is 0 or missing."""
    return wording.format(totals[key]) if totals.get(key) else ""


def _to_markdown(card: dict[str, Any]) -> str:
    lines = [
        "# Corpus card",
        "",
        *_overview(card),
        "",
        *_source_section(card["sources"]),
        *reading_lines(card.get("readings", []), card.get("phases", [])),
        *skipped_lines(card["sources"]),
        *filter_lines(card.get("filters", []), card["sources"]),
        *evaluation_lines(card.get("evaluation_sets", [])),
        *_length_section("Tokens per document", card["sources"], "document_lengths"),
        *_length_section("Tokens per sentence", card["sources"], "sentence_lengths"),
        *_fault_section(card["problems"]),
        *_file_section(card["sources"]),
    ]
    return "\n".join(lines)


def _overview(card: dict[str, Any]) -> list[str]:
    totals = card["totals"]
    casing = "uncased" if card["vocabulary"]["lowercase"] else "cased"
    if "strip_accents" in card["vocabulary"]:
        casing += ", without accents" if card["vocabulary"]["strip_accents"] else ", with accents"
    kind = _KIND_NAMES[card["vocabulary"].get("kind", "wordpiece")]
    return [
        f"{totals['documents']:,} documents, {totals['sentences']:,} sentences, {totals['words']:,} words, "
        f"{totals['tokens']:,} tokens ({totals['tokens'] / max(totals['words'], 1):.3f} per word), "
        f"{totals['text_bytes'] / 1e6:,.1f} MB of text.",
        f"{kind} vocabulary of {card['vocabulary']['size']:,} entries, {casing}; unknown tokens: "
        f"{totals['unknown_tokens']:,} ({100 * totals['unknown_rate']:.4f} %). Language of the sentence splitter: "
        f"{card['language']}.",
        f"Read {totals['documents_read']:,} documents; left out {totals['duplicates']:,} exact duplicates and "
        f"{totals['too_short']:,} that are too short{_if_any(', and {:,} that filters drop', totals, 'filtered')}"
        f"{_if_any('; {:,} of them are copies of held-out text', totals, 'lost_to_held_out')}; held out "
        f"{totals['validation_documents']:,} for validation.",
        *_hints(card),
    ]


def _source_section(sources: list[dict[str, Any]]) -> list[str]:
    count_keys = ("documents", "duplicates", "too_short", "sentences", "words", "tokens")
    titles = ("name", "kind", "license", "weight", "files", "input MB", *count_keys, "unknown tokens")
    rows = [
        table_row(
            *(source[key] for key in ("name", "kind", "license", "weight")),
            f"{source['files']:,}",
            f"{source['input_bytes'] / 1e6:,.1f}",
            *(f"{source[key]:,}" for key in count_keys),
            f"{100 * source['unknown_tokens'] / max(source['tokens'], 1):.4f} %",
        )
        for source in sources
    ]
    header = [table_row(*(title.replace("_", " ") for title in titles)), table_row(*["---"] * 4, *["---:"] * 9)]
    return ["## Sources", "", *header, *rows, ""]


def _file_section(sources: list[dict[str, Any]]) -> list[str]:
    lines = ["## Files", ""]
    for source in sources:
        revision = f", revision {source['revision']}" if source["revision"] else ""
        files = counted(source["files"], "file")
        lines += [f"{source['name']}{revision}: {files}, contents sha256 {source['content']}", ""]
        lines += [f"- `{portable_path(path)}` sha256 {digest}" for path, digest in source["file_hashes"].items()]
        if source["files"] > _MAX_LISTED_FILES:
            lines.append(f"- and {source['files'] - _MAX_LISTED_FILES:,} more")
        lines.append("")
    return lines


def portable_path(path: str) -> str:
    """Shorten folders that differ between machines in a path: working directory, home, Python installation."""
    if not Path(path).is_absolute():
        return path
    python = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    short_names = [(Path.cwd(), Path()), *((root, Path(root.name)) for root in python), (Path.home(), Path("~"))]
    for root, short_name in short_names:
        if Path(path).is_relative_to(root):
            return str(short_name / Path(path).relative_to(root))
    return path


def _length_section(title: str, sources: list[dict[str, Any]], key: str) -> list[str]:
    bins = sorted({name for source in sources for name in source[key]}, key=lambda name: int(name.split("-")[0]))
    rows = [table_row(name, *(f"{source[key].get(name, 0):,}" for source in sources)) for name in bins]
    header = [table_row("tokens", *(source["name"] for source in sources)), table_row("---", *["---:"] * len(sources))]
    return [f"## {title}", "", *header, *rows, ""]


def _fault_section(problems: list[dict[str, Any]]) -> list[str]:
    if not problems:
        return []
    rows = [
        table_row(portable_path(problem["path"]), problem["fault"], f"{problem['count']:,}", problem["first"])
        for problem in problems[:_MAX_LISTED_PROBLEMS]
    ]
    unlisted = len(problems) - _MAX_LISTED_PROBLEMS
    more = [f"and {unlisted:,} more, see card.json"] if unlisted > 0 else []
    header = [table_row("path", "fault", "count", "first location"), table_row("---", "---", "---:", "---")]
    return ["## Faults in the input", "", *header, *rows, *more, ""]
