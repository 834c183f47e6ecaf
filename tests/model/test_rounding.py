"""Rows of bf16 products on a CPU are rounded up: few shapes, and the same results."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.config import ModelConfig
from pretrain.model.heads import PretrainingModel
from pretrain.model.kernels import grouped_op, rounding
from tests.batches_by_hand import make_batch

MODELS: dict[str, dict[str, Any]] = {
    "bert": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "means": {"pooling": "mean"},
    "modernbert": {"family": "modernbert", "local_attention": 16, "global_every": 2},
    "t5": {"positions": "relative", "relative_buckets": 16, "relative_max_distance": 64},
    "deberta": {"positions": "disentangled", "relative_max_distance": 64, "token_types": False},
}
LENGTHS = (3, 5, 9, 40, 77, 90, 90, 128)


def make_model(**options: Any) -> PretrainingModel:
    shape = {"size": "custom", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 128, **options}
    torch.manual_seed(0)
    return PretrainingModel(ModelConfig.model_validate(shape), 101)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, where nothing is rounded up otherwise."""
    found = []
    for is_round in (False, True):
        for module in (rounding, grouped_op):
            monkeypatch.setattr(module, "compiles_each_shape", lambda like, on=is_round: on)
        model, batch = make_model(**MODELS[name]), make_batch(LENGTHS)
        assert len(rounding.pad_tokens(batch, model.embeddings.word).input_ids) % 16 == 0 or not is_round
        losses = model(batch)
        (losses.mlm_loss + losses.nsp_loss).backward()
        found.append([*losses, model.masked_logits(batch), model.encode(batch), *(p.grad for p in model.parameters())])
        monkeypatch.undo()
    for plain, rounded in zip(*found, strict=True):
        torch.testing.assert_close(rounded, plain, rtol=1e-4, atol=2e-6)


class _Shapes(TorchDispatchMode):
    """Collects the shapes of matrix products, and the lengths to which attention pads."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[tuple[int, ...]] = set()
        self.lengths: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.bertrain.grouped_attention.default:
            self.lengths |= {
                len(one.keys.valid_GL[0]) for one in grouped_op.sequence_groups(grouped_op.Arguments(*args))
            }
        elif func is torch.ops.aten.mm.default:
            self.products.add((*args[0].shape, *args[1].shape))
        return func(*args, **(kwargs or {}))


def test_few_shapes_for_many_lengths() -> None:
    model = make_model(**MODELS["t5"]).bfloat16()
    generator, shapes = torch.Generator().manual_seed(0), _Shapes()
    filler = tokens = 0
    for seed in range(20):
        lengths = sorted(torch.randint(50, 129, (64,), generator=generator).tolist())
        batch = make_batch(lengths, seed=seed)
        with shapes:
            losses = model(batch)
            (losses.mlm_loss + losses.nsp_loss).backward()
        tokens += sum(lengths)
        filler += len(rounding.pad_tokens(batch, model.embeddings.word).input_ids) - sum(lengths)
    assert len(shapes.products) < 80  # 334 without
    assert not [one for one in shapes.lengths if one % rounding.LENGTH_MULTIPLE]
    assert 0 < filler < 0.04 * tokens
