"""The loops of `native.cpp` as functions of torch, for a CPU.

In a step of 500 tokens, eager torch runs about a hundred small operations per layer. torch.compile needs a minute to
compile, and then still calls a dozen functions with guards. Here a layer makes nine calls to code that g++ compiles in
seconds, once per machine. Without g++, torch computes everything: the last bits of results differ and, in sequences of
four windows or more, the dropout of attention weights.

Shape letters: T tokens of the micro-batch, R query positions, H hidden width, F feed-forward width.
"""

import contextlib
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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.common.measured import cpu_has, cpuinfo, rates_file
from pretrain.config import ModelConfig
from pretrain.model.cost import has_native_loops
from pretrain.model.kernels.products import weight_gradient

_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"]
_FLAGS += ["-std=c++17", "-shared", "-fPIC"]
_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_MAX_LENGTH = 512  # batched matmuls of fp32 are faster with longer sequences (docs/benchmarks/lab-notes.md)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Compile and load `native.cpp`, cached in the user's cache folder; None without a C++ compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    sources = (path.read_text() for path in sorted(_SOURCE.parent.glob("native*.?pp")))
    inputs = [*sources, *_FLAGS, cpuinfo("flags") or cpuinfo("Features"), platform.machine(), compiler]
    inputs += [platform.libc_ver(), torch.__version__]
    name = f"native-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}.so"
    try:
        path = rates_file().parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with contextlib.suppress(OSError):  # not complete, or of another system that shares the folder
                return ctypes.CDLL(str(path))
        _compile_library(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.CalledProcessError):  # RuntimeError: no home folder
        return None


def _compile_library(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        target = Path(temporary) / path.name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(target)]
        done = subprocess.run(command, capture_output=True)
        if done.returncode < 0:  # killed by a signal
            done = subprocess.run(command, capture_output=True)
        done.check_returncode()
        target.replace(path)  # atomic: other processes may compile it, too


def supports_native(x: Tensor) -> bool:
    """Return whether the loops support the device and dtype of `x`, outside of compiled code and of autocast."""
    outside = not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
    return x.is_cpu and x.dtype in _TYPES and outside and library() is not None


@functools.cache
def has_amx() -> bool:
    """Return whether this CPU multiplies bf16 matrices in AMX tiles."""
    return cpu_has("amx_bf16")


class NativeSequences(NamedTuple):
    """The fields of `TokenLayout` and `AttentionOptions` that `native_attention.hpp` reads."""

    offsets: Tensor  # int32 [S + 1]
    queries: Tensor | None
    query_offsets: Tensor
    seeds: Tensor
    cos: Tensor | None
    sin: Tensor | None
    heads: int
    interleaved: bool
    window: int
    dropout: float

    def forward(self, qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute `grouped_op.grouped_attention`, without its gradient."""
        count = len(qkv) if self.queries is None else len(self.queries)
        context_RH = qkv.new_empty(count, qkv.shape[1] // 3)
        lse_RN = qkv.new_empty(count, self.heads, dtype=torch.float32)
        _call("attention", qkv, self._struct(qkv), qkv, _fp32(bias), context_RH, lse_RN)
        return context_RH, lse_RN

    def backward(self, grad: Tensor, output: tuple[Tensor, Tensor], qkv: Tensor, bias: Tensor | None) -> Tensor:
        """Return the gradient of `qkv`, given the gradient of the context and the results of `forward`."""
        grad_qkv = torch.empty_like(qkv)
        operands = qkv, _fp32(bias), *output, grad.contiguous(), grad_qkv
        _call("attention_backward", qkv, self._struct(qkv), *operands)
        return grad_qkv

    def _struct(self, qkv: Tensor) -> Any:
        tensors = self.offsets, self.queries, self.query_offsets, self.seeds, self.cos, self.sin
        addresses = map(_address, tensors)
        sizes = len(self.offsets) - 1, self.heads, qkv.shape[1] // 3 // self.heads
        return ctypes.byref(_Sequences(*addresses, *sizes, self.interleaved, self.window, self.dropout))


def prefer_native_attention(qkv: Tensor, heads: int, longest: int, window: int) -> bool:
    """Return whether `NativeSequences` supports these arguments and is faster than batched matmuls."""
    fast_matmul = qkv.dtype == torch.float32 or has_amx()
    is_faster = bool(window) or longest <= _MAX_LENGTH or not fast_matmul
    return is_faster and qkv.shape[1] // 3 // heads % 16 == 0 and supports_native(qkv)


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


def cross_entropy(logits_CV: Tensor, bias_V: Tensor | None, labels_C: Tensor, *, needs_gradient: bool) -> Tensor:
    """Return fp32 [2], as `fused_cross_entropy.vocabulary_losses`; may overwrite the logits with their gradient."""
    if len(labels_C) and int(labels_C.max()) >= logits_CV.shape[1]:
        raise IndexError(f"label {int(labels_C.max())} of {logits_CV.shape[1]} columns")
    results_2C = logits_CV.new_empty(2, len(logits_CV), dtype=torch.float32)
    bias = None if bias_V is None else bias_V.float()
    _call("cross_entropy", logits_CV, *logits_CV.shape, logits_CV, bias, labels_C, int(needs_gradient), *results_2C)
    return results_2C.sum(1)


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


class _Sequences(ctypes.Structure):  # as in native_attention.hpp
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("offsets", "queries", "query_offsets", "seeds", "cos", "sin")),
        *((name, ctypes.c_long) for name in ("count", "heads", "width", "interleaved", "window")),
        ("dropout", ctypes.c_double),
    ]


def _call(name: str, like: Tensor, *arguments: Any) -> None:
    """Call a kernel for the dtype of `like`; a tensor is passed as its address, a float as a double."""
    function = getattr(library(), f"{name}_{_TYPES[like.dtype]}")
    function(*(_to_ctype(x) for x in arguments))


def _address(x: Tensor | None) -> ctypes.c_void_p:
    assert x is None or x.is_contiguous()
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _to_ctype(x: Any) -> Any:
    if x is None or isinstance(x, Tensor):
        return _address(x)
    return ctypes.c_double(x) if isinstance(x, float) else ctypes.c_long(x) if isinstance(x, int) else x


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


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
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        states, parameters = (saved := ctx.saved_tensors)[:8], saved[8:]
        context_RH, hidden_RH, seeds_R, attended_RH, normed_RH, inner_RF, active_RF, output_RH = states
        moments, last_moments, out_weight, in_weight, last_weight, *vectors = parameters
        out_bias, gain, _, in_bias, last_bias, last_gain, _ = vectors

        def norm_backward(x: Tensor, bias: Tensor, residual: Tensor, site: int, *operands: Any) -> tuple[Tensor, ...]:
            grad_x, grad_residual = torch.empty_like(x), torch.empty_like(x)
            vector_grads = x.new_empty(3, x.shape[1], dtype=torch.float32)
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
    out, moments = torch.empty_like(x), x.new_empty(len(x), 2, dtype=torch.float32)
    _call("norm", x, *x.shape, x, bias, residual, seeds, site, dropout, gain, shift, eps, out, moments)
    return out, moments
