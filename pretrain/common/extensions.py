"""Custom modules of the user, named in a config or an option: kinds (`common.kinds`), metrics and callbacks.

Python looks for them on its path, then in the config's folder, then in the current folder. A module is imported
only if the user requests it: with the config of a run that starts, with --import, or with an import in the user's
program. The config in a run folder, an export or a fine-tuned model imports nothing: it may be untrusted.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import pkgutil
import shutil
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pretrain.common.errors import InputError
from pretrain.common.wording import did_you_mean

ENV_VAR = "BERTRAIN_MODULES"
"""Environment variable with the modules that the user requested (`_requested()` as JSON). Workers inherit it."""

_OUR_PACKAGES = ("pretrain", "finetune", "cluster")


class Contract(NamedTuple):
    """The interface of a kind's modules: a class named `attribute`, derived from `base`, with the `needed` members."""

    attribute: str
    base: type
    needed: tuple[str, ...] = ()  # required members that `base` declares, besides its abstract methods

    def check(self, module: Any, name: str) -> None:
        """Raise `InputError` if the module `name` does not implement the interface."""
        found, base = getattr(module, self.attribute, None), self.base.__name__
        if not (isinstance(found, type) and issubclass(found, self.base)):
            example = f"{self.attribute} = YourClass" if self.attribute.isupper() else f"class {self.attribute}({base})"
            raise InputError(
                f"{name}: {_path(module)} has no {self.attribute}, a class that derives from "
                f"{self.base.__module__}.{base}. Add `{example}`."
            )
        for member in (*sorted(getattr(found, "__abstractmethods__", ())), *self.needed):
            declared = getattr(self.base, member, None)
            if getattr(found, member, None) is declared:
                form = inspect.signature(declared) if callable(declared) else f": {self.base.__annotations__[member]}"
                missing = f"{member}{form}".replace("'", "")
                raise InputError(f"{name}: {self.attribute} of {_path(module)} lacks {missing}, which {base} requires.")


def is_custom(name: str) -> bool:
    """Return whether `name` is a custom module or an attribute of one: it contains a dot or a colon."""
    return "." in name or ":" in name


def check_name(name: str, *, with_attribute: bool = False) -> None:
    """Raise `ValueError` unless `name` is `package.module`, or `package.module:name` if `with_attribute`."""
    module, colon, attribute = name.partition(":")
    parts = [*module.split("."), *([attribute] if colon else [])]
    if not all(map(str.isidentifier, parts)) or bool(colon) != with_attribute or not (colon or is_custom(name)):
        form = "my_package.module:name" if with_attribute else "my_package.module"
        raise ValueError(f"{name!r} is not a dotted name such as {form}")


def import_modules(names: Iterable[str], folder: Path | None = None) -> None:
    """Import the modules in `names` (`module` or `module:name`), which may be in `folder`; raises as `load_custom`."""
    requested, modules = _requested(), list(dict.fromkeys(name.partition(":")[0] for name in names))
    if not modules:
        return
    folders = [str(path.resolve()) for path in (folder, Path.cwd()) if path]
    requested["folders"] = list(dict.fromkeys([*requested["folders"], *folders]))
    requested["names"] = list(dict.fromkeys([*requested["names"], *modules]))
    os.environ[ENV_VAR] = json.dumps(requested)
    loaded = set(sys.modules)
    for name in modules:
        load_custom(name)
    imported = {*requested["names"], *(set(sys.modules) - loaded)}
    packages = sorted({name.partition(".")[0] for name in imported} - set(_OUR_PACKAGES))
    paths = [_path(sys.modules[package]) for package in packages if package in sys.modules]
    carried = [str(path) for path in paths if str(path.parent) in requested["folders"]]
    os.environ[ENV_VAR] = json.dumps({**requested, "carried": list(dict.fromkeys([*requested["carried"], *carried]))})


