"""Runs side by side: one list of panels, as the charts of a report and as a W&B workspace that can be read back."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from html_page import Page

from finetune.cli import main
from finetune.tasks import registry
from finetune.training.config import TASKS, FinetuneConfig
from pretrain.common.records import append_end_event, is_training, read_records
from pretrain.common.run_files import FAILED, SCORES
from pretrain.config import PretrainConfig
from pretrain.objectives import make_objective
from pretrain.reporting import pages, report, workspace
from pretrain.reporting.panels import panels, panels_for
from pretrain.reporting.runs import read_runs
from pretrain.reporting.subjects import subject_of
from pretrain.run import loop
from pretrain.run.metrics import TRAINING_METRICS
from pretrain.run.progress import MetricSums, Progress, Stopwatch
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


def write_scores(folder: Path, metric: str, positive: str = "", **scores: Any) -> None:
    said = {"metric": metric, "step": 2, "scores": {"dev": scores}, "details": {"dev": {"positive": positive}}}
    (folder / SCORES).write_text(json.dumps(said))


def draw(*folders: Path, watched: bool = False) -> Page:
    """The page of these runs, written into the first folder."""
    page = Page(report.write_report(folders, folders[0] / "report.html", watched=watched).read_text())
    page.assert_stands_alone()
    return page


def written(folder: Path) -> str:
    return workspace.write(read_runs([folder]), folder / "workspace.json")


def read_workspace(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["workspace"]


def plots_of(folder: Path) -> list[dict[str, Any]]:
    """The panels of the workspace in the folder."""
    return [one for section in read_workspace(folder / "workspace.json")["sections"] for one in section["panels"]]


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


def tables_of(page: Page) -> dict[str, list[list[str]]]:
    """The cells of each table as text, by its heading."""
    found: dict[str, list[list[str]]] = {}
    for heading, body in re.findall(r"<h2>([^<]*)</h2>\s*<div[^>]*><div[^>]*><table>(.*?)</table>", page.html, re.S):
        rows = re.findall(r"<tr>(.*?)</tr>", body, re.S)
        found[heading] = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row, re.S) for row in rows]
    return found


def charts_of(page: Page) -> dict[str, dict[str, list[list[str]]]]:
    """Title of a chart -> name of a curve -> step and value of each point, as text."""
    titles = re.findall(r'<figure class="chart" data-chart[^>]*><figcaption><b>(.*?)</b>', page.html)
    curves = [{curve["name"]: [point[2:] for point in curve["points"]] for curve in chart} for chart in page.charts]
    return dict(zip(titles, curves, strict=True))


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
            objective = make_objective(PretrainConfig.model_validate(values))
            run: Any = SimpleNamespace(
                progress=Progress(step=1, window=MetricSums(totals=[1.0] * totals, counts=[1.0] * counts)),
                engine=engine,
                task=SimpleNamespace(metrics=objective.means),
                plan=SimpleNamespace(peak_flops=1.0),
                recorder=SimpleNamespace(log=written.append),
                stopwatch=Stopwatch(),
                stragglers=RankTimes(engine),
                learning_rate=0.1,
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
        assert subject_of(other_sections) is None
        recognized = subject_of({**other_sections, task.kind: {"train": "data/a.tsv"}})
        assert recognized is not None
        assert (recognized.data_key, recognized.data) == (f"{task.kind}.train", f"{task.kind}: a.tsv")


class TestPage:
    def test_a_run_has_its_curves_ranks_and_events(self, run: Path) -> None:
        page = draw(run)
        charts = charts_of(page)
        assert charts["Loss, nats"] == {
            "training": [["step 10", "8.9"], ["step 20", "8.8"], ["step 30", "8.7"]],
            "held-out": [["step 30", "7.5"]],
        }
        assert charts["Gradient norm before clipping (1 not finite)"] == {
            "training": [["step 10", "1.5"], ["step 30", "1.5"]]
        }
        assert charts["Forward time by rank, s"] == {"rank 0": [["step 30", "0.5"]], "rank 1": [["step 30", "0.75"]]}
        loss = page.html[page.html.index(">Loss, nats<") :].partition("</svg>")[0]
        assert loss.count('class="event"') == loss.count('class="mark"') == 1
        assert "length 128" in loss
        for expected in ("Not finished at step 30 of 60", "7.000", "2,000", "0:30 left at this speed", HOSTILE):
            assert expected in page.text, expected

    def test_of_many_ranks_three_are_shown(self, tmp_path: Path) -> None:
        times = [0.1 * number for number in range(1, 17)]
        charts = charts_of(draw(write_run(tmp_path / "r", [training(1, rank_forward_seconds=times)])))
        found = {name: value for name, ((_, value),) in charts["Forward time by rank, s"].items()}
        assert found == {"slowest of 16": "1.6", "median of 16": "0.9", "fastest of 16": "0.1"}

    def test_strangers_text_stays_text(self, tmp_path: Path) -> None:
        records = [training(1), {"event": HOSTILE, "step": 1, "message": HOSTILE}]
        run = write_run(tmp_path / "<b>&", records, phases=[{"steps": 5, "sequence_length": 8}])
        (run / "config.yaml").write_text(json.dumps({"name": HOSTILE, "tracking": {"group": HOSTILE}}))
        page = draw(run)
        assert "alert(1)" in page.html
        assert "<script>alert" not in page.html
        written(run)
        assert "alert(1)" in read_workspace(run / "workspace.json")["name"]
        sent = workspace.make(read_runs([run]), "")._to_model().model_dump(mode="json", by_alias=True)
        (filtered,) = sent["spec"]["section"]["runSets"][0]["filters"]["filters"]
        assert filtered["value"] == [HOSTILE]

    def test_steps_undone_by_a_rollback_are_not_plotted(self, tmp_path: Path) -> None:
        records = [training(10), training(20, loss=99.0), training(30), {"event": "rollback", "step": 30}, training(20)]
        charts = charts_of(draw(write_run(tmp_path / "r", records)))
        assert charts["Loss, nats"] == {"training": [["step 10", "8.9"], ["step 20", "8.8"]]}

    def test_pretrainings_lie_over_each_other(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        other = write_run(tmp_path / "other", [training(10, loss=5.0), {"event": "stop", "step": 10, "message": "x"}])
        page = draw(run, other)
        charts = charts_of(page)
        assert charts["Loss, training, nats"]["other"] == [["step 10", "5"]]
        assert list(charts["Loss, training, nats"]) == ["mini", "other"]
        assert charts["Loss, held-out, nats"] == {"mini": [["step 30", "7.5"]]}
        assert list(charts["Learning rate"]) == ["mini", "other"]
        assert not any("by rank" in title for title in charts)
        tables = tables_of(page)
        assert tables["Runs"] == [
            ["run", "state", "MLM loss", "MLM accuracy", "tokens/s", "training time"],
            ["mini", "not finished at step 30 of 60", "7.000", "20.0%", "2,000", "0:30"],
            ["other", "stopped at step 10", "", "", "2,000", "0:10"],
        ]
        assert [row[:3] for row in tables["Events"][1:]] == [["other", "stop", "10"], ["mini", "restart", "23"]]
        assert 'class="event"' not in page.html, "no line would show whose event it is"
        assert report.summary([run, other]).splitlines()[1].split()[:4] == ["mini", "not", "finished", "at"]
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "60")
        narrow = report.summary([run, other]).splitlines()
        assert narrow[:2] == ["mini", "  state             not finished at step 30 of 60"]

    def test_fine_tunings_have_their_scores_side_by_side(self, tmp_path: Path) -> None:
        """Two tasks scored by the same metric, each from pretrained weights (two seeds) and from random ones."""
        write_tasks(tmp_path)
        failed = tmp_path / "names-9"
        failed.mkdir()
        (failed / FAILED).write_text(json.dumps({"message": "loss is NaN"}))
        page = draw(tmp_path)
        tables = tables_of(page)
        assert tables["Fine-tuning scores by task and initial checkpoint"] == [
            ["task", "metric", "set", "from runs/demo/export", "from random weights"],
            ["entities: names.jsonl", "f1", "dev", "0.8000 ± 0.1414 (mean of 2, 0.7000 to 0.9000)", "0.2000"],
            ["questions: returns.jsonl", "f1", "dev", "0.5000 ± 0.1414 (mean of 2, 0.4000 to 0.6000)", "0.1000"],
        ]
        scores = {row[0]: row[1:3] for row in tables["Runs"]}
        assert scores["names-0"] == ["finished at step 2", "dev: f1 0.7000, exact 0.0000"]
        assert scores["names-9"] == ["diverged at step 0", "loss is NaN"]
        assert "7 runs: 6 finished, 1 diverged" in page.text
        charts = charts_of(page)
        for data, names in (("entities: names.jsonl", "names"), ("questions: returns.jsonl", "returns")):
            shown = charts[f"Scores on held-out examples: f1, {data}"]
            assert set(shown) == {f"{names}-0", f"{names}-1", f"{names}-random"}

    def test_a_sweep_over_glue_has_its_table(self, tmp_path: Path) -> None:
        for at, (task, score) in enumerate([("rte", "60.0"), ("sst2", "90.0")]):
            write_tuned(tmp_path / task / "seed-0", 0.5, start_from="bert", classification={"glue": task})
            summary = tmp_path / task / "summary.json"
            summary.write_text(json.dumps({"glue": [["", "RTE"], ["mine, dev", score]]}))
            os.utime(summary, (at, at))
        assert tables_of(draw(tmp_path))["GLUE"] == [["", "RTE"], ["mine, dev", "90.0"]]
        assert "GLUE" not in tables_of(draw(tmp_path / "rte/seed-0"))

    def test_runs_of_other_settings_are_rows_of_their_own(self, tmp_path: Path) -> None:
        data = {"entities": {"train": "a/names.jsonl"}, "start_from": "bert"}
        for rate, score in ((1e-5, 0.25), (5e-5, 0.75)):
            for seed, precision in enumerate(("bf16", "fp32")):
                ours = {"training": {"learning_rate": rate, "epochs": 3.0}, "engine": {"precision": precision}}
                write_tuned(tmp_path / f"{rate}-{seed}", score, seed=seed, **data, **ours)
        rows = tables_of(draw(tmp_path))["Fine-tuning scores by task and initial checkpoint"][1:]
        task = "entities: names.jsonl, training.learning_rate"
        assert [row[:1] + row[3:] for row in rows] == [
            [f"{task} 1e-05", "0.2500 ± 0.0000 (mean of 2, 0.2500 to 0.2500)"],
            [f"{task} 5e-05", "0.7500 ± 0.0000 (mean of 2, 0.7500 to 0.7500)"],
        ]

    def test_scores_of_evaluate_pretrained_are_skipped(self, run: Path) -> None:
        for folder in (run.parent / "scores", run):
            folder.mkdir(exist_ok=True)
            (folder / SCORES).write_text(json.dumps({"models": [{"name": "mini"}]}))
        assert list(tables_of(draw(run.parent))) == ["Events"]

    def test_a_torn_last_line_is_left_out(self, run: Path) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 40, "lo')
        assert [step for step, _ in charts_of(draw(run))["Loss, nats"]["training"]] == ["step 10", "step 20", "step 30"]

    def test_a_watched_page_is_drawn_again_until_the_run_ends(self, run: Path) -> None:
        out = run / "report.html"
        server = pages.make_server(lambda: report.write_report([run], out, watched=True))
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def get(path: str = "/") -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}") as answer:
                return answer.read().decode()

        try:
            for step, said, refreshed in ((40, "Not finished at step 40 of 60", 1), (60, "Finished at step 60", 0)):
                add(run, training(step))
                page = get()
                assert said in page
                assert page.count('http-equiv="refresh"') == refreshed
                assert page == out.read_text()
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get("/metrics.jsonl")
            (run / "metrics.jsonl").write_text("damaged\n\n")
            with pytest.raises(urllib.error.HTTPError, match="500") as refusal:
                get()
            assert "not a JSON object" in refusal.value.read().decode()
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    @pytest.mark.parametrize("event", ["stop", "diverged"])
    def test_a_run_that_ended_early_is_over(self, run: Path, event: str) -> None:
        append_end_event(run, event, "as it was asked to: --resume", 20)
        assert read_runs([run])[0].state == {"stop": "stopped", "diverged": "diverged"}[event]
        assert 'http-equiv="refresh"' not in draw(run, watched=True).html
        add(run, training(60))
        assert read_runs([run])[0].state == "finished"

    @pytest.mark.parametrize("saved", [20, 34])  # before the last record at 30 (ended immediately), or after it
    def test_a_stopped_run_is_where_it_is_saved_until_it_is_started_again(self, run: Path, saved: int) -> None:
        add(run, {"event": "stop", "step": saved, "time": 1e9, "message": "as it was asked to"})
        for started, said in (
            (1e9 - 60, f"Stopped at step {saved} of 60"),
            (1e9 + 60, "Not finished at step 30 of 60"),
        ):
            when = datetime.datetime.fromtimestamp(started, datetime.timezone.utc).isoformat(timespec="seconds")
            (run / "environment.json").write_text(json.dumps({"started": when}))
            assert said in draw(run).text

    def test_time_left_weighs_phases_by_their_tokens(self, tmp_path: Path) -> None:
        phase = {"sequence_length": 128, "global_sequences": 8, "steps": 20, "peak_learning_rate": 1e-3}
        run = write_run(tmp_path / "r", [training(10)], phases=[phase, {**phase, "sequence_length": 512}])
        # 1 s a step: 10 more steps of length 128, then 20 that cost four times as much
        assert "1:30 left at this speed" in draw(run).text


class TestNames:
    @pytest.mark.parametrize(
        ("records", "expected"),
        [("", "no record yet"), ('{"event": "restart", "step": 0}\n', "no record yet"), (None, "no metrics.jsonl")],
    )
    def test_nothing_to_show_is_one_line(self, tmp_path: Path, capsys: Any, records: str | None, expected: str) -> None:
        if records is not None:
            (tmp_path / "metrics.jsonl").write_text(records)
        assert main(["report", str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line

    def test_runs_are_found_by_name_and_jobs_by_their_cluster(self, run: Path, monkeypatch: Any, capsys: Any) -> None:
        monkeypatch.chdir(run.parent)
        job = write_run(run.parent / "elsewhere", [training(1)])
        Path("runs").mkdir()
        run.rename("runs/mini")
        found = {("job", ""): job, ("mini", "http://head:8265"): job}
        monkeypatch.setattr("finetune.cli.find_job_folder", lambda *given, plain_http: found.get(given))
        assert main(["report", "mini", "job", "mini", "--workspace"]) == 0
        assert list(charts_of(Page(Path("report.html").read_text()))["Learning rate"]) == ["runs/mini", "elsewhere"]
        assert read_workspace(Path("report.workspace.json"))["sections"]
        assert main(["report", "mini", "--address", "http://head:8265"]) == 0
        assert (job / "report.html").is_file()
        assert main(["report", "other"]) == 2
        assert "other: not a folder, and runs/other is not a folder either" in capsys.readouterr().err


class TestWorkspace:
    def test_has_the_panels_in_wandbs_names(self, run: Path) -> None:
        written(run)
        path = run / "workspace.json"
        names = {plot.get("title", ""): plot.get("y", []) for plot in plots_of(run)}
        assert names["Loss"] == ["train/loss", "eval/loss"]
        assert names["Useful tokens per second"] == ["throughput/tokens_per_sec"]
        assert names["Forward time by rank"] == ["train/rank_forward_seconds/0", "train/rank_forward_seconds/1"]
        assert "events/restart" in names["Events"]
        query = read_workspace(path)["runset_settings"]["query"]
        assert re.fullmatch(query, "mini-0a1b2c3d")
        assert not re.fullmatch(query, "mini-2-0a1b2c3d")
        (run / "config.yaml").write_text(json.dumps({"name": "mini", "tracking": {"run_id": "mini-7"}}))
        written(run)
        assert re.fullmatch(read_workspace(path)["runset_settings"]["query"], "mini-7")

    def test_another_file_in_the_place_is_refused(self, run: Path) -> None:
        (run / "workspace.json").write_text('{"mine": 1}')
        refused(r"workspace\.json: not a W&B workspace", written, run)

    def test_many_ranks_have_no_rank_among_the_seconds(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "r", [training(1, rank_wait_seconds=[0.1] * 255 + [0.5])])
        written(run)
        (waits,) = [plot for plot in plots_of(run) if plot.get("title") == "Data wait by rank"]
        names = [one.rpartition("/")[2] for one in waits["y"]]
        assert names == ["min", "median", "max"]

    def test_runs_are_grouped_by_what_they_were_trained_on(self, tmp_path: Path) -> None:
        write_tasks(tmp_path)
        written(tmp_path)
        groups = [one["name"] for one in read_workspace(tmp_path / "workspace.json")["runset_settings"]["groupby"]]
        assert groups == ["entities.train", "questions.train", "random_weights"]
        assert [plot["metrics"] for plot in plots_of(tmp_path) if "metrics" in plot] == [["eval/f1"]]
        for path in tmp_path.glob("returns-*"):
            shutil.rmtree(path)
        shutil.rmtree(tmp_path / "names-random")
        written(tmp_path)
        assert read_workspace(tmp_path / "workspace.json")["runset_settings"]["groupby"] == []  # seeds of one

    def test_beside_f1_stands_its_class(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "r", [training(2), evaluated(2, f1=0.1)], classification={"train": "a.csv"})
        write_scores(run, "f1", "fraud", f1=0.1, macro_f1=0.5)
        page = draw(tmp_path)
        assert tables_of(page)["Runs"][1][2] == "dev: f1 (fraud) 0.1000, macro f1 0.5000"
        assert "f1 (fraud)" in str(page.text).partition("Runs")[0], "the tile"

    def test_a_score_without_a_value_has_no_bar(self, tmp_path: Path) -> None:
        scores = {"accuracy": None, "f1": 0.1}
        run = write_run(tmp_path / "r", [training(2), evaluated(2, **scores)], classification={"glue": "rte"})
        write_scores(run, "accuracy", **scores)
        written(run)
        plots = plots_of(run)
        assert any("y" in one for one in plots)
        assert not any("metrics" in one for one in plots)

    def test_saved_twice_it_is_one_and_holds_no_key(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setattr(workspace, "wandb_entity", lambda: "we")
        from wandb_workspaces.workspaces import internal

        stored: list[Any] = []

        def upsert(view: Any) -> dict[str, Any]:
            stored.append((view.name, view.model_copy(deep=True)))
            view.name = "nw-abc-v"
            return {"upsertView": {"view": {"name": "nw-abc-v", "id": "id"}}}

        monkeypatch.setattr(internal, "upsert_view2", upsert)
        monkeypatch.setattr(
            internal.View, "from_name", lambda *names: stored[-1][1].model_copy(update={"name": names[2]})
        )
        monkeypatch.setattr("wandb_workspaces.workspaces.interface.get_app_url", lambda _: "https://wandb.example")
        monkeypatch.setattr("wandb.Api", lambda: None)
        assert "https://wandb.example/we" in written(run)
        (run / "config.yaml").write_text(json.dumps({"name": "other", "tracking": {"project": "bertrain"}}))
        assert "https://wandb.example/we" in written(run)
        assert [view.display_name for _, view in stored] == ["mini report", "other report"]
        first, second = (name for name, _ in stored)
        assert second == "nw-abc-v" != first
        assert KEY not in (run / "workspace.json").read_text()

    def test_a_refusal_keeps_the_file_and_does_not_print_the_key(self, run: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setattr(workspace, "wandb_entity", MagicMock(side_effect=ConnectionError(f"401 for {KEY}")))
        said = written(run)
        assert "saving it to W&B failed (ConnectionError: 401 for ...)" in said
        assert read_workspace(run / "workspace.json")["entity"] == ""

    def test_a_run_that_is_kept_offline_stays_so(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setattr(workspace, "wandb_entity", lambda: pytest.fail("asked W&B"))
        (run / "config.yaml").write_text(json.dumps({"name": "mini", "tracking": {"wandb": "offline"}}))
        written(run)


def test_a_report_and_the_live_line_skip_events(run: Path) -> None:
    kinds = [is_training(record) for record in read_records(run)]
    assert kinds == [True, True, False, True, False]


@pytest.mark.parametrize("config", ["phases: x", "phases: [1]", "phases: [{steps: a}]", "a: [\n"])
def test_a_damaged_config_of_a_run_is_one_line(run: Path, config: str) -> None:
    (run / "config.yaml").write_text(config)
    refused(r"config\.yaml", read_runs, [run])
