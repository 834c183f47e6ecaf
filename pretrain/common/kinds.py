"""Kinds that are one module of a package each, such as kinds of sources: adding a kind is adding a file.

A kind has the name of its module. The names come from the package's folder, so a config is checked without importing
any kind. A module is imported when its kind is used.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable
from types import ModuleType


def kind_names(package: str) -> list[str]:
    """Names of the modules in `package` ("pretrain.corpus.sources"), sorted. Imports its parent packages only."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return sorted(module.name for module in pkgutil.iter_modules(folders or []))


def check_kind(package: str, name: str) -> None:
    """Raise `ValueError` with the nearest name if `package` has no module `name`."""
    names = kind_names(package)
    if name not in names:
        raise ValueError(not_one_of(name, names))


def not_one_of(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known `names` and the nearest of them."""
    known = list(names)
    return f"{name!r} is not one of {', '.join(known)}; {did_you_mean(name, known) or 'choose one.'}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The question "did you mean X?" with the nearest of `names`; "" if none is similar."""
    nearest = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {nearest[0]}?" if nearest else ""


def load_kind(package: str, name: str) -> ModuleType:
    """The module of the kind `name`; `ValueError` as `check_kind`."""
    check_kind(package, name)
    return importlib.import_module(f"{package}.{name}")
