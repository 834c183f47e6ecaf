"""Task heads: losses and logits equal to those of transformers' models with the same weights, over padded batches."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from labeled_batches import batch_of, pad
from tiny_checkpoints import make_bert

from finetune.tasks.base import Head, Objective, Windows
from finetune.training.model.batches import Batches
from finetune.training.model.task_model import TaskModel
from pretrain.checkpoint.assembly import assemble
from pretrain.checkpoint.layouts import HeadDropout, TaskHead, read_config
from pretrain.checkpoint.released import read_released
from pretrain.config import ModelConfig
from pretrain.model.heads import PretrainingModel
from pretrain.training.engine.gradient_sums import add_rows, use_sparse_embedding_gradients
from tests.artifacts.untrained import task_model

LENGTHS = [5, 9, 12, 7]
OUTPUTS = {"sequence": 3, "tokens": 5, "spans": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


def ours(checkpoint: Path, head: Head, objective: Objective, outputs: int) -> TaskModel:
    released = read_released(checkpoint)
    model = task_model(released, head, objective, outputs)
    weights = {name: torch.randn_like(p) * 0.1 for name, p in model.state_dict().items() if name.startswith("head.")}
    model.load_state_dict({**released.backbone, **weights})
    return model.eval()


def theirs(checkpoint: Path, name: str, model: TaskModel, outputs: int) -> Any:
    import transformers

    baseline = getattr(transformers, f"BertFor{name}").from_pretrained(checkpoint, num_labels=outputs).eval()
    state = {key.removeprefix("head."): value for key, value in model.state_dict().items()}
    layer = baseline.qa_outputs if name == "QuestionAnswering" else baseline.classifier
    layer.load_state_dict({"weight": state["out_weight"], "bias": state["out_bias"]})
    if "dense_weight" in state:
        baseline.bert.pooler.dense.load_state_dict({"weight": state["dense_weight"], "bias": state["dense_bias"]})
    return baseline


make_batch = functools.partial(batch_of, LENGTHS)
FIRST = np.cumsum([0, *LENGTHS[:-1]])
ALL = np.arange(sum(LENGTHS))


@pytest.mark.parametrize(
    ("objective", "problem", "labels"),
    [
        ("classes", "single_label_classification", np.array([2, 0, 1, 2])),
        ("labels", "multi_label_classification", np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]], np.float32)),
        ("value", "regression", np.array([0.5, -1.0, 2.0, 3.0], np.float32)),
    ],
)
def test_sequence_losses_are_those_of_transformers(checkpoint, objective, problem, labels) -> None:
    outputs = 1 if objective == "value" else 3
    model = ours(checkpoint, "sequence", objective, outputs)
    baseline = theirs(checkpoint, "SequenceClassification", model, outputs)
    baseline.config.problem_type = problem
    batch = make_batch(labels, FIRST)
    with torch.no_grad():
        output, expected = model(batch), baseline(**pad(batch), labels=batch.labels)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.loss / 4, expected.loss, rtol=1e-5, atol=1e-6)


def test_tags_are_those_of_transformers(checkpoint: Path) -> None:
    model = ours(checkpoint, "tokens", "classes", 5)
    baseline = theirs(checkpoint, "TokenClassification", model, 5)
    asked = ALL[ALL % 3 == 1]
    batch = make_batch(asked % 5, asked)
    labels = torch.full((len(LENGTHS), max(LENGTHS)), -100)
    labels[batch.window_of_query, batch.positions[batch.query_positions]] = batch.labels
    with torch.no_grad():
        output, expected = model(batch), baseline(**pad(batch), labels=labels)
    found = expected.logits[batch.window_of_query, batch.positions[batch.query_positions]]
    torch.testing.assert_close(output.logits, found, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.loss / len(asked), expected.loss, rtol=1e-5, atol=1e-6)


def test_spans_are_those_of_transformers(checkpoint: Path) -> None:
    model = ours(checkpoint, "spans", "span", 2)
    baseline = theirs(checkpoint, "QuestionAnswering", model, 2)
    labels, begins, ends = np.zeros((len(ALL), 2), np.uint8), [2, 0, 4, 6], [3, 0, 11, 6]
    labels[FIRST + np.array(begins), 0] = labels[FIRST + np.array(ends), 1] = 1
    weights = np.isin(ALL, FIRST).astype(np.float32)
    batch = make_batch(labels, ALL, weights)
    order = np.argsort(LENGTHS, kind="stable")
    with torch.no_grad():
        output = model(batch)
        # Only the window's tokens: transformers' softmax also covers padding.
        expected = baseline(**pad(batch))
    mask = pad(batch)["attention_mask"] == 0
    losses = [
        torch.nn.functional.cross_entropy(logits.masked_fill(mask, -torch.inf), torch.tensor(np.array(answers)[order]))
        for logits, answers in ((expected.start_logits, begins), (expected.end_logits, ends))
    ]
    torch.testing.assert_close(output.loss / 4, sum(losses) / 2, rtol=1e-5, atol=1e-6)


SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 32, "max_position_embeddings": 24}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
HALF = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.0}
DISTILBERT = {"vocab_size": 40, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
DISTILBERT |= {"max_position_embeddings": 24, "attention_dropout": 0.0}


@pytest.mark.parametrize(
    ("family", "values"),
    [
        *(
            (family, {**SIZES, **more})
            for family in ("Bert", "Roberta", "Electra")
            for more in (HALF, {**NO_DROPOUT, "classifier_dropout": 0.25}, {**HALF, "classifier_dropout": 0.0})
        ),
        ("DistilBert", {**DISTILBERT, "dropout": 0.5}),
        ("DistilBert", {**DISTILBERT, "dropout": 0.0, "seq_classif_dropout": 0.25, "qa_dropout": 0.75}),
    ],
)
@pytest.mark.parametrize(
    ("head", "kind"),
    [("sequence", "SequenceClassification"), ("tokens", "TokenClassification"), ("spans", "QuestionAnswering")],
)
def test_heads_drop_where_and_as_much_as_transformers(family, values, head, kind, monkeypatch) -> None:
    """Here dropout multiplies its input by its probability, so its position and probability show in the logits."""
    import transformers

    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x * (1 - self.p) if self.training else x)
    for module in ("pretrain.model.block", "finetune.training.model.task_model"):
        monkeypatch.setattr(f"{module}.hash_dropout", lambda x, keys, site, dropout: x * (1 - dropout))
    monkeypatch.setattr("pretrain.model.kernels.native.supports_native", lambda _: False)
    torch.manual_seed(0)
    if family == "Roberta":
        values = {**values, "max_position_embeddings": 26, "type_vocab_size": 1}
    config = getattr(transformers, f"{family}Config")(**values)
    baseline = getattr(transformers, f"{family}For{kind}")(config).train()
    with torch.no_grad():
        for name, parameter in baseline.named_parameters():
            # DistilBERT's encoder drops no output of its attention, ours does: not what is asked here.
            parameter.add_(torch.randn_like(parameter) * 0.1).mul_("out_lin" not in name)
    released = assemble(dict(baseline.state_dict()), read_config(config.to_dict()), config.to_dict())
    model = task_model(released, head, "span" if head == "spans" else "classes", 2).train()
    model.load_state_dict(released.backbone | {f"head.{name}": tensor for name, tensor in released.head.items()})
    asked = FIRST if head == "sequence" else ALL
    batch = make_batch(np.zeros((len(asked), 2) if head == "spans" else len(asked), np.int64), asked)
    batch = dataclasses.replace(batch, token_types=batch.token_types * (released.token_types == 2))
    inputs = pad(batch)
    if released.token_types < 2:
        del inputs["token_type_ids"]
    with torch.no_grad():
        output, expected = model(batch), baseline(**inputs)
    logits = torch.stack([expected.start_logits, expected.end_logits], -1) if head == "spans" else expected.logits
    if head != "sequence":
        logits = logits[batch.window_of_query, batch.positions[batch.query_positions]]
    torch.testing.assert_close(output.logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("head", "objective"), [("sequence", "classes"), ("tokens", "classes")])
def test_heads_drop_in_training_alone(head: Head, objective: Objective) -> None:
    shape = ModelConfig(size="custom", layers=1, hidden=32, heads=2, max_positions=24)
    model = TaskModel(shape, 40, head, objective, 3, TaskHead("tanh", dropout=HeadDropout(0.5, 0.5))).eval()
    hidden, keys = torch.randn(50, 32), torch.arange(50, dtype=torch.int32)
    kept = model.head(hidden, keys)
    assert torch.equal(model.head(hidden, keys), kept)
    model.train()
    dropped = model.head(hidden, keys)
    assert not torch.equal(dropped, kept)
    assert torch.equal(model.head(hidden, keys), dropped)  # determined by the keys


def test_windows_of_an_example_are_averaged_before_the_loss(checkpoint: Path) -> None:
    """Two windows of one example: cross-entropy of the mean logits, with the example's whole weight."""
    model = ours(checkpoint, "sequence", "classes", 3)
    starts = np.array([0, 5, 11, 15])
    windows = Windows(
        ids=np.arange(5, 20, dtype=np.int32),
        types=np.zeros(15, np.uint8),
        starts=starts,
        extra={},
        examples=np.array([0, 0, 1]),
        queries=starts[:-1],
        labels=np.array([2, 2, 0]),
        weights=np.array([0.75, 0.75, 1.0], np.float32),
    )
    batches = Batches(windows, seed=0, budget=100, rank=0, world_size=1)
    (each,) = batches.batches_by_length()
    with torch.no_grad():
        logits = model(each).logits[np.argsort(each.query_indices)]
        loss = sum(model(batch).loss for batch in batches.step(0, 2).micro_batches)
    means = torch.stack([(logits[0] + logits[1]) / 2, logits[2]])
    expected = torch.nn.functional.cross_entropy(means, torch.tensor([2, 0]), reduction="none")
    torch.testing.assert_close(loss, 1.5 * expected[0] + expected[1])


