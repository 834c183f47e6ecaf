"""Optimizer groups, schedule, and LAMB whole and sharded."""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from transformers import get_linear_schedule_with_warmup, get_polynomial_decay_schedule_with_warmup, get_wsd_schedule

from pretrain.config import OptimizerConfig, PhaseConfig, PretrainOptimizerConfig
from pretrain.training.optim import (
    Lamb,
    Segment,
    StableAdamW,
    TensorwiseOptimizer,
    cut_segments,
    learning_rate,
    make_optimizer,
    number_tensors,
    parameter_groups,
    square_sum,
)
from tests.distributed import run_workers

SHAPES = {
    "embeddings.word": (50, 8),
    "embeddings.norm_weight": (8,),
    "layers.0.qkv_weight": (24, 8),
    "layers.0.qkv_bias": (24,),
    "layers.0.ffn_norm_weight": (8,),
    "heads.pooler_weight": (8, 8),
    "heads.mlm_bias": (50,),
}


def make_parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.1 * (1 + number))
        for number, (name, shape) in enumerate(SHAPES.items())
    }


def make_gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    # Every other step is ten times as large: StableAdamW clips there.
    scale = 10.0 if step % 2 else 1.0
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def reference_lamb(weights: torch.Tensor, gradients: list[torch.Tensor], lr: float, decay: float, adapt: bool):
    """Algorithm 2 of You et al. 2020, in fp64, on one tensor."""
    x, m, v = weights.double(), torch.zeros_like(weights).double(), torch.zeros_like(weights).double()
    for t, g in enumerate((gradient.double() for gradient in gradients), start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        r = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6)
        update = r + decay * x
        ratio = x.norm() / update.norm() if adapt else 1.0
        x = x - lr * ratio * update
    return x.float()


def reference_stable_adamw(weights: torch.Tensor, gradients: list[torch.Tensor], lr: float, decay: float, _: bool):
    """Algorithm 2 of Wortsman et al. 2023 with its debiased betas, in fp64, on one tensor."""
    x, v, u = weights.double(), torch.zeros_like(weights).double(), torch.zeros_like(weights).double()
    for t, g in enumerate((gradient.double() for gradient in gradients), start=1):
        beta1 = 0.9 * (1 - 0.9 ** (t - 1)) / (1 - 0.9**t)
        beta2 = 0.999 * (1 - 0.999 ** (t - 1)) / (1 - 0.999**t)
        v = beta1 * v + (1 - beta1) * g
        u = beta2 * u + (1 - beta2) * g * g
        rms = (g * g / u.clamp(min=1e-12)).mean().sqrt()
        rate = lr / max(1.0, rms.item())
        x = x - rate * decay * x - rate * v / (u.sqrt() + 1e-6)
    return x.float()


REFERENCES = {"lamb": reference_lamb, "stable_adamw": reference_stable_adamw}


def make_tensorwise(name: str, groups: list[dict[str, Any]], lr: float = 0.0) -> TensorwiseOptimizer:
    kinds = {"lamb": Lamb, "stable_adamw": StableAdamW}
    return kinds[name](groups, lr=lr, betas=(0.9, 0.999))


def expected_after(steps: int, of: str = "lamb", lr: float = 0.01, decay: float = 0.1) -> dict[str, torch.Tensor]:
    expected = {}
    gradients = [make_gradients(step) for step in range(steps)]
    for name, start in make_parameters().items():
        exempt = name.endswith(("bias", "norm_weight"))
        pieces = 3 if ".qkv_" in name else 1
        parts = zip(
            start.detach().chunk(pieces),
            zip(*(gradient[name].chunk(pieces) for gradient in gradients), strict=True),
            strict=True,
        )
        expected[name] = torch.cat(
            [REFERENCES[of](x, list(gs), lr, 0.0 if exempt else decay, not exempt) for x, gs in parts]
        )
    return expected


