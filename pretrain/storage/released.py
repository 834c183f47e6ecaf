"""Fetches only the files of a released model at an address that are needed to load it.

A repository often contains the same weights in several formats, several times the size of one.
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

# The first of these files that exists has the weights; if none does, a single torch file has them.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
INNER_FOLDER = "0_Transformer"  # the encoder's folder in older sentence-transformers models
# Config, tokenizer, pooling, a fine-tuned model's settings, and the file that identifies a TensorFlow checkpoint.
_PATTERNS = ("config.json", "bert_config.json", "tokenizer*.json", "vocab.*", "merges.txt", "*_tokens*.json", "*.model")
_PATTERNS += ("modules.json", "*_Pooling/config.json", "*sentence_*.json", "finetune.json", "*.index")
# Files of a pooled classifier.
_PATTERNS += ("encoder/modules.json", "encoder/*_Pooling/config.json", "encoder/*sentence_*.json")
_FETCHED = ".fetched.json"  # names of the files that were fetched
_FETCHING = ".fetching.json"  # name of that file during a fetch


def fetch_released(address: str, objects: ObjectStore) -> None:
    """Fetch the released model at `address` to its local folder. Raises `InputError` if it is not stored there."""
    listed = folders.find(address, objects)
    if address not in listed:  # it is a folder
        names = {name[len(address) + 1 :] for name in listed}
        listed = {join(address, name): listed[join(address, name)] for name in _files(address, names, objects)}
    if not listed:
        raise InputError(f"{address}: no config.json, tokenizer or weights are stored there. Check the address.")
    if (record := local_path(address) / _FETCHED).is_file():  # renamed, so that a mix of two revisions is not loaded
        record.replace(record.with_name(_FETCHING))
    _remove_deleted(local_path(address), folders.fetch_found(address, listed, objects, shown=True))


def is_offline(address: str) -> bool:
    """Return whether the Hub must not be queried (HF_HUB_OFFLINE) and `address` was fetched before."""
    if not address.startswith("hf:") or not any(
        (local_path(address) / name).is_file() for name in (_FETCHED, MANIFEST)
    ):
        return False
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _files(address: str, names: Collection[str], objects: ObjectStore) -> set[str]:
    """Return the subset of `names` at `address` that is needed to load the model, with one set of weights."""
    inner = f"{INNER_FOLDER}/" if "config.json" not in names and f"{INNER_FOLDER}/config.json" in names else ""
    local_names = {name.removeprefix(inner) for name in names if name.startswith(inner)}
    weights = [name for name in WEIGHT_FILES if name in local_names][:1]
    if not weights:
        torch_files = [name for name in local_names if Path(name).suffix in TORCH_SUFFIXES and "/" not in name]
        weights = torch_files if len(torch_files) == 1 else []
    elif weights[0].endswith(".index.json"):
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # reading it raises later
            content = json.loads(objects.read(join(address, inner + weights[0])) or b"")
            weights += local_names & set(content["weight_map"].values())
    chosen = [name for name in local_names if name in weights or _matches(name)]
    return {inner + name for name in chosen} | {name for name in names if _matches(name)}


def _matches(name: str) -> bool:
    return any(name.count("/") == p.count("/") and fnmatch.fnmatchcase(name, p) for p in _PATTERNS)


def _remove_deleted(folder: Path, downloaded: Iterable[Path]) -> None:
    """Remove earlier fetched files that no longer exist at the address: they could be loaded instead of new ones."""
    if not folder.is_dir():  # the address is a file's
        return
    names, journal = {path.relative_to(folder).as_posix() for path in downloaded}, folder / _FETCHING
    earlier = json.loads(journal.read_text(encoding="utf-8")) if journal.is_file() else []
    for name in set(earlier) - names:
        (folder / name).unlink(missing_ok=True)
    write_json(folder / _FETCHED, sorted(names))
    journal.unlink(missing_ok=True)
