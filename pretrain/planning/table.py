"""The recommendation as text for the terminal."""

from dataclasses import dataclass
from typing import Any

from pretrain.common import settings
from pretrain.common.wording import aligned, counted
from pretrain.config import PretrainConfig
from pretrain.config.families import Shape
from pretrain.planning import pace
from pretrain.planning.budget import Budget
from pretrain.planning.candidates import MOST_EPOCHS, Plan, volume
from pretrain.planning.published import PublishedLaw, Recipe
from pretrain.planning.speed import Speed
from pretrain.planning.text import RunText

_HEADINGS = ("", "size", "parameters", "tokens", "epochs", "batch", "steps", "FLOP", "time", "bits/char", "90 %")
_HEADINGS += ("best in", "outside of the points")
_RIGHT = range(2, len(_HEADINGS) - 1)
_FEW_STEPS = 100
_CAPPED = "*"
_SHAPE = tuple(f"model.{name}" for name in Shape._fields)


@dataclass(frozen=True)
class PredictedPlan:
    """A plan with what the law expects of it.

    Attributes:
        plan: the run.
        loss: bits per character.
        low, high: the middle 90 % of the likely laws.
        wins: share of the likely laws by which this candidate is the best.
        beyond: in what it lies outside of the points that the law was fitted to, or "".
        is_too_far: whether it is more than one size of the table past the measured runs.
    """

    plan: Plan
    loss: float
    low: float
    high: float
    wins: float
    beyond: str
    is_too_far: bool = False


@dataclass(frozen=True)
class Recommendation:
    """Choices for a budget, the best first, and what they rest on.

    Attributes:
        config: the one that was given, with its precision resolved.
        too_large: shapes that do not fit into memory, with what they need.
        too_costly: those that the budget does not pay for, with the cost of their shortest runs.
    """

    config: PretrainConfig
    budget: Budget
    law: PublishedLaw
    text: RunText
    speed: Speed | None
    choices: tuple[PredictedPlan, ...]
    too_large: tuple[str, ...] = ()
    too_costly: tuple[str, ...] = ()


def report(found: Recommendation) -> str:
    """What it rests on, the table of candidates with the best marked, and the settings of the best."""
    best, law = found.choices[0], found.law
    by_size = sorted(found.choices, key=lambda choice: choice.plan.size)
    rows = [_cells(choice, is_best=choice is best) for choice in by_size]
    lines = [
        f"Budget\n  {found.budget.text}{_budget_note(found)}",
        f"Text\n  {found.text.source}",
        f"Law\n  {_law_note(law)}",
        *([f"Speed\n  {found.speed.source}"] if found.speed else []),
        "Candidates\n" + "\n".join(f"  {line}".rstrip() for line in aligned([_HEADINGS, *rows], _RIGHT)),
        "\n".join(f"  {note}" for note in _notes(found)),
        f"Settings of {best.plan.shape}\n  {settings_line(found.config, best.plan.config) or 'those of the config'}",
    ]
    return "\n\n".join(lines)


def cost_text(one: Plan, budget: Budget) -> str:
    """What a plan costs, in the unit of the budget."""
    return f"{one.flops:.2g} FLOP" if budget.flops else _duration(one.seconds)


def settings_line(before: PretrainConfig, after: PretrainConfig) -> str:
    """`--set NAME=VALUE` for each setting that differs, for a command with the config `before`.

    A shape is written whole: the file may leave parts of its own to model.size, which another shape changes.
    """
    values = {name: value for name, (_, value) in settings.changes(before, after).items()}
    if not values.keys().isdisjoint(_SHAPE):
        values |= {name: getattr(after.model, name.removeprefix("model.")) for name in _SHAPE}
    return " ".join(f"--set {name}={_written(value)}" for name, value in values.items())


def _written(value: Any) -> str:
    """Without exponent, which YAML 1.1 reads as text."""
    return f"{value:.12f}".rstrip("0") if isinstance(value, float) else str(value)


def _budget_note(found: Recommendation) -> str:
    if found.budget.flops:
        return " FLOP of training"
    return f", of which {1 - pace.TRAINING_SHARE:.0%} is for evaluations and checkpoints"


def _law_note(law: PublishedLaw) -> str:
    fitted, recipe = law.fitted, law.recipe.values
    flops = [point.flops for point in fitted]
    held_out = f", {law.error(law.held_out):.1%} on {counted(len(law.held_out), 'run')} that it was not fitted to"
    return (
        f"fitted to {counted(len(fitted), 'run')} of {min(flops):.1g} to {max(flops):.1g} FLOP ({recipe['family']}, "
        f"{recipe['optimizer']}, vocabulary of {recipe['vocabulary']}); largest error "
        f"{law.error(fitted):.1%}{held_out if law.held_out else ', none held out'}"
    )


def _cells(choice: PredictedPlan, *, is_best: bool) -> tuple[str, ...]:
    one = choice.plan
    return (
        ">" if is_best else "",
        one.shape,
        _short(one.size),
        _short(one.tokens),
        (f"{one.epochs:.2f}" if one.epochs else "?") + (_CAPPED if one.is_capped else ""),
        " + ".join(str(phase.global_sequences) for phase in one.config.phases),
        f"{one.config.total_steps:,}",
        f"{one.flops:.2g}",
        _duration(one.seconds),
        f"{choice.loss:.3f}",
        f"{choice.low:.3f}-{choice.high:.3f}",
        f"{choice.wins:.0%}",
        choice.beyond,
    )


def _notes(found: Recommendation) -> list[str]:
    best, law = found.choices[0], found.law
    notes = [
        "parameters: effective, FLOPs of a token / 6. bits/char: on the held-out text of `bench speedrun`; other text "
        "has other losses.",
        "90 %: of the laws that fit resampled points; best in: share of these laws by which the size is the best.",
    ]
    if any(choice.plan.is_capped for choice in found.choices):
        notes.append(f"{_CAPPED} stops after {MOST_EPOCHS:g} epochs, before the budget is spent: more text would help.")
    if found.too_large:
        notes.append(f"too large for the memory of a worker: {', '.join(found.too_large)}")
    if found.too_costly:
        notes.append(f"too costly, with a step at least of each phase: {', '.join(found.too_costly)}")
    lower = min(found.choices, key=lambda choice: choice.loss)
    if lower.is_too_far:
        largest = max((point.shape for point in law.points), key=volume)
        notes.append(
            f"{lower.plan.shape} has the lowest loss by the law, but is more than one size past the measured runs, of "
            f"at most {largest} and {_short(max(point.tokens for point in law.points))} tokens: not recommended."
        )
    alike = [choice.plan.shape for choice in found.choices if not choice.is_too_far and choice.loss < best.loss]
    if best.plan.is_capped and alike:
        notes.append(
            f"{', '.join(alike)}: lower losses by the law, but by less than chance. A smaller size costs less."
        )
    if best.beyond:
        notes.append(f"{best.plan.shape} is an extrapolation: {best.beyond} of the farthest measured run.")
    if best.plan.config.total_steps < _FEW_STEPS:
        notes.append(
            f"{counted(best.plan.config.total_steps, 'step')} are too few to learn much. Give a larger budget."
        )
    differing = law.recipe.differing(Recipe.of(found.config))
    if differing:
        notes.append(
            f"this config has {', '.join(differing)}; the law's runs do not. Rely on the order of sizes, not on losses."
        )
    return notes


def _short(number: float) -> str:
    """2345678 -> 2.35 M."""
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"


def _duration(seconds: float) -> str:
    if not seconds:
        return "?"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
