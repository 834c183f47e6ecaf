"""Several runs of one command: seeds, grids, configs; their tables, what is kept, what is not run again."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from cluster.workers.trials import choose_parallel
from finetune.cli import build_parsers, main
from finetune.experiments import results, sweep, trials
from finetune.experiments.candidates import Candidate, group_trials, rank, removable_trials
from finetune.experiments.grid import GridPoint, auto_grid, expand, parse_grid
from finetune.experiments.outcomes import Outcome, Spread, Trial, combined_error, spreads
from finetune.experiments.trials import degenerate_reason
from finetune.tasks.classification import ClassificationSettings
from finetune.training import runs
from finetune.training.config import GRIDS, FinetuneConfig
from pretrain.common.errors import DivergedError, InputError, MachineError, StoppedError
from tests.chaos import wait_for
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
    assert "3 of 3  seed" in first.stdout
    summary = json.loads((work / "runs/tiny/summary.json").read_text())
    found = [scores(work / f"runs/tiny/seed-{seed}") for seed in (0, 1)]
    made = [(work / f"runs/tiny/seed-{seed}/predictions/dev.jsonl").read_text() for seed in (0, 1)]
    assert made[0] != made[1], "the seeds did not differ"
    for name in ("accuracy", "macro_f1"):
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
    run_seeds()
    out = capsys.readouterr().out
    assert "2 runs, 2 done, 0 failed" in out
    mean = statistics.mean(one["accuracy"] for one in found)
    assert f"{mean:.4f}" in next(line for line in out.splitlines() if line.split()[:2] == ["dev", "accuracy"])
    after = times(work / "runs/tiny")
    assert {path for path in after if after[path] != before.get(path)} <= {"summary.json", ".", ".lock"}

    # Other settings under the same name are refused.
    for changed, shown in (("epochs=2.0", r"epochs \(1\.0 -> 2\.0\)"), ("patience=1", r"patience \(0 -> 1\)")):
        refused(rf"training\.{shown}", run_seeds, f"training.{changed}")

    # So are other data: scores on them would not be those of the same thing.
    config = sweep.load_config("tiny.yaml")
    assert isinstance(config.task_settings, ClassificationSettings)
    dev = Path(config.task_settings.dev)
    dev.write_text("\n".join(dev.read_text().splitlines()[:-1]) + "\n")
    refused(r"seed-0: the files of classification have changed since", run_seeds)


def run_seeds(*overrides: str) -> None:
    sweep.run_sweep([Path("tiny.yaml")], overrides, {}, seeds=2, keep="all")


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
    wait_for(lambda: process.poll() is not None or (metrics.exists() and metrics.read_bytes().count(b"\n") > 3), 240)
    assert process.poll() is None, process.communicate()[0]
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
    """RTE and SST-2."""
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
    return folder


@pytest.mark.slow
def test_configs_share_a_sweep_with_glues_table_and_submission(work: Path) -> None:
    """Killed with its first run done, it repeats only the second; a third time nothing runs, and the table is equal."""
    write_glue(work / "data")
    config = yaml.safe_load((work / "tiny.yaml").read_text())
    for name, epochs in (("sst2", 150), ("rte", 8)):  # the second does not end before it is killed
        section = {"glue": name, "glue_dir": "data"}
        task = {**config, "name": name, "classification": section, "training": {**config["training"], "epochs": epochs}}
        (work / f"{name}.yaml").write_text(yaml.safe_dump(task))
    given = ["sweep", "rte.yaml", "sst2.yaml", "--submission", "out", "--parallel", "1"]
    process = subprocess.Popen([sys.executable, "-m", "finetune.cli", *given], cwd=work, env=environment())
    wait_for(lambda: process.poll() is not None or (work / "runs/sst2/seed-0/metrics.jsonl").exists(), 240)
    assert process.poll() is None
    process.kill()
    process.wait()
    before = times(work / "runs/rte/seed-0")
    made = finetune(work, *given)
    assert made.returncode == 0, made.stderr + made.stdout
    assert "1 of 2 to run" in made.stdout
    assert times(work / "runs/rte/seed-0") == before
    rte, sst = (scores(work / f"runs/{name}/seed-0")["accuracy"] for name in ("rte", "sst2"))
    row = next(line for line in made.stdout.splitlines() if line.startswith("| ") and ", dev" in line)
    cells = [cell.strip() for cell in row.strip("| ").split("|")]
    assert cells[1:] == ["–"] * 4 + [f"{100 * sst:.1f}"] + ["–"] * 3 + [f"{100 * rte:.1f}", f"{50 * (sst + rte):.1f}"]
    lines = (work / "out/RTE.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert len(lines) == 5
    assert (work / "out/SST-2.tsv").exists()
    assert "missing: CoLA" in made.stdout
    summaries = [json.loads((work / f"runs/{name}/summary.json").read_text()) for name in ("rte", "sst2")]
    assert [one["glue"][-1] for one in summaries] == [cells, cells]
    again = finetune(work, *given)
    assert again.stdout[again.stdout.index("config  ") :] == made.stdout[made.stdout.index("config  ") :]


# ---------------------------------------------------------------- grids


def test_a_grid_is_every_combination_the_last_setting_changing_fastest() -> None:
    points = expand({"training.learning_rate": ["1e-5", "3e-5"], "max_length": ["64", "128"]})
    expected = [("1e-5", "64"), ("1e-5", "128"), ("3e-5", "64"), ("3e-5", "128")]
    assert [tuple(point.settings.values()) for point in points] == expected
    assert points[1].overrides == ["training.learning_rate=1e-5", "max_length=128"]
    assert points[1].label == "learning_rate 1e-5, max_length 128"
    assert points[1].folder_name == "learning-rate-1e-5-max-length-128"
    assert expand({}) == [GridPoint({})]


@pytest.mark.parametrize(("name", "count"), [("devlin", 18), ("small-bert", 20)])
def test_published_grids_have_their_points_and_fold_into_folders_of_their_own(work, monkeypatch, name, count) -> None:
    monkeypatch.chdir(work)
    points = expand(parse_grid(name, []))
    assert len(points) == count
    config = sweep.load_config(work / "tiny.yaml")
    made = sweep.sweep_trials(config, work / "tiny.yaml", [], points, seeds=2)
    assert len({trial.config.folder for trial in made}) == len({trial.label for trial in made}) == 2 * count
    for trial in made:
        again = FinetuneConfig.model_validate(trial.config.model_dump())  # its name is allowed, among others
        rates = {key.rpartition(".")[2]: float(value) for key, value in trial.point.settings.items()}
        assert {key: getattr(again.training, key) for key in rates} == rates
        assert again.tracking.group == "tiny"
    first = {key: values[0] for key, values in GRIDS[name].items()}
    assert {key: float(value) for key, value in made[0].point.settings.items()} == pytest.approx(first)


def test_the_usual_grid_lies_around_the_config(work: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    base = sweep.load_config(work / "tiny.yaml")
    given = base.training.model_copy(update={"learning_rate": 1.2e-4, "epochs": 9.6, "steps": 0})
    rates, epochs = ["6e-05", "0.00012", "0.00024"], ["6.4", "9.6", "13"]
    assert auto_grid(given) == {"training.learning_rate": rates, "training.epochs": epochs}
    assert auto_grid(given.model_copy(update={"steps": 5})) == {"training.learning_rate": rates}
    chosen = ["--set", "training.learning_rate=0", "--set", "training.epochs=0"]  # by the model and the examples
    monkeypatch.chdir(work)
    assert main(["sweep", "tiny.yaml", *chosen, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("learning-rate-0.001-epochs-20/seed-0") == 1, "auto's own"
    assert "9 runs:" in shown
    assert "learning-rate-0.002-epochs-27/" in shown


def test_folds_are_runs_whose_predictions_come_together(work: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(work)
    seen: list[str] = []

    def run(configs: Any, members: Sequence[trials.Trial], **options: Any) -> list[Outcome | None]:
        outcomes: list[Outcome | None] = []
        for number, trial in enumerate(members):
            seen.append(f"{trial.label}, {trial.config.folder}")
            write_outcome(trial.config.folder, 0.5)
            said = {"metric": "accuracy", "scores": {"fold": {"accuracy": 0.6 + number / 10}}, "chosen_on": "dev"}
            said |= {"details": {}, "data": ""}
            (trial.config.folder / "scores.json").write_text(json.dumps(said))
            rows = [trial.config.make_task().record(one) for one in trial.config.make_task().test_sets()["fold"]]
            (trial.config.folder / "predictions").mkdir()
            (trial.config.folder / "predictions/fold.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
            monkeypatch.setattr(runs, "check_same_settings", lambda config, finished: None)
            outcomes.append(trials.read_outcome(trial))
        return outcomes

    monkeypatch.setattr(sweep, "run_all", run)
    sweep.run_sweep([Path("tiny.yaml")], [], {}, folds=3)
    assert seen[1] == "seed 0, fold 2/3, runs/tiny/seed-0/fold-2-of-3"
    summary = json.loads(Path("runs/tiny/summary.json").read_text())["scores"]["fold"]["accuracy"]
    assert (summary["runs"], summary["mean"]) == (3, pytest.approx(0.7))
    assert summary["deviation"] == pytest.approx(0.1)
    rows = [json.loads(line) for line in Path("runs/tiny/folds.jsonl").read_text().splitlines()]
    texts = [line.split("\t")[0] for line in Path("train.tsv").read_text().splitlines()[1:]]
    assert [row["text"] for row in rows] == texts
    assert {row["fold"] for row in rows} == {1, 2, 3}
    assert "32 predictions, each by a run not trained on the example" in capsys.readouterr().out


def test_axes_are_laid_over_a_grid() -> None:
    grid = parse_grid("devlin", ["training.epochs=3", "max_length=64, 128,64"])
    assert grid["training.epochs"] == ["3"]
    assert grid["max_length"] == ["64", "128"]
    assert parse_grid("", ["random_weights=true"]) == {"random_weights": ["true"]}
    assert parse_grid("", ["classification.class_weights=none,balanced"])


OF_THE_RUN, OF_THE_SCORES = "cannot be an axis of a grid", "defines the scores"


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        *(
            (f"{name}=1,2", OF_THE_RUN)
            for name in ("seed", "fold", "name", "run_dir", "scheduling.workers", "tracking.group")
        ),
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


def test_data_are_read_once_for_all_trials_on_them(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    made: list[FinetuneConfig] = []
    plan = runs.plan
    monkeypatch.setattr(runs, "plan", lambda config, **given: made.append(config) or plan(config, **given))
    grid = {"classification.train_examples": ["8", "16", "32"], "training.learning_rate": ["1e-5", "3e-5"]}
    sweep.run_sweep([Path("tiny.yaml")], [], grid, dry_run=True)
    assert len(made) == 3  # one for each set of examples


def test_configs_may_stand_around_options() -> None:
    found = build_parsers()[0].parse_args(["sweep", "a.yaml", "--seeds", "2", "b.yaml", "--set", "seed=1", "c.yaml"])
    assert ([str(path) for path in found.config], found.seeds, found.set) == (
        ["a.yaml", "b.yaml", "c.yaml"],
        2,
        ["seed=1"],
    )


def test_configs_that_do_not_go_together_are_refused(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    tiny, other = Path("tiny.yaml"), Path("other.yaml")
    other.write_text(tiny.read_text())
    refused(r"other\.yaml: another config has the same run folder runs/tiny", sweep.run_sweep, [tiny, other], [], {})
    other.write_text(tiny.read_text().replace("name: tiny", "name: other\nscheduling: {max_failures: 7}"))
    refused("scheduling: differs between tiny and other", sweep.run_sweep, [tiny, other], [], {})
    refused("--parallel", sweep.run_sweep, [tiny], ["scheduling.workers=2"], {})
    no_dev = ["classification={train: train.tsv}"]
    refused("tiny: no dev set", sweep.run_sweep, [tiny], no_dev, {"max_length": ["8", "16"]})


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
    assert results.count_line(outcomes) == "5 runs, 3 done, 1 failed, 1 to run"


def test_settings_rank_by_their_mean_and_ties_keep_their_order() -> None:
    one, two, three, four = expand({"x": ["1", "2", "3", "4"]})
    points = [one, one, two, two, three, three, four, four]
    outcomes = [done(0.5), done(0.5), done(0.6), done(0.6), done(0.7), done(0.5), FAILED, None]
    found = [(each.point, each.spread and each.spread.mean) for each in rank(given(points, outcomes))]
    assert found == [(two, 0.6), (three, 0.6), (one, 0.5), (four, None)]


def test_settings_that_diverge_rank_behind_those_that_do_not() -> None:
    points = [point for point in expand({"x": ["1", "2"]}) for _ in range(3)]
    outcomes = [FAILED, done(0.91), FAILED, done(0.90), done(0.89), done(0.91)]
    assert [one.point.label for one in rank(given(points, outcomes))] == ["x 2", "x 1"]
    assert removable_trials(given(points, outcomes)) == [0, 1, 2, 3, 4]
    # What did not diverge is run again: then the first settings may lead after all.
    again = Outcome(error=MachineError("killed"))
    assert removable_trials(given(points, [again, done(0.91), done(0.9), *outcomes[3:]])) == [0, 2, 3, 4]


def test_models_are_dropped_once_other_settings_lead() -> None:
    one, two = expand({"x": ["1", "2"]})
    points = [one, one, two, two]
    assert removable_trials(given(points, [done(0.5), None, None, None])) == []
    assert removable_trials(given(points, [done(0.5), done(0.6), None, None])) == [0]
    # The second settings are not all over: their best stays, and so do the leading ones'.
    assert removable_trials(given(points, [done(0.5), done(0.6), done(0.9), None])) == [0]
    assert removable_trials(given(points, [done(0.5), done(0.6), done(0.9), done(0.1)])) == [0, 2, 3]
    assert removable_trials(given(points, [done(0.5), done(0.6), done(0.9), FAILED])) == [0, 2, 3]
    assert removable_trials(given(points, [done(0.6), done(0.6), done(0.6), done(0.6)])) == [1, 2, 3], (
        "the first of equals"
    )


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
    assert degenerate_reason({"dev": {"confusion": {"labels": ["a", "b"], "counts": counts}}}) == expected
    assert degenerate_reason({"dev": {"by_type": {}}}) == degenerate_reason({}) == ""


def test_the_end_has_the_exit_code_of_what_failed() -> None:
    lost = Outcome(error=MachineError("out of memory"))
    assert combined_error([done(1.0), None]) is None
    assert isinstance(combined_error([done(1.0), FAILED, FAILED]), DivergedError)
    assert isinstance(combined_error([FAILED, lost]), MachineError)
    assert "2 of 2 runs" in str(combined_error([FAILED, lost]))


def test_a_run_folder_shows_whether_the_run_has_finished(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    config = trials.trial_config(sweep.load_config("tiny.yaml"), "seed-0", folder=Path("runs/tiny/seed-0"), seed=0)
    trial = Trial("seed 0", config, config, GridPoint({}))
    folder = config.folder
    assert trials.read_outcome(trial) is None
    (folder / "checkpoints").mkdir(parents=True)
    write_outcome(folder, 0.5)
    assert trials.read_outcome(trial) is None, "scores come before the model, checkpoints go after it"
    (folder / "checkpoints").rmdir()
    found = trials.read_outcome(trial)
    assert found is not None
    assert found.score == 0.5
    (folder / "config.yaml").write_text(sweep.dump(config))
    assert trials.read_outcome(trial) == found
    faster = config.training.model_copy(update={"learning_rate": 0.5})
    for changes in ({"seed": 7}, {"start_from": "elsewhere"}, {"training": faster}):
        other = Trial("seed 0", config.model_copy(update=changes), config, GridPoint({}))
        refused(f"other settings: {next(iter(changes))}", trials.read_outcome, other)
    for damaged in ("{", "{}", "[]"):
        (folder / "scores.json").write_text(damaged)
        refused("damaged", trials.read_outcome, trial)
    (folder / "failed.json").write_text(json.dumps({"message": "step 3: loss is NaN."}))
    diverged = trials.read_outcome(trial)
    assert diverged is not None
    assert isinstance(diverged.error, DivergedError)


# ---------------------------------------------------------------- how it is scheduled and shown


def test_trials_take_a_gpu_each_or_a_machine_each() -> None:
    assert choose_parallel([(2, 0)], 5, 0, 0, "here") == (1, 2)
    assert choose_parallel([(2, 0)], 5, 2, 0, "here") == (2, 1)
    assert choose_parallel([(16, 8)], 5, 0, 0, "here") == (5, 3)
    assert choose_parallel([(16, 8)], 20, 0, 0, "here") == (8, 2)
    assert choose_parallel([(4, 8)], 20, 0, 0, "here") == (4, 1)
    assert choose_parallel([(8, 0), (4, 0)], 20, 0, 0, "here") == (2, 4)
    for nodes, parallel, cpus in (([(2, 0)], 3, 0), ([(8, 2)], 3, 0), ([(2, 0)], 0, 4)):
        with pytest.raises(MachineError, match="--parallel"):
            choose_parallel(nodes, 5, parallel, cpus, "here")


def test_what_ended_is_not_run_again_and_the_rest_is(work: Path, monkeypatch: Any, capsys: Any) -> None:
    """All of `run_all` but Ray: what is handed to it, and what is found in the folders afterwards."""
    monkeypatch.chdir(work)
    config = sweep.load_config("tiny.yaml")
    members = sweep.sweep_trials(config, Path("tiny.yaml"), [], [GridPoint({})], 4)
    folders = [member.config.folder for member in members]
    write_outcome(folders[1], 0.9)
    handed: list[Any] = []

    def fake(target: str, tasks: Sequence[Any], *, poll: Any, **options: Any) -> None:
        handed.append((target, [task.training.config["seed"] for task in tasks], options["parallel"]))
        assert all(task.training.resume for task in tasks)
        poll({})
        write_outcome(folders[0], 0.7)
        poll({0: None})
        (Path("runs/tiny/stop")).touch()
        poll({1: DivergedError("step 3: loss is NaN.\nsecond line"), 2: StoppedError("stopped at step 3")})
        poll({})
        raise StoppedError("runs/tiny: stopped.")

    monkeypatch.setattr(trials, "run_trials", fake)
    seen: list[int] = []
    ended = lambda outcomes: seen.append(sum(map(bool, outcomes)))  # noqa: E731
    outcomes = trials.run_all([config], members, parallel=3, on_result=ended)
    assert handed == [("finetune.training.train:main", [0, 2, 3], 3)]
    assert seen == [2, 3]
    assert [outcome and outcome.score for outcome in outcomes] == [0.7, 0.9, None, None]
    assert outcomes[3] is None
    with pytest.raises(StoppedError, match=r"runs/tiny: stopped with 1 run unfinished\. Run the same command again"):
        trials.raise_failure(config.folder, outcomes)
    out = capsys.readouterr().out
    assert "2 of 4  seed 0  dev accuracy 0.7000\n" in out
    assert "3 of 4  seed 2  failed: step 3: loss is NaN. second line\n" in out
    assert out.count("stopping: ") == 1
    # What diverged is not run again, what was stopped is. Ray loses it, as it does not say how it ended.
    again: list[int] = []
    run = lambda target, tasks, **options: again.extend(task.training.config["seed"] for task in tasks)  # noqa: E731
    monkeypatch.setattr(trials, "run_trials", run)
    outcomes = trials.run_all([config], members, parallel=0, on_result=lambda outcomes: None)
    assert again == [3]
    errors = [outcome.error for outcome in outcomes if outcome]
    assert [type(error) for error in errors] == [type(None), type(None), DivergedError, MachineError]


def write_outcome(folder: Path, accuracy: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    said: dict[str, Any] = {"metric": "accuracy", "scores": {"dev": {"accuracy": accuracy}}, "chosen_on": "dev"}
    said |= {"details": {}, "data": ""}
    (folder / "scores.json").write_text(json.dumps(said))


def given(points: Sequence[GridPoint], outcomes: Sequence[Outcome | None], **changes: Any) -> list[Candidate]:
    values = {"name": "a", "classification": {"train": "train.tsv"}, **changes}
    config = FinetuneConfig.model_validate(values)
    (found,) = group_trials([Trial("", config, config, point) for point in points], outcomes)
    return found


def test_tables_put_the_best_first_and_name_configs_and_failures() -> None:
    one, two = expand({"training.learning_rate": ["1e-5", "3e-5"]})
    rows = rows_of([rank(given([one, two], [done(0.5), done(0.75)]))])
    assert rows[1:] == ["3e-5 dev accuracy 0.7500", "1e-5 dev accuracy 0.5000"]
    those = [rank(given([one, one, two], [done(0.5), FAILED, None])), given([one], [done(0.25)], name="b")]
    found, to_run, other, *notes = rows_of(those)[1:]
    assert found == "a 1e-5 dev accuracy 0.5000 – 0.5000 0.5000"
    assert to_run == "a 3e-5 – – – –"
    assert other == "b 1e-5 dev accuracy 0.2500 – 0.2500 0.2500"
    assert notes == ["a, 1e-5: failed: step 3: loss is NaN.", "a, 3e-5: to run"]


def test_seeds_have_a_row_for_every_score() -> None:
    outcome = Outcome("f1", {"dev": {"loss": 1.0, "f1": 0.5}, "test": {"f1": 0.25}}, chosen_on="dev", positive="yes")
    (_, *rows) = rows_of([given([GridPoint({})] * 2, [outcome, outcome])])
    assert rows == [
        "dev f1 (yes) 0.5000 0.0000 0.5000 0.5000",
        "dev loss 1.0000 0.0000 1.0000 1.0000",
        "test f1 (yes) 0.2500 0.0000 0.2500 0.2500",
    ]


def test_a_narrow_table_folds_names_and_no_numbers() -> None:
    (point,) = expand({"training.learning_rate": ["1e-5"], "training.examples_per_step": ["16"]})
    name = "a-config-with-a-long-name"
    rows = rows_of([rank(given([point, point], [done(0.5), FAILED], name=name)), given([point], [done(0.25)])], 80)
    assert [number for row in rows for number in re.findall(r"0\.\d+", row)] == ["0.5000"] * 3 + ["0.2500"] * 3


def rows_of(ranked: Any, width: int = 160) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(results.score_table(ranked))
    return [" ".join(line.split()) for line in capture.get().splitlines() if line.strip(" ─")]


def test_of_two_configs_of_a_glue_task_the_better_one_counts() -> None:
    def made(score: float, task: str) -> list[Candidate]:
        return given([GridPoint({})], [done(score)], classification={"glue": task, "glue_dir": "glue"})

    best = results.glue_best([made(0.5, "rte"), made(0.7, "rte"), made(0.6, "rte"), made(0.9, "sst2")])
    assert results.glue_rows(best, "mine")[-1][5:-1:4] == ["90.0", "70.0"]
