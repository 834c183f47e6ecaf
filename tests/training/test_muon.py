"""Muon: its formula on whole matrices, and the same steps when the matrices are cut over workers."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pretrain.config import OptimizerConfig
from pretrain.model.parameters import is_hidden_matrix
from pretrain.training.engine import gather_objects
from pretrain.training.optim import (
    Muon,
    Segment,
    assign_tensor_ids,
    cut_segments,
    make_optimizer,
    matrix_shapes,
    parameter_groups,
)
from pretrain.training.optim import matrix_rounds as rounds
from pretrain.training.optim.matrix_rounds import MatrixPiece, plan_rounds
from pretrain.training.optim.muon import orthogonalize
from tests.distributed import give_moments, of_whole_tensors, run_workers

SHAPES = {
    "embeddings.word": (50, 8),
    "embeddings.norm_weight": (8,),
    "layers.0.qkv_weight": (24, 8),
    "layers.0.qkv_bias": (24,),
    "layers.0.attention_out_weight": (8, 8),
    "layers.0.gated_in_weight": (40, 8),
    "layers.0.ffn_out_weight": (8, 20),
    "layers.0.ffn_norm_weight": (8,),
    "layers.1.kv_weight": (8, 8),
    "heads.mlm_transform_weight": (8, 8),
    "heads.mlm_bias": (50,),
}
PARTS = {"layers.0.qkv_weight": 3, "layers.0.gated_in_weight": 2, "layers.1.kv_weight": 2}
MATRICES = [name for name in SHAPES if name.startswith("layers.") and name.endswith(("in_weight", "out_weight"))]
MATRICES += ["layers.0.qkv_weight", "layers.1.kv_weight"]
SETTINGS = OptimizerConfig(name="muon", weight_decay=0.1, muon_lr_scale=0.5)
RATE = 0.02


def make_parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def make_gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make_muon(named: dict[str, torch.nn.Parameter], settings: OptimizerConfig = SETTINGS) -> Muon:
    optimizer = make_optimizer(settings, parameter_groups(named.items(), settings.weight_decay))
    assert isinstance(optimizer, Muon)
    for group in optimizer.param_groups:
        group["lr"] = RATE * group["lr_scale"]
    return of_whole_tensors(optimizer)


def train_whole(steps: int, optimizer: Muon, parameters: dict[str, torch.nn.Parameter], first: int = 0) -> None:
    for step in range(first, first + steps):
        for name, gradient in make_gradients(step).items():
            parameters[name].grad = gradient
        optimizer.step()


def newton_schulz(g: torch.Tensor) -> torch.Tensor:
    """The iteration as Jordan et al. write it, on the matrix as it is, in fp64."""
    x = g.double() / g.double().norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def reference(name: str, steps: int) -> torch.Tensor:
    """Liu et al. 2025, section 2.2, part by part in fp64."""
    parts = PARTS.get(name, 1)
    weights = [part.double() for part in make_parameters()[name].detach().chunk(parts)]
    momenta = [torch.zeros_like(part) for part in weights]
    rate = 0.5 * RATE
    for step in range(steps):
        for number, gradient in enumerate(make_gradients(step)[name].chunk(parts)):
            g, m, w = gradient.double(), momenta[number], weights[number]
            m.mul_(0.95).add_(g)
            update = newton_schulz(g + 0.95 * m)
            update = 0.2 * math.sqrt(max(w.shape)) * update
            w.sub_(rate * (update + 0.1 * w))
    return torch.cat(weights).float()


# ---- whole matrices


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 5)])
def test_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    found = orthogonalize(matrix)
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.25
    assert torch.linalg.svdvals(matrix).min() < 0.1 or values.min() > 0.6
    torch.testing.assert_close(found, newton_schulz(matrix).float(), rtol=1e-4, atol=1e-5)
    # The direction stays: the polynomial changes singular values only.
    assert (found * matrix).sum() > 0.65 * torch.linalg.svdvals(matrix).sum()


def test_the_scale_of_a_gradient_does_not_matter() -> None:
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(3))
    for scale in (1e-12, 1e12):
        torch.testing.assert_close(orthogonalize(matrix * scale), orthogonalize(matrix), rtol=1e-4, atol=1e-5)
    assert not orthogonalize(torch.zeros(6, 9)).any()


def test_it_takes_the_matrices_of_the_layers_only() -> None:
    assert sorted(name for name in SHAPES if is_hidden_matrix(name)) == sorted(MATRICES)
    assert not is_hidden_matrix("positions.table")
    shapes = matrix_shapes(SHAPES)
    ids = assign_tensor_ids(SHAPES)
    assert [shapes[i] for i in ids["layers.0.qkv_weight"]] == [(8, 8)] * 3
    assert [shapes[i] for i in ids["layers.0.gated_in_weight"]] == [(20, 8)] * 2
    assert len(shapes) == 3 + 1 + 2 + 1 + 2


def test_whole_matrices_equal_the_paper_and_all_else_adamw() -> None:
    parameters, others = make_parameters(), make_parameters()
    train_whole(4, make_muon(parameters), parameters)
    adamw = make_optimizer(OptimizerConfig(weight_decay=0.1), parameter_groups(others.items(), 0.1))
    for group in adamw.param_groups:
        group["lr"] = RATE
    for step in range(4):
        for name, gradient in make_gradients(step).items():
            others[name].grad = gradient
        adamw.step()
    for name, parameter in parameters.items():
        if name in MATRICES:
            torch.testing.assert_close(parameter.detach(), reference(name, 4), rtol=1e-4, atol=1e-5, msg=name)
        else:
            assert torch.equal(parameter, others[name]), name


def test_matrices_keep_one_moment() -> None:
    parameters = make_parameters()
    optimizer = make_muon(parameters)
    train_whole(1, optimizer, parameters)
    for name, parameter in parameters.items():
        kinds = {"step", "exp_avg"} | (set() if name in MATRICES else {"exp_avg_sq"})
        assert set(optimizer.state[parameter]) == kinds, name


# ---- shards


def flat_range(values: dict[str, torch.Tensor], first: int, last: int) -> torch.Tensor:
    """Entries [first, last) of the tensors laid end to end, padded with zeros as ZeRO does."""
    flat = torch.cat([value.reshape(-1) for value in values.values()])
    return torch.cat([flat, torch.zeros(max(0, last - flat.numel()))])[first:last].clone()


def segments_of(names: Sequence[str], first: int, last: int) -> list[Segment]:
    ids, segments, offset = assign_tensor_ids(SHAPES), [], 0
    for name in names:
        numel = math.prod(SHAPES[name])
        low, high = min(max(first - offset, 0), numel), min(max(last - offset, 0), numel)
        segments += cut_segments(ids[name], numel, low, high, offset + low - first)
        offset += numel
    return segments


class Gloo:
    """The ranks of the process group."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.sent = dist.get_rank(), dist.get_world_size(), 0

    def gather_objects(self, value: Any) -> list[Any]:
        return gather_objects(value)

    def all_to_all(self, values: torch.Tensor, sent_sizes: list[int], received_sizes: list[int]) -> torch.Tensor:
        self.sent += sum(sent_sizes)
        gathered = values.new_empty(sum(received_sizes))
        dist.all_to_all_single(gathered, values, received_sizes, sent_sizes)
        return gathered


