"""When a loss is a spike, and what a run does about it: it goes back, skips the data, and ends after too many."""

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretrain.batches.loader import BatchMaker
from pretrain.checkpoint.store import read_weights
from pretrain.config import PretrainConfig, SpikeConfig
from pretrain.corpus.shards import open_shards
from pretrain.run import loop, stragglers
from pretrain.run.spikes import LOSS_WINDOW, SkipCounter, is_spike
from pretrain.run.stragglers import RankTimes, find_stragglers
from tests.distributed import run_workers
from tests.starts import Start, all_records, make_starts, pretraining, records


def usual(seed: int, level: float = 3.0, noise: float = 0.05) -> list[float]:
    generator = random.Random(seed)
    return [level + generator.gauss(0, noise) for _ in range(LOSS_WINDOW)]


@pytest.mark.parametrize("seed", range(20))
def test_a_much_higher_loss_is_a_spike_and_noise_is_not(seed: int) -> None:
    before = usual(seed)
    assert not any(is_spike(before, loss, SpikeConfig()) for loss in usual(seed + 100))
    assert not is_spike(before, 1.0, SpikeConfig()), "a fall is none"
    assert is_spike(before, 3.0 * 1.5, SpikeConfig())
    assert is_spike([*before[:-3], 9.0, 9.0, 9.0], 4.5, SpikeConfig()), "odd losses among them move the bound little"


def test_losses_that_the_settings_do_not_count_as_spikes() -> None:
    before = usual(0)
    assert not is_spike(before[:31], 100.0, SpikeConfig()), "too few to tell"
    assert not is_spike(before, 100.0, SpikeConfig(spike_sigmas=0))
    assert not is_spike([3.0] * 64, 3.5, SpikeConfig()), "many deviations, but a small share"
    assert is_spike(before, math.inf, SpikeConfig())


def test_stragglers() -> None:
    assert find_stragglers([1.0, 1.1, 0.9, 2.0], 1.5) == {3: pytest.approx(2.0)}
    assert find_stragglers([1.0, 1.2], 1.5) == {}
    assert find_stragglers([0.001, 0.003], 1.5) == {}, "milliseconds are noise"
    assert find_stragglers([1.0], 1.5) == {}


def test_a_straggler_is_named_once_when_it_has_been_slow_for_a_while(monkeypatch) -> None:
    now, logged = [0.0], []
    monkeypatch.setattr(stragglers.time, "monotonic", lambda: now[0])
    times = RankTimes(SimpleNamespace())  # type: ignore[arg-type]
    recorder = SimpleNamespace(log=logged.append)

    def record(second: float, forward: list[float]) -> int:
        now[0] = second
        times.report_stragglers(forward, recorder, int(second))  # type: ignore[arg-type]
        return len(logged)

    assert [record(second / 10, [0.1, 0.3]) for second in range(95)] == [0] * 95, "many records, not 10 s"
    assert record(9.6, [0.1, 0.1]) == 0
    assert [record(second, [0.1, 0.3]) for second in (10, 15, 20.5, 30, 60)] == [0, 0, 1, 1, 1]
    assert record(61, [0.1, 0.1]) == 1
    assert [record(second, [0.3, 0.1]) for second in (100, 200, 300)] == [1, 1, 2], "three records"
    assert logged[-1]["rank"] == 0


# ---- whole runs


