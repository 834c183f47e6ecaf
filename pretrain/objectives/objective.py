"""What a pretraining minimizes, and all that other rooms ask of it. No torch is needed but to train.

Letters: V vocabulary, T tokens and K masked tokens of a micro-batch.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pretrain.common.errors import InputError
from pretrain.common.records import Metric
from pretrain.config import ModelConfig, PretrainConfig
from pretrain.model import cost

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from pretrain.batches.batch import StepBatch


class FrozenModel(NamedTuple):
    """A model that a run reads and does not train, such as a teacher."""

    folder: str  # where it was read
    model: ModelConfig
    next_sentence: bool  # whether it has a classifier of sentence pairs
    state: dict[str, Tensor]  # of `PretrainingModel`, whole, fp32, with as many rows as its tokenizer has entries
    fingerprint: str  # SHA-256 of `state`, as hexadecimal digits


ReadFrozen = Callable[[PretrainConfig, str], FrozenModel]
"""Reads the model that a setting of the config names; raises `InputError` if it does not fit the run."""


class Exported(NamedTuple):
    """One of the models that a run is exported as, and what its card says of it."""

    shape: ModelConfig
    learned: str  # after "pretrained with"
    weights: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict  # its parameters, of those in a checkpoint
    suffix: str = ""  # of its folder's name
    layout: str = ""  # whose released layout it has, if not that of its family
    head: str = ""  # the end of its class's name in transformers, if the classifier of pairs does not decide it
    usage: str = ""  # if it does not fill masks


class Term(NamedTuple):
    """A loss: the sum `NAME_loss` of the model's output, whose mean is over a count. `NAME_correct` is beside it."""

    name: str
    count: str  # of a `StepBatch`: masked, labeled or tokens; over all ranks and micro-batches
    weight: float = 1.0  # in the whole
    shown: str = ""  # SHOWN_loss and SHOWN_accuracy are recorded; "" records neither


class Objective(ABC):
    """A model that computes sums of losses, and the means that they become (invariant 3).

    `model` exists after `build`. Its forward pass takes a `MicroBatch` and returns what the methods of training call
    `output`. In the methods of planning, `lengths` are the tokens of each sequence, and `masked` those to predict. All
    FLOPs are of matrix products, forward and backward.

    Args:
        config: of the run.
        vocabulary: V, which training and planning need.
        frozen: the shape of the model that the run reads and does not train; `build` finds it, too.
    """

    setting: ClassVar[str] = ""  # of the config that chooses the objective
    metrics: ClassVar[Mapping[str, Metric]] = {}  # what it records, as it is shown; `loss` is everybody's
    frozen_role: ClassVar[str] = ""  # what the frozen model is, if there is one; `setting` then names it
    model: nn.Module

    def __init__(self, config: PretrainConfig, vocabulary: int = 0, frozen: ModelConfig | None = None) -> None:
        self.config, self.vocabulary, self.frozen = config, vocabulary, frozen
        self.shapes = [config.model]  # of the models that are trained; the first is the run's own
        self.identity: dict[str, Any] = {}  # what each checkpoint keeps: folder and fingerprint, by role

    # ---- the start of a run

    def check(self, read: ReadFrozen) -> None:
        """Raise `InputError` if what the objective reads does not fit, before anything is written."""
        return None

    @abstractmethod
    def build(self, read: ReadFrozen) -> None:
        """Make `model`. Raises `InputError` as `check`."""

    @property
    def how(self) -> dict[str, bool]:
        """How the config's engine runs a model."""
        engine = self.config.engine
        return {"compile": engine.compiled, "activation_checkpointing": engine.activation_checkpointing}

    def check_resumed(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Raise `InputError` if the checkpoint with this state is of a run that read something else."""
        for role, now in self.identity.items():
            before = state.get(role)
            if before is None or before["fingerprint"] != now["fingerprint"]:
                was = f"{before['folder']} ({before['fingerprint'][:12]})" if before else "none"
                raise InputError(
                    f"{checkpoint}: its {role} was {was}, and {self.setting} is {now['folder']} "
                    f"({now['fingerprint'][:12]}). Give the same one, or start a new run."
                )

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move what is not a parameter of the model to where the engine computes, in its precision."""
        return None

    def first_weights(self) -> Mapping[str, Tensor]:
        """The weights of a new run by name, fp32; {} leaves the model as it was initialized."""
        return {}

    # ---- training

    @property
    @abstractmethod
    def terms(self) -> tuple[Term, ...]:
        """What the loss is the weighted sum of."""

    def loss_weights(self, step: StepBatch) -> tuple[float, ...]:
        """What the losses of each micro-batch of a step are multiplied by (invariant 3: global counts)."""
        return tuple(term.weight / max(getattr(step, term.count), 1) for term in self.terms)

    def loss(self, output: Any, weights: Sequence[float] | Tensor) -> Tensor:
        """This micro-batch's part of the global mean loss, to be differentiated; `weights` as `loss_weights`."""
        parts = (getattr(output, f"{term.name}_loss") * weights[number] for number, term in enumerate(self.terms))
        return functools.reduce(operator.add, parts)

    def totals(self, output: Any) -> Tensor:
        """fp32 [n] sums of one micro-batch."""
        import torch

        return torch.stack(
            [getattr(output, f"{one.name}_{kind}") for kind in ("loss", "correct") for one in self.terms]
        )

    def counts(self, step: StepBatch) -> tuple[float, ...]:
        """Global counts of one step, which totals are divided by."""
        return tuple(getattr(step, term.count) for term in self.terms)

    def means(self, totals: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """`loss` and `metrics`, by name."""
        terms, counts = self.terms, [max(count, 1) for count in counts]
        losses, correct = totals[: len(terms)], totals[len(terms) :]
        whole = sum(term.weight * loss / count for term, loss, count in zip(terms, losses, counts, strict=True))
        means = {"loss": whole}
        for term, loss, right, count in zip(terms, losses, correct, counts, strict=True):
            if term.shown:
                means |= {f"{term.shown}_loss": loss / count, f"{term.shown}_accuracy": right / count}
        return means

    # ---- planning

    @abstractmethod
    def parameters(self) -> list[tuple[str, int, str]]:
        """(name, trained parameters, note) of each of `shapes`; without what it shares with one before it."""

    @property
    def trained(self) -> int:
        """All parameters that are trained."""
        return sum(count for _, count, _ in self.parameters())

    @abstractmethod
    def useful_flops(self, lengths: Sequence[float], masked: float) -> float:
        """As `cost.flops`: no padding, no recomputation, and the last layer whole."""

    @abstractmethod
    def model_flops(self, lengths: Sequence[float], masked: float) -> float:
        """What MFU counts: as `useful_flops`, without the rows that the last layers skip."""

    @abstractmethod
    def last_rows(self, tokens: float, sequences: float, masked: float) -> list[float]:
        """Query positions of the last layer of each of `shapes`."""

    def executed_flops(self, lengths: Sequence[float], masked: float) -> float:
        """What is executed: `model_flops`, and what the backward pass computes again; without the optimizer's."""
        rows = self.last_rows(sum(lengths), len(lengths), masked)
        again = sum(
            cost.recomputed_flops(shape, lengths, of_last, checkpointing=self.config.engine.activation_checkpointing)
            for shape, of_last in zip(self.shapes, rows, strict=True)
        )
        return self.model_flops(lengths, masked) + again

    # ---- what remains

    @property
    @abstractmethod
    def exported(self) -> tuple[Exported, ...]:
        """The models that a run is exported as; its own, which fine-tuning uses, comes last."""
