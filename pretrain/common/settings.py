"""YAML files read into frozen pydantic models: line numbers in errors, nearest names, overrides by dotted key."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Generic, TypeGuard, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pretrain.common.errors import InputError, is_control, printable
from pretrain.common.files import check_local
from pretrain.common.secret_names import secret_paths

# Bounds of one YAML text, far above those of any run's settings.
_MOST_BYTES = 1 << 20
_MOST_VALUES = 50_000  # an alias counts as all that it stands for
_MOST_LEVELS = 50  # of sections and lists within each other
# What messages show at most, in characters.
_LONGEST_VALUE = 60
_LONGEST_OVERRIDE = 200


def _local(text: str) -> str:
    check_local(text)
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{text!r} begins with a user that this machine does not know") from None
    return text


LocalPath = Annotated[str, AfterValidator(_local)]
"""A path of the machines that run, relative or absolute; remote addresses are refused."""

SEVERAL_LINES: dict[str, JsonValue] = {"several_lines": True}
"""`Field(json_schema_extra=SEVERAL_LINES)`: text that may hold tabs and line breaks; all other text may not."""

NO_SECRETS: dict[str, JsonValue] = {"no_secrets": True}
"""`Field(json_schema_extra=NO_SECRETS)`: names of others' choosing, such as labels, whose values are public."""


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, descriptions kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


S = TypeVar("S", bound=Section)


def load(path: Path | str, kind: type[S], overrides: Sequence[str] = ()) -> S:
    """The settings in the YAML file `path`, with `key.path=value` overrides applied.

    Values are read as YAML 1.2 reads them (1e-4 is a number, `off` is text) and never converted from one
    type to another. List items are addressed by number: `phases.0.steps=10`.

    Raises:
        InputError: one line per problem, each with the file's line or the override at fault.
    """
    source = _Document(Path(path), kind)
    for override in overrides:
        source.override(override)
    return source.validate()


def read_values(path: Path | str) -> dict[str, Any]:
    """What the YAML file `path` holds, whatever it describes, read as `load` reads it but not checked.

    Raises `InputError` where it cannot be read; a file that holds no section is an empty one.
    """
    values = _parse(_read(Path(path)), str(path))[1]
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def names(path: Path | str) -> set[str]:
    """The names that stand first in the YAML file `path`, whatever it describes; `InputError` where it cannot be read."""
    return set(read_values(path))


def dump(settings: Section, exclude: set[str] | None = None) -> str:
    """Resolved settings, but for the sections in `exclude`, as YAML that `load` reads back to equal ones."""
    values = settings.model_dump(mode="json", exclude=exclude)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def differences(before: Section, after: Section, *, free: Sequence[str]) -> list[str]:
    """Dotted names of settings that differ, with both values; those that match a pattern of `free` may."""
    old, new = dict(_leaves(before.model_dump())), dict(_leaves(after.model_dump()))
    return [
        f"{name} ({old.get(name)} -> {new.get(name)})"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
        and not any(fnmatchcase(name, one) or fnmatchcase(name, f"{one}.*") for one in free)
    ]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything below `value` that is not a section or a list."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else None
    if items is None:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 scalars; PyYAML itself reads 1e-4 as text and `off` as false.

    What it returns can be walked: it is bounded in size and depth with every alias written out, and holds no circle.
    """

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}
    # Those of YAML 1.2's core schema; the key None refuses all others, such as timestamps.
    yaml_constructors: typing.ClassVar[dict] = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0
        self._extents: dict[yaml.Node, tuple[int, int]] = {}  # values and levels of each node that is complete

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark
        self._level += 1
        self._check(len(self._extents), self._level, mark)  # before the recursion goes deeper
        node = super().compose_node(parent, index)
        self._level -= 1
        if node is None:
            return None
        if not is_alias:
            self._extents[node] = self._extent(node)
        elif node not in self._extents:
            raise _problem("an alias stands within what it is an alias of", mark)
        self._check(*self._extents[node], mark)
        return node

    def _check(self, values: int, levels: int, mark: yaml.Mark) -> None:
        if values > _MOST_VALUES:
            raise _problem(f"more than {_MOST_VALUES:,} values, with every alias written out", mark)
        if levels > _MOST_LEVELS:
            raise _problem(f"more than {_MOST_LEVELS} levels of sections and lists", mark)

    def _extent(self, node: yaml.Node) -> tuple[int, int]:
        """(Values, levels) of a node whose children are complete."""
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [one for pair in node.value for one in pair]
        extents = [self._extents[child] for child in children]
        return 1 + sum(values for values, _ in extents), 1 + max((levels for _, levels in extents), default=0)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError):  # a tag such as !!int before what is none
            kind = node.tag.rpartition(":")[2]
            raise _problem(f"{_shown(node.value)} is no {kind}", node.start_mark) from None

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """Text. JSON, which is YAML too, writes a character beyond 16 bits as two escapes: they become one again."""
        return node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        """A whole number in decimal or hexadecimal digits; PyYAML would read a leading 0 as octal."""
        if len(node.value) <= _MOST_DIGITS:
            number = int(node.value, 16 if "x" in node.value else 10)
            if -(2**63) <= number < 2**63:
                return number
        raise _problem(f"{_shown(node.value)} is beyond 64 bits", node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise _problem(f"{name} stands twice, first on line {seen[name]}", key.start_mark)
            seen[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _problem(text: str, mark: yaml.Mark | None) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; quotes text that YAML 1.2 takes for something else, as well as what 1.1 does."""


