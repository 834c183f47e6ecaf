"""The cost of a model, from its config alone: parameters, FLOPs, and memory. Does not need torch.

H is the hidden width, and T the number of tokens of a micro-batch.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from pretrain.config import ModelConfig
from pretrain.model.activations import get_activation
from pretrain.model.norms import get_norm
from pretrain.model.parameters import (
    Parameter,
    embedding_parameters,
    final_parameters,
    head_parameters,
    layer_parameters,
    matrix_entries,
    position_parameters,
    stacked_parts,
    total,
)

# Maximum number of vocabulary logits that are computed at a time: 2^26 bf16 entries are 128 MiB. Smaller chunks would
# accumulate the decoder's gradient more often.
LOGITS_PER_CHUNK = 1 << 26
# 2 FLOPs per multiply-add; the backward pass has twice the products of the forward pass.
FLOPS_PER_ENTRY = 6
_PROJECTIONS = ("qkv_weight", "q_weight", "kv_weight")


class ParameterCount(NamedTuple):
    """Parameter counts. A decoder that is tied to the word embeddings is counted once."""

    embeddings: int  # including tables of relative positions
    layers: int  # including the final norm
    heads: int  # pooler, NSP classifier, MLM transform, untied decoder and decoder bias

    @property
    def total(self) -> int:
        """The total, as transformers counts it for BertForPreTraining (BertForMaskedLM without NSP)."""
        return sum(self)


def check_names(model: ModelConfig) -> None:
    """Raise `InputError` if the config names an unknown norm or activation."""
    get_norm(model.norm)
    get_activation(model.activation)


def parameter_count(model: ModelConfig, vocabulary_size: int, next_sentence: bool = True) -> ParameterCount:
    """Count the parameters of the encoder with its pretraining heads. Raises `InputError` as `check_names` does."""
    check_names(model)
    return ParameterCount(
        total(embedding_parameters(model, vocabulary_size)) + total(position_parameters(model)),
        sum(total(layer_parameters(model, index)) for index in range(model.layers)) + total(final_parameters(model)),
        total(head_parameters(model, vocabulary_size, next_sentence)),
    )


def flops(
    model: ModelConfig, vocabulary_size: int, lengths: Sequence[float], masked: float, next_sentence: bool = True
) -> float:
    """Return the useful FLOPs of one forward and backward pass over sequences of `lengths` tokens.

    Counts matrix products only, without padding and recomputation, and the MLM head at `masked` positions: 6 FLOPs per
    weight and token, and in the attention 12 H per pair of a query and a key that it attends to. Each term of
    disentangled positions adds 6 H per token and reachable distance; the projection of the table, once per
    micro-batch, is not counted. The last layer is counted in full, as other systems do, though we skip positions that
    no loss uses.
    """
    sentence_pairs = len(lengths) if next_sentence else 0
    return layers_flops(model, lengths) + head_flops(model, vocabulary_size, masked, sentence_pairs)


def head_flops(model: ModelConfig, vocabulary_size: int, masked: float, sentence_pairs: int = 0) -> float:
    """Return the FLOPs of the heads, forward and backward: MLM at `masked` positions, NSP for `sentence_pairs`."""
    heads = {parameter.name: parameter for parameter in head_parameters(model, vocabulary_size, sentence_pairs > 0)}
    width = model.embedding or model.hidden
    transform = heads["mlm_transform_weight"].numel if model.mlm_transform else 0
    classifier = heads["pooler_weight"].numel + heads["nsp_weight"].numel if sentence_pairs else 0
    return FLOPS_PER_ENTRY * ((transform + width * vocabulary_size) * masked + classifier * sentence_pairs)


def encoder_flops(model: ModelConfig, lengths: Sequence[float], queries: float) -> float:
    """Return the FLOPs of the encoder, forward and backward, with `queries` query positions in the last layer.

    Query positions are assumed to be spread evenly over the tokens. MFU uses this count, which excludes skipped work.
    """
    tokens, window = sum(lengths), model.window(model.layers - 1)
    skipped_pairs = sum(_attended_pairs(length, window) for length in lengths) * (1 - queries / tokens)
    skipped = _layer_costs(model).after_attention_flops * (tokens - queries) + 12 * model.hidden * skipped_pairs
    return layers_flops(model, lengths) - skipped


def recomputed_flops(model: ModelConfig, lengths: Sequence[float], queries: float, *, checkpointing: bool) -> float:
    """Return the FLOPs that the encoder's backward pass recomputes; `lengths` and `queries` as for `encoder_flops`.

    All our attention kernels recompute scores, as flash attention does (Dao et al. 2022, algorithm 4): 2 H per pair of
    a query and a key. Compiled code recomputes only operations between matrix products, which are not counted.

    Args:
        checkpointing: whether the layers run forward again (`engine.activation_checkpointing`).
    """
    tokens, last_window = sum(lengths), model.window(model.layers - 1)
    all_pairs = sum(
        layers * (_attended_pairs(length, window) + 2 * _distance_pairs(model, length, window))
        for window, layers in _layer_costs(model).layers_by_window.items()
        for length in lengths
    )
    skipped = sum(_attended_pairs(length, last_window) for length in lengths) * (1 - queries / tokens)
    pairs = model.recursions * all_pairs - skipped
    layers = encoder_flops(model, lengths, queries) - _projection_flops(model) * tokens if checkpointing else 0.0
    return 2 * model.hidden * pairs + layers / 3


def activation_bytes(
    model: ModelConfig, tokens: int, queries: int, *, itemsize: int, compiled: bool, checkpointing: bool, native: bool
) -> int:
    """Return the bytes that one micro-batch keeps for the backward pass, plus the working space of one layer.

    A layer keeps the stacked query, key and value, the context, its output, and the products of its other matmuls.
    If compiled, the backward pass recomputes everything between these. Native loops also keep the matmuls' inputs. In
    eager mode, a layer also keeps what the gradients of its norms and activation need, and one-byte dropout masks. A
    pre-norm layer keeps the normalized input of its projections, but not the last product. The last layer computes
    only query positions after query, key and value. Checked against torch's saved tensors: within 8 %.

    Args:
        tokens: T.
        queries: number of query positions in the last layer.
        itemsize: bytes of a number in the model's precision.
        compiled: whether torch.compile fuses the layers.
        checkpointing: whether a layer keeps only its input.
        native: whether `kernels/native.cpp` is used for models that it supports, as on a CPU without compilation.
    """
    h, b, pre_norm = model.hidden, itemsize, model.norm_placement == "pre"
    embedding = tokens * _embedding_saved_bytes(model, b, compiled) + _distance_saved_bytes(model, b)
    eager_bytes = _native_saved_bytes if native and has_native_loops(model) else _eager_saved_bytes
    after_attention = (_compiled_saved_bytes if compiled else eager_bytes)(model, b) + 4 * model.heads
    before_attention = 3 * b * model.hidden + (_norm_saved_bytes(model, b, compiled) if pre_norm else 0)
    layer = tokens * (before_attention + after_attention)
    last_layer = tokens * before_attention + queries * after_attention
    final_norm = queries * _norm_saved_bytes(model, b, compiled) if pre_norm else 0
    working = working_bytes(model, tokens, itemsize)
    if checkpointing:
        return embedding + model.depth * b * tokens * h + layer + final_norm + working
    return embedding + (model.depth - 1) * layer + last_layer + final_norm + working


def has_native_loops(model: ModelConfig) -> bool:
    """Return whether `kernels/native.cpp` supports the model's layers: only BERT's."""
    design = model.norm, model.activation, model.norm_placement, model.gated
    biases = model.attention_bias and model.ffn_in_bias and model.ffn_out_bias
    return biases and design == ("layer_norm", "gelu", "post", False)


def working_bytes(model: ModelConfig, tokens: int, itemsize: int) -> int:
    """Return the working space of one layer over `tokens` tokens, in a precision of `itemsize` bytes."""
    inner = model.intermediate * (2 if model.gated else 1)
    return itemsize * tokens * (2 * inner + 10 * model.hidden)


def logits_bytes(model: ModelConfig, vocabulary_size: int, masked: int, *, itemsize: int, compiled: bool) -> int:
    """Return the bytes of one chunk of logits or their gradient, and of the decoder's accumulated gradient."""
    chunk = min(masked * vocabulary_size, LOGITS_PER_CHUNK)
    width = model.embedding or model.hidden
    # Without compilation: also two fp32 copies, and a mask of one byte per entry.
    return chunk * (itemsize if compiled else 9 + itemsize) + itemsize * vocabulary_size * width


