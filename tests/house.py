"""Measures code size and complexity, limited by `tests/house.yaml`. `python -m tests.house` prints values and limits.

`python -m tests.house COVERAGE` prints the branch coverage of each component, from a report of
`coverage json` (`[tool.coverage]` in pyproject.toml).
"""

import argparse
import ast
import functools
import itertools
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import yaml

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("cluster", "finetune", "pretrain")
LONG_FILE = 500  # lines
# Words that only objectives other than masked tokens use, and where they are allowed: in the objectives, in their
# settings and checks, and in the layouts of released models, such as DistilBERT.
OBJECTIVES = re.compile(r"electra|replaced.?tokens|\brtd|discriminator|distil(?!bert)|\bteacher", re.IGNORECASE)
THEIR_PLACES = ("pretrain/objectives/", "pretrain/config/", "pretrain/checkpoint/layouts/")
# Documented names of the standard library.
DOCUMENTED = {"_exit", "_current_frames", "_typeshed", "_replace", "_asdict", "_fields"}
LIBRARY = re.compile(r"(torch|dist|ray|deepspeed|fsspec|wandb)\.(\w+\.)*_[A-Za-z]")
KERNELS = f"{ROOT / 'pretrain' / 'model' / 'kernels'}/"
WORD_LIST = "finetune/scores/common_words.txt"  # data
AT_LEAST = ("test_asserts",)  # values whose limits are minima
_NOT_CODE = frozenset(
    {tokenize.COMMENT, tokenize.STRING, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    | {tokenize.ENCODING, tokenize.ENDMARKER}
)


def limits() -> dict[str, float]:
    """Return the committed limits, by name."""
    return yaml.safe_load((ROOT / "tests" / "house.yaml").read_text(encoding="utf-8"))


def weight() -> dict[str, float]:
    """Return the current values, by the names of the limits."""
    from cluster.manifests.settings import KubeRaySettings, SlurmSettings
    from finetune.training.config import FinetuneConfig
    from pretrain.config import PretrainConfig
    from tests.odd_phrases import count
    from tests.test_layers import MAY_IMPORT

    product, tests = files_of(PRODUCT), files_of(("tests",))
    lines, tokens = sum(map(line_count, product)), sum(map(code_tokens, product))
    figures = {
        "product_lines": lines + sum(map(line_count, _tracked("pretrain/*.?pp"))),
        "product_lines_of_all_files": sum(map(line_count, _product_files())),
        "product_code_tokens": tokens,
        "product_code_tokens_per_line": round(tokens / lines, 2),
        "test_lines": sum(map(line_count, tests)),
        "test_code_tokens": sum(map(code_tokens, tests)),
        "test_asserts": sum(map(_asserts, tests)),
        "private_names_in_tests": len(private_names_in_tests()),
        "settings": len(_settings(PretrainConfig, FinetuneConfig)),
        "place_settings": len(_settings(KubeRaySettings, SlurmSettings)),
        **_command_line(),
        "components": len(MAY_IMPORT),
        "permitted_imports": sum(len(components.split()) for components in MAY_IMPORT.values()),
        "files_that_know_an_objective": len(files_that_know_an_objective()),
        "files_over_500_lines": sum(line_count(file) > LONG_FILE for file in product),
        "longest_function": max(length for file in product for length in function_lengths(file)),
        "bert_forward_files": len(forward := _forward_pass()),
        "bert_forward_lines": sum(map(line_count, forward)),
        "engine_public_methods": _public_methods(ROOT / "pretrain/training/engine/engine.py", "Engine"),
        "private_names": len(private_names()) + len(unlisted_private_names()),
        "readme_lines": line_count(ROOT / "README.md"),
        "docs_kilobytes": sum(file.stat().st_size for file in _pages()) // 1000,
        "decisions": len([file for file in _pages() if file.parent.name == "decisions" and file.name[0].isdigit()]),
        "changelog_kilobytes": (ROOT / "CHANGELOG.md").stat().st_size // 1000,
        **count(product),
    }
    _nodes.cache_clear()  # frees 0.4 GB
    return figures


def branch_coverage(report: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (covered, total) branches of each component, from a report of `coverage json`."""
    reached: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for name, file in report["files"].items():
        component = "/".join(Path(name).parts[:2])
        reached[component] += file["summary"]["covered_branches"]
        total[component] += file["summary"]["num_branches"]
    return {component: (reached[component], total[component]) for component in sorted(total)}


def files_that_know_an_objective() -> list[str]:
    """Return the product files outside `THEIR_PLACES` that match `OBJECTIVES`, including comments and templates."""
    files = [file for file in _tracked("*.py", "*.j2") if file.relative_to(ROOT).parts[0] in PRODUCT]
    names = {file.relative_to(ROOT).as_posix(): file for file in files}
    return [
        name
        for name, file in names.items()
        if not name.startswith(THEIR_PLACES) and OBJECTIVES.search(file.read_text())
    ]


def private_names_in_tests() -> list[str]:
    """Return `file:line: name` of every use in tests of a private name that the product defines.

    Imports, attributes, and strings with a name after a dot or in `setattr` are counted; so are private names of other
    packages, such as `torch._dynamo`, if the product defines the same name.
    """
    names = {name for file in files_of(PRODUCT) for name in _defined(file) if re.match(r"_[A-Za-z]", name)}
    names -= {"_replace", "_asdict"}  # documented methods of NamedTuple
    found = []
    for file in files_of(("tests",)):
        used = [(getattr(node, "lineno", 0), name) for node in _nodes(file) for name in _used(node)]
        found += [f"{file.relative_to(ROOT)}:{line}: {name}" for line, name in used if name in names]
    return found


def private_names() -> list[tuple[str, str]]:
    """Return (owner, name) of other libraries' private names in the table of decision 0158.

    An owner is a module or module:Class. A name that ends in * counts once.
    """
    page = (ROOT / "docs/decisions/0158-private-names.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([\w.:]+)` \| `(\w+\*?)` \| .+ \|$", page, re.MULTILINE)


def unlisted_private_names() -> list[str]:
    """Return `file:line: name` of every private name of another library that the product uses but the table lacks."""
    listed = re.compile("|".join(name.replace("*", r"\w*") for _, name in private_names()))
    product = {name for file in files_of(PRODUCT) for name in _defined(file)} | DOCUMENTED
    found = []
    for file in files_of(PRODUCT):
        inner: set[int] = set()
        for node in _nodes(file):
            for name in [] if id(node) in inner else _dotted(node):
                parts = re.findall(r"\w+", name)
                private = {part for part in parts if re.match(r"_[A-Za-z]", part)} - product
                if (private or LIBRARY.match(name)) and not any(map(listed.fullmatch, parts)):
                    found.append(f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name}")
            inner |= {id(node.value)} if isinstance(node, ast.Attribute) else set()
    return found


def _dotted(node: Any) -> list[str]:
    """Return dotted names in a node, and names of keyword arguments."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{one.name}" for one in node.names]
    if isinstance(node, ast.Import):
        return [one.name for one in node.names]
    if isinstance(node, ast.keyword) and node.arg:
        return [node.arg]
    return [ast.unparse(node)] if isinstance(node, ast.Attribute) else []


def _used(node: Any) -> list[str]:
    """Return names from other modules or objects in a node."""
    if isinstance(node, ast.ImportFrom):
        return [one.name for one in node.names]
    if isinstance(node, ast.Attribute):
        return [] if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else [node.attr]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value.rpartition(".")[2]] if re.fullmatch(r"[\w.]+\.\w+", node.value) else []
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")).endswith("attr"):
        return [one.value for one in node.args[1:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return []


def _defined(file: Path) -> Iterator[str]:
    """Yield the names of functions, classes, variables and attributes of `self` that a file defines."""
    for node in _nodes(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def _tracked(*patterns: str) -> list[Path]:
    """Return the files that git tracks; in an unpacked archive, without git, all files."""
    listed = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode or not listed.stdout:
        return [file for pattern in patterns for file in ROOT.glob(f"**/{pattern}") if ".venv" not in file.parts]
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


@functools.cache
def _nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def files_of(folders: tuple[str, ...]) -> list[Path]:
    return [file for file in _tracked("*.py") if file.relative_to(ROOT).parts[0] in folders]


def _pages() -> list[Path]:
    """Return the hand-written pages of docs/."""
    pages = [file for file in _tracked("*.md") if file.relative_to(ROOT).parts[:1] == ("docs",)]
    return [page for page in pages if page.relative_to(ROOT).parts[1] != "reference"]


def _product_files() -> list[Path]:
    """Return all files of the product's packages: code, templates, scripts, JSON and YAML."""
    return [file for file in _tracked(*(f"{folder}/*" for folder in PRODUCT)) if file != ROOT / WORD_LIST]


def line_count(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def code_tokens(file: Path) -> int:
    """Count names, numbers and operators; strings and f-strings with their contents count 0, in any Python."""
    start, end = (getattr(tokenize, f"FSTRING_{name}", None) for name in ("START", "END"))  # of Python 3.12
    count = depth = 0
    with file.open("rb") as lines:
        for token in tokenize.tokenize(lines.readline):
            depth += token.type == start
            count += not depth and token.type not in _NOT_CODE
            depth -= token.type == end
    return count


def _asserts(file: Path) -> int:
    return sum(isinstance(node, ast.Assert) for node in _nodes(file))


def _command_line() -> dict[str, int]:
    from finetune.cli import build_parsers

    _, commands = build_parsers()
    actions = itertools.chain.from_iterable(parser._actions for parser in commands.values())
    options = [one for one in actions if one.option_strings and not isinstance(one, argparse._HelpAction)]
    return {"commands": len(commands), "command_options": len(options)}


def function_lengths(file: Path) -> Iterator[int]:
    """Yield the number of lines of each function, including docstring and comments."""
    for node in _nodes(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def _forward_pass() -> list[Path]:
    """Return the files that BERT's forward pass and loss enter, in order, without kernels and what they call."""
    from pretrain.config import ModelConfig
    from pretrain.model.heads import PretrainingModel
    from tests.batches_by_hand import make_batch

    shape = ModelConfig(size="custom", layers=2, hidden=32, heads=4, max_positions=32)
    model, batch = PretrainingModel(shape, vocabulary_size=101), make_batch((7, 20))
    found: dict[str, None] = {}
    kernels, room = 0, f"{ROOT / 'pretrain'}/"  # number of kernels on the call stack; root of the files to note

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal kernels
        file = frame.f_code.co_filename
        if not file.startswith(room) or event not in ("call", "return"):
            return
        if file.startswith(KERNELS):
            kernels += 1 if event == "call" else -1
        elif not kernels:
            found[file] = None

    sys.setprofile(note)
    try:
        model(batch)
    finally:
        sys.setprofile(None)
    return list(map(Path, found))


def _public_methods(file: Path, name: str) -> int:
    """Return the number of public methods of a class, including properties."""
    (owner,) = (
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    members = [node.name for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum(not member.startswith("_") for member in members)


def _settings(*configs: type[Any]) -> set[tuple[str, str]]:
    """Return (section, setting) of each setting of these configs. A section in several places counts once."""
    found: set[tuple[str, str]] = set()
    waiting = list(configs)
    seen: set[type[Any]] = set()
    while waiting:
        section = waiting.pop()
        if section in seen:
            continue
        seen.add(section)
        for name, field in section.model_fields.items():
            inner = list(_sections(field.annotation))
            waiting += inner
            if not inner:
                owner = next(one for one in reversed(section.__mro__) if name in getattr(one, "model_fields", {}))
                found.add((owner.__name__, name))
    return found


def _sections(annotation: Any) -> Iterator[type[Any]]:
    """Yield the sections in an annotation such as `tuple[PhaseConfig, ...] | None`."""
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for name, (reached, branches) in branch_coverage(json.loads(Path(sys.argv[1]).read_text())).items():
            print(f"{name:24} {reached:>6,} of {branches:>6,} branches, {reached / max(branches, 1):.1%}")
    else:
        allowed = limits()
        for key, value in weight().items():
            print(f"{key:30} {value:>10,}   {'at least' if key in AT_LEAST else 'limit'} {allowed.get(key, 0):>10,}")
