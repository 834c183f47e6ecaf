"""Several runs of one command: seeds, grids, GLUE; their tables, what is kept, what is not run again."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from cluster.workers.trials.driver import trials_that_fit
from cluster.workers.trials.request import TrialEvent
from finetune.experiments import glue_runs, results, sweep, trials, trials_view
from finetune.experiments.candidates import candidates, rank, to_drop
from finetune.experiments.grid import GridPoint, expand, parse_grid
from finetune.experiments.outcomes import Outcome, Spread, Trial, failure, spreads
from finetune.experiments.trials import TrialRuns, degenerate
from finetune.tasks.classification import ClassificationSettings
from finetune.tasks.datasets import glue
from finetune.training import runs
from finetune.training.config import GRIDS, FinetuneConfig
from pretrain.common.errors import DivergedError, InputError, MachineError, StoppedError
from tests.tasks.refusals import refused
from tests.tiny_checkpoints import make_bert

ROOT = Path(__file__).parents[2]
WORDS = ("good", "fine", "great", "bad", "poor", "awful")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A released checkpoint of a BERT of two layers, with random weights."""
    return make_bert(tmp_path_factory.mktemp("released"), positions=32)


def write_set(path: Path, rows: int, labels: Sequence[str] = ("neg", "pos")) -> None:
    lines = []
    for row in range(rows):
        word = WORDS[row % 3 + 3 * (row % 2)]
        lines.append(f"the film was {word} and a plot\t{labels[1 - row % 2]}")
    path.write_text("text\tlabel\n" + "\n".join(lines) + "\n")


@pytest.fixture
def work(tmp_path: Path, start: Path) -> Path:
    """A folder with a config and its files."""
    write_set(tmp_path / "train.tsv", 32)
    write_set(tmp_path / "dev.tsv", 10)
    write_config(tmp_path, start)
    return tmp_path


def write_config(folder: Path, start: Path, **changes: Any) -> None:
    values = {
        "name": "tiny",
        "start_from": str(start),
        "max_length": 16,
        "classification": {"train": "train.tsv", "dev": "dev.tsv"},
        "training": {"examples_per_step": 8, "learning_rate": 1e-3, "epochs": 1},
        "engine": {"precision": "fp32", "compile": False, "micro_batch_tokens": 512},
        "tracking": {"wandb": "off", "log_every_steps": 1},
        **changes,
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))


def finetune(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "finetune.cli", *arguments]
    return subprocess.run(command, cwd=work, env=environment(), capture_output=True, text=True, timeout=900)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def scores(folder: Path) -> dict[str, float]:
    return json.loads((folder / "scores.json").read_text())["scores"]["dev"]


# ---------------------------------------------------------------- whole commands