def layers_flops(model: ModelConfig, lengths: Sequence[float]) -> float:
    """Return the FLOPs of all applications of the layers, and of the projection of the embeddings."""
    tokens, costs = sum(lengths), _layer_costs(model)
    pairs = sum(
        layers * (_attended_pairs(length, window) + _distance_pairs(model, length, window))
        for window, layers in costs.layers_by_window.items()
        for length in lengths
    )
    layers = costs.matrix_flops * tokens + 12 * model.hidden * pairs
    return model.recursions * layers + _projection_flops(model) * tokens


class _LayerCosts(NamedTuple):
    """Constants from which the FLOPs of a model's layers are computed for each micro-batch; cached."""

    matrix_flops: int  # FLOPs per token of the weight matrices of all layers
    after_attention_flops: int  # FLOPs per token of the last layer's weight matrices, without query, key and value
    layers_by_window: Counter[int]  # number of layers with each attention window


def _layer_costs(model: ModelConfig) -> _LayerCosts:
    hashable: Any = model  # pyright does not know that a frozen config is hashable
    return cached_layer_costs(hashable)


@functools.lru_cache(maxsize=16)
def cached_layer_costs(model: ModelConfig) -> _LayerCosts:
    """Count the FLOPs of the layers' weight matrices per token, and the layers with each attention window."""
    # The matrices named position_* multiply distance embeddings, not tokens.
    layers = [
        [p for p in layer_parameters(model, index) if not p.name.startswith("position_")]
        for index in range(model.layers)
    ]
    return _LayerCosts(
        FLOPS_PER_ENTRY * sum(map(matrix_entries, layers)),
        FLOPS_PER_ENTRY * matrix_entries(p for p in layers[-1] if p.name not in _PROJECTIONS),
        Counter(map(model.window, range(model.layers))),
    )