def test_groups_exempt_biases_and_layer_norm():
    parameters = make_parameters()
    decayed, exempt = parameter_groups(parameters.items(), 0.01)
    assert decayed["names"] == ["embeddings.word", "layers.0.qkv_weight", "heads.pooler_weight"]
    assert exempt["names"] == [name for name in SHAPES if name not in decayed["names"]]
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.01, 0.0)
    for group in (decayed, exempt):
        assert [id(p) for p in group["params"]] == [id(parameters[name]) for name in group["names"]]


def test_groups_without_parameters_are_left_out():
    parameters = make_parameters()
    assert len(parameter_groups([("a.norm_weight", parameters["embeddings.norm_weight"])], 0.01)) == 1


@pytest.mark.parametrize("matrices", [{"name": "muon", "muon_lr_scale": 2.5}, {}])
def test_a_decay_timescale_is_the_share_of_the_steps_in_which_weights_shrink_by_e(matrices: dict[str, Any]):
    phases = (make_phase(steps=30000, peak=4e-3), make_phase(steps=10000, peak=1e-3))
    optimizer = PretrainOptimizerConfig.model_validate({"decay_timescale": 0.1, **matrices})
    decay, factor, rate = optimizer.decay_over(phases), 1.0, matrices.get("muon_lr_scale", 1.0)
    for phase in phases:
        factor *= (1 - decay * rate * phase.peak_learning_rate) ** phase.steps
    assert factor == pytest.approx(math.exp(-10), rel=1e-2)  # the whole run is ten timescales
    half = tuple(phase.model_copy(update={"steps": phase.steps // 2}) for phase in phases)
    assert optimizer.decay_over(half) == pytest.approx(2 * decay), "a run of half the steps decays twice as fast"


@pytest.mark.parametrize(("matrices", "fastest"), [({"name": "muon", "muon_lr_scale": 2.5}, 1e-2), ({}, 4e-3)])
def test_a_timescale_below_one_step_takes_no_more_than_the_whole_weight(matrices: dict[str, Any], fastest: float):
    phases = (make_phase(steps=3, peak=4e-3), make_phase(steps=1, peak=1e-3))
    optimizer = PretrainOptimizerConfig.model_validate({"decay_timescale": 0.1, **matrices})
    assert optimizer.decay_over(phases) * fastest == pytest.approx(1.0)


def test_without_a_timescale_the_weight_decay_does_not_depend_on_the_run():
    assert PretrainOptimizerConfig(weight_decay=0.3).decay_over((make_phase(steps=7, peak=1e-3),)) == 0.3


def make_phase(steps: int, peak: float) -> PhaseConfig:
    return PhaseConfig(sequence_length=8, global_sequences=2, steps=steps, peak_learning_rate=peak)


def test_adamw_is_torchs_with_the_groups():
    parameters = make_parameters()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5), parameter_groups(parameters.items(), 0.5))
    assert type(optimizer) is torch.optim.AdamW
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(torch.equal(before[name], parameters[name]) for name in SHAPES)  # the rate starts at 0
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    for name, parameter in parameters.items():
        kept = 1.0 if name.endswith(("bias", "norm_weight")) else 1 - 0.1 * 0.5
        torch.testing.assert_close(parameter.detach(), before[name] * kept)


def test_settings_reach_the_optimizer():
    settings = OptimizerConfig(name="lamb", beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.2)
    for name in ("lamb", "stable_adamw", "adamw"):
        groups = parameter_groups(make_parameters().items(), settings.weight_decay)
        optimizer = make_optimizer(settings.model_copy(update={"name": name}), groups)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
        for group in optimizer.param_groups:
            assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.9), 1e-3, 0.0)


