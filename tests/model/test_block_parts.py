"""Parts of the block that no released family has: equal to plain torch, and refused by released layouts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.checkpoint.layouts import LAYOUTS, OWN, ReleasedFacts, write_config
from pretrain.common.errors import InputError
from pretrain.config import ModelConfig
from pretrain.model.encoder import Encoder
from pretrain.model.positions import rotate, rotation
from tests.batches_by_hand import make_batch

VOCABULARY, LENGTHS = 101, (7, 20, 13)
PARTS: list[dict[str, Any]] = [{"recursions": 3}]
ALL = {"gated": True, "recursions": 2}
ROTARY = {"positions": "rotary", "rotary_base": 100.0}


def make_shape(**values: Any) -> ModelConfig:
    sizes = {"size": "custom", "layers": 2, "hidden": 32, "heads": 4, "intermediate": 48, "max_positions": 128}
    return ModelConfig.model_validate({**sizes, "hidden_dropout": 0.0, **values})


def make_encoder(shape: ModelConfig) -> Encoder:
    """Weights away from their initial values, so that each of them matters."""
    torch.manual_seed(0)
    encoder = Encoder(shape, VOCABULARY)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return encoder


class Reference:
    """The encoder in plain torch, one sequence at a time."""

    def __init__(self, shape: ModelConfig, state: dict[str, Tensor]) -> None:
        self.shape, self.state = shape, state

    def encode(self, batch: Any) -> Tensor:
        return torch.cat(
            [self._sequence(batch, first, n) for first, n in zip(batch.cu_seqlens, batch.lengths, strict=False)]
        )

    def _sequence(self, batch: Any, first: int, length: int) -> Tensor:
        shape, state, part = self.shape, self.state, slice(first, first + length)
        x = state["embeddings.word"][batch.input_ids[part]] + state["embeddings.token_type"][batch.token_types[part]]
        if shape.positions == "learned":
            x = x + state["embeddings.position"][batch.positions[part]]
        x = self._norm(x, "embeddings.norm")
        if shape.embedding:
            x = self._dense(x, "embeddings.project")
        for _ in range(shape.recursions):
            for number in range(shape.layers):
                x = self._layer(x, f"layers.{number}.")
        return self._norm(x, "final.norm") if shape.norm_placement == "pre" else x

    def _layer(self, x: Tensor, at: str) -> Tensor:
        before = self.shape.norm_placement == "pre"
        normed = self._norm(x, f"{at}attention_norm") if before and f"{at}attention_norm_weight" in self.state else x
        x = x + self._dense(self._context(normed, at), f"{at}attention_out")
        if not before:
            x = self._norm(x, f"{at}attention_norm")
        inner = self._feed_forward(self._norm(x, f"{at}ffn_norm") if before else x, at)
        x = x + self._dense(inner, f"{at}ffn_out")
        return x if before else self._norm(x, f"{at}ffn_norm")

    def _context(self, normed: Tensor, at: str) -> Tensor:
        shape = self.shape
        q, k, v = self._dense(normed, f"{at}qkv").unflatten(-1, (3, shape.heads, -1)).unbind(1)
        if shape.positions == "rotary":
            by = rotation(torch.arange(len(normed)), shape.head_width, shape.rotary_base)
            q, k = rotate(q, by), rotate(k, by)
        q, k, v = (y.transpose(0, 1) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)

    def _feed_forward(self, x: Tensor, at: str) -> Tensor:
        if self.shape.gated:
            activated, gate = self._dense(x, f"{at}gated_in").chunk(2, -1)
            return F.gelu(activated) * gate
        return F.gelu(self._dense(x, f"{at}ffn_in"))

    def _dense(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.state[f"{name}_weight"], self.state.get(f"{name}_bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.state[f"{name}_weight"], self.state[f"{name}_bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.shape.layer_norm_eps)


@pytest.mark.parametrize("placement", ["post", "pre"])
@pytest.mark.parametrize("entry", [*PARTS, {"embedding": 16, "recursions": 2}, ALL, {**ALL, **ROTARY}], ids=str)
def test_states_and_gradients_are_those_of_plain_torch(entry: dict[str, Any], placement: str) -> None:
    shape = make_shape(**entry, norm_placement=placement)
    encoder, batch = make_encoder(shape), make_batch(LENGTHS)
    state = {name: p.detach().clone().requires_grad_() for name, p in encoder.named_parameters()}
    # Only some rows of the last layer, as in pretraining.
    rows = torch.tensor([0, 5, 8, 30])
    found, expected = encoder.encode(batch, rows), Reference(shape, state).encode(batch)[rows]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, state[name].grad, rtol=1e-3, atol=1e-4, msg=name)


def test_every_application_of_the_first_layer_reads_normalized_states() -> None:
    """Normalized embeddings need no norm before attention; the output of the last layer does."""
    names = [name for name, _ in make_encoder(make_shape(norm_placement="pre", recursions=2)).named_parameters()]
    assert "layers.0.attention_norm_weight" in names
    names = [name for name, _ in make_encoder(make_shape(norm_placement="pre")).named_parameters()]
    assert "layers.0.attention_norm_weight" not in names


def test_each_application_of_a_layer_has_a_dropout_mask_of_its_own() -> None:
    """Two layers with the same weights, applied once, drop as one that is applied twice."""
    twice = make_shape(layers=1, recursions=2, hidden_dropout=0.3)
    apart = make_shape(layers=2, hidden_dropout=0.3)
    encoder, other, batch = make_encoder(twice), make_encoder(apart), make_batch(LENGTHS)
    state = encoder.state_dict()
    other.load_state_dict(state | {n.replace("layers.0", "layers.1"): p for n, p in state.items() if "layers.0" in n})
    torch.testing.assert_close(encoder.encode(batch), other.encode(batch))


@pytest.mark.parametrize("entry", PARTS, ids=str)
@pytest.mark.parametrize("family", sorted(LAYOUTS.keys() - {OWN.family}))
def test_released_layouts_refuse_them_by_name(family: str, entry: dict[str, Any]) -> None:
    layout = LAYOUTS[family]
    shape = make_shape(family=layout.parts, **entry)
    ((name, value),) = entry.items()
    with pytest.raises(InputError, match=f"model.{name} is {value}, and {family} supports only (False|1)"):
        write_config({}, ReleasedFacts(layout, shape), "", VOCABULARY, 0)
