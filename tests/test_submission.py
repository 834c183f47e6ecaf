"""What is checked before a job is sent, and what a client is told in one line."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.jobs import Job
from cluster.submission import read_job
from pretrain.errors import InputError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    values = {
        "name": "trial",
        "corpus": {"dir": "corpora/one"},
        "phases": [{"sequence_length": 32, "global_sequences": 8, "steps": 4, "peak_learning_rate": 1e-3}],
    }
    path.write_text(yaml.safe_dump(values))
    return path


def read(config: Path, *more: str, workers: str | None = None) -> Job:
    return read_job(["pretrain", str(config), *more], folder=Path("/shared"), workers=workers)


def test_a_run_has_one_name_everywhere(config: Path) -> None:
    job = read(config, "--set", "seed=7")
    assert (job.name, job.config["tracking"]["run_id"], job.config["seed"]) == ("trial", "trial", 7)
    assert job.run_dir == Path("runs/trial")
    assert json.loads(json.dumps(job.config)) == job.config


@pytest.mark.parametrize(
    ("given", "expected"), [(None, (1, 1)), ("3", (3, 3)), ("2-4", (2, 4)), ("2-2", (2, 2))]
)
def test_workers(config: Path, given: str | None, expected: tuple[int, int]) -> None:
    assert read(config, workers=given).workers == expected


@pytest.mark.parametrize("given", ["0", "4-2", "two", "1-", "-3", ""])
def test_workers_that_are_none(config: Path, given: str) -> None:
    with pytest.raises(InputError, match="neither a number from 1 nor a range"):
        read(config, workers=given)


@pytest.mark.parametrize("key", ["api_key", "token", "client_secret", "password", "AWS_SECRET"])
def test_a_secret_in_a_config_is_refused(config: Path, key: str) -> None:
    with pytest.raises(InputError, match=rf"engine\.deepspeed\.wandb\.{key} looks like a secret") as caught:
        read(config, "--set", f"engine.deepspeed={{wandb: {{{key}: hunter2}}}}")
    assert "hunter2" not in str(caught.value)


def test_settings_about_tokens_are_no_secrets(config: Path) -> None:
    assert read(config, "--set", "corpus.shard_tokens=2000").config["corpus"]["shard_tokens"] == 2000


@pytest.mark.parametrize("name", ["../up", "a/b", "Trial", "-x", "x" * 64, "a b", "$(id)"])
def test_a_name_stays_a_name(config: Path, name: str) -> None:
    with pytest.raises(InputError, match="name"):
        read(config, "--set", f"name={json.dumps(name)}")


# ---- the command line, against what answers


def run(tmp_path: Path, *arguments: str) -> tuple[int, str, float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "cluster", *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout, time.monotonic() - began


class _Refuses(http.server.BaseHTTPRequestHandler):
    """A dashboard that knows nobody's token."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b"Forbidden")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_no_cluster(tmp_path: Path, config: Path) -> None:
    code, said, _ = run(tmp_path, "submit", "--", "pretrain", str(config))
    assert (code, said) == (
        2,
        "error: No cluster: name one with --address URL, or start one here with ./launch.sh up.\n",
    )


def test_nobody_there(tmp_path: Path, config: Path) -> None:
    code, said, _ = run(tmp_path, "submit", "--address", "http://127.0.0.1:9", "--", "pretrain", str(config))
    assert code == 3
    assert said.startswith("error: No cluster answers at http://127.0.0.1:9 (")


def test_somebody_there_who_says_nothing(tmp_path: Path, config: Path) -> None:
    """Ray's own client would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, said, _ = run(tmp_path, "submit", "--address", address, "--", "pretrain", str(config))
    assert code == 3
    assert said.startswith(f"error: No cluster answers at {address} (")
    assert said.count("\n") == 1


def test_a_wrong_token(tmp_path: Path, config: Path, refusing: str) -> None:
    code, said, _ = run(tmp_path, "submit", "--address", refusing, "--", "pretrain", str(config))
    assert code == 2
    assert said.startswith(f"error: {refusing}: the cluster refuses this token.")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["submit", "--address", "auto", "--", "pretrain", "{config}"], "is no URL of a Ray dashboard"),
        (["submit", "--", "pretrain", "nowhere.yaml"], "nowhere.yaml"),
        (["submit", "--", "pretrain", "{config}", "--set", "phasess=1"], "did you mean phases"),
        (["submit", "--", "pretrain", "{config}", "--from", "x"], "--from: is for finetune"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(
    tmp_path: Path, config: Path, arguments: list[str], said: str
) -> None:
    code, output, _ = run(tmp_path, *(part.format(config=config) for part in arguments))
    assert code == 2
    assert said in output
    assert "Traceback" not in output
