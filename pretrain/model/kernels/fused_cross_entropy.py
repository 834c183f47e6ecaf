"""Cross-entropy over the vocabulary without storing all logits: the most expensive part of a small encoder's step.

Shape letters: K masked tokens, C of them in a chunk, H hidden width, V vocabulary.

The gradient needs the same logits as the loss, so the forward pass also computes it, chunk by chunk. For the backward
pass it keeps the gradients of its inputs ([K, H], [V, H] and [V]) instead of logits [K, V]. This takes three matmuls
without recomputation, and memory for one chunk. The idea is from Liger Kernel's fused linear cross-entropy (Hsu et al.
2024, arXiv:2410.10989, section 3.2). The gradient overwrites the logits in place.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.model.compile import maybe_compile
from pretrain.model.cost import LOGITS_PER_CHUNK
from pretrain.model.kernels.native import cross_entropy, supports_native
from pretrain.model.kernels.products import weight_gradient

# Rows of logits on a GPU are aligned to this number of entries. cuBLAS's fastest kernels need 16 bytes (NVIDIA, Matrix
# Multiplication Background User's Guide, section 4.1); with 128 bytes it writes whole cache lines.
_ROW_ENTRIES = 64


def empty_scores(rows: int, decoder: Tensor) -> Tensor:
    """Allocate [rows, V] for the product of hidden states and `decoder` [V, H], in its dtype and on its device.

    On a GPU each row is padded to a multiple of 64 entries: BERT's 30,522 bf16 columns take 61,044 bytes, not a
    multiple of 16. torch passes the row stride of outputs and operands to cuBLAS without a copy
    (aten/src/ATen/native/cuda/cuBlasCommonArgs.h, prepare_matrix_for_cublas). CPUs need no padding.
    """
    columns = len(decoder)
    padding = 0 if decoder.is_cpu else -columns % _ROW_ENTRIES
    return decoder.new_empty(rows, columns + padding)[:, :columns]


def vocabulary_losses(
    hidden: Tensor, decoder: Tensor, bias: Tensor | None, labels: Tensor, fused: bool
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of the scores `hidden @ decoder.T + bias` against the labels.

    Args:
        hidden: [K, H], bf16, fp16 or fp32; K may be 0.
        decoder: [V, H], the decoder's weight, in the dtype of `hidden`.
        bias: [V], or None.
        labels: int64 [K]; negative labels are ignored.
        fused: let torch.compile fuse the operations between the matmuls.

    Returns:
        (sum of cross-entropies in nats, expected number of correct predictions if ties are broken at random), fp32
        scalars; the first is differentiable, once.
    """
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or decoder.requires_grad)
    losses: Any = _VocabularyLosses.apply(hidden, decoder, bias, labels, None, fused, needs_gradient)
    return losses


# Axes of the compiled functions' arguments: logits, bias, labels, scores of the labels, a teacher's logits.
_AXES = ("K", "", "K", "K", "K")


class SoftTargets(NamedTuple):
    """A teacher's hidden states and decoder, whose product is its logits; temperature and weights of the losses.

    Attributes:
        hidden, decoder, bias: as for `vocabulary_losses`, of any width; never differentiated.
        temperature: divides both models' logits.
        soft_weight, hard_weight: weights of the divergence from the teacher and of the cross-entropy with the labels.
    """

    hidden: Tensor  # [K, H of the teacher]
    decoder: Tensor  # [V, H of the teacher]
    bias: Tensor | None  # [V]
    temperature: float
    soft_weight: float
    hard_weight: float


