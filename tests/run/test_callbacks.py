"""Callbacks: told what a run does, on rank 0, with records that change nothing; an error stops the run or does not."""

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from corpora import make_corpus
from starts import Start, pretraining, records, starts

from finetune.cli import main
from pretrain.common import extensions
from pretrain.run.callbacks import Callbacks, serialize_callbacks
from tests.distributed import run_workers

ROOT = Path(__file__).parents[2]
HOOKS = """
import json, os

def tell(hook, record):
    with open("told.jsonl", "a") as file:
        file.write(json.dumps([hook, dict(record)]) + "\\n")
    if record.get("logged"):
        record["logged"]["loss"] = 0.0  # of a copy
    record["step"] = 0  # raises: it is read-only

class Fails:
    def __init__(self, at):
        self.at = at
    def step_end(self, record):
        if record["step"] == self.at:
            raise SystemExit("enough\\nfor today")

class Unmade:
    def __init__(self):
        raise OSError("no network")
    def run_end(self, record): ...

class Silent: ...
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with `told.hooks`, which is the current one."""
    monkeypatch.setenv(extensions.ENV_VAR, "{}")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "told").mkdir()
    (tmp_path / "told/hooks.py").write_text(HOOKS)
    yield tmp_path
    for name in ("told", "told.hooks"):
        sys.modules.pop(name, None)


