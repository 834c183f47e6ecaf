"""YAML files read into frozen pydantic models: line numbers in errors, nearest names, overrides by dotted key."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from pretrain.errors import InputError
from pretrain.secret_names import secret_paths


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


def names(path: Path | str) -> set[str]:
    """The names that stand first in the YAML file `path`, whatever it describes; `InputError` where it cannot be read."""
    values = _parse(_read(Path(path)), str(path))[1]
    return set(map(str, values)) if isinstance(values, dict) else set()


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
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else None
    )
    if items is None:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 scalars; PyYAML itself reads 1e-4 as text and `off` as false."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                problem = f"{name} stands twice, first on line {seen[name]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


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
# PyYAML would read a leading 0 as octal.
_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(node.value, 16 if "x" in node.value else 10)
)

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
        where = f"--set {text}"
        name, equals, written = text.partition("=")
        keys = _keys(name.strip())
        if not equals or "" in keys:
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
        for name in type(value).model_fields:
            yield from _secrets(getattr(value, name), (*path, name))
    elif isinstance(value, dict):
        yield from secret_paths(value, path)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _secrets(item, (*path, number))


def _keys(name: str) -> _Keys:
    """The keys of a dotted name; whole numbers are list positions."""
    return tuple(int(key) if key.isdecimal() else key for key in name.split("."))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Name a YAML file.") from None


def _parse(text: str, where: str) -> tuple[yaml.Node | None, Any]:
    """The node tree and the values of one YAML text; `InputError` with the line when it is none."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            return root, loader.construct_document(root) if root is not None else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = None if where.startswith("--set") else error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML: {' '.join(str(error).split())}.") from None


def _enter(holder: Any, part: str | int, value: Any, where: str, replace: bool = False) -> Any:
    """`holder[part]`, set to `value` where it is not there yet or `replace` is asked."""
    if isinstance(holder, list):
        if not isinstance(part, int) or part > len(holder):
            raise InputError(
                f"{where} is a list of {len(holder)}; {part!r} is none of its numbers 0 to {len(holder)}."
            )
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
        inner = (
            [t for t in (field.annotation, *typing.get_args(field.annotation)) if _is_section(t)]
            if field
            else []
        )
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
    model = _section(kind, path[:-1])
    field = model.model_fields.get(str(path[-1])) if model else None
    return (field.description if field else None) or ""


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
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else f"{text[:57]}..."
