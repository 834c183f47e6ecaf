"""Extracts three labeled sets from the docstrings in the demo's corpus; nothing is downloaded or annotated by hand.

packages  classification: the package that a documentation passage comes from
names     entities: code names in prose, which the author put in backticks (the backticks are removed)
returns   questions: what a function returns; the answer is a phrase of its docstring
"""

import ast
import contextlib
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.common.files import atomic_open
from pretrain.corpus.sources.docstrings import installed_modules, running_text, syntax_tree

_NUM_PACKAGES = 6
# Maximum number of training examples of each set. Pretraining matters most with few labels: with 1,600, even a model
# without pretraining recognizes a package by its words.
_MAX_TRAIN = {"packages": 400, "names": 1600, "returns": 1600}
_MAX_DEV = 400  # maximum number of held-out examples of each set
_MAX_MODULES = 250  # maximum number of modules per package: enough text, and read in seconds
_DEV_SHARE = 0.2  # share of modules to hold out
_FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED_NODES = (ast.Module, ast.ClassDef, *_FUNCTION_NODES)
_STATEMENT_FIELDS = ("body", "handlers", "orelse", "finalbody", "cases")  # fields that contain statements
_CODE_NAME = re.compile(r"``?(?P<code>[A-Za-z_][\w.]*)(?:\(\))?``?")
_RETURN_PHRASE = re.compile(
    r"\breturns? (?P<what>(?:an?|the|true|whether|all|each|number)\b[^.;:()\n]{3,80})[.;]", re.IGNORECASE
)


@dataclass(frozen=True)
class _Docstring:
    package: str
    module: str  # path of the module's file
    name: str  # name of the function; empty for a module or class
    text: str


def write_sets(folder: Path) -> dict[str, dict[str, int]]:
    """Write {packages,names,returns}-{train,dev}.jsonl; return {set: {split: number of examples}}.

    Modules are split by a hash of their path, so the two splits have no module in common.
    """
    extractors = {"packages": _package_records, "names": _name_records, "returns": _return_records}
    docstrings = list(_read_docstrings())
    counts: dict[str, dict[str, int]] = {}
    for name, extract in extractors.items():
        records = extract(docstrings)
        counts[name] = {
            split: _write_split(folder / f"{name}-{split}.jsonl", records, split == "dev", limit)
            for split, limit in (("train", _MAX_TRAIN[name]), ("dev", _MAX_DEV))
        }
    return counts


def _write_split(path: Path, records: list[dict[str, Any]], held_out: bool, limit: int) -> int:
    """Write at most `limit` records of one split, in pseudo-random order, and return their number."""
    chosen = sorted(
        (record for record in records if _is_held_out(record["document"]) == held_out),
        key=lambda record: _hash(json.dumps(record, sort_keys=True)),
    )[:limit]
    with atomic_open(path, "w") as file:
        for record in chosen:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return len(chosen)


def _package_records(docstrings: list[_Docstring]) -> list[dict[str, Any]]:
    """Extract passages of documentation, the same number from each package."""
    passages: dict[str, dict[str, str]] = defaultdict(dict)
    for docstring in docstrings:
        for paragraph in running_text(docstring.text):
            if len(paragraph.split()) >= 12:
                passages[docstring.package].setdefault(paragraph, docstring.module)
    num_passages = min(map(len, passages.values()), default=0)
    return [
        {"text": text, "label": package, "document": module}
        for package in sorted(passages)
        for text, module in sorted(passages[package].items(), key=lambda item: _hash(item[0]))[:num_passages]
    ]


def _name_records(docstrings: list[_Docstring]) -> list[dict[str, Any]]:
    """Extract paragraphs with one to six code names in backticks."""
    records: dict[str, dict[str, Any]] = {}
    for docstring in docstrings:
        for paragraph in docstring.text.split("\n\n"):
            line = " ".join(paragraph.split())
            if not 40 <= len(line) <= 400 or line.count("`") > 24 or ">>>" in line or "::" in line or ":`" in line:
                continue
            text, entities = _without_backticks(line)
            if 1 <= len(entities) <= 6 and "`" not in text:
                records.setdefault(text, {"text": text, "entities": entities, "document": docstring.module})
    return list(records.values())


def _without_backticks(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text without the backticks of code names, and these names as entities."""
    plain_text, end, entities = "", 0, []
    for match in _CODE_NAME.finditer(text):
        plain_text += text[end : match.start()]
        entities.append({"start": len(plain_text), "end": len(plain_text) + len(match["code"]), "type": "CODE"})
        plain_text += match["code"]
        end = match.end()
    return plain_text + text[end:], entities


def _return_records(docstrings: list[_Docstring]) -> list[dict[str, Any]]:
    """Extract a question about each function whose docstring describes the return value in one phrase."""
    records: dict[str, dict[str, Any]] = {}
    for docstring in docstrings:
        if not docstring.name or docstring.name.startswith("_"):
            continue
        context = " ".join(" ".join(running_text(docstring.text)).split()[:120])
        match = _RETURN_PHRASE.search(context)
        if match is None or len(match["what"].split()) > 14:
            continue
        records.setdefault(
            context,
            {
                "id": _hash(docstring.module + docstring.name)[:12],
                "question": f"What does {docstring.name.replace('_', ' ')} return?",
                "context": context,
                "answers": {"text": [match["what"]], "answer_start": [match.start("what")]},
                "document": docstring.module,
            },
        )
    return list({record["id"]: record for record in records.values()}.values())


def _read_docstrings() -> Iterator[_Docstring]:
    """Yield the docstrings of some modules of each of the largest packages; the standard library counts as one."""
    by_package: dict[str, list[str]] = defaultdict(list)
    for path in installed_modules():
        by_package[_package(path)].append(path)
    packages = sorted(by_package, key=lambda package: (-len(by_package[package]), package))[:_NUM_PACKAGES]
    for path in (path for package in packages for path in sorted(by_package[package], key=_hash)[:_MAX_MODULES]):
        for name, text in named_docstrings(Path(path).read_bytes()):
            yield _Docstring(_package(path), path, name, text)


def named_docstrings(source: bytes) -> list[tuple[str, str]]:
    """Return (function name or "", docstring) of a module, its classes and functions; [] if it does not parse."""
    docstrings: list[tuple[str, str]] = []
    if b'"""' not in source:
        return docstrings
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError), syntax_tree(source) as tree:
        nodes: list[ast.AST] = [tree]
        for node in nodes:  # grows during the loop
            if isinstance(node, _DOCUMENTED_NODES) and (text := ast.get_docstring(node)):
                docstrings.append((node.name if isinstance(node, _FUNCTION_NODES) else "", text))
            # Like `ast.walk`, but without expressions, which have no docstrings.
            nodes += [statement for name in _STATEMENT_FIELDS for statement in getattr(node, name, ())]
    return docstrings


def _package(path: str) -> str:
    """Return the top-level package of a file, or `python` for the standard library."""
    parts = Path(path).parts
    return parts[parts.index("site-packages") + 1].removesuffix(".py") if "site-packages" in parts else "python"


def _is_held_out(document: str) -> bool:
    return int(_hash(Path(document).name + Path(document).parent.name)[:8], 16) < _DEV_SHARE * 2**32


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
