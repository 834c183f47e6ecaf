"""Cross-entropy over the vocabulary without storing all logits: the heaviest part of a small encoder's step.

Shape letters: K masked tokens, C of them in a piece, H hidden width, V vocabulary.

The gradient needs the same logits as the loss, so the forward pass also computes it, piece by piece. For the backward
pass it keeps the gradients of its inputs ([K, H], [V, H] and [V]) instead of logits [K, V]. That takes three matmuls
without recomputation, and memory for one piece (the idea of Liger Kernel's fused linear cross-entropy, Hsu et al. 2024,
arXiv:2410.10989, section 3.2). The gradient overwrites the logits in place.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.model.compile import program
from pretrain.model.cost import LOGITS_PER_PIECE
from pretrain.model.kernels.products import weight_gradient

# Alignment in entries of the rows of scores on a GPU. cuBLAS's fastest kernels need 16 bytes (NVIDIA, Matrix
# Multiplication Background User's Guide, section 4.1); with 128 it writes whole cache lines.
_ROW_ENTRIES = 64


def empty_scores(rows: int, word: Tensor) -> Tensor:
    """Allocate [rows, V] for the product of so many hidden states and `word` [V, H], in its dtype and on its device.

    On a GPU each row is padded if V is not a multiple of 64: BERT's 30,522 bf16 columns take 61,044 bytes, not a
    multiple of 16. torch passes the row stride of outputs and operands to cuBLAS without a copy
    (aten/src/ATen/native/cuda/cuBlasCommonArgs.h, prepare_matrix_for_cublas). CPUs need no padding.
    """
    columns = len(word)
    gap = 0 if word.is_cpu else -columns % _ROW_ENTRIES
    return word.new_empty(rows, columns + gap)[:, :columns]


def vocabulary_losses(
    hidden: Tensor, word: Tensor, bias: Tensor | None, labels: Tensor, fused: bool
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of the scores `hidden @ word.T + bias` against the labels.

    Args:
        hidden: [K, H], bf16, fp16 or fp32; K may be 0.
        word: [V, H], the decoder's weight, in the dtype of `hidden`.
        bias: [V], or None.
        labels: int64 [K]; negative labels are ignored.
        fused: let torch.compile fuse the operations between the matmuls.

    Returns:
        (sum of cross-entropies in nats, expected number of correct predictions, with ties broken at random), fp32
        scalars; the first is differentiable, once.
    """
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or word.requires_grad)
    losses: Any = _VocabularyLosses.apply(hidden, word, bias, labels, None, fused, needs_gradient)
    return losses


# Axes of the arguments of the functions compiled here: logits, bias, labels, their scores, a teacher's logits.
_ROWS = ("K", "", "K", "K", "K")


class SoftTargets(NamedTuple):
    """The factors of a teacher's scores for the same tokens, and the weights of the losses.

    Attributes:
        hidden, word, bias: as for `vocabulary_losses`, of any width; never differentiated.
        temperature: by which both models' scores are divided.
        soft_weight, hard_weight: of the divergence from the teacher, and of the cross-entropy with the labels.
    """

    hidden: Tensor  # [K, H of the teacher]
    word: Tensor  # [V, H of the teacher]
    bias: Tensor | None  # [V]
    temperature: float
    soft_weight: float
    hard_weight: float


