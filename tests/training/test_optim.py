"""Optimizer groups, schedule, and LAMB whole and sharded."""

import math
import random
from typing import Any, Literal

import pytest
import torch
from transformers import get_linear_schedule_with_warmup, get_polynomial_decay_schedule_with_warmup, get_wsd_schedule

from pretrain.config import OptimizerConfig, PhaseConfig, PretrainOptimizerConfig
from pretrain.training.engine.deepspeed_patches import import_deepspeed
from pretrain.training.engine.loss_scale import LossScale
from pretrain.training.optim import (
    Lamb,
    Segment,
    StableAdamW,
    TensorwiseOptimizer,
    assign_tensor_ids,
    cut_segments,
    learning_rate,
    make_optimizer,
    parameter_groups,
    sum_of_squares,
)
from tests.distributed import give_moments, of_whole_tensors

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
    return of_whole_tensors(kinds[name](groups, lr=lr, betas=(0.9, 0.999), eps=1e-6))


def expected_after(steps: int, of: str = "lamb", lr: float = 0.01, decay: float = 0.1) -> dict[str, torch.Tensor]:
    expected = {}
    gradients = [make_gradients(step) for step in range(steps)]
    for name, start in make_parameters().items():
        exempt = name.endswith(("bias", "norm_weight"))
        pieces = 3 if ".qkv_" in name else 1
        parts = zip(*(x.chunk(pieces) for x in (start.detach(), *(g[name] for g in gradients))), strict=True)
        made = [REFERENCES[of](x, gs, lr, 0.0 if exempt else decay, not exempt) for x, *gs in parts]
        expected[name] = torch.cat(made)
    return expected


def test_groups_exempt_biases_and_layer_norm():
    parameters = make_parameters()
    decayed, exempt = parameter_groups(parameters.items(), 0.01)
    assert decayed["names"] == ["embeddings.word", "layers.0.qkv_weight", "heads.pooler_weight"]
    assert exempt["names"] == [name for name in SHAPES if name not in decayed["names"]]
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.01, 0.0)
    for group in (decayed, exempt):
        assert [id(p) for p in group["params"]] == [id(parameters[name]) for name in group["names"]]
    assert len(parameter_groups([("a.norm_weight", parameters["embeddings.norm_weight"])], 0.01)) == 1  # none is empty


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
    # A timescale below one step takes no more than the whole weight.
    short = tuple(phase.model_copy(update={"steps": steps}) for phase, steps in zip(phases, (3, 1), strict=True))
    assert optimizer.decay_over(short) * rate * 4e-3 == pytest.approx(1.0)
    assert PretrainOptimizerConfig(weight_decay=0.3).decay_over(phases) == 0.3


def make_phase(steps: int, peak: float, **more: Any) -> PhaseConfig:
    return PhaseConfig(sequence_length=8, global_sequences=2, steps=steps, peak_learning_rate=peak, **more)


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
def test_it_reads_nothing_back_from_the_device(kind: str):
    """The engine keeps the step count beside the weights. A tensor on `meta` has no value that could be read."""
    parameters = {name: torch.nn.Parameter(value.detach().to("meta")) for name, value in make_parameters().items()}
    optimizer = make_tensorwise(kind, parameter_groups(parameters.items(), 0.1), lr=0.1)
    for parameter in parameters.values():
        zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros((), device="meta"), **zeros}
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def test_lamb_takes_ratio_one_where_a_norm_is_zero():
    weights = torch.nn.Parameter(torch.zeros(4))
    optimizer = of_whole_tensors(Lamb(parameter_groups([("a_weight", weights)], 0.0), lr=0.5))
    weights.grad = torch.full((4,), 3.0)
    optimizer.step()
    torch.testing.assert_close(weights.detach(), torch.full((4,), -0.5))  # Adam's first step is the rate
    weights.grad = torch.zeros(4)
    give_moments(optimizer)
    optimizer.step()
    torch.testing.assert_close(weights.detach(), torch.full((4,), -0.5))  # no gradient, no decay: no update


def test_cut_segments_splits_at_shard_and_tensor_borders():
    ids = assign_tensor_ids(["w", "layers.0.qkv_weight"])["layers.0.qkv_weight"]
    assert list(ids) == [1, 2, 3]
    assert cut_segments(ids, 30, 0, 30, 5) == [Segment(5, 15, 1), Segment(15, 25, 2), Segment(25, 35, 3)]
    assert cut_segments(ids, 30, 8, 21, 0) == [Segment(0, 2, 1, 8), Segment(2, 12, 2), Segment(12, 13, 3)]
    assert cut_segments(ids, 30, 25, 28, 7) == [Segment(7, 10, 3, 5)]
    assert cut_segments(ids, 30, 30, 30, 0) == []


def test_norms_of_long_tensors_are_exact():
    values = torch.rand(3_000_001, generator=torch.Generator().manual_seed(0))
    exact = values.double().square().sum()
    assert abs(sum_of_squares(values) / exact - 1) < 1e-6


