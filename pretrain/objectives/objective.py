"""The interface of pretraining objectives. Only training needs torch; planning does not."""

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
    """A model that a run uses but does not train, such as a teacher."""

    folder: str  # folder or object store URL that it was read from
    model: ModelConfig
    next_sentence: bool  # whether it has a sentence-pair classifier
    state: dict[str, Tensor]  # fp32 weights by `PretrainingModel`'s names, with one embedding row per tokenizer entry
    fingerprint: str  # SHA-256 of `state`, as hexadecimal digits


ReadFrozen = Callable[[PretrainConfig, str], FrozenModel]
"""Reads the model that a setting names, given the config and the setting; raises `InputError` if it does not fit."""


class Exported(NamedTuple):
    """A model that is exported from a run, and the text of its card."""

    shape: ModelConfig
    learned: str  # objective that it was trained with; completes the phrase "pretrained with"
    weights: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict  # selects its weights among a checkpoint's
    suffix: str = ""  # suffix of its folder's name
    layout: str = ""  # model family whose released layout it gets; "": the config's family
    head: str = ""  # suffix of its class in transformers; "": determined by the sentence-pair classifier
    usage: str = ""  # usage text for the card, for a model that does not fill masks


class Term(NamedTuple):
    """A loss: the sum `NAME_loss` in the model's output, divided by a count. The output also has `NAME_correct`."""

    name: str
    count: str  # field of `StepBatch` with the count: masked, labeled or tokens
    weight: float = 1.0  # weight of the mean loss in the total loss
    shown: str = ""  # prefix of the recorded metrics SHOWN_loss and SHOWN_accuracy; "": not recorded


class Objective(ABC):
    """A model and its losses: sums over micro-batches, divided by global counts (invariant 3 in docs/invariants.md).

    `model` exists after `build`. Its forward pass takes a `MicroBatch` and returns the `output` that the training
    methods take. In the planning methods, `lengths` are the numbers of tokens of sequences, and `masked` is the number
    of tokens to predict. FLOPs count the matrix products of the forward and backward pass.

    Args:
        config: the run's config.
        vocabulary_size: number of rows of the word embeddings; needed for training and planning.
        frozen_config: config of the frozen model, if the run has one and it is known; `build` sets it.
    """

    setting: ClassVar[str] = ""  # config setting that selects the objective
    metrics: ClassVar[Mapping[str, Metric]] = {}  # recorded metrics, in addition to `loss`
    frozen_role: ClassVar[str] = ""  # role of the frozen model, if there is one; the value of `setting` is its path
    model: nn.Module

    def __init__(
        self, config: PretrainConfig, vocabulary_size: int = 0, frozen_config: ModelConfig | None = None
    ) -> None:
        self.config, self.vocabulary, self.frozen_config = config, vocabulary_size, frozen_config
        self.shapes = [config.model]  # configs of the trained models; the first is the run's
        self.identity: dict[str, Any] = {}  # frozen models' folders and fingerprints by role, stored in checkpoints

    # ---- start of a run

    def check(self, read: ReadFrozen) -> None:
        """Raise `InputError` if the objective's inputs do not fit the config. Called before anything is written."""
        return None

    @abstractmethod
    def build(self, read: ReadFrozen) -> None:
        """Create `model`. Raises `InputError` as `check` does."""

    @property
    def forward_options(self) -> dict[str, bool]:
        """Arguments from the config's `engine` section for a model's constructor."""
        engine = self.config.engine
        return {"compile": engine.compiled, "activation_checkpointing": engine.activation_checkpointing}

    def check_resumed(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Raise `InputError` if the checkpoint with this `state` was made with another frozen model."""
        for role, current in self.identity.items():
            saved = state.get(role)
            if saved is None or saved["fingerprint"] != current["fingerprint"]:
                previous = f"{saved['folder']} ({saved['fingerprint'][:12]})" if saved else "none"
                raise InputError(
                    f"{checkpoint}: its {role} was {previous}, and {self.setting} is {current['folder']} "
                    f"({current['fingerprint'][:12]}). Use the same {role}, or start a new run."
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
        """Return the factor of each loss in the micro-batches of a step: weight / global count (invariant 3)."""
        return tuple(term.weight / max(getattr(step, term.count), 1) for term in self.terms)

    def loss(self, output: Any, weights: Sequence[float] | Tensor) -> Tensor:
        """Return this micro-batch's contribution to the global mean loss; `weights` come from `loss_weights`."""
        losses = (getattr(output, f"{term.name}_loss") * weights[index] for index, term in enumerate(self.terms))
        return functools.reduce(operator.add, losses)

    def totals(self, output: Any) -> Tensor:
        """Return the sums over one micro-batch, fp32 [n]: all losses, then all numbers of correct predictions."""
        import torch

        return torch.stack(
            [getattr(output, f"{term.name}_{kind}") for kind in ("loss", "correct") for term in self.terms]
        )

    def counts(self, step: StepBatch) -> tuple[float, ...]:
        """Return the global counts of one step by which the totals are divided, one per term."""
        return tuple(getattr(step, term.count) for term in self.terms)

    def means(self, totals: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Return the values of `loss` and of the recorded `metrics`, by name."""
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
        """Return (name, number of trained parameters, note) for each of `shapes`; the first includes shared ones."""

    @property
    def trained(self) -> int:
        """The number of trained parameters."""
        return sum(count for _, count, _ in self.parameters())

    @abstractmethod
    def useful_flops(self, lengths: Sequence[float], masked: float) -> float:
        """Return the FLOPs that `cost.flops` counts: no padding or recomputation, but the whole last layer."""

    @abstractmethod
    def model_flops(self, lengths: Sequence[float], masked: float) -> float:
        """Return the FLOPs that MFU counts: `useful_flops` without positions that the last layers skip."""

    @abstractmethod
    def last_rows(self, tokens: float, sequences: float, masked: float) -> list[float]:
        """Return the number of query positions in the last layer of each of `shapes`."""

    def executed_flops(self, lengths: Sequence[float], masked: float) -> float:
        """Return the executed FLOPs: `model_flops` plus recomputation in the backward pass; without the optimizer."""
        rows = self.last_rows(sum(lengths), len(lengths), masked)
        recomputed = sum(
            cost.recomputed_flops(model, lengths, last_rows, checkpointing=self.config.engine.activation_checkpointing)
            for model, last_rows in zip(self.shapes, rows, strict=True)
        )
        return self.model_flops(lengths, masked) + recomputed

    # ---- export

    @property
    @abstractmethod
    def exported(self) -> tuple[Exported, ...]:
        """The models that are exported from a run; its main model, which fine-tuning uses, comes last."""