def test_seeds_finish_or_fail_and_what_is_done_is_not_run_again(work: Path, monkeypatch: Any, capsys: Any) -> None:
    """Seeds 0 and 1 finish; seed 2 finds a damaged file in its folder, a mistake of the user's."""
    (work / "runs/tiny/seed-2").mkdir(parents=True)
    (work / "runs/tiny/seed-2/metrics.jsonl").write_text("damaged\n{}\n")
    at_once = str(min(2, len(os.sched_getaffinity(0))))
    first = finetune(work, "finetune", "tiny.yaml", "--seeds", "3", "--parallel", at_once)
    assert first.returncode == InputError.exit_code, first.stderr + first.stdout
    assert "1 of 3 runs failed" in first.stderr
    assert "seed 2  failed: runs/tiny/seed-2/metrics.jsonl:1: not a JSON object." in first.stdout
    summary = json.loads((work / "runs/tiny/summary.json").read_text())
    found = [scores(work / f"runs/tiny/seed-{seed}") for seed in (0, 1)]
    made = [(work / f"runs/tiny/seed-{seed}/predictions/dev.jsonl").read_text() for seed in (0, 1)]
    assert made[0] != made[1], "the seeds did not differ"
    for name in ("accuracy", "f1"):
        values = [one[name] for one in found]
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        expected = {"runs": 2, "mean": mean, "deviation": deviation, "least": min(values), "most": max(values)}
        assert summary["scores"]["dev"][name] == pytest.approx(expected)
    assert [summary[name] for name in ("runs", "done", "failed", "to_run")] == [3, 2, 1, 0]
    assert [one["error"] is None for one in summary["each"]] == [True, True, False]
    configs = [yaml.safe_load((work / f"runs/tiny/seed-{k}/config.yaml").read_text()) for k in (0, 1)]
    assert [one["seed"] for one in configs] == [0, 1]
    assert [one["name"] for one in configs] == ["tiny-seed-0", "tiny-seed-1"]
    assert {one["tracking"]["group"] for one in configs} == {"tiny"}

    # Again, the two that are done: neither Ray nor training.
    before = times(work / "runs/tiny")
    monkeypatch.chdir(work)
    sweep.run_seeds(sweep.load_config("tiny.yaml"), 2)
    out = capsys.readouterr().out
    assert "2 runs, 2 done, 0 failed" in out
    mean = statistics.mean(one["accuracy"] for one in found)
    assert f"{mean:.4f}" in next(line for line in out.splitlines() if line.split()[:1] == ["mean"])
    after = times(work / "runs/tiny")
    assert {path for path in after if after[path] != before.get(path)} <= {"summary.json", ".", ".lock"}

    # Other settings under the same name are refused.
    for changed, shown in (("epochs=2.0", r"epochs \(1\.0 -> 2\.0\)"), ("patience=1", r"patience \(0 -> 1\)")):
        refused(rf"training\.{shown}", sweep.run_seeds, sweep.load_config("tiny.yaml", [f"training.{changed}"]), 2)

    # So are other data: scores on them would not be those of the same thing.
    config = sweep.load_config("tiny.yaml")
    assert isinstance(config.task_settings, ClassificationSettings)
    dev = Path(config.task_settings.dev)
    dev.write_text("\n".join(dev.read_text().splitlines()[:-1]) + "\n")
    refused(r"seed-0: was trained or scored on other data than the files", sweep.run_seeds, config, 2)


