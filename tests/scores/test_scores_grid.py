"""`evaluate-pretrained --grid-set`: each config takes the best values for the checkpoint and for random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.scores.finetuning import FinetuningScore, finetuning_scores
from finetune.scores.finetuning_runs import FinetuningSettings
from finetune.scores.record import Record
from finetune.scores.view import score_notes, score_rows
from pretrain.common.errors import DivergedError, MachineError, RunError, StoppedError
from tests.fake_trials import hand_out
from tests.tasks.refusals import refused
from tests.tiny_checkpoints import write_reviews

MODEL = {"fingerprint": "f", "name": "n", "folder": "d"}
RATES = {"training.learning_rate": ["1e-4", "1e-3", "1e-2"]}


class Runs:
    """Stands for Ray. The checkpoint is best at a rate of 1e-3, random weights at 1e-4; seeds add 0.01 each."""

    def __init__(self) -> None:
        self.ran: list[tuple[bool, float, int]] = []  # (random weights, rate, seed)
        self.errors: dict[float, RunError] = {}  # by the rate at which they happen

    def __call__(self, target: str, tasks: Sequence[Any], *, poll: Any, **options: Any) -> None:
        hand_out(tasks, poll, self._result)

    def _result(self, task: Any) -> float | RunError:
        config = task.training.config
        random, rate, seed = config["random_weights"], config["training"]["learning_rate"], config["seed"]
        error = self.errors.get(rate)
        if not isinstance(error, StoppedError):
            self.ran.append((random, rate, seed))
        score = 0.5 - 10 * rate if random else 0.7 + 0.1 * (rate == 1e-3)
        return error or score + 0.01 * min(seed, 9)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    monkeypatch.setattr("cluster.workers.trials.launch.run_trials", runs)
    return runs


@pytest.fixture
def settings(tmp_path: Path) -> FinetuningSettings:
    write_reviews(tmp_path / "data")
    (tmp_path / "reviews.yaml").write_text(
        "name: reviews\nmax_length: 32\nclassification: {train: train.jsonl, dev: dev.jsonl}\n"
        "engine: {precision: fp32}\ntraining: {examples_per_step: 4}\n"
    )
    return FinetuningSettings((tmp_path / "reviews.yaml",), seeds=2, data=tmp_path / "data", grid=RATES)


@pytest.fixture
def tune(tmp_path: Path, bert: Path, runs: Runs, settings: FinetuningSettings) -> Callable[..., FinetuningScore]:
    """Fine-tunes by the settings, of which some are changed."""

    def tune(folder: str = "out", record: Record | None = None, **changes: Any) -> FinetuningScore:
        asked = replace(settings, **changes)
        return finetuning_scores(bert, tmp_path / folder, "n", asked, record=record)["reviews"]

    return tune


def test_each_start_takes_its_best_rate_by_a_seed_that_is_not_scored(tmp_path: Path, runs: Runs, tune: Any) -> None:
    record = Record(tmp_path / "record.json", MODEL)
    score = tune(record=record)
    assert score.pretrained == pytest.approx((0.8, 0.81))
    assert score.random == pytest.approx((0.499, 0.509))
    assert score.chosen == {"pretrained": "learning_rate 1e-3", "random": "learning_rate 1e-4"}
    tried = [(random, rate, 1000) for random in (False, True) for rate in (1e-4, 1e-3, 1e-2)]
    scored = [(random, (1e-3, 1e-4)[random], seed) for random in (False, True) for seed in (0, 1)]
    assert sorted(runs.ran) == sorted([*tried, *scored])
    assert FinetuningScore.from_data(record.content["finetuning"]["scores"]["reviews"]) == score
    rows = dict(score_rows([record.content]))
    assert rows["  chosen"] == ["learning_rate 1e-3"]
    assert rows["  chosen from random weights"] == ["learning_rate 1e-4"]
    runs.ran.clear()
    assert tune() == score
    assert runs.ran == []
    tune(seeds=3)
    assert sorted(runs.ran) == [(False, 1e-3, 2), (True, 1e-4, 2)]


def test_scores_with_and_without_a_grid_have_marks(tmp_path: Path, tune: Any) -> None:
    records = [Record(tmp_path / f"{name}.json", {**MODEL, "name": name}) for name in ("with", "without")]
    for record, grid in zip(records, (RATES, {}), strict=True):
        tune(record=record, grid=grid)
    notes = ["reviews [1]: grid training.learning_rate=1e-4,1e-3,1e-2", "reviews [2]: grid none"]
    assert score_notes([record.content for record in records]) == notes


def test_a_rate_that_diverges_is_not_chosen(runs: Runs, tune: Any) -> None:
    runs.errors = {1e-3: DivergedError("loss is nan")}
    assert tune().chosen["pretrained"] == "learning_rate 1e-4"
    runs.errors = dict.fromkeys((1e-4, 1e-3, 1e-2), DivergedError("loss is nan"))
    with pytest.raises(DivergedError, match="6 of 6 runs failed"):
        tune("other")


def test_nothing_is_chosen_until_all_have_run(runs: Runs, tune: Any) -> None:
    runs.errors = {1e-2: MachineError("no memory")}
    with pytest.raises(MachineError, match="2 of 6 runs failed"):
        tune()
    runs.errors = {1e-2: StoppedError("stopped.")}
    with pytest.raises(StoppedError):
        tune()
    assert len(runs.ran) == 6, "no run was scored"
    runs.errors = {}
    assert tune().chosen["pretrained"].endswith("1e-3")


@pytest.mark.parametrize("grid", [{}, RATES])
def test_a_second_look_keeps_other_seeds_and_random_weights(tmp_path: Path, runs: Runs, tune: Any, grid: Any) -> None:
    first = tune(grid=grid)
    runs.ran.clear()
    quick = tune(record=Record(tmp_path / "record.json", MODEL), grid=grid, seeds=1, random=False)
    assert (quick.pretrained, quick.random) == (first.pretrained, first.random)
    assert runs.ran == []


def test_only_settings_of_training_are_chosen(runs: Runs, tune: Any) -> None:
    refused("--grid-set max_length: only settings of training can be chosen", tune, grid={"max_length": ["16"]})
    steps = {"grid": {"training.epochs": ["1", "2"]}, "overrides": ("training.steps=2",)}
    refused("a grid of epochs has no effect", tune, **steps)
    assert runs.ran == []
