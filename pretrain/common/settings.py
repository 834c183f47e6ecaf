"""Reads YAML files and dictionaries into frozen pydantic models. Errors name the file, line and similar settings."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pretrain.common.commands import run_argument
from pretrain.common.errors import InputError, is_control, printable, version_mismatch
from pretrain.common.examples import config_path
from pretrain.common.kinds import import_custom_kind
from pretrain.common.sections import ALLOW_TABS_AND_NEWLINES, Keys, Section, field_at
from pretrain.common.setting_errors import describe_expected, format_value, shorten, suggest
from pretrain.common.yaml_text import Dumper, parse, read_text

_MIN_UNKNOWN = 3  # minimum number of unknown top-level keys to report a config as one for another command
_SECRET = re.compile(r"(token|secret|password|passwd|authorization|credential)s?$|(api|access|private)[_-]?key$", re.I)
_MAX_SHOWN = 200  # maximum number of characters of an override in a message

S = TypeVar("S", bound=Section)

AnyConfig = Path | str | Mapping[str, Any] | Section
"""A config: a YAML file, the name of an example, a nested dictionary, or a config object."""

Overrides = Sequence[str] | Mapping[str, Any]
"""Overrides of a config: strings `key.path=value`, or values by key.path."""


def load(config: AnyConfig, schema: type[S], overrides: Overrides = (), *, imports: bool = False) -> S:
    """Load the settings of `config`, with overrides applied.

    Values are read as YAML 1.2 (1e-4 is a number, `off` is a string) and never converted to another type. List items
    are addressed by index: `phases.0.steps=10`.

    With `imports`, the custom modules that the config names are imported (`pretrain.common.extensions`): for the config
    of a new run, never for a recorded one.

    Raises:
        InputError: one line per problem, each with the line of the file or the override that causes it.
    """
    document = _Document(config, schema, overrides)
    settings = document.validate()
    if imports:
        import_named(settings, document.folder, lambda keys: f"{document.where(keys)}: ")
        if (extended := settings.extended_class()) is not schema:
            document.schema = typing.cast(type[S], extended)
            settings = schema.model_validate(document.validate().model_dump(mode="json"))
    return settings


def load_recorded(path: Path, schema: type[S]) -> S:
    """Load the settings that a run recorded in `path`. `InputError` if they are invalid for this version."""
    return _Document(path, schema, ()).validate(recorded=True)


def import_named(settings: Section, folder: Path | None = None, where: Callable[[Keys], str] = lambda _: "") -> None:
    """Import the custom modules that `settings` name, from `folder` too, and check them.

    Raises `InputError`. Its message starts with the setting's origin (the result of `where`), name and value.
    """
    for keys, package, name in settings.custom_modules():
        try:
            import_custom_kind(package, name, folder)
        except InputError as error:
            raise InputError(f"{where(keys)}{'.'.join(map(str, keys))}: {error}") from None


def unvalidated_values(config: AnyConfig, schema: type[Section], overrides: Overrides) -> dict[str, Any]:
    """Return the values of `config` with `overrides` applied as in `load`, but not validated.

    Raises `InputError` if the file cannot be read, or an override cannot be applied.
    """
    return _Document(config, schema, overrides).values


def as_overrides(overrides: Overrides) -> list[str]:
    """Return overrides as strings `key.path=value`, with values in JSON, which is YAML."""
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(_to_plain(value), default=repr)}" for key, value in overrides.items()]
    return [overrides] if isinstance(overrides, str) else list(overrides)


def with_start(overrides: Overrides, start_from: Any) -> list[str]:
    """Return overrides as strings, with `start_from` parsed by `run_argument`; None keeps the config's value."""
    start = {} if start_from is None else {"start_from": run_argument(start_from)}
    return as_overrides(overrides) + as_overrides(start)


def _to_plain(value: Any) -> Any:
    """Return a copy in YAML's types: sections, tuples and paths become dictionaries, lists and strings."""
    if isinstance(value, Section):
        value = value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def read_values(path: Path | str) -> dict[str, Any]:
    """Read the values of the YAML file `path` as `load` does, but do not validate them; {} if it is not a mapping.

    Raises `InputError` if the file cannot be read.
    """
    values = parse(read_text(Path(path)), str(path))[1]
    return _to_plain(values) if isinstance(values, dict) else {}


def top_level_keys(path: Path | str) -> set[str]:
    """Return the top-level keys of the YAML file `path`. Raises `InputError` if it cannot be read."""
    return set(read_values(path))


