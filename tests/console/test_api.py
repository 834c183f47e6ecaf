"""The functions for Python: from a script without a guard, in one process again and again, and what they refuse."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_bert, write_reviews

import cluster
import finetune
import pretrain
from cluster.jobs import client
from finetune.training.config import FinetuneConfig
from pretrain.config import load_config
from pretrain.tracking import live
from tests.tasks.refusals import refused

ROOT = Path(__file__).parents[2]
CORPUS = {
    "sources": ({"kind": "jsonl", "path": Path("text.jsonl")},),
    "min_document_words": 0,
}  # tuples and paths are fine
TINY: dict[str, Any] = {
    "name": "tiny",
    "corpus": {"dir": "corpus", "vocabulary": {"size": 200}, "processes": 2, **CORPUS},
    "model": {"size": "custom", "layers": 1, "hidden": 16, "heads": 2, "max_positions": 32},
    "phases": [{"sequence_length": 32, "global_sequences": 4, "steps": 3, "peak_learning_rate": 1e-3}],
    "engine": {"precision": "fp32", "compile": False, "micro_batch_tokens": 256},
    "tracking": {"log_every_steps": 1, "wandb": "off"},
}
TASK: dict[str, Any] = {"name": "task", "max_length": 16, "training": {"steps": 2}, "engine": {"precision": "fp32"}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, which a script has prepared and trained on, two workers included."""
    folder = tmp_path_factory.mktemp("place")
    rows = [{"text": f"The film number {number} was good. It ran very long. " * 4} for number in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "script.py").write_text(
        "import sys, threading, pretrain\n"
        "assert not {'torch', 'ray', 'pydantic'} & set(sys.modules)\n"
        "threading.Thread(target=input, daemon=True).start()  # processes are spawned beside other threads\n"
        "from pathlib import Path\n"
        f"config = {TINY!r}\n".replace("PosixPath", "Path")
        + "print(repr(pretrain.prepare(config)))\n"
        "print(pretrain.train(config, overrides={'scheduling.workers': 2}))\n"
    )
    # Python's own tracebacks, of which `input` prints one, are colored from 3.13 on.
    colors = {"FORCE_COLOR": "1", "PYTHON_COLORS": "0"}
    command, environment = [sys.executable, "script.py"], {**os.environ, "PYTHONPATH": str(ROOT), **colors}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as script:
        output = script.communicate(timeout=120)[0].decode()
    assert script.returncode == 0, output
    assert "\x1b" not in output, "no control codes without a terminal"
    assert output.count("corpus: prepared in ") == 1, "the script runs once, not in each process again"
    assert "2 workers, through Ray" in output
    assert output.endswith("runs/tiny: finished.\n")
    return folder