_DIGITS = "[0-9]+(?:_[0-9]+)*"
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
for _tag, _pattern, _first in _SCALARS:
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)
_MOST_DIGITS = 100  # of a whole number as it is written; Python itself refuses to read 5,000
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_text)

_Keys = tuple[str | int, ...]


class _Document(Generic[S]):
    """One YAML file with the overrides laid over it, which knows where each value came from."""

    def __init__(self, path: Path, kind: type[S]) -> None:
        self.path, self.kind = path, kind
        self.root, self.values = _parse(_read(path), str(path))
        if not isinstance(self.values, dict):
            raise InputError(
                f"{path}: found no settings; expected lines of `key: value`, at least {', '.join(_required(kind))}."
            )
        self.overrides: list[tuple[_Keys, str]] = []

    def override(self, text: str) -> None:
        """Lay `key.path=value` over the file's values."""
        where = f"--set {_cut(printable(text), _LONGEST_OVERRIDE)}"
        name, equals, written = text.partition("=")
        keys = _keys(name.strip())
        if not equals or "" in keys or len(keys) > _MOST_LEVELS:
            raise InputError(f"{where}: expected key.path=value, for example phases.0.steps=10.")
        value = _parse(written, where)[1] if written.strip() else ""
        self.overrides.append((keys, where))
        holder: Any = self.values
        for depth, key in enumerate(keys):
            last = depth == len(keys) - 1
            place = f"{where}: {'.'.join(map(str, keys[:depth])) or self.path}"
            fresh: Any = value if last else [] if isinstance(keys[depth + 1], int) else {}
            holder = _enter(holder, key, fresh, place, replace=last)

    def validate(self) -> S:
        if problems := list(self._control_characters(self.values)):
            raise InputError("\n".join(problems))
        try:
            settings = self.kind.model_validate(_with_tuples(self.values, self.kind), strict=True)
        except ValidationError as error:
            problems = [problem for problem in error.errors(include_url=False) if not _is_echo(problem)]
            problems.sort(key=lambda problem: self.line(problem["loc"]) or 0)
            raise InputError("\n".join(dict.fromkeys(map(self.explain, problems)))) from None
        for path in _secrets(settings):
            where = self.where(path)
            if where.startswith("--set "):
                where = where.partition("=")[0]  # the value is not for the screen
            raise InputError(
                f"{where}: {'.'.join(map(str, path))} looks like a secret, and a config is kept in logs, job records "
                "and checkpoints. Set it in the environment of the machines that train."
            )
        return settings

    def _control_characters(self, value: Any, path: _Keys = ()) -> Iterator[str]:
        """One line for each text in `value` with characters that would leave the line or the quotes it is put into."""
        if isinstance(value, dict):
            for key, item in value.items():
                if found := _controls(str(key)):
                    yield f"{self.where((*path, str(key)))}: the name {printable(str(key))} holds {found}. Write it without."
                else:
                    yield from self._control_characters(item, (*path, str(key)))
        elif isinstance(value, list):
            for number, item in enumerate(value):
                yield from self._control_characters(item, (*path, number))
        elif isinstance(value, str):
            field = _field(self.kind, path)
            allowed = "\t\n" if field is not None and field.json_schema_extra == SEVERAL_LINES else ""
            if found := _controls(value, allowed):
                name = ".".join(map(str, path))
                yield f"{self.where(path)}: {name} is {_shown(value)}, which holds {found}. Write it without."

    def explain(self, error: ErrorDetails) -> str:
        """One line for one problem that pydantic found."""
        path: _Keys = tuple(error["loc"])
        name = ".".join(map(str, path))
        kind, context = error["type"], error.get("ctx", {})
        if kind == "extra_forbidden":
            return f"{self.where(path)}: {name} is not a known setting; {_suggest(self.kind, path)}"
        if kind == "missing":
            return f"{self.where(path[:-1])}: {name} is missing. {_description(self.kind, path)}".rstrip()
        if kind == "value_error":
            message = str(context["error"])
            # A check that spans sections begins with the name it is about.
            here = path or _keys(message.split(" ", 1)[0])
            return f"{self.where(here)}: {f'{name}: ' if name else ''}{message}"
        return f"{self.where(path)}: {name} is {_shown(error['input'])}; expected {_expected(kind, context)}"

    def where(self, path: _Keys) -> str:
        """The override that set `path`, else the file and the line nearest to it."""
        for keys, text in reversed(self.overrides):
            if path[: len(keys)] == keys:
                return text
        made = [text for keys, text in self.overrides if keys[: len(path)] == path]
        if made and not self.stands(path):  # an override brought it, as a section on its way
            return made[-1]
        line = self.line(path)
        return f"{self.path}:{line}" if line else str(self.path)

    def line(self, path: _Keys) -> int | None:
        """The file's line of `path`, or of the nearest section around it."""
        lines = [line for line, _ in self._walk(path)]
        return lines[-1] if lines else None

    def stands(self, path: _Keys) -> bool:
        """Whether the file itself has `path`."""
        return len(list(self._walk(path))) == len(path)

    def _walk(self, path: _Keys) -> Iterator[tuple[int, yaml.Node]]:
        node: yaml.Node | None = self.root
        for key in path:
            step = _child(node, key)
            if step is None:
                return
            yield step
            node = step[1]


