"""The first weights of an output layer are the best linear model of the frozen features, and few labels get steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from labeled_batches import windows_of
from sklearn.linear_model import LogisticRegression
from tiny_checkpoints import make_bert

from finetune.tasks.base import Objective
from finetune.tasks.classification.checks import never_predicted_warnings
from finetune.training.config import FinetuneConfig
from finetune.training.model.batches import Batches
from finetune.training.model.output_layer import PENALTY, SHRINK, fit_output_layer, regularization
from finetune.training.model.task_model import TaskModel
from finetune.training.runs import run_remarks, selection_remarks
from pretrain.checkpoint.layouts import TaskHead
from pretrain.checkpoint.released import read_released

EXAMPLES = 60


def make_batches(objective: Objective, outputs: int) -> Batches:
    draw = np.random.default_rng(0)
    lengths = draw.integers(3, 12, EXAMPLES)
    labels = {
        "classes": draw.integers(0, outputs, EXAMPLES),
        "labels": draw.integers(0, 2, (EXAMPLES, outputs)).astype(np.float32),
        "value": draw.normal(size=EXAMPLES).astype(np.float32),
    }
    windows = windows_of(lengths.tolist(), labels[objective], np.cumsum([0, *lengths[:-1]]), segments=1)
    return Batches(windows, seed=0, budget=64, rank=0, world_size=1)


def fit(tmp_path: Path, objective: Objective, outputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(features [N, H], labels, weight [C, H], bias [C])."""
    released = read_released(make_bert(tmp_path / "bert"))
    head = TaskHead(pooling="mean")
    model = TaskModel(released.model, released.vocabulary_size, "sequence", objective, outputs, head).eval()
    model.load_state_dict(released.backbone, strict=False)
    batches = make_batches(objective, outputs)
    made = fit_output_layer(model, batches, torch.device("cpu"))
    seen = list(batches.batches_by_length())
    features = torch.cat([model.features(batch) for batch in seen]).double().numpy()
    labels = torch.cat([batch.labels for batch in seen]).numpy()
    return features, labels, made["head.out_weight"].double().numpy(), made["head.out_bias"].double().numpy()


def centered(features: np.ndarray) -> np.ndarray:
    return (features - features.mean(0)) / np.sqrt((features**2).sum(1).mean())


def test_a_value_gets_the_ridge_solution(tmp_path: Path) -> None:
    features, labels, weight, bias = fit(tmp_path, "value", 1)
    scaled = centered(features)
    gram = scaled.T @ scaled / EXAMPLES + PENALTY / EXAMPLES * np.eye(scaled.shape[1])
    solution = np.linalg.solve(gram, scaled.T @ (labels - labels.mean()) / EXAMPLES)
    expected = scaled @ solution + labels.mean()
    assert np.abs(features @ weight[0] + bias[0] - expected).max() < 1e-2 * np.abs(expected).max()


def test_classes_get_the_logistic_regression(tmp_path: Path) -> None:
    features, labels, weight, bias = fit(tmp_path, "classes", 3)
    scaled = centered(features)
    theirs = LogisticRegression(C=1 / (2 * PENALTY), tol=1e-8, max_iter=10_000).fit(scaled, labels)
    ours = torch.softmax(torch.from_numpy(features @ weight.T + bias) / SHRINK, 1).numpy()
    assert np.abs(ours - theirs.predict_proba(scaled)).max() < 0.02


def test_labels_are_fitted_one_by_one(tmp_path: Path) -> None:
    features, labels, weight, bias = fit(tmp_path, "labels", 2)
    scaled = centered(features)
    ours = torch.sigmoid(torch.from_numpy(features @ weight.T + bias) / SHRINK).numpy()
    for number in range(2):  # the loss is the mean over the labels
        theirs = LogisticRegression(C=1 / (2 * 2 * PENALTY), tol=1e-8, max_iter=10_000)
        theirs.fit(scaled, labels[:, number])
        assert np.abs(ours[:, number] - theirs.predict_proba(scaled)[:, 1]).max() < 0.02


def test_few_labels_are_fitted_more_closely_and_with_more_confidence() -> None:
    assert regularization("classes", 16) == regularization("classes", 500) == (PENALTY, SHRINK)
    assert regularization("classes", 4) == pytest.approx((PENALTY / 64, SHRINK * 1.75))
    assert regularization("labels", 2) == (PENALTY, SHRINK)
    assert regularization("value", 2) == (PENALTY, 1)


