"""The loops of `native.cpp` as differentiable functions of torch, for short sequences on a CPU.

In a step of 500 tokens, eager torch runs about a hundred small operations per layer. torch.compile needs a minute to
compile, and then still calls a dozen functions with guards. Here a layer makes nine calls to code that g++ compiles in
seconds, once per machine. Without g++, torch computes everything, and only the last bits of results differ.

Shape letters: T tokens of the micro-batch, R query positions, H hidden width, F feed-forward width.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.common.measured import rates_file
from pretrain.config import ModelConfig
from pretrain.model.cost import has_native_loops
from pretrain.model.kernels.layout import AttentionOptions, TokenLayout, query_boundaries
from pretrain.model.kernels.products import weight_gradient

_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC"]
_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
# Maximum lengths of sequences; for longer ones, batched matmuls are faster (docs/benchmarks/lab-notes.md).
_MAX_LENGTH, _MAX_LENGTH_WITHOUT_GRADIENTS = 128, 256


@functools.cache
def library() -> ctypes.CDLL | None:
    """Compile and load `native.cpp`, cached in the user's cache folder; None without a C++ compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    cpu = Path("/proc/cpuinfo")
    flags = next((line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    inputs = [_SOURCE.read_text(), *_FLAGS, flags, platform.machine(), compiler, torch.__version__]
    name = f"native-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}.so"
    try:
        folder = rates_file().parent
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                target = Path(temporary) / name
                subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", str(target)], check=True, capture_output=True)
                target.replace(folder / name)  # atomic: other processes may compile it, too
        return ctypes.CDLL(str(folder / name))
    except (OSError, subprocess.CalledProcessError):
        return None


def supports_native(x: Tensor) -> bool:
    """Return whether the loops support the device and dtype of `x`, outside of compiled code."""
    return x.is_cpu and x.dtype in _TYPES and not torch.compiler.is_compiling() and library() is not None


def use_native_attention(qkv: Tensor, layout: TokenLayout, options: AttentionOptions) -> bool:
    """Return whether `native_attention` supports these arguments and is faster than batched matmuls."""
    terms, longest = (layout.rotation, layout.distance_bias, layout.relative), layout.max_seqlen
    is_global = not options.window or longest <= options.window + 1
    width = qkv.shape[1] // 3 // options.heads
    max_length = _MAX_LENGTH if torch.is_grad_enabled() else _MAX_LENGTH_WITHOUT_GRADIENTS
    fits = not options.fused and longest <= max_length and width % 16 == 0
    return fits and is_global and all(term is None for term in terms) and supports_native(qkv)


def native_attention(
    qkv: Tensor, bias: Tensor | None, layout: TokenLayout, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Compute `grouped_op.grouped_attention` in C++."""
    queries, offsets = layout.queries, layout.cu_seqlens
    query_offsets = offsets if queries is None else query_boundaries(queries, offsets)
    indices = queries, layout.seeds, offsets, query_offsets
    return _Attention.apply(qkv, bias, indices, options)  # pyright: ignore[reportReturnType]


def prefer_native(function: Callable[..., Tensor], shape: ModelConfig, compile: bool) -> Callable[..., Tensor]:
    """Return `block.after_attention` in C++ for an uncompiled model with BERT's layers; `function` for others."""
    if compile or not has_native_loops(shape):
        return function

    def after_attention(
        context_TH: Tensor,
        hidden_TH: Tensor,
        seeds_T: Tensor | None,
        weights: Sequence[Any],
        functions: Any,
        dropout: float,
    ) -> Tensor:
        if not supports_native(hidden_TH):
            return function(context_TH, hidden_TH, seeds_T, weights, functions, dropout)
        flat = (x for field in weights for x in (field if isinstance(field, tuple) else (field,)))
        return _AfterAttention.apply(context_TH, hidden_TH, seeds_T, functions.eps, float(dropout), *flat)  # pyright: ignore[reportReturnType]

    return after_attention


def step_table(group: dict[str, Any], state: dict[str, Any], divisor: float, *tensors: Tensor) -> None:
    """Update an embedding table as torch's fused AdamW does; a row that never had a gradient only decays.

    Args:
        group: the optimizer's param group: learning rate, betas, epsilon and weight decay.
        state: the table's optimizer state: fp32 moments [V * H] and number of steps.
        divisor: number by which the gradient is divided, for clipping.
        tensors: (seen, gradient, master, weights). `seen`, uint8 [V], is 1 if a row ever had a gradient, 2 if unknown.
            The gradient [V, H] and the master weights [V * H] are fp32; the model's weights are set to the master's.
    """
    seen, gradient, master, weights = tensors
    state["step"] += 1
    moments = state["exp_avg"], state["exp_avg_sq"]
    scalars = group["lr"], *group["betas"], group["eps"], group["weight_decay"], state["step"].item()
    buffers = seen, gradient, master, *moments, weights
    _call("adamw", weights, *gradient.shape, *buffers, divisor, *map(float, scalars))


class _Sequences(ctypes.Structure):  # as in native.cpp
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("offsets", "queries", "query_offsets", "seeds")),
        *((name, ctypes.c_long) for name in ("count", "heads", "width")),
        ("dropout", ctypes.c_double),
    ]


def _call(name: str, like: Tensor, *arguments: Any) -> None:
    """Call a kernel for the dtype of `like`; a tensor is passed as its address, a float as a double."""
    function = getattr(library(), f"{name}_{_TYPES[like.dtype]}")
    function(*(_to_ctype(x) for x in arguments))


def _to_ctype(x: Any) -> Any:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    return ctypes.c_double(x) if isinstance(x, float) else ctypes.c_long(x) if isinstance(x, int) else x


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, bias: Tensor | None, indices: tuple[Tensor | None, ...], options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        ctx.indices, ctx.options = indices, options
        queries, width = indices[0], qkv.shape[1] // 3
        count = len(qkv) if queries is None else len(queries)
        context_RH, lse_RN = qkv.new_empty(count, width), torch.empty(count, options.heads)
        bias = None if bias is None else bias.float()
        _call("attention", qkv, _sequences(ctx, qkv), qkv, bias, context_RH, lse_RN)
        ctx.save_for_backward(qkv, bias, context_RH, lse_RN)
        ctx.mark_non_differentiable(lse_RN)
        return context_RH, lse_RN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, bias, context_RH, lse_RN = ctx.saved_tensors
        grad_qkv = torch.empty_like(qkv)
        saved = qkv, bias, context_RH, lse_RN
        _call("attention_backward", qkv, _sequences(ctx, qkv), *saved, grads[0].contiguous(), grad_qkv)
        return grad_qkv, None if bias is None else grad_qkv.sum(0), None, None


def _sequences(ctx: Any, qkv: Tensor) -> Any:
    queries, seeds, offsets, query_offsets = ctx.indices
    addresses = (None if x is None else x.data_ptr() for x in (offsets, queries, query_offsets, seeds))
    heads, dropout = ctx.options.heads, ctx.options.dropout
    return ctypes.byref(_Sequences(*addresses, len(offsets) - 1, heads, qkv.shape[1] // 3 // heads, dropout))


class _AfterAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        context_RH: Tensor,
        hidden_RH: Tensor,
        seeds_R: Tensor | None,
        eps: float,
        dropout: float,
        *weights: Tensor,  # the tensors of `block.LayerWeights`
    ) -> Tensor:
        out_weight, in_weight, last_weight = weights[0], weights[4], weights[6]  # attention_out, ffn_in, ffn_out
        vectors = [weights[n].float() for n in (1, 2, 3, 5, 7, 8, 9)]
        out_bias, gain, shift, in_bias, last_bias, last_gain, last_shift = vectors
        ctx.dropout = dropout
        attended_RH = context_RH @ out_weight.T
        normed_RH, moments = _norm(attended_RH, out_bias, hidden_RH, seeds_R, 1, dropout, gain, shift, eps)
        inner_RF = normed_RH @ in_weight.T
        active_RF = torch.empty_like(inner_RF)
        _call("gelu", inner_RF, *inner_RF.shape, inner_RF, in_bias, active_RF)
        output_RH = active_RF @ last_weight.T
        last_RH, last_moments = _norm(output_RH, last_bias, normed_RH, seeds_R, 2, dropout, last_gain, last_shift, eps)
        states = context_RH, hidden_RH, seeds_R, attended_RH, normed_RH, inner_RF, active_RF, output_RH
        ctx.save_for_backward(*states, moments, last_moments, out_weight, in_weight, last_weight, *vectors)
        return last_RH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        states, parameters = (saved := ctx.saved_tensors)[:8], saved[8:]
        context_RH, hidden_RH, seeds_R, attended_RH, normed_RH, inner_RF, active_RF, output_RH = states
        moments, last_moments, out_weight, in_weight, last_weight, *vectors = parameters
        out_bias, gain, _, in_bias, last_bias, last_gain, _ = vectors

        def norm_backward(x: Tensor, bias: Tensor, residual: Tensor, site: int, *operands: Any) -> tuple[Tensor, ...]:
            grad_x, grad_residual = torch.empty_like(x), torch.empty_like(x)
            vector_grads = torch.empty(3, x.shape[1])
            results = grad_x, grad_residual, vector_grads
            _call("norm_backward", x, *x.shape, x, bias, residual, seeds_R, site, ctx.dropout, *operands, *results)
            return results

        grad_output, grad_normed, last_vector_grads = norm_backward(
            output_RH, last_bias, normed_RH, 2, last_gain, last_moments, grads[0].contiguous(), None
        )
        grad_active, grad_inner = grad_output @ last_weight, torch.empty_like(inner_RF)
        grad_in_bias = torch.empty_like(in_bias)
        _call("gelu_backward", inner_RF, *inner_RF.shape, inner_RF, in_bias, grad_active, grad_inner, grad_in_bias)
        grad_attended, grad_hidden, first_vector_grads = norm_backward(
            attended_RH, out_bias, hidden_RH, 1, gain, moments, grad_normed, grad_inner @ in_weight
        )
        pairs = (grad_attended, context_RH), (grad_inner, normed_RH), (grad_output, active_RF)
        weight_grads = [weight_gradient(*pair) for pair in pairs]
        vector_grads = [x.to(out_weight.dtype) for x in (*first_vector_grads, grad_in_bias, *last_vector_grads)]
        flat = weight_grads[0], *vector_grads[:3], weight_grads[1], vector_grads[3], weight_grads[2], *vector_grads[4:]
        return grad_attended @ out_weight, grad_hidden, None, None, None, *flat


def _norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    seeds: Tensor | None,
    site: int,
    dropout: float,
    gain: Tensor,
    shift: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return (LayerNorm of residual + dropout(x + bias), fp32 mean and inverse standard deviation of each row)."""
    out, moments = torch.empty_like(x), torch.empty(len(x), 2)
    _call("norm", x, *x.shape, x, bias, residual, seeds, site, dropout, gain, shift, eps, out, moments)
    return out, moments
