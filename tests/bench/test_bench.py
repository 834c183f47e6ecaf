"""`bench`: options, ends and rows. No test depends on measured speed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from corpora import make_corpus

from pretrain.common.errors import InputError
from pretrain.corpus.shards import open_shards
from tests.bench import loader, workers
from tests.bench.__main__ import BENCHMARKS, main
from tests.chaos import wait_for
from tests.tiny_checkpoints import make_bert, write_reviews

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_names_the_program_as_it_was_started(name, monkeypatch, capsys) -> None:
    monkeypatch.setenv("BERTRAIN_PROGRAM", "./launch.sh")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: ./launch.sh bench {name} ")


def test_names_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed"]) == 2
    assert capsys.readouterr().err.startswith("error: bench: 'speed' is not a benchmark; choose from step, prepare, ")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.count("\n  s") == 4


def test_the_product_imports_no_benchmark() -> None:
    files = [path for package in ("pretrain", "finetune", "cluster") for path in (ROOT / package).rglob("*.py")]
    assert not [path for path in files if "tests.bench" in path.read_text()]


def test_a_benchmark_runs_from_any_folder(tmp_path: Path) -> None:
    """As launch.sh starts it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "tests.bench", "scale", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_step_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_corpus(tmp_path / "corpus", documents=100)
    least = ["--sizes", "mini", "--lengths", "128", "--tokens", "256", "--repeats", "1", "--precision", "fp32"]
    arguments = ["--corpus", str(tmp_path / "corpus"), "--peers", "bare", "sdpa", *least]
    assert main(["step", *arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["tokens_per_second"]["ours"] > 0


@pytest.mark.slow
def test_loader_and_preparation_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loader", "--sequences", "2", "--repeats", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loader"][0]["sequences_per_second"]["ours"] > 0
    body = "A sentence of some words & more. Another one follows it.\n\n" * 100
    documents = (f'<doc id="{n}" url="u" title="T{n}">\nT{n}\n\nNumber {n}. {body}</doc>\n' for n in range(20))
    (tmp_path / "wiki").write_text("".join(documents))
    arguments = ["prepare", "--file", str(tmp_path / "wiki"), "--json"]
    assert main([*arguments, "--repeats", "1"]) == 0
    speeds = json.loads(capsys.readouterr().out)["speed"]
    assert speeds["tokenize"]["tokens"] == speeds["tokenizers"]["tokens"] == speeds["prepare"]["tokens"] > 0
    assert main([*arguments, "--check-ids"]) == 0
    assert json.loads(capsys.readouterr().out)["ids"]["mismatches"] == 0


def test_a_corpus_of_less_than_a_batch_is_refused(tmp_path: Path) -> None:
    shards = open_shards(make_corpus(tmp_path / "corpus", documents=4), "train")
    with pytest.raises(InputError, match=r"fills \d+ sequences of 512, less than a batch of 256"):
        loader.compare(shards, 512, 256, 1)


TERMINATED = {
    "bench finetune": "from tests.bench.__main__ import main; sys.exit(main(['finetune', sys.argv[2]]))",
    "--minutes": (
        "from pretrain.planning import pace; from pretrain.config import load_config\n"
        "pace.time_steps(load_config(sys.argv[3]), 2)"
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
    recipe = Path(__file__).parents[2] / "configs/pretrain/mini.yaml"
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scale", "--repeats", "0"], "--repeats: '0' is not a whole number above 0"),
        (["loader", "--repeats", "0"], "--repeats: '0' is not a whole number above 0"),
        (["step", "--corpus", "x", "--repeats", "0"], "--repeats: '0' is not a whole number above 0"),
        (["workers", "--corpus", "x", "--rounds", "0"], "--rounds: '0' is not a whole number above 0"),
        (["workers", "--corpus", "x", "--steps", "19"], "--steps is 19; give at least 20"),
        (["loader", "--lengths", "128", "4"], "error: bench: sequence_length: "),
        (["scale", "--length", "4"], "error: bench: phases.0.sequence_length: "),
        (["step", "--corpus", "x", "--threads", "-1"], "error: --threads: -1; expected a whole number from 0."),
        (["prepare", "--file", "nowhere"], "error: --file: nowhere: not found, or not a file."),
        (["prepare", "--file", __file__], "no document in this source of kind wikiextractor"),
    ],
)
def test_senseless_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(words)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
