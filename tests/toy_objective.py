"""Predict masked tokens, and the position of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.common.records import Metric
from pretrain.model.heads import PretrainingBatch, PretrainingModel
from pretrain.objectives.masked import MaskedTokens
from pretrain.objectives.objective import Exported, ReadFrozen, Term


class PlaceLosses(NamedTuple):
    """Sums over the micro-batch, fp32 scalars."""

    mlm_loss: Tensor
    place_loss: Tensor
    mlm_correct: Tensor
    place_correct: Tensor


class PlaceModel(PretrainingModel):
    """The encoder with a second head. Shape letters: T tokens, K masked tokens, H hidden size, P positions."""

    place_weight: nn.Parameter  # [P, H]

    def __init__(self, *arguments: Any, positions: int, **options: bool) -> None:
        super().__init__(*arguments, **options)
        self.place_weight = nn.Parameter(0.02 * torch.randn(positions, self.shape.hidden))

    def forward(self, batch: PretrainingBatch) -> PlaceLosses:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_TH = self.encode(batch)
        masked_KH = hidden_TH.index_select(0, batch.masked_rows)
        mlm_loss, _, mlm_correct, _ = self.heads(masked_KH, self._decoder(), batch.masked_labels, batch.nsp_labels)
        scores_TP = F.linear(hidden_TH, self.place_weight).float()
        place_loss = F.cross_entropy(scores_TP, batch.positions, reduction="sum")
        return PlaceLosses(mlm_loss, place_loss, mlm_correct, (scores_TP.argmax(-1) == batch.positions).sum().float())


class Places(MaskedTokens):
    setting = "objective"
    metrics: ClassVar[Mapping[str, Metric]] = {
        **MaskedTokens.metrics,
        "place_loss": Metric("nats", "Cross-entropy of the position.", "Loss of places"),
        "place_accuracy": Metric("fraction", "Accuracy of positions.", "Places found", "place", live=True),
    }

    def build(self, read: ReadFrozen) -> None:
        shape, options = self.config.model, {"next_sentence": False, **self.forward_options}
        self.model = PlaceModel(shape, self.vocabulary, positions=shape.max_positions, **options)

    @property
    def terms(self) -> tuple[Term, ...]:
        return Term("mlm", "masked", shown="mlm"), Term("place", "tokens", shown="place")

    @property
    def head_size(self) -> int:
        """The number of weights of the second head."""
        return self.config.model.max_positions * self.config.model.hidden

    def parameters(self) -> list[tuple[str, int, str]]:
        ((name, count, note),) = super().parameters()
        return [(name, count + self.head_size, note)]

    def useful_flops(self, lengths: Sequence[float], masked: float) -> float:
        return super().useful_flops(lengths, masked) + 6 * self.head_size * sum(lengths)

    def model_flops(self, lengths: Sequence[float], masked: float) -> float:
        return self.useful_flops(lengths, masked)

    def last_rows(self, tokens: float, sequences: float, masked: float) -> list[float]:
        return [tokens]

    @property
    def exported(self) -> tuple[Exported, ...]:
        return (Exported(self.config.model, "masked language modeling and positions", _without_places),)


OBJECTIVE = Places


def _without_places(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that released layouts have."""
    return {name: tensor for name, tensor in state.items() if name != "place_weight"}
