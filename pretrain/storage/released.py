"""Released models at an address: of all the files there, those that a model is read from.

A repository often holds the same weights in several formats, which together are several times as large.
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

# The first of these that is there has the weights; else the only file of torch.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
INNER = "0_Transformer"  # the encoder's folder in older folders of sentence-transformers
# Config, tokenizer, pooling, a fine-tuned model's settings, and what tells a TensorFlow checkpoint.
_OTHERS = ("config.json", "bert_config.json", "tokenizer*.json", "vocab.*", "merges.txt", "*_tokens*.json", "*.model")
_OTHERS += ("modules.json", "*_Pooling/config.json", "*sentence_*.json", "finetune.json", "*.index")
# Of a pooled classifier
_OTHERS += ("encoder/modules.json", "encoder/*_Pooling/config.json", "encoder/*sentence_*.json")
_FETCHED = ".fetched.json"  # names of the files that were fetched
_FETCHING = ".fetching.json"  # that, during a fetch


def fetch_released(address: str, objects: ObjectStore) -> None:
    """Bring the released model at `address` to its local folder. `InputError` if there is nothing to read it from."""
    found = folders.find(address, objects)
    if address not in found:  # a folder
        names = {name[len(address) + 1 :] for name in found}
        found = {join(address, name): found[join(address, name)] for name in _files(address, names, objects)}
    if not found:
        raise InputError(f"{address}: no config.json, tokenizer or weights are stored there. Check the address.")
    if (record := local(address) / _FETCHED).is_file():  # without it, files of two revisions are not taken for a model
        record.replace(record.with_name(_FETCHING))
    _forget_deleted(local(address), folders.fetch_found(address, found, objects, shown=True))


def is_offline(address: str) -> bool:
    """Whether the Hub may not be asked (HF_HUB_OFFLINE), and what it had at `address` is here."""
    if not address.startswith("hf:") or not any((local(address) / name).is_file() for name in (_FETCHED, MANIFEST)):
        return False
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _files(address: str, names: Collection[str], objects: ObjectStore) -> set[str]:
    """Those of the files `names` at `address` that a model is read from, with one set of weights."""
    inner = f"{INNER}/" if "config.json" not in names and f"{INNER}/config.json" in names else ""
    own = {name.removeprefix(inner) for name in names if name.startswith(inner)}
    weights = [name for name in WEIGHT_FILES if name in own][:1]
    if not weights:
        torch_files = [name for name in own if Path(name).suffix in TORCH_SUFFIXES and "/" not in name]
        weights = torch_files if len(torch_files) == 1 else []
    elif weights[0].endswith(".index.json"):
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # refused where it is read
            content = json.loads(objects.read(join(address, inner + weights[0])) or b"")
            weights += own & set(content["weight_map"].values())
    chosen = [name for name in own if name in weights or _matches(name)]
    return {inner + name for name in chosen} | {name for name in names if _matches(name)}


def _matches(name: str) -> bool:
    return any(name.count("/") == one.count("/") and fnmatch.fnmatchcase(name, one) for one in _OTHERS)


def _forget_deleted(folder: Path, downloaded: Iterable[Path]) -> None:
    """Remove files that an earlier call fetched, and that were deleted at the address; their names may win."""
    if not folder.is_dir():  # the address of one file
        return
    names, earlier = {path.relative_to(folder).as_posix() for path in downloaded}, folder / _FETCHING
    before = json.loads(earlier.read_text(encoding="utf-8")) if earlier.is_file() else []
    for name in set(before) - names:
        (folder / name).unlink(missing_ok=True)
    write_json(folder / _FETCHED, sorted(names))
    earlier.unlink(missing_ok=True)
