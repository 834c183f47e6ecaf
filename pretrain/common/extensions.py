"""The user's own modules, which a config or an option names: kinds, metrics and callbacks of other packages.

They are found where Python finds modules, then beside the config, then in the current folder. A module is imported only
if the user asks for it: with the config of a run that starts, with --import, or with an import of the program itself.
The config in a run folder, an export or a fine-tuned model asks for nothing, since a stranger may have written it.
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

ASKED = "BERTRAIN_MODULES"
"""The environment variable with what this process was asked for, as JSON of `_asked`; its workers inherit it."""

_OURS = ("pretrain", "finetune", "cluster")


class Contract(NamedTuple):
    """What a module of a kind has: `attribute`, a class that derives from `base` and has what is `needed`."""

    attribute: str
    base: type
    needed: tuple[str, ...] = ()  # that `base` only declares, besides its abstract methods

    def check(self, module: Any, name: str) -> None:
        """Raise `InputError` if the module `name` lacks it."""
        found, base = getattr(module, self.attribute, None), self.base.__name__
        if not (isinstance(found, type) and issubclass(found, self.base)):
            how = f"{self.attribute} = YourClass" if self.attribute.isupper() else f"class {self.attribute}({base})"
            raise InputError(
                f"{name}: {_path(module)} has no {self.attribute}, a class that derives from "
                f"{self.base.__module__}.{base}. Add `{how}`."
            )
        for member in (*sorted(getattr(found, "__abstractmethods__", ())), *self.needed):
            declared = getattr(self.base, member, None)
            if getattr(found, member, None) is declared:
                kind = inspect.signature(declared) if callable(declared) else f": {self.base.__annotations__[member]}"
                wanted = f"{member}{kind}".replace("'", "")
                raise InputError(f"{name}: {self.attribute} of {_path(module)} lacks {wanted}, which {base} asks for.")


def is_own(name: str) -> bool:
    """Whether a name is that of a module of the user's own, or of something in one: it has a dot or a colon."""
    return "." in name or ":" in name


def check_name(name: str, *, attribute: bool = False) -> None:
    """Raise `ValueError` if `name` is no `package.module`, or `package.module:name` with an `attribute`."""
    module, colon, inner = name.partition(":")
    parts = [*module.split("."), *([inner] if colon else [])]
    if not all(map(str.isidentifier, parts)) or bool(colon) != attribute or not (colon or is_own(name)):
        form = "my_package.module:name" if attribute else "my_package.module"
        raise ValueError(f"{name!r} is no dotted name of your own such as {form}")


def ask_for(names: Iterable[str], folder: Path | None = None) -> None:
    """Import these modules (`module` or `module:name`); they are looked for in `folder`, too. `InputError` as `own`."""
    asked, wanted = _asked(), list(dict.fromkeys(name.partition(":")[0] for name in names))
    if not wanted:
        return
    folders = [str(one.resolve()) for one in (folder, Path.cwd()) if one]
    asked["folders"] = list(dict.fromkeys([*asked["folders"], *folders]))
    asked["names"] = list(dict.fromkeys([*asked["names"], *wanted]))
    os.environ[ASKED] = json.dumps(asked)
    before = set(sys.modules)
    for name in wanted:
        own(name)
    tops = {name.partition(".")[0] for name in (*asked["names"], *(set(sys.modules) - before))} - set(_OURS)
    places = [_path(sys.modules[top]) for top in sorted(tops) if top in sys.modules]
    lying = [str(path) for path in places if str(path.parent) in asked["folders"]]
    os.environ[ASKED] = json.dumps({**asked, "carried": list(dict.fromkeys([*asked["carried"], *lying]))})


