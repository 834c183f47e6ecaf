"""Every parameter of the model: name, shape and initial values. Modules, estimates and file layouts read this list.

Modules create their parameters from it, so a parameter added here is created and counted, and must be mapped in the
released layouts (`pretrain/checkpoint/layouts/`). Does not need torch.

Names are MODULE_KIND: `ffn_norm_weight` is the weight of the module ffn_norm. Modules named `*norm` are norms.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from pretrain.config import ModelConfig
from pretrain.model.norms import Initial, get_norm

# Modules whose weight and bias stack several projections of equal size along the first axis.
STACKED = {
    "qkv": 3,  # query, key and value
    "kv": 2,  # key and value, if they have fewer heads than the query
    "gated_in": 2,  # the input of the activation, and the gate
}


class Parameter(NamedTuple):
    """One parameter of a module."""

    name: str
    shape: tuple[int, ...]
    initial: Initial
    scale: float = 1.0  # factor of the initial standard deviation of "normal" values

    @property
    def numel(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)


def embedding_parameters(model: ModelConfig, vocabulary_size: int) -> tuple[Parameter, ...]:
    """The parameters of `encoder.Embeddings`: tables, norm, and a projection if they are not as wide as the layers."""
    width = model.embedding or model.hidden
    tables = {
        "word": vocabulary_size,
        "position": model.max_positions if model.positions == "learned" else 0,
        "token_type": 2 if model.token_types else 0,
    }
    return (
        *(Parameter(name, (rows, width), "normal") for name, rows in tables.items() if rows or name == "word"),
        *(_norm_parameters("norm", width, model) if model.embedding_norm else ()),
        *(linear_parameters("project", model.hidden, width) if width != model.hidden else ()),
    )


def position_parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """The parameters of `relative_positions.RelativeBiases` or `RelativeEmbeddings`, shared by all layers."""
    if model.positions == "relative":
        return (Parameter("table", (model.relative_buckets, model.heads), "normal"),)
    if model.disentangled:
        table = Parameter("table", (2 * model.relative_span, model.hidden), "normal")
        return table, *(_norm_parameters("norm", model.hidden, model) if model.relative_norm else ())
    return ()


def layer_parameters(model: ModelConfig, index: int) -> tuple[Parameter, ...]:
    """The parameters of the `block.Layer` with this index, in the order of the computation."""
    hidden, ffn = model.hidden, model.intermediate
    pre_norm = model.norm_placement == "pre"
    attention_norm = _norm_parameters("attention_norm", hidden, model) if model.has_attention_norm(index) else ()
    ffn_norm = _norm_parameters("ffn_norm", hidden, model)
    scale = _output_scale(model)
    ffn_in, inner = ("gated_in", STACKED["gated_in"] * ffn) if model.gated else ("ffn_in", ffn)
    return (
        *(attention_norm if pre_norm else ()),
        *_qkv_parameters(model),
        *relative_projection_parameters(model),
        *linear_parameters("attention_out", hidden, hidden, bias=model.attention_bias, scale=scale),
        *(ffn_norm if pre_norm else attention_norm),
        *linear_parameters(ffn_in, inner, hidden, bias=model.ffn_in_bias),
        *linear_parameters("ffn_out", hidden, ffn, bias=model.ffn_out_bias, scale=scale),
        *(() if pre_norm else ffn_norm),
    )


def relative_projection_parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """A layer's own projections of distance embeddings to keys (c2p) and queries (p2c); () if it uses the tokens'."""
    terms = {"position_key": "c2p", "position_query": "p2c"} if model.relative_projections else {}
    names = [name for name, term in terms.items() if model.relative_terms in (term, "both")]
    hidden, bias = model.hidden, model.attention_bias
    return tuple(p for name in names for p in linear_parameters(name, hidden, hidden, bias=bias))


def final_parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """The parameters of `final_norm.FinalNorm`, after the last layer of a pre-norm model."""
    return _norm_parameters("norm", model.hidden, model) if model.norm_placement == "pre" else ()


def head_parameters(model: ModelConfig, vocabulary_size: int, next_sentence: bool) -> tuple[Parameter, ...]:
    """The parameters of `heads.Heads`. A decoder that is tied to the word embeddings is not listed."""
    hidden, width, scale = model.hidden, model.embedding or model.hidden, _output_scale(model)
    nsp = (*linear_parameters("pooler", hidden, hidden), *linear_parameters("nsp", 2, hidden)) if next_sentence else ()
    transform = (
        *linear_parameters("mlm_transform", width, hidden, bias=model.mlm_transform_bias, scale=scale),
        *_norm_parameters("mlm_norm", width, model),
    )
    return (
        *nsp,
        *(transform if model.mlm_transform else ()),
        *(() if model.tied_decoder else (Parameter("decoder", (vocabulary_size, width), "normal", scale),)),
        *((Parameter("mlm_bias", (vocabulary_size,), "zeros"),) if model.decoder_bias else ()),
    )


def linear_parameters(
    name: str,
    outputs: int,
    inputs: int,
    *,
    bias: bool = True,
    scale: float = 1.0,
) -> tuple[Parameter, ...]:
    """The parameters of a linear layer: weight [outputs, inputs], and bias [outputs] if it has one."""
    weight = Parameter(f"{name}_weight", (outputs, inputs), "normal", scale)
    return (weight, Parameter(f"{name}_bias", (outputs,), "zeros")) if bias else (weight,)


def has_weight_decay(name: str) -> bool:
    """Return whether weight decay and LAMB's trust ratio apply to a parameter. Biases and norms are exempt."""
    module, _, kind = name.rpartition("_")
    return not kind.endswith("bias") and not module.endswith("norm")


