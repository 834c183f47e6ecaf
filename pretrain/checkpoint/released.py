"""Reads released encoders, and our runs and exports, from their folders (invariant 6 in docs/invariants.md).

Reads every family of `layouts` in transformers' format, and BERT in NVIDIA's format too.
`layouts` defines the names, `assembly` assembles the model, and `released_writer` writes fine-tuned models.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.checkpoint import store
from pretrain.checkpoint.assembly import ReleasedModel, assemble
from pretrain.checkpoint.layouts import BERTRAIN, Architecture, Layout, layout_of, read_config, unsupported_parts
from pretrain.checkpoint.layouts.pooled import POOLING, unwrap
from pretrain.checkpoint.mapping import MappedTensor
from pretrain.checkpoint.released_writer import with_position_table
from pretrain.checkpoint.sentence_transformers import sentence_files, sentence_pooling
from pretrain.checkpoint.tokenizer import is_run, released_folder
from pretrain.checkpoint.weight_files import read_weights
from pretrain.common.addresses import hub_hint
from pretrain.common.errors import InputError
from pretrain.common.files import read_json
from pretrain.common.thread_waits import one_thread
from pretrain.config import ModelConfig, config_of
from pretrain.objectives import make_objective
from pretrain.storage.runs import fetched_model

__all__ = ["ReleasedModel", "read_model_config", "read_released", "unsupported_in_transformers"]


def read_released(folder: Path) -> ReleasedModel:
    """Read the model in `folder`: a released model, an export, or a run (its latest checkpoint).

    Raises:
        InputError: something is missing or damaged, our encoder does not support the architecture, or a tensor of the
            backbone is missing or has the wrong shape.
    """
    model_folder = _model_folder(folder)
    if is_run(model_folder):
        return _read_run(model_folder)
    config, arch = _read_config(folder, model_folder)
    path, tensors = read_weights(model_folder)
    with one_thread():
        released = assemble(tensors, arch, config, where=str(path))
    # If the family has no pooling in config.json, it comes from sentence-transformers or from one of our exports.
    has_own_pooling = POOLING in arch.layout.values_of(arch.model, config)
    pooling = "" if has_own_pooling else config.get(POOLING, "")
    return replace(released, sentence_files=sentence_files(folder, arch.model, pooling))


def read_model_config(location: Path | str) -> ModelConfig:
    """Read the config of the model in a folder or at an address, without weights; `InputError` if there is none."""
    model_folder = _model_folder(folder := fetched_model(location))
    if is_run(model_folder):
        return with_position_table(config_of(model_folder).model, {})[0]
    return _read_config(folder, model_folder)[1].model


def _model_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. Use one with config.json and the weights.{hub_hint(folder)}")
    return released_folder(folder)


def unsupported_in_transformers(folder: Path) -> str:
    """Return the settings that keep transformers from loading the model, or ""; `InputError` for a bad config.json."""
    path = _config_path(folder)
    arch = _to_architecture(unwrap(read_json(path)), path)
    return unsupported_parts(arch.model) if arch.layout is BERTRAIN else ""


def _config_path(folder: Path) -> Path:
    found = next((folder / name for name in ("config.json", "bert_config.json") if (folder / name).is_file()), None)
    if found is None:
        raise InputError(f"{folder}: has no config.json. Use the folder of a released model.")
    return found


def _read_config(folder: Path, model_folder: Path) -> tuple[dict[str, Any], Architecture]:
    """Read the family's config.json; the pooling that `folder` declares for sentence-transformers takes precedence."""
    path = _config_path(model_folder)
    config = {**unwrap(read_json(path)), **sentence_pooling(folder)}
    return config, _to_architecture(config, path)


def _to_architecture(config: dict[str, Any], path: Path) -> Architecture:
    try:
        return read_config(config)
    except KeyError as error:
        raise InputError(f"{path}: {error} is missing. Use the config.json of an encoder.") from None
    except (ValueError, AttributeError, TypeError) as error:  # pydantic's errors are ValueErrors
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: bertrain's encoder does not support this model ({reason}).") from None


def _read_run(folder: Path) -> ReleasedModel:
    checkpoint = store.choose(folder / "checkpoints", None)
    export_spec = make_objective(config_of(folder)).exported[-1]  # the last one is the main model
    state = export_spec.weights(store.read_weights(checkpoint))
    # Parameters that fine-tuning adds are initialized as in BERT, like after an export (it records no attention_init).
    model, state = with_position_table(export_spec.shape.model_copy(update={"attention_init": "normal"}), state)
    layout = layout_of(model, export_spec.layout)
    pretraining = {name: tensor for name, tensor in state.items() if name.startswith("heads.")}
    renamed = {name: task_name for name in pretraining if (task_name := _task_head_name(name, layout))}
    return ReleasedModel(
        family=layout.family,
        model=model,
        backbone={name: tensor for name, tensor in state.items() if name not in pretraining},
        head={task_name.removeprefix("head."): pretraining[name] for name, task_name in renamed.items()},
        config=dict(sentence_pooling(folder)),
        mapping=tuple(MappedTensor(name, tuple(t.shape), renamed.get(name, name)) for name, t in state.items()),
        token_types=2 if model.token_types else 0,
        pretraining=pretraining,
        sentence_files=sentence_files(folder, model),
    )


def _task_head_name(name: str, layout: Layout) -> str:
    """Return the task-head parameter that is stored as the same tensor as the pretraining parameter `name`, or ""."""
    suffix = name.rpartition("_")[2]  # "weight" or "bias"
    candidates = (f"head.{module}_{suffix}" for module in ("dense", "norm"))
    return next((ours for ours in candidates if layout.names(name) == layout.names(ours) != []), "")