def times(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


@pytest.mark.slow
def test_sweep_keeps_the_best_and_reports_divergence(work: Path) -> None:
    grid = ["--grid-set", "training.learning_rate=1e-3,1e30", "--grid-set", "training.examples_per_step=8,16"]
    grid += ["--set", "training.warmup_share=0"]
    first = finetune(work, "sweep", "tiny.yaml", *grid)
    assert first.returncode == DivergedError.exit_code, first.stderr + first.stdout
    assert "2 of 4 runs failed" in first.stderr
    folder = work / "runs/tiny"
    assert len(list(folder.glob("*/seed-0/model/manifest.json"))) == 1
    assert len(list(folder.glob("*/seed-0/scores.json"))) == 2
    summary = json.loads((folder / "summary.json").read_text())
    best = summary["settings"][0]
    assert best["metric"] == max(one["metric"] for one in summary["settings"])
    again = finetune(work, "finetune", "runs/tiny/best.yaml", "--dry-run", "--show-config")
    assert again.returncode == 0, again.stderr
    assert f"examples_per_step: {best['training.examples_per_step']}" in again.stdout
    assert "name: tiny-best" in again.stdout

    second = finetune(work, "sweep", "tiny.yaml", *grid)
    assert second.returncode == DivergedError.exit_code
    assert "4 runs, 2 done, 2 failed" in second.stdout
    assert (folder / "logs/ray.log").stat().st_mtime_ns < (folder / "summary.json").stat().st_mtime_ns
    assert json.loads((folder / "summary.json").read_text())["settings"] == summary["settings"]


@pytest.mark.slow
def test_ctrl_c_stops_with_a_checkpoint_and_the_same_command_continues(work: Path) -> None:
    command = ["finetune", "tiny.yaml", "--seeds", "2", "--set", "training.epochs=60"]
    command += ["--set", "evaluation.every_epochs=100"]
    whole = [sys.executable, "-m", "finetune.cli", *command]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(whole, cwd=work, env=environment(), **streams)
    metrics = work / "runs/tiny/seed-0/metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=300)[0]
    assert process.returncode == StoppedError.exit_code, out
    assert "stopped with 2 runs unfinished. Run the same command again to continue." in out
    assert list((work / "runs/tiny/seed-0/checkpoints").glob("*/manifest.json"))
    assert not (work / "runs/tiny/seed-1/logs").exists(), "another run was begun after the stop"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert max(steps) < 240
    second = finetune(work, *command)
    assert second.returncode == 0, second.stderr + second.stdout
    assert "resumed from" in (work / "runs/tiny/seed-0/logs/training-0.log").read_text()
    assert "2 runs, 2 done, 0 failed" in second.stdout


def write_glue(folder: Path) -> Path:
    """RTE and SST-2 whole, MNLI without its mismatched set."""
    for split, rows in (("train", 16), ("dev", 6), ("test", 4)):
        tables = {"RTE": ["index\tsentence1\tsentence2\tlabel"], "SST-2": ["sentence\tlabel"]}
        for row in range(rows):
            label = ("entailment", "not_entailment")[row % 2]
            tables["RTE"].append(f"{row}\tthe film was {WORDS[row % 6]}\tthe plot was {WORDS[row % 5]}\t{label}")
            tables["SST-2"].append(f"the film was {WORDS[row % 6]}\t{row % 2}")
        if split == "test":
            tables["RTE"] = [line.rpartition("\t")[0] for line in tables["RTE"]]
            tables["SST-2"] = ["index\tsentence", *(f"{n}\t{line[:-2]}" for n, line in enumerate(tables["SST-2"][1:]))]
        for name, lines in tables.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    (folder / "MNLI").mkdir()
    for name in ("train", "dev_matched"):
        (folder / "MNLI" / f"{name}.tsv").write_text("sentence1\tsentence2\tgold_label\na\tb\tneutral\n")
    return folder


@pytest.mark.slow
def test_glue_runs_what_is_there_and_writes_table_and_submission(work: Path, start: Path) -> None:
    write_glue(work / "data")
    config = yaml.safe_load((work / "tiny.yaml").read_text()) | {"name": "mini"}
    del config["start_from"], config["classification"]
    (work / "glue.yaml").write_text(yaml.safe_dump(config))
    options = ["--from", str(start), "--glue-dir", "data", "--submission", "out", "--seeds", "2"]
    made = finetune(work, "glue", "glue.yaml", *options)
    assert made.returncode == 0, made.stderr + made.stdout
    assert "MNLI: left out" in made.stdout
    assert "no dev_mismatched.tsv" in made.stdout
    rte = [scores(work / f"runs/mini/rte/seed-{seed}")["accuracy"] for seed in (0, 1)]
    sst = [scores(work / f"runs/mini/sst2/seed-{seed}")["accuracy"] for seed in (0, 1)]
    row = next(line for line in made.stdout.splitlines() if line.startswith("| mini, dev"))
    cells = [cell.strip() for cell in row.strip("| ").split("|")]
    assert cells[1:10] == ["–"] * 4 + [f"{50 * sum(sst):.1f}"] + ["–"] * 3 + [f"{50 * sum(rte):.1f}"]
    assert cells[10] == f"{25 * (sum(sst) + sum(rte)):.1f}"
    assert json.loads((work / "runs/mini/glue.json").read_text())["results"]["rte"]["dev"]["accuracy"] == (
        pytest.approx(statistics.mean(rte))
    )
    lines = (work / "out/RTE.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert len(lines) == 5
    assert (work / "out/SST-2.tsv").exists()
    assert sum((work / f"runs/mini/rte/seed-{seed}/predictions/test.jsonl").exists() for seed in (0, 1)) == 1


# ---------------------------------------------------------------- grids


def test_a_grid_is_every_combination_the_last_setting_changing_fastest() -> None:
    points = expand({"training.learning_rate": ["1e-5", "3e-5"], "max_length": ["64", "128"]})
    expected = [("1e-5", "64"), ("1e-5", "128"), ("3e-5", "64"), ("3e-5", "128")]
    assert [tuple(point.settings.values()) for point in points] == expected
    assert points[1].overrides == ["training.learning_rate=1e-5", "max_length=128"]
    assert points[1].label == "learning_rate 1e-5, max_length 128"
    assert points[1].folder == "learning-rate-1e-5-max-length-128"
    assert expand({}) == [GridPoint({})]


@pytest.mark.parametrize(("name", "count"), [("devlin", 18), ("small-bert", 20)])
def test_published_grids_have_their_points_and_fold_into_folders_of_their_own(work, monkeypatch, name, count) -> None:
    monkeypatch.chdir(work)
    points = expand(parse_grid(name, []))
    assert len(points) == count
    config = sweep.load_config(work / "tiny.yaml")
    made = sweep.sweep_trials(config, work / "tiny.yaml", [], points, seeds=2)
    assert len({trial.config.folder for _, trial in made}) == len({trial.label for _, trial in made}) == 2 * count
    for point, trial in made:
        again = FinetuneConfig.model_validate(trial.config.model_dump())  # its name is allowed, among others
        rates = {key.rpartition(".")[2]: float(value) for key, value in point.settings.items()}
        assert {key: getattr(again.training, key) for key in rates} == rates
        assert again.tracking.group == "tiny"
    first = {key: values[0] for key, values in GRIDS[name].items()}
    assert {key: float(value) for key, value in made[0][0].settings.items()} == pytest.approx(first)


def test_axes_are_laid_over_a_grid() -> None:
    grid = parse_grid("devlin", ["training.epochs=3", "max_length=64, 128,64", "optimizer.name=[a,b],c"])
    assert grid["training.epochs"] == ["3"]
    assert grid["max_length"] == ["64", "128"]
    assert grid["optimizer.name"] == ["[a,b]", "c"]
    assert parse_grid("", ["random_weights=true"]) == {"random_weights": ["true"]}
    assert parse_grid("", ["classification.class_weights=none,balanced"])


OF_THE_RUN, OF_THE_SCORES = "is not a setting to compare by", "decides what the scores mean"


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        *((f"{name}=1,2", OF_THE_RUN) for name in ("seed", "name", "run_dir", "scheduling.workers", "tracking.group")),
        *((f"classification.{name}=a,b", OF_THE_SCORES) for name in ("metric", "dev_share")),
        *((f"{name}=a,b", OF_THE_SCORES) for name in ("entities.dev", "questions", "entities.labels.0")),
        *((wrong, "--grid-set") for wrong in ("training.epochs", "=1,2", "training.epochs=", "training.epochs=1,,2")),
    ],
)
def test_wrong_axes_are_refused(axis: str, message: str) -> None:
    refused(message if message == "--grid-set" else f"{axis}: {message}", parse_grid, "", [axis])


