"""English text from Python and its installed packages: help topics and docstrings, read without importing modules.

A document consists of a module's docstrings in the order of the file, or of a topic of the language reference. Only
prose is kept: no doctests, code, tables, signatures or field lists.
"""

import ast
import contextlib
import gc
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from pretrain.common.addresses import local_path
from pretrain.corpus.inputs import Chunk, Input, Problems, SourceReader, grouped, no_files_error
from pretrain.corpus.listing import files_in

_SKIPPED_FOLDERS = frozenset({"test", "tests", "testing", "idle_test", "__pycache__"})
_MIN_WORDS = 6  # minimum words of a paragraph that is kept
_MIN_TEXT_LINE_WORDS = 4  # a line with fewer words above an indented line is a parameter's name and type
_MIN_PLAIN_SHARE = 0.9  # minimum share of letters, spaces and plain punctuation; code and tables have less
_TOPICS = ("pydoc_data", "topics.py")  # module with the help topics

_ROLE = re.compile(r":[\w:+.-]+:`(~?)\.?([^`<>]+?)(?:\s*<[^`]*>)?`")  # :class:`~a.b.C` shows C
_LINK = re.compile(r"`([^`<>]+?)\s*<[^`<>]*>`__?")
_LITERAL = re.compile(r"``([^`]+)``|`([^`]+)`_{0,2}")
_EMPHASIS = re.compile(r"(?<![\w*])\*{1,2}([^*\s](?:[^*\n]*[^*\s])?)\*{1,2}(?![\w*])")
_MARKDOWN_LINK = re.compile(r"\[([^\][]+)\]\([^)\s]*\)")
_FOOTNOTE = re.compile(r"\s*\[(?:\d+|#\w*|[A-Z]\w+\d{2,4}\w?)\]_")
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_FIELD = re.compile(r":\w[^:`\n]{0,60}:\s+|@\w+\s+")  # :param int x: ...
_BULLET = re.compile(r"(?:[-*+•]|\(?\d{1,2}[.)]|#\.)\s+")
_ARGUMENT = re.compile(r"[*`]*[\w.]+[`]*(?:\s*\([^()]*(?:\([^()]*\)[^()]*)*\))?[`]*\s*(?::|--|–)\s+(?=\S)")
_UNDERLINE = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}")
_CODE = re.compile(r"[=<>{}|\\#@$]|::|\(\)|\w_\w|->|https?:|\w\.\w+\.\w|\w\(\w*")
_SENTENCE_ENDS = (".", "!", "?", ".)", '."', ".'")


class Reader(SourceReader):
    """The prose of Python modules, one document each."""

    suffixes = (".py",)

    def find(self, config_key: str) -> list[Input]:
        return grouped(self._modules(config_key) if self.config.path else map(Path, installed_modules()), config_key)

    def read(self, chunk: Chunk, problems: Problems) -> Iterator[str]:
        return documents(chunk.paths, problems.add)

    def _modules(self, config_key: str) -> list[Path]:
        """Return the files at the config's `path` that are not tests."""
        files = self.find_files(config_key)
        folder = local_path(self.config.path).expanduser()
        root = folder if folder.is_dir() else Path(os.path.commonpath([file.parent for file in files]))
        if modules := [file for file in files if not _is_excluded(file, root)]:
            return modules
        raise no_files_error(self.config, config_key)


def installed_modules() -> list[str]:
    """List the Python files of the standard library and of installed packages, without tests."""
    paths = sysconfig.get_paths()
    roots = sorted({Path(paths[key]) for key in ("stdlib", "purelib", "platlib")})
    files = ((file, root) for root in roots for file in files_in(root) if file.suffix == ".py")
    return list(dict.fromkeys(str(file) for file, root in files if not _is_excluded(file, root)))


def _is_excluded(file: Path, root: Path) -> bool:
    """Return whether a file below `root` is a test or in a site-packages folder.

    The standard library's folder may contain site-packages: either this Python's, which is a separate root, or the
    folder of the Python from which a virtual environment was created, whose packages are not installed in it.
    """
    parts = file.relative_to(root).parts
    return _is_test(parts) or "site-packages" in parts


def _is_test(parts: tuple[str, ...]) -> bool:
    return bool(_SKIPPED_FOLDERS.intersection(parts)) or parts[-1].startswith(("test_", "conftest."))