def transformers_rates(phase: PhaseConfig) -> list[float]:
    """Of its schedule without the first step where that is one of warm-up: its rate is 0."""
    skipped = min(1, phase.warmup_steps)
    steps = phase.steps + skipped
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=phase.peak_learning_rate)
    shape = (optimizer, phase.warmup_steps, steps)
    if phase.decay == "linear":
        schedule = get_linear_schedule_with_warmup(*shape)
    else:
        schedule = get_polynomial_decay_schedule_with_warmup(*shape, phase.final_learning_rate, power=0.5)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates[skipped:]


def test_schedule_equals_transformers_and_restarts_per_phase():
    phases = [
        make_phase(20, 1e-3, warmup_steps=7, decay="linear"),
        make_phase(30, 4e-3, warmup_steps=3, decay="polynomial"),
        make_phase(9, 2e-3, decay="polynomial", final_learning_rate=1e-5),
    ]
    expected = [rate for phase in phases for rate in transformers_rates(phase)]
    assert [learning_rate(phases, step) for step in range(59)] == pytest.approx(expected, rel=1e-12, abs=1e-18)
    with pytest.raises(IndexError):
        learning_rate(phases, 59)


@pytest.mark.parametrize("decay", ["linear", "1-sqrt"])
@pytest.mark.parametrize(("steps", "warmup", "last", "final"), [(20, 5, 6, 0.0), (9, 0, 9, 1e-4), (12, 4, 8, 0.0)])
def test_warm_up_stable_decay_equals_transformers(decay: Any, steps: int, warmup: int, last: int, final: float):
    end: dict[str, Any] = {"decay": decay, "decay_steps": last, "final_learning_rate": final}
    phase = make_phase(steps, 1e-3, warmup_steps=warmup, **end)
    skipped = min(1, warmup)  # its first step of a warm-up has rate 0 (here: the final one)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    stable: dict[str, Any] = {"num_warmup_steps": 0, "num_stable_steps": steps - max(0, warmup - 1) - last}
    decays: dict[str, Any] = {"num_decay_steps": last, "decay_type": decay, "min_lr_ratio": final / 1e-3}
    schedule = get_wsd_schedule(optimizer, **stable, **decays)
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
        make_phase(10, 1e-3, **changes)


@pytest.mark.parametrize("decay", ["linear", "polynomial", "1-sqrt", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (6, 0), (6, 1), (6, 4), (6, 6)])
def test_every_step_learns_and_the_last_of_the_warm_up_has_the_peak(
    decay: Literal["linear", "polynomial", "1-sqrt", "constant"], steps: int, warmup: int
):
    phase = make_phase(steps, 0.5, warmup_steps=warmup, decay=decay)
    rates = [learning_rate([phase], step) for step in range(steps)]
    assert min(rates) > 0
    assert rates[:warmup] == pytest.approx([0.5 * (step + 1) / warmup for step in range(warmup)])
    after = rates[max(0, warmup - 1) :]
    assert after[0] == 0.5
    assert after == sorted(after, reverse=True)
    assert len(set(after)) == (1 if decay == "constant" else len(after))


# ---- fp16's loss scale, by the rule of DeepSpeed's dynamic scaler


SLOW: dict[str, Any] = {"hysteresis": 4, "consecutive_hysteresis": True, "loss_scale_window": 7}
FAST: dict[str, Any] = {"hysteresis": 1, "initial_scale_power": 4, "loss_scale_window": 5}


@pytest.mark.parametrize("section", [{}, {"loss_scale_window": 3}, FAST, SLOW])
def test_it_goes_as_deepspeeds_scaler_does(section: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import_deepspeed()
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # rank 0 logs
    ours = LossScale.from_config(section)
    theirs = loss_scaler.DynamicLossScaler(
        init_scale=2 ** section.get("initial_scale_power", 16),
        scale_window=section.get("loss_scale_window", 1000),
        min_scale=1,
        delayed_shift=section.get("hysteresis", 2),
        consecutive_hysteresis=section.get("consecutive_hysteresis", False),
        raise_error_at_min_scale=False,
    )
    draw = random.Random(0)
    for step in range(3000):
        overflow = draw.random() < (0.3 if step % 500 < 60 else 0.02)
        ours.update(overflow=overflow)
        theirs.update_scale(overflow)
        assert ours.state() == {key: getattr(theirs, key) for key in ours.state()}, step


def test_a_checkpoint_keeps_it() -> None:
    scale = LossScale.from_config({"loss_scale_window": 3})
    for overflow in (True, True, False, False, False, False, False):
        scale.update(overflow=overflow)
    restored = LossScale.from_config({"loss_scale_window": 3})
    restored.load(scale.state())
    assert restored == scale


def test_a_fixed_scale_stays() -> None:
    scale = LossScale.from_config({"loss_scale": 128})
    for _ in range(5):
        scale.update(overflow=True)
    assert scale.cur_scale == 128