def settings(corpus: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    small = {"model__layers": 1, "checkpoint__every_steps": 10}
    return pretraining(corpus, run_dir, [(32, 12, 40), (32, 12, 30)], **{**small, **changes})


Bad = dict[tuple[int, int], float]
"""(first sample of the run's text, sequences) of a batch -> what its losses are multiplied by."""


def starts_with_bad_data(given: list[tuple[Start, Bad]]) -> list[str]:
    return [_start_with_bad_data(start, bad) for start, bad in given]


def _start_with_bad_data(start: Start, batches: Bad) -> str:
    from pretrain.run import train

    config = PretrainConfig.model_validate(start.config)
    whole_run = config.phases[0].model_copy(update={"steps": 10**4})
    maker = BatchMaker(
        open_shards(config.corpus.folder, "train"),
        config.model_copy(update={"phases": (whole_run,)}),
        0,
        seed=config.seed,
        rank=0,
        world_size=1,
    )
    # Of whichever sequence a worker has first.
    bad = {
        int(batch.token_keys[begin]): factor
        for where, factor in batches.items()
        for batch in maker.make(*where).micro_batches
        for begin in batch.cu_seqlens[:-1].tolist()
    }
    whole, whole_totals = train.Pretraining.loss_weights, train.Pretraining.totals

    def totals(self: Any, output: Any) -> torch.Tensor:
        factor = bad.get(self.now, 1.0)
        return whole_totals(self, output) * (factor if math.isfinite(factor) else 1.0)

    def loss_weights(self: Any, step: Any) -> tuple[float, ...]:
        self.now = int(step.micro_batches[0].token_keys[0])
        return tuple(weight * bad.get(self.now, 1.0) for weight in whole(self, step))

    train.Pretraining.loss_weights = loss_weights  # type: ignore[method-assign]
    train.Pretraining.totals = totals  # type: ignore[method-assign]
    try:
        return make_starts(train.main, [start])[0]
    finally:
        train.Pretraining.loss_weights, train.Pretraining.totals = whole, whole_totals  # type: ignore[method-assign]


def test_a_spike_is_rolled_back_and_its_data_skipped(corpus: Path, tmp_path: Path) -> None:
    whole, again = settings(corpus, tmp_path / "whole"), settings(corpus, tmp_path / "again")
    bad = {(37 * 12, 12): 30.0}  # step 38 of the first phase
    parts = [Start(again, stop_at=40), Start(again, resume=True, stop_at=12), Start(again, resume=True)]
    outcomes = run_workers(1, starts_with_bad_data, [(start, bad) for start in (Start(whole), *parts)])[0]
    assert [outcome[:12] for outcome in outcomes] == ["", "StoppedError", "StoppedError", ""]
    found = records(tmp_path / "whole")
    assert [one["step"] for one in found] == list(range(1, 71)), "each step once"
    assert max(one["loss"] for one in found) < 10
    event = next(one for one in all_records(tmp_path / "whole") if one.get("event") == "rollback")
    assert (event["step"], event["from_step"], event["passed_over_steps"]) == (30, 38, 8)
    assert [one["loss"] for one in found] == [one["loss"] for one in records(tmp_path / "again")], "exact resume"


def test_rollbacks_that_a_checkpoint_followed_do_not_end_a_run(corpus: Path, tmp_path: Path) -> None:
    config = pretraining(corpus, tmp_path / "run", [(32, 12, 36)], model__layers=1, checkpoint__every_steps=4)
    bad = {(number * 12, 12): math.nan for first in (6, 20, 34, 48) for number in range(first, first + 5)}
    assert run_workers(1, starts_with_bad_data, [(Start(config), bad)]) == [[""]]
    events = [one for one in all_records(tmp_path / "run") if one.get("event") == "rollback"]
    assert [(one["step"], one["from_step"]) for one in events] == [(4, 11), (12, 18), (20, 26), (28, 34)]


def test_saves_and_stops_wait_for_a_good_step(corpus: Path, tmp_path: Path) -> None:
    config = settings(corpus, tmp_path / "run", checkpoint__keep_last=9, checkpoint__every_steps=6)
    bad = {(number * 12, 12): math.nan for number in (5, 6, 12, 13)}  # steps 6, 7, 13 and 14
    (outcome,) = run_workers(1, starts_with_bad_data, [(Start(config, stop_at=13), bad)])[0]
    assert outcome.startswith("StoppedError: stopped at step 15 of 70; checkpoint step-00000015 is saved.")
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names[-3:] == ["step-00000008", "step-00000012", "step-00000015"]


def starts_with_a_bad_update(given: list[Start]) -> list[str]:
    """Starts in whose first one the update of step 5 spoils a weight, so that every later loss is NaN."""
    from pretrain.run import train

    launch, spoilt = loop.Fit.launch_step, list[int]()

    def launch_step(self: Any, number: int, *others: Any) -> Any:
        launched = launch(self, number, *others)
        if number == 4 and not spoilt:
            spoilt.append(number)
            for fragment in self.engine.fragments():
                if fragment.name == "embeddings.norm_weight":
                    fragment.tensors["weight"].fill_(math.inf)
            self.engine.layout.refresh(None)
            self.engine.layout.wait_for_weights()
        return launched

    loop.Fit.launch_step = launch_step  # type: ignore[method-assign]
    try:
        return make_starts(train.main, given)
    finally:
        loop.Fit.launch_step = launch  # type: ignore[method-assign]


@pytest.mark.parametrize(("steps", "noticed"), [(20, 10), (6, 6)])
def test_bad_weights_are_never_saved(corpus: Path, tmp_path: Path, steps: int, noticed: int) -> None:
    """Saves are due at steps 6 and 9, after the update and before the rollback; the run ends at step 6 or later."""
    saved = {"every_steps": 3, "keep_last": 1}
    config = pretraining(corpus, tmp_path / "run", [(32, 12, steps)], model__layers=1, checkpoint=saved)
    assert run_workers(1, starts_with_a_bad_update, [Start(config)]) == [[""]]
    events = [one for one in all_records(tmp_path / "run") if one.get("event") == "rollback"]
    assert [(one["step"], one["from_step"]) for one in events] == [(3, noticed)]
    weights = read_weights(tmp_path / f"run/checkpoints/step-{steps:08d}")
    assert all(weight.isfinite().all() for weight in weights.values())


def test_a_phase_may_begin_with_higher_losses(corpus: Path, tmp_path: Path) -> None:
    """Longer sequences have them: BERT's second phase. No rollback could help."""
    phases = [(32, 12, 40), (32, 11, 30)]
    config = pretraining(corpus, tmp_path / "run", phases, model__layers=1, checkpoint__every_steps=10)
    second = {(480 + 11 * number, 11): 3.0 for number in range(30)}
    assert run_workers(1, starts_with_bad_data, [(Start(config), second)]) == [[""]]
    found = records(tmp_path / "run")
    assert found[41]["loss"] > 2.5 * found[39]["loss"]
    assert not [one for one in all_records(tmp_path / "run") if one.get("event") == "rollback"]


def test_an_fp16_scale_that_does_not_fall_is_not_a_search() -> None:
    def skipped(scales: list[float]) -> list[bool]:
        counter = SkipCounter()
        return [counter.record_skip(scale) for scale in scales]

    assert not any(skipped([65536, 65536, 32768, 16384, 8192])), "hysteresis, then a search"
    assert skipped([2, 1, 1]) == [False, True, True]
    assert skipped([1024] * 5) == [False, False, False, True, True], "a fixed scale"
    counter = SkipCounter()
    assert not any(counter.record_skip(1024) for _ in range(3))
    counter.record_applied()
    assert not any(counter.record_skip(1024) for _ in range(3)), "an applied step starts the count again"


STAGES = [(stage, precision) for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]
SKIPPED, FROM, TO = 2, 7, 30  # the batches of NaN: one, and many


@pytest.fixture(scope="module")
def with_nan(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], tuple[Path, str]]:
    """By (stage, precision): run folder and outcome of a run with a batch of NaN, and with many later."""
    root = tmp_path_factory.mktemp("nan")
    batches = {(number * 12, 12): math.nan for number in (SKIPPED, *range(FROM, TO))}
    given = []
    for stage, precision in STAGES:
        values = pretraining(corpus, root / f"{stage}-{precision}", [(32, 12, 40)], model__layers=1)
        values["engine"] |= {"zero_stage": stage, "precision": precision}
        values["checkpoint"]["every_steps"] = 5
        given.append((Start(values), batches))
    outcomes = run_workers(1, starts_with_bad_data, given)[0]
    folders = [Path(start.config["run_dir"]) for start, _ in given]
    return dict(zip(STAGES, zip(folders, outcomes, strict=True), strict=True))


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_a_batch_of_nan_is_skipped(with_nan: Any, stage: int, precision: str) -> None:
    run_dir, _ = with_nan[stage, precision]
    before = [one for one in records(run_dir) if one["step"] <= 5]  # where it goes back to
    assert before[-1]["skipped_steps"] == 1
    assert all(math.isfinite(one["loss"]) for one in before if one["step"] != SKIPPED + 1)
    weights = read_weights(run_dir / "checkpoints/step-00000005")
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_nan_in_a_row_rolls_back_and_ends_the_run_after_too_many(with_nan: Any, stage: int, precision: str) -> None:
    run_dir, outcome = with_nan[stage, precision]
    assert outcome.startswith("DivergedError: 5 steps in a row up to step 10 had a loss or gradient that is not finite")
    assert "after 3 rollbacks. The last good checkpoint is step-00000005" in outcome
    events = [one for one in all_records(run_dir) if one.get("event") == "rollback"]
    assert [(one["step"], one["from_step"]) for one in events] == [(5, 12), (5, 10), (5, 10)]