@pytest.mark.parametrize(
    ("width", "examples", "rate", "epochs"),
    [(768, 100_000, 3e-5, 3.0), (384, 100_000, 1.2e-4, 3.0), (256, 1_000, 2.7e-4, 9.6), (64, 50, 1e-3, 20.0)],
)
def test_rate_and_epochs_follow_width_and_examples(width: int, examples: int, rate: float, epochs: float) -> None:
    values: dict[str, Any] = {"name": "x", "classification": {"train": "x"}}
    training = FinetuneConfig.model_validate(values).filled(width, examples).training
    assert (training.learning_rate, training.epochs) == (pytest.approx(rate, rel=0.02), epochs)
    given = {**values, "training": {"learning_rate": 5e-5, "epochs": 1.0}}
    training = FinetuneConfig.model_validate(given).filled(width, examples).training
    assert (training.learning_rate, training.epochs) == (5e-5, 1.0)


def record(step: int, accuracy: float) -> dict[str, Any]:
    return {"step": step, "split": "validation", "accuracy": accuracy}


def test_a_training_that_does_not_improve_on_the_frozen_model_is_told() -> None:
    better = run_remarks([record(0, 0.9), record(5, 0.95)], "accuracy", 5)
    assert better == ["frozen linear model, before training: accuracy 0.9000"]
    assert "on it, and the linear model was kept" in run_remarks([record(0, 0.9), record(5, 0.85)], "accuracy", 0)[1]
    assert "on it, and step 5 was kept for" in run_remarks([record(0, 0.9), record(5, 0.9)], "accuracy", 5)[1]
    assert len(run_remarks([record(0, 1.0), record(5, 1.0)], "accuracy", 5)) == 1  # nothing is better
    assert run_remarks([record(5, 0.85)], "accuracy", 5) == []  # its output layer was there before


def test_a_dev_set_too_small_to_choose_by_is_told() -> None:
    records = [record(0, 0.8), record(5, 0.85)]
    assert (
        "accuracy has the 95 % interval 0.70 to 0.95, and the checkpoints scored 0.80 to 0.85"
        in selection_remarks(records, "accuracy", (0.7, 0.95))[0]
    )
    assert selection_remarks(records, "accuracy", (0.8, 0.9)) == []  # narrow
    assert selection_remarks([record(0, 0.3), *records], "accuracy", (0.7, 0.95)) == []  # a clear gain
    assert selection_remarks(records, "accuracy", None) == selection_remarks([], "accuracy", (0.7, 0.95)) == []


def test_a_loss_that_still_falls_is_told() -> None:
    falling = [{"step": n, "lr": 1e-4, "loss": 2 - n / 10} for n in range(10)]
    assert "the loss is still falling" in run_remarks(falling, "accuracy", 9)[0]
    level = [{"step": n, "lr": 1e-4, "loss": max(1.0, 2 - n / 2)} for n in range(10)]
    assert run_remarks(level, "accuracy", 9) == []
    assert (
        run_remarks([{**one, "loss": one["loss"] * 0.1 if n else 20} for n, one in enumerate(falling)], "f1", 9) == []
    )


def test_a_class_that_is_never_predicted_is_told() -> None:
    missed, few = [[5, 1, 0], [0, 5, 0], [1, 4, 0]], [[5, 1, 0], [0, 5, 0], [0, 4, 0]]

    def told(counts: list[list[int]], **trained: int) -> list[str]:
        return list(never_predicted_warnings(("a", "b", "c")[: len(counts)], counts, trained))

    assert told(missed)[0].startswith("the model never predicts 'c' (5 examples). Train longer")
    assert told(missed, a=9, b=9, c=9) == told(missed)
    assert told(few, a=9, b=9, c=9) == []  # too few to tell
    assert told(few, a=9, b=9)[0].startswith("the model never predicts 'c' (4 examples): the training data has no such")
    assert "'c' (5 examples): only 4 training examples of each" in told(missed, a=9, b=9, c=4)[0]
    one, alone = told([[5, 0], [1, 0]], a=9, b=0)
    assert "predicts 'a' for every example" in one
    assert "'b' (1 example): the training data has no such examples" in alone
    assert list(never_predicted_warnings(("a", "b"), [[5, 0], [5, 0]], {}, threshold=0.01)) == [
        "the model predicts 'a' for every example. The decision threshold is 0.01; try another."
    ]