def _projection_flops(model: ModelConfig) -> int:
    """Return the FLOPs per token of the projection of embeddings whose width differs from the layers'."""
    width = model.embedding or model.hidden
    return FLOPS_PER_ENTRY * width * model.hidden if width != model.hidden else 0


def _attended_pairs(length: float, window: int) -> float:
    """Return the number of pairs of a query and a key that it attends to, in a sequence of `length` tokens."""
    if not window or length <= window:
        return length * length
    return length * (2 * window + 1) - window * (window + 1)


def _distance_pairs(model: ModelConfig, length: float, window: int) -> float:
    """Return the cost of products with distance embeddings, as the number of query-key pairs that would cost the same.

    For the largest distance, fp32 rounding in `positions.relative_row_indices` may select the next bucket.
    """
    if not model.disentangled:
        return 0.0
    farthest, middle = min(length - 1, window or length), model.relative_span // 2
    if model.relative_buckets and farthest > middle:
        growth = math.log(farthest / middle) / math.log((model.relative_max_distance - 1) / middle)
        farthest = middle + math.ceil(growth * (middle - 1))
    rows = min(2 * model.relative_span, 2 * farthest + 1)
    return (model.score_terms - 1) * length * rows / 2


def _embedding_saved_bytes(model: ModelConfig, itemsize: int, compiled: bool) -> int:
    """Return the bytes per token that the embeddings keep, including rotary angles."""
    h, b = model.hidden, itemsize
    bases = {model.rotary_base_of(index) for index in range(model.layers)} - {0.0}
    angles = 4 * model.head_width * len(bases)
    if compiled:
        positions = {"learned": b, "sinusoidal": 4}.get(model.positions, 0)
        return h * (2 * b + positions if model.embedding_norm else b) + angles
    norm = 4 * h * get_norm(model.norm).saved if model.embedding_norm else 0
    return b * h + norm + h * (model.hidden_dropout > 0) + angles


