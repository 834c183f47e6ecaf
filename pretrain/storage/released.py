"""Fetches only the files of a released model at an address that are needed to load it.

A repository often contains the same weights in several formats, which together are several times as large.
"""

import contextlib
import fnmatch
import json
from collections.abc import Collection, Iterable
from pathlib import Path

from pretrain.common.addresses import join, local
from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST, write_json
from pretrain.storage import folders
from pretrain.storage.objects import ObjectStore

# The first of these files that exists has the weights; if there is none, the only torch file.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
INNER = "0_Transformer"  # the encoder's folder in older folders of sentence-transformers
# Config, tokenizer, pooling, a fine-tuned model's settings, and the file that identifies a TensorFlow checkpoint.
_OTHERS = ("config.json", "bert_config.json", "tokenizer*.json", "vocab.*", "merges.txt", "*_tokens*.json", "*.model")
_OTHERS += ("modules.json", "*_Pooling/config.json", "*sentence_*.json", "finetune.json", "*.index")
# Files of a pooled classifier
_OTHERS += ("encoder/modules.json", "encoder/*_Pooling/config.json", "encoder/*sentence_*.json")
_FETCHED = ".fetched.json"  # names of the files that were fetched
_FETCHING = ".fetching.json"  # the name of that file during a fetch


def fetch_released(address: str, objects: ObjectStore) -> None:
    """Fetch the released model at `address` to its local folder. Raises `InputError` if its files are not there."""
    found = folders.find(address, objects)
    if address not in found:  # a folder
        names = {name[len(address) + 1 :] for name in found}
        found = {join(address, name): found[join(address, name)] for name in _files(address, names, objects)}
    if not found:
        raise InputError(f"{address}: no config.json, tokenizer or weights are stored there. Check the address.")
    if (record := local(address) / _FETCHED).is_file():  # absent, so a mix of two revisions is not loaded
        record.replace(record.with_name(_FETCHING))
    _forget_deleted(local(address), folders.fetch_found(address, found, objects, shown=True))


def is_offline(address: str) -> bool:
    """Return whether the Hub must not be queried (HF_HUB_OFFLINE) and `address` was fetched before."""
    if not address.startswith("hf:") or not any((local(address) / name).is_file() for name in (_FETCHED, MANIFEST)):
        return False
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _files(address: str, names: Collection[str], objects: ObjectStore) -> set[str]:
    """Return the files, of `names` at `address`, that are needed to load the model, with one set of weights."""
    inner = f"{INNER}/" if "config.json" not in names and f"{INNER}/config.json" in names else ""
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
    return any(name.count("/") == one.count("/") and fnmatch.fnmatchcase(name, one) for one in _OTHERS)


def _forget_deleted(folder: Path, downloaded: Iterable[Path]) -> None:
    """Remove files of earlier fetches that no longer exist at the address: they might be loaded instead of new ones."""
    if not folder.is_dir():  # the address of one file
        return
    names, earlier = {path.relative_to(folder).as_posix() for path in downloaded}, folder / _FETCHING
    before = json.loads(earlier.read_text(encoding="utf-8")) if earlier.is_file() else []
    for name in set(before) - names:
        (folder / name).unlink(missing_ok=True)
    write_json(folder / _FETCHED, sorted(names))
    earlier.unlink(missing_ok=True)