def train_sharded(
    borders: Sequence[float],
    steps: int,
    entries: int,
    settings: OptimizerConfig = SETTINGS,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], int]:
    """Train this rank's part of every group, between two `borders` (shares of a group), one group at a time."""
    parameters = make_parameters()
    optimizer = make_muon(parameters, settings)
    flats, segments, workers = [], {}, Gloo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "ROUND_ENTRIES", entries)
        for group in optimizer.param_groups:
            names = group["names"]
            total = sum(math.prod(SHAPES[name]) for name in names)
            ends = [0, *(int(border * total) for border in borders), total + 5]
            bounds = (ends[workers.rank], ends[workers.rank + 1])
            flat = torch.nn.Parameter(flat_range({name: parameters[name].detach() for name in names}, *bounds))
            segments[flat] = segments_of(names, *bounds)
            flats.append((flat, names, bounds))
            group["params"] = [flat]
        give_moments(optimizer).set_shards(segments, matrix_shapes(SHAPES), workers, dtype=dtype)
        for step in range(steps):
            gradients = make_gradients(step)
            for flat, names, bounds in flats:
                flat.grad = flat_range({name: gradients[name] for name in names}, *bounds)
            groups = optimizer.param_groups
            for group in groups:
                optimizer.param_groups = [group]
                optimizer.step()
            optimizer.param_groups = groups
    return [flat.detach() for flat, _, _ in flats], workers.sent