def test_a_grid_of_epochs_is_refused_where_steps_go_before_them(work: Path) -> None:
    path, set_steps = work / "tiny.yaml", ["training.steps=5"]
    for overrides, grid in ((set_steps, {}), ([], {"training.steps": ["5"]})):
        points = expand({"training.epochs": ["1", "2"], **grid})
        config = sweep.load_config(path, overrides)
        refused(r"training\.steps", sweep.sweep_trials, config, path, overrides, points, 1)


def test_each_trial_has_the_steps_of_its_own_data(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Trial] = []

    def fake(config: FinetuneConfig, members: Sequence[Trial], **_: Any) -> TrialRuns:
        handed.extend(members)
        raise StoppedError("before the first")

    monkeypatch.chdir(work)
    monkeypatch.setattr(sweep, "run_all", fake)
    made: list[FinetuneConfig] = []
    plan = runs.plan
    monkeypatch.setattr(runs, "plan", lambda config, **given: made.append(config) or plan(config, **given))
    grid = {"classification.train_examples": ["8", "16", "32"], "training.learning_rate": ["1e-5", "3e-5"]}
    with pytest.raises(StoppedError):
        sweep.run_sweep(work / "tiny.yaml", [], grid)
    assert [trial.steps for trial in handed] == [1, 1, 2, 2, 4, 4]
    assert len(made) == 3  # one for each set of examples


def test_runs_of_one_command_have_short_names_and_wandb_ids_of_their_own(work: Path) -> None:
    def ids(run_id: str) -> list[str]:
        config = sweep.load_config(work / "tiny.yaml", [f"tracking.run_id={run_id}"])
        made = [trials.trial_config(config, f"seed-{seed}", folder=work, seed=seed) for seed in (0, 1)]
        return [FinetuneConfig.model_validate(one.model_dump()).tracking.run_id for one in made]

    assert ids("abc") == ["abc-seed-0", "abc-seed-1"]
    assert ids("n" * 64) == [f"{'n' * 57}-seed-0", f"{'n' * 57}-seed-1"]
    assert ids('""') == ["", ""]  # each start generates one
    config = sweep.load_config(work / "tiny.yaml", [f"name={'n' * 63}"])
    label = "16-5e-05-" + "4" * 80
    for given in ("seed-0", label[:62], label):
        made = trials.trial_config(config, given, folder=work, seed=1)
        assert FinetuneConfig.model_validate(made.model_dump()).name[:1] == "n"


