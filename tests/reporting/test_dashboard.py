"""The dashboard: one list of panels, as a self-contained page and as a W&B workspace that can be read back."""

from __future__ import annotations

import datetime
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from html_page import Page
from hypothesis import given
from hypothesis import strategies as st

from finetune.cli import main
from finetune.tasks import registry
from finetune.training.config import TASKS, FinetuneConfig
from pretrain.common.errors import InputError
from pretrain.common.records import is_training, note_end, read_records
from pretrain.common.run_files import FAILED, SCORES
from pretrain.config import PretrainConfig
from pretrain.objectives import objective_of
from pretrain.reporting import dashboard
from pretrain.reporting.dashboard import curves, workspace
from pretrain.reporting.dashboard.panels import panels, panels_for
from pretrain.reporting.dashboard.runs import find_folder, read_runs
from pretrain.reporting.dashboard.subjects import subject
from pretrain.run import loop
from pretrain.run.metrics import TRAINING_METRICS
from pretrain.run.progress import Progress, Stopwatch, Window
from pretrain.run.stragglers import RankTimes
from tests.starts import pretraining
from tests.tasks.refusals import refused

HOSTILE = "</script><script>alert(1)</script> | [x](y) \u2028 'q\""
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)


def training(step: int, **others: Any) -> dict[str, Any]:
    record = {"step": step, "epoch": 0, "samples": 8 * step, "tokens": 900 * step, "loss": 9 - step / 100}
    record |= {"mlm_loss": 8.0, "nsp_loss": 0.7, "mlm_accuracy": 0.1, "nsp_accuracy": 0.5, "lr": 1e-3}
    record |= {"grad_norm": 1.5, "tokens_per_second": 2000.0, "mfu": 0.4, "data_stall_fraction": 0.01}
    record |= {"seconds": float(step), "evaluation_seconds": 0.0, "checkpoint_seconds": 0.0, "skipped_steps": 0}
    return {**record, "memory_bytes": 10**9, **others}


def evaluated(step: int, **scores: Any) -> dict[str, Any]:
    return {"step": step, "split": "validation", "loss": 1.0, "seconds": 1.0, **scores}


