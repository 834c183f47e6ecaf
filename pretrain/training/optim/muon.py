"""Muon: orthogonalized momentum for the layers' matrices; AdamW for all other parameters.

DeepSpeed's Muon (0.19.8, `optimizer.type`) differs: it orthogonalizes before gradients are clipped and checked, does
not split stacked projections, and keeps its momentum outside the optimizer's state.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pretrain.model.parameters import is_hidden_matrix
from pretrain.training.optim.lists import foreach, uses_foreach
from pretrain.training.optim.matrix_rounds import MatrixPiece, Round, Shape, Workers, plan_rounds
from pretrain.training.optim.skipping import SkippingOptimizer
from pretrain.training.optim.tensorwise import Segment, assign_tensor_ids

# Newton-Schulz iteration of Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/: coefficients, and steps.
_QUINTIC, _STEPS = (3.4445, -4.7750, 2.0315), 5
_UPDATE_RMS = 0.2  # typical root mean square of AdamW's updates (Liu et al. 2025, section 2.2)
# Matrices up to this width are batched on CPUs. Unbatched, bf16 takes 1.5 times as long, and 4 to 5 times at width 128.
_MAX_BATCHED_WIDTH = 256


def matrix_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[int, Shape]:
    """Return the shapes of the matrices that Muon orthogonalizes, by tensor id; a stacked parameter has several."""
    ids = assign_tensor_ids(shapes)
    return {
        tensor_id: (shape[0] // len(ids[name]), shape[1])
        for name, shape in shapes.items()
        if is_hidden_matrix(name)
        for tensor_id in ids[name]
    }


def orthogonalize(update_RC: Tensor) -> Tensor:
    """Return roughly the nearest orthogonal matrix: singular values become 0.7 to 1.2 (Newton-Schulz iteration).

    `update_RC` is one or several matrices [..., R, C], and the computation uses its dtype. The scale of a matrix has no
    effect; a matrix of zeros remains zero.
    """
    rows, columns = update_RC.shape[-2:]
    x = update_RC.mT if rows > columns else update_RC
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = x / norm.clamp(min=1e-30).to(x.dtype)
    a, b, c = _QUINTIC
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if rows > columns else x


class Muon(SkippingOptimizer):
    """Muon, Jordan et al. 2024, with weight decay and the scale of Liu et al. 2025 (arXiv:2502.16982, section 2.2).

    The update of a matrix is the orthogonalized Nesterov momentum times 0.2 sqrt(max(rows, columns)). It is about as
    large as AdamW's, so the same learning rate and weight decay suit both, as in `torch.optim.Muon` with
    adjust_lr_fn="match_rms_adamw". Query, key and value of a stacked `qkv_weight` are orthogonalized separately, as are
    the halves of `gated_in_weight`.

    Each param group has the entries `names`, one name per parameter, and `orthogonal`, whether all its parameters are
    matrices to orthogonalize. Parameters must be contiguous fp32. Before the first step, call `set_shards` and set the
    state; matrices have no second moment. `step` overwrites the gradient.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, {**defaults, "orthogonal": False})
        self._pieces: list[list[MatrixPiece]] = []  # pieces that each rank stores
        self._flat_index: dict[Tensor, int] = {}  # index of each flat tensor
        self._shapes: dict[int, Shape] = {}
        self._replicated, self._dtype = False, torch.float32
        self._workers: Workers
        self._rounds: dict[tuple[int, ...], list[Round]] = {}  # plans, by the indices of the flat tensors in the step

    def set_shards(
        self,
        segments: Mapping[Tensor, Sequence[Segment]],
        shapes: Mapping[int, Shape],
        workers: Workers,
        *,
        replicated: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Set which tensors the flat parameters contain, after a wrapper has sharded them; all workers must call this.

        Args:
            segments: this worker's flat parameters, with their segments. All workers have the same number and order.
            shapes: the result of `matrix_shapes`.
            workers: the workers that step together; `step` uses their collectives.
            replicated: whether every worker stores all matrices.
            dtype: dtype for sending and orthogonalizing the updates.
        """
        self._dtype = dtype
        self._flat_index = {flat: index for index, flat in enumerate(segments)}
        local_pieces = [
            MatrixPiece(seg.tensor_id, seg.tensor_start, seg.stop - seg.start, self._flat_index[flat], seg.start)
            for flat, flat_segments in segments.items()
            for seg in flat_segments
            if seg.tensor_id in shapes
        ]
        gathered = workers.gather_objects([tuple(piece) for piece in local_pieces])
        self._pieces = [[MatrixPiece(*values) for values in rank_pieces] for rank_pieces in gathered]
        self._shapes, self._replicated, self._workers, self._rounds = dict(shapes), replicated, workers, {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step the parameters with gradients; do nothing before `set_shards`, when DeepSpeed allocates moments."""
        if not self._pieces:
            return
        self._prepare_skip()
        lrs: dict[Tensor, float] = {}
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["orthogonal"]:
                self._apply_nesterov(group, parameters)
                lrs |= dict.fromkeys(parameters, group["lr"])
            elif parameters:
                self._step_adamw(group, parameters)
        if lrs:
            self._step_matrices(lrs)

    def _apply_nesterov(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update the momenta, replace gradients by Nesterov updates, and decay the weights."""
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        momenta = [state["exp_avg"] for state in states]
        self._advance_counts([state["step"] for state in states])
        self._lerp_means(momenta, gradients, 1 - group["momentum"])
        foreach._foreach_lerp_(gradients, momenta, group["momentum"])
        foreach._foreach_mul_(parameters, self._one_minus(group["lr"] * group["weight_decay"]))

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_matrices(self, lrs: Mapping[Tensor, float]) -> None:
        """Step these flat parameters: orthogonalize the updates, which replaced their gradients, and apply them."""
        flats = {self._flat_index[flat]: flat for flat in lrs}
        key = tuple(sorted(flats))
        if key not in self._rounds:
            pieces = [[piece for piece in rank_pieces if piece.flat_index in flats] for rank_pieces in self._pieces]
            self._rounds[key] = plan_rounds(pieces, self._shapes, self._workers.rank, self._replicated)
        for round_ in self._rounds[key]:
            self._apply_updates(_flatten(round_.received), self._orthogonalized_updates(round_, flats), flats, lrs)

    def _apply_updates(
        self, pieces: list[MatrixPiece], updates: Tensor, flats: Mapping[int, Tensor], lrs: Mapping[Tensor, float]
    ) -> None:
        """Step the weights of `pieces` with their concatenated fp32 `updates`."""
        if self._applied is not None:
            updates.mul_(self._applied)
        weights = _flat_views(pieces, flats)
        indices_by_scale: dict[float, list[int]] = {}  # indices in `pieces`, by the scale of their update
        for index, piece in enumerate(pieces):
            scale = lrs[flats[piece.flat_index]] * _UPDATE_RMS * math.sqrt(max(self._shapes[piece.tensor_id]))
            indices_by_scale.setdefault(scale, []).append(index)
        split_updates = updates.split([piece.numel for piece in pieces])
        for scale, indices in indices_by_scale.items():
            same_scale = ([values[index] for index in indices] for values in (weights, split_updates))
            foreach._foreach_add_(*same_scale, alpha=-scale)

    def _orthogonalized_updates(self, round_: Round, flats: Mapping[int, Tensor]) -> Tensor:
        """Return the orthogonalized updates of this worker's pieces, concatenated in fp32."""
        gradients = {index: flat.grad for index, flat in flats.items() if flat.grad is not None}
        like = next(iter(flats.values()))  # any tensor on the device
        sent = _flat_views(_flatten(round_.sent), gradients)
        gathered = self._exchange(sent, round_.sent, round_.gathered, like)
        pieces = _flatten(round_.gathered)
        *starts, total = itertools.accumulate(map(math.prod, round_.owned.values()), initial=0)
        start_of = dict(zip(round_.owned, starts, strict=True))
        owned = gathered.new_empty(total)  # the owned matrices, concatenated
        _copy(_owned_views(pieces, owned, start_of), gathered.split([piece.numel for piece in pieces]))
        self._orthogonalize(round_, owned)
        returned = _owned_views(_flatten(round_.returned), owned, start_of)
        return self._exchange(returned, round_.returned, round_.received, like).float()

    def _orthogonalize(self, round_: Round, owned: Tensor) -> None:
        """Orthogonalize the owned matrices, concatenated in `owned`, in place.

        On a GPU, all matrices of one shape are batched, so that more matrices do not mean more kernels. Each of five
        temporaries takes as much memory as the batch: 32 MB in bf16 (`ROUND_ENTRIES`), or one matrix if that is larger.
        On a CPU, only narrow matrices are batched: the product of one cannot use all cores.
        """
        start = 0
        for shape, same_shape in itertools.groupby(round_.owned.values()):
            count = len(list(same_shape))
            batched = uses_foreach(owned) or min(shape) <= _MAX_BATCHED_WIDTH
            for batch_size in [count] if batched else [1] * count:
                stop = start + batch_size * math.prod(shape)
                matrices = owned[start:stop].view((-1, *shape) if batched else shape)
                matrices.copy_(orthogonalize(matrices))
                start = stop

    def _exchange(
        self, values: Sequence[Tensor], sent: list[list[MatrixPiece]], received: list[list[MatrixPiece]], like: Tensor
    ) -> Tensor:
        """Send `values`, the contents of `sent`; return the contents of `received`, on the device of `like`."""
        joined = like.new_empty(sum(value.numel() for value in values), dtype=self._dtype)
        _copy(joined.split([value.numel() for value in values]), values)
        sizes = ([sum(p.numel for p in pieces) for pieces in by_worker] for by_worker in (sent, received))
        return self._workers.all_to_all(joined, *sizes)


def _flat_views(pieces: Sequence[MatrixPiece], flats: Mapping[int, Tensor]) -> list[Tensor]:
    """Return a view of each piece in its flat tensor; `flats` maps indices to tensors."""
    views = {index: flat.view(-1) for index, flat in flats.items()}
    return [views[p.flat_index][p.flat_start : p.flat_start + p.numel] for p in pieces]


def _owned_views(pieces: Sequence[MatrixPiece], owned: Tensor, start_of: Mapping[int, int]) -> list[Tensor]:
    """Return a view of each piece in `owned`, where the matrix of tensor id i starts at `start_of[i]`."""
    offsets = [start_of[piece.tensor_id] + piece.matrix_start for piece in pieces]
    return [owned[offset : offset + piece.numel] for offset, piece in zip(offsets, pieces, strict=True)]


def _copy(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if destinations:
        foreach._foreach_copy_(destinations, sources)


def _flatten(pieces_by_worker: list[list[MatrixPiece]]) -> list[MatrixPiece]:
    return [piece for pieces in pieces_by_worker for piece in pieces]