def _secrets(value: Any, path: _Keys = ()) -> Iterator[_Keys]:
    """Where a secret stands in what a config passes on to other software; names of ours hold none."""
    if isinstance(value, Section):
        for name, field in type(value).model_fields.items():
            if field.json_schema_extra == NO_SECRETS:
                continue
            yield from _secrets(getattr(value, name), (*path, name))
    elif isinstance(value, dict):
        yield from secret_paths(value, path)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _secrets(item, (*path, number))


def _keys(name: str) -> _Keys:
    """The keys of a dotted name; whole numbers are list positions."""
    return tuple(int(key) if key.isdecimal() and len(key) < 10 else key for key in name.split("."))


def _controls(text: str, allowed: str = "") -> str:
    """The control characters in `text`, for a message; "" where there are none but `allowed`."""
    found = dict.fromkeys(one for one in text if is_control(one) and one not in allowed)
    return f"control characters ({', '.join(map(printable, found))})" if found else ""


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise InputError(f"{path}: more than {_MOST_BYTES >> 20} MiB. Name a YAML file of settings.")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Name a YAML file.") from None


def _parse(text: str, where: str) -> tuple[yaml.Node | None, Any]:
    """The node tree and the values of one YAML text; `InputError` with the line when it is none."""
    in_file = not where.startswith("--set")
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            return root, loader.construct_document(root) if root is not None else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if in_file and error.problem_mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {error.problem or error.context}.") from None
    except yaml.reader.ReaderError as error:
        line = f":{text.count(chr(10), 0, error.position) + 1}" if in_file else ""
        found = printable(text[error.position])
        raise InputError(f"{where}{line}: not valid YAML: the character {found} cannot stand here.") from None


def _enter(holder: Any, part: str | int, value: Any, where: str, replace: bool = False) -> Any:
    """`holder[part]`, set to `value` where it is not there yet or `replace` is asked."""
    if isinstance(holder, list):
        if not isinstance(part, int) or part > len(holder):
            raise InputError(f"{where} is a list of {len(holder)}; {part!r} is none of its numbers 0 to {len(holder)}.")
        if part == len(holder):
            holder.append(value)
        elif replace or holder[part] is None:
            holder[part] = value
        return holder[part]
    if isinstance(holder, dict):
        if replace or holder.get(str(part)) is None:
            holder[str(part)] = value
        return holder[str(part)]
    raise InputError(f"{where} is {_shown(holder)}, not a section; {part!r} cannot be set in it.")