def soft_target_losses(
    hidden: Tensor, word: Tensor, bias: Tensor | None, labels: Tensor, soft: SoftTargets, fused: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`vocabulary_losses` with a teacher's scores and labels (Hinton et al. 2015, arXiv:1503.02531, section 2).

    The divergence is the Kullback-Leibler divergence from the student's to the teacher's softmax at the temperature,
    times its square (transformers, research project distillation, distiller.py: `ce_loss_fct`).

    Returns:
        (weighted sum of the next two, which alone is differentiable; sum of cross-entropies; sum of divergences, both
        in nats; expected number of correct predictions), fp32 scalars.
    """
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or word.requires_grad)
    losses: Any = _VocabularyLosses.apply(hidden, word, bias, labels, soft, fused, needs_gradient)
    return losses


class _VocabularyLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        word: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        soft: SoftTargets | None,
        fused: bool,
        needs_gradient: bool,
    ) -> tuple[Tensor, ...]:
        fused = fused and len(labels) > 0  # torch.compile would make another program for no rows
        totals = torch.zeros(2 if soft is None else 4, device=hidden.device)
        grad_hidden, grad_word, grad_bias = torch.empty_like(hidden), None, None
        # Pieces of nearly equal length: a last piece of a single row would be compiled separately.
        pieces = max(1, -(-len(labels) * word.shape[0] // LOGITS_PER_PIECE))
        rows = max(1, -(-len(labels) // pieces))
        scores = empty_scores(min(rows, len(labels)), word)
        teacher_scores = None if soft is None else empty_scores(len(scores), soft.word)
        for first in range(0, max(1, len(labels)), rows):
            piece = slice(first, first + rows)
            labels_C = labels[piece]
            logits_CV = torch.mm(hidden[piece], word.T, out=scores[: len(labels_C)])
            operands = logits_CV, bias, labels_C, _label_scores(logits_CV, bias, labels_C)
            compute, more = losses_and_gradient, ()
            if soft is not None and teacher_scores is not None:
                compute = _soft_losses_and_gradient
                more = torch.mm(soft.hidden[piece], soft.word.T, out=teacher_scores[: len(labels_C)]), *soft[2:]
            elif not needs_gradient:
                totals += program(_losses, fused, _ROWS)(*operands)
                continue
            totals += program(compute, fused, _ROWS)(*operands, *more)
            if not needs_gradient:
                continue
            grad_CV = logits_CV
            torch.mm(grad_CV, word, out=grad_hidden[piece])
            grad_word = _add(grad_word, weight_gradient(grad_CV, hidden[piece]))
            if bias is not None:
                grad_bias = _add(grad_bias, _column_sums(grad_CV))
        if grad_word is not None:
            of_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
            ctx.save_for_backward(grad_hidden, grad_word.to(word.dtype), of_bias)
        loss, *rest = totals.unbind()
        ctx.mark_non_differentiable(*rest)
        return loss, *rest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place: they are not used elsewhere, and there is only one backward pass.
        return *(None if saved is None else saved.mul_(grads[0]) for saved in ctx.saved_tensors), *(None,) * 4


def _add(total: Tensor | None, piece: Tensor) -> Tensor:
    """`total` + `piece`: several pieces are added in fp32; a single one needs no copy."""
    return piece if total is None else total.float().add_(piece)


def _column_sums(x_CV: Tensor) -> Tensor:
    """[V], on a GPU in fp32."""
    # A product with ones is twice as fast on CPU.
    return (x_CV.new_ones(1, len(x_CV)) @ x_CV)[0] if x_CV.is_cpu else x_CV.sum(0, dtype=torch.float32)


def _label_scores(logits_CV: Tensor, bias_V: Tensor | None, labels_C: Tensor) -> Tensor:
    """fp32 [C], the scores of the labels, anything where they are negative.

    Not compiled with the rest: torch 2.11 then reads them after the gradient has replaced the logits.
    """
    column_C = labels_C.clamp_min(0)
    label_C = logits_CV.gather(1, column_C[:, None]).squeeze(1).float()
    return label_C if bias_V is None else label_C + bias_V[column_C].float()


def _losses(logits_CV: Tensor, bias_V: Tensor | None, labels_C: Tensor, label_C: Tensor) -> Tensor:
    """fp32 [2] as `vocabulary_losses` returns; `logits_CV` come without their bias, `label_C` with it."""
    return _totals(labels_C, label_C, *_normalize(logits_CV, bias_V))


def losses_and_gradient(logits_CV: Tensor, bias_V: Tensor | None, labels_C: Tensor, label_C: Tensor) -> Tensor:
    """`_losses`; the logits become the gradient of the first. Uncompiled, each out-of-place operation takes a table."""
    scores_CV, top_C, log_total_C = _normalize(logits_CV, bias_V)
    totals = _totals(labels_C, label_C, scores_CV, top_C, log_total_C)
    column_V = torch.arange(scores_CV.shape[1], device=scores_CV.device)
    # Ignored rows get probabilities of 0, and no column is their label, so entries need no extra operation.
    denominator_C = torch.where(labels_C < 0, math.inf, log_total_C)
    grad_CV = scores_CV.sub_(denominator_C[:, None]).exp_()
    grad_CV.sub_((column_V == labels_C[:, None]).float())
    logits_CV.copy_(grad_CV)
    return totals


def _soft_losses_and_gradient(
    logits_CV: Tensor,
    bias_V: Tensor | None,
    labels_C: Tensor,
    label_C: Tensor,
    teacher_CV: Tensor,
    teacher_bias_V: Tensor | None,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
) -> Tensor:
    """fp32 [4] as `soft_target_losses` returns; the logits become the gradient of the first."""
    scores_CV, top_C, log_total_C = _normalize(logits_CV, bias_V)
    column_V = torch.arange(scores_CV.shape[1], device=scores_CV.device)
    hard_CV = (scores_CV - log_total_C[:, None]).exp() - (column_V == labels_C[:, None]).float()
    given_CV = teacher_CV.float() if teacher_bias_V is None else teacher_CV.float() + teacher_bias_V.float()
    own_CV = (scores_CV / temperature).log_softmax(-1)
    their_CV = (given_CV / temperature).log_softmax(-1)
    shares_CV = their_CV.exp()
    divergence = (shares_CV * (their_CV - own_CV)).sum() * temperature**2
    cross_entropy, correct = _totals(labels_C, label_C, scores_CV, top_C, log_total_C).unbind()
    weighted = soft_weight * divergence + hard_weight * cross_entropy
    grad_CV = hard_weight * hard_CV + (soft_weight * temperature) * (own_CV.exp() - shares_CV)
    logits_CV.copy_(grad_CV)
    return torch.stack([weighted, cross_entropy, divergence, correct])


def _normalize(logits_CV: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """In fp32: (scores [C, V], the highest of each row [C], log of the sum of their exponentials [C])."""
    scores_CV = logits_CV.float() if bias_V is None else logits_CV.float() + bias_V.float()
    top_C = scores_CV.amax(-1)
    return scores_CV, top_C, (scores_CV - top_C[:, None]).exp_().sum(-1).log() + top_C


def _totals(labels_C: Tensor, label_C: Tensor, scores_CV: Tensor, top_C: Tensor, log_total_C: Tensor) -> Tensor:
    # Scores in bf16 tie: a label that shares the top with others counts as its share of them.
    ties_C = (scores_CV >= top_C[:, None]).sum(-1, dtype=torch.int32)
    correct_C = torch.where(label_C >= top_C, 1.0 / ties_C, 0.0)
    return torch.stack([_sum_of_rows(log_total_C - label_C, labels_C), _sum_of_rows(correct_C, labels_C)])


def _sum_of_rows(values_C: Tensor, labels_C: Tensor) -> Tensor:
    """Return the sum over the rows that are not ignored, a scalar."""
    return torch.where(labels_C < 0, 0.0, values_C).sum()
