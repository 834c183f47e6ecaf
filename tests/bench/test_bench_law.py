"""`bench law`: which runs are points, what is fitted and predicted, the file and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned_laws import PLANTED

from pretrain.common.errors import InputError
from pretrain.config import PretrainConfig, load_config
from pretrain.planning import published
from pretrain.planning.candidates import effective_size, shape_name, with_shape, works
from pretrain.planning.text import PhaseText, RunText
from pretrain.planning.work import optimizer_flops
from tests.bench.__main__ import main
from tests.bench.law.command import fit_runs
from tests.bench.law.points import Choice, read_runs
from tests.bench.speedrun import results
from tests.bench.speedrun.results import Results, Trial
from tests.bench.speedrun.scores import Scores

CONFIG = Path(__file__).parents[2] / "configs" / "pretrain" / "mini.yaml"
LENGTH, UNIQUE = 100.0, 14e6
TEXT = RunText((PhaseText(LENGTH, UNIQUE / LENGTH),), "", True)
SHAPES = ((2, 128), (4, 192), (4, 256), (6, 384))


def make_trial(config: PretrainConfig, budget: float, *, worse: float = 1.0, **values: Any) -> Trial:
    """A run that obeys the planted law, or is worse by a factor."""
    size, one = effective_size(config, works(config, TEXT)), works(config, TEXT)[0]
    per_step = one.executed / one.steps
    steps = round(budget / per_step)
    tokens = round(steps * one.tokens / one.steps)
    name = values.pop("trial", shape_name(config.model))
    common = {
        "trial": name,
        "run": f"{name}-{budget:g}-s0",
        "seed": 0,
        "budget": budget,
        "flops": steps * per_step,
        "steps": steps,
        "tokens": tokens,
        "epochs": tokens / UNIQUE,
        "minutes": 5.0,
        "words": 10,
        "ground": "x",
        "scores": Scores(bits_per_character=worse * float(PLANTED.loss(size, tokens, UNIQUE))),
        "config": config.model_dump(mode="json"),
        "machine": {"started": "2026-11-24T10:00:00", "cpu": "A", "cpu_cores": 2, "gpus": [], "git_commit": "a" * 40},
    }
    return Trial(**{**common, **values})


def write_trials(folder: Path, *more: Trial) -> Path:
    config = load_config(CONFIG)
    trials = [make_trial(with_shape(config, *shape), flops) for shape in SHAPES for flops in (5e12, 2e13, 1e14)]
    folder.mkdir(exist_ok=True)
    results.write(Results(trials=(*trials, *more)), folder / results.RESULTS)
    return folder


def test_points_are_the_runs_of_each_size(tmp_path: Path) -> None:
    """A worse run of one size and budget, one with no score and one with a teacher are none; sizes omit Muon."""
    config = load_config(CONFIG)
    batch = config.phases[0].model_copy(update={"global_sequences": 16, "ramp_from": 0, "ramp_steps": 0})
    worse = make_trial(config.model_copy(update={"phases": (batch,)}), 2e13, worse=1.1, trial="b16")
    taught = make_trial(config, 3e13, trial="taught")
    taught = taught.model_copy(update={"config": {**taught.config, "distillation": {"teacher": "bert"}}})
    diverged = make_trial(config, 4e13, trial="bad", flops=0.0, remarks="the training diverged")
    newer = make_trial(config, 5e13, trial="newer")
    newer = newer.model_copy(update={"config": {**newer.config, "unknown": 1}})
    no_number = make_trial(config, 6e13, trial="nan", scores=Scores(bits_per_character=float("nan")))
    folder = write_trials(tmp_path / "out", worse, taught, diverged, newer, no_number)
    runs, left_out = read_runs([folder], Choice())
    assert len(runs) == 12
    assert [line.split(":")[0] for line in left_out] == [
        *("taught-3e+13-s0", "bad-4e+13-s0", "newer-5e+13-s0", "nan-6e+13-s0"),
        worse.run,
    ]
    assert left_out[3].endswith("its score is nan bits per character")
    assert left_out[-1].endswith("4x256-2e+13-s0 is better")
    assert "another version" in left_out[2]
    for run in runs:
        assert run.point.size == pytest.approx(effective_size(run.config, works(run.config, TEXT)), rel=1e-3)
        assert run.point.unique == pytest.approx(UNIQUE)
        assert 6 * run.point.size * run.point.tokens < run.point.flops
        assert optimizer_flops(run.config) > 0
    assert [run.point.flops for run in runs] == sorted(run.point.flops for run in runs)
    few, _ = read_runs([folder], Choice(only=("b16", "4x*"), below=2.0))
    assert {run.trial.trial for run in few} <= {"b16", "4x192", "4x256"}
    assert all(run.point.loss < 2.0 for run in few)


def test_recomputed_layers_make_no_larger_point(tmp_path: Path) -> None:
    engine = load_config(CONFIG).engine
    config = load_config(CONFIG, ["engine.activation_checkpointing=true"])
    folder = write_trials(tmp_path / "out", make_trial(config, 7e13, trial="again"))
    (again,) = read_runs([folder], Choice(only=("again",)))[0]
    plain = config.model_copy(update={"engine": engine})
    assert again.config.engine.activation_checkpointing
    assert again.point.size == pytest.approx(effective_size(plain, works(plain, TEXT)), rel=2e-3)


def test_a_law_is_fitted_predicts_and_is_written(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(published, "PUBLISHED", tmp_path / "published.json")
    folder = write_trials(tmp_path / "out")
    words = ["law", str(folder), "--holdout", "4x256-1e+14-s0", "--holdout", "6x384"]
    assert main([*words, "--write"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("held out\n") == 4
    assert "largest error on 8 fitted runs: 0.0%" in printed
    law = published.read(folder / "law.json")
    assert law == published.read(tmp_path / "published.json") == published.read()
    assert [point.run for point in law.held_out] == [point.run for point in law.points if point.held_out]
    assert len(law.fitted) == 8
    # The larger size was not in the fit, and is predicted within 2 %.
    assert law.error(law.held_out) < 0.02
    assert (law.machine, law.commit, law.date) == ("2 cores of A", "aaaaaaa", "2026-11-24")
    assert law.recipe.values["optimizer"] == "muon"
    # Held-out runs do not move the law.
    moved = write_trials(tmp_path / "moved", make_trial(load_config(CONFIG), 3e13, worse=1.3, trial="odd"))
    assert main([*words[:1], str(moved), *words[2:], "--holdout", "odd", "--out", str(tmp_path / "other")]) == 0
    assert published.read(tmp_path / "other" / "law.json").coefficients == law.coefficients
    assert published.read() == law, "published only with --write"


def test_runs_of_one_large_shape_are_of_one_size(tmp_path: Path) -> None:
    """Its size varies a little with the steps."""
    runs, _ = read_runs([write_trials(tmp_path / "out")], Choice())
    points = [run.point.model_copy(update={"size": 62.7e6 + 2e3 * number}) for number, run in enumerate(runs)]
    with pytest.raises(InputError, match="12 runs of 1 size to fit"):
        fit_runs([replace(run, point=point) for run, point in zip(runs, points, strict=True)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none: has no speedrun.json. Give the --out of a `bench speedrun`."),
        (["out", "--holdout", "x"], "--holdout x: no run or trial has this name; there are 2x128, 4x192, 4x256, 6x384"),
        (["out", "--only", "2x128"], "3 runs of 1 size to fit; expected at least 6 of 3 sizes"),
        (["out", "--holdout", "*"], "0 runs of 0 sizes to fit"),
        (["out", "other"], "have trials on different texts"),
        (["out", "--out", "out/speedrun.json"], "out/speedrun.json: cannot write here"),
    ],
)
def test_what_is_no_ground_for_a_law_is_refused(words, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_trials(tmp_path / "out")
    write_trials(tmp_path / "other", make_trial(load_config(CONFIG), 1e13, ground="y"))
    assert main(["law", *words]) == 2
    assert message in capsys.readouterr().err
