"""`bench all` and `bench compare`: rows, table, JSON, page and verdicts. No test depends on measured speed."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import html
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corpora import make_corpus
from html_page import Page

from pretrain.__main__ import main
from pretrain.bench import all as bench_all
from pretrain.bench import baselines, compare, loader, page, quality, results, workers
from pretrain.bench.all import Measurement, collect
from pretrain.bench.results import BenchResult, Comparison, FailedMeasurement, Figure, Limit, Machine, Results
from pretrain.common.errors import InputError
from pretrain.common.settings import dump
from pretrain.config import load_config
from pretrain.corpus.shards import open_shards
from pretrain.reporting.charts import Bar, bar_chart
from tests.chaos import wait_for
from tests.tiny_checkpoints import make_bert, write_reviews

# What the benchmarks printed in small runs, shortened.
STEP: dict[str, Any] = {
    "threads": 2,
    "torch": "2.13.0+cpu",
    "results": [
        {
            "size": "mini",
            "length": 128,
            "sequences_per_step": 2,
            "mean_tokens": 100.0,
            "tokens_per_second": {"ours": 2248.95, "sdpa": 2286.63, "eager": 1949.35},
            "spread": {"ours": [2200.0, 2300.0], "sdpa": [2100.0, 2400.0], "eager": [1900.0, 2000.0]},
            "best_peer": "sdpa",
            "ratios": {"sdpa": [0.98, 0.95, 1.1], "eager": [1.15, 1.1, 1.2]},
            "loss": {"ours": 7.64},
            "matmul_peak_gflops": 373.9,
            "mfu": 0.1,
        }
    ],
}
LOADER: dict[str, Any] = {
    "loader": [
        {
            "length": 128,
            "sequences_per_batch": 8,
            "sequences_per_second": {"ours": 7750.1, "transformers": 12176.9},
            "spread": {"ours": [7700.0, 7800.0], "transformers": [12000.0, 12300.0]},
            "ratio": 0.636,
            "ratio_spread": [0.63, 0.64],
        }
    ],
    "resume": {"sample": 150_000_000, "seconds": 0.39},
}
PREPARE: dict[str, Any] = {
    "cores": 2,
    "file": {"path": "wiki.txt", "megabytes": 10.0},
    "speed": {
        "prepare": {"megabytes": 10.0, "mb_per_second": 10.0, "spread": [9.0, 11.0]},
        "datasets": {"megabytes": 10.0, "mb_per_second": 3.0, "spread": [2.9, 3.1]},
        "tokenize": {"megabytes": 9.91, "mb_per_second": 41.5, "spread": [40.0, 42.0]},
        "tokenizers": {"megabytes": 9.91, "mb_per_second": 6.7, "spread": [6.5, 6.9]},
    },
    "ratios": {
        "prepare / datasets": {"median": 3.3, "spread": [3.2, 3.4]},
        "prepare / tokenizers": {"median": 1.5, "spread": [1.4, 1.6]},
        "tokenize / tokenizers": {"median": 6.2, "spread": [6.0, 6.4]},
    },
    "read_mb_per_second": 20_000.0,
}
ABOUT: dict[str, Any] = {
    "started": "2026-11-21T18:49:05+00:00",
    "git_commit": "a955c95" + "0" * 33 + "-dirty",
    "cpu": "AMD <EPYC>",
    "cpu_cores": 2,
    "gpus": [],
    "memory_bytes": 24 << 30,
    "platform": "Linux",
    "python": "3.11.7",
    "packages": {"torch": "2.13.0"},
}
INPUTS = {"corpus": "ab12", "text": "cd34"}


def printing(what: str, kind: str, result: dict[str, Any]) -> Measurement:
    """A benchmark that prints a result after other output."""
    return Measurement(what, kind, (sys.executable, "-c", f"print('loading'); print({json.dumps(result)!r})"))


def failing(what: str, code: str) -> Measurement:
    return Measurement(what, "step", (sys.executable, "-c", code))


@pytest.fixture
def found(tmp_path: Path) -> Results:
    jobs = [
        printing("step mini @128", "step", STEP),
        failing("step base @512", "import sys; sys.exit('warning: x\\nerror: disk <full>')"),
        printing("loader", "loader", LOADER),
        printing("prepare", "prepare", PREPARE),
    ]
    return collect(jobs, tmp_path, ABOUT, INPUTS)


class TestRows:
    def test_a_step_is_compared_with_the_fastest_baseline_and_the_matmul_peak(self) -> None:
        (row,) = results.step_rows(STEP)
        assert (row.what, row.unit, row.baseline_name) == (
            "step mini @128",
            "useful tokens/s",
            "transformers sdpa",
        )
        assert row.ours == Figure(median=2248.95, low=2200, high=2300)
        assert row.baseline == Figure(median=2286.63, low=2100, high=2400)
        assert row.ratio == Figure(median=0.98, low=0.95, high=1.1)
        assert row.limit is not None
        assert (row.limit.value, row.limit.share) == (pytest.approx(22489.5), 0.1)

    def test_compiled_baselines_have_a_row_of_their_own(self) -> None:
        one = copy.deepcopy(STEP["results"][0])
        for kind, rate in (("sdpa-compiled", 4000.0), ("eager-compiled", 3000.0)):
            one["tokens_per_second"][kind], one["spread"][kind] = rate, [rate, rate]
            one["ratios"][kind] = [2248.95 / rate] * 3
        plain, compiled = results.step_rows({"results": [one]})
        assert (plain.what, plain.baseline_name) == ("step mini @128", "transformers sdpa")
        assert (compiled.what, compiled.baseline_name) == (
            "step mini @128, compiled",
            "transformers sdpa-compiled",
        )

    def test_the_loader_is_held_against_the_fastest_step_of_its_length(self) -> None:
        def step(size: str, length: int, rate: float) -> dict[str, Any]:
            return {"size": size, "length": length, "tokens_per_second": {"ours": rate}, "mean_tokens": 100.0}

        steps = [step("base", 128, 1000.0), step("mini", 128, 5000.0), step("mini", 512, 9000.0)]
        (row,) = results.loader_rows(LOADER, steps)
        assert row.limit is not None
        assert (row.limit.value, row.limit.share) == (50.0, pytest.approx(155.002))
        assert results.loader_rows(LOADER, [])[0].limit is None

    def test_the_preparation_is_held_against_reading_the_file(self) -> None:
        whole, alone, tokenizing = results.prepare_rows(PREPARE)
        assert (alone.ours.median, alone.baseline.median, alone.ratio.median) == (10.0, 6.7, 1.5)
        assert (whole.what, whole.ours.median, whole.baseline.median, whole.ratio.median) == (
            "prepare 10 MB, text to shards",
            10.0,
            3.0,
            3.3,
        )
        assert (tokenizing.ours.median, tokenizing.baseline_name, tokenizing.ratio.high) == (
            41.5,
            "encode_batch_fast",
            6.4,
        )
        # How many MB the sentences have depends on our splitting; the name must not.
        assert tokenizing.what == "tokenize 10 MB, sentences to ids"
        assert whole.limit is not None
        assert whole.limit.share == pytest.approx(10 / 20_000)


class TestCollecting:
    def test_one_failure_leaves_the_others(self, found: Results, tmp_path: Path) -> None:
        assert list(found.measured) == [
            "step mini @128",
            "loader @128",
            "prepare 10 MB, text to shards",
            "prepare 10 MB, text to shards, baseline to ids only",
            "tokenize 10 MB, sentences to ids",
        ]
        log = tmp_path / "step-base-512.log"
        assert found.failed == {"step base @512": f"disk <full> (its output: {log})"}
        assert log.read_text() == "warning: x\nerror: disk <full>\n"
        assert [run.result for run in found.runs] == [STEP, None, LOADER, PREPARE]
        assert found.machine.threads == 2
        # The need of the loader comes from the step of the same measurement.
        limit = found.measured["loader @128"].limit
        assert limit is not None
        assert limit.value == pytest.approx(22.4895)

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            ("", "printed no JSON"),
            ("print('nothing')", "printed no JSON"),
            ("import os; os._exit(9)", "exited with code 9"),
            ("import os; os.kill(os.getpid(), 15)", "exited with code -15"),
            ("raise KeyError('peak')", "KeyError: 'peak'"),
        ],
    )
    def test_every_end_without_a_result_is_a_failure(self, tmp_path: Path, code: str, reason: str) -> None:
        only = collect([failing("step", code)], tmp_path, ABOUT, INPUTS)
        assert only.failed["step"].startswith(reason)
        assert only.machine.threads is None

    def test_jobs_run_one_after_the_other_with_a_line_each(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        log = tmp_path / "order"
        code = f"f = open({str(log)!r}, 'a'); f.write('begin\\n'); f.flush(); f.write('end\\n'); raise SystemExit(2)"
        collect([failing("a", code), failing("b", code)], tmp_path, ABOUT, INPUTS)
        assert log.read_text().split() == ["begin", "end", "begin", "end"]
        lines = capsys.readouterr().err.splitlines()
        assert [re.sub(r"\d+ s", "N s", line) for line in lines] == [
            "[1/2] a ... failed after N s",
            "[2/2] b ... failed after N s",
        ]

    def test_quick_leaves_base_out(self) -> None:
        corpus, text = Path("corpus"), Path("text")
        quick, full = (bench_all.jobs(corpus, text, quick=quick) for quick in (True, False))
        assert [job.what for job in quick] == ["step mini @512", "step mini @128", "loader", "prepare"]
        assert [job.what for job in full][2:4] == ["step base @512", "step base @128"]
        assert all(job.command[:4] == (sys.executable, "-m", "pretrain", "bench") for job in full)


class TestOlderFiles:
    def test_the_file_of_an_older_version_is_read(self, found: Results, tmp_path: Path) -> None:
        path = tmp_path / "bench.json"
        results.write(found, path)
        today = path.read_text()
        assert today.count('"mfu"') == 1
        path.write_text(today.replace('"mfu"', '"peak_fraction"'))
        former = (
            path.read_text().replace("baseline to ids only", "peer to ids alone").replace("tokenize 10", "tokenise 10")
        )
        path.write_text(former)
        assert results.read(path) == found
        assert main(["bench", "compare", str(path), str(path)]) == 0

    def test_the_output_of_an_older_version_is_a_row(self) -> None:
        one = copy.deepcopy(STEP["results"][0])
        one["peak_fraction"] = one.pop("mfu")
        assert results.step_rows({"results": [one]}) == results.step_rows(STEP)


class TestCommand:
    @pytest.fixture
    def arguments(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Arguments of `bench all` for a small corpus."""
        monkeypatch.chdir(tmp_path)
        text = tmp_path / "wiki.txt"
        text.write_text(
            f'<doc id="1" url="" title="A">\nA\n\n{"Some words are here, and more of them follow. " * 20}\n\n</doc>\n'
        )
        return ["all", "--corpus", str(make_corpus(tmp_path / "corpus", documents=4)), "--text", str(text)]

    def test_writes_table_json_and_page(
        self, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(bench_all, "jobs", lambda *_, **__: [printing("step", "step", STEP)])
        assert main(["bench", *arguments]) == 0
        (folder,) = Path("runs").glob("bench-*")
        out = capsys.readouterr().out
        assert "step mini @128" in out
        assert str(folder / "bench.json") in out
        assert (folder / "bench.html").resolve().as_uri() in out
        found = results.read(folder / "bench.json")
        assert [run.what for run in found.runs] == ["step"]
        assert set(found.inputs) == {"corpus", "text"}
        assert folder.name.endswith(results.short_commit(found.commit))

    def test_ends_with_3_where_one_failed(
        self, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        jobs = [
            failing("step", "raise SystemExit('error: no compiler')"),
            printing("loader", "loader", LOADER),
        ]
        monkeypatch.setattr(bench_all, "jobs", lambda *_, **__: jobs)
        assert main(["bench", *arguments, "--out", "here"]) == 3
        assert "step: failed: no compiler" in capsys.readouterr().out
        assert list(results.read(Path("here/bench.json")).measured) == ["loader @128"]
        assert "no compiler" in Path("here/bench.html").read_text()

    @pytest.mark.parametrize("missing", ["--corpus", "--text"])
    def test_missing_input_is_reported_before_anything_runs(
        self, arguments: list[str], missing: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments[arguments.index(missing) + 1] = "nowhere"
        assert main(["bench", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert "nowhere" in line

    @pytest.mark.slow
    def test_measures_for_real(self, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        least = {
            "step": ["--tokens", "256", "--repeats", "1"],
            "loader": ["--sequences", "2", "--repeats", "1"],
            "prepare": ["--repeats", "1"],
        }
        planned = bench_all.jobs
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
        monkeypatch.setattr(
            bench_all,
            "jobs",
            lambda *given, **named: [
                dataclasses.replace(job, command=(*job.command, *least[job.kind]))
                for job in planned(*given, **named)
                if job.what != "step mini @512"
            ],
        )
        make_corpus(Path("corpus"), documents=100)
        assert main(["bench", *arguments, "--quick", "--out", "here"]) == 0
        found = results.read(Path("here/bench.json"))
        assert [what.partition(" ")[0] for what in found.measured] == [
            "step",
            "loader",
            "loader",
            "prepare",
            "tokenize",
        ]
        assert [row.limit is not None for row in found.measured.values()] == [True, False, True, True, True]
        Page(Path("here/bench.html").read_text()).assert_stands_alone()
        assert main(["bench", "compare", "here/bench.json", "here/bench.json"]) == 0

    @pytest.mark.slow
    def test_a_family_without_next_sentences_is_measured(self, arguments: list[str]) -> None:
        make_corpus(Path("corpus"), documents=100)
        least = ["--sizes", "mini", "--lengths", "128", "--tokens", "256", "--repeats", "1", "--precision", "fp32"]
        assert main(["bench", "step", "--corpus", "corpus", "--families", "modernbert", "--peers", "bare", *least]) == 0


class TestWritingOut:
    def test_the_table_is_aligned_and_complete(self, found: Results) -> None:
        lines = results.table(found).splitlines()
        table, rest = lines[:6], lines[6:]
        assert len({line.index("transformers") for line in table if "transformers" in line}) == 1
        assert len({len(line) for line in table}) == 1
        step = re.split(r"  +", table[1])
        assert step == [
            "step mini @128",
            "useful tokens/s",
            "2,249",
            "(2,200-2,300)",
            "transformers sdpa",
            "2,287",
            "0.98",
            "(0.95-1.10)",
            "22,489",
            "10 %",
        ]
        assert rest[0].startswith("step base @512: failed: disk <full>")
        assert [line.partition(",")[0] for line in rest[1:]] == [
            "limit of step: matmul peak",
            "limit of loader: training step",
            "limit of prepare and tokenize: reading the file",
        ]

    def test_json_comes_back_as_it_was(self, found: Results, tmp_path: Path) -> None:
        results.write(found, tmp_path / "bench.json")
        assert results.read(tmp_path / "bench.json") == found

    @pytest.mark.parametrize(
        ("value", "text"),
        [(12345.6, "12,346"), (100, "100"), (99.94, "99.9"), (9.876, "9.88"), (0.001, "0.00")],
    )
    def test_numbers(self, value: float, text: str) -> None:
        assert results.number(value) == text

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0.000456, "0.046 %"), (0.404, "40 %"), (1.5, "1.5 times"), (1374.2, "1,374 times")],
    )
    def test_shares(self, value: float, text: str) -> None:
        assert results.share(value) == text

    def test_commits_are_shortened(self) -> None:
        assert results.short_commit("v0.1.0-3-g" + "a" * 40 + "-dirty") == "v0.1.0-3-gaaaaaaa-dirty"
        assert results.short_commit(None) == "unknown"


class TestPage:
    def test_is_self_contained_and_has_every_figure(self, found: Results, tmp_path: Path) -> None:
        shown = Page(page.write(found, tmp_path / "bench.html").read_text())
        shown.assert_stands_alone()
        for row in found.measured.values():
            for cell in results.cells(row):
                assert cell in shown.text, cell
        for expected in (
            "commit a955c95-dirty",
            "AMD <EPYC>",
            "disk <full>",
            "matmul peak: 22,489",
            "ab12",
            "training step: 22.5",
            "reading the file: 20,000, out of range",
        ):
            assert expected in shown.text, expected
        assert shown.html.count("<figure") == 5

    def test_without_a_figure_it_says_what_failed(self, tmp_path: Path) -> None:
        nothing = collect([failing("step", "raise SystemExit('<b>')")], tmp_path, ABOUT, INPUTS)
        shown = Page(page.write(nothing, tmp_path / "bench.html").read_text())
        shown.assert_stands_alone()
        assert "<b> (its output" in shown.text
        assert "<figure" not in shown.html


class TestBarChart:
    bars = (Bar("ours", 50, 40, 80), Bar("a<b>", 20, 10, 25, "baseline"))

    def chart(self, limit: tuple[str, float] | None) -> str:
        chart = bar_chart("t & u", "things/s", self.bars, form=str, limit=limit)
        assert not Page(chart).open
        return chart

    def widths(self, chart: str) -> list[float]:
        return [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', chart)]

    def test_bars_are_as_long_as_their_values_and_the_range_fits(self) -> None:
        chart = self.chart(None)
        assert self.widths(chart) == [
            pytest.approx(388 * 50 / 80, abs=0.1),
            pytest.approx(388 * 20 / 80, abs=0.1),
        ]
        ends = [float(x) for x in re.findall(r'x2="([\d.]+)"', chart)]
        assert max(ends) == 394
        assert html.escape("a<b>") in chart
        assert "class=limit" not in chart

    def test_a_near_limit_is_a_mark_on_each_bar(self) -> None:
        chart = self.chart(("peak", 160))
        assert self.widths(chart) == [
            pytest.approx(388 * 50 / 160, abs=0.1),
            pytest.approx(388 * 20 / 160, abs=0.1),
        ]
        assert re.findall(r'<line class=limit x1="([\d.]+)"', chart) == ["394.0", "394.0"]
        assert "peak: 160" in chart

    def test_a_far_limit_is_written_as_text(self) -> None:
        chart = self.chart(("reading", 100_000))
        assert self.widths(chart) == self.widths(self.chart(None))
        assert "class=limit" not in chart
        assert "reading: 100000, out of range" in chart


def of(low: float, median: float, high: float) -> Figure:
    return Figure(median=median, low=low, high=high)


def row(what: str, ours: Figure, baseline: float = 10, baseline_name: str = "baseline") -> Comparison:
    flat = of(baseline, baseline, baseline)
    limit = Limit(name="limit", meaning="all", value=1000, share=ours.median / 1000)
    ratio = of(ours.low / baseline, ours.median / baseline, ours.high / baseline)
    return Comparison(
        what=what, unit="x/s", ours=ours, baseline_name=baseline_name, baseline=flat, ratio=ratio, limit=limit
    )


def measured(*rows: Comparison | FailedMeasurement, **changes: Any) -> Results:
    machine = Machine(cpu="A", cores=2, threads=2, gpus=[], memory_bytes=1, platform="", python="", packages={})
    machine = machine.model_copy(update={key: value for key, value in changes.items() if key != "inputs"})
    runs = [
        BenchResult(what=one.what, kind="step", command="", seconds=1, result=None, failed=getattr(one, "failed", ""))
        for one in rows
    ]
    return Results(
        date=ABOUT["started"],
        commit=None,
        machine=machine,
        inputs=changes.get("inputs", INPUTS),
        rows=list(rows),
        runs=runs,
    )


Compare = Callable[..., tuple[int, str]]


class TestCompare:
    @pytest.fixture
    def compared(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
        """Exit code and output of `bench compare` on two results."""

        def run(a: Results, b: Results, *options: str) -> tuple[int, str]:
            results.write(a, tmp_path / "a.json")
            results.write(b, tmp_path / "b.json")
            code = main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *options])
            return code, capsys.readouterr().out

        return run

    @pytest.mark.parametrize(
        ("a", "b", "expected"),
        [
            (of(95, 100, 105), of(70, 80, 90), "slower"),
            (of(95, 100, 105), of(110, 120, 130), "faster"),
            (of(95, 100, 105), of(70, 80, 95), "ranges overlap"),  # they touch
            (of(85, 100, 105), of(70, 80, 90), "ranges overlap"),
            (of(50, 100, 150), of(70, 80, 90), "ranges overlap"),  # one inside the other
            (of(70, 80, 90), of(50, 100, 150), "ranges overlap"),
            (of(99, 100, 101), of(96, 97, 98), "significant, but under 5%"),
            (of(99, 100, 101), of(102, 103, 104), "significant, but under 5%"),
            (of(100, 100, 100), of(95, 95, 95), "slower"),  # the threshold itself counts
            (of(100, 100, 100), of(100, 100, 100), "ranges overlap"),
        ],
    )
    def test_verdicts(self, a: Figure, b: Figure, expected: str) -> None:
        assert compare.verdict(a, b, 0.05) == expected

    def test_a_slow_down_is_shown_and_fails(self, compared: Compare) -> None:
        a = measured(row("fast", of(95, 100, 105)), row("slow", of(95, 100, 105)), row("same", of(90, 100, 105)))
        b = measured(
            row("fast", of(190, 200, 210), baseline=11), row("slow", of(70, 80, 90)), row("same", of(85, 95, 100))
        )
        code, out = compared(a, b)
        assert code == 1
        lines = {line.split()[0]: re.split(r"  +", line) for line in out.splitlines()}
        assert lines["fast"] == [
            "fast",
            "x/s",
            "100",
            "(95.0-105)",
            "200",
            "(190-210)",
            "+100.0%",
            "+10.0%",
            "+81.8%",
            "faster",
        ]
        assert lines["slow"][-4:] == ["-20.0%", "+0.0%", "-20.0%", "slower"]
        assert lines["same"][-1] == "ranges overlap"
        assert out.splitlines()[-1] == "regressions: slow"
        assert "warning" not in out

    def test_the_threshold_decides(self, compared: Compare) -> None:
        a, b = measured(row("slow", of(95, 100, 105))), measured(row("slow", of(70, 80, 90)))
        assert compared(a, b, "--threshold", "0.25")[0] == 0
        assert compared(a, b, "--threshold", "0.1")[0] == 1
        assert compared(b, a)[0] == 0

    def test_rows_of_one_file_alone_are_listed(self, compared: Compare) -> None:
        a, b = (
            measured(row("old", of(1, 2, 3)), row("both", of(1, 2, 3))),
            measured(row("both", of(1, 2, 3)), row("new", of(1, 2, 3))),
        )
        code, out = compared(a, b)
        assert code == 0
        assert "only in A: old\nonly in B: new\nno regressions" in out
        assert "no row is in both files" in compared(measured(), a)[1]

    def test_what_fails_only_in_b_counts_as_worse(self, compared: Compare) -> None:
        good, bad = measured(row("step", of(1, 2, 3))), measured(FailedMeasurement(what="step", failed="no memory"))
        code, out = compared(good, bad)
        assert code == 1
        assert "failed in B: step: no memory\nregressions: step (failed)" in out
        assert compared(bad, good)[0] == 0
        assert compared(bad, bad)[0] == 0

    def test_another_baseline_has_no_change(self, compared: Compare) -> None:
        a, b = (
            measured(row("step", of(1, 2, 3))),
            measured(row("step", of(1, 2, 3), baseline_name="another kind")),
        )
        assert re.search(r"\+0\.0%  *differs  differs  ranges overlap", compared(a, b)[1])

    def test_a_slower_machine_is_not_a_slow_down(self, compared: Compare) -> None:
        """If both rates halve, the ratio stays. If only ours halves, that is a regression."""
        a, b = measured(row("step", of(95, 100, 105))), measured(row("step", of(47, 50, 53), baseline=5))
        assert compared(a, b)[0] == 0
        assert compared(a, measured(row("step", of(47, 50, 53))))[0] == 1

    def test_different_machines_and_inputs_are_reported_in_one_line_each(self, compared: Compare) -> None:
        a = measured(row("step", of(1, 2, 3)))
        b = measured(row("step", of(1, 2, 3)), cpu="B", threads=4, inputs={**INPUTS, "text": "ef56"})
        code, out = compared(a, b)
        assert code == 0
        assert [line for line in out.splitlines() if line.startswith("warning")] == [
            "warning: the machines differ: cpu A / B, threads 2 / 4",
            "warning: the inputs differ: text cd34 / ef56",
        ]

    @pytest.mark.parametrize(
        ("content", "fault"),
        [
            (None, "No such file"),
            (b"", "Invalid JSON"),
            (b"\xff\x00", "Invalid JSON"),
            (b"{}", "date: Field required"),
            (b"[1]", "should be an object"),
            (b'{"format": 2}', "format"),
            ("median", "ours.median"),
        ],
    )
    def test_files_that_are_not_results_are_refused_in_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | str | None, fault: str
    ) -> None:
        good, bad = tmp_path / "good.json", tmp_path / "bad.json"
        results.write(measured(row("step", of(1, 2, 3))), good)
        if isinstance(content, bytes):
            bad.write_bytes(content)
        elif content:
            bad.write_text(good.read_text().replace(f'"{content}": 2.0', f'"{content}": NaN', 1))
        assert main(["bench", "compare", str(good), str(bad)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {bad}: ")
        assert fault in line

    @pytest.mark.parametrize("threshold", ["-0.1", "nan"])
    def test_a_senseless_threshold_is_refused(self, capsys: pytest.CaptureFixture[str], threshold: str) -> None:
        assert main(["bench", "compare", "a", "b", f"--threshold={threshold}"]) == 2
        assert capsys.readouterr().err.startswith("error: --threshold: is ")


def test_a_corpus_of_less_than_a_batch_is_refused(tmp_path: Path) -> None:
    shards = open_shards(make_corpus(tmp_path / "corpus", documents=4), "train")
    with pytest.raises(InputError, match=r"fills \d+ sequences of 512, less than a batch of 256"):
        loader.compare(shards, 512, 256, 1)


TERMINATED = {
    "bench all": (
        "from pretrain.bench import all as bench; from pathlib import Path; from pretrain.common import children\n"
        "with children.unwound_when_terminated(), tempfile.TemporaryDirectory() as folder:\n"
        "    bench._run(bench.Measurement.of('one', 'step'), Path(folder))"
    ),
    "bench finetune": "from finetune.__main__ import main; sys.exit(main(['bench', 'finetune', sys.argv[2]]))",
    "--minutes": (
        "from pretrain import pace; from pretrain.config import load_config\n"
        "pace._time_steps(load_config(sys.argv[3]), 2)"
    ),
}


@pytest.mark.parametrize("what", list(TERMINATED))
def test_what_is_terminated_ends_its_program_and_leaves_no_files(what: str, tmp_path: Path) -> None:
    """A stand-in for the program says that it has started, and that it was asked to end."""
    program, scratch = tmp_path / "program", tmp_path / "scratch"
    lines = (f"trap 'touch {tmp_path}/ended; exit' TERM", f"touch {tmp_path}/started", "while :; do sleep 0.1; done")
    program.write_text("\n".join(["#!/bin/sh", *lines]))
    program.chmod(0o755)
    scratch.mkdir()
    reviews, start = write_reviews(tmp_path, train=4, dev=4), str(make_bert(tmp_path / "bert"))
    task = {"name": "run", "run_dir": str(tmp_path / "run"), "start_from": start, "classification": reviews}
    (tmp_path / "task.yaml").write_text(json.dumps({**task, "engine": {"precision": "fp32"}}))
    recipe = Path(__file__).parents[1] / "configs/pretrain/mini.yaml"
    code = f"import sys, tempfile; sys.executable = sys.argv[1]\n{TERMINATED[what]}"
    command = [sys.executable, "-c", code, str(program), str(tmp_path / "task.yaml"), str(recipe)]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}) as running:
        wait_for((tmp_path / "started").exists)
        running.terminate()
        assert running.wait(timeout=60) == 128 + signal.SIGTERM
    assert (tmp_path / "ended").exists()
    assert not list(scratch.iterdir())


def test_workers_are_compared_round_by_round() -> None:
    """Ratios are medians over the rounds, so a single slow round has no effect."""
    bare = {"name": "bare", "tokens_per_second": [100.0, 50.0, 200.0]}
    ways = [
        {"name": "zero 1 x 1 workers", "zero": 1, "workers": 1, "tokens_per_second": [90.0, 45.0, 160.0]},
        {"name": "zero 1 x 2 workers", "zero": 1, "workers": 2, "tokens_per_second": [99.0, 36.0, 176.0]},
        {"name": "zero 3 x 2 workers", "zero": 3, "workers": 2, "tokens_per_second": [80.0, 40.0, 160.0]},
    ]
    rows = workers.compare(bare, ways)
    assert [row["median"] for row in rows] == [100.0, 90.0, 99.0, 80.0]
    assert [row.get("of bare") for row in rows] == pytest.approx([None, 0.9, 0.88, 0.8])
    assert [row.get("of the first") for row in rows] == pytest.approx([None, 1.0, 1.1, 1.0])


def test_workers_refuses_runs_too_short_to_measure() -> None:
    with pytest.raises(InputError, match="--steps is 19; give at least 20"):
        workers.main(["--corpus", "nowhere", "--steps", "19"])


class TestQuality:
    def options(self, **values: Any) -> argparse.Namespace:
        given = {"corpus": "unused", "size": "mini", "length": 64, "sequences": 32, "rate": 1e-3, "recipe": None}
        return argparse.Namespace(**{**given, "peer_family": "bert", **values})

    def test_without_a_recipe_both_train_the_same(self) -> None:
        ours, theirs = quality._configs(self.options())
        assert ours is theirs
        assert theirs.pairs.has_classifier
        assert type(baselines._their_model(theirs, 100, "eager")).__name__ == "BertForPreTraining"

    def test_a_recipe_trains_as_it_says_and_the_baseline_as_its_own_does(self) -> None:
        recipe = Path(__file__).parents[1] / "configs/pretrain/mini.yaml"
        ours, theirs = quality._configs(self.options(recipe=str(recipe)))
        assert (ours.optimizer.name, ours.masking.probability, ours.model.family) == ("muon", 0.3, "modernbert")
        assert (theirs.optimizer.name, theirs.masking.probability, theirs.model.family) == ("adamw", 0.15, "bert")
        assert (ours.phases[0].global_sequences, theirs.phases[0].global_sequences) == (64, 32)
        assert ours.phases[0].sequence_length == theirs.phases[0].sequence_length == 64
        assert ours.pairs == theirs.pairs, "the same sequences"
        assert ours.corpus == theirs.corpus
        assert type(baselines._their_model(theirs, 100, "eager")).__name__ == "BertForMaskedLM"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("start_from", "somewhere"),
            ("distillation.teacher", "somewhere"),
            ("electra.generator_width", "0.25"),
            ("averaging.share", "0.2"),
        ],
    )
    def test_a_recipe_of_another_objective_is_refused(self, name: str, value: str, tmp_path: Path) -> None:
        path = Path(__file__).parents[1] / "configs/pretrain/mini.yaml"
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(dump(load_config(path, [f"{name}={value}"])))
        with pytest.raises(InputError, match=f"recipe.yaml: {name} is set; this benchmark trains masked"):
            quality._configs(self.options(recipe=str(recipe)))

    def test_a_corpus_without_held_out_text_is_refused_before_training(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(quality, "TrainerProcess", lambda _: pytest.fail("trained"))
        corpus = make_corpus(tmp_path / "corpus", documents=4, validation_documents=0)
        with pytest.raises(InputError, match="has no held-out text"):
            quality.compare(self.options(corpus=str(corpus)))

    def test_a_recipes_decay_and_masking_are_those_of_a_run_of_the_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In 10 minutes, 1,000 steps of ours fit; ours ends with them, if it is faster than it was when timed."""
        specs: list[baselines.TrainerSpec] = []

        class Trainer:
            def __init__(self, spec: baselines.TrainerSpec) -> None:
                specs.append(spec)
                self.seconds = {1: 0.6, 2: 0.4}.get(len(specs), 2.0)

            def train(self, _: float) -> baselines.StepReport:
                return baselines.StepReport(self.seconds, 1, 1.0)

            def held_out_loss(self) -> float:
                return 1.0

            def close(self) -> None: ...

        monkeypatch.setattr(quality, "TrainerProcess", Trainer)
        monkeypatch.setattr(quality, "open_shards", lambda *_: argparse.Namespace(shards=[1]))
        path = Path(__file__).parents[1] / "configs/pretrain/mini.yaml"
        options = self.options(recipe=str(path), minutes=10.0, json=True, peer="eager")
        sequences = quality.compare(options)["sequences"]
        ours, recipe = specs[1].config, load_config(path)
        assert ours.phases[0].steps == 1000
        assert ours.weight_decay == pytest.approx(recipe.weight_decay * recipe.total_steps / 1000)
        assert ours.masking_shares(0) == (0.3, 0.15)
        assert sequences == {"ours": 999 * 64, "transformers": 300 * 32}, "the step that compiles is not counted"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scale", "--repeats", "0"], "--repeats: '0' is not a whole number above 0"),
        (["loader", "--repeats", "0"], "--repeats: '0' is not a whole number above 0"),
        (["step", "--corpus", "x", "--repeats", "0"], "--repeats: '0' is not a whole number above 0"),
        (["workers", "--corpus", "x", "--rounds", "0"], "--rounds: '0' is not a whole number above 0"),
        (["checkpoint", "--rounds", "0"], "--rounds: '0' is not a whole number above 0"),
        (["loader", "--lengths", "128", "4"], "error: bench: sequence_length: "),
        (["wire", "--ranks", "8", "1"], "error: --ranks: 1, which sends nothing; expected numbers from 2."),
        (["wire", "--size", "nosuch"], "--size: invalid choice: 'nosuch'"),
        (["checkpoint", "--size", "nosuch"], "error: bench: model: size: 'nosuch' is no size of family bert"),
        (["quality", "--corpus", "x", "--size", "nosuch"], "error: bench: model: size: 'nosuch' is no size"),
        (["quality", "--corpus", "x", "--minutes", "0"], "error: --minutes: 0; expected a number above 0."),
        (["scale", "--length", "4"], "error: bench: phases.0.sequence_length: "),
        (["step", "--corpus", "x", "--threads", "-1"], "error: --threads: -1; expected a whole number from 0."),
        (["prepare", "--limit-mb", "nan"], "error: --limit-mb: nan; expected a number of MB from 0."),
        (["prepare", "--limit-mb", "inf"], "error: --limit-mb: inf; expected a number of MB from 0."),
        (["prepare", "--limit-mb", "-1"], "error: --limit-mb: -1; expected a number of MB from 0."),
        (["checkpoint", "--dir", f"{__file__}/x"], "/test_bench.py/x: cannot write here"),
    ],
)
def test_senseless_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["bench", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