def test_the_span_loss_has_a_right_gradient(checkpoint: Path) -> None:
    from finetune.training.model.task_model import span_loss

    labels = np.zeros((len(ALL), 2), np.uint8)
    labels[FIRST] = 1
    batch = make_batch(labels, ALL, np.isin(ALL, FIRST).astype(np.float32))
    logits = torch.randn(len(ALL), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: span_loss(x, batch), (logits,))


def test_look_ups_of_a_task_model_may_give_rows(checkpoint: Path) -> None:
    """The same gradient, and no whole table of it; a decoder that shares the table needs it whole."""
    batch = make_batch(np.array([0, 2, 1, 1]), FIRST)
    model = ours(checkpoint, "sequence", "classes", OUTPUTS["sequence"])
    assert len(set(batch.input_ids.tolist())) < len(batch.input_ids), "some words come twice"
    word = model.embeddings.word
    (whole,) = torch.autograd.grad(model(batch).loss, word)
    use_sparse_embedding_gradients(model)
    (rows,) = torch.autograd.grad(model(batch).loss, word)
    assert rows.is_sparse
    assert len(rows._values()) == len(batch.input_ids)
    place = torch.full_like(word, 7.0)
    for first in (True, False):
        add_rows(place, rows, first)
    torch.testing.assert_close(place, 2 * whole)


def test_tied_words_have_dense_gradients() -> None:
    tied = PretrainingModel(ModelConfig(size="custom", layers=1, hidden=8, heads=1, max_positions=8), 20).eval()
    use_sparse_embedding_gradients(tied)
    ids = torch.tensor([1, 2, 3, 1, 2])
    embedded = tied.embeddings(ids, torch.zeros_like(ids), torch.arange(5), torch.zeros(5, dtype=torch.int32))
    (gradient,) = torch.autograd.grad(embedded.square().sum(), [tied.embeddings.word])
    assert not gradient.is_sparse, "the decoder reads every row"