def documents(paths: tuple[str, ...], report: Callable[[str, str], None]) -> Iterator[str]:
    """Yield the prose of each module, one paragraph per line, without paragraphs that occurred before in `paths`.

    `report(path, fault)` is called for files that cannot be read or parsed.
    """
    seen: set[str] = set()
    for path in paths:
        try:
            source = Path(path).read_bytes()
        except OSError as error:
            report(path, f"cannot be read: {error.strerror}")
            continue
        if b'"""' not in source and b"'''" not in source and not path.endswith(_TOPICS[1]):
            continue
        try:
            with syntax_tree(source) as tree:
                texts = _topics(tree) if Path(path).parts[-2:] == _TOPICS else [list(_docstrings(tree))]
                del tree
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            report(path, f"not valid Python: {type(error).__name__}")
            continue
        for text in texts:
            paragraphs = [p for docstring in text for p in running_text(docstring) if p not in seen]
            paragraphs = list(dict.fromkeys(paragraphs))
            seen.update(paragraphs)
            if paragraphs:
                yield "\n".join(paragraphs)


@contextlib.contextmanager
def syntax_tree(source: bytes) -> Iterator[ast.Module]:
    """Yield the syntax tree of a module. Raises errors like `ast.parse`.

    Garbage collection is disabled in the `with` block: trees have no cycles, and searching for cycles would double the
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in third-party files
            yield ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of the module, its classes and functions, in the order of the file."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring:
                yield docstring
        statements: list[ast.AST] = []
        for name in ("body", "handlers", "orelse", "finalbody"):
            children = getattr(node, name, None)
            if isinstance(children, list):
                statements += children
        pending.extend(reversed(statements))


def _topics(tree: ast.Module) -> list[list[str]]:
    """Return the help topics in the module pydoc_data.topics, each as a list of one string."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return [[topic] for topic in ast.literal_eval(node.value).values()]
    return []


def running_text(docstring: str) -> list[str]:
    """Return the paragraphs of `docstring` that are prose, without reST, Markdown and Google-style markup."""
    prose = []
    for run in _line_runs(inspect.cleandoc(docstring).split("\n")):
        paragraph = _clean(run)
        if _is_prose(paragraph):
            prose.append(paragraph)
    return prose


def _line_runs(lines: list[str]) -> Iterator[str]:
    """Yield the text of each list item, argument and run of equally indented lines, without code and doctests."""
    run: list[str] = []
    indent = code_indent = -1  # lines that are indented more than code_indent are a literal block
    in_fence = in_doctest = False
    for line in [*lines, ""]:
        text = line.strip()
        line_indent = len(line) - len(line.lstrip())
        if text.startswith(("```", "~~~")):
            in_fence = not in_fence
            text = ""
        if text.startswith((">>> ", "... ", "In [")):
            in_doctest = True
        if not text:
            in_doctest = False
        elif code_indent >= 0 and line_indent <= code_indent:
            code_indent = -1
        skip = not text or in_fence or in_doctest or code_indent >= 0 or text.startswith("..")
        is_item = bool(_BULLET.match(text) or _FIELD.match(text))
        is_argument = line_indent != indent and _ARGUMENT.match(text) is not None
        is_below_name = line_indent > indent and len(run) == 1 and len(run[0].split()) < _MIN_TEXT_LINE_WORDS
        if run and (skip or is_item or is_argument or is_below_name or line_indent < indent):
            yield " ".join(run)
            run = []
        if text.startswith("..") or text.endswith("::"):
            code_indent = line_indent
        if skip:
            continue
        if _UNDERLINE.fullmatch(text):
            run = []  # the underlined line is a heading
            continue
        if not run or line_indent > indent:
            indent = line_indent
        run.append(text)


def _clean(run: str) -> str:
    marker = _BULLET.match(run) or _FIELD.match(run)
    text = run[marker.end() :] if marker else run
    text = _ROLE.sub(lambda match: match[2].rpartition(".")[2] if match[1] else match[2], text)
    text = _LINK.sub(r"\1", text)
    text = _LITERAL.sub(lambda match: match[1] or match[2], text)
    text = _MARKDOWN_LINK.sub(r"\1", text)
    text = _FOOTNOTE.sub("", _TAG.sub("", _EMPHASIS.sub(r"\1", text)))
    if text.endswith("::"):
        text = text[:-1]
    argument = _ARGUMENT.match(text)
    if argument and argument.end() < len(text):
        text = text[argument.end() :]
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def _is_prose(paragraph: str) -> bool:
    """Return whether a paragraph looks like sentences: enough words, a final punctuation mark, few signs of code."""
    words = paragraph.split()
    if len(words) < _MIN_WORDS or not paragraph.endswith((*_SENTENCE_ENDS, ":")) or not paragraph[0].isalnum():
        return False
    plain_characters = sum(character.isalpha() or character in " ,.'-" for character in paragraph)
    return plain_characters >= _MIN_PLAIN_SHARE * len(paragraph) and len(_CODE.findall(paragraph)) <= len(words) // 8