@pytest.fixture
def place(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(corpus)
    return corpus


def test_a_text_becomes_a_model_that_predicts(place: Path) -> None:
    """Twice in this process, which goes on as if nothing had been."""
    handlers = signal.getsignal(signal.SIGINT), list(logging.root.handlers), logging.getLoggerClass()
    run = pretrain.train(load_config(TINY), overrides={"name": "alone"}, no_ray=True)
    assert list(run.metrics()["step"]) == [1, 2, 3]
    assert run.metrics()["loss"].notna().all()
    assert list(run.evaluations()["step"]) == [3]
    out = pretrain.export(run, "exported")
    assert "transformers loads it with" in repr(out)
    train, dev = (write_reviews(place)[name] for name in ("train", "dev"))
    values = {**TASK, "classification": {"train": train, "dev": dev}, "tracking": {"wandb": "off"}}
    task = finetune.train(values, start_from=out, no_ray=True)
    assert 0 <= task.scores["dev"]["accuracy"] <= 1
    assert "runs/task/model: finished." in repr(task)
    assert finetune.load(task)("a good film")["label"] in task.scores["dev"] or finetune.load("runs/task").scores
    assert handlers == (signal.getsignal(signal.SIGINT), list(logging.root.handlers), logging.getLoggerClass())
    again = finetune.train(values, start_from=out, resume=True, no_ray=True)
    assert (task.trained, again.trained) == (True, False)


def test_ctrl_c_saves_a_checkpoint_and_is_an_exception(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {**TINY, "name": "long", "phases": [{**TINY["phases"][0], "steps": 100_000}]}
    poll = live.LiveProgress.poll

    def interrupt(progress: Any) -> None:
        poll(progress)
        if progress.step >= 2 and not stopped.is_set():
            stopped.set()
            os.kill(os.getpid(), signal.SIGINT)

    stopped, before = threading.Event(), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(live.LiveProgress, "poll", interrupt)
    with pytest.raises(pretrain.StoppedError, match=r"checkpoint step-\d+ is saved"):
        pretrain.train(long, no_ray=True)
    assert signal.getsignal(signal.SIGINT) is before
    assert list(place.glob("runs/long/checkpoints/step-*/manifest.json"))


def test_a_config_is_the_same_in_every_form(place: Path) -> None:
    config = load_config("mini")
    assert load_config(config) == load_config(config.model_dump()) == config
    changed = {
        "seed": 3,
        "scheduling.workers": 2,
        "run_dir": Path("a #b"),
        "corpus.filters.contamination.sets": ({"path": "x"},),
    }
    texts = ["seed=3", "scheduling.workers=2", 'run_dir="a #b"', "corpus.filters.contamination.sets=[{path: x}]"]
    for form in (config, config.model_dump(mode="json"), "mini"):
        assert load_config(form, changed) == load_config("mini", texts)
    assert TINY["corpus"]["sources"][0]["path"] == Path("text.jsonl"), "what is given is not changed"
    assert load_config({**TINY, "model": load_config(TINY).model}, {"seed": 1}).seed == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**TINY, "phasess": []}, r"^config: phasess is not a known setting; did you mean phases\?$"),
        ({**TINY, "phases": [{**TINY["phases"][0], "steps": "3"}]}, "^config: phases.0.steps is '3'; expected a valid"),
        (
            TASK | {"classification": {"train": "x"}},
            "^config: is not the config of a pretraining run, which has no",
        ),
        ("sst2", r"sst2\.yaml: is not the config of a pretraining run, which has no max_length, classification, train"),
        ("minii", r"^minii: no such file; did you mean mini\?"),
        ("none.yaml", r"^none\.yaml: cannot be read \(No such file"),
        (None, "^config: is empty; expected the path of a YAML file, or settings"),
        ({**TINY, "corpus": {"dir": "nowhere"}}, r"^nowhere: not a prepared corpus .* Run `prepare` with this config"),
        (TINY, r"^runs/tiny: already has checkpoints \(latest step-00000003\)\. Add --resume"),
    ],
)
def test_a_wrong_config_is_one_line(place: Path, config: Any, message: str) -> None:
    refused(message, pretrain.train, config)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: finetune.train("mini"),
            r"mini\.yaml: is not the config of a fine-tuning run, which has no corpus",
        ),
        (lambda: finetune.train(TINY), "^config: is not the config of a fine-tuning run"),
        (lambda: finetune.train({**TASK, "name": "new", "classification": {"train": "x"}}), "^--from: missing"),
        (lambda: pretrain.export("nowhere", "out"), "^nowhere: not a run folder"),
        (lambda: pretrain.train(TINY, overrides={"phases.0.step": 3}), "^--set phases.0.step=3: .* did you mean steps"),
        (lambda: pretrain.train(TINY, overrides=["seed"]), "^--set seed: expected key.path=value"),
    ],
)
def test_other_mistakes_are_one_line(place: Path, call: Callable[[], Any], message: str) -> None:
    refused(message, call)


def test_a_notebook_completes_the_functions(place: Path) -> None:
    assert {"prepare", "train", "export"} < set(dir(pretrain))
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = pretrain.trian  # pyright: ignore[reportAttributeAccessIssue]


def test_a_start_may_be_a_result_a_path_or_the_name_of_a_run(place: Path) -> None:
    from finetune.training.api import read_config

    run = pretrain.train(TINY, resume=True)
    assert not run.trained, "it is finished already"
    values = {**TASK, "classification": {"train": "x"}}
    for start in (run, run.folder, "tiny", "runs/tiny"):
        assert read_config(values, start_from=start).start_from == "runs/tiny"
    make_bert(place / "bert")
    assert read_config(values, start_from="bert").start_from == "bert"
    assert isinstance(read_config(FinetuneConfig.model_validate(values)), FinetuneConfig)


def test_a_job_is_submitted_as_the_command_line_does(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    started: list[Any] = []
    monkeypatch.setattr(client.JobsClient, "__init__", lambda jobs, address, **_: setattr(jobs, "safe_url", address))
    monkeypatch.setattr(
        client.JobsClient, "submit", lambda jobs, job, **given: started.append((jobs.safe_url, job, given))
    )
    cluster.submit(pretrain.train, load_config(TINY), address="a", workers="2-4")
    ((address, job, given),) = started
    assert (address, job.name, job.workers, given) == ("a", "tiny", (2, 4), {"wait_for_nodes": False})
    submit: Any = cluster.submit
    with pytest.raises(pretrain.InputError, match=r"^submit: 'pretrain' cannot be a job. Pass one of the functions"):
        submit("pretrain", TINY)
