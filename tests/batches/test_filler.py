"""Filler: a micro-batch has a round shape, and losses, gradients and counts are those of the text alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from batches_by_hand import make_batch
from corpora import make_corpus
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.training.config import FinetuneConfig
from pretrain.batches.batch import MicroBatch
from pretrain.batches.filler import with_filler
from pretrain.batches.loader import BatchMaker
from pretrain.batches.pairs import IGNORED
from pretrain.config import ModelConfig, PretrainConfig
from pretrain.corpus.shards import TokenShards, open_shards
from pretrain.model import attention
from pretrain.model.heads import PretrainingModel
from pretrain.model.kernels.fused_cross_entropy import vocabulary_losses
from pretrain.objectives.masked import MaskedTokens
from tests.batches.test_loader import run_config

LENGTHS = (9, 40, 77, 128)
LONGEST = 128
VOCABULARY = 101
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "means": {"pooling": "mean"},
    "modernbert": {"family": "modernbert", "local_attention": 16, "global_every": 2},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    folder = make_corpus(tmp_path_factory.mktemp("corpus") / "c", documents=30, vocabulary_size=300)
    return open_shards(folder, "train")


def make_model(**options: Any) -> PretrainingModel:
    shape = {"size": "custom", "layers": 2, "hidden": 32, "heads": 2, "max_positions": LONGEST, **options}
    torch.manual_seed(0)
    return PretrainingModel(ModelConfig.model_validate(shape), VOCABULARY)


@given(st.lists(st.integers(5, LONGEST), min_size=1, max_size=300))
def test_filler_is_short_sequences_behind_the_text(lengths: list[int]) -> None:
    batch = make_batch(lengths)
    filled = with_filler(batch, LONGEST)
    tokens, more = sum(lengths), len(filled.input_ids) - sum(lengths)
    for name in ("input_ids", "token_types", "positions", "token_keys"):
        assert getattr(filled, name)[:tokens].equal(getattr(batch, name))
    assert filled.real_lengths == batch.lengths
    assert filled.targets == len(batch.masked_rows)
    own = filled.lengths[len(lengths) :]
    assert len(own) == filled.filler.sequences
    assert sum(own) == more
    assert 0 < min(own) <= max(own) <= LONGEST
    assert filled.cu_seqlens.tolist() == torch.tensor([0, *filled.lengths]).cumsum(0).tolist()
    assert filled.positions[tokens:].tolist() == [i for length in own for i in range(length)]
    assert filled.masked_rows[: len(batch.masked_rows)].equal(batch.masked_rows)
    assert filled.masked_rows.diff().ge(0).all()
    assert set(filled.masked_labels[len(batch.masked_rows) :].tolist()) <= {IGNORED}
    assert set(filled.masked_rows[len(batch.masked_rows) :].tolist()) <= {len(filled.input_ids) - 1}
    assert filled.nsp_labels.tolist() == [*batch.nsp_labels.tolist(), *[IGNORED] * len(own)]
    assert len(filled.input_ids) % 16 == 0
    if max(filled.lengths) >= 16:
        assert len(filled.masked_rows) % 16 == 0
    assert more <= max(tokens / 16, 16) + len(lengths) / 4 + 2 * len(own)


@given(st.lists(st.integers(5, LONGEST), min_size=1, max_size=20), st.integers(0, 70_000))
def test_no_sequence_has_more_queries_than_the_longest_has_tokens(lengths: list[int], rows: int) -> None:
    # The flash kernel reserves as many rows as `max_seqlen`, and leaves those of further queries uninitialized.
    batch = dataclasses.replace(
        make_batch(lengths),
        masked_rows=torch.zeros(rows, dtype=torch.int64),
        masked_labels=torch.zeros(rows, dtype=torch.int64),
    )
    filled = with_filler(batch, LONGEST)
    assert filled.filler.rows + 1 <= max(filled.lengths)


def test_few_shapes_for_many_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes: list[set[tuple[int, ...]]] = [set(), set()]
    filler = tokens = 0
    for _ in range(200):
        lengths = torch.randint(90, LONGEST + 1, (128,), generator=generator).tolist()
        batch = make_batch(lengths)
        for kinds, one in zip(shapes, (batch, with_filler(batch, LONGEST)), strict=True):
            kinds.add((len(one.input_ids), len(one.lengths), len(one.masked_rows)))
        filler += len(one.input_ids) - sum(lengths)
        tokens += sum(lengths)
    assert len(shapes[0]) > 150
    assert len(shapes[1]) <= 8
    assert filler <= 0.03 * tokens


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_text(name: str) -> None:
    model = make_model(**MODELS[name])
    batch = make_batch(LENGTHS, VOCABULARY)
    found = []
    for one in (batch, with_filler(batch, LONGEST)):
        losses = model(one)
        (losses.mlm_loss + losses.nsp_loss).backward()
        found.append((losses, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
        model.zero_grad()
    (alone, expected), (filled, gradients) = found
    for field, value in alone._asdict().items():
        if value is not None:
            torch.testing.assert_close(getattr(filled, field), value, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-5, msg=parameter)


@pytest.mark.parametrize("fused", [False, True])
def test_negative_labels_are_left_out(fused: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, word, bias = (torch.randn(shape, generator=generator) for shape in ((6, 8), (20, 8), (20,)))
    labels = torch.tensor([3, IGNORED, 0, 19, -1, 7])
    results = []
    for rows in (labels >= 0, torch.ones(6, dtype=torch.bool)):
        inputs = [x.clone().requires_grad_() for x in (hidden[rows], word, bias)]
        losses = vocabulary_losses(inputs[0], inputs[1], inputs[2], labels[rows], fused)
        losses[0].backward()
        results.append(([loss.detach() for loss in losses], [x.grad for x in inputs]))
    (expected, of_kept), (found, of_all) = results
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(of_all[1:], of_kept[1:])
    assert of_all[0] is not None
    assert not of_all[0][labels < 0].any()
    torch.testing.assert_close(of_all[0][labels >= 0], of_kept[0])


class Shapes(TorchDispatchMode):
    """The shapes of all that operators take and give."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shapes = [tuple(x.shape) for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        self.seen.append((str(func), shapes))
        return result


