"""Google's releases of BERT as TensorFlow 1 checkpoints, under the names that transformers gives their tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from pretrain.checkpoint.mapping import LEFT_OUT, MappedTensor
from pretrain.checkpoint.tensorflow1 import Checkpoint
from pretrain.common.errors import InputError


class GoogleTensors(NamedTuple):
    """The tensors of a checkpoint."""

    tensors: dict[str, Tensor]  # by transformers' names
    originals: dict[str, tuple[str, tuple[int, ...]]]  # of each: the variable's name and shape in the file
    left_out: list[MappedTensor]  # variables that are no part of a model


def find_checkpoint(folder: Path) -> Path | None:
    """The prefix of the TensorFlow checkpoint in `folder`: the only one, or the one that the file `checkpoint` names.

    None if the folder has torch weights, or no checkpoint. Raises `InputError` if several could be meant.
    """
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return None
    prefixes = sorted(path.with_suffix("") for path in folder.glob("*.index"))
    if len(prefixes) > 1 and (folder / "checkpoint").is_file():
        text = (folder / "checkpoint").read_text(encoding="utf-8", errors="replace")
        newest = re.search(r'^model_checkpoint_path: "(?:.*/)?([^"/]+)"', text, re.MULTILINE)
        prefixes = [path for path in prefixes if newest and path.name == newest[1]] or prefixes
    if len(prefixes) > 1:
        names = ", ".join(path.name for path in prefixes)
        raise InputError(f"{folder}: has several TensorFlow checkpoints ({names}). Keep only the one to read.")
    return prefixes[0] if prefixes else None


def read_google(prefix: Path) -> GoogleTensors:
    """All tensors of a model in the checkpoint. Raises `InputError` if it is damaged."""
    checkpoint = Checkpoint(prefix)
    result = GoogleTensors({}, {}, [])
    for name, variable in checkpoint.variables.items():
        theirs = _torch_name(name)
        if theirs is None or not variable.readable:
            reason = "no values of a model" if theirs else "the optimizer's"
            result.left_out.append(MappedTensor(name, variable.shape, f"{LEFT_OUT}{reason}"))
            continue
        values = checkpoint.read(name)
        result.tensors[theirs] = values.T if name.endswith("/kernel") else values
        result.originals[theirs] = name, variable.shape
    return result


# The names of the heads in google-research/bert: run_classifier.py, run_squad.py and run_pretraining.py.
_TENSORFLOW_HEADS = {
    "output_": "classifier.",
    "cls/squad/output_": "qa_outputs.",
    "cls/seq_relationship/output_": "cls.seq_relationship.",
}


def _torch_name(name: str) -> str | None:
    """A variable of Google's BERT under transformers' name; None for an optimizer's."""
    if name == "global_step" or name.rpartition("/")[2] in ("adam_m", "adam_v"):
        return None
    if name == "cls/predictions/output_bias":
        return "cls.predictions.bias"
    for beginning, module in _TENSORFLOW_HEADS.items():
        if name in (f"{beginning}weights", f"{beginning}bias"):
            return module + ("weight" if name.endswith("weights") else "bias")
    name = re.sub(r"/layer_(\d+)/", r"/layer/\1/", name)
    name = re.sub(r"/(kernel|gamma)$", "/weight", name)
    name = re.sub(r"/beta$", "/bias", name)
    name = re.sub(r"_embeddings$", "_embeddings/weight", name)
    return name.replace("/", ".")
