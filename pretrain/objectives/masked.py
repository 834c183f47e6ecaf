"""Masked language modeling, with next-sentence or sentence-order prediction (Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pretrain.common.records import Metric
from pretrain.model import cost
from pretrain.objectives.objective import Exported, Objective, Term

if TYPE_CHECKING:
    from pretrain.objectives.objective import ReadFrozen

MLM_METRICS = {
    "mlm_loss": Metric("nats", "Cross-entropy per masked token; mean since the last record.", "MLM loss", "mlm loss"),
    "mlm_accuracy": Metric(
        "fraction", "Accuracy on masked tokens since the last record.", "MLM accuracy", "mlm", live=True
    ),
}
PAIR_METRICS = {
    "nsp_loss": Metric("nats", "Cross-entropy per sentence pair; mean since the last record.", "NSP loss"),
    "nsp_accuracy": Metric(
        "fraction", "Accuracy on sentence pairs since the last record.", "NSP accuracy", "nsp", live=True
    ),
    "sop_loss": Metric(
        "nats",
        "Cross-entropy of predicting whether a sentence pair is swapped; mean since the last record.",
        "SOP loss",
    ),
    "sop_accuracy": Metric(
        "fraction", "Accuracy on sentence pairs since the last record.", "SOP accuracy", "sop", live=True
    ),
}
_PAIR_TASKS = {"nsp": " and next-sentence prediction", "sop": " and sentence-order prediction", "none": ""}


class MaskedTokens(Objective):
    """BERT's objective: masked language modeling, and a sentence-pair classifier if configured."""

    metrics: ClassVar[Mapping[str, Metric]] = {**MLM_METRICS, **PAIR_METRICS}

    def build(self, read: ReadFrozen) -> None:
        from pretrain.model.heads import PretrainingModel

        has_classifier = self.config.pairs.has_classifier
        self.model = PretrainingModel(self.config.model, self.vocabulary, has_classifier, **self.forward_options)

    @property
    def terms(self) -> tuple[Term, ...]:
        # As in Devlin et al., the total loss is the sum of the two mean losses, each with weight 1.
        return Term("mlm", "masked", shown="mlm"), self.pair_term

    @property
    def pair_term(self) -> Term:
        """The loss of the sentence-pair classifier, which is 0 without a classifier."""
        return Term("nsp", "labeled", shown=self.config.pairs.objective if self.config.pairs.has_classifier else "")

    def parameters(self) -> list[tuple[str, int, str]]:
        count = cost.parameter_count(self.config.model, self.vocabulary, self.config.pairs.has_classifier)
        return [("model", count.total, "")]

    def useful_flops(self, lengths: Sequence[float], masked: float) -> float:
        return cost.flops(self.config.model, self.vocabulary, lengths, masked, self.config.pairs.has_classifier)

    def model_flops(self, lengths: Sequence[float], masked: float) -> float:
        model, pairs = self.config.model, len(lengths) if self.config.pairs.has_classifier else 0
        (rows,) = self.last_rows(sum(lengths), len(lengths), masked)
        return cost.encoder_flops(model, lengths, rows) + cost.head_flops(model, self.vocabulary, masked, pairs)

    def last_rows(self, tokens: float, sequences: float, masked: float) -> list[float]:
        needs_all_tokens = self.config.pairs.has_classifier and self.config.model.pooling != "cls"
        return [tokens if needs_all_tokens else masked + sequences]

    @property
    def exported(self) -> tuple[Exported, ...]:
        learned = f"masked language modeling{_PAIR_TASKS[self.config.pairs.objective]}"
        return (Exported(self.config.model, learned),)
