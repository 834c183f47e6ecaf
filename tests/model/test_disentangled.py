"""Disentangled attention: its buckets, its pieces, what it costs, and the checkpoints of DeBERTa."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.checkpoint.layouts import BERTRAIN, LAYOUTS, layout_of, read_config
from pretrain.checkpoint.released import read_released
from pretrain.common.errors import InputError
from pretrain.config import ModelConfig
from pretrain.model.cost import encoder_flops, flops, recomputed_flops
from pretrain.model.heads import PretrainingModel
from pretrain.model.kernels import grouped_op
from pretrain.model.parameters import relative_projection_parameters
from pretrain.model.positions import relative_row_indices
from tests import parity
from tests.batches_by_hand import make_batch
from tests.checkpoint.test_layouts import DEBERTA, assert_same

SIZES = {"size": "custom", "layers": 2, "hidden": 32, "heads": 4, "intermediate": 48, "max_positions": 64}


def make_shape(**values: Any) -> ModelConfig:
    return ModelConfig.model_validate({**SIZES, "family": "deberta", **values})


# ---- arithmetic


@pytest.mark.parametrize(("buckets", "farthest"), [(256, 512), (32, 512), (32, 128), (7, 20), (4, 4), (48, 1000)])
def test_rows_are_the_buckets_of_transformers(buckets: int, farthest: int) -> None:
    deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    distances = torch.arange(-1100, 1101)
    theirs = deberta.make_log_bucket_position(distances, buckets, farthest).long()
    shape = make_shape(relative_buckets=buckets, relative_max_distance=farthest)
    found = relative_row_indices(distances, shape)
    assert torch.equal(found, (theirs + buckets).clamp(0, 2 * buckets - 1))
    assert bool((found.diff() >= 0).all())  # a slice of the table holds what a group reaches


def test_without_buckets_each_distance_has_a_row() -> None:
    found = relative_row_indices(torch.arange(-5, 6), make_shape(relative_buckets=0, relative_max_distance=3))
    assert found.tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 5, 5, 5]


@pytest.mark.parametrize("scores", [1, 40 * 40 * 2, 40 * 40 * 6, 1 << 20])
def test_pieces_of_any_size_give_the_same(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are one head, some heads of one unit, one unit, or all."""
    model, batch = PretrainingModel(make_shape(hidden_dropout=0.0), 101), make_batch((38, 40, 40, 7))
    results: list[list[Tensor]] = []
    for size in (1 << 30, scores):
        monkeypatch.setattr(grouped_op, "SCORES_PER_MATMUL", size)
        model.zero_grad()
        loss = model(batch).mlm_loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-5)


def test_a_short_group_reads_only_rows_that_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = make_shape(relative_buckets=16, relative_max_distance=40)
    model, batch, seen = PretrainingModel(shape, 101), make_batch((3, 3, 60)), []
    monkeypatch.setattr("pretrain.model.kernels.grouping.SCORES_PER_GROUP", 0)  # a group for each length
    own = grouped_op.DistanceTerms.reached_rows

    def spy(self: Any, *arguments: Any) -> Any:
        found = own(self, *arguments)
        assert found[0] is not None
        seen.append(found[0].shape[1])
        return found

    monkeypatch.setattr(grouped_op.DistanceTerms, "reached_rows", spy)
    model.encode(batch)
    assert set(seen) == {5, 32}


