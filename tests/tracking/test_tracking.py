"""metrics.jsonl survives kills and resumes, W&B never blocks training, and the terminal shows the current values."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import logging
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pretrain.common.errors import InputError, MachineError
from pretrain.common.records import append_end_event, read_records
from pretrain.common.run_files import PROBES
from pretrain.common.settings import dump
from pretrain.common.wording import clock
from pretrain.config import PretrainConfig
from pretrain.objectives.masked import MaskedTokens
from pretrain.tracking import live, mirror
from pretrain.tracking.live import follow
from pretrain.tracking.logs import quiet_logging
from pretrain.tracking.mirror import wandb_names
from pretrain.tracking.rows import LAST_SENT
from pretrain.tracking.tracker import Tracker, send_probes
from tests.distributed import Program, run_program
from tests.tasks.refusals import refused
from tests.wandb_files import history

RESTART = {"event": "restart", "time": 1.0, "message": "worker 1 died"}
RESUME = {"event": "resume", "time": 1.0, "message": "resumed from step-00000010"}


def make_config(**tracking: Any) -> PretrainConfig:
    phase = {"sequence_length": 128, "global_sequences": 8, "steps": 80, "peak_learning_rate": 1e-3}
    phases = [phase, {**phase, "sequence_length": 512, "steps": 20}]
    values = {"name": "tiny", "corpus": {"dir": "data"}, "phases": phases, "tracking": {"wandb": "off", **tracking}}
    return PretrainConfig.model_validate(values)


def start(folder: Path, run_id: str | None = None, step: int | None = None, **settings: Any) -> Tracker:
    given = {"card": {"corpus_card": {"words": 7}}, "job_type": "pretrain", "enabled": settings.pop("enabled", True)}
    return Tracker(make_config(**settings), folder, run_id=run_id, step=step, **given)


def write_run(folder: Path, *records: dict[str, Any], **given: Any) -> str:
    """A start that logs these records and closes; its run id."""
    tracker = start(folder, **given)
    for record in records:
        tracker.log(record)
    tracker.close()
    return tracker.run_id


Sent = list[tuple[int, dict[str, Any]]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """(step, values) of all that W&B was given, without W&B."""
    rows: Sent = []
    run = SimpleNamespace(log=lambda values, step, commit: rows.append((step, values)))
    monkeypatch.setattr(mirror, "start_wandb", lambda *_: run)
    monkeypatch.setattr(mirror, "finish_wandb", lambda _: None)
    monkeypatch.setattr(mirror, "log_wandb_artifact", lambda *_: 1 / 0)
    return rows


def kill(tracker: Tracker) -> None:
    """End the thread of the fixture `sent` as a kill would, after what was logged so far."""
    tracker.log_artifact(Path())
    assert tracker.mirror is not None
    tracker.mirror.thread.join()


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_records(folder)]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for W&B's end, however busy the machine is."""
    monkeypatch.setattr(mirror, "TEARDOWN_SECONDS", 600.0)
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "600")


def log_without_end(folder: Path) -> None:
    tracker = start(folder)
    for step in itertools.count(1):
        tracker.log({"step": step, "loss": 1 / step, "message": "x" * 3000})
        if step == 20:
            (folder / "twenty").touch()


