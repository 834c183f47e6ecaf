"""YAML files and dictionaries read into frozen pydantic models: where in errors, nearest names, overrides by key."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pretrain.common.commands import run_argument
from pretrain.common.errors import InputError, is_control, printable
from pretrain.common.examples import config_path
from pretrain.common.kinds import ask_for_kind
from pretrain.common.sections import (
    NO_SECRETS,
    SEVERAL_LINES,
    Keys,
    Section,
    field_at,
    is_section,
    required_names,
)
from pretrain.common.setting_errors import expected, shortened, shown, suggest
from pretrain.common.yaml_text import Dumper, child, parse, read_text

_OTHER_KIND = 3  # unknown sections: the config of another kind
_SECRET = re.compile(r"(token|secret|password|passwd|authorization|credential)s?$|(api|access|private)[_-]?key$", re.I)
_LONGEST_OVERRIDE = 200  # characters of an override in a message

S = TypeVar("S", bound=Section)

AnyConfig = Path | str | Mapping[str, Any] | Section
"""A config as it may be given: a YAML file, the name of an example, nested values, or a config object."""

Overrides = Sequence[str] | Mapping[str, Any]
"""Overrides of a config: texts `key.path=value`, or values by key.path."""


def load(config: AnyConfig, kind: type[S], overrides: Overrides = (), *, imports: bool = False) -> S:
    """The settings of `config`, with overrides applied.

    Values are read as YAML 1.2 (1e-4 is a number, `off` is text) and never converted to another type. List items are
    addressed by index: `phases.0.steps=10`.

    `imports` imports the modules of the user's own that it names (`pretrain.common.extensions`): for the config of a
    run that is to start, never for one that was recorded.

    Raises:
        InputError: one line per problem, each with the line of the file or the override that causes it.
    """
    source = _Document(config, kind, overrides)
    try:
        settings = source.validate()
    except RecursionError:
        raise InputError(
            f"{source.origin}: nested too deeply, or an alias (*) refers to itself. Write it out."
        ) from None
    if imports:
        import_named(settings, source.folder, lambda keys: f"{source.where(keys)}: ")
        if (narrowed := settings.narrowed()) is not kind:
            source.kind = typing.cast(type[S], narrowed)
            settings = kind.model_validate(source.validate().model_dump(mode="json"))
    return settings


def import_named(settings: Section, folder: Path | None = None, where: Callable[[Keys], str] = lambda _: "") -> None:
    """Import the modules of the user's own that `settings` name, also from `folder`, and check them.

    Raises `InputError` that begins with `where` a setting is, its name and its value.
    """
    for keys, package, name in settings.own_modules():
        try:
            ask_for_kind(package, name, folder)
        except InputError as error:
            raise InputError(f"{where(keys)}{'.'.join(map(str, keys))}: {error}") from None


def given_values(config: AnyConfig, kind: type[Section], overrides: Overrides = ()) -> dict[str, Any]:
    """The values of `config` with `overrides` applied, as `load` takes them, but not validated.

    Raises `InputError` if the file cannot be read, or an override cannot be applied.
    """
    return _Document(config, kind, overrides).values


def as_overrides(overrides: Overrides) -> list[str]:
    """Overrides as texts `key.path=value`, with values in JSON, which is YAML."""
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(_plain(value), default=repr)}" for key, value in overrides.items()]
    return [overrides] if isinstance(overrides, str) else list(overrides)


def with_start(overrides: Overrides, start_from: Any) -> list[str]:
    """Overrides as texts, with that of `start_from`, as `run_argument` takes it; None leaves it to the config."""
    start = {} if start_from is None else {"start_from": run_argument(start_from)}
    return as_overrides(overrides) + as_overrides(start)


def _plain(value: Any) -> Any:
    """A copy with dictionaries, lists and texts for sections, tuples and paths, as YAML has them."""
    if isinstance(value, Section):
        return _plain(value.model_dump(exclude_unset=True))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def read_values(path: Path | str) -> dict[str, Any]:
    """The values in the YAML file `path`, read as `load` reads them but not validated; {} if it holds no mapping.

    Raises `InputError` if the file cannot be read.
    """
    values = parse(read_text(Path(path)), str(path))[1]
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def names(path: Path | str) -> set[str]:
    """The top-level names in the YAML file `path`. Raises `InputError` if it cannot be read."""
    return set(read_values(path))


def dump(settings: Section, exclude: set[str] | None = None) -> str:
    """All settings, without the sections in `exclude`, as YAML that `load` reads back to equal settings."""
    values = settings.model_dump(mode="json", exclude=exclude)
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def differences(
    before: Section | Mapping[str, Any], after: Section | Mapping[str, Any], *, free: Sequence[str]
) -> list[str]:
    """Dotted names, with both values, of the settings that differ and match no pattern of `free`.

    Either may be the values of a section (`model_dump`) that this version does not have as it is.
    """
    return [
        f"{name} ({old} -> {new})"
        for name, (old, new) in changes(before, after).items()
        if not any(_is_below(name, pattern) for pattern in free)
    ]


def _is_below(name: str, pattern: str) -> bool:
    """Whether a dotted name is a setting that `pattern` describes, or below one; * is one part of a name."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(map(fnmatchcase, parts, wanted))