def dump(settings: Section, exclude: set[str] | None = None) -> str:
    """Format all settings, except the sections in `exclude`, as YAML that `load` reads back to equal settings."""
    values = settings.model_dump(mode="json", exclude=exclude)
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def differences(
    before: Section | Mapping[str, Any], after: Section | Mapping[str, Any], *, ignore: Sequence[str]
) -> list[str]:
    """List the settings that differ, with both values, unless their dotted names match a pattern in `ignore`.

    Both arguments may be plain values (`model_dump`) of a section whose fields this version does not have.
    """
    return [
        f"{name} ({old} -> {new})"
        for name, (old, new) in changes(before, after).items()
        if not any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in ignore)
    ]


def changes(before: Section | Mapping[str, Any], after: Section | Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ: dotted name -> (value before, value after)."""
    values = (source.model_dump() if isinstance(source, Section) else source for source in (before, after))
    old, new = ({".".join(map(str, keys)): value for keys, value in _leaves(plain)} for plain in values)
    return {
        name: (old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)
    }


def _leaves(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield (path, value) of everything below `value` except dictionaries and lists."""
    is_list = isinstance(value, list | tuple)
    if not is_list and not isinstance(value, Mapping):
        yield path, value
        return
    for key, item in enumerate(value) if is_list else value.items():
        yield from _leaves(item, (*path, key))


class _Document(Generic[S]):
    """The values of one YAML file or dictionary with overrides applied, and the origin of each."""

    def __init__(self, config: AnyConfig, schema: type[S], overrides: Overrides) -> None:
        self.schema = schema
        self.folder: Path | None = None
        self.origin, content, lines = "config", config, {}
        if isinstance(config, Path | str):
            path = config_path(Path(config))
            self.origin, self.folder = str(path), path.parent
            lines, content = parse(read_text(path), self.origin)
        elif not isinstance(config, Mapping | Section):
            raise InputError(f"config: is {format_value(config)}; expected the path of a YAML file, or settings.")
        if not isinstance(content, Mapping | Section):
            raise InputError(f"{self.origin}: no settings in this file; expected lines of `key: value`.")
        self.values: dict[str, Any] = _to_plain(content)
        self.origins = {(): self.origin} | {keys: f"{self.origin}:{line}" for keys, line in lines.items()}
        for override in as_overrides(overrides):
            self.apply_override(override)

    def apply_override(self, text: str) -> None:
        """Apply the override `key.path=value` to the file's values."""
        where = f"--set {shorten(printable(text), _MAX_SHOWN)}"
        name, equals, value = text.partition("=")
        keys = self._keys_of(name.strip())
        if not equals or "" in keys:
            raise InputError(f"{where}: expected key.path=value, for example phases.0.steps=10.")
        self._set_value(keys, _to_plain(parse(value, where)[1] if value.strip() else ""), where)
        unaffected = {path: origin for path, origin in self.origins.items() if path[: len(keys)] != keys}
        self.origins = unaffected | {keys[:n]: where for n in range(1, len(keys) + 1) if keys[:n] not in unaffected}

    def _set_value(self, keys: Keys, value: Any, where: str) -> None:
        """Set the value at `keys`, and create missing sections and lists above it."""
        container: Any = self.values
        for depth, key in enumerate(keys):
            is_list = isinstance(container, list)
            if not (isinstance(key, int) and key <= len(container) if is_list else isinstance(container, dict)):
                reason = f"{key!r} is not one of the indices 0 to {len(container)}" if is_list else "not a section"
                raise InputError(f"{where}: {'.'.join(map(str, keys[:depth]))} is {format_value(container)}; {reason}.")
            key = key if is_list else str(key)
            if not is_list:
                container.setdefault(key)
            elif key == len(container):
                container.append(None)
            if depth == len(keys) - 1:
                container[key] = value
            elif container[key] is None:
                container[key] = [] if isinstance(keys[depth + 1], int) else {}
            container = container[key]

    def _keys_of(self, name: str) -> Keys:
        """Split a setting's dotted name into keys. Names that the user chooses, as for sources, may contain dots."""
        keys, parts = _split_name(name), name.split(".")
        for depth in range(1, len(keys)):
            field = field_at(self.schema, keys[:depth])
            annotation = field.annotation if field else None
            if typing.get_origin(annotation) is dict and typing.get_args(annotation)[1] is not Any:
                return (*keys[:depth], ".".join(parts[depth:]))
        return keys

    def validate(self, *, recorded: bool = False) -> S:
        """Return the validated settings. Raises `InputError`: one line per problem, or one line if `recorded`."""
        if problems := list(self._control_characters()):
            raise InputError("\n".join(problems))
        try:
            settings = self.schema.model_validate(self.values, strict=True)
        except ValidationError as error:
            # pydantic also reports a list as too short if its items are invalid.
            problems = [
                item for item in error.errors(include_url=False) if item["type"] != "too_short" or not item["input"]
            ]
            self._reject_other_configs(problems)
            if recorded and any(item["type"] == "extra_forbidden" for item in problems):
                raise InputError(version_mismatch(self.origin, "Train again.")) from None
            order = list(self.origins)
            problems.sort(key=lambda item: order.index(self._located_prefix(item["loc"])))
            raise InputError("\n".join(dict.fromkeys(map(self.explain, problems)))) from None
        self._check_secrets()
        return settings

    def _reject_other_configs(self, problems: Sequence[ErrorDetails]) -> None:
        """Raise `InputError` if many settings are unknown: the config is probably for another command."""
        paths = [item["loc"] for item in problems if item["type"] == "extra_forbidden"]
        unknown = [str(path[0]) for path in paths if len(path) == 1]
        if len(unknown) >= _MIN_UNKNOWN:
            raise InputError(
                f"{self.origin}: is not the config of a {self.schema.SUBJECT}, which has no {', '.join(unknown)}."
            )

    def _control_characters(self) -> Iterator[str]:
        """Yield an error line for each name or string with control characters, which could forge lines of output."""
        for path, value in _leaves(self.values):
            name, field = ".".join(map(str, path)), field_at(self.schema, path)
            allowed = "\t\n" if field is not None and field.json_schema_extra == ALLOW_TABS_AND_NEWLINES else ""
            if controls := _describe_controls(name):
                yield f"{self.where(path)}: the name {printable(name)} contains {controls}. Remove them."
            elif isinstance(value, str) and (controls := _describe_controls(value, allowed)):
                yield f"{self.where(path)}: {name} is {format_value(value)}, which contains {controls}. Remove them."

    def _check_secrets(self) -> None:
        """Reject strings in settings of other software whose names suggest secrets; our settings contain none."""
        for path, value in _leaves(self.values):
            names = [key for key in path if isinstance(key, str)]
            ours = [field for n in range(len(path)) if (field := field_at(self.schema, path[: n + 1]))]
            if isinstance(value, str) and value and any(map(_SECRET.search, names[len(ours) :])):
                where = self.where(path)
                where = where.partition("=")[0] if where.startswith("--set ") else where  # without the value
                raise InputError(
                    f"{where}: {'.'.join(map(str, path))} looks like a secret, and configs are stored in logs, job "
                    "records and checkpoints. Set it as an environment variable of the machines that train."
                )

    def explain(self, error: ErrorDetails) -> str:
        """Return one line about a problem that pydantic reports."""
        path: Keys = tuple(error["loc"])
        where, name = self.where(path), ".".join(map(str, path))
        if error["type"] == "extra_forbidden":
            return f"{where}: {name} is not a known setting; {suggest(self.schema, path)}"
        if error["type"] == "missing":
            field = field_at(self.schema, path)
            return f"{where}: {name} is missing. {(field and field.description) or ''}".rstrip()
        if error["type"] == "value_error":
            message = str(error.get("ctx", {})["error"])
            # If a check involves several settings, its message starts with the name of one of them.
            setting = (*path, *_split_name(message.split(" ", 1)[0].rstrip(":")))
            return f"{self.where(setting)}: {f'{name}: ' if name else ''}{message}"
        return f"{where}: {name} is {format_value(error['input'])}; {describe_expected(error)}"

    def where(self, path: Keys) -> str:
        """Return the override that set `path`, or else the file and line of the setting or its innermost section."""
        return self.origins[self._located_prefix(path)]

    def _located_prefix(self, path: Keys) -> Keys:
        """Return the longest prefix of `path` whose origin is known."""
        return next(path[:n] for n in range(len(path), -1, -1) if path[:n] in self.origins)


def _split_name(name: str) -> Keys:
    """Split a dotted name into keys; integers are list indices."""
    return tuple(int(key) if key.isdecimal() and len(key) < 10 else key for key in name.split("."))


def _describe_controls(text: str, allowed: str = "") -> str:
    """Describe the control characters in `text` that are not `allowed`; "" if there are none."""
    controls = dict.fromkeys(character for character in text if is_control(character) and character not in allowed)
    return f"control characters ({', '.join(map(printable, controls))})" if controls else ""
