"""The layers of a released family between its encoder and the output layer of a task."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from pretrain.checkpoint.layouts.pooled import POOLING
from pretrain.config import ModelConfig


class HeadDropout(NamedTuple):
    """Dropout rates of a task's head in training; `before_dense` has no effect without a dense layer."""

    before_dense: float = 0.0
    before_out: float = 0.0


class TaskHead(NamedTuple):
    """The layers of a task's head before its output layer.

    Attributes:
        activation: activation of the dense layer, a key of `pretrain.model.activations.ACTIVATIONS`; "" without one.
        bias: whether the dense layer has a bias.
        norm: norm after the activation, a key of `pretrain.model.norms.NORMS`; "" without one.
        pooling: input of a sequence head: the first token, or the mean or maximum of all tokens. With late, the head
            is applied to every token, and the results are averaged.
        dropout: dropout rates in training.
    """

    activation: str = ""
    bias: bool = True
    norm: str = ""
    pooling: Literal["cls", "mean", "max", "late"] = "cls"
    dropout: HeadDropout = HeadDropout()


def sequence_head(activation: str, *, input_dropout: bool = False) -> Callable[..., TaskHead]:
    """Return the `Layout.task_head` of BERT-like families: a dense layer for sequences, none for tokens and spans.

    Args:
        activation: activation of the dense layer.
        input_dropout: whether dropout also applies to the input of the dense layer, as in RobertaClassificationHead and
            ElectraClassificationHead.
    """

    def head(config: Mapping[str, Any], model: ModelConfig, purpose: str) -> TaskHead:
        if purpose == "spans":  # no dropout, as in google-research/bert run_squad.py, create_model
            return TaskHead()
        rate = config.get("classifier_dropout")
        rate = model.hidden_dropout if rate is None else rate
        if purpose == "tokens":
            return TaskHead(dropout=HeadDropout(0.0, rate))
        if pooled := pooled_head(config, rate):
            return pooled
        return TaskHead(activation, dropout=HeadDropout(rate if input_dropout else 0.0, rate))

    return head


def pooled_head(config: Mapping[str, Any], rate: float) -> TaskHead | None:
    """Return the sequence head if config.json requests the mean or maximum of all tokens; otherwise None.

    Args:
        rate: dropout rate after pooling.
    """
    pooling = config.get(POOLING, "cls")
    return TaskHead(pooling=pooling, dropout=HeadDropout(0.0, rate)) if pooling in ("mean", "max") else None