class TestMetricsFile:
    def test_the_end_of_a_run_replaces_an_incomplete_line(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        append_end_event(tmp_path, "stop", "as asked", 23)
        assert not path.exists()
        kept = '{"step": 10}\n{"step": 20, "lost": [}\n{"step": 20}\n{"step": 20, "split": "validation"}\n'
        # The step that is saved, which the message names, is not always recorded.
        for kind, saved, step in (("stop", 0, 0), ("stop", 23, 23), ("diverged", 23, 20)):
            path.write_text(f'{kept}{{"st')
            append_end_event(tmp_path, kind, "as asked", saved)
            lines = path.read_text()
            assert lines.startswith(kept)
            event = json.loads(lines.removeprefix(kept))
            assert (event["event"], event["step"], event["message"]) == (kind, step, "as asked")

    def test_one_json_object_a_line_with_null_for_what_json_cannot_say(self, tmp_path: Path) -> None:
        evaluation = {"step": 1, "split": "validation", "loss": 2.25}
        write_run(tmp_path, {"step": 1, "loss": 2.5, "grad_norm": math.inf, "lr": math.nan}, evaluation)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert lines[0] == '{"step": 1, "loss": 2.5, "grad_norm": null, "lr": null}'
        assert json.loads(lines[1]) == evaluation

    def test_other_ranks_write_nothing(self, tmp_path: Path) -> None:
        tracker = start(tmp_path / "run", run_id="tiny-1", step=5, enabled=False)
        tracker.log({"step": 6})
        tracker.log_artifact(tmp_path)
        tracker.close()
        assert tracker.run_id == "tiny-1"
        assert not (tmp_path / "run").exists()

    def test_resume_drops_what_an_abandoned_continuation_wrote(self, tmp_path: Path) -> None:
        records = [{"step": 10, "loss": 0.1 + 0.2}, {"step": 20}, {"step": 20, "split": "validation"}]
        run_id = write_run(tmp_path, *records, {"step": 30}, {"step": 30, "split": "validation"})
        kept = (tmp_path / "metrics.jsonl").read_bytes().split(b'{"step": 30')[0]
        second = start(tmp_path, run_id=run_id, step=20)
        assert (tmp_path / "metrics.jsonl").read_bytes() == kept
        second.log({"step": 30, "loss": 1.0})
        assert steps(tmp_path) == [10, 20, 20, 30], "a record is on disk when log returns"
        second.close()
        assert second.run_id == run_id
        assert not list(tmp_path.glob(".*tmp"))

    def test_a_new_run_in_an_old_folder_begins_with_an_empty_file(self, tmp_path: Path) -> None:
        first = write_run(tmp_path, {"step": 0})
        second = write_run(tmp_path)
        assert steps(tmp_path) == []
        assert second != first
        assert second.startswith("tiny-")

    @pytest.mark.parametrize("torn", [b'{"step": 20, "lo', b"\0\0\0\0", b'{"step": 20}\xff'])
    def test_a_torn_last_line_is_ignored_and_repaired(self, tmp_path: Path, torn: bytes) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b'{"step": 10}\n' + torn)
        assert steps(tmp_path) == [10]
        tracker = start(tmp_path, run_id="tiny-1", step=10)
        tracker.log({"step": 20})
        tracker.close()
        assert path.read_bytes() == b'{"step": 10}\n{"step": 20}\n'

    def test_damage_before_the_last_line_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 10}\n{"st\n{"step": 20}\n')
        refused(r"metrics\.jsonl:2: not a JSON object", read_records, tmp_path)
        refused(r"metrics\.jsonl:2", start, tmp_path, run_id="tiny-1", step=10)
        assert b'{"st\n' in (tmp_path / "metrics.jsonl").read_bytes()

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ('{"event": "a", "step": 1, "time": "yesterday"}', "time is 'yesterday'; expected seconds since 1970"),
            ('{"event": "a", "step": 1, "time": 1e20}', "time is 1e+20; expected seconds since 1970"),
            ('{"event": "a", "step": 1, "time": NaN}', "time is nan; expected seconds since 1970"),
            ('{"event": 1, "step": 1}', "event is 1; expected text"),
            ('{"step": "one"}', "step is 'one'; expected a step number"),
            ('{"step": 1, "loss": "low"}', "loss is 'low'; expected a number"),
            ('{"step": 1, "rank_wait_seconds": [1, "x"]}', "rank_wait_seconds is [1, 'x']; expected a number"),
            ('{"step": 1, "seconds": Infinity}', "seconds is inf; expected a number"),
            ('{"step": 1, "tokens": ' + "1" * 5000 + "}", "not a JSON object"),
            ("[" * 100_000, "not a JSON object"),
        ],
        ids=lambda value: value[:30],
    )
    def test_a_record_that_cannot_be_shown_is_named(self, tmp_path: Path, line: str, reason: str) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text(f'{{"step": 1, "loss": null, "best": true}}\n{line}\n')
        with pytest.raises(InputError) as caught:
            read_records(tmp_path)
        assert str(caught.value) == f"{path}:2: {reason}. Remove the line, or restore the file."

    def test_a_killed_writer_leaves_a_readable_file(self, tmp_path: Path) -> None:
        with Program(log_without_end, tmp_path) as process:
            wait_for(lambda: (tmp_path / "twenty").exists())
            process.kill()
        found = steps(tmp_path)
        assert len(found) >= 20
        assert found == list(range(1, len(found) + 1))
        start(tmp_path, run_id="tiny-1", step=15).close()
        assert steps(tmp_path) == list(range(1, 16))

    def test_a_resumed_run_keeps_the_events_past_its_checkpoint(self, tmp_path: Path) -> None:
        write_run(tmp_path, {"step": 10}, {"step": 20}, {"event": "restart", "step": 20})
        start(tmp_path, run_id="tiny-1", step=10).close()
        assert read_records(tmp_path) == [{"step": 10}, {"event": "restart", "step": 20}]

    def test_a_full_disk_is_reported_in_one_line(self, tmp_path: Path) -> None:
        tracker = start(tmp_path)
        assert tracker.file is not None
        with Path("/dev/full").open("wb") as full:
            os.dup2(full.fileno(), tracker.file.fileno())
        with pytest.raises(MachineError, match=r"metrics\.jsonl: disk full"):
            tracker.log({"step": 1})
        tracker.file.close()


