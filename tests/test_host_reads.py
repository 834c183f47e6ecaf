"""The model's step on a GPU neither reads from the device nor has shapes that depend on data.

On the meta device there are shapes but no data, so both fail there. Only the flash kernel has to be chosen for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from batches_by_hand import make_batch

from pretrain.batches.loader import MicroBatch
from pretrain.config import ElectraConfig, ModelConfig
from pretrain.model.attention import dispatch
from pretrain.model.electra import ElectraModel
from pretrain.model.heads import PretrainingModel

VOCABULARY = 1000
LENGTHS = (40, 128, 9, 77)
SHAPES: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": {"family": "modernbert"},
    "means": {"pooling": "mean"},
    "gates": {"family": "modernbert", "attention_gate": "value", "qk_norm": True, "kv_heads": 2},
    "sinusoidal": {"positions": "sinusoidal", "activation": "relu", "embedding": 32},
}


@pytest.fixture(autouse=True)
def _flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_flash", lambda *_: True)


def make_shape(**options: Any) -> ModelConfig:
    size = {"size": "custom", "layers": 4, "hidden": 128, "heads": 4, "max_positions": 128}
    return ModelConfig.model_validate({**size, **options})


def train(model: torch.nn.Module, batch: MicroBatch) -> None:
    """Forward and backward passes in bf16 on the meta device."""
    model.to(device="meta", dtype=torch.bfloat16)
    losses = model(batch.to(torch.device("meta")))
    terms = [loss for loss in losses if loss is not None and loss.requires_grad]
    assert terms
    torch.stack(terms).sum().backward()
    assert model.get_parameter("embeddings.word").grad is not None


@pytest.mark.parametrize("causal", [0, 1, len(LENGTHS)])
@pytest.mark.parametrize("name", SHAPES)
def test_a_micro_batch_reads_nothing_back(name: str, causal: int) -> None:
    batch = make_batch(LENGTHS, VOCABULARY)
    if causal:
        targets = int((batch.masked_rows >= sum(LENGTHS[:-causal])).sum())
        batch = dataclasses.replace(batch, causal=causal, causal_targets=targets)
    train(PretrainingModel(make_shape(**SHAPES[name]), VOCABULARY), batch)


def test_replaced_tokens_are_sampled_on_the_device() -> None:
    model = ElectraModel(make_shape(), VOCABULARY, settings=ElectraConfig(generator_width=0.5))
    train(model, make_batch(LENGTHS, VOCABULARY))
