"""The recommendation of `pretrain --dry-run --budget`: which size, batch, steps and rate a budget is best spent on."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pretrain.common.errors import InputError
from pretrain.common.memory import machine_memory
from pretrain.common.worker import torchrun_place
from pretrain.config import PretrainConfig
from pretrain.model.precision import resolve_precision
from pretrain.objectives import objective_of
from pretrain.planning import pace, published
from pretrain.planning.budget import Budget, parse_budget
from pretrain.planning.candidates import SHAPES, Plan, plan, volume, with_shape, with_workers, works
from pretrain.planning.estimate import Cluster, parse_cluster
from pretrain.planning.law import Law, interval
from pretrain.planning.memory import memory_bytes
from pretrain.planning.published import PublishedLaw
from pretrain.planning.speed import Roofline, Speed, ThisMachine
from pretrain.planning.table import PredictedPlan, Recommendation, cost_text, report
from pretrain.planning.text import RunText, read_text

_WITHIN = 0.9  # a plan is outside of the points only by more than this
_OVER = 1.1  # a plan costs more than the budget by more than rounding
_TOO_FEW = 10  # steps below which a size is not recommended
_ALIKE = 1.014  # by which equal runs differ by chance: one deviation (docs/benchmarks/scaling-law.md)
# GiB of a GPU, the smallest sold (data sheets).
_GPU_GIB = {"V100": 16, "A100": 40, "L4": 24, "L40S": 48, "RTX4090": 24, "H100": 80, "H200": 141, "B200": 180}


def recommendation(config: PretrainConfig, budget_text: str, on: str | None = None, law: Path | None = None) -> str:
    """The table of candidates for the terminal, and the settings of the best.

    Args:
        budget_text: as `budget.parse_budget`.
        on: cluster, as for `parse_cluster`; needed if the budget is a time.
        law: file of a law; None takes that of the package.

    Raises:
        InputError: the budget, the cluster or the law is wrong, the law says nothing about such a config, no size
            fits, or the budget pays for none.
        MachineError: the timed run failed.
    """
    budget, where, on = parse_budget(budget_text), f"--on {on}", on or ""
    found = published.read(law)
    _check(config, budget, on, where)
    config, _ = resolve_precision(config, on)
    cluster = parse_cluster(on, config) if on else None
    text = read_text(config)
    shaped = [with_shape(config, *shape) for shape in _shapes(config)]
    if cluster is not None:
        shaped = [with_workers(one, cluster.workers) for one in shaped]
    speed = _speed(config, cluster)

    def planned() -> tuple[list[Plan], list[str], list[str]]:
        fitting, too_large = _fitting([plan(one, budget, text, speed) for one in shaped], cluster, where)
        return *_affordable(fitting, budget), too_large

    plans, too_costly, too_large = planned()
    if isinstance(speed, ThisMachine) and text.is_prepared and budget.seconds:
        _calibrate(speed, choose(plans, found)[0].plan, text)
        plans, too_costly, too_large = planned()
    choices = tuple(choose(plans, found))
    return report(Recommendation(config, budget, found, text, speed, choices, tuple(too_large), tuple(too_costly)))


def choose(plans: Sequence[Plan], found: PublishedLaw) -> list[PredictedPlan]:
    """The plans with their predictions, the recommended one first, then by loss.

    It has the lowest loss of those that are not too far from the measured runs (`PredictedPlan.is_too_far`). If its
    text ends before the budget, it is the smallest of those that are about as good: smaller ones cost less.
    """
    likely, near = found.likely, _near(plans, found)
    losses = np.array([[_predicted(law, one) for one in plans] for law in likely])
    wins = np.bincount(losses.argmin(axis=1), minlength=len(plans)) / len(likely)
    choices = [
        PredictedPlan(
            one,
            _predicted(found.law, one),
            *interval(likely, one.size, one.tokens, one.unique),
            float(share),
            _beyond(one, found),
            one.shape not in near,
        )
        for one, share in zip(plans, wins, strict=True)
    ]

    def doubts(choice: PredictedPlan) -> tuple[bool, bool]:
        return choice.is_too_far, choice.plan.config.total_steps < _TOO_FEW

    best = min(choices, key=lambda choice: (doubts(choice), choice.loss))
    alike = [one for one in choices if doubts(one) == doubts(best) and one.loss <= _ALIKE * best.loss]
    chosen = min(alike, key=lambda choice: choice.plan.size) if best.plan.is_capped else best
    return sorted(choices, key=lambda choice: (choice is not chosen, choice.loss))


def _near(plans: Sequence[Plan], found: PublishedLaw) -> set[str]:
    """Shapes at most one size past the largest measured one and, with more FLOPs than measured, not too small either.

    The law expects too much of small models in long runs. So they are at most one size smaller than those with no more
    tokens than measured; if all have more, those with the fewest.
    """
    largest = max(volume(point.shape) for point in found.points)
    step = min((size for layers, hidden in SHAPES if (size := layers * hidden**2) > largest), default=largest)
    possible = {volume(one.shape): one for one in plans if volume(one.shape) <= step}
    flops, tokens = (max(getattr(one, name) for one in found.points) / _WITHIN for name in ("flops", "tokens"))
    least = min(possible, default=0)
    if any(one.flops > flops for one in possible.values()):
        fewest = min(one.tokens for one in possible.values())
        least = min(size for size, one in possible.items() if one.tokens <= max(tokens, fewest / _WITHIN))
        if fewest <= tokens:
            least = max((size for size in possible if size < least), default=least)
    return {one.shape for one in plans if least <= volume(one.shape) <= step}


# ---- What is checked and measured


def _check(config: PretrainConfig, budget: Budget, on: str, where: str) -> None:
    objective = objective_of(config)
    others = {"start_from": config.start_from and "continues a checkpoint, whose size is given"}
    for setting, gist in {**others, objective.setting: objective.gist}.items():
        if gist:
            raise InputError(
                f"--budget: {setting}: {gist}. The law is of masked language modeling from random weights; give "
                "--minutes instead, which scales the steps of this config."
            )
    if budget.seconds and not on:
        raise InputError(
            f"--budget {budget.text}: a time needs the speed of a machine. Give --on here or --on 8xH100 with it, or a "
            "budget in FLOPs such as 0.5e15."
        )
    if on == "here" and (config.scheduling.address or torchrun_place()):
        raise InputError(f"{where}: times this machine alone; leave out scheduling.address and torchrun.")


def _shapes(config: PretrainConfig) -> list[tuple[int, int]]:
    """The candidates, and the config's own shape."""
    return sorted({*SHAPES, (config.model.layers, config.model.hidden)}, key=lambda shape: shape[0] * shape[1] ** 2)