def test_a_run_tells_of_all_and_stops_where_it_is_asked_to(place: Path) -> None:
    extensions.import_modules(["told.hooks:tell"])
    corpus = make_corpus(place / "corpus", documents=60, vocabulary_size=300)
    plain, told = (
        pretraining(corpus, place / name, [(32, 8, 4)], evaluation__every_steps=2, tracking__log_every_steps=2)
        for name in ("plain", "told-run")
    )
    failing = [{"call": "told.hooks:Fails", "on_error": "stop", "at": at} for at in (1, 99)]
    given = [
        Start(plain),
        Start({**told, "callbacks": ["told.hooks:tell", failing[0]]}),
        Start({**told, "callbacks": ["told.hooks:tell", failing[1]]}, resume=True),
    ]
    for done, stopped, resumed in run_workers(2, starts, given):
        assert done == resumed == ""
        assert stopped.startswith("StoppedError: ")
        assert "stopped at step 2 of 4; checkpoint step-00000002 is saved." in stopped
    found = [json.loads(line) for line in (place / "told.jsonl").read_text().splitlines()]
    ends = ("evaluation", "checkpoint", "run_end")
    for place_of, step in ((0, 2), (5, 4)):
        expected = [("step_end", step - 1), ("step_end", step), *((hook, step) for hook in ends)]
        assert [(hook, record["step"]) for hook, record in found[place_of : place_of + 5]] == expected
    assert len(found) == 10
    steps = [record for hook, record in found if hook == "step_end"]
    assert [bool(record["logged"]) for record in steps] == [False, True, False, True]
    assert steps[1]["logged"] == records(place / "told-run")[0]
    paths = [record["path"] for hook, record in found if hook == "checkpoint"]
    assert paths == [str(place / f"told-run/checkpoints/step-0000000{step}") for step in (2, 4)]
    ends = [record for hook, record in found if hook == "run_end"]
    assert [end["outcome"] for end in ends] == ["stopped", "finished"]
    said = "the callback told.hooks:Fails raised SystemExit in step_end of step 1: enough; st"
    assert ends[0]["error"].startswith(said)
    assert [one["loss"] for one in records(place / "told-run")] == [one["loss"] for one in records(place / "plain")]
    lines = (place / "told-run/metrics.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event.get("event") == "callback"]
    assert [event["step"] for event in events] == [1, 1, 3]
    assert events[0]["message"].startswith("the callback told.hooks:tell raised TypeError in step_end of step 1: ")


def test_an_error_is_said_once_with_its_traceback(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    events: list[dict[str, Any]] = []
    extensions.import_modules(["told.hooks:Fails"])
    callbacks = Callbacks([{"call": "told.hooks:Fails", "at": 1}], log=events.append)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            callbacks.call("step_end", {"step": 1})
    assert not callbacks.stop_reason
    assert [event["message"] for event in events] == [
        "the callback told.hooks:Fails raised SystemExit in step_end of step 1: enough; the run continues; its "
        "later errors are not reported. logs/training-0.log has the traceback"
    ]
    assert caplog.text.count("hooks.py") == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "[told.hooks:Silent]",
            "callbacks.0: told.hooks:Silent: is not a callback. Pass a function (hook, record), or",
        ),
        ("[json:dumps]", "callbacks.0: json:dumps: is not a callback."),
        ("[told.hooks:tells]", "told/hooks.py has no tells; did you mean tell?"),
        ("[told.hooks]", "callbacks.0: 'told.hooks' is not a dotted name such as my_package.module:name"),
        ("[7]", "callbacks.0: use my_package.module:name, or a section with this name as `call`"),
        ("told.hooks:tell", "callbacks is 'told.hooks:tell'; expected a list"),
        ("[{call: 'told.hooks:Fails', at: 1, on_error: never}]", "callbacks.0: on_error: 'never' is not one of warn"),
        ("[{call: 'told.hooks:Fails', att: 1}]", "callbacks.0: told.hooks:Fails: missing a required argument: 'at'."),
        ("[{call: 'told.hooks:tell', at: 1}]", "callbacks.0: told.hooks:tell: only a class accepts options."),
        ("[{call: 'told.hooks:Fails', at: 1, api_key: x}]", "callbacks.0.api_key looks like a secret"),
    ],
)
def test_what_is_no_callback_is_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    (place / "own.yaml").write_text(yaml.safe_dump(pretraining(place / "corpus", Path("run"), [(32, 8, 4)])))
    assert main(["pretrain", "own.yaml", "--no-ray", "--set", f"callbacks={setting}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (place / "run").exists()


def test_functions_of_any_origin_are_carried() -> None:
    assert len(serialize_callbacks([functools.partial(os.path.join, "x"), {}.setdefault], pickled=True)) == 2


OBJECTS = """
import json, os, sys, threading
import pretrain
from beside import Beside

class Seen:
    every_rank = True
    def __init__(self):
        self.seen = []
    def step_end(self, record):
        self.seen.append(("step_end", record["step"], record["loss"]))
    def evaluation(self, record):
        self.seen.append(("evaluation", record["step"], record["loss"]))
    def checkpoint(self, record):
        self.seen.append(("checkpoint", record["step"], record["path"]))
    def run_end(self, record):
        self.seen.append(("run_end", record["step"], record["outcome"]))
        with open(f"seen-{os.environ.get('RANK', 'here')}.json", "w") as file:
            json.dump(self.seen, file)

seen, config = Seen(), json.load(open("config.json"))
pretrain.train(config, no_ray=True, callbacks=[seen, Beside("here.txt")], overrides={"name": "here", "run_dir": "here"})
assert [one[0] for one in seen.seen][-1] == "run_end"
workers = {"run_dir": "workers", "scheduling.workers": int(sys.argv[1]), "scheduling.cpus_per_worker": 1}
pretrain.train(config, callbacks=[Seen(), Beside("workers.txt")], overrides=workers)
try:
    pretrain.train(config, callbacks=[sys.stdout], overrides={"run_dir": "no"})
except pretrain.InputError as error:
    print(error)
seen.lock = threading.Lock()
try:
    pretrain.train(config, callbacks=[seen], overrides={"run_dir": "no"})
except pretrain.InputError as error:
    print(error)
"""
BESIDE = """
class Beside:
    def __init__(self, path):
        self.path = path
    def step_end(self, record):
        with open(self.path, "a") as file:
            print(record["step"], file=file)
"""


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_objects_are_told_here_and_in_workers(tmp_path: Path, workers: int) -> None:
    """Of the program's own class and of a module's beside it, which is not in the current folder."""
    (tmp_path / "program").mkdir()
    (tmp_path / "program/main.py").write_text(OBJECTS)
    (tmp_path / "program/beside.py").write_text(BESIDE)
    corpus = make_corpus(tmp_path / "corpus", documents=60, vocabulary_size=300)
    config = pretraining(corpus, tmp_path / "run", [(32, 8, 2)])
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, str(tmp_path / "program/main.py"), str(workers)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    here, *ranks = (json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in ("here", *range(workers)))
    assert ranks[0] == ranks[-1]
    assert [one[:2] for one in here] == [one[:2] for one in ranks[0]]
    assert [one[0] for one in here] == ["step_end", "step_end", "evaluation", "checkpoint", "run_end"]
    assert [one[2] for one in here[:3]] == pytest.approx([one[2] for one in ranks[0][:3]], rel=1e-5)
    assert (tmp_path / "here.txt").read_text() == (tmp_path / "workers.txt").read_text() == "1\n2\n"  # rank 0 alone
    refused, unsent = done.stdout.splitlines()[-2:]
    assert refused.startswith("callbacks.0: _io:TextIOWrapper: is not a callback. Pass a function (hook, record), or")
    assert unsent.startswith("callbacks: __main__:Seen cannot be sent to the workers (")
    assert not (tmp_path / "no").exists()
