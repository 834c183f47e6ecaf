"""Cross-entropy over the vocabulary without a table of all logits: the heaviest part of a small encoder's step.

Shape letters: K masked tokens, C of them at a time, H hidden width, V vocabulary.

The gradient needs the same logits as the loss, so the forward pass computes it from each piece of them at once. For the
backward pass it keeps the gradients of its inputs ([K, H], [V, H] and [V]) instead of logits [K, V]. That takes three
matmuls, none done twice, and memory for one piece (the idea of Liger Kernel's fused linear cross-entropy, Hsu et al.
2024, arXiv:2410.10989, section 3.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretrain.model.compile import program
from pretrain.model.cost import LOGITS_PER_PIECE


def vocabulary_losses(
    hidden: Tensor, word: Tensor, bias: Tensor | None, labels: Tensor, fused: bool
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the scores `hidden @ word.T + bias` against the labels.

    Args:
        hidden: [K, H], bf16, fp16 or fp32; K may be 0.
        word: [V, H], the decoder's weight, in the dtype of `hidden`.
        bias: [V], or None.
        labels: int64 [K].
        fused: let torch.compile fuse what lies between the matmuls.

    Returns:
        (sum of cross-entropies in nats, expected number of correct predictions, with ties broken at random), fp32
        scalars; the first is differentiable, once.
    """
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or word.requires_grad)
    losses: Any = _VocabularyLosses.apply(hidden, word, bias, labels, fused, needs_gradient)
    return losses


class _VocabularyLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        word: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        fused: bool,
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        totals = torch.zeros(2, device=hidden.device)
        grad_hidden, grad_word, grad_bias = torch.empty_like(hidden), None, None
        # Pieces of nearly equal length: a last one of a single row would be compiled for itself.
        pieces = max(1, -(-len(labels) * word.shape[0] // LOGITS_PER_PIECE))
        rows = max(1, -(-len(labels) // pieces))
        for first in range(0, max(1, len(labels)), rows):
            piece = slice(first, first + rows)
            logits_CV, labels_C = hidden[piece] @ word.T, labels[piece]
            if not needs_gradient:
                totals += program(_losses, fused)(logits_CV, bias, labels_C)
                continue
            losses, grad_CV = program(_losses_and_gradient, fused)(logits_CV, bias, labels_C)
            totals += losses
            torch.mm(grad_CV, word, out=grad_hidden[piece])
            grad_word = _add(grad_word, grad_CV.T @ hidden[piece])
            if bias is not None:
                # A column sum as a product with ones: twice as fast on CPU.
                grad_bias = _add(grad_bias, (grad_CV.new_ones(1, len(grad_CV)) @ grad_CV)[0])
        if grad_word is not None:
            of_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
            ctx.save_for_backward(grad_hidden, grad_word.to(word.dtype), of_bias)
        loss, correct = totals.unbind()
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place: nothing else uses them, and there is one backward pass.
        return *(None if saved is None else saved.mul_(grads[0]) for saved in ctx.saved_tensors), None, None, None


def _add(total: Tensor | None, piece: Tensor) -> Tensor:
    """`total` + `piece`: several pieces are added in fp32; a single one needs no copy."""
    return piece if total is None else total.float().add_(piece)


def _losses(logits_CV: Tensor, bias_V: Tensor | None, labels_C: Tensor) -> Tensor:
    """fp32 [2]: summed cross-entropy, and correct predictions; `logits_CV` come without their bias."""
    return _totals(labels_C, *_normalise(logits_CV, bias_V))


def _losses_and_gradient(logits_CV: Tensor, bias_V: Tensor | None, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """(`_losses`, gradient of the summed cross-entropy [C, V] in the dtype of the logits)."""
    scores_CV, top_C, log_total_C = _normalise(logits_CV, bias_V)
    column_V = torch.arange(scores_CV.shape[1], device=scores_CV.device)
    grad_CV = (scores_CV - log_total_C[:, None]).exp() - (column_V == labels_C[:, None]).float()
    return _totals(labels_C, scores_CV, top_C, log_total_C), grad_CV.to(logits_CV.dtype)


def _normalise(logits_CV: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """In fp32: (scores [C, V], the highest of each row [C], log of the sum of their exponentials [C])."""
    scores_CV = logits_CV.float() if bias_V is None else logits_CV.float() + bias_V.float()
    top_C = scores_CV.amax(-1)
    return scores_CV, top_C, (scores_CV - top_C[:, None]).exp().sum(-1).log() + top_C


def _totals(labels_C: Tensor, scores_CV: Tensor, top_C: Tensor, log_total_C: Tensor) -> Tensor:
    label_C = scores_CV.gather(1, labels_C[:, None]).squeeze(1)
    # Scores in bf16 tie: a label that shares the top with others counts as its share of them.
    ties_C = (scores_CV >= top_C[:, None]).sum(-1)
    correct = torch.where(label_C >= top_C, 1.0 / ties_C, 0.0).sum()
    return torch.stack([(log_total_C - label_C).sum(), correct])
