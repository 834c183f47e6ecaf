"""Muon: momentum, orthogonalised, for the matrices of the layers; AdamW for all other parameters.

DeepSpeed has a Muon too (0.19.8, `optimizer.type`). It orthogonalises before gradients are clipped and checked, keeps
stacked projections together, and takes its momentum out of the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pretrain.model.parameters import is_hidden_matrix
from pretrain.training.optim.matrix_rounds import Alone, MatrixPiece, Round, Shape, Workers, plan_rounds
from pretrain.training.optim.tensorwise import Segment, cut_segments, number_tensors

# Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/: the quintic with the steepest slope at zero.
_QUINTIC, _STEPS = (3.4445, -4.7750, 2.0315), 5
_RMS = 0.2  # of AdamW's updates, Liu et al. 2025 section 2.2


def matrix_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[int, Shape]:
    """Shapes of the matrices that Muon orthogonalises, by tensor id; a stacked parameter holds several."""
    ids = number_tensors(shapes)
    return {
        tensor_id: (shape[0] // len(ids[name]), shape[1])
        for name, shape in shapes.items()
        if is_hidden_matrix(name)
        for tensor_id in ids[name]
    }


def orthogonalise(update_RC: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly: singular values become 0.7 to 1.2 (Newton-Schulz iteration).

    Computed in the type of `update_RC`. The scale of the matrix does not matter; zeros stay zeros.
    """
    rows, columns = update_RC.shape
    x = update_RC.mT if rows > columns else update_RC
    x = x / torch.linalg.vector_norm(x, dtype=torch.float32).clamp(min=1e-30).to(x.dtype)
    a, b, c = _QUINTIC
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if rows > columns else x