def changes(before: Section | Mapping[str, Any], after: Section | Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (value before, value after) of the settings that differ; of sections or their values."""
    old, new = (dict(_leaves(one.model_dump() if isinstance(one, Section) else one)) for one in (before, after))
    return {
        name: (old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)
    }


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf below `value`, that is, everything but sections and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else None
    if items is None:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


class _Document(Generic[S]):
    """One YAML file, or given values, with overrides applied; it knows where each value comes from."""

    def __init__(self, config: AnyConfig, kind: type[S], overrides: Overrides = ()) -> None:
        self.kind = kind
        self.root: yaml.Node | None = None
        self.folder: Path | None = None
        if isinstance(config, Path | str):
            path = config_path(Path(config))
            self.origin, self.folder = str(path), path.parent
            self.root, self.values = parse(read_text(path), self.origin)
        elif isinstance(config, Mapping | Section):
            self.origin, self.values = "config", _plain(config)
        else:
            raise InputError(f"config: is {shown(config)}; expected the path of a YAML file, or settings.")
        if not isinstance(self.values, dict):
            raise InputError(
                f"{self.origin}: no settings in this file; expected lines of `key: value`, at least "
                f"{', '.join(required_names(kind))}."
            )
        self.overrides: list[tuple[Keys, str]] = []
        for override in as_overrides(overrides):
            self.override(override)

    def override(self, text: str) -> None:
        """Apply the override `key.path=value` to the file's values."""
        where = f"--set {shortened(printable(text), _LONGEST_OVERRIDE)}"
        name, equals, written = text.partition("=")
        keys = self._keys_of(name.strip())
        if not equals or "" in keys:
            raise InputError(f"{where}: expected key.path=value, for example phases.0.steps=10.")
        value = parse(written, where)[1] if written.strip() else ""
        self.overrides.append((keys, where))
        container: Any = self.values
        for depth, key in enumerate(keys):
            last = depth == len(keys) - 1
            place = f"{where}: {'.'.join(map(str, keys[:depth])) or self.origin}"
            new_item: Any = value if last else [] if isinstance(keys[depth + 1], int) else {}
            container = _enter(container, key, new_item, place, replace=last)

    def _keys_of(self, name: str) -> Keys:
        """The keys of a setting's dotted name. Names that are not ours, such as those of sources, may contain dots."""
        keys, parts = _split_name(name), name.split(".")
        for depth in range(1, len(keys)):
            field = field_at(self.kind, keys[:depth])
            annotation = field.annotation if field else None
            if typing.get_origin(annotation) is dict and typing.get_args(annotation)[1] is not Any:
                return (*keys[:depth], ".".join(parts[depth:]))
        return keys

    def validate(self) -> S:
        """The validated settings. Raises `InputError` with one line per problem."""
        if problems := list(self._control_characters(self.values)):
            raise InputError("\n".join(problems))
        try:
            settings = self.kind.model_validate(_with_tuples(self.values, self.kind), strict=True)
        except ValidationError as error:
            problems = [problem for problem in error.errors(include_url=False) if not _is_echo(problem)]
            self._check_kind(problems)
            problems.sort(key=lambda problem: self.line(problem["loc"]) or 0)
            raise InputError("\n".join(dict.fromkeys(map(self.explain, problems)))) from None
        for path in _secrets(settings):
            where = self.where(path)
            if where.startswith("--set "):
                where = where.partition("=")[0]  # the value must not be printed
            raise InputError(
                f"{where}: {'.'.join(map(str, path))} looks like a secret, and configs are stored in logs, job records "
                "and checkpoints. Set it as an environment variable of the machines that train."
            )
        return settings

    def _check_kind(self, problems: Sequence[ErrorDetails]) -> None:
        """Raise `InputError` if the settings are those of another kind of config."""
        unknown = [str(one["loc"][0]) for one in problems if one["type"] == "extra_forbidden" and len(one["loc"]) == 1]
        if len(unknown) >= _OTHER_KIND:
            raise InputError(
                f"{self.origin}: is not the config of a {self.kind.PURPOSE}, which has no {', '.join(unknown)}."
            )

    def _control_characters(self, value: Any, path: Keys = ()) -> Iterator[str]:
        """One line for each text below `value` with control characters, which could break out of a line or quotes."""
        if isinstance(value, dict):
            for key, item in value.items():
                if controls := _controls(str(key)):
                    where = self.where((*path, str(key)))
                    yield f"{where}: the name {printable(str(key))} contains {controls}. Remove them."
                else:
                    yield from self._control_characters(item, (*path, str(key)))
        elif isinstance(value, list):
            for number, item in enumerate(value):
                yield from self._control_characters(item, (*path, number))
        elif isinstance(value, str):
            field = field_at(self.kind, path)
            allowed = "\t\n" if field is not None and field.json_schema_extra == SEVERAL_LINES else ""
            if controls := _controls(value, allowed):
                name = ".".join(map(str, path))
                yield f"{self.where(path)}: {name} is {shown(value)}, which contains {controls}. Remove them."

    def explain(self, error: ErrorDetails) -> str:
        """One line for one problem that pydantic reports."""
        path: Keys = tuple(error["loc"])
        name = ".".join(map(str, path))
        kind, context = error["type"], error.get("ctx", {})
        if kind == "extra_forbidden":
            return f"{self.where(path)}: {name} is not a known setting; {suggest(self.kind, path)}"
        if kind == "missing":
            field = field_at(self.kind, path)
            return (
                f"{self.where(path[:-1])}: {name} is missing. {(field.description if field else None) or ''}".rstrip()
            )
        if kind == "value_error":
            message = str(context["error"])
            # The message of a check across settings starts with the name of one of them.
            setting = (*path, *_split_name(message.split(" ", 1)[0].rstrip(":")))
            if path and field_at(self.kind, setting) is None:
                setting = path
            return f"{self.where(setting)}: {f'{name}: ' if name else ''}{message}"
        return f"{self.where(path)}: {name} is {shown(error['input'])}; expected {expected(kind, context)}"

    def where(self, path: Keys) -> str:
        """The override that set `path`, or else the file and the nearest line."""
        for keys, text in reversed(self.overrides):
            if path[: len(keys)] == keys:
                return text
        below = [text for keys, text in self.overrides if keys[: len(path)] == path]
        if below and not self.is_in_file(path):  # an override below this section created it
            return below[-1]
        line = self.line(path)
        return f"{self.origin}:{line}" if line else self.origin

    def line(self, path: Keys) -> int | None:
        """The line of `path` in the file, or of the innermost section around it that the file has."""
        lines = [line for line, _ in self._walk(path)]
        return lines[-1] if lines else None

    def is_in_file(self, path: Keys) -> bool:
        """Whether the file itself has `path`."""
        return len(list(self._walk(path))) == len(path)

    def _walk(self, path: Keys) -> Iterator[tuple[int, yaml.Node]]:
        node: yaml.Node | None = self.root
        for key in path:
            step = child(node, key)
            if step is None:
                return
            yield step
            node = step[1]


def _secrets(value: Any, path: Keys = (), *, is_named: bool = False) -> Iterator[Keys]:
    """Paths of texts under the names of secrets, in what a config passes on to other software; ours hold none."""
    if isinstance(value, Section):
        for name, field in type(value).model_fields.items():
            if field.json_schema_extra == NO_SECRETS:
                continue
            yield from _secrets(getattr(value, name), (*path, name))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _secrets(item, (*path, str(name)), is_named=is_named or _SECRET.search(str(name)) is not None)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _secrets(item, (*path, number), is_named=is_named)
    elif is_named and isinstance(value, str) and value:
        yield path


def _split_name(name: str) -> Keys:
    """The keys of a dotted name; whole numbers are list indices."""
    return tuple(int(key) if key.isdecimal() and len(key) < 10 else key for key in name.split("."))


def _controls(text: str, allowed: str = "") -> str:
    """The control characters in `text` besides the `allowed` ones, as words for a message; "" if there are none."""
    controls = dict.fromkeys(character for character in text if is_control(character) and character not in allowed)
    return f"control characters ({', '.join(map(printable, controls))})" if controls else ""


def _enter(container: Any, key: str | int, value: Any, where: str, replace: bool = False) -> Any:
    """`container[key]`, after it was set to `value` if it is missing or `replace` is true."""
    if isinstance(container, list):
        if not isinstance(key, int) or key > len(container):
            raise InputError(
                f"{where} is a list of {len(container)}; {key!r} is not one of the indices 0 to {len(container)}."
            )
        if key == len(container):
            container.append(value)
        elif replace or container[key] is None:
            container[key] = value
        return container[key]
    if isinstance(container, dict):
        if replace or container.get(str(key)) is None:
            container[str(key)] = value
        return container[str(key)]
    raise InputError(f"{where} is {shown(container)}, not a section; {key!r} cannot be set in it.")


def _with_tuples(value: Any, annotation: Any) -> Any:
    """`value` with lists converted to tuples wherever the models expect tuples."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):  # an optional section
        annotation = typing.get_args(annotation)[0]
    if isinstance(value, dict) and is_section(annotation):
        fields = annotation.model_fields
        return {
            str(key): _with_tuples(item, fields[key].annotation) if key in fields else item
            for key, item in value.items()
        }
    if isinstance(value, list) and typing.get_origin(annotation) is tuple:
        return tuple(_with_tuples(item, typing.get_args(annotation)[0]) for item in value)
    return value


def _is_echo(problem: ErrorDetails) -> bool:
    """Whether a list is reported as too short only because pydantic refused an item, which it reports as well."""
    least = problem.get("ctx", {}).get("min_length", 0)
    return problem["type"] == "too_short" and len(problem["input"]) >= least