def soft_target_losses(
    hidden: Tensor, decoder: Tensor, bias: Tensor | None, labels: Tensor, soft: SoftTargets, fused: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses against both labels and a teacher's soft targets (Hinton et al. 2015, arXiv:1503.02531, section 2).

    The divergence is the Kullback-Leibler divergence from the student's to the teacher's softmax at the temperature,
    times the squared temperature (transformers, research project distillation, distiller.py: `ce_loss_fct`).

    Returns:
        (weighted sum of the next two; sum of cross-entropies in nats; sum of divergences in nats; expected number of
        correct predictions), fp32 scalars. Only the first is differentiable, once.
    """
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or decoder.requires_grad)
    losses: Any = _VocabularyLosses.apply(hidden, decoder, bias, labels, soft, fused, needs_gradient)
    return losses


class _VocabularyLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        decoder: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        soft: SoftTargets | None,
        fused: bool,
        needs_gradient: bool,
    ) -> tuple[Tensor, ...]:
        fused = fused and len(labels) > 0  # torch.compile would compile again for zero rows
        totals = torch.zeros(2 if soft is None else 4, device=hidden.device)
        grad_hidden, grad_decoder, grad_bias = torch.empty_like(hidden), None, None
        # Chunks of nearly equal length: a last chunk of one row would be compiled separately.
        chunk_count = max(1, -(-len(labels) * decoder.shape[0] // LOGITS_PER_CHUNK))
        rows = max(1, -(-len(labels) // chunk_count))
        scores = empty_scores(min(rows, len(labels)), decoder)
        teacher_scores = None if soft is None else empty_scores(len(scores), soft.decoder)
        for start in range(0, max(1, len(labels)), rows):
            chunk = slice(start, start + rows)
            labels_C = labels[chunk]
            logits_CV = torch.mm(hidden[chunk], decoder.T, out=scores[: len(labels_C)])
            if soft is None and logits_CV.is_contiguous() and supports_native(logits_CV):
                totals += cross_entropy(logits_CV, bias, labels_C, needs_gradient=needs_gradient)
            else:
                compute, teacher_operands = losses_and_gradient if needs_gradient else _losses, ()
                if soft is not None and teacher_scores is not None:
                    compute = _soft_losses_and_gradient
                    teacher_CV = torch.mm(soft.hidden[chunk], soft.decoder.T, out=teacher_scores[: len(labels_C)])
                    teacher_operands = teacher_CV, *soft[2:]
                operands = logits_CV, bias, labels_C, _label_scores(logits_CV, bias, labels_C), *teacher_operands
                totals += maybe_compile(compute, fused, _AXES)(*operands)
            if not needs_gradient:
                continue
            grad_CV = logits_CV
            torch.mm(grad_CV, decoder, out=grad_hidden[chunk])
            grad_decoder = _accumulate(grad_decoder, weight_gradient(grad_CV, hidden[chunk]))
            if bias is not None:
                grad_bias = _accumulate(grad_bias, _column_sums(grad_CV))
        if grad_decoder is not None:
            saved_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
            ctx.save_for_backward(grad_hidden, grad_decoder.to(decoder.dtype), saved_bias)
        loss, *metrics = totals.unbind()
        ctx.mark_non_differentiable(*metrics)
        return loss, *metrics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place: the saved gradients are not used elsewhere, and there is only one backward pass.
        return *(None if saved is None else saved.mul_(grads[0]) for saved in ctx.saved_tensors), *(None,) * 4


def _accumulate(total: Tensor | None, chunk: Tensor) -> Tensor:
    """Return `total` + `chunk` in fp32; the first chunk is returned without a copy."""
    return chunk if total is None else total.float().add_(chunk)


def _column_sums(x_CV: Tensor) -> Tensor:
    """Return the sum of each column, [V]; in fp32 on a GPU."""
    # On CPU, a product with ones is twice as fast.
    return (x_CV.new_ones(1, len(x_CV)) @ x_CV)[0] if x_CV.is_cpu else x_CV.sum(0, dtype=torch.float32)


def _label_scores(logits_CV: Tensor, bias_V: Tensor | None, labels_C: Tensor) -> Tensor:
    """Return fp32 [C], the scores of the labels; undefined where labels are negative.

    Not compiled together with the losses: torch 2.11 would read the logits after the gradient has replaced them.
    """
    column_C = labels_C.clamp_min(0)
    label_score_C = logits_CV.gather(1, column_C[:, None]).squeeze(1).float()
    return label_score_C if bias_V is None else label_score_C + bias_V[column_C].float()


def _losses(logits_CV: Tensor, bias_V: Tensor | None, labels_C: Tensor, label_score_C: Tensor) -> Tensor:
    """Return fp32 [2], as `vocabulary_losses`; `logits_CV` lack the bias, `label_score_C` includes it."""
    return _totals(labels_C, label_score_C, *_normalize(logits_CV, bias_V))


def losses_and_gradient(logits_CV: Tensor, bias_V: Tensor | None, labels_C: Tensor, label_score_C: Tensor) -> Tensor:
    """Return `_losses`, and overwrite the logits with their gradient; in-place operations save memory in eager mode."""
    scores_CV, max_C, lse_C = _normalize(logits_CV, bias_V)
    totals = _totals(labels_C, label_score_C, scores_CV, max_C, lse_C)
    column_V = torch.arange(scores_CV.shape[1], device=scores_CV.device)
    # Ignored rows get probability 0 and match no column, so their gradient is 0 without a mask.
    denominator_C = torch.where(labels_C < 0, math.inf, lse_C)
    grad_CV = scores_CV.sub_(denominator_C[:, None]).exp_()
    grad_CV.sub_((column_V == labels_C[:, None]).float())
    logits_CV.copy_(grad_CV)
    return totals


def _soft_losses_and_gradient(
    logits_CV: Tensor,
    bias_V: Tensor | None,
    labels_C: Tensor,
    label_score_C: Tensor,
    teacher_CV: Tensor,
    teacher_bias_V: Tensor | None,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
) -> Tensor:
    """Return fp32 [4], as `soft_target_losses`, and overwrite the logits with the gradient of the weighted sum."""
    scores_CV, max_C, lse_C = _normalize(logits_CV, bias_V)
    column_V = torch.arange(scores_CV.shape[1], device=scores_CV.device)
    hard_grad_CV = (scores_CV - lse_C[:, None]).exp() - (column_V == labels_C[:, None]).float()
    teacher_scores_CV = teacher_CV.float() if teacher_bias_V is None else teacher_CV.float() + teacher_bias_V.float()
    student_logp_CV = (scores_CV / temperature).log_softmax(-1)
    teacher_logp_CV = (teacher_scores_CV / temperature).log_softmax(-1)
    teacher_p_CV = teacher_logp_CV.exp()
    divergence = (teacher_p_CV * (teacher_logp_CV - student_logp_CV)).sum() * temperature**2
    cross_entropy, correct = _totals(labels_C, label_score_C, scores_CV, max_C, lse_C).unbind()
    weighted = soft_weight * divergence + hard_weight * cross_entropy
    grad_CV = hard_weight * hard_grad_CV + (soft_weight * temperature) * (student_logp_CV.exp() - teacher_p_CV)
    logits_CV.copy_(grad_CV)
    return torch.stack([weighted, cross_entropy, divergence, correct])


def _normalize(logits_CV: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp32 (scores [C, V], maximum of each row [C], log-sum-exp of each row [C])."""
    scores_CV = logits_CV.float() if bias_V is None else logits_CV.float() + bias_V.float()
    max_C = scores_CV.amax(-1)
    return scores_CV, max_C, (scores_CV - max_C[:, None]).exp_().sum(-1).log() + max_C


def _totals(labels_C: Tensor, label_score_C: Tensor, scores_CV: Tensor, max_C: Tensor, lse_C: Tensor) -> Tensor:
    # Scores in bf16 are often equal: a label that ties with n - 1 others counts as 1 / n.
    ties_C = (scores_CV >= max_C[:, None]).sum(-1, dtype=torch.int32)
    correct_C = torch.where(label_score_C >= max_C, 1.0 / ties_C, 0.0)
    return torch.stack([_sum_of_rows(lse_C - label_score_C, labels_C), _sum_of_rows(correct_C, labels_C)])


def _sum_of_rows(values_C: Tensor, labels_C: Tensor) -> Tensor:
    """Return the sum over the rows that are not ignored, a scalar."""
    return torch.where(labels_C < 0, 0.0, values_C).sum()