def shapes_of_a_step(batch: MicroBatch) -> list[tuple[str, list[tuple[int, ...]]]]:
    """Of a forward and a backward pass with the flash kernel, on a device without data."""
    model = make_model(attention_dropout=0.1).to(device="meta", dtype=torch.bfloat16)
    with Shapes() as shapes:
        losses = model(batch.to(torch.device("meta")))
        (losses.mlm_loss + losses.nsp_loss).backward()
    return shapes.seen


def test_different_texts_take_the_same_kernels_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "supports_flash", lambda *_: True)
    first = make_batch([*range(60, 124), 128], VOCABULARY)
    second = make_batch([70, *range(61, 124), 128], VOCABULARY)
    assert shapes_of_a_step(first) != shapes_of_a_step(second)
    first, second = (with_filler(batch, LONGEST) for batch in (first, second))
    assert first.real_lengths != second.real_lengths
    assert shapes_of_a_step(first) == shapes_of_a_step(second)


def filled_config(config: PretrainConfig) -> PretrainConfig:
    return config.model_copy(update={"engine": config.engine.model_copy(update={"cuda_graphs": True})})


@pytest.mark.parametrize("world_size", [1, 3])
def test_counts_and_useful_work_are_those_of_the_text(shards: TokenShards, world_size: int) -> None:
    config = run_config(length=60)
    for rank in range(world_size):
        place: dict[str, Any] = {"seed": 0, "rank": rank, "world_size": world_size}
        plain, filled = (BatchMaker(shards, one, 0, **place).make(0, 24) for one in (config, filled_config(config)))
        assert dataclasses.replace(plain, micro_batches=()) == dataclasses.replace(filled, micro_batches=())
        objective = MaskedTokens(config, shards.vocabulary_size)
        for one, other in zip(plain.micro_batches, filled.micro_batches, strict=True):
            assert other.filler.sequences
            assert other.filler.rows
            assert objective.model_flops(one.real_lengths, one.targets) == objective.model_flops(
                other.real_lengths, other.targets
            )


def test_held_out_batches_have_no_filler(shards: TokenShards) -> None:
    maker = BatchMaker(shards, filled_config(run_config()), 0, seed=0, rank=0, world_size=1, held_out=True)
    assert not any(batch.filler.sequences for batch in maker.make(0, 8).micro_batches)


def refused(config: type[Any], values: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="cuda_graphs") as error:
        config.model_validate(values)
    return str(error.value)


def test_where_filler_would_reach_a_loss_it_is_refused() -> None:
    values = yaml.safe_load(Path("configs/pretrain/bert-mini.yaml").read_text(encoding="utf-8"))
    values["engine"] = {**values.get("engine", {}), "cuda_graphs": True}
    PretrainConfig.model_validate(values)
    pairs = {"objective": "none"}
    assert "electra" in refused(PretrainConfig, {**values, "pairs": pairs, "electra": {"generator_width": 0.25}})
    task = yaml.safe_load(next(Path("configs/finetune").glob("*.yaml")).read_text(encoding="utf-8"))
    assert "pretraining" in refused(FinetuneConfig, {**task, "engine": {"cuda_graphs": True}})
    assert FinetuneConfig.model_validate(task).engine.cuda_graphs == "auto", "which is off there"