class Entered(TorchDispatchMode):
    """Runs the body of the grouped attention."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = torch.ops.bertrain
        if func in (ours.grouped_attention.default, ours.grouped_attention_backward.default):
            return (grouped_op.backward_op if "backward" in str(func) else grouped_op.forward_op)._init_fn(*args)
        return func(*args, **(kwargs or {}))


def test_a_micro_batch_reads_nothing_back() -> None:
    """On the meta device there are shapes but no data. Other models: test_fake_cuda.py, which has no distances."""
    model = PretrainingModel(make_shape(), 101).to("meta")
    with Entered():
        model(make_batch((7, 40, 9)).to(torch.device("meta"))).mlm_loss.backward()
    assert model.get_parameter("embeddings.word").grad is not None


# ---- costs


def test_flops_count_the_rows_that_are_reached() -> None:
    plain = make_shape(positions="none", relative_buckets=0, relative_max_distance=0, relative_norm=False)
    shape = make_shape(relative_buckets=16, relative_max_distance=40)
    # A query and a key of 5 tokens reach 9 rows; of 60, all 32. 6 FLOPs per product and column, two terms, two layers.
    for length, rows in ((5, 9), (60, 32)):
        more = 2 * 2 * 6 * 32 * length * rows
        assert flops(shape, 101, [length], 1) - flops(plain, 101, [length], 1) == more
        assert encoder_flops(shape, [length], length) - encoder_flops(plain, [length], length) == more
        again = recomputed_flops(shape, [length], length, checkpointing=False)
        assert again - recomputed_flops(plain, [length], length, checkpointing=False) == more / 3
    own = shape.model_copy(update={"relative_projections": True})
    assert flops(own, 101, [60], 1) == flops(shape, 101, [60], 1)  # of the table, not of tokens
    one = shape.model_copy(update={"relative_projections": True, "relative_terms": "c2p"})
    assert [p.name for p in relative_projection_parameters(one)] == ["position_key_weight", "position_key_bias"]


# ---- configs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": "rotary", "rotary_base": 1e4}, "relative_buckets has no effect with positions: rotary"),
        ({"relative_max_distance": 0}, "disentangled needs relative_max_distance"),
        ({"relative_buckets": 64, "relative_max_distance": 33}, r"relative_max_distance \(33\) more than half"),
        ({"relative_buckets": 2}, r"relative_buckets \(2\) must be 0 or at least 4"),
        ({"family": "bert", "relative_norm": True}, "relative_norm has no effect .* set it to false"),
        ({"family": "bert", "relative_terms": "c2p"}, "relative_terms has no effect .* set it to both"),
        ({"family": "modernbert", "relative_projections": True}, "relative_projections has no effect"),
        ({"size": "ettin-17m"}, "unknown size .ettin-17m. for family deberta, which has mini"),
    ],
)
def test_options_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_shape(**change)


def test_microsofts_config_is_read() -> None:
    """microsoft/deberta-v3-base, config.json."""
    config = {**DEBERTA, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 128100}
    config |= {"intermediate_size": 3072, "max_position_embeddings": 512, "position_buckets": 256}
    config |= {"hidden_act": "gelu", "layer_norm_eps": 1e-7, "max_relative_positions": -1, "type_vocab_size": 0}
    config |= {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "initializer_range": 0.02}
    base = ModelConfig.model_validate({"family": "deberta", "attention_dropout": 0.1, "size": "base"})
    assert read_config(config).model == base.model_copy(update={"size": "custom"})
    assert layout_of(base) is LAYOUTS["deberta"]


def test_the_positions_of_another_family_need_our_own_layout() -> None:
    values = {"family": "modernbert", "positions": "disentangled", "rotary_base": 0, "local_rotary_base": 0}
    shape = ModelConfig.model_validate({**values, "relative_buckets": 32, "relative_max_distance": 512})
    assert layout_of(shape) is BERTRAIN
    reason = LAYOUTS["modernbert"].unsupported_parts(shape)
    assert "model.positions is disentangled, and modernbert supports only rotary" in reason
    assert "model.positions is learned" in LAYOUTS["deberta"].unsupported_parts(ModelConfig())
    assert "model.gated is True" in LAYOUTS["deberta"].unsupported_parts(make_shape(gated=True))


# ---- checkpoints


def test_both_names_of_the_head_and_an_encoder_alone_are_read(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    theirs = parity.make_theirs("AutoModelForMaskedLM", "DeBERTa-v3", parity.SHAPES[0])
    assert theirs is not None
    whole = parity.read_back(theirs, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    head = ("mlm_transform_weight", "mlm_transform_bias", "mlm_norm_weight", "mlm_norm_bias", "mlm_bias")
    assert whole.pretraining.keys() == {f"heads.{name}" for name in head}

    def renamed(name: str) -> str:
        name = name.replace("cls.predictions.transform.", "lm_predictions.lm_head.")
        return name.replace("cls.predictions.", "lm_predictions.lm_head.")

    # As released: today's head, beside the head of replaced tokens and positions that are not added.
    further = {
        "mask_predictions.dense.weight": torch.ones(2, 2),
        "deberta.embeddings.position_embeddings.weight": torch.ones(66, 32),
    }
    save_file({**{renamed(name): tensor for name, tensor in tensors.items()}, **further}, path)
    today = read_released(tmp_path)
    assert_same({**today.backbone, **today.pretraining}, {**whole.backbone, **whole.pretraining})
    reasons = {tensor.name: tensor.target for tensor in today.mapping if not tensor.is_read}
    assert "replaced tokens" in reasons["mask_predictions.dense.weight"]
    assert "absolute positions" in reasons["deberta.embeddings.position_embeddings.weight"]

    save_file({n.removeprefix("deberta."): t for n, t in tensors.items() if n.startswith("deberta.")}, path)
    assert_same(read_released(tmp_path).backbone, whole.backbone)
    save_file({name: t for name, t in tensors.items() if "rel_embeddings" not in name}, path)
    with pytest.raises(InputError, match=r"deberta\.encoder\.rel_embeddings\.weight is missing"):
        read_released(tmp_path)


def test_the_context_pooler_follows_its_config(tmp_path: Path) -> None:
    config = {**DEBERTA, "pooler_hidden_act": "relu", "pooler_dropout": 0.2, "cls_dropout": 0.3}
    head = LAYOUTS["deberta"].task_head(config, read_config(config).model, "sequence")
    assert (head.activation, head.dropout) == ("relu", (0.2, 0.3))
    config, shape = {**DEBERTA, "hidden_dropout_prob": 0.2}, make_shape(hidden_dropout=0.2)
    tokens = LAYOUTS["deberta"].task_head(config, shape, "tokens")
    assert (tokens.activation, tokens.dropout) == ("", (0.0, 0.2))