def own(name: str) -> Any:
    """The module `name`, or what `module:attribute` names.

    Raises `InputError`: nobody asked for it, it is not found, it raises, or it has no such attribute.
    """
    given, colon, attribute = name.partition(":")
    # Of what the program has imported, a recorded config may name a class of a kind, but not any function such as one
    # of os.
    if (colon or given not in sys.modules) and given not in _asked()["names"]:
        raise InputError(
            f"{name}: a recorded config names this module, and imports nothing by itself. If you trust the module, "
            f"add --import {given}, or import it in your program."
        )
    module = sys.modules.get(given) or _imported(given)
    if colon and not hasattr(module, attribute):
        nearest = did_you_mean(attribute, vars(module)) or f"Define {attribute} there."
        raise InputError(f"{name}: {_path(module)} has no {attribute}; {nearest}")
    return getattr(module, attribute) if colon else module


def carrying(environment: dict[str, Any], aside: Path) -> dict[str, Any]:
    """The environment of Ray's workers with what carries the modules to other machines.

    Their Python files are copied to the folder `aside`, which Ray sends.
    """
    if ASKED not in os.environ:
        return environment
    asked = _asked()
    for top in map(Path, asked["carried"]):
        for file in [top] if top.is_file() else sorted(top.rglob("*.py")):
            copy = aside / file.relative_to(top.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    folder = {"working_dir": str(aside)} if asked["carried"] else {}
    there = json.dumps({**asked, "folders": []})  # those are of this machine
    return {**environment, **folder, "env_vars": {**environment.get("env_vars", {}), ASKED: there}}


def asked_modules() -> dict[str, ModuleType]:
    """The modules that were asked for, by name."""
    return {name: sys.modules[name] for name in _asked()["names"] if name in sys.modules}


def hashes() -> dict[str, str]:
    """SHA-256 of the file of each module that was asked for, and of those beside them that they import."""
    tops = tuple(f"{Path(one).stem}." for one in _asked()["carried"])
    names = [name for name in sys.modules if name in _asked()["names"] or f"{name}.".startswith(tops)]
    files = {name: getattr(sys.modules[name], "__file__", None) for name in sorted(names)}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in files.items() if file}


def _asked() -> dict[str, list[str]]:
    """The names; the folders in which they are looked for; what lies there, which other machines lack."""
    return {"names": [], "folders": [], "carried": [], **json.loads(os.environ.get(ASKED, "{}"))}


def _path(module: ModuleType) -> Path:
    """The folder of a package, or the file of a module."""
    return Path([*getattr(module, "__path__", ()), getattr(module, "__file__", None) or module.__name__][0])


def _imported(name: str) -> ModuleType:
    folders = _asked()["folders"]
    # At the end: a stray file must not replace a module that is installed.
    sys.path += [folder for folder in folders if folder not in sys.path]
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise InputError(_why_raised(name, error)) from None
        raise InputError(_why_missing(name, error.name, folders)) from None
    except (Exception, SystemExit) as error:
        raise InputError(_why_raised(name, error)) from None


def _why_missing(name: str, missing: str, folders: list[str]) -> str:
    parent, _, last = missing.rpartition(".")
    if not parent:
        return f"{name}: there is no package {last}; it is not installed, and not in {' or '.join(folders)}."
    package = sys.modules[parent]
    known = [module.name for module in pkgutil.iter_modules(getattr(package, "__path__", ()))]
    nearest = did_you_mean(last, known) or f"it has {', '.join(known) or 'none'}."
    return f"{name}: {_path(package)} has no module {last}; {nearest}"


def _why_raised(name: str, error: BaseException) -> str:
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")]
    folders = tuple(_asked()["folders"])
    frames = [one for one in frames if one.filename != __file__ and "importlib" not in one.filename] or frames
    last = next((one for one in reversed(frames) if one.filename.startswith(folders)), frames[-1])
    where = (last.filename, last.lineno) if not isinstance(error, SyntaxError) else (error.filename, error.lineno)
    reason = (str(error).strip().splitlines() or [""])[0]
    return (
        f"{where[0]}:{where[1]}: {name} raises {type(error).__name__} when it is imported ({reason}). For its "
        f"traceback: PYTHONPATH={os.pathsep.join(folders)} python -c 'import {name}'"
    )
