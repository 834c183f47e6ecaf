"""Optional packages that only some commands need, and the extras that install them."""

import contextlib
import importlib.util
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from pretrain.common.errors import InputError, MachineError

# The extras in pyproject.toml: extra -> modules that it installs and this project imports.
EXTRAS = {
    "abfs": ("adlfs",),
    "cluster": ("ray",),
    "data": ("datasets", "mwparserfromhell", "pandas", "pyarrow", "rensa", "sentencex"),
    "gs": ("gcsfs",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "s3": ("s3fs",),
    "train": ("deepspeed",),
    "wandb": ("wandb", "wandb_workspaces"),
}

MARKER_FOLDERS = {"cluster": "workers", "finetune": "training", "pretrain": "common"}  # our package -> a folder in it


def is_installed(module: str) -> bool:
    """Return whether `module` can be imported, without importing it."""
    if module in sys.modules:
        return sys.modules[module] is not None
    with contextlib.suppress(ImportError):
        spec = importlib.util.find_spec(module)
        return spec is not None and spec.origin is not None  # a folder of W&B runs, named wandb, has no origin
    return False


def install_command(*modules: str) -> str:
    """Return the command that installs the packages of `modules`: as extras if possible, else by name."""
    extras = ",".join(extra for extra, names in EXTRAS.items() if set(names) & set(modules))
    packages = f"'bertrain[{extras}]'" if extras else " ".join(modules)
    return f"{shlex.quote(sys.executable)} -m pip install {packages}"


def expect(purpose: str, *modules: str) -> None:
    """Raise `MachineError`, with an installation command, unless all `modules` are installed."""
    if missing := [module for module in modules if not is_installed(module)]:
        raise MachineError(f"{purpose}: {', '.join(missing)} not installed. Run: {install_command(*missing)}")


@contextlib.contextmanager
def convert_import_errors(purpose: str) -> Iterator[None]:
    """If a module that an extra installs is missing, raise the `MachineError` of `expect` for `purpose`."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if any(name in modules for modules in EXTRAS.values()):
            expect(purpose, name)
        raise


def check_not_shadowed(*names: str, path: Sequence[str] | None = None) -> None:
    """Raise `InputError` if a user's module on `path` (None: sys.path) shadows one of our packages."""
    for name in names:
        if (spec := PathFinder.find_spec(name, path)) is not None:
            folders = list(spec.submodule_search_locations or ())
            if not any(Path(folder, MARKER_FOLDERS[name]).is_dir() for folder in folders):
                raise InputError(f"{spec.origin or folders[0]} hides bertrain's package {name}. Rename it.")
