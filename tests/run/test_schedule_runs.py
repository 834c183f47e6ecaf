"""Ramps of the batch size and averaged weights: what they are, and that runs with them resume bitwise."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from pretrain.batches.loader import BatchMaker, Loader
from pretrain.checkpoint import hf, store
from pretrain.common.errors import InputError
from pretrain.config import PhaseConfig, PretrainConfig
from pretrain.corpus.shards import open_shards
from tests.distributed import run_workers
from tests.starts import Start, all_records, pretraining, records, starts

STEPS = 6  # over both phases
SIZES = [4, 4, 8, 12]  # of the first phase
AVERAGED = 2  # the last steps: the second phase, of which the first one's mean is no part


def phase_of(**changes: Any) -> PhaseConfig:
    usual = {"sequence_length": 32, "global_sequences": 12, "steps": 9, "peak_learning_rate": 1e-3}
    return PhaseConfig.model_validate({**usual, **changes})


# ---- ramps


@pytest.mark.parametrize(
    ("full", "first", "ramp", "steps"), [(12, 4, 3, 9), (4608, 768, 50, 60), (4928, 448, 10, 10), (4, 1, 3, 20)]
)
def test_a_ramp_has_equally_many_steps_at_each_size(full: int, first: int, ramp: int, steps: int) -> None:
    phase = phase_of(global_sequences=full, ramp_from=first, ramp_steps=ramp, steps=steps)
    sizes = [phase.sequences_at(step) for step in range(steps)]
    assert sizes == sorted(sizes)
    assert (sizes[0], set(sizes[ramp:])) == (first, {full} if steps > ramp else set())
    assert sorted(set(sizes[:ramp])) == list(range(first, full, first))
    counts = [len(list(same)) for _, same in itertools.groupby(sizes[:ramp])]
    assert max(counts) - min(counts) <= 1
    before = [0, *itertools.accumulate(sizes)]
    assert [phase.first_sample(step) for step in range(steps + 1)] == before
    assert phase.sequences == before[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ramp_from": 4}, "ramp_from .4. and ramp_steps .0. go together"),
        ({"ramp_steps": 4}, "ramp_from .0. and ramp_steps .4. go together"),
        ({"ramp_from": 5, "ramp_steps": 4}, "ramp_from .5. must divide global_sequences .12."),
        ({"ramp_from": 12, "ramp_steps": 4}, "and be smaller"),
        ({"ramp_from": 2, "ramp_steps": 4}, "ramp_steps .4. must be at least 5"),
        ({"ramp_from": 4, "ramp_steps": 10}, "at most steps .9."),
    ],
)
def test_a_ramp_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        phase_of(**changes)


def test_the_first_batch_of_a_ramp_needs_a_sequence_for_each_worker(corpus: Path, tmp_path: Path) -> None:
    values = settings(tmp_path, tmp_path / "run", scheduling={"workers": 6})
    with pytest.raises(ValueError, match=r"phases.0.ramp_from \(4\) is less than the number of workers \(6\)"):
        PretrainConfig.model_validate(values)
    # torchrun may start more workers than the config has.
    config = PretrainConfig.model_validate(settings(corpus, tmp_path))
    maker = BatchMaker(open_shards(corpus, "train"), config, 0, seed=0, rank=0, world_size=5)
    with pytest.raises(InputError, match=r"phases.0.ramp_from \(4\) is less than the number of workers \(5\)"):
        maker.check_batch()


def test_batches_of_a_ramp_follow_each_other_without_a_gap(corpus: Path, tmp_path: Path) -> None:
    config = PretrainConfig.model_validate(settings(corpus, tmp_path))
    shards = open_shards(corpus, "train")

    def found(**more: Any) -> list[tuple[int, int]]:
        loader = Loader(shards, config, 0, rank=0, world_size=1, **more)
        return [(batch.first_sample, batch.sequences) for batch in loader]

    assert found() == [(0, 4), (4, 4), (8, 8), (16, 12)]
    assert found(start_step=2) == [(8, 8), (16, 12)]


# ---- whole runs


def settings(corpus: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A run of two phases with Muon, a ramp in the first one, and averages of its last step and of the second one."""
    values = pretraining(corpus, run_dir, [(32, 12, 4), (64, 6, 2)], **changes)
    values["phases"][0] |= {"ramp_from": 4, "ramp_steps": 3, "averaged_share": 0.25}
    values["phases"][1] |= {"averaged_share": 1.0}
    more = {
        "optimizer": {"name": "muon"},
        "checkpoint": {"every_steps": 1, "keep_last": 9},
        "engine": {**values["engine"], "micro_batch_tokens": 256, "zero_stage": 1},
    }
    return {**values, **more}


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Path]:
    """Run folders by number of workers: never interrupted, and stopped in the ramp and while weights are averaged."""
    root = tmp_path_factory.mktemp("runs")
    found = {}
    for world in (1, 2):
        through, broken = (found.setdefault((world, name), root / f"{world}-{name}") for name in ("through", "broken"))
        again = settings(corpus, broken)
        again["checkpoint"] |= {"every_steps": 100, "every_minutes": 1e-9}  # after each step, too
        parts = [Start(again, stop_at=2), Start(again, resume=True, stop_at=3), Start(again, resume=True)]
        plan = [Start(settings(corpus, through)), *parts]
        for outcomes in run_workers(world, starts, plan):
            assert [outcome.partition(":")[0] for outcome in outcomes] == ["", "StoppedError", "StoppedError", ""]
        # As the command line does before the workers start.
        (through / "config.yaml").write_text(yaml.safe_dump(settings(corpus, through)))
    return found


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / store.name_of(step)


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_is_bitwise_one_never_interrupted(runs, world: int) -> None:
    through, broken = runs[world, "through"], runs[world, "broken"]
    assert [one["loss"] for one in records(through)] == [one["loss"] for one in records(broken)]
    written = {path.name: path.read_bytes() for path in checkpoint(through, STEPS).glob("*.safetensors")}
    assert written == {path.name: path.read_bytes() for path in checkpoint(broken, STEPS).glob("*.safetensors")}
    average = [[one for one in all_records(run) if one.get("event") == "average"] for run in (through, broken)]
    (ours,), (theirs,) = average
    assert ours["message"] == theirs["message"]


