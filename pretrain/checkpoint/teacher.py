"""The teacher of a distillation, read from any readable checkpoint, and what its student begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.released import read_released
from pretrain.checkpoint.start import digest, start_tokenizer
from pretrain.common.errors import InputError
from pretrain.config import ModelConfig, PretrainConfig
from pretrain.corpus.manifest import check_same_tokenizer
from pretrain.corpus.shards import open_shards
from pretrain.corpus.vocabulary import vocabulary_size
from pretrain.model.distillation import evenly_spread
from pretrain.model.heads import PretrainingModel
from pretrain.storage.runs import fetched_model

# Settings of the model that may differ between a student and the teacher whose layers it begins with.
_FREE = (
    "family",
    "size",
    "layers",
    "max_positions",
    "hidden_dropout",
    "attention_dropout",
    "init_std",
    "attention_init",
    "scaled_output_init",
)
# 0 in these fields stands for another field's value.
_DEFAULTS = {"embedding": "hidden", "kv_heads": "heads"}


@dataclass(frozen=True)
class Teacher:
    """A model that a student learns from.

    Attributes:
        folder: where it was read.
        model: its shape.
        next_sentence: whether it has a classifier of sentence pairs.
        state: of `pretrain.model.heads.PretrainingModel`, whole, fp32, with as many rows as its tokenizer has entries.
        fingerprint: SHA-256 of `state`, as hexadecimal digits.
    """

    folder: str
    model: ModelConfig
    next_sentence: bool
    state: dict[str, Tensor]
    fingerprint: str

    def build(self, *, compile: bool = False) -> PretrainingModel:
        """The model with these weights, not copied; it draws no random numbers."""
        with torch.device("meta"):
            rows = len(self.state["embeddings.word"])
            model = PretrainingModel(self.model, rows, self.next_sentence, compile=compile)
        model.load_state_dict(self.state, assign=True)
        return model


def check_teacher(config: PretrainConfig) -> None:
    """Raise `InputError` if the run's teacher cannot be read, or does not fit the corpus or the student."""
    teacher = read_teacher(config)
    if config.distillation.initialize:
        student_weights(config, teacher, student_shapes(config, teacher))


def student_shapes(config: PretrainConfig, teacher: Teacher) -> dict[str, torch.Size]:
    """Shapes of the student's parameters, by name, with the teacher's heads."""
    # `neighbors` needs the values of its biases, which a meta tensor has not.
    shape = config.model.model_copy(update={"attention_init": "normal"})
    with torch.device("meta"):
        student = PretrainingModel(shape, len(teacher.state["embeddings.word"]), teacher.next_sentence)
    return {name: tensor.shape for name, tensor in student.state_dict().items()}


def read_teacher(config: PretrainConfig) -> Teacher:
    """The model in `distillation.teacher`.

    Raises:
        InputError: it cannot be read, has no whole head for masked language modeling, knows too few positions, has
            another vocabulary than the corpus, or, if a loss compares hidden states, another width than the student.
    """
    folder, where = config.distillation.teacher, f"distillation.teacher: {config.distillation.teacher}"
    released = read_released(fetched_model(folder))
    tokenizer = start_tokenizer(fetched_model(folder), released)
    shards = open_shards(config.corpus.folder, "train")
    check_same_tokenizer(shards.folder, tokenizer, of="distillation.teacher")
    model, entries = released.model, config.model.rows(vocabulary_size(tokenizer))
    if entries > released.vocabulary_size:
        raise InputError(
            f"{where} has {released.vocabulary_size} rows of word embeddings, but model.vocabulary_rows is {entries}. "
            "Make them agree."
        )
    next_sentence = "heads.nsp_weight" in released.pretraining
    state, missing = released.prediction_state(next_sentence=next_sentence)
    if missing:
        raise InputError(
            f"{where} has no {missing}, so it predicts no masked tokens. Choose a model for masked language "
            "modeling, or train its head first with start_from."
        )
    longest = max(phase.sequence_length for phase in config.phases)
    if model.max_positions < longest:
        raise InputError(
            f"{where} knows {model.max_positions} positions, but phases have sequences of {longest}. Shorten them."
        )
    if config.distillation.cosine_weight and model.hidden != config.model.hidden:
        raise InputError(
            f"{where} has a hidden width of {model.hidden}, and the student of {config.model.hidden} (model.hidden). "
            "Set distillation.cosine_weight: 0, or the same width."
        )
    for name in ("embeddings.word", "heads.decoder", "heads.mlm_bias"):
        if name in state:
            state[name] = state[name][:entries].contiguous()
    return Teacher(folder, model, next_sentence, state, digest(state))


def student_weights(config: PretrainConfig, teacher: Teacher, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """What a student begins with: the teacher's embeddings and heads, and those of its layers that the config names.

    Args:
        config: the run.
        teacher: as `read_teacher` gives it.
        shapes: of the student's parameters, by name. A head that the teacher lacks is left out of the result.

    Raises:
        InputError: the student has other parts or widths, or the teacher has no such layer.
    """
    _refuse_other_shape(config, teacher)
    layers = config.distillation.layers or evenly_spread(config.model.layers, teacher.model.layers)
    if max(layers) >= teacher.model.layers or len(set(layers)) < len(layers):
        raise InputError(
            f"distillation.layers: {list(layers)}, but {teacher.folder} has {teacher.model.layers} layers, numbered "
            "from 0. Choose fewer layers for the student."
        )
    state: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        found = teacher.state.get(_source(name, layers))
        if found is None:
            if name.startswith("heads."):
                continue
            raise InputError(
                f"distillation.layers: the student needs {name}, but layer {layers[0]} of {teacher.folder} has none. "
                "Let the first layer be the teacher's first one."
            )
        if name == "embeddings.position":
            found = found[: config.model.max_positions]
        if tuple(found.shape) != tuple(shape):
            raise InputError(
                f"distillation.teacher: {teacher.folder}: {name} is {list(found.shape)}, but {list(shape)} in the "
                "student. Give it the teacher's shape, or set distillation.initialize: false."
            )
        state[name] = found
    return state


def _source(name: str, layers: Sequence[int]) -> str:
    """The teacher's parameter that one of the student's begins with."""
    part, _, rest = name.partition(".")
    if part != "layers":
        return name
    number, _, parameter = rest.partition(".")
    return f"layers.{layers[int(number)]}.{parameter}" if int(number) < len(layers) else ""


def _resolved(model: ModelConfig, name: str) -> Any:
    """The value of a field, or of the one that 0 stands for."""
    return getattr(model, name) or getattr(model, _DEFAULTS.get(name, name))


def _refuse_other_shape(config: PretrainConfig, teacher: Teacher) -> None:
    """Raise `InputError` for the first setting of the model that differs from the teacher's and has to be the same."""
    for name in ModelConfig.model_fields:
        own, theirs = (_resolved(model, name) for model in (config.model, teacher.model))
        if name not in _FREE and own != theirs:
            raise InputError(
                f"model.{name}: {own!r}, but the teacher ({teacher.folder}) has {theirs!r}, and the student begins "
                "with its layers. Set the teacher's, or distillation.initialize: false."
            )
    if config.model.max_positions > teacher.model.max_positions and config.model.positions == "learned":
        raise InputError(
            f"model.max_positions: {config.model.max_positions}, but the teacher ({teacher.folder}) has "
            f"{teacher.model.max_positions}. Lower it, or set distillation.initialize: false."
        )
