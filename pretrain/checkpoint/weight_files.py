"""Reads the weight files of released models, unpickling only tensors, and writes exports atomically."""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pretrain.common.errors import InputError
from pretrain.common.files import (
    MANIFEST,
    disk_errors,
    fsync_folder,
    read_json,
    read_manifest,
    reject_lfs_pointer,
    sha256_file,
    write_manifest,
)
from pretrain.storage.released import TORCH_SUFFIXES, WEIGHT_FILES

WEIGHTS = WEIGHT_FILES[0]
FOR_TRANSFORMERS = {"format": "pt"}  # metadata of a safetensors file that transformers 4.x requires


def read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Read safetensors or torch weights, in one file or in shards; return (the file or the index, tensors by name).

    The first of these that exists is read: model.safetensors, its index, pytorch_model.bin, its index, the only other
    torch file in the folder. If the folder has our manifest, the files must match it.

    Raises:
        InputError: there are no weights, or they are damaged, incomplete or contain objects other than tensors.
    """
    path = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None) or _only_torch_file(folder)
    if path.name.endswith(".index.json"):
        return path, _read_shards(path)
    return path, _read_file(path)


@contextlib.contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; then add a manifest and rename it to `out`, replacing an earlier export.

    Other files in `out` are kept, as is a symbolic link to it. An error leaves `out` unchanged; if the process dies
    between two renames, `out` has become `.NAME.XXXX.old`. Raises `InputError` if `out` is not an export, or if one of
    the new files would replace a file that no export wrote.
    """
    out = out.resolve() if out.is_symlink() else out
    other_files = _other_files(out)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    with disk_errors(out):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            if clash := next((p for p in other_files if p.parent != out or (temporary / p.name).exists()), None):
                raise InputError(f"{clash}: no export wrote it, and this one would overwrite it. Move it, then retry.")
            for path in temporary.rglob("*"):
                if path.is_dir():
                    fsync_folder(path)
                else:
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            write_manifest(temporary, {"format": 1})
            _replace_folder(temporary, out, other_files)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _other_files(out: Path) -> list[Path]:
    """Return the files in `out`, or in its folders, that an earlier export did not write.

    Raises `InputError` if `out` is neither an export nor empty.
    """
    children = list(out.iterdir()) if out.is_dir() else []
    if not children and not (out.exists() and not out.is_dir()):
        return []
    # Corpora and checkpoints have a manifest, too.
    files = read_manifest(out)["files"] if (out / MANIFEST).is_file() else {}
    if "config.json" not in files:
        raise InputError(f"{out}: exists and is not an export. Choose another folder, or remove it.")
    exported = {MANIFEST, *(Path(name).parts[0] for name in files)}
    in_folders = [path for name in exported for path in (out / name).rglob("*") if path.is_file()]
    other_files = [path for path in in_folders if path.relative_to(out).as_posix() not in files]
    return [path for path in children if path.name not in exported] + other_files


def save_weights(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write contiguous tensors that share no storage as safetensors. Errors of the operating system are `OSError`."""
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(tensors, path, metadata)
        path.chmod(mode)  # safetensors gives only the owner access, ignoring the umask
    except SafetensorError as error:
        # safetensors reports an error of the operating system only in its message; restore the errno.
        match = re.search(r"os error (\d+)", str(error))
        raise OSError(int(match[1]) if match else 0, str(error)) from error


def _only_torch_file(folder: Path) -> Path:
    files = [path for path in sorted(folder.iterdir()) if path.suffix in TORCH_SUFFIXES]
    if len(files) == 1:
        return files[0]
    if any(folder.glob("*.index")):
        raise InputError(
            f"{folder}: a TensorFlow checkpoint. Google's are on the Hub with torch weights: use "
            "hf://google-bert/bert-base-uncased or hf://google/bert_uncased_L-4_H-256_A-4, for example."
        )
    found = f"; has {', '.join(path.name for path in files)}, but only one is allowed" if files else ""
    raise InputError(
        f"{folder}: has none of {', '.join(WEIGHT_FILES)}{found}. Use a folder with config.json and the weights."
    )


def _read_shards(index: Path) -> dict[str, Tensor]:
    names_by_file: dict[str, set[str]] = {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{index}: has no weight_map. Download it again.")
    for name, file in weight_map.items():
        # An untrusted index must not refer to files outside its folder.
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{index}: names the file {file!r}; only files in the same folder are read.")
        names_by_file.setdefault(file, set()).add(name)
    tensors: dict[str, Tensor] = {}
    for file, names in sorted(names_by_file.items()):
        if not (index.parent / file).is_file():
            raise InputError(f"{index.parent / file}: not found, but listed in {index.name}. Download it too.")
        shard = _read_file(index.parent / file)
        if missing := sorted(names - shard.keys()):
            raise InputError(f"{index.parent / file}: has no {missing[0]}, but {index.name} lists it.")
        tensors |= shard
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    _check_manifest(path)
    reject_lfs_pointer(path)
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: damaged ({error}). Download or export it again.") from None
    try:
        # Only tensors and plain containers are unpickled (invariant 5 in docs/invariants.md).
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises various exceptions for damaged bytes
        # torch's message advises loading arbitrary objects.
        reason = "it contains other objects" if "weights_only" in str(error) else str(error).strip().split("\n")[0]
        raise InputError(
            f"{path}: cannot be read as plain tensors ({reason}). Download it again, or convert it to safetensors."
        ) from None
    return _find_tensors(content, path)


def _find_tensors(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the tensors in a torch file, also below "model" (NVIDIA, fairseq) or "state_dict" (Lightning)."""
    for key in ("model", "state_dict", "module"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = content.items() if isinstance(content, Mapping) else ()
    by_name = {name: tensor for name, tensor in tensors if isinstance(name, str) and isinstance(tensor, Tensor)}
    if not by_name:
        raise InputError(f"{path}: is not a mapping of names to tensors. Use the weights of a model.")
    return by_name


def _check_manifest(path: Path) -> None:
    """Raise `InputError` if a file differs from its folder's manifest; other programs' manifest.json are ignored."""
    if not path.with_name(MANIFEST).is_file():
        return
    manifest = read_json(path.with_name(MANIFEST))
    files = manifest.get("files")
    if "format" in manifest and isinstance(files, dict) and sha256_file(path) != files.get(path.name, {}).get("sha256"):
        raise InputError(f"{path}: its SHA-256 differs from the manifest's, so the file was changed. Export again.")


def _replace_folder(temporary: Path, out: Path, other_files: Sequence[Path]) -> None:
    """Rename `temporary` to `out`. An earlier `out` is removed after its `other_files` are moved to the new one."""
    fsync_folder(temporary)
    old = out.with_name(f".{out.name}.{secrets.token_hex(4)}.old")
    if out.exists():
        out.rename(old)
    try:
        temporary.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    for path in other_files:
        (old / path.name).rename(path)
    fsync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)