def test_losses_do_not_depend_on_the_number_of_workers(runs) -> None:
    one, two = (records(runs[world, "through"]) for world in (1, 2))
    assert [record["samples"] for record in one] == list(itertools.accumulate([*SIZES, 6, 6]))
    for first, second in zip(one, two, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], abs=1e-5)
        assert second["samples"] == first["samples"]


def test_the_average_is_the_mean_of_the_last_steps_weights(runs) -> None:
    for (world, _), run in runs.items():
        weights = [store.read_weights(checkpoint(run, step)) for step in range(STEPS - AVERAGED + 1, STEPS + 1)]
        averaged = store.read_weights(checkpoint(run, STEPS), averaged=True)
        assert store.read_state(checkpoint(run, STEPS))["averaged"] == AVERAGED
        for name, mean in averaged.items():
            expected = torch.stack([each[name] for each in weights]).double().mean(0).float()
            torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-8, msg=f"{world}: {name}")
        assert not torch.equal(averaged["embeddings.word"], weights[-1]["embeddings.word"])


def test_the_average_is_evaluated_and_exported(runs, tmp_path: Path) -> None:
    run = runs[2, "through"]
    hf.export_run(run, tmp_path / "averaged", averaged=True)
    hf.export_run(run, tmp_path / "last")
    word = "bert.embeddings.word_embeddings.weight"
    found, last = (load_file(tmp_path / name / "model.safetensors")[word] for name in ("averaged", "last"))
    averaged = store.read_weights(checkpoint(run, STEPS), averaged=True)
    assert torch.equal(found, averaged["embeddings.word"])
    assert not torch.equal(found, last)
    (event,) = [one for one in all_records(run) if one.get("event") == "average"]
    evaluation = records(run, "validation")[-1]
    assert event["loss"] != evaluation["loss"]
    assert f"{event['loss']:.4f} ({evaluation['loss']:.4f} without averaging)" in event["message"]
    card = (tmp_path / "averaged/README.md").read_text()
    assert f"{event['mlm_loss']:.4f}" in card
    assert f"the mean of the weights after its last {AVERAGED} steps" in card


def test_a_checkpoint_without_an_average_is_refused(runs, tmp_path: Path) -> None:
    run = runs[1, "through"]
    assert not any("average" in key for file in checkpoint(run, 2).glob("*.safetensors") for key in load_file(file))
    with pytest.raises(InputError, match=r"step-00000002: has no averaged weights. Use a checkpoint from the end"):
        hf.export_run(run, tmp_path / "out", "step-00000002", averaged=True)


def test_a_mean_has_the_last_steps_of_its_phase_alone(corpus: Path, tmp_path: Path) -> None:
    values = pretraining(corpus, tmp_path / "run", [(32, 12, 10), (32, 12, 8), (32, 12, 6)])
    for phase, share in zip(values["phases"], (0.5, 1.0, 0.5), strict=True):
        phase["averaged_share"] = share
    config = PretrainConfig.model_validate(values)
    assert [config.averaged_steps(step) for step in (4, 5, 9, 10, 17, 18, 20, 21, 23)] == [0, 1, 5, 1, 8, 0, 0, 1, 3]


def test_a_run_decays_as_its_timescale_says(corpus: Path, tmp_path: Path) -> None:
    # 4 steps at 1e-3: 1 / (0.5 * 4 * 1e-3) = 500
    decays = {"timescale": {"decay_timescale": 0.5}, "decay": {"weight_decay": 500.0}, "default": {}}
    runs = [
        pretraining(corpus, tmp_path / name, [(32, 8, 4)], optimizer={"name": "muon", **values})
        for name, values in decays.items()
    ]
    assert run_workers(1, starts, [Start(run) for run in runs]) == [[""] * 3]
    timescale, decay, default = ([one["loss"] for one in records(tmp_path / name)] for name in decays)
    assert timescale == decay
    assert timescale[2:] != default[2:]