@pytest.mark.parametrize(
    ("borders", "entries"),
    [
        ((0.37,), 1 << 24),  # inside a matrix
        ((0.05, 0.06), 100),  # the second of three workers holds a few entries; many rounds
        ((0.5, 1.0), 1 << 24),  # the third holds padding only
    ],
)
def test_cut_over_workers_it_equals_whole(borders: Sequence[float], entries: int) -> None:
    parameters = make_parameters()
    optimizer = make_muon(parameters)
    names_of = [list(group["names"]) for group in optimizer.param_groups]
    train_whole(3, optimizer, parameters)
    parts = run_workers(len(borders) + 1, train_sharded, borders, 3, entries)
    for number, names in enumerate(names_of):
        joined = torch.cat([shards[number] for shards, _ in parts])
        whole = torch.cat([parameters[name].detach().reshape(-1) for name in names])
        torch.testing.assert_close(joined[: whole.numel()], whole, rtol=1e-6, atol=1e-7)
        assert not joined[whole.numel() :].any(), "padding stays zero"
    matrices = sum(math.prod(SHAPES[name]) for name in MATRICES)
    assert sum(sent for _, sent in parts) == 3 * 2 * matrices, "each entry travels once in each direction"


def test_low_precision_rounds_updates_and_no_more() -> None:
    """In bf16, momenta and weights stay in fp32 and updates differ by rounding, the same over any workers."""
    parameters = make_parameters()
    optimizer = make_muon(parameters)
    names_of = [list(group["names"]) for group in optimizer.param_groups]
    train_whole(3, optimizer, parameters)
    how = (3, 1 << 24, SETTINGS, torch.bfloat16)
    whole, cut = (run_workers(2, train_sharded, border, *how) for border in [(1,), (0.37,)])
    for number, names in enumerate(names_of):
        first, second = (torch.cat([shards[number] for shards, _ in parts]) for parts in (whole, cut))
        both = (make_parameters(), parameters)
        start, exact = (torch.cat([values[name].detach().reshape(-1) for name in names]) for values in both)
        assert first.dtype == torch.float32
        assert torch.equal(first[: exact.numel()], second[: exact.numel()])
        off = (first[: exact.numel()] - exact).norm() / (exact - start).norm()
        assert off < 0.02
        assert (off > 1e-4) == any(name in MATRICES for name in names)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("entries", [1 << 24, 60])
def test_the_parts_of_the_workers_fit_together(shared: bool, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ROUND_ENTRIES", entries)
    shapes = dict(enumerate([(8, 8)] * 5 + [(20, 8), (8, 20), (3, 2)]))
    held = []
    for rank in range(3):
        whole = [MatrixPiece(i, 0, r * c, 0, 100 * i) for i, (r, c) in shapes.items()]
        cut = []
        for piece in whole:
            first, last = (piece.numel * worker // 3 for worker in (rank, rank + 1))
            cut.append(piece._replace(matrix_start=first, numel=last - first))
        held.append(whole if shared else cut)
    plans = [plan_rounds(held, shapes, rank, shared) for rank in range(3)]
    assert len({len(plan) for plan in plans}) == 1
    assert (len(plans[0]) > 1) == (entries == 60)
    for parts in zip(*plans, strict=True):
        for a in range(3):
            for b in range(3):
                assert parts[a].sent[b] == parts[b].gathered[a]
                assert parts[a].returned[b] == parts[b].received[a]
    owned = [i for plan in plans for part in plan for i in part.owned]
    assert sorted(owned) == list(shapes), "each matrix has one owner"
    for rank, plan in enumerate(plans):
        received = sorted(piece for part in plan for pieces in part.received for piece in pieces)
        assert received == sorted(held[rank])
        assert shared or received == sorted(piece for part in plan for pieces in part.sent for piece in pieces)


def test_owners_have_equal_work() -> None:
    shapes = {number: (64, 64) if number % 3 else (64, 256) for number in range(48)}
    held = [[MatrixPiece(i, 0, r * c, 0, 0) for i, (r, c) in shapes.items()]] + [[]] * 3
    work = []
    for rank in range(4):
        owned = [shape for part in plan_rounds(held, shapes, rank, False) for shape in part.owned.values()]
        work.append(sum(min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in owned))
    assert max(work) < 1.1 * min(work)