def _with_tuples(value: Any, annotation: Any) -> Any:
    """Lists made tuples wherever the models hold tuples; anything else as it is."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):  # an optional section
        annotation = typing.get_args(annotation)[0]
    if isinstance(value, dict) and _is_section(annotation):
        fields = annotation.model_fields
        return {
            str(key): _with_tuples(item, fields[key].annotation) if key in fields else item
            for key, item in value.items()
        }
    if isinstance(value, list) and typing.get_origin(annotation) is tuple:
        return tuple(_with_tuples(item, typing.get_args(annotation)[0]) for item in value)
    return value


def _child(node: yaml.Node | None, part: str | int) -> tuple[int, yaml.Node] | None:
    """(1-based line, node) of the item `part` of a mapping or sequence node."""
    if isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            if key.value == str(part):
                return key.start_mark.line + 1, item
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark.line + 1, node.value[part]
    return None


def _section(model: type[Section], path: _Keys) -> type[Section] | None:
    """What describes the settings below `path` of `model`; None where there is nothing."""
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = [t for t in (field.annotation, *typing.get_args(field.annotation)) if _is_section(t)] if field else []
        if not inner:
            return None
        model = inner[0]
    return model


def _required(kind: type[Section]) -> list[str]:
    return [name for name, field in kind.model_fields.items() if field.is_required()]


def _is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _known_names(model: type[Section], prefix: str = "") -> Iterator[str]:
    """Dotted names of every setting; list items are numbered 0."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for annotation in (field.annotation, *typing.get_args(field.annotation)):
            if _is_section(annotation):
                number = "0." if typing.get_origin(field.annotation) is tuple else ""
                yield from _known_names(annotation, f"{prefix}{name}.{number}")


def _suggest(kind: type[Section], path: _Keys) -> str:
    """What an unknown setting may have been meant to be: a near name beside it, or elsewhere."""
    wanted, model = str(path[-1]), _section(kind, path[:-1])
    beside = list(model.model_fields) if model else []
    if near := difflib.get_close_matches(wanted, beside, n=1):
        return f"did you mean {near[0]}?"
    everywhere = list(_known_names(kind))
    leaf = {name.rpartition(".")[2]: name for name in reversed(everywhere)}
    if near := difflib.get_close_matches(wanted, leaf, n=1, cutoff=0.8):
        return f"did you mean {leaf[near[0]]}?"
    return f"known here: {', '.join(beside)}."


def _is_echo(problem: ErrorDetails) -> bool:
    """Whether a list is called too short only because an item of it was refused, reported besides."""
    least = problem.get("ctx", {}).get("min_length", 0)
    return problem["type"] == "too_short" and len(problem["input"]) >= least


def _description(kind: type[Section], path: _Keys) -> str:
    field = _field(kind, path)
    return (field.description if field else None) or ""


def _field(kind: type[Section], path: _Keys) -> FieldInfo | None:
    """What describes the setting `path` of `kind`; None where there is nothing."""
    model = _section(kind, path[:-1]) if path else None
    return model.model_fields.get(str(path[-1])) if model else None


_EXPECTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda ctx: "a whole number",
    "int_from_float": lambda ctx: "a whole number",
    "float_type": lambda ctx: "a number",
    "finite_number": lambda ctx: "a finite number",
    "bool_type": lambda ctx: "true or false",
    "string_type": lambda ctx: "text; put it in quotes if it looks like a number",
    "literal_error": lambda ctx: f"one of {ctx['expected']}",
    "tuple_type": lambda ctx: "a list",
    "dict_type": lambda ctx: "a section of `key: value` lines",
    "model_type": lambda ctx: "a section of `key: value` lines",
    "string_pattern_mismatch": lambda ctx: f"text like {ctx['pattern']}",
    "too_short": lambda ctx: f"at least {ctx['min_length']} item",
    "greater_than": lambda ctx: f"more than {ctx['gt']:g}",
    "greater_than_equal": lambda ctx: f"at least {ctx['ge']:g}",
    "less_than": lambda ctx: f"less than {ctx['lt']:g}",
    "less_than_equal": lambda ctx: f"at most {ctx['le']:g}",
}


def _expected(kind: str, context: dict[str, Any]) -> str:
    # Without a phrase of our own, pydantic's name of the rule is still better than nothing.
    return _EXPECTED[kind](context) if kind in _EXPECTED else kind.replace("_", " ")


def _shown(value: Any) -> str:
    """A value as found, short enough for one line."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return _cut(repr(value) if not isinstance(value, bool) else str(value).lower(), _LONGEST_VALUE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
