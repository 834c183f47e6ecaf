"""Logits and gradients of every family equal transformers' (tests/parity.py), and so does the exported ONNX model."""

from pathlib import Path

import pytest
import torch

from tests import parity

transformers = pytest.importorskip("transformers")

SHAPE = parity.SHAPES[0]


@pytest.mark.parametrize("family", [*parity.FAMILIES, *parity.OTHERS])
def test_logits_and_gradients_are_those_of_transformers(family: str) -> None:
    found = parity.measure(family, SHAPE, (parity.MLM, parity.GRADIENTS, *parity.HEADS))
    assert {parity.MLM, parity.GRADIENTS, "classification", "tokens"} <= set(found)
    assert max(found.values()) < parity.LIMIT, found


@pytest.mark.parametrize("family", parity.FAMILIES)
def test_the_padded_twin_gives_the_logits_of_training(family: str, tmp_path: Path) -> None:
    released = parity.read_back(parity.make_theirs("AutoModelForMaskedLM", family, SHAPE), tmp_path)
    inputs, read = parity.inputs_of(parity.batch_for(released, SHAPE), released), dict(released.head)
    for head, objective in parity.HEADS.values():
        released.head.clear()
        released.head.update(read, **random_head(parity.task_shapes(released, head)))
        batch = parity.task_batch(released, SHAPE, head)
        with torch.no_grad():
            expected = parity.task_model(released, head, objective).eval()(batch).logits
        torch.testing.assert_close(parity.padded_logits(released, inputs, head), expected, rtol=0, atol=1e-4)


def random_head(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def test_the_onnx_model_gives_the_logits_of_transformers() -> None:
    pytest.importorskip("onnxruntime")
    found = parity.measure("ModernBERT with biases, untied, mean", parity.ONNX_SHAPE, (parity.ONNX,))
    assert found[parity.ONNX] < parity.LIMIT


def test_a_wrong_model_is_seen(tmp_path: Path) -> None:
    """The measure is not blind: a gate taken for the activation changes the logits."""
    theirs = parity.make_theirs("AutoModelForMaskedLM", "GTE", SHAPE)
    released = parity.read_back(theirs, tmp_path)
    before = parity.mlm_logits(released, SHAPE)
    weight = released.backbone["layers.1.gated_in_weight"]
    released.backbone["layers.1.gated_in_weight"] = torch.cat(weight.chunk(2)[::-1])
    assert parity.difference(parity.mlm_logits(released, SHAPE), before) > 100 * parity.LIMIT