def is_hidden_matrix(name: str) -> bool:
    """Return whether Muon updates a parameter: the layers' weight matrices, not embeddings, heads, norms or biases."""
    return ".layers." in f".{name}" and has_weight_decay(name)


def stacked_parts(name: str) -> int:
    """Return the number of projections stacked in a parameter; 1 for most parameters."""
    return STACKED.get(name.rpartition(".")[2].rpartition("_")[0], 1)


def layer_of(name: str, layers: int) -> int:
    """Return the depth of a parameter: 0 for embeddings, 1 to `layers` for the layers, `layers` + 1 for all others."""
    module, _, child = name.partition(".")
    if module in ("embeddings", "relative"):
        return 0
    return int(child.partition(".")[0]) + 1 if module == "layers" else layers + 1


def total(parameters: Iterable[Parameter]) -> int:
    """Return the number of entries of all `parameters`."""
    return sum(parameter.numel for parameter in parameters)


def matrix_entries(parameters: Iterable[Parameter]) -> int:
    """Return the number of entries of the weight matrices among `parameters`: their multiply-adds per token."""
    return sum(parameter.numel for parameter in parameters if len(parameter.shape) == 2)


def _qkv_parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """The projections to query, key and value: stacked, or the query separate if keys and values have fewer heads."""
    hidden, bias = model.hidden, model.attention_bias
    if model.kv_heads in (0, model.heads):
        return linear_parameters("qkv", STACKED["qkv"] * hidden, hidden, bias=bias)
    rows = STACKED["kv"] * model.kv_heads * model.head_width
    return *linear_parameters("q", hidden, hidden, bias=bias), *linear_parameters("kv", rows, hidden, bias=bias)


def _output_scale(model: ModelConfig) -> float:
    """Return the scale of output layers' initial values (transformers modeling_modernbert.py, _init_weights, "out")."""
    return (2 * model.depth) ** -0.5 if model.family == "modernbert" else 1.0


def _norm_parameters(name: str, width: int, model: ModelConfig) -> tuple[Parameter, ...]:
    kinds = get_norm(model.norm).parameters
    return tuple(Parameter(f"{name}_{kind}", (width,), initial) for kind, initial in kinds.items())