# ---------------------------------------------------------------- what came of it


def done(score: float, metric: str = "accuracy", **others: float) -> Outcome:
    return Outcome(metric, {"dev": {"loss": 1.0, metric: score, **others}}, chosen_on="dev")


FAILED = Outcome(error=DivergedError("step 3: loss is NaN."))


def test_spread_is_that_of_a_sample() -> None:
    values = [0.5, 0.75, 0.7]
    assert Spread.of(values) == Spread(3, statistics.mean(values), statistics.stdev(values), 0.5, 0.75)
    assert Spread.of([0.5]) == Spread(1, 0.5, None, 0.5, 0.5)
    assert Spread.of([]) is None


def test_spreads_leave_out_what_failed_is_missing_or_not_finite() -> None:
    outcomes = [done(0.5), done(0.7, f1=0.2), FAILED, None, Outcome("accuracy", {"dev": {"loss": float("nan")}})]
    found = spreads(outcomes)["dev"]
    assert found["accuracy"] == Spread.of([0.5, 0.7])
    assert found["f1"] == Spread.of([0.2])
    assert found["loss"] == Spread.of([1.0, 1.0])
    assert results.counts(outcomes) == {"runs": 5, "done": 3, "failed": 1, "degenerate": 0, "to_run": 1}


def test_settings_rank_by_their_mean_and_ties_keep_their_order() -> None:
    one, two, three, four = expand({"x": ["1", "2", "3", "4"]})
    points = [one, one, two, two, three, three, four, four]
    outcomes = [done(0.5), done(0.5), done(0.6), done(0.6), done(0.7), done(0.5), FAILED, None]
    found = [(each.point, each.spread and each.spread.mean) for each in rank(candidates(points, outcomes))]
    assert found == [(two, 0.6), (three, 0.6), (one, 0.5), (four, None)]


def test_settings_that_diverge_rank_behind_those_that_do_not() -> None:
    points = [point for point in expand({"x": ["1", "2"]}) for _ in range(3)]
    outcomes = [FAILED, done(0.91), FAILED, done(0.90), done(0.89), done(0.91)]
    assert [one.point.label for one in rank(candidates(points, outcomes))] == ["x 2", "x 1"]
    assert to_drop(candidates(points, outcomes)) == [0, 1, 2, 3, 4]
    # What did not diverge is run again: then the first settings may lead after all.
    again = Outcome(error=MachineError("killed"))
    assert to_drop(candidates(points, [again, done(0.91), done(0.9), *outcomes[3:]])) == [0, 2, 3, 4]


def test_models_are_dropped_once_other_settings_lead() -> None:
    one, two = expand({"x": ["1", "2"]})
    points = [one, one, two, two]
    assert to_drop(candidates(points, [done(0.5), None, None, None])) == []
    assert to_drop(candidates(points, [done(0.5), done(0.6), None, None])) == [0]
    # The second settings are not all over: their best stays, and so do the leading ones'.
    assert to_drop(candidates(points, [done(0.5), done(0.6), done(0.9), None])) == [0]
    assert to_drop(candidates(points, [done(0.5), done(0.6), done(0.9), done(0.1)])) == [0, 2, 3]
    assert to_drop(candidates(points, [done(0.5), done(0.6), done(0.9), FAILED])) == [0, 2, 3]
    assert to_drop(candidates(points, [done(0.6), done(0.6), done(0.6), done(0.6)])) == [1, 2, 3], "the first of equals"


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([[5, 0], [3, 0]], "no better than always a (0.6250)"),
        ([[4, 1], [2, 1]], "no better than always a (0.6250)"),
        ([[4, 1], [1, 2]], ""),
        ([[0, 3], [0, 5]], "no better than always b (0.6250)"),
    ],
)
def test_a_run_that_learned_nothing_is_reported(counts: list[list[int]], expected: str) -> None:
    said = {"details": {"dev": {"confusion": {"labels": ["a", "b"], "counts": counts}}}}
    assert degenerate(said) == expected
    assert degenerate({"details": {"dev": {"by_type": {}}}}) == degenerate({"details": {}}) == ""


