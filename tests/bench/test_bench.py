"""`bench`: options, ends and rows. No test depends on measured speed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from corpora import make_corpus
from tiny_checkpoints import make_bert, make_distilbert, make_roberta, write_reviews

from finetune.training.config import load_config
from pretrain.checkpoint import released
from pretrain.common.errors import InputError, MachineError
from pretrain.planning.roofline import GPUS, find_gpu
from tests.bench import finetuning, gpu, workers
from tests.bench.__main__ import BENCHMARKS, main
from tests.bench.gpu import Case, host_reads, measure, table
from tests.chaos import ROOT, wait_for
from tests.distributed import run_program


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


SMALL_RUNS = {
    "finetune": (["run.yaml", "--seeds", "1"], "trainer "),
    "workers": (["--corpus", "corpus", "--steps", "20", "--zero", "1", "--workers", "1", "--rounds", "1"], "of bare"),
    "scale": (["--ranks", "2", "--repeats", "1"], "max/mean"),
    "stream": (["--terabytes", "0.002", "--ranks", "2", "--rate", "1e9", "--seconds", "0.1", "--steps", "0"], "rank 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_RUNS)
def test_every_other_benchmark_of_a_cpu_runs(name, tmp_path, monkeypatch, capsys) -> None:
    """`speedrun` runs in the default suite, `gpu` needs a GPU."""
    monkeypatch.chdir(tmp_path)
    words, expected = SMALL_RUNS[name]
    if name in ("workers", "scale"):
        words = [*words, "--length", "64", "--sequences", "4"]
    if name == "workers":
        make_corpus(tmp_path / "corpus", documents=100)
    if name == "finetune":
        pytest.importorskip("accelerate")
        reviews, training = write_reviews(tmp_path, train=64, dev=8), {"examples_per_step": 4, "epochs": 1.0}
        bert = str(make_bert(tmp_path / "bert"))
        write_config(tmp_path, start_from=bert, classification=reviews, training=training, engine={"precision": "fp32"})
    assert main([name, *words]) == 0, capsys.readouterr().err
    assert expected in capsys.readouterr().out


@pytest.mark.slow
def test_preparation_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "A sentence of some words & more. Another one follows it.\n\n" * 100
    documents = (f'<doc id="{n}" url="u" title="T{n}">\nT{n}\n\nNumber {n}. {body}</doc>\n' for n in range(20))
    (tmp_path / "wiki").write_text("".join(documents))
    assert main(["prepare", "--file", str(tmp_path / "wiki"), "--repeats", "1", "--json"]) == 0
    speeds = json.loads(capsys.readouterr().out)["speed"]
    assert speeds["tokenizers"]["tokens"] == speeds["prepare"]["tokens"] > speeds["datasets"]["tokens"] > 0


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
        (["scale", "--repeats", "0"], "--repeats: '0' is not a positive integer"),
        (["step", "--corpus", "x", "--repeats", "0"], "--repeats: '0' is not a positive integer"),
        (["workers", "--corpus", "x", "--rounds", "0"], "--rounds: '0' is not a positive integer"),
        (["workers", "--corpus", "x", "--steps", "19"], "--steps is 19; give at least 20"),
        (["scale", "--length", "4"], "error: bench: phases.0.sequence_length: "),
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


SHAPE = {"size": "custom", "layers": 1, "hidden": 32, "heads": 2, "max_positions": 64}
SMALL = Case("small", 16, 64, 101, SHAPE)


def test_without_a_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: bench gpu: torch ")
    assert "finds no GPU" in line


@pytest.mark.parametrize(
    ("known", "name"),
    [
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("A100", "NVIDIA A100-SXM4-80GB"),
        ("L4", "NVIDIA L4"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("", "NVIDIA T4"),
        ("", "NVIDIA L40"),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(name: str, known: str) -> None:
    assert find_gpu(name) is GPUS.get(known)


def test_a_small_model_is_trained_and_stands_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gpu.bench_config

    def uncompiled(*arguments: Any, **options: Any) -> Any:
        config = whole(*arguments, **options)
        return config.model_copy(update={"engine": config.engine.model_copy(update={"compile": False})})

    monkeypatch.setattr(gpu, "bench_config", uncompiled)
    monkeypatch.setattr(gpu, "BLOCKS", 2)
    row = measure(SMALL, 1, "bf16", GPUS["H100"])
    assert row["seconds"] > 0
    assert row["spread_seconds"][0] <= row["seconds"] <= row["spread_seconds"][1]
    assert row["share"] == row["limit_seconds"] / row["seconds"]
    assert row["limited_by"] == "products"
    assert sum(row["parts"].values()) == row["limit_seconds"]
    header, line = table([row]).splitlines()
    assert header.split("  ")[0] == "model"
    assert line.startswith("small  4 x 16 bf16  ")
    assert "products" in line


def test_rows_without_times_or_limits() -> None:
    row: dict[str, Any] = {"model": "large", "length": 128, "sequences": 8, "precision": "fp32"}
    failed = {**row, "failed": "does not fit into this GPU's memory"}
    timed = {**row, "seconds": 0.5, "host_reads": {"engine.py:10": 2, "loop.py:3": 1}, "memory_bytes": 3 << 30}
    timed |= {"host_seconds": 0.2, "kernel_seconds": 0.4}
    lines = table([failed, timed]).splitlines()
    assert " ".join(lines[1].split()) == f"large 8 x 128 fp32 - - - - - - - - {failed['failed']}"
    assert " ".join(lines[2].split()) == "large 8 x 128 fp32 500.0 200.0 400.0 2,048 - - - 3 3.0"
    assert lines[3:] == ["host read: engine.py:10", "host read: loop.py:3"]


def test_host_reads_are_counted_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    synchronize = lambda device: modes.append("waited")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    def step() -> None:
        assert modes[-1] == "warn"
        torch.cuda.synchronize(device="cuda:0")
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another warning", stacklevel=1)

    reads = host_reads(step)
    assert sorted(reads.values()) == [1, 1, 3]
    assert all(place.startswith(__file__) for place in reads)
    assert modes == [0, "warn", "waited", 0]
    assert torch.cuda.synchronize is synchronize

    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        host_reads(fail)
    assert modes[-1] == 0


# Earlier trainings in this process leave them set (pretrain/run/session.py). accelerate would then wait for ranks.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def write_config(root: Path, **values: Any) -> Path:
    path = root / "run.yaml"
    settings = {"name": "run", "run_dir": str(root / "run"), "max_length": 32, "tracking": {"wandb": "off"}, **values}
    path.write_text(yaml.safe_dump(settings))
    return path


def train_baselines(given: list[list[str]]) -> int:
    return max(main(["finetune", *words]) for words in given)


def test_the_trainer_learns_from_every_family(tmp_path: Path) -> None:
    """RoBERTa has one type of segment, DistilBERT none, and each its own padding."""
    bert = make_bert(tmp_path / "bert")
    reviews, given = write_reviews(tmp_path, train=160, dev=40), []
    training = {"examples_per_step": 16, "learning_rate": 3e-3, "epochs": 12.0}
    for start in (make_roberta(tmp_path / "roberta", bert), make_distilbert(tmp_path / "distilbert", bert)):
        place = tmp_path / f"{start.name}-run"
        place.mkdir()
        path = write_config(place, start_from=str(start), classification=reviews, training=training)
        given.append([str(path), "--peer", str(place / "result.json")])
    alone = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    done = run_program(train_baselines, given, env=alone)
    assert done.returncode == 0, done.stderr
    for _, _, output in given:
        scores = json.loads(Path(output).read_text())
        assert scores["metric"] == "accuracy"
        assert scores["score"] > 0.6, "better than guessing"
        assert scores["examples_per_second"] > 0


def test_the_trainer_has_our_optimizer_and_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    own = {"training": {"warmup_share": 0.1}, "optimizer": {"beta2": 0.98}}
    path = write_config(tmp_path, start_from="unused", classification=write_reviews(tmp_path, train=4, dev=4), **own)
    config = load_config(path)
    given = finetuning.trainer_arguments(config, 100)
    assert (given.adam_beta1, given.adam_beta2) == (config.optimizer.beta1, config.optimizer.beta2) == (0.9, 0.98)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = transformers.get_scheduler(given.lr_scheduler_type, optimizer, given.warmup_steps, 100)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:10] == pytest.approx([step / 10 for step in range(10)])
    assert rates[10:] == pytest.approx([1 - step / 90 for step in range(90)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"training": {"layer_decay": 0.9}}, "training.layer_decay: 0.9; the Trainer has no such setting. Set it to 1"),
        ({"optimizer": {"name": "lamb"}}, "optimizer.name: lamb; the Trainer has no such setting. Set it to adamw"),
        ({"random_weights": True}, "random_weights: True; the Trainer has no such setting. Set it to False"),
        ({"class_weights": "balanced"}, "classification.class_weights: balanced; .* Set it to none"),
        ({"dev": None}, r"no dev set\. Set one"),
        ({"start_from": "run"}, "It is a run: export it"),
        ({"start_from": "own"}, r"It has model\.norm"),
        ({"start_from": ""}, "--from: missing"),
        ({"start_from": "bert"}, r"is missing\. Install the extra"),  # of a package
    ],
)
def test_what_cannot_be_compared_is_refused_before_training(tmp_path, monkeypatch, values, message) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetuning, "run_program", lambda _: pytest.fail("trained"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    start = values.get("start_from", "unused")
    if start == "run":
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        (tmp_path / "run" / "config.yaml").write_text("name: pretrained\n")
    elif start in ("own", "bert"):
        make_bert(tmp_path / start)
        monkeypatch.setattr(released, "unsupported_in_transformers", lambda _: "model.norm" if start == "own" else "")
    reviews = {**write_reviews(tmp_path, train=4, dev=4)}
    reviews |= {name: values.pop(name) for name in ("class_weights", "dev") if name in values}
    reviews = {name: value for name, value in reviews.items() if value is not None}
    config = load_config(write_config(tmp_path, **{"start_from": start, "classification": reviews, **values}))
    with pytest.raises((InputError, MachineError), match=message):
        finetuning.compare(config, 1)


def test_only_tags_of_tokens_are_padded() -> None:
    """A label set may have as many labels as the first text has tokens."""
    sets = [{"input_ids": [1] * tokens, "labels": [1.0, 0.0, 0.0]} for tokens in (3, 4)]
    assert finetuning.collate_windows(sets, 0, segments=False, tags=False)["labels"].shape == (2, 3)
    tagged = [{"input_ids": [1] * tokens, "labels": [2] * tokens} for tokens in (3, 4)]
    collated = finetuning.collate_windows(tagged, 0, segments=False, tags=True)
    assert collated["labels"].tolist() == [[2, 2, 2, -100], [2, 2, 2, 2]]


def test_runs_of_the_benchmark_are_not_tracked(tmp_path: Path) -> None:
    reviews = write_reviews(tmp_path, train=4, dev=4)
    tracking = {"wandb": "online", "log_every_steps": 7}
    config = load_config(write_config(tmp_path, start_from="unused", classification=reviews, tracking=tracking))
    written = load_config(finetuning.write_run_config(config, 3, tmp_path / "ours-3"))
    assert (written.tracking.wandb, written.tracking.log_every_steps, written.seed) == ("off", 7, 3)
