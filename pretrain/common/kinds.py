"""Kinds (of sources, for example): each is a module of a package, so adding a file adds a kind.

A kind has the name of its module. The names come from the package's folder, so a config is checked without importing
any kind. A module is imported when its kind is used. A name with a dot is a custom module
(`pretrain.common.extensions`). The package's `KIND` is the interface that its modules must implement.
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
    """Raise `ValueError` with the nearest name if `package` has no module `name`, and it cannot be a custom module."""
    if extensions.is_custom(name):
        extensions.check_name(name)
    else:
        _check_built_in(package, name)


def _check_built_in(package: str, name: str) -> None:
    if name not in (names := kind_names(package)):
        raise ValueError(not_one_of(name, names))


def not_one_of(name: str, names: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the known `names` and the most similar one."""
    known = list(names)
    return f"{name!r} is not one of {', '.join(known)}; {did_you_mean(name, known) or 'choose one.'}"


def load_kind(package: str, name: str) -> ModuleType:
    """Return the module of the kind `name`; raises `ValueError` as `check_kind` does.

    Raises `InputError` if a custom module cannot be imported, or does not implement the kind's interface.
    """
    if not extensions.is_custom(name):
        _check_built_in(package, name)
        module = importlib.import_module(f"{package}.{name}")
    else:
        module = extensions.load_custom(name)
    contract = getattr(importlib.import_module(package), "KIND", None)
    if contract is not None:
        contract.check(module, name)
    return module


def import_kind(package: str, name: str, folder: Path | None) -> None:
    """Import a custom module, and check it as `load_kind` does.

    Raises `InputError`. If the module is not found, the error suggests a similar built-in kind.
    """
    try:
        extensions.import_modules([name], folder)
    except InputError as error:
        has_package = name.partition(".")[0] in sys.modules
        nearest = "" if has_package else did_you_mean(name.rpartition(".")[2], kind_names(package))
        raise InputError(f"{error}{nearest and f' Of the built-in kinds, {nearest}'}") from None
    load_kind(package, name)
