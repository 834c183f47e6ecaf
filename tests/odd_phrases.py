"""Counts phrases that are not standard English in the product's comments, docstrings and strings.

`python -m tests.odd_phrases [NAME]` lists them. `tests/house.yaml` has the limits.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

# Regular expressions by name. Docstrings and constants are checked separately.
PROSE = {
    "is_no": r"(?<!there )(?<!There )\b(?:is|are|was|were) no (?!longer\b|more\b)\w",
    "those": r"\b(?:those|that) (?:of|that|in|which|to|with|on|at|from)\b|\bthose\b",
    "texts": r"\ba text\b|\btexts\b",
    "begins": r"\b(?:begins|goes on|go on|ends)\b",
    "newest": r"\b[Nn]ewest\b",
    "own": r"\bof (?:its|their|his|our|your) own\b|\b(?:its|their|an|one's) own\b",
}
NAMES = re.compile(r"(?:^|_)(?:MOST|LEAST|FEWEST|NEWEST)(?:_|$)")
DOCSTRINGS = re.compile(r"(?:What|Whether|How)\b")


def count(files: Iterable[Path]) -> dict[str, int]:
    """Return the number of matches of each phrase, by the name of its limit."""
    found = Counter(name for file in files for name, _, _ in odd_phrases(file))
    return {f"odd_{name}": found[name] for name in ("docstrings", "names", *PROSE)}


def odd_phrases(file: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (name, line, phrase with context) of each phrase."""
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.alias):
            name = node.id if isinstance(node, ast.Name) else node.name
            if NAMES.search(name):
                yield "names", node.lineno, name
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if DOCSTRINGS.match(text):
                yield "docstrings", getattr(node, "lineno", 1), text.split("\n")[0]
    for line, text in _prose(source, tree):
        joined = re.sub(r"\s+", " ", text)
        for name, pattern in PROSE.items():
            for found in re.finditer(pattern, joined):
                yield name, line, joined[max(0, found.start() - 40) : found.end() + 40]


def _prose(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) of strings and of blocks of comments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    comment, first, last = "", 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1:
            yield first, comment
            comment, first = "", token.start[0]
        comment, last = f"{comment} {token.string.lstrip('# ')}", token.start[0]
    yield first, comment


if __name__ == "__main__":
    from tests.house import PRODUCT, ROOT, files_of

    for path in files_of(PRODUCT):
        for name, line, phrase in odd_phrases(path):
            if name in (sys.argv[1:] or [name]):
                print(f"{path.relative_to(ROOT)}:{line}: {name}: {phrase}")
