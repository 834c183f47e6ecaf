"""Plugins by name: each module of a package such as `pretrain.corpus.sources` is a kind (here, a kind of source).

A kind is named after its module. The names come from the package's folder, so a config is checked without importing
any kind. A module is imported when its kind is used. A name with a dot is a custom module
(`pretrain.common.extensions`). The package's `INTERFACE` is the interface that its modules must implement.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from pretrain.common import extensions
from pretrain.common.errors import InputError
from pretrain.common.wording import did_you_mean


def kind_names(package: str) -> list[str]:
    """Return the sorted names of modules in `package` ("pretrain.corpus.sources"). Imports only its parent packages."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return sorted(module.name for module in pkgutil.iter_modules(folders or []))


def check_kind(package: str, name: str) -> None:
    """Raise `ValueError`, suggesting the closest name, if `name` is neither a module of `package` nor a custom name."""
    if extensions.is_custom(name):
        extensions.check_name(name)
    else:
        _check_built_in(package, name)


def _check_built_in(package: str, name: str) -> None:
    if name not in (names := kind_names(package)):
        raise ValueError(unknown_name_message(name, names))


def unknown_name_message(name: str, names: Iterable[str]) -> str:
    """Return the message for an unknown name, with the known `names` and the most similar one."""
    known = list(names)
    return f"{name!r} is not one of {', '.join(known)}; {did_you_mean(name, known) or 'choose one.'}"


def load_kind(package: str, name: str) -> ModuleType:
    """Return the module of the kind `name`; raises `ValueError` in the same cases as `check_kind`.

    Raises `InputError` if a custom module cannot be imported, or does not implement the kind's interface.
    """
    if not extensions.is_custom(name):
        _check_built_in(package, name)
        module = importlib.import_module(f"{package}.{name}")
    else:
        module = extensions.load_custom(name)
    interface = getattr(importlib.import_module(package), "INTERFACE", None)
    if interface is not None:
        interface.check(module, name)
    return module


def import_custom_kind(package: str, name: str, folder: Path | None) -> None:
    """Import a custom module, and check it as `load_kind` does.

    Raises `InputError`. If the module is not found, the error suggests a similar built-in kind.
    """
    try:
        extensions.import_modules([name], folder)
    except InputError as error:
        is_package_imported = name.partition(".")[0] in sys.modules
        nearest = "" if is_package_imported else did_you_mean(name.rpartition(".")[2], kind_names(package))
        raise InputError(f"{error}{nearest and f' Of the built-in kinds, {nearest}'}") from None
    load_kind(package, name)