def add(run: Path, record: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def write_run(folder: Path, records: list[dict[str, Any]], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.yaml").write_text(json.dumps({"name": folder.name, **config}))
    return folder


def write_scores(folder: Path, metric: str, **scores: Any) -> None:
    (folder / SCORES).write_text(json.dumps({"metric": metric, "step": 2, "scores": {"dev": scores}, "details": {}}))


def draw(folder: Path) -> Path:
    """The page of the runs in this folder."""
    dashboard.write_dashboard(str(folder))
    return folder / "dashboard.html"


def plots_of(folder: Path) -> list[Any]:
    """The panels of the workspace beside the page."""
    return [one for section in workspace.read(folder / "dashboard.json").sections for one in section.panels]


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    assert found
    return json.loads(found[1])


def write_tuned(folder: Path, score: float, **config: Any) -> Path:
    """A finished fine-tuning with f1 as its main metric."""
    write_run(folder, [training(2), evaluated(2, exact=0.0, f1=score)], **config)
    write_scores(folder, "f1", exact=0.0, f1=score)
    return folder


def write_tasks(folder: Path) -> None:
    """Two tasks from pretrained weights with two seeds each, and from random weights."""
    given = {"names": ("entities", 0.8, 0.2), "returns": ("questions", 0.5, 0.1)}
    for name, (section, score, random_score) in given.items():
        data: dict[str, Any] = {section: {"train": f"labeled/{name}.jsonl"}, "start_from": "runs/demo/export"}
        for seed in (0, 1):
            write_tuned(folder / f"{name}-{seed}", score - 0.1 + 0.2 * seed, seed=seed, random_weights=False, **data)
        write_tuned(folder / f"{name}-random", random_score, random_weights=True, **data)


def tables_of(page: Path) -> dict[str, list[list[str]]]:
    """The cells of each table as text, by its heading."""
    found: dict[str, list[list[str]]] = {}
    table = r"<h2>([^<]*)</h2>\s*<div[^>]*><div[^>]*><table[^>]*>(.*?)</table>"
    for heading, body in re.findall(table, page.read_text(), re.S):
        rows = [
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in re.findall(r"<tr>(.*?)</tr>", body, re.S)
        ]
        found[heading] = [[" ".join(re.sub(r"<[^>]+>", " ", cell).split()) for cell in row] for row in rows]
    return found


def charts_of(page: Path) -> dict[str, list[dict[str, Any]]]:
    return {chart["title"]: chart["curves"] for chart in data_of(page)["charts"]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    records = [
        training(10),
        training(20, grad_norm=None),
        {"event": "restart", "step": 23, "time": 1e9, "message": HOSTILE},
        training(30, rank_forward_seconds=[0.5, 0.75], rank_wait_seconds=[0.0, 0.25]),
        evaluated(30, loss=7.5, mlm_loss=7.0, mlm_accuracy=0.2, best=True),
    ]
    phases = [{"steps": 20, "sequence_length": 128}, {"steps": 40, "sequence_length": 512}]
    return write_run(tmp_path / "mini", records, phases=phases)


class TestPanels:
    def test_every_metric_is_one_that_a_run_writes(self) -> None:
        """Compared with the records that the training loop writes, with each objective."""
        written: list[dict[str, Any]] = []
        engine: Any = SimpleNamespace(
            usage=lambda: SimpleNamespace(memory_bytes=1, waited_seconds=0.0),
            world_size=1,
            rank=0,
            device=torch.device("cpu"),
            workers=SimpleNamespace(sum_over_workers=lambda it: it),
        )
        for pairs, changes, totals, counts in (
            ("nsp", {}, 4, 2),
            ("sop", {}, 4, 2),
            ("none", {"distillation__teacher": "x"}, 6, 3),
            ("none", {"electra__generator_width": 0.5}, 4, 2),
        ):
            values = pretraining(Path("corpus"), Path("run"), [(32, 8, 1)], pairs__objective=pairs, **changes)
            objective = objective_of(PretrainConfig.model_validate(values))
            run: Any = SimpleNamespace(
                progress=Progress(step=1, window=Window(totals=[1.0] * totals, counts=[1.0] * counts)),
                engine=engine,
                task=SimpleNamespace(metrics=objective.means),
                plan=SimpleNamespace(peak_flops=1.0),
                recorder=SimpleNamespace(log=written.append),
                stopwatch=Stopwatch(),
                stragglers=RankTimes(engine),
                rate=0.1,
                epoch=0,
                norm=1.0,
            )
            loop.Fit.log(run)
        special = ("nsp_loss", "sop_loss", "distil_loss", "rtd_loss")
        assert [{*special} & set(record) for record in written] == [{name} for name in special]
        record = {name: value for one in written for name, value in one.items()}
        metrics = [metric for panel in panels() if panel.kind != "probes" for metric in panel.metrics]
        assert {metric for metric in metrics if not metric.endswith("/")} <= set(record)
        assert set(record) == set(TRAINING_METRICS)
        by_rank = {metric for panel in panels() if panel.kind == "ranks" for metric in panel.metrics}
        assert by_rank == {metric for metric, value in record.items() if isinstance(value, list)}

    def test_scores_are_what_else_an_evaluation_has(self) -> None:
        records = [training(1), evaluated(1, f1=0.5, best=True)]
        (scores,) = [panel for panel in panels_for(records) if panel.kind == "scores"]
        assert scores.metrics == ("f1",)
        assert "scores" not in {panel.kind for panel in panels_for([training(1)])}

    @pytest.mark.parametrize("task", registry.TASKS)
    def test_a_task_is_recognized_by_its_training_file(self, task: type[registry.Task[Any]]) -> None:
        """So a task of the registry needs no entry in the dashboard."""
        assert "train" in task.settings_type.model_fields
        other_sections = FinetuneConfig.model_construct(name="a").model_dump(mode="json", exclude=set(TASKS))
        assert subject(other_sections) is None
        recognized = subject({**other_sections, task.kind: {"train": "data/a.tsv"}})
        assert recognized is not None
        assert (recognized.data_key, recognized.data) == (f"{task.kind}.train", f"{task.kind}: a.tsv")


class TestCurves:
    @given(
        st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300),
        st.integers(1, 40),
        st.integers(1, 7),
    )
    def test_a_stretch_keeps_its_least_and_most(self, values: list[float | None], most: int, apart: int) -> None:
        steps = [7 + apart * number for number in range(len(values))]
        curve = curves.thin("a", "training", steps, values, most)
        finite = [value for value in values if value is not None]
        assert len(curve.x) <= most or len(values) <= most
        assert curve.x == sorted(set(curve.x))
        assert curve.not_finite == len(values) - len(finite)
        low, high = (those or curve.y for those in (curve.low, curve.high))
        for ours, theirs, pick in ((low, finite, min), (high, finite, max)):
            shown = [value for value in ours if value is not None]
            assert bool(shown) == bool(theirs)
            if theirs:
                assert pick(shown) == pytest.approx(pick(theirs), rel=1e-5)

    def test_one_spike_in_a_hundred_thousand_is_there(self) -> None:
        values: list[float | None] = [1.0] * 100_000
        values[54_321], values[60_000], values[70_000] = 9.0, math.nan, None
        curve = curves.thin("a", "training", range(10, 1_000_010, 10), values)
        assert len(curve.x) == curves.BUCKETS
        spike = curve.high.index(9.0)
        assert abs(curve.x[spike] - 543_220) < 1_000_000 / curves.BUCKETS
        assert sum(value == 9.0 for value in curve.high) == 1
        assert set(curve.low) == {1.0}
        assert curve.not_finite == 2

    def test_sources_and_probes_have_curves(self, tmp_path: Path) -> None:
        """Of one run a curve for each source and range; of several runs a chart for each."""

        def write(folder: Path) -> Path:
            sources = {"source_loss/wiki": 2.0, "source_loss/books + web": 3.0}
            write_run(folder, [training(10), training(20), evaluated(20, **sources, best=True)])
            scores = {"blimp": 0.6, "positions/0-63": 4.0, "positions/64-127": 3.5}
            failed = {"step": 30, "split": "probe", "time": 1e9, "seconds": 2.0, "error": "no such file"}
            probes = [{"step": 10, "split": "probe", "time": 1e9, "seconds": 2.0, "skipped": 0, **scores}, failed]
            (folder / "probes.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in probes))
            return folder

        charts = charts_of(draw(write(tmp_path / "a" / "one")))
        found = [(one["name"], one["x"], one["y"]) for one in charts["Held-out loss by source"]]
        assert found == [("wiki", [20], [2.0]), ("books + web", [20], [3.0])]
        found = [(one["name"], one["x"], one["y"]) for one in charts["Loss at positions"]]
        assert found == [("0-63", [10], [4.0]), ("64-127", [10], [3.5])]
        assert [one["y"] for one in charts["BLiMP"]] == [[0.6]]
        assert "Scores on held-out examples" not in charts
        write(tmp_path / "a" / "two")
        charts = charts_of(draw(tmp_path / "a"))
        for title in ("Held-out loss by source: wiki", "Loss at positions: 64-127"):
            assert [one["name"] for one in charts[title]] == ["one", "two"]
        plots = {panel.title: panel for panel in plots_of(tmp_path / "a") if hasattr(panel, "x")}
        names = {title: [str(getattr(name, "name", name)) for name in panel.y] for title, panel in plots.items()}
        assert names["BLiMP"] == ["probe/blimp"]
        assert "probe/step" in str(plots["BLiMP"].x)
        assert names["Held-out loss by source"] == ["eval/source_loss/wiki", "eval/source_loss/books + web"]

    def test_many_ranks_are_three_curves(self, tmp_path: Path) -> None:
        seconds = [float(n) for n in range(16)], [1.0] * 15
        records = [training(step, rank_forward_seconds=one) for step, one in enumerate(seconds, 1)]
        (run,) = read_runs(write_run(tmp_path / "r", records))
        (panel,) = [panel for panel in panels() if panel.metrics == ("rank_forward_seconds",)]
        found = {curve.name: curve.y for curve in curves.curves(panel, [run])}
        assert found == {"slowest of 16": [15.0, 1.0], "median of 16": [8.0, 1.0], "fastest of 16": [0.0, 1.0]}


class TestPage:
    def test_is_self_contained_and_shows_only_the_records(self, run: Path) -> None:
        page = draw(run)
        Page(page.read_text()).assert_stands_alone()
        charts = charts_of(page)
        found = [(one["name"], one["x"], one["y"]) for one in charts["Loss"]]
        assert found == [("training", [10, 20, 30], [8.9, 8.8, 8.7]), ("held-out", [30], [7.5])]
        assert charts["Gradient norm before clipping"][0]["y"] == [1.5, None, 1.5]
        assert charts["Gradient norm before clipping"][0]["not_finite"] == 1
        found = [(one["name"], one["y"]) for one in charts["Forward time by rank"]]
        assert found == [("rank 0", [0.5]), ("rank 1", [0.75])]
        marks = [(mark["kind"], mark["step"]) for mark in data_of(page)["marks"]]
        assert marks == [("restart", 23), ("phase", 20)]
        text = Page(page.read_text()).text
        for expected in ("Training: step 30 of 60", "7.000", "2,000", "0:30 left at this speed"):
            assert expected in text, expected

    def test_strangers_text_stays_text(self, tmp_path: Path) -> None:
        records = [training(1), {"event": HOSTILE, "step": 1, "message": HOSTILE}]
        run = write_run(tmp_path / "<b>&", records, phases=[{"steps": 5, "sequence_length": 8}])
        (run / "config.yaml").write_text(json.dumps({"name": HOSTILE, "tracking": {"group": HOSTILE}}))
        html = draw(run).read_text()
        assert "alert(1)" in html
        assert "<script>alert" not in html
        Page(html).assert_stands_alone()
        assert data_of(run / "dashboard.html")["marks"][0]["message"] == HOSTILE
        assert "alert(1)" in workspace.read(run / "dashboard.json").name
        section = json.loads((run / "dashboard.json").read_text())["spec"]["section"]
        (filtered,) = section["runSets"][0]["filters"]["filters"]
        assert filtered["value"] == [HOSTILE]

    def test_events_of_several_runs_are_listed_with_their_runs_and_not_drawn(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            write_run(tmp_path / name, [training(1), {"event": "restart", "step": 1, "message": f"worker of {name}"}])
        page = draw(tmp_path)
        assert data_of(page)["marks"] == []
        text = Page(page.read_text()).text
        assert "worker of one" in text
        assert "worker of two" in text

    def test_steps_undone_by_a_rollback_are_not_plotted(self, tmp_path: Path) -> None:
        records = [training(10), training(20, loss=99.0), training(30), {"event": "rollback", "step": 30}, training(20)]
        assert charts_of(draw(write_run(tmp_path / "r", records)))["Loss"][0]["y"] == [8.9, 8.8]

    def test_runs_beside_each_other_and_their_scores(self, tmp_path: Path) -> None:
        for seed, accuracy in enumerate((0.5, 0.75)):
            folder, scores = tmp_path / "glue" / "rte" / f"seed-{seed}", {"accuracy": accuracy, "f1": 0.1}
            config: dict[str, Any] = {"seed": seed, "classification": {"glue": "rte"}, "start_from": "bert"}
            write_run(folder, [training(2), evaluated(2, **scores)], **config)
            write_scores(folder, "accuracy", **scores)
        failed = write_run(tmp_path / "glue" / "rte" / "seed-2", [training(1)])
        (failed / FAILED).write_text(json.dumps({"message": HOSTILE}))
        page = draw(tmp_path / "glue")
        charts = charts_of(page)
        assert [one["name"] for one in charts["Loss, held-out"]] == ["rte/seed-0", "rte/seed-1"]
        assert [one["y"] for one in charts["Scores on held-out examples: accuracy"]] == [[0.5], [0.75]]
        text = Page(page.read_text()).text
        summary = "3 runs: 2 finished, 1 diverged"
        for expected in (summary, "classification: rte", "0.6250 ± 0.1768", "mean of 2", "alert(1)"):
            assert expected in text, expected

    def test_scores_of_evaluate_pretrained_are_skipped(self, run: Path) -> None:
        for folder in (run.parent / "scores", run):
            folder.mkdir(exist_ok=True)
            (folder / SCORES).write_text(json.dumps({"models": [{"name": "mini"}]}))
        assert "Fine-tuning scores" not in tables_of(draw(run.parent))

    def test_only_seeds_of_one_thing_are_averaged(self, tmp_path: Path) -> None:
        """Two tasks scored by the same metric, each from pretrained weights (two seeds) and from random ones."""
        write_tasks(tmp_path)
        page = draw(tmp_path)
        table = tables_of(page)["Fine-tuning scores by task and initial checkpoint"]
        assert table == [
            ["task", "metric", "set", "from runs/demo/export", "from random weights"],
            ["entities: names.jsonl", "f1", "dev", "0.8000 ± 0.1414 mean of 2, 0.7000 to 0.9000", "0.2000"],
            ["questions: returns.jsonl", "f1", "dev", "0.5000 ± 0.1414 mean of 2, 0.4000 to 0.6000", "0.1000"],
        ]
        assert not any("mean of" in " ".join(row) for row in tables_of(page)["Fine-tuning scores"])
        assert "mean of 6" not in Page(page.read_text()).text
        charts = charts_of(page)
        for data, names in (("entities: names.jsonl", "names"), ("questions: returns.jsonl", "returns")):
            shown = {one["name"]: one["y"] for one in charts[f"Scores on held-out examples: f1, {data}"]}
            assert set(shown) == {f"{names}-0", f"{names}-1", f"{names}-random"}
            assert all(len(values) == 1 for values in shown.values())

    def test_runs_of_other_settings_are_rows_of_their_own(self, tmp_path: Path) -> None:
        data = {"entities": {"train": "a/names.jsonl"}, "start_from": "bert"}
        for rate, score in ((1e-5, 0.25), (5e-5, 0.75)):
            for seed, precision in enumerate(("bf16", "fp32")):
                ours = {"training": {"learning_rate": rate, "epochs": 3.0}, "engine": {"precision": precision}}
                write_tuned(tmp_path / f"{rate}-{seed}", score, seed=seed, **data, **ours)
        rows = tables_of(draw(tmp_path))["Fine-tuning scores by task and initial checkpoint"][1:]
        task = "entities: names.jsonl, training.learning_rate"
        assert rows == [
            [f"{task} 1e-05", "f1", "dev", "0.2500 ± 0.0000 mean of 2, 0.2500 to 0.2500"],
            [f"{task} 5e-05", "f1", "dev", "0.7500 ± 0.0000 mean of 2, 0.7500 to 0.7500"],
        ]

    def test_a_torn_last_line_is_left_out(self, run: Path) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 40, "lo')
        assert charts_of(draw(run))["Loss"][0]["x"] == [10, 20, 30]

    def test_follow_ends_with_the_run(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        page, seen = run / "dashboard.html", []

        def sleep(seconds: float) -> None:
            seen.append('http-equiv="refresh"' in page.read_text())
            add(run, training(60))

        monkeypatch.setattr(dashboard.time, "sleep", sleep)
        dashboard.write_dashboard(str(run), follow=True)
        assert seen == [True]
        assert 'http-equiv="refresh"' not in page.read_text()
        assert "Finished at step 60 of 60" in page.read_text()

    @pytest.mark.parametrize("event", ["stop", "diverged"])
    def test_follow_ends_with_a_run_that_ended_early(self, run: Path, monkeypatch: Any, event: str) -> None:
        monkeypatch.setattr(dashboard.time, "sleep", lambda _: note_end(run, event, "as it was asked to: --resume"))
        dashboard.write_dashboard(str(run), follow=True)
        [state] = [one.state for one in read_runs(run)]
        assert state == {"stop": "stopped", "diverged": "diverged"}[event]
        add(run, training(60))
        assert read_runs(run)[0].state == "finished"

    def test_a_stopped_run_that_was_started_again_has_not_ended(self, run: Path) -> None:
        add(run, {"event": "stop", "step": 30, "time": 1e9, "message": "as it was asked to"})
        for started, state in ((1e9 - 60, "stopped"), (1e9 + 60, "not finished")):
            when = datetime.datetime.fromtimestamp(started, datetime.timezone.utc).isoformat(timespec="seconds")
            (run / "environment.json").write_text(json.dumps({"started": when}))
            assert read_runs(run)[0].state == state

    def test_time_left_weighs_phases_by_their_tokens(self, tmp_path: Path) -> None:
        phase = {"sequence_length": 128, "global_sequences": 8, "steps": 20, "peak_learning_rate": 1e-3}
        run = write_run(tmp_path / "r", [training(10)], phases=[phase, {**phase, "sequence_length": 512}])
        # 1 s a step: 10 more steps of length 128, then 20 that cost four times as much
        assert "1:30 left at this speed" in Page(draw(run).read_text()).text


class TestRefusals:
    @pytest.mark.parametrize(
        ("records", "expected"),
        [("", "no record yet"), ('{"event": "restart", "step": 0}\n', "no record yet"), (None, "no metrics.jsonl")],
    )
    def test_nothing_to_show_is_one_line(self, tmp_path: Path, capsys: Any, records: str | None, expected: str) -> None:
        if records is not None:
            (tmp_path / "metrics.jsonl").write_text(records)
        assert main(["dashboard", str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line

    def test_a_name_is_looked_for_below_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("runs/mini").mkdir(parents=True)
        assert find_folder("mini") == Path("runs/mini")
        refused("other: not a folder, and runs/other is not a folder either", find_folder, "other")

    def test_the_page_cannot_take_the_place_of_the_workspace(self, run: Path) -> None:
        with pytest.raises(InputError, match=r"page\.json: the workspace is written to this file"):
            dashboard.write_dashboard(str(run), run / "page.json")

    def test_another_file_in_the_place_is_refused(self, run: Path) -> None:
        (run / "dashboard.json").write_text('{"mine": 1}')
        refused(r"dashboard\.json: not a W&B workspace", dashboard.write_dashboard, str(run))


class TestWorkspace:
    def test_can_be_read_again_and_has_the_panels_in_wandbs_names(self, run: Path) -> None:
        draw(run)
        path = run / "dashboard.json"
        again = workspace.read(path)
        assert workspace.as_data(again) == json.loads(path.read_text())
        plots = {getattr(plot, "title", ""): plot for one in again.sections for plot in one.panels}
        names = {title: [one.name for one in getattr(plot, "y", [])] for title, plot in plots.items()}
        assert names["Loss"] == ["train/loss", "eval/loss"]
        assert names["Useful tokens per second"] == ["throughput/tokens_per_sec"]
        assert names["Forward time by rank"] == ["train/rank_forward_seconds/0", "train/rank_forward_seconds/1"]
        assert "events/restart" in names["Events"]
        assert re.fullmatch(again.runset_settings.query, "mini-0a1b2c3d")
        assert not re.fullmatch(again.runset_settings.query, "mini-2-0a1b2c3d")
        (run / "config.yaml").write_text(json.dumps({"name": "mini", "tracking": {"run_id": "mini-7"}}))
        dashboard.write_dashboard(str(run))
        assert re.fullmatch(workspace.read(path).runset_settings.query, "mini-7")

    def test_many_ranks_have_no_rank_among_the_seconds(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "r", [training(1, rank_wait_seconds=[0.1] * 255 + [0.5])])
        draw(run)
        (waits,) = [plot for plot in plots_of(run) if getattr(plot, "title", "") == "Data wait by rank"]
        names = [one.name.rpartition("/")[2] for one in waits.y]
        assert names == ["min", "median", "max"]

    def test_runs_are_grouped_by_what_they_were_trained_on(self, tmp_path: Path) -> None:
        write_tasks(tmp_path)
        draw(tmp_path)
        groups = [one.name for one in workspace.read(tmp_path / "dashboard.json").runset_settings.groupby]
        assert groups == ["entities.train", "questions.train", "random_weights"]
        bars = [plot for plot in plots_of(tmp_path) if type(plot).__name__ == "BarPlot"]
        assert [[metric.name for metric in plot.metrics] for plot in bars] == [["eval/f1"]]
        for path in tmp_path.glob("returns-*"):
            shutil.rmtree(path)
        shutil.rmtree(tmp_path / "names-random")
        dashboard.write_dashboard(str(tmp_path))
        assert workspace.read(tmp_path / "dashboard.json").runset_settings.groupby == []  # seeds of one

    def test_a_score_without_a_value_has_no_bar(self, tmp_path: Path) -> None:
        scores = {"accuracy": None, "f1": 0.1}
        run = write_run(tmp_path / "r", [training(2), evaluated(2, **scores)], classification={"glue": "rte"})
        write_scores(run, "accuracy", **scores)
        draw(run)
        kinds = {type(one).__name__ for one in plots_of(run)}
        assert kinds >= {"LinePlot"}
        assert "BarPlot" not in kinds

    def test_saved_twice_it_is_one_and_holds_no_key(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setattr(workspace, "wandb_entity", lambda: "we")
        from wandb_workspaces.workspaces import Workspace

        saved_as: list[str] = []

        def save(self: Any) -> None:
            saved_as.append(self._internal_name)
            self._internal_name, self._internal_id = "nw-abc-v", "id"

        monkeypatch.setattr(Workspace, "save", save)
        monkeypatch.setattr(Workspace, "url", property(lambda self: "https://wandb.example/we"))
        assert "https://wandb.example/we" in dashboard.write_dashboard(str(run))
        dashboard.write_dashboard(str(run))
        assert saved_as == ["", "nw-abc-v"]
        for name in ("dashboard.json", "dashboard.html"):
            assert KEY not in (run / name).read_text()

    def test_a_refusal_keeps_the_file_and_does_not_print_the_key(self, run: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setattr(workspace, "wandb_entity", MagicMock(side_effect=ConnectionError(f"401 for {KEY}")))
        said = dashboard.write_dashboard(str(run))
        assert "saving it to W&B failed (ConnectionError: 401 for ...)" in said
        assert workspace.read(run / "dashboard.json").entity == ""

    def test_a_run_that_is_kept_offline_stays_so(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setattr(workspace, "wandb_entity", lambda: pytest.fail("asked W&B"))
        (run / "config.yaml").write_text(json.dumps({"name": "mini", "tracking": {"wandb": "offline"}}))
        dashboard.write_dashboard(str(run))


def test_a_report_and_the_live_line_skip_events(run: Path) -> None:
    kinds = [is_training(record) for record in read_records(run)]
    assert kinds == [True, True, False, True, False]


@pytest.mark.parametrize("config", ["phases: x", "phases: [1]", "phases: [{steps: a}]", "a: [\n"])
def test_a_damaged_config_of_a_run_is_one_line(run: Path, config: str) -> None:
    (run / "config.yaml").write_text(config)
    refused(r"config\.yaml", dashboard.write_dashboard, str(run))