def test_the_end_has_the_exit_code_of_what_failed() -> None:
    lost = Outcome(error=MachineError("out of memory"))
    assert failure([done(1.0), None]) is None
    assert isinstance(failure([done(1.0), FAILED, FAILED]), DivergedError)
    assert isinstance(failure([FAILED, lost]), MachineError)
    assert "2 of 2 runs" in str(failure([FAILED, lost]))


def test_a_run_folder_shows_whether_the_run_has_finished(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    config = trials.trial_config(sweep.load_config("tiny.yaml"), "seed-0", folder=Path("runs/tiny/seed-0"), seed=0)
    trial = Trial("seed 0", config, 4)
    folder = config.folder
    assert trials.read_outcome(trial) is None
    (folder / "checkpoints").mkdir(parents=True)
    said = {"metric": "accuracy", "scores": {"dev": {"accuracy": 0.5}}, "details": {}}
    (folder / "scores.json").write_text(json.dumps(said))
    assert trials.read_outcome(trial) is None, "scores come before the model, checkpoints go after it"
    (folder / "checkpoints").rmdir()
    found = trials.read_outcome(trial)
    assert found is not None
    assert found.score == 0.5
    (folder / "config.yaml").write_text(sweep.dump(config))
    assert trials.read_outcome(trial) == found
    faster = config.training.model_copy(update={"learning_rate": 0.5})
    for changes in ({"seed": 7}, {"start_from": "elsewhere"}, {"training": faster}):
        other = Trial("seed 0", config.model_copy(update=changes), 4)
        refused(f"other settings: {next(iter(changes))}", trials.read_outcome, other)
    (folder / "scores.json").write_text("{")
    refused("damaged", trials.read_outcome, trial)
    (folder / "failed.json").write_text(json.dumps({"message": "step 3: loss is NaN."}))
    diverged = trials.read_outcome(trial)
    assert diverged is not None
    assert isinstance(diverged.error, DivergedError)


def test_a_run_that_scored_no_test_set_is_held_against_its_dev_set(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As runs of the version before did, whose scores.json does not say what chose the checkpoint."""
    monkeypatch.chdir(work)
    write_set(work / "test.tsv", 6)
    loaded = sweep.load_config("tiny.yaml", ["classification.test=test.tsv"])
    config = trials.trial_config(loaded, "seed-0", folder=Path("runs/tiny/seed-0"), seed=0)
    trial = Trial("seed 0", config, 4)
    config.folder.mkdir(parents=True)

    def check(test_sets: bool, **said: str) -> None:
        scores = {"metric": "accuracy", "scores": {"dev": {"accuracy": 0.5}}, "details": {}}
        scores["data"] = runs.digest(config, test_sets=test_sets)
        (config.folder / "scores.json").write_text(json.dumps({**scores, **said}))
        trials.check_data([trial], [trials.read_outcome(trial)])

    check(test_sets=False)
    check(test_sets=True, chosen_on="dev")
    refused("other data", check, test_sets=False, chosen_on="dev")
    refused("other data", check, test_sets=True)


def test_several_workers_a_run_are_refused(work: Path) -> None:
    refused("--parallel", trials.check_alone, sweep.load_config(work / "tiny.yaml", ["scheduling.workers=2"]))


# ---------------------------------------------------------------- how it is scheduled and shown


def test_trials_take_a_gpu_each_or_a_machine_each() -> None:
    assert trials_that_fit([(2, 0)], 5, 0, 0, "here") == (1, 2)
    assert trials_that_fit([(2, 0)], 5, 2, 0, "here") == (2, 1)
    assert trials_that_fit([(16, 8)], 5, 0, 0, "here") == (5, 3)
    assert trials_that_fit([(16, 8)], 20, 0, 0, "here") == (8, 2)
    assert trials_that_fit([(4, 8)], 20, 0, 0, "here") == (4, 1)
    assert trials_that_fit([(8, 0), (4, 0)], 20, 0, 0, "here") == (2, 4)
    for nodes, parallel, cpus in (([(2, 0)], 3, 0), ([(8, 2)], 3, 0), ([(2, 0)], 0, 4)):
        with pytest.raises(MachineError, match="--parallel"):
            trials_that_fit(nodes, 5, parallel, cpus, "here")


def test_runs_are_followed_on_the_terminal(work: Path, start: Path, monkeypatch: Any, capsys: Any) -> None:
    """All of `run_all` but Ray: what is handed to it, and what its events become."""
    monkeypatch.chdir(work)
    config = sweep.load_config("tiny.yaml")
    folders = [Path(f"runs/tiny/seed-{seed}") for seed in range(4)]
    configs = [trials.trial_config(config, one.name, folder=one, seed=seed) for seed, one in enumerate(folders)]
    members = [Trial(f"seed {seed}", one, 4) for seed, one in enumerate(configs)]
    write_outcome(members[1].config.folder, 0.9)
    handed: list[Any] = []

    def fake(target: str, tasks: Sequence[Any], *, poll: Any, **options: Any) -> None:
        handed.append((target, [task.training.config["seed"] for task in tasks], options["parallel"]))
        assert all(task.training.resume for task in tasks)
        poll([TrialEvent(0, "started")])
        (members[0].config.folder / "metrics.jsonl").write_text('{"step": 2, "loss": 0.5}\n{"split": "valid')
        poll([])
        write_outcome(members[0].config.folder, 0.7)
        poll([TrialEvent(0, "restarted"), TrialEvent(0, "started"), TrialEvent(0, "ended"), TrialEvent(1, "started")])
        poll([TrialEvent(1, "ended", DivergedError("step 3: loss is NaN.\nsecond line")), TrialEvent(2, "started")])
        poll([TrialEvent(2, "ended", StoppedError("stopped at step 3"))])
        raise StoppedError("runs/tiny: stopped with 1 runs to go.")

    monkeypatch.setattr("cluster.workers.trials.launch.run_trials", fake)
    monkeypatch.setattr("finetune.experiments.trials_view.PLAIN_SECONDS", 0.0)
    seen: list[int] = []
    ran = trials.run_all(config, members, parallel=3, ended=lambda outcomes: seen.append(sum(map(bool, outcomes))))
    assert handed == [("finetune.training.train:main", [0, 2, 3], 3)]
    assert seen == [2, 3]
    assert [outcome and outcome.score for outcome in ran.outcomes] == [0.7, 0.9, None, None]
    assert ran.outcomes[3] is None
    assert "Run the same command again to continue" in str(ran.stopped)
    out = capsys.readouterr().out
    assert "1 of 4 done · seed 0: step 2/4, loss 0.500\n" in out
    assert "seed 0  crashed, restarting" in out
    assert "seed 0  accuracy 0.7000" in out
    assert "seed 2  failed: step 3: loss is NaN. second line\n" in out
    assert "3 of 4 done · 1 failed" in out
    assert "seed 3  stopped" in out
    # What diverged is not run again, what was stopped is.
    again: list[int] = []
    monkeypatch.setattr(
        "cluster.workers.trials.launch.run_trials",
        lambda target, tasks, **options: again.extend(task.training.config["seed"] for task in tasks),
    )
    ran = trials.run_all(config, members)
    assert again == [3]
    assert isinstance(failure(ran.outcomes), DivergedError)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(trials_view.time, "monotonic", lambda: now[0])
    return now


def seen(folder: Path, step: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 0.5}) + "\n")


def test_time_left_goes_by_the_examples_since_the_first_were_seen(tmp_path: Path, clock: list[float]) -> None:
    """Two runs of 100 and 300 examples; the first was at 20 in an earlier call."""
    folders = [tmp_path / "a", tmp_path / "b"]
    seen(folders[0], 2)
    lines = [trials_view.TrialLine("a", folders[0], 100, 10), trials_view.TrialLine("b", folders[1], 300, 10)]
    view = trials_view.TrialsView(lines, [0, 1], tmp_path / "stop")
    view.started(0, again=False)
    clock[0] = 50.0  # start-up
    assert view.seconds_left() is None
    seen(folders[0], 4)
    assert view.seconds_left() is None
    clock[0] = 60.0
    seen(folders[0], 6)
    assert view.seconds_left() == pytest.approx((40 + 300) * 10 / 20)
    clock[0] = 80.0
    view.ended(0, done(0.5))
    view.started(1, again=False)
    assert view.seconds_left() == pytest.approx(300 * 30 / 60)
    clock[0] = 90.0
    seen(folders[1], 5)
    assert view.seconds_left() == pytest.approx(150 * 40 / 210)
    seen(folders[1], 12)
    assert view.seconds_left() == 0


def test_what_a_failed_run_saw_counts_for_the_time_left(tmp_path: Path, clock: list[float]) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    lines = [trials_view.TrialLine(folder.name, folder, 100, 100) for folder in folders]
    view = trials_view.TrialsView(lines, [0, 1], tmp_path / "stop")
    clock[0] = 10.0
    seen(folders[0], 10)
    seen(folders[1], 10)
    assert view.seconds_left() is None
    clock[0] = 80.0
    seen(folders[0], 20)
    seen(folders[1], 80)
    view.ended(1, Outcome(error=DivergedError("loss is NaN")))
    assert view.seconds_left() == pytest.approx(80 * 70 / 80)
    clock[0] = 150.0
    seen(folders[0], 30)
    assert view.seconds_left() == pytest.approx(70 * 140 / 90)


def write_outcome(folder: Path, accuracy: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    said = {"metric": "accuracy", "scores": {"dev": {"accuracy": accuracy}}, "details": {}}
    (folder / "scores.json").write_text(json.dumps(said))


def test_tables_name_every_run_and_put_the_best_first() -> None:
    one, two = expand({"training.learning_rate": ["1e-5", "3e-5"]})
    table = text_of(results.sweep_table(candidates([one, two], [done(0.5), done(0.75)]), "accuracy"))
    assert [line.split() for line in table.splitlines() if "e-5" in line] == [["3e-5", "0.7500"], ["1e-5", "0.5000"]]
    table = text_of(results.sweep_table(candidates([one, one, two], [done(0.5), FAILED, None]), "accuracy"))
    assert "failed: step 3" in table
    assert "to run" in table


def text_of(table: Any) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


# ---------------------------------------------------------------- GLUE


def test_our_row_is_the_mean_over_the_runs_that_are_done() -> None:
    mnli = Outcome("accuracy", {"dev_matched": {"accuracy": 0.8}, "dev_mismatched": {"accuracy": 0.82}})
    outcomes = [done(0.6), done(0.7), done(0.85, metric="accuracy_and_f1", f1=0.9), FAILED, mnli]
    means = glue_runs.glue_results(["rte", "rte", "mrpc", "sst2", "mnli"], outcomes)
    assert set(means) == {"rte", "mrpc", "mnli"}
    assert glue.paper_row(means) == pytest.approx([80, 82, None, None, None, None, None, 90, 65], nan_ok=True)


def test_tasks_are_those_whose_files_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_glue(tmp_path / "data")
    assert glue_runs.find_tasks(str(data), []) == ["sst2", "rte"]
    assert "MNLI: left out" in capsys.readouterr().out
    assert glue_runs.find_tasks(str(data), ["rte"]) == ["rte"]
    assert glue_runs.find_tasks(str(data / "RTE"), []) == ["rte"], "a task's own folder"
    (data / "MRPC").mkdir()
    (data / "MRPC" / "train.tsv").touch()
    assert glue.tasks_in(data)["mrpc"].endswith("no dev.tsv")
    (data / "MRPC" / "dev.tsv").touch()
    assert glue.tasks_in(data)["mrpc"] == ""
    for asked, message in (("mnli", "dev_mismatched"), ("cola", "no folder CoLA"), ("snli", "not a GLUE task")):
        refused(message, glue_runs.find_tasks, str(data), [asked])
    refused("no such folder", glue_runs.find_tasks, str(tmp_path / "none"), [])
    (tmp_path / "empty").mkdir()
    refused(r"has no task with train\.tsv", glue_runs.find_tasks, str(tmp_path / "empty"), [])


def test_glue_without_its_folder_is_refused(work: Path) -> None:
    for arguments in ((None, []), (glue_runs.TEMPLATE, [])):
        refused("--glue-dir: name the folder", glue_runs.run_glue, *arguments)
    refused("learning_rat", glue_runs.run_glue, glue_runs.TEMPLATE, ["training.learning_rat=1"])