class Muon(torch.optim.Optimizer):
    """Muon, Jordan et al. 2024, with weight decay and the scale of Liu et al. 2025 (arXiv:2502.16982, section 2.2).

    Updates of matrices are Nesterov momentum, orthogonalised, times 0.2 sqrt(max(rows, columns)). So they are as large
    as AdamW's, and one learning rate and weight decay serve both, as in `torch.optim.Muon` with
    adjust_lr_fn="match_rms_adamw". Query, key and value of a stacked `qkv_weight` are orthogonalised each on its own,
    and so are the halves of `gated_in_weight`.

    Groups carry `names`, and `orthogonal` where all their parameters are matrices for Muon. Parameters must be
    contiguous fp32. `step` uses up the gradient. Matrices have no second moment.
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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "orthogonal": False,
        }
        super().__init__(groups, defaults)
        self._held: list[list[MatrixPiece]] | None = None  # by rank
        self._numbers: dict[Tensor, int] = {}  # of the flat tensors
        self._shapes: dict[int, Shape] = {}
        self._shared = False
        self._workers: Workers = Alone()
        self._rounds: dict[tuple[int, ...], list[Round]] = {}  # by the flat tensors that step

    def set_shards(
        self,
        segments: Mapping[Tensor, Sequence[Segment]],
        shapes: Mapping[int, Shape],
        workers: Workers,
        *,
        shared: bool = False,
    ) -> None:
        """Set what the flat parameters hold, once a wrapper has flattened and sharded them; all workers call this.

        Args:
            segments: the pieces of each flat parameter of this worker. All workers have as many, in the same order.
            shapes: as `matrix_shapes` gives them.
            workers: those that step together; `step` calls its collectives.
            shared: every worker holds all matrices.
        """
        self._numbers = {flat: number for number, flat in enumerate(segments)}
        mine = [
            MatrixPiece(piece.tensor_id, piece.first, piece.stop - piece.start, self._numbers[flat], piece.start)
            for flat, pieces in segments.items()
            for piece in pieces
            if piece.tensor_id in shapes
        ]
        gathered = workers.gather_objects([tuple(piece) for piece in mine])
        self._held = [[MatrixPiece(*values) for values in of_rank] for of_rank in gathered]
        self._shapes, self._shared, self._workers, self._rounds = dict(shapes), shared, workers, {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over the gradients present. Returns what `closure`, if given, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._held is None:
            self._hold_whole()
        rates: dict[Tensor, float] = {}
        for group in self.param_groups:
            present = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["orthogonal"]:
                for parameter in present:
                    self._blend(group, parameter)
                    rates[parameter] = group["lr"]
            elif present:
                self._adamw(group, present)
        if rates:
            self._step_matrices(rates)
        return loss

    def _hold_whole(self) -> None:
        """Take the parameters as whole tensors, as they are without a wrapper."""
        named: dict[str, Tensor] = {}
        for group in self.param_groups:
            if len(group["names"]) != len(group["params"]):
                raise RuntimeError("Muon: the parameters were flattened by a wrapper; call set_shards first")
            named |= zip(group["names"], group["params"], strict=True)
        ids = number_tensors(named)
        segments = {p: cut_segments(ids[name], p.numel(), 0, p.numel(), 0) for name, p in named.items()}
        self.set_shards(segments, matrix_shapes({name: p.shape for name, p in named.items()}), Alone())

    def _blend(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Advance the momentum and turn the gradient into Nesterov's; decay the weights."""
        state, gradient = self._state(parameter, "exp_avg"), parameter.grad
        assert gradient is not None
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - group["momentum"])
        gradient.lerp_(state["exp_avg"], group["momentum"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])

    def _adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """torch's fused AdamW."""
        states = [self._state(parameter, "exp_avg", "exp_avg_sq") for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _state(self, parameter: Tensor, *moments: str) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update((moment, torch.zeros_like(parameter)) for moment in moments)
        return state

    def _step_matrices(self, rates: Mapping[Tensor, float]) -> None:
        """Orthogonalise the updates of these flat parameters, which their gradients hold, and step."""
        flats = {self._numbers[flat]: flat for flat in rates}
        key = tuple(sorted(flats))
        if key not in self._rounds:
            assert self._held is not None
            held = [[piece for piece in of_rank if piece.flat in flats] for of_rank in self._held]
            self._rounds[key] = plan_rounds(held, self._shapes, self._workers.rank, self._shared)
        for part in self._rounds[key]:
            for piece, update in self._exchange(part, flats):
                rows, columns = self._shapes[piece.tensor_id]
                rate = rates[flats[piece.flat]] * _RMS * math.sqrt(max(rows, columns))
                weights = flats[piece.flat].view(-1)[piece.start : piece.start + piece.numel]
                weights.add_(update.to(weights), alpha=-rate)

    def _exchange(self, part: Round, flats: Mapping[int, Tensor]) -> list[tuple[MatrixPiece, Tensor]]:
        """The orthogonalised updates of this worker's pieces, 1-D."""
        sent = []
        for piece in _joined(part.sent):
            gradient = flats[piece.flat].grad
            assert gradient is not None
            sent.append(gradient.view(-1)[piece.start : piece.start + piece.numel])
        gathered = self._send(sent, part.sent, part.gathered, next(iter(flats.values())))
        whole = {i: gathered.new_empty(rows * columns) for i, (rows, columns) in part.owned.items()}
        for piece, values in _cut(gathered, part.gathered):
            whole[piece.tensor_id][piece.first : piece.first + piece.numel] = values
        done = {i: orthogonalise(whole[i].view(shape)).reshape(-1) for i, shape in part.owned.items()}
        back = [done[piece.tensor_id][piece.first : piece.first + piece.numel] for piece in _joined(part.returned)]
        return _cut(self._send(back, part.returned, part.taken, gathered), part.taken)

    def _send(
        self, values: list[Tensor], sent: list[list[MatrixPiece]], received: list[list[MatrixPiece]], like: Tensor
    ) -> Tensor:
        """`values`, which are the pieces `sent`, sent; those received, 1-D, in the type of the computation."""
        dtype = torch.bfloat16 if like.is_cuda else torch.float32
        values = values or [like.new_empty(0)]
        joined = torch.cat([value.to(dtype) for value in values])
        return self._workers.all_to_all(joined, *([sum(p.numel for p in of) for of in by] for by in (sent, received)))


def _joined(by_worker: list[list[MatrixPiece]]) -> list[MatrixPiece]:
    return [piece for pieces in by_worker for piece in pieces]


def _cut(values: Tensor, by_worker: list[list[MatrixPiece]]) -> list[tuple[MatrixPiece, Tensor]]:
    """The entries of each piece in 1-D `values`, where they lie end to end."""
    pieces = _joined(by_worker)
    return list(zip(pieces, values.split([piece.numel for piece in pieces]), strict=True))
