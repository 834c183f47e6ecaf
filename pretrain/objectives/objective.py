"""The interface of pretraining objectives. Only training needs torch.

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
    next_sentence: bool  # whether it has a sentence-pair classifier
    state: dict[str, Tensor]  # of `PretrainingModel`, fp32, with one embedding row per tokenizer entry
    fingerprint: str  # SHA-256 of `state`, as hexadecimal digits


ReadFrozen = Callable[[PretrainConfig, str], FrozenModel]
"""Reads the model that a setting of the config names; raises `InputError` if it does not fit the run."""


class Exported(NamedTuple):
    """A model that is exported from a run, and the text of its card."""

    shape: ModelConfig
    learned: str  # continues "pretrained with"
    weights: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict  # selects its parameters from a checkpoint's
    suffix: str = ""  # of its folder's name
    layout: str = ""  # family of its released layout, if it differs from the model's
    head: str = ""  # suffix of its class in transformers, if the sentence-pair classifier does not determine it
    usage: str = ""  # text for the card, if the model does not fill masks


class Term(NamedTuple):
    """A loss: the model's output `NAME_loss`, a sum, divided by a count. The output also has `NAME_correct`."""

    name: str
    count: str  # field of `StepBatch`: masked, labeled or tokens; over all ranks and micro-batches
    weight: float = 1.0  # in the total loss
    shown: str = ""  # SHOWN_loss and SHOWN_accuracy are recorded; "" records neither


class Objective(ABC):
    """A model that computes sums of losses, and their means (invariant 3).

    `model` exists after `build`. Its forward pass takes a `MicroBatch` and returns the `output` that the training
    methods take. In the methods of planning, `lengths` are the tokens of each sequence, and `masked` the number of
    tokens to predict. All FLOPs are of matrix products, forward and backward.

    Args:
        config: the run's config.
        vocabulary: V; required for training and planning.
        frozen: the frozen model's config, if the run has one; `build` also sets it.
    """

    setting: ClassVar[str] = ""  # config setting that selects the objective
    metrics: ClassVar[Mapping[str, Metric]] = {}  # recorded metrics, in addition to `loss`
    frozen_role: ClassVar[str] = ""  # role of the frozen model, if there is one; its path is then in `setting`
    model: nn.Module

    def __init__(self, config: PretrainConfig, vocabulary: int = 0, frozen: ModelConfig | None = None) -> None:
        self.config, self.vocabulary, self.frozen = config, vocabulary, frozen
        self.shapes = [config.model]  # configs of the trained models; the first is the run's
        self.identity: dict[str, Any] = {}  # stored in each checkpoint: folder and fingerprint, by role

    # ---- the start of a run

    def check(self, read: ReadFrozen) -> None:
        """Raise `InputError` if the objective's inputs do not fit, before anything is written."""
        return None

    @abstractmethod
    def build(self, read: ReadFrozen) -> None:
        """Create `model`. Raises `InputError` as `check`."""

    @property
    def forward_options(self) -> dict[str, bool]:
        """Arguments for a model's constructor, from the `engine` section."""
        engine = self.config.engine
        return {"compile": engine.compiled, "activation_checkpointing": engine.activation_checkpointing}

    def check_resumed(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Raise `InputError` if the checkpoint with this state belongs to a run with other inputs."""
        for role, current in self.identity.items():
            saved = state.get(role)
            if saved is None or saved["fingerprint"] != current["fingerprint"]:
                was = f"{saved['folder']} ({saved['fingerprint'][:12]})" if saved else "none"
                raise InputError(
                    f"{checkpoint}: its {role} was {was}, and {self.setting} is {current['folder']} "
                    f"({current['fingerprint'][:12]}). Use the same one, or start a new run."
                )

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move tensors that are not parameters of `model` to the engine's device and dtype."""
        return None

    def initial_weights(self) -> Mapping[str, Tensor]:
        """Return the initial weights of a new run by name, fp32; {} keeps the model's initialization."""
        return {}

    # ---- training

    @property
    @abstractmethod
    def terms(self) -> tuple[Term, ...]:
        """The losses whose weighted sum is the total loss."""

    def loss_weights(self, step: StepBatch) -> tuple[float, ...]:
        """Return the factor of each loss in the micro-batches of a step (invariant 3: global counts)."""
        return tuple(term.weight / max(getattr(step, term.count), 1) for term in self.terms)

    def loss(self, output: Any, weights: Sequence[float] | Tensor) -> Tensor:
        """Return this micro-batch's contribution to the global mean loss; `weights` come from `loss_weights`."""
        parts = (getattr(output, f"{term.name}_loss") * weights[number] for number, term in enumerate(self.terms))
        return functools.reduce(operator.add, parts)

    def totals(self, output: Any) -> Tensor:
        """Return fp32 [n], the sums of one micro-batch."""
        import torch

        return torch.stack(
            [getattr(output, f"{term.name}_{kind}") for kind in ("loss", "correct") for term in self.terms]
        )

    def counts(self, step: StepBatch) -> tuple[float, ...]:
        """Return the global counts of one step, by which totals are divided."""
        return tuple(getattr(step, term.count) for term in self.terms)

    def means(self, totals: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Return `loss` and `metrics`, by name."""
        terms, counts = self.terms, [max(count, 1) for count in counts]
        losses, correct = totals[: len(terms)], totals[len(terms) :]
        total = sum(term.weight * loss / count for term, loss, count in zip(terms, losses, counts, strict=True))
        means = {"loss": total}
        for term, loss, hits, count in zip(terms, losses, correct, counts, strict=True):
            if term.shown:
                means |= {f"{term.shown}_loss": loss / count, f"{term.shown}_accuracy": hits / count}
        return means

    # ---- planning

    @abstractmethod
    def parameters(self) -> list[tuple[str, int, str]]:
        """Return (name, trained parameters, note) for each of `shapes`; shared parameters count only in the first."""

    @property
    def trained(self) -> int:
        """The number of trained parameters."""
        return sum(count for _, count, _ in self.parameters())

    @abstractmethod
    def useful_flops(self, lengths: Sequence[float], masked: float) -> float:
        """Return FLOPs as `cost.flops`: without padding and recomputation, with the whole last layer."""

    @abstractmethod
    def model_flops(self, lengths: Sequence[float], masked: float) -> float:
        """Return the FLOPs that MFU counts: `useful_flops` without the rows that the last layers skip."""

    @abstractmethod
    def last_rows(self, tokens: float, sequences: float, masked: float) -> list[float]:
        """Return the number of query positions in the last layer of each of `shapes`."""

    def executed_flops(self, lengths: Sequence[float], masked: float) -> float:
        """Return the executed FLOPs: `model_flops` and the backward pass's recomputation; without the optimizer."""
        rows = self.last_rows(sum(lengths), len(lengths), masked)
        recomputed = sum(
            cost.recomputed_flops(model, lengths, last, checkpointing=self.config.engine.activation_checkpointing)
            for model, last in zip(self.shapes, rows, strict=True)
        )
        return self.model_flops(lengths, masked) + recomputed

    # ---- export

    @property
    @abstractmethod
    def exported(self) -> tuple[Exported, ...]:
        """The exported models of a run; its main model, which fine-tuning uses, comes last."""
