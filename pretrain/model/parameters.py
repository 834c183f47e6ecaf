"""Every parameter of the model: name, shape and initial values. Modules, estimates and file layouts read this list.

Modules create their parameters from it, so a parameter that is added here exists, is counted, and must have a place in
the released layouts (`pretrain/checkpoint/layouts.py`). No torch is needed.

A name is MODULE_KIND: `ffn_norm_weight` is the weight of the module ffn_norm. Modules that end with `norm` are norms.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pretrain.config import ModelConfig
from pretrain.model.norms import Initial, get_norm

# Modules whose weight and bias stack several projections of equal size along the first axis.
STACKED = {"qkv": 3}  # query, key and value


class Parameter(NamedTuple):
    """One parameter of a module."""

    name: str
    shape: tuple[int, ...]
    initial: Initial

    @property
    def numel(self) -> int:
        """Entries."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def embedding_parameters(model: ModelConfig, vocabulary_size: int) -> tuple[Parameter, ...]:
    """The parameters of `encoder.Embeddings`: three tables, their norm, and a projection if the widths differ."""
    width = model.embedding or model.hidden
    return (
        Parameter("word", (vocabulary_size, width), "normal"),
        Parameter("position", (model.max_positions, width), "normal"),
        Parameter("token_type", (2, width), "normal"),
        *_norm("norm", width, model),
        *(linear_parameters("project", model.hidden, width) if width != model.hidden else ()),
    )


def layer_parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """The parameters of one `encoder.Layer`, in the order of the computation."""
    hidden, ffn = model.hidden, model.intermediate
    return (
        *linear_parameters("qkv", STACKED["qkv"] * hidden, hidden),
        *linear_parameters("attention_out", hidden, hidden),
        *_norm("attention_norm", hidden, model),
        *linear_parameters("ffn_in", ffn, hidden),
        *linear_parameters("ffn_out", hidden, ffn),
        *_norm("ffn_norm", hidden, model),
    )


def head_parameters(model: ModelConfig, vocabulary_size: int, next_sentence: bool) -> tuple[Parameter, ...]:
    """The parameters of `heads.Heads`. The decoder is not listed: it is tied to the word embeddings."""
    hidden, width = model.hidden, model.embedding or model.hidden
    pair = (*linear_parameters("pooler", hidden, hidden), *linear_parameters("nsp", 2, hidden)) if next_sentence else ()
    return (
        *pair,
        *linear_parameters("mlm_transform", width, hidden),
        *_norm("mlm_norm", width, model),
        Parameter("mlm_bias", (vocabulary_size,), "zeros"),
    )


def linear_parameters(name: str, outputs: int, inputs: int) -> tuple[Parameter, Parameter]:
    """The parameters of a linear layer: weight [outputs, inputs] and bias."""
    return Parameter(f"{name}_weight", (outputs, inputs), "normal"), Parameter(f"{name}_bias", (outputs,), "zeros")


def has_weight_decay(name: str) -> bool:
    """Whether weight decay and LAMB's trust ratio apply to a parameter. Biases and norms are exempt."""
    module, _, kind = name.rpartition("_")
    return not kind.endswith("bias") and not module.endswith("norm")


def stacked_parts(name: str) -> int:
    """How many projections a parameter stacks; 1 for most."""
    return STACKED.get(name.rpartition(".")[2].rpartition("_")[0], 1)


def layer_of(name: str, layers: int) -> int:
    """The depth of a parameter: 0 for embeddings, 1 to `layers` for the layers, `layers` + 1 for heads."""
    part, _, rest = name.partition(".")
    if part == "embeddings":
        return 0
    return int(rest.partition(".")[0]) + 1 if part == "layers" else layers + 1


def total(parameters: Iterable[Parameter]) -> int:
    """Entries of all `parameters`."""
    return sum(parameter.numel for parameter in parameters)


def matrix_entries(parameters: Iterable[Parameter]) -> int:
    """Entries of the weight matrices among `parameters`: every token multiplies and adds each of them once."""
    return sum(parameter.numel for parameter in parameters if len(parameter.shape) == 2)


def _norm(name: str, width: int, model: ModelConfig) -> tuple[Parameter, ...]:
    kinds = get_norm(model.norm).parameters
    return tuple(Parameter(f"{name}_{kind}", (width,), initial) for kind, initial in kinds.items())
