"""The base of all config sections, its field types, and how to look up a field by its path."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeGuard

from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue, field_validator
from pydantic.fields import FieldInfo

from pretrain.common.addresses import SCHEMES, check_address, is_remote
from pretrain.common.files import check_local

Keys = tuple[str | int, ...]
"""The path of a setting: names of sections and fields, and indices of list items, from the top level down."""


class Section(BaseModel):
    """Base of all config sections. They are frozen; unknown keys, infinities and NaN are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    SUBJECT: ClassVar[str] = "run"
    """The object that a config of this class describes."""

    @field_validator("*", mode="before")
    @classmethod
    def _lists_to_tuples(cls, value: Any) -> Any:
        """Convert lists of YAML and JSON to tuples, since strict validation rejects lists."""
        return tuple(value) if isinstance(value, list) else value

    def custom_modules(self) -> Iterator[tuple[Keys, str, str]]:
        """Yield (path of the setting, package of its kinds, name) of each custom module (`common.extensions`)."""
        yield from ()

    def extended_class(self) -> type[Section]:
        """Return the class of these settings, extended by the sections of custom modules, which must be imported."""
        return type(self)


def _check_path(text: str) -> str:
    check_local(text)
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{text!r} names a user who does not exist on this machine") from None
    return text


LocalPath = Annotated[str, AfterValidator(_check_path)]
"""A relative or absolute path on the machines of the run; a remote address is an error."""


def check_location(location: str, *, for_writing: bool = False) -> str:
    """Return a path or address, without a trailing slash of the address. Raises `ValueError` if it is neither."""
    if is_remote(location):
        check_address(location, for_writing=for_writing)
        return location.rstrip("/")
    scheme, separator, _ = location.partition("://")
    if separator and scheme.isalnum():
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"{location!r} is an address with an unknown scheme. Use a local path, or one of {known}.")
    return _check_path(location)


Location = Annotated[str, AfterValidator(check_location)]
"""A path like `LocalPath`, or an address of an object store (`pretrain.common.addresses`)."""

WritableLocation = Annotated[str, AfterValidator(lambda value: check_location(value, for_writing=True))]
"""Like `Location`, but an address must be writable."""

ALLOW_TABS_AND_NEWLINES: dict[str, JsonValue] = {"tabs_and_newlines": True}
"""`Field(json_schema_extra=ALLOW_TABS_AND_NEWLINES)`: the setting may contain tabs and newlines."""


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    """Return whether a type annotation is a config section."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


@functools.cache
def fields_of(schema: type[Section]) -> dict[Keys, FieldInfo]:
    """Return the fields of all settings below `schema` by path, in which every list index is 0."""
    fields: dict[Keys, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        fields[name,] = field
        parent = (name, 0) if typing.get_origin(field.annotation) is tuple else (name,)
        for section in filter(is_section, (field.annotation, *typing.get_args(field.annotation))):
            for keys, inner in fields_of(section).items():
                fields.setdefault((*parent, *keys), inner)
    return fields


def field_at(schema: type[Section], path: Keys) -> FieldInfo | None:
    """Return the field at `path` below `schema`; None if there is none."""
    return fields_of(schema).get(tuple(0 if isinstance(key, int) else key for key in path))
