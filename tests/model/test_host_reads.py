"""The model's step on a GPU neither reads from the device nor has shapes that depend on data.

On the meta device there are shapes but no data, so both fail there. The flash kernel has to be chosen for it; without
it (fp32, or a V100), the grouped attention has to be entered, of which torch would only ask the shapes.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batches_by_hand import make_batch
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.batches.batch import MicroBatch
from pretrain.common.transfers import PendingCopy, arrivals
from pretrain.config import ElectraConfig, ModelConfig
from pretrain.model import attention
from pretrain.model.heads import PretrainingModel
from pretrain.model.kernels import grouped_op
from pretrain.objectives.replaced_tokens import ElectraModel

VOCABULARY = 1000
LENGTHS = (40, 128, 9, 77)
SHAPES: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": {"family": "modernbert"},
    "means": {"pooling": "mean"},
    "shared keys": {"family": "modernbert", "kv_heads": 2},
    "sinusoidal": {"positions": "sinusoidal", "activation": "relu", "embedding": 32},
}


SHAPES_WITHOUT_FLASH: dict[str, dict[str, Any]] = {
    **SHAPES,
    "local": {"family": "modernbert", "local_attention": 16, "global_every": 2},
    "relative": {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 32, "attention_dropout": 0.1},
    "disentangled": {"family": "deberta"},
}


class Entered(TorchDispatchMode):
    """Runs the body of the grouped attention, and counts how often it did."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.bertrain.grouped_attention.default:
            self.forward += 1
            return grouped_op.forward_op._init_fn(*args)
        if func is torch.ops.bertrain.grouped_attention_backward.default:
            self.backward += 1
            return grouped_op.backward_op._init_fn(*args)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_flash", lambda *_: True)


@pytest.fixture
def no_flash() -> Iterator[Entered]:
    with Entered() as mode:
        yield mode


def make_shape(**options: Any) -> ModelConfig:
    size = {"size": "custom", "layers": 4, "hidden": 128, "heads": 4, "max_positions": 128}
    return ModelConfig.model_validate({**size, **options})


def make_model(name: str) -> torch.nn.Module:
    if name == "replaced tokens":
        return ElectraModel(make_shape(), VOCABULARY, settings=ElectraConfig(generator_width=0.5))
    return PretrainingModel(make_shape(**SHAPES_WITHOUT_FLASH[name]), VOCABULARY)


def train(model: torch.nn.Module, batch: MicroBatch, dtype: torch.dtype = torch.bfloat16) -> None:
    """Forward and backward passes on the meta device."""
    model.to(device="meta", dtype=dtype)
    losses = model(batch.to(torch.device("meta")))
    terms = [loss for loss in losses if loss is not None and loss.requires_grad]
    assert terms
    torch.stack(terms).sum().backward()
    assert model.get_parameter("embeddings.word").grad is not None


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("name", [*SHAPES, "replaced tokens"])
def test_a_micro_batch_reads_nothing_back(name: str) -> None:
    train(make_model(name), make_batch(LENGTHS, VOCABULARY))


@pytest.mark.parametrize("name", [*SHAPES_WITHOUT_FLASH, "replaced tokens"])
def test_a_micro_batch_without_flash_reads_nothing_back(no_flash: Entered, name: str) -> None:
    """Groups are made once for all layers."""
    grouped_op.group_sequences.cache_clear()
    train(make_model(name), make_batch(LENGTHS, VOCABULARY), torch.float32)
    assert no_flash.forward == no_flash.backward == (8 if name == "replaced tokens" else 4)
    assert grouped_op.group_sequences.cache_info().misses <= 2


def test_a_copy_is_waited_for_when_the_next_is_on_its_way() -> None:
    order: list[str] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            order.append(f"wait {self.number}")

    def launch() -> Iterator[tuple[int, PendingCopy]]:
        for number in range(3):
            order.append(f"launch {number}")
            event: Any = Event(number)
            yield number, PendingCopy(torch.tensor(number), event)

    assert [(number, int(values)) for number, values in arrivals(launch())] == [(0, 0), (1, 1), (2, 2)]
    assert order == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]
    assert list(arrivals([])) == []