def _distance_saved_bytes(model: ModelConfig, itemsize: int) -> int:
    """Return the bytes that the reachable distance embeddings keep: normalized once, projected for each layer."""
    rows = min(2 * model.relative_span, 2 * model.max_positions)
    norm = rows * _norm_saved_bytes(model, itemsize, False) if model.relative_norm else 0
    return norm + model.depth * (model.score_terms - 1) * itemsize * rows * model.hidden


def _compiled_saved_bytes(model: ModelConfig, itemsize: int) -> int:
    """Return the bytes per token that a compiled layer keeps after its attention."""
    inner = model.intermediate * (2 if model.gated else 1)
    return itemsize * (inner + model.hidden * (3 if model.norm_placement == "pre" else 4))


def _native_saved_bytes(model: ModelConfig, itemsize: int) -> int:
    """Return the bytes per token that a layer of native loops keeps after its attention, with two moments per norm."""
    return itemsize * (2 * model.intermediate + 5 * model.hidden) + 16


def _eager_saved_bytes(model: ModelConfig, itemsize: int) -> int:
    """Return the bytes per token that an uncompiled layer keeps after its attention."""
    h, norm_bytes = model.hidden, 4 * model.hidden * get_norm(model.norm).saved
    norms = norm_bytes if model.norm_placement == "pre" else 2 * norm_bytes
    return itemsize * 3 * h + _activation_saved_bytes(model, itemsize) + norms + 2 * h * (model.hidden_dropout > 0)


def _norm_saved_bytes(model: ModelConfig, itemsize: int, compiled: bool) -> int:
    """Return the bytes per token that a norm keeps in addition to its input: its output, and its fp32 tensors."""
    saved_tensors = get_norm(model.norm).saved - (itemsize == 4)  # in fp32 the input is not copied
    return model.hidden * (itemsize if compiled else itemsize + 4 * saved_tensors)


def _activation_saved_bytes(model: ModelConfig, itemsize: int) -> int:
    """Return the bytes per token that the activation keeps: its output for the next matmul, and fp32 tensors."""
    if model.gated:
        return model.intermediate * (itemsize + 12)  # both projections, and the activation's output
    # An fp32 output is kept once, since the next matmul needs the same tensor.
    saves_copy = get_activation(model.activation).saves_input or itemsize < 4
    return model.intermediate * (itemsize + 4 * saves_copy)


def hidden_matrices(model: ModelConfig) -> list[Parameter]:
    """Return the weight matrices of the layers, which Muon orthogonalizes (`parameters.is_hidden_matrix`)."""
    layers = (layer_parameters(model, index) for index in range(model.layers))
    return [parameter for layer in layers for parameter in layer if len(parameter.shape) == 2]


def orthogonalization_flops(model: ModelConfig) -> int:
    """Return the FLOPs of Muon's five Newton-Schulz iterations for all `hidden_matrices` in a step."""
    flops = 0
    for parameter in hidden_matrices(model):
        parts = stacked_parts(parameter.name)
        small, large = sorted((parameter.shape[0] // parts, parameter.shape[1]))
        flops += parts * 5 * (4 * small * small * large + 2 * small**3)
    return flops
