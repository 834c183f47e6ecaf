"""Parses YAML 1.2 to values and their line numbers, and writes YAML."""

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pretrain.common.errors import InputError, printable
from pretrain.common.sections import Keys
from pretrain.common.setting_errors import format_value

_MAX_BYTES = 1 << 20  # maximum size of a config, far more than the settings of any run need


def read_text(path: Path) -> str:
    """Return the content of a YAML file. Raises `InputError` if it cannot be read, is too large or is not UTF-8."""
    try:
        if path.stat().st_size > _MAX_BYTES:  # for example a training file, by mistake
            raise InputError(f"{path}: more than {_MAX_BYTES >> 20} MiB. Use a YAML file with settings.")
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}). Use a YAML file, or a name in `configs`."
        ) from None


def parse(text: str, where: str) -> tuple[dict[Keys, int], Any]:
    """Parse one YAML document. Returns ({path of each item: its 1-based line}, in file order, and the values).

    Args:
        text: the YAML.
        where: the file of the text, or the override `--set ...`; error messages start with it.

    Raises:
        InputError: the text is not valid YAML; the message has the line.
    """
    in_file = not where.startswith("--set")
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        values = loader.construct_document(root) if root is not None else None
        return dict(_lines(root)), values
    except RecursionError:
        reason = "nested too deeply, or an alias (*) refers to itself"
        raise InputError(f"{where}: not valid YAML: {reason}.") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if in_file and error.problem_mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {error.problem or error.context}.") from None
    except yaml.reader.ReaderError as error:
        line = f":{text.count(chr(10), 0, error.position) + 1}" if in_file else ""
        character = printable(text[error.position])
        raise InputError(f"{where}{line}: not valid YAML: the character {character} is not allowed here.") from None


def _lines(node: yaml.Node | None, path: Keys = ()) -> Iterator[tuple[Keys, int]]:
    """Yield (path, 1-based line) of every item below `node`, which is at `path`."""
    items: list[Any] = []
    if isinstance(node, yaml.MappingNode):
        items = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(index, value, value) for index, value in enumerate(node.value)]
    for key, first_node, value in items:
        yield (*path, key), first_node.start_mark.line + 1
        yield from _lines(value, (*path, key))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2; PyYAML itself reads 1e-4 as a string and `off` as false."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}
    # The types of YAML 1.2's core schema; the key None refuses all others, such as timestamps.
    yaml_constructors: typing.ClassVar[dict] = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError):  # a tag such as !!int in front of a value of another type
            type_name = node.tag.rpartition(":")[2]
            raise _problem(f"{format_value(node.value)} is not of type {type_name}", node.start_mark) from None

    def construct_string(self, node: yaml.ScalarNode) -> str:
        """Return a string. JSON escapes a character beyond 16 bits as two surrogates, which are joined here."""
        return node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        """Return an integer, decimal or hexadecimal. PyYAML would read a leading 0 as octal."""
        if len(node.value) <= _MAX_DIGITS:
            number = int(node.value, 16 if "x" in node.value else 10)
            if -(2**63) <= number < 2**63:
                return number
        raise _problem(f"{format_value(node.value)} does not fit into 64 bits", node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise _problem(f"{name} is set twice, first on line {seen[name]}", key.start_mark)
            seen[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _problem(text: str, mark: yaml.Mark | None) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)


class Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper. It quotes text that YAML 1.1 or 1.2 would read as something else."""


_DIGITS = "[0-9]+(?:_[0-9]+)*"
# (tag, pattern, first characters) of the scalars of YAML 1.2.
_SCALARS: tuple[tuple[str, str, list[str]], ...] = (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", rf"[-+]?(0x[0-9a-fA-F]+|{_DIGITS})", list("-+0123456789")),
    (
        "float",
        rf"[-+]?(\.[0-9]+|{_DIGITS}(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
)
for _tag, _pattern, _first_characters in _SCALARS:
    for _class in (_Loader, Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first_characters)
_MAX_DIGITS = 100  # maximum length of an integer; Python refuses to parse 5,000 digits
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_string)