def _fitting(plans: Sequence[Plan], cluster: Cluster | None, where: str) -> tuple[list[Plan], list[str]]:
    """(the plans that fit into the memory of a worker, the shapes of the others with what they need)."""
    if cluster is None:
        return list(plans), []
    limit = _memory(cluster)

    def lacks(one: Plan) -> str:
        stage = one.config.engine.zero_stage
        needed = sum(memory_bytes(one.config, stage, cluster.workers, cluster.device).values())
        return f"{needed / 2**30:,.1f} GiB" if needed > limit else ""

    fits, left_out = _divided(plans, lacks)
    if not fits:
        raise InputError(
            f"{where}: no size fits into the {limit / 2**30:,.1f} GiB that a worker of {cluster.name} has: "
            f"{', '.join(left_out)}. Lower engine.micro_batch_tokens."
        )
    return fits, left_out


def _affordable(plans: Sequence[Plan], budget: Budget) -> tuple[list[Plan], list[str]]:
    """(the plans that the budget pays for, the shapes of the others with what one step of each phase costs)."""

    def lacks(one: Plan) -> str:
        share = one.flops / budget.flops if budget.flops else one.seconds / budget.seconds
        return cost_text(one, budget) if share > _OVER else ""

    affordable, left_out = _divided(plans, lacks)
    if not affordable:
        raise InputError(
            f"--budget {budget.text}: pays for no size. The shortest runs cost more: {', '.join(left_out)}. Give a "
            "larger budget."
        )
    return affordable, left_out


def _divided(plans: Sequence[Plan], lacks: Callable[[Plan], str]) -> tuple[list[Plan], list[str]]:
    """(the plans that lack nothing, the shapes of the others with what `lacks` says)."""
    left_out = [f"{one.shape} ({said})" for one in plans if (said := lacks(one))]
    return [one for one in plans if not lacks(one)], left_out


def _memory(cluster: Cluster) -> float:
    """Bytes that a worker can have."""
    if cluster.gpu is not None:
        return _GPU_GIB[cluster.kind] * 2.0**30
    if cluster.device == "cuda":
        import torch

        return float(torch.cuda.get_device_properties(0).total_memory)
    return machine_memory()[1] / cluster.workers


def _speed(config: PretrainConfig, cluster: Cluster | None) -> Speed | None:
    if cluster is None:
        return None
    if cluster.gpu is not None:
        return Roofline(cluster)
    print("timing the matrix products of each size ...", flush=True)
    return ThisMachine(cluster.device, config.engine.resolved_precision)


def _calibrate(speed: ThisMachine, best: Plan, text: RunText) -> None:
    """Time steps of the plan that is the best as far as is known."""
    print(f"timing steps of {best.shape} in a run, about a minute ...", flush=True)
    work = works(best.config, text)
    speed.calibrate(best.config, work[0], pace.measure(best.config, text.lengths).seconds)


def _predicted(law: Law, one: Plan) -> float:
    return float(law.loss(one.size, one.tokens, one.unique))


def _beyond(one: Plan, found: PublishedLaw) -> str:
    """In what a plan lies outside of the points that the law was fitted to."""
    sizes, tokens = zip(*((point.size, point.tokens) for point in found.fitted), strict=True)
    parts = []
    for name, value, values in (("size", one.size, sizes), ("tokens", one.tokens, tokens)):
        nearest = min(max(value, min(values)), max(values))
        if not _WITHIN <= value / nearest <= 1 / _WITHIN:
            parts.append(f"{name} {value / nearest:.2g}x")
    return " and ".join(parts)
