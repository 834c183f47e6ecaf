"""The sums of gradients over micro-batches and workers, and their norm."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.model.encoder import Embeddings
from pretrain.training.engine import deepspeed_patches
from pretrain.training.engine.buckets import BUCKET_ENTRIES
from pretrain.training.optim import sums_of_squares

PIECE_ENTRIES = BUCKET_ENTRIES  # number of entries per collective; larger pieces need more memory and save no time
_ADDITION_ENTRIES = 1 << 20  # maximum number of entries per addition on a CPU
MAX_IN_FLIGHT = 8  # maximum number of pieces sent simultaneously: 160 MB in half precision
# torch 2.13 renamed reduce_scatter_tensor and deprecated the old name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reduces_in_transit() -> bool:
    """Return whether the backend should sum the workers' parts; gloo should not, since it would round more often."""
    return dist.get_backend() != "gloo"


class GradientSums:
    """The fp32 gradient sums of ZeRO 1 and 2.

    Each gradient is added when it is computed. Each rank owns a part of every bucket (`buckets`). A complete bucket is
    sent to its owners: in stage 1 during a step's last backward pass; in stage 2, which does not keep all sums,
    during every one. All ranks send the same buckets in the same order, whatever the order of gradients.

    DeepSpeed copies every gradient to fp32 and to a bucket, divides it by the number of workers, flattens it, copies it
    back and adds it to zeros: about 50 bytes of memory traffic per entry. Its stage 1 also rounds the sums to half
    precision, and gloo rounds after adding each worker's part. Here, with gloo, each part is rounded once, before it is
    sent; the owner's is not sent. NCCL adds parts along its ring and rounds each sum, but needs only one collective per
    piece. DeepSpeed needs one per piece and owner, and waits for the device before each (allreduce_and_copy).

    Attributes:
        local_parts: fp32 [entries of the part], this rank's part of each bucket's sums, complete after `finish`.
    """

    def __init__(
        self,
        deepspeed: Any,
        buckets: Iterable[tuple[Sequence[nn.Parameter], Tensor]],
        *,
        keeps_all: bool,
    ) -> None:
        """Replace ZeRO's gradient sums.

        Args:
            deepspeed: DeepSpeed's engine, in stage 1 or 2.
            buckets: (parameters, their flat weights) of each optimizer group.
            keeps_all: whether each rank keeps the sums of all gradients, as in stage 1, and sends them once per step.
        """
        self._sent_dtype = deepspeed.communication_data_type  # by default the dtype of the weights
        self._keeps_all = keeps_all or dist.get_world_size() == 1
        self._buckets = [_Bucket(parameters, weights, self._keeps_all) for parameters, weights in buckets]
        self._bucket_of = {key: bucket for bucket in self._buckets for key in bucket.slices}
        self.local_parts = [bucket.part for bucket in self._buckets]
        self._to_send: deque[_Bucket] = deque()  # buckets to send in this backward pass, in order
        self._pending: deque[_PieceInFlight] = deque()
        deepspeed_patches.replace_gradient_sums(deepspeed.optimizer, self._add)

    @property
    def accepts_sparse(self) -> bool:
        """Return whether gradients of embeddings may be sparse tensors; their rows are summed in fp32."""
        return self._keeps_all

    def nonzero_parts(self) -> list[Tensor]:
        """Return `local_parts`, but for tables with sparse gradients only the rows that have gradients."""
        tables = map(self.sparse_sums, range(len(self.local_parts)))
        return [part if t is None else t[0][t[1]].view(-1) for part, t in zip(self.local_parts, tables, strict=True)]

    def sparse_sums(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return (sums [V, H], indices of rows with gradients) if a bucket is one table with sparse gradients."""
        bucket = self._buckets[index]
        # On a GPU, the host would have to wait for the indices, and the GPU reads a whole table in microseconds.
        if bucket.rows is None or bucket.shape is None or not bucket.part.is_cpu:
            return None
        return bucket.part[: bucket.shape.numel()].view(bucket.shape), bucket.rows.unique()

    @property
    def is_empty(self) -> bool:
        """Return whether no gradient has been added in this step."""
        return not any(bucket.filled for bucket in self._buckets)

    def add(self, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Add gradients of a micro-batch outside of DeepSpeed's backward pass; nothing is sent yet."""
        for parameter, gradient in gradients:
            self._bucket_of[id(parameter)].add(parameter, gradient)

    def mark_filled(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record that replayed kernels have added gradients of `parameters`."""
        for parameter in parameters:
            self._bucket_of[id(parameter)].filled.add(id(parameter))

    def begin_backward(self, *, last: bool) -> None:
        """Prepare for the backward pass of a micro-batch; `last`: whether it is the last one of the step."""
        if dist.get_world_size() > 1 and (last or not self._keeps_all):
            self._to_send = deque(self._buckets)
            for bucket in self._buckets:
                bucket.missing, bucket.is_sent = set(bucket.slices), False

    def end_backward(self) -> None:
        """Finish the backward pass: send the remaining buckets, which did not get all of their gradients."""
        while self._to_send:
            self._send(self._to_send.popleft())

    def finish(self) -> None:
        """Complete the step's sums: missing gradients count as zero, and every rank has the sums of its part."""
        while self._pending:
            self._receive()
        for bucket in self._buckets:
            bucket.end_step()

    def _add(self, parameter: nn.Parameter, _: int) -> None:
        bucket = self._bucket_of[id(parameter)]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        bucket.add(parameter, gradient)
        while self._to_send and not self._to_send[0].missing:
            self._send(self._to_send.popleft())

    def _send(self, bucket: _Bucket) -> None:
        """Send a bucket to its owners, in pieces."""
        sums = bucket.pop_sums()
        for start in range(0, sums.shape[1], width := max(1, PIECE_ENTRIES // len(sums))):
            if len(self._pending) == MAX_IN_FLIGHT:
                self._receive()
            columns = slice(start, start + width)
            local, sent = bucket.part[columns], sums[:, columns].to(self._sent_dtype).contiguous()
            if reduces_in_transit():
                received = sent.new_empty(sent.shape[1])
                work = _reduce_scatter(received, sent.view(-1), async_op=True)
            else:
                received = torch.empty_like(sent)
                work = dist.all_to_all_single(received, sent, async_op=True)
            includes_local = self._keeps_all and reduces_in_transit()
            self._pending.append(_PieceInFlight(local, received, work, includes_local))

    def _receive(self) -> None:
        """Add the other ranks' parts of the oldest piece to this rank's part."""
        local, received, work, includes_local = self._pending.popleft()
        work.wait()
        if includes_local:
            local.copy_(received)
        elif received.dim() == 1:
            _add_entries(local, received)
        else:
            for rank, part in enumerate(received):
                if not self._keeps_all or rank != dist.get_rank():
                    _add_entries(local, part)


class _PieceInFlight(NamedTuple):
    """A piece that is being sent."""

    local: Tensor  # this rank's part of the sums, fp32 [entries]
    received: Tensor  # the sum over ranks, [entries], or each rank's summand, [workers, entries]
    work: Any  # handle of the collective
    includes_local: bool  # whether `received` includes `local`, and so replaces it


class _Bucket:
    """The sums of one optimizer group.

    Attributes:
        part: fp32 [entries of the part], this rank's part of the sums over workers.
        filled: ids of the parameters whose slice contains a gradient.
        missing: ids of the parameters whose gradient in this micro-batch is awaited before the bucket is sent.
        is_sent: whether the bucket has been sent in this micro-batch.
        shape: shape of the bucket's only parameter; None if it has several, or if there are several workers.
        rows: indices of that parameter's rows whose sums may be nonzero, int64; None if unknown.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], weights: Tensor, keeps_all: bool) -> None:
        """If `keeps_all`, keep the fp32 sums of all ranks' parts during a step; `part` is then a view of them."""
        starts = {id(p): int(p.storage_offset() - weights.storage_offset()) for p in parameters}
        self.slices = {id(p): slice(starts[id(p)], starts[id(p)] + p.numel()) for p in parameters}
        self.missing: set[int] = set()
        self.is_sent = False
        self.filled: set[int] = set()
        self._weights, self._workers, self._keeps_all = weights.detach(), dist.get_world_size(), keeps_all
        self._sums: Tensor | None = None  # [entries], of a step in fp32, or of a micro-batch in the weights' dtype
        is_single = keeps_all and len(parameters) == 1 and self._workers == 1
        self.shape = parameters[0].shape if is_single else None
        self.rows: Tensor | None = None
        self._is_stale = False  # whether `part` contains the sums of an earlier step
        if keeps_all:
            self._sums = torch.zeros_like(self._weights, dtype=torch.float32)
            self.part = self._sums.view(self._workers, -1)[dist.get_rank()]
        else:
            self.part = self._weights.new_zeros(len(self._weights) // self._workers, dtype=torch.float32)

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a dense or sparse gradient to the sums of all parts."""
        if self.is_sent:
            raise RuntimeError(f"a gradient of shape {tuple(parameter.shape)} came after its bucket was sent")
        if self._sums is None:
            self._sums = torch.zeros_like(self._weights)
        key = id(parameter)
        view, is_first = self._sums[self.slices[key]], key not in self.filled
        self.filled.add(key)
        self.missing.discard(key)
        if gradient.is_sparse:
            old_rows = self.rows if self.shape is not None else None
            add_rows(view.view(parameter.shape), gradient, is_first, old_rows)
            rows = gradient._indices()[0]
            self.rows = rows if is_first else None if old_rows is None else torch.cat([old_rows, rows])
            return
        self.rows = None
        if is_first:
            view.copy_(gradient.reshape(-1))
        else:
            _add_entries(view, gradient.reshape(-1))

    def pop_sums(self) -> Tensor:
        """Return the sums of all parts, [workers, entries of a part], for sending; drop them unless `keeps_all`."""
        self.is_sent = True
        if self._keeps_all:
            self._zero_unfilled()
        elif self._is_stale:
            self.part.zero_()
            self._is_stale = False
        sums = torch.zeros_like(self._weights) if self._sums is None else self._sums
        if not self._keeps_all:
            self._sums = None
            self.filled.clear()
        return sums.view(self._workers, -1)

    def end_step(self) -> None:
        """Complete the sums of a step; the next gradient starts new sums."""
        if self._keeps_all:
            self._zero_unfilled()
        self.filled.clear()
        self._is_stale, self.is_sent = True, False

    def _zero_unfilled(self) -> None:
        assert self._sums is not None
        for key, entries in self.slices.items():
            if key not in self.filled:
                self._sums[entries].zero_()
        self.filled.update(self.slices)  # other ranks' sums may be added to these zeros


def _add_entries(sums: Tensor, addend: Tensor) -> None:
    """Add `addend`, of any dtype, to fp32 `sums`; both [entries]."""
    if sums.is_cuda:
        sums.add_(addend)
        return
    # On CPUs, adding mixed dtypes is not vectorized (seven times slower), and a whole fp32 copy does not fit the cache.
    for piece, new in zip(sums.split(_ADDITION_ENTRIES), addend.split(_ADDITION_ENTRIES), strict=True):
        piece.add_(new.float())


def add_rows(sums: Tensor, gradient: Tensor, is_first: bool, old_rows: Tensor | None = None) -> None:
    """Add a sparse gradient to fp32 `sums` [V, H]; if `is_first`, first clear `old_rows` (by default all rows)."""
    if is_first and old_rows is not None:
        sums.index_fill_(0, old_rows, 0)
    elif is_first:
        sums.zero_()
    sums.index_add_(0, gradient._indices()[0], gradient._values().float())


def use_sparse_embedding_gradients(model: nn.Module) -> None:
    """Make embeddings whose table nothing else uses return sparse gradients of the looked-up rows.

    With dense gradients, a fine-tuning step of 400 tokens would clear, copy and add 23 MB.
    """
    for module in model.modules():
        if isinstance(module, Embeddings):
            module.sparse_gradients = True


def global_norm(gradients: Sequence[Tensor], sum_over_workers: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Return the norm of all workers' 1-D `gradients`, an fp64 scalar; not finite if any gradient is not.

    DeepSpeed copies whole gradients to fp64 (twice their size), needs a collective for each group, and needs another
    pass and collective to check whether all are finite.
    """
    return sum_over_workers(sums_of_squares(list(gradients)).sum()).sqrt()