class TestWandb:
    @pytest.mark.parametrize(
        ("record", "name"),
        [
            ({"epoch": 0}, "train/epoch"),
            ({"samples": 80}, "time/sample"),
            ({"tokens": 900}, "train/num_input_tokens_seen"),
            ({"loss": 3.0}, "train/loss"),
            ({"mlm_loss": 2.5}, "train/mlm_loss"),
            ({"lr": 1e-3}, "train/learning_rate"),
            ({"grad_norm": 1.5}, "train/grad_norm"),
            ({"tokens_per_second": 5.0}, "throughput/tokens_per_sec"),
            ({"mfu": 0.4}, "throughput/device/mfu"),
            ({"seconds": 7.0}, "time/train"),
            ({"loss": 3.0, "split": "validation"}, "eval/loss"),
            ({"mlm_accuracy": 0.5, "split": "validation"}, "eval/mlm_accuracy"),
            ({"seconds": 2.0, "split": "validation"}, "eval/runtime"),
        ],
    )
    def test_names_that_users_of_the_trainer_and_composer_know(self, record: dict[str, Any], name: str) -> None:
        assert wandb_names({"step": 10, **record}) == {"train/global_step": 10, name: next(iter(record.values()))}

    def test_a_list_is_a_name_for_each_worker_and_an_event_a_mark(self) -> None:
        few = {f"train/rank_forward_seconds/{rank}": seconds for rank, seconds in enumerate((0.5, 0.75))}
        assert wandb_names({"step": 10, "rank_forward_seconds": [0.5, 0.75]}) == {"train/global_step": 10, **few}
        seconds = [1.0] * 256
        seconds[7], seconds[8], seconds[9] = 0.5, 3.0, 2.0
        many = {"min": 0.5, "median": 1.0, "max": 3.0, "max_rank": 8}
        many = {f"train/rank_forward_seconds/{name}": value for name, value in many.items()}
        assert wandb_names({"step": 10, "rank_forward_seconds": seconds}) == {"train/global_step": 10, **many}
        marks = {"events/restart": 1, "events/message": "worker 1 died"}
        assert wandb_names({"step": 10, **RESTART}) == {"train/global_step": 10, **marks}

    @pytest.mark.usefixtures("patient")
    def test_an_offline_run_holds_everything(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_TAGS", "tag-one,tag-two")
        export = tmp_path / "export"
        export.mkdir()
        (export / "model.safetensors").write_text("weights")
        tracker = start(tmp_path / "run", wandb="offline", group="sweep")
        for step in range(10, 60, 10):
            tracker.log({"step": step, "loss": 1 / step})
        tracker.log({"step": 50, "split": "validation", "loss": 0.5})
        tracker.log_artifact(export)
        tracker.close()

        (log,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*-{tracker.run_id}/run-{tracker.run_id}.wandb")
        content = log.read_bytes()
        for expected in ("train/global_step", "eval/loss", "sweep", "tag-one", "tag-two", "corpus_card", "model-tiny-"):
            assert expected.encode() in content, expected
        assert content.count(b"train/loss") >= 5

    def test_training_does_not_wait_for_wandb(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """W&B starts only after everything was logged; a tracker that waits for it would hang here."""
        may_start, logged = threading.Event(), []
        run = SimpleNamespace(log=lambda values, step, commit: logged.append((step, values)))
        monkeypatch.setattr(mirror, "start_wandb", lambda *_: run if may_start.wait(60) else None)
        monkeypatch.setattr(mirror, "finish_wandb", lambda run: logged.append("finished"))
        tracker = start(tmp_path, wandb="offline")
        tracker.log({"step": 1})
        tracker.log({"step": 2})
        assert steps(tmp_path) == [1, 2]
        assert logged == []
        may_start.set()
        tracker.close()
        assert logged == [(1, {"train/global_step": 1}), (2, {"train/global_step": 2}), "finished"]

    def test_a_step_is_one_row_however_often_it_is_recorded(self, tmp_path: Path, sent: Sent) -> None:
        first = start(tmp_path, wandb="offline")
        for step in (10, 20):
            first.log({"step": step, "loss": 1.0})
        first.log({"step": 20, "split": "validation", "accuracy": 0.5})
        first.log({"event": "straggler", "step": 30, "rank": 1, "message": "slow"})
        first.log({"step": 30, "loss": 1.0})
        first.log({"step": 40, "loss": 1.0})
        kill(first)
        second = start(tmp_path, run_id=first.run_id, step=20, wandb="offline")
        second.log_events([{"event": "restart", "message": "killed"}, {"event": "resume", "message": "resumed"}], 20)
        for step in (30, 40):
            second.log({"step": step, "loss": 2.0})
        second.rewind(20)  # with other data from here on
        second.log({"event": "rollback", "step": 20, "message": "a loss spike"})
        for step in (30, 40, 50):
            second.log({"step": step, "loss": 3.0})
        second.close()
        rows = [(step, values.get("train/loss")) for step, values in sent]
        assert rows == [(10, 1.0), (20, 1.0), (30, 1.0), (40, 2.0), (50, 3.0)]
        assert [step for step, values in sent if values["train/global_step"] != step] == []
        named = dict(sent)
        assert named[20]["eval/accuracy"] == 0.5
        assert (named[30]["events/straggler"], named[30]["events/message"]) == (1, "slow")
        assert named[40]["events/message"] == "killed\nresumed\na loss spike"
        assert (named[40]["events/step"], named[40]["events/rollback"]) == (20, 1)

    @pytest.mark.slow
    def test_a_run_that_is_killed_five_times_has_each_step_once(self, tmp_path: Path) -> None:
        """Read from the .wandb files of the starts; a start continues from the last multiple of 7."""
        script = (
            "import sys, time; from pathlib import Path; from tests.tracking.test_tracking import start\n"
            "first, last = map(int, sys.argv[2:])\n"
            "tracker = start(Path(sys.argv[1]), 'tiny-1', first, wandb='offline')\n"
            "for step in range(first + 1, last + 1):\n"
            "    tracker.log({'step': step, 'loss': 1 / step})\n"
            "    if step % 10 == 0:\n"
            "        tracker.log({'step': step, 'split': 'validation', 'accuracy': 0.5})\n"
            "tracker.close() if last == 100 else time.sleep(600)\n"
        )
        rows: list[int] = []
        for first, last in ((0, 20), (14, 30), (28, 50), (49, 50), (49, 70), (70, 100)):
            command = [sys.executable, "-c", script, str(tmp_path), str(first), str(last)]
            with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as process:
                while process.poll() is None:
                    rows = [step for path in tmp_path.glob("wandb/offline-run-*/*.wandb") for step, _ in history(path)]
                    # The row of the newest step is sent when the next one comes.
                    if last < 100 and last - 1 in rows:
                        process.kill()
                    time.sleep(0.2)
        found = [row for path in tmp_path.glob("wandb/offline-run-*/*.wandb") for row in history(path)]
        assert sorted(step for step, _ in found) == list(range(1, 101))
        assert all(values["train/global_step"] == str(step) for step, values in found)
        assert sorted(step for step, values in found if "eval/accuracy" in values) == list(range(10, 101, 10))

    def test_a_checkpoint_at_the_last_row_sends_that_row_later(self, tmp_path: Path, sent: Sent) -> None:
        """The row of the newest step waits for others of that step, and dies with the process."""
        first = start(tmp_path, wandb="offline")
        for step in (10, 20):
            first.log({"step": step, "loss": 1.0})
        kill(first)
        second = start(tmp_path, run_id=first.run_id, step=20, wandb="offline")
        second.log({"step": 30, "loss": 1.0})
        second.close()
        assert [step for step, _ in sent] == [10, 20, 30]

    def test_scores_of_checkpoints_are_sent_once_in_later_rows(self, tmp_path: Path, sent: Sent) -> None:
        """One checkpoint a row, over an axis of their own; also if a kill loses a row, and after the run's end."""

        def score(*probed: int) -> None:
            lines = [json.dumps({"split": "probe", "step": step, "blimp": step / 100}) for step in probed]
            (tmp_path / PROBES).write_text("".join(f"{line}\n" for line in lines))

        first = start(tmp_path, wandb="offline")
        first.log({"step": 20, "loss": 1.0})
        score(10, 20)
        for step in (30, 40):
            first.log({"step": step, "loss": 1.0})
            first.log({"step": step, "split": "validation", "loss": 1.0})
        kill(first)  # which loses the row of step 40
        score(10, 20, 30, 40)
        second = start(tmp_path, run_id=first.run_id, step=20, wandb="offline")
        for step in (30, 40, 50):
            second.log({"step": step, "loss": 1.0})
        second.close()
        config = make_config(wandb="offline").model_copy(update={"run_dir": str(tmp_path)})
        for _ in range(2):
            send_probes(config)
        probed = [(step, row["probe/step"], row["probe/blimp"]) for step, row in sent if "probe/step" in row]
        assert probed == [(30, 10, 0.1), (40, 20, 0.2), (50, 30, 0.3), (51, 40, 0.4)]
        assert [step for step, _ in sent] == [20, 30, 40, 50, 51]

    def test_without_a_note_nothing_is_sent_that_an_earlier_start_may_have_sent(self, tmp_path: Path, sent: Sent):
        (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n{"step": 20}\n{"step": 30}\n')
        (tmp_path / LAST_SENT).write_text('{"id": "another", "step": 0}')
        write_run(tmp_path, {"step": 30}, run_id="tiny-1", step=20, wandb="offline")
        assert [step for step, _ in sent] == [30]

    def test_the_end_of_a_run_reaches_wandb_only(self, tmp_path: Path, sent: Sent) -> None:
        tracker = start(tmp_path, wandb="offline")
        tracker.mirror_end("stop", 7, "as asked")
        tracker.close()
        assert sent == [(7, {"train/global_step": 7, "events/stop": 1, "events/message": "as asked"})]
        assert read_records(tmp_path) == []
        start(tmp_path, run_id="tiny-1", enabled=False).mirror_end("stop", 7, "as asked")

    def test_a_failing_wandb_costs_the_mirror_only(self, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
        monkeypatch.setattr(mirror, "start_wandb", lambda *_: 1 / 0)
        tracker = start(tmp_path, wandb="offline")
        assert tracker.mirror is not None
        tracker.mirror.thread.join()
        tracker.log({"step": 1})
        tracker.log({"step": 2})
        assert not tracker.mirrored
        tracker.close()
        assert steps(tmp_path) == [1, 1, 2]
        event = read_records(tmp_path)[1]
        assert event["event"] == "wandb"
        assert event["message"].endswith("without it (ZeroDivisionError: division by zero)")
        assert "W&B failed; metrics.jsonl continues" in caplog.text

    def test_a_wandb_that_fails_after_the_last_record_is_an_event_too(self, tmp_path: Path, monkeypatch: Any) -> None:
        go = threading.Event()
        monkeypatch.setattr(mirror, "start_wandb", lambda *_: 1 / 0 if go.wait() else None)
        tracker = start(tmp_path, wandb="offline")
        tracker.log({"step": 3})
        go.set()
        tracker.close()
        assert [(one["step"], one.get("event")) for one in read_records(tmp_path)] == [(3, None), (3, "wandb")]

    def test_a_generated_id_fits_wandb(self, tmp_path: Path) -> None:
        config = make_config().model_copy(update={"name": 63 * "a"})
        tracker = Tracker(config, tmp_path, run_id=None, step=None, card={}, job_type="pretrain", enabled=False)
        assert re.fullmatch("a{55}-[0-9a-f]{8}", tracker.run_id)

    @pytest.mark.usefixtures("patient")
    def test_a_server_that_does_not_answer_means_offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mirror, "INIT_SECONDS", 1.0)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never says a word
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
            write_run(tmp_path, {"step": 1, "loss": 0.5}, wandb="online")
        (log,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
        assert b"train/loss" in log.read_bytes()

    @pytest.mark.parametrize(
        ("setting", "environment", "mode"),
        [
            ("auto", {}, "offline"),
            ("auto", {"WANDB_API_KEY": "k"}, "online"),
            ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
            ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, "off"),
            ("auto", {"NETRC": "netrc", "WANDB_BASE_URL": "https://wandb.example.org"}, "online"),
            ("auto", {"NETRC": "netrc", "WANDB_BASE_URL": "https://elsewhere.example.org"}, "offline"),
            ("online", {"WANDB_API_KEY": "k"}, "online"),
            ("offline", {"WANDB_API_KEY": "k"}, "offline"),
            ("off", {"WANDB_API_KEY": "k"}, "off"),
        ],
    )
    def test_online_only_where_a_key_is_set(self, tmp_path, monkeypatch, setting, environment, mode) -> None:
        monkeypatch.chdir(tmp_path)
        Path("netrc").write_text("machine wandb.example.org login user password secret\n")
        Path("netrc").chmod(0o600)
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NETRC", "nowhere")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert mirror.wandb_mode(setting) == mode

    def test_without_logins_it_is_offline_before_wandb_is_imported(self, tmp_path: Path, monkeypatch: Any) -> None:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setitem(sys.modules, "wandb", None)
        assert mirror.wandb_mode("auto") == "off"
        monkeypatch.setattr(mirror, "is_installed", lambda module: True)
        assert mirror.wandb_mode("auto") == "offline"

    def test_online_without_a_key_is_the_users_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "nowhere"))
        refused("no W&B key is set", start, tmp_path, wandb="online")


def be_noisy(logs: Path) -> None:
    """A library that adds a terminal handler at import, as DeepSpeed does, one that does so later, warnings, W&B."""

    def library(name: str) -> logging.Logger:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(logging.StreamHandler(sys.stdout))
        return logger

    early = library("early")
    quiet_logging(logs / "first.log")
    quiet_logging(logs / "worker.log")
    early.info("from the early library")
    library("late").info("from the late library")
    warnings.warn("from warnings", stacklevel=1)
    logging.getLogger("wandb").info("chatter")
    logging.getLogger("wandb").warning("worth knowing")
    logging.getLogger("late").debug("too much")
    print("ours")


def test_quiet_logging_keeps_the_terminal_clean(tmp_path: Path) -> None:
    result = run_program(be_noisy, tmp_path)
    assert (result.stdout, result.stderr) == ("ours\n", "")
    text = (tmp_path / "worker.log").read_text()
    for expected in ("from the early library", "from the late library", "UserWarning: from warnings", "worth knowing"):
        assert text.count(expected) == 1, expected
    assert "chatter" not in text
    assert "too much" not in text
    assert (tmp_path / "first.log").read_text() == ""


class TestFollow:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        (tmp_path / "config.yaml").write_text(dump(make_config()))
        return tmp_path

    def test_a_pipe_gets_plain_lines(self, run: Path) -> None:
        with following(run) as screen:
            append(run, {"step": 10, "loss": 3.0, "mlm_accuracy": 0.25, "tokens_per_second": 12345.6})
            append(
                run,
                {"step": 10, "split": "validation", "loss": 3.5, "mlm_loss": 3.0, "mlm_accuracy": 0.2, "best": True},
            )
            append(run, {"step": 20, "loss": 2.0})
        lines = screen.getvalue().splitlines()
        assert "  step 10 held-out  mlm loss 3.000  mlm 20.0%  best" in lines
        assert re.sub(r"\S+ left  ", "", lines[-1]) == "step 20/100  loss 2.000"
        assert "\x1b" not in screen.getvalue()

    def test_a_terminal_gets_one_live_line(self, run: Path) -> None:
        with following(run, terminal=True) as screen:
            append(run, {"step": 90, "loss": 3.0, "mfu": 0.415, "skipped_steps": 2})
        text = screen.getvalue()
        assert "starting the workers" in text or "step 90/100" in text
        last = text[text.rindex("━") :]
        for expected in ("step 90/100", "loss 3.000", "42% MFU", "2 skipped"):
            assert expected in last

    @pytest.mark.parametrize("terminal", [False, True])
    def test_the_phases_of_the_start_are_shown_as_they_happen(self, run: Path, terminal: bool) -> None:
        (run / "logs").mkdir()
        live.write_startup_stage(run, "phase of an earlier start, which was killed")
        with following(run, terminal) as screen:
            wait_for(lambda: live.WORKERS in screen.getvalue())
            for phase in (live.LOAD, live.COMPILE):
                live.write_startup_stage(run, phase)
                wait_for(lambda phase=phase: phase in screen.getvalue())
            live.end_startup(run)
            wait_for(lambda: live.STEPS in screen.getvalue())
            append(run, {"step": 10, "loss": 3.0})
        text = screen.getvalue()
        assert "earlier start" not in text
        if not terminal:
            seen = [line.strip() for line in text.splitlines()]
            assert seen[:4] == [live.WORKERS, live.LOAD, live.COMPILE, live.STEPS]
            assert "step 10/100" in seen[4]

    def test_earlier_records_are_not_reported_again(self, run: Path) -> None:
        append(run, {"step": 40, "loss": 3.0}, {"step": 40, "split": "validation", "mlm_loss": 9.0, "loss": 9.0})
        with following(run) as screen:
            append(run, {"step": 50, "loss": 2.0}, {"step": 50, "split": "validation", "mlm_loss": 9.5, "loss": 9.5})
        text = screen.getvalue()
        assert "9.000" not in text
        assert "mlm loss 9.500" in text
        assert "best" not in text

    def test_a_restart_withdraws_the_steps_it_dropped(self, run: Path) -> None:
        progress, screen = polled(run)
        append(run, {"step": 10}, {"step": 20}, {"step": 30})
        progress.poll()
        assert progress.step == 30
        restarted = start(run, run_id="tiny-1", step=10)
        restarted.log_events([RESTART, RESUME], 10)
        restarted.close()
        progress.poll()
        assert (progress.step, progress.started_training) == (10, False)
        append(run, {"step": 20})
        progress.poll()
        assert progress.step == 20
        assert shown(screen) == ["  step 10: worker 1 died", "  step 10: resumed from step-00000010"]

    def test_a_restart_that_drops_no_step_shows_its_start(self, run: Path) -> None:
        append(run, {"step": 10, **RESTART})  # of an earlier start
        progress, screen = polled(run)
        append(run, {"step": 20})
        progress.poll()
        assert not progress.started_training
        append(run, {"step": 30}, {"step": 30, **RESTART, "time": 2.0}, {"step": 30, **RESUME})
        progress.poll()
        assert not progress.started_training
        assert shown(screen) == ["  step 30: worker 1 died", "  step 30: resumed from step-00000010"]

    @pytest.mark.parametrize("between", [False, True])
    def test_a_rollback_is_shown_and_the_line_goes_on(self, run: Path, between: bool) -> None:
        progress, screen = polled(run)
        tracker = start(run)
        for step in (10, 20, 30):
            tracker.log({"step": step})
            progress.poll()
        tracker.rewind(20)
        if between:
            progress.poll()
        tracker.log({"event": "rollback", "step": 20, "time": 1.0, "message": "a loss spike: back to step-00000020"})
        progress.poll()
        assert (progress.step, progress.started_training) == (20, True)
        tracker.log({"step": 30})
        progress.poll()
        assert shown(screen) == ["  step 20: a loss spike: back to step-00000020"]
        tracker.close()

    @pytest.mark.parametrize("error", [FileNotFoundError(), OSError(errno.ESTALE, "Stale file handle")])
    def test_a_read_that_fails_once_costs_nothing(self, run: Path, monkeypatch: Any, error: OSError) -> None:
        progress, _ = polled(run)
        append(run, {"step": 10})
        progress.poll()
        append(run, {"step": 20})
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(error))
            progress.poll()
        assert progress.step == 10
        progress.poll()
        assert progress.step == 20

    def test_half_a_line_waits_for_its_other_half(self, run: Path) -> None:
        progress, _ = polled(run)
        path = run / "metrics.jsonl"
        path.write_text('{"step": 10}\n{"st')
        progress.poll()
        assert progress.step == 10
        with path.open("a") as file:
            file.write('ep": 20}\n')
        progress.poll()
        assert progress.step == 20

    def test_time_left_weighs_phases_by_their_tokens(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 1000.0
        monkeypatch.setattr(live.time, "monotonic", lambda: now)
        progress, _ = polled(run)
        append(run, {"step": 10})
        progress.poll()
        assert progress.bar.tasks[0].time_remaining is None
        now += 20
        append(run, {"step": 20})
        progress.poll()
        # 2 s a step: 60 more steps of length 128, then 20 that cost four times as much
        assert progress.bar.tasks[0].time_remaining == 60 * 2 + 20 * 8

    @given(width=st.integers(40, 250), step=st.integers(1, 100), loss=st.none() | st.floats(0, 1e4))
    def test_the_live_line_fits_the_terminal(self, width: int, step: int, loss: float | None) -> None:
        screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        progress = live.LiveProgress(Path("/nonexistent"), 100, screen, MaskedTokens.metrics)
        progress.last_record = {"step": step, "loss": loss, "mlm_accuracy": 0.5, "nsp_accuracy": 0.9}
        progress.last_record |= {"tokens_per_second": 1e6, "mfu": 0.4, "data_stall_fraction": 0.01}
        progress.has_records = True
        progress.poll()
        screen.print(progress.bar.get_renderable())
        (line,) = shown(screen)
        assert len(line) <= width
        assert f"step {step}/100" in line
        assert "stall 1.0%" in line or (width < 125 and line.rstrip().endswith("…"))


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (67, "1:07"), (3599.6, "1:00:00"), (93784, "1 d 02:03")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@contextlib.contextmanager
def following(run: Path, terminal: bool = False) -> Iterator[io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=200, color_system=None, highlight=False)
    with follow(run, 100, console, MaskedTokens.metrics):
        yield screen


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def append(run: Path, *records: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def polled(run: Path) -> tuple[live.LiveProgress, Console]:
    screen = Console(file=io.StringIO(), width=200)
    return live.LiveProgress(run, 100, screen), screen


def shown(screen: Console) -> list[str]:
    return screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
