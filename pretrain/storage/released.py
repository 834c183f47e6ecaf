"""Fetches the files of a released model that are needed to load it.

A repository often contains the same weights in several formats, and is several times as large as any one of them.
"""

import contextlib
import fnmatch
import json
from collections.abc import Collection, Iterable
from pathlib import Path

from pretrain.common.addresses import join, local_path
from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST, write_json
from pretrain.storage import folders
from pretrain.storage.objects import ObjectStore

# The weights are in the first of these files that exists, or else in the only torch file.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
INNER_FOLDER = "0_Transformer"  # the encoder's folder in older sentence-transformers models
# Files to fetch: config, tokenizer, pooling, a fine-tuned model's settings, and the index of a TensorFlow checkpoint.
_PATTERNS = ("config.json", "bert_config.json", "tokenizer*.json", "vocab.*", "merges.txt", "*_tokens*.json", "*.model")
_PATTERNS += ("modules.json", "*_Pooling/config.json", "*sentence_*.json", "finetune.json", "*.index")
# The same files of the encoder in an exported classifier with mean or maximum pooling.
_PATTERNS += ("encoder/modules.json", "encoder/*_Pooling/config.json", "encoder/*sentence_*.json")
_FETCHED = ".fetched.json"  # record: a list of the files that were fetched
_FETCHING = ".fetching.json"  # name of the previous record while a fetch is in progress


def fetch_released(address: str, objects: ObjectStore) -> None:
    """Fetch the released model at `address` to its local folder. Raises `InputError` if it is not stored there."""
    listed = folders.find(address, objects)
    if address not in listed:  # the address is a folder
        names = {name[len(address) + 1 :] for name in listed}
        listed = {join(address, name): listed[join(address, name)] for name in _needed_files(address, names, objects)}
    if not listed:
        raise InputError(f"{address}: no config.json, tokenizer or weights are stored there. Check the address.")
    if (record := local_path(address) / _FETCHED).is_file():  # renamed, so that an interrupted fetch leaves no record
        record.replace(record.with_name(_FETCHING))
    _remove_outdated(local_path(address), folders.fetch_found(address, listed, objects, show_progress=True))


def must_use_local_copy(address: str) -> bool:
    """Return whether HF_HUB_OFFLINE is set and `address`, which is on the Hub, was fetched before."""
    if not address.startswith("hf:") or not any(
        (local_path(address) / name).is_file() for name in (_FETCHED, MANIFEST)
    ):
        return False
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _needed_files(address: str, names: Collection[str], objects: ObjectStore) -> set[str]:
    """Return the subset of `names` at `address` that is needed to load the model, with one set of weights."""
    prefix = f"{INNER_FOLDER}/" if "config.json" not in names and f"{INNER_FOLDER}/config.json" in names else ""
    local_names = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    weights = [name for name in WEIGHT_FILES if name in local_names][:1]
    if not weights:
        torch_files = [name for name in local_names if Path(name).suffix in TORCH_SUFFIXES and "/" not in name]
        weights = torch_files if len(torch_files) == 1 else []
    elif weights[0].endswith(".index.json"):
        # A damaged index raises an error when it is loaded.
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            content = json.loads(objects.read(join(address, prefix + weights[0])) or b"")
            weights += local_names & set(content["weight_map"].values())
    chosen = [name for name in local_names if name in weights or _matches(name)]
    return {prefix + name for name in chosen} | {name for name in names if _matches(name)}


def _matches(name: str) -> bool:
    return any(name.count("/") == p.count("/") and fnmatch.fnmatchcase(name, p) for p in _PATTERNS)


def _remove_outdated(folder: Path, fetched: Iterable[Path]) -> None:
    """Remove fetched files that are no longer at the address, since they could be loaded instead of new ones."""
    if not folder.is_dir():  # the address is a single file
        return
    names, old_record = {path.relative_to(folder).as_posix() for path in fetched}, folder / _FETCHING
    old_names = json.loads(old_record.read_text(encoding="utf-8")) if old_record.is_file() else []
    for name in set(old_names) - names:
        (folder / name).unlink(missing_ok=True)
    write_json(folder / _FETCHED, sorted(names))
    old_record.unlink(missing_ok=True)