def run_whole(
    steps: int, optimizer: TensorwiseOptimizer, parameters: dict[str, torch.nn.Parameter], first: int = 0
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    for step in range(first, first + steps):
        for name, gradient in make_gradients(step).items():
            parameters[name].grad = gradient
        optimizer.step()


@pytest.mark.parametrize("kind", REFERENCES)
def test_on_whole_tensors_it_equals_the_paper(kind: str):
    parameters = make_parameters()
    run_whole(4, make_tensorwise(kind, parameter_groups(parameters.items(), 0.1)), parameters)
    for name, expected in expected_after(4, kind).items():
        torch.testing.assert_close(parameters[name].detach(), expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", REFERENCES)
def test_its_state_saves_and_loads(kind: str):
    parameters = make_parameters()
    optimizer = make_tensorwise(kind, parameter_groups(parameters.items(), 0.1))
    run_whole(2, optimizer, parameters)
    copied = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    resumed = make_tensorwise(kind, parameter_groups(copied.items(), 0.1))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run_whole(2, optimizer, parameters, first=2)
    run_whole(2, resumed, copied, first=2)
    for name in SHAPES:
        assert torch.equal(parameters[name], copied[name]), name


@pytest.mark.parametrize("kind", REFERENCES)
def test_it_reads_nothing_back_from_the_device(kind: str):
    """The engine keeps the step count beside the weights. A tensor on `meta` has no value that could be read."""
    parameters = {name: torch.nn.Parameter(value.detach().to("meta")) for name, value in make_parameters().items()}
    optimizer = make_tensorwise(kind, parameter_groups(parameters.items(), 0.1), lr=0.1)
    for parameter in parameters.values():
        zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros((), device="meta"), **zeros}
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def test_stable_adamw_is_adamw_until_gradients_grow():
    """The first gradient equals its second moment: RMS 1. One of ten times its size is clipped, one smaller is not."""
    for growth, clipped in ((0.5, False), (10.0, True)):
        ours, theirs = (torch.nn.Parameter(torch.ones(3, 4)) for _ in range(2))
        optimizer = make_tensorwise("stable_adamw", parameter_groups([("a_weight", ours)], 0.1), lr=0.01)
        adamw = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1)
        for scale in (1.0, growth):
            ours.grad, theirs.grad = (torch.full((3, 4), scale) for _ in range(2))
            optimizer.step()
            adamw.step()
        moved, adamws = (1 - weight.detach() for weight in (ours, theirs))
        if clipped:
            assert (moved < 0.95 * adamws).all()
        else:
            torch.testing.assert_close(moved, adamws, rtol=1e-4, atol=0)


def test_lamb_takes_ratio_one_where_a_norm_is_zero():
    weights = torch.nn.Parameter(torch.zeros(4))
    optimizer = Lamb(parameter_groups([("a_weight", weights)], 0.0), lr=0.5)
    weights.grad = torch.full((4,), 3.0)
    optimizer.step()
    torch.testing.assert_close(weights.detach(), torch.full((4,), -0.5))  # Adam's first step is the rate
    weights.grad = torch.zeros(4)
    optimizer.state.clear()
    optimizer.step()
    torch.testing.assert_close(weights.detach(), torch.full((4,), -0.5))  # no gradient, no decay: no update


def test_lamb_refuses_flattened_parameters_without_segments():
    flat = torch.nn.Parameter(torch.ones(10))
    flat.grad = torch.ones(10)
    optimizer = Lamb([{"params": [flat], "names": ["a", "b"], "weight_decay": 0.1}], lr=0.1)
    with pytest.raises(RuntimeError, match="set_segments"):
        optimizer.step()


@pytest.mark.parametrize(
    "pieces",
    [
        [Segment(0, 11, 0)],
        [Segment(0, 6, 0), Segment(5, 10, 1)],
        [Segment(0, 5, 2)],
        [Segment(5, 10, 0), Segment(0, 5, 1)],
    ],
)
def test_lamb_refuses_segments_that_do_not_fit(pieces: list[Segment]):
    flat = torch.nn.Parameter(torch.ones(10))
    optimizer = Lamb([{"params": [flat], "names": ["a"], "weight_decay": 0.1}], lr=0.1)
    with pytest.raises(ValueError, match="does not fit"):
        optimizer.set_segments({flat: pieces}, 2, lambda norms: None)