def load_custom(name: str) -> Any:
    """Return the module `name`, or the attribute that `module:attribute` names.

    Raises `InputError` if it was not requested, is not found, raises on import, or has no such attribute.
    """
    module_name, colon, attribute = name.partition(":")
    # A recorded config may name a kind in a module that is already imported, but not any function, such as os:system.
    if (colon or module_name not in sys.modules) and module_name not in _requested()["names"]:
        raise InputError(
            f"{name}: a recorded config names this module, but does not cause its import. If you trust the module, "
            f"add --import {module_name}, or import it in your program."
        )
    module = sys.modules.get(module_name) or _import(module_name)
    if colon and not hasattr(module, attribute):
        nearest = did_you_mean(attribute, vars(module)) or f"Define {attribute} there."
        raise InputError(f"{name}: {_path(module)} has no {attribute}; {nearest}")
    return getattr(module, attribute) if colon else module


def ship_modules(environment: dict[str, Any], staging: Path) -> dict[str, Any]:
    """Extend the environment of Ray's workers so that workers on other machines get the requested modules, too.

    The modules' Python files are copied to the folder `staging`, which Ray sends.
    """
    if ENV_VAR not in os.environ:
        return environment
    requested = _requested()
    for package in map(Path, requested["carried"]):
        for file in [package] if package.is_file() else sorted(package.rglob("*.py")):
            copy = staging / file.relative_to(package.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    folder = {"working_dir": str(staging)} if requested["carried"] else {}
    value = json.dumps({**requested, "folders": []})  # the folders exist only on this machine
    return {**environment, **folder, "env_vars": {**environment.get("env_vars", {}), ENV_VAR: value}}


def imported_modules() -> dict[str, ModuleType]:
    """Return the requested modules that are imported, by name."""
    return {name: sys.modules[name] for name in _requested()["names"] if name in sys.modules}


def module_hashes() -> dict[str, str]:
    """Return the SHA-256 of each requested module's file, and of the modules that they import from the same folders."""
    prefixes = tuple(f"{Path(path).stem}." for path in _requested()["carried"])
    names = [name for name in sys.modules if name in _requested()["names"] or f"{name}.".startswith(prefixes)]
    files = {name: getattr(sys.modules[name], "__file__", None) for name in sorted(names)}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in files.items() if file}


def _requested() -> dict[str, list[str]]:
    """Return `names` of modules, `folders` to search, and paths in these folders to copy to workers (`carried`)."""
    return {"names": [], "folders": [], "carried": [], **json.loads(os.environ.get(ENV_VAR, "{}"))}


def _path(module: ModuleType) -> Path:
    """Return the folder of a package, or the file of a module."""
    return Path([*getattr(module, "__path__", ()), getattr(module, "__file__", None) or module.__name__][0])


def _import(name: str) -> ModuleType:
    folders = _requested()["folders"]
    # Added at the end of the path, so that a stray file does not replace an installed module.
    sys.path += [folder for folder in folders if folder not in sys.path]
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise InputError(_raised_message(name, error)) from None
        raise InputError(_missing_message(name, error.name, folders)) from None
    except (Exception, SystemExit) as error:
        raise InputError(_raised_message(name, error)) from None


def _missing_message(name: str, missing: str, folders: list[str]) -> str:
    parent, _, last = missing.rpartition(".")
    if not parent:
        return f"{name}: there is no package {last}; it is not installed, and not in {' or '.join(folders)}."
    package = sys.modules[parent]
    known = [module.name for module in pkgutil.iter_modules(getattr(package, "__path__", ()))]
    nearest = did_you_mean(last, known) or f"it has {', '.join(known) or 'none'}."
    return f"{name}: {_path(package)} has no module {last}; {nearest}"


def _raised_message(name: str, error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    folders = tuple(_requested()["folders"])
    frames = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename] or frames
    frame = next((frame for frame in reversed(frames) if frame.filename.startswith(folders)), frames[-1])
    where = (frame.filename, frame.lineno) if not isinstance(error, SyntaxError) else (error.filename, error.lineno)
    reason = (str(error).strip().splitlines() or [""])[0]
    return (
        f"{where[0]}:{where[1]}: {name} raises {type(error).__name__} when it is imported ({reason}). For its "
        f"traceback: PYTHONPATH={os.pathsep.join(folders)} python -c 'import {name}'"
    )
