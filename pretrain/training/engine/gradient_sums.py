"""The sums of gradients over micro-batches and workers, and their norm."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.model.encoder import Embeddings
from pretrain.training.engine import deepspeed_patches
from pretrain.training.optim import square_sums

# Size of the gradient pieces sent between workers. Larger ones save no time and are copied three times in the process.
BUCKET_ENTRIES = 10_000_000
_SUM_ENTRIES = 1 << 20  # of gradients that are added at once
_IN_FLIGHT = 2  # pieces that are sent at the same time: one is converted while another is on its way
# torch 2.13 renamed reduce_scatter_tensor, and warns of the old name.
_sum_and_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def adds_on_the_way() -> bool:
    """Whether the backend adds the workers' parts while they are sent. gloo does so too, but rounds more often."""
    return dist.get_backend() != "gloo"


class GradientSums:
    """The fp32 sums of gradients. Each gradient is added when it is computed; the step sends the sums to their owners.

    DeepSpeed copies every gradient to fp32 and to a bucket, divides it by the number of workers, flattens it, copies it
    back and adds it to zeros: some 50 bytes of memory traffic for each entry. Its stage 1 also rounds the sums to half
    precision in the process, and gloo rounds after adding each worker's part. Here, with gloo, each worker's part is
    rounded once, before it is sent, and the owner's part is not rounded. NCCL adds parts on their way around its ring,
    and rounds each sum; that is one collective for a piece, however many workers there are. DeepSpeed's stage 1 needs
    one for each piece and owner, and waits for the device before each (stage_1_and_2.py, allreduce_and_copy).

    For several workers these are whole sums, as DeepSpeed's stage 1 has them, cut into the owners' equal parts.
    """

    @classmethod
    def move_gradients(cls, wrapper: Any) -> GradientSums | None:
        """Replace ZeRO's sums; None if the user's `deepspeed` section requests sums that are not fp32 on the device."""
        return cls(wrapper) if deepspeed_patches.sums_in_fp32(wrapper) else None

    def __init__(self, wrapper: Any) -> None:
        self._sent = deepspeed_patches.sent_type(wrapper)
        # fp32 [workers, owner's part] of each group, laid out as its weights are.
        self._sums_G: list[Tensor] = []
        self._views: dict[int, Tensor] = {}  # by the id of a parameter, its part of the sums
        for parameters, weights in deepspeed_patches.weights_of_stages_1_and_2(wrapper):
            flat = torch.zeros(weights.numel(), device=weights.device)
            self._sums_G.append(flat.view(dist.get_world_size(), -1))
            for parameter in parameters:
                offset = int(parameter.storage_offset() - weights.storage_offset())
                self._views[id(parameter)] = flat.narrow(0, offset, parameter.numel())
        self._filled: set[int] = set()  # ids of parameters with a gradient in this step
        own_G = [sums[dist.get_rank()] for sums in self._sums_G]
        deepspeed_patches.replace_gradient_sums(wrapper, own_G, self._add)

    def finish(self) -> None:
        """Finish the step's sums: missing gradients are zero, and every worker gets the sums of its part."""
        for key, view in self._views.items():
            if key not in self._filled:
                view.zero_()
        self._filled.clear()
        if dist.get_world_size() > 1:
            pieces = (x for sums in self._sums_G for x in sums.split(max(1, BUCKET_ENTRIES // len(sums)), dim=1))
            if adds_on_the_way():
                self._reduce_scatter(pieces)
            else:
                for piece in pieces:
                    self._exchange(piece)

    def _reduce_scatter(self, pieces: Iterable[Tensor]) -> None:
        """Replace this worker's row of each fp32 [workers, entries] by the sum of all workers' rows of that number."""
        rank, pending = dist.get_rank(), deque[tuple[Tensor, Tensor, Any]]()

        def receive() -> None:
            own, received, work = pending.popleft()
            work.wait()
            own.copy_(received)

        for sums in pieces:
            sent = sums.to(self._sent)
            received = sent.new_empty(sent.shape[1])
            pending.append((sums[rank], received, _sum_and_scatter(received, sent.view(-1), async_op=True)))
            if len(pending) == _IN_FLIGHT:
                receive()
        while pending:
            receive()

    def _exchange(self, sums: Tensor) -> None:
        """Add the other workers' fp32 [workers, entries] to this worker's row."""
        rank, sent = dist.get_rank(), sums.to(self._sent)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        for other, row in enumerate(received):
            if other != rank:
                _add_entries(sums[rank], row)

    def _add(self, parameter: nn.Parameter, _: int) -> None:
        view, first = self._views[id(parameter)], id(parameter) not in self._filled
        self._filled.add(id(parameter))
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            add_rows(view.view(parameter.shape), gradient, first)
        elif first:
            view.copy_(gradient.reshape(-1))
        else:
            _add_entries(view, gradient.reshape(-1))


def _add_entries(sums: Tensor, more: Tensor) -> None:
    """Add `more`, of any type, to fp32 `sums`; both [entries]."""
    if sums.is_cuda:
        sums.add_(more)
        return
    # A mixed sum is not vectorised on CPUs (seven times slower), and a whole fp32 copy leaves the cache.
    for piece, new in zip(sums.split(_SUM_ENTRIES), more.split(_SUM_ENTRIES), strict=True):
        piece.add_(new.float())


def add_rows(sums: Tensor, gradient: Tensor, first: bool) -> None:
    """Add an uncoalesced sparse [V, H] to fp32 `sums` [V, H]; `first` overwrites what they hold."""
    if first:
        sums.zero_()
    sums.index_add_(0, gradient._indices()[0], gradient._values().float())


def use_sparse_embedding_gradients(model: nn.Module) -> None:
    """Make embeddings return gradients of only the rows that were looked up, if nothing else uses the table.

    A fine-tuning step of 400 tokens would otherwise clear, send and add 23 MB for them.
    """
    for part in model.modules():
        if isinstance(part, Embeddings):
            part.sparse_gradients = True


def norm_over_workers(wrapper: Any, sum_over_workers: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    """A function that returns the global norm of ZeRO's gradients, an fp64 scalar; not finite when one of them is not.

    ZeRO's own copies whole gradients to fp64 (twice their size) and needs a collective for each group. To check whether
    all are finite it reads them again and needs another collective.
    """

    def norm() -> Tensor:
        squares = square_sums(list(deepspeed_patches.gradients_of_zero(wrapper)))
        return sum_over_workers(squares.sum()).sqrt()

    return norm


class FusedScaling:
    """Clips and removes the loss scale inside the fused AdamW, which divides by `grad_scale` as it reads a gradient.

    Attributes:
        loss_scale: of the gradients of this step. When ZeRO clips, its own is already that of the next step.
    """

    def __init__(self, optimizer: torch.optim.AdamW, clip_norm: float) -> None:
        self._optimizer, self._clip_norm = optimizer, clip_norm
        self.loss_scale = 1.0

    def __call__(self, _: Any, norm: Tensor) -> None:
        scale, clip = self.loss_scale, self._clip_norm
        factor = (norm / scale + 1e-6) / clip if clip else torch.ones_like(norm)
        self._optimizer.grad_scale = factor.clamp(min=1.0).float() * scale  # pyright: ignore[reportAttributeAccessIssue]