def test_cut_segments_splits_at_shard_and_tensor_borders():
    ids = number_tensors(["w", "layers.0.qkv_weight"])["layers.0.qkv_weight"]
    assert list(ids) == [1, 2, 3]
    assert cut_segments(ids, 30, 0, 30, 5) == [Segment(5, 15, 1), Segment(15, 25, 2), Segment(25, 35, 3)]
    assert cut_segments(ids, 30, 8, 21, 0) == [Segment(0, 2, 1, 8), Segment(2, 12, 2), Segment(12, 13, 3)]
    assert cut_segments(ids, 30, 25, 28, 7) == [Segment(7, 10, 3, 5)]
    assert cut_segments(ids, 30, 30, 30, 0) == []


def flat_shard(name_values: dict[str, torch.Tensor], first: int, last: int) -> torch.Tensor:
    """Entries [first, last) of the tensors laid end to end, padded with zeros as ZeRO does."""
    flat = torch.cat([value.reshape(-1) for value in name_values.values()])
    return torch.cat([flat, torch.zeros(max(0, last - flat.numel()))])[first:last].clone()


def shard_segments(names: list[str], first: int, last: int) -> list[Segment]:
    ids, segments, offset = number_tensors(SHAPES), [], 0
    for name in names:
        numel = math.prod(SHAPES[name])
        low, high = min(max(first - offset, 0), numel), min(max(last - offset, 0), numel)
        segments += cut_segments(ids[name], numel, low, high, offset + low - first)
        offset += numel
    return segments


def train_sharded(kind: str, border: int, steps: int) -> list[torch.Tensor]:
    """Train this rank's uneven shard, [.., border) or [border, ..), of both groups; return the shards."""
    parameters = make_parameters()
    groups = parameter_groups(parameters.items(), 0.1)
    flats, segments = [], {}
    for group in groups:
        names = group["names"]
        total = sum(math.prod(SHAPES[name]) for name in names)
        cut = min(border, total - 1)
        bounds = (0, cut) if dist.get_rank() == 0 else (cut, total + 3)
        flat = torch.nn.Parameter(flat_shard({name: parameters[name].detach() for name in names}, *bounds))
        if group["layer_adaptation"] or kind == "stable_adamw":
            segments[flat] = shard_segments(names, *bounds)
        flats.append((flat, names, bounds))
        group["params"] = [flat]
    optimizer = make_tensorwise(kind, groups, lr=0.01)
    count = max(ids.stop for ids in number_tensors(SHAPES).values())
    optimizer.set_segments(segments, count, dist.all_reduce)
    for step in range(steps):
        gradients = make_gradients(step)
        for flat, names, bounds in flats:
            flat.grad = flat_shard({name: gradients[name] for name in names}, *bounds)
        everything = optimizer.param_groups
        for group in everything:  # as ZeRO steps: one group at a time
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = everything
    return [flat.detach() for flat, _, _ in flats]


@pytest.mark.parametrize("border", [100, 500])  # inside the embeddings; inside the keys of qkv_weight
@pytest.mark.parametrize("kind", REFERENCES)
def test_sharded_over_two_workers_it_equals_whole(kind: str, border: int):
    shards = run_workers(2, train_sharded, kind, border, 4)
    expected = expected_after(4, kind)
    for number, group in enumerate(parameter_groups(make_parameters().items(), 0.1)):
        whole = torch.cat([expected[name].reshape(-1) for name in group["names"]])
        joined = torch.cat([shards[0][number], shards[1][number]])
        torch.testing.assert_close(joined[: whole.numel()], whole, rtol=1e-5, atol=1e-6)
        assert not joined[whole.numel() :].any()  # padding stays zero


def test_norms_of_long_tensors_are_exact():
    values = torch.rand(3_000_001, generator=torch.Generator().manual_seed(0))
    exact = values.double().square().sum()
    assert abs(square_sum(values) / exact - 1) < 1e-6


def transformers_rates(phase: PhaseConfig) -> list[float]:
    """Of its schedule without the first step where that is one of warm-up: its rate is 0."""
    skipped = min(1, phase.warmup_steps)
    steps = phase.steps + skipped
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=phase.peak_learning_rate)
    if phase.decay == "linear":
        schedule = get_linear_schedule_with_warmup(optimizer, phase.warmup_steps, steps)
    else:
        schedule = get_polynomial_decay_schedule_with_warmup(
            optimizer, phase.warmup_steps, steps, phase.final_learning_rate, power=0.5
        )
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates[skipped:]


def test_schedule_equals_transformers_and_restarts_per_phase():
    shape: dict[str, Any] = {"sequence_length": 8, "global_sequences": 1}
    phases = [
        PhaseConfig(**shape, steps=20, peak_learning_rate=1e-3, warmup_steps=7, decay="linear"),
        PhaseConfig(**shape, steps=30, peak_learning_rate=4e-3, warmup_steps=3, decay="polynomial"),
        PhaseConfig(**shape, steps=9, peak_learning_rate=2e-3, decay="polynomial", final_learning_rate=1e-5),
    ]
    expected = [rate for phase in phases for rate in transformers_rates(phase)]
    assert [learning_rate(phases, step) for step in range(59)] == pytest.approx(expected, rel=1e-12, abs=1e-18)
    with pytest.raises(IndexError):
        learning_rate(phases, 59)


def test_constant_schedule_holds_the_peak():
    phase = PhaseConfig(
        sequence_length=8, global_sequences=1, steps=5, peak_learning_rate=0.4, warmup_steps=2, decay="constant"
    )
    assert [learning_rate([phase], step) for step in range(5)] == [0.2, 0.4, 0.4, 0.4, 0.4]


@pytest.mark.parametrize("decay", ["linear", "1-sqrt"])
@pytest.mark.parametrize(("steps", "warmup", "last", "final"), [(20, 5, 6, 0.0), (9, 0, 9, 1e-4), (12, 4, 8, 0.0)])
def test_warm_up_stable_decay_equals_transformers(decay: Any, steps: int, warmup: int, last: int, final: float):
    phase = PhaseConfig(
        sequence_length=8,
        global_sequences=1,
        steps=steps,
        peak_learning_rate=1e-3,
        warmup_steps=warmup,
        decay=decay,
        decay_steps=last,
        final_learning_rate=final,
    )
    skipped = min(1, warmup)  # its first step of a warm-up has rate 0 (here: the final one)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule = get_wsd_schedule(
        optimizer,
        num_warmup_steps=0,
        num_decay_steps=last,
        num_stable_steps=steps - max(0, warmup - 1) - last,
        decay_type=decay,
        min_lr_ratio=final / 1e-3,
    )
    after = [schedule.lr_lambdas[0](step) * 1e-3 for step in range(steps - max(0, warmup - 1))]
    rates = [learning_rate([phase], step) for step in range(steps)]
    assert rates[max(0, warmup - 1) :] == pytest.approx(after, rel=1e-12)
    assert rates[:warmup] == pytest.approx([1e-3 * (step + skipped) / max(1, warmup) for step in range(warmup)])
    assert rates[-last] == 1e-3
    assert rates[-last + 1] < 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay": "constant", "decay_steps": 2}, "decay_steps .2. has no effect with decay: constant"),
        ({"warmup_steps": 5, "decay_steps": 6}, "must not exceed steps .10. together"),
    ],
)
def test_a_plateau_that_cannot_be_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        PhaseConfig(sequence_length=8, global_sequences=1, steps=10, peak_learning_rate=1e-3, **changes)


@pytest.mark.parametrize("decay", ["linear", "polynomial", "1-sqrt", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (6, 0), (6, 1), (6, 4), (6, 6)])
def test_every_step_learns_and_the_last_of_the_warm_up_has_the_peak(
    decay: Literal["linear", "polynomial", "1-sqrt", "constant"], steps: int, warmup: int
):
    phase = PhaseConfig(
        sequence_length=8, global_sequences=1, steps=steps, peak_learning_rate=0.5, warmup_steps=warmup, decay=decay
    )
    rates = [learning_rate([phase], step) for step in range(steps)]
    assert min(rates) > 0
    assert rates[:warmup] == pytest.approx([0.5 * (step + 1) / warmup for step in range(warmup)])
    after = rates[max(0, warmup - 1) :]
    assert after[0] == 0.5
    assert after == sorted(after, reverse=True)
    assert decay == "constant" or len(set(after)) == len(after)
